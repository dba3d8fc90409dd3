/* One optimizer step, written once and run by every device. Read step.c first.
 *
 * Main thread; on the dry device whichever thread plans. */
#ifndef BALLAST_WORKER_STEP_H
#define BALLAST_WORKER_STEP_H

#include "worker/training.h"

struct step_result {
    double loss;       /* over the valid labels of the whole global batch */
    double grad_norm;  /* before clipping */
    double lr;
    uint64_t tokens;   /* of all ranks */
    uint64_t labels;   /* valid ones, of all ranks */
    bool skipped;      /* a gradient was not finite: no rank updated */
};

/* Run step `step`. Collective. A failure before the update leaves parameters and optimizer as
 * they were (OUT_OF_MEMORY: a phase was not admitted; the caller has the report). */
enum status step_run(struct training *training, const struct batch_source *source, uint64_t step,
                     struct step_result *out_result, struct failure *why) MUST_CHECK;

/* Run one section alone, to record it. Only on the dry device. */
enum status step_rehearse(struct training *training, enum section section,
                          struct failure *why) MUST_CHECK;

#endif
