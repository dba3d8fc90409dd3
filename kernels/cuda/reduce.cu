/* Sums, fills and conversions over long arrays. Every sum has an order that depends on the
 * number of elements alone: neither on the number of blocks that run at a time nor on where
 * the array begins. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/quads.h"

enum {
    SUM_THREADS = 1024,   /* of the one block that sums losses */
    SQUARES_THREADS = 256 /* of each block that sums squares */
};

static __global__ void set_varying(struct cuda_varying *varying, struct cuda_varying value)
{
    *varying = value;
}

/* Sum over the block's threads, valid in thread 0: a tree in each warp, then warps in order. */
static __device__ __forceinline__ double block_sum(double value)
{
    __shared__ double warps[32];
    for (int bits = 16; bits > 0; bits /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, bits);
    }
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = warps[0];
    for (unsigned i = 1; threadIdx.x == 0 && i < blockDim.x / 32; i++) {
        value += warps[i];
    }
    return value;
}

/* One block: there is one value per token. */
static __global__ void __launch_bounds__(SUM_THREADS)
    sum_values(double *__restrict__ out, const float *__restrict__ values, size_t n)
{
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < n; i += SUM_THREADS) {
        sum += (double)values[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        *out = sum;
    }
}

/* partials[b] = the squares of blocks b, b + gridDim.x, ... of CUDA_SUM_BLOCK values. */
static __global__ void __launch_bounds__(SQUARES_THREADS)
    sum_square_blocks(double *__restrict__ partials, const float *__restrict__ values, size_t n,
                      bool aligned)
{
    double sum = 0.0;
    for (size_t begin = (size_t)blockIdx.x * CUDA_SUM_BLOCK; begin < n;
         begin += (size_t)gridDim.x * CUDA_SUM_BLOCK) {
        const size_t end = n - begin < CUDA_SUM_BLOCK ? n : begin + CUDA_SUM_BLOCK;
        UNROLL_BY(4)
        for (size_t i = begin + 4 * threadIdx.x; i < end; i += 4 * SQUARES_THREADS) {
            float x[4];
            load_quad(x, values + i, end - i, aligned);
            for (int j = 0; j < 4; j++) {
                sum = __fma_rn((double)x[j], (double)x[j], sum);
            }
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

/* *out = partials[0] + partials[1] + ..., in order; one block. The additions wait for each
 * other, so the values are brought near first. */
static __global__ void __launch_bounds__(SQUARES_THREADS)
    sum_partials(double *__restrict__ out, const double *__restrict__ partials, unsigned n)
{
    __shared__ double near[CUDA_SUM_PARTIALS];
    for (unsigned i = threadIdx.x; i < n; i += SQUARES_THREADS) {
        near[i] = partials[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (unsigned i = 0; i < n; i++) {
            sum += near[i];
        }
        *out = sum;
    }
}

static __global__ void __launch_bounds__(QUADS_BLOCK)
    sum_parts(float *__restrict__ out, const float *__restrict__ parts, size_t n_parts,
              size_t stride, size_t n, bool aligned)
{
    for (size_t i = quads_first(); i < n; i += quads_stride()) {
        float sum[4], x[4];
        load_quad(sum, parts + i, n - i, aligned);
        UNROLL_BY(4)
        for (size_t p = 1; p < n_parts; p++) {
            load_quad(x, parts + p * stride + i, n - i, aligned);
            for (int j = 0; j < 4; j++) {
                sum[j] = __fadd_rn(sum[j], x[j]);
            }
        }
        store_quad(out + i, sum, n - i, aligned);
    }
}

static __global__ void __launch_bounds__(QUADS_BLOCK)
    add(float *__restrict__ dst, const float *__restrict__ src, size_t n, bool aligned)
{
    for (size_t i = quads_first(); i < n; i += quads_stride()) {
        float x[4], y[4];
        load_quad(x, dst + i, n - i, aligned);
        load_quad(y, src + i, n - i, aligned);
        for (int j = 0; j < 4; j++) {
            x[j] = __fadd_rn(x[j], y[j]);
        }
        store_quad(dst + i, x, n - i, aligned);
    }
}

static __global__ void __launch_bounds__(QUADS_BLOCK)
    fill(float *__restrict__ values, size_t n, float value, bool aligned)
{
    const float x[4] = {value, value, value, value};
    for (size_t i = quads_first(); i < n; i += quads_stride()) {
        store_quad(values + i, x, n - i, aligned);
    }
}

template <class T>
static __global__ void __launch_bounds__(QUADS_BLOCK)
    narrow(T *__restrict__ dst, const float *__restrict__ src, size_t n, bool aligned)
{
    for (size_t i = quads_first(); i < n; i += quads_stride()) {
        float x[4];
        load_quad(x, src + i, n - i, aligned);
        store_quad(dst + i, x, n - i, aligned);
    }
}

/* ---- launchers ---- */

extern "C" void cuda_launch_set_varying(cudaStream_t stream, const struct cuda_set_varying *args)
{
    LAUNCH(set_varying, 1, 1, 0, stream, args->varying, args->value);
}

extern "C" void cuda_launch_sum(cudaStream_t stream, const struct cuda_sum *args)
{
    LAUNCH(sum_values, 1, SUM_THREADS, 0, stream, args->out, args->values, args->n);
}

extern "C" void cuda_launch_sum_squares(cudaStream_t stream, const struct cuda_sum_squares *args)
{
    const size_t n_blocks = args->n / CUDA_SUM_BLOCK + (args->n % CUDA_SUM_BLOCK != 0);
    const unsigned n_partials = (unsigned)min(n_blocks, (size_t)CUDA_SUM_PARTIALS);
    if (n_partials > 0) {
        LAUNCH(sum_square_blocks, n_partials, SQUARES_THREADS, 0, stream, args->partials,
               args->values, args->n, quads_aligned(args->values, sizeof(float)));
    }
    LAUNCH(sum_partials, 1, SQUARES_THREADS, 0, stream, args->out, args->partials, n_partials);
}

extern "C" void cuda_launch_sum_parts(cudaStream_t stream, const struct cuda_sum_parts *args)
{
    const bool aligned = quads_aligned(args->out, sizeof(float)) &&
                         quads_aligned(args->parts, sizeof(float)) &&
                         (args->stride % 4 == 0 || args->n_parts < 2);
    if (args->n > 0) {
        LAUNCH(sum_parts, quads_grid(args->n), QUADS_BLOCK, 0, stream, args->out, args->parts,
               args->n_parts, args->stride, args->n, aligned);
    }
}

extern "C" void cuda_launch_add(cudaStream_t stream, const struct cuda_add *args)
{
    const bool aligned =
        quads_aligned(args->dst, sizeof(float)) && quads_aligned(args->src, sizeof(float));
    if (args->n > 0) {
        LAUNCH(add, quads_grid(args->n), QUADS_BLOCK, 0, stream, args->dst, args->src, args->n,
               aligned);
    }
}

extern "C" void cuda_launch_fill(cudaStream_t stream, const struct cuda_fill *args)
{
    if (args->n > 0) {
        LAUNCH(fill, quads_grid(args->n), QUADS_BLOCK, 0, stream, args->values, args->n,
               args->value, quads_aligned(args->values, sizeof(float)));
    }
}

template <class T> static void launch_narrow(cudaStream_t stream, const struct cuda_narrow *args)
{
    const bool aligned =
        quads_aligned(args->dst, sizeof(T)) && quads_aligned(args->src, sizeof(float));
    if (args->n > 0) {
        LAUNCH(narrow<T>, quads_grid(args->n), QUADS_BLOCK, 0, stream, (T *)args->dst, args->src,
               args->n, aligned);
    }
}

extern "C" void cuda_launch_narrow(cudaStream_t stream, const struct cuda_narrow *args)
{
    if (args->dtype == DTYPE_BF16) {
        launch_narrow<bf16>(stream, args);
    } else {
        launch_narrow<float>(stream, args);
    }
}
