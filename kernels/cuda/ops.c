/* The table of operations on the GPU: every call becomes a block of arguments and goes to body.c,
 * which carries it out or keeps it. Owns the table, and with the first one the device's small
 * scratch block and cuBLASLt. Main thread; a table that never ran an operation may be asked for
 * scratch sizes and check() by any one thread. */
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "kernels/cuda/cuda_device.h"
#include "proto/base/heap.h"

enum { VARYING_BYTES = 256 }; /* of the scratch block; the partials follow */

/* An argument block whose padding is zero. Fields are set one by one: what a caller's struct has
 * between its fields must not get in. */
#define ARGS(kernel)                                                                               \
    struct cuda_##kernel args;                                                                     \
    memset(&args, 0, sizeof args)

#define SUBMIT(ops, kernel) cuda_submit(cuda_ops_of(ops), &operation_##kernel, &args, sizeof args)

#define DEFINE_OPERATION(kernel)                                                                   \
    static void run_##kernel(struct cuda_ops *self, const void *args)                              \
    {                                                                                              \
        self->kernels->kernel(self->cuda->streams[STREAM_COMPUTE], args);                          \
    }                                                                                              \
    static const struct cuda_operation operation_##kernel = {#kernel, run_##kernel};

#define OPERATIONS(X)                                                                              \
    X(embed_forward)                                                                               \
    X(embed_backward)                                                                              \
    X(norm_forward)                                                                                \
    X(norm_backward)                                                                               \
    X(rotary)                                                                                      \
    X(activation_forward)                                                                          \
    X(activation_backward)                                                                         \
    X(residual_dropout)                                                                            \
    X(dropout_backward)                                                                            \
    X(cross_entropy)                                                                               \
    X(bias_backward)                                                                               \
    X(sum)                                                                                         \
    X(sum_squares)                                                                                 \
    X(sum_parts)                                                                                   \
    X(add)                                                                                         \
    X(fill)                                                                                        \
    X(narrow)                                                                                      \
    X(random_normal)                                                                               \
    X(adamw)
OPERATIONS(DEFINE_OPERATION)

/* The rest is the runtime's or cuBLASLt's. */
struct cuda_zero {
    void *dst;
    size_t bytes;
};

struct cuda_copy_within {
    void *dst;
    const void *src;
    size_t bytes;
};

static void run_zero(struct cuda_ops *self, const void *args)
{
    const struct cuda_zero *zero = args;
    /* A failure is the runtime's last error, which body.c asks for. */
    (void)cudaMemsetAsync(zero->dst, 0, zero->bytes, self->cuda->streams[STREAM_COMPUTE]);
}

static void run_copy(struct cuda_ops *self, const void *args)
{
    const struct cuda_copy_within *copy = args;
    (void)cudaMemcpyAsync(copy->dst, copy->src, copy->bytes, cudaMemcpyDeviceToDevice,
                          self->cuda->streams[STREAM_COMPUTE]);
}

static const struct cuda_operation operation_zero = {"zero", run_zero};
static const struct cuda_operation operation_copy_within = {"copy", run_copy};
static const struct cuda_operation operation_matmul = {"matmul", cuda_matmul_run};
static const struct cuda_operation operation_attention_forward = {"attention_forward",
                                                                  cuda_attention_forward};
static const struct cuda_operation operation_attention_backward = {"attention_backward",
                                                                   cuda_attention_backward};

void cuda_ops_note(struct cuda_ops *self, enum status status, const char *format, ...)
{
    if (self->error.status != STATUS_OK) {
        return;
    }
    self->error.status = status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(self->error.text, sizeof self->error.text, format, arguments);
    va_end(arguments);
}

/* ---- dropout ---- */

/* Without step and first_sample, which the kernels read from device memory; that is made to hold
 * them, or does so for the body. */
static const struct cuda_varying *take_dropout(struct ops *ops, const struct dropout *from,
                                               struct dropout *out)
{
    struct cuda_ops *self = cuda_ops_of(ops);
    if (from->p > 0.0f) {
        const struct body *body = cuda_body_now(self);
        if (body == NULL) {
            cuda_set_varying(self, from->step, from->first_sample);
        } else {
            /* the promise of `struct body` */
            assert(body->step == from->step && body->first_sample == from->first_sample);
        }
    }
    out->p = from->p;
    out->seed = from->seed;
    out->first_token = from->first_token;
    out->seq_len = from->seq_len;
    out->layer = from->layer;
    out->use = from->use;
    out->first_head = from->first_head;
    return self->cuda->varying;
}

