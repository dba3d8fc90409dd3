/* Sixteen fp32 lanes, whatever the instruction set, and the functions on them.
 *
 * Lanes are the unit of every order of summation here, so the values do not depend on the
 * width of the machine's registers. Header only, pure. Included by kernels/cpu/simd/ alone,
 * which is compiled with SIMD_SUFFIX set to the instruction set's name, once as it is and once
 * with SIMD_STORE_BF16: `elem`, what matrices of the compute type hold, is then bf16. Arithmetic
 * is fp32 in both; bf16 is widened when loaded and rounded once when stored. */
#ifndef BALLAST_KERNELS_CPU_SIMD_SIMD_H
#define BALLAST_KERNELS_CPU_SIMD_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#include "kernels/philox.h"

#define SIMD_JOIN2(name, suffix) name##_##suffix
#define SIMD_JOIN(name, suffix) SIMD_JOIN2(name, suffix)
/* The name of a function of this compilation, and the element of its matrices. */
#if defined(SIMD_STORE_BF16)
#define SIMD(name) SIMD_JOIN(SIMD_JOIN(name, SIMD_SUFFIX), bf16)
typedef uint16_t elem;
#else
#define SIMD(name) SIMD_JOIN(name, SIMD_SUFFIX)
typedef float elem;
#endif
#define SIMD_INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));

SIMD_INLINE vec vec_set(float value)
{
    return value - (vec){0};
}

