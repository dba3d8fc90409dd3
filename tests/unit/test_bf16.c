/* Every operation of the bf16 table but matrix products: against the fp32 table.
 *
 * links: testing kernels base
 * timeout: 600
 *
 * Both tables get the same numbers, which bf16 can hold. Arithmetic is the same text in fp32 with
 * one rounding at the end, so outputs in bf16 have to be the fp32 table's, rounded once, bit for
 * bit, and outputs in fp32 have to be equal: no tolerance is needed. All instruction sets of the
 * machine and several numbers of threads are run, which therefore agree too. */
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
#include "kernels/philox.h"
#include "tests/lib/bf16_values.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

enum { MAX_ARRAYS = 8, ROWS = 130, WIDTH = 301, SEQ_LEN = 65 };

/* Inputs and outputs alike: random numbers before, compared after. */
struct array {
    size_t n;
    float scale;
    bool fp32; /* in both tables */
};

struct operation {
    const char *name;
    void (*run)(struct ops *ops, void *const *a, const void *parameters);
    const void *parameters;
    struct array arrays[MAX_ARRAYS];
};

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

/* An operand must not be written beyond its end. */
enum { GUARD = 8, GUARD_PATTERN = 0x7F };

static void *guarded(const void *values, size_t bytes)
{
    unsigned char *memory = malloc(bytes + GUARD);
    assert_non_null(memory);
    memcpy(memory, values, bytes);
    memset(memory + bytes, GUARD_PATTERN, GUARD);
    return memory;
}

static void check_guard(const void *array, size_t bytes, const char *name)
{
    const unsigned char *end = (const unsigned char *)array + bytes;
    for (size_t i = 0; i < GUARD; i++)
        if (end[i] != GUARD_PATTERN)
            fail_msg("%s: wrote beyond the end of an operand", name);
}

static void check_table(const struct operation *o, const struct simd_table *set, int n_threads,
                        float *const *start, float *const *want)
{
    struct ops *ops = kernel_ops_of(DTYPE_BF16, n_threads);
    assert_int_equal(ops->dtype, DTYPE_BF16);
    assert_int_equal(ops->elem_bytes, 2);
    cpu_of(ops)->simd = set;
    void *got[MAX_ARRAYS] = {0};
    for (size_t i = 0; i < MAX_ARRAYS && o->arrays[i].n > 0; i++) {
        const size_t n = o->arrays[i].n;
        uint16_t *narrow = bf16_from(start[i], n);
        got[i] = o->arrays[i].fp32 ? guarded(start[i], n * sizeof(float)) : guarded(narrow, n * 2);
        free(narrow);
    }
    o->run(ops, got, o->parameters);
    for (size_t i = 0; i < MAX_ARRAYS && o->arrays[i].n > 0; i++) {
        const size_t n = o->arrays[i].n;
        const bool fp32 = o->arrays[i].fp32;
        if (!(fp32 ? values_equal(got[i], want[i], n) : bf16_equal(got[i], want[i], n)))
            fail_msg("%s: array %zu, %s, %d threads", o->name, i, set->name, n_threads);
        check_guard(got[i], n * (fp32 ? 4 : 2), o->name);
        free(got[i]);
    }
    kernel_ops_free(ops);
}

static void check(const struct operation *o)
{
    float *start[MAX_ARRAYS] = {0}, *want[MAX_ARRAYS] = {0};
    void *operands[MAX_ARRAYS] = {0};
    for (size_t i = 0; i < MAX_ARRAYS && o->arrays[i].n > 0; i++) {
        start[i] = values_random(o->arrays[i].n, o->arrays[i].scale, i + 1);
        if (!o->arrays[i].fp32)
            bf16_snap(start[i], o->arrays[i].n);
        operands[i] = want[i] = values_copy(start[i], o->arrays[i].n);
    }
    struct ops *ops = kernel_ops(2);
    o->run(ops, operands, o->parameters);
    kernel_ops_free(ops);
    const struct simd_table *sets[3];
    const size_t n_sets = bf16_sets(sets);
    for (size_t set = 0; set < n_sets; set++)
        for (int n_threads = 1; n_threads <= 4; n_threads *= 2)
            check_table(o, sets[set], n_threads, start, want);
    for (size_t i = 0; i < MAX_ARRAYS; i++) {
        free(start[i]);
        free(want[i]);
    }
}

