/* Evaluation: the exact token-weighted mean loss over held-out samples.
 *
 * Keeps no logits and no activations: the peak does not depend on how much is evaluated. Rows are
 * dealt out over the ranks, each once; the last batch is padded with rows whose labels are
 * ignored. Does not touch any random state. Main thread, collective. */
#ifndef BALLAST_WORKER_EVAL_H
#define BALLAST_WORKER_EVAL_H

#include "worker/training.h"

struct eval_source {
    uint64_t n_samples;
    void (*fill)(void *user, uint64_t sample, int32_t *inputs, int32_t *labels);
    void *user;
};

struct eval_result {
    double loss;     /* mean over valid labels; 0 when there are none */
    uint64_t labels; /* valid ones */
    uint64_t samples;
};

/* Evaluate the first `max_samples` samples (0: all). */
enum status eval_run(struct training *training, const struct eval_source *source,
                     uint64_t max_samples, struct eval_result *out_result,
                     struct failure *why) MUST_CHECK;
/* Record one micro-batch. Only on the dry device. */
enum status eval_rehearse(struct training *training, struct failure *why) MUST_CHECK;

#endif
