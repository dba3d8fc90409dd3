/* Layer norm and RMS norm. A block takes a row; it reads the row up to three times, of which all
 * but the first come from the cache. The gradients of weight and bias go by columns (columns.h).
 * Owns nothing. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/columns.h"

enum { NORM_THREADS = 512 };

template <typename T, int N>
__global__ void __launch_bounds__(NORM_THREADS) norm_forward_rows(struct cuda_norm_forward c)
{
    const T *weight = (const T *)c.weight, *bias = (const T *)c.bias;
    const size_t first = (size_t)threadIdx.x * N, step = (size_t)blockDim.x * N;
    for (size_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        const T *x = (const T *)c.x + r * c.width;
        T *out = (T *)c.out + r * c.width;
        float v[N], mean = 0.0f, sum = 0.0f;
        if (c.kind == NORM_LAYER) {
            for (size_t i = first; i < c.width; i += step) {
                load(v, x + i);
                for (int j = 0; j < N; j++) {
                    sum += v[j];
                }
            }
            mean = block_sum(sum) / (float)c.width;
        }
        float squares = 0.0f;
        for (size_t i = first; i < c.width; i += step) {
            load(v, x + i);
            for (int j = 0; j < N; j++) {
                squares = __fmaf_rn(v[j] - mean, v[j] - mean, squares);
            }
        }
        const float rstd = 1.0f / sqrtf(block_sum(squares) / (float)c.width + c.eps);
        for (size_t i = first; i < c.width; i += step) {
            float w[N], b[N];
            load(v, x + i);
            load(w, weight + i);
            set(b, 0.0f);
            if (bias != NULL) {
                load(b, bias + i);
            }
            for (int j = 0; j < N; j++) {
                v[j] = __fmaf_rn((v[j] - mean) * rstd, w[j], b[j]);
            }
            store(out + i, v);
        }
        if (threadIdx.x == 0) {
            if (c.mean != NULL) {
                c.mean[r] = mean;
            }
            c.rstd[r] = rstd;
        }
    }
}

/* With n = (x - mean) rstd and g = dout weight: dx += rstd (g - avg(g) - n avg(g n)); RMS norm
 * has no avg(g) term. */
