/* AdamW, by ranges. Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

enum { GRAIN = 16384 };

struct adamw_call {
    const struct simd_table *simd;
    float *params, *moment_m, *moment_v;
    void *copy; /* NULL: none */
    const float *grads;
    const struct adamw *adamw;
};

static void update_range(const void *call, size_t begin, size_t end)
{
    const struct adamw_call *c = call;
    c->simd->adamw(c->params + begin, c->copy ? elem_at(c->simd, c->copy, begin) : NULL,
                   c->moment_m + begin, c->moment_v + begin, c->grads + begin, end - begin,
                   c->adamw);
}

static void adamw(struct ops *ops, float *params, void *copy, float *moment_m, float *moment_v,
                  const float *grads, size_t n, const struct adamw *adamw)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct adamw_call call = {.simd = cpu->simd,
                                    .params = params,
                                    .moment_m = moment_m,
                                    .moment_v = moment_v,
                                    .copy = copy,
                                    .grads = grads,
                                    .adamw = adamw};
    cpu_parallel(cpu, n, GRAIN, 4 * n, CPU_EVEN, update_range, &call);
}

void cpu_adamw_init(struct cpu_ops *cpu)
{
    cpu->base.adamw = adamw;
}