/* ---- norms ---- */

static const enum norm_kind LAYER = NORM_LAYER, RMS = NORM_RMS;

static void run_norm(struct ops *ops, void *const *a, const void *parameters)
{
    const enum norm_kind kind = *(const enum norm_kind *)parameters;
    const bool layer = kind == NORM_LAYER;
    ops->norm_forward(ops, kind, a[0], layer ? a[1] : NULL, a[2], a[3], a[4], layer ? a[5] : NULL,
                      ROWS, WIDTH, 1e-5f);
}

static void run_norm_backward(struct ops *ops, void *const *a, const void *parameters)
{
    const enum norm_kind kind = *(const enum norm_kind *)parameters;
    const bool layer = kind == NORM_LAYER;
    ops->norm_backward(ops, kind, a[0], a[1], layer ? a[2] : NULL, a[3], a[4], a[5],
                       layer ? a[6] : NULL, a[7], ROWS, WIDTH);
}

static void norms(void **state)
{
    (void)state;
    for (int kind = NORM_LAYER; kind <= NORM_RMS; kind++) {
        const struct array matrix = {ROWS * WIDTH, 3.0f, false};
        const struct array row = {WIDTH, 1.0f, false}, sums = {WIDTH, 1.0f, true};
        const struct array column = {ROWS, 1.0f, true};
        const void *which = kind == NORM_LAYER ? &LAYER : &RMS;
        check(&(struct operation){
            "norm forward", run_norm, which, {matrix, column, column, matrix, row, row}});
        check(&(struct operation){"norm backward",
                                  run_norm_backward,
                                  which,
                                  {matrix, sums, sums, matrix, matrix, row, column, column}});
    }
}

/* ---- MLP ---- */

static const enum activation_kind GELU = ACTIVATION_GELU, SWIGLU = ACTIVATION_SWIGLU;

static void run_activation(struct ops *ops, void *const *a, const void *parameters)
{
    ops->activation_forward(ops, *(const enum activation_kind *)parameters, a[0], a[1], ROWS,
                            WIDTH);
}

static void run_activation_backward(struct ops *ops, void *const *a, const void *parameters)
{
    ops->activation_backward(ops, *(const enum activation_kind *)parameters, a[0], a[1], a[2], ROWS,
                             WIDTH);
}

static void run_activation_in_place(struct ops *ops, void *const *a, const void *parameters)
{
    ops->activation_backward(ops, *(const enum activation_kind *)parameters, a[0], a[1], a[0], ROWS,
                             WIDTH);
}

static void activations(void **state)
{
    (void)state;
    for (int kind = ACTIVATION_GELU; kind <= ACTIVATION_SWIGLU; kind++) {
        const size_t n = (size_t)ROWS * WIDTH, n_in = kind == ACTIVATION_SWIGLU ? 2 * n : n;
        const struct array in = {n_in, 60.0f, false}, out = {n, 1.0f, false};
        const void *which = kind == ACTIVATION_SWIGLU ? &SWIGLU : &GELU;
        check(&(struct operation){"activation", run_activation, which, {out, in}});
        check(&(struct operation){
            "activation backward", run_activation_backward, which, {in, out, in}});
        check(&(struct operation){
            "activation backward in place", run_activation_in_place, which, {in, out}});
    }
}

/* ---- residual stream ---- */

static const struct dropout DROPOUT = {.p = 0.1f,
                                       .seed = 7,
                                       .step = 3,
                                       .first_sample = 5,
                                       .seq_len = SEQ_LEN,
                                       .use = RANDOM_MLP_OUT_DROPOUT};

static void run_residual(struct ops *ops, void *const *a, const void *parameters)
{
    ops->residual_dropout(ops, a[0], a[1], a[2], ROWS, WIDTH, parameters);
    ops->residual_dropout(ops, a[1], a[1], a[2], ROWS, WIDTH, parameters); /* in place */
    ops->residual_dropout(ops, a[3], NULL, a[2], ROWS, WIDTH, parameters);
    ops->dropout_backward(ops, a[4], a[2], ROWS, WIDTH, parameters);
}

static void residual(void **state)
{
    (void)state;
    const struct array x = {ROWS * WIDTH, 2.0f, false};
    check(&(struct operation){"residual", run_residual, NULL, {x, x, x, x, x}});
    check(&(struct operation){"residual, dropout", run_residual, &DROPOUT, {x, x, x, x, x}});
}

