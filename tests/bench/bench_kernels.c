/* Speed of the CPU operations, one by one, at the shapes of GPT-2 124M (B 4, T 256).
 *
 *   bench_kernels [--json] [--dtype fp32|bf16] [--threads N] [--repeats N] [--only TEXT]
 *                 [--cpu-time]
 *
 * Prints the median of the repeats (and the best, which a busy machine disturbs less); with
 * --cpu-time of the processor's time per thread, which neighbours disturb less still. At the end it
 * adds the operations up to a whole training step and says how much of it is spent outside matrix
 * products, and what share of the 4096^3 product's rate the step can reach. */
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "kernels/cpu/cpu_ops.h"
#include "kernels/philox.h"
#include "proto/base/units.h"

enum {
    BATCH = 4,
    SEQ_LEN = 256,
    ROWS = BATCH * SEQ_LEN,
    WIDTH = 768,
    INNER = 3072,
    HEADS = 12,
    HEAD_DIM = 64,
    VOCAB = 50257,
    LAYERS = 12,
    PARAMS = 124439808,
    POOL = 3 * 64 * 1024 * 1024, /* floats that all cases share */
    RESULTS = POOL / 2,          /* of products, from here on */
    MAX_RESULTS = 96,
    MAX_REPEATS = 101
};

struct result {
    const char *name;
    double median_ms, best_ms;
    double amount;    /* floating-point operations or bytes of one call */
    const char *unit; /* "GF/s" or "GB/s" */
    double per_step;  /* calls in one training step; 0: not part of it */
    bool product;
};

struct bench {
    struct ops *ops;
    float *pool; /* as bf16 and as fp32 full of usual numbers */
    int n_threads;
    bool cpu_time;
    int n_repeats;
    const char *only;
    struct result results[MAX_RESULTS];
    size_t n_results;
};

/* What a case runs: reads its operands from the bench's pool. */
typedef void run_case(struct bench *bench, const void *parameters);

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double now_s(const struct bench *bench)
{
    if (!bench->cpu_time)
        return units_monotonic_s();
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return ((double)time.tv_sec + (double)time.tv_nsec * 1e-9) / bench->n_threads;
}

static const struct result *measure(struct bench *bench, struct result result, run_case *run,
                                    const void *parameters)
{
    if ((bench->only && !strstr(result.name, bench->only)) || bench->n_results == MAX_RESULTS)
        return NULL;
    double ms[MAX_REPEATS];
    run(bench, parameters); /* compiles, touches, wakes the threads */
    int n = 0;
    double spent = 0.0;
    while (n < bench->n_repeats && (n < 5 || spent < 2000.0)) {
        const double start = now_s(bench);
        run(bench, parameters);
        ms[n] = (now_s(bench) - start) * 1e3;
        spent += ms[n++];
    }
    qsort(ms, (size_t)n, sizeof *ms, ascending);
    result.median_ms = ms[n / 2];
    result.best_ms = ms[0];
    bench->results[bench->n_results] = result;
    return &bench->results[bench->n_results++];
}

/* ---- matrix products ---- */

static void run_matmul(struct bench *bench, const void *parameters)
{
    struct matmul call = *(const struct matmul *)parameters;
    const size_t a = call.m * call.k, c = call.m * call.n;
    call.a = bench->pool;
    call.b = bench->pool + a;
    /* Results apart from operands: fp32 ones, read as bf16, would be any numbers. */
    call.c = bench->pool + RESULTS;
    call.bias = call.form == MATMUL_NT ? bench->pool : NULL;
    call.scratch = bench->pool + RESULTS + c;
    bench->ops->matmul(bench->ops, &call);
}

static const struct result *measure_matmul(struct bench *bench, const char *name,
                                           enum matmul_form form, size_t m, size_t n, size_t k,
                                           double per_step)
{
    const struct matmul call = {.form = form, .m = m, .n = n, .k = k, .c_fp32 = form == MATMUL_TN};
    struct matmul asked = call;
    asked.bias = form == MATMUL_NT ? bench->pool : NULL;
    const size_t scratch = bench->ops->matmul_scratch(bench->ops, &asked) / sizeof(float);
    if (m * k + k * n > RESULTS || m * n + scratch > POOL - RESULTS) {
        fprintf(stderr, "%s needs %zu floats of scratch: left out\n", name, scratch);
        return NULL;
    }
    return measure(bench,
                   (struct result){.name = name,
                                   .amount = 2.0 * (double)m * (double)n * (double)k,
                                   .unit = "GF/s",
                                   .per_step = per_step,
                                   .product = true},
                   run_matmul, &call);
}

