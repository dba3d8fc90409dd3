/* The table of operations on the stand-in, against the CPU's: every operation with its operands at
 * the same places of an arena, on both devices, and the arenas compared to the byte.
 *
 * links: standin kernels base
 *
 * The launchers are the CPU's own operations here, so what is tested is that each argument gets to
 * its place, types and dropout's step included. Products come from another library and are
 * compared with a plain one in double: fp32 to 1e-5 of the largest value, bf16 to one rounding. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/cuda_device.h"
#include "proto/base/heap.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>

enum {
    MIB = 1024 * 1024,
    INTS_BYTES = 64 * 1024, /* of the arena: small integers, then numbers */
    ARENA_BYTES = 4 * MIB,
    SCRATCH_BYTES = 40 * MIB /* behind it on the device */
};

static const struct cuda_plugin *plugin;
static struct device device;
static struct failure why;
static unsigned char *host, *expected, *on_device;

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

/* ---- the arena ---- */

static float to_float(uint16_t bf16)
{
    const uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Words that are finite and small as one float and as two bf16: each half is a bf16 of
 * magnitude 1/4 .. 1. */
static void fill_arena(unsigned char *arena, uint64_t seed)
{
    int32_t *ints = (int32_t *)(void *)arena;
    uint32_t *words = (uint32_t *)(void *)(arena + INTS_BYTES);
    uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < INTS_BYTES / sizeof *ints; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        ints[i] = (int32_t)(x >> 61); /* 0 .. 7 */
    }
    for (size_t i = 0; i < (ARENA_BYTES - INTS_BYTES) / sizeof *words; i++) {
        uint32_t word = 0;
        for (int half = 0; half < 2; half++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            const uint32_t sign = (uint32_t)(x >> 63) << 15;
            word = word << 16 | sign | (0x3e80u + (uint32_t)(x >> 40) % 0x100u);
        }
        words[i] = word;
    }
}

static void put(void *dst, const void *src, size_t bytes)
{
    struct ticket ticket;
    assert_ok(device.table->copy(&device, dst, src, bytes, COPY_FROM_HOST, &ticket, &why));
    assert_ok(device.table->wait(&device, &ticket, &why));
}

static void get(void *dst, const void *src, size_t bytes)
{
    struct ticket ticket;
    assert_ok(device.table->copy(&device, dst, src, bytes, COPY_TO_HOST, &ticket, &why));
    assert_ok(device.table->wait(&device, &ticket, &why));
}

/* Where operand number i is; each has 128 KiB. */
static void *at(unsigned char *base, size_t i)
{
    return base + INTS_BYTES + i * 128 * 1024;
}

static float *floats(unsigned char *base, size_t i)
{
    return at(base, i);
}

static const int32_t *ints(unsigned char *base, size_t i)
{
    return (const int32_t *)(void *)(base + i * 8192);
}

typedef void case_run(struct ops *ops, unsigned char *base);

static void compare(enum dtype dtype, const char *name, case_run *run)
{
    struct ops *cpu = NULL, *cuda = NULL;
    assert_ok(cpu_ops_new(dtype, 1, &cpu, &why));
    assert_ok(plugin->ops_new(&device, dtype, &cuda, &why));
    assert_string_equal(cuda->name, "cuda");
    assert_int_equal(cuda->dtype, dtype);
    assert_int_equal(cuda->elem_bytes, dtype_bytes(dtype));
    fill_arena(expected, 5);
    put(on_device, expected, ARENA_BYTES);
    run(cpu, expected);
    run(cuda, on_device);
    assert_ok(cpu->check(cpu, &why));
    assert_ok(cuda->check(cuda, &why));
    get(host, on_device, ARENA_BYTES);
    for (size_t i = 0; i < ARENA_BYTES; i++) {
        if (host[i] != expected[i]) {
            fail_msg("%s %s: operand %zu, byte %zu differs", name,
                     dtype == DTYPE_BF16 ? "bf16" : "fp32", (i - INTS_BYTES) / (128 * 1024),
                     (i - INTS_BYTES) % (128 * 1024));
        }
    }
    cuda->free(cuda);
    cpu->free(cpu);
}

/* ---- the cases ---- */

enum { B = 2, T = 24, N = B * T, H = 64, V = 33, NH = 4, NKV = 2, HD = 16 };

