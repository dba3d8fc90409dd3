/* Normal random values: their distribution, and that element i is element i in any call.
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

static void distribution(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    struct ops *ops = kernel_ops(2);
    float *x = values_zero(N);
    ops->random_normal(ops, x, N, 1.0f, 42, 3, 0);
    double moment[5] = {0}, neighbours = 0.0;
    size_t within_one = 0, beyond_three = 0;
    for (size_t i = 0; i < N; i++) {
        assert_true(isfinite(x[i]) && fabsf(x[i]) < 5.78f);
        double power = 1.0;
        for (int k = 1; k <= 4; k++) {
            power *= (double)x[i];
            moment[k] += power / N;
        }
        neighbours += i ? (double)x[i] * (double)x[i - 1] / N : 0.0;
        within_one += fabsf(x[i]) < 1.0f;
        beyond_three += fabsf(x[i]) > 3.0f;
    }
    /* Five standard deviations of each estimate over 2^20 values. */
    assert_true(fabs(moment[1]) < 0.005);
    assert_true(fabs(moment[2] - 1.0) < 0.007);
    assert_true(fabs(moment[3]) < 0.019);
    assert_true(fabs(moment[4] - 3.0) < 0.048);
    assert_true(fabs(neighbours) < 0.005);
    assert_true(fabs((double)within_one / N - 0.682689) < 0.0023);
    assert_true(fabs((double)beyond_three / N - 0.0026998) < 0.00026);
    free(x);
    kernel_ops_free(ops);
}

/* The four words of a counter, in double with the mathematics library. */
static double expected(uint64_t element, uint64_t seed, uint32_t tensor)
{
    const struct philox_key key = philox_key(seed, 0);
    const uint64_t counter = element / 4;
    const struct philox w =
        philox4x32(key.key0, key.key1, (uint32_t)counter, (uint32_t)(counter >> 32), tensor,
                   philox_stream(0, RANDOM_INIT, 0));
    const uint32_t *pair = w.word + (element % 4) / 2 * 2;
    const double u1 = ((double)(pair[0] >> 8) + 1.0) / 16777216.0;
    const double turn = 2.0 * acos(-1.0) * (double)(pair[1] >> 8) / 16777216.0;
    return sqrt(-2.0 * log(u1)) * (element % 2 ? sin(turn) : cos(turn));
}

static void matches_formula(void **state)
{
    (void)state;
    enum { N = 20000 };
    struct ops *ops = kernel_ops(1);
    float *x = values_zero(N);
    const uint64_t first = 4 * 0xFFFFFF00ull + 3; /* the counter's low word wraps inside */
    ops->random_normal(ops, x, N, 0.02f, 9, 8, first);
    for (size_t i = 0; i < N; i++)
        assert_true(fabs((double)x[i] - 0.02 * expected(first + i, 9, 8)) < 2e-8);
    free(x);
    kernel_ops_free(ops);
}

static void independent_of_the_call(void **state)
{
    (void)state;
    enum { N = 70001 };
    struct ops *ops = kernel_ops(1);
    float *whole = values_zero(N), *part = values_zero(N), *other = values_zero(N);
    ops->random_normal(ops, whole, N, 0.5f, 7, 1, 0);
    const size_t cuts[] = {0, 1, 3, 64, 65, 1000, 33333, N};
    for (size_t i = 0; i + 1 < sizeof cuts / sizeof *cuts; i++)
        ops->random_normal(ops, part + cuts[i], cuts[i + 1] - cuts[i], 0.5f, 7, 1, cuts[i]);
    assert_true(values_equal(whole, part, N));
    kernel_ops_free(ops);
    ops = kernel_ops(3);
    ops->random_normal(ops, part, N, 0.5f, 7, 1, 0);
    assert_true(values_equal(whole, part, N));
    cpu_of(ops)->simd = &simd_table_plain;
    ops->random_normal(ops, part, N, 0.5f, 7, 1, 0);
    assert_true(values_equal(whole, part, N));
    ops->random_normal(ops, other, N, 0.5f, 7, 2, 0);
    assert_true(memcmp(whole, other, N * sizeof *whole) != 0);
    ops->random_normal(ops, other, N, 0.5f, 8, 1, 0);
    assert_true(memcmp(whole, other, N * sizeof *whole) != 0);
    free(whole);
    free(part);
    free(other);
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(distribution),
        cmocka_unit_test(matches_formula),
        cmocka_unit_test(independent_of_the_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
