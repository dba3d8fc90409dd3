/* Attention against the plain double reference and its finite differences.
 *
 * links: testing kernels base
 *
 * Tolerances are relative to the largest value of the array: a sum of up to T products in
 * fp32 (2^-24 each, partly cancelling) plus the exponential's 1 ulp gives a few 1e-7; the
 * backward pass chains two of these. */
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

static const double FORWARD_TOLERANCE = 1e-6, BACKWARD_TOLERANCE = 4e-6;

struct shape {
    size_t batch, seq_len;
    uint32_t n_heads, n_kv_heads, head_dim;
};

struct arrays {
    float *qkv, *out, *lse, *dout, *dqkv, *delta;
    size_t n_qkv, n_out, n_lse;
};

static struct attention attention_of(const struct shape *s, float p)
{
    return (struct attention){.batch = s->batch,
                              .seq_len = s->seq_len,
                              .n_heads = s->n_heads,
                              .n_kv_heads = s->n_kv_heads,
                              .head_dim = s->head_dim,
                              .scale = 1.0f / sqrtf((float)s->head_dim),
                              .dropout = {.p = p,
                                          .seed = 7,
                                          .step = 3,
                                          .first_sample = 2,
                                          .seq_len = (uint32_t)s->seq_len,
                                          .layer = 1,
                                          .use = RANDOM_ATTENTION_DROPOUT}};
}

static struct arrays make(const struct attention *a)
{
    struct arrays x = {0};
    const size_t rows = a->batch * a->seq_len;
    x.n_out = rows * a->n_heads * a->head_dim;
    x.n_qkv = rows * (a->n_heads + 2 * (size_t)a->n_kv_heads) * a->head_dim;
    x.n_lse = rows * a->n_heads;
    x.qkv = values_random(x.n_qkv, 2.0f, 1);
    x.dout = values_random(x.n_out, 1.0f, 2);
    x.out = values_random(x.n_out, 9.0f, 3); /* overwritten */
    x.lse = values_random(x.n_lse, 9.0f, 4);
    x.dqkv = values_random(x.n_qkv, 9.0f, 5);
    x.delta = values_random(x.n_lse, 9.0f, 6);
    return x;
}

static void free_arrays(struct arrays *x)
{
    free(x->qkv);
    free(x->dout);
    free(x->out);
    free(x->lse);
    free(x->dqkv);
    free(x->delta);
}

static void run(struct ops *ops, const struct attention *a, struct arrays *x)
{
    ops->attention_forward(ops, a, x->out, x->lse, x->qkv);
    ops->attention_backward(ops, a, x->dqkv, x->delta, x->dout, x->out, x->lse, x->qkv);
}

struct loss {
    const struct attention *attention;
    const double *dout;
    double *out;
    size_t n;
};

/* sum(dout * out): its gradient is what the backward pass computes. */
static double loss(const double *qkv, const void *context)
{
    const struct loss *l = context;
    reference_attention(l->attention, l->out, NULL, qkv);
    double sum = 0.0;
    for (size_t i = 0; i < l->n; i++)
        sum += l->dout[i] * l->out[i];
    return sum;
}

/* Compares some elements of the gradient, spread over the array by a prime step. */
static void check_gradient(const struct attention *a, const struct arrays *x)
{
    double *qkv = values_widen(x->qkv, x->n_qkv), *dout = values_widen(x->dout, x->n_out);
    double *out = values_zero_double(x->n_out);
    const struct loss context = {a, dout, out, x->n_out};
    double most = 0.0, worst = 0.0;
    for (size_t i = 0; i < x->n_qkv; i++)
        most = fabs((double)x->dqkv[i]) > most ? fabs((double)x->dqkv[i]) : most;
    const size_t n_checked = 24;
    for (size_t j = 0; j < n_checked; j++) {
        const size_t i = j * 7919 % x->n_qkv;
        const double slope = reference_slope(loss, qkv, i, &context);
        const double distance = fabs(slope - (double)x->dqkv[i]);
        worst = distance > worst ? distance : worst;
    }
    if (worst > BACKWARD_TOLERANCE * most)
        fail_msg("gradient off by %g of %g", worst, most);
    free(qkv);
    free(dout);
    free(out);
}

