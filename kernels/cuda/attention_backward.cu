/* Attention backward on tensor cores, bf16. Probabilities are computed again from the saved
 * log-sum-exp (Dao et al., 2022). With P the probabilities, K the dropout factors and
 * D = dout V^T:
 *     dV = (P K)^T dout,  dS = P (D K - delta),  dQ = scale dS K,  dK = scale dS^T Q.
 * One kernel owns tiles of queries and makes dQ, one owns tiles of keys and makes dK and dV:
 * the scores are made twice, and in return every element of dqkv is one thread's sum in a fixed
 * order: heads of the group ascending, then tiles ascending. Sums are fp32; P and dS are rounded to
 * bf16 for the second product. */
#include "kernels/cuda/attention.h"

static const float LOG2_E = 1.44269504f;

/* ---- dQ ---- */

/* slopes: D -> dS, of rows that are queries. `saved` are lse, in powers of two, and delta of
 * the block's queries. */
template <int M, int QUERIES, int KEYS, bool DROPOUT, int WORDS>
static __device__ __forceinline__ void
differentiate_queries(const float (&scores)[M][KEYS / 8][4], float (&slopes)[M][KEYS / 8][4],
                      const float *saved, int first_row, float scale, const uint32_t (&kept)[WORDS],
                      float keep_scale)
{
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int half = 0; half < 2; half++) {
            const int row = first_row + 16 * m + 8 * half + (int)(threadIdx.x & 31) / 4;
            const float lse = saved[row], delta = saved[QUERIES + row];
            UNROLL
            for (int word = 0; word < KEYS / draw_word<KEYS>; word++) {
                const uint32_t bits = DROPOUT ? kept_of_row<M, KEYS>(kept, m, half, word) : 0u;
                UNROLL
                for (int i = 0; i < draw_word<KEYS> / 4; i++) {
                    const int n = word * draw_word<KEYS> / 8 + i / 2, e = 2 * half + i % 2;
                    const float p = exp2_fast(scores[m][n][e] * scale - lse);
                    float slope = slopes[m][n][e];
                    if (DROPOUT) {
                        slope = bits >> (i / 2 * 8 + i % 2) & 1u ? slope * keep_scale : 0.0f;
                    }
                    slopes[m][n][e] = p * (slope - delta);
                }
            }
        }
    }
}

/* What a kernel reads and writes. */
struct backward_arrays {
    bf16 *dqkv;
    const bf16 *dout, *qkv;
    const float *lse, *delta;
};

/* lse, in powers of two, and delta of query `first + thread`, on their way to shared memory;
 * beyond the last, what makes P and dS 0. */
static __device__ __forceinline__ float2 saved_of(const struct backward_arrays *arrays, size_t at,
                                                  int first, int seq_len)
{
    const int query = first + (int)threadIdx.x;
    if (query >= seq_len) {
        return make_float2(INFINITY, 0.0f);
    }
    return make_float2(arrays->lse[at + query] * LOG2_E, arrays->delta[at + query]);
}

