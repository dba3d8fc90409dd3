/* Attention forward on tensor cores, bf16: softmax with a running maximum and sum per query
 * while tiles of keys pass by (Milakov and Gimelshein, 2018; Dao et al., 2022). Sums and
 * exponentials are fp32; probabilities are rounded to bf16 for the second product. */
#include "kernels/cuda/attention.h"

static const float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

/* Of a thread's 2 M rows. The maximum is the same in the four lanes of a row; the sum is of
 * the lane's own columns until the end. */
template <int M> struct running {
    float most[M][2], sum[M][2];
};

/* scores -> 2^(scale (score - most)); sums so far shrink by what the maximum grew. `scale`
 * contains log2(e). */
template <int M, int KEYS, int WIDTH>
static __device__ __forceinline__ void soften(float (&scores)[M][KEYS / 8][4],
                                              struct running<M> &state,
                                              float (&sums)[M][WIDTH / 8][4], float scale)
{
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int half = 0; half < 2; half++) {
            float most = state.most[m][half];
            UNROLL
            for (int n = 0; n < KEYS / 8; n++) {
                most = fmaxf(most, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            /* A query that has met no key yet keeps -infinity; 0 instead avoids inf - inf. */
            const float base = most == -INFINITY ? 0.0f : most * scale;
            const float shrink = exp2_fast(state.most[m][half] * scale - base);
            float sum = state.sum[m][half] * shrink;
            UNROLL
            for (int n = 0; n < KEYS / 8; n++) {
                UNROLL
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    scores[m][n][e] = exp2_fast(scores[m][n][e] * scale - base);
                    sum += scores[m][n][e];
                }
            }
            UNROLL
            for (int n = 0; n < WIDTH / 8; n++) {
                sums[m][n][2 * half] *= shrink;
                sums[m][n][2 * half + 1] *= shrink;
            }
            state.most[m][half] = most;
            state.sum[m][half] = sum;
        }
    }
}

/* Probabilities that are dropped become 0. The factor 1/(1-p) comes at the end. */
template <int M, int KEYS>
static __device__ __forceinline__ void drop(float (&scores)[M][KEYS / 8][4],
                                            const struct attention_draw *draw, uint32_t stream,
                                            int first_query, int first_key)
{
    uint32_t kept[draw_words<M, KEYS>];
    draw_rows<M, KEYS>(kept, draw, stream, first_query, first_key);
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int half = 0; half < 2; half++) {
            UNROLL
            for (int word = 0; word < KEYS / draw_word<KEYS>; word++) {
                const uint32_t bits = kept_of_row<M, KEYS>(kept, m, half, word);
                UNROLL
                for (int i = 0; i < draw_word<KEYS> / 4; i++) {
                    const int n = word * draw_word<KEYS> / 8 + i / 2, e = 2 * half + i % 2;
                    scores[m][n][e] = bits >> (i / 2 * 8 + i % 2) & 1u ? scores[m][n][e] : 0.0f;
                }
            }
        }
    }
}

