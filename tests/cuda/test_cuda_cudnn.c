/* Attention by cuDNN, as far as that goes without a GPU.
 *
 * links: testing standin kernels base
 * timeout: 300
 *
 * - The real library, where it is installed: it takes the graphs; and for a GPU that is described
 *   to it, it proposes an engine for each and compiles its kernel (with the toolkit's stub in place
 *   of a driver, where that is installed, too). What is missing is said on stdout.
 * - A pretended library (lib/fake_cudnn.h), whose engines, notes, scratch and errors are set by
 *   the test: the choice of an engine, the addresses handed over, every error path. It can carry
 *   out a graph, operation by operation, which shows that the graphs are attention. Or the
 *   stand-in's launchers compute, so that the comparison with our kernels is tested, too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <dlfcn.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/cuda_device.h"
#include "proto/base/heap.h"
#include "tests/cuda/lib/fake_cudnn.h"
#include "tests/cuda/lib/typed.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

static const char library[] = "libcudnn.so.9";
/* The usual place of the toolkit; it has the soname of the driver's library. */
static const char driver_stub[] = "/usr/local/cuda/lib64/stubs/libcuda.so";

static struct attention shape_of(size_t batch, size_t tokens, uint32_t heads, uint32_t kv_heads,
                                 uint32_t head_dim)
{
    return (struct attention){.batch = batch,
                              .seq_len = tokens,
                              .n_heads = heads,
                              .n_kv_heads = kv_heads,
                              .head_dim = head_dim,
                              .scale = 1.0f / sqrtf((float)head_dim)};
}

/* ---- the pretended library in use ---- */

static struct attention_cudnn *fake_new(int major)
{
    struct attention_cudnn *cudnn = NULL;
    struct failure why = {0};
    assert_int_equal(attention_cudnn_new_with(&fake_calls, major, &cudnn, &why), STATUS_OK);
    return cudnn;
}

/* ---- who is refused ---- */

static void refuses_what_is_not_there(void **state)
{
    (void)state;
    struct cudnn_calls calls;
    struct failure why = {0};
    assert_int_equal(attention_cudnn_load("libno-such-cudnn.so.9", &calls, &why),
                     STATUS_UNSUPPORTED);
    assert_non_null(strstr(why.text, "libno-such-cudnn.so.9"));
    /* a library that is something else */
    assert_int_equal(attention_cudnn_load("libm.so.6", &calls, &why), STATUS_UNSUPPORTED);
    assert_non_null(strstr(why.text, "cudnn"));
    /* and here: no library, or this runtime, which is not a GPU's */
    struct attention_cudnn *cudnn = NULL;
    assert_int_equal(attention_cudnn_new(&cudnn, &why), STATUS_UNSUPPORTED);
    assert_null(cudnn);
    assert_true(why.text[0] != '\0');
    attention_cudnn_free(NULL);
}

