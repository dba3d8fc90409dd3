/* NCCL for the data collectives, the control path left as it is.
 *
 * The wrapper forwards exchange, broadcast, progress and abort to `control` and sends gradients and
 * parameters from GPU to GPU: grouped sends and receives on the communication stream, after what
 * compute has been given so far. A wait makes compute wait, not the host. Main thread. */
#ifndef BALLAST_WORKER_PARALLEL_COMM_NCCL_H
#define BALLAST_WORKER_PARALLEL_COMM_NCCL_H

#include "worker/parallel/comm.h"

/* Collective. Makes the communicator and warms it. `control` and `device` are borrowed until the
 * wrapper is freed and are freed after it. The wrapper starts with control's figures; abort_flag,
 * timeout_s and piece_bytes count as set in the wrapper. While it lives it watches the device's
 * waits. UNSUPPORTED, on all ranks alike, where two ranks have the same GPU. */
enum status comm_nccl_init(struct comm *comm, struct comm *control, struct device *device,
                           struct failure *why) MUST_CHECK;

#endif
