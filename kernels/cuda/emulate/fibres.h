/* A GPU's thread blocks on the CPU, for compilers other than nvcc. Included by
 * kernels/cuda/portable.h alone.
 *
 * Every thread of a block is a fibre. Blocks run one after the other on the thread that calls
 * fibre_run; a fibre runs until it reaches a barrier or an operation of its warp, so any
 * order of threads that the barriers allow is a run of the kernel. BALLAST_FIBRES_ORDER
 * chooses it: forward (also when unset), reverse, or a number that seeds a random order. What
 * depends on the order is a race.
 *
 * What a GPU leaves undefined ends the process: the kernel, the block, the thread and the
 * reason are printed, then abort(). This covers threads that do not meet at a barrier or in a warp
 * operation, lanes read that take no part, misaligned asynchronous copies and matrix rows,
 * and launches no GPU would take. Dynamic shared memory begins as NaN in every block; what
 * cp.async writes is NaN until the latest moment at which the wait allows it to be.
 *
 * Not modelled: the memory model inside a warp operation, bank conflicts, registers, clusters.
 * `__shared__` variables keep the last block's values at the start of a block; they are not
 * NaN. Matrix products add in the order of k, each sum rounded to fp32; a GPU rounds less
 * often and in an order of its own. */
#ifndef BALLAST_KERNELS_CUDA_EMULATE_FIBRES_H
#define BALLAST_KERNELS_CUDA_EMULATE_FIBRES_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>
#include "kernels/cuda/emulate/enqueue.h"

/* ---- qualifiers ---- */
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static thread_local /* the fibres of a block share a thread */
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

/* ---- vector types ---- */
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz)
    {
    }
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z)
    {
    }
};

#define FIBRE_VECTOR_2(name, type, bytes)                                                          \
    struct __align__(bytes) name                                                                   \
    {                                                                                              \
        type x, y;                                                                                 \
    };                                                                                             \
    static inline name make_##name(type x, type y)                                                 \
    {                                                                                              \
        return name{x, y};                                                                         \
    }
#define FIBRE_VECTOR_4(name, type, bytes)                                                          \
    struct __align__(bytes) name                                                                   \
    {                                                                                              \
        type x, y, z, w;                                                                           \
    };                                                                                             \
    static inline name make_##name(type x, type y, type z, type w)                                 \
    {                                                                                              \
        return name{x, y, z, w};                                                                   \
    }
FIBRE_VECTOR_2(float2, float, 8)
FIBRE_VECTOR_2(int2, int, 8)
FIBRE_VECTOR_2(uint2, unsigned, 8)
FIBRE_VECTOR_2(double2, double, 16)
FIBRE_VECTOR_4(float4, float, 16)
FIBRE_VECTOR_4(int4, int, 16)
FIBRE_VECTOR_4(uint4, unsigned, 16)
FIBRE_VECTOR_4(ushort4, unsigned short, 8)
#undef FIBRE_VECTOR_2
#undef FIBRE_VECTOR_4

extern __thread struct uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

/* ---- launching ---- */
struct fibre_launch {
    const char *name; /* the kernel's */
    struct uint3 grid, block;
    size_t shared_bytes;
};

/* Ends the process where CUDA would refuse the launch. */
void fibre_check_launch(const struct fibre_launch *launch);
/* Run the whole grid; thread(closure) is the body of each thread. */
void fibre_run(const struct fibre_launch *launch, void (*thread)(const void *closure),
               const void *closure);
/* Print kernel, block, thread and the text; abort. */
[[noreturn]] void fibre_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A kernel's arguments, by value, in an object that may be copied byte by byte. */
template <class... P> struct fibre_arguments {
};
template <class Head, class... Tail> struct fibre_arguments<Head, Tail...> {
    Head head;
    fibre_arguments<Tail...> tail;
};

static inline fibre_arguments<> fibre_pack()
{
    return {};
}

template <class Head, class... Tail>
fibre_arguments<Head, Tail...> fibre_pack(Head head, Tail... tail)
{
    return {head, fibre_pack(tail...)};
}

template <class... P, class... Unpacked>
void fibre_call(void (*kernel)(P...), const fibre_arguments<> &, const Unpacked &...unpacked)
{
    kernel(unpacked...);
}

template <class... P, class Head, class... Tail, class... Unpacked>
void fibre_call(void (*kernel)(P...), const fibre_arguments<Head, Tail...> &left,
                const Unpacked &...unpacked)
{
    fibre_call(kernel, left.tail, unpacked..., left.head);
}

template <class... P> struct fibre_closure {
    struct fibre_launch launch;
    void (*kernel)(P...);
    fibre_arguments<P...> arguments;
};

template <class... P> void fibre_thread(const void *closure)
{
    const auto *c = static_cast<const fibre_closure<P...> *>(closure);
    fibre_call(c->kernel, c->arguments);
}

