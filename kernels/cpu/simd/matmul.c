/* Panels of matrix products. See simd_table.h and kernels/cpu/matmul.c.
 *
 * A panel holds PANEL_ROWS rows of the left operand, or PANEL_COLUMNS columns of the right
 * one, with k as the outer dimension, so that the kernel reads both in order. What is missing
 * at the edge is 0. Panels and C are fp32: operands of another type are widened on the way. */
#include "kernels/cpu/simd/parts.h"

/* `width` elements, all of them there. */
SIMD_INLINE void widen_row(float *out, const elem *in, const size_t width)
{
#if defined(SIMD_STORE_BF16)
    size_t i = 0;
    for (; i + LANES <= width; i += LANES)
        vec_store(out + i, elem_load(in + i));
    for (; i < width; i++)
        out[i] = elem_get(in + i);
#else
    memcpy(out, in, width * sizeof *out);
#endif
}

/* One panel of `width` from in[l * row + i], some rows at a time. */
SIMD_INLINE void copy_panel(float *out, const elem *in, size_t row, size_t n, size_t from,
                            size_t to, const size_t width)
{
    if (n >= width) {
        for (size_t l = from; l < to; l++)
            widen_row(out + l * width, in + l * row, width);
        return;
    }
    for (size_t l = from; l < to; l++)
        for (size_t i = 0; i < width; i++)
            out[l * width + i] = i < n ? elem_get(in + l * row + i) : 0.0f;
}

/* One panel of `width` from in[i * row + l]: squares of sixteen, and the rest one by one. */
SIMD_INLINE void turn_panel(float *out, const elem *in, size_t row, size_t n, size_t k,
                            const size_t width)
{
    const size_t whole = k / LANES * LANES;
    for (size_t first = 0; first < width; first += LANES) {
        const size_t lanes = width - first < LANES ? width - first : LANES;
        for (size_t l = 0; l < whole; l += LANES) {
            vec square[LANES];
            for (size_t i = 0; i < LANES; i++)
                square[i] = i < lanes && first + i < n ? elem_load(in + (first + i) * row + l)
                                                       : vec_set(0.0f);
            vec_transpose(square);
            for (size_t i = 0; i < LANES; i++)
                memcpy(out + (l + i) * width + first, &square[i], lanes * sizeof *out);
        }
        for (size_t l = whole; l < k; l++)
            for (size_t i = first; i < first + lanes; i++)
                out[l * width + i] = i < n ? elem_get(in + i * row + l) : 0.0f;
    }
}

SIMD_INLINE void arrange(float *out, const elem *in, size_t row, bool k_outside, size_t n, size_t k,
                         const size_t width)
{
    enum { ROWS = 8 }; /* read side by side: more would evict one another at unlucky distances */
    if (k_outside) {
        for (size_t l = 0; l < k; l += ROWS)
            for (size_t i = 0; i < n; i += width)
                copy_panel(out + i * k, in + i, row, n - i, l, k - l < ROWS ? k : l + ROWS, width);
        return;
    }
    for (size_t i = 0; i < n; i += width)
        turn_panel(out + i * k, in + i * row, row, n - i, k, width);
}

void SIMD(arrange_left)(float *out, const void *in, size_t row, bool k_outside, size_t n, size_t k)
{
    arrange(out, in, row, k_outside, n, k, PANEL_ROWS);
}

void SIMD(arrange_right)(float *out, const void *in, size_t row, bool k_outside, size_t n, size_t k)
{
    arrange(out, in, row, k_outside, n, k, PANEL_COLUMNS);
}

/* The right panel is larger than the first cache and comes from the second: this many rows
 * of it are asked for in advance. */
enum { AHEAD = 12 };

/* One panel by one panel: C (PANEL_ROWS, PANEL_COLUMNS) = or += the product, plus the bias. */
static void multiply_tile(float *c, size_t c_row, const float *left, const float *right,
                          const float *bias, size_t k, bool accumulate)
{
    vec sum[PANEL_ROWS][PANEL_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < PANEL_ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_VECTORS; j++) {
            sum[i][j] = vec_set(0.0f);
            __builtin_prefetch(c + (size_t)i * c_row + (size_t)j * LANES, 1);
        }
    for (size_t l = 0; l < k; l++, left += PANEL_ROWS, right += PANEL_COLUMNS) {
        vec b[PANEL_VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_VECTORS; j++) {
            b[j] = vec_load(right + (size_t)j * LANES);
            __builtin_prefetch(right + (AHEAD * PANEL_VECTORS + j) * LANES);
        }
#pragma GCC unroll 8
        for (int i = 0; i < PANEL_ROWS; i++) {
            const vec a = vec_set(left[i]);
#pragma GCC unroll 8
            for (int j = 0; j < PANEL_VECTORS; j++)
                sum[i][j] = vec_fma(a, b[j], sum[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < PANEL_ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_VECTORS; j++) {
            float *to = c + (size_t)i * c_row + (size_t)j * LANES;
            vec value = sum[i][j];
            if (bias)
                value += vec_load(bias + (size_t)j * LANES);
            if (accumulate)
                value = vec_load(to) + value;
            vec_store(to, value);
        }
}

/* A tile that reaches over the edge of C goes by way of a copy. */
static void multiply_edge(float *c, size_t c_row, const float *left, const float *right,
                          const float *bias, size_t m, size_t n, size_t k, bool accumulate)
{
    _Alignas(64) float tile[PANEL_ROWS * PANEL_COLUMNS] = {0}, padded[PANEL_COLUMNS] = {0};
    const size_t rows = m < PANEL_ROWS ? m : PANEL_ROWS;
    const size_t columns = n < PANEL_COLUMNS ? n : PANEL_COLUMNS;
    if (bias)
        memcpy(padded, bias, columns * sizeof *padded);
    for (size_t i = 0; accumulate && i < rows; i++)
        memcpy(tile + i * PANEL_COLUMNS, c + i * c_row, columns * sizeof *tile);
    multiply_tile(tile, PANEL_COLUMNS, left, right, bias ? padded : NULL, k, accumulate);
    for (size_t i = 0; i < rows; i++)
        memcpy(c + i * c_row, tile + i * PANEL_COLUMNS, columns * sizeof *tile);
}

void SIMD(multiply_panels)(float *c, size_t c_row, const float *left, const float *right,
                           const float *bias, size_t m, size_t n, size_t k, bool accumulate)
{
    for (size_t j = 0; j < n; j += PANEL_COLUMNS)
        for (size_t i = 0; i < m; i += PANEL_ROWS) {
            float *to = c + i * c_row + j;
            const float *tile_bias = bias ? bias + j : NULL;
            if (m - i >= PANEL_ROWS && n - j >= PANEL_COLUMNS)
                multiply_tile(to, c_row, left + i * k, right + j * k, tile_bias, k, accumulate);
            else
                multiply_edge(to, c_row, left + i * k, right + j * k, tile_bias, m - i, n - j, k,
                              accumulate);
        }
}
