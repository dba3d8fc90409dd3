/* What the attention kernels share: the shape of a call, which queries meet which keys, and
 * products of tiles on tensor cores. For kernels/cuda/attention_*.cu only.
 *
 * The tensor-core kernels see one picture. A block of four warps owns a tile of `rows` that
 * stays in shared memory while tiles of `columns` pass by, two stages of them, so that the next
 * one is on its way during a product. Forward and dQ: rows are queries, columns keys. dK and
 * dV: rows are keys, columns queries. A warp owns 16 M rows and needs nothing of the other
 * warps but the copies; the scores it makes, (rows, columns), are in the registers where the
 * next product wants its left operand, so they never visit memory.
 *
 * Fragments are those of mma.m16n8k16: with g = lane / 4 and t = lane % 4, element e of an
 * accumulator is row g + 8 (e / 2), column 2 t + e % 2. */
#ifndef BALLAST_KERNELS_CUDA_ATTENTION_H
#define BALLAST_KERNELS_CUDA_ATTENTION_H

#include "kernels/cuda/portable.h" /* first */
#include "kernels/cuda/kernels.h"

#include <assert.h>

/* 2^x within 2 ulp; results below 2^-126 are 0, and so is 2^-infinity. */
static __device__ __forceinline__ float exp2_fast(float x)
{
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

enum { ATTENTION_WARPS = 4, ATTENTION_THREADS = 32 * ATTENTION_WARPS };

/* A call as the kernels see it, passed by value. Positions fit an int. */
struct attention_shape {
    int batch, seq_len;
    int n_heads, n_kv_heads, head_dim;
    int group;           /* query heads per key/value head */
    size_t row, out_row; /* elements of a row of qkv, of out */
    float scale;
    const int32_t *segments;
    /* Dropout; threshold 0 drops nothing. */
    const struct cuda_varying *varying;
    uint64_t seed;
    uint32_t threshold, first_token, layer, use, first_head;
    float keep_scale;
};

struct attention_shape attention_shape_of(const struct attention *attention,
                                          const struct cuda_varying *varying);

/* For fp32, and for head dimensions that the tensor-core kernels have no tile for. */
void attention_plain_forward(cudaStream_t stream, const struct cuda_attention_forward *args);
void attention_plain_backward(cudaStream_t stream, const struct cuda_attention_backward *args);
/* delta(B,nh,T) = row sums of dout * out. */
void attention_delta(cudaStream_t stream, const struct cuda_attention_backward *args);

/* Whether the tensor cores do it: bf16, one of the head dimensions with a tile. */
static inline bool attention_has_tile(enum dtype dtype, uint32_t head_dim)
{
    return dtype == DTYPE_BF16 && (head_dim == 64 || head_dim == 80 || head_dim == 96 ||
                                   head_dim == 128 || head_dim == 256);
}

/* ---- which queries meet which keys ---- */

/* What a block computes: a tile of queries of one head, or of keys of one key/value head. Tiles
 * of a head follow each other, so that they share it in the cache, the longest first: the
 * last queries see the most keys, the first keys are seen by the most queries. */
struct attention_block {
    int sample, head, first;
};

static __device__ __forceinline__ struct attention_block
query_block(const struct attention_shape *shape, int queries)
{
    const unsigned n_tiles = (unsigned)(shape->seq_len + queries - 1) / (unsigned)queries;
    const unsigned head = blockIdx.x / n_tiles;
    return {(int)(head / (unsigned)shape->n_heads), (int)(head % (unsigned)shape->n_heads),
            (int)(n_tiles - 1 - blockIdx.x % n_tiles) * queries};
}

static __device__ __forceinline__ struct attention_block
key_block(const struct attention_shape *shape, int keys)
{
    const unsigned n_tiles = (unsigned)(shape->seq_len + keys - 1) / (unsigned)keys;
    const unsigned head = blockIdx.x / n_tiles;
    return {(int)(head / (unsigned)shape->n_kv_heads), (int)(head % (unsigned)shape->n_kv_heads),
            (int)(blockIdx.x % n_tiles) * keys};
}

/* Blocks for tiles of `rows` rows of n_heads heads. */
static inline unsigned attention_grid(const struct attention_shape *shape, int n_heads, int rows)
{
    const size_t n_tiles = ((size_t)shape->seq_len + (size_t)rows - 1) / (size_t)rows;
    const size_t n = n_tiles * (size_t)n_heads * (size_t)shape->batch;
    assert(n <= INT32_MAX);
    return (unsigned)n;
}

/* Where a sample's head starts, in elements. `head` counts q, k and v heads alike. */
static __device__ __forceinline__ size_t packed_at(const struct attention_shape *shape, int sample,
                                                   int head)
{
    return (size_t)sample * shape->seq_len * shape->row + (size_t)head * shape->head_dim;
}

static __device__ __forceinline__ size_t out_at(const struct attention_shape *shape, int sample,
                                                int head)
{
    return (size_t)sample * shape->seq_len * shape->out_row + (size_t)head * shape->head_dim;
}

/* Start of (B,nh,T). */
static __device__ __forceinline__ size_t saved_at(const struct attention_shape *shape, int sample,
                                                  int head)
{
    return ((size_t)sample * shape->n_heads + head) * shape->seq_len;
}

/* The documents of a sample, or NULL. */
static __device__ __forceinline__ const int32_t *documents_at(const struct attention_shape *shape,
                                                              int sample)
{
    return shape->segments ? shape->segments + (size_t)sample * shape->seq_len : NULL;
}

struct document_range {
    int32_t low, high;
};

/* Of rows first ... end-1; every lane gets the answer. One document: 0. */
static __device__ __forceinline__ struct document_range document_range_of(const int32_t *documents,
                                                                          int first, int end)
{
    struct document_range range = {0, 0};
    if (!documents) {
        return range;
    }
    range.low = INT32_MAX;
    range.high = INT32_MIN;
    for (int i = first + (int)(threadIdx.x & 31); i < end; i += 32) {
        const int32_t document = documents[i];
        range.low = document < range.low ? document : range.low;
        range.high = document > range.high ? document : range.high;
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        const int32_t low = __shfl_xor_sync(0xffffffffu, range.low, distance);
        const int32_t high = __shfl_xor_sync(0xffffffffu, range.high, distance);
        range.low = low < range.low ? low : range.low;
        range.high = high > range.high ? high : range.high;
    }
    return range;
}

static __device__ __forceinline__ bool documents_apart(struct document_range a,
                                                       struct document_range b)
{
    return a.high < b.low || b.high < a.low;
}

/* Both are the same single document: nothing to compare pair by pair. */
static __device__ __forceinline__ bool documents_equal(struct document_range a,
                                                       struct document_range b)
{
    return a.low == a.high && b.low == b.high && a.low == b.low;
}

/* The first tile of keys from `tile` on that has a document of the queries, whose own are
 * `asking`; end_tile if there is none. *out_compare: whether pairs of the tile have to be
 * compared. */
template <int KEYS>
static __device__ __forceinline__ int next_key_tile(const int32_t *documents,
                                                    struct document_range asking, int tile,
                                                    int end_tile, int seq_len, bool *out_compare)
{
    for (; documents && tile < end_tile; tile++) {
        const int first = tile * KEYS;
        const struct document_range answering =
            document_range_of(documents, first, min(first + KEYS, seq_len));
        if (!documents_apart(asking, answering)) {
            *out_compare = !documents_equal(asking, answering);
            break;
        }
    }
    return tile;
}

/* ---- dropout ---- */

/* What a block's draws have in common. */
struct attention_draw {
    uint32_t key0, key1, sample, first_token, threshold;
};

static __device__ __forceinline__ struct attention_draw
attention_draw_of(const struct attention_shape *shape, int sample)
{
    const struct philox_key key = philox_key(shape->seed, shape->varying->step);
    struct attention_draw draw = {key.key0, key.key1,
                                  shape->varying->first_sample + (uint32_t)sample,
                                  shape->first_token, shape->threshold};
    return draw;
}

static __device__ __forceinline__ uint32_t stream_of_head(const struct attention_shape *shape,
                                                          int head)
{
    return philox_stream(shape->layer, (enum random_use)shape->use,
                         shape->first_head + (uint32_t)head);
}

/* Bit i: the probability of (query, first_key + i) stays; N keys, 16 or 32. A draw covers
 * four keys, counted from the start of the whole sequence. */
template <int N>
static __device__ __forceinline__ uint32_t draw_kept(const struct attention_draw *draw,
                                                     uint32_t stream, int query, int first_key)
{
    const uint32_t first = draw->first_token + (uint32_t)first_key, offset = first % 4;
    const int n_groups = offset == 0 ? N / 4 : N / 4 + 1;
    uint64_t bits = 0;
    UNROLL_BY(1)
    for (int group = 0; group < n_groups; group++) {
        const struct philox drawn =
            philox4x32(draw->key0, draw->key1, first / 4 + (uint32_t)group,
                       draw->first_token + (uint32_t)query, draw->sample, stream);
        const uint32_t kept = (drawn.word[0] >= draw->threshold ? 1u : 0u) |
                              (drawn.word[1] >= draw->threshold ? 2u : 0u) |
                              (drawn.word[2] >= draw->threshold ? 4u : 0u) |
                              (drawn.word[3] >= draw->threshold ? 8u : 0u);
        bits |= (uint64_t)kept << (4 * group);
    }
    return (uint32_t)(bits >> offset);
}

/* The draws for a warp's 16 M queries and KEYS keys, a word of up to 32 keys each, spread over
 * the lanes: word i of lane l is number 32 i + l, counted query by query. */
template <int KEYS> constexpr int draw_word = KEYS < 32 ? KEYS : 32;
template <int M, int KEYS>
constexpr int draw_words = (31 + 16 * M * KEYS / draw_word<KEYS>) / 32; /* of a lane */

template <int M, int KEYS, int WORDS>
static __device__ __forceinline__ void draw_rows(uint32_t (&kept)[WORDS],
                                                 const struct attention_draw *draw, uint32_t stream,
                                                 int first_query, int first_key)
{
    constexpr int per_row = KEYS / draw_word<KEYS>;
    UNROLL
    for (int i = 0; i < WORDS; i++) {
        const int at = 32 * i + (int)(threadIdx.x & 31);
        const int row = at / per_row % (16 * M), word = at % per_row;
        kept[i] = draw_kept<draw_word<KEYS>>(draw, stream, first_query + row,
                                             first_key + word * draw_word<KEYS>);
    }
}

/* This thread's part of a word of row 16 m + 8 half + lane / 4: bit 8 n + e belongs to element e
 * of fragment n within the word. */
template <int M, int KEYS, int WORDS>
static __device__ __forceinline__ uint32_t kept_of_row(const uint32_t (&kept)[WORDS], int m,
                                                       int half, int word)
{
    constexpr int per_row = KEYS / draw_word<KEYS>;
    const int lane = (int)(threadIdx.x & 31), first = (16 * m + 8 * half) * per_row;
    const uint32_t bits =
        __shfl_sync(0xffffffffu, kept[first / 32], first % 32 + lane / 4 * per_row + word);
    return bits >> (lane % 4 * 2);
}

/* ---- tiles in shared memory ---- */

template <int HD> constexpr int tile_row = HD % 64 == 0 ? HD : HD + 8;

/* Element offset of a chunk of eight elements: number `chunk` + `plus`, plus being less than 8
 * and sharing no bit with it. The eight rows that an ldmatrix reads at once must lie in different
 * banks: where eight chunks are a multiple of all banks the chunks of a row trade places,
 * elsewhere rows are one chunk longer, an odd number of them. With a chunk known to the compiler
 * few different offsets are left to keep in registers. */
template <int HD> static __device__ __forceinline__ int tile_at(int row, int chunk, int plus = 0)
{
    if (HD % 64 != 0) {
        return row * tile_row<HD> + chunk * 8 + plus * 8;
    }
    return row * HD + (((chunk & 7) | plus) ^ (row & 7)) * 8 + (chunk & ~7) * 8;
}

/* Queue the copies of rows first ... first+ROWS-1 of N heads, `head_step` elements apart, to N
 * tiles, `tile_step` apart; rows from `end` on become 0 and are not read. A thread walks down
 * with one address for all heads, which takes few registers. */
template <int HD, int ROWS, int N>
static __device__ __forceinline__ void load_tiles(bf16 *tile, int tile_step, const bf16 *head,
                                                  size_t head_step, size_t row, int first, int end)
{
    constexpr int chunks = HD / 8, step = ATTENTION_THREADS / chunks;
    if constexpr (ATTENTION_THREADS % chunks == 0) {
        static_assert(ROWS % step == 0, "every thread copies as many rows");
        const int c = (int)threadIdx.x % chunks, r = (int)threadIdx.x / chunks;
        const bf16 *from = head + (size_t)(first + r) * row + c * 8;
        UNROLL
        for (int i = 0; i < ROWS / step; i++, from += step * row) {
            const int at = step % 8 == 0 ? tile_at<HD>(r, c) + i * step * tile_row<HD>
                                         : tile_at<HD>(r + i * step, c);
            UNROLL
            for (int n = 0; n < N; n++) {
                cp_async16_zfill(tile + at + n * tile_step, from + (size_t)n * head_step,
                                 first + r + i * step < end);
            }
        }
    } else {
        for (int i = (int)threadIdx.x; i < ROWS * chunks; i += ATTENTION_THREADS) {
            const int r = i / chunks, c = i % chunks;
            const bf16 *from = head + (size_t)(first + r) * row + c * 8;
            for (int n = 0; n < N; n++) {
                cp_async16_zfill(tile + tile_at<HD>(r, c) + n * tile_step,
                                 from + (size_t)n * head_step, first + r < end);
            }
        }
    }
}

template <int HD, int ROWS>
static __device__ __forceinline__ void load_tile(bf16 *tile, const bf16 *head, size_t row,
                                                 int first, int end)
{
    load_tiles<HD, ROWS, 1>(tile, 0, head, 0, row, first, end);
}

/* ---- products ---- */

/* scores(16 M rows, COLUMNS) = rows(16 M, HD) columns(COLUMNS, HD)^T; `rows` are the warp's.
 * Offsets are of a lane's place in the first sixteen rows, so that all others differ by constants.
 */
template <int HD, int M, int COLUMNS>
static __device__ __forceinline__ void multiply_scores(float (&scores)[M][COLUMNS / 8][4],
                                                       const bf16 *rows, const bf16 *columns)
{
    const int lane = (int)(threadIdx.x & 31);
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int n = 0; n < COLUMNS / 8; n++) {
            UNROLL
            for (int e = 0; e < 4; e++) {
                scores[m][n][e] = 0.0f;
            }
        }
    }
    UNROLL
    for (int k = 0; k < HD / 16; k++) {
        uint32_t left[M][4];
        UNROLL
        for (int m = 0; m < M; m++) {
            const int at = tile_at<HD>(lane % 16, 2 * k, lane / 16);
            ldmatrix_x4(left[m], rows + at + 16 * m * tile_row<HD>);
        }
        UNROLL
        for (int n = 0; n < COLUMNS / 16; n++) {
            uint32_t right[4];
            const int at = tile_at<HD>(lane % 8 + lane / 16 * 8, 2 * k, lane / 8 % 2);
            ldmatrix_x4(right, columns + at + 16 * n * tile_row<HD>);
            UNROLL
            for (int m = 0; m < M; m++) {
                mma_m16n8k16_bf16(scores[m][2 * n], left[m], right);
                mma_m16n8k16_bf16(scores[m][2 * n + 1], left[m], right + 2);
            }
        }
    }
}

