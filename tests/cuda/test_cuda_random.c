/* Normal random values of the GPU's kernel, run by fibres: the CPU device's bits, for any first
 * element.
 *
 * links: testing kernels base
 * sources: kernels/cuda/random.cu
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/kernels.h"
#include "tests/cuda/lib/typed.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static void check(struct ops *ops, size_t n, size_t skew, uint64_t seed, uint64_t first)
{
    const size_t whole = n + skew + 1;
    float *got = values_random(whole, 1.0f, 1), *want = values_random(whole, 1.0f, 1);
    const struct cuda_random_normal args = {got + skew, n, 0.02f, seed, 77, first};
    cuda_launch_random_normal(NULL, &args);
    ops->random_normal(ops, want + skew, n, 0.02f, seed, 77, first);
    assert_true(values_equal(got, want, whole));
    free(got);
    free(want);
}

/* Whole and cut counters at both ends, every alignment of values against counters, and counters
 * on both sides of 2^32. */
static void same_bits_as_cpu(void **state)
{
    (void)state;
    const size_t sizes[] = {0, 1, 2, 3, 4, 5, 7, 8, 130, 1025};
    const uint64_t places[] = {0, 1000, (uint64_t)4 << 32, ((uint64_t)4 << 32) - 128,
                               (uint64_t)1 << 50};
    struct ops *ops = kernel_ops(1);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t place = 0; place < sizeof places / sizeof *places; place++) {
            for (size_t j = 0; j < 16; j++) {
                typed_order((i + j) % TYPED_ORDERS);
                check(ops, sizes[i], j % 4, 42 + place, places[place] + j / 4);
            }
        }
    }
    kernel_ops_free(ops);
}

/* Many values, so that every quarter turn, exponent and end of a polynomial comes by; more than
 * the grid takes at once. */
static void same_bits_for_millions(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(2);
    typed_order(0);
    check(ops, (size_t)8192 * 1024 + 5001, 0, 0x123456789ABCDEFu, 3);
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits_as_cpu),
        cmocka_unit_test(same_bits_for_millions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
