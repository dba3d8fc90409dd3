/* Sums down the columns of a matrix, in an order that its shape fixes, without scratch.
 *
 * A block owns a strip of columns: `lanes` threads side by side with N columns each. Its threads
 * make COLUMN_THREADS / lanes teams, each of which adds every so-many-eth row; the teams' sums are
 * added in a tree within a warp, then warp after warp. Strips are as narrow as 32 bytes (the least
 * that memory hands out) so that narrow matrices, too, keep most of a GPU busy. Header only. */
#ifndef BALLAST_KERNELS_CUDA_COLUMNS_H
#define BALLAST_KERNELS_CUDA_COLUMNS_H

#include "kernels/cuda/rows.h"

enum {
    COLUMN_THREADS = 512,
    COLUMN_WARPS = COLUMN_THREADS / WARP_LANES,
    ROWS_AT_ONCE = 4,   /* rows that a thread has under way */
    STRIPS_WANTED = 128 /* about a block for every multiprocessor */
};

/* Threads side by side, a power of two between 32 bytes' worth and a warp: a function of shape. */
static inline unsigned strip_lanes(size_t width, size_t elem_bytes, int n)
{
    const size_t least = 32 / (elem_bytes * (size_t)n);
    size_t lanes = WARP_LANES;
    while (lanes > least && width < STRIPS_WANTED * lanes * (size_t)n) {
        lanes /= 2;
    }
    return (unsigned)lanes;
}

static inline unsigned strip_count(size_t width, unsigned lanes, int n)
{
    const size_t columns = (size_t)lanes * (size_t)n;
    return blocks_x((width + columns - 1) / columns);
}

/* out[column] = the teams' sums of the block's strip, `first` its first column. */
template <int N>
static __device__ __forceinline__ void store_columns(float *out, const float (&sum)[N],
                                                     size_t first, size_t width, unsigned lanes)
{
    __shared__ float of_warp[COLUMN_WARPS][WARP_LANES * N];
    const unsigned lane = threadIdx.x % WARP_LANES;
    __syncthreads(); /* who reads an earlier call's sums has done so */
    for (int i = 0; i < N; i++) {
        float total = sum[i];
        for (unsigned step = lanes; step < WARP_LANES; step *= 2) {
            total += __shfl_xor_sync(0xFFFFFFFFu, total, (int)step);
        }
        if (lane < lanes) {
            of_warp[threadIdx.x / WARP_LANES][lane * N + (unsigned)i] = total;
        }
    }
    __syncthreads();
    if (threadIdx.x < lanes * N && first + threadIdx.x < width) {
        float total = 0.0f;
        for (int warp = 0; warp < COLUMN_WARPS; warp++) {
            total += of_warp[warp][threadIdx.x];
        }
        out[first + threadIdx.x] = total;
    }
}

#endif
