/* Products of small tiles, the inside of attention. Tiles are fp32. Header only, pure.
 *
 * C(n_rows, n_vectors*16) = or += A(n_rows, n_inner) B(n_inner, n_vectors*16), where B and C are
 * row-major and A(i, k) lies at a[i * a_row + k * a_inner], so that A may be read transposed.
 * Every element adds its products in order of k. */
#ifndef BALLAST_KERNELS_CPU_SIMD_TILE_H
#define BALLAST_KERNELS_CPU_SIMD_TILE_H

#include <stdbool.h>
#include "kernels/cpu/simd/simd.h"

struct tile {
    const float *a;
    size_t a_row, a_inner;
    const float *b;
    size_t b_row;
    float *c;
    size_t c_row;
    size_t n_rows, n_vectors, n_inner;
    bool accumulate;
};

/* The block of C that stays in registers. */
#if defined(__AVX512F__)
enum { TILE_ROWS = 4, TILE_VECTORS = 4 };
#else
enum { TILE_ROWS = 4, TILE_VECTORS = 1 };
#endif

SIMD_INLINE void tile_block(const struct tile *t, size_t row, size_t vector, const int n_rows,
                            const int n_vectors)
{
    vec sum[TILE_ROWS][TILE_VECTORS];
    const float *a = t->a + row * t->a_row;
    const float *b = t->b + vector * LANES;
    float *c = t->c + row * t->c_row + vector * LANES;
#pragma GCC unroll 8
    for (int i = 0; i < n_rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < n_vectors; j++)
            sum[i][j] = t->accumulate ? vec_load(c + (size_t)i * t->c_row + (size_t)j * LANES)
                                      : vec_set(0.0f);
    for (size_t k = 0; k < t->n_inner; k++, a += t->a_inner, b += t->b_row) {
        vec right[TILE_VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < n_vectors; j++)
            right[j] = vec_load(b + (size_t)j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < n_rows; i++) {
            const vec left = vec_set(a[(size_t)i * t->a_row]);
#pragma GCC unroll 8
            for (int j = 0; j < n_vectors; j++)
                sum[i][j] = vec_fma(left, right[j], sum[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < n_vectors; j++)
            vec_store(c + (size_t)i * t->c_row + (size_t)j * LANES, sum[i][j]);
}

SIMD_INLINE void tile_columns(const struct tile *t, size_t vector, const int n_vectors)
{
    size_t row = 0;
    for (; row + TILE_ROWS <= t->n_rows; row += TILE_ROWS)
        tile_block(t, row, vector, TILE_ROWS, n_vectors);
    for (; row < t->n_rows; row++)
        tile_block(t, row, vector, 1, n_vectors);
}

/* Not inlined on purpose: one copy per file serves all products. */
static __attribute__((noinline)) void tile_product(const struct tile tile)
{
    size_t vector = 0;
    for (; vector + TILE_VECTORS <= tile.n_vectors; vector += TILE_VECTORS)
        tile_columns(&tile, vector, TILE_VECTORS);
    if (TILE_VECTORS > 2 && vector + 2 <= tile.n_vectors) {
        tile_columns(&tile, vector, TILE_VECTORS > 2 ? 2 : 1);
        vector += 2;
    }
    for (; vector < tile.n_vectors; vector++)
        tile_columns(&tile, vector, 1);
}

/* out[j][i] = in[i][j] * factor of a (n_rows, n_columns) part; out's rows are `out_row` apart and
 * are filled with zeros up to it. */
static inline void tile_transpose(float *out, size_t out_row, const elem *in, size_t in_row,
                                  size_t n_rows, size_t n_columns, float factor)
{
    const size_t whole_rows = n_rows / LANES * LANES, whole_columns = n_columns / LANES * LANES;
    for (size_t i = 0; i < whole_rows; i += LANES)
        for (size_t j = 0; j < whole_columns; j += LANES) {
            vec square[LANES];
            for (size_t r = 0; r < LANES; r++)
                square[r] = elem_load(in + (i + r) * in_row + j) * factor;
            vec_transpose(square);
            for (size_t r = 0; r < LANES; r++)
                vec_store(out + (j + r) * out_row + i, square[r]);
        }
    for (size_t j = 0; j < n_columns; j++) {
        float *to = out + j * out_row;
        for (size_t i = j < whole_columns ? whole_rows : 0; i < n_rows; i++)
            to[i] = elem_get(in + i * in_row + j) * factor;
        for (size_t i = n_rows; i < out_row; i++)
            to[i] = 0.0f;
    }
}

/* Rows of n_columns copied from rows `in_row` apart to rows `out_row` apart, times a
 * factor; the rest of each row is zero. out_row is n_columns, rounded up to lanes. */
SIMD_INLINE void tile_copy(float *out, size_t out_row, const elem *in, size_t in_row, size_t n_rows,
                           size_t n_columns, float factor)
{
    for (size_t i = 0; i < n_rows; i++)
        for (size_t j = 0; j < out_row; j += LANES)
            vec_store(out + i * out_row + j,
                      elem_load_part(in + i * in_row + j, n_columns - j, 0.0f) * factor);
}

#endif