static void all_products(struct bench *bench)
{
    static const struct {
        const char *name[3];
        size_t out, in;
        double per_step;
    } layers[] = {
        {{"qkv NT", "qkv NN", "qkv TN"}, 3 * WIDTH, WIDTH, LAYERS},
        {{"attention out NT", "attention out NN", "attention out TN"}, WIDTH, WIDTH, LAYERS},
        {{"mlp in NT", "mlp in NN", "mlp in TN"}, INNER, WIDTH, LAYERS},
        {{"mlp out NT", "mlp out NN", "mlp out TN"}, WIDTH, INNER, LAYERS},
        {{"head NT", "head NN", "head TN"}, VOCAB, WIDTH, 1},
    };
    struct cpu_ops *cpu = cpu_of(bench->ops);
    if (bench->ops->dtype == DTYPE_BF16) {
        cpu_choose_products(cpu, false);
        measure_matmul(bench, "widened bf16 4096^3", MATMUL_NT, 4096, 4096, 4096, 0);
        cpu_choose_products(cpu, true);
        if (__builtin_cpu_supports("avx512bf16"))
            measure_matmul(bench, "oneDNN bf16 4096^3", MATMUL_NT, 4096, 4096, 4096, 0);
        cpu_choose_products(cpu, cpu_library_has_bf16());
    } else {
        measure_matmul(bench, "sgemm 4096^3", MATMUL_NT, 4096, 4096, 4096, 0);
        const struct simd_table *set = cpu->simd;
        cpu->simd = &simd_table_plain; /* products through the library */
        measure_matmul(bench, "oneDNN sgemm 4096^3", MATMUL_NT, 4096, 4096, 4096, 0);
        cpu->simd = set;
    }
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        const size_t out = layers[i].out, in = layers[i].in;
        measure_matmul(bench, layers[i].name[0], MATMUL_NT, ROWS, out, in, layers[i].per_step);
        measure_matmul(bench, layers[i].name[1], MATMUL_NN, ROWS, in, out, layers[i].per_step);
        measure_matmul(bench, layers[i].name[2], MATMUL_TN, out, in, ROWS, layers[i].per_step);
    }
}

/* OpenBLAS in the same process, where it is installed, as a second opinion on the rate. */
typedef void sgemm_function(int order, int transpose_a, int transpose_b, int m, int n, int k,
                            float alpha, const float *a, int lda, const float *b, int ldb,
                            float beta, float *c, int ldc);

static void run_openblas(struct bench *bench, const void *parameters)
{
    sgemm_function *const *sgemm = parameters;
    float *a = bench->pool, *b = a + 4096 * 4096, *c = b + 4096 * 4096;
    (*sgemm)(101, 111, 112, 4096, 4096, 4096, 1.0f, a, 4096, b, 4096, 0.0f, c, 4096);
}

static void openblas_product(struct bench *bench, int n_threads)
{
    setenv("OPENBLAS_CORETYPE", "SkylakeX", 1);
    char threads[16];
    snprintf(threads, sizeof threads, "%d", n_threads);
    setenv("OPENBLAS_NUM_THREADS", threads, 1);
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    sgemm_function *sgemm = NULL;
    if (library)
        *(void **)&sgemm = dlsym(library, "cblas_sgemm");
    if (sgemm)
        measure(bench,
                (struct result){.name = "OpenBLAS sgemm 4096^3",
                                .amount = 2.0 * 4096.0 * 4096.0 * 4096.0,
                                .unit = "GF/s"},
                run_openblas, &sgemm);
}

/* ---- attention ---- */

static void run_attention(struct bench *bench, const void *parameters)
{
    const struct attention *a = parameters;
    const size_t rows = a->batch * a->seq_len;
    const size_t n_out = rows * a->n_heads * a->head_dim;
    const size_t n_qkv = rows * (a->n_heads + 2 * (size_t)a->n_kv_heads) * a->head_dim;
    float *qkv = bench->pool, *out = qkv + n_qkv, *lse = out + n_out;
    bench->ops->attention_forward(bench->ops, a, out, lse, qkv);
}

