/* Is the run well, and if not, why. Pure. */
#ifndef BALLAST_DAEMON_HEALTH_H
#define BALLAST_DAEMON_HEALTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "daemon/run.h"

enum health_level { HEALTH_OK, HEALTH_WARN, HEALTH_ERROR };

enum {
    HEALTH_MAX_REASONS = 12,
    HEALTH_REASON_BYTES = 200,
    HEALTH_QUIET_MS = 10000,  /* a rank that says nothing */
    HEALTH_STUCK_MS = 60000,  /* a rank whose main thread does not move */
    HEALTH_ABSENT_MS = 10000, /* a rank that never linked */
};

/* What health needs beyond the run itself. */
struct health_facts {
    int64_t now_ms;
    bool disk_known;
    uint64_t disk_free_bytes;
    bool journal_broken;
    bool oom_reported;
    uint64_t oom_step;
    int32_t oom_rank;
    const char *oom_phase; /* NULL: unknown */
    bool step_skipped;     /* the newest one */
    bool loss_not_finite;
};

struct health {
    enum health_level level;
    size_t n_reasons; /* worst first */
    char reasons[HEALTH_MAX_REASONS][HEALTH_REASON_BYTES];
};

const char *health_name(enum health_level level);
void health_judge(const struct run *run, const struct health_facts *facts,
                  struct health *out_health);

#endif
