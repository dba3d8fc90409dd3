/* Sums, fills and rotations on a range. See simd_table.h. */
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/parts.h"

double SIMD(sum_squares)(const float *values, size_t n)
{
    enum { WIDTH = 32, HALF = LANES / 2 }; /* independent sums, added in a fixed tree */
    dvec part[WIDTH / HALF] = {0};
    double sum[WIDTH];
    size_t i = 0;
    /* Four quarters side by side: memory delivers several streams faster than one. */
    const size_t quarter = n / WIDTH * HALF;
    for (; i < quarter; i += HALF)
        for (size_t j = 0; j < WIDTH / HALF; j++) {
            const dvec x = dvec_widen(values + j * quarter + i);
            part[j] = dvec_fma(x, x, part[j]);
        }
    i = quarter * (WIDTH / HALF);
    memcpy(sum, part, sizeof sum);
    for (size_t j = 0; i + j < n; j++) {
        const double x = (double)values[i + j];
        sum[j] = fma(x, x, sum[j]);
    }
    for (size_t half = WIDTH / 2; half > 0; half /= 2)
        for (size_t j = 0; j < half; j++)
            sum[j] += sum[j + half];
    return sum[0];
}

void SIMD(sum_parts)(float *out, const float *parts, size_t n_parts, size_t stride, size_t n)
{
    enum { BLOCK = 1024 }; /* stays in the first cache while the parts pass by */
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t count = n - i < BLOCK ? n - i : BLOCK;
        memcpy(out + i, parts + i, count * sizeof *out);
        for (size_t p = 1; p < n_parts; p++)
            SIMD(add)(out + i, parts + p * stride + i, count);
    }
}

void SIMD(add)(float *restrict dst, const float *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] += src[i];
}

void SIMD(accumulate)(float *dst, const void *elements, size_t n)
{
    const elem *src = elements;
    for (size_t i = 0; i < n; i += LANES) {
        const vec sum = vec_load_part(dst + i, n - i, 0.0f) + elem_load_part(src + i, n - i, 0.0f);
        vec_store_part(dst + i, sum, n - i);
    }
}

void SIMD(embed_row)(void *row, const void *token, const void *position, size_t n)
{
    const elem *a = token, *b = position;
    elem *out = row;
    if (!b) {
        memcpy(out, a, n * sizeof *out);
        return;
    }
    for (size_t i = 0; i < n; i += LANES) {
        const vec sum = elem_load_part(a + i, n - i, 0.0f) + elem_load_part(b + i, n - i, 0.0f);
        elem_store_part(out + i, sum, n - i);
    }
}

void SIMD(widen)(float *dst, const void *elements, size_t n)
{
    const elem *src = elements;
    for (size_t i = 0; i < n; i += LANES)
        vec_store_part(dst + i, elem_load_part(src + i, n - i, 0.0f), n - i);
}

void SIMD(narrow)(void *elements, const float *src, size_t n)
{
    elem *dst = elements;
    for (size_t i = 0; i < n; i += LANES)
        elem_store_part(dst + i, vec_load_part(src + i, n - i, 0.0f), n - i);
}

void SIMD(fill)(float *values, size_t n, float value)
{
    for (size_t i = 0; i < n; i++)
        values[i] = value;
}

void SIMD(rotate)(void *elements, const float *cosine, const float *sine, size_t n_pairs)
{
    elem *head = elements;
    for (size_t i = 0; i < n_pairs; i += LANES) {
        const size_t n = n_pairs - i;
        const vec c = vec_load_part(cosine + i, n, 0.0f), s = vec_load_part(sine + i, n, 0.0f);
        const vec a = elem_load_part(head + i, n, 0.0f);
        const vec b = elem_load_part(head + n_pairs + i, n, 0.0f);
        elem_store_part(head + i, a * c - b * s, n);
        elem_store_part(head + n_pairs + i, b * c + a * s, n);
    }
}

void SIMD(exponential)(float *out, const float *in, size_t n)
{
    for (size_t i = 0; i < n; i += LANES)
        vec_store_part(out + i, vec_exp(vec_load_part(in + i, n - i, 0.0f)), n - i);
}
