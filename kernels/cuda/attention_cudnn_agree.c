/* cuDNN's attention beside ours on small problems: attention_cudnn_agrees(). See
 * attention_cudnn.h. In setup only: it takes memory, and the host waits. */
#include <math.h>
#include <string.h>
#include <time.h>
#include "kernels/cuda/attention_cudnn.h"
#include "proto/base/heap.h"

/* What a trial's block of device memory holds, in this order; the host has all but scratch. */
enum part {
    PART_QKV,
    PART_DOUT,
    PART_OUT,
    PART_OUT_CUDNN,
    PART_LSE,
    PART_LSE_CUDNN,
    PART_DQKV,
    PART_DQKV_CUDNN,
    PART_DQKV_AGAIN,
    PART_DELTA,
    PART_DELTA_CUDNN,
    PART_SCRATCH,
    N_PARTS
};

enum { PART_ALIGNMENT = 256, BF16_BYTES = 2, WAIT_S = 60, LOOK_NS = 100 * 1000 };

/* Of the greatest value. The two round probabilities and what they store to bf16 (2^-9 of a value
 * each) and sum in other orders; a wrong mask, scale or head is off by far more. */
static const double out_tolerance = 1.0 / 64, gradient_tolerance = 1.0 / 32, fp32_tolerance = 1e-3;

struct trial {
    struct attention attention;
    bool backward;
    size_t at[N_PARTS + 1], bytes[N_PARTS];
    char *device, *host; /* owned */
};

static size_t trial_rows(const struct attention *a)
{
    return a->batch * a->seq_len;
}

static size_t packed_width(const struct attention *a)
{
    return ((size_t)a->n_heads + 2 * (size_t)a->n_kv_heads) * a->head_dim;
}

static void trial_layout(struct trial *trial, size_t scratch_bytes)
{
    const struct attention *a = &trial->attention;
    const size_t packed = trial_rows(a) * packed_width(a) * BF16_BYTES;
    const size_t heads = trial_rows(a) * a->n_heads * a->head_dim * BF16_BYTES;
    const size_t rows = trial_rows(a) * a->n_heads * sizeof(float);
    const size_t bytes[N_PARTS] = {
        [PART_QKV] = packed,      [PART_DOUT] = heads,        [PART_OUT] = heads,
        [PART_OUT_CUDNN] = heads, [PART_LSE] = rows,          [PART_LSE_CUDNN] = rows,
        [PART_DQKV] = packed,     [PART_DQKV_CUDNN] = packed, [PART_DQKV_AGAIN] = packed,
        [PART_DELTA] = rows,      [PART_DELTA_CUDNN] = rows,  [PART_SCRATCH] = scratch_bytes};
    size_t at = 0;
    for (int i = 0; i < N_PARTS; i++) {
        trial->at[i] = at;
        trial->bytes[i] = bytes[i];
        at += (bytes[i] + PART_ALIGNMENT - 1) / PART_ALIGNMENT * PART_ALIGNMENT;
    }
    trial->at[N_PARTS] = at;
}

static void *part(const struct trial *trial, enum part which)
{
    return trial->device + trial->at[which];
}

/* Numbers in [-1, 1), bf16 by cutting. */
static void trial_fill(struct trial *trial, enum part which)
{
    uint32_t state = 12345u + (uint32_t)which;
    char *at = trial->host + trial->at[which];
    for (size_t i = 0; i < trial->bytes[which]; i += BF16_BYTES) {
        state = state * 1664525u + 1013904223u;
        const float value = (float)(state >> 8) * 0x1p-23f - 1.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        const uint16_t upper = (uint16_t)(bits >> 16);
        memcpy(at + i, &upper, sizeof upper);
    }
}

static enum status cuda_trouble(cudaError_t error, struct failure *why)
{
    (void)cudaGetLastError(); /* it is reported here */
    return fail(why, error == cudaErrorMemoryAllocation ? STATUS_OUT_OF_MEMORY : STATUS_IO,
                "comparing cuDNN's attention: %s (%d)", cudaGetErrorString(error), (int)error);
}

