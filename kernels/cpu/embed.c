/* Embedding tables. Forward goes by rows; the gradient goes by columns, so that every
 * element of a table adds its rows in order. Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

struct embed_call {
    const struct simd_table *simd;
    void *out;
    const void *wte, *wpe;
    float *dwte, *dwpe;
    const void *dout;
    const int32_t *tokens, *positions;
    size_t rows, width;
};

static void forward_rows(const void *call, size_t begin, size_t end)
{
    const struct embed_call *c = call;
    for (size_t r = begin; r < end; r++) {
        const size_t token = (size_t)c->tokens[r] * c->width;
        const void *position = NULL;
        if (c->wpe)
            position = const_elem_at(c->simd, c->wpe, (size_t)c->positions[r] * c->width);
        c->simd->embed_row(elem_at(c->simd, c->out, r * c->width),
                           const_elem_at(c->simd, c->wte, token), position, c->width);
    }
}

static void embed_forward(struct ops *ops, void *out, const int32_t *tokens,
                          const int32_t *positions, const void *wte, const void *wpe, size_t rows,
                          size_t width)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct embed_call call = {.simd = cpu->simd,
                                    .out = out,
                                    .wte = wte,
                                    .wpe = wpe,
                                    .tokens = tokens,
                                    .positions = positions,
                                    .width = width};
    cpu_parallel(cpu, rows, 4, rows * width, CPU_EVEN, forward_rows, &call);
}

static void backward_columns(const void *call, size_t begin, size_t end)
{
    const struct embed_call *c = call;
    for (size_t r = 0; r < c->rows; r++) {
        const void *dout = const_elem_at(c->simd, c->dout, r * c->width + begin);
        c->simd->accumulate(c->dwte + (size_t)c->tokens[r] * c->width + begin, dout, end - begin);
        if (c->dwpe)
            c->simd->accumulate(c->dwpe + (size_t)c->positions[r] * c->width + begin, dout,
                                end - begin);
    }
}

static void embed_backward(struct ops *ops, float *dwte, float *dwpe, const void *dout,
                           const int32_t *tokens, const int32_t *positions, size_t rows,
                           size_t width)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct embed_call call = {.simd = cpu->simd,
                                    .dwte = dwte,
                                    .dwpe = dwpe,
                                    .dout = dout,
                                    .tokens = tokens,
                                    .positions = positions,
                                    .rows = rows,
                                    .width = width};
    cpu_parallel(cpu, width, 64, rows * width, CPU_EVEN, backward_columns, &call);
}

void cpu_embed_init(struct cpu_ops *cpu)
{
    cpu->base.embed_forward = embed_forward;
    cpu->base.embed_backward = embed_backward;
}