static const struct cuda_varying *take_attention(struct ops *ops, const struct attention *from,
                                                 struct attention *out)
{
    out->batch = from->batch;
    out->seq_len = from->seq_len;
    out->n_heads = from->n_heads;
    out->n_kv_heads = from->n_kv_heads;
    out->head_dim = from->head_dim;
    out->scale = from->scale;
    out->segments = from->segments;
    return take_dropout(ops, &from->dropout, &out->dropout);
}

/* ---- matrix products ---- */

static size_t matmul_scratch(struct ops *ops, const struct matmul *shape)
{
    return cuda_matmul_scratch(cuda_ops_of(ops)->cuda->gpu.major, shape);
}

static void matmul(struct ops *ops, const struct matmul *call)
{
    struct matmul args;
    if (call->m == 0 || call->n == 0) {
        return;
    }
    memset(&args, 0, sizeof args);
    args.form = call->form;
    args.m = call->m;
    args.n = call->n;
    args.k = call->k;
    args.a = call->a;
    args.b = call->b;
    args.bias = call->bias;
    args.c = call->c;
    args.c_fp32 = call->c_fp32;
    args.accumulate = call->accumulate;
    args.scratch = call->scratch;
    SUBMIT(ops, matmul);
}

static void bias_backward(struct ops *ops, float *dbias, const void *dout, size_t rows, size_t cols)
{
    ARGS(bias_backward);
    args.dtype = ops->dtype;
    args.dbias = dbias;
    args.dout = dout;
    args.rows = rows;
    args.cols = cols;
    SUBMIT(ops, bias_backward);
}

/* ---- embedding ---- */

static void embed_forward(struct ops *ops, void *out, const int32_t *tokens,
                          const int32_t *positions, const void *wte, const void *wpe, size_t rows,
                          size_t width)
{
    ARGS(embed_forward);
    args.dtype = ops->dtype;
    args.out = out;
    args.tokens = tokens;
    args.positions = positions;
    args.wte = wte;
    args.wpe = wpe;
    args.rows = rows;
    args.width = width;
    SUBMIT(ops, embed_forward);
}

static void embed_backward(struct ops *ops, float *dwte, float *dwpe, const void *dout,
                           const int32_t *tokens, const int32_t *positions, size_t rows,
                           size_t width)
{
    ARGS(embed_backward);
    args.dtype = ops->dtype;
    args.dwte = dwte;
    args.dwpe = dwpe;
    args.dout = dout;
    args.tokens = tokens;
    args.positions = positions;
    args.rows = rows;
    args.width = width;
    SUBMIT(ops, embed_backward);
}

/* ---- norms ---- */

static void norm_forward(struct ops *ops, enum norm_kind kind, void *out, float *mean, float *rstd,
                         const void *x, const void *weight, const void *bias, size_t rows,
                         size_t width, float eps)
{
    ARGS(norm_forward);
    args.dtype = ops->dtype;
    args.kind = kind;
    args.out = out;
    args.mean = mean;
    args.rstd = rstd;
    args.x = x;
    args.weight = weight;
    args.bias = bias;
    args.rows = rows;
    args.width = width;
    args.eps = eps;
    SUBMIT(ops, norm_forward);
}

static void norm_backward(struct ops *ops, enum norm_kind kind, void *dx, float *dweight,
                          float *dbias, const void *dout, const void *x, const void *weight,
                          const float *mean, const float *rstd, size_t rows, size_t width)
{
    ARGS(norm_backward);
    args.dtype = ops->dtype;
    args.kind = kind;
    args.dx = dx;
    args.dweight = dweight;
    args.dbias = dbias;
    args.dout = dout;
    args.x = x;
    args.weight = weight;
    args.mean = mean;
    args.rstd = rstd;
    args.rows = rows;
    args.width = width;
    SUBMIT(ops, norm_backward);
}

/* ---- attention ---- */

