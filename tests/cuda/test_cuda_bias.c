/* Column sums on the GPU's kernel, run by fibres, against the CPU device.
 *
 * links: testing kernels base
 * sources: kernels/cuda/bias.cu
 *
 * The result is fp32 in both types. Rows are added in another order than the CPU's, which adds one
 * after the other: 1500 of them keep 5e-6 of the greatest sum. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include "kernels/cuda/kernels.h"
#include "tests/cuda/lib/typed.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static const double TOLERANCE = 5e-6;

/* Whole packs and not, more rows than the teams take at once, all widths of strips (33000 columns:
 * a warp side by side), a start that is not 16-byte aligned. */
static const size_t shapes[][3] = {{1, 1, 0},    {5, 7, 0},     {5, 768, 0},
                                   {2, 1000, 0}, {1500, 24, 0}, {700, 9, 0},
                                   {3, 4099, 0}, {2, 33000, 0}, {300, 64, 1}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static void check(enum dtype dtype, size_t rows, size_t cols, size_t skew)
{
    float *dout = values_random(rows * cols, 1.0f, 1);
    float *want = values_random(cols, 9.0f, 2), *got = values_random(cols, 9.0f, 3);
    void *typed = typed_new_skew(dtype, dout, rows * cols, skew);
    void *kept = NULL;
    struct ops *ops = kernel_ops(1);
    ops->bias_backward(ops, want, dout, rows, cols);
    kernel_ops_free(ops);
    for (size_t order = 0; order < TYPED_ORDERS; order++) {
        typed_order(order);
        const struct cuda_bias_backward call = {
            .dtype = dtype, .dbias = got, .dout = typed, .rows = rows, .cols = cols};
        cuda_launch_bias_backward(NULL, &call);
        assert_true(typed_same(&kept, got, cols * sizeof *got));
    }
    assert_true(typed_close("dbias", DTYPE_FP32, got, want, cols, TOLERANCE));
    typed_free_skew(dtype, typed, skew);
    free(kept);
    free(dout);
    free(want);
    free(got);
}

static void matches_cpu_in_any_order(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        check(DTYPE_FP32, shapes[i][0], shapes[i][1], shapes[i][2]);
        check(DTYPE_BF16, shapes[i][0], shapes[i][1], shapes[i][2]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_cpu_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