static void check_shape(struct ops *ops, const struct attention *a)
{
    struct arrays x = make(a);
    run(ops, a, &x);
    double *qkv = values_widen(x.qkv, x.n_qkv);
    double *out = values_zero_double(x.n_out), *lse = values_zero_double(x.n_lse);
    reference_attention(a, out, lse, qkv);
    const double out_distance = values_distance(x.out, out, x.n_out);
    const double lse_distance = values_distance(x.lse, lse, x.n_lse);
    if (out_distance > FORWARD_TOLERANCE || lse_distance > FORWARD_TOLERANCE)
        fail_msg("B %zu T %zu nh %u nkv %u hd %u: out %g lse %g", a->batch, a->seq_len, a->n_heads,
                 a->n_kv_heads, a->head_dim, out_distance, lse_distance);
    check_gradient(a, &x);
    free(qkv);
    free(out);
    free(lse);
    free_arrays(&x);
}

static const struct shape SHAPES[] = {
    {1, 1, 1, 1, 16},   {2, 3, 2, 1, 16},  {1, 7, 4, 1, 64},   {1, 63, 3, 3, 16},
    {1, 64, 2, 2, 64},  {2, 65, 2, 1, 16}, {1, 130, 4, 1, 32}, {1, 70, 2, 2, 128},
    {1, 97, 1, 1, 256}, {1, 40, 2, 1, 20}, {1, 66, 1, 1, 8},   {1, 129, 1, 1, 160},
};

static void matches_reference(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(2);
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++) {
        const struct attention a = attention_of(&SHAPES[i], 0.0f);
        check_shape(ops, &a);
    }
    kernel_ops_free(ops);
}

static void dropout_matches_reference(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(2);
    for (size_t i = 1; i < sizeof SHAPES / sizeof *SHAPES; i += 2) {
        struct attention a = attention_of(&SHAPES[i], 0.1f);
        a.dropout.first_token = (uint32_t)i; /* also where words do not begin with a tile */
        a.dropout.first_head = 5;
        check_shape(ops, &a);
    }
    kernel_ops_free(ops);
}

/* With V = 1 and uniform probabilities the output counts the kept ones. */
static void keep_rate(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    const struct attention a = attention_of(&(struct shape){1, 512, 1, 1, 16}, 0.1f);
    struct arrays x = make(&a);
    for (size_t i = 0; i < x.n_qkv; i++)
        x.qkv[i] = i % 48 < 32 ? 0.0f : 1.0f;
    ops->attention_forward(ops, &a, x.out, x.lse, x.qkv);
    double kept = 0.0, pairs = 0.0;
    for (size_t t = 0; t < 512; t++) {
        kept += (double)x.out[t * 16] * (double)(t + 1) * 0.9;
        pairs += (double)(t + 1);
    }
    /* 131,328 pairs: the standard deviation of the rate is 0.0008. */
    assert_true(fabs(kept / pairs - 0.9) < 0.004);
    free_arrays(&x);
    kernel_ops_free(ops);
}

/* A document's outputs do not change by a bit when another document does, and equal those of
 * the document alone (public fault: packed documents see each other). */