static void refuses_versions_and_gpus(void **state)
{
    (void)state;
    static const struct {
        size_t version;
        int major;
        bool good;
    } cases[] = {{8907, 9, false},  {90000, 8, true}, {90901, 9, true},  {91000, 9, false},
                 {91001, 9, false}, {91002, 9, true}, {91900, 7, false}, {91900, 8, true},
                 {91900, 12, true}, {99900, 9, true}, {100000, 9, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct attention_cudnn *cudnn = NULL;
        struct failure why = {0};
        fake.version = cases[i].version;
        const enum status status =
            attention_cudnn_new_with(&fake_calls, cases[i].major, &cudnn, &why);
        assert_int_equal(status, cases[i].good ? STATUS_OK : STATUS_UNSUPPORTED);
        if (cases[i].good) {
            assert_int_equal(attention_cudnn_version(cudnn), cases[i].version);
        } else {
            assert_null(cudnn);
            assert_true(why.text[0] != '\0');
        }
        attention_cudnn_free(cudnn);
    }
}

static void refuses_without_a_handle(void **state)
{
    (void)state;
    struct attention_cudnn *cudnn = NULL;
    struct failure why = {0};
    fake.create_result = 1001; /* what the real one says without a driver */
    assert_int_equal(attention_cudnn_new_with(&fake_calls, 9, &cudnn, &why), STATUS_UNSUPPORTED);
    assert_null(cudnn);
    assert_non_null(strstr(why.text, "PRETENDED_ERROR (1001): the cause"));
}

static void serves_the_plain_kind(void **state)
{
    (void)state;
    struct attention_cudnn *cudnn = fake_new(9);
    const struct attention plain = shape_of(2, 256, 8, 2, 64);
    assert_true(attention_cudnn_serves(cudnn, &plain, DTYPE_BF16));
    assert_false(attention_cudnn_serves(cudnn, &plain, DTYPE_FP32));
    static const uint32_t dims[] = {8, 24, 64, 96, 128, 0, 4, 60, 100, 136, 256};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        struct attention a = plain;
        a.head_dim = dims[i];
        assert_int_equal(attention_cudnn_serves(cudnn, &a, DTYPE_BF16), i < 5);
    }
    const int32_t documents[1] = {0};
    struct attention a = plain;
    a.segments = documents;
    assert_false(attention_cudnn_serves(cudnn, &a, DTYPE_BF16));
    a = plain;
    a.dropout.p = 0.1f;
    assert_false(attention_cudnn_serves(cudnn, &a, DTYPE_BF16));
    a = plain;
    a.n_kv_heads = 3;
    assert_false(attention_cudnn_serves(cudnn, &a, DTYPE_BF16));
    a = plain;
    a.seq_len = 1;
    assert_false(attention_cudnn_serves(cudnn, &a, DTYPE_BF16));
    a = plain;
    a.batch = (size_t)INT32_MAX + 1;
    assert_false(attention_cudnn_serves(cudnn, &a, DTYPE_BF16));
    /* and what is not served gets neither a plan nor a run */
    struct failure why = {0};
    assert_true(attention_cudnn_scratch(cudnn, &a, false, &why) == SIZE_MAX);
    assert_int_equal(why.status, STATUS_UNSUPPORTED);
    const struct cuda_attention_forward args = {.dtype = DTYPE_FP32, .attention = plain};
    assert_int_equal(attention_cudnn_forward(cudnn, NULL, &args, NULL, &why), STATUS_UNSUPPORTED);
    assert_int_equal(fake.n_executed, 0);
    attention_cudnn_free(cudnn);
}

/* ---- plans ---- */

static void takes_the_first_deterministic_engine(void **state)
{
    (void)state;
    const struct attention a = shape_of(2, 256, 8, 2, 64);
    fake.n_engines[0] = 3;
    fake.random[0] = true;
    fake.no_plan[1] = true;
    fake.scratch[2] = 4096;
    struct attention_cudnn *cudnn = fake_new(9);
    assert_int_equal(attention_cudnn_scratch(cudnn, &a, true, NULL), 4096);
    assert_int_equal(fake.operations, 23);
    assert_int_equal(attention_cudnn_scratch(cudnn, &a, false, NULL), 4096);
    assert_int_equal(fake.operations, 14);
    /* kept: the same shape asks nobody */
    const int calls = fake.n_calls;
    assert_int_equal(attention_cudnn_scratch(cudnn, &a, true, NULL), 4096);
    assert_int_equal(attention_cudnn_scratch(cudnn, &a, false, NULL), 4096);
    assert_int_equal(fake.n_calls, calls);
    /* another does, whatever differs */
    for (int which = 0; which < 5; which++) {
        struct attention b = a;
        b.batch += which == 0;
        b.seq_len += which == 1;
        b.n_heads += which == 2 ? 8 : 0;
        b.n_kv_heads *= which == 3 ? 2 : 1;
        b.head_dim += which == 4 ? 8 : 0;
        const int before = fake.n_calls;
        assert_int_equal(attention_cudnn_scratch(cudnn, &b, false, NULL), 4096);
        assert_true(fake.n_calls > before);
    }
    attention_cudnn_free(cudnn);
}

static void takes_the_fallback_last(void **state)
{
    (void)state;
    const struct attention a = shape_of(2, 256, 4, 4, 64);
    fake.n_engines[0] = 1;
    fake.n_engines[1] = 1;
    fake.random[0] = true;
    fake.scratch[0] = 1;
    fake.scratch[1] = 512;
    struct attention_cudnn *cudnn = fake_new(9);
    assert_int_equal(attention_cudnn_scratch(cudnn, &a, true, NULL), 512);
    assert_int_equal(fake.operations, 21); /* no sums over query heads */
    attention_cudnn_free(cudnn);
}

