/* The dry table: counts, touches nothing.
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

/* Addresses that fault when they are touched. */
static void *nowhere(size_t i)
{
    return (void *)(uintptr_t)(16 * (i + 1));
}

static void counts_flops(void **state)
{
    (void)state;
    struct ops *cpu = kernel_ops(1);
    struct dry_ops dry;
    dry_ops_init(&dry, cpu);
    struct ops *ops = &dry.base;
    assert_string_equal(ops->name, "dry");
    assert_int_equal(ops->dtype, DTYPE_FP32);
    assert_int_equal(ops->elem_bytes, 4);
    const struct matmul call = {.form = MATMUL_NT,
                                .m = 3,
                                .n = 5,
                                .k = 7,
                                .a = nowhere(0),
                                .b = nowhere(1),
                                .c = nowhere(2)};
    ops->matmul(ops, &call);
    assert_true(dry.flops == 210.0);
    assert_int_equal(dry.n_calls, 1);
    const struct attention a = {
        .batch = 2, .seq_len = 5, .n_heads = 3, .n_kv_heads = 1, .head_dim = 16};
    dry.flops = 0.0;
    ops->attention_forward(ops, &a, nowhere(0), nowhere(1), nowhere(2));
    /* 2 samples, 3 heads, 15 pairs, two products of 16 multiply-adds. */
    assert_true(dry.flops == 2.0 * 3.0 * 15.0 * 2.0 * 32.0);
    dry.flops = 0.0;
    ops->attention_backward(ops, &a, nowhere(0), nowhere(1), nowhere(2), nowhere(3), nowhere(4),
                            nowhere(5));
    assert_true(dry.flops == 2.5 * 2.0 * 3.0 * 15.0 * 2.0 * 32.0);
    kernel_ops_free(cpu);
}

static void touches_nothing(void **state)
{
    (void)state;
    struct ops *cpu = kernel_ops(1);
    struct dry_ops dry;
    dry_ops_init(&dry, cpu);
    struct ops *ops = &dry.base;
    const struct dropout dropout = {.p = 0.5f, .seq_len = 1};
    const struct rotary rotary = {.n_pairs = 8};
    const struct adamw adamw = {.lr = 1.0f};
    double sum = 5.0, squares = 5.0;
    void *p = nowhere(0);
    ops->bias_backward(ops, p, p, 3, 4);
    ops->embed_forward(ops, p, p, p, p, p, 3, 4);
    ops->embed_backward(ops, p, p, p, p, p, 3, 4);
    ops->norm_forward(ops, NORM_LAYER, p, p, p, p, p, p, 3, 4, 1e-5f);
    ops->norm_backward(ops, NORM_LAYER, p, p, p, p, p, p, p, p, 3, 4);
    ops->rotary(ops, p, p, &rotary, 3, 1, 1, 16, 1);
    ops->activation_forward(ops, ACTIVATION_GELU, p, p, 3, 4);
    ops->activation_backward(ops, ACTIVATION_SWIGLU, p, p, p, 3, 4);
    ops->residual_dropout(ops, p, p, p, 3, 4, &dropout);
    ops->dropout_backward(ops, p, p, 3, 4, &dropout);
    ops->cross_entropy(ops, p, p, p, 3, 4, 1.0f, true);
    ops->sum(ops, &sum, p, 3);
    ops->adamw(ops, p, NULL, p, p, p, 3, &adamw);
    ops->sum_squares(ops, &squares, p, 3);
    ops->sum_parts(ops, p, p, 2, 3, 3);
    ops->add(ops, p, p, 3);
    ops->zero(ops, p, 3);
    ops->random_normal(ops, p, 3, 1.0f, 1, 1, 0);
    ops->fill(ops, p, 3, 1.0f);
    ops->copy(ops, p, p, 3);
    assert_true(dry.flops == 0.0 && sum == 5.0 && squares == 5.0);
    assert_int_equal(dry.n_calls, 20);
    assert_string_equal(ops->fingerprint(ops), "dry");
    struct failure why = {0};
    assert_int_equal(ops->check(ops, &why), STATUS_OK);
    ops->free(ops);
    kernel_ops_free(cpu);
}

/* No entry of the table may be missing: a NULL would only be found by the step that needs it. */
static void tables_are_complete(void **state)
{
    (void)state;
    struct ops *cpu = kernel_ops(1);
    struct dry_ops dry;
    dry_ops_init(&dry, cpu);
    const size_t first = offsetof(struct ops, matmul_scratch);
    const struct ops *tables[] = {cpu, &dry.base};
    for (size_t t = 0; t < 2; t++)
        for (size_t at = first; at < offsetof(struct ops, body_begin); at += sizeof(void *)) {
            void *entry;
            memcpy(&entry, (const char *)tables[t] + at, sizeof entry);
            assert_non_null(entry);
        }
    kernel_ops_free(cpu);
}

static void scratch_is_the_targets(void **state)
{
    (void)state;
    struct ops *cpu = kernel_ops(2);
    struct dry_ops dry;
    dry_ops_init(&dry, cpu);
    for (int form = MATMUL_NT; form <= MATMUL_TN; form++) {
        const struct matmul shape = {
            .form = (enum matmul_form)form, .m = 1024, .n = 3072, .k = 768};
        assert_int_equal(dry.base.matmul_scratch(&dry.base, &shape),
                         cpu->matmul_scratch(cpu, &shape));
    }
    kernel_ops_free(cpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_flops),
        cmocka_unit_test(touches_nothing),
        cmocka_unit_test(tables_are_complete),
        cmocka_unit_test(scratch_is_the_targets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
