/* Where a kernel launch goes in a build without nvcc.
 *
 * LAUNCH (kernels/cuda/portable.h) makes a closure of the kernel and its arguments and hands
 * it to emulate_enqueue, which the stand-in for the runtime defines: it is one more piece of
 * work in a stream's queue. A test of kernels alone links tests/cuda/lib/immediate.c, which runs
 * the closure at once. */
#ifndef BALLAST_KERNELS_CUDA_EMULATE_ENQUEUE_H
#define BALLAST_KERNELS_CUDA_EMULATE_ENQUEUE_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Queue run(closure) on `stream`. `bytes` bytes of the closure are copied before the call
 * returns and handed to `run` at an address aligned as malloc's are; `run` leaves them as
 * they are and may be called on the same bytes again (a captured launch that is replayed).
 * `name` is the kernel's, a string literal. Thread: the one that launches; `run` may be called
 * on another one. */
void emulate_enqueue(cudaStream_t stream, const char *name, void (*run)(void *closure),
                     const void *closure, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
