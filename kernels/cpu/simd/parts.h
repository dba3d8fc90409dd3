/* The functions of one compilation of this folder, gathered by table.c. See simd_table.h
 * for what they do. */
#ifndef BALLAST_KERNELS_CPU_SIMD_PARTS_H
#define BALLAST_KERNELS_CPU_SIMD_PARTS_H

#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/simd_table.h"

/* The part of C that stays in registers, and so the shape of panels. */
#if defined(__AVX512F__)
enum { PANEL_ROWS = 8, PANEL_VECTORS = 3 }; /* 24 of 32 registers */
#else
enum { PANEL_ROWS = 6, PANEL_VECTORS = 1 }; /* 12 of 16: a vector is two of them */
#endif
enum { PANEL_COLUMNS = PANEL_VECTORS * LANES };

void SIMD(arrange_left)(float *out, const void *in, size_t row, bool k_outside, size_t n, size_t k);
void SIMD(arrange_right)(float *out, const void *in, size_t row, bool k_outside, size_t n,
                         size_t k);
void SIMD(multiply_panels)(float *c, size_t c_row, const float *left, const float *right,
                           const float *bias, size_t m, size_t n, size_t k, bool accumulate);
void SIMD(column_sums)(float *out, const void *in, size_t rows, size_t stride, size_t n);
void SIMD(norm_forward)(enum norm_kind kind, void *out, float *mean, float *rstd, const void *x,
                        const void *weight, const void *bias, size_t rows, size_t width, float eps);
void SIMD(norm_backward_rows)(enum norm_kind kind, void *dx, const void *dout, const void *x,
                              const void *weight, const float *mean, const float *rstd, size_t rows,
                              size_t width);
void SIMD(norm_backward_columns)(enum norm_kind kind, float *dweight, float *dbias,
                                 const void *dout, const void *x, const float *mean,
                                 const float *rstd, size_t rows, size_t width, size_t n);
void SIMD(gelu_forward)(void *out, const void *in, size_t n);
void SIMD(gelu_backward)(void *din, const void *dout, const void *in, size_t n);
void SIMD(swiglu_forward)(void *out, const void *in, size_t inner);
void SIMD(swiglu_backward)(void *din, const void *dout, const void *in, size_t inner);
void SIMD(dropout_row)(void *out, const void *residual, const void *branch, size_t width,
                       const struct dropout_row *row);
float SIMD(cross_entropy_row)(void *logits, size_t vocab, int32_t label, float grad_scale,
                              bool with_gradient);
void SIMD(adamw)(float *params, void *copy, float *moment_m, float *moment_v, const float *grads,
                 size_t n, const struct adamw *adamw);
double SIMD(sum_squares)(const float *values, size_t n);
void SIMD(sum_parts)(float *out, const float *parts, size_t n_parts, size_t stride, size_t n);
void SIMD(add)(float *dst, const float *src, size_t n);
void SIMD(accumulate)(float *dst, const void *src, size_t n);
void SIMD(embed_row)(void *out, const void *token, const void *position, size_t n);
void SIMD(widen)(float *dst, const void *src, size_t n);
void SIMD(narrow)(void *dst, const float *src, size_t n);
void SIMD(fill)(float *values, size_t n, float value);
void SIMD(random_normal)(float *values, size_t n, float std, struct philox_key key, uint32_t tensor,
                         uint64_t first_element);
void SIMD(rotate)(void *head, const float *cosine, const float *sine, size_t n_pairs);
void SIMD(exponential)(float *out, const float *in, size_t n);
void SIMD(attention_forward)(const struct attention *attention, void *out, float *lse,
                             const void *qkv, size_t sample, uint32_t head, size_t query_tile);
void SIMD(attention_delta)(float *delta, const void *dout, const void *out, size_t rows,
                           size_t stride, size_t head_dim);
void SIMD(attention_backward)(const struct attention *attention, void *dqkv,
                              const struct key_rows *keys, const float *delta, const void *dout,
                              const float *lse, const void *qkv, size_t sample, uint32_t head,
                              size_t query_tile, size_t first_key_tile, size_t end_key_tile,
                              bool want_dq);

#endif