static void says_why_there_is_no_plan(void **state)
{
    (void)state;
    static const struct {
        int n_engines;
        bool random, no_plan;
        size_t version, tokens;
        int major;
        bool backward;
        const char *text; /* NULL: there is one */
    } cases[] = {{0, false, false, 91900, 256, 9, false, "no engine"},
                 {1, true, false, 91900, 256, 9, true, "same bits"},
                 {1, false, true, 91900, 256, 9, true, "the cause"},
                 {1, false, false, 91900, 256, 10, true, "10.x"},
                 {1, false, false, 91900, 256, 10, false, NULL},
                 {1, false, false, 91500, 200, 9, true, "128"},
                 {1, false, false, 91500, 200, 9, false, NULL},
                 {1, false, false, 91500, 256, 9, true, NULL},
                 {1, false, false, 91501, 200, 9, true, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fake.n_engines[0] = cases[i].n_engines;
        fake.random[0] = cases[i].random;
        fake.no_plan[0] = cases[i].no_plan;
        fake.version = cases[i].version;
        struct attention_cudnn *cudnn = fake_new(cases[i].major);
        const struct attention a = shape_of(2, cases[i].tokens, 8, 8, 64);
        struct failure why = {0};
        const size_t bytes = attention_cudnn_scratch(cudnn, &a, cases[i].backward, &why);
        if (cases[i].text == NULL) {
            assert_int_equal(bytes, 0);
        } else {
            assert_true(bytes == SIZE_MAX);
            assert_int_equal(why.status, STATUS_UNSUPPORTED);
            assert_non_null(strstr(why.text, cases[i].text));
            assert_true(attention_cudnn_scratch(cudnn, &a, cases[i].backward, NULL) == SIZE_MAX);
        }
        attention_cudnn_free(cudnn);
    }
}

/* ---- calls ---- */

static void hands_over_addresses(void **state)
{
    (void)state;
    _Alignas(16) static char qkv[2048], dqkv[2048], out[64], dout[64], lse[64], delta[64],
        scratch[64];
    static int streams[2];
    const cudaStream_t first = (cudaStream_t)(void *)&streams[0];
    const cudaStream_t second = (cudaStream_t)(void *)&streams[1];
    const size_t head = 64 * 2;
    struct failure why = {0};
    fake.scratch[0] = 64;
    struct attention_cudnn *cudnn = fake_new(9);
    struct cuda_attention_forward forward = {.dtype = DTYPE_BF16,
                                             .attention = shape_of(2, 256, 8, 2, 64),
                                             .out = out,
                                             .lse = (float *)(void *)lse,
                                             .qkv = qkv};
    assert_int_equal(attention_cudnn_forward(cudnn, first, &forward, scratch, &why), STATUS_OK);
    assert_int_equal(fake.n_executed, 1);
    assert_ptr_equal(fake.stream, first);
    assert_int_equal(fake.last.n_ids, 7);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_Q), qkv);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_K), qkv + 8 * head);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_V), qkv + 10 * head);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_OUT), out);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_LSE), lse);
    assert_ptr_equal(fake.last.workspace, scratch);

    struct cuda_attention_backward backward = {.dtype = DTYPE_BF16,
                                               .attention = forward.attention,
                                               .dqkv = dqkv,
                                               .delta = (float *)(void *)delta,
                                               .dout = dout,
                                               .out = out,
                                               .lse = (float *)(void *)lse,
                                               .qkv = qkv};
    assert_int_equal(attention_cudnn_backward(cudnn, first, &backward, scratch, &why), STATUS_OK);
    assert_int_equal(fake.n_set_stream, 1); /* it knows */
    assert_int_equal(attention_cudnn_backward(cudnn, second, &backward, scratch, &why), STATUS_OK);
    assert_int_equal(fake.n_set_stream, 2);
    assert_ptr_equal(fake.stream, second);
    assert_int_equal(fake.last.n_ids, 13);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_Q), qkv);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_K), qkv + 8 * head);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_V), qkv + 10 * head);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_DQ), dqkv);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_DK), dqkv + 8 * head);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_DV), dqkv + 10 * head);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_OUT), out);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_DOUT), dout);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_LSE), lse);
    assert_ptr_equal(fake_pointer(CUDNN_TENSOR_DELTA), delta);

    const int executed = fake.n_executed;
    forward.qkv = qkv + 8; /* not aligned */
    assert_int_equal(attention_cudnn_forward(cudnn, first, &forward, scratch, &why),
                     STATUS_INVALID);
    assert_int_equal(attention_cudnn_backward(cudnn, first, &backward, NULL, &why),
                     STATUS_INVALID); /* no scratch */
    assert_int_equal(fake.n_executed, executed);
    attention_cudnn_free(cudnn);
}

