/* Operands of kernels in their compute type, and how near a result has to be. For tests of kernels
 * against the CPU device in fp32. Header only.
 *
 * A kernel computes in fp32 and rounds what it stores once. Given the same (rounded) inputs, a bf16
 * result is therefore within half a unit of bf16's last place of the fp32 result, 2^-8 of its
 * value, besides what two fp32 computations differ by. */
#ifndef BALLAST_TESTS_CUDA_LIB_TYPED_H
#define BALLAST_TESTS_CUDA_LIB_TYPED_H

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/ops.h"

/* What a test is run in, one after the other: results depend on none of these. */
static const char *const typed_orders[] = {"forward", "forward", "reverse", "12345"};
enum { TYPED_ORDERS = sizeof typed_orders / sizeof *typed_orders };

static inline void typed_order(size_t which)
{
    setenv("BALLAST_FIBRES_ORDER", typed_orders[which], 1);
}

/* Nearest, ties to even: adding half of the last place kept carries into it. */
static inline uint16_t typed_round(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (isnan(value)) {
        return 0x7FFF;
    }
    const uint32_t rest = bits & 0xFFFFu, odd = bits >> 16 & 1u;
    return (uint16_t)((bits >> 16) + (rest > 0x8000u || (rest == 0x8000u && odd)));
}

static inline float typed_widen_one(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline size_t typed_bytes(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? 2 : 4;
}

/* The values in the type, `skew` elements into memory of their own (16-byte aligned for skew
 * 0). The type's rounding is also done to `values`, so that the CPU is given the same numbers.
 * Freed by typed_free with the same skew. */
static inline void *typed_new_skew(enum dtype dtype, float *values, size_t n, size_t skew)
{
    const size_t bytes = typed_bytes(dtype);
    char *memory = malloc((n + skew) * bytes + (n + skew == 0));
    assert(memory);
    char *data = memory + skew * bytes;
    for (size_t i = 0; i < n; i++) {
        if (dtype == DTYPE_BF16) {
            const uint16_t half = typed_round(values[i]);
            memcpy(data + i * bytes, &half, bytes);
            values[i] = typed_widen_one(half);
        } else {
            memcpy(data + i * bytes, &values[i], bytes);
        }
    }
    return data;
}

static inline void *typed_new(enum dtype dtype, float *values, size_t n)
{
    return typed_new_skew(dtype, values, n, 0);
}

static inline void typed_free_skew(enum dtype dtype, void *data, size_t skew)
{
    free((char *)data - skew * typed_bytes(dtype));
}

static inline float typed_get(enum dtype dtype, const void *data, size_t i)
{
    if (dtype == DTYPE_BF16) {
        return typed_widen_one(((const uint16_t *)data)[i]);
    }
    return ((const float *)data)[i];
}

/* Whether every element is `want` to within its type's rounding and `tolerance` of the greatest
 * |want|; prints the first one that is not. */
static inline bool typed_close(const char *what, enum dtype dtype, const void *got,
                               const float *want, size_t n, double tolerance)
{
    double most = 0.0;
    for (size_t i = 0; i < n; i++) {
        most = fmax(most, fabs((double)want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        const double value = (double)typed_get(dtype, got, i), right = (double)want[i];
        const double rounding = dtype == DTYPE_BF16 ? fabs(right) * 0x1p-8 : 0.0;
        if (!(fabs(value - right) <= rounding + tolerance * most)) {
            printf("%s, %s: element %zu of %zu is %.9g, not %.9g (greatest %g)\n", what,
                   dtype == DTYPE_BF16 ? "bf16" : "fp32", i, n, value, right, most);
            return false;
        }
    }
    return true;
}

/* Whether every element is `want`, rounded to the type, bit for bit. */
static inline bool typed_exact(const char *what, enum dtype dtype, const void *got,
                               const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const float right = dtype == DTYPE_BF16 ? typed_widen_one(typed_round(want[i])) : want[i];
        const float value = typed_get(dtype, got, i);
        if (memcmp(&value, &right, sizeof value) != 0) {
            printf("%s, %s: element %zu of %zu is %.9g, not %.9g\n", what,
                   dtype == DTYPE_BF16 ? "bf16" : "fp32", i, n, (double)value, (double)right);
            return false;
        }
    }
    return true;
}

/* Keeps `bytes` of the first run, compares those of later ones. */
static inline bool typed_same(void **kept, const void *data, size_t bytes)
{
    if (*kept == NULL) {
        *kept = malloc(bytes);
        assert(*kept);
        memcpy(*kept, data, bytes);
        return true;
    }
    return memcmp(*kept, data, bytes) == 0;
}

#endif
