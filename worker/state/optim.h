/* AdamW's states and its update over slices.
 *
 * Where a unit's states are on the host, so is its update: gradients come over in pieces, the
 * host's own AdamW (the same bits) updates, and what the step computes with goes back, while the
 * next piece is on its way. Where only the parameters are on the host, they come to the device for
 * the update, piece by piece. Main thread. */
#ifndef BALLAST_WORKER_STATE_OPTIM_H
#define BALLAST_WORKER_STATE_OPTIM_H

#include "worker/state/grads.h"
#include "worker/state/params.h"

struct optim {
    struct state *state;  /* borrowed, with the workspace */
    struct workspace *workspace;
    struct failure error; /* the first since optim_check() */
};

/* What does not change from tensor to tensor in one update. */
struct optim_step {
    uint64_t t; /* 1 for the first update */
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale;
};

float *optim_m(struct optim *optim, uint32_t unit, uint32_t slice);
float *optim_v(struct optim *optim, uint32_t unit, uint32_t slice);
/* Update slice `slice` of every unit. Decay follows the tensors that the slice cuts. */
void optim_update(struct optim *optim, struct params *params, struct grads *grads, struct ops *ops,
                  uint32_t slice, const struct optim_step *step);
/* A copy between host and device that failed; nothing but the end of the run follows. */
enum status optim_check(struct optim *optim, struct failure *why) MUST_CHECK;

#endif
