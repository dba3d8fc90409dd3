/* Embedding tables on the GPU's kernels, run by fibres, against the CPU device, bit for bit: one
 * sum of two values and one rounding forward; backward the rows of an entry are added in order.
 *
 * links: testing kernels base
 * sources: kernels/cuda/embed.cu */
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

/* skew: of the table and the rows, in elements; also of the lists of tokens. */
struct shape {
    size_t rows, width;
    int32_t vocab;
    size_t seq_len, skew;
};

/* Few and many repetitions, more rows than a chunk of tokens (1024), widths below and above the
 * columns of a block, and starts that are not 16-byte aligned. */
static const struct shape shapes[] = {
    {1, 1, 3, 1, 0},       {5, 7, 2, 5, 0},       {5, 768, 251, 5, 0},  {9, 1000, 4, 3, 0},
    {1100, 8, 40, 500, 0}, {2100, 3, 7, 1050, 1}, {1300, 16, 1, 1, 0},  {40, 2600, 5, 20, 0},
    {70, 8, 50257, 64, 1}, {1024, 8, 9, 1024, 0}, {1025, 5, 300, 41, 3}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static int32_t *positions_of(const struct shape *s, int32_t *positions)
{
    for (size_t r = 0; r < s->rows; r++) {
        positions[r] = (int32_t)(r % s->seq_len);
    }
    return positions;
}

static void check_forward(const struct shape *s, enum dtype dtype, bool with_positions)
{
    const size_t n = s->rows * s->width, n_wte = (size_t)s->vocab * s->width;
    const size_t n_wpe = s->seq_len * s->width;
    float *wte = values_random(n_wte, 1.0f, 1), *wpe = values_random(n_wpe, 1.0f, 2);
    float *want = values_random(n, 9.0f, 3);
    int32_t *tokens = values_integers(s->rows, s->vocab, 4);
    int32_t *positions = positions_of(s, values_integers(s->rows, 1, 5));
    void *typed_wte = typed_new_skew(dtype, wte, n_wte, s->skew);
    void *typed_wpe = typed_new(dtype, wpe, n_wpe), *out = typed_new(dtype, want, n);
    struct ops *ops = kernel_ops(1);
    ops->embed_forward(ops, want, tokens, positions, wte, with_positions ? wpe : NULL, s->rows,
                       s->width);
    kernel_ops_free(ops);
    const struct cuda_embed_forward call = {.dtype = dtype,
                                            .out = out,
                                            .tokens = tokens,
                                            .positions = with_positions ? positions : NULL,
                                            .wte = typed_wte,
                                            .wpe = with_positions ? typed_wpe : NULL,
                                            .rows = s->rows,
                                            .width = s->width};
    cuda_launch_embed_forward(NULL, &call);
    assert_true(typed_exact("embedded", dtype, out, want, n));
    typed_free_skew(dtype, typed_wte, s->skew);
    void *all[] = {wte, wpe, want, tokens, positions, typed_wpe, out};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

static void forward(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        check_forward(&shapes[i], DTYPE_FP32, true);
        check_forward(&shapes[i], DTYPE_FP32, false);
        check_forward(&shapes[i], DTYPE_BF16, true);
        check_forward(&shapes[i], DTYPE_BF16, false);
    }
}

static void check_backward(const struct shape *s, enum dtype dtype, size_t order, bool with_wpe)
{
    const size_t n = s->rows * s->width, n_wte = (size_t)s->vocab * s->width;
    const size_t n_wpe = s->seq_len * s->width;
    float *dwte = values_random(n_wte + s->skew, 1.0f, 1), *dwpe = values_random(n_wpe, 1.0f, 2);
    float *want_dwte = values_copy(dwte, n_wte + s->skew), *want_dwpe = values_copy(dwpe, n_wpe);
    float *dout = values_random(n, 1.0f, 3);
    int32_t *tokens = values_integers(s->rows + s->skew, s->vocab, 4);
    int32_t *positions = positions_of(s, values_integers(s->rows, 1, 5));
    void *typed_dout = typed_new_skew(dtype, dout, n, s->skew);
    struct ops *ops = kernel_ops(1);
    ops->embed_backward(ops, want_dwte + s->skew, with_wpe ? want_dwpe : NULL, dout,
                        tokens + s->skew, positions, s->rows, s->width);
    kernel_ops_free(ops);
    const struct cuda_embed_backward call = {.dtype = dtype,
                                             .dwte = dwte + s->skew,
                                             .dwpe = with_wpe ? dwpe : NULL,
                                             .dout = typed_dout,
                                             .tokens = tokens + s->skew,
                                             .positions = positions,
                                             .rows = s->rows,
                                             .width = s->width};
    typed_order(order);
    cuda_launch_embed_backward(NULL, &call);
    assert_true(values_equal(dwte, want_dwte, n_wte + s->skew));
    assert_true(values_equal(dwpe, want_dwpe, n_wpe));
    typed_free_skew(dtype, typed_dout, s->skew);
    void *all[] = {dwte, dwpe, want_dwte, want_dwpe, dout, tokens, positions};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

static void backward_in_any_order(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        check_backward(&shapes[i], DTYPE_FP32, TYPED_ORDERS - 1, true);
        check_backward(&shapes[i], DTYPE_BF16, TYPED_ORDERS - 2, true);
        check_backward(&shapes[i], DTYPE_BF16, 0, false);
    }
    typed_order(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward),
        cmocka_unit_test(backward_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
