/* Loops over long arrays, four elements a thread. For .cu files, after portable.h.
 *
 * A thread takes elements i .. i+3 for i = 4 * its index in the grid, then the same a whole grid
 * further. Where an array begins at a multiple of four elements' size they are one access,
 * otherwise four; which thread takes which element is the same either way. */
#ifndef BALLAST_KERNELS_CUDA_QUADS_H
#define BALLAST_KERNELS_CUDA_QUADS_H

#include "kernels/cuda/portable.h"

enum { QUADS_BLOCK = 256, QUADS_GRID_MAX = 8192 };

/* Blocks for n > 0 elements. */
static inline unsigned quads_grid(size_t n)
{
    const size_t per_block = (size_t)4 * QUADS_BLOCK, n_blocks = (n + per_block - 1) / per_block;
    return (unsigned)min(n_blocks, (size_t)QUADS_GRID_MAX);
}

/* NULL is aligned. */
static inline bool quads_aligned(const void *base, size_t elem_bytes)
{
    return (uintptr_t)base % (4 * elem_bytes) == 0;
}

static __device__ __forceinline__ size_t quads_first(void)
{
    return 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
}

static __device__ __forceinline__ size_t quads_stride(void)
{
    return (size_t)4 * gridDim.x * blockDim.x;
}

/* `left` elements of the array are left, at least one; what is beyond them reads as 0 and is
 * not written. */
static __device__ __forceinline__ void load_quad(float x[4], const float *from, size_t left,
                                                 bool aligned)
{
    if (aligned && left >= 4) {
        const float4 quad = *reinterpret_cast<const float4 *>(from);
        x[0] = quad.x;
        x[1] = quad.y;
        x[2] = quad.z;
        x[3] = quad.w;
        return;
    }
    for (int j = 0; j < 4; j++) {
        x[j] = (size_t)j < left ? from[j] : 0.0f;
    }
}

static __device__ __forceinline__ void store_quad(float *to, const float x[4], size_t left,
                                                  bool aligned)
{
    if (aligned && left >= 4) {
        *reinterpret_cast<float4 *>(to) = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
    for (int j = 0; j < 4; j++) {
        if ((size_t)j < left) {
            to[j] = x[j];
        }
    }
}

static __device__ __forceinline__ void store_quad(bf16 *to, const float x[4], size_t left,
                                                  bool aligned)
{
    if (aligned && left >= 4) {
        *reinterpret_cast<uint2 *>(to) =
            make_uint2(floats_to_bf16x2(x[0], x[1]), floats_to_bf16x2(x[2], x[3]));
        return;
    }
    for (int j = 0; j < 4; j++) {
        if ((size_t)j < left) {
            to[j] = float_to_bf16(x[j]);
        }
    }
}

#endif