static float seen_scale, seen_masked, seen_one;

static void look_at_values(const struct fake_descriptor *pack)
{
    (void)pack;
    memcpy(&seen_scale, fake_pointer(CUDNN_TENSOR_SCALE), sizeof seen_scale);
    memcpy(&seen_masked, fake_pointer(CUDNN_TENSOR_MASKED), sizeof seen_masked);
    if (fake_pointer(CUDNN_TENSOR_ONE) != NULL) {
        memcpy(&seen_one, fake_pointer(CUDNN_TENSOR_ONE), sizeof seen_one);
    }
}

static void hands_over_values(void **state)
{
    (void)state;
    _Alignas(16) static char memory[16];
    static const size_t versions[] = {90901, 91002};
    fake.compute = look_at_values;
    for (size_t i = 0; i < 2; i++) {
        fake.version = versions[i];
        struct attention_cudnn *cudnn = fake_new(9);
        const struct cuda_attention_backward args = {.dtype = DTYPE_BF16,
                                                     .attention = shape_of(1, 128, 2, 2, 16),
                                                     .dqkv = memory,
                                                     .delta = (float *)(void *)memory,
                                                     .dout = memory,
                                                     .out = memory,
                                                     .lse = (float *)(void *)memory,
                                                     .qkv = memory};
        assert_int_equal(attention_cudnn_backward(cudnn, NULL, &args, NULL, NULL), STATUS_OK);
        assert_true(seen_scale == 0.25f);
        assert_true(seen_one == 1.0f);
        assert_true(i == 0 ? seen_masked == -FLT_MAX : isinf(seen_masked) && seen_masked < 0);
        attention_cudnn_free(cudnn);
    }
}

/* ---- what the graphs compute ---- */

enum { B = 2, T = 5, HEADS = 4, KV = 2, D = 8, WIDTH = (HEADS + 2 * KV) * D, ROWS = B * T };

static double at_bf16(const uint16_t *values, int row, int width, int column)
{
    return (double)typed_widen_one(values[row * width + column]);
}

/* Row (b, t), query head h, written down plainly: lse, out (D), and in `score` p per key. */
static double plain_row(const uint16_t *qkv, int b, int t, int h, double *p, double *out)
{
    const int k0 = (HEADS + h / (HEADS / KV)) * D, v0 = k0 + KV * D;
    double sum = 0;
    for (int s = 0; s <= t; s++) {
        double score = 0;
        for (int d = 0; d < D; d++) {
            score +=
                at_bf16(qkv, b * T + t, WIDTH, h * D + d) * at_bf16(qkv, b * T + s, WIDTH, k0 + d);
        }
        p[s] = exp(score / sqrt(D));
        sum += p[s];
    }
    for (int d = 0; d < D; d++) {
        out[d] = 0;
        for (int s = 0; s <= t; s++) {
            out[d] += p[s] / sum * at_bf16(qkv, b * T + s, WIDTH, v0 + d);
        }
    }
    for (int s = 0; s <= t; s++) {
        p[s] /= sum;
    }
    return log(sum);
}