static void documents_do_not_meet(void **state)
{
    (void)state;
    enum { T = 192, A = 70 };
    struct ops *ops = kernel_ops(2);
    int32_t segments[T];
    for (int t = 0; t < T; t++)
        segments[t] = t < A ? 0 : t < 150 ? 1 : 2;
    const struct shape s = {1, T, 2, 1, 16};
    struct attention a = attention_of(&s, 0.0f);
    a.segments = segments;
    check_shape(ops, &a);

    struct arrays x = make(&a);
    run(ops, &a, &x);
    float *out = values_copy(x.out, x.n_out), *dqkv = values_copy(x.dqkv, x.n_qkv);
    for (size_t i = 5 * 64; i < 6 * 64; i++)
        x.qkv[i] = 100.0f;
    run(ops, &a, &x);
    const size_t out_at = A * 32, qkv_at = A * 64;
    assert_true(values_equal(out + out_at, x.out + out_at, x.n_out - out_at));
    assert_true(values_equal(dqkv + qkv_at, x.dqkv + qkv_at, x.n_qkv - qkv_at));
    assert_false(memcmp(out, x.out, out_at * sizeof *out) == 0);

    struct attention alone = attention_of(&(struct shape){1, 80, 2, 1, 16}, 0.0f);
    struct arrays y = make(&alone);
    memcpy(y.qkv, x.qkv + qkv_at, y.n_qkv * sizeof *y.qkv);
    run(ops, &alone, &y);
    double *want = values_widen(y.out, y.n_out);
    assert_true(values_distance(x.out + out_at, want, y.n_out) < FORWARD_TOLERANCE);
    free(want);
    free(out);
    free(dqkv);
    free_arrays(&x);
    free_arrays(&y);
    kernel_ops_free(ops);
}

/* Scores of +-1e4 must neither overflow nor lose the sum. */
static void large_scores(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    const struct attention a = attention_of(&(struct shape){1, 80, 1, 1, 16}, 0.0f);
    struct arrays x = make(&a);
    for (size_t i = 0; i < x.n_qkv; i++)
        x.qkv[i] *= i % 48 < 32 ? 50.0f : 1.0f;
    run(ops, &a, &x);
    double *qkv = values_widen(x.qkv, x.n_qkv), *out = values_zero_double(x.n_out);
    reference_attention(&a, out, NULL, qkv);
    /* Scores of 1e4 have an fp32 spacing of 1e-3, which is the probabilities' error. */
    assert_true(values_distance(x.out, out, x.n_out) < 1e-2);
    for (size_t i = 0; i < x.n_qkv; i++)
        assert_true(isfinite(x.dqkv[i]));
    free(qkv);
    free(out);
    free_arrays(&x);
    kernel_ops_free(ops);
}

/* Bits do not depend on threads, on the way the backward pass is cut, or on the call. */
static void same_bits(void **state)
{
    (void)state;
    static const struct shape shapes[] = {
        {2, 200, 4, 2, 64}, {1, 200, 4, 1, 64}, {1, 130, 3, 3, 16}, {1, 200, 2, 1, 160}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const struct attention a = attention_of(&shapes[i], i % 2 ? 0.1f : 0.0f);
        struct arrays first = make(&a);
        struct ops *ops = kernel_ops(1);
        run(ops, &a, &first);
        kernel_ops_free(ops);
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            struct arrays again = make(&a);
            ops = kernel_ops(n_threads);
            run(ops, &a, &again);
            assert_true(values_equal(first.out, again.out, first.n_out));
            assert_true(values_equal(first.lse, again.lse, first.n_lse));
            assert_true(values_equal(first.delta, again.delta, first.n_lse));
            assert_true(values_equal(first.dqkv, again.dqkv, first.n_qkv));
            kernel_ops_free(ops);
            free_arrays(&again);
        }
        free_arrays(&first);
    }
}

/* All instruction sets that this machine has give the same bits. */
static void same_bits_on_other_sets(void **state)
{
    (void)state;
    const struct attention a = attention_of(&(struct shape){1, 70, 2, 1, 24}, 0.1f);
    struct ops *ops = kernel_ops(1);
    struct arrays first = make(&a), again = make(&a);
    run(ops, &a, &first);
    cpu_of(ops)->simd = &simd_table_plain;
    run(ops, &a, &again);
    assert_true(values_equal(first.out, again.out, first.n_out));
    assert_true(values_equal(first.dqkv, again.dqkv, first.n_qkv));
    free_arrays(&first);
    free_arrays(&again);
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_reference),
        cmocka_unit_test(dropout_matches_reference),
        cmocka_unit_test(keep_rate),
        cmocka_unit_test(documents_do_not_meet),
        cmocka_unit_test(large_scores),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(same_bits_on_other_sets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
