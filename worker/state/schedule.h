/* The learning rate as a pure function of the step. Any thread. */
#ifndef BALLAST_WORKER_STATE_SCHEDULE_H
#define BALLAST_WORKER_STATE_SCHEDULE_H

#include <stdint.h>

enum schedule_kind { SCHEDULE_KIND_CONSTANT, SCHEDULE_KIND_COSINE, SCHEDULE_KIND_LINEAR };

struct schedule {
    enum schedule_kind kind;
    double lr;            /* peak */
    double warmup_min_lr; /* at step 0 of the warm-up */
    uint64_t warmup_steps;
    uint64_t total_steps; /* the decay ends here */
    double min_ratio;     /* final lr / peak lr */
};

/* Rate of update `step` (0, 1, ...): linear from warmup_min_lr, reaching lr at update
 * warmup_steps - 1; then the decay, which reaches lr * min_ratio at total_steps - 1 and stays. */
double schedule_lr(const struct schedule *schedule, uint64_t step);

#endif