/* Scores as the left operand of the next product, rounded to bf16. */
template <int M, int COLUMNS>
static __device__ __forceinline__ void round_scores(uint32_t (&left)[M][COLUMNS / 16][4],
                                                    const float (&scores)[M][COLUMNS / 8][4])
{
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int k = 0; k < COLUMNS / 16; k++) {
            const float *low = scores[m][2 * k], *high = scores[m][2 * k + 1];
            left[m][k][0] = floats_to_bf16x2(low[0], low[1]);
            left[m][k][1] = floats_to_bf16x2(low[2], low[3]);
            left[m][k][2] = floats_to_bf16x2(high[0], high[1]);
            left[m][k][3] = floats_to_bf16x2(high[2], high[3]);
        }
    }
}

/* sums(16 M rows, WIDTH) += left(16 M, COLUMNS) columns(COLUMNS, from dimension `first` on, a
 * multiple of 64). */
template <int HD, int M, int COLUMNS, int WIDTH>
static __device__ __forceinline__ void multiply_columns(float (&sums)[M][WIDTH / 8][4],
                                                        const uint32_t (&left)[M][COLUMNS / 16][4],
                                                        const bf16 *columns, int first)
{
    const int lane = (int)(threadIdx.x & 31);
    UNROLL
    for (int k = 0; k < COLUMNS / 16; k++) {
        UNROLL
        for (int n = 0; n < WIDTH / 16; n++) {
            uint32_t right[4];
            const int at = tile_at<HD>(lane % 16, 2 * n, lane / 16);
            ldmatrix_x4_trans(right, columns + first + at + 16 * k * tile_row<HD>);
            UNROLL
            for (int m = 0; m < M; m++) {
                mma_m16n8k16_bf16(sums[m][2 * n], left[m][k], right);
                mma_m16n8k16_bf16(sums[m][2 * n + 1], left[m][k], right + 2);
            }
        }
    }
}

