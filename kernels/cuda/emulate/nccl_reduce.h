/* The arithmetic of NCCL's reductions. Owns nothing. Any thread. */
#ifndef BALLAST_KERNELS_CUDA_EMULATE_NCCL_REDUCE_H
#define BALLAST_KERNELS_CUDA_EMULATE_NCCL_REDUCE_H

#include <nccl.h>
#include <stdbool.h>
#include <stddef.h>

/* Bytes of an element; 0: a type that is not known here. */
size_t emulate_nccl_bytes(ncclDataType_t type);
bool emulate_nccl_can_reduce(ncclDataType_t type, ncclRedOp_t op);
/* out(n) = the parts [n_parts][n] combined in the order first, first + 1, ..., first - 1: an
 * order that nobody should rely on. `out` aliases no part. */
void emulate_nccl_reduce(void *out, const void *parts, size_t n, size_t n_parts, size_t first,
                         ncclDataType_t type, ncclRedOp_t op);

#endif
