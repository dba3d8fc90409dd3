/* Sums, fills and conversions on the GPU's kernels, run by fibres, against the CPU device and
 * against sums in long double.
 *
 * links: testing kernels base
 * sources: kernels/cuda/reduce.cu
 *
 * Element-wise results and sums of parts have the CPU's bits. Sums in fp64 are taken in another
 * order than the CPU's, of terms that are exact or rounded once: a million of them keep
 * 1e-13 of the sum of their magnitudes. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "kernels/cuda/kernels.h"
#include "tests/cuda/lib/typed.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static const double TOLERANCE = 1e-13;
/* One quad short of, at, and past a thread, a block of threads and a block of squares. */
static const size_t sizes[] = {1, 2, 3, 4, 5, 1023, 1024, 1029, 16383, 16384, 16390, 100003};
enum { N_SIZES = sizeof sizes / sizeof *sizes, MOST = 100003, SKEWS = 3 };

static void varying_is_set(void **state)
{
    (void)state;
    struct cuda_varying varying = {0, 0};
    const struct cuda_set_varying args = {&varying, {7, 0xFFFFFFF0u}};
    cuda_launch_set_varying(NULL, &args);
    assert_int_equal(varying.step, 7);
    assert_int_equal(varying.first_sample, 0xFFFFFFF0u);
}

static double sum(const float *values, size_t n)
{
    double out = NAN;
    const struct cuda_sum args = {&out, values, n};
    cuda_launch_sum(NULL, &args);
    return out;
}

static double sum_squares(const float *values, size_t n)
{
    static double partials[CUDA_SUM_PARTIALS];
    double out = NAN;
    for (size_t i = 0; i < CUDA_SUM_PARTIALS; i++) {
        partials[i] = NAN; /* what is not written must not be read */
    }
    const struct cuda_sum_squares args = {&out, partials, values, n};
    cuda_launch_sum_squares(NULL, &args);
    return out;
}

/* Near the right sum, and the same bits in every order of threads and wherever the array
 * begins. */
static void check_sums(const float *values, size_t n)
{
    long double right = 0.0L, right_squares = 0.0L, magnitudes = 0.0L;
    for (size_t i = 0; i < n; i++) {
        const long double x = (long double)values[i];
        right += x;
        magnitudes += fabsl(x);
        right_squares += x * x;
    }
    double first = 0.0, first_squares = 0.0;
    for (size_t order = 0; order < TYPED_ORDERS; order++) {
        for (size_t skew = 0; skew < SKEWS; skew++) {
            float *memory = values_zero(n + skew);
            memcpy(memory + skew, values, n * sizeof *values);
            typed_order(order);
            const double got = sum(memory + skew, n), squares = sum_squares(memory + skew, n);
            free(memory);
            assert_true(fabs((double)(got - right)) <= TOLERANCE * (double)magnitudes);
            assert_true(fabs((double)(squares - right_squares)) <=
                        TOLERANCE * (double)right_squares);
            if (order == 0 && skew == 0) {
                first = got;
                first_squares = squares;
            }
            assert_memory_equal(&got, &first, sizeof got);
            assert_memory_equal(&squares, &first_squares, sizeof squares);
        }
    }
}

static void sums_are_near_and_fixed(void **state)
{
    (void)state;
    float *values = values_random(MOST, 3.0f, 1);
    for (size_t i = 0; i < N_SIZES; i++) {
        check_sums(values, sizes[i]);
    }
    struct ops *ops = kernel_ops(1);
    double cpu = 0.0;
    ops->sum_squares(ops, &cpu, values, MOST);
    assert_true(fabs(cpu - sum_squares(values, MOST)) <= TOLERANCE * cpu);
    ops->sum(ops, &cpu, values, MOST);
    assert_true(fabs(cpu - sum(values, MOST)) <= TOLERANCE * 3.0 * MOST);
    kernel_ops_free(ops);
    assert_true(sum(values, 0) == 0.0);
    assert_true(sum_squares(values, 0) == 0.0);
    free(values);
}

/* fp32 would lose the small terms, and its squares would overflow; a NaN is not lost. */
static void sums_in_fp64(void **state)
{
    (void)state;
    float values[1000];
    for (size_t i = 0; i < 1000; i++) {
        values[i] = 1.0f;
    }
    values[17] = 0x1p30f;
    assert_true(sum(values, 1000) == 0x1p30 + 999.0);
    values[17] = 0x1p20f;
    assert_true(sum_squares(values, 1000) == 0x1p40 + 999.0);
    values[17] = 3e38f;
    assert_true(sum_squares(values, 1000) > 8.9e76 && sum_squares(values, 1000) < 9.1e76);
    values[999] = NAN;
    assert_true(isnan(sum(values, 1000)));
    assert_true(isnan(sum_squares(values, 1000)));
    values[999] = INFINITY;
    assert_true(isinf(sum_squares(values, 1000)));
}

/* More blocks of squares than partial sums: memory of zeros with some numbers in it, the sum of
 * whose squares is exact. */
