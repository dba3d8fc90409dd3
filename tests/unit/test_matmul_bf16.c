/* Matrix products of the bf16 table, both ways of doing them.
 *
 * links: testing kernels base
 * timeout: 600
 *
 * Widened to fp32, they have to be the fp32 table's for the same numbers, rounded once, bit for
 * bit. The library adds the same products in another order, in fp32 too: its results may lie an
 * error of such sums away, 2e-6 of the largest (as in test_matmul.c, and as much again), before
 * they are rounded, which adds 2^-8 of the value: half a step of bf16, whose mantissa has 8 bits.
 * Where a processor lacks AVX512_BF16 the library cannot and only the first way is run. */
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
#include "proto/base/heap.h"
#include "tests/lib/bf16_values.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static bool library_works(void)
{
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
}

struct operands {
    struct matmul call;
    size_t n_a, n_b, n_c;
    float *a, *b, *bias, *c; /* numbers that bf16 has; c: before the call */
    uint16_t *narrow_a, *narrow_b, *narrow_bias;
    float *want; /* the fp32 table's */
};

static float *snapped(size_t n, float scale, uint64_t seed)
{
    float *values = values_random(n, scale, seed);
    bf16_snap(values, n);
    return values;
}

static void compute(struct ops *ops, struct matmul call)
{
    float *scratch = values_random(ops->matmul_scratch(ops, &call) / sizeof(float) + 1, 9.0f, 99);
    call.scratch = scratch;
    ops->matmul(ops, &call);
    free(scratch);
}

static struct operands make(const struct matmul *shape, bool bias)
{
    struct operands o = {.call = *shape,
                         .n_a = shape->m * shape->k,
                         .n_b = shape->k * shape->n,
                         .n_c = shape->m * shape->n};
    o.a = snapped(o.n_a, 1.0f, 1);
    o.b = snapped(o.n_b, 1.0f, 2);
    o.bias = snapped(shape->n, 1.0f, 3);
    o.c = snapped(o.n_c, 1.0f, 4);
    o.narrow_a = bf16_from(o.a, o.n_a);
    o.narrow_b = bf16_from(o.b, o.n_b);
    o.narrow_bias = bf16_from(o.bias, shape->n);
    o.want = values_copy(o.c, o.n_c);
    struct ops *ops = kernel_ops(2);
    struct matmul call = o.call;
    call.a = o.a;
    call.b = o.b;
    call.bias = bias ? o.bias : NULL;
    call.c = o.want;
    compute(ops, call);
    kernel_ops_free(ops);
    o.call.a = o.narrow_a;
    o.call.b = o.narrow_b;
    o.call.bias = bias ? o.narrow_bias : NULL;
    return o;
}