template <int M, int WIDTH>
static __device__ __forceinline__ void zero_sums(float (&sums)[M][WIDTH / 8][4])
{
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int n = 0; n < WIDTH / 8; n++) {
            UNROLL
            for (int e = 0; e < 4; e++) {
                sums[m][n][e] = 0.0f;
            }
        }
    }
}

static __device__ __forceinline__ float factor_of(float factor, int, int)
{
    return factor;
}

template <int M>
static __device__ __forceinline__ float factor_of(const float (&factor)[M][2], int m, int half)
{
    return factor[m][half];
}

/* Write a warp's sums, each row times its factor (one for all, or [M][2]), as bf16 by way of its
 * own rows of `tile`, which it no longer needs, so that a row goes to memory in one piece. */
template <int HD, int M, int WIDTH, class Factor>
static __device__ __forceinline__ void
store_sums(bf16 *out, size_t out_row, bf16 *tile, int first_row, int n_rows,
           const float (&sums)[M][WIDTH / 8][4], const Factor &factor)
{
    const int lane = (int)(threadIdx.x & 31);
    __syncwarp();
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int n = 0; n < WIDTH / 8; n++) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                const int row = first_row + 16 * m + 8 * half + lane / 4;
                const float f = factor_of(factor, m, half), *pair = sums[m][n] + 2 * half;
                uint32_t *at = (uint32_t *)(void *)(tile + tile_at<HD>(row, n));
                at[lane % 4] = floats_to_bf16x2(pair[0] * f, pair[1] * f);
            }
        }
    }
    __syncwarp();
    constexpr int chunks = WIDTH / 8;
    for (int i = lane; i < 16 * M * chunks; i += 32) {
        const int row = first_row + i / chunks, c = i % chunks;
        if (row < n_rows) {
            *(uint4 *)(void *)(out + (size_t)row * out_row + c * 8) =
                *(const uint4 *)(const void *)(tile + tile_at<HD>(row, c));
        }
    }
}

