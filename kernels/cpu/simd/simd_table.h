/* The arithmetic of the CPU operations on one range, per instruction set.
 *
 * Every file of this folder is compiled several times with other instruction sets, and each time
 * for both compute types; a compilation ends in one table. All of one type use the same 16-lane
 * structure and explicit fused multiply-adds, so they give equal bits; only the speed differs.
 * `void *` operands are of the compute type and are widened to fp32 as they are read. Pure
 * functions, no allocation, any thread. Arguments as in kernels/ops.h unless said otherwise. */
#ifndef BALLAST_KERNELS_CPU_SIMD_TABLE_H
#define BALLAST_KERNELS_CPU_SIMD_TABLE_H

#include "kernels/ops.h"
#include "kernels/philox.h"

enum {
    ATTENTION_QUERY_TILE = 64, /* queries of one work item */
    SUM_SQUARES_BLOCK = 4096,  /* elements that are summed before blocks are added */
};

/* Dropout of one row: the counter but for its column, and what follows from p. */
struct dropout_row {
    struct philox_key key;
    uint32_t token, sample, stream;
    uint32_t threshold; /* 0: nothing is dropped, words are not drawn */
    float scale;
};

/* Where attention backward adds up dk and dv of one (sample, key/value head): the row of key j
 * is dk + (j - first) * row. padded: rows have room for the head dimension rounded up to lanes. */
struct key_rows {
    float *dk, *dv;
    size_t row, first;
    bool padded;
};

struct simd_table {
    const char *name;
    size_t elem_bytes; /* of the compute type */

    /* Matrix products: see kernels/cpu/simd/matmul.c for panels. 0: the set has no fused
     * multiply-add and fp32 products go through the library. */
    size_t panel_rows, panel_columns;
    /* Panels of n rows (left) or columns (right) and k inner elements. k_outside: element
     * (i, l) of the operand is in[l * row + i], else in[i * row + l]. */
    void (*arrange_left)(float *out, const void *in, size_t row, bool k_outside, size_t n,
                         size_t k);
    void (*arrange_right)(float *out, const void *in, size_t row, bool k_outside, size_t n,
                          size_t k);
    /* C(m, n) = or += left * right + bias(n); bias may be NULL. */
    void (*multiply_panels)(float *c, size_t c_row, const float *left, const float *right,
                            const float *bias, size_t m, size_t n, size_t k, bool accumulate);

    void (*column_sums)(float *out, const void *in, size_t rows, size_t stride, size_t n);

    void (*norm_forward)(enum norm_kind kind, void *out, float *mean, float *rstd, const void *x,
                         const void *weight, const void *bias, size_t rows, size_t width,
                         float eps);
    void (*norm_backward_rows)(enum norm_kind kind, void *dx, const void *dout, const void *x,
                               const void *weight, const float *mean, const float *rstd,
                               size_t rows, size_t width);
    /* Columns [0, n) of matrices whose rows are `width` apart, rows added in order. */
    void (*norm_backward_columns)(enum norm_kind kind, float *dweight, float *dbias,
                                  const void *dout, const void *x, const float *mean,
                                  const float *rstd, size_t rows, size_t width, size_t n);

    void (*gelu_forward)(void *out, const void *in, size_t n);
    void (*gelu_backward)(void *din, const void *dout, const void *in, size_t n);
    /* One row: in and din are [gate(inner) | up(inner)]. */
    void (*swiglu_forward)(void *out, const void *in, size_t inner);
    void (*swiglu_backward)(void *din, const void *dout, const void *in, size_t inner);

    /* out = residual + mask * branch * scale; residual may be NULL. */
    void (*dropout_row)(void *out, const void *residual, const void *branch, size_t width,
                        const struct dropout_row *row);

    /* Returns the row's loss. */
    float (*cross_entropy_row)(void *logits, size_t vocab, int32_t label, float grad_scale,
                               bool with_gradient);

    void (*adamw)(float *params, void *copy, float *moment_m, float *moment_v, const float *grads,
                  size_t n, const struct adamw *adamw);
    double (*sum_squares)(const float *values, size_t n); /* n <= SUM_SQUARES_BLOCK */
    void (*sum_parts)(float *out, const float *parts, size_t n_parts, size_t stride, size_t n);
    void (*add)(float *dst, const float *src, size_t n);
    void (*accumulate)(float *dst, const void *src, size_t n); /* dst += src */
    /* out = token + position; position may be NULL. */
    void (*embed_row)(void *out, const void *token, const void *position, size_t n);
    void (*widen)(float *dst, const void *src, size_t n);
    void (*narrow)(void *dst, const float *src, size_t n);
    void (*fill)(float *values, size_t n, float value);
    void (*random_normal)(float *values, size_t n, float std, struct philox_key key,
                          uint32_t tensor, uint64_t first_element);
    /* Rotate one head's pairs (i, i + n_pairs) by the given cosines and sines. */
    void (*rotate)(void *head, const float *cosine, const float *sine, size_t n_pairs);

    /* out[i] = exp(in[i]); at most 1 ulp from the exact value, 0 below -87.3, infinite above
     * 88.3. For tests. */
    void (*exponential)(float *out, const float *in, size_t n);

    /* Output rows and lse of one (sample, query head, tile of queries). */
    void (*attention_forward)(const struct attention *attention, void *out, float *lse,
                              const void *qkv, size_t sample, uint32_t head, size_t query_tile);
    /* delta of n rows of one head: row sums of dout * out; rows are `stride` apart. */
    void (*attention_delta)(float *delta, const void *dout, const void *out, size_t rows,
                            size_t stride, size_t head_dim);
    /* What one (query head, tile of queries) and the keys of [first_key_tile, end_key_tile)
     * contribute: added to `keys` unless that is NULL; dq, when wanted, is written to dqkv. */
    void (*attention_backward)(const struct attention *attention, void *dqkv,
                               const struct key_rows *keys, const float *delta, const void *dout,
                               const float *lse, const void *qkv, size_t sample, uint32_t head,
                               size_t query_tile, size_t first_key_tile, size_t end_key_tile,
                               bool want_dq);
};

/* Keys of one inner step: half as many for wide heads, so that scratch stays on the stack. */
static inline size_t attention_key_tile(uint32_t head_dim)
{
    return head_dim > 128 ? 32 : 64;
}

extern const struct simd_table simd_table_plain, simd_table_avx2, simd_table_avx512;
extern const struct simd_table simd_table_plain_bf16, simd_table_avx2_bf16, simd_table_avx512_bf16;

#endif
