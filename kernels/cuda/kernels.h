/* The launchers of the GPU's kernels: one function per kernel, queued on a stream.
 *
 * kernels/cuda/ops.c calls only this table, so that what is launched can be exchanged: the
 * product's launchers are CUDA kernels; without a GPU a test puts the CPU device's operations
 * (kernels/cuda/emulate) or the same kernels run by fibres in their place.
 *
 * Conventions
 * - Pointers are device memory. `dtype` is the type of `void *` operands; `float *` are fp32.
 *   Meaning, shapes and aliasing are those of the operation of the same name in kernels/ops.h.
 * - Every argument block is copied by the call; a launcher keeps no pointer to it.
 * - Deterministic: a value depends on inputs and shapes only. No floating-point atomics.
 * - Sizes are size_t: more than 2^31 elements have to work.
 * - Thread: the caller's. Errors are the runtime's sticky ones, seen by ops->check(). */
#ifndef BALLAST_KERNELS_CUDA_KERNELS_H
#define BALLAST_KERNELS_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What varies from micro-step to micro-step, in device memory, so that captured launches read
 * it when they run. */
struct cuda_varying {
    uint32_t step, first_sample;
};

/* A kernel with dropout takes `dropout.step` and `dropout.first_sample` from `varying` (device
 * memory, never NULL when dropout.p > 0) instead of from the struct. */

struct cuda_set_varying {
    struct cuda_varying *varying; /* device memory */
    struct cuda_varying value;
};

struct cuda_embed_forward {
    enum dtype dtype;
    void *out;
    const int32_t *tokens, *positions;
    const void *wte, *wpe;
    size_t rows, width;
};

struct cuda_embed_backward {
    enum dtype dtype;
    float *dwte, *dwpe;
    const void *dout;
    const int32_t *tokens, *positions;
    size_t rows, width;
};

struct cuda_norm_forward {
    enum dtype dtype;
    enum norm_kind kind;
    void *out;
    float *mean, *rstd;
    const void *x, *weight, *bias;
    size_t rows, width;
    float eps;
};

struct cuda_norm_backward {
    enum dtype dtype;
    enum norm_kind kind;
    void *dx;
    float *dweight, *dbias;
    const void *dout, *x, *weight;
    const float *mean, *rstd;
    size_t rows, width;
};

struct cuda_rotary {
    enum dtype dtype;
    void *qkv;
    const int32_t *positions;
    struct rotary rotary; /* by value */
    size_t rows;
    uint32_t n_heads, n_kv_heads, head_dim;
    int direction;
};

struct cuda_attention_forward {
    enum dtype dtype;
    struct attention attention; /* `segments` is device memory */
    const struct cuda_varying *varying;
    void *out;
    float *lse;
    const void *qkv;
};

struct cuda_attention_backward {
    enum dtype dtype;
    struct attention attention;
    const struct cuda_varying *varying;
    void *dqkv;
    float *delta;
    const void *dout, *out;
    const float *lse;
    const void *qkv;
};

struct cuda_activation_forward {
    enum dtype dtype;
    enum activation_kind kind;
    void *out;
    const void *in;
    size_t rows, inner;
};

struct cuda_activation_backward {
    enum dtype dtype;
    enum activation_kind kind;
    void *din;
    const void *dout, *in;
    size_t rows, inner;
};

struct cuda_residual_dropout {
    enum dtype dtype;
    void *out;
    const void *residual, *branch;
    size_t rows, width;
    struct dropout dropout;
    const struct cuda_varying *varying;
};

struct cuda_dropout_backward {
    enum dtype dtype;
    void *dbranch;
    const void *dout;
    size_t rows, width;
    struct dropout dropout;
    const struct cuda_varying *varying;
};

struct cuda_cross_entropy {
    enum dtype dtype;
    float *losses;
    void *logits;
    const int32_t *labels;
    size_t rows, vocab;
    float grad_scale;
    bool with_gradient;
};

struct cuda_bias_backward {
    enum dtype dtype;
    float *dbias;
    const void *dout;
    size_t rows, cols;
};

/* c(m,n) = or += a b in fp32, plainly; what cuBLASLt has no algorithm for within the
 * workspace. See struct matmul. Not fast. */
struct cuda_plain_matmul {
    enum dtype dtype;
    struct matmul call; /* scratch unused */
};

struct cuda_sum {
    double *out;
    const float *values;
    size_t n;
};

/* *out = sum of squares in fp64: blocks of CUDA_SUM_BLOCK values are summed apart, then the
 * blocks' sums in order. `partials` has room for CUDA_SUM_PARTIALS doubles. */
enum { CUDA_SUM_BLOCK = 16384, CUDA_SUM_PARTIALS = 4096 };
struct cuda_sum_squares {
    double *out, *partials;
    const float *values;
    size_t n;
};

struct cuda_sum_parts {
    float *out;
    const float *parts;
    size_t n_parts, stride, n;
};

struct cuda_add {
    float *dst;
    const float *src;
    size_t n;
};

struct cuda_fill {
    float *values;
    size_t n;
    float value;
};

struct cuda_narrow {
    enum dtype dtype;
    void *dst;
    const float *src;
    size_t n;
};

struct cuda_random_normal {
    float *values;
    size_t n;
    float std;
    uint64_t seed;
    uint32_t tensor;
    uint64_t first_element;
};

struct cuda_adamw {
    enum dtype dtype; /* of copy */
    float *params;
    void *copy;       /* NULL: none */
    float *moment_m, *moment_v;
    const float *grads;
    size_t n;
    struct adamw adamw;
};

/* X(name): a launcher `void cuda_launch_name(cudaStream_t, const struct cuda_name *)`. */
#define CUDA_KERNELS(X)                                                                            \
    X(set_varying)                                                                                 \
    X(embed_forward)                                                                               \
    X(embed_backward)                                                                              \
    X(norm_forward)                                                                                \
    X(norm_backward)                                                                               \
    X(rotary)                                                                                      \
    X(attention_forward)                                                                           \
    X(attention_backward)                                                                          \
    X(activation_forward)                                                                          \
    X(activation_backward)                                                                         \
    X(residual_dropout)                                                                            \
    X(dropout_backward)                                                                            \
    X(cross_entropy)                                                                               \
    X(bias_backward)                                                                               \
    X(plain_matmul)                                                                                \
    X(sum)                                                                                         \
    X(sum_squares)                                                                                 \
    X(sum_parts)                                                                                   \
    X(add)                                                                                         \
    X(fill)                                                                                        \
    X(narrow)                                                                                      \
    X(random_normal)                                                                               \
    X(adamw)

#define CUDA_DECLARE_LAUNCHER(name)                                                                \
    void cuda_launch_##name(cudaStream_t stream, const struct cuda_##name *args);
CUDA_KERNELS(CUDA_DECLARE_LAUNCHER)
#undef CUDA_DECLARE_LAUNCHER

struct cuda_kernels {
#define CUDA_KERNEL_FIELD(name) void (*name)(cudaStream_t stream, const struct cuda_##name *args);
    CUDA_KERNELS(CUDA_KERNEL_FIELD)
#undef CUDA_KERNEL_FIELD
};

/* The kernels themselves. */
extern const struct cuda_kernels cuda_kernels;

#ifdef __cplusplus
}
#endif

#endif
