/* What the forward and the backward pass of attention share. Header only, pure.
 *
 * Scores are kept transposed, (keys, queries): sixteen queries are the lanes of a vector, so
 * that maxima and sums over keys need no exchange between lanes. */
#ifndef BALLAST_KERNELS_CPU_SIMD_ATTENTION_H
#define BALLAST_KERNELS_CPU_SIMD_ATTENTION_H

#include "kernels/cpu/simd/parts.h"
#include "kernels/cpu/simd/tile.h"

enum {
    QUERIES = ATTENTION_QUERY_TILE,
    QUERY_VECTORS = QUERIES / LANES,
    MAX_KEYS = 64,
    MAX_WIDTH = 2 * ROTARY_MAX_PAIRS, /* head dimension, rounded up to lanes */
    KEY_FLOATS = 64 * 128,            /* keys of an inner step times their width */
};

/* Which queries meet which keys. */
struct meeting {
    const struct attention *attention;
    size_t sample;
    uint32_t head;
    size_t first_query, n_queries;
    size_t first_key, n_keys;
};

static inline size_t padded_width(uint32_t head_dim)
{
    return (head_dim + LANES - 1) / LANES * LANES;
}

/* Some key of the tile lies behind some query. */
static inline bool on_diagonal(const struct meeting *m)
{
    return m->first_key + m->n_keys > m->first_query + 1;
}

/* First query vector that sees the key. */
static inline size_t first_vector(const struct meeting *m, size_t key)
{
    const size_t absolute = m->first_key + key;
    return absolute > m->first_query ? (absolute - m->first_query) / LANES : 0;
}

static inline size_t n_query_vectors(const struct meeting *m)
{
    return (m->n_queries + LANES - 1) / LANES;
}

/* No document of the queries is among the keys': the tile contributes exactly nothing. */
static inline bool documents_apart(const struct meeting *m)
{
    if (!m->attention->segments)
        return false;
    const int32_t *segments = m->attention->segments + m->sample * m->attention->seq_len;
    int32_t low[2] = {INT32_MAX, INT32_MAX}, high[2] = {INT32_MIN, INT32_MIN};
    const size_t first[2] = {m->first_query, m->first_key}, n[2] = {m->n_queries, m->n_keys};
    for (int side = 0; side < 2; side++)
        for (size_t i = first[side]; i < first[side] + n[side]; i++) {
            low[side] = segments[i] < low[side] ? segments[i] : low[side];
            high[side] = segments[i] > high[side] ? segments[i] : high[side];
        }
    return high[0] < low[1] || high[1] < low[0];
}

/* scores(keys, queries) = left(keys, width) right(width, queries), without the part that the
 * causal mask removes. */
static inline void multiply_scores(const struct meeting *m, float *scores, const float *left,
                                   const float *right, size_t width)
{
    const size_t step = on_diagonal(m) ? LANES : m->n_keys;
    const size_t n_vectors = n_query_vectors(m);
    for (size_t key = 0; key < m->n_keys; key += step) {
        const size_t vector = first_vector(m, key);
        if (vector >= n_vectors)
            break;
        tile_product((struct tile){.a = left + key * width,
                                   .a_row = width,
                                   .a_inner = 1,
                                   .b = right + vector * LANES,
                                   .b_row = QUERIES,
                                   .c = scores + key * QUERIES + vector * LANES,
                                   .c_row = QUERIES,
                                   .n_rows = m->n_keys - key < step ? m->n_keys - key : step,
                                   .n_vectors = n_vectors - vector,
                                   .n_inner = width});
    }
}