/* ---- masks ---- */

/* Set the scores of pairs that must not meet to -infinity. `row` and `column` are the
 * positions of the warp's first row and of the tile's first column; documents may be NULL. Rows and
 * columns beyond the last are not written and meet nothing of weight. */
template <bool ROWS_ARE_KEYS, int M, int COLUMNS>
static __device__ __forceinline__ void mask_scores(float (&scores)[M][COLUMNS / 8][4], int row,
                                                   int column, const int32_t *documents,
                                                   int seq_len)
{
    const int lane = (int)(threadIdx.x & 31);
    int32_t own[2 * M] = {};
    row += lane / 4;
    column += lane % 4 * 2;
    UNROLL
    for (int i = 0; i < 2 * M; i++) {
        own[i] = documents ? documents[min(row + 8 * i, seq_len - 1)] : 0;
    }
    UNROLL
    for (int n = 0; n < COLUMNS / 8; n++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
            const int c = column + 8 * n + e;
            const int32_t other = documents ? documents[min(c, seq_len - 1)] : 0;
            UNROLL
            for (int i = 0; i < 2 * M; i++) {
                const int r = row + 8 * i;
                const bool meet = (ROWS_ARE_KEYS ? r <= c : c <= r) && own[i] == other;
                float *score = &scores[i / 2][n][i % 2 * 2 + e];
                *score = meet ? *score : -INFINITY;
            }
        }
    }
}

#endif