/* Ours and cuDNN's on the same inputs; cuDNN's backward is given our forward's results. */
static enum status trial_queue(struct attention_cudnn *cudnn, cudaStream_t stream,
                               const struct cuda_kernels *ours, const struct trial *trial,
                               struct failure *why)
{
    struct cuda_attention_forward forward = {.dtype = DTYPE_BF16,
                                             .attention = trial->attention,
                                             .out = part(trial, PART_OUT),
                                             .lse = part(trial, PART_LSE),
                                             .qkv = part(trial, PART_QKV)};
    ours->attention_forward(stream, &forward);
    forward.out = part(trial, PART_OUT_CUDNN);
    forward.lse = part(trial, PART_LSE_CUDNN);
    enum status status =
        attention_cudnn_forward(cudnn, stream, &forward, part(trial, PART_SCRATCH), why);
    if (status != STATUS_OK || !trial->backward) {
        return status;
    }
    struct cuda_attention_backward backward = {.dtype = DTYPE_BF16,
                                               .attention = trial->attention,
                                               .dqkv = part(trial, PART_DQKV),
                                               .delta = part(trial, PART_DELTA),
                                               .dout = part(trial, PART_DOUT),
                                               .out = part(trial, PART_OUT),
                                               .lse = part(trial, PART_LSE),
                                               .qkv = part(trial, PART_QKV)};
    ours->attention_backward(stream, &backward);
    backward.delta = part(trial, PART_DELTA_CUDNN);
    backward.dqkv = part(trial, PART_DQKV_CUDNN);
    status = attention_cudnn_backward(cudnn, stream, &backward, part(trial, PART_SCRATCH), why);
    if (status != STATUS_OK) {
        return status;
    }
    backward.dqkv = part(trial, PART_DQKV_AGAIN);
    return attention_cudnn_backward(cudnn, stream, &backward, part(trial, PART_SCRATCH), why);
}

static enum status wait_for(cudaStream_t stream, struct failure *why)
{
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        const cudaError_t error = cudaStreamQuery(stream);
        if (error == cudaSuccess) {
            return STATUS_OK;
        }
        const cudaError_t kept = cudaGetLastError(); /* the runtime may keep a "not ready" */
        if (error != cudaErrorNotReady) {
            return cuda_trouble(error, why);
        }
        if (kept != cudaSuccess && kept != cudaErrorNotReady) {
            return cuda_trouble(kept, why);
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - start.tv_sec > WAIT_S) {
            return fail(why, STATUS_DEADLINE,
                        "comparing cuDNN's attention has taken more than %d s", WAIT_S);
        }
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
}

static double value_at(const char *values, size_t i, bool fp32)
{
    float value;
    if (fp32) {
        memcpy(&value, values + i * sizeof value, sizeof value);
    } else {
        uint16_t half;
        memcpy(&half, values + i * sizeof half, sizeof half);
        const uint32_t bits = (uint32_t)half << 16;
        memcpy(&value, &bits, sizeof value);
    }
    return value;
}

/* Compare columns [first, first + n) of rows of `width` elements. */
static enum status compare(const struct trial *trial, enum part ours, enum part theirs,
                           const char *what, size_t width, size_t first, size_t n, double tolerance,
                           struct failure *why)
{
    const bool fp32 = ours == PART_LSE || ours == PART_DELTA;
    const char *a = trial->host + trial->at[ours], *b = trial->host + trial->at[theirs];
    const size_t rows = trial->bytes[ours] / (fp32 ? sizeof(float) : BF16_BYTES) / width;
    double greatest = 0, worst = 0;
    bool finite = true;
    for (size_t row = 0; row < rows; row++) {
        for (size_t i = row * width + first; i < row * width + first + n; i++) {
            const double x = value_at(a, i, fp32), y = value_at(b, i, fp32);
            finite = finite && isfinite(x) && isfinite(y);
            greatest = fmax(greatest, fabs(x));
            worst = fmax(worst, fabs(x - y));
        }
    }
    if (finite && worst <= tolerance * greatest) {
        return STATUS_OK;
    }
    return fail(why, STATUS_UNSUPPORTED,
                "cuDNN's attention gives another %s than our kernels (%zu x %zu, %u heads, %u of "
                "keys, dimension %u): off by %g%s of at most %g, %g of it is allowed",
                what, trial->attention.batch, trial->attention.seq_len, trial->attention.n_heads,
                trial->attention.n_kv_heads, trial->attention.head_dim, worst,
                finite ? "" : " and not finite", greatest, tolerance);
}

