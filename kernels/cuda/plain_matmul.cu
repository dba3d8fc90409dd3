/* Matrix products without tensor cores: what the library has no algorithm for. A block computes a
 * tile of C, a thread sixteen elements of it, each over k in order. Owns nothing. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.h"

enum {
    TILE = 64,  /* rows and columns of a block's part of C */
    DEPTH = 16, /* of k at a time */
    SIDE = 16,  /* threads of a block along each side */
    TILE_THREADS = SIDE * SIDE,
    OF_THREAD = 4 /* rows and columns of C of a thread: TILE / SIDE */
};
static_assert(TILE == SIDE * OF_THREAD, "the threads cover the tile");

/* An operand seen as (outer, k): element (i, k) lies at i * outer_step + k * k_step, one of which
 * is 1. */
template <typename T> struct operand {
    const T *base;
    size_t n_outer, n_k, outer_step, k_step;
};

/* tile[k][i] = element (first + i, first_k + k), 0 outside. Neighbouring threads read neighbouring
 * addresses. */
template <typename T>
static __device__ __forceinline__ void load_tile(float (&tile)[DEPTH][TILE + 1],
                                                 const struct operand<T> *from, size_t first,
                                                 size_t first_k)
{
    for (unsigned item = threadIdx.x; item < TILE * DEPTH; item += TILE_THREADS) {
        const bool k_inside = from->k_step == 1;
        const unsigned k = k_inside ? item % DEPTH : item / TILE;
        const unsigned i = k_inside ? item / DEPTH : item % TILE;
        float value = 0.0f;
        if (first + i < from->n_outer && first_k + k < from->n_k) {
            value =
                to_float(from->base[(first + i) * from->outer_step + (first_k + k) * from->k_step]);
        }
        tile[k][i] = value;
    }
}

template <typename C> struct result {
    C *base;
    const void *bias; /* of T, or NULL */
    bool accumulate;
};

template <typename T, typename C>
static __device__ __forceinline__ void store_tile(const struct result<C> *to,
                                                  const float (&sum)[OF_THREAD][OF_THREAD],
                                                  size_t row, size_t column, size_t m, size_t n)
{
    for (unsigned i = 0; i < OF_THREAD; i++) {
        for (unsigned j = 0; j < OF_THREAD; j++) {
            const size_t r = row + i * SIDE, c = column + j * SIDE;
            if (r >= m || c >= n) {
                continue;
            }
            float value = sum[i][j];
            if (to->bias != NULL) {
                value += to_float(((const T *)to->bias)[c]);
            }
            C *at = to->base + r * n + c;
            store_float(at, to->accumulate ? to_float(*at) + value : value);
        }
    }
}

template <typename T, typename C>
__global__ void __launch_bounds__(TILE_THREADS, 2) /* else it spills */
    plain_matmul_tiles(struct operand<T> a, struct operand<T> b, struct result<C> to)
{
    __shared__ float left[DEPTH][TILE + 1], right[DEPTH][TILE + 1];
    const unsigned x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const size_t n = b.n_outer, first_column = (size_t)blockIdx.x * TILE;
    for (size_t first_row = (size_t)blockIdx.y * TILE; first_row < a.n_outer;
         first_row += (size_t)gridDim.y * TILE) {
        float sum[OF_THREAD][OF_THREAD];
        for (int i = 0; i < OF_THREAD; i++) {
            set(sum[i], 0.0f);
        }
        for (size_t first_k = 0; first_k < a.n_k; first_k += DEPTH) {
            load_tile(left, &a, first_row, first_k);
            load_tile(right, &b, first_column, first_k);
            __syncthreads();
            for (int k = 0; k < DEPTH; k++) {
                for (unsigned i = 0; i < OF_THREAD; i++) {
                    for (unsigned j = 0; j < OF_THREAD; j++) {
                        sum[i][j] =
                            __fmaf_rn(left[k][y + i * SIDE], right[k][x + j * SIDE], sum[i][j]);
                    }
                }
            }
            __syncthreads();
        }
        store_tile<T>(&to, sum, first_row + y, first_column + x, a.n_outer, n);
    }
}

template <typename T, typename C> static void launch(cudaStream_t stream, const struct matmul *call)
{
    const bool left_k_outside = call->form == MATMUL_TN, right_k_inside = call->form == MATMUL_NT;
    const struct operand<T> a = {
        (const T *)call->a, call->m, call->k, left_k_outside ? 1 : call->k,
            left_k_outside ? call->m : 1
    };
    const struct operand<T> b = {
        (const T *)call->b, call->n, call->k, right_k_inside ? call->k : 1,
            right_k_inside ? 1 : call->n
    };
    const struct result<C> to = {
        (C *)call->c, call->bias, call->accumulate
    };
    const dim3 grid(blocks_x((call->n + TILE - 1) / TILE), blocks_y((call->m + TILE - 1) / TILE));
    LAUNCH((plain_matmul_tiles<T, C>), grid, dim3(TILE_THREADS), 0, stream, a, b, to);
}

void cuda_launch_plain_matmul(cudaStream_t stream, const struct cuda_plain_matmul *args)
{
    const struct matmul *call = &args->call;
    if (call->m == 0 || call->n == 0) {
        return;
    }
    if (args->dtype == DTYPE_FP32) {
        launch<float, float>(stream, call);
    } else if (call->c_fp32) {
        launch<bf16, float>(stream, call);
    } else {
        launch<bf16, bf16>(stream, call);
    }
}
