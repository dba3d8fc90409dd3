/* Cross-entropy, a block for each row of logits. One pass finds the greatest and the sum of the
 * exponentials together (Milakov and Gimelshein, 2018, "Online normalizer calculation for
 * softmax"), a second one writes the gradient in place. Owns nothing.
 *
 * A vocabulary need not be a multiple of anything, so each row begins at another place within 16
 * bytes: elements before and after the row's whole packs go one by one. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.h"

enum { LOSS_THREADS = 1024 };

/* Of the logits seen: the greatest, and the sum of exp(x - greatest). */
struct running {
    float greatest, sum;
};

/* exp(x - greatest); as long as everything seen is -infinity, exp(x). */
static __device__ __forceinline__ float above(float x, float greatest)
{
    return expf(greatest == -INFINITY ? x : x - greatest);
}

template <int N>
static __device__ __forceinline__ void see(struct running *running, const float (&v)[N])
{
    float greatest = v[0];
    for (int j = 1; j < N; j++) {
        greatest = fmaxf(greatest, v[j]);
    }
    if (greatest > running->greatest) {
        running->sum *= expf(running->greatest - greatest);
        running->greatest = greatest;
    }
    for (int j = 0; j < N; j++) {
        running->sum += above(v[j], running->greatest);
    }
}

/* How a row lies: `head` single elements, whole packs, then single elements from `tail` on. */
struct row_parts {
    size_t head, tail, n_single;
};

template <typename T>
static __device__ __forceinline__ struct row_parts parts_of(const T *x, size_t vocab)
{
    const size_t past = (uintptr_t)x % PACK_BYTES / sizeof(T);
    const size_t to_pack = past == 0 ? 0 : PACK<T> - past;
    struct row_parts parts;
    parts.head = to_pack < vocab ? to_pack : vocab;
    parts.tail = parts.head + (vocab - parts.head) / PACK<T> * PACK<T>;
    parts.n_single = parts.head + (vocab - parts.tail);
    return parts;
}

/* The single element that thread t < n_single takes. */
static __device__ __forceinline__ size_t single(const struct row_parts *parts, size_t t)
{
    return t < parts->head ? t : parts->tail + (t - parts->head);
}

template <typename T>
static __device__ __forceinline__ struct running see_row(const T *x, const struct row_parts *parts)
{
    struct running running = {-INFINITY, 0.0f};
    if (threadIdx.x < parts->n_single) {
        float v[1];
        load(v, x + single(parts, threadIdx.x));
        see(&running, v);
    }
    for (size_t i = parts->head + (size_t)threadIdx.x * PACK<T>; i < parts->tail;
         i += (size_t)blockDim.x * PACK<T>) {
        float v[PACK<T>];
        load(v, x + i);
        see(&running, v);
    }
    const float greatest = block_greatest(running.greatest);
    if (running.greatest != greatest) {
        running.sum *= expf(running.greatest - greatest);
    }
    running.sum = block_sum(running.sum);
    running.greatest = greatest;
    return running;
}

/* x = scale exp(x - greatest), less grad_scale at the label, for N elements from i on. */
template <typename T, int N>
static __device__ __forceinline__ void write_gradient(T *x, size_t i, float greatest, float scale,
                                                      size_t label, float grad_scale)
{
    float v[N];
    load(v, x + i);
    for (int j = 0; j < N; j++) {
        v[j] = __fmul_rn(expf(v[j] - greatest), scale);
        if (i + (size_t)j == label) {
            v[j] -= grad_scale;
        }
    }
    store(x + i, v);
}

template <typename T>
static __device__ __forceinline__ void clear_row(T *x, const struct row_parts *parts)
{
    float zero[PACK<T>], one[1] = {0.0f};
    set(zero, 0.0f);
    if (threadIdx.x < parts->n_single) {
        store(x + single(parts, threadIdx.x), one);
    }
    for (size_t i = parts->head + (size_t)threadIdx.x * PACK<T>; i < parts->tail;
         i += (size_t)blockDim.x * PACK<T>) {
        store(x + i, zero);
    }
}

template <typename T>
__global__ void __launch_bounds__(LOSS_THREADS) cross_entropy_rows(struct cuda_cross_entropy c)
{
    for (size_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        T *x = (T *)c.logits + r * c.vocab;
        const struct row_parts parts = parts_of(x, c.vocab);
        const int32_t label = c.labels[r];
        if (label < 0) {
            if (threadIdx.x == 0) {
                c.losses[r] = 0.0f;
            }
            if (c.with_gradient) {
                clear_row(x, &parts);
            }
            continue;
        }
        const float target = to_float(x[label]); /* before anyone overwrites it */
        const struct running all = see_row(x, &parts);
        if (threadIdx.x == 0) {
            c.losses[r] = logf(all.sum) + (all.greatest - target);
        }
        if (!c.with_gradient) {
            continue;
        }
        __syncthreads(); /* a block of one warp has met no barrier yet */
        const float scale = c.grad_scale / all.sum;
        if (threadIdx.x < parts.n_single) {
            write_gradient<T, 1>(x, single(&parts, threadIdx.x), all.greatest, scale, (size_t)label,
                                 c.grad_scale);
        }
        for (size_t i = parts.head + (size_t)threadIdx.x * PACK<T>; i < parts.tail;
             i += (size_t)blockDim.x * PACK<T>) {
            write_gradient<T, PACK<T>>(x, i, all.greatest, scale, (size_t)label, c.grad_scale);
        }
    }
}

template <typename T> static void launch(cudaStream_t stream, const struct cuda_cross_entropy *args)
{
    const unsigned threads = block_threads(args->vocab / PACK<T>, LOSS_THREADS);
    LAUNCH((cross_entropy_rows<T>), dim3(blocks_x(args->rows)), dim3(threads), 0, stream, *args);
}

void cuda_launch_cross_entropy(cudaStream_t stream, const struct cuda_cross_entropy *args)
{
    if (args->rows == 0) {
        return;
    }
    if (args->dtype == DTYPE_BF16) {
        launch<bf16>(stream, args);
    } else {
        launch<float>(stream, args);
    }
}