template <int HD, int M, int KEYS, bool DROPOUT>
static __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_backward_queries(struct attention_shape shape, struct backward_arrays arrays)
{
    constexpr int QUERIES = 16 * M * ATTENTION_WARPS;
    constexpr int VALUES = 2 * KEYS * tile_row<HD>; /* from the keys of a stage to the values */
    DYNAMIC_SHARED(bf16, queries);
    bf16 *const douts = queries + QUERIES * tile_row<HD>;
    bf16 *const keys = douts + QUERIES * tile_row<HD>;
    bf16 *const values = keys + VALUES;
    float *const saved = (float *)(void *)(values + VALUES); /* lse, delta */

    const int seq_len = shape.seq_len, thread = (int)threadIdx.x;
    const struct attention_block block = query_block(&shape, QUERIES);
    const int first_query = block.first, kv_head = block.head / shape.group;
    const size_t q_at = packed_at(&shape, block.sample, block.head);
    const bf16 *k = arrays.qkv + packed_at(&shape, block.sample, shape.n_heads + kv_head);
    const size_t k_to_v = (size_t)shape.n_kv_heads * HD;
    const int32_t *documents = documents_at(&shape, block.sample);
    const int end = min(first_query + QUERIES, seq_len), end_tile = (end + KEYS - 1) / KEYS;
    const struct document_range asking = document_range_of(documents, first_query, end);
    const int warp_row = 16 * M * (thread / 32), warp_query = first_query + warp_row;
    const int warp_at = warp_row * tile_row<HD>;

    struct attention_draw draw = {};
    uint32_t stream = 0;
    if (DROPOUT) {
        draw = attention_draw_of(&shape, block.sample);
        stream = stream_of_head(&shape, block.head);
    }
    bool compare_next = false;
    int tile = next_key_tile<KEYS>(documents, asking, 0, end_tile, seq_len, &compare_next);
    load_tile<HD, QUERIES>(queries, arrays.qkv + q_at, shape.row, first_query, seq_len);
    load_tile<HD, QUERIES>(douts, arrays.dout + out_at(&shape, block.sample, block.head),
                           shape.out_row, first_query, seq_len);
    load_tiles<HD, KEYS, 2>(keys, VALUES, k, k_to_v, shape.row, tile * KEYS, seq_len);
    cp_async_commit();
    if (thread < QUERIES) {
        const float2 value =
            saved_of(&arrays, saved_at(&shape, block.sample, block.head), first_query, seq_len);
        saved[thread] = value.x;
        saved[QUERIES + thread] = value.y;
    }
    float sums[M][HD / 8][4];
    zero_sums<M, HD>(sums);
    for (int stage = 0; tile < end_tile; stage ^= 1) {
        const int first_key = tile * KEYS, here = stage * KEYS * tile_row<HD>;
        const bool compare = compare_next;
        cp_async_wait<0>();
        __syncthreads(); /* the copies are everybody's; nobody reads the other stage any more */
        tile = next_key_tile<KEYS>(documents, asking, tile + 1, end_tile, seq_len, &compare_next);
        if (tile < end_tile) {
            load_tiles<HD, KEYS, 2>(keys + (stage ^ 1) * KEYS * tile_row<HD>, VALUES, k, k_to_v,
                                    shape.row, tile * KEYS, seq_len);
        }
        cp_async_commit();
        if (first_key >= warp_query + 16 * M) {
            continue; /* behind all queries of this warp */
        }
        uint32_t kept[draw_words<M, KEYS>] = {};
        if (DROPOUT) {
            draw_rows<M, KEYS>(kept, &draw, stream, warp_query, first_key);
        }
        float scores[M][KEYS / 8][4], slopes[M][KEYS / 8][4];
        multiply_scores<HD, M, KEYS>(scores, queries + warp_at, keys + here);
        if (compare || first_key + KEYS > warp_query + 1) {
            mask_scores<false, M, KEYS>(scores, warp_query, first_key, compare ? documents : NULL,
                                        seq_len);
        }
        multiply_scores<HD, M, KEYS>(slopes, douts + warp_at, values + here);
        differentiate_queries<M, QUERIES, KEYS, DROPOUT>(
            scores, slopes, saved, warp_row, shape.scale * LOG2_E, kept, shape.keep_scale);
        uint32_t left[M][KEYS / 16][4];
        round_scores<M, KEYS>(left, slopes);
        multiply_columns<HD, M, KEYS, HD>(sums, left, keys + here, 0);
    }
    store_sums<HD, M, HD>(arrays.dqkv + q_at + (size_t)first_query * shape.row, shape.row, queries,
                          warp_row, seq_len - first_query, sums, shape.scale);
}

/* ---- dK, dV ---- */

/* The tile of queries that a block of keys looks at: of every head of the group, from the
 * diagonal on. */
struct query_step {
    int head, tile;
};

/* The step after `step` whose queries share a document with the keys; the head is `end_head`
 * if there is none. *out_compare: whether pairs of the tile have to be compared. */
