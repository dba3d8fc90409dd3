/* Activation functions of the MLP, element by element. din may be in: a thread has read all that
 * its results replace before it writes. Owns nothing. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.h"

enum { MLP_THREADS = 256 };

/* GELU, tanh form: 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). */
#define GELU_2A 1.59576912f    /* 2 sqrt(2/pi) */
#define GELU_2AB 0.0713548163f /* 2 sqrt(2/pi) 0.044715 */
#define GELU_6AB 0.214064449f  /* three times that: the derivative of 2u */

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (expf(-x) + 1.0f);
}

/* Also 1 - sigmoid, as exp(-x) sigmoid: the difference would lose its digits. */
static __device__ __forceinline__ float sigmoid_and_rest(float x, float *out_rest)
{
    const float e = fminf(expf(-x), 1e30f); /* infinity times 0 */
    const float s = 1.0f / (e + 1.0f);
    *out_rest = e * s;
    return s;
}

static __device__ __forceinline__ float gelu(float x)
{
    return x * sigmoid(x * __fmaf_rn(x * x, GELU_2AB, GELU_2A));
}

static __device__ __forceinline__ float gelu_slope(float x)
{
    /* Beyond 40 the slope is 0 or 1 to the last bit; x cubed must not overflow. The comparisons
     * let not-a-number through. */
    x = x < -40.0f ? -40.0f : x > 40.0f ? 40.0f : x;
    const float square = x * x;
    float rest;
    const float s = sigmoid_and_rest(x * __fmaf_rn(square, GELU_2AB, GELU_2A), &rest);
    return __fmaf_rn(x * __fmaf_rn(square, GELU_6AB, GELU_2A), s * rest, s);
}

template <typename T, int N>
__global__ void __launch_bounds__(MLP_THREADS) gelu_forward(T *out, const T *in, size_t n)
{
    const size_t step = (size_t)gridDim.x * MLP_THREADS * N;
    for (size_t i = ((size_t)blockIdx.x * MLP_THREADS + threadIdx.x) * N; i < n; i += step) {
        float v[N];
        load(v, in + i);
        for (int j = 0; j < N; j++) {
            v[j] = gelu(v[j]);
        }
        store(out + i, v);
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(MLP_THREADS)
    gelu_backward(T *din, const T *dout, const T *in, size_t n)
{
    const size_t step = (size_t)gridDim.x * MLP_THREADS * N;
    for (size_t i = ((size_t)blockIdx.x * MLP_THREADS + threadIdx.x) * N; i < n; i += step) {
        float v[N], d[N];
        load(v, in + i);
        load(d, dout + i);
        for (int j = 0; j < N; j++) {
            v[j] = d[j] * gelu_slope(v[j]);
        }
        store(din + i, v);
    }
}

/* blockIdx.y goes over rows, blockIdx.x over their columns; in is (rows, 2 inner). */
template <typename T, int N>
__global__ void __launch_bounds__(MLP_THREADS)
    swiglu_forward(T *out, const T *in, size_t rows, size_t inner)
{
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    for (size_t r = blockIdx.y; r < rows && i < inner; r += gridDim.y) {
        float gate[N], up[N];
        load(gate, in + r * 2 * inner + i);
        load(up, in + r * 2 * inner + inner + i);
        for (int j = 0; j < N; j++) {
            gate[j] = gate[j] * sigmoid(gate[j]) * up[j];
        }
        store(out + r * inner + i, gate);
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(MLP_THREADS)
    swiglu_backward(T *din, const T *dout, const T *in, size_t rows, size_t inner)
{
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    for (size_t r = blockIdx.y; r < rows && i < inner; r += gridDim.y) {
        float gate[N], up[N], d[N];
        load(gate, in + r * 2 * inner + i);
        load(up, in + r * 2 * inner + inner + i);
        load(d, dout + r * inner + i);
        for (int j = 0; j < N; j++) {
            float rest;
            const float s = sigmoid_and_rest(gate[j], &rest);
            const float dgate = d[j] * up[j] * (s * __fmaf_rn(gate[j], rest, 1.0f));
            up[j] = d[j] * gate[j] * s;
            gate[j] = dgate;
        }
        store(din + r * 2 * inner + i, gate);
        store(din + r * 2 * inner + inner + i, up);
    }
}

/* The two passes in one form: dout is NULL in the forward pass. */
struct activation_call {
    enum activation_kind kind;
    void *out;
    const void *dout, *in;
    size_t rows, inner;
};

template <typename T, int N>
static void launch_gelu(cudaStream_t stream, const struct activation_call *a)
{
    const size_t n = a->rows * a->inner, per_block = (size_t)MLP_THREADS * N;
    const dim3 grid(blocks_x((n + per_block - 1) / per_block));
    if (a->dout == NULL) {
        LAUNCH((gelu_forward<T, N>), grid, dim3(MLP_THREADS), 0, stream, (T *)a->out,
               (const T *)a->in, n);
    } else {
        LAUNCH((gelu_backward<T, N>), grid, dim3(MLP_THREADS), 0, stream, (T *)a->out,
               (const T *)a->dout, (const T *)a->in, n);
    }
}

template <typename T, int N>
static void launch_swiglu(cudaStream_t stream, const struct activation_call *a)
{
    const size_t items = (a->inner + N - 1) / N;
    const unsigned threads = block_threads(items, MLP_THREADS);
    const dim3 grid(blocks_x((items + threads - 1) / threads), blocks_y(a->rows));
    if (a->dout == NULL) {
        LAUNCH((swiglu_forward<T, N>), grid, dim3(threads), 0, stream, (T *)a->out,
               (const T *)a->in, a->rows, a->inner);
    } else {
        LAUNCH((swiglu_backward<T, N>), grid, dim3(threads), 0, stream, (T *)a->out,
               (const T *)a->dout, (const T *)a->in, a->rows, a->inner);
    }
}

template <typename T> static void choose(cudaStream_t stream, const struct activation_call *a)
{
    const bool gelu = a->kind == ACTIVATION_GELU;
    const bool packs = in_packs<T>(gelu ? a->rows * a->inner : a->inner, a->out, a->dout, a->in);
    if (gelu && packs) {
        launch_gelu<T, PACK<T>>(stream, a);
    } else if (gelu) {
        launch_gelu<T, 1>(stream, a);
    } else if (packs) {
        launch_swiglu<T, PACK<T>>(stream, a);
    } else {
        launch_swiglu<T, 1>(stream, a);
    }
}

static void activate(cudaStream_t stream, enum dtype dtype, const struct activation_call *a)
{
    if (a->rows == 0 || a->inner == 0) {
        return;
    }
    if (dtype == DTYPE_BF16) {
        choose<bf16>(stream, a);
    } else {
        choose<float>(stream, a);
    }
}

void cuda_launch_activation_forward(cudaStream_t stream, const struct cuda_activation_forward *args)
{
    const struct activation_call a = {args->kind, args->out,  NULL,
                                      args->in,   args->rows, args->inner};
    activate(stream, args->dtype, &a);
}

void cuda_launch_activation_backward(cudaStream_t stream,
                                     const struct cuda_activation_backward *args)
{
    const struct activation_call a = {args->kind, args->din,  args->dout,
                                      args->in,   args->rows, args->inner};
    activate(stream, args->dtype, &a);
}
