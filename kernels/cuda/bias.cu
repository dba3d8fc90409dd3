/* The gradient of a bias: sums of columns (columns.h). Owns nothing. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/columns.h"

template <typename T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    bias_backward_columns(struct cuda_bias_backward c, unsigned lanes)
{
    const size_t strip = (size_t)blockIdx.x * lanes * N;
    const size_t column = strip + threadIdx.x % lanes * N;
    const size_t n_teams = COLUMN_THREADS / lanes;
    float sum[N];
    set(sum, 0.0f);
    for (size_t r = threadIdx.x / lanes; r < c.rows && column < c.cols;
         r += ROWS_AT_ONCE * n_teams) {
        float d[ROWS_AT_ONCE][N];
        for (int a = 0; a < ROWS_AT_ONCE; a++) {
            const size_t row = r + (size_t)a * n_teams;
            set(d[a], 0.0f);
            if (row < c.rows) {
                load(d[a], (const T *)c.dout + row * c.cols + column);
            }
        }
        for (int a = 0; a < ROWS_AT_ONCE; a++) {
            for (int j = 0; j < N; j++) {
                sum[j] += d[a][j];
            }
        }
    }
    store_columns(c.dbias, sum, strip, c.cols, lanes);
}

template <typename T, int N>
static void launch(cudaStream_t stream, const struct cuda_bias_backward *args)
{
    const unsigned lanes = strip_lanes(args->cols, sizeof(T), N);
    LAUNCH((bias_backward_columns<T, N>), dim3(strip_count(args->cols, lanes, N)),
           dim3(COLUMN_THREADS), 0, stream, *args, lanes);
}

template <typename T> static void choose(cudaStream_t stream, const struct cuda_bias_backward *args)
{
    if (in_packs<T>(args->cols, args->dout)) {
        launch<T, PACK<T>>(stream, args);
    } else {
        launch<T, 1>(stream, args);
    }
}

void cuda_launch_bias_backward(cudaStream_t stream, const struct cuda_bias_backward *args)
{
    if (args->cols == 0) {
        return;
    }
    if (args->dtype == DTYPE_BF16) {
        choose<bf16>(stream, args);
    } else {
        choose<float>(stream, args);
    }
}
