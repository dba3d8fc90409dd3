/* Launchers whose kernels are the CPU device's operations. Arguments are copied by the call;
 * what varies is read from device memory when the operation runs. Owns one table of operations
 * per type, used by the executor's thread only. */
#include "kernels/cuda/emulate/launch_cpu.h"

#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/emulate/emulate.h"

struct ops *emulate_cpu_ops(enum dtype dtype)
{
    static struct ops *tables[2];
    struct ops **table = &tables[dtype == DTYPE_BF16];
    if (*table == NULL) {
        struct failure why = {0};
        if (cpu_ops_new(dtype, 1, table, &why) != STATUS_OK) {
            emulate_misuse("no CPU operations for a launch: %s", why.text);
        }
    }
    return *table;
}

/* An operation that failed would leave its output as it was. */
static void check(struct ops *ops)
{
    struct failure why = {0};
    if (ops->check(ops, &why) != STATUS_OK) {
        emulate_misuse("%s: %s", emulate_running(), why.text);
    }
}

static struct dropout with_varying(struct dropout dropout, const struct cuda_varying *varying)
{
    if (dropout.p > 0) {
        if (varying == NULL) {
            emulate_misuse("%s: dropout without `varying`", emulate_running());
        }
        dropout.step = varying->step;
        dropout.first_sample = varying->first_sample;
    }
    return dropout;
}

/* RUN(name) is the body of a kernel that has its arguments in `a` and a table in `ops`;
 * LAUNCHER then queues it. */
#define RUN(name, table_dtype)                                                                     \
    static void do_##name(struct ops *ops, const struct cuda_##name *a);                           \
    static void run_##name(void *closure)                                                          \
    {                                                                                              \
        const struct cuda_##name *a = closure;                                                     \
        struct ops *ops = emulate_cpu_ops(table_dtype);                                            \
        do_##name(ops, a);                                                                         \
        check(ops);                                                                                \
    }                                                                                              \
    static void launch_##name(cudaStream_t stream, const struct cuda_##name *args)                 \
    {                                                                                              \
        emulate_enqueue(stream, #name, run_##name, args, sizeof *args);                            \
    }                                                                                              \
    static void do_##name(struct ops *ops, const struct cuda_##name *a)

RUN(set_varying, DTYPE_FP32)
{
    (void)ops;
    *a->varying = a->value;
}

RUN(embed_forward, a->dtype)
{
    ops->embed_forward(ops, a->out, a->tokens, a->positions, a->wte, a->wpe, a->rows, a->width);
}

RUN(embed_backward, a->dtype)
{
    ops->embed_backward(ops, a->dwte, a->dwpe, a->dout, a->tokens, a->positions, a->rows, a->width);
}

RUN(norm_forward, a->dtype)
{
    ops->norm_forward(ops, a->kind, a->out, a->mean, a->rstd, a->x, a->weight, a->bias, a->rows,
                      a->width, a->eps);
}

RUN(norm_backward, a->dtype)
{
    ops->norm_backward(ops, a->kind, a->dx, a->dweight, a->dbias, a->dout, a->x, a->weight, a->mean,
                       a->rstd, a->rows, a->width);
}

RUN(rotary, a->dtype)
{
    ops->rotary(ops, a->qkv, a->positions, &a->rotary, a->rows, a->n_heads, a->n_kv_heads,
                a->head_dim, a->direction);
}

RUN(attention_forward, a->dtype)
{
    struct attention attention = a->attention;
    attention.dropout = with_varying(attention.dropout, a->varying);
    ops->attention_forward(ops, &attention, a->out, a->lse, a->qkv);
}

RUN(attention_backward, a->dtype)
{
    struct attention attention = a->attention;
    attention.dropout = with_varying(attention.dropout, a->varying);
    ops->attention_backward(ops, &attention, a->dqkv, a->delta, a->dout, a->out, a->lse, a->qkv);
}

RUN(activation_forward, a->dtype)
{
    ops->activation_forward(ops, a->kind, a->out, a->in, a->rows, a->inner);
}

RUN(activation_backward, a->dtype)
{
    ops->activation_backward(ops, a->kind, a->din, a->dout, a->in, a->rows, a->inner);
}

RUN(residual_dropout, a->dtype)
{
    const struct dropout dropout = with_varying(a->dropout, a->varying);
    ops->residual_dropout(ops, a->out, a->residual, a->branch, a->rows, a->width, &dropout);
}

RUN(dropout_backward, a->dtype)
{
    const struct dropout dropout = with_varying(a->dropout, a->varying);
    ops->dropout_backward(ops, a->dbranch, a->dout, a->rows, a->width, &dropout);
}

RUN(cross_entropy, a->dtype)
{
    ops->cross_entropy(ops, a->losses, a->logits, a->labels, a->rows, a->vocab, a->grad_scale,
                       a->with_gradient);
}

RUN(bias_backward, a->dtype)
{
    ops->bias_backward(ops, a->dbias, a->dout, a->rows, a->cols);
}

RUN(plain_matmul, a->dtype)
{
    struct matmul call = a->call;
    const size_t bytes = ops->matmul_scratch(ops, &call);
    call.scratch = bytes > 0 ? malloc(bytes) : NULL;
    if (bytes > 0 && call.scratch == NULL) {
        emulate_misuse("no host memory for a product's scratch: %zu bytes", bytes);
    }
    ops->matmul(ops, &call);
    free(call.scratch);
}

RUN(sum, DTYPE_FP32)
{
    ops->sum(ops, a->out, a->values, a->n);
}

RUN(sum_squares, DTYPE_FP32)
{
    /* The CPU needs no room for partial sums; whoever reads them does not read what was there. */
    memset(a->partials, 0xff, CUDA_SUM_PARTIALS * sizeof *a->partials);
    ops->sum_squares(ops, a->out, a->values, a->n);
}

RUN(sum_parts, DTYPE_FP32)
{
    ops->sum_parts(ops, a->out, a->parts, a->n_parts, a->stride, a->n);
}

RUN(add, DTYPE_FP32)
{
    ops->add(ops, a->dst, a->src, a->n);
}

RUN(fill, DTYPE_FP32)
{
    ops->fill(ops, a->values, a->n, a->value);
}

RUN(narrow, a->dtype)
{
    ops->narrow(ops, a->dst, a->src, a->n);
}

RUN(random_normal, DTYPE_FP32)
{
    ops->random_normal(ops, a->values, a->n, a->std, a->seed, a->tensor, a->first_element);
}

RUN(adamw, a->dtype)
{
    ops->adamw(ops, a->params, a->copy, a->moment_m, a->moment_v, a->grads, a->n, &a->adamw);
}

const struct cuda_kernels cuda_kernels_cpu = {
#define FIELD(name) .name = launch_##name,
    CUDA_KERNELS(FIELD)
#undef FIELD
};