static void rotary(struct ops *ops, void *qkv, const int32_t *positions,
                   const struct rotary *rotary, size_t rows, uint32_t n_heads, uint32_t n_kv_heads,
                   uint32_t head_dim, int direction)
{
    ARGS(rotary);
    args.dtype = ops->dtype;
    args.qkv = qkv;
    args.positions = positions;
    args.rotary.n_pairs = rotary->n_pairs;
    memcpy(args.rotary.inv_freq, rotary->inv_freq, rotary->n_pairs * sizeof *rotary->inv_freq);
    args.rows = rows;
    args.n_heads = n_heads;
    args.n_kv_heads = n_kv_heads;
    args.head_dim = head_dim;
    args.direction = direction;
    SUBMIT(ops, rotary);
}

static void attention_forward(struct ops *ops, const struct attention *attention, void *out,
                              float *lse, const void *qkv)
{
    ARGS(attention_forward);
    args.dtype = ops->dtype;
    args.varying = take_attention(ops, attention, &args.attention);
    args.out = out;
    args.lse = lse;
    args.qkv = qkv;
    SUBMIT(ops, attention_forward);
}

static void attention_backward(struct ops *ops, const struct attention *attention, void *dqkv,
                               float *delta, const void *dout, const void *out, const float *lse,
                               const void *qkv)
{
    ARGS(attention_backward);
    args.dtype = ops->dtype;
    args.varying = take_attention(ops, attention, &args.attention);
    args.dqkv = dqkv;
    args.delta = delta;
    args.dout = dout;
    args.out = out;
    args.lse = lse;
    args.qkv = qkv;
    SUBMIT(ops, attention_backward);
}

/* ---- MLP and residual stream ---- */

static void activation_forward(struct ops *ops, enum activation_kind kind, void *out,
                               const void *in, size_t rows, size_t inner)
{
    ARGS(activation_forward);
    args.dtype = ops->dtype;
    args.kind = kind;
    args.out = out;
    args.in = in;
    args.rows = rows;
    args.inner = inner;
    SUBMIT(ops, activation_forward);
}

static void activation_backward(struct ops *ops, enum activation_kind kind, void *din,
                                const void *dout, const void *in, size_t rows, size_t inner)
{
    ARGS(activation_backward);
    args.dtype = ops->dtype;
    args.kind = kind;
    args.din = din;
    args.dout = dout;
    args.in = in;
    args.rows = rows;
    args.inner = inner;
    SUBMIT(ops, activation_backward);
}

static void residual_dropout(struct ops *ops, void *out, const void *residual, const void *branch,
                             size_t rows, size_t width, const struct dropout *dropout)
{
    ARGS(residual_dropout);
    args.dtype = ops->dtype;
    args.out = out;
    args.residual = residual;
    args.branch = branch;
    args.rows = rows;
    args.width = width;
    args.varying = take_dropout(ops, dropout, &args.dropout);
    SUBMIT(ops, residual_dropout);
}

static void dropout_backward(struct ops *ops, void *dbranch, const void *dout, size_t rows,
                             size_t width, const struct dropout *dropout)
{
    ARGS(dropout_backward);
    args.dtype = ops->dtype;
    args.dbranch = dbranch;
    args.dout = dout;
    args.rows = rows;
    args.width = width;
    args.varying = take_dropout(ops, dropout, &args.dropout);
    SUBMIT(ops, dropout_backward);
}

/* ---- loss ---- */

static void cross_entropy(struct ops *ops, float *losses, void *logits, const int32_t *labels,
                          size_t rows, size_t vocab, float grad_scale, bool with_gradient)
{
    ARGS(cross_entropy);
    args.dtype = ops->dtype;
    args.losses = losses;
    args.logits = logits;
    args.labels = labels;
    args.rows = rows;
    args.vocab = vocab;
    args.grad_scale = grad_scale;
    args.with_gradient = with_gradient;
    SUBMIT(ops, cross_entropy);
}

static void sum(struct ops *ops, double *out, const float *values, size_t n)
{
    ARGS(sum);
    args.out = out;
    args.values = values;
    args.n = n;
    SUBMIT(ops, sum);
}

/* ---- optimizer and reductions ---- */

