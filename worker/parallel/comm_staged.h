/* Data collectives through host memory, for ranks that share a GPU (NCCL refuses that) and as the
 * way that works on every device.
 *
 * Device memory is copied to a staging buffer piece by piece, exchanged by `control`, and copied
 * back; a collective is complete when its call returns, and its ticket is zero. Same values,
 * shapes and figures as the comm that is wrapped. Main thread. */
#ifndef BALLAST_WORKER_PARALLEL_COMM_STAGED_H
#define BALLAST_WORKER_PARALLEL_COMM_STAGED_H

#include "worker/parallel/comm.h"

/* Host memory of the staging buffer, for the ledger. */
enum { COMM_STAGED_BYTES = 8 * 1024 * 1024 };

/* Takes the staging buffer; exchanges nothing. `control` and `device` are borrowed until the
 * wrapper is freed and are freed after it. abort_flag, timeout_s and piece_bytes count as set in
 * the wrapper. OUT_OF_MEMORY. */
enum status comm_staged_init(struct comm *comm, struct comm *control, struct device *device,
                             struct failure *why) MUST_CHECK;

#endif