SIMD_INLINE vec vec_load(const float *from)
{
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

SIMD_INLINE void vec_store(float *to, vec value)
{
    memcpy(to, &value, sizeof value);
}

/* The first n lanes, the others `rest`. */
SIMD_INLINE vec vec_load_part(const float *from, size_t n, float rest)
{
    if (n >= LANES)
        return vec_load(from);
    float lanes[LANES];
    for (size_t i = 0; i < LANES; i++)
        lanes[i] = i < n ? from[i] : rest;
    return vec_load(lanes);
}

SIMD_INLINE void vec_store_part(float *to, vec value, size_t n)
{
    if (n >= LANES) {
        vec_store(to, value);
        return;
    }
    float lanes[LANES];
    vec_store(lanes, value);
    for (size_t i = 0; i < n; i++)
        to[i] = lanes[i];
}

#if defined(SIMD_STORE_BF16)
typedef uint16_t narrow_vec __attribute__((vector_size(32)));

SIMD_INLINE vec elem_load(const elem *from)
{
    narrow_vec value;
    memcpy(&value, from, sizeof value);
    return (vec)(__builtin_convertvector(value, uvec) << 16);
}

/* Nearest, ties to even. A value that is not a number stays so, whatever its low bits: its
 * quiet bit is set, since those that are cut off may be the only ones. */
SIMD_INLINE narrow_vec elem_round(vec value)
{
    const uvec bits = (uvec)value;
    const uvec nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const uvec odd = (bits >> 16) | 0x0040;
    const uvec number = (uvec)(value == value);
    return __builtin_convertvector((number & nearest) | (~number & odd), narrow_vec);
}

SIMD_INLINE void elem_store(elem *to, vec value)
{
    const narrow_vec narrow = elem_round(value);
    memcpy(to, &narrow, sizeof narrow);
}

SIMD_INLINE float elem_get(const elem *from)
{
    const uint32_t bits = (uint32_t)*from << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

SIMD_INLINE void elem_set(elem *to, float value)
{
    *to = elem_round(vec_set(value))[0];
}

/* The first n lanes, the others `rest`. */
SIMD_INLINE vec elem_load_part(const elem *from, size_t n, float rest)
{
    if (n >= LANES)
        return elem_load(from);
    float lanes[LANES];
    for (size_t i = 0; i < LANES; i++)
        lanes[i] = i < n ? elem_get(from + i) : rest;
    return vec_load(lanes);
}

SIMD_INLINE void elem_store_part(elem *to, vec value, size_t n)
{
    if (n >= LANES) {
        elem_store(to, value);
        return;
    }
    elem lanes[LANES];
    elem_store(lanes, value);
    for (size_t i = 0; i < n; i++)
        to[i] = lanes[i];
}
#else
SIMD_INLINE vec elem_load(const elem *from)
{
    return vec_load(from);
}

SIMD_INLINE void elem_store(elem *to, vec value)
{
    vec_store(to, value);
}

SIMD_INLINE float elem_get(const elem *from)
{
    return *from;
}

SIMD_INLINE void elem_set(elem *to, float value)
{
    *to = value;
}

SIMD_INLINE vec elem_load_part(const elem *from, size_t n, float rest)
{
    return vec_load_part(from, n, rest);
}

SIMD_INLINE void elem_store_part(elem *to, vec value, size_t n)
{
    vec_store_part(to, value, n);
}
#endif

/* a * b + c, rounded once. */
SIMD_INLINE vec vec_fma(vec a, vec b, vec c)
{
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    union {
        vec whole;
        __m256 half[2];
    } x = {a}, y = {b}, z = {c};
    z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
    z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
    return z.whole;
#else
    for (int i = 0; i < LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Eight fp64 lanes: half a vector, converted. */
typedef float half_vec __attribute__((vector_size(32)));
typedef double dvec __attribute__((vector_size(64)));

SIMD_INLINE dvec dvec_widen(const float *from)
{
    half_vec values;
    memcpy(&values, from, sizeof values);
    return __builtin_convertvector(values, dvec);
}

/* a * b + c, rounded once. */
SIMD_INLINE dvec dvec_fma(dvec a, dvec b, dvec c)
{
#if defined(__AVX512F__)
    return (dvec)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
    for (int i = 0; i < LANES / 2; i++)
        c[i] = fma(a[i], b[i], c[i]);
    return c;
#endif
}

/* Lane by lane: where the mask is set (all ones) a, else b. */
SIMD_INLINE vec vec_select(ivec mask, vec a, vec b)
{
    return (vec)((mask & (ivec)a) | (~mask & (ivec)b));
}

/* The greater; b where either is not a number. */
SIMD_INLINE vec vec_max(vec a, vec b)
{
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return vec_select(a > b, a, b);
#endif
}

/* Sum of the lanes in a fixed tree. */
SIMD_INLINE float vec_sum(vec v)
{
    float lane[LANES];
    vec_store(lane, v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

SIMD_INLINE float vec_greatest(vec v)
{
    float lane[LANES];
    vec_store(lane, v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

/* Sixteen by sixteen, in place: four rounds that swap ever larger squares. */
SIMD_INLINE void vec_transpose(vec r[LANES])
{
    vec t[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26,
                                       12, 28, 14, 30);
        t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11,
                                           27, 13, 29, 15, 31);
    }
#pragma GCC unroll 16
    for (int j = 0; j < 8; j++) {
        const int i = j / 2 * 4 + j % 2;
        r[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12,
                                       13, 28, 29);
        r[i + 2] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26,
                                           27, 14, 15, 30, 31);
    }
#pragma GCC unroll 16
    for (int j = 0; j < 8; j++) {
        const int i = j / 4 * 8 + j % 4;
        t[i] = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24,
                                       25, 26, 27);
        t[i + 4] = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14,
                                           15, 28, 29, 30, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        r[i] = __builtin_shufflevector(t[i], t[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20,
                                       21, 22, 23);
        r[i + 8] = __builtin_shufflevector(t[i], t[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26,
                                           27, 28, 29, 30, 31);
    }
}

/* exp. x = n ln2 + r with |r| <= ln2/2, exp(r) = 1 + r + r^2 P(r), P a minimax polynomial of
 * degree 4 whose error is 7e-9 of exp(r); rounding brings the whole to about 1 ulp. Below -87.3
 * (the smallest normal result) it is 0, above 88.3 infinite; not-a-number stays so. */
SIMD_INLINE vec vec_exp(vec x)
{
    const vec round = vec_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const vec shifted = vec_fma(x, vec_set(1.44269504f), round);
    const vec n = shifted - round;
    vec r = vec_fma(n, vec_set(-0.693145752f), x);
    r = vec_fma(n, vec_set(-1.42860682e-6f), r);
    vec p = vec_fma(r, vec_set(0.00139411131f), vec_set(0.00836317521f));
    p = vec_fma(p, r, vec_set(0.0416663736f));
    p = vec_fma(p, r, vec_set(0.166665763f));
    p = vec_fma(p, r, vec_set(0.5f));
    p = vec_fma(p, r * r, r) + 1.0f;
    /* The rounded integer sits in the low bits of `shifted`; move it into the exponent. */
    p = (vec)((uvec)p + ((uvec)shifted << 23));
    p = vec_select(x < vec_set(-87.3f), vec_set(0.0f), p);
    p = vec_select(x > vec_set(88.3f), vec_set(INFINITY), p);
    return vec_select(x == x, p, x);
}

/* 32 x 32 -> 64 bit products, split in halves. */
SIMD_INLINE void uvec_multiply(uint32_t a, uvec b, uvec *out_high, uvec *out_low)
{
#if defined(__AVX512F__)
    const __m512i factor = _mm512_set1_epi64((int64_t)a);
    const __m512i even = _mm512_mul_epu32((__m512i)b, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)b, 32), factor);
    *out_low = (uvec)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    *out_high = (uvec)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#else
    uint32_t in[LANES], high[LANES], low[LANES];
    memcpy(in, &b, sizeof in);
    for (int i = 0; i < LANES; i++) {
        const uint64_t product = (uint64_t)a * in[i];
        high[i] = (uint32_t)(product >> 32);
        low[i] = (uint32_t)product;
    }
    memcpy(out_high, high, sizeof high);
    memcpy(out_low, low, sizeof low);
#endif
}

/* philox4x32() on sixteen counters at once. */
SIMD_INLINE void uvec_philox(struct philox_key key, uvec c[4])
{
    uint32_t key0 = key.key0, key1 = key.key1;
    for (int round = 0; round < 10; round++) {
        uvec high0, low0, high1, low1;
        uvec_multiply(0xD2511F53u, c[0], &high0, &low0);
        uvec_multiply(0xCD9E8D57u, c[2], &high1, &low1);
        c[0] = high1 ^ c[1] ^ key0;
        c[2] = high0 ^ c[3] ^ key1;
        c[1] = low1;
        c[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

SIMD_INLINE uvec uvec_set(uint32_t value)
{
    return value + (uvec){0};
}

/* 0, 1, 2, ... 15 from `first` on. */
SIMD_INLINE uvec uvec_count(uint32_t first)
{
    const uvec steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return steps + first;
}

/* Lanes of four vectors w[0..3] in the order w[0][0] w[1][0] w[2][0] w[3][0] w[0][1] ... */
SIMD_INLINE void uvec_interleave(const uvec w[4], uint32_t out[4 * LANES])
{
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++)
            out[4 * i + j] = w[j][i];
}

#endif
