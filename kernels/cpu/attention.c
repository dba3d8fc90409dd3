/* Causal attention: which thread computes which tile. The arithmetic is in
 * kernels/cpu/simd/attention_*.c. Owns nothing. Main thread.
 *
 * Forward: every (sample, head, tile of queries) stands alone. Backward has two ways with
 * equal bits, since every row of dqkv adds the same parts in the same order in both. With enough
 * key/value heads a (sample, key/value head) is one item and everything is computed
 * once. With few, dq goes by tiles of queries and dk, dv by tiles of keys, which
 * computes the scores twice but gives every thread work. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>

struct attention_call {
    const struct simd_table *simd;
    const struct attention *attention;
    float *out, *lse; /* forward */
    float *dqkv, *delta;
    const float *dout, *saved_out, *saved_lse, *qkv;
    size_t n_query_tiles, n_key_tiles;
    uint32_t group; /* query heads per key/value head */
};

static struct attention_call call_of(const struct cpu_ops *cpu, const struct attention *attention)
{
    assert(attention->head_dim <= 2 * ROTARY_MAX_PAIRS);
    assert(attention->n_heads % attention->n_kv_heads == 0);
    const size_t key_tile = attention_key_tile(attention->head_dim);
    return (struct attention_call){
        .simd = cpu->simd,
        .attention = attention,
        .n_query_tiles = (attention->seq_len + ATTENTION_QUERY_TILE - 1) / ATTENTION_QUERY_TILE,
        .n_key_tiles = (attention->seq_len + key_tile - 1) / key_tile,
        .group = attention->n_heads / attention->n_kv_heads};
}

/* Elements touched, for the decision to stay on one thread: pairs times the head's width,
 * of which vectors do sixteen at a time. */
static size_t work_of(const struct attention *a)
{
    return a->batch * a->n_heads * a->seq_len * a->seq_len * a->head_dim / 16;
}

static void forward_tiles(const void *call, size_t begin, size_t end)
{
    const struct attention_call *c = call;
    for (size_t i = begin; i < end; i++) {
        /* Head by head, so that its keys and values stay in the cache for all its tiles. Late
         * tiles see the most keys: they go first. */
        const size_t tile = c->n_query_tiles - 1 - i % c->n_query_tiles;
        const size_t head = i / c->n_query_tiles;
        c->simd->attention_forward(c->attention, c->out, c->lse, c->qkv,
                                   head / c->attention->n_heads,
                                   (uint32_t)(head % c->attention->n_heads), tile);
    }
}

static void attention_forward(struct ops *ops, const struct attention *attention, void *out,
                              float *lse, const void *qkv)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    struct attention_call call = call_of(cpu, attention);
    call.out = out;
    call.lse = lse;
    call.qkv = qkv;
    const size_t heads = attention->batch * attention->n_heads;
    /* Whole heads where there are many, so that no two threads fetch the same keys. */
    const size_t grain = heads >= 16 ? call.n_query_tiles : 1;
    cpu_parallel(cpu, call.n_query_tiles * heads, grain, work_of(attention), CPU_UNEVEN,
                 forward_tiles, &call);
}

static void delta_heads(const void *call, size_t begin, size_t end)
{
    const struct attention_call *c = call;
    const struct attention *a = c->attention;
    const size_t stride = (size_t)a->n_heads * a->head_dim;
    for (size_t i = begin; i < end; i++) {
        const size_t at = i / a->n_heads * a->seq_len * stride + i % a->n_heads * a->head_dim;
        c->simd->attention_delta(c->delta + i * a->seq_len, c->dout + at, c->saved_out + at,
                                 a->seq_len, stride, a->head_dim);
    }
}

static void backward_part(const struct attention_call *c, size_t sample, uint32_t head,
                          size_t query_tile, size_t first_key_tile, size_t end_key_tile,
                          bool want_dq, bool want_dkv)
{
    c->simd->attention_backward(c->attention, c->dqkv, c->delta, c->dout, c->saved_lse, c->qkv,
                                sample, head, query_tile, first_key_tile, end_key_tile, want_dq,
                                want_dkv);
}