/* Gradients of the sum of dout out, from the definition. */
static void plain_gradients(const uint16_t *qkv, const uint16_t *dout, double *dqkv, double *delta)
{
    memset(dqkv, 0, sizeof(double) * ROWS * WIDTH);
    for (int i = 0; i < B * HEADS * T; i++) {
        const int b = i / (HEADS * T), h = i / T % HEADS, t = i % T, row = b * T + t;
        const int k0 = (HEADS + h / (HEADS / KV)) * D, v0 = k0 + KV * D;
        double p[T], out[D];
        (void)plain_row(qkv, b, t, h, p, out);
        delta[i] = 0;
        for (int d = 0; d < D; d++) {
            delta[i] += out[d] * at_bf16(dout, row, HEADS * D, h * D + d);
        }
        for (int s = 0; s <= t; s++) {
            double dp = 0;
            for (int d = 0; d < D; d++) {
                const double g = at_bf16(dout, row, HEADS * D, h * D + d);
                dp += g * at_bf16(qkv, b * T + s, WIDTH, v0 + d);
                dqkv[(b * T + s) * WIDTH + v0 + d] += p[s] * g;
            }
            const double ds = p[s] * (dp - delta[i]) / sqrt(D);
            for (int d = 0; d < D; d++) {
                dqkv[row * WIDTH + h * D + d] += ds * at_bf16(qkv, b * T + s, WIDTH, k0 + d);
                dqkv[(b * T + s) * WIDTH + k0 + d] += ds * at_bf16(qkv, row, WIDTH, h * D + d);
            }
        }
    }
}

static void computes_attention(void **state)
{
    (void)state;
    _Alignas(16) static uint16_t qkv[ROWS * WIDTH], dqkv[ROWS * WIDTH], out[ROWS * HEADS * D];
    _Alignas(16) static uint16_t dout[ROWS * HEADS * D];
    _Alignas(16) static float lse[B * HEADS * T], delta[B * HEADS * T];
    static double expected[ROWS * WIDTH], expected_delta[B * HEADS * T];
    uint32_t random = 1;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        random = random * 1664525u + 1013904223u;
        qkv[i] = typed_round((float)(random >> 8) * 0x1p-23f - 1.0f);
        dout[i % (ROWS * HEADS * D)] = typed_round((float)(random >> 9) * 0x1p-22f - 1.0f);
    }
    fake.compute = fake_evaluate;
    fake.version = 91900;
    struct attention_cudnn *cudnn = fake_new(9);
    const struct attention a = shape_of(B, T, HEADS, KV, D);
    const struct cuda_attention_forward forward = {
        .dtype = DTYPE_BF16, .attention = a, .out = out, .lse = lse, .qkv = qkv};
    assert_int_equal(attention_cudnn_forward(cudnn, NULL, &forward, NULL, NULL), STATUS_OK);
    const struct cuda_attention_backward backward = {.dtype = DTYPE_BF16,
                                                     .attention = a,
                                                     .dqkv = dqkv,
                                                     .delta = delta,
                                                     .dout = dout,
                                                     .out = out,
                                                     .lse = lse,
                                                     .qkv = qkv};
    assert_int_equal(attention_cudnn_backward(cudnn, NULL, &backward, NULL, NULL), STATUS_OK);
    attention_cudnn_free(cudnn);
    for (int i = 0; i < B * HEADS * T; i++) {
        const int b = i / (HEADS * T), h = i / T % HEADS, t = i % T;
        double p[T], row[D];
        assert_true(fabs(plain_row(qkv, b, t, h, p, row) - (double)lse[i]) < 1e-5);
        for (int d = 0; d < D; d++) {
            assert_true(fabs(row[d] - at_bf16(out, b * T + t, HEADS * D, h * D + d)) < 1.0 / 256);
        }
    }
    plain_gradients(qkv, dout, expected, expected_delta);
    for (int i = 0; i < B * HEADS * T; i++) {
        assert_true(fabs(expected_delta[i] - (double)delta[i]) < 1.0 / 64); /* of a rounded out */
    }
    for (int i = 0; i < ROWS * WIDTH; i++) {
        assert_true(fabs(expected[i] - (double)typed_widen_one(dqkv[i])) < 1.0 / 32);
    }
}