/* rows(queries, width) = or += scores(keys, queries)^T keys(keys, width). */
static inline void multiply_to_queries(const struct meeting *m, float *rows, const float *scores,
                                       const float *keys, size_t width, bool accumulate)
{
    const size_t step = on_diagonal(m) ? LANES : m->n_queries;
    for (size_t query = 0; query < m->n_queries; query += step) {
        const size_t n = m->n_queries - query < step ? m->n_queries - query : step;
        const size_t seen = m->first_query + query + n; /* keys before this one */
        if (seen <= m->first_key)
            continue;
        const size_t n_seen = seen - m->first_key;
        tile_product((struct tile){.a = scores + query,
                                   .a_row = 1,
                                   .a_inner = QUERIES,
                                   .b = keys,
                                   .b_row = width,
                                   .c = rows + query * width,
                                   .c_row = width,
                                   .n_rows = n,
                                   .n_vectors = width / LANES,
                                   .n_inner = n_seen < m->n_keys ? n_seen : m->n_keys,
                                   .accumulate = accumulate});
    }
}

/* rows(keys, width) = or += scores(keys, queries) queries(queries, width); rows are `stride`
 * apart. */
static inline void multiply_to_keys(const struct meeting *m, float *rows, size_t stride,
                                    const float *scores, const float *queries, size_t width,
                                    bool accumulate)
{
    const size_t step = on_diagonal(m) ? LANES : m->n_keys;
    for (size_t key = 0; key < m->n_keys; key += step) {
        const size_t query = first_vector(m, key) * LANES;
        if (query >= m->n_queries)
            break;
        tile_product((struct tile){.a = scores + key * QUERIES + query,
                                   .a_row = QUERIES,
                                   .a_inner = 1,
                                   .b = queries + query * width,
                                   .b_row = width,
                                   .c = rows + key * stride,
                                   .c_row = stride,
                                   .n_rows = m->n_keys - key < step ? m->n_keys - key : step,
                                   .n_vectors = width / LANES,
                                   .n_inner = m->n_queries - query,
                                   .accumulate = accumulate});
    }
}

/* Overwrite the scores of pairs that must not meet. */
static inline void mask_scores(const struct meeting *m, float *scores, float masked)
{
    const int32_t *segments = m->attention->segments;
    const bool diagonal = on_diagonal(m);
    if (!segments && !diagonal)
        return;
    int32_t documents[QUERIES] = {0};
    if (segments) {
        segments += m->sample * m->attention->seq_len;
        memcpy(documents, segments + m->first_query, m->n_queries * sizeof *documents);
    }
    for (size_t key = 0; key < m->n_keys; key++)
        for (size_t v = 0; v < n_query_vectors(m); v++) {
            float *at = scores + key * QUERIES + v * LANES;
            const uvec query = uvec_count((uint32_t)(m->first_query + v * LANES));
            ivec meet = (ivec)(query >= (uint32_t)(m->first_key + key));
            if (segments) {
                ivec document;
                memcpy(&document, documents + v * LANES, sizeof document);
                meet &= document == segments[m->first_key + key];
            }
            vec_store(at, vec_select(meet, vec_load(at), vec_set(masked)));
        }
}

/* keep(keys, queries) = 1/(1-p) where the probability stays, else 0. */
static inline void draw_keep(const struct meeting *m, float *keep)
{
    const struct dropout *d = &m->attention->dropout;
    const struct philox_key philox = philox_key(d->seed, d->step);
    const uint32_t threshold = dropout_threshold(d->p);
    const vec scale = vec_set(dropout_scale(d->p));
    const size_t first = d->first_token + m->first_key, end = first + m->n_keys;
    for (size_t group = first / 4; 4 * group < end; group++)
        for (size_t v = 0; v < n_query_vectors(m); v++) {
            uvec c[4] = {uvec_set((uint32_t)group),
                         uvec_count(d->first_token + (uint32_t)(m->first_query + v * LANES)),
                         uvec_set(d->first_sample + (uint32_t)m->sample),
                         uvec_set(philox_stream(d->layer, (enum random_use)d->use,
                                                d->first_head + m->head))};
            uvec_philox(philox, c);
            for (size_t word = 0; word < 4; word++) {
                const size_t key = 4 * group + word;
                if (key >= first && key < end)
                    vec_store(keep + (key - first) * QUERIES + v * LANES,
                              vec_select((ivec)(c[word] >= threshold), scale, vec_set(0.0f)));
            }
        }
}

#endif