static const struct dropout dropping = {.p = 0.3f,
                                        .seed = 99,
                                        .step = 7,
                                        .first_sample = 12,
                                        .first_token = 3,
                                        .seq_len = T,
                                        .layer = 2,
                                        .use = 1,
                                        .first_head = 1};

static void case_embed(struct ops *ops, unsigned char *base)
{
    ops->embed_forward(ops, at(base, 0), ints(base, 0), ints(base, 1), at(base, 1), at(base, 2), N,
                       H);
    ops->embed_forward(ops, at(base, 3), ints(base, 0), ints(base, 1), at(base, 1), NULL, N, H);
    ops->embed_backward(ops, floats(base, 4), floats(base, 5), at(base, 0), ints(base, 0),
                        ints(base, 1), N, H);
    ops->embed_backward(ops, floats(base, 6), NULL, at(base, 0), ints(base, 0), ints(base, 1), N,
                        H);
}

static void case_norm(struct ops *ops, unsigned char *base)
{
    ops->norm_forward(ops, NORM_LAYER, at(base, 0), floats(base, 1), floats(base, 2), at(base, 3),
                      at(base, 4), at(base, 5), N, H, 1e-5f);
    ops->norm_backward(ops, NORM_LAYER, at(base, 6), floats(base, 7), floats(base, 8), at(base, 9),
                       at(base, 3), at(base, 4), floats(base, 1), floats(base, 2), N, H);
    ops->norm_forward(ops, NORM_RMS, at(base, 10), NULL, floats(base, 11), at(base, 3), at(base, 4),
                      NULL, N, H, 1e-3f);
    ops->norm_backward(ops, NORM_RMS, at(base, 12), floats(base, 13), NULL, at(base, 9),
                       at(base, 3), at(base, 4), NULL, floats(base, 11), N, H);
}

static void case_attention(struct ops *ops, unsigned char *base)
{
    struct rotary rotary = {.n_pairs = HD / 2};
    for (uint32_t i = 0; i < HD / 2; i++) {
        rotary.inv_freq[i] = 1.0f / (float)(1 + i);
    }
    ops->rotary(ops, at(base, 0), ints(base, 0), &rotary, N, NH, NKV, HD, 1);
    ops->rotary(ops, at(base, 1), ints(base, 0), &rotary, N, NH, NKV, HD, -1);
    struct attention attention = {.batch = B,
                                  .seq_len = T,
                                  .n_heads = NH,
                                  .n_kv_heads = NKV,
                                  .head_dim = HD,
                                  .scale = 0.25f,
                                  .dropout = dropping};
    ops->attention_forward(ops, &attention, at(base, 2), floats(base, 3), at(base, 0));
    ops->attention_backward(ops, &attention, at(base, 4), floats(base, 5), at(base, 6), at(base, 2),
                            floats(base, 3), at(base, 0));
    attention.dropout.p = 0.0f;
    attention.segments = ints(base, 2);
    ops->attention_forward(ops, &attention, at(base, 7), floats(base, 8), at(base, 1));
    ops->attention_backward(ops, &attention, at(base, 9), floats(base, 10), at(base, 6),
                            at(base, 7), floats(base, 8), at(base, 1));
}

static void case_mlp(struct ops *ops, unsigned char *base)
{
    ops->activation_forward(ops, ACTIVATION_GELU, at(base, 0), at(base, 1), N, H);
    ops->activation_backward(ops, ACTIVATION_GELU, at(base, 2), at(base, 3), at(base, 1), N, H);
    ops->activation_forward(ops, ACTIVATION_SWIGLU, at(base, 4), at(base, 5), N, H);
    ops->activation_backward(ops, ACTIVATION_SWIGLU, at(base, 5), at(base, 3), at(base, 5), N, H);
    ops->bias_backward(ops, floats(base, 6), at(base, 3), N, H);
}

/* The step changes from call to call, and calls without dropout lie between. */
static void case_residual(struct ops *ops, unsigned char *base)
{
    struct dropout dropout = dropping;
    ops->residual_dropout(ops, at(base, 0), at(base, 1), at(base, 2), N, H, &dropout);
    dropout.step++;
    ops->residual_dropout(ops, at(base, 3), NULL, at(base, 2), N, H, &dropout);
    ops->dropout_backward(ops, at(base, 4), at(base, 2), N, H, &dropout);
    dropout.p = 0.0f;
    dropout.step = 1000;
    ops->residual_dropout(ops, at(base, 5), at(base, 1), at(base, 2), N, H, &dropout);
    dropout = dropping;
    dropout.first_sample += 5;
    ops->dropout_backward(ops, at(base, 2), at(base, 2), N, H, &dropout);
}