static void more_blocks_than_partials(void **state)
{
    (void)state;
    const size_t n = (size_t)CUDA_SUM_BLOCK * CUDA_SUM_PARTIALS + 3 * CUDA_SUM_BLOCK + 5;
    void *memory = mmap(NULL, n * sizeof(float), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(memory != MAP_FAILED);
    float *values = memory;
    double right = 0.0;
    for (size_t i = 0; i < 1000; i++) {
        const size_t at = n - 1 - (i * 104729 + i * i * 64) % n;
        right -= (double)values[at] * (double)values[at];
        values[at] = (float)(i + 1);
        right += (double)values[at] * (double)values[at];
    }
    assert_true(sum_squares(values, n) == right);
    munmap(memory, n * sizeof(float));
}

/* Every n and both an aligned and a skewed layout; what lies behind the n elements stays. */
static void parts_are_added_in_order(void **state)
{
    (void)state;
    enum { PARTS = 5, STRIDE = MOST + 2 };
    struct ops *ops = kernel_ops(1);
    float *parts = values_random((size_t)PARTS * STRIDE, 2.0f, 2);
    float *got = values_random(MOST + 1, 1.0f, 3), *want = values_zero(MOST);
    for (size_t i = 0; i < N_SIZES; i++) {
        for (size_t n_parts = 1; n_parts <= PARTS; n_parts += 2) {
            const size_t n = sizes[i], stride = i % 2 == 0 ? STRIDE : STRIDE - 1;
            const float kept = got[n];
            const struct cuda_sum_parts args = {got, parts, n_parts, stride, n};
            typed_order(i % TYPED_ORDERS);
            cuda_launch_sum_parts(NULL, &args);
            ops->sum_parts(ops, want, parts, n_parts, stride, n);
            assert_true(values_equal(got, want, n));
            assert_true(values_equal(&kept, &got[n], 1));
        }
    }
    const struct cuda_sum_parts none = {got, parts, PARTS, STRIDE, 0};
    cuda_launch_sum_parts(NULL, &none);
    free(parts);
    free(got);
    free(want);
    kernel_ops_free(ops);
}

/* Into memory `skew` elements from an aligned address; what lies around stays. */
static void check_narrow(enum dtype dtype, const float *src, size_t n, size_t skew)
{
    const size_t elem_bytes = typed_bytes(dtype), bytes = (n + skew + 1) * elem_bytes;
    unsigned char *memory = malloc(bytes), *dst = memory + skew * elem_bytes;
    unsigned char *untouched = malloc(bytes);
    memset(memory, 0xA5, bytes);
    memset(untouched, 0xA5, bytes);
    const struct cuda_narrow narrow = {dtype, dst, src, n};
    cuda_launch_narrow(NULL, &narrow);
    assert_true(typed_exact("narrow", dtype, dst, src, n));
    memset(dst, 0xA5, n * elem_bytes);
    assert_memory_equal(memory, untouched, bytes);
    free(memory);
    free(untouched);
}

static void check_elements(struct ops *ops, size_t n, size_t skew)
{
    float *src = values_random(n + skew, 2.0f, 4), *got = values_random(n + skew + 1, 1.0f, 5);
    float *want = values_copy(got, n + skew + 1);
    const struct cuda_add add = {got + skew, src + skew, n};
    cuda_launch_add(NULL, &add);
    ops->add(ops, want + skew, src + skew, n);
    assert_true(values_equal(got, want, n + skew + 1));

    const struct cuda_fill fill = {got + skew, n, -0.3f};
    cuda_launch_fill(NULL, &fill);
    ops->fill(ops, want + skew, n, -0.3f);
    assert_true(values_equal(got, want, n + skew + 1));

    free(got);
    free(want);
    for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
        for (size_t to_skew = 0; to_skew < 2; to_skew++) {
            check_narrow((enum dtype)dtype, src + skew, n, to_skew);
        }
    }
    free(src);
}

static void elements(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(1);
    for (size_t i = 0; i < N_SIZES; i++) {
        for (size_t skew = 0; skew < SKEWS; skew++) {
            typed_order((i + skew) % TYPED_ORDERS);
            check_elements(ops, sizes[i], skew);
        }
    }
    check_elements(ops, (size_t)8192 * 1024 + 1003, 0); /* more than the grid takes at once */
    float none = 1.0f;
    const struct cuda_add add = {&none, &none, 0};
    const struct cuda_fill fill = {&none, 0, 2.0f};
    const struct cuda_narrow narrow = {DTYPE_BF16, &none, &none, 0};
    cuda_launch_add(NULL, &add);
    cuda_launch_fill(NULL, &fill);
    cuda_launch_narrow(NULL, &narrow);
    assert_true(none == 1.0f);
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(varying_is_set),
        cmocka_unit_test(sums_are_near_and_fixed),
        cmocka_unit_test(sums_in_fp64),
        cmocka_unit_test(more_blocks_than_partials),
        cmocka_unit_test(parts_are_added_in_order),
        cmocka_unit_test(elements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