/* All of it once; true when it went well. */
static bool go_through(struct failure *why)
{
    _Alignas(16) static char memory[16];
    struct attention_cudnn *cudnn = NULL;
    enum status status = attention_cudnn_new_with(&fake_calls, 9, &cudnn, why);
    if (status == STATUS_OK) {
        const struct attention a = shape_of(1, 128, 2, 1, 16);
        const struct cuda_attention_forward forward = {.dtype = DTYPE_BF16,
                                                       .attention = a,
                                                       .out = memory,
                                                       .lse = (float *)(void *)memory,
                                                       .qkv = memory};
        const struct cuda_attention_backward backward = {.dtype = DTYPE_BF16,
                                                         .attention = a,
                                                         .dqkv = memory,
                                                         .delta = (float *)(void *)memory,
                                                         .dout = memory,
                                                         .out = memory,
                                                         .lse = (float *)(void *)memory,
                                                         .qkv = memory};
        status = attention_cudnn_forward(cudnn, NULL, &forward, NULL, why);
        if (status == STATUS_OK) {
            status = attention_cudnn_backward(cudnn, NULL, &backward, NULL, why);
        }
    }
    attention_cudnn_free(cudnn);
    assert_int_equal(fake.descriptors, 0);
    assert_int_equal(fake.handles, 0);
    assert_int_equal(heap_live(), fake_live);
    return status == STATUS_OK;
}

static void every_call_may_fail(void **state)
{
    (void)state;
    int n = 0;
    for (;;) {
        struct failure why = {0};
        fake_reset(NULL);
        fake.fail_at = ++n;
        if (go_through(&why)) {
            break;
        }
        assert_true(why.text[0] != '\0');
        assert_non_null(strstr(why.text, "PRETENDED_ALLOC_FAILED (4003): the cause"));
    }
    assert_true(n > 500); /* it did go through the graphs */
    assert_true(fake.n_calls == n - 1);
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    uint64_t n = 0;
    bool good = false;
    while (!good) {
        struct failure why = {0};
        heap_fail(++n, false);
        good = go_through(&why);
        const uint64_t failures = heap_failures();
        heap_fail(0, false);
        assert_int_equal(failures, good ? 0 : 1);
        assert_true(good || why.status == STATUS_OUT_OF_MEMORY);
    }
    assert_int_equal(n, 6); /* itself, and a plan and a graph each */
}

/* ---- agreement ---- */

static enum wrong { RIGHT, WRONG_OUT, WRONG_LSE, WRONG_GRADIENT, WRONG_NOT_A_NUMBER, RANDOM } wrong;

/* As cuDNN would on the GPU, by the launchers of the stand-in. */
static void compute(const struct fake_descriptor *pack)
{
    (void)pack;
    const void *q = fake_pointer(CUDNN_TENSOR_Q);
    const char *k = fake_pointer(CUDNN_TENSOR_K), *v = fake_pointer(CUDNN_TENSOR_V);
    /* the two trials differ in the width of the keys */
    struct attention a =
        v - k == 4 * 128 * 2 ? shape_of(1, 256, 4, 4, 128) : shape_of(2, 384, 8, 2, 64);
    float scale;
    memcpy(&scale, fake_pointer(CUDNN_TENSOR_SCALE), sizeof scale);
    a.scale = wrong == WRONG_LSE ? scale * 1.25f : scale;
    void *dq = fake_pointer(CUDNN_TENSOR_DQ);
    if (dq == NULL) {
        const struct cuda_attention_forward args = {.dtype = DTYPE_BF16,
                                                    .attention = a,
                                                    .out = fake_pointer(CUDNN_TENSOR_OUT),
                                                    .lse = fake_pointer(CUDNN_TENSOR_LSE),
                                                    .qkv = q};
        cuda_kernels_choose()->attention_forward(fake.stream, &args);
        if (wrong == WRONG_OUT || wrong == WRONG_NOT_A_NUMBER) {
            assert_int_equal(
                cudaMemsetAsync(args.out, wrong == WRONG_OUT ? 0 : 0xff, 64, fake.stream),
                cudaSuccess);
        }
        return;
    }
    const struct cuda_attention_backward args = {.dtype = DTYPE_BF16,
                                                 .attention = a,
                                                 .dqkv = dq,
                                                 .delta = fake_pointer(CUDNN_TENSOR_DELTA),
                                                 .dout = fake_pointer(CUDNN_TENSOR_DOUT),
                                                 .out = fake_pointer(CUDNN_TENSOR_OUT),
                                                 .lse = fake_pointer(CUDNN_TENSOR_LSE),
                                                 .qkv = q};
    cuda_kernels_choose()->attention_backward(fake.stream, &args);
    if (wrong == WRONG_GRADIENT) {
        assert_int_equal(cudaMemsetAsync(fake_pointer(CUDNN_TENSOR_DV), 0, 64, fake.stream),
                         cudaSuccess);
    } else if (wrong == RANDOM && fake.n_executed % 2 == 1) {
        /* one bit of one value, far within the tolerance */
        assert_int_equal(cudaMemsetAsync(fake_pointer(CUDNN_TENSOR_DQ), 1, 1, fake.stream),
                         cudaSuccess);
    }
}

