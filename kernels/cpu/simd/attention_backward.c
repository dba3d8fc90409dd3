/* Attention backward for one tile of queries of one head against a range of key tiles.
 *
 * Probabilities are computed again from the saved log-sum-exp (Dao et al., 2022). With P the
 * probabilities, K the dropout factors and D = dout V^T:
 *     dV = (P K)^T dout,  dS = P (D K - delta),  dQ = scale dS K,  dK = scale dS^T Q.
 * The caller's loops decide who owns which rows of dqkv; the order in which a row adds its
 * parts is always: heads of the group ascending, then tiles ascending. See simd_table.h. */
#include "kernels/cpu/simd/attention.h"

/* Operands of a tile of queries, both ways round: lanes are queries in the transposed ones. */
struct query_side {
    _Alignas(64) float queries[QUERIES * MAX_WIDTH], queries_t[MAX_WIDTH * QUERIES];
    _Alignas(64) float dout[QUERIES * MAX_WIDTH], dout_t[MAX_WIDTH * QUERIES];
    _Alignas(64) float dq[QUERIES * MAX_WIDTH];
    _Alignas(64) float lse[QUERIES], delta[QUERIES];
};

struct key_side {
    _Alignas(64) float keys[KEY_FLOATS], values[KEY_FLOATS];
    _Alignas(64) float padded[KEY_FLOATS];         /* dk or dv, see add_to_keys() */
    _Alignas(64) float scores[MAX_KEYS * QUERIES]; /* P, later P K */
    _Alignas(64) float slopes[MAX_KEYS * QUERIES]; /* D, later dS */
    _Alignas(64) float keep[MAX_KEYS * QUERIES];
};
/* Both live on the stack of a thread. */
_Static_assert(sizeof(struct query_side) + sizeof(struct key_side) < 512 * 1024, "stack");

static void load_queries(const struct meeting *m, struct query_side *side, const elem *q,
                         size_t q_row, const elem *dout, size_t dout_row, size_t width)
{
    const size_t head_dim = m->attention->head_dim, n = m->n_queries;
    const float scale = m->attention->scale;
    tile_copy(side->queries, width, q, q_row, n, head_dim, scale);
    tile_copy(side->dout, width, dout, dout_row, n, head_dim, 1.0f);
    tile_transpose(side->queries_t, QUERIES, q, q_row, n, head_dim, scale);
    tile_transpose(side->dout_t, QUERIES, dout, dout_row, n, head_dim, 1.0f);
    const size_t rest = (width - head_dim) * QUERIES * sizeof(float);
    memset(side->queries_t + head_dim * QUERIES, 0, rest);
    memset(side->dout_t + head_dim * QUERIES, 0, rest);
}

/* Queries beyond the tile's end, and those that met no key, get probabilities of 0. */
static void load_saved(const struct meeting *m, struct query_side *side, const float *lse,
                       const float *delta)
{
    const size_t at =
        (m->sample * m->attention->n_heads + m->head) * m->attention->seq_len + m->first_query;
    for (size_t q = 0; q < QUERIES; q++) {
        const bool there = q < m->n_queries && lse[at + q] > -INFINITY;
        side->lse[q] = there ? lse[at + q] : INFINITY;
        side->delta[q] = there ? delta[at + q] : 0.0f;
    }
}

/* scores -> P K and slopes -> dS. */
static void differentiate(const struct meeting *m, const struct query_side *side,
                          struct key_side *k)
{
    const bool dropping = m->attention->dropout.p > 0.0f;
    for (size_t v = 0; v < n_query_vectors(m); v++) {
        const vec lse = vec_load(side->lse + v * LANES);
        const vec delta = vec_load(side->delta + v * LANES);
        for (size_t i = v * LANES; i < m->n_keys * QUERIES; i += QUERIES) {
            const vec p = vec_exp(vec_load(k->scores + i) - lse);
            vec d = vec_load(k->slopes + i);
            if (dropping) {
                const vec keep = vec_load(k->keep + i);
                d *= keep;
                vec_store(k->scores + i, p * keep);
            } else {
                vec_store(k->scores + i, p);
            }
            vec_store(k->slopes + i, p * (d - delta));
        }
    }
}

/* dk or dv of a tile: straight into rows that have room for whole vectors, else by way of some
 * that have. */
static void add_to_keys(const struct meeting *m, const struct key_rows *keys, float *rows,
                        float *padded, const float *scores, const float *queries, size_t width,
                        bool accumulate)
{
    const size_t head_dim = m->attention->head_dim;
    rows += (m->first_key - keys->first) * keys->row;
    if (width == head_dim || keys->padded) {
        multiply_to_keys(m, rows, keys->row, scores, queries, width, accumulate);
        return;
    }
    for (size_t key = 0; accumulate && key < m->n_keys; key++) {
        memcpy(padded + key * width, rows + key * keys->row, head_dim * sizeof *rows);
        memset(padded + key * width + head_dim, 0, (width - head_dim) * sizeof *rows);
    }
    multiply_to_keys(m, padded, width, scores, queries, width, accumulate);
    for (size_t key = 0; key < m->n_keys; key++)
        memcpy(rows + key * keys->row, padded + key * width, head_dim * sizeof *rows);
}

