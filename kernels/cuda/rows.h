/* What the kernels that go by rows or by elements share: 16-byte access, sums over a warp and a
 * block, the shapes of launches. Header only.
 *
 * A kernel here is a template of T, the type of its activations (float or bf16), and of N, the
 * elements that a thread handles side by side: a pack, 16 bytes in one access, where the rows'
 * length and the addresses allow it, else 1. All arithmetic is in fp32. */
#ifndef BALLAST_KERNELS_CUDA_ROWS_H
#define BALLAST_KERNELS_CUDA_ROWS_H

#include "kernels/cuda/portable.h"

enum { WARP_LANES = 32 };
constexpr size_t PACK_BYTES = 16;

/* Elements of a pack. */
template <typename T> constexpr int PACK = (int)(PACK_BYTES / sizeof(T));

/* N elements that are read and written in one access; in two where they are 32 bytes. */
template <typename T, int N>
struct alignas(N * sizeof(T) < PACK_BYTES ? N * sizeof(T) : PACK_BYTES) pack {
    T value[N];
};

template <typename T, int N>
static __device__ __forceinline__ void load(float (&out)[N], const T *from)
{
    const pack<T, N> whole = *reinterpret_cast<const pack<T, N> *>(from);
    for (int i = 0; i < N; i++) {
        out[i] = to_float(whole.value[i]);
    }
}

template <typename T, int N>
static __device__ __forceinline__ void store(T *to, const float (&value)[N])
{
    pack<T, N> whole;
    for (int i = 0; i < N; i++) {
        store_float(&whole.value[i], value[i]);
    }
    *reinterpret_cast<pack<T, N> *>(to) = whole;
}

template <int N> static __device__ __forceinline__ void set(float (&out)[N], float value)
{
    for (int i = 0; i < N; i++) {
        out[i] = value;
    }
}

/* The warp's sum and greatest, the same bits in every lane. */
static __device__ __forceinline__ float warp_sum(float value)
{
    for (int step = WARP_LANES / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
    }
    return value;
}

static __device__ __forceinline__ float warp_greatest(float value)
{
    for (int step = WARP_LANES / 2; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
    }
    return value;
}

/* K sums over a block of whole warps, the same bits in every thread. */
template <int K> static __device__ __forceinline__ void block_sum(float (&value)[K])
{
    __shared__ float of_warp[K][WARP_LANES];
    const unsigned lane = threadIdx.x % WARP_LANES, n_warps = blockDim.x / WARP_LANES;
    for (int k = 0; k < K; k++) {
        value[k] = warp_sum(value[k]);
    }
    if (n_warps == 1) {
        return;
    }
    __syncthreads(); /* who reads an earlier call's sums has done so */
    if (lane == 0) {
        for (int k = 0; k < K; k++) {
            of_warp[k][threadIdx.x / WARP_LANES] = value[k];
        }
    }
    __syncthreads();
    for (int k = 0; k < K; k++) {
        value[k] = warp_sum(lane < n_warps ? of_warp[k][lane] : 0.0f);
    }
}

static __device__ __forceinline__ float block_sum(float value)
{
    float one[1] = {value};
    block_sum(one);
    return one[0];
}

/* The greatest of a block of whole warps; not-a-number is passed over. */
static __device__ __forceinline__ float block_greatest(float value)
{
    __shared__ float of_warp[WARP_LANES];
    const unsigned lane = threadIdx.x % WARP_LANES, n_warps = blockDim.x / WARP_LANES;
    value = warp_greatest(value);
    if (n_warps == 1) {
        return value;
    }
    __syncthreads();
    if (lane == 0) {
        of_warp[threadIdx.x / WARP_LANES] = value;
    }
    __syncthreads();
    return warp_greatest(lane < n_warps ? of_warp[lane] : -INFINITY);
}

/* Whether rows of `width` elements of T at these addresses (NULL: none) are whole packs. */
template <typename T>
static inline bool in_packs(size_t width, const void *a, const void *b = NULL, const void *c = NULL,
                            const void *d = NULL)
{
    const uintptr_t address = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d;
    return width % PACK<T> == 0 && address % PACK_BYTES == 0;
}

/* Threads of a block, whole warps, for so many things to do: no more than `most`. */
static inline unsigned block_threads(size_t n, unsigned most)
{
    const size_t whole = (n / WARP_LANES + (n % WARP_LANES != 0 || n == 0)) * WARP_LANES;
    return (unsigned)(whole > most ? most : whole);
}

/* Blocks along x and y of a grid. What is left beyond a limit, the kernel's loop over the grid
 * does. */
static inline unsigned blocks_x(size_t n)
{
    const size_t most = (size_t)1 << 30;
    return (unsigned)(n < most ? n : most);
}

static inline unsigned blocks_y(size_t n)
{
    const size_t most = 65535;
    return (unsigned)(n < most ? n : most);
}

#endif
