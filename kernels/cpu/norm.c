/* Layer norm and RMS norm. Forward and the gradient of x go by rows; the gradients of weight
 * and bias go by columns, each adding its rows in order. Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

enum { ROWS = 8, COLUMNS = 64 };

struct norm_call {
    const struct simd_table *simd;
    enum norm_kind kind;
    void *out; /* dx in the backward pass */
    float *mean, *rstd;
    const void *dout, *x, *weight, *bias;
    const float *saved_mean, *saved_rstd;
    float *dweight, *dbias;
    size_t rows, width;
    float eps;
};

static void forward_rows(const void *call, size_t begin, size_t end)
{
    const struct norm_call *c = call;
    const size_t at = begin * c->width;
    c->simd->norm_forward(c->kind, elem_at(c->simd, c->out, at), c->mean ? c->mean + begin : NULL,
                          c->rstd + begin, const_elem_at(c->simd, c->x, at), c->weight, c->bias,
                          end - begin, c->width, c->eps);
}

static void norm_forward(struct ops *ops, enum norm_kind kind, void *out, float *mean, float *rstd,
                         const void *x, const void *weight, const void *bias, size_t rows,
                         size_t width, float eps)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct norm_call call = {.simd = cpu->simd,
                                   .kind = kind,
                                   .out = out,
                                   .mean = kind == NORM_LAYER ? mean : NULL,
                                   .rstd = rstd,
                                   .x = x,
                                   .weight = weight,
                                   .bias = kind == NORM_LAYER ? bias : NULL,
                                   .width = width,
                                   .eps = eps};
    cpu_parallel(cpu, rows, ROWS, rows * width, CPU_EVEN, forward_rows, &call);
}

static void backward_rows(const void *call, size_t begin, size_t end)
{
    const struct norm_call *c = call;
    const size_t at = begin * c->width;
    c->simd->norm_backward_rows(
        c->kind, elem_at(c->simd, c->out, at), const_elem_at(c->simd, c->dout, at),
        const_elem_at(c->simd, c->x, at), c->weight, c->saved_mean ? c->saved_mean + begin : NULL,
        c->saved_rstd + begin, end - begin, c->width);
}

static void backward_columns(const void *call, size_t begin, size_t end)
{
    const struct norm_call *c = call;
    c->simd->norm_backward_columns(c->kind, c->dweight + begin, c->dbias ? c->dbias + begin : NULL,
                                   const_elem_at(c->simd, c->dout, begin),
                                   const_elem_at(c->simd, c->x, begin), c->saved_mean,
                                   c->saved_rstd, c->rows, c->width, end - begin);
}

static void norm_backward(struct ops *ops, enum norm_kind kind, void *dx, float *dweight,
                          float *dbias, const void *dout, const void *x, const void *weight,
                          const float *mean, const float *rstd, size_t rows, size_t width)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct norm_call call = {.simd = cpu->simd,
                                   .kind = kind,
                                   .out = dx,
                                   .dout = dout,
                                   .x = x,
                                   .weight = weight,
                                   .saved_mean = kind == NORM_LAYER ? mean : NULL,
                                   .saved_rstd = rstd,
                                   .dweight = dweight,
                                   .dbias = kind == NORM_LAYER ? dbias : NULL,
                                   .rows = rows,
                                   .width = width};
    cpu_parallel(cpu, rows, ROWS, rows * width, CPU_EVEN, backward_rows, &call);
    cpu_parallel(cpu, width, COLUMNS, rows * width, CPU_EVEN, backward_columns, &call);
}

void cpu_norm_init(struct cpu_ops *cpu)
{
    cpu->base.norm_forward = norm_forward;
    cpu->base.norm_backward = norm_backward;
}
