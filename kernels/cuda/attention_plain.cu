/* Attention without tensor cores: fp32 tables, and bf16 with head dimensions that
 * attention_forward.cu and attention_backward.cu have no tile for. For exactness and every shape,
 * not for speed.
 *
 * A block of four warps owns sixteen rows, four a warp, that stay in shared memory as fp32
 * while tiles of 32 columns pass by; a lane owns a column of the scores, later every 32nd
 * dimension of the sums. Rows are queries and columns keys, but for dK and dV the other way
 * round. */
#include "kernels/cuda/attention.h"

enum {
    ROWS = 16,
    WARP_ROWS = ROWS / ATTENTION_WARPS,
    COLUMNS = 32,
    LANE_WIDTH = 2 * ROTARY_MAX_PAIRS / 32, /* dimensions of a lane, at most */
};

/* Floats of a row in shared memory: odd, so that a column of rows lies in different banks. */
static __host__ __device__ __forceinline__ int padded(int head_dim)
{
    return head_dim | 1;
}

template <class T>
static __device__ __forceinline__ void load_rows(float *tile, const T *head, size_t row, int first,
                                                 int n, int end, int head_dim)
{
    for (int i = (int)threadIdx.x; i < n * head_dim; i += ATTENTION_THREADS) {
        const int r = i / head_dim, c = i % head_dim;
        tile[r * padded(head_dim) + c] =
            first + r < end ? to_float(head[(size_t)(first + r) * row + c]) : 0.0f;
    }
}

/* scores[r] = row r of the warp times the lane's column. */
static __device__ __forceinline__ void dot_rows(float (&scores)[WARP_ROWS], const float *rows,
                                                const float *columns, int head_dim)
{
    const int width = padded(head_dim);
    rows += (int)threadIdx.x / 32 * WARP_ROWS * width;
    columns += (int)(threadIdx.x & 31) * width;
    for (int r = 0; r < WARP_ROWS; r++) {
        scores[r] = 0.0f;
    }
    UNROLL_BY(1)
    for (int i = 0; i < head_dim; i++) {
        const float x = columns[i];
        UNROLL
        for (int r = 0; r < WARP_ROWS; r++) {
            scores[r] = fmaf(rows[r * width + i], x, scores[r]);
        }
    }
}

/* sums(rows of the warp, dimensions of the lane) += weights(ROWS, COLUMNS) columns. */
static __device__ __forceinline__ void add_columns(float (&sums)[WARP_ROWS][LANE_WIDTH],
                                                   const float *weights, const float *columns,
                                                   int head_dim)
{
    const int lane = (int)(threadIdx.x & 31), width = padded(head_dim);
    weights += (int)threadIdx.x / 32 * WARP_ROWS * COLUMNS;
    UNROLL
    for (int i = 0; i < LANE_WIDTH; i++) {
        if (lane + 32 * i >= head_dim) {
            break;
        }
        UNROLL_BY(1)
        for (int c = 0; c < COLUMNS; c++) {
            const float x = columns[c * width + lane + 32 * i];
            UNROLL
            for (int r = 0; r < WARP_ROWS; r++) {
                sums[r][i] = fmaf(weights[r * COLUMNS + c], x, sums[r][i]);
            }
        }
    }
}

/* `rows` is the warp's first one of those that the block writes, `n` how many there are of the
 * four. */
template <class T>
static __device__ __forceinline__ void store_rows(T *rows, size_t row, int n,
                                                  const float (&sums)[WARP_ROWS][LANE_WIDTH],
                                                  const float (&factor)[WARP_ROWS], int head_dim)
{
    const int lane = (int)(threadIdx.x & 31);
    UNROLL
    for (int r = 0; r < WARP_ROWS; r++) {
        UNROLL
        for (int i = 0; i < LANE_WIDTH; i++) {
            if (r < n && lane + 32 * i < head_dim) {
                store_float(rows + (size_t)r * row + lane + 32 * i, sums[r][i] * factor[r]);
            }
        }
    }
}

static __device__ __forceinline__ bool meets(const int32_t *documents, int query, int key,
                                             int seq_len)
{
    return key <= query && query < seq_len && (!documents || documents[query] == documents[key]);
}

/* The factor of a probability: 0, or 1/(1-p). */
static __device__ __forceinline__ float keep_of(const struct attention_shape *shape, int sample,
                                                int head, int query, int key)
{
    if (shape->threshold == 0) {
        return 1.0f;
    }
    const struct attention_draw draw = attention_draw_of(shape, sample);
    const uint32_t at = draw.first_token + (uint32_t)key;
    const struct philox drawn =
        philox4x32(draw.key0, draw.key1, at / 4, draw.first_token + (uint32_t)query, draw.sample,
                   stream_of_head(shape, head));
    /* Not word[at % 4]: that would put the words into memory. */
    const uint32_t low = at & 1 ? drawn.word[1] : drawn.word[0];
    const uint32_t high = at & 1 ? drawn.word[3] : drawn.word[2];
    return (at & 2 ? high : low) >= draw.threshold ? shape->keep_scale : 0.0f;
}

