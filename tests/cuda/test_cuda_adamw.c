/* AdamW on the GPU's kernel, run by fibres: the CPU device's bits, and two public faults.
 *
 * links: testing kernels base
 * sources: kernels/cuda/adamw.cu
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
#include "kernels/cuda/kernels.h"
#include "tests/cuda/lib/typed.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

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

/* One range: the arrays, skewed by some elements, and room behind them that stays. */
struct range {
    float *p, *m, *v, *g;
    unsigned char *memory, *copy; /* the copy is skewed by elements of its own */
    size_t bytes;                 /* of `memory` */
};

/* Magnitudes from denormal to large: divisions and roots are exact at the ends too. */
static struct range range_new(size_t n, size_t skew, size_t copy_skew, enum dtype dtype)
{
    const size_t whole = n + skew + 1, elem_bytes = typed_bytes(dtype);
    struct range r = {.p = values_random(whole, 1.0f, 1),
                      .m = values_random(whole, 0.1f, 2),
                      .v = values_random(whole, 0.1f, 3),
                      .g = values_random(whole, 2.0f, 4),
                      .bytes = (n + copy_skew + 1) * elem_bytes};
    for (size_t i = 0; i < whole; i++) {
        const float scale = ldexpf(1.0f, (int)(i * 37 % 120) - 75);
        r.g[i] *= scale;
        r.m[i] *= scale;
        r.v[i] = i % 11 == 0 ? 0.0f : fabsf(r.v[i]) * scale * scale;
    }
    r.memory = malloc(r.bytes);
    memset(r.memory, 0xA5, r.bytes);
    r.copy = r.memory + copy_skew * elem_bytes;
    return r;
}

static void range_free(struct range *r)
{
    free(r->p);
    free(r->m);
    free(r->v);
    free(r->g);
    free(r->memory);
}

/* Two steps on both devices: every array equal, also outside the range. */
static void check(size_t n, size_t skew, size_t copy_skew, enum dtype dtype, bool with_copy)
{
    struct range cpu = range_new(n, skew, copy_skew, dtype);
    struct range cuda = range_new(n, skew, copy_skew, dtype);
    struct ops *ops = kernel_ops(1);
    for (int step = 4; step <= 5; step++) {
        struct adamw adamw = settings(3e-4f, 0.1f, step);
        adamw.grad_scale = 0.37f;
        ops->adamw(ops, cpu.p + skew, NULL, cpu.m + skew, cpu.v + skew, cpu.g + skew, n, &adamw);
        const struct cuda_adamw args = {.dtype = dtype,
                                        .params = cuda.p + skew,
                                        .copy = with_copy ? cuda.copy : NULL,
                                        .moment_m = cuda.m + skew,
                                        .moment_v = cuda.v + skew,
                                        .grads = cuda.g + skew,
                                        .n = n,
                                        .adamw = adamw};
        cuda_launch_adamw(NULL, &args);
    }
    kernel_ops_free(ops);
    assert_true(values_equal(cuda.p, cpu.p, n + skew + 1));
    assert_true(values_equal(cuda.m, cpu.m, n + skew + 1));
    assert_true(values_equal(cuda.v, cpu.v, n + skew + 1));
    assert_true(values_equal(cuda.g, cpu.g, n + skew + 1));
    if (with_copy) {
        assert_true(typed_exact("copy", dtype, cuda.copy, cpu.p + skew, n));
        memset(cuda.copy, 0xA5, n * typed_bytes(dtype));
    }
    assert_memory_equal(cuda.memory, cpu.memory, cuda.bytes);
    range_free(&cpu);
    range_free(&cuda);
}

static void same_bits_as_cpu(void **state)
{
    (void)state;
    const size_t sizes[] = {0, 1, 3, 4, 5, 1023, 1024, 1030, 65537};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t skew = 0; skew < 3; skew++) {
            typed_order((i + skew) % TYPED_ORDERS);
            check(sizes[i], skew, skew, DTYPE_BF16, true);
            check(sizes[i], skew, (skew + 1) % 3, DTYPE_BF16, true);
            check(sizes[i], skew, skew, DTYPE_FP32, true);
            check(sizes[i], skew, (skew + 1) % 3, DTYPE_FP32, true);
            check(sizes[i], skew, skew, DTYPE_BF16, false);
        }
    }
}

/* One weight of bf16 with its master, n steps. */
struct weight {
    float master, m, v;
    uint16_t copy;
};

static void steps(struct weight *w, float grad, float lr, float decay, int n)
{
    for (int step = 1; step <= n; step++) {
        const struct cuda_adamw args = {.dtype = DTYPE_BF16,
                                        .params = &w->master,
                                        .copy = &w->copy,
                                        .moment_m = &w->m,
                                        .moment_v = &w->v,
                                        .grads = &grad,
                                        .n = 1,
                                        .adamw = settings(lr, decay, step)};
        cuda_launch_adamw(NULL, &args);
    }
}

/* A bf16 weight of 1 loses every update below 2^-9 if it is its own master: constant gradient 1,
 * lr 6e-4, 100 steps would leave it at exactly 1. */
static void small_updates_add_up(void **state)
{
    (void)state;
    struct weight w = {.master = 1.0f, .copy = typed_round(1.0f)};
    steps(&w, 1.0f, 6e-4f, 0.0f, 100);
    assert_true(fabsf(w.master - 0.94f) < 1e-4f);
    assert_true(typed_widen_one(w.copy) == 0.94140625f);
}

/* The same for decay: no gradient, lr 1e-4, decay 0.1, 1000 steps. */
static void small_decay_adds_up(void **state)
{
    (void)state;
    struct weight w = {.master = 1.0f, .copy = typed_round(1.0f)};
    steps(&w, 0.0f, 1e-4f, 0.1f, 1000);
    assert_true(fabsf(w.master - 0.99005f) < 1e-5f);
    assert_true(typed_widen_one(w.copy) == 0.98828125f); /* nearest in steps of 2^-8 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits_as_cpu),
        cmocka_unit_test(small_updates_add_up),
        cmocka_unit_test(small_decay_adds_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
