/* The dry table: counts floating-point operations, touches no operand.
 *
 * Counted, a multiplication and an addition as one each:
 *   matmul               2 m n k
 *   attention_forward    4 hd per (query, key) pair that the causal mask allows: the two
 *                        products, B nh T (T+1)/2 pairs; segments are not looked at
 *   attention_backward   2.5 times that: the scores again and four products
 * Everything else moves memory rather than computing and counts 0 here. Every
 * operation counts as one call. Owns nothing; any one thread. */
#include "kernels/ops.h"

static struct dry_ops *dry_of(struct ops *ops)
{
    return (struct dry_ops *)(void *)ops;
}

static void count(struct ops *ops, double flops)
{
    struct dry_ops *dry = dry_of(ops);
    dry->flops += flops;
    dry->n_calls++;
}

static size_t matmul_scratch(struct ops *ops, const struct matmul *shape)
{
    struct ops *target = dry_of(ops)->target;
    return target->matmul_scratch(target, shape);
}

static void matmul(struct ops *ops, const struct matmul *call)
{
    count(ops, 2.0 * (double)call->m * (double)call->n * (double)call->k);
}

static double attention_flops(const struct attention *attention)
{
    const double tokens = (double)attention->seq_len;
    return 2.0 * 2.0 * (double)attention->batch * attention->n_heads * attention->head_dim *
           tokens * (tokens + 1.0) / 2.0;
}

static void attention_forward(struct ops *ops, const struct attention *attention, void *out,
                              float *lse, const void *qkv)
{
    (void)out, (void)lse, (void)qkv;
    count(ops, attention_flops(attention));
}

static void attention_backward(struct ops *ops, const struct attention *attention, void *dqkv,
                               float *delta, const void *dout, const void *out, const float *lse,
                               const void *qkv)
{
    (void)dqkv, (void)delta, (void)dout, (void)out, (void)lse, (void)qkv;
    count(ops, 2.5 * attention_flops(attention));
}

static void bias_backward(struct ops *ops, float *dbias, const void *dout, size_t rows, size_t cols)
{
    (void)dbias, (void)dout, (void)rows, (void)cols;
    count(ops, 0.0);
}

static void embed_forward(struct ops *ops, void *out, const int32_t *tokens,
                          const int32_t *positions, const void *wte, const void *wpe, size_t rows,
                          size_t width)
{
    (void)out, (void)tokens, (void)positions, (void)wte, (void)wpe, (void)rows, (void)width;
    count(ops, 0.0);
}

static void embed_backward(struct ops *ops, float *dwte, float *dwpe, const void *dout,
                           const int32_t *tokens, const int32_t *positions, size_t rows,
                           size_t width)
{
    (void)dwte, (void)dwpe, (void)dout, (void)tokens, (void)positions, (void)rows, (void)width;
    count(ops, 0.0);
}

static void norm_forward(struct ops *ops, enum norm_kind kind, void *out, float *mean, float *rstd,
                         const void *x, const void *weight, const void *bias, size_t rows,
                         size_t width, float eps)
{
    (void)kind, (void)out, (void)mean, (void)rstd, (void)x, (void)weight, (void)bias;
    (void)rows, (void)width, (void)eps;
    count(ops, 0.0);
}

static void norm_backward(struct ops *ops, enum norm_kind kind, void *dx, float *dweight,
                          float *dbias, const void *dout, const void *x, const void *weight,
                          const float *mean, const float *rstd, size_t rows, size_t width)
{
    (void)kind, (void)dx, (void)dweight, (void)dbias, (void)dout, (void)x, (void)weight;
    (void)mean, (void)rstd, (void)rows, (void)width;
    count(ops, 0.0);
}

static void rotary(struct ops *ops, void *qkv, const int32_t *positions,
                   const struct rotary *rotary, size_t rows, uint32_t n_heads, uint32_t n_kv_heads,
                   uint32_t head_dim, int direction)
{
    (void)qkv, (void)positions, (void)rotary, (void)rows, (void)n_heads, (void)n_kv_heads;
    (void)head_dim, (void)direction;
    count(ops, 0.0);
}

