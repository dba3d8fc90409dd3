/* Causal attention: which thread computes which tile. The arithmetic is in
 * kernels/cpu/simd/attention_*.c. Owns nothing. Main thread.
 *
 * Forward: every (sample, head, tile of queries) stands alone. Backward has two ways with
 * equal bits, since every row of dqkv adds the same parts in the same order in both. With enough
 * key/value heads a (sample, key/value head) is one item and everything is computed
 * once. With few, dq goes by tiles of queries and dk, dv by tiles of keys, which
 * computes the scores twice but gives every thread work.
 *
 * dk and dv are added up in fp32: in dqkv itself where that is fp32, else on the thread's stack,
 * from where they are rounded once. The first way then needs room for a whole sequence, so long
 * ones go the second. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>

/* Floats of dk and dv that are added up on the stack; 1 MiB. */
enum { SUM_FLOATS = 256 * 1024 };

struct attention_call {
    const struct simd_table *simd;
    const struct attention *attention;
    void *out, *dqkv;
    float *lse, *delta;
    const void *dout, *saved_out, *qkv;
    const float *saved_lse;
    size_t n_query_tiles, n_key_tiles, key_tile;
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
        .key_tile = key_tile,
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
        c->simd->attention_delta(c->delta + i * a->seq_len, const_elem_at(c->simd, c->dout, at),
                                 const_elem_at(c->simd, c->saved_out, at), a->seq_len, stride,
                                 a->head_dim);
    }
}

static void backward_part(const struct attention_call *c, const struct key_rows *keys,
                          size_t sample, uint32_t head, size_t query_tile, size_t first_key_tile,
                          size_t end_key_tile, bool want_dq)
{
    c->simd->attention_backward(c->attention, c->dqkv, keys, c->delta, c->dout, c->saved_lse,
                                c->qkv, sample, head, query_tile, first_key_tile, end_key_tile,
                                want_dq);
}

static size_t padded_width(const struct attention *a)
{
    enum { LANES = 16 };
    return ((size_t)a->head_dim + LANES - 1) / LANES * LANES;
}

/* First element of dk in the first row of the sequence; dv comes n_kv_heads heads later. */
static size_t dk_at(const struct attention *a, size_t sample, uint32_t kv_head, size_t *out_row)
{
    *out_row = (a->n_heads + 2 * (size_t)a->n_kv_heads) * a->head_dim;
    return sample * a->seq_len * *out_row + ((size_t)a->n_heads + kv_head) * a->head_dim;
}

/* Where n keys from `first` on are added up; `sums` has room for them unless dqkv is fp32. */
static struct key_rows open_keys(const struct attention_call *c, size_t sample, uint32_t kv_head,
                                 size_t first, size_t n, float *sums)
{
    const struct attention *a = c->attention;
    if (c->simd->elem_bytes == sizeof(float)) {
        size_t row;
        float *dk = (float *)c->dqkv + dk_at(a, sample, kv_head, &row);
        return (struct key_rows){.dk = dk + first * row,
                                 .dv = dk + first * row + (size_t)a->n_kv_heads * a->head_dim,
                                 .row = row,
                                 .first = first};
    }
    const size_t width = padded_width(a);
    assert(2 * n * width <= SUM_FLOATS);
    return (struct key_rows){
        .dk = sums, .dv = sums + n * width, .row = width, .first = first, .padded = true};
}

/* Rounds them into dqkv. */
static void close_keys(const struct attention_call *c, const struct key_rows *keys, size_t sample,
                       uint32_t kv_head, size_t n)
{
    const struct attention *a = c->attention;
    if (c->simd->elem_bytes == sizeof(float))
        return;
    size_t row;
    const size_t dk = dk_at(a, sample, kv_head, &row);
    for (size_t i = 0; i < n; i++) {
        const size_t at = dk + (keys->first + i) * row;
        c->simd->narrow(elem_at(c->simd, c->dqkv, at), keys->dk + i * keys->row, a->head_dim);
        c->simd->narrow(elem_at(c->simd, c->dqkv, at + (size_t)a->n_kv_heads * a->head_dim),
                        keys->dv + i * keys->row, a->head_dim);
    }
}

/* Items are (sample, key/value head). */
static void backward_whole(const void *call, size_t begin, size_t end)
{
    _Alignas(64) float sums[SUM_FLOATS];
    const struct attention_call *c = call;
    const size_t n = c->attention->seq_len;
    for (size_t i = begin; i < end; i++) {
        const size_t sample = i / c->attention->n_kv_heads;
        const uint32_t kv_head = (uint32_t)(i % c->attention->n_kv_heads);
        const struct key_rows keys = open_keys(c, sample, kv_head, 0, n, sums);
        for (uint32_t head = kv_head * c->group; head < (kv_head + 1) * c->group; head++)
            for (size_t tile = 0; tile < c->n_query_tiles; tile++)
                backward_part(c, &keys, sample, head, tile, 0, c->n_key_tiles, true);
        close_keys(c, &keys, sample, kv_head, n);
    }
}

/* Items are (tile of queries, sample, head). */
static void backward_queries(const void *call, size_t begin, size_t end)
{
    const struct attention_call *c = call;
    const size_t heads = c->attention->batch * c->attention->n_heads;
    for (size_t i = begin; i < end; i++) {
        const size_t tile = c->n_query_tiles - 1 - i / heads, head = i % heads;
        backward_part(c, NULL, head / c->attention->n_heads,
                      (uint32_t)(head % c->attention->n_heads), tile, 0, c->n_key_tiles, true);
    }
}

/* Items are (tile of keys, sample, key/value head). */
static void backward_keys(const void *call, size_t begin, size_t end)
{
    enum { TILE_FLOATS = 2 * 64 * 2 * ROTARY_MAX_PAIRS };
    _Alignas(64) float sums[TILE_FLOATS];
    const struct attention_call *c = call;
    const size_t heads = c->attention->batch * c->attention->n_kv_heads;
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / heads, sample = i % heads / c->attention->n_kv_heads;
        const uint32_t kv_head = (uint32_t)(i % c->attention->n_kv_heads);
        const size_t first_key = tile * c->key_tile;
        const size_t left = c->attention->seq_len - first_key;
        const size_t n = left < c->key_tile ? left : c->key_tile;
        const struct key_rows keys = open_keys(c, sample, kv_head, first_key, n, sums);
        const size_t first = first_key / ATTENTION_QUERY_TILE;
        for (uint32_t head = kv_head * c->group; head < (kv_head + 1) * c->group; head++)
            for (size_t query_tile = first; query_tile < c->n_query_tiles; query_tile++)
                backward_part(c, &keys, sample, head, query_tile, tile, tile + 1, false);
        close_keys(c, &keys, sample, kv_head, n);
    }
}

/* Whether backward_whole() has room for its sums. */
static bool whole_heads_fit(const struct attention_call *c)
{
    return c->simd->elem_bytes == sizeof(float) ||
           2 * c->attention->seq_len * padded_width(c->attention) <= SUM_FLOATS;
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
    if (whole_heads_fit(&call) && whole_heads_fill(kv_heads, (size_t)cpu->n_threads)) {
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