/* ---- embedding, rotary, loss ---- */

enum { VOCAB = 97, LONG_VOCAB = 5003 };

static void run_embed(struct ops *ops, void *const *a, const void *parameters)
{
    (void)parameters;
    int32_t *tokens = values_integers(ROWS, VOCAB, 1), *positions = values_integers(ROWS, 40, 2);
    ops->embed_forward(ops, a[0], tokens, positions, a[1], a[2], ROWS, WIDTH);
    ops->embed_forward(ops, a[3], tokens, NULL, a[1], NULL, ROWS, WIDTH);
    ops->embed_backward(ops, a[4], a[5], a[6], tokens, positions, ROWS, WIDTH);
    ops->embed_backward(ops, a[4], NULL, a[6], tokens, NULL, ROWS, WIDTH);
    free(tokens);
    free(positions);
}

static void embedding(void **state)
{
    (void)state;
    const struct array rows = {ROWS * WIDTH, 1.0f, false};
    check(&(struct operation){"embedding",
                              run_embed,
                              NULL,
                              {rows,
                               {VOCAB * WIDTH, 1.0f, false},
                               {40 * WIDTH, 0.1f, false},
                               rows,
                               {VOCAB * WIDTH, 1.0f, true},
                               {40 * WIDTH, 1.0f, true},
                               rows}});
}

static void run_rotary(struct ops *ops, void *const *a, const void *parameters)
{
    (void)parameters;
    struct rotary rotary = {.n_pairs = 20};
    for (uint32_t i = 0; i < rotary.n_pairs; i++)
        rotary.inv_freq[i] = powf(10000.0f, -(float)i / 20.0f);
    int32_t *positions = values_integers(ROWS, 5000, 1);
    ops->rotary(ops, a[0], positions, &rotary, ROWS, 3, 1, 40, 1);
    ops->rotary(ops, a[1], positions, &rotary, ROWS, 3, 1, 40, -1);
    free(positions);
}

static void rotary(void **state)
{
    (void)state;
    const struct array qkv = {ROWS * (3 + 2) * 40, 2.0f, false};
    check(&(struct operation){"rotary", run_rotary, NULL, {qkv, qkv}});
}

enum { LOSS_ROWS = 40 };

static void run_loss(struct ops *ops, void *const *a, const void *parameters)
{
    const int32_t vocab = *(const int32_t *)parameters;
    int32_t *labels = values_integers(LOSS_ROWS, vocab, 1);
    labels[3] = labels[11] = -1;
    labels[5] = vocab - 1;
    ops->cross_entropy(ops, a[0], a[1], labels, LOSS_ROWS, (size_t)vocab, 0.125f, false);
    ops->cross_entropy(ops, a[2], a[3], labels, LOSS_ROWS, (size_t)vocab, 0.125f, true);
    free(labels);
}

static void cross_entropy(void **state)
{
    (void)state;
    /* With five words a label's gradient shows the roundings of both its terms. */
    static const int32_t vocabs[] = {LONG_VOCAB, 5};
    for (size_t i = 0; i < 2; i++) {
        const struct array losses = {LOSS_ROWS, 1.0f, true};
        const struct array logits = {LOSS_ROWS * (size_t)vocabs[i], i == 0 ? 9.0f : 1.0f, false};
        check(&(struct operation){
            "cross-entropy", run_loss, &vocabs[i], {losses, logits, losses, logits}});
    }
}

static void run_bias(struct ops *ops, void *const *a, const void *parameters)
{
    (void)parameters;
    ops->bias_backward(ops, a[0], a[1], ROWS, WIDTH);
}

static void bias_gradient(void **state)
{
    (void)state;
    check(&(struct operation){
        "bias", run_bias, NULL, {{WIDTH, 1.0f, true}, {ROWS * WIDTH, 1.0f, false}}});
}

/* ---- attention ---- */

static void run_attention(struct ops *ops, void *const *a, const void *parameters)
{
    ops->attention_forward(ops, parameters, a[0], a[1], a[2]);
}

/* `out`, `lse` as a forward pass leaves them would differ in rounding between the tables; any
 * numbers do. */
