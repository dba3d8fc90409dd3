/* Rotary position embedding in place, a block for each row. Angles are computed in double, so that
 * long positions keep their precision; a row's cosines and sines serve all its heads.
 * Owns nothing. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.h"

#include <assert.h>
#include <math.h>

enum { ROTARY_THREADS = 256 };

template <typename T, int N>
__global__ void __launch_bounds__(ROTARY_THREADS) rotate_rows(struct cuda_rotary c)
{
    __shared__ float cosine[ROTARY_MAX_PAIRS], sine[ROTARY_MAX_PAIRS];
    const unsigned n_pairs = c.rotary.n_pairs, packs = n_pairs / N;
    const size_t row_width = ((size_t)c.n_heads + 2 * (size_t)c.n_kv_heads) * c.head_dim;
    const unsigned n_items = (c.n_heads + c.n_kv_heads) * packs;
    const double direction = c.direction < 0 ? -1.0 : 1.0;
    for (size_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        __syncthreads(); /* the last row's angles are used no more */
        for (unsigned i = threadIdx.x; i < n_pairs; i += blockDim.x) {
            const double angle = (double)c.positions[r] * (double)c.rotary.inv_freq[i];
            cosine[i] = (float)cos(angle);
            sine[i] = (float)(direction * sin(angle));
        }
        __syncthreads();
        T *row = (T *)c.qkv + r * row_width;
        for (unsigned item = threadIdx.x; item < n_items; item += blockDim.x) {
            const unsigned i = item % packs * N;
            T *pair = row + (size_t)(item / packs) * c.head_dim + i;
            float a[N], b[N];
            load(a, pair);
            load(b, pair + n_pairs);
            for (unsigned j = 0; j < N; j++) {
                const float first = a[j] * cosine[i + j] - b[j] * sine[i + j];
                b[j] = b[j] * cosine[i + j] + a[j] * sine[i + j];
                a[j] = first;
            }
            store(pair, a);
            store(pair + n_pairs, b);
        }
    }
}

template <typename T, int N> static void launch(cudaStream_t stream, const struct cuda_rotary *args)
{
    const size_t pairs = ((size_t)args->n_heads + args->n_kv_heads) * args->rotary.n_pairs;
    LAUNCH((rotate_rows<T, N>), dim3(blocks_x(args->rows)),
           dim3(block_threads(pairs / N, ROTARY_THREADS)), 0, stream, *args);
}

template <typename T> static void choose(cudaStream_t stream, const struct cuda_rotary *args)
{
    if (in_packs<T>(args->rotary.n_pairs, args->qkv)) {
        launch<T, PACK<T>>(stream, args);
    } else {
        launch<T, 1>(stream, args);
    }
}

void cuda_launch_rotary(cudaStream_t stream, const struct cuda_rotary *args)
{
    assert(args->rotary.n_pairs == args->head_dim / 2 && args->rotary.n_pairs <= ROTARY_MAX_PAIRS);
    if (args->rows == 0 || args->rotary.n_pairs == 0) {
        return;
    }
    if (args->dtype == DTYPE_BF16) {
        choose<bf16>(stream, args);
    } else {
        choose<float>(stream, args);
    }
}