static void run_attention_backward(struct bench *bench, const void *parameters)
{
    const struct attention *a = parameters;
    const size_t rows = a->batch * a->seq_len, n_lse = rows * a->n_heads;
    const size_t n_out = rows * a->n_heads * a->head_dim;
    const size_t n_qkv = rows * (a->n_heads + 2 * (size_t)a->n_kv_heads) * a->head_dim;
    float *qkv = bench->pool, *out = qkv + n_qkv, *lse = out + n_out;
    float *delta = lse + n_lse, *dqkv = delta + n_lse;
    bench->ops->attention_backward(bench->ops, a, dqkv, delta, out, out, lse, qkv);
}

static void measure_attention(struct bench *bench, const char *forward, const char *backward,
                              const struct attention *a, double per_step)
{
    const double t = (double)a->seq_len;
    const double amount = 2.0 * (double)a->batch * a->n_heads * a->head_dim * t * (t + 1.0);
    measure(
        bench,
        (struct result){.name = forward, .amount = amount, .unit = "GF/s", .per_step = per_step},
        run_attention, a);
    measure(bench,
            (struct result){
                .name = backward, .amount = 2.5 * amount, .unit = "GF/s", .per_step = per_step},
            run_attention_backward, a);
}

static void all_attention(struct bench *bench)
{
    struct attention a = {.batch = BATCH,
                          .seq_len = SEQ_LEN,
                          .n_heads = HEADS,
                          .n_kv_heads = HEADS,
                          .head_dim = HEAD_DIM,
                          .scale = 0.125f};
    measure_attention(bench, "attention forward", "attention backward", &a, LAYERS);
    a.dropout =
        (struct dropout){.p = 0.1f, .seed = 1, .seq_len = SEQ_LEN, .use = RANDOM_ATTENTION_DROPOUT};
    measure_attention(bench, "attention forward, dropout", "attention backward, dropout", &a, 0);
    a = (struct attention){.batch = 1,
                           .seq_len = 2048,
                           .n_heads = 8,
                           .n_kv_heads = 2,
                           .head_dim = 128,
                           .scale = 0.0883883f};
    measure_attention(bench, "attention T 2048 hd 128 forward", "attention T 2048 hd 128 backward",
                      &a, 0);
}

/* ---- everything that moves memory; amounts are bytes that must be read and written ---- */

enum memory_case {
    CASE_STREAM,
    CASE_ADAMW,
    CASE_SQUARES,
    CASE_LAYER_FORWARD,
    CASE_LAYER_BACKWARD,
    CASE_RMS_FORWARD,
    CASE_GELU_FORWARD,
    CASE_GELU_BACKWARD,
    CASE_SWIGLU_FORWARD,
    CASE_SWIGLU_BACKWARD,
    CASE_RESIDUAL,
    CASE_RESIDUAL_DROPOUT,
    CASE_BIAS,
    CASE_EMBED_FORWARD,
    CASE_EMBED_BACKWARD,
    CASE_LOSS,
    CASE_ROTARY,
    CASE_ADD,
    CASE_NORMAL
};

enum { STREAM_ELEMENTS = 32 * 1024 * 1024 };

/* Four arrays read, three of them written, as AdamW does, with no arithmetic to speak of. */
static void stream(float *restrict a, float *restrict b, float *restrict c, const float *restrict d,
                   size_t begin, size_t end)
{
    for (size_t i = begin; i < end; i++) {
        a[i] += d[i];
        b[i] += d[i];
        c[i] += d[i];
    }
}

static void run_stream(struct bench *bench, const void *parameters)
{
    const int n_threads = *(const int *)parameters;
    float *p = bench->pool;
    const size_t n = STREAM_ELEMENTS;
    const size_t share = n / (size_t)n_threads;
#pragma omp parallel for num_threads(n_threads)
    for (int i = 0; i < n_threads; i++)
        stream(p, p + n, p + 2 * n, p + 3 * n, (size_t)i * share, ((size_t)i + 1) * share);
}

