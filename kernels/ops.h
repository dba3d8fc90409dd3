/* Every operation of a training step, with shapes.
 *
 * One table of functions per device and compute type. `cpu` computes; `dry` counts the
 * floating-point operations and touches nothing; `cuda` queues on a stream. The step calls only
 * this table, `device`, `comm` and the workspace, which is why one text of the step serves
 * all three.
 *
 * Conventions
 * - All matrices are row-major and dense. N = B*T tokens (rows), H width, V vocabulary,
 *   nh query heads, nkv key/value heads, hd head dimension, F inner width of the MLP.
 * - `void *` operands are activations or weights in the table's compute type (ops->dtype);
 *   `float *` operands are fp32 on every table.
 * - "=" means the output is overwritten, "+=" that it is added to; said per function.
 * - No output aliases an input unless said so.
 * - Thread: the caller's (the worker's main thread); operations are in program order.
 * - Deterministic: a value depends on the inputs, the shapes and the thread count only, and
 *   for everything but matmul not on the thread count either. No atomics.
 * - Operations return nothing. A device that can fail keeps the first error, which
 *   ops->check() returns.
 * - `scratch` is memory for the call's duration; its size is a pure function of the shape,
 *   from ops->matmul_scratch(), and the planner reserves it from the workspace. */
#ifndef BALLAST_KERNELS_OPS_H
#define BALLAST_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"

enum dtype { DTYPE_FP32, DTYPE_BF16 };
size_t dtype_bytes(enum dtype dtype);
/* "fp32", "bf16" */
const char *dtype_name(enum dtype dtype);

enum { ROTARY_MAX_PAIRS = 128 }; /* head dimension up to 256 */

/* C(M,Nc) from A and B:  NT: C = A(M,K) B(Nc,K)^T   forward, weights (out, in)
 *                        NN: C = A(M,K) B(K,Nc)     gradient of the input
 *                        TN: C = A(K,M)^T B(K,Nc)   gradient of the weight */
enum matmul_form { MATMUL_NT, MATMUL_NN, MATMUL_TN };

struct matmul {
    enum matmul_form form;
    size_t m, n, k;
    const void *a, *b;
    const void *bias;  /* (n) added to every row, or NULL; NT only */
    void *c;
    bool c_fp32;       /* C is fp32 whatever the compute type (weight gradients, logits) */
    bool accumulate;   /* C += instead of C = */
    void *scratch;     /* ops->matmul_scratch() bytes; may be NULL when that is 0 */
};

enum norm_kind { NORM_LAYER, NORM_RMS };
enum activation_kind { ACTIVATION_GELU, ACTIVATION_SWIGLU };

/* Where the rows of this call lie in the run, so that dropout is keyed by global element.
 * Row (b,t) is sample first_sample+b of the global batch, token first_token+t of its
 * sequence. p = 0 switches dropout off. Kept values are scaled by 1/(1-p). */
struct dropout {
    float p;
    uint64_t seed;
    uint32_t step;
    uint32_t first_sample;
    uint32_t first_token;
    uint32_t seq_len; /* T: rows per sequence in this call */
    uint32_t layer;
    uint32_t use; /* enum random_use */
    /* Attention only: global index of the call's first query head (0 unless the heads are
     * split over ranks). */
    uint32_t first_head;
};

struct rotary {
    uint32_t n_pairs;                    /* hd/2 */
    float inv_freq[ROTARY_MAX_PAIRS];
};

/* Causal self-attention over packed rows [q heads | k heads | v heads], row width
 * (nh + 2 nkv) hd. Query head i reads key/value head i / (nh/nkv). */
struct attention {
    size_t batch, seq_len;
    uint32_t n_heads, n_kv_heads, head_dim;
    float scale;
    const int32_t *segments; /* (B,T) document ids; attention stays inside one. NULL: one */
    struct dropout dropout;  /* of the probabilities; use = RANDOM_ATTENTION_DROPOUT */
};

struct adamw {
    float lr, beta1, beta2, eps;
    float weight_decay;      /* of this range; 0 for norms and biases */
    float grad_scale;        /* clipping factor, multiplies every gradient */
    double bias_correction1; /* 1 - beta1^t */
    double bias_correction2;
};

/* A run of operations that is the same each time it comes by: between ops_body_begin and
 * ops_body_end the operations called, their order, shapes and addresses are functions of the
 * plan and of this key alone. A device may capture them once and replay them. What varies from
 * one micro-step to the next inside a body is only what stands here; a `struct dropout` of
 * the body has the same values. */