static void agrees_with_our_kernels(void **state)
{
    (void)state;
    static const struct {
        enum wrong wrong;
        const char *text;
    } cases[] = {{RIGHT, NULL},
                 {WRONG_OUT, "another output"},
                 {WRONG_LSE, "another"},
                 {WRONG_GRADIENT, "gradient of v"},
                 {WRONG_NOT_A_NUMBER, "not finite"},
                 {RANDOM, "other bits the second time"}};
    cudaStream_t stream = NULL;
    assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    fake.compute = compute;
    fake.scratch[0] = 1000;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct attention_cudnn *cudnn = fake_new(9);
        struct failure why = {0};
        bool backward = false;
        wrong = cases[i].wrong;
        const enum status status =
            attention_cudnn_agrees(cudnn, stream, cuda_kernels_choose(), &backward, &why);
        const char *expected = cases[i].text;
        if (status != (expected == NULL ? STATUS_OK : STATUS_UNSUPPORTED) ||
            (expected != NULL && strstr(why.text, expected) == NULL)) {
            fail_msg("case %zu: %s", i, why.text);
        }
        assert_int_equal(backward, expected == NULL);
        attention_cudnn_free(cudnn);
        if (i == 0) {
            fake_live = heap_live(); /* the launchers keep what they took the first time */
        }
        assert_int_equal(heap_live(), fake_live);
    }
    /* where there is no backward the forward alone is compared */
    struct attention_cudnn *cudnn = fake_new(10);
    bool backward = true;
    wrong = WRONG_GRADIENT;
    assert_int_equal(attention_cudnn_agrees(cudnn, stream, cuda_kernels_choose(), &backward, NULL),
                     STATUS_OK);
    assert_false(backward);
    attention_cudnn_free(cudnn);
    assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
}

/* ---- the real library ---- */

/* It keeps memory until the process ends, in modules that are unloaded by the time leaks are
 * counted. */
void __lsan_disable(void) __attribute__((weak));
void __lsan_enable(void) __attribute__((weak));

static int leaks_are_not_ours(void **state)
{
    if (__lsan_disable != NULL) {
        __lsan_disable();
    }
    return fake_reset(state);
}

static int leaks_are_ours(void **state)
{
    if (__lsan_enable != NULL) {
        __lsan_enable();
    }
    return fake_all_gone(state);
}

static bool real_calls(struct cudnn_calls *out_calls)
{
    struct failure why = {0};
    if (attention_cudnn_load(library, out_calls, &why) != STATUS_OK) {
        printf("not tested: %s\n", why.text);
        return false;
    }
    return true;
}

static void the_library_takes_the_graphs(void **state)
{
    (void)state;
    struct cudnn_calls calls;
    if (!real_calls(&calls)) {
        return;
    }
    static const uint32_t shapes[][5] = {{4, 1024, 12, 12, 64}, {2, 4096, 32, 8, 128},
                                         {2, 200, 8, 2, 64},    {1, 2, 1, 1, 8},
                                         {3, 131, 6, 1, 96},    {1, 65536, 16, 16, 128}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const uint32_t *s = shapes[i];
        const struct attention a = shape_of(s[0], s[1], s[2], s[3], s[4]);
        for (int backward = 0; backward < 2; backward++) {
            struct failure why = {0};
            if (attention_cudnn_check_graph(&calls, &a, backward == 1, &why) != STATUS_OK) {
                fail_msg("shape %zu, %s: %s", i, backward ? "backward" : "forward", why.text);
            }
        }
    }
    /* it does look: heads that do not divide */
    const struct attention bad = shape_of(2, 256, 6, 4, 64);
    struct failure why = {0};
    assert_int_not_equal(attention_cudnn_check_graph(&calls, &bad, false, &why), STATUS_OK);
    assert_true(why.text[0] != '\0');
}

