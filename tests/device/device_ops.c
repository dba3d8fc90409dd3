/* Every operation of the CUDA device against the CPU device's, and its speed.
 *
 *   device_ops [--size small|full] [--only NAME] [--threads N] [--bench] [--json]
 *
 * Loads the plug-in as ballast-worker does (BALLAST_CUDA_LIBRARY names another, such as the
 * stand-in), opens GPU 0, and gives each case of operations.c to both devices, in fp32 and in
 * bf16: results within the operation's tolerance, inputs and the bytes between arrays untouched,
 * and a second run with the same bits. Exit code 0: all fine; 1: a case failed; 2: bad usage;
 * 3: no device.
 *
 * --bench times instead: enough repeats between two waits for the queue to be full, and the
 * median of five such rounds. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/units.h"
#include "tests/device/arrays.h"
#include "worker/plugin.h"

enum { BENCH_ROUNDS = 5, BENCH_ROUND_MS = 60, PATTERN_VALUES = 1 << 20 };

struct options {
    unsigned when; /* SMALL or FULL */
    const char *only;
    int threads;
    bool bench, json;
};

/* Both devices, in one compute type. */
struct pair {
    const struct options *options;
    struct device *device;
    struct ops *cpu, *cuda;
    enum dtype dtype;
    size_t n_cases, n_failed;
    bool any_line; /* of JSON, for its commas */
};

/* A stretch of device memory. */
struct stretch {
    struct device *device;
    void *base;
    size_t bytes;
};

static bool stretch_open(struct stretch *stretch, struct device *device, size_t bytes,
                         struct failure *why)
{
    *stretch = (struct stretch){.device = device, .bytes = device_round(device, bytes)};
    if (device->table->reserve(device, stretch->bytes, &stretch->base, why) != STATUS_OK) {
        return false;
    }
    if (device->table->commit(device, stretch->base, 0, stretch->bytes, why) != STATUS_OK) {
        device->table->unreserve(device, stretch->base, stretch->bytes);
        return false;
    }
    return true;
}

static void stretch_close(struct stretch *stretch)
{
    stretch->device->table->decommit(stretch->device, stretch->base, 0, stretch->bytes);
    stretch->device->table->unreserve(stretch->device, stretch->base, stretch->bytes);
}

static bool move(struct device *device, void *dst, const void *src, size_t bytes,
                 enum copy_kind kind, struct failure *why)
{
    struct ticket ticket;
    return device->table->copy(device, dst, src, bytes, kind, &ticket, why) == STATUS_OK &&
           device->table->wait(device, &ticket, why) == STATUS_OK;
}

static void *host_memory(size_t bytes)
{
    void *memory = aligned_alloc(ARRAY_ALIGN, (bytes + ARRAY_ALIGN) / ARRAY_ALIGN * ARRAY_ALIGN);
    if (memory == NULL) {
        fprintf(stderr, "device_ops: no host memory for %zu bytes\n", bytes);
        exit(3);
    }
    return memory;
}

static size_t scratch_of(struct ops *ops, const struct operation *operation,
                         const struct shape *shape)
{
    return operation->scratch == NULL ? 0 : operation->scratch(ops, shape);
}

/* ---- text ---- */

/* "rows 4 width 48 RMS" */
static const char *shape_text(const struct operation *operation, const struct shape *shape,
                              char *text, size_t room)
{
    char words[128];
    size_t n = 0;
    unsigned i = 0;
    snprintf(words, sizeof words, "%s", operation->dims);
    for (char *rest = words, *word; (word = strsep(&rest, " ")) != NULL && n < room; i++) {
        n += (size_t)snprintf(text + n, room - n, "%s%s %zu", i > 0 ? " " : "", word, shape->d[i]);
    }
    snprintf(words, sizeof words, "%s", operation->switches);
    i = 0;
    for (char *rest = words, *word; (word = strsep(&rest, " ")) != NULL && n < room; i++) {
        if (shape->flags >> i & 1u) {
            n += (size_t)snprintf(text + n, room - n, " %s", word);
        }
    }
    return text;
}

static void begin_json_line(struct pair *pair)
{
    printf("%s\n  ", pair->any_line ? "," : "");
    pair->any_line = true;
}

