/* Gradients: mirror of the parameters' calls.
 *
 * A micro-step computes each unit's gradient complete before it touches the accumulator: the first
 * assigns, later ones are one fp32 add. So the sum has the same bits wherever the accumulator
 * lives. Sums over ranks are taken in rank order, in bounded buckets:
 *
 *   grad_sync=last   once, of the accumulators, before the update   grads_reduce
 *   grad_sync=each   of every unit when its gradient is complete    grads_end
 *
 * (and under stages 2 and 3 with one micro-step, where both are the same, the second way, so that
 * no whole accumulator is needed). Main thread. */
#ifndef BALLAST_WORKER_STATE_GRADS_H
#define BALLAST_WORKER_STATE_GRADS_H

#include <stdbool.h>
#include "worker/memory/workspace.h"
#include "worker/state/state.h"

struct grads {
    struct state *state;         /* borrowed, with what follows */
    struct workspace *workspace;
    struct ops *ops;
    struct comm *comm;
    size_t bucket_bytes;         /* most that the buckets of a reduction take */
    bool by_library;             /* sums by comm's reduce_slices, in no order of ours */
    struct failure error;        /* the first since grads_check() */
};

/* A unit's gradient of the micro-step at hand. */
struct unit_grad {
    float *data;          /* n_elems of the unit, to be written completely */
    struct buffer buffer; /* held where that is not the accumulator itself */
    bool first;           /* micro-step */
};

/* Where to write the unit's gradient of this micro-step. Alignment gaps are zero already. */
struct unit_grad grads_begin(struct grads *grads, uint32_t unit, bool first_micro_step);
/* The gradient is complete: into the accumulator with it, summed over ranks if that is due now.
 * Collective then; a failure is kept for grads_check(). */
void grads_end(struct grads *grads, uint32_t unit, struct unit_grad *grad);
enum status grads_check(struct grads *grads, struct failure *why) MUST_CHECK;

/* What is left to do before the update: afterwards every rank that updates a slice holds its
 * sum. Collective. */
enum status grads_reduce(struct grads *grads, struct failure *why) MUST_CHECK;
/* The accumulator of a slice; of a rank's own only, where it holds no others. */
float *grads_slice(struct grads *grads, uint32_t unit, uint32_t slice);

#endif
