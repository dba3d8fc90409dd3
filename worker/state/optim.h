/* AdamW's states and its update over slices.
 *
 * moment_m and moment_v are slice-major: block r holds slice r of every unit and starts at a
 * granule, so that later stages commit only block r and nothing moves. Main thread. */
#ifndef BALLAST_WORKER_STATE_OPTIM_H
#define BALLAST_WORKER_STATE_OPTIM_H

#include "worker/state/grads.h"
#include "worker/state/params.h"

struct optim {
    const struct units *units; /* borrowed */
    struct region moment_m, moment_v;
    size_t block_bytes; /* one rank's slices, rounded to granules */
};

/* What does not change from tensor to tensor in one update. */
struct optim_step {
    uint64_t t; /* 1 for the first update */
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale;
};

enum status optim_init(struct optim *optim, const struct units *units, struct device *device,
                       struct ledger *ledger, struct failure *why) MUST_CHECK;
void optim_fini(struct optim *optim);
float *optim_m(struct optim *optim, uint32_t unit, uint32_t slice);
float *optim_v(struct optim *optim, uint32_t unit, uint32_t slice);
/* Update slice `slice` of every unit. Decay follows the tensors that the slice cuts. */
void optim_update(struct optim *optim, struct params *params, struct grads *grads, struct ops *ops,
                  uint32_t slice, const struct optim_step *step);

#endif
