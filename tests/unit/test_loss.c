/* Cross-entropy against the plain double reference and its finite differences.
 *
 * links: testing kernels base
 *
 * Losses: the sum of exponentials keeps 1e-7, its logarithm and the subtraction of two
 * numbers of size 10 in fp64 add nothing: 3e-7 relative. */
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

struct loss {
    const int32_t *labels;
    size_t rows, vocab;
    double *losses;
};

static double total(const double *logits, const void *context)
{
    const struct loss *l = context;
    reference_cross_entropy(l->losses, logits, l->labels, l->rows, l->vocab);
    double sum = 0.0;
    for (size_t r = 0; r < l->rows; r++)
        sum += l->losses[r];
    return sum;
}

static void check(size_t rows, size_t vocab, float spread)
{
    struct ops *ops = kernel_ops(2);
    float *logits = values_random(rows * vocab, spread, 1), *losses = values_random(rows, 9.0f, 2);
    float *saved = values_copy(logits, rows * vocab), *again = values_zero(rows);
    int32_t *labels = values_integers(rows, (int32_t)vocab, 3);
    if (rows > 1)
        labels[rows / 2] = -1;
    double *wide = values_widen(logits, rows * vocab), *want = values_zero_double(rows);
    reference_cross_entropy(want, wide, labels, rows, vocab);
    const float grad_scale = 0.25f;
    ops->cross_entropy(ops, losses, logits, labels, rows, vocab, grad_scale, false);
    assert_true(values_equal(saved, logits, rows * vocab)); /* logits stay */
    assert_true(values_distance(losses, want, rows) < 3e-7);
    ops->cross_entropy(ops, again, logits, labels, rows, vocab, grad_scale, true);
    assert_true(values_equal(losses, again, rows));
    const struct loss context = {labels, rows, vocab, want};
    for (size_t j = 0; j < 60; j++) {
        const size_t i = j * 7919 % (rows * vocab);
        const double slope = reference_slope(total, wide, i, &context) * (double)grad_scale;
        assert_true(fabs(slope - (double)logits[i]) < 2e-7);
    }
    for (size_t r = 0; r < rows; r++) {
        double sum = 0.0;
        for (size_t i = 0; i < vocab; i++) {
            sum += (double)logits[r * vocab + i];
            if (labels[r] < 0)
                assert_true(logits[r * vocab + i] == 0.0f);
        }
        assert_true(fabs(sum) < 1e-6); /* a softmax less a one-hot row */
    }
    free(logits);
    free(losses);
    free(saved);
    free(again);
    free(labels);
    free(wide);
    free(want);
    kernel_ops_free(ops);
}

static void matches_reference(void **state)
{
    (void)state;
    check(1, 1, 1.0f);
    check(3, 7, 5.0f);
    check(7, 63, 5.0f);
    check(5, 65, 40.0f);
    check(4, 250, 5.0f);
    check(3, 5003, 10.0f);
}

/* Equal logits: ln V (public fault: three vocabulary sizes mixed up). */
static void uniform_logits(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    float logits[250] = {0}, loss;
    const int32_t label = 17;
    ops->cross_entropy(ops, &loss, logits, &label, 1, 250, 1.0f, false);
    assert_true(fabs((double)loss - 5.521461) < 1e-6);
    kernel_ops_free(ops);
}

/* What is not finite must be seen, not hidden. */
static void not_finite(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    float logits[40] = {0}, loss;
    const int32_t label = 3, ignored = -1;
    logits[20] = NAN;
    ops->cross_entropy(ops, &loss, logits, &label, 1, 40, 1.0f, true);
    assert_true(loss - loss != 0.0f);
    logits[20] = INFINITY;
    ops->cross_entropy(ops, &loss, logits, &label, 1, 40, 1.0f, false);
    assert_true(loss - loss != 0.0f);
    ops->cross_entropy(ops, &loss, logits, &ignored, 1, 40, 1.0f, true);
    assert_true(loss == 0.0f && logits[20] == 0.0f);
    kernel_ops_free(ops);
}

static void same_bits(void **state)
{
    (void)state;
    enum { ROWS = 37, VOCAB = 2500 };
    int32_t *labels = values_integers(ROWS, VOCAB, 3);
    float *first = values_random(ROWS * VOCAB, 4.0f, 1), first_losses[ROWS], losses[ROWS];
    struct ops *ops = kernel_ops(1);
    cpu_of(ops)->simd = &simd_table_plain;
    ops->cross_entropy(ops, first_losses, first, labels, ROWS, VOCAB, 0.1f, true);
    kernel_ops_free(ops);
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        float *logits = values_random(ROWS * VOCAB, 4.0f, 1);
        ops = kernel_ops(n_threads);
        ops->cross_entropy(ops, losses, logits, labels, ROWS, VOCAB, 0.1f, true);
        assert_true(values_equal(first, logits, ROWS * VOCAB));
        assert_true(values_equal(first_losses, losses, ROWS));
        free(logits);
        kernel_ops_free(ops);
    }
    free(first);
    free(labels);
}

static void sum_in_order(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(2);
    float *values = values_random(10007, 5.0f, 1);
    double want = 0.0, got = 1.0;
    for (size_t i = 0; i < 10007; i++)
        want += (double)values[i];
    ops->sum(ops, &got, values, 10007);
    assert_true(got == want);
    ops->sum(ops, &got, values, 0);
    assert_true(got == 0.0);
    free(values);
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_reference), cmocka_unit_test(uniform_logits),
        cmocka_unit_test(not_finite),        cmocka_unit_test(same_bits),
        cmocka_unit_test(sum_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
