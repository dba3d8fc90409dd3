/* Normal random values, by ranges. Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

enum { GRAIN = 16384 };

struct normal_call {
    const struct simd_table *simd;
    float *values;
    float std;
    struct philox_key key;
    uint32_t tensor;
    uint64_t first_element;
};

static void normal_range(const void *call, size_t begin, size_t end)
{
    const struct normal_call *c = call;
    c->simd->random_normal(c->values + begin, end - begin, c->std, c->key, c->tensor,
                           c->first_element + begin);
}

static void random_normal(struct ops *ops, float *values, size_t n, float std, uint64_t seed,
                          uint32_t tensor, uint64_t first_element)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct normal_call call = {cpu->simd,           values, std,
                                     philox_key(seed, 0), tensor, first_element};
    cpu_parallel(cpu, n, GRAIN, 16 * n, CPU_EVEN, normal_range, &call);
}

void cpu_random_init(struct cpu_ops *cpu)
{
    cpu->base.random_normal = random_normal;
}