static void tell_case(struct pair *pair, const struct operation *operation,
                      const struct shape *shape, const struct verdict *verdict)
{
    char text[160];
    shape_text(operation, shape, text, sizeof text);
    if (pair->options->json) {
        begin_json_line(pair);
        printf("{\"operation\": \"%s\", \"dtype\": \"%s\", \"shape\": \"%s\", \"worst\": %.3g, "
               "\"tolerance\": %.3g, \"ok\": %s, \"text\": \"%s\"}",
               operation->name, dtype_name(pair->dtype), text, verdict->distance,
               verdict->tolerance, verdict->ok ? "true" : "false", verdict->text);
        return;
    }
    printf("%-19s %-4s  %-68s %9.2g %9.2g  %s%s\n", operation->name, dtype_name(pair->dtype), text,
           verdict->distance, verdict->tolerance, verdict->ok ? "ok" : "FAILED: ", verdict->text);
    if (!verdict->ok) {
        printf("    tolerances: %s\n", operation->reason);
    }
    fflush(stdout);
}

/* ---- checking ---- */

struct images {
    void *before, *want, *got, *again;
};

/* The call on the device, from `before` to `got`. */
static bool run_on_device(struct pair *pair, const struct operation *operation,
                          const struct shape *shape, const struct layout *layout,
                          const struct stretch *stretch, const void *before, void *got,
                          struct failure *why)
{
    void *p[MAX_OPERANDS];
    arrays_place(layout, stretch->base, p);
    if (!move(pair->device, stretch->base, before, layout->image_bytes, COPY_FROM_HOST, why)) {
        return false;
    }
    operation->call(pair->cuda, shape, p, (char *)stretch->base + layout->image_bytes);
    return pair->cuda->check(pair->cuda, why) == STATUS_OK &&
           move(pair->device, got, stretch->base, layout->image_bytes, COPY_TO_HOST, why);
}

static bool run_both(struct pair *pair, const struct operation *operation,
                     const struct shape *shape, const struct layout *layout,
                     const struct images *images, struct failure *why)
{
    void *p[MAX_OPERANDS];
    void *scratch = host_memory(scratch_of(pair->cpu, operation, shape));
    arrays_fill(layout, pair->dtype, images->before);
    if (operation->prepare != NULL) {
        arrays_place(layout, images->before, p);
        operation->prepare(pair->cpu, shape, p);
    }
    memcpy(images->want, images->before, layout->image_bytes);
    arrays_place(layout, images->want, p);
    operation->call(pair->cpu, shape, p, scratch);
    bool done = pair->cpu->check(pair->cpu, why) == STATUS_OK;
    free(scratch);
    struct stretch stretch;
    if (!done ||
        !stretch_open(&stretch, pair->device, layout->image_bytes + layout->scratch_bytes, why)) {
        return false;
    }
    done =
        run_on_device(pair, operation, shape, layout, &stretch, images->before, images->got, why) &&
        run_on_device(pair, operation, shape, layout, &stretch, images->before, images->again, why);
    stretch_close(&stretch);
    return done;
}

static void check_case(struct pair *pair, const struct operation *operation,
                       const struct shape *shape)
{
    struct layout layout;
    struct verdict verdict = {.ok = true};
    struct failure why = {0};
    arrays_layout(&layout, operation, shape, pair->dtype, scratch_of(pair->cuda, operation, shape));
    const struct images images = {host_memory(layout.image_bytes), host_memory(layout.image_bytes),
                                  host_memory(layout.image_bytes), host_memory(layout.image_bytes)};
    if (!run_both(pair, operation, shape, &layout, &images, &why)) {
        verdict = (struct verdict){.distance = 1e30};
        snprintf(verdict.text, sizeof verdict.text, "%.150s", why.text);
    } else {
        arrays_compare(&layout, pair->dtype, images.before, images.want, images.got, &verdict);
        if (verdict.ok && memcmp(images.got, images.again, layout.image_bytes) != 0) {
            verdict.ok = false;
            snprintf(verdict.text, sizeof verdict.text, "a second run had other bits");
        }
    }
    free(images.before);
    free(images.want);
    free(images.got);
    free(images.again);
    pair->n_cases++;
    pair->n_failed += !verdict.ok;
    tell_case(pair, operation, shape, &verdict);
}

/* ---- timing ---- */