struct body {
    uint32_t section, layer, pass; /* the key: enum section, the block, which part of it */
    uint32_t step, first_sample;   /* what varies */
};

struct ops {
    const char *name; /* "cpu", "cuda", "dry" */
    enum dtype dtype; /* compute type of activations and weights */
    size_t elem_bytes;

    /* ---- matrix products ---- */
    /* Scratch bytes that matmul needs for this form and shape; a pure function of them, the
     * compute type and the machine, also for shapes far larger than this machine. */
    size_t (*matmul_scratch)(struct ops *ops, const struct matmul *shape);
    void (*matmul)(struct ops *ops, const struct matmul *call);
    /* dbias(cols) = column sums of dout(rows, cols), in an order that depends on the shape only. */
    void (*bias_backward)(struct ops *ops, float *dbias, const void *dout, size_t rows,
                          size_t cols);

    /* ---- embedding ---- */
    /* out(N,H) = wte[tokens] (+ wpe[positions] when wpe is not NULL). */
    void (*embed_forward)(struct ops *ops, void *out, const int32_t *tokens,
                          const int32_t *positions, const void *wte, const void *wpe, size_t rows,
                          size_t width);
    /* dwte[tokens] += dout, dwpe[positions] += dout; rows added in order. dwpe may be NULL. */
    void (*embed_backward)(struct ops *ops, float *dwte, float *dwpe, const void *dout,
                           const int32_t *tokens, const int32_t *positions, size_t rows,
                           size_t width);

    /* ---- norms ---- */
    /* out(N,H) = normalised x * weight (+ bias). mean(N) and rstd(N) are written (mean only
     * by NORM_LAYER; NULL otherwise). bias NULL for NORM_RMS. */
    void (*norm_forward)(struct ops *ops, enum norm_kind kind, void *out, float *mean, float *rstd,
                         const void *x, const void *weight, const void *bias, size_t rows,
                         size_t width, float eps);
    /* dx(N,H) += ; dweight(H) = ; dbias(H) = (NULL for NORM_RMS). */
    void (*norm_backward)(struct ops *ops, enum norm_kind kind, void *dx, float *dweight,
                          float *dbias, const void *dout, const void *x, const void *weight,
                          const float *mean, const float *rstd, size_t rows, size_t width);

    /* ---- attention ---- */
    /* Rotate the q and k heads of qkv in place by position (pairs i, i+hd/2); direction +1
     * forward, -1 backward. positions (N) is each row's index in its sequence. */
    void (*rotary)(struct ops *ops, void *qkv, const int32_t *positions,
                   const struct rotary *rotary, size_t rows, uint32_t n_heads, uint32_t n_kv_heads,
                   uint32_t head_dim, int direction);
    /* out(N, nh hd) = ; lse(B,nh,T) = log-sum-exp of the scaled scores of each query. */
    void (*attention_forward)(struct ops *ops, const struct attention *attention, void *out,
                              float *lse, const void *qkv);
    /* dqkv(N, (nh+2nkv) hd) = ; delta(B,nh,T) is written (row sums of dout*out). */
    void (*attention_backward)(struct ops *ops, const struct attention *attention, void *dqkv,
                               float *delta, const void *dout, const void *out, const float *lse,
                               const void *qkv);

    /* ---- MLP ---- */
    /* GELU (tanh form): in(N,F) -> out(N,F). SWIGLU: in(N,2F) = [gate | up] per row,
     * out(N,F) = silu(gate) * up. */
    void (*activation_forward)(struct ops *ops, enum activation_kind kind, void *out,
                               const void *in, size_t rows, size_t inner);
    /* din = ; may alias `in`. */
    void (*activation_backward)(struct ops *ops, enum activation_kind kind, void *din,
                                const void *dout, const void *in, size_t rows, size_t inner);

    /* ---- residual stream ---- */
    /* out(N,H) = residual + dropout(branch). out may alias residual or branch. residual NULL:
     * out = dropout(branch). */
    void (*residual_dropout)(struct ops *ops, void *out, const void *residual, const void *branch,
                             size_t rows, size_t width, const struct dropout *dropout);
    /* dbranch(N,H) = mask * dout / (1-p). May alias dout. */
    void (*dropout_backward)(struct ops *ops, void *dbranch, const void *dout, size_t rows,
                             size_t width, const struct dropout *dropout);

