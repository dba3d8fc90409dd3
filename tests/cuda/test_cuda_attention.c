/* Attention on the GPU's kernels, run by fibres, against the CPU device in fp32.
 *
 * links: testing kernels base
 * sources: kernels/cuda/attention_forward.cu attention_backward.cu attention_plain.cu
 *
 * Both are given the same numbers, those of a bf16 run rounded first. Tolerances are relative to
 * the greatest value of an array, gradients of q, k and v apart.
 * - fp32: sums in another order of up to 256 dimensions and 300 keys, two of them chained: 2e-5.
 * - bf16, out: probabilities are rounded to bf16, 2^-9 of each, so an output is off by at most
 *   2^-9 of the greatest |v|; the greatest |out| is that of a first token, a value itself: 2^-8.
 * - bf16, gradients: P, dS and, by way of delta, out are rounded, 2^-9 of each, and the errors
 *   of a sum add up partly: 2^-7.
 * - lse is never rounded: its products are exact in fp32, which leaves 2e-5. delta contains
 *   out's rounding: 2^-8. */
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
#include "kernels/philox.h"
#include "tests/cuda/lib/typed.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static const double FP32_TOLERANCE = 2e-5, OUT_TOLERANCE = 0x1p-8, GRADIENT_TOLERANCE = 0x1p-7;

struct shape {
    size_t batch, seq_len;
    uint32_t n_heads, n_kv_heads, head_dim;
    float p;
    uint32_t first_token;
    int documents; /* tokens of a document; 0: no segments */
};

/* What both devices are given, and what each makes of it. */
struct run {
    struct attention attention;
    enum dtype dtype;
    size_t n_qkv, n_out, n_lse;
    int32_t *segments;
    float *qkv, *dout; /* of the CPU */
    float *out, *lse, *dqkv, *delta;
    void *typed_qkv, *typed_dout, *typed_out, *typed_dqkv; /* of the kernels */
    float *typed_lse, *typed_delta;
    struct cuda_varying varying;
};

/* Documents of about the length, whose numbers come again. */
static int32_t *segments_of(const struct shape *s)
{
    if (s->documents == 0) {
        return NULL;
    }
    const size_t n = s->batch * s->seq_len;
    int32_t *segments = malloc(n * sizeof *segments);
    assert_non_null(segments);
    for (size_t i = 0; i < n; i++) {
        const size_t sample = i / s->seq_len, token = i % s->seq_len;
        segments[i] = (int32_t)((token + 7 * sample) / (size_t)s->documents % 3);
    }
    return segments;
}

static void *unwritten(size_t bytes)
{
    void *memory = malloc(bytes);
    assert_non_null(memory);
    memset(memory, 0xFF, bytes); /* NaN in both types */
    return memory;
}

static struct run run_new(const struct shape *s, enum dtype dtype, float spread)
{
    struct run r = {.dtype = dtype, .segments = segments_of(s), .varying = {3, 2}};
    const size_t rows = s->batch * s->seq_len;
    r.n_out = rows * s->n_heads * s->head_dim;
    r.n_qkv = rows * (s->n_heads + 2 * (size_t)s->n_kv_heads) * s->head_dim;
    r.n_lse = rows * s->n_heads;
    r.attention = (struct attention){.batch = s->batch,
                                     .seq_len = s->seq_len,
                                     .n_heads = s->n_heads,
                                     .n_kv_heads = s->n_kv_heads,
                                     .head_dim = s->head_dim,
                                     .scale = 1.0f / sqrtf((float)s->head_dim),
                                     .segments = r.segments,
                                     .dropout = {.p = s->p,
                                                 .seed = 0x123456789ABu,
                                                 .step = r.varying.step,
                                                 .first_sample = r.varying.first_sample,
                                                 .first_token = s->first_token,
                                                 .seq_len = (uint32_t)s->seq_len,
                                                 .layer = 1,
                                                 .use = RANDOM_ATTENTION_DROPOUT,
                                                 .first_head = 5}};
    r.qkv = values_random(r.n_qkv, spread, 1);
    r.dout = values_random(r.n_out, 1.0f, 2);
    r.typed_qkv = typed_new(dtype, r.qkv, r.n_qkv);
    r.typed_dout = typed_new(dtype, r.dout, r.n_out);
    r.out = unwritten(r.n_out * sizeof(float));
    r.lse = unwritten(r.n_lse * sizeof(float));
    r.dqkv = unwritten(r.n_qkv * sizeof(float));
    r.delta = unwritten(r.n_lse * sizeof(float));
    r.typed_out = unwritten(r.n_out * typed_bytes(dtype));
    r.typed_dqkv = unwritten(r.n_qkv * typed_bytes(dtype));
    r.typed_lse = unwritten(r.n_lse * sizeof(float));
    r.typed_delta = unwritten(r.n_lse * sizeof(float));
    return r;
}