static void adamw(struct ops *ops, float *params, void *copy, float *moment_m, float *moment_v,
                  const float *grads, size_t n, const struct adamw *adamw)
{
    ARGS(adamw);
    args.dtype = ops->dtype;
    args.params = params;
    args.copy = copy;
    args.moment_m = moment_m;
    args.moment_v = moment_v;
    args.grads = grads;
    args.n = n;
    args.adamw.lr = adamw->lr;
    args.adamw.beta1 = adamw->beta1;
    args.adamw.beta2 = adamw->beta2;
    args.adamw.eps = adamw->eps;
    args.adamw.weight_decay = adamw->weight_decay;
    args.adamw.grad_scale = adamw->grad_scale;
    args.adamw.bias_correction1 = adamw->bias_correction1;
    args.adamw.bias_correction2 = adamw->bias_correction2;
    SUBMIT(ops, adamw);
}

static void sum_squares(struct ops *ops, double *out, const float *values, size_t n)
{
    ARGS(sum_squares);
    args.out = out;
    args.partials = cuda_ops_of(ops)->cuda->partials;
    args.values = values;
    args.n = n;
    SUBMIT(ops, sum_squares);
}

static void sum_parts(struct ops *ops, float *out, const float *parts, size_t n_parts,
                      size_t stride, size_t n)
{
    ARGS(sum_parts);
    args.out = out;
    args.parts = parts;
    args.n_parts = n_parts;
    args.stride = stride;
    args.n = n;
    SUBMIT(ops, sum_parts);
}

static void add(struct ops *ops, float *dst, const float *src, size_t n)
{
    ARGS(add);
    args.dst = dst;
    args.src = src;
    args.n = n;
    SUBMIT(ops, add);
}

static void zero(struct ops *ops, void *dst, size_t bytes)
{
    struct cuda_zero args = {dst, bytes};
    if (bytes > 0) {
        SUBMIT(ops, zero);
    }
}

static void random_normal(struct ops *ops, float *values, size_t n, float std, uint64_t seed,
                          uint32_t tensor, uint64_t first_element)
{
    ARGS(random_normal);
    args.values = values;
    args.n = n;
    args.std = std;
    args.seed = seed;
    args.tensor = tensor;
    args.first_element = first_element;
    SUBMIT(ops, random_normal);
}

static void fill(struct ops *ops, float *values, size_t n, float value)
{
    ARGS(fill);
    args.values = values;
    args.n = n;
    args.value = value;
    SUBMIT(ops, fill);
}

static void copy(struct ops *ops, void *dst, const void *src, size_t bytes)
{
    struct cuda_copy_within args = {dst, src, bytes};
    if (bytes > 0) {
        SUBMIT(ops, copy_within);
    }
}

static void narrow(struct ops *ops, void *dst, const float *src, size_t n)
{
    ARGS(narrow);
    args.dtype = ops->dtype;
    args.dst = dst;
    args.src = src;
    args.n = n;
    SUBMIT(ops, narrow);
}

/* ---- errors, fingerprint, life ---- */

static enum status check(struct ops *ops, struct failure *why)
{
    struct cuda_ops *self = cuda_ops_of(ops);
    struct cuda_device *cuda = self->cuda;
    if (self->queued) {
        assert(!cuda->in_body);
        struct failure waited = {0};
        const enum status status =
            cuda_wait_stream(cuda, STREAM_COMPUTE, "waiting for the operations", &waited);
        /* What was noted when it was queued is the cause, this is what it led to. */
        if (status != STATUS_OK) {
            cuda_ops_note(self, waited.status, "%s", waited.text);
        }
        if (cuda->error.status != STATUS_OK) {
            cuda_ops_note(self, cuda->error.status, "%s", cuda->error.text);
            cuda->error = (struct failure){0};
        }
        self->queued = false;
    }
    const struct failure error = self->error;
    self->error = (struct failure){0};
    return error.status == STATUS_OK ? STATUS_OK : fail(why, error.status, "%s", error.text);
}

static const char *fingerprint(struct ops *ops)
{
    return cuda_ops_of(ops)->fingerprint;
}

/* The number after "kernels" changes whenever the same inputs may give other bits. */
static void write_fingerprint(struct cuda_ops *self)
{
    const struct cuda_device *cuda = self->cuda;
    snprintf(self->fingerprint, sizeof self->fingerprint,
             "cuda %s; kernels 1; %s sm_%d%d; driver %d; cuBLASLt %zu; algorithms %016llx; cuDNN %zu",
             self->base.dtype == DTYPE_BF16 ? "bf16" : "fp32", cuda->gpu.name, cuda->gpu.major,
             cuda->gpu.minor, cuda->driver_version, cuda_products_version(),
             (unsigned long long)cuda_products_hash(self), cuda_attention_version(cuda));
}