static void activation_forward(struct ops *ops, enum activation_kind kind, void *out,
                               const void *in, size_t rows, size_t inner)
{
    (void)kind, (void)out, (void)in, (void)rows, (void)inner;
    count(ops, 0.0);
}

static void activation_backward(struct ops *ops, enum activation_kind kind, void *din,
                                const void *dout, const void *in, size_t rows, size_t inner)
{
    (void)kind, (void)din, (void)dout, (void)in, (void)rows, (void)inner;
    count(ops, 0.0);
}

static void residual_dropout(struct ops *ops, void *out, const void *residual, const void *branch,
                             size_t rows, size_t width, const struct dropout *dropout)
{
    (void)out, (void)residual, (void)branch, (void)rows, (void)width, (void)dropout;
    count(ops, 0.0);
}

static void dropout_backward(struct ops *ops, void *dbranch, const void *dout, size_t rows,
                             size_t width, const struct dropout *dropout)
{
    (void)dbranch, (void)dout, (void)rows, (void)width, (void)dropout;
    count(ops, 0.0);
}

static void cross_entropy(struct ops *ops, float *losses, void *logits, const int32_t *labels,
                          size_t rows, size_t vocab, float grad_scale, bool with_gradient)
{
    (void)losses, (void)logits, (void)labels, (void)rows, (void)vocab, (void)grad_scale;
    (void)with_gradient;
    count(ops, 0.0);
}

static void sum(struct ops *ops, double *out, const float *values, size_t n)
{
    (void)out, (void)values, (void)n;
    count(ops, 0.0);
}

static void adamw(struct ops *ops, float *params, void *copy, float *moment_m, float *moment_v,
                  const float *grads, size_t n, const struct adamw *adamw)
{
    (void)params, (void)copy, (void)moment_m, (void)moment_v, (void)grads, (void)n, (void)adamw;
    count(ops, 0.0);
}

static void sum_squares(struct ops *ops, double *out, const float *values, size_t n)
{
    (void)out, (void)values, (void)n;
    count(ops, 0.0);
}

static void sum_parts(struct ops *ops, float *out, const float *parts, size_t n_parts,
                      size_t stride, size_t n)
{
    (void)out, (void)parts, (void)n_parts, (void)stride, (void)n;
    count(ops, 0.0);
}

static void add(struct ops *ops, float *dst, const float *src, size_t n)
{
    (void)dst, (void)src, (void)n;
    count(ops, 0.0);
}

static void zero(struct ops *ops, void *dst, size_t bytes)
{
    (void)dst, (void)bytes;
    count(ops, 0.0);
}

static void random_normal(struct ops *ops, float *values, size_t n, float std, uint64_t seed,
                          uint32_t tensor, uint64_t first_element)
{
    (void)values, (void)n, (void)std, (void)seed, (void)tensor, (void)first_element;
    count(ops, 0.0);
}

static void fill(struct ops *ops, float *values, size_t n, float value)
{
    (void)values, (void)n, (void)value;
    count(ops, 0.0);
}

static void copy(struct ops *ops, void *dst, const void *src, size_t bytes)
{
    (void)dst, (void)src, (void)bytes;
    count(ops, 0.0);
}

static void narrow(struct ops *ops, void *dst, const float *src, size_t n)
{
    (void)dst, (void)src, (void)n;
    count(ops, 0.0);
}

static enum status check(struct ops *ops, struct failure *why)
{
    struct ops *target = dry_of(ops)->target;
    return target->check(target, why); /* a scratch size that could not be found */
}

static const char *fingerprint(struct ops *ops)
{
    (void)ops;
    return "dry";
}

static void free_ops(struct ops *ops)
{
    (void)ops; /* the caller's memory, nothing owned */
}

void dry_ops_init(struct dry_ops *dry, struct ops *target)
{
    *dry = (struct dry_ops){.base = {.name = "dry",
                                     .dtype = target->dtype,
                                     .elem_bytes = target->elem_bytes,
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
                                     .check = check,
                                     .fingerprint = fingerprint,
                                     .free = free_ops},
                            .target = target};
}