static void run_memory(struct bench *bench, const void *parameters)
{
    static const struct adamw adamw = {.lr = 1e-9f,
                                       .beta1 = 0.9f,
                                       .beta2 = 0.95f,
                                       .eps = 1e-8f,
                                       .weight_decay = 0.1f,
                                       .grad_scale = 1.0f,
                                       .bias_correction1 = 0.1,
                                       .bias_correction2 = 0.05};
    static const struct dropout dropout = {
        .p = 0.1f, .seed = 1, .seq_len = SEQ_LEN, .use = RANDOM_MLP_OUT_DROPOUT};
    static int32_t numbers[ROWS], positions[ROWS];
    static struct rotary rotary = {.n_pairs = HEAD_DIM / 2};
    static float small[4][INNER];
    struct ops *ops = bench->ops;
    const size_t n = STREAM_ELEMENTS, large = (size_t)ROWS * INNER;
    float *x = bench->pool, *y = x + 2 * large, *z = y + 2 * large;
    double sum;
    for (int i = 0; i < ROWS; i++) {
        numbers[i] = i * 7919 % VOCAB;
        positions[i] = i % SEQ_LEN;
    }
    switch (*(const enum memory_case *)parameters) {
    case CASE_STREAM:
        return;
    case CASE_ADAMW:
        ops->adamw(ops, x, ops->dtype == DTYPE_BF16 ? x + 4 * n : NULL, x + n, x + 2 * n, x + 3 * n,
                   n, &adamw);
        return;
    case CASE_SQUARES:
        ops->sum_squares(ops, &sum, x, n);
        return;
    case CASE_LAYER_FORWARD:
        ops->norm_forward(ops, NORM_LAYER, y, small[0], small[1], x, small[2], small[3], ROWS,
                          WIDTH, 1e-5f);
        return;
    case CASE_LAYER_BACKWARD:
        ops->norm_backward(ops, NORM_LAYER, z, small[0], small[1], y, x, small[2], small[3],
                           small[3], ROWS, WIDTH);
        return;
    case CASE_RMS_FORWARD:
        ops->norm_forward(ops, NORM_RMS, y, NULL, small[1], x, small[2], NULL, ROWS, WIDTH, 1e-5f);
        return;
    case CASE_GELU_FORWARD:
        ops->activation_forward(ops, ACTIVATION_GELU, y, x, ROWS, INNER);
        return;
    case CASE_GELU_BACKWARD:
        ops->activation_backward(ops, ACTIVATION_GELU, z, y, x, ROWS, INNER);
        return;
    case CASE_SWIGLU_FORWARD:
        ops->activation_forward(ops, ACTIVATION_SWIGLU, y, x, ROWS, INNER);
        return;
    case CASE_SWIGLU_BACKWARD:
        ops->activation_backward(ops, ACTIVATION_SWIGLU, z, y, x, ROWS, INNER);
        return;
    case CASE_RESIDUAL:
        ops->residual_dropout(ops, z, x, y, ROWS, WIDTH, NULL);
        return;
    case CASE_RESIDUAL_DROPOUT:
        ops->residual_dropout(ops, z, x, y, ROWS, WIDTH, &dropout);
        return;
    case CASE_BIAS:
        ops->bias_backward(ops, small[0], x, ROWS, INNER);
        return;
    case CASE_EMBED_FORWARD:
        ops->embed_forward(ops, z, numbers, positions, x, y, ROWS, WIDTH);
        return;
    case CASE_EMBED_BACKWARD:
        ops->embed_backward(ops, x + large, x + large + (size_t)VOCAB * WIDTH, x, numbers,
                            positions, ROWS, WIDTH);
        return;
    case CASE_LOSS:
        ops->cross_entropy(ops, small[0], x, numbers, ROWS, VOCAB, 1e-3f, true);
        return;
    case CASE_ROTARY:
        ops->rotary(ops, x, positions, &rotary, ROWS, HEADS, HEADS, HEAD_DIM, 1);
        return;
    case CASE_ADD:
        ops->add(ops, x, x + n, n);
        return;
    case CASE_NORMAL:
        ops->random_normal(ops, x, n, 1e-6f, 1, 2, 0);
        return;
    }
}

