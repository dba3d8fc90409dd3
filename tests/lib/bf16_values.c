/* See bf16_values.h. */
#include "tests/lib/bf16_values.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

float bf16_widen(uint16_t value)
{
    const uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* The magnitude of a positive pattern; infinity counts as the power of two it stands for. */
static double magnitude(uint16_t value)
{
    const double wide = (double)bf16_widen(value);
    return isinf(wide) ? 0x1p128 : wide;
}

uint16_t bf16_round(float value)
{
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value))
        return sign | 0x7FC0;
    if (isinf(value))
        return sign | 0x7F80;
    const double exact = fabs((double)value);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    /* Cut off, and the next one: patterns are ordered as their values are. */
    const uint16_t below = (uint16_t)(bits >> 16 & 0x7FFF), above = (uint16_t)(below + 1);
    const double down = exact - magnitude(below), up = magnitude(above) - exact;
    const bool odd = below % 2 == 1;
    return sign | (down < up || (down == up && !odd) ? below : above);
}

uint16_t *bf16_from(const float *values, size_t n)
{
    uint16_t *out = calloc(n ? n : 1, sizeof *out);
    assert(out);
    for (size_t i = 0; i < n; i++)
        out[i] = bf16_round(values[i]);
    return out;
}

void bf16_snap(float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        values[i] = bf16_widen(bf16_round(values[i]));
}

bool bf16_equal(const uint16_t *got, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const float value = bf16_widen(got[i]);
        if (isnan(want[i]) ? isnan(value) : got[i] == bf16_round(want[i]))
            continue;
        printf("element %zu of %zu: %.9g, want %.9g rounded\n", i, n, (double)value,
               (double)want[i]);
        return false;
    }
    return true;
}
