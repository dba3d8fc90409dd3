/* Activation functions, the exponential below them, and residual dropout.
 *
 * links: testing kernels base
 *
 * The exponential is held to 1 ulp and a little (its own error is below 1.1 ulp); activation
 * functions add a division and a few products: 4e-7 of the largest value. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cpu/cpu_ops.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/reference.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static const double TOLERANCE = 5e-7;

static void exponential(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    enum { N = 200000 };
    float *x = values_zero(N), *y = values_zero(N);
    double worst = 0.0;
    for (size_t i = 0; i < N; i++)
        x[i] = -87.3f + 175.5f * (float)i / N;
    cpu_of(ops)->simd->exponential(y, x, N);
    for (size_t i = 0; i < N; i++) {
        const double want = exp((double)x[i]);
        int exponent;
        frexp(want, &exponent);
        worst = fmax(worst, fabs((double)y[i] - want) / ldexp(1.0, exponent - 24));
    }
    printf("exp: at most %.3f ulp off\n", worst);
    assert_true(worst <= 1.1);
    const float edge[] = {-INFINITY, -1e30f, -90.0f, 0.0f, 89.0f, 1e30f, INFINITY, NAN};
    float got[8];
    cpu_of(ops)->simd->exponential(got, edge, 8);
    assert_true(got[0] == 0.0f && got[1] == 0.0f && got[2] == 0.0f && got[3] == 1.0f);
    assert_true(isinf(got[4]) && isinf(got[5]) && isinf(got[6]) && isnan(got[7]));
    free(x);
    free(y);
    kernel_ops_free(ops);
}

struct activation {
    enum activation_kind kind;
    size_t rows, inner;
    const double *dout;
    double *out;
};

static double loss(const double *in, const void *context)
{
    const struct activation *a = context;
    reference_activation(a->kind, a->out, in, a->rows, a->inner);
    double sum = 0.0;
    for (size_t i = 0; i < a->rows * a->inner; i++)
        sum += a->dout[i] * a->out[i];
    return sum;
}

static void check_activation(enum activation_kind kind, size_t rows, size_t inner)
{
    struct ops *ops = kernel_ops(2);
    const size_t n_out = rows * inner, n_in = kind == ACTIVATION_SWIGLU ? 2 * n_out : n_out;
    float *in = values_random(n_in, 6.0f, 1), *dout = values_random(n_out, 1.0f, 2);
    float *out = values_random(n_out, 9.0f, 3), *din = values_random(n_in, 9.0f, 4);
    double *wide_in = values_widen(in, n_in), *wide_dout = values_widen(dout, n_out);
    double *want = values_zero_double(n_out), *slopes = values_zero_double(n_in);
    ops->activation_forward(ops, kind, out, in, rows, inner);
    ops->activation_backward(ops, kind, din, dout, in, rows, inner);
    reference_activation(kind, want, wide_in, rows, inner);
    assert_true(values_distance(out, want, n_out) < TOLERANCE);
    const struct activation context = {kind, rows, inner, wide_dout, want};
    for (size_t i = 0; i < n_in; i++)
        slopes[i] = i % 5 == 0 ? reference_slope(loss, wide_in, i, &context) : (double)din[i];
    const double distance = values_distance(din, slopes, n_in);
    if (!(distance < TOLERANCE))
        fail_msg("kind %d rows %zu inner %zu: gradient off by %g", (int)kind, rows, inner,
                 distance);
    ops->activation_backward(ops, kind, in, dout, in, rows, inner); /* in place */
    assert_true(values_equal(in, din, n_in));
    free(in);
    free(dout);
    free(out);
    free(din);
    free(wide_in);
    free(wide_dout);
    free(want);
    free(slopes);
    kernel_ops_free(ops);
}

static void activations(void **state)
{
    (void)state;
    const size_t shapes[][2] = {{1, 1}, {3, 7}, {7, 63}, {2, 65}, {5, 172}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_activation(ACTIVATION_GELU, shapes[i][0], shapes[i][1]);
        check_activation(ACTIVATION_SWIGLU, shapes[i][0], shapes[i][1]);
    }
}

/* Far outside of where the curve bends, and where the exponential is 0 or infinite. */
static void activation_ends(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    const float in[] = {-1e15f, -20.0f, 0.0f, 20.0f, 1e15f};
    const float dout[] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    float out[5], din[5];
    ops->activation_forward(ops, ACTIVATION_GELU, out, in, 1, 5);
    ops->activation_backward(ops, ACTIVATION_GELU, din, dout, in, 1, 5);
    assert_true(out[0] == 0.0f && out[2] == 0.0f && out[3] == 20.0f && out[4] == 1e15f);
    assert_true(fabsf(din[0]) < 1e-20f && fabsf(out[1]) < 1e-30f && din[2] == 0.5f &&
                din[3] == 1.0f && din[4] == 1.0f);
    kernel_ops_free(ops);
}

static void check_dropout(struct ops *ops, const struct dropout *d, size_t rows, size_t width,
                          float *out)
{
    const size_t n = rows * width;
    float *residual = values_random(n, 1.0f, 1), *branch = values_random(n, 1.0f, 2);
    double *keep = values_zero_double(n);
    reference_keep(d, keep, rows, width);
    ops->residual_dropout(ops, out, residual, branch, rows, width, d);
    for (size_t i = 0; i < n; i++) {
        const double want = (double)residual[i] + (double)branch[i] * keep[i];
        assert_true(fabs((double)out[i] - want) < 3e-7);
    }
    float *gradient = values_copy(branch, n);
    ops->dropout_backward(ops, gradient, gradient, rows, width, d);
    for (size_t i = 0; i < n; i++)
        assert_true(fabs((double)gradient[i] - (double)branch[i] * keep[i]) < 3e-7);
    /* out may be the residual or the branch. */
    float *in_place = values_copy(residual, n);
    ops->residual_dropout(ops, in_place, in_place, branch, rows, width, d);
    assert_true(values_equal(in_place, out, n));
    memcpy(in_place, branch, n * sizeof *in_place);
    ops->residual_dropout(ops, in_place, residual, in_place, rows, width, d);
    assert_true(values_equal(in_place, out, n));
    free(residual);
    free(branch);
    free(keep);
    free(gradient);
    free(in_place);
}

