/* Layer and RMS norm on the GPU's kernels, run by fibres, against the CPU device.
 *
 * links: testing kernels base
 * sources: kernels/cuda/norm.cu
 *
 * In fp32 sums are taken in another order than the CPU's: those of a row keep 2e-6 of the greatest
 * result; those of a column, which the CPU adds one after the other, with 1100 rows 5e-6. bf16: see
 * typed.h. */
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

static const double TOLERANCE = 2e-6, COLUMN_TOLERANCE = 5e-6;

/* x, weight, bias, dout and dx as the CPU takes them, and the same in the type. */
struct norm {
    enum norm_kind kind;
    enum dtype dtype;
    size_t rows, width;
    float *x, *weight, *bias, *dout, *dx, *out, *mean, *rstd, *dweight, *dbias;
    void *typed_x, *typed_weight, *typed_bias, *typed_dout, *typed_dx, *typed_out;
    float *cuda_mean, *cuda_rstd, *cuda_dweight, *cuda_dbias;
};

static struct norm make(enum norm_kind kind, enum dtype dtype, size_t rows, size_t width)
{
    const size_t n = rows * width;
    struct norm a = {.kind = kind,
                     .dtype = dtype,
                     .rows = rows,
                     .width = width,
                     .x = values_random(n, 3.0f, 1),
                     .weight = values_random(width, 1.0f, 2),
                     .bias = values_random(width, 1.0f, 3),
                     .dout = values_random(n, 1.0f, 4),
                     .dx = values_random(n, 1.0f, 5),
                     .out = values_random(n, 9.0f, 6),
                     .mean = values_zero(rows),
                     .rstd = values_zero(rows),
                     .dweight = values_random(width, 9.0f, 7),
                     .dbias = values_random(width, 9.0f, 8),
                     .cuda_mean = values_random(rows, 9.0f, 9),
                     .cuda_rstd = values_random(rows, 9.0f, 10),
                     .cuda_dweight = values_random(width, 9.0f, 11),
                     .cuda_dbias = values_random(width, 9.0f, 12)};
    for (size_t i = 0; i < n; i++) {
        a.x[i] += 4.0f; /* a mean to remove */
    }
    a.typed_x = typed_new(dtype, a.x, n);
    a.typed_weight = typed_new(dtype, a.weight, width);
    a.typed_bias = typed_new(dtype, a.bias, width);
    a.typed_dout = typed_new(dtype, a.dout, n);
    a.typed_dx = typed_new(dtype, a.dx, n);
    a.typed_out = typed_new(dtype, a.out, n);
    return a;
}

