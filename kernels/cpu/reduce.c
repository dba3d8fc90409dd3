/* Sums, moves and conversions over ranges. Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <string.h>

enum {
    GRAIN = 16384,           /* elements of one range */
    BYTES_GRAIN = 64 * 1024, /* bytes of one range */
    BLOCKS_AT_ONCE = 1024    /* block sums that are kept before they are added */
};

struct squares_call {
    const struct simd_table *simd;
    const float *values;
    size_t n;
    double *sums; /* one per block */
};

static void square_blocks(const void *call, size_t begin, size_t end)
{
    const struct squares_call *c = call;
    for (size_t block = begin; block < end; block++) {
        const size_t first = block * SUM_SQUARES_BLOCK;
        const size_t left = c->n - first;
        c->sums[block] = c->simd->sum_squares(c->values + first,
                                              left < SUM_SQUARES_BLOCK ? left : SUM_SQUARES_BLOCK);
    }
}

/* Blocks of fixed size are summed apart and added in order, whoever summed them. */
static void sum_squares(struct ops *ops, double *out, const float *values, size_t n)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    double sums[BLOCKS_AT_ONCE];
    double total = 0.0;
    while (n > 0) {
        const size_t most = (size_t)BLOCKS_AT_ONCE * SUM_SQUARES_BLOCK;
        const size_t now = n < most ? n : most;
        const size_t n_blocks = (now + SUM_SQUARES_BLOCK - 1) / SUM_SQUARES_BLOCK;
        const struct squares_call call = {cpu->simd, values, now, sums};
        cpu_parallel(cpu, n_blocks, 4, now, CPU_EVEN, square_blocks, &call);
        for (size_t i = 0; i < n_blocks; i++)
            total += sums[i];
        values += now;
        n -= now;
    }
    *out = total;
}

struct range_call {
    const struct simd_table *simd;
    float *dst;
    const float *src;
    size_t n_parts, stride;
    float value;
};

static void parts_range(const void *call, size_t begin, size_t end)
{
    const struct range_call *c = call;
    c->simd->sum_parts(c->dst + begin, c->src + begin, c->n_parts, c->stride, end - begin);
}

static void sum_parts(struct ops *ops, float *out, const float *parts, size_t n_parts,
                      size_t stride, size_t n)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct range_call call = {cpu->simd, out, parts, n_parts, stride, 0.0f};
    cpu_parallel(cpu, n, GRAIN, n * n_parts, CPU_EVEN, parts_range, &call);
}

static void add_range(const void *call, size_t begin, size_t end)
{
    const struct range_call *c = call;
    c->simd->add(c->dst + begin, c->src + begin, end - begin);
}

static void add(struct ops *ops, float *dst, const float *src, size_t n)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct range_call call = {.simd = cpu->simd, .dst = dst, .src = src};
    cpu_parallel(cpu, n, GRAIN, n, CPU_EVEN, add_range, &call);
}

static void fill_range(const void *call, size_t begin, size_t end)
{
    const struct range_call *c = call;
    c->simd->fill(c->dst + begin, end - begin, c->value);
}

static void fill(struct ops *ops, float *values, size_t n, float value)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct range_call call = {.simd = cpu->simd, .dst = values, .value = value};
    cpu_parallel(cpu, n, GRAIN, n, CPU_EVEN, fill_range, &call);
}

struct narrow_call {
    const struct simd_table *simd;
    void *dst;
    const float *src;
};

static void narrow_range(const void *call, size_t begin, size_t end)
{
    const struct narrow_call *c = call;
    c->simd->narrow(elem_at(c->simd, c->dst, begin), c->src + begin, end - begin);
}

static void narrow(struct ops *ops, void *dst, const float *src, size_t n)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct narrow_call call = {cpu->simd, dst, src};
    cpu_parallel(cpu, n, GRAIN, n, CPU_EVEN, narrow_range, &call);
}

struct bytes_call {
    unsigned char *dst;
    const unsigned char *src; /* NULL: zero */
};

static void bytes_range(const void *call, size_t begin, size_t end)
{
    const struct bytes_call *c = call;
    if (c->src)
        memcpy(c->dst + begin, c->src + begin, end - begin);
    else
        memset(c->dst + begin, 0, end - begin);
}

static void zero(struct ops *ops, void *dst, size_t bytes)
{
    const struct bytes_call call = {dst, NULL};
    cpu_parallel(cpu_of(ops), bytes, BYTES_GRAIN, bytes / 4, CPU_EVEN, bytes_range, &call);
}

static void copy(struct ops *ops, void *dst, const void *src, size_t bytes)
{
    if (dst == src)
        return;
    const struct bytes_call call = {dst, src};
    cpu_parallel(cpu_of(ops), bytes, BYTES_GRAIN, bytes / 4, CPU_EVEN, bytes_range, &call);
}

void cpu_reduce_init(struct cpu_ops *cpu)
{
    cpu->base.sum_squares = sum_squares;
    cpu->base.sum_parts = sum_parts;
    cpu->base.add = add;
    cpu->base.fill = fill;
    cpu->base.zero = zero;
    cpu->base.copy = copy;
    cpu->base.narrow = narrow;
}