static void all_memory(struct bench *bench, int n_threads)
{
    const double elem = (double)bench->ops->elem_bytes;
    const double hidden = elem * ROWS * WIDTH, inner = elem * ROWS * INNER;
    const double big = 4.0 * STREAM_ELEMENTS, logits = elem * ROWS * VOCAB;
    const double sums = 4.0 * ROWS * WIDTH;
    const double copy = bench->ops->dtype == DTYPE_BF16 ? elem * STREAM_ELEMENTS : 0.0;
    const struct {
        enum memory_case which;
        const char *name;
        double bytes, per_step;
    } cases[] = {
        {CASE_LAYER_FORWARD, "layer norm forward", 2.0 * hidden, 2 * LAYERS + 1},
        {CASE_LAYER_BACKWARD, "layer norm backward", 4.0 * hidden, 2 * LAYERS + 1},
        {CASE_RMS_FORWARD, "rms norm forward", 2.0 * hidden, 0},
        {CASE_GELU_FORWARD, "gelu forward", 2.0 * inner, LAYERS},
        {CASE_GELU_BACKWARD, "gelu backward", 3.0 * inner, LAYERS},
        {CASE_SWIGLU_FORWARD, "swiglu forward", 3.0 * inner, 0},
        {CASE_SWIGLU_BACKWARD, "swiglu backward", 5.0 * inner, 0},
        {CASE_RESIDUAL, "residual", 3.0 * hidden, 4 * LAYERS},
        {CASE_RESIDUAL_DROPOUT, "residual, dropout", 3.0 * hidden, 0},
        {CASE_BIAS, "bias gradient (mlp in)", inner, LAYERS * 9.0 / 4.0},
        {CASE_EMBED_FORWARD, "embedding forward", 3.0 * hidden, 1},
        {CASE_LOSS, "cross-entropy with gradient", 2.0 * logits, 1},
        {CASE_ROTARY, "rotary", 4.0 * hidden, 0},
        /* From here on fp32 is written where others expect bf16. */
        {CASE_EMBED_BACKWARD, "embedding backward", hidden + 4.0 * sums, 1},
        {CASE_SQUARES, "sum of squares", big, (double)PARAMS / STREAM_ELEMENTS},
        {CASE_ADAMW, "adamw", 7.0 * big + copy, (double)PARAMS / STREAM_ELEMENTS},
        {CASE_ADD, "add", 3.0 * big, 0},
        {CASE_NORMAL, "normal random values", big, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        measure(bench,
                (struct result){.name = cases[i].name,
                                .amount = cases[i].bytes,
                                .unit = "GB/s",
                                .per_step = cases[i].per_step},
                run_memory, &cases[i].which);
    measure(bench,
            (struct result){
                .name = "stream of 4 reads and 3 writes", .amount = 7.0 * big, .unit = "GB/s"},
            run_stream, &n_threads);
}

/* ---- output ---- */

static double rate(const struct result *r)
{
    return r->amount / (r->median_ms * 1e6);
}

static const struct result *find(const struct bench *bench, const char *name)
{
    for (size_t i = 0; i < bench->n_results; i++)
        if (strcmp(bench->results[i].name, name) == 0)
            return &bench->results[i];
    return NULL;
}

/* The rate that others are a share of: the best of the implementations. */
static double peak_rate(const struct bench *bench)
{
    double peak = 0.0;
    for (size_t i = 0; i < bench->n_results; i++)
        if (strstr(bench->results[i].name, "4096^3"))
            peak = fmax(peak, rate(&bench->results[i]));
    return peak;
}

static void print_table(const struct bench *bench, double peak, double stream_rate)
{
    printf("%s\n", bench->ops->fingerprint(bench->ops));
    printf("%-36s %10s %10s %9s %7s %11s\n", "operation", "median ms", "best ms", "rate", "share",
           "ms per step");
    for (size_t i = 0; i < bench->n_results; i++) {
        const struct result *r = &bench->results[i];
        const double whole = strcmp(r->unit, "GF/s") == 0 ? peak : stream_rate;
        printf("%-36s %10.3f %10.3f %9.1f", r->name, r->median_ms, r->best_ms, rate(r));
        if (whole > 0.0)
            printf(" %6.1f%%", 100.0 * rate(r) / whole);
        else
            printf(" %7s", "");
        if (r->per_step > 0.0)
            printf(" %11.2f", r->per_step * r->median_ms);
        printf("\n");
    }
}

static void print_json(const struct bench *bench)
{
    printf("{\"fingerprint\": \"%s\", \"results\": [", bench->ops->fingerprint(bench->ops));
    for (size_t i = 0; i < bench->n_results; i++) {
        const struct result *r = &bench->results[i];
        printf("%s\n  {\"name\": \"%s\", \"median_ms\": %.6f, \"best_ms\": %.6f, \"rate\": %.3f, "
               "\"unit\": \"%s\", \"calls_per_step\": %.3f}",
               i ? "," : "", r->name, r->median_ms, r->best_ms, rate(r), r->unit, r->per_step);
    }
}

static void print_step(const struct bench *bench, double peak, bool json)
{
    double products_ms = 0.0, rest_ms = 0.0, flops = 0.0;
    for (size_t i = 0; i < bench->n_results; i++) {
        const struct result *r = &bench->results[i];
        *(r->product ? &products_ms : &rest_ms) += r->per_step * r->median_ms;
        if (r->product)
            flops += r->per_step * r->amount;
    }
    /* Causal attention counts 6 L h T per token. */
    flops += 6.0 * LAYERS * WIDTH * (double)SEQ_LEN * ROWS;
    const double ms = products_ms + rest_ms;
    const double share = peak > 0.0 ? flops / (ms * 1e6) / peak : 0.0;
    if (json) {
        printf("],\n \"step\": {\"products_ms\": %.3f, \"rest_ms\": %.3f, \"share_of_peak\": "
               "%.4f}}\n",
               products_ms, rest_ms, share);
        return;
    }
    printf("\nGPT-2 124M step of %d tokens: products %.0f ms, the rest %.0f ms (%.1f %%), "
           "%.0f tokens/s,\n%.1f %% of the 4096^3 rate by model FLOPs\n",
           ROWS, products_ms, rest_ms, 100.0 * rest_ms / ms, ROWS / ms * 1e3, 100.0 * share);
}

/* Elements of a bf16 operand are bf16; two of them, read as fp32, are about the second. */
static void fill_pool(struct bench *bench)
{
    enum { CHUNK = POOL / 2 };
    struct ops *ops = bench->ops;
    ops->random_normal(ops, bench->pool, POOL, 0.02f, 1, 1, 0);
    if (ops->dtype == DTYPE_BF16) {
        uint16_t *elements = (uint16_t *)(void *)bench->pool;
        ops->narrow(ops, elements, bench->pool + CHUNK, CHUNK);
        memcpy(elements + CHUNK, elements, CHUNK * sizeof *elements);
        memcpy(elements + POOL, elements, (size_t)POOL * sizeof *elements);
    }
}

static int run_bench(struct bench *bench, enum dtype dtype, int n_threads, bool json)
{
    struct failure why = {0};
    bench->n_threads = n_threads;
    if (cpu_ops_new(dtype, n_threads, &bench->ops, &why) != STATUS_OK) {
        fprintf(stderr, "%s\n", why.text);
        return 1;
    }
    bench->pool = malloc((size_t)POOL * sizeof *bench->pool);
    if (!bench->pool) {
        fprintf(stderr, "no memory for the operands\n");
        bench->ops->free(bench->ops);
        return 1;
    }
    fill_pool(bench);
    all_products(bench);
    if (dtype == DTYPE_FP32)
        openblas_product(bench, n_threads);
    all_attention(bench);
    all_memory(bench, n_threads);
    int result = 0;
    if (bench->ops->check(bench->ops, &why) != STATUS_OK) {
        fprintf(stderr, "%s\n", why.text);
        result = 1;
    }
    const double peak = peak_rate(bench);
    const struct result *stream_result = find(bench, "stream of 4 reads and 3 writes");
    if (json)
        print_json(bench);
    else
        print_table(bench, peak, stream_result ? rate(stream_result) : 0.0);
    if (!bench->only)
        print_step(bench, peak, json);
    else if (json)
        printf("]}\n");
    free(bench->pool);
    bench->ops->free(bench->ops);
    return result;
}

int main(int argc, char **argv)
{
    static struct bench bench = {.n_repeats = 21};
    enum dtype dtype = DTYPE_FP32;
    int n_threads = 2;
    bool json = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--json") == 0) {
            json = true;
            continue;
        }
        if (strcmp(argv[i], "--cpu-time") == 0) {
            bench.cpu_time = true;
            continue;
        }
        if (value && strcmp(argv[i], "--threads") == 0)
            n_threads = atoi(value);
        else if (value && strcmp(argv[i], "--repeats") == 0)
            bench.n_repeats = atoi(value);
        else if (value && strcmp(argv[i], "--only") == 0)
            bench.only = value;
        else if (value && strcmp(argv[i], "--dtype") == 0 &&
                 (strcmp(value, "fp32") == 0 || strcmp(value, "bf16") == 0))
            dtype = strcmp(value, "bf16") == 0 ? DTYPE_BF16 : DTYPE_FP32;
        else
            n_threads = 0;
        i++;
    }
    if (n_threads < 1 || bench.n_repeats < 1 || bench.n_repeats > MAX_REPEATS) {
        fprintf(stderr,
                "usage: bench_kernels [--json] [--dtype fp32|bf16] [--threads N] "
                "[--repeats 1..%d] [--only TEXT] [--cpu-time]\n",
                MAX_REPEATS);
        return 2;
    }
    return run_bench(&bench, dtype, n_threads, json);
}
