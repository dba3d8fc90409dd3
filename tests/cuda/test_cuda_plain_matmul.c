/* Plain matrix products on the GPU's kernel, run by fibres, against the CPU device.
 *
 * links: testing kernels base
 * sources: kernels/cuda/plain_matmul.cu
 *
 * Sums of up to 768 products are taken in another order: 2e-6 of the greatest result. bf16 inputs
 * have exact products in fp32; see typed.h for the rounding of C. */
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

static const double TOLERANCE = 2e-6;

struct arrays {
    float *a, *b, *bias, *c;
    void *typed_a, *typed_b, *typed_bias, *typed_c, *kept;
};

static void check(struct ops *ops, enum dtype dtype, const struct matmul *shape, bool with_bias)
{
    const size_t m = shape->m, n = shape->n, k = shape->k;
    const enum dtype c_type = shape->c_fp32 ? DTYPE_FP32 : dtype;
    struct arrays x = {.a = values_random(m * k, 1.0f, 1),
                       .b = values_random(k * n, 1.0f, 2),
                       .bias = values_random(n, 1.0f, 3),
                       .c = values_random(m * n, 3.0f, 4)};
    x.typed_a = typed_new(dtype, x.a, m * k);
    x.typed_b = typed_new(dtype, x.b, k * n);
    x.typed_bias = typed_new(dtype, x.bias, n);
    const size_t n_orders = m * n * k < 4000 ? TYPED_ORDERS : 1; /* a long one takes long */
    for (size_t order = 0; order < n_orders; order++) {
        x.typed_c = typed_new(c_type, x.c, m * n);
        struct cuda_plain_matmul call = {.dtype = dtype, .call = *shape};
        call.call.a = x.typed_a;
        call.call.b = x.typed_b;
        call.call.bias = with_bias ? x.typed_bias : NULL;
        call.call.c = x.typed_c;
        typed_order(order);
        cuda_launch_plain_matmul(NULL, &call);
        assert_true(typed_same(&x.kept, x.typed_c, m * n * typed_bytes(c_type)));
        free(x.typed_c);
    }
    struct matmul want = *shape;
    want.a = x.a;
    want.b = x.b;
    want.bias = with_bias ? x.bias : NULL;
    want.c = x.c;
    const size_t scratch = ops->matmul_scratch(ops, &want);
    want.scratch = scratch > 0 ? malloc(scratch) : NULL;
    ops->matmul(ops, &want);
    if (!typed_close("product", c_type, x.kept, x.c, m * n, TOLERANCE)) {
        fail_msg("form %d, %zu x %zu x %zu, bias %d, accumulate %d", (int)shape->form, m, n, k,
                 with_bias, shape->accumulate);
    }
    void *all[] = {want.scratch, x.a, x.b, x.bias, x.c, x.typed_a, x.typed_b, x.typed_bias, x.kept};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

static void matches_cpu(void **state)
{
    (void)state;
    const size_t shapes[][3] = {{1, 1, 1},     {5, 7, 3},    {64, 64, 16},  {65, 130, 33},
                                {3, 251, 768}, {128, 5, 40}, {1, 66, 1000}, {5, 70, 11}};
    struct ops *ops = kernel_ops(1);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int form = MATMUL_NT; form <= MATMUL_TN; form++) {
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                struct matmul shape = {.form = (enum matmul_form)form,
                                       .m = shapes[i][0],
                                       .n = shapes[i][1],
                                       .k = shapes[i][2],
                                       .accumulate = accumulate};
                const bool with_bias = form == MATMUL_NT && i % 2 == (size_t)accumulate;
                check(ops, DTYPE_FP32, &shape, with_bias);
                check(ops, DTYPE_BF16, &shape, with_bias);
                shape.c_fp32 = true;
                check(ops, DTYPE_BF16, &shape, with_bias);
            }
        }
    }
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
