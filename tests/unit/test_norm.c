/* Layer norm and RMS norm against the plain double reference and its finite differences.
 *
 * links: testing kernels base
 *
 * Tolerances are relative to the largest value: sums of up to 768 terms in sixteen lanes
 * keep about 1e-7 each; the weight's gradient adds one such error per row. */
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

static const double TOLERANCE = 2e-6;

struct norm {
    enum norm_kind kind;
    size_t rows, width;
    double *x, *weight, *bias, *dout, *out;
};

static double loss(const struct norm *n)
{
    reference_norm(n->kind, n->out, n->x, n->weight, n->bias, n->rows, n->width, 1e-5);
    double sum = 0.0;
    for (size_t i = 0; i < n->rows * n->width; i++)
        sum += n->dout[i] * n->out[i];
    return sum;
}

static double loss_of(const double *changed, const void *context)
{
    (void)changed; /* one of the arrays that the context names */
    return loss(context);
}

/* The worst distance of some elements of a gradient from the slope along `array`. */
static double gradient_distance(const struct norm *norm, double *array, const float *got, size_t n)
{
    double worst = 0.0, most = 1e-9;
    for (size_t j = 0; j < 40; j++) {
        const size_t i = j * 7919 % n;
        const double slope = reference_slope(loss_of, array, i, norm);
        worst = fmax(worst, fabs(slope - (double)got[i]));
        most = fmax(most, fabs(slope));
    }
    return worst / most;
}

struct arrays {
    float *x, *weight, *bias, *dout, *out, *mean, *rstd, *dx, *before, *dweight, *dbias;
};

static struct arrays make(size_t rows, size_t width)
{
    struct arrays a = {.x = values_random(rows * width, 3.0f, 1),
                       .weight = values_random(width, 1.0f, 2),
                       .bias = values_random(width, 1.0f, 3),
                       .dout = values_random(rows * width, 1.0f, 4),
                       .out = values_random(rows * width, 9.0f, 5),
                       .mean = values_random(rows, 9.0f, 6),
                       .rstd = values_random(rows, 9.0f, 7),
                       .dx = values_random(rows * width, 1.0f, 8),
                       .dweight = values_random(width, 9.0f, 9),
                       .dbias = values_random(width, 9.0f, 10)};
    for (size_t i = 0; i < rows * width; i++)
        a.x[i] += 2.0f; /* a mean to remove */
    a.before = values_copy(a.dx, rows * width);
    return a;
}

static void free_arrays(struct arrays *a)
{
    float *all[] = {a->x,    a->weight, a->bias,   a->dout,    a->out,  a->mean,
                    a->rstd, a->dx,     a->before, a->dweight, a->dbias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void run(struct ops *ops, enum norm_kind kind, struct arrays *a, size_t rows, size_t width)
{
    const bool layer = kind == NORM_LAYER;
    ops->norm_forward(ops, kind, a->out, layer ? a->mean : NULL, a->rstd, a->x, a->weight,
                      layer ? a->bias : NULL, rows, width, 1e-5f);
    ops->norm_backward(ops, kind, a->dx, a->dweight, layer ? a->dbias : NULL, a->dout, a->x,
                       a->weight, layer ? a->mean : NULL, a->rstd, rows, width);
}

static void check(enum norm_kind kind, size_t rows, size_t width)
{
    struct ops *ops = kernel_ops(2);
    struct arrays a = make(rows, width);
    run(ops, kind, &a, rows, width);
    const size_t n = rows * width;
    struct norm norm = {kind,
                        rows,
                        width,
                        values_widen(a.x, n),
                        values_widen(a.weight, width),
                        kind == NORM_LAYER ? values_widen(a.bias, width) : NULL,
                        values_widen(a.dout, n),
                        values_zero_double(n)};
    loss(&norm);
    assert_true(values_distance(a.out, norm.out, n) < TOLERANCE);
    for (size_t i = 0; i < n; i++)
        a.dx[i] -= a.before[i]; /* it was added to what was there */
    assert_true(gradient_distance(&norm, norm.x, a.dx, n) < TOLERANCE + 2e-7 * 4);
    assert_true(gradient_distance(&norm, norm.weight, a.dweight, width) < TOLERANCE);
    if (kind == NORM_LAYER)
        assert_true(gradient_distance(&norm, norm.bias, a.dbias, width) < TOLERANCE);
    free(norm.x);
    free(norm.weight);
    free(norm.bias);
    free(norm.dout);
    free(norm.out);
    free_arrays(&a);
    kernel_ops_free(ops);
}

static void matches_reference(void **state)
{
    (void)state;
    const size_t shapes[][2] = {{1, 7}, {3, 16}, {7, 63}, {65, 65}, {5, 768}, {33, 100}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check(NORM_LAYER, shapes[i][0], shapes[i][1]);
        check(NORM_RMS, shapes[i][0], shapes[i][1]);
    }
}

static void same_bits(void **state)
{
    (void)state;
    enum { ROWS = 130, WIDTH = 300 };
    for (int kind = NORM_LAYER; kind <= NORM_RMS; kind++) {
        struct arrays first = make(ROWS, WIDTH);
        struct ops *ops = kernel_ops(1);
        cpu_of(ops)->simd = &simd_table_plain;
        run(ops, (enum norm_kind)kind, &first, ROWS, WIDTH);
        kernel_ops_free(ops);
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            struct arrays again = make(ROWS, WIDTH);
            ops = kernel_ops(n_threads);
            run(ops, (enum norm_kind)kind, &again, ROWS, WIDTH);
            assert_true(values_equal(first.out, again.out, ROWS * WIDTH));
            assert_true(values_equal(first.dx, again.dx, ROWS * WIDTH));
            assert_true(values_equal(first.dweight, again.dweight, WIDTH));
            assert_true(values_equal(first.dbias, again.dbias, WIDTH));
            kernel_ops_free(ops);
            free_arrays(&again);
        }
        free_arrays(&first);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_reference),
        cmocka_unit_test(same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