static void free_operands(struct operands *o)
{
    void *all[] = {o->a, o->b, o->bias, o->c, o->narrow_a, o->narrow_b, o->narrow_bias, o->want};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* C of a call: fp32 or bf16 memory, by c_fp32; freed by free(). */
static void *product(struct ops *ops, const struct operands *o)
{
    struct matmul call = o->call;
    void *c = o->call.c_fp32 ? (void *)values_copy(o->c, o->n_c) : (void *)bf16_from(o->c, o->n_c);
    call.c = c;
    compute(ops, call);
    return c;
}

static struct ops *open_table(bool by_library, int n_threads)
{
    struct ops *ops = kernel_ops_of(DTYPE_BF16, n_threads);
    cpu_choose_products(cpu_of(ops), by_library);
    return ops;
}

/* By the library: near. */
static bool near(const struct operands *o, const void *c)
{
    double most = 0.0;
    for (size_t i = 0; i < o->n_c; i++)
        most = fmax(most, fabs((double)o->want[i]));
    for (size_t i = 0; i < o->n_c; i++) {
        const double want = (double)o->want[i];
        double allowed = 2e-6 * most;
        double got;
        if (o->call.c_fp32) {
            got = (double)((const float *)c)[i];
        } else {
            got = (double)bf16_widen(((const uint16_t *)c)[i]);
            allowed += 0x1p-8 * (fabs(want) + allowed);
        }
        if (!(fabs(got - want) <= allowed)) {
            printf("element %zu of %zu: %.9g, want %.9g\n", i, o->n_c, got, want);
            return false;
        }
    }
    return true;
}

static bool exact(const struct operands *o, const void *c)
{
    return o->call.c_fp32 ? values_equal(c, o->want, o->n_c) : bf16_equal(c, o->want, o->n_c);
}

static void check(struct ops *ops, const struct matmul *shape, bool bias, bool by_library)
{
    struct operands o = make(shape, bias);
    void *c = product(ops, &o);
    if (!(by_library ? near(&o, c) : exact(&o, c)))
        fail_msg("%s: form %d m %zu n %zu k %zu bias %d accumulate %d c_fp32 %d",
                 ops->fingerprint(ops), (int)shape->form, shape->m, shape->n, shape->k, bias,
                 shape->accumulate, shape->c_fp32);
    free(c);
    free_operands(&o);
}

static void check_forms(struct ops *ops, const size_t size[3], bool by_library)
{
    for (int form = MATMUL_NT; form <= MATMUL_TN; form++)
        for (int flags = 0; flags < 8; flags++) {
            const bool bias = flags & 4;
            if (bias && form != MATMUL_NT)
                continue;
            const struct matmul shape = {.form = (enum matmul_form)form,
                                         .m = size[0],
                                         .n = size[1],
                                         .k = size[2],
                                         .c_fp32 = flags & 1,
                                         .accumulate = flags & 2};
            check(ops, &shape, bias, by_library);
        }
}

static const size_t SHAPES[][3] = {{1, 1, 1},    {1, 64, 64},    {2, 7, 3},      {3, 65, 63},
                                   {4, 16, 128}, {5, 1, 17},     {6, 100, 50},   {7, 63, 65},
                                   {63, 64, 1},  {64, 64, 64},   {65, 129, 33},  {130, 48, 400},
                                   {33, 500, 7}, {96, 1600, 64}, {20, 64, 1700}, {17, 250, 130}};

static size_t bf16_sets(const struct simd_table *sets[3])
{
    size_t n = 0;
    sets[n++] = &simd_table_plain_bf16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        sets[n++] = &simd_table_avx2_bf16;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        sets[n++] = &simd_table_avx512_bf16;
    return n;
}

static void widened_is_exact(void **state)
{
    (void)state;
    const struct simd_table *sets[3];
    const size_t n_sets = bf16_sets(sets);
    for (size_t set = 0; set < n_sets; set++) {
        struct ops *ops = open_table(false, 1 + (int)set);
        cpu_of(ops)->simd = sets[set];
        for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++)
            check_forms(ops, SHAPES[i], false);
        kernel_ops_free(ops);
    }
}

/* More rows than are added up at a time, several blocks of columns and of the inner dimension. */
static void widened_blocks_are_exact(void **state)
{
    (void)state;
    static const size_t sizes[][3] = {{1100, 40, 20}, {20, 1560, 1700}, {2, 20, 60000}};
    struct ops *ops = open_table(false, 2);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_forms(ops, sizes[i], false);
    kernel_ops_free(ops);
}

static void library_is_near(void **state)
{
    (void)state;
    if (!library_works()) {
        printf("no AVX512_BF16: the library is not used\n");
        return;
    }
    struct ops *ops = open_table(true, 2);
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++)
        check_forms(ops, SHAPES[i], true);
    static const size_t cut[] = {600, 450, 70}; /* blocks, and rests of them, both ways */
    check_forms(ops, cut, true);
    kernel_ops_free(ops);
}

/* The head of GPT-2: as wide as its vocabulary, a few rows. */
static void head(void **state)
{
    (void)state;
    for (int by_library = 0; by_library <= (library_works() ? 1 : 0); by_library++) {
        struct ops *ops = open_table(by_library, 2);
        const struct matmul forward = {.form = MATMUL_NT, .m = 9, .n = 50257, .k = 48};
        const struct matmul input = {.form = MATMUL_NN, .m = 9, .n = 48, .k = 50257};
        const struct matmul weight = {
            .form = MATMUL_TN, .m = 50257, .n = 48, .k = 9, .c_fp32 = true};
        check(ops, &forward, false, by_library);
        check(ops, &input, false, by_library);
        check(ops, &weight, false, by_library);
        kernel_ops_free(ops);
    }
}