template <int QUERIES>
static __device__ __forceinline__ struct query_step
next_query_tile(const int32_t *documents, struct document_range answering, struct query_step step,
                int first_tile, int end_head, int seq_len, bool *out_compare)
{
    for (;;) {
        step.tile++;
        if (step.tile * QUERIES >= seq_len) {
            step.tile = first_tile;
            step.head++;
            if (step.head == end_head) {
                return step;
            }
        }
        if (!documents) {
            return step;
        }
        const int first = step.tile * QUERIES;
        const struct document_range asking =
            document_range_of(documents, first, min(first + QUERIES, seq_len));
        if (!documents_apart(asking, answering)) {
            *out_compare = !documents_equal(asking, answering);
            return step;
        }
    }
}

/* scores -> P, without those dropped, and slopes: D -> dS, of rows that are keys. `saved` are
 * lse, in powers of two, and delta of the tile's queries. */
template <int M, int QUERIES, bool DROPOUT>
static __device__ __forceinline__ void
differentiate_keys(float (&scores)[M][QUERIES / 8][4], float (&slopes)[M][QUERIES / 8][4],
                   const float *saved, float scale, const uint32_t (&kept)[(QUERIES + 31) / 32],
                   float keep_scale)
{
    const int lane = (int)(threadIdx.x & 31);
    UNROLL
    for (int n = 0; n < QUERIES / 8; n++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
            const int column = 8 * n + lane % 4 * 2 + e;
            const float lse = saved[column], delta = saved[QUERIES + column];
            uint32_t bits = 0;
            if (DROPOUT) {
                bits = __shfl_sync(0xffffffffu, kept[n / 4], column % 32) >> (lane / 4);
            }
            UNROLL
            for (int i = 0; i < 2 * M; i++) {
                float *score = &scores[i / 2][n][i % 2 * 2 + e];
                float *slope = &slopes[i / 2][n][i % 2 * 2 + e];
                const float p = exp2_fast(*score * scale - lse);
                if (DROPOUT) {
                    const bool keep = bits >> (8 * i) & 1u;
                    *score = keep ? p : 0.0f;
                    *slope = p * ((keep ? *slope * keep_scale : 0.0f) - delta);
                } else {
                    *score = p;
                    *slope = p * (*slope - delta);
                }
            }
        }
    }
}

/* Tiles of a block in shared memory. */
struct key_block_tiles {
    const bf16 *keys, *values;   /* the warp's rows */
    const bf16 *queries, *douts; /* of the stage, as is `saved` */
    const float *saved;
};

/* dK and dV += what a tile of queries gives to a warp's keys. `first` is the first dimension
 * that the block makes, the documents are NULL where all pairs share one. */
template <int HD, int M, int QUERIES, int WIDTH, bool DROPOUT>
static __device__ __forceinline__ void
add_queries(float (&dk)[M][WIDTH / 8][4], float (&dv)[M][WIDTH / 8][4],
            const struct key_block_tiles *tiles, const struct attention_shape *shape,
            const struct attention_draw *draw, int head, int warp_key, int first_query,
            const int32_t *documents, int first)
{
    uint32_t kept[(QUERIES + 31) / 32] = {};
    if (DROPOUT) {
        const int lane = (int)(threadIdx.x & 31);
        UNROLL
        for (int i = 0; i < (QUERIES + 31) / 32; i++) {
            kept[i] = draw_kept<16 * M>(draw, stream_of_head(shape, head),
                                        first_query + 32 * i + lane % QUERIES, warp_key);
        }
    }
    float scores[M][QUERIES / 8][4], slopes[M][QUERIES / 8][4];
    multiply_scores<HD, M, QUERIES>(scores, tiles->keys, tiles->queries);
    if (documents || warp_key + 16 * M > first_query + 1) {
        mask_scores<true, M, QUERIES>(scores, warp_key, first_query, documents, shape->seq_len);
    }
    multiply_scores<HD, M, QUERIES>(slopes, tiles->values, tiles->douts);
    differentiate_keys<M, QUERIES, DROPOUT>(scores, slopes, tiles->saved, shape->scale * LOG2_E,
                                            kept, shape->keep_scale);
    uint32_t left[M][QUERIES / 16][4];
    round_scores<M, QUERIES>(left, scores);
    multiply_columns<HD, M, QUERIES, WIDTH>(dv, left, tiles->douts, first);
    round_scores<M, QUERIES>(left, slopes);
    multiply_columns<HD, M, QUERIES, WIDTH>(dk, left, tiles->queries, first);
}