static void run_attention_backward(struct ops *ops, void *const *a, const void *parameters)
{
    ops->attention_backward(ops, parameters, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static void check_attention(struct attention attention, const char *name)
{
    attention.scale = 1.0f / sqrtf((float)attention.head_dim);
    const size_t rows = attention.batch * attention.seq_len;
    const size_t n_lse = rows * attention.n_heads, n_out = n_lse * attention.head_dim;
    const size_t n_qkv =
        rows * (attention.n_heads + 2 * (size_t)attention.n_kv_heads) * attention.head_dim;
    const struct array out = {n_out, 1.0f, false}, lse = {n_lse, 4.0f, true};
    const struct array qkv = {n_qkv, 2.0f, false};
    check(&(struct operation){name, run_attention, &attention, {out, lse, qkv}});
    check(&(struct operation){
        name, run_attention_backward, &attention, {qkv, lse, out, out, lse, qkv}});
}

static void attention(void **state)
{
    (void)state;
    check_attention(
        (struct attention){
            .batch = 2, .seq_len = 100, .n_heads = 4, .n_kv_heads = 2, .head_dim = 64},
        "attention, grouped");
    check_attention(
        (struct attention){
            .batch = 1, .seq_len = 150, .n_heads = 3, .n_kv_heads = 1, .head_dim = 20},
        "attention, padded heads"); /* one thread: the whole head at once; more: by tiles */
    struct dropout dropout = DROPOUT;
    dropout.use = RANDOM_ATTENTION_DROPOUT;
    int32_t segments[130];
    for (int i = 0; i < 130; i++)
        segments[i] = i < 90 ? i / 37 : 9;
    check_attention((struct attention){.batch = 1,
                                       .seq_len = 130,
                                       .n_heads = 2,
                                       .n_kv_heads = 1,
                                       .head_dim = 160,
                                       .segments = segments,
                                       .dropout = dropout},
                    "attention, wide, documents, dropout");
}

/* Too long for the sums of a whole sequence to lie on the stack. */
static void long_attention(void **state)
{
    (void)state;
    check_attention(
        (struct attention){
            .batch = 1, .seq_len = 520, .n_heads = 1, .n_kv_heads = 1, .head_dim = 250},
        "attention, long");
}

/* ---- conversions ---- */

static void check_narrow(const struct simd_table *set, const float *values, size_t n)
{
    struct ops *ops = kernel_ops_of(DTYPE_BF16, 2);
    cpu_of(ops)->simd = set;
    uint16_t *got = calloc(n, sizeof *got);
    assert_non_null(got);
    ops->narrow(ops, got, values, n);
    assert_true(bf16_equal(got, values, n));
    for (size_t i = 0; i < n; i++)
        assert_true(!signbit(values[i]) == !(got[i] & 0x8000));
    free(got);
    kernel_ops_free(ops);
}

/* Every upper half with the lower halves at which something happens: exact, just below and above
 * a tie, the tie, and not-a-number whose set bits are all in the lower half. */
static void narrow_everything(void **state)
{
    (void)state;
    static const uint16_t low[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    enum { N_LOW = sizeof low / sizeof *low, N = 65536 * N_LOW };
    float *values = values_zero(N);
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t bits = (i / N_LOW) << 16 | low[i % N_LOW];
        memcpy(&values[i], &bits, sizeof bits);
    }
    const struct simd_table *sets[3];
    const size_t n_sets = bf16_sets(sets);
    for (size_t set = 0; set < n_sets; set++)
        check_narrow(sets[set], values, N - 3); /* not a whole number of vectors */
    free(values);
}

static void narrow_fp32_copies(void **state)
{
    (void)state;
    struct ops *ops = kernel_ops(2);
    float *values = values_random(70001, 1.0f, 1), *got = values_zero(70001);
    ops->narrow(ops, got, values, 70001);
    assert_true(values_equal(got, values, 70001));
    free(values);
    free(got);
    kernel_ops_free(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms),
        cmocka_unit_test(activations),
        cmocka_unit_test(residual),
        cmocka_unit_test(embedding),
        cmocka_unit_test(rotary),
        cmocka_unit_test(cross_entropy),
        cmocka_unit_test(bias_gradient),
        cmocka_unit_test(attention),
        cmocka_unit_test(long_attention),
        cmocka_unit_test(narrow_everything),
        cmocka_unit_test(narrow_fp32_copies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