static void store_dq(elem *dq, size_t row, const float *rows, size_t width, size_t n_rows,
                     size_t head_dim, float scale)
{
    for (size_t r = 0; r < n_rows; r++)
        for (size_t i = 0; i < head_dim; i += LANES)
            elem_store_part(dq + r * row + i, vec_load(rows + r * width + i) * scale, head_dim - i);
}

void SIMD(attention_delta)(float *delta, const void *dout_rows, const void *out_rows, size_t rows,
                           size_t stride, size_t head_dim)
{
    const elem *dout = dout_rows, *out = out_rows;
    for (size_t r = 0; r < rows; r++, dout += stride, out += stride) {
        vec sum = vec_set(0.0f);
        for (size_t i = 0; i < head_dim; i += LANES)
            sum = vec_fma(elem_load_part(dout + i, head_dim - i, 0.0f),
                          elem_load_part(out + i, head_dim - i, 0.0f), sum);
        delta[r] = vec_sum(sum);
    }
}

void SIMD(attention_backward)(const struct attention *attention, void *dqkv,
                              const struct key_rows *keys, const float *delta, const void *dout,
                              const float *lse, const void *qkv_rows, size_t sample, uint32_t head,
                              size_t query_tile, size_t first_key_tile, size_t end_key_tile,
                              bool want_dq)
{
    const elem *qkv = qkv_rows;
    struct query_side side;
    struct key_side k;
    const size_t head_dim = attention->head_dim, width = padded_width(attention->head_dim);
    const size_t dout_row = attention->n_heads * head_dim;
    const size_t row = (attention->n_heads + 2 * (size_t)attention->n_kv_heads) * head_dim;
    const uint32_t group = attention->n_heads / attention->n_kv_heads, kv_head = head / group;
    const size_t tile = attention_key_tile(attention->head_dim);
    struct meeting m = {.attention = attention,
                        .sample = sample,
                        .head = head,
                        .first_query = query_tile * QUERIES};
    m.n_queries = attention->seq_len - m.first_query;
    if (m.n_queries > QUERIES)
        m.n_queries = QUERIES;

    const size_t sequence = sample * attention->seq_len;
    const size_t q_at = (sequence + m.first_query) * row + head * head_dim;
    const size_t k_at = sequence * row + (attention->n_heads + kv_head) * head_dim;
    const size_t v_at = k_at + attention->n_kv_heads * head_dim;
    load_queries(&m, &side, qkv + q_at, row,
                 (const elem *)dout + (sequence + m.first_query) * dout_row + head * head_dim,
                 dout_row, width);
    load_saved(&m, &side, lse, delta);

    bool any = false;
    const size_t end = m.first_query + m.n_queries;
    for (size_t key_tile = first_key_tile; key_tile < end_key_tile; key_tile++) {
        m.first_key = key_tile * tile;
        if (m.first_key >= end)
            break;
        m.n_keys = end - m.first_key < tile ? end - m.first_key : tile;
        if (documents_apart(&m))
            continue;
        const size_t at = m.first_key * row;
        tile_copy(k.keys, width, qkv + k_at + at, row, m.n_keys, head_dim, 1.0f);
        tile_copy(k.values, width, qkv + v_at + at, row, m.n_keys, head_dim, 1.0f);
        multiply_scores(&m, k.scores, k.keys, side.queries_t, width);
        multiply_scores(&m, k.slopes, k.values, side.dout_t, width);
        mask_scores(&m, k.scores, -INFINITY);
        mask_scores(&m, k.slopes, 0.0f);
        if (attention->dropout.p > 0.0f)
            draw_keep(&m, k.keep);
        differentiate(&m, &side, &k);
        if (keys) {
            /* The first part that a key receives is its own tile's, of the first head. */
            const bool accumulate = head % group != 0 || m.first_key / QUERIES != query_tile;
            add_to_keys(&m, keys, keys->dv, k.padded, k.scores, side.dout, width, accumulate);
            add_to_keys(&m, keys, keys->dk, k.padded, k.slopes, side.queries, width, accumulate);
        }
        if (want_dq)
            multiply_to_queries(&m, side.dq, k.slopes, k.keys, width, any);
        any = true;
    }
    if (want_dq)
        store_dq((elem *)dqkv + q_at, row, side.dq, width, m.n_queries, head_dim, attention->scale);
}
