/* Sums over ranges and moves of memory.
 *
 * links: testing kernels base
 */
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

static void squares(void **state)
{
    (void)state;
    const size_t sizes[] = {0, 1, 31, 33, 4095, 4096, 4097, 200000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t n = sizes[s];
        float *x = values_random(n, 3.0f, 1);
        long double want = 0.0L;
        for (size_t i = 0; i < n; i++)
            want += (long double)x[i] * (long double)x[i];
        double first = 0.0;
        for (int n_threads = 0; n_threads <= 3; n_threads++) {
            struct ops *ops = kernel_ops(n_threads ? n_threads : 1);
            if (n_threads == 0)
                cpu_of(ops)->simd = &simd_table_plain;
            double got = -1.0;
            ops->sum_squares(ops, &got, x, n);
            /* fp64 with at most 6,250 additions in a row. */
            assert_true(fabs(got - (double)want) <= 1e-13 * (double)want);
            if (n_threads == 0)
                first = got;
            assert_true(got == first);
            kernel_ops_free(ops);
        }
        free(x);
    }
}

/* More blocks than are kept at once. */
static void many_blocks(void **state)
{
    (void)state;
    enum { N = 1024 * 4096 + 5000 };
    float *x = values_zero(N);
    for (size_t i = 0; i < N; i++)
        x[i] = 2.0f;
    struct ops *ops = kernel_ops(2);
    double got = 0.0;
    ops->sum_squares(ops, &got, x, N);
    assert_true(got == 4.0 * N);
    x[N - 1] = INFINITY;
    ops->sum_squares(ops, &got, x, N);
    assert_true(isinf(got));
    kernel_ops_free(ops);
    free(x);
}

static void parts_in_order(void **state)
{
    (void)state;
    const size_t sizes[] = {1, 63, 1025, 40000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t n_parts = 1; n_parts <= 4; n_parts++) {
            const size_t n = sizes[s], stride = n + 3;
            float *parts = values_random(n_parts * stride, 2.0f, 1), *want = values_zero(n);
            for (size_t i = 0; i < n; i++) {
                want[i] = parts[i];
                for (size_t p = 1; p < n_parts; p++)
                    want[i] += parts[p * stride + i];
            }
            for (int n_threads = 1; n_threads <= 3; n_threads++) {
                struct ops *ops = kernel_ops(n_threads);
                float *out = values_random(n, 9.0f, 2);
                ops->sum_parts(ops, out, parts, n_parts, stride, n);
                assert_true(values_equal(out, want, n));
                kernel_ops_free(ops);
                free(out);
            }
            free(parts);
            free(want);
        }
}

static void moves(void **state)
{
    (void)state;
    enum { N = 100003 };
    for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
        struct ops *ops = kernel_ops(n_threads);
        float *a = values_random(N, 1.0f, 1), *b = values_random(N, 1.0f, 2);
        float *sum = values_copy(a, N);
        ops->add(ops, sum, b, N);
        for (size_t i = 0; i < N; i++)
            assert_true(sum[i] == a[i] + b[i]);
        ops->copy(ops, sum, b, (N - 1) * sizeof *b);
        assert_true(values_equal(sum, b, N - 1));
        assert_true(sum[N - 1] == a[N - 1] + b[N - 1]); /* not one byte more */
        ops->fill(ops, a, N - 1, 2.5f);
        for (size_t i = 0; i < N - 1; i++)
            assert_true(a[i] == 2.5f);
        ops->zero(ops, a, (N - 2) * sizeof *a);
        for (size_t i = 0; i < N - 2; i++)
            assert_true(a[i] == 0.0f);
        assert_true(a[N - 2] == 2.5f);
        free(a);
        free(b);
        free(sum);
        kernel_ops_free(ops);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(squares),
        cmocka_unit_test(many_blocks),
        cmocka_unit_test(parts_in_order),
        cmocka_unit_test(moves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