static __device__ __forceinline__ float warp_max(float x)
{
    for (int distance = 16; distance > 0; distance /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
}

static __device__ __forceinline__ float warp_sum(float x)
{
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
}

/* ---- forward ---- */

/* Of the warp's queries, the same in all lanes. */
struct plain_running {
    float most[WARP_ROWS], sum[WARP_ROWS];
};

/* scores -> weights, in shared memory, and what is known of the queries so far. */
static __device__ __forceinline__ void
soften(const struct attention_shape *shape, const struct attention_block *block,
       const int32_t *documents, int key, float (&scores)[WARP_ROWS], struct plain_running *state,
       float (&sums)[WARP_ROWS][LANE_WIDTH], float *weights)
{
    const int row = (int)threadIdx.x / 32 * WARP_ROWS, lane = (int)(threadIdx.x & 31);
    UNROLL
    for (int r = 0; r < WARP_ROWS; r++) {
        const int query = block->first + row + r;
        const bool meet = meets(documents, query, key, shape->seq_len);
        const float score = meet ? scores[r] * shape->scale : -INFINITY;
        const float most = fmaxf(state->most[r], warp_max(score));
        /* A query that has met no key yet keeps -infinity; 0 instead avoids inf - inf. */
        const float base = most == -INFINITY ? 0.0f : most;
        const float shrink = expf(state->most[r] - base), p = expf(score - base);
        state->most[r] = most;
        state->sum[r] = fmaf(state->sum[r], shrink, warp_sum(p));
        for (int i = 0; i < LANE_WIDTH; i++) {
            sums[r][i] *= shrink;
        }
        weights[(row + r) * COLUMNS + lane] =
            meet ? p * keep_of(shape, block->sample, block->head, query, key) : 0.0f;
    }
}

template <class T>
static __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_plain_forward_kernel(struct attention_shape shape, T *out, float *lse, const T *qkv)
{
    const int hd = shape.head_dim, seq_len = shape.seq_len;
    DYNAMIC_SHARED(float, queries);
    float *const columns = queries + ROWS * padded(hd); /* keys, then values */
    float *const weights = columns + COLUMNS * padded(hd);
    const struct attention_block block = query_block(&shape, ROWS);
    const T *q = qkv + packed_at(&shape, block.sample, block.head);
    const T *k = qkv + packed_at(&shape, block.sample, shape.n_heads + block.head / shape.group);
    const T *v = k + (size_t)shape.n_kv_heads * hd;
    const int32_t *documents = documents_at(&shape, block.sample);
    const int end = min(block.first + ROWS, seq_len);
    const struct document_range asking = document_range_of(documents, block.first, end);
    const int row = (int)threadIdx.x / 32 * WARP_ROWS, lane = (int)(threadIdx.x & 31);

    struct plain_running state;
    float sums[WARP_ROWS][LANE_WIDTH] = {};
    for (int r = 0; r < WARP_ROWS; r++) {
        state.most[r] = -INFINITY;
        state.sum[r] = 0.0f;
    }
    load_rows(queries, q, shape.row, block.first, ROWS, seq_len, hd);
    for (int key = 0; key < end; key += COLUMNS) {
        if (documents_apart(asking, document_range_of(documents, key, min(key + COLUMNS, end)))) {
            continue;
        }
        float scores[WARP_ROWS];
        __syncthreads();
        load_rows(columns, k, shape.row, key, COLUMNS, seq_len, hd);
        __syncthreads();
        dot_rows(scores, queries, columns, hd);
        soften(&shape, &block, documents, key + lane, scores, &state, sums, weights);
        __syncthreads();
        load_rows(columns, v, shape.row, key, COLUMNS, seq_len, hd);
        __syncthreads();
        add_columns(sums, weights, columns, hd);
    }
    float factor[WARP_ROWS];
    const int first = block.first + row, n = seq_len - first;
    for (int r = 0; r < WARP_ROWS; r++) {
        factor[r] = state.sum[r] > 0.0f ? 1.0f / state.sum[r] : 0.0f;
        if (lane == 0 && r < n) {
            lse[saved_at(&shape, block.sample, block.head) + first + r] =
                state.most[r] + logf(state.sum[r]);
        }
    }
    store_rows(out + out_at(&shape, block.sample, block.head) + (size_t)first * shape.out_row,
               shape.out_row, n, sums, factor, hd);
}

/* ---- backward: the formulas are in attention_backward.cu ---- */

template <class T>
static __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_delta_kernel(struct attention_shape shape, float *delta, const T *dout, const T *out)
{
    const size_t i = (size_t)blockIdx.x * ATTENTION_WARPS + threadIdx.x / 32;
    const size_t heads = (size_t)shape.n_heads, seq_len = (size_t)shape.seq_len;
    if (i >= (size_t)shape.batch * heads * seq_len) {
        return;
    }
    const size_t token = i / (heads * seq_len) * seq_len + i % seq_len;
    const size_t at = token * shape.out_row + i / seq_len % heads * (size_t)shape.head_dim;
    float sum = 0.0f;
    for (int c = (int)(threadIdx.x & 31); c < shape.head_dim; c += 32) {
        sum = fmaf(to_float(dout[at + c]), to_float(out[at + c]), sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        delta[i] = sum;
    }
}

template <class T> struct plain_arrays {
    T *dqkv;
    const T *dout, *qkv;
    const float *lse, *delta;
};

/* The lane's pair with each row of the warp: dS goes to `slopes`, P to `weights`. */
template <class T, bool ROWS_ARE_KEYS>
static __device__ __forceinline__ void
differentiate(const struct attention_shape *shape, const struct plain_arrays<T> *arrays, int sample,
              int head, int first_row, int column, const float (&scores)[WARP_ROWS],
              const float (&douts)[WARP_ROWS], float *weights, float *slopes)
{
    const int32_t *documents = documents_at(shape, sample);
    const size_t saved = saved_at(shape, sample, head);
    const int row = (int)threadIdx.x / 32 * WARP_ROWS, lane = (int)(threadIdx.x & 31);
    UNROLL
    for (int r = 0; r < WARP_ROWS; r++) {
        const int own = first_row + row + r;
        const int query = ROWS_ARE_KEYS ? column : own, key = ROWS_ARE_KEYS ? own : column;
        float p = 0.0f, slope = 0.0f, keep = 0.0f;
        if (meets(documents, query, key, shape->seq_len)) {
            p = expf(scores[r] * shape->scale - arrays->lse[saved + query]);
            keep = keep_of(shape, sample, head, query, key);
            slope = p * (douts[r] * keep - arrays->delta[saved + query]);
        }
        if (ROWS_ARE_KEYS) {
            weights[(row + r) * COLUMNS + lane] = p * keep;
        }
        slopes[(row + r) * COLUMNS + lane] = slope;
    }
}

/* dQ of a tile of queries, or dK and dV of a tile of keys. */
template <class T, bool ROWS_ARE_KEYS>
static __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_plain_backward_kernel(struct attention_shape shape, struct plain_arrays<T> arrays)
{
    const int hd = shape.head_dim, seq_len = shape.seq_len, width = padded(hd);
    DYNAMIC_SHARED(float, rows);                            /* Q or K */
    float *const row_others = rows + ROWS * width;          /* dout or V */
    float *const columns = row_others + ROWS * width;       /* K or Q */
    float *const column_others = columns + COLUMNS * width; /* V or dout */
    float *const weights = column_others + COLUMNS * width;
    float *const slopes = weights + ROWS * COLUMNS;
    const struct attention_block block =
        ROWS_ARE_KEYS ? key_block(&shape, ROWS) : query_block(&shape, ROWS);
    const int kv_head = ROWS_ARE_KEYS ? block.head : block.head / shape.group;
    const int first_head = ROWS_ARE_KEYS ? kv_head * shape.group : block.head;
    const int end_head = ROWS_ARE_KEYS ? first_head + shape.group : first_head + 1;
    const size_t k_at = packed_at(&shape, block.sample, shape.n_heads + kv_head);
    const size_t v_at = k_at + (size_t)shape.n_kv_heads * hd;
    const int32_t *documents = documents_at(&shape, block.sample);
    const int end = min(block.first + ROWS, seq_len);
    const struct document_range own = document_range_of(documents, block.first, end);
    const int begin_column = ROWS_ARE_KEYS ? block.first / COLUMNS * COLUMNS : 0;
    const int end_column = ROWS_ARE_KEYS ? seq_len : end;
    const int row = (int)threadIdx.x / 32 * WARP_ROWS, lane = (int)(threadIdx.x & 31);

    float sums[WARP_ROWS][LANE_WIDTH] = {}, other_sums[WARP_ROWS][LANE_WIDTH] = {};
    if (ROWS_ARE_KEYS) {
        load_rows(rows, arrays.qkv + k_at, shape.row, block.first, ROWS, seq_len, hd);
        load_rows(row_others, arrays.qkv + v_at, shape.row, block.first, ROWS, seq_len, hd);
    }
    for (int head = first_head; head < end_head; head++) {
        const T *q = arrays.qkv + packed_at(&shape, block.sample, head);
        const T *dout = arrays.dout + out_at(&shape, block.sample, head);
        if (!ROWS_ARE_KEYS) {
            load_rows(rows, q, shape.row, block.first, ROWS, seq_len, hd);
            load_rows(row_others, dout, shape.out_row, block.first, ROWS, seq_len, hd);
        }
        for (int column = begin_column; column < end_column; column += COLUMNS) {
            if (documents_apart(
                    own, document_range_of(documents, column, min(column + COLUMNS, end_column)))) {
                continue;
            }
            float scores[WARP_ROWS], douts[WARP_ROWS];
            __syncthreads();
            load_rows(columns, ROWS_ARE_KEYS ? q : arrays.qkv + k_at, shape.row, column, COLUMNS,
                      seq_len, hd);
            load_rows(column_others, ROWS_ARE_KEYS ? dout : arrays.qkv + v_at,
                      ROWS_ARE_KEYS ? shape.out_row : shape.row, column, COLUMNS, seq_len, hd);
            __syncthreads();
            dot_rows(scores, rows, columns, hd);
            dot_rows(douts, row_others, column_others, hd);
            differentiate<T, ROWS_ARE_KEYS>(&shape, &arrays, block.sample, head, block.first,
                                            column + lane, scores, douts, weights, slopes);
            __syncwarp(); /* a warp's weights are its own */
            add_columns(sums, slopes, columns, hd);
            if (ROWS_ARE_KEYS) {
                add_columns(other_sums, weights, column_others, hd);
            }
        }
    }
    const float scale = shape.scale;
    const float scales[WARP_ROWS] = {scale, scale, scale, scale};
    const float ones[WARP_ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
    const int first = block.first + row, n = seq_len - first;
    const size_t from = (size_t)first * shape.row;
    const size_t at = ROWS_ARE_KEYS ? k_at : packed_at(&shape, block.sample, block.head);
    store_rows(arrays.dqkv + at + from, shape.row, n, sums, scales, hd);
    if (ROWS_ARE_KEYS) {
        store_rows(arrays.dqkv + v_at + from, shape.row, n, other_sums, ones, hd);
    }
}

/* ---- launching ---- */

static size_t plain_bytes(const struct attention_shape *shape, int n_rows, int n_weights)
{
    return (size_t)(n_rows * padded(shape->head_dim) + n_weights * ROWS * COLUMNS) * sizeof(float);
}

template <class T>
static void launch_forward(cudaStream_t stream, const struct cuda_attention_forward *args)
{
    const struct attention_shape shape = attention_shape_of(&args->attention, args->varying);
    LAUNCH(attention_plain_forward_kernel<T>, attention_grid(&shape, shape.n_heads, ROWS),
           ATTENTION_THREADS, plain_bytes(&shape, ROWS + COLUMNS, 1), stream, shape, (T *)args->out,
           args->lse, (const T *)args->qkv);
}

void attention_plain_forward(cudaStream_t stream, const struct cuda_attention_forward *args)
{
    if (args->dtype == DTYPE_BF16) {
        launch_forward<bf16>(stream, args);
    } else {
        launch_forward<float>(stream, args);
    }
}

template <class T>
static void launch_delta(cudaStream_t stream, const struct cuda_attention_backward *args)
{
    const struct attention_shape shape = attention_shape_of(&args->attention, args->varying);
    LAUNCH(attention_delta_kernel<T>, attention_grid(&shape, shape.n_heads, ATTENTION_WARPS),
           ATTENTION_THREADS, 0, stream, shape, args->delta, (const T *)args->dout,
           (const T *)args->out);
}

void attention_delta(cudaStream_t stream, const struct cuda_attention_backward *args)
{
    if (args->dtype == DTYPE_BF16) {
        launch_delta<bf16>(stream, args);
    } else {
        launch_delta<float>(stream, args);
    }
}

template <class T>
static void launch_backward(cudaStream_t stream, const struct cuda_attention_backward *args)
{
    const struct attention_shape shape = attention_shape_of(&args->attention, args->varying);
    const struct plain_arrays<T> arrays = {
        (T *)args->dqkv, (const T *)args->dout, (const T *)args->qkv, args->lse, args->delta
    };
    const size_t bytes = plain_bytes(&shape, 2 * (ROWS + COLUMNS), 2);
    LAUNCH((attention_plain_backward_kernel<T, false>), attention_grid(&shape, shape.n_heads, ROWS),
           ATTENTION_THREADS, bytes, stream, shape, arrays);
    LAUNCH((attention_plain_backward_kernel<T, true>),
           attention_grid(&shape, shape.n_kv_heads, ROWS), ATTENTION_THREADS, bytes, stream, shape,
           arrays);
}

void attention_plain_backward(cudaStream_t stream, const struct cuda_attention_backward *args)
{
    if (args->dtype == DTYPE_BF16) {
        launch_backward<bf16>(stream, args);
    } else {
        launch_backward<float>(stream, args);
    }
}