/* A GPU's properties as cuDNN writes them. */
static const char *describe(int device_version, int multiprocessors, int shared_bytes)
{
    static char text[2048];
    snprintf(text, sizeof text,
             "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
             "\"regsPerBlock\":65536,\"multiProcessorCount\":%d,\"warpSize\":32,"
             "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,"
             "\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,"
             "\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,"
             "\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,"
             "\"totalGlobalMem\":80000000000,\"smClockRateKHz\":1980000,"
             "\"memClockRateKHz\":2619000,\"l2CacheSize\":52428800,\"cudaDeviceId\":0,"
             "\"deviceVer\":%d,\"driverVer\":13000,\"deviceName\":\"described\"}",
             multiprocessors, shared_bytes, device_version);
    return text;
}

/* Engines exist for the graphs. With a driver's stub a plan fails in the very last step, where the
 * compiled kernel is handed to the driver; a graph that no engine takes never gets that far. */
static void the_library_has_engines(void **state)
{
    (void)state;
    struct cudnn_calls calls;
    if (!real_calls(&calls)) {
        return;
    }
    if (calls.version() < 90800) {
        printf("not tested: cuDNN %zu plans for no GPU that is not there\n", calls.version());
        return;
    }
    if (dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) == NULL &&
        dlopen(driver_stub, RTLD_LAZY | RTLD_LOCAL) == NULL) {
        printf("not tested: neither a driver nor its stub\n");
        return;
    }
    static const int gpus[][3] = {{900, 132, 232448}, {800, 108, 166912}};
    static const uint32_t shapes[][5] = {{4, 1024, 12, 12, 64}, {2, 200, 8, 2, 128}};
    for (size_t g = 0; g < sizeof gpus / sizeof *gpus; g++) {
        struct attention_cudnn *cudnn = NULL;
        struct failure why = {0};
        const char *gpu = describe(gpus[g][0], gpus[g][1], gpus[g][2]);
        if (attention_cudnn_new_described(&calls, gpu, gpus[g][0] / 100, &cudnn, &why) !=
            STATUS_OK) {
            fail_msg("%s", why.text);
        }
        for (size_t i = 0; i < 4; i++) {
            const uint32_t *s = shapes[i / 2];
            const struct attention a = shape_of(s[0], s[1], s[2], s[3], s[4]);
            const bool backward = i % 2 == 1;
            const size_t bytes = attention_cudnn_scratch(cudnn, &a, backward, &why);
            if (bytes == SIZE_MAX && strstr(why.text, "cuLibraryLoadData") == NULL) {
                fail_msg("compute capability %d.0, shape %zu, %s: %s", gpus[g][0] / 100, i / 2,
                         backward ? "backward" : "forward", why.text);
            }
        }
        attention_cudnn_free(cudnn);
    }
}

int main(void)
{
#define FAKE(test) cmocka_unit_test_setup_teardown(test, fake_reset, fake_all_gone)
#define REAL(test) cmocka_unit_test_setup_teardown(test, leaks_are_not_ours, leaks_are_ours)
    const struct CMUnitTest tests[] = {
        FAKE(refuses_what_is_not_there),
        FAKE(refuses_versions_and_gpus),
        FAKE(refuses_without_a_handle),
        FAKE(serves_the_plain_kind),
        FAKE(takes_the_first_deterministic_engine),
        FAKE(takes_the_fallback_last),
        FAKE(says_why_there_is_no_plan),
        FAKE(hands_over_addresses),
        FAKE(hands_over_values),
        FAKE(computes_attention),
        FAKE(every_call_may_fail),
        FAKE(every_allocation_may_fail),
        FAKE(agrees_with_our_kernels),
        REAL(the_library_takes_the_graphs),
        REAL(the_library_has_engines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
