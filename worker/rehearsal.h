/* Rehearsal: run the step without computing, so its memory is known before it is taken.
 *
 * Puts a training together on the dry device, runs every section once, and makes a plan of
 * the record. Any thread, one rehearsal at a time per `struct rehearsal`. */
#ifndef BALLAST_WORKER_REHEARSAL_H
#define BALLAST_WORKER_REHEARSAL_H

#include "worker/training.h"

/* What a rehearsal needs to know of the run; borrowed, unchanged for the run's life. */
struct rehearsal {
    const struct training_options *options;
    const struct units *units;
    struct ops *target;      /* whose scratch sizes count; used only for its sizes */
    size_t granule_bytes;
    size_t pinned_bytes;     /* host memory that the device keeps for its copies */
    uint32_t rank, world_size;
};

/* Totals that are not memory. */
struct rehearsal_cost {
    double flops;        /* of one optimizer step, all micro-steps, this rank */
    uint64_t comm_bytes; /* sent by this rank in one optimizer step */
};

/* The plan of `strategy`, in *out_plan (initialised here; plan_fini() it). out_cost may be NULL. */
enum status rehearse(const struct rehearsal *rehearsal, const struct strategy *strategy,
                     struct plan *out_plan, struct rehearsal_cost *out_cost,
                     struct failure *why) MUST_CHECK;

#endif
