/* The residual stream and its dropout on the GPU's kernel, run by fibres, against the CPU device,
 * bit for bit: the same random words, one product and one sum in fp32, one rounding.
 *
 * links: testing kernels base
 * sources: kernels/cuda/residual.cu */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include "kernels/cuda/kernels.h"
#include "kernels/philox.h"
#include "tests/cuda/lib/typed.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

struct arrays {
    enum dtype dtype;
    size_t rows, width, skew; /* skew: of residual, in elements */
    float *residual, *branch, *want;
    void *typed_residual, *typed_branch, *out;
};

static struct arrays make(enum dtype dtype, size_t rows, size_t width, size_t skew)
{
    const size_t n = rows * width;
    struct arrays a = {dtype,
                       rows,
                       width,
                       skew,
                       values_random(n, 1.0f, 1),
                       values_random(n, 1.0f, 2),
                       values_random(n, 9.0f, 3),
                       NULL,
                       NULL,
                       NULL};
    a.residual[0] = -0.0f;
    a.branch[0] = -0.0f;
    a.typed_residual = typed_new_skew(dtype, a.residual, n, skew);
    a.typed_branch = typed_new(dtype, a.branch, n);
    a.out = typed_new(dtype, a.want, n);
    return a;
}

static void free_arrays(struct arrays *a)
{
    typed_free_skew(a->dtype, a->typed_residual, a->skew);
    void *all[] = {a->residual, a->branch, a->want, a->typed_branch, a->out};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

/* Step and sample reach a kernel by `varying` alone: what stands in the struct is made wrong. */
static void launch(const struct arrays *a, void *out, const void *residual, const void *branch,
                   const struct dropout *dropout)
{
    const struct cuda_varying varying = {dropout->step, dropout->first_sample};
    struct cuda_residual_dropout call = {.dtype = a->dtype,
                                         .out = out,
                                         .residual = residual,
                                         .branch = branch,
                                         .rows = a->rows,
                                         .width = a->width,
                                         .dropout = *dropout,
                                         .varying = dropout->p > 0.0f ? &varying : NULL};
    call.dropout.step = 0xDEAD;
    call.dropout.first_sample = 0xDEAD;
    cuda_launch_residual_dropout(NULL, &call);
}

static void launch_backward(const struct arrays *a, void *dbranch, const void *dout,
                            const struct dropout *dropout)
{
    const struct cuda_varying varying = {dropout->step, dropout->first_sample};
    struct cuda_dropout_backward call = {.dtype = a->dtype,
                                         .dbranch = dbranch,
                                         .dout = dout,
                                         .rows = a->rows,
                                         .width = a->width,
                                         .dropout = *dropout,
                                         .varying = dropout->p > 0.0f ? &varying : NULL};
    call.dropout.step = 0xDEAD;
    call.dropout.first_sample = 0xDEAD;
    cuda_launch_dropout_backward(NULL, &call);
}

static void check(enum dtype dtype, size_t rows, size_t width, size_t skew,
                  const struct dropout *dropout)
{
    const size_t n = rows * width, bytes = n * typed_bytes(dtype);
    struct arrays a = make(dtype, rows, width, skew);
    struct ops *ops = kernel_ops(1);
    ops->residual_dropout(ops, a.want, a.residual, a.branch, rows, width, dropout);
    void *kept = NULL;
    for (size_t order = 1; order < TYPED_ORDERS; order++) {
        typed_order(order);
        launch(&a, a.out, a.typed_residual, a.typed_branch, dropout);
        assert_true(typed_same(&kept, a.out, bytes));
    }
    assert_true(typed_exact("sum", dtype, a.out, a.want, n));
    /* out may be the residual or the branch. */
    struct arrays b = make(dtype, rows, width, skew);
    launch(&b, b.typed_residual, b.typed_residual, b.typed_branch, dropout);
    assert_memory_equal(b.typed_residual, a.out, bytes);
    launch(&a, b.typed_branch, a.typed_residual, b.typed_branch, dropout);
    assert_memory_equal(b.typed_branch, a.out, bytes);
    /* No residual: the mask itself, forward and backward. */
    ops->dropout_backward(ops, a.want, a.branch, rows, width, dropout);
    launch(&a, a.out, NULL, a.typed_branch, dropout);
    assert_true(typed_exact("dropped", dtype, a.out, a.want, n));
    launch_backward(&a, a.typed_branch, a.typed_branch, dropout);
    assert_true(typed_exact("gradient", dtype, a.typed_branch, a.want, n));
    kernel_ops_free(ops);
    free(kept);
    free_arrays(&a);
    free_arrays(&b);
}

static void equals_cpu(void **state)
{
    (void)state;
    const struct dropout dropouts[] = {
        {.p = 0.0f},
        {.p = 0.1f,
         .seed = 0x123456789ABCDEFu,
         .step = 7,
         .first_sample = 11,
         .first_token = 1000,
         .seq_len = 3,
         .layer = 5,
         .use = RANDOM_MLP_OUT_DROPOUT},
        {.p = 0.9f, .seed = 3, .step = 1u << 31, .seq_len = 1, .use = RANDOM_EMBED_DROPOUT},
        {.p = 1e-12f, .seed = 3, .seq_len = 1}, /* below the least threshold: nothing is dropped */
    };
    const size_t shapes[][3] = {{1, 1, 0},  {5, 7, 0},    {5, 768, 0}, {7, 1000, 0},
                                {5, 16, 1}, {2, 2056, 0}, {4, 12, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (size_t d = 0; d < sizeof dropouts / sizeof *dropouts; d++) {
            check(DTYPE_FP32, shapes[i][0], shapes[i][1], shapes[i][2], &dropouts[d]);
            check(DTYPE_BF16, shapes[i][0], shapes[i][1], shapes[i][2], &dropouts[d]);
        }
    }
}

/* An element whose random word is the threshold is kept. */
static void at_the_threshold(void **state)
{
    (void)state;
    struct dropout dropout = {.seq_len = 1, .use = RANDOM_EMBED_DROPOUT};
    uint32_t word = 1;
    while (word % 256 != 0 || word == 0) { /* until p has the 24 bits of a float */
        dropout.seed++;
        const struct philox_key key = philox_key(dropout.seed, 0);
        word = philox4x32(key.key0, key.key1, 0, 0, 0, philox_stream(0, RANDOM_EMBED_DROPOUT, 0))
                   .word[0];
    }
    dropout.p = (float)((double)word / 4294967296.0);
    assert_true(dropout_threshold(dropout.p) == word);
    float got = 9.0f;
    const float one = 1.0f;
    const struct arrays a = {.dtype = DTYPE_FP32, .rows = 1, .width = 1};
    launch(&a, &got, NULL, &one, &dropout);
    assert_true(got == dropout_scale(dropout.p));
}

/* More rows than a grid has blocks along y: 65535. */
static void many_rows(void **state)
{
    (void)state;
    enum { ROWS = 65600 };
    const struct dropout dropout = {
        .p = 0.3f, .seed = 4, .seq_len = 1000, .use = RANDOM_ATTENTION_OUT_DROPOUT};
    struct arrays a = make(DTYPE_FP32, ROWS, 1, 0);
    struct ops *ops = kernel_ops(1);
    ops->residual_dropout(ops, a.want, a.residual, a.branch, ROWS, 1, &dropout);
    kernel_ops_free(ops);
    launch(&a, a.out, a.typed_residual, a.typed_branch, &dropout);
    assert_true(typed_exact("sum", DTYPE_FP32, a.out, a.want, ROWS));
    free_arrays(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_cpu),
        cmocka_unit_test(at_the_threshold),
        cmocka_unit_test(many_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