template <int HD, int M, int QUERIES, int WIDTH, bool DROPOUT>
static __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_backward_keys(struct attention_shape shape, struct backward_arrays arrays)
{
    constexpr int KEYS = 16 * M * ATTENTION_WARPS, QUERY_TILE = QUERIES * tile_row<HD>;
    DYNAMIC_SHARED(bf16, keys);
    bf16 *const values = keys + KEYS * tile_row<HD>;
    bf16 *const queries = values + KEYS * tile_row<HD>;
    bf16 *const douts = queries + 2 * QUERY_TILE;
    float *const saved = (float *)(void *)(douts + 2 * QUERY_TILE); /* [stage][lse, delta] */

    const int seq_len = shape.seq_len, thread = (int)threadIdx.x;
    const struct attention_block block = key_block(&shape, KEYS);
    const int first_key = block.first, first_head = block.head * shape.group;
    const int end_head = first_head + shape.group, first_tile = first_key / QUERIES;
    const size_t k_at = packed_at(&shape, block.sample, shape.n_heads + block.head);
    const size_t v_at = k_at + (size_t)shape.n_kv_heads * HD;
    const int32_t *documents = documents_at(&shape, block.sample);
    const struct document_range answering =
        document_range_of(documents, first_key, min(first_key + KEYS, seq_len));
    const int warp_row = 16 * M * (thread / 32), warp_key = first_key + warp_row;
    const int first = WIDTH == HD ? 0 : (int)blockIdx.y * WIDTH;

    struct attention_draw draw = {};
    if (DROPOUT) {
        draw = attention_draw_of(&shape, block.sample);
    }
    bool compare = false, compare_next = false;
    struct query_step step = {first_head, first_tile - 1};
    step = next_query_tile<QUERIES>(documents, answering, step, first_tile, end_head, seq_len,
                                    &compare_next);
    load_tiles<HD, KEYS, 2>(keys, KEYS * tile_row<HD>, arrays.qkv + k_at, v_at - k_at, shape.row,
                            first_key, seq_len);
    float dk[M][WIDTH / 8][4], dv[M][WIDTH / 8][4];
    zero_sums<M, WIDTH>(dk);
    zero_sums<M, WIDTH>(dv);
    struct query_step now = {first_head, -1}; /* none */
    for (int stage = 1;; stage ^= 1) {
        /* `now` is in this stage, if it is a step at all; `step` goes to the other. */
        cp_async_wait<0>();
        __syncthreads(); /* the copies are everybody's; nobody reads the other stage any more */
        const int other = stage ^ 1;
        float2 next = make_float2(0.0f, 0.0f);
        if (step.head < end_head) {
            const int at = step.tile * QUERIES;
            load_tile<HD, QUERIES>(queries + other * QUERY_TILE,
                                   arrays.qkv + packed_at(&shape, block.sample, step.head),
                                   shape.row, at, seq_len);
            load_tile<HD, QUERIES>(douts + other * QUERY_TILE,
                                   arrays.dout + out_at(&shape, block.sample, step.head),
                                   shape.out_row, at, seq_len);
            if (thread < QUERIES) {
                next = saved_of(&arrays, saved_at(&shape, block.sample, step.head), at, seq_len);
            }
        }
        cp_async_commit();
        if (warp_key < now.tile * QUERIES + QUERIES) {
            const struct key_block_tiles tiles = {
                keys + warp_row * tile_row<HD>, values + warp_row * tile_row<HD>,
                queries + stage * QUERY_TILE, douts + stage * QUERY_TILE,
                saved + stage * 2 * QUERIES};
            add_queries<HD, M, QUERIES, WIDTH, DROPOUT>(dk, dv, &tiles, &shape, &draw, now.head,
                                                        warp_key, now.tile * QUERIES,
                                                        compare ? documents : NULL, first);
        }
        if (step.head == end_head) {
            break;
        }
        if (thread < QUERIES) {
            saved[other * 2 * QUERIES + thread] = next.x;
            saved[other * 2 * QUERIES + QUERIES + thread] = next.y;
        }
        compare = compare_next;
        now = step;
        step = next_query_tile<QUERIES>(documents, answering, step, first_tile, end_head, seq_len,
                                        &compare_next);
    }
    const size_t from = (size_t)first_key * shape.row + (size_t)first;
    store_sums<HD, M, WIDTH>(arrays.dqkv + k_at + from, shape.row, keys, warp_row,
                             seq_len - first_key, dk, shape.scale);
    store_sums<HD, M, WIDTH>(arrays.dqkv + v_at + from, shape.row, values, warp_row,
                             seq_len - first_key, dv, DROPOUT ? shape.keep_scale : 1.0f);
}