template <class... P> void fibre_run_closure(void *closure)
{
    fibre_run(&static_cast<fibre_closure<P...> *>(closure)->launch, fibre_thread<P...>, closure);
}

template <class... P, class... A>
void fibre_enqueue(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream, A... arguments)
{
    static_assert(sizeof...(P) == sizeof...(A), "a kernel is launched with all its arguments");
    static_assert((std::is_trivially_copyable<P>::value && ...), "arguments are copied as bytes");
    static_assert((sizeof(P) + ... + 0) <= 4096, "CUDA takes 4 KiB of arguments");
    const fibre_closure<P...> closure = {
        {name, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes},
        kernel,
        fibre_pack(static_cast<P>(arguments)...)};
    fibre_check_launch(&closure.launch);
    emulate_enqueue(stream, name, fibre_run_closure<P...>, &closure, sizeof closure);
}

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                     \
    fibre_enqueue(#kernel, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

void *fibre_dynamic_shared(void);
#define DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(fibre_dynamic_shared())

/* ---- barriers and operations of a warp ---- */
/* Where in the source a thread waits, for messages. */
struct fibre_place {
    const char *what, *file;
    int line;
};

/* What a lane brings to an operation of its warp, and takes away from it. */
struct fibre_warp_call {
    struct fibre_place place;
    uint32_t mask;     /* lanes that take part */
    bool aligned;      /* all of a full warp, at the same place */
    int lane, source;  /* source: whose value a shuffle asks for */
    size_t bytes;      /* of the shuffled value */
    uint32_t value[4]; /* in and out */
    const void *row;   /* ldmatrix: this lane's row */
    const uint32_t *a, *b;
    float *d;    /* mma: in and out */
    uint32_t *r; /* ldmatrix: out */
    /* Does the operation for all lanes: calls[i] is lane i's, NULL where it takes no part. */
    void (*perform)(struct fibre_warp_call *const calls[32]);
};

int fibre_lane(void);
void fibre_sync_block(struct fibre_place place);
void fibre_sync_warp(struct fibre_warp_call *call);
void fibre_perform_nothing(struct fibre_warp_call *const calls[32]);
void fibre_perform_shuffle(struct fibre_warp_call *const calls[32]);
void fibre_perform_ballot(struct fibre_warp_call *const calls[32]);

#define FIBRE_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

static inline void __syncthreads(FIBRE_PLACE)
{
    fibre_sync_block({"__syncthreads", file, line});
}

static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, FIBRE_PLACE)
{
    struct fibre_warp_call call = {};
    call.place = {"__syncwarp", file, line};
    call.mask = mask;
    call.perform = fibre_perform_nothing;
    fibre_sync_warp(&call);
}

template <class T> T fibre_shuffle(unsigned mask, T value, int source, struct fibre_place place)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 or 8 bytes");
    struct fibre_warp_call call = {};
    call.place = place;
    call.mask = mask;
    call.source = source;
    call.bytes = sizeof value;
    memcpy(call.value, &value, sizeof value);
    call.perform = fibre_perform_shuffle;
    fibre_sync_warp(&call);
    memcpy(&value, call.value, sizeof value);
    return value;
}

/* A source outside the lane's group of `width` lanes leaves the lane its own value, but for
 * __shfl_sync, which counts modulo the width; as PTX says of shfl.sync. */
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, FIBRE_PLACE)
{
    const int lane = fibre_lane(), base = lane & ~(width - 1);
    return fibre_shuffle(mask, value, base | (source & (width - 1)), {"__shfl_sync", file, line});
}

template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, FIBRE_PLACE)
{
    const int lane = fibre_lane(), source = lane ^ bits, last = lane | (width - 1);
    return fibre_shuffle(mask, value, source <= last ? source : lane,
                         {"__shfl_xor_sync", file, line});
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, FIBRE_PLACE)
{
    const int lane = fibre_lane(), source = lane + (int)by, last = lane | (width - 1);
    return fibre_shuffle(mask, value, source <= last ? source : lane,
                         {"__shfl_down_sync", file, line});
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, FIBRE_PLACE)
{
    const int lane = fibre_lane(), source = lane - (int)by, first = lane & ~(width - 1);
    return fibre_shuffle(mask, value, source >= first ? source : lane,
                         {"__shfl_up_sync", file, line});
}

static inline unsigned fibre_ballot(unsigned mask, int predicate, struct fibre_place place)
{
    struct fibre_warp_call call = {};
    call.place = place;
    call.mask = mask;
    call.value[0] = predicate != 0;
    call.perform = fibre_perform_ballot;
    fibre_sync_warp(&call);
    return call.value[0];
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, FIBRE_PLACE)
{
    return fibre_ballot(mask, predicate, {"__ballot_sync", file, line});
}

