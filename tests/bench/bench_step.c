/* The whole training step of GPT-2 124M (B 4, T 256, fp32) against the rate of a large matrix
 * product measured in the same run, round by round, so that a busy machine disturbs both alike.
 *
 *   bench_step [--json] [--bf16] [--cpu-time] [--threads N] [--rounds N]
 *              [--checkpointing MODE]
 *
 * With --bf16 every round has a step in bf16 beside the one in fp32; needs 6 GB. Rates are of
 * medians, and of the fastest rounds, which a busy machine disturbs less. --cpu-time counts the
 * processor's time per thread, which neighbours disturb less still.
 * Rate of the step: model FLOPs, 6 N_matmul + 6 L h T per token; recomputation does not count.
 * Compared with the better of oneDNN and (where installed) OpenBLAS with its SkylakeX kernels. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include "kernels/cpu/cpu_ops.h"
#include "proto/base/units.h"
#include "tests/lib/small_training.h"

enum { SIDE = 4096, MAX_ROUNDS = 64 };

typedef void sgemm_function(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                            const float *a, int lda, const float *b, int ldb, float beta, float *c,
                            int ldc);

struct bench {
    struct small_training small;
    struct small_training small_bf16;
    bool bf16, cpu_time;
    struct small_series series;
    float *a, *b, *c;      /* SIDE x SIDE */
    void *scratch, *library_scratch;
    sgemm_function *sgemm; /* NULL without OpenBLAS */
    double ours[MAX_ROUNDS], onednn[MAX_ROUNDS], openblas[MAX_ROUNDS], step[MAX_ROUNDS];
    double step_bf16[MAX_ROUNDS];
    double share[MAX_ROUNDS];
    double phase_ms[N_PHASES][MAX_ROUNDS];
    int n_rounds, round;
    double started;
    enum phase phase;
};

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, int n)
{
    double sorted[MAX_ROUNDS];
    memcpy(sorted, values, (size_t)n * sizeof *values);
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    return sorted[n / 2];
}

static double least(const double *values, int n)
{
    double best = values[0];
    for (int i = 1; i < n; i++) {
        best = values[i] < best ? values[i] : best;
    }
    return best;
}

/* The core type has to be chosen before the library is loaded. */
static void load_openblas(struct bench *bench, int n_threads)
{
    setenv("OPENBLAS_CORETYPE", "SkylakeX", 1);
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return;
    }
    void (*set_threads)(int) = (void (*)(int))dlsym(library, "openblas_set_num_threads");
    bench->sgemm = (sgemm_function *)dlsym(library, "cblas_sgemm");
    if (set_threads != NULL) {
        set_threads(n_threads);
    }
}

