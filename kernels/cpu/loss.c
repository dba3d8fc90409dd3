/* Cross-entropy, by rows, and the sum of the rows' losses. Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

struct loss_call {
    const struct simd_table *simd;
    float *losses;
    void *logits;
    const int32_t *labels;
    size_t vocab;
    float grad_scale;
    bool with_gradient;
};

static void loss_rows(const void *call, size_t begin, size_t end)
{
    const struct loss_call *c = call;
    for (size_t r = begin; r < end; r++)
        c->losses[r] =
            c->simd->cross_entropy_row(elem_at(c->simd, c->logits, r * c->vocab), c->vocab,
                                       c->labels[r], c->grad_scale, c->with_gradient);
}

static void cross_entropy(struct ops *ops, float *losses, void *logits, const int32_t *labels,
                          size_t rows, size_t vocab, float grad_scale, bool with_gradient)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct loss_call call = {cpu->simd, losses,     logits,       labels,
                                   vocab,     grad_scale, with_gradient};
    cpu_parallel(cpu, rows, 1, 4 * rows * vocab, CPU_EVEN, loss_rows, &call);
}

/* One value after the other: losses are few, and the order is the one anybody expects. */
static void sum(struct ops *ops, double *out, const float *values, size_t n)
{
    (void)ops;
    double total = 0.0;
    for (size_t i = 0; i < n; i++)
        total += (double)values[i];
    *out = total;
}

void cpu_loss_init(struct cpu_ops *cpu)
{
    cpu->base.cross_entropy = cross_entropy;
    cpu->base.sum = sum;
}