/* Fill the device's arrays with a pattern that repeats. */
static bool fill_device(struct pair *pair, const struct layout *layout, char *base,
                        struct failure *why)
{
    bool done = true;
    for (size_t i = 0; i < layout->n && done; i++) {
        const struct operand *operand = &layout->operands[i];
        const size_t n = operand->n < PATTERN_VALUES ? operand->n : PATTERN_VALUES;
        const size_t chunk = layout->bytes[i] / operand->n * n;
        void *pattern = host_memory(chunk);
        memset(pattern, 0, chunk);
        if (operand->role != ROLE_OUT) {
            arrays_fill_operand(operand, pair->dtype, pattern, n);
        }
        for (size_t at = 0; at < layout->bytes[i] && done; at += chunk) {
            const size_t left = layout->bytes[i] - at;
            done = move(pair->device, base + layout->offset[i] + at, pattern,
                        left < chunk ? left : chunk, COPY_FROM_HOST, why);
        }
        free(pattern);
    }
    return done;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Milliseconds of one call: the median of some rounds, each as long as many calls. */
static bool time_calls(struct pair *pair, const struct operation *operation,
                       const struct shape *shape, const struct layout *layout, char *base,
                       double *out_ms, struct failure *why)
{
    void *p[MAX_OPERANDS];
    double ms[BENCH_ROUNDS];
    size_t n_calls = 1;
    arrays_place(layout, base, p);
    for (int round = -2; round < BENCH_ROUNDS; round++) { /* two to warm up and to count */
        const double started = units_monotonic_s();
        for (size_t i = 0; i < n_calls; i++) {
            operation->call(pair->cuda, shape, p, base + layout->image_bytes);
        }
        if (pair->cuda->check(pair->cuda, why) != STATUS_OK) {
            return false;
        }
        const double took = (units_monotonic_s() - started) * 1e3 / (double)n_calls;
        if (round >= 0) {
            ms[round] = took;
        } else if (pair->options->when == FULL) {
            n_calls = took > BENCH_ROUND_MS ? 1 : (size_t)(BENCH_ROUND_MS / (took + 1e-3)) + 1;
        }
    }
    qsort(ms, BENCH_ROUNDS, sizeof *ms, ascending);
    *out_ms = ms[BENCH_ROUNDS / 2];
    return true;
}

/* Bytes that a call must at least read and write. */
static double traffic(const struct layout *layout)
{
    double bytes = 0;
    for (size_t i = 0; i < layout->n; i++) {
        bytes += (double)layout->bytes[i] * (layout->operands[i].role == ROLE_INOUT ? 2 : 1);
    }
    return bytes;
}

static void bench_case(struct pair *pair, const struct operation *operation,
                       const struct shape *shape)
{
    struct layout layout;
    struct failure why = {0};
    struct stretch stretch;
    char text[160];
    double ms = 0;
    arrays_layout(&layout, operation, shape, pair->dtype, scratch_of(pair->cuda, operation, shape));
    bool done =
        stretch_open(&stretch, pair->device, layout.image_bytes + layout.scratch_bytes, &why);
    if (done) {
        done = fill_device(pair, &layout, stretch.base, &why) &&
               time_calls(pair, operation, shape, &layout, stretch.base, &ms, &why);
        stretch_close(&stretch);
    }
    pair->n_cases++;
    pair->n_failed += !done;
    shape_text(operation, shape, text, sizeof text);
    const double amount = operation->flops == NULL ? traffic(&layout) : operation->flops(shape);
    const double rate = ms > 0 ? amount / ms / (operation->flops == NULL ? 1e6 : 1e9) : 0;
    const char *unit = operation->flops == NULL ? "GB/s" : "TFLOP/s";
    if (pair->options->json) {
        begin_json_line(pair);
        printf("{\"operation\": \"%s\", \"dtype\": \"%s\", \"shape\": \"%s\", \"ms\": %.6g, "
               "\"rate\": %.6g, \"unit\": \"%s\", \"ok\": %s, \"text\": \"%s\"}",
               operation->name, dtype_name(pair->dtype), text, ms, rate, unit,
               done ? "true" : "false", done ? "" : why.text);
    } else {
        printf("%-19s %-4s  %-68s %10.4f ms %10.1f %s%s\n", operation->name,
               dtype_name(pair->dtype), text, ms, rate, unit, done ? "" : why.text);
        fflush(stdout);
    }
}

/* ---- all of them ---- */

static void run_operation(struct pair *pair, const struct operation *operation)
{
    const struct options *options = pair->options;
    if (options->only != NULL && strcmp(options->only, operation->name) != 0) {
        return;
    }
    /* A stand-in is timed only to see that timing works. */
    const unsigned wanted = options->bench && options->when == FULL ? BENCH : options->when;
    for (const struct shape *shape = operation->shapes; shape->when != 0; shape++) {
        if ((shape->when & wanted) == 0) {
            continue;
        }
        if (options->bench) {
            bench_case(pair, operation, shape);
        } else {
            check_case(pair, operation, shape);
        }
    }
}

static bool run_type(struct pair *pair, const struct plugin *plugin, enum dtype dtype)
{
    static const struct operation *const first[] = {&operation_matmul, &operation_attention_forward,
                                                    &operation_attention_backward,
                                                    &operation_rotary, &operation_body};
    struct failure why = {0};
    pair->dtype = dtype;
    if (cpu_ops_new(dtype, pair->options->threads, &pair->cpu, &why) != STATUS_OK ||
        plugin->cuda->ops_new(pair->device, dtype, &pair->cuda, &why) != STATUS_OK) {
        fprintf(stderr, "device_ops: %s: %s\n", dtype_name(dtype), why.text);
        return false;
    }
    fprintf(stderr, "%s: %s against %s\n", dtype_name(dtype), pair->cuda->fingerprint(pair->cuda),
            pair->cpu->fingerprint(pair->cpu));
    for (size_t i = 0; i < sizeof first / sizeof first[0]; i++) {
        run_operation(pair, first[i]);
    }
    for (size_t i = 0; i < n_operations; i++) {
        run_operation(pair, &operations[i]);
    }
    pair->cuda->free(pair->cuda);
    pair->cpu->free(pair->cpu);
    return true;
}

static int affinity_cpus(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

static bool read_options(int argc, char **argv, struct options *out_options)
{
    *out_options = (struct options){.when = FULL, .threads = affinity_cpus()};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--bench") == 0) {
            out_options->bench = true;
        } else if (strcmp(argv[i], "--json") == 0) {
            out_options->json = true;
        } else if (strcmp(argv[i], "--only") == 0) {
            out_options->only = argv[++i];
        } else if (strcmp(argv[i], "--threads") == 0 && atoi(value) > 0) {
            out_options->threads = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--size") == 0 &&
                   (strcmp(value, "small") == 0 || strcmp(value, "full") == 0)) {
            out_options->when = strcmp(argv[++i], "small") == 0 ? SMALL : FULL;
        } else {
            fprintf(stderr, "usage: device_ops [--size small|full] [--only NAME] [--threads N] "
                            "[--bench] [--json]\n");
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv)
{
    struct options options;
    struct plugin plugin;
    struct device device;
    struct cuda_gpu gpu;
    struct failure why = {0};
    if (!read_options(argc, argv, &options)) {
        return 2;
    }
    if (plugin_open(&plugin, &why) != STATUS_OK ||
        plugin.cuda->open(&device, 0, 0, &gpu, &why) != STATUS_OK) {
        fprintf(stderr, "device_ops: %s\n", why.text);
        return 3;
    }
    struct pair pair = {.options = &options, .device = &device};
    if (options.json) {
        printf("{\"gpu\": \"%s\", \"capability\": \"%d.%d\", \"bytes\": %llu, \"%s\": [", gpu.name,
               gpu.major, gpu.minor, (unsigned long long)gpu.total_bytes,
               options.bench ? "rates" : "cases");
    } else {
        printf("%s, compute capability %d.%d\n", gpu.name, gpu.major, gpu.minor);
    }
    bool done = run_type(&pair, &plugin, DTYPE_FP32);
    done = run_type(&pair, &plugin, DTYPE_BF16) && done;
    if (options.json) {
        printf("\n], \"n\": %zu, \"failed\": %zu}\n", pair.n_cases, pair.n_failed);
    }
    fprintf(stderr, "%zu cases, %zu failed\n", pair.n_cases, pair.n_failed);
    device_fini(&device);
    plugin_close(&plugin);
    return !done ? 3 : pair.n_failed > 0 || pair.n_cases == 0 ? 1 : 0;
}
