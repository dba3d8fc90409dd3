/* Rotary position embedding on the GPU's kernel, run by fibres, against the CPU device.
 *
 * links: testing kernels base
 * sources: kernels/cuda/rotary.cu
 *
 * Both take cosine and sine in double; two products and a sum follow, which a GPU may contract:
 * 3e-7 of the greatest value. bf16: see typed.h. */
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

static const double TOLERANCE = 3e-7;

struct shape {
    size_t rows;
    uint32_t n_heads, n_kv_heads, head_dim;
    size_t skew;
};

static void check(const struct shape *s, enum dtype dtype, int direction)
{
    const size_t row_width = ((size_t)s->n_heads + 2 * (size_t)s->n_kv_heads) * s->head_dim;
    const size_t n = s->rows * row_width;
    float *qkv = values_random(n, 2.0f, 1);
    int32_t *positions = values_integers(s->rows, 200000, 2);
    void *typed = typed_new_skew(dtype, qkv, n, s->skew), *kept = NULL;
    char *before = malloc(n * typed_bytes(dtype));
    assert_non_null(before);
    memcpy(before, typed, n * typed_bytes(dtype));
    struct cuda_rotary call = {.dtype = dtype,
                               .qkv = typed,
                               .positions = positions,
                               .rotary = {.n_pairs = s->head_dim / 2},
                               .rows = s->rows,
                               .n_heads = s->n_heads,
                               .n_kv_heads = s->n_kv_heads,
                               .head_dim = s->head_dim,
                               .direction = direction};
    for (uint32_t i = 0; i < s->head_dim / 2; i++) {
        call.rotary.inv_freq[i] = powf(10000.0f, -2.0f * (float)i / (float)s->head_dim);
    }
    struct ops *ops = kernel_ops(1);
    ops->rotary(ops, qkv, positions, &call.rotary, s->rows, s->n_heads, s->n_kv_heads, s->head_dim,
                direction);
    kernel_ops_free(ops);
    for (size_t order = 1; order < TYPED_ORDERS; order++) {
        typed_order(order);
        memcpy(typed, before, n * typed_bytes(dtype));
        cuda_launch_rotary(NULL, &call);
        assert_true(typed_same(&kept, typed, n * typed_bytes(dtype)));
    }
    assert_true(typed_close("rotated", dtype, typed, qkv, n, TOLERANCE));
    const size_t n_values = (size_t)s->n_kv_heads * s->head_dim; /* at each row's end */
    for (size_t r = 0; r < s->rows; r++) {
        const size_t at = ((r + 1) * row_width - n_values) * typed_bytes(dtype);
        assert_memory_equal((char *)typed + at, before + at, n_values * typed_bytes(dtype));
    }
    typed_free_skew(dtype, typed, s->skew);
    free(kept);
    free(before);
    free(qkv);
    free(positions);
}

/* Pairs of whole packs and not, grouped heads, heads of 2 and of 256, a skewed start. */
static void matches_cpu(void **state)
{
    (void)state;
    const struct shape shapes[] = {{1, 1, 1, 2, 0},  {5, 3, 1, 6, 0},   {5, 12, 12, 64, 0},
                                   {7, 4, 2, 80, 0}, {2, 2, 1, 256, 0}, {3, 4, 4, 16, 1},
                                   {5, 3, 3, 50, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check(&shapes[i], DTYPE_FP32, 1);
        check(&shapes[i], DTYPE_FP32, -1);
        check(&shapes[i], DTYPE_BF16, 1);
        check(&shapes[i], DTYPE_BF16, -1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