static float *allocate(size_t n)
{
    float *values = mmap(NULL, n * sizeof *values, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (values == MAP_FAILED) {
        fprintf(stderr, "no memory for %zu floats\n", n);
        exit(1);
    }
    return values;
}

static double now_s(const struct bench *bench)
{
    if (!bench->cpu_time) {
        return units_monotonic_s();
    }
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return ((double)time.tv_sec + (double)time.tv_nsec * 1e-9) / bench->small.n_threads;
}

static const double product_flops = 2.0 * SIDE * SIDE * SIDE;

static struct matmul product(const struct bench *bench, void *scratch)
{
    return (struct matmul){.form = MATMUL_NT, .m = SIDE, .n = SIDE, .k = SIDE, .a = bench->a,
                           .b = bench->b, .c = bench->c, .scratch = scratch};
}

static double our_rate(struct bench *bench)
{
    const struct matmul call = product(bench, bench->scratch);
    const double start = now_s(bench);
    bench->small.ops->matmul(bench->small.ops, &call);
    return product_flops / (now_s(bench) - start);
}

static double onednn_rate(struct bench *bench)
{
    const struct matmul call = product(bench, bench->library_scratch);
    const double start = now_s(bench);
    cpu_library_matmul(cpu_of(bench->small.ops), &call);
    return product_flops / (now_s(bench) - start);
}

static double openblas_rate(struct bench *bench)
{
    enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
    if (bench->sgemm == NULL) {
        return 0.0;
    }
    const double start = now_s(bench);
    bench->sgemm(ROW_MAJOR, NO_TRANS, TRANS, SIDE, SIDE, SIDE, 1.0f, bench->a, SIDE, bench->b, SIDE,
                 0.0f, bench->c, SIDE);
    return product_flops / (now_s(bench) - start);
}

static enum status note_phase(void *user, enum phase phase, struct failure *why)
{
    (void)why;
    struct bench *bench = user;
    const double now = now_s(bench);
    bench->phase_ms[bench->phase][bench->round] += (now - bench->started) * 1e3;
    bench->started = now;
    bench->phase = phase;
    return STATUS_OK;
}

static double step_seconds(struct bench *bench, const struct batch_source *source, uint64_t step)
{
    bench->phase = PHASE_SETUP;
    const double start = bench->started = now_s(bench);
    (void)small_step(&bench->small, source, step);
    (void)note_phase(bench, PHASE_SETUP, NULL);
    return now_s(bench) - start;
}

static double bf16_step_seconds(struct bench *bench, const struct batch_source *source,
                                uint64_t step)
{
    if (!bench->bf16) {
        return 0.0;
    }
    const double start = now_s(bench);
    (void)small_step(&bench->small_bf16, source, step);
    return now_s(bench) - start;
}

static void run(struct bench *bench)
{
    const struct batch_source source = small_series_source(&bench->series);
    const struct training_options *options = &bench->small.options;
    const double flops = spec_flops_per_token(&bench->small.spec, options->limits.seq_len) *
                         options->limits.seq_len * options->limits.global_batch;
    bench->small.training.enter_phase = note_phase;
    bench->small.training.user = bench;
    (void)our_rate(bench);
    (void)onednn_rate(bench);
    (void)openblas_rate(bench);
    (void)step_seconds(bench, &source, 0);
    (void)bf16_step_seconds(bench, &source, 0);
    memset(bench->phase_ms, 0, sizeof bench->phase_ms);
    for (int round = 0; round < bench->n_rounds; round++) {
        bench->round = round;
        bench->ours[round] = our_rate(bench);
        bench->onednn[round] = onednn_rate(bench);
        bench->openblas[round] = openblas_rate(bench);
        bench->step[round] = step_seconds(bench, &source, (uint64_t)round + 1);
        bench->step_bf16[round] = bf16_step_seconds(bench, &source, (uint64_t)round + 1);
        /* Again after it: what the neighbours took meanwhile shows in the mean of both. */
        bench->onednn[round] = (bench->onednn[round] + onednn_rate(bench)) / 2.0;
        const double best = bench->onednn[round] > bench->openblas[round] ? bench->onednn[round]
                                                                          : bench->openblas[round];
        bench->share[round] = flops / bench->step[round] / best;
    }
}

static void print(const struct bench *bench, bool json)
{
    const int n = bench->n_rounds;
    const struct strategy_limits *limits = &bench->small.options.limits;
    const double tokens = (double)limits->global_batch * limits->seq_len;
    const double step = median(bench->step, n);
    const double rate = spec_flops_per_token(&bench->small.spec, limits->seq_len) * tokens / step;
    const double forward = median(bench->phase_ms[PHASE_FORWARD], n);
    const double backward = median(bench->phase_ms[PHASE_BACKWARD], n);
    const double update = median(bench->phase_ms[PHASE_STEP], n);
    if (json) {
        printf("{\"bench\":\"step\",\"step_ms\":%.2f,\"forward_ms\":%.2f,\"backward_ms\":%.2f,"
               "\"update_ms\":%.2f,\"tokens_per_second\":%.1f,\"model_gflops\":%.1f,"
               "\"our_sgemm_gflops\":%.1f,\"onednn_gflops\":%.1f,\"openblas_gflops\":%.1f,"
               "\"share_of_sgemm\":%.4f",
               step * 1e3, forward, backward, update, tokens / step, rate / 1e9,
               median(bench->ours, n) / 1e9, median(bench->onednn, n) / 1e9,
               median(bench->openblas, n) / 1e9, median(bench->share, n));
        if (bench->bf16) {
            const double bf16 = median(bench->step_bf16, n);
            printf(",\"bf16_step_ms\":%.2f,\"bf16_tokens_per_second\":%.1f,"
                   "\"bf16_over_fp32\":%.4f,\"bf16_over_fp32_best\":%.4f",
                   bf16 * 1e3, tokens / bf16, step / bf16,
                   least(bench->step, n) / least(bench->step_bf16, n));
        }
        printf("}\n");
        return;
    }
    printf("GPT-2 124M, fp32, B %u, T %u, %d thread%s, median of %d rounds\n", limits->global_batch,
           limits->seq_len, bench->small.n_threads, bench->small.n_threads == 1 ? "" : "s", n);
    printf("  sgemm 4096^3   ours %.1f, oneDNN %.1f GFLOP/s, OpenBLAS (SkylakeX) ",
           median(bench->ours, n) / 1e9, median(bench->onednn, n) / 1e9);
    if (bench->sgemm == NULL) {
        printf("not installed\n");
    } else {
        printf("%.1f GFLOP/s\n", median(bench->openblas, n) / 1e9);
    }
    printf("  step           %.0f ms (forward %.0f, backward %.0f, update %.0f), %.0f tokens/s\n",
           step * 1e3, forward, backward, update, tokens / step);
    printf("  model FLOPs    %.1f GFLOP/s = %.1f %% of the better sgemm "
           "(goal 80 %%, at least 75 %%)\n",
           rate / 1e9, 100.0 * median(bench->share, n));
    if (bench->bf16) {
        const double bf16 = median(bench->step_bf16, n);
        printf("  %s\n", bench->small_bf16.ops->fingerprint(bench->small_bf16.ops));
        printf("  step in bf16   %.0f ms, %.0f tokens/s = %.2f x fp32; best %.0f and %.0f ms, "
               "%.2f x (goal 1.6 x)\n",
               bf16 * 1e3, tokens / bf16, step / bf16, least(bench->step_bf16, n) * 1e3,
               least(bench->step, n) * 1e3,
               least(bench->step, n) / least(bench->step_bf16, n));
    }
}

static enum status open_training(struct small_training *small, enum dtype dtype, int n_threads,
                                 const char *checkpointing, struct failure *why)
{
    small_init(small, "gpt2-124m");
    small->dtype = dtype;
    small->n_threads = n_threads;
    small->options.limits.global_batch = 4;
    small->options.limits.seq_len = 256;
    small->strategy.micro_batch = 4;
    const enum status status = strategy_set(&small->strategy, "checkpointing", checkpointing, why);
    if (status == STATUS_OK) {
        small_open(small);
    }
    return status;
}

int main(int argc, char **argv)
{
    static struct bench bench;
    bench.n_rounds = 7;
    bool json = false;
    int n_threads = 2;
    const char *checkpointing = "none";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            json = true;
        } else if (strcmp(argv[i], "--bf16") == 0) {
            bench.bf16 = true;
        } else if (strcmp(argv[i], "--cpu-time") == 0) {
            bench.cpu_time = true;
        } else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc) {
            n_threads = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
            bench.n_rounds = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--checkpointing") == 0 && i + 1 < argc) {
            checkpointing = argv[++i];
        } else {
            fprintf(stderr, "usage: bench_step [--json] [--bf16] [--cpu-time] [--threads N] "
                            "[--rounds N] [--checkpointing MODE]\n");
            return 2;
        }
    }
    if (n_threads < 1 || bench.n_rounds < 1 || bench.n_rounds > MAX_ROUNDS) {
        fprintf(stderr, "bench_step: --threads from 1, --rounds from 1 to %d\n", MAX_ROUNDS);
        return 2;
    }
    load_openblas(&bench, n_threads);
    struct small_training *small = &bench.small;
    struct failure why = {0};
    if (open_training(small, DTYPE_FP32, n_threads, checkpointing, &why) != STATUS_OK ||
        (bench.bf16 && open_training(&bench.small_bf16, DTYPE_BF16, n_threads, checkpointing,
                                     &why) != STATUS_OK)) {
        fprintf(stderr, "bench_step: %s\n", why.text);
        return 2;
    }
    bench.series = (struct small_series){small->spec.vocab, 4, 256};
    const size_t n = (size_t)SIDE * SIDE;
    bench.a = allocate(3 * n);
    bench.b = bench.a + n;
    bench.c = bench.b + n;
    small->ops->random_normal(small->ops, bench.a, 2 * n, 1.0f, 1, 1, 0);
    const struct matmul shape = {.form = MATMUL_NT, .m = SIDE, .n = SIDE, .k = SIDE};
    const size_t scratch = small->ops->matmul_scratch(small->ops, &shape);
    bench.scratch = scratch == 0 ? NULL : allocate(scratch / sizeof(float) + 1);
    const size_t library_scratch = cpu_library_scratch(cpu_of(small->ops), &shape);
    bench.library_scratch =
        library_scratch == 0 ? NULL : allocate(library_scratch / sizeof(float) + 1);
    run(&bench);
    print(&bench, json);
    small_close(small);
    if (bench.bf16) {
        small_close(&bench.small_bf16);
    }
    return 0;
}