static void run_free(struct run *r)
{
    void *all[] = {r->segments,   r->qkv,       r->dout,       r->out,        r->lse,
                   r->dqkv,       r->delta,     r->typed_qkv,  r->typed_dout, r->typed_out,
                   r->typed_dqkv, r->typed_lse, r->typed_delta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

static void run_kernels(struct run *r)
{
    struct attention attention = r->attention;
    attention.dropout.step = 99; /* `varying` counts */
    attention.dropout.first_sample = 99;
    cuda_launch_attention_forward(NULL, &(struct cuda_attention_forward){.dtype = r->dtype,
                                                                         .attention = attention,
                                                                         .varying = &r->varying,
                                                                         .out = r->typed_out,
                                                                         .lse = r->typed_lse,
                                                                         .qkv = r->typed_qkv});
    cuda_launch_attention_backward(NULL, &(struct cuda_attention_backward){.dtype = r->dtype,
                                                                           .attention = attention,
                                                                           .varying = &r->varying,
                                                                           .dqkv = r->typed_dqkv,
                                                                           .delta = r->typed_delta,
                                                                           .dout = r->typed_dout,
                                                                           .out = r->typed_out,
                                                                           .lse = r->typed_lse,
                                                                           .qkv = r->typed_qkv});
}

static void run_cpu(struct run *r)
{
    struct ops *ops = kernel_ops(1);
    ops->attention_forward(ops, &r->attention, r->out, r->lse, r->qkv);
    ops->attention_backward(ops, &r->attention, r->dqkv, r->delta, r->dout, r->out, r->lse, r->qkv);
    kernel_ops_free(ops);
}

/* Heads first ... first+n-1 of the packed rows. */
static bool heads_close(const char *what, const struct run *r, uint32_t first, uint32_t n,
                        double tolerance)
{
    const struct attention *a = &r->attention;
    const size_t bytes = typed_bytes(r->dtype), rows = a->batch * a->seq_len;
    const size_t row = (a->n_heads + 2 * (size_t)a->n_kv_heads) * a->head_dim;
    const size_t from = (size_t)first * a->head_dim, width = (size_t)n * a->head_dim;
    char *got = unwritten(rows * width * bytes);
    float *want = unwritten(rows * width * sizeof *want);
    for (size_t i = 0; i < rows; i++) {
        memcpy(got + i * width * bytes, (char *)r->typed_dqkv + (i * row + from) * bytes,
               width * bytes);
        memcpy(want + i * width, r->dqkv + i * row + from, width * sizeof *want);
    }
    const bool close = typed_close(what, r->dtype, got, want, rows * width, tolerance);
    free(got);
    free(want);
    return close;
}

static bool all_close(const struct run *r)
{
    const bool narrow = r->dtype == DTYPE_BF16;
    const double out = narrow ? OUT_TOLERANCE : FP32_TOLERANCE;
    const double gradient = narrow ? GRADIENT_TOLERANCE : FP32_TOLERANCE;
    const uint32_t nh = r->attention.n_heads, nkv = r->attention.n_kv_heads;
    bool close = typed_close("out", r->dtype, r->typed_out, r->out, r->n_out, out);
    close &= typed_close("lse", DTYPE_FP32, r->typed_lse, r->lse, r->n_lse, FP32_TOLERANCE);
    close &= typed_close("delta", DTYPE_FP32, r->typed_delta, r->delta, r->n_lse, out);
    close &= heads_close("dv", r, nh + nkv, nkv, gradient);
    /* A first token's probability is 1, whatever q and k: with nothing but such tokens these
     * gradients are 0 but for delta's rounding. */
    if (r->attention.seq_len > 1) {
        close &= heads_close("dq", r, 0, nh, gradient);
        close &= heads_close("dk", r, nh, nkv, gradient);
    }
    return close;
}

/* Against the CPU, and the same bits in every order of threads. */
static void check(const struct shape *s, enum dtype dtype, bool all_orders)
{
    struct run r = run_new(s, dtype, 2.0f);
    void *kept[4] = {NULL};
    run_cpu(&r);
    for (size_t order = 1; order < (all_orders ? TYPED_ORDERS : 2); order++) {
        typed_order(order);
        run_kernels(&r);
        bool same = typed_same(&kept[0], r.typed_out, r.n_out * typed_bytes(dtype));
        same &= typed_same(&kept[1], r.typed_lse, r.n_lse * sizeof(float));
        same &= typed_same(&kept[2], r.typed_delta, r.n_lse * sizeof(float));
        same &= typed_same(&kept[3], r.typed_dqkv, r.n_qkv * typed_bytes(dtype));
        if (!same) {
            fail_msg("other bits in order %s", typed_orders[order]);
        }
    }
    if (!all_close(&r)) {
        fail_msg("%s B %zu T %zu heads %u/%u of %u, dropout %g, documents of %d",
                 dtype == DTYPE_BF16 ? "bf16" : "fp32", s->batch, s->seq_len, s->n_heads,
                 s->n_kv_heads, s->head_dim, (double)s->p, s->documents);
    }
    for (int i = 0; i < 4; i++) {
        free(kept[i]);
    }
    run_free(&r);
}

static void check_all(const struct shape *shapes, size_t n, enum dtype dtype)
{
    for (size_t i = 0; i < n; i++) {
        check(&shapes[i], dtype, i % 2 == 1);
    }
}

static const struct shape PLAIN[] = {
    {1, 1, 2, 1, 16, 0.0f, 0, 0},   {2, 17, 4, 2, 16, 0.0f, 0, 0},   {1, 64, 3, 3, 64, 0.0f, 0, 0},
    {1, 130, 2, 1, 20, 0.0f, 0, 0}, {1, 200, 2, 1, 16, 0.0f, 0, 30}, {2, 60, 2, 1, 33, 0.1f, 0, 0},
    {1, 40, 2, 2, 256, 0.0f, 0, 0}, {2, 70, 4, 1, 16, 0.1f, 3, 25},  {1, 90, 2, 1, 128, 0.0f, 0, 1},
};

static void plain_in_fp32(void **state)
{
    (void)state;
    check_all(PLAIN, sizeof PLAIN / sizeof *PLAIN, DTYPE_FP32);
}

static void plain_in_bf16(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{2, 17, 4, 2, 16, 0.0f, 0, 0},
                                          {1, 130, 2, 1, 20, 0.1f, 2, 40}};
    check_all(shapes, sizeof shapes / sizeof *shapes, DTYPE_BF16);
}

static void tiles(void **state)
{
    (void)state;
    static const struct shape shapes[] = {
        {1, 1, 2, 1, 64, 0.0f, 0, 0},    {2, 17, 4, 2, 64, 0.0f, 0, 0},
        {1, 64, 3, 3, 64, 0.0f, 0, 0},   {1, 130, 2, 1, 64, 0.0f, 0, 0},
        {1, 200, 4, 2, 64, 0.0f, 0, 0},  {1, 17, 2, 1, 128, 0.0f, 0, 0},
        {1, 130, 2, 1, 128, 0.0f, 0, 0}, {1, 200, 3, 3, 128, 0.0f, 0, 0},
        {1, 70, 2, 1, 80, 0.0f, 0, 0},   {1, 70, 2, 1, 96, 0.0f, 0, 0},
        {1, 70, 2, 1, 256, 0.0f, 0, 0},
    };
    check_all(shapes, sizeof shapes / sizeof *shapes, DTYPE_BF16);
}

/* Tiles that no document shares, tiles with one document, with several, and tokens that see
 * only themselves (as padding does). */
static void tiles_of_documents(void **state)
{
    (void)state;
    static const struct shape shapes[] = {
        {1, 300, 2, 1, 64, 0.0f, 0, 70},  {2, 130, 2, 1, 64, 0.0f, 0, 128},
        {1, 200, 2, 2, 128, 0.0f, 0, 64}, {1, 70, 2, 1, 64, 0.0f, 0, 1},
        {1, 100, 2, 1, 256, 0.0f, 0, 33}, {1, 90, 2, 1, 80, 0.0f, 0, 20},
    };
    check_all(shapes, sizeof shapes / sizeof *shapes, DTYPE_BF16);
}

static void tiles_with_dropout(void **state)
{
    (void)state;
    static const struct shape shapes[] = {
        {2, 70, 4, 2, 64, 0.1f, 0, 0},   {1, 200, 2, 1, 64, 0.1f, 6, 0},
        {1, 130, 2, 1, 128, 0.1f, 0, 0}, {1, 100, 2, 1, 128, 0.5f, 3, 40},
        {1, 50, 2, 1, 256, 0.1f, 0, 0},  {1, 50, 1, 1, 256, 0.1f, 1, 0},
        {1, 50, 2, 1, 96, 0.1f, 0, 0},   {1, 50, 1, 1, 80, 0.1f, 2, 0},
    };
    check_all(shapes, sizeof shapes / sizeof *shapes, DTYPE_BF16);
}

/* With q = 0 the probabilities are equal and with V = 1 at the token's own dimension an output
 * is 0 exactly where a probability was dropped; with dout = 1 at the query's own dimension so is
 * a gradient of v. */
static void drops_the_same(void **state)
{
    (void)state;
    enum { T = 64, HD = 64, ROW = 3 * HD };
    for (uint32_t first_token = 0; first_token < 4; first_token++) {
        const struct shape s = {1, T, 1, 1, HD, 0.3f, first_token, 0};
        struct run r = run_new(&s, DTYPE_BF16, 1.0f);
        for (size_t i = 0; i < r.n_qkv; i++) {
            r.qkv[i] = i % ROW == 2 * HD + i / ROW ? 1.0f : 0.0f;
        }
        for (size_t i = 0; i < r.n_out; i++) {
            r.dout[i] = i % HD == i / HD ? 1.0f : 0.0f;
        }
        free(r.typed_qkv);
        free(r.typed_dout);
        r.typed_qkv = typed_new(DTYPE_BF16, r.qkv, r.n_qkv);
        r.typed_dout = typed_new(DTYPE_BF16, r.dout, r.n_out);
        run_cpu(&r);
        typed_order(0);
        run_kernels(&r);
        size_t n_dropped = 0;
        for (size_t query = 0; query < T; query++) {
            for (size_t key = 0; key < T; key++) {
                const size_t out = query * HD + key, dv = key * ROW + 2 * HD + query;
                const bool dropped = r.out[out] == 0.0f;
                assert_true((typed_get(DTYPE_BF16, r.typed_out, out) == 0.0f) == dropped);
                assert_true((typed_get(DTYPE_BF16, r.typed_dqkv, dv) == 0.0f) == dropped);
                n_dropped += dropped && key <= query;
            }
        }
        assert_true(n_dropped > 500 && n_dropped < 750); /* of 2080 */
        run_free(&r);
    }
}

/* A document's results do not change by a bit when another document does. */
static void documents_do_not_meet(void **state)
{
    (void)state;
    enum { T = 150, FIRST = 70, HD = 64, ROW = 3 * HD };
    const struct shape s = {1, T, 1, 1, HD, 0.0f, 0, FIRST};
    struct run r = run_new(&s, DTYPE_BF16, 2.0f), other = run_new(&s, DTYPE_BF16, 2.0f);
    for (size_t i = 5 * ROW; i < 6 * ROW; i++) {
        ((uint16_t *)other.typed_qkv)[i] = typed_round(100.0f);
    }
    typed_order(0);
    run_kernels(&r);
    run_kernels(&other);
    const uint16_t *out = r.typed_out, *other_out = other.typed_out;
    const uint16_t *dqkv = r.typed_dqkv, *other_dqkv = other.typed_dqkv;
    assert_memory_equal(out + FIRST * HD, other_out + FIRST * HD, (T - FIRST) * HD * sizeof *out);
    assert_memory_equal(dqkv + FIRST * ROW, other_dqkv + FIRST * ROW,
                        (T - FIRST) * ROW * sizeof *dqkv);
    assert_memory_not_equal(out, other_out, FIRST * HD * sizeof *out);
    run_free(&r);
    run_free(&other);
}

/* Scores of +-1e4 must neither overflow nor lose the sum. */
static void large_scores(void **state)
{
    (void)state;
    static const enum dtype dtypes[] = {DTYPE_FP32, DTYPE_BF16};
    const struct shape s = {1, 100, 1, 1, 64, 0.0f, 0, 0};
    for (int d = 0; d < 2; d++) {
        struct run r = run_new(&s, dtypes[d], 60.0f);
        run_cpu(&r);
        typed_order(0);
        run_kernels(&r);
        /* Scores of 1e4 have an fp32 spacing of 1e-3, which is the probabilities' error. */
        assert_true(typed_close("out", dtypes[d], r.typed_out, r.out, r.n_out, 1e-2));
        assert_true(typed_close("lse", DTYPE_FP32, r.typed_lse, r.lse, r.n_lse, 1e-6));
        for (size_t i = 0; i < r.n_qkv; i++) {
            assert_true(isfinite(typed_get(dtypes[d], r.typed_dqkv, i)));
        }
        run_free(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_in_fp32),
        cmocka_unit_test(plain_in_bf16),
        cmocka_unit_test(tiles),
        cmocka_unit_test(tiles_of_documents),
        cmocka_unit_test(tiles_with_dropout),
        cmocka_unit_test(drops_the_same),
        cmocka_unit_test(documents_do_not_meet),
        cmocka_unit_test(large_scores),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