static void dropout_matches_reference(void **state)
{
    (void)state;
    const size_t shapes[][2] = {{1, 1}, {3, 7}, {6, 63}, {9, 65}, {64, 768}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const struct dropout d = {.p = 0.1f,
                                  .seed = 0x700000003u,
                                  .step = 9,
                                  .first_sample = 4,
                                  .first_token = 10,
                                  .seq_len = 3,
                                  .layer = 2,
                                  .use = RANDOM_MLP_OUT_DROPOUT};
        float *first = values_zero(shapes[i][0] * shapes[i][1]);
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            struct ops *ops = kernel_ops(n_threads);
            float *out = values_zero(shapes[i][0] * shapes[i][1]);
            check_dropout(ops, &d, shapes[i][0], shapes[i][1], n_threads == 1 ? first : out);
            if (n_threads > 1)
                assert_true(values_equal(first, out, shapes[i][0] * shapes[i][1]));
            free(out);
            kernel_ops_free(ops);
        }
        free(first);
    }
}

/* The rows of a call may be any part of the batch: elements keep their masks. */
static void dropout_is_keyed_by_global_element(void **state)
{
    (void)state;
    enum { T = 8, WIDTH = 70, ROWS = 3 * T };
    struct ops *ops = kernel_ops(1);
    struct dropout d = {.p = 0.3f, .seed = 5, .step = 1, .seq_len = T, .use = RANDOM_EMBED_DROPOUT};
    float ones[ROWS * WIDTH], whole[ROWS * WIDTH], part[T / 2 * WIDTH];
    for (size_t i = 0; i < ROWS * WIDTH; i++)
        ones[i] = 1.0f;
    ops->residual_dropout(ops, whole, NULL, ones, ROWS, WIDTH, &d);
    d.first_sample = 2;
    d.first_token = T / 2;
    d.seq_len = T / 2;
    ops->residual_dropout(ops, part, NULL, ones, T / 2, WIDTH, &d);
    assert_true(values_equal(part, whole + (2 * T + T / 2) * WIDTH, T / 2 * WIDTH));
    size_t n_kept = 0;
    for (size_t i = 0; i < ROWS * WIDTH; i++)
        n_kept += whole[i] > 0.0f;
    /* 1,680 draws: the standard deviation of the rate is 0.011. */
    assert_true(fabs((double)n_kept / (ROWS * WIDTH) - 0.7) < 0.045);
    d.step = 2;
    float other[T / 2 * WIDTH];
    ops->residual_dropout(ops, other, NULL, ones, T / 2, WIDTH, &d);
    assert_true(memcmp(other, part, sizeof part) != 0);
    kernel_ops_free(ops);
}

static void no_dropout_adds(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    const struct dropout off = {.p = 0.0f, .seq_len = 1};
    const float a[3] = {1.0f, 2.0f, 3.0f}, b[3] = {0.5f, -2.0f, 4.0f};
    const float sum[3] = {1.5f, 0.0f, 7.0f};
    float out[3];
    ops->residual_dropout(ops, out, a, b, 3, 1, &off);
    assert_true(values_equal(out, sum, 3));
    ops->residual_dropout(ops, out, a, b, 1, 3, NULL);
    assert_true(values_equal(out, sum, 3));
    ops->residual_dropout(ops, out, NULL, b, 3, 1, &off);
    assert_true(values_equal(out, b, 3));
    kernel_ops_free(ops);
}

static void same_bits_on_other_sets(void **state)
{
    (void)state;
    enum { N = 1000 };
    float *in = values_random(N, 8.0f, 1), *dout = values_random(N, 1.0f, 2);
    float *a = values_zero(2 * N), *b = values_zero(2 * N);
    struct ops *ops = kernel_ops(1);
    const struct simd_table *best = cpu_of(ops)->simd;
    best->gelu_forward(a, in, N);
    simd_table_plain.gelu_forward(b, in, N);
    assert_true(values_equal(a, b, N));
    best->gelu_backward(a, dout, in, N);
    simd_table_plain.gelu_backward(b, dout, in, N);
    assert_true(values_equal(a, b, N));
    best->swiglu_backward(a, dout, in, N / 2);
    simd_table_plain.swiglu_backward(b, dout, in, N / 2);
    assert_true(values_equal(a, b, N));
    const struct dropout_row row = {{1, 2}, 3, 4, 5, 0x40000000u, 1.25f};
    best->dropout_row(a, in, dout, N, &row);
    simd_table_plain.dropout_row(b, in, dout, N, &row);
    assert_true(values_equal(a, b, N));
    free(in);
    free(dout);
    free(a);
    free(b);
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exponential),
        cmocka_unit_test(activations),
        cmocka_unit_test(activation_ends),
        cmocka_unit_test(dropout_matches_reference),
        cmocka_unit_test(dropout_is_keyed_by_global_element),
        cmocka_unit_test(no_dropout_adds),
        cmocka_unit_test(same_bits_on_other_sets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