/* Items are (sample, key/value head). */
static void backward_whole(const void *call, size_t begin, size_t end)
{
    const struct attention_call *c = call;
    for (size_t i = begin; i < end; i++) {
        const size_t sample = i / c->attention->n_kv_heads;
        const uint32_t kv_head = (uint32_t)(i % c->attention->n_kv_heads);
        for (uint32_t head = kv_head * c->group; head < (kv_head + 1) * c->group; head++)
            for (size_t tile = 0; tile < c->n_query_tiles; tile++)
                backward_part(c, sample, head, tile, 0, c->n_key_tiles, true, true);
    }
}

/* Items are (tile of queries, sample, head). */
static void backward_queries(const void *call, size_t begin, size_t end)
{
    const struct attention_call *c = call;
    const size_t heads = c->attention->batch * c->attention->n_heads;
    for (size_t i = begin; i < end; i++) {
        const size_t tile = c->n_query_tiles - 1 - i / heads, head = i % heads;
        backward_part(c, head / c->attention->n_heads, (uint32_t)(head % c->attention->n_heads),
                      tile, 0, c->n_key_tiles, true, false);
    }
}

/* Items are (tile of keys, sample, key/value head). */
static void backward_keys(const void *call, size_t begin, size_t end)
{
    const struct attention_call *c = call;
    const size_t heads = c->attention->batch * c->attention->n_kv_heads;
    const size_t key_tile = attention_key_tile(c->attention->head_dim);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / heads, sample = i % heads / c->attention->n_kv_heads;
        const uint32_t kv_head = (uint32_t)(i % c->attention->n_kv_heads);
        const size_t first = tile * key_tile / ATTENTION_QUERY_TILE;
        for (uint32_t head = kv_head * c->group; head < (kv_head + 1) * c->group; head++)
            for (size_t query_tile = first; query_tile < c->n_query_tiles; query_tile++)
                backward_part(c, sample, head, query_tile, tile, tile + 1, false, true);
    }
}

/* The second way costs 7 products for 5, so it pays when the first would leave the threads
 * idle for more than that. */
static bool whole_heads_fill(size_t n_items, size_t n_threads)
{
    const size_t rounds = (n_items + n_threads - 1) / n_threads;
    return 7 * n_items >= 5 * rounds * n_threads;
}

static void attention_backward(struct ops *ops, const struct attention *attention, void *dqkv,
                               float *delta, const void *dout, const void *out, const float *lse,
                               const void *qkv)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    struct attention_call call = call_of(cpu, attention);
    call.dqkv = dqkv;
    call.delta = delta;
    call.dout = dout;
    call.saved_out = out;
    call.saved_lse = lse;
    call.qkv = qkv;
    const size_t heads = attention->batch * attention->n_heads;
    const size_t kv_heads = attention->batch * attention->n_kv_heads;
    const size_t work = work_of(attention);
    cpu_parallel(cpu, heads, 1, heads * attention->seq_len * attention->head_dim, CPU_EVEN,
                 delta_heads, &call);
    if (whole_heads_fill(kv_heads, (size_t)cpu->n_threads)) {
        cpu_parallel(cpu, kv_heads, 1, work, CPU_UNEVEN, backward_whole, &call);
    } else {
        cpu_parallel(cpu, call.n_query_tiles * heads, 1, work, CPU_UNEVEN, backward_queries, &call);
        cpu_parallel(cpu, call.n_key_tiles * kv_heads, 1, work, CPU_UNEVEN, backward_keys, &call);
    }
}

void cpu_attention_init(struct cpu_ops *cpu)
{
    cpu->base.attention_forward = attention_forward;
    cpu->base.attention_backward = attention_backward;
}