static inline int __any_sync(unsigned mask, int predicate, FIBRE_PLACE)
{
    return fibre_ballot(mask, predicate, {"__any_sync", file, line}) != 0;
}

static inline int __all_sync(unsigned mask, int predicate, FIBRE_PLACE)
{
    return fibre_ballot(mask, predicate == 0, {"__all_sync", file, line}) == 0;
}

/* ---- the twins of PTX instructions: see kernels/cuda/portable.h ---- */
void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], FIBRE_PLACE);
void ldmatrix_x2(uint32_t r[2], const void *row, FIBRE_PLACE);
void ldmatrix_x4(uint32_t r[4], const void *row, FIBRE_PLACE);
void ldmatrix_x2_trans(uint32_t r[2], const void *row, FIBRE_PLACE);
void ldmatrix_x4_trans(uint32_t r[4], const void *row, FIBRE_PLACE);
void cp_async16_zfill(void *shared, const void *global, bool valid, FIBRE_PLACE);
void cp_async_commit(void);
void fibre_copies_wait(int n_pending);

static inline void cp_async16(void *shared, const void *global, FIBRE_PLACE)
{
    cp_async16_zfill(shared, global, true, file, line);
}

template <int N_PENDING> void cp_async_wait(void)
{
    static_assert(N_PENDING >= 0, "groups that may still be in flight");
    fibre_copies_wait(N_PENDING);
}

#undef FIBRE_PLACE

/* ---- arithmetic: compile with -ffp-contract=off ---- */
#define FIBRE_FUNCTION(type, name, parameters, value)                                              \
    static inline type name parameters                                                             \
    {                                                                                              \
        return value;                                                                              \
    }
FIBRE_FUNCTION(float, __fadd_rn, (float a, float b), a + b)
FIBRE_FUNCTION(float, __fsub_rn, (float a, float b), a - b)
FIBRE_FUNCTION(float, __fmul_rn, (float a, float b), a *b)
FIBRE_FUNCTION(float, __fdiv_rn, (float a, float b), a / b)
FIBRE_FUNCTION(float, __fsqrt_rn, (float a), sqrtf(a))
FIBRE_FUNCTION(float, __frcp_rn, (float a), 1.0f / a)
FIBRE_FUNCTION(float, __fmaf_rn, (float a, float b, float c), fmaf(a, b, c))
FIBRE_FUNCTION(double, __dadd_rn, (double a, double b), a + b)
FIBRE_FUNCTION(double, __dmul_rn, (double a, double b), a *b)
FIBRE_FUNCTION(double, __ddiv_rn, (double a, double b), a / b)
FIBRE_FUNCTION(double, __fma_rn, (double a, double b, double c), fma(a, b, c))
FIBRE_FUNCTION(float, rsqrtf, (float a), 1.0f / sqrtf(a))
FIBRE_FUNCTION(float, __fdividef, (float a, float b), a / b)
FIBRE_FUNCTION(int, __popc, (unsigned a), __builtin_popcount(a))
FIBRE_FUNCTION(int, __ffs, (int a), __builtin_ffs(a))
FIBRE_FUNCTION(int, __clz, (int a), a == 0 ? 32 : __builtin_clz((unsigned)a))
FIBRE_FUNCTION(unsigned, __umulhi, (unsigned a, unsigned b), (unsigned)((uint64_t)a *b >> 32))
#undef FIBRE_FUNCTION
/* glibc has functions of these names. */
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)

template <class To, class From> To fibre_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline float __uint_as_float(unsigned a)
{
    return fibre_bits<float>(a);
}

static inline float __int_as_float(int a)
{
    return fibre_bits<float>(a);
}

static inline unsigned __float_as_uint(float a)
{
    return fibre_bits<unsigned>(a);
}

static inline int __float_as_int(float a)
{
    return fibre_bits<int>(a);
}

template <class T> T min(T a, T b)
{
    return a < b ? a : b;
}

template <class T> T max(T a, T b)
{
    return a > b ? a : b;
}

template <class T> T __ldg(const T *from)
{
    return *from;
}

static inline void __threadfence(void)
{
}

/* Integers only: a sum of floats by atomics has no fixed order. */
template <class T> T atomicAdd(T *to, T value)
{
    static_assert(std::is_integral<T>::value, "no floating-point atomics");
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

template <class T> T atomicMax(T *to, T value)
{
    static_assert(std::is_integral<T>::value, "no floating-point atomics");
    const T old = *to; /* fibres do not interrupt each other */
    *to = old > value ? old : value;
    return old;
}

template <class T> T atomicCAS(T *to, T expected, T value)
{
    static_assert(std::is_integral<T>::value, "no floating-point atomics");
    __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

#endif
