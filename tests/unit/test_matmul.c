/* Matrix products against the plain double reference, scratch sizes, and failures.
 *
 * links: testing kernels base
 *
 * A sum of k products of numbers in [-1, 1] errs by about sqrt(k) 2^-24 of its typical
 * size; relative to the largest value that is below 1e-6 up to k = 4096. */
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
#include "proto/base/units.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/reference.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static const double TOLERANCE = 1e-6;

struct operands {
    struct matmul call;
    size_t n_a, n_b, n_c;
    float *a, *b, *bias, *c, *scratch;
};

static struct operands make(struct ops *ops, const struct matmul *shape, bool bias)
{
    struct operands o = {.call = *shape,
                         .n_a = shape->m * shape->k,
                         .n_b = shape->k * shape->n,
                         .n_c = shape->m * shape->n};
    o.a = values_random(o.n_a, 1.0f, 1);
    o.b = values_random(o.n_b, 1.0f, 2);
    o.bias = values_random(shape->n, 1.0f, 3);
    o.c = values_random(o.n_c, 1.0f, 4);
    o.call.a = o.a;
    o.call.b = o.b;
    o.call.bias = bias ? o.bias : NULL;
    o.call.c = o.c;
    o.scratch = values_zero(ops->matmul_scratch(ops, &o.call) / sizeof(float) + 1);
    o.call.scratch = o.scratch;
    return o;
}

static void free_operands(struct operands *o)
{
    free(o->a);
    free(o->b);
    free(o->bias);
    free(o->c);
    free(o->scratch);
}

static void check(struct ops *ops, const struct matmul *shape, bool bias)
{
    struct operands o = make(ops, shape, bias);
    double *a = values_widen(o.a, o.n_a), *b = values_widen(o.b, o.n_b);
    double *add = values_widen(o.bias, shape->n), *c = values_widen(o.c, o.n_c);
    reference_matmul(shape->form, shape->m, shape->n, shape->k, a, b, bias ? add : NULL, c,
                     shape->accumulate);
    ops->matmul(ops, &o.call);
    const double distance = values_distance(o.c, c, o.n_c);
    if (!(distance < TOLERANCE))
        fail_msg("form %d m %zu n %zu k %zu bias %d accumulate %d: off by %g", (int)shape->form,
                 shape->m, shape->n, shape->k, bias, shape->accumulate, distance);
    free(a);
    free(b);
    free(add);
    free(c);
    free_operands(&o);
}

static const size_t SHAPES[][3] = {{1, 1, 1},    {1, 64, 64},    {2, 7, 3},      {3, 65, 63},
                                   {4, 16, 128}, {5, 1, 17},     {6, 100, 50},   {7, 63, 65},
                                   {63, 64, 1},  {64, 64, 64},   {65, 129, 33},  {130, 48, 400},
                                   {33, 500, 7}, {96, 3072, 64}, {20, 64, 3072}, {17, 250, 130}};

/* The tables of this machine; the plain one goes through the library. */
static size_t machine_sets(const struct simd_table *sets[3])
{
    size_t n = 0;
    sets[n++] = &simd_table_plain;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        sets[n++] = &simd_table_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        sets[n++] = &simd_table_avx512;
    return n;
}

static void check_set(const struct simd_table *set)
{
    struct ops *ops = kernel_ops(2);
    cpu_of(ops)->simd = set;
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++)
        for (int form = MATMUL_NT; form <= MATMUL_TN; form++)
            for (int accumulate = 0; accumulate < 2; accumulate++)
                for (int bias = 0; bias < (form == MATMUL_NT ? 2 : 1); bias++) {
                    const struct matmul shape = {.form = (enum matmul_form)form,
                                                 .m = SHAPES[i][0],
                                                 .n = SHAPES[i][1],
                                                 .k = SHAPES[i][2],
                                                 .accumulate = accumulate != 0};
                    check(ops, &shape, bias != 0);
                }
    kernel_ops_free(ops);
}

static void matches_reference(void **state)
{
    (void)state;
    const struct simd_table *sets[3];
    const size_t n = machine_sets(sets);
    for (size_t i = 0; i < n; i++)
        check_set(sets[i]);
}

/* One element, by the definition. */
static double element(const struct operands *o, const float *c, size_t i, size_t j)
{
    const struct matmul *s = &o->call;
    double sum = s->accumulate ? (double)c[i * s->n + j] : 0.0;
    for (size_t l = 0; l < s->k; l++)
        sum += (double)(s->form == MATMUL_TN ? o->a[l * s->m + i] : o->a[i * s->k + l]) *
               (double)o->b[l * s->n + j];
    return sum;
}

/* Large enough to be cut into blocks of columns and of the inner dimension; some elements are
 * compared, the last row and column among them. */
