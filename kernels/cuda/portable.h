/* What a kernel's source is written with. The only place that knows which compiler it is.
 *
 * Under nvcc these are CUDA's own things; any other C++17 compiler gets them from
 * kernels/cuda/emulate/fibres.h, which runs a block's threads as fibres on the CPU. Include
 * this first in a .cu file.
 *
 * How kernels are written
 * - `static __global__ void kernel(...)`, and `static __device__ __forceinline__` for the
 *   functions they call. UNROLL before a loop unrolls it, UNROLL_BY(n) n-fold.
 * - `LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...)`. Arguments are evaluated
 *   and copied by the call. A kernel with a comma in its template arguments goes in parentheses:
 *   LAUNCH((kernel<bf16, 64>), ...). Grid, block and arguments are those CUDA takes: an empty
 *   grid is an error.
 * - `DYNAMIC_SHARED(type, name)` declares `type *name`, 16-byte aligned; undefined at first.
 * - No PTX and no compiler test outside this file: an instruction that has no intrinsic is one
 *   function here, with a twin in emulate/fibres.h.
 * - Arithmetic whose bits are specified uses __fmaf_rn, __fadd_rn and so on, which nvcc never
 *   contracts. */
#ifndef BALLAST_KERNELS_CUDA_PORTABLE_H
#define BALLAST_KERNELS_CUDA_PORTABLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define PORTABLE_PRAGMA(text) _Pragma(#text)
#define UNROLL PORTABLE_PRAGMA(unroll)
#define UNROLL_BY(n) PORTABLE_PRAGMA(unroll n)

/* More than 48 KiB of shared memory has to be asked for. */
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                     \
    do {                                                                                           \
        if ((shared_bytes) > 48u * 1024u) {                                                        \
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,              \
                                 (int)(shared_bytes));                                             \
        }                                                                                          \
        kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__);                        \
    } while (0)

#define DYNAMIC_SHARED(type, name)                                                                 \
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];                          \
    type *name = reinterpret_cast<type *>(dynamic_shared_bytes)

/* The address within shared memory that PTX takes. */
static __device__ __forceinline__ uint32_t shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* d(16,8) += a(16,16) b(16,8), fp32 sums of bf16 products. Of lane l, with g = l/4, t = l%4:
 * a[0] row g, columns 2t and 2t+1; a[1] row g+8; a[2], a[3] the same with columns + 8.
 * b[0] rows 2t and 2t+1, column g; b[1] rows + 8.
 * d[0], d[1] row g, columns 2t and 2t+1; d[2], d[3] row g+8.
 * The lower half of a register is the lower column of a, or row of b. */
static __device__ __forceinline__ void mma_m16n8k16_bf16(float d[4], const uint32_t a[4],
                                                         const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Load 8x8 matrices of 2-byte elements from shared memory. Lane 8i+j gives the address of row j
 * of matrix i, 16-byte aligned; lane l gets of each matrix row l/4, columns 2(l%4) and +1.
 * _trans: column l/4, rows 2(l%4) and +1. x2 reads the addresses of lanes 0 to 15. */
static __device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix_x2(uint32_t r[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix_x2_trans(uint32_t r[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

/* Copy 16 bytes from global to shared memory, both 16-byte aligned, past the first cache.
 * The data are there after a cp_async_wait, for the thread that copied; others need a barrier
 * after that wait. */
static __device__ __forceinline__ void cp_async16(void *shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                 "l"(global)
                 : "memory");
}

/* Where not valid, `global` is not read and zeros are written; it is 16-byte aligned all the
 * same. */
static __device__ __forceinline__ void cp_async16_zfill(void *shared, const void *global,
                                                        bool valid)
{
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
}

/* What this thread copied since the last commit is a group, even when that is nothing. */
static __device__ __forceinline__ void cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Wait until at most the N_PENDING newest groups of this thread are in flight. */
template <int N_PENDING> static __device__ __forceinline__ void cp_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N_PENDING) : "memory");
}

#else
#include "kernels/cuda/emulate/fibres.h"
#define UNROLL
#define UNROLL_BY(n)
#endif

/* ---- bf16: a storage type, the upper half of an fp32 ---- */
struct bf16 {
    uint16_t bits;
};

static __device__ __forceinline__ float bf16_to_float(bf16 x)
{
    return __uint_as_float((uint32_t)x.bits << 16);
}

/* Rounded to nearest, ties to even; NaN becomes 0x7FFF, as the processor's conversion has it. */
static __device__ __forceinline__ bf16 float_to_bf16(float x)
{
#ifdef __CUDACC__
    return bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return bf16{0x7FFF};
    }
    return bf16{(uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
#endif
}

/* Two at once, `low` in the lower half: an operand register of mma. */
static __device__ __forceinline__ uint32_t floats_to_bf16x2(float low, float high)
{
#ifdef __CUDACC__
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return (uint32_t)__bfloat16_as_ushort(pair.y) << 16 | __bfloat16_as_ushort(pair.x);
#else
    return (uint32_t)float_to_bf16(high).bits << 16 | float_to_bf16(low).bits;
#endif
}

static __device__ __forceinline__ float2 bf16x2_to_floats(uint32_t pair)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

/* The same for both types, for kernels that are templates of the type. */
static __device__ __forceinline__ float to_float(float x)
{
    return x;
}

static __device__ __forceinline__ float to_float(bf16 x)
{
    return bf16_to_float(x);
}

static __device__ __forceinline__ void store_float(float *to, float x)
{
    *to = x;
}

static __device__ __forceinline__ void store_float(bf16 *to, float x)
{
    *to = float_to_bf16(x);
}

/* kernels/philox.h is C for all devices; its functions become ones for both sides here. */
#ifdef __CUDACC__
#define inline __host__ __device__ inline
#include "kernels/philox.h"
#undef inline
#else
#include "kernels/philox.h"
#endif

#endif