static void free_norm(struct norm *a)
{
    void *all[] = {a->x,         a->weight,       a->bias,       a->dout,       a->dx,
                   a->out,       a->mean,         a->rstd,       a->dweight,    a->dbias,
                   a->typed_x,   a->typed_weight, a->typed_bias, a->typed_dx,   a->typed_dout,
                   a->typed_out, a->cuda_mean,    a->cuda_rstd,  a->cuda_dbias, a->cuda_dweight};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

static void run_cuda(struct norm *a)
{
    const bool layer = a->kind == NORM_LAYER;
    const struct cuda_norm_forward forward = {.dtype = a->dtype,
                                              .kind = a->kind,
                                              .out = a->typed_out,
                                              .mean = layer ? a->cuda_mean : NULL,
                                              .rstd = a->cuda_rstd,
                                              .x = a->typed_x,
                                              .weight = a->typed_weight,
                                              .bias = layer ? a->typed_bias : NULL,
                                              .rows = a->rows,
                                              .width = a->width,
                                              .eps = 1e-5f};
    cuda_launch_norm_forward(NULL, &forward);
    const struct cuda_norm_backward backward = {.dtype = a->dtype,
                                                .kind = a->kind,
                                                .dx = a->typed_dx,
                                                .dweight = a->cuda_dweight,
                                                .dbias = layer ? a->cuda_dbias : NULL,
                                                .dout = a->typed_dout,
                                                .x = a->typed_x,
                                                .weight = a->typed_weight,
                                                .mean = layer ? a->cuda_mean : NULL,
                                                .rstd = a->cuda_rstd,
                                                .rows = a->rows,
                                                .width = a->width};
    cuda_launch_norm_backward(NULL, &backward);
}

static void check(enum norm_kind kind, enum dtype dtype, size_t rows, size_t width)
{
    const bool layer = kind == NORM_LAYER;
    const size_t n = rows * width;
    struct norm a = make(kind, dtype, rows, width);
    struct ops *ops = kernel_ops(1);
    ops->norm_forward(ops, kind, a.out, layer ? a.mean : NULL, a.rstd, a.x, a.weight,
                      layer ? a.bias : NULL, rows, width, 1e-5f);
    ops->norm_backward(ops, kind, a.dx, a.dweight, layer ? a.dbias : NULL, a.dout, a.x, a.weight,
                       layer ? a.mean : NULL, a.rstd, rows, width);
    kernel_ops_free(ops);
    run_cuda(&a);
    assert_true(typed_close("out", dtype, a.typed_out, a.out, n, TOLERANCE));
    assert_true(typed_close("rstd", DTYPE_FP32, a.cuda_rstd, a.rstd, rows, TOLERANCE));
    assert_true(typed_close("dx", dtype, a.typed_dx, a.dx, n, TOLERANCE));
    assert_true(
        typed_close("dweight", DTYPE_FP32, a.cuda_dweight, a.dweight, width, COLUMN_TOLERANCE));
    if (layer) {
        assert_true(typed_close("mean", DTYPE_FP32, a.cuda_mean, a.mean, rows, TOLERANCE));
        assert_true(
            typed_close("dbias", DTYPE_FP32, a.cuda_dbias, a.dbias, width, COLUMN_TOLERANCE));
    }
    free_norm(&a);
}

/* Short and long rows, whole packs and not; columns with more rows than a team takes at once;
 * rows wider than a block's threads; narrow and wide strips of columns. */
static void matches_cpu(void **state)
{
    (void)state;
    const size_t shapes[][2] = {{1, 1},    {5, 7},   {5, 768},  {2, 1000},
                                {1100, 8}, {300, 5}, {1, 5000}, {2, 4099}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int kind = NORM_LAYER; kind <= NORM_RMS; kind++) {
            check((enum norm_kind)kind, DTYPE_FP32, shapes[i][0], shapes[i][1]);
            check((enum norm_kind)kind, DTYPE_BF16, shapes[i][0], shapes[i][1]);
        }
    }
}

static void same_bits(void **state)
{
    (void)state;
    const size_t shapes[][2] = {{5, 1000}, {1100, 8}, {270, 7}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
            void *kept[5] = {NULL};
            for (size_t order = 0; order < TYPED_ORDERS; order++) {
                const size_t rows = shapes[i][0], width = shapes[i][1];
                struct norm a = make(NORM_LAYER, (enum dtype)dtype, rows, width);
                const size_t bytes = rows * width * typed_bytes(a.dtype);
                typed_order(order);
                run_cuda(&a);
                assert_true(typed_same(&kept[0], a.typed_out, bytes));
                assert_true(typed_same(&kept[1], a.typed_dx, bytes));
                assert_true(typed_same(&kept[2], a.cuda_dweight, width * sizeof(float)));
                assert_true(typed_same(&kept[3], a.cuda_dbias, width * sizeof(float)));
                assert_true(typed_same(&kept[4], a.cuda_rstd, rows * sizeof(float)));
                free_norm(&a);
            }
            for (size_t k = 0; k < sizeof kept / sizeof *kept; k++) {
                free(kept[k]);
            }
        }
    }
    typed_order(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_cpu),
        cmocka_unit_test(same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
