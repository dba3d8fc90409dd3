/* Attention forward for one tile of queries of one head: keys pass by in tiles, with a
 * running maximum and sum per query (Milakov and Gimelshein, 2018; Dao et al., 2022), so no
 * matrix over all keys exists. See simd_table.h. */
#include "kernels/cpu/simd/attention.h"

/* State of the tile's queries while keys pass by. */
struct running {
    vec most[QUERY_VECTORS]; /* greatest score so far */
    vec sum[QUERY_VECTORS];  /* of exp(score - most) */
    float shrink[QUERIES];   /* what the last tile multiplied earlier results by */
};

/* scores -> exp(score - most), updating the running state. */
static void soften(const struct meeting *m, struct running *state, float *scores)
{
    for (size_t v = 0; v < n_query_vectors(m); v++) {
        float *column = scores + v * LANES;
        vec most = state->most[v];
        for (size_t key = 0; key < m->n_keys; key++)
            most = vec_max(vec_load(column + key * QUERIES), most);
        /* A query that has met no key yet keeps -infinity; 0 in its place avoids inf - inf. */
        const vec base = vec_select(most == vec_set(-INFINITY), vec_set(0.0f), most);
        const vec shrink = vec_exp(state->most[v] - base);
        vec sum = vec_set(0.0f);
        for (size_t key = 0; key < m->n_keys; key++) {
            const vec p = vec_exp(vec_load(column + key * QUERIES) - base);
            sum += p;
            vec_store(column + key * QUERIES, p);
        }
        state->most[v] = most;
        state->sum[v] = vec_fma(state->sum[v], shrink, sum);
        vec_store(state->shrink + v * LANES, shrink);
    }
}

static void shrink_rows(float *rows, const float *factor, size_t n_rows, size_t width)
{
    for (size_t r = 0; r < n_rows; r++)
        if (factor[r] != 1.0f)
            for (size_t i = 0; i < width; i += LANES)
                vec_store(rows + r * width + i, vec_load(rows + r * width + i) * factor[r]);
}

static void finish(const struct meeting *m, const struct running *state, elem *out, float *lse,
                   const float *rows, size_t width)
{
    const struct attention *a = m->attention;
    const size_t out_row = (size_t)a->n_heads * a->head_dim;
    float most[QUERIES], sum[QUERIES];
    for (size_t v = 0; v < QUERY_VECTORS; v++) {
        vec_store(most + v * LANES, state->most[v]);
        vec_store(sum + v * LANES, state->sum[v]);
    }
    out += (m->sample * a->seq_len + m->first_query) * out_row + (size_t)m->head * a->head_dim;
    lse += (m->sample * a->n_heads + m->head) * a->seq_len + m->first_query;
    for (size_t q = 0; q < m->n_queries; q++) {
        const float factor = sum[q] > 0.0f ? 1.0f / sum[q] : 0.0f;
        for (size_t i = 0; i < a->head_dim; i += LANES)
            elem_store_part(out + q * out_row + i, vec_load(rows + q * width + i) * factor,
                            a->head_dim - i);
        lse[q] = most[q] + logf(sum[q]);
    }
}

void SIMD(attention_forward)(const struct attention *attention, void *out, float *lse,
                             const void *qkv, size_t sample, uint32_t head, size_t query_tile)
{
    _Alignas(64) float queries[MAX_WIDTH * QUERIES]; /* transposed and scaled */
    _Alignas(64) float keys[KEY_FLOATS], values[KEY_FLOATS];
    _Alignas(64) float scores[MAX_KEYS * QUERIES], keep[MAX_KEYS * QUERIES];
    _Alignas(64) float rows[QUERIES * MAX_WIDTH]; /* the output, not yet divided by the sum */
    const size_t head_dim = attention->head_dim, width = padded_width(attention->head_dim);
    const size_t row =
        (attention->n_heads + 2 * (size_t)attention->n_kv_heads) * attention->head_dim;
    const uint32_t kv_head = head / (attention->n_heads / attention->n_kv_heads);
    struct meeting m = {.attention = attention,
                        .sample = sample,
                        .head = head,
                        .first_query = query_tile * QUERIES};
    m.n_queries = attention->seq_len - m.first_query;
    if (m.n_queries > QUERIES)
        m.n_queries = QUERIES;

    const elem *sequence = (const elem *)qkv + sample * attention->seq_len * row;
    const elem *q = sequence + m.first_query * row + head * head_dim;
    const elem *k = sequence + (attention->n_heads + kv_head) * head_dim;
    const elem *v = k + attention->n_kv_heads * head_dim;
    tile_transpose(queries, QUERIES, q, row, m.n_queries, head_dim, attention->scale);
    memset(queries + head_dim * QUERIES, 0, (width - head_dim) * QUERIES * sizeof *queries);

    struct running state;
    for (int i = 0; i < QUERY_VECTORS; i++) {
        state.most[i] = vec_set(-INFINITY);
        state.sum[i] = vec_set(0.0f);
    }
    bool any = false;
    const size_t end = m.first_query + m.n_queries, tile = attention_key_tile(attention->head_dim);
    for (m.first_key = 0; m.first_key < end; m.first_key += tile) {
        m.n_keys = end - m.first_key < tile ? end - m.first_key : tile;
        if (documents_apart(&m))
            continue;
        tile_copy(keys, width, k + m.first_key * row, row, m.n_keys, head_dim, 1.0f);
        tile_copy(values, width, v + m.first_key * row, row, m.n_keys, head_dim, 1.0f);
        multiply_scores(&m, scores, keys, queries, width);
        mask_scores(&m, scores, -INFINITY);
        soften(&m, &state, scores);
        if (attention->dropout.p > 0.0f) {
            draw_keep(&m, keep);
            for (size_t i = 0; i < m.n_keys * QUERIES; i += LANES)
                vec_store(scores + i, vec_load(scores + i) * vec_load(keep + i));
        }
        if (any)
            shrink_rows(rows, state.shrink, m.n_queries, width);
        multiply_to_queries(&m, rows, scores, values, width, any);
        any = true;
    }
    finish(&m, &state, out, lse, rows, width);
}
