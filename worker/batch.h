/* A micro-batch on its way to the device: filled on the host, copied, released.
 *
 * Main thread. */
#ifndef BALLAST_WORKER_BATCH_H
#define BALLAST_WORKER_BATCH_H

#include "worker/training.h"

/* Host copies of inputs, labels and positions of `batch` rows, one array after the other. */
void batch_fill(struct training *training, const struct batch_source *source, uint64_t step,
                uint32_t first_sample, size_t batch);
/* The labels of the batch filled last. */
const int32_t *batch_labels(const struct training *training, size_t rows);
/* Bring the host batch to the device, into decoder.input. */
enum status batch_load(struct training *training, size_t rows, struct failure *why) MUST_CHECK;
void batch_release(struct training *training);

#endif