template <int HD, int M, int KEYS, bool DROPOUT>
static __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_forward_kernel(struct attention_shape shape, bf16 *out, float *lse, const bf16 *qkv)
{
    constexpr int QUERIES = 16 * M * ATTENTION_WARPS;
    constexpr int VALUES = 2 * KEYS * tile_row<HD>; /* from the keys of a stage to the values */
    DYNAMIC_SHARED(bf16, queries);
    bf16 *const keys = queries + QUERIES * tile_row<HD>;
    bf16 *const values = keys + VALUES;

    const int seq_len = shape.seq_len;
    const struct attention_block block = query_block(&shape, QUERIES);
    const int first_query = block.first, kv_head = block.head / shape.group;
    const bf16 *q = qkv + packed_at(&shape, block.sample, block.head);
    const bf16 *k = qkv + packed_at(&shape, block.sample, shape.n_heads + kv_head);
    const size_t k_to_v = (size_t)shape.n_kv_heads * HD;
    const int32_t *documents = documents_at(&shape, block.sample);
    const int end = min(first_query + QUERIES, seq_len), end_tile = (end + KEYS - 1) / KEYS;
    const struct document_range asking = document_range_of(documents, first_query, end);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int warp_row = 16 * M * warp, warp_query = first_query + warp_row;
    const float scale = shape.scale * LOG2_E;

    struct attention_draw draw = {};
    uint32_t stream = 0;
    if (DROPOUT) {
        draw = attention_draw_of(&shape, block.sample);
        stream = stream_of_head(&shape, block.head);
    }
    struct running<M> state;
    UNROLL
    for (int i = 0; i < 2 * M; i++) {
        state.most[i / 2][i % 2] = -INFINITY;
        state.sum[i / 2][i % 2] = 0.0f;
    }
    float sums[M][HD / 8][4];
    zero_sums<M, HD>(sums);

    bool compare_next = false;
    int tile = next_key_tile<KEYS>(documents, asking, 0, end_tile, seq_len, &compare_next);
    load_tile<HD, QUERIES>(queries, q, shape.row, first_query, seq_len);
    load_tiles<HD, KEYS, 2>(keys, VALUES, k, k_to_v, shape.row, tile * KEYS, seq_len);
    cp_async_commit();
    for (int stage = 0; tile < end_tile; stage ^= 1) {
        const int first_key = tile * KEYS;
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
        float scores[M][KEYS / 8][4];
        multiply_scores<HD, M, KEYS>(scores, queries + warp_row * tile_row<HD>,
                                     keys + stage * KEYS * tile_row<HD>);
        if (compare || first_key + KEYS > warp_query + 1) {
            mask_scores<false, M, KEYS>(scores, warp_query, first_key, compare ? documents : NULL,
                                        seq_len);
        }
        soften<M, KEYS, HD>(scores, state, sums, scale);
        if (DROPOUT) {
            drop<M, KEYS>(scores, &draw, stream, warp_query, first_key);
        }
        uint32_t left[M][KEYS / 16][4];
        round_scores<M, KEYS>(left, scores);
        multiply_columns<HD, M, KEYS, HD>(sums, left, values + stage * KEYS * tile_row<HD>, 0);
    }

    float factor[M][2];
    float *saved = lse + saved_at(&shape, block.sample, block.head);
    UNROLL
    for (int i = 0; i < 2 * M; i++) {
        const int m = i / 2, half = i % 2;
        float sum = state.sum[m][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        factor[m][half] = sum > 0.0f ? (DROPOUT ? shape.keep_scale : 1.0f) / sum : 0.0f;
        const int query = warp_query + 16 * m + 8 * half + lane / 4;
        if (lane % 4 == 0 && query < seq_len) {
            saved[query] = LN_2 * (state.most[m][half] * scale + log2f(sum));
        }
    }
    store_sums<HD, M, HD>(out + out_at(&shape, block.sample, block.head) +
                              (size_t)first_query * shape.out_row,
                          shape.out_row, queries, warp_row, seq_len - first_query, sums, factor);
}

struct attention_shape attention_shape_of(const struct attention *attention,
                                          const struct cuda_varying *varying)
{
    const struct attention *a = attention;
    /* Tiles may reach beyond the last row by less than their own length. */
    assert(a->seq_len < INT32_MAX - 1024 && a->batch <= INT32_MAX);
    assert(a->n_heads % a->n_kv_heads == 0 && a->head_dim <= 2 * ROTARY_MAX_PAIRS);
    assert(a->scale > 0.0f); /* the maximum is taken before the product */
    assert(a->dropout.p == 0.0f || varying != NULL);
    struct attention_shape shape = {};
    shape.batch = (int)a->batch;
    shape.seq_len = (int)a->seq_len;
    shape.n_heads = (int)a->n_heads;
    shape.n_kv_heads = (int)a->n_kv_heads;
    shape.head_dim = (int)a->head_dim;
    shape.group = (int)(a->n_heads / a->n_kv_heads);
    shape.row = (a->n_heads + 2 * (size_t)a->n_kv_heads) * a->head_dim;
    shape.out_row = (size_t)a->n_heads * a->head_dim;
    shape.scale = a->scale;
    shape.segments = a->segments;
    shape.varying = varying;
    shape.seed = a->dropout.seed;
    shape.threshold = dropout_threshold(a->dropout.p);
    shape.first_token = a->dropout.first_token;
    shape.layer = a->dropout.layer;
    shape.use = a->dropout.use;
    shape.first_head = a->dropout.first_head;
    shape.keep_scale = dropout_scale(a->dropout.p);
    return shape;
}

template <int HD, int M, int KEYS>
static void launch(cudaStream_t stream, const struct cuda_attention_forward *args)
{
    constexpr int QUERIES = 16 * M * ATTENTION_WARPS;
    const struct attention_shape shape = attention_shape_of(&args->attention, args->varying);
    const size_t shared = (QUERIES + 4 * KEYS) * tile_row<HD> * sizeof(bf16);
    const unsigned grid = attention_grid(&shape, shape.n_heads, QUERIES);
    if (args->attention.dropout.p > 0.0f) {
        LAUNCH((attention_forward_kernel<HD, M, KEYS, true>), grid, ATTENTION_THREADS, shared,
               stream, shape, (bf16 *)args->out, args->lse, (const bf16 *)args->qkv);
    } else {
        LAUNCH((attention_forward_kernel<HD, M, KEYS, false>), grid, ATTENTION_THREADS, shared,
               stream, shape, (bf16 *)args->out, args->lse, (const bf16 *)args->qkv);
    }
}

/* Tiles: as many queries as the registers hold sums for, and 96 KiB of shared memory at most,
 * which every GPU from compute capability 8.0 on has. */
extern "C" void cuda_launch_attention_forward(cudaStream_t stream,
                                              const struct cuda_attention_forward *args)
{
    if (args->attention.batch == 0 || args->attention.seq_len == 0) {
        return;
    }
    if (!attention_has_tile(args->dtype, args->attention.head_dim)) {
        attention_plain_forward(stream, args);
        return;
    }
    switch (args->attention.head_dim) {
    case 64:
        launch<64, 2, 64>(stream, args);
        break;
    case 80:
        launch<80, 2, 32>(stream, args);
        break;
    case 96:
        launch<96, 2, 32>(stream, args);
        break;
    case 128:
        launch<128, 2, 32>(stream, args);
        break;
    default:
        launch<256, 1, 32>(stream, args);
        break;
    }
}
