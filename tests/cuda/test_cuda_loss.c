/* Cross-entropy on the GPU's kernel, run by fibres, against the CPU device.
 *
 * links: testing kernels base
 * sources: kernels/cuda/loss.cu
 *
 * In fp32 the sum of up to 50257 exponentials is taken in another order and without the CPU's
 * fp64, and the exponential is another: 2e-6 of the greatest loss and gradient. bf16: see
 * typed.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include "kernels/cuda/kernels.h"
#include "tests/cuda/lib/typed.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static const double TOLERANCE = 2e-6;
static const float GRAD_SCALE = 0.37f;

static void launch(enum dtype dtype, float *losses, void *logits, const int32_t *labels,
                   size_t rows, size_t vocab, bool with_gradient)
{
    const struct cuda_cross_entropy call = {.dtype = dtype,
                                            .losses = losses,
                                            .logits = logits,
                                            .labels = labels,
                                            .rows = rows,
                                            .vocab = vocab,
                                            .grad_scale = GRAD_SCALE,
                                            .with_gradient = with_gradient};
    cuda_launch_cross_entropy(NULL, &call);
}

/* Logits of some size, some of them -infinity (a masked part of the vocabulary); the third row's
 * label is ignored; labels at both ends. */
static void check(enum dtype dtype, size_t rows, size_t vocab, float scale, size_t skew)
{
    const size_t n = rows * vocab;
    float *logits = values_random(n, scale, 1), *want_losses = values_random(rows, 9.0f, 2);
    float *losses = values_random(rows, 9.0f, 3);
    int32_t *labels = values_integers(rows, (int32_t)vocab, 4);
    labels[0] = (int32_t)vocab - 1;
    for (size_t r = 1; r < rows; r++) {
        labels[r] = r == 1 ? 0 : r == 2 ? -1 : labels[r];
    }
    for (size_t i = 0; i < n; i += 5) {
        const size_t r = i / vocab;
        if (labels[r] != (int32_t)(i % vocab)) {
            logits[i] = -INFINITY;
        }
    }
    void *typed = typed_new_skew(dtype, logits, n, skew);
    void *kept = malloc(n * typed_bytes(dtype));
    assert_non_null(kept);
    memcpy(kept, typed, n * typed_bytes(dtype));
    struct ops *ops = kernel_ops(1);
    ops->cross_entropy(ops, want_losses, logits, labels, rows, vocab, GRAD_SCALE, true);
    kernel_ops_free(ops);
    launch(dtype, losses, typed, labels, rows, vocab, false);
    assert_memory_equal(typed, kept, n * typed_bytes(dtype)); /* untouched */
    assert_true(typed_close("losses", DTYPE_FP32, losses, want_losses, rows, TOLERANCE));
    void *first = NULL, *first_losses = NULL;
    for (size_t order = 0; order < TYPED_ORDERS; order++) {
        typed_order(order);
        memcpy(typed, kept, n * typed_bytes(dtype));
        launch(dtype, losses, typed, labels, rows, vocab, true);
        assert_true(typed_same(&first, typed, n * typed_bytes(dtype)));
        assert_true(typed_same(&first_losses, losses, rows * sizeof *losses));
    }
    assert_true(typed_close("losses", DTYPE_FP32, losses, want_losses, rows, TOLERANCE));
    assert_true(typed_close("gradient", dtype, typed, logits, n, TOLERANCE));
    typed_free_skew(dtype, typed, skew);
    free(kept);
    free(first);
    free(first_losses);
    free(logits);
    free(want_losses);
    free(losses);
    free(labels);
}

static void matches_cpu(void **state)
{
    (void)state;
    const size_t shapes[][3] = {{1, 1, 0},    {5, 2, 0},     {5, 7, 1},    {5, 8, 0},
                                {5, 8, 3},    {3, 251, 0},   {5, 1000, 0}, {5, 1000, 5},
                                {1, 4096, 0}, {4, 50257, 0}, {3, 8191, 7}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check(DTYPE_FP32, shapes[i][0], shapes[i][1], 4.0f, shapes[i][2]);
        check(DTYPE_BF16, shapes[i][0], shapes[i][1], 4.0f, shapes[i][2]);
    }
    check(DTYPE_FP32, 5, 251, 200.0f,
          0); /* exponentials that vanish, sums that must not overflow */
    check(DTYPE_BF16, 5, 251, 200.0f, 0);
}

static void not_a_number_is_seen(void **state)
{
    (void)state;
    enum { VOCAB = 300 };
    const int32_t labels[] = {5, 7};
    for (size_t at = 0; at < VOCAB; at += 37) {
        float *logits = values_random(2 * VOCAB, 1.0f, 1), losses[2];
        logits[at] = NAN;
        logits[VOCAB] = INFINITY;
        launch(DTYPE_FP32, losses, logits, labels, 2, VOCAB, true);
        assert_true(isnan(losses[0]) && isnan(losses[1]));
        assert_true(isnan(logits[0]) && isnan(logits[VOCAB - 1]));
        free(logits);
    }
}

/* 16385 x 131072 logits: the last row begins above INT_MAX. The labels of the other rows are
 * ignored, so that without a gradient they are not read: of the matrix only the last row takes
 * memory. Covers the address of a row, which reading and writing share; the writing of a gradient
 * so far out is not run. */
static void last_row_beyond_int(void **state)
{
    (void)state;
    enum { ROWS = 16385, VOCAB = 131072 };
    float *row = values_random(VOCAB, 4.0f, 1), *losses = values_random(ROWS, 9.0f, 2);
    int32_t *labels = values_integers(ROWS, 1, 3);
    for (size_t r = 0; r < ROWS; r++) {
        labels[r] = -1;
    }
    labels[ROWS - 1] = 12345;
    for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
        const size_t bytes = typed_bytes((enum dtype)dtype), n = (size_t)ROWS * VOCAB;
        assert_true(n > INT32_MAX);
        char *logits = mmap(NULL, n * bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        assert_true(logits != MAP_FAILED);
        void *typed = typed_new((enum dtype)dtype, row, VOCAB);
        memcpy(logits + (n - VOCAB) * bytes, typed, VOCAB * bytes);
        float alone;
        launch((enum dtype)dtype, &alone, typed, &labels[ROWS - 1], 1, VOCAB, false);
        launch((enum dtype)dtype, losses, logits, labels, ROWS, VOCAB, false);
        assert_true(alone > 1.0f && losses[ROWS - 1] == alone && losses[ROWS - 2] == 0.0f);
        free(typed);
        munmap(logits, n * bytes);
    }
    free(row);
    free(losses);
    free(labels);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_cpu),
        cmocka_unit_test(not_a_number_is_seen),
        cmocka_unit_test(last_row_beyond_int),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