static enum status trial_judge(const struct trial *trial, struct failure *why)
{
    const struct attention *a = &trial->attention;
    const size_t q = (size_t)a->n_heads * a->head_dim, kv = (size_t)a->n_kv_heads * a->head_dim;
    const size_t width = packed_width(a);
    const struct {
        enum part ours, theirs;
        const char *what;
        size_t width, first, n;
        double tolerance;
    } pairs[] = {
        {PART_OUT, PART_OUT_CUDNN, "output", q, 0, q, out_tolerance},
        {PART_LSE, PART_LSE_CUDNN, "log-sum-exp", 1, 0, 1, fp32_tolerance},
        {PART_DELTA, PART_DELTA_CUDNN, "delta", 1, 0, 1, fp32_tolerance},
        {PART_DQKV, PART_DQKV_CUDNN, "gradient of q", width, 0, q, gradient_tolerance},
        {PART_DQKV, PART_DQKV_CUDNN, "gradient of k", width, q, kv, gradient_tolerance},
        {PART_DQKV, PART_DQKV_CUDNN, "gradient of v", width, q + kv, kv, gradient_tolerance}};
    const size_t n = trial->backward ? sizeof pairs / sizeof *pairs : 2;
    for (size_t i = 0; i < n; i++) {
        const enum status status =
            compare(trial, pairs[i].ours, pairs[i].theirs, pairs[i].what, pairs[i].width,
                    pairs[i].first, pairs[i].n, pairs[i].tolerance, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    if (trial->backward &&
        memcmp(trial->host + trial->at[PART_DQKV_CUDNN], trial->host + trial->at[PART_DQKV_AGAIN],
               trial->bytes[PART_DQKV_AGAIN]) != 0) {
        return fail(why, STATUS_UNSUPPORTED,
                    "cuDNN's backward of attention gave other bits the second time");
    }
    return STATUS_OK;
}

static enum status trial_run(struct attention_cudnn *cudnn, cudaStream_t stream,
                             const struct cuda_kernels *ours, struct trial *trial,
                             struct failure *why)
{
    const size_t inputs = trial->at[PART_OUT], all = trial->at[PART_SCRATCH];
    trial_fill(trial, PART_QKV);
    trial_fill(trial, PART_DOUT);
    cudaError_t error =
        cudaMemcpyAsync(trial->device, trial->host, inputs, cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) { /* the backward's parts may stay unwritten */
        error = cudaMemsetAsync(trial->device + inputs, 0, all - inputs, stream);
    }
    if (error != cudaSuccess) {
        return cuda_trouble(error, why);
    }
    enum status status = trial_queue(cudnn, stream, ours, trial, why);
    if (status == STATUS_OK) {
        error = cudaGetLastError(); /* of our launches */
        if (error == cudaSuccess) {
            error = cudaMemcpyAsync(trial->host + inputs, trial->device + inputs, all - inputs,
                                    cudaMemcpyDeviceToHost, stream);
        }
        status = error == cudaSuccess ? STATUS_OK : cuda_trouble(error, why);
    }
    const enum status waited = wait_for(stream, status == STATUS_OK ? why : NULL);
    if (status == STATUS_OK && waited == STATUS_OK) {
        status = trial_judge(trial, why);
    }
    return status != STATUS_OK ? status : waited;
}

enum status attention_cudnn_agrees(struct attention_cudnn *cudnn, cudaStream_t stream,
                                   const struct cuda_kernels *ours, bool *out_backward,
                                   struct failure *why)
{
    static const uint32_t shapes[][5] = {{2, 384, 8, 2, 64}, {1, 256, 4, 4, 128}};
    bool backward = true;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const uint32_t *s = shapes[i];
        struct trial trial = {.attention = {.batch = s[0],
                                            .seq_len = s[1],
                                            .n_heads = s[2],
                                            .n_kv_heads = s[3],
                                            .head_dim = s[4],
                                            .scale = 1.0f / sqrtf((float)s[4])}};
        size_t scratch = attention_cudnn_scratch(cudnn, &trial.attention, false, why);
        if (scratch == SIZE_MAX) {
            return STATUS_UNSUPPORTED;
        }
        const size_t more = attention_cudnn_scratch(cudnn, &trial.attention, true, NULL);
        trial.backward = more != SIZE_MAX;
        backward = backward && trial.backward;
        scratch = trial.backward && more > scratch ? more : scratch;
        trial_layout(&trial, scratch);
        trial.host = heap_alloc(trial.at[PART_SCRATCH]);
        if (trial.host == NULL) {
            return fail(why, STATUS_OUT_OF_MEMORY, "no memory to compare cuDNN's attention in");
        }
        const cudaError_t error = cudaMalloc((void **)&trial.device, trial.at[N_PARTS]);
        enum status status = STATUS_OK;
        if (error != cudaSuccess) {
            status = cuda_trouble(error, why);
        } else {
            status = trial_run(cudnn, stream, ours, &trial, why);
        }
        if (status == STATUS_DEADLINE) {
            return status; /* both are still in use */
        }
        (void)cudaFree(trial.device);
        heap_free(trial.host);
        if (status != STATUS_OK) {
            return status;
        }
    }
    *out_backward = backward;
    return STATUS_OK;
}
