/* Activation functions on the GPU's kernels, run by fibres, against the CPU device.
 *
 * links: testing kernels base
 * sources: kernels/cuda/mlp.cu
 *
 * fp32: the two exponentials are within about 1 ulp of the true one each, a division and a few
 * products follow: 1e-6 of the greatest value. bf16: see typed.h. */
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

static const double TOLERANCE = 1e-6;

struct mlp {
    enum activation_kind kind;
    enum dtype dtype;
    size_t rows, inner, skew; /* skew: of `in` and `din`, in elements */
};

static void launch_backward(const struct mlp *m, void *din, const void *dout, const void *in)
{
    const struct cuda_activation_backward call = {.dtype = m->dtype,
                                                  .kind = m->kind,
                                                  .din = din,
                                                  .dout = dout,
                                                  .in = in,
                                                  .rows = m->rows,
                                                  .inner = m->inner};
    cuda_launch_activation_backward(NULL, &call);
}

static void check(const struct mlp *m)
{
    const size_t n_out = m->rows * m->inner;
    const size_t n_in = m->kind == ACTIVATION_SWIGLU ? 2 * n_out : n_out;
    float *in = values_random(n_in, 6.0f, 1), *dout = values_random(n_out, 1.0f, 2);
    float *out = values_random(n_out, 9.0f, 3), *din = values_random(n_in, 9.0f, 4);
    void *typed_in = typed_new_skew(m->dtype, in, n_in, m->skew);
    void *typed_dout = typed_new(m->dtype, dout, n_out);
    void *typed_out = typed_new(m->dtype, out, n_out);
    void *typed_din = typed_new_skew(m->dtype, din, n_in, m->skew);
    struct ops *ops = kernel_ops(1);
    ops->activation_forward(ops, m->kind, out, in, m->rows, m->inner);
    ops->activation_backward(ops, m->kind, din, dout, in, m->rows, m->inner);
    kernel_ops_free(ops);
    void *first_out = NULL, *first_din = NULL;
    for (size_t order = 1; order < TYPED_ORDERS; order++) {
        typed_order(order);
        const struct cuda_activation_forward forward = {.dtype = m->dtype,
                                                        .kind = m->kind,
                                                        .out = typed_out,
                                                        .in = typed_in,
                                                        .rows = m->rows,
                                                        .inner = m->inner};
        cuda_launch_activation_forward(NULL, &forward);
        launch_backward(m, typed_din, typed_dout, typed_in);
        assert_true(typed_same(&first_out, typed_out, n_out * typed_bytes(m->dtype)));
        assert_true(typed_same(&first_din, typed_din, n_in * typed_bytes(m->dtype)));
    }
    assert_true(typed_close("out", m->dtype, typed_out, out, n_out, TOLERANCE));
    assert_true(typed_close("din", m->dtype, typed_din, din, n_in, TOLERANCE));
    launch_backward(m, typed_in, typed_dout, typed_in); /* in place */
    assert_memory_equal(typed_in, typed_din, n_in * typed_bytes(m->dtype));
    typed_free_skew(m->dtype, typed_in, m->skew);
    typed_free_skew(m->dtype, typed_din, m->skew);
    void *all[] = {in, dout, out, din, typed_dout, typed_out, first_out, first_din};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

static void matches_cpu(void **state)
{
    (void)state;
    const size_t shapes[][3] = {{1, 1, 0},   {5, 7, 0},    {1, 7, 0},   {5, 768, 0}, {5, 1000, 1},
                                {2, 172, 0}, {3, 2056, 0}, {9, 251, 0}, {8, 4, 0},   {1, 8, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int kind = ACTIVATION_GELU; kind <= ACTIVATION_SWIGLU; kind++) {
            for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
                const struct mlp m = {(enum activation_kind)kind, (enum dtype)dtype, shapes[i][0],
                                      shapes[i][1], shapes[i][2]};
                check(&m);
            }
        }
    }
}

/* More rows than a grid has blocks along y: 65535. */
static void many_rows(void **state)
{
    (void)state;
    enum { ROWS = 65600 };
    float *in = values_random(2 * ROWS, 6.0f, 1);
    float *got = values_random(ROWS, 9.0f, 2), *want = values_zero(ROWS);
    struct ops *ops = kernel_ops(1);
    ops->activation_forward(ops, ACTIVATION_SWIGLU, want, in, ROWS, 1);
    kernel_ops_free(ops);
    const struct cuda_activation_forward call = {
        .kind = ACTIVATION_SWIGLU, .out = got, .in = in, .rows = ROWS, .inner = 1};
    cuda_launch_activation_forward(NULL, &call);
    assert_true(typed_close("out", DTYPE_FP32, got, want, ROWS, TOLERANCE));
    free(in);
    free(got);
    free(want);
}

/* Far outside of where the curve bends, and where the exponential is 0 or infinite. */
static void ends(void **state)
{
    (void)state;
    float in[] = {-1e15f, -20.0f, 0.0f, 20.0f, 1e15f, NAN};
    float dout[] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    float out[6], din[6];
    const struct mlp m = {ACTIVATION_GELU, DTYPE_FP32, 1, 6, 0};
    const struct cuda_activation_forward call = {.out = out, .in = in, .rows = 1, .inner = 6};
    cuda_launch_activation_forward(NULL, &call);
    launch_backward(&m, din, dout, in);
    assert_true(out[0] == 0.0f && out[2] == 0.0f && out[3] == 20.0f && out[4] == 1e15f);
    assert_true(fabsf(din[0]) < 1e-20f && fabsf(out[1]) < 1e-30f && din[2] == 0.5f &&
                din[3] == 1.0f && din[4] == 1.0f);
    assert_true(isnan(out[5]) && isnan(din[5]));
    float gate[] = {-1e15f, -200.0f, 1e15f, 1.0f, 1.0f, 1.0f}; /* and the ups */
    float dgate[6];
    const struct mlp s = {ACTIVATION_SWIGLU, DTYPE_FP32, 1, 3, 0};
    launch_backward(&s, dgate, dout, gate);
    assert_true(fabsf(dgate[0]) < 1e-10f && fabsf(dgate[1]) < 1e-20f && dgate[2] == 1.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_cpu),
        cmocka_unit_test(many_rows),
        cmocka_unit_test(ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
