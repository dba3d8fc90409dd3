/* AdamW: its written order of operations, and two public faults.
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
#include "tests/lib/bf16_values.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/reference.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

/* The written order, once more, one element at a time. */
static void update(float *p, float *m, float *v, float grad, const struct adamw *a)
{
    const float g = grad * a->grad_scale;
    *m = fmaf(a->beta1, *m, (1.0f - a->beta1) * g);
    *v = fmaf(a->beta2, *v, (1.0f - a->beta2) * (g * g));
    const float corrected_m = *m / (float)a->bias_correction1;
    const float corrected_v = *v / (float)a->bias_correction2;
    const float step = corrected_m / (sqrtf(corrected_v) + a->eps);
    *p = *p - a->lr * (step + a->weight_decay * *p);
}

static struct adamw settings(float lr, float decay, int step)
{
    return (struct adamw){.lr = lr,
                          .beta1 = 0.9f,
                          .beta2 = 0.999f,
                          .eps = 1e-8f,
                          .weight_decay = decay,
                          .grad_scale = 1.0f,
                          .bias_correction1 = 1.0 - pow(0.9, step),
                          .bias_correction2 = 1.0 - pow(0.999, step)};
}

/* The same bits as the scalar text, for every length, thread count and instruction set. */
static void written_order(void **state)
{
    (void)state;
    const size_t sizes[] = {1, 15, 16, 17, 1000, 65537};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int n_threads = 0; n_threads <= 3; n_threads++) {
            const size_t n = sizes[s];
            struct ops *ops = kernel_ops(n_threads ? n_threads : 1);
            if (n_threads == 0)
                cpu_of(ops)->simd = &simd_table_plain;
            float *p = values_random(n, 1.0f, 1), *m = values_random(n, 0.1f, 2);
            float *v = values_zero(n), *g = values_random(n, 2.0f, 3);
            float *want_p = values_copy(p, n), *want_m = values_copy(m, n),
                  *want_v = values_zero(n);
            struct adamw adamw = settings(3e-4f, 0.1f, 4);
            adamw.grad_scale = 0.37f;
            for (int i = 0; i < 2; i++) {
                ops->adamw(ops, p, NULL, m, v, g, n, &adamw);
                for (size_t j = 0; j < n; j++)
                    update(&want_p[j], &want_m[j], &want_v[j], g[j], &adamw);
            }
            assert_true(values_equal(p, want_p, n));
            assert_true(values_equal(m, want_m, n));
            assert_true(values_equal(v, want_v, n));
            free(p);
            free(m);
            free(v);
            free(g);
            free(want_p);
            free(want_m);
            free(want_v);
            kernel_ops_free(ops);
        }
}

static bool copy_is(enum dtype dtype, const void *copy, const float *params, size_t n)
{
    return dtype == DTYPE_BF16 ? bf16_equal(copy, params, n) : values_equal(copy, params, n);
}

/* The copy is the new values, rounded; making it changes nothing else. */
static void copy_is_rounded(void **state)
{
    (void)state;
    static const struct simd_table *const sets[] = {&simd_table_plain, &simd_table_plain_bf16};
    enum { N = 40003 }; /* several ranges, and a part of a vector */
    for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++)
        for (int n_threads = 0; n_threads <= 3; n_threads++) {
            struct ops *ops = kernel_ops_of((enum dtype)dtype, n_threads ? n_threads : 1);
            if (n_threads == 0)
                cpu_of(ops)->simd = sets[dtype];
            float *p = values_random(N, 1.0f, 1), *m = values_random(N, 1.0f, 2);
            float *v = values_zero(N), *g = values_random(N, 1.0f, 3);
            float *want_p = values_copy(p, N), *want_m = values_copy(m, N),
                  *want_v = values_zero(N);
            uint16_t *copy = calloc(2 * N + 1, sizeof *copy);
            assert_non_null(copy);
            for (int step = 1; step <= 3; step++) {
                const struct adamw adamw = settings(0.1f, 0.1f, step);
                ops->adamw(ops, p, copy, m, v, g, N, &adamw);
                ops->adamw(ops, want_p, NULL, want_m, want_v, g, N, &adamw);
                assert_true(copy_is(ops->dtype, copy, p, N));
            }
            assert_int_equal(copy[N * ops->elem_bytes / 2], 0); /* and not beyond it */
            assert_true(values_equal(p, want_p, N));
            assert_true(values_equal(m, want_m, N));
            assert_true(values_equal(v, want_v, N));
            float *all[] = {p, m, v, g, want_p, want_m, want_v};
            for (size_t i = 0; i < sizeof all / sizeof *all; i++)
                free(all[i]);
            free(copy);
            kernel_ops_free(ops);
        }
}

static float many_steps(struct ops *ops, void *copy, float lr, float decay, float gradient,
                        int n_steps)
{
    float p = 1.0f, m = 0.0f, v = 0.0f;
    for (int step = 1; step <= n_steps; step++) {
        const struct adamw adamw = settings(lr, decay, step);
        ops->adamw(ops, &p, copy, &m, &v, &gradient, 1, &adamw);
    }
    return p;
}

/* Small updates must accumulate in the fp32 master: weight 1, constant gradient 1, lr 6e-4, 100
 * steps, then decay alone (public fault: bf16 training without a true master copy). Bf16 steps
 * by 2^-8 below 1: no single update of these would change a weight that is only there. */
static void small_updates_accumulate(void **state)
{
    (void)state;
    for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
        struct ops *ops = kernel_ops_of((enum dtype)dtype, 1);
        float copy[1] = {0};
        const float p = many_steps(ops, copy, 6e-4f, 0.0f, 1.0f, 100);
        assert_true(fabs((double)p - 0.94) < 1e-4);
        assert_true(copy_is(ops->dtype, copy, &p, 1));
        if (dtype == DTYPE_BF16) {
            uint16_t bf16;
            memcpy(&bf16, copy, sizeof bf16);
            assert_true(bf16_widen(bf16) == 0.94140625f);
        }
        const float decayed = many_steps(ops, copy, 1e-4f, 0.1f, 0.0f, 1000);
        assert_true(fabs((double)decayed - 0.99005) < 1e-5);
        assert_true(copy_is(ops->dtype, copy, &decayed, 1));
        kernel_ops_free(ops);
    }
}

/* No gradient: without decay a weight keeps its bits, with decay it shrinks by the factor
 * (public fault: decay applied to norms). */
static void decay(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    float p[2] = {1.0f, 1.0f}, m[2] = {0}, v[2] = {0};
    const float g[2] = {0.0f, 0.0f};
    for (int step = 1; step <= 10; step++) {
        const struct adamw without = settings(1e-2f, 0.0f, step),
                           with = settings(1e-2f, 0.1f, step);
        ops->adamw(ops, &p[0], NULL, &m[0], &v[0], &g[0], 1, &without);
        ops->adamw(ops, &p[1], NULL, &m[1], &v[1], &g[1], 1, &with);
    }
    assert_true(p[0] == 1.0f);
    assert_true(fabs((double)p[1] - 0.990045) < 1e-6);
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_order),
        cmocka_unit_test(copy_is_rounded),
        cmocka_unit_test(small_updates_accumulate),
        cmocka_unit_test(decay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