/* ---- launching ---- */

static struct backward_arrays arrays_of(const struct cuda_attention_backward *args)
{
    return {(bf16 *)args->dqkv, (const bf16 *)args->dout, (const bf16 *)args->qkv, args->lse,
            args->delta};
}

template <int HD, int M, int KEYS, bool DROPOUT>
static void launch_queries(cudaStream_t stream, const struct cuda_attention_backward *args)
{
    constexpr int QUERIES = 16 * M * ATTENTION_WARPS;
    const struct attention_shape shape = attention_shape_of(&args->attention, args->varying);
    const size_t shared =
        (2 * QUERIES + 4 * KEYS) * tile_row<HD> * sizeof(bf16) + 2 * QUERIES * sizeof(float);
    LAUNCH((attention_backward_queries<HD, M, KEYS, DROPOUT>),
           attention_grid(&shape, shape.n_heads, QUERIES), ATTENTION_THREADS, shared, stream, shape,
           arrays_of(args));
}

/* A block makes WIDTH of the HD dimensions of its keys. */
template <int HD, int M, int QUERIES, int WIDTH, bool DROPOUT>
static void launch_keys(cudaStream_t stream, const struct cuda_attention_backward *args)
{
    constexpr int KEYS = 16 * M * ATTENTION_WARPS;
    const struct attention_shape shape = attention_shape_of(&args->attention, args->varying);
    const size_t shared =
        (2 * KEYS + 4 * QUERIES) * tile_row<HD> * sizeof(bf16) + 4 * QUERIES * sizeof(float);
    const dim3 grid(attention_grid(&shape, shape.n_kv_heads, KEYS), HD / WIDTH);
    LAUNCH((attention_backward_keys<HD, M, QUERIES, WIDTH, DROPOUT>), grid, ATTENTION_THREADS,
           shared, stream, shape, arrays_of(args));
}

/* Tiles: what fits the registers without spilling and 99 KiB of shared memory. */
template <bool DROPOUT>
static void launch(cudaStream_t stream, const struct cuda_attention_backward *args)
{
    switch (args->attention.head_dim) {
    case 64:
        launch_queries<64, 2, 32, DROPOUT>(stream, args);
        launch_keys<64, DROPOUT ? 1 : 2, 32, 64, DROPOUT>(stream, args);
        break;
    case 80:
        launch_queries<80, 1, 32, DROPOUT>(stream, args);
        launch_keys<80, 1, 32, 80, DROPOUT>(stream, args);
        break;
    case 96:
        launch_queries<96, 1, 32, DROPOUT>(stream, args);
        launch_keys<96, 1, 32, 96, DROPOUT>(stream, args);
        break;
    case 128:
        launch_queries<128, 2, 32, DROPOUT>(stream, args);
        launch_keys<128, 1, 32, 128, DROPOUT>(stream, args);
        break;
    default:
        launch_queries<256, 1, 16, DROPOUT>(stream, args);
        launch_keys<256, 1, 16, 128, DROPOUT>(stream, args);
        break;
    }
}

extern "C" void cuda_launch_attention_backward(cudaStream_t stream,
                                               const struct cuda_attention_backward *args)
{
    if (args->attention.batch == 0 || args->attention.seq_len == 0) {
        return;
    }
    attention_delta(stream, args);
    if (!attention_has_tile(args->dtype, args->attention.head_dim)) {
        attention_plain_backward(stream, args);
    } else if (args->attention.dropout.p > 0.0f) {
        launch<true>(stream, args);
    } else {
        launch<false>(stream, args);
    }
}