/* What all tables share. */
static enum status shared_new(struct cuda_device *cuda, struct failure *why)
{
    const uint64_t before = cuda_used_bytes();
    enum status status = cuda_products_new(cuda, why);
    if (status != STATUS_OK) {
        return status;
    }
    const cudaError_t error =
        cudaMalloc(&cuda->scratch, VARYING_BYTES + CUDA_SUM_PARTIALS * sizeof(double));
    if (error != cudaSuccess) {
        cuda_products_free(cuda);
        return cuda_failed(error, "scratch for reductions", why);
    }
    cuda->varying = cuda->scratch;
    cuda->partials = (double *)(void *)((unsigned char *)cuda->scratch + VARYING_BYTES);
    cuda->varying_known = false;
    const uint64_t after = cuda_used_bytes();
    cuda->external.library_bytes = after > before ? after - before : 0;
    return STATUS_OK;
}

static void shared_free(struct cuda_device *cuda)
{
    cuda_attention_forget(cuda);
    cuda->cudnn_tried = false;
    cuda_products_free(cuda);
    if (cuda->scratch != NULL) {
        cudaFree(cuda->scratch);
        cuda->scratch = NULL;
    }
}

static void free_ops(struct ops *ops)
{
    if (ops == NULL) {
        return;
    }
    struct cuda_ops *self = cuda_ops_of(ops);
    struct cuda_device *cuda = self->cuda;
    struct failure why = {0};
    if (cuda_wait_stream(cuda, STREAM_COMPUTE, "waiting for the last operations", &why) !=
        STATUS_OK) {
        why.status = STATUS_OK; /* it is the end: whoever needed the result has checked */
    }
    struct cuda_ops **link = &cuda->ops;
    while (*link != self) {
        link = &(*link)->next;
    }
    *link = self->next;
    cuda_bodies_free(self->bodies);
    if (--cuda->n_ops == 0) {
        shared_free(cuda);
    }
    heap_free(self);
}

static const struct ops cuda_table = {
    .name = "cuda",
    .matmul_scratch = matmul_scratch,
    .matmul = matmul,
    .bias_backward = bias_backward,
    .embed_forward = embed_forward,
    .embed_backward = embed_backward,
    .norm_forward = norm_forward,
    .norm_backward = norm_backward,
    .rotary = rotary,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .activation_forward = activation_forward,
    .activation_backward = activation_backward,
    .residual_dropout = residual_dropout,
    .dropout_backward = dropout_backward,
    .cross_entropy = cross_entropy,
    .sum = sum,
    .adamw = adamw,
    .sum_squares = sum_squares,
    .sum_parts = sum_parts,
    .add = add,
    .zero = zero,
    .random_normal = random_normal,
    .fill = fill,
    .copy = copy,
    .narrow = narrow,
    .body_begin = cuda_body_begin,
    .body_end = cuda_body_end,
    .body_forget = cuda_body_forget,
    .check = check,
    .fingerprint = fingerprint,
    .free = free_ops,
};

enum status cuda_ops_new(struct device *device, enum dtype dtype, struct ops **out_ops,
                         struct failure *why)
{
    struct cuda_device *cuda = cuda_of(device);
    struct cuda_ops *self = heap_calloc(1, sizeof *self);
    if (self == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory for the table of operations");
    }
    self->base = cuda_table;
    self->base.dtype = dtype;
    self->base.elem_bytes = dtype_bytes(dtype);
    self->cuda = cuda;
    self->kernels = cuda_kernels_choose();
    enum status status = cuda_bodies_new(&self->bodies, why);
    if (status == STATUS_OK && cuda->n_ops == 0) {
        status = shared_new(cuda, why);
    }
    if (status != STATUS_OK) {
        cuda_bodies_free(self->bodies);
        heap_free(self);
        return status;
    }
    if (dtype == DTYPE_BF16) {
        const uint64_t before = cuda_used_bytes();
        cuda_attention_choose(cuda, self->kernels);
        const uint64_t after = cuda_used_bytes();
        cuda->external.library_bytes += after > before ? after - before : 0;
    }
    cuda->n_ops++;
    self->next = cuda->ops;
    cuda->ops = self;
    write_fingerprint(self);
    *out_ops = &self->base;
    return STATUS_OK;
}