static void blocks_match_reference(void **state)
{
    (void)state;
    static const size_t shapes[][3] = {{128, 100, 4500}, {129, 1300, 4097}, {130, 65, 64}};
    struct ops *ops = kernel_ops(2);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int form = MATMUL_NN; form <= MATMUL_TN; form++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                const struct matmul shape = {.form = (enum matmul_form)form,
                                             .m = shapes[s][0],
                                             .n = shapes[s][1],
                                             .k = shapes[s][2],
                                             .accumulate = accumulate != 0};
                struct operands o = make(ops, &shape, false);
                float *before = values_copy(o.c, o.n_c);
                ops->matmul(ops, &o.call);
                for (size_t e = 0; e < 200; e++) {
                    const size_t at = o.n_c - 1 - e * 7919 % o.n_c;
                    const double want = element(&o, before, at / shape.n, at % shape.n);
                    /* Values are around sqrt(k/9), up to 90. */
                    assert_true(fabs((double)o.c[at] - want) < 90.0 * TOLERANCE);
                }
                free(before);
                free_operands(&o);
            }
    kernel_ops_free(ops);
}

static float *product(struct ops *ops, struct operands *o)
{
    ops->matmul(ops, &o->call);
    return values_copy(o->c, o->n_c);
}

/* Bits depend neither on where operands lie nor on the call. */
static void same_bits_anywhere(void **state)
{
    (void)state;
    for (int form = MATMUL_NT; form <= MATMUL_TN; form++) {
        const struct matmul shape = {.form = (enum matmul_form)form, .m = 200, .n = 192, .k = 770};
        struct ops *ops = kernel_ops(2);
        struct operands o = make(ops, &shape, false);
        float *first = product(ops, &o), *again = product(ops, &o);
        assert_true(values_equal(first, again, o.n_c));
        for (size_t shift = 1; shift <= 15; shift += 7) {
            float *a = values_zero(o.n_a + shift), *b = values_zero(o.n_b + shift);
            float *c = values_zero(o.n_c + shift);
            memcpy(a + shift, o.a, o.n_a * sizeof *a);
            memcpy(b + shift, o.b, o.n_b * sizeof *b);
            struct matmul shifted = o.call;
            shifted.a = a + shift;
            shifted.b = b + shift;
            shifted.c = c + shift;
            ops->matmul(ops, &shifted);
            assert_true(values_equal(first, c + shift, o.n_c));
            free(a);
            free(b);
            free(c);
        }
        free(first);
        free(again);
        free_operands(&o);
        kernel_ops_free(ops);
    }
}

/* Nor on the number of threads, on the instruction set, or on the other rows. Where products
 * go through the library only the first is looked at, and reported. */
static void same_bits_on_other_sets(void **state)
{
    (void)state;
    const struct simd_table *sets[3];
    const size_t n_sets = machine_sets(sets);
    for (int form = MATMUL_NT; form <= MATMUL_TN; form++) {
        float *first = NULL;
        const struct matmul shape = {.form = (enum matmul_form)form,
                                     .m = 209,
                                     .n = 201,
                                     .k = 770,
                                     .accumulate = form == MATMUL_NN};
        for (size_t set = 0; set < n_sets; set++)
            for (int n_threads = 1; n_threads <= 3; n_threads++) {
                struct ops *ops = kernel_ops(n_threads);
                cpu_of(ops)->simd = sets[set];
                struct operands o = make(ops, &shape, form == MATMUL_NT);
                float *c = product(ops, &o);
                if (set == 0 && n_threads > 1 && memcmp(first, c, o.n_c * sizeof *c) != 0)
                    printf("library, form %d: 1 and %d threads differ\n", form, n_threads);
                if (set == 1 && n_threads == 1) {
                    free(first);
                    first = NULL;
                }
                if (set > 0 && first)
                    assert_true(values_equal(first, c, o.n_c));
                if (first)
                    free(c);
                else
                    first = c;
                free_operands(&o);
                kernel_ops_free(ops);
            }
        free(first);
    }
}

static void rows_stand_alone(void **state)
{
    (void)state;
    const struct matmul shape = {.form = MATMUL_NT, .m = 130, .n = 97, .k = 500};
    struct ops *ops = kernel_ops(2);
    struct operands o = make(ops, &shape, true);
    float *whole = product(ops, &o);
    if (cpu_of(ops)->simd->panel_columns > 0)
        for (size_t m = 1; m < 9; m++) {
            struct matmul part = o.call;
            part.m = m;
            part.a = o.a + 77 * shape.k;
            ops->matmul(ops, &part);
            assert_true(values_equal(whole + 77 * shape.n, o.c, m * shape.n));
        }
    free(whole);
    free_operands(&o);
    kernel_ops_free(ops);
}

/* Resident memory of this process. */
static size_t resident_bytes(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    size_t total = 0, resident = 0;
    assert_int_equal(fscanf(file, "%zu %zu", &total, &resident), 2);
    fclose(file);
    return resident * 4096;
}