template <typename T, int N>
__global__ void __launch_bounds__(NORM_THREADS) norm_backward_rows(struct cuda_norm_backward c)
{
    const T *weight = (const T *)c.weight;
    const size_t first = (size_t)threadIdx.x * N, step = (size_t)blockDim.x * N;
    for (size_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        const T *x = (const T *)c.x + r * c.width, *dout = (const T *)c.dout + r * c.width;
        T *dx = (T *)c.dx + r * c.width;
        const float mean = c.mean != NULL ? c.mean[r] : 0.0f, rstd = c.rstd[r];
        float v[N], d[N], w[N], sums[2] = {0.0f, 0.0f};
        for (size_t i = first; i < c.width; i += step) {
            load(v, x + i);
            load(d, dout + i);
            load(w, weight + i);
            for (int j = 0; j < N; j++) {
                const float g = d[j] * w[j];
                sums[0] += g;
                sums[1] = __fmaf_rn(g, (v[j] - mean) * rstd, sums[1]);
            }
        }
        block_sum(sums);
        const float average_g = c.kind == NORM_LAYER ? sums[0] / (float)c.width : 0.0f;
        const float average_gn = sums[1] / (float)c.width;
        for (size_t i = first; i < c.width; i += step) {
            float old[N];
            load(v, x + i);
            load(d, dout + i);
            load(w, weight + i);
            load(old, dx + i);
            for (int j = 0; j < N; j++) {
                const float normal = (v[j] - mean) * rstd;
                const float inner = __fmaf_rn(normal, -average_gn, d[j] * w[j] - average_g);
                old[j] = __fmaf_rn(inner, rstd, old[j]);
            }
            store(dx + i, old);
        }
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    norm_backward_columns(struct cuda_norm_backward c, unsigned lanes)
{
    const size_t strip = (size_t)blockIdx.x * lanes * N;
    const size_t column = strip + threadIdx.x % lanes * N;
    const size_t n_teams = COLUMN_THREADS / lanes;
    float weight_sum[N], bias_sum[N];
    set(weight_sum, 0.0f);
    set(bias_sum, 0.0f);
    for (size_t r = threadIdx.x / lanes; r < c.rows && column < c.width;
         r += ROWS_AT_ONCE * n_teams) {
        float v[ROWS_AT_ONCE][N], d[ROWS_AT_ONCE][N], mean[ROWS_AT_ONCE], rstd[ROWS_AT_ONCE];
        for (int a = 0; a < ROWS_AT_ONCE; a++) {
            const size_t row = r + (size_t)a * n_teams;
            set(v[a], 0.0f);
            set(d[a], 0.0f);
            mean[a] = rstd[a] = 0.0f;
            if (row < c.rows) {
                load(v[a], (const T *)c.x + row * c.width + column);
                load(d[a], (const T *)c.dout + row * c.width + column);
                mean[a] = c.mean != NULL ? c.mean[row] : 0.0f;
                rstd[a] = c.rstd[row];
            }
        }
        for (int a = 0; a < ROWS_AT_ONCE; a++) {
            for (int j = 0; j < N; j++) {
                const float normal = (v[a][j] - mean[a]) * rstd[a];
                weight_sum[j] = __fmaf_rn(d[a][j], normal, weight_sum[j]);
                bias_sum[j] += d[a][j];
            }
        }
    }
    store_columns(c.dweight, weight_sum, strip, c.width, lanes);
    if (c.dbias != NULL) {
        store_columns(c.dbias, bias_sum, strip, c.width, lanes);
    }
}

template <typename T, int N>
static void launch_forward(cudaStream_t stream, const struct cuda_norm_forward *args)
{
    const unsigned threads = block_threads((args->width + N - 1) / N, NORM_THREADS);
    LAUNCH((norm_forward_rows<T, N>), dim3(blocks_x(args->rows)), dim3(threads), 0, stream, *args);
}

template <typename T, int N>
static void launch_backward(cudaStream_t stream, const struct cuda_norm_backward *args)
{
    const unsigned threads = block_threads((args->width + N - 1) / N, NORM_THREADS);
    if (args->rows > 0) {
        LAUNCH((norm_backward_rows<T, N>), dim3(blocks_x(args->rows)), dim3(threads), 0, stream,
               *args);
    }
    const unsigned lanes = strip_lanes(args->width, sizeof(T), N);
    LAUNCH((norm_backward_columns<T, N>), dim3(strip_count(args->width, lanes, N)),
           dim3(COLUMN_THREADS), 0, stream, *args, lanes);
}

template <typename T>
static void choose_forward(cudaStream_t stream, const struct cuda_norm_forward *args)
{
    struct cuda_norm_forward call = *args;
    if (call.kind != NORM_LAYER) {
        call.mean = NULL;
        call.bias = NULL;
    }
    if (in_packs<T>(call.width, call.out, call.x, call.weight, call.bias)) {
        launch_forward<T, PACK<T>>(stream, &call);
    } else {
        launch_forward<T, 1>(stream, &call);
    }
}

template <typename T>
static void choose_backward(cudaStream_t stream, const struct cuda_norm_backward *args)
{
    struct cuda_norm_backward call = *args;
    if (call.kind != NORM_LAYER) {
        call.mean = NULL;
        call.dbias = NULL;
    }
    if (in_packs<T>(call.width, call.dx, call.dout, call.x, call.weight)) {
        launch_backward<T, PACK<T>>(stream, &call);
    } else {
        launch_backward<T, 1>(stream, &call);
    }
}

void cuda_launch_norm_forward(cudaStream_t stream, const struct cuda_norm_forward *args)
{
    if (args->rows == 0 || args->width == 0) {
        return;
    }
    if (args->dtype == DTYPE_BF16) {
        choose_forward<bf16>(stream, args);
    } else {
        choose_forward<float>(stream, args);
    }
}

void cuda_launch_norm_backward(cudaStream_t stream, const struct cuda_norm_backward *args)
{
    if (args->width == 0) {
        return;
    }
    if (args->dtype == DTYPE_BF16) {
        choose_backward<bf16>(stream, args);
    } else {
        choose_backward<float>(stream, args);
    }
}
