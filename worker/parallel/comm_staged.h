/* Collectives of device memory through the host, for ranks that share a GPU.
 *
 * Wraps a communicator that moves host memory: control calls are passed on, data collectives go
 * through a bounded staging buffer with device copies. Works on any device. Main thread. */
#ifndef BALLAST_WORKER_PARALLEL_COMM_STAGED_H
#define BALLAST_WORKER_PARALLEL_COMM_STAGED_H

#include "worker/parallel/comm.h"

/* `control` (borrowed, stays in use) moves the bytes, `device` (borrowed) holds them.
 * comm->table->free() leaves both as they were. OUT_OF_MEMORY: no host memory for staging. */
enum status comm_staged_init(struct comm *comm, struct comm *control, struct device *device,
                             struct failure *why) MUST_CHECK;

#endif
