/* Activation functions of the MLP and the residual stream's dropout. By rows and ranges.
 * Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

enum { GRAIN = 16384 }; /* elements of one range; a multiple of the lanes */

struct activation_call {
    const struct simd_table *simd;
    void *out; /* din in the backward pass */
    const void *in, *dout;
    size_t inner;
};

static void gelu_range(const void *call, size_t begin, size_t end)
{
    const struct activation_call *c = call;
    void *out = elem_at(c->simd, c->out, begin);
    const void *in = const_elem_at(c->simd, c->in, begin);
    if (c->dout)
        c->simd->gelu_backward(out, const_elem_at(c->simd, c->dout, begin), in, end - begin);
    else
        c->simd->gelu_forward(out, in, end - begin);
}

static void swiglu_rows(const void *call, size_t begin, size_t end)
{
    const struct activation_call *c = call;
    for (size_t r = begin; r < end; r++) {
        const void *in = const_elem_at(c->simd, c->in, r * 2 * c->inner);
        if (c->dout)
            c->simd->swiglu_backward(elem_at(c->simd, c->out, r * 2 * c->inner),
                                     const_elem_at(c->simd, c->dout, r * c->inner), in, c->inner);
        else
            c->simd->swiglu_forward(elem_at(c->simd, c->out, r * c->inner), in, c->inner);
    }
}

static void activate(struct ops *ops, enum activation_kind kind, void *out, const void *dout,
                     const void *in, size_t rows, size_t inner)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct activation_call call = {cpu->simd, out, in, dout, inner};
    const size_t n = rows * inner;
    switch (kind) {
    case ACTIVATION_GELU:
        cpu_parallel(cpu, n, GRAIN, 4 * n, CPU_EVEN, gelu_range, &call);
        return;
    case ACTIVATION_SWIGLU:
        cpu_parallel(cpu, rows, 1, 4 * n, CPU_EVEN, swiglu_rows, &call);
        return;
    }
}

static void activation_forward(struct ops *ops, enum activation_kind kind, void *out,
                               const void *in, size_t rows, size_t inner)
{
    activate(ops, kind, out, NULL, in, rows, inner);
}

static void activation_backward(struct ops *ops, enum activation_kind kind, void *din,
                                const void *dout, const void *in, size_t rows, size_t inner)
{
    activate(ops, kind, din, dout, in, rows, inner);
}

struct residual_call {
    const struct simd_table *simd;
    void *out;
    const void *residual, *branch;
    size_t width;
    const struct dropout *dropout;
};

static void residual_rows(const void *call, size_t begin, size_t end)
{
    const struct residual_call *c = call;
    const struct dropout *d = c->dropout;
    for (size_t r = begin; r < end; r++) {
        struct dropout_row row = {.scale = 1.0f};
        if (d && d->p > 0.0f)
            row =
                (struct dropout_row){.key = philox_key(d->seed, d->step),
                                     .token = d->first_token + (uint32_t)(r % d->seq_len),
                                     .sample = d->first_sample + (uint32_t)(r / d->seq_len),
                                     .stream = philox_stream(d->layer, (enum random_use)d->use, 0),
                                     .threshold = dropout_threshold(d->p),
                                     .scale = dropout_scale(d->p)};
        const size_t at = r * c->width;
        c->simd->dropout_row(elem_at(c->simd, c->out, at),
                             c->residual ? const_elem_at(c->simd, c->residual, at) : NULL,
                             const_elem_at(c->simd, c->branch, at), c->width, &row);
    }
}

static void residual_dropout(struct ops *ops, void *out, const void *residual, const void *branch,
                             size_t rows, size_t width, const struct dropout *dropout)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct residual_call call = {cpu->simd, out, residual, branch, width, dropout};
    cpu_parallel(cpu, rows, 4, rows * width, CPU_EVEN, residual_rows, &call);
}

static void dropout_backward(struct ops *ops, void *dbranch, const void *dout, size_t rows,
                             size_t width, const struct dropout *dropout)
{
    residual_dropout(ops, dbranch, NULL, dout, rows, width, dropout);
}

void cpu_mlp_init(struct cpu_ops *cpu)
{
    cpu->base.activation_forward = activation_forward;
    cpu->base.activation_backward = activation_backward;
    cpu->base.residual_dropout = residual_dropout;
    cpu->base.dropout_backward = dropout_backward;
}