static void case_loss(struct ops *ops, unsigned char *base)
{
    ops->cross_entropy(ops, floats(base, 0), at(base, 1), ints(base, 0), N, V, 0.125f, true);
    ops->cross_entropy(ops, floats(base, 2), at(base, 3), ints(base, 1), N, V, 0.5f, false);
    ops->sum(ops, at(base, 4), floats(base, 0), N);
    ops->sum(ops, at(base, 5), floats(base, 0), 0);
}

static void case_optimizer(struct ops *ops, unsigned char *base)
{
    const struct adamw adamw = {.lr = 0.1f,
                                .beta1 = 0.9f,
                                .beta2 = 0.99f,
                                .eps = 1e-6f,
                                .weight_decay = 0.02f,
                                .grad_scale = 0.5f,
                                .bias_correction1 = 0.19,
                                .bias_correction2 = 0.0199};
    ops->fill(ops, floats(base, 3), 1000, 0.25f);
    ops->adamw(ops, floats(base, 0), at(base, 1), floats(base, 2), floats(base, 3), floats(base, 4),
               777, &adamw);
    ops->adamw(ops, floats(base, 5), NULL, floats(base, 2), floats(base, 3), floats(base, 4), 333,
               &adamw);
    ops->sum_squares(ops, at(base, 6), floats(base, 7), 32768);
    ops->sum_squares(ops, (double *)at(base, 6) + 1, floats(base, 8), 20001);
    ops->sum_parts(ops, floats(base, 9), floats(base, 10), 5, 1000, 777);
    ops->add(ops, floats(base, 11), floats(base, 12), 999);
    ops->narrow(ops, at(base, 13), floats(base, 14), 555);
    ops->zero(ops, (char *)at(base, 15) + 3, 1001);
    ops->zero(ops, at(base, 16), 0);
    ops->copy(ops, (char *)at(base, 17) + 1, (char *)at(base, 18) + 5, 2003);
    ops->copy(ops, at(base, 17), at(base, 18), 0);
    ops->random_normal(ops, floats(base, 19), 1234, 0.02f, 42, 3, 77);
}

static void test_same_as_cpu(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        case_run *run;
    } cases[] = {
        {"embed", case_embed},         {"norm", case_norm},
        {"attention", case_attention}, {"mlp", case_mlp},
        {"loss", case_loss},           {"residual", case_residual},
        {"optimizer", case_optimizer},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        compare(DTYPE_FP32, cases[i].name, cases[i].run);
        compare(DTYPE_BF16, cases[i].name, cases[i].run);
    }
}

/* ---- products ---- */

static double element(const void *array, enum dtype dtype, size_t i)
{
    return dtype == DTYPE_BF16 ? (double)to_float(((const uint16_t *)array)[i])
                               : (double)((const float *)array)[i];
}

/* Row-major element (i, j) of C, by the book. */
static double plain(const struct matmul *call, enum dtype dtype, size_t i, size_t j)
{
    double sum = 0.0;
    for (size_t l = 0; l < call->k; l++) {
        const size_t in_a = call->form == MATMUL_TN ? l * call->m + i : i * call->k + l;
        const size_t in_b = call->form == MATMUL_NT ? j * call->k + l : l * call->n + j;
        sum += element(call->a, dtype, in_a) * element(call->b, dtype, in_b);
    }
    sum += call->bias == NULL ? 0.0 : element(call->bias, dtype, j);
    const enum dtype c_dtype = call->c_fp32 ? DTYPE_FP32 : dtype;
    return sum + (call->accumulate ? element(call->c, c_dtype, i * call->n + j) : 0.0);
}