/* Asking is quick and takes no memory, however large the shape. */
static void scratch_of_large_shapes(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(2);
    const struct matmul small = {.form = MATMUL_NT, .m = 1024, .n = 768, .k = 768};
    ops->matmul_scratch(ops, &small);
    const size_t before = resident_bytes();
    const double start = units_monotonic_s();
    for (int form = MATMUL_NT; form <= MATMUL_TN; form++) {
        const struct matmul large = {
            .form = (enum matmul_form)form, .m = 8192, .n = 28672, .k = 8192};
        const size_t first = ops->matmul_scratch(ops, &large);
        assert_int_equal(ops->matmul_scratch(ops, &large), first);
        printf("form %d: %zu KiB of scratch\n", form, first / 1024);
        assert_true(first < (size_t)1 << 30);
    }
    const double ms = (units_monotonic_s() - start) * 1e3;
    printf("three large shapes: %.2f ms\n", ms);
    assert_true(ms < 500.0); /* a busy machine; typical is far below */
    assert_true(resident_bytes() < before + 16 * 1024 * 1024);
    kernel_ops_free(ops);
}

static void bias_gradient(void **state)
{
    (void)state;
    const size_t shapes[][2] = {{1, 1}, {7, 3}, {65, 63}, {33, 130}, {300, 257}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const size_t rows = shapes[i][0], cols = shapes[i][1];
        float *dout = values_random(rows * cols, 1.0f, 1), *want = values_zero(cols);
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < cols; c++)
                want[c] += dout[r * cols + c];
        for (int n_threads = 0; n_threads <= 3; n_threads++) {
            struct ops *ops = kernel_ops(n_threads ? n_threads : 1);
            if (n_threads == 0)
                cpu_of(ops)->simd = &simd_table_plain;
            float *got = values_random(cols, 9.0f, 2);
            ops->bias_backward(ops, got, dout, rows, cols);
            assert_true(values_equal(got, want, cols));
            free(got);
            kernel_ops_free(ops);
        }
        free(dout);
        free(want);
    }
}

static void refusals(void **state)
{
    (void)state;
    struct ops *ops = NULL;
    struct failure why = {0};
    assert_int_equal(cpu_ops_new(DTYPE_FP32, 0, &ops, &why), STATUS_OUT_OF_RANGE);
    assert_int_equal(cpu_ops_new(DTYPE_BF16, 0, &ops, &why), STATUS_OUT_OF_RANGE);
    assert_null(ops);
    assert_int_equal(dtype_bytes(DTYPE_FP32), 4);
    assert_int_equal(dtype_bytes(DTYPE_BF16), 2);
}

/* Every allocation fails once: a status, no leak, no output; and an operation keeps its first
 * error until it is asked for. */
static void allocations_fail(void **state)
{
    (void)state;
    const int64_t live = heap_live();
    uint64_t nth = 1;
    for (;; nth++) {
        struct ops *ops = NULL;
        struct failure why = {0};
        heap_fail(nth, true);
        const enum status status = cpu_ops_new(DTYPE_FP32, 1, &ops, &why);
        const uint64_t n_failed = heap_failures();
        heap_fail(0, false);
        if (status == STATUS_OK) {
            assert_int_equal(n_failed, 0);
            ops->free(ops);
            break;
        }
        assert_int_equal(status, STATUS_OUT_OF_MEMORY);
        assert_null(ops);
        assert_int_equal(heap_live(), live);
    }
    assert_true(nth > 1);
    assert_int_equal(heap_live(), live);

    struct ops *ops = kernel_ops(1);
    cpu_of(ops)->simd = &simd_table_plain; /* products through the library, which keeps them */
    const struct matmul shape = {.form = MATMUL_NT, .m = 4, .n = 4, .k = 4};
    heap_fail(1, true);
    assert_int_equal(ops->matmul_scratch(ops, &shape), 0);
    heap_fail(0, false);
    struct failure why = {0};
    assert_int_equal(ops->check(ops, &why), STATUS_OUT_OF_MEMORY);
    assert_non_null(strstr(why.text, "m=4 n=4 k=4"));
    assert_int_equal(ops->check(ops, &why), STATUS_OK);
    check(ops, &shape, false); /* the next try works */
    kernel_ops_free(ops);
    assert_int_equal(heap_live(), live);
}

static void fingerprint_names_everything(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    const char *text = ops->fingerprint(ops);
    printf("%s\n", text);
    if (cpu_of(ops)->simd->panel_columns == 0)
        assert_non_null(strstr(text, "oneDNN"));
    assert_non_null(strstr(text, cpu_of(ops)->simd->name));
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_reference),  cmocka_unit_test(blocks_match_reference),
        cmocka_unit_test(same_bits_anywhere), cmocka_unit_test(same_bits_on_other_sets),
        cmocka_unit_test(rows_stand_alone),   cmocka_unit_test(scratch_of_large_shapes),
        cmocka_unit_test(bias_gradient),      cmocka_unit_test(refusals),
        cmocka_unit_test(allocations_fail),   cmocka_unit_test(fingerprint_names_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