    /* ---- loss ---- */
    /* Cross-entropy of logits(rows, V) against labels(rows); label -1 is ignored (loss 0,
     * gradient 0). losses(rows) = per-row loss. When with_gradient, logits are overwritten by
     * grad_scale * (softmax - onehot). */
    void (*cross_entropy)(struct ops *ops, float *losses, void *logits, const int32_t *labels,
                          size_t rows, size_t vocab, float grad_scale, bool with_gradient);
    /* *out = sum of values in fp64, in an order that depends on n only. */
    void (*sum)(struct ops *ops, double *out, const float *values, size_t n);

    /* ---- optimizer and reductions, always fp32 ---- */
    /* One AdamW step over n elements, in place; one written order of operations on every
     * tier: g' = g*grad_scale; m = fma(beta1, m, (1-beta1) g'); v = fma(beta2, v, (1-beta2) g'g');
     * p = p - lr*(m/bc1 / (sqrt(v/bc2) + eps) + decay*p). params is the master copy; `copy`,
     * when not NULL, receives the new values rounded to the compute type (nearest-even). */
    void (*adamw)(struct ops *ops, float *params, void *copy, float *moment_m, float *moment_v,
                  const float *grads, size_t n, const struct adamw *adamw);
    /* *out = sum of squares in fp64, in a fixed order that does not depend on threads. */
    void (*sum_squares)(struct ops *ops, double *out, const float *values, size_t n);
    /* out[i] = parts[0][i] + parts[1][i] + ... in that order; part p starts at parts + p*stride.
     * out may alias no part. */
    void (*sum_parts)(struct ops *ops, float *out, const float *parts, size_t n_parts,
                      size_t stride, size_t n);
    /* dst += src */
    void (*add)(struct ops *ops, float *dst, const float *src, size_t n);
    void (*zero)(struct ops *ops, void *dst, size_t bytes);
    /* values[i] = std * normal(0,1), keyed by seed, tensor and first_element + i. */
    void (*random_normal)(struct ops *ops, float *values, size_t n, float std, uint64_t seed,
                          uint32_t tensor, uint64_t first_element);
    /* values[i] = value */
    void (*fill)(struct ops *ops, float *values, size_t n, float value);
    void (*copy)(struct ops *ops, void *dst, const void *src, size_t bytes);
    /* dst[i] = src[i] in the compute type, rounded to nearest, ties to even. */
    void (*narrow)(struct ops *ops, void *dst, const float *src, size_t n);

    /* First error of an operation since the last check, STATUS_OK if none. Waits for queued
     * work on devices that queue. */
    enum status (*check)(struct ops *ops, struct failure *why);
    /* Text that names library, instruction set and algorithms: the kernel fingerprint. */
    const char *(*fingerprint)(struct ops *ops);
    void (*free)(struct ops *ops);

    /* ---- bodies: NULL on tables that have no use for them, see ops_body_begin ---- */
    void (*body_begin)(struct ops *ops, const struct body *body);
    void (*body_end)(struct ops *ops);
    /* Forget what was captured: before regions named by it are released, after a switch. */
    void (*body_forget)(struct ops *ops);
};

static inline void ops_body_begin(struct ops *ops, const struct body *body)
{
    if (ops->body_begin != NULL) {
        ops->body_begin(ops, body);
    }
}

static inline void ops_body_end(struct ops *ops)
{
    if (ops->body_end != NULL) {
        ops->body_end(ops);
    }
}

static inline void ops_body_forget(struct ops *ops)
{
    if (ops->body_forget != NULL) {
        ops->body_forget(ops);
    }
}

/* The CPU table: n_threads >= 1. OUT_OF_MEMORY, or UNSUPPORTED for a type the
 * processor cannot do. Creates no thread before the first operation. */
enum status cpu_ops_new(enum dtype dtype, int n_threads, struct ops **out_ops,
                        struct failure *why) MUST_CHECK;

/* The dry table: counts, computes nothing, reads and writes no operand. Scratch sizes are asked of
 * `target` (borrowed), the table the run will use. */
struct dry_ops {
    struct ops base;
    struct ops *target;
    double flops;        /* counted since the caller last set it to 0 */
    uint64_t n_calls;
};
void dry_ops_init(struct dry_ops *dry, struct ops *target);

#endif
