/* Every operation of kernels/ops.h once more: plain loops in double, no tiles, no vectors.
 *
 * Shapes and names as in kernels/ops.h. Only forward passes; gradients are checked against
 * central differences of these, and against a backward pass where one is given. Pure. */
#ifndef BALLAST_TESTS_LIB_REFERENCE_H
#define BALLAST_TESTS_LIB_REFERENCE_H

#include "kernels/ops.h"

/* c += when accumulate. bias may be NULL. */
void reference_matmul(enum matmul_form form, size_t m, size_t n, size_t k, const double *a,
                      const double *b, const double *bias, double *c, bool accumulate);

void reference_norm(enum norm_kind kind, double *out, const double *x, const double *weight,
                    const double *bias, size_t rows, size_t width, double eps);

void reference_activation(enum activation_kind kind, double *out, const double *in, size_t rows,
                          size_t inner);

void reference_rotary(double *qkv, const int32_t *positions, const struct rotary *rotary,
                      size_t rows, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim,
                      int direction);

/* lse may be NULL. Dropout as kernels/philox.h describes it. */
void reference_attention(const struct attention *attention, double *out, double *lse,
                         const double *qkv);

/* Factors 1/(1-p) or 0 of residual_dropout. */
void reference_keep(const struct dropout *dropout, double *keep, size_t rows, size_t width);

void reference_cross_entropy(double *losses, const double *logits, const int32_t *labels,
                             size_t rows, size_t vocab);

/* Derivative of f along element i of x: central difference with a step of 1e-4, extrapolated
 * once (Richardson), which leaves about 1e-10 of smooth functions of size 1. */
double reference_slope(double (*f)(const double *x, const void *context), double *x, size_t i,
                       const void *context);

#endif