/* `shape` says everything but the operands, which begin `skew` elements into their places. */
static void check_matmul(struct ops *cuda, const struct matmul *shape, bool bias, size_t skew)
{
    const enum dtype dtype = cuda->dtype;
    const enum dtype c_dtype = shape->c_fp32 ? DTYPE_FP32 : dtype;
    const size_t elem = cuda->elem_bytes;
    const size_t places[] = {INTS_BYTES, INTS_BYTES + MIB, INTS_BYTES + 2 * MIB,
                             INTS_BYTES + 3 * MIB};
    unsigned char *bases[] = {expected, on_device};
    struct matmul calls[2];
    for (int i = 0; i < 2; i++) {
        calls[i] = *shape;
        calls[i].a = bases[i] + places[0] + skew * elem;
        calls[i].b = bases[i] + places[1] + skew * elem;
        calls[i].bias = bias ? bases[i] + places[2] + skew * elem : NULL;
        calls[i].c = bases[i] + places[3] + skew * dtype_bytes(c_dtype);
        calls[i].scratch = i == 0 ? NULL : on_device + ARENA_BYTES;
    }
    fill_arena(expected, shape->m * 7 + shape->n);
    put(on_device, expected, ARENA_BYTES);
    cuda->matmul(cuda, &calls[1]);
    assert_ok(cuda->check(cuda, &why));
    get(host, on_device, ARENA_BYTES);
    double most = 0.0, worst = 0.0;
    const unsigned char *got = host + ((unsigned char *)calls[0].c - expected);
    for (size_t i = 0; i < shape->m; i++) {
        for (size_t j = 0; j < shape->n; j++) {
            const double want = plain(&calls[0], dtype, i, j);
            const double off = fabs(element(got, c_dtype, i * shape->n + j) - want);
            worst = off > worst || isnan(off) ? off : worst;
            most = fabs(want) > most ? fabs(want) : most;
        }
    }
    const double tolerance = c_dtype == DTYPE_BF16 ? 1.0 / 256 : 1e-5;
    if (!(worst <= tolerance * most)) {
        fail_msg("form %d, %zu x %zu x %zu, bias %d, fp32 %d, accumulate %d: off by %g of %g",
                 (int)shape->form, shape->m, shape->n, shape->k, bias, shape->c_fp32,
                 shape->accumulate, worst, most);
    }
    /* Nothing else was touched. */
    const size_t c_start = (size_t)(got - host);
    const size_t c_end = c_start + shape->m * shape->n * dtype_bytes(c_dtype);
    assert_memory_equal(host, expected, c_start);
    assert_memory_equal(host + c_end, expected + c_end, ARENA_BYTES - c_end);
}

static void check_products(enum dtype dtype)
{
    static const size_t sizes[][3] = {{64, 48, 32}, {33, 17, 9}, {1, 8, 16},
                                      {5, 257, 40}, {8, 1, 64},  {16, 24, 3}};
    struct ops *cuda = NULL;
    assert_ok(plugin->ops_new(&device, dtype, &cuda, &why));
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (unsigned way = 0; way < 3 * 8; way++) {
            const struct matmul shape = {
                .form = (enum matmul_form)(way / 8),
                .m = sizes[s][0],
                .n = sizes[s][1],
                .k = sizes[s][2],
                .c_fp32 = (way & 1) != 0,
                .accumulate = (way & 2) != 0,
            };
            const bool bias = (way & 4) != 0;
            if (bias && shape.form != MATMUL_NT) {
                continue;
            }
            check_matmul(cuda, &shape, bias, 0);
            check_matmul(cuda, &shape, bias, 1);
            check_matmul(cuda, &shape, bias, 8); /* what is kept for 0, at other addresses */
        }
    }
    /* Large enough to be given scratch. */
    const struct matmul large = {.form = MATMUL_NT, .m = 256, .n = 257, .k = 256};
    assert_true(cuda->matmul_scratch(cuda, &large) > 0);
    check_matmul(cuda, &large, true, 0);
    cuda->free(cuda);
}

static void test_products(void **state)
{
    (void)state;
    check_products(DTYPE_FP32);
    check_products(DTYPE_BF16);
}

/* Scratch is a pure function of the shape, for shapes of any size, and never more than ours. */
static void test_scratch(void **state)
{
    (void)state;
    struct ops *cuda = NULL;
    assert_ok(plugin->ops_new(&device, DTYPE_BF16, &cuda, &why));
    const struct matmul tiny = {.form = MATMUL_NT, .m = 8, .n = 8, .k = 8};
    const struct matmul huge = {.form = MATMUL_TN, .m = 1u << 30, .n = 1u << 20, .k = 1u << 30};
    assert_int_equal(cuda->matmul_scratch(cuda, &tiny), 0);
    assert_int_equal(cuda->matmul_scratch(cuda, &huge), 32 * MIB);
    assert_int_equal(cuda_matmul_scratch(8, &huge), 8 * MIB);
    cuda->free(cuda);
}

