/* Rotary embedding against the plain double reference; there and back.
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

static struct rotary rotary_of(uint32_t head_dim)
{
    struct rotary rotary = {.n_pairs = head_dim / 2};
    for (uint32_t i = 0; i < rotary.n_pairs; i++)
        rotary.inv_freq[i] = powf(10000.0f, -2.0f * (float)i / (float)head_dim);
    return rotary;
}

static void matches_reference(void **state)
{
    (void)state;
    const uint32_t shapes[][4] = {
        {1, 1, 1, 16}, {7, 4, 1, 16}, {65, 4, 2, 64}, {33, 2, 2, 256}, {63, 3, 1, 10}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const uint32_t rows = shapes[i][0], nh = shapes[i][1], nkv = shapes[i][2];
        const uint32_t hd = shapes[i][3];
        const size_t n = (size_t)rows * (nh + 2 * nkv) * hd;
        const struct rotary rotary = rotary_of(hd);
        int32_t *positions = values_integers(rows, 1000000, 3);
        float *first = NULL;
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            struct ops *ops = kernel_ops(n_threads);
            float *qkv = values_random(n, 1.0f, 1), *before = values_copy(qkv, n);
            double *want = values_widen(qkv, n);
            ops->rotary(ops, qkv, positions, &rotary, rows, nh, nkv, hd, 1);
            reference_rotary(want, positions, &rotary, rows, nh, nkv, hd, 1);
            /* Two products and a sum per element. */
            assert_true(values_distance(qkv, want, n) < 2e-7);
            if (first)
                assert_true(values_equal(first, qkv, n));
            else
                first = values_copy(qkv, n);
            /* The backward rotation undoes it, and leaves values alone. */
            ops->rotary(ops, qkv, positions, &rotary, rows, nh, nkv, hd, -1);
            for (size_t j = 0; j < n; j++)
                assert_true(fabsf(qkv[j] - before[j]) < 4e-7f);
            const size_t row = (nh + 2 * nkv) * hd, values = (nh + nkv) * hd;
            assert_true(values_equal(qkv + values, before + values, row - values));
            free(qkv);
            free(before);
            free(want);
            kernel_ops_free(ops);
        }
        free(first);
        free(positions);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(matches_reference)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
