/* The out-of-memory report: who asked what in which phase, who holds what, what to do.
 *
 * A plain value, filled on the rank that was short and readable everywhere. Pure. */
#ifndef BALLAST_WORKER_MEMORY_OOM_H
#define BALLAST_WORKER_MEMORY_OOM_H

#include <stdio.h>
#include "proto/strategy.h"
#include "worker/memory/admit.h"
#include "worker/memory/plan.h"

enum { OOM_LIVE_LINES = 32, OOM_REMEDIES = 3, OOM_TEXT_BYTES = 160 };

struct oom_remedy {
    struct strategy strategy;
    uint64_t peak_bytes[N_PHASES];
    uint64_t committed_bytes;
    double relative_flops; /* of the strategy in force: 1.33 = a third more */
    bool fits;
    bool exact;                    /* changes no bit of what is learned */
    char text[OOM_TEXT_BYTES];
};

struct oom_report {
    uint64_t step;
    uint32_t rank, micro_step;
    enum phase phase;
    enum tier tier;
    const char *tensor;      /* static text: the first planned buffer that had no room */
    int layer;               /* of it, -1 outside the blocks */
    enum category category;  /* of it */
    uint64_t asked_bytes, limit_bytes, held_bytes;
    uint64_t held[N_CATEGORIES]; /* in use, device tier */
    struct plan_live live[OOM_LIVE_LINES];
    size_t n_live;
    uint64_t planned[N_PHASES], actual[N_PHASES];
    struct oom_remedy remedies[OOM_REMEDIES];
    size_t n_remedies;
    char cause[OOM_TEXT_BYTES];
    char outcome[OOM_TEXT_BYTES];
};

/* Fill all but the remedies and the outcome. `held` is what is in use by category, `actual` the
 * peaks measured so far in this step. */
void oom_fill(struct oom_report *report, const struct shortage *shortage, const struct plan *plan,
              size_t workspace_committed, uint64_t step, uint32_t micro_step,
              const uint64_t held[N_CATEGORIES], const uint64_t actual[N_PHASES]);
/* The report for a person, many lines. */
void oom_print(const struct oom_report *report, FILE *out);

#endif