/* ---- life ---- */

static void test_fingerprint(void **state)
{
    (void)state;
    struct ops *bf16 = NULL, *fp32 = NULL, *again = NULL;
    assert_ok(plugin->ops_new(&device, DTYPE_BF16, &bf16, &why));
    assert_ok(plugin->ops_new(&device, DTYPE_FP32, &fp32, &why));
    assert_ok(plugin->ops_new(&device, DTYPE_BF16, &again, &why));
    const char *text = bf16->fingerprint(bf16);
    assert_non_null(strstr(text, "cuda bf16"));
    assert_non_null(strstr(text, "sm_90"));
    assert_non_null(strstr(text, "cuBLASLt 130100"));
    assert_string_equal(text, again->fingerprint(again));
    assert_string_not_equal(text, fp32->fingerprint(fp32));
    struct cuda_external external;
    plugin->external(&device, &external);
    assert_true(external.library_bytes >= CUDA_SUM_PARTIALS * sizeof(double));
    fp32->free(fp32);
    again->free(again);
    bf16->free(bf16);
}

/* An error of a launch is kept, said once, and the table goes on. */
static void test_errors(void **state)
{
    (void)state;
    struct ops *cuda = NULL;
    assert_ok(plugin->ops_new(&device, DTYPE_FP32, &cuda, &why));
    cuda_ops_note(cuda_ops_of(cuda), STATUS_IO, "first %d", 1);
    cuda_ops_note(cuda_ops_of(cuda), STATUS_OUT_OF_MEMORY, "second");
    assert_int_equal(cuda->check(cuda, &why), STATUS_IO);
    assert_string_equal(why.text, "first 1");
    assert_ok(cuda->check(cuda, &why));
    cuda->fill(cuda, floats(on_device, 0), 10, 1.0f);
    cuda_note(cuda_of(&device), cudaErrorInvalidValue, "elsewhere");
    assert_int_equal(cuda->check(cuda, &why), STATUS_IO);
    assert_non_null(strstr(why.text, "elsewhere: CUDA says cudaErrorInvalidValue (1)"));
    assert_ok(cuda->check(cuda, &why));
    cuda->free(cuda);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    const int64_t live = heap_live();
    uint64_t nth = 1;
    for (; nth < 30; nth++) {
        struct ops *ops = NULL;
        heap_fail(nth, false);
        const enum status status = plugin->ops_new(&device, DTYPE_FP32, &ops, &why);
        const bool failed = heap_failures() > 0;
        heap_fail(0, false);
        if (!failed) {
            assert_ok(status);
            ops->free(ops);
            break;
        }
        assert_int_equal(status, STATUS_OUT_OF_MEMORY);
        assert_null(ops);
        assert_int_equal(heap_live(), live);
    }
    assert_true(nth > 3 && nth < 30);
    assert_int_equal(heap_live(), live);
}

static int open_device(void **state)
{
    (void)state;
    struct cuda_gpu gpu;
    void *base = NULL;
    plugin = ballast_cuda();
    host = malloc(ARENA_BYTES);
    expected = malloc(ARENA_BYTES);
    if (host == NULL || expected == NULL || plugin->open(&device, 0, 0, &gpu, &why) != STATUS_OK ||
        device.table->reserve(&device, ARENA_BYTES + SCRATCH_BYTES, &base, &why) != STATUS_OK ||
        device.table->commit(&device, base, 0, ARENA_BYTES + SCRATCH_BYTES, &why) != STATUS_OK) {
        fprintf(stderr, "%s\n", why.text);
        return -1;
    }
    on_device = base;
    return 0;
}

static int close_device(void **state)
{
    (void)state;
    device_fini(&device);
    free(expected);
    free(host);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_as_cpu), cmocka_unit_test(test_products),
        cmocka_unit_test(test_scratch),     cmocka_unit_test(test_fingerprint),
        cmocka_unit_test(test_errors),      cmocka_unit_test(test_out_of_memory),
    };
    setenv("BALLAST_STANDIN_KERNELS", "cpu", 1);
    return cmocka_run_group_tests(tests, open_device, close_device);
}
