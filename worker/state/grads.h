/* Gradients: mirror of the parameters' three calls.
 *
 * A micro-step computes each unit's gradient complete before it touches the accumulator: the first
 * assigns (the kernels write straight into it), later ones are one fp32 add from a workspace
 * buffer. So the sum has the same bits wherever the accumulator lives. Main thread. */
#ifndef BALLAST_WORKER_STATE_GRADS_H
#define BALLAST_WORKER_STATE_GRADS_H

#include <stdbool.h>
#include "worker/memory/workspace.h"
#include "worker/parallel/comm.h"
#include "worker/state/units.h"

struct grads {
    const struct units *units;   /* borrowed */
    struct region region;        /* unit-major accumulators */
};

/* A unit's gradient of the micro-step at hand. */
struct unit_grad {
    float *data;          /* n_elems of the unit, to be written completely */
    struct buffer buffer; /* held when this is not the first micro-step */
};

enum status grads_init(struct grads *grads, const struct units *units, struct device *device,
                       struct ledger *ledger, struct failure *why) MUST_CHECK;
void grads_fini(struct grads *grads);

/* Where to write the unit's gradient of this micro-step. Alignment gaps are zero already. */
struct unit_grad grads_begin(struct grads *grads, struct workspace *workspace, struct ops *ops,
                             uint32_t unit, bool first_micro_step);
/* The gradient is complete: add it to the accumulator if it is not there already. */
void grads_end(struct grads *grads, struct workspace *workspace, struct ops *ops, uint32_t unit,
               struct unit_grad *grad);

/* Sum the accumulators over all ranks, in rank order, in bounded buckets of at most
 * bucket_bytes staging. Afterwards every rank holds the same sums. */
enum status grads_reduce(struct grads *grads, struct workspace *workspace, struct ops *ops,
                         struct comm *comm, size_t bucket_bytes, struct failure *why) MUST_CHECK;
float *grads_slice(struct grads *grads, uint32_t unit, uint32_t slice);

#endif
