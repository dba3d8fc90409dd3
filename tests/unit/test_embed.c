/* Embedding tables: rows are fetched and added, gradients add up in the order of rows.
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

enum { ROWS = 130, VOCAB = 11, T = 65 };

static void check(size_t width, bool with_positions)
{
    float *wte = values_random(VOCAB * width, 1.0f, 1), *wpe = values_random(T * width, 1.0f, 2);
    float *dout = values_random(ROWS * width, 1.0f, 3);
    int32_t *tokens = values_integers(ROWS, VOCAB, 4), positions[ROWS];
    for (int r = 0; r < ROWS; r++)
        positions[r] = r % T;
    float *want_dwte = values_random(VOCAB * width, 1.0f, 5);
    float *want_dwpe = values_random(T * width, 1.0f, 6);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t i = 0; i < width; i++) {
            want_dwte[(size_t)tokens[r] * width + i] += dout[r * width + i];
            want_dwpe[(size_t)positions[r] * width + i] += dout[r * width + i];
        }
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        struct ops *ops = kernel_ops(n_threads);
        float *out = values_random(ROWS * width, 9.0f, 7);
        float *dwte = values_random(VOCAB * width, 1.0f, 5);
        float *dwpe = values_random(T * width, 1.0f, 6);
        ops->embed_forward(ops, out, tokens, positions, wte, with_positions ? wpe : NULL, ROWS,
                           width);
        for (size_t r = 0; r < ROWS; r++)
            for (size_t i = 0; i < width; i++) {
                const float token = wte[(size_t)tokens[r] * width + i];
                const float position = wpe[(size_t)positions[r] * width + i];
                assert_true(out[r * width + i] == (with_positions ? token + position : token));
            }
        ops->embed_backward(ops, dwte, with_positions ? dwpe : NULL, dout, tokens, positions, ROWS,
                            width);
        assert_true(values_equal(dwte, want_dwte, VOCAB * width));
        if (with_positions)
            assert_true(values_equal(dwpe, want_dwpe, T * width));
        free(out);
        free(dwte);
        free(dwpe);
        kernel_ops_free(ops);
    }
    free(wte);
    free(wpe);
    free(dout);
    free(tokens);
    free(want_dwte);
    free(want_dwpe);
}

static void rows_in_order(void **state)
{
    (void)state;
    const size_t widths[] = {1, 7, 64, 65, 300};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        check(widths[i], true);
        check(widths[i], false);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_in_order)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