/* Bits depend neither on the number of threads, nor on where operands lie, nor on the call. */
static void same_bits(void **state)
{
    (void)state;
    for (int by_library = 0; by_library <= (library_works() ? 1 : 0); by_library++)
        for (int form = MATMUL_NT; form <= MATMUL_TN; form++) {
            const struct matmul shape = {.form = (enum matmul_form)form,
                                         .m = 600,
                                         .n = 401,
                                         .k = 1100,
                                         .c_fp32 = form == MATMUL_TN,
                                         .accumulate = form == MATMUL_TN};
            struct operands o = make(&shape, false);
            const size_t bytes = o.n_c * (shape.c_fp32 ? 4 : 2);
            void *first = NULL;
            for (int n_threads = 1; n_threads <= 4; n_threads *= 2) {
                struct ops *ops = open_table(by_library, n_threads);
                for (int again = 0; again < 2; again++) {
                    void *c = product(ops, &o);
                    if (first)
                        assert_memory_equal(first, c, bytes);
                    else
                        first = c;
                    if (c != first)
                        free(c);
                }
                kernel_ops_free(ops);
            }
            free(first);
            free_operands(&o);
        }
}

/* Asking takes no memory to speak of, and what is asked for stays in bounds, even for a large
 * model's shapes. Per thread by the library; else as matmul.c says. */
static void scratch_is_bounded(void **state)
{
    (void)state;
    for (int by_library = 0; by_library <= (library_works() ? 1 : 0); by_library++) {
        struct ops *ops = open_table(by_library, 2);
        for (int form = MATMUL_NT; form <= MATMUL_TN; form++) {
            const struct matmul large = {.form = (enum matmul_form)form,
                                         .m = 8192,
                                         .n = 28672,
                                         .k = 8192,
                                         .c_fp32 = form == MATMUL_TN};
            const size_t bytes = ops->matmul_scratch(ops, &large);
            printf("%s form %d: %zu KiB\n", by_library ? "library" : "widened", form, bytes / 1024);
            assert_int_equal(ops->matmul_scratch(ops, &large), bytes);
            assert_true(bytes <= (size_t)(by_library ? 64 : 15) << 20);
        }
        kernel_ops_free(ops);
    }
}

static void fingerprint_names_the_way(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops_of(DTYPE_BF16, 1);
    printf("%s\n", ops->fingerprint(ops));
    assert_non_null(strstr(ops->fingerprint(ops), "bf16"));
    cpu_choose_products(cpu_of(ops), false);
    assert_non_null(strstr(ops->fingerprint(ops), "widened to fp32"));
    cpu_choose_products(cpu_of(ops), true);
    assert_non_null(strstr(ops->fingerprint(ops), "oneDNN"));
    assert_non_null(strstr(ops->fingerprint(ops), cpu_of(ops)->simd->name));
    kernel_ops_free(ops);
}

/* Every allocation of a first product by the library fails once: the error is kept, and the next
 * try works. */
static void allocations_fail(void **state)
{
    (void)state;
    if (!library_works())
        return;
    const struct matmul shape = {.form = MATMUL_NT, .m = 5, .n = 6, .k = 7};
    const int64_t live = heap_live();
    for (uint64_t nth = 1;; nth++) {
        struct ops *ops = open_table(true, 2);
        struct operands o = make(&shape, false);
        uint16_t c[30] = {0};
        struct matmul call = o.call;
        call.c = c;
        float *scratch = values_zero((size_t)1 << 20);
        call.scratch = scratch;
        heap_fail(nth, true);
        ops->matmul(ops, &call);
        const uint64_t n_failed = heap_failures();
        heap_fail(0, false);
        struct failure why = {0};
        assert_int_equal(ops->check(ops, &why), n_failed > 0 ? STATUS_OUT_OF_MEMORY : STATUS_OK);
        ops->matmul(ops, &call);
        assert_true(near(&o, c));
        free(scratch);
        free_operands(&o);
        kernel_ops_free(ops);
        assert_int_equal(heap_live(), live);
        if (n_failed == 0) {
            assert_true(nth > 1);
            return;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(widened_is_exact),
        cmocka_unit_test(widened_blocks_are_exact),
        cmocka_unit_test(library_is_near),
        cmocka_unit_test(head),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(scratch_is_bounded),
        cmocka_unit_test(fingerprint_names_the_way),
        cmocka_unit_test(allocations_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
