/* Embedding tables. Forward takes a block for each row.
 *
 * Backward adds the rows of a table's entry in order, without atomics, sorting or scratch: the
 * block of row n leaves when an earlier row has the same token; else the entry is its own, and it
 * adds row n and all later rows with that token. Most rows of a text leave early, as a frequent
 * token has come before; the others read the list of tokens once, which stays in the cache.
 * Owns nothing. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.h"

enum {
    EMBED_THREADS = 256,
    EMBED_WARPS = EMBED_THREADS / WARP_LANES,
    TOKENS_AT_ONCE = 4, /* that a thread compares: 16 bytes */
    CHUNK_TOKENS = EMBED_THREADS * TOKENS_AT_ONCE,
    ADDED_AT_ONCE = 4 /* rows under way before they are added */
};

template <typename T, int N>
__global__ void __launch_bounds__(EMBED_THREADS) embed_forward_rows(struct cuda_embed_forward c)
{
    const T *wte = (const T *)c.wte, *wpe = (const T *)c.wpe;
    const size_t first = (size_t)threadIdx.x * N, step = (size_t)blockDim.x * N;
    for (size_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        const T *token = wte + (size_t)c.tokens[r] * c.width;
        const T *position = wpe != NULL ? wpe + (size_t)c.positions[r] * c.width : NULL;
        for (size_t i = first; i < c.width; i += step) {
            float v[N];
            load(v, token + i);
            if (position != NULL) {
                float p[N];
                load(p, position + i);
                for (int j = 0; j < N; j++) {
                    v[j] += p[j];
                }
            }
            store((T *)c.out + r * c.width + i, v);
        }
    }
}

/* One table of the backward pass: table[index[r]] += dout[r]. */
struct scatter {
    float *table;
    const void *dout;
    const int32_t *index;
    size_t rows, width;
};

/* Bit j: whether index[at + j] is `wanted` and comes before `end`. */
static __device__ __forceinline__ unsigned matches(const int32_t *index, size_t at, size_t end,
                                                   int32_t wanted)
{
    if (at >= end) {
        return 0;
    }
    pack<int32_t, TOKENS_AT_ONCE> four;
    const bool whole = at + TOKENS_AT_ONCE <= end && (uintptr_t)index % PACK_BYTES == 0;
    if (whole) {
        four = *reinterpret_cast<const pack<int32_t, TOKENS_AT_ONCE> *>(index + at);
    }
    unsigned found = 0;
    for (int j = 0; j < TOKENS_AT_ONCE; j++) {
        const size_t i = at + (size_t)j;
        if (i < end && (whole ? four.value[j] : index[i]) == wanted) {
            found |= 1u << j;
        }
    }
    return found;
}

/* Whether index[0 .. n) holds `wanted`; all threads of the block together. */
static __device__ __forceinline__ bool comes_before(const int32_t *index, size_t n, int32_t wanted)
{
    __shared__ unsigned of_warp[2][EMBED_WARPS];
    for (size_t chunk = 0, turn = 0; chunk < n; chunk += CHUNK_TOKENS, turn ^= 1) {
        const size_t at = chunk + (size_t)threadIdx.x * TOKENS_AT_ONCE;
        const unsigned any = __ballot_sync(0xFFFFFFFFu, matches(index, at, n, wanted) != 0);
        if (threadIdx.x % WARP_LANES == 0) {
            of_warp[turn][threadIdx.x / WARP_LANES] = any;
        }
        __syncthreads(); /* one is enough: the next chunk writes the other half */
        unsigned found = 0;
        for (int warp = 0; warp < EMBED_WARPS; warp++) {
            found |= of_warp[turn][warp];
        }
        if (found != 0) {
            return true;
        }
    }
    return false;
}

/* Lists which of index[chunk .. chunk + CHUNK_TOKENS) are `wanted`, in order: their distances from
 * `chunk`. Returns how many; all threads of the block together. */
static __device__ __forceinline__ unsigned
list_matches(unsigned short *list, const struct scatter *s, size_t chunk, int32_t wanted)
{
    __shared__ unsigned of_warp[EMBED_WARPS];
    const unsigned lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    const unsigned place = threadIdx.x * TOKENS_AT_ONCE;
    const unsigned found = matches(s->index, chunk + place, s->rows, wanted);
    unsigned before = 0, of_this_warp = 0;
    for (int j = 0; j < TOKENS_AT_ONCE; j++) {
        const unsigned lanes = __ballot_sync(0xFFFFFFFFu, (int)(found >> j & 1u));
        before += (unsigned)__popc(lanes & ((1u << lane) - 1u));
        of_this_warp += (unsigned)__popc(lanes);
    }
    __syncthreads(); /* who reads the last chunk's list has done so */
    if (lane == 0) {
        of_warp[warp] = of_this_warp;
    }
    __syncthreads();
    unsigned total = 0;
    for (unsigned w = 0; w < EMBED_WARPS; w++) {
        before += w < warp ? of_warp[w] : 0u;
        total += of_warp[w];
    }
    for (unsigned j = 0; j < TOKENS_AT_ONCE; j++) {
        if (found >> j & 1u) {
            list[before++] = (unsigned short)(place + j);
        }
    }
    if (total != 0) {
        __syncthreads();
    }
    return total;
}

/* blockIdx.x is the row, blockIdx.y the slice of columns, N to a thread. */
template <typename T, int N>
__global__ void __launch_bounds__(EMBED_THREADS, 4) embed_scatter(struct scatter s)
{
    __shared__ unsigned short list[CHUNK_TOKENS];
    const size_t column = ((size_t)blockIdx.y * EMBED_THREADS + threadIdx.x) * N;
    const bool mine = column < s.width;
    for (size_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
        const int32_t wanted = s.index[row];
        __syncthreads();
        if (comes_before(s.index, row, wanted)) {
            continue;
        }
        float *entry = s.table + (size_t)wanted * s.width + column;
        float sum[N];
        set(sum, 0.0f);
        if (mine) {
            load(sum, entry);
        }
        for (size_t chunk = row / CHUNK_TOKENS * CHUNK_TOKENS; chunk < s.rows;
             chunk += CHUNK_TOKENS) {
            const unsigned n = list_matches(list, &s, chunk, wanted);
            const T *dout = (const T *)s.dout + chunk * s.width + column;
            for (unsigned i = 0; i < n && mine; i += ADDED_AT_ONCE) {
                float d[ADDED_AT_ONCE][N];
                for (unsigned a = 0; a < ADDED_AT_ONCE; a++) { /* no branch between them */
                    const unsigned which = i + a < n ? i + a : n - 1;
                    load(d[a], dout + (size_t)list[which] * s.width);
                }
                for (unsigned a = 0; a < ADDED_AT_ONCE; a++) {
                    for (int j = 0; j < N; j++) {
                        sum[j] = i + a < n ? sum[j] + d[a][j] : sum[j];
                    }
                }
            }
        }
        if (mine) {
            store(entry, sum);
        }
    }
}

template <typename T, int N>
static void launch_forward(cudaStream_t stream, const struct cuda_embed_forward *args)
{
    const unsigned threads = block_threads((args->width + N - 1) / N, EMBED_THREADS);
    LAUNCH((embed_forward_rows<T, N>), dim3(blocks_x(args->rows)), dim3(threads), 0, stream, *args);
}

template <typename T, int N>
static void launch_scatter(cudaStream_t stream, const struct scatter *args)
{
    const size_t slice = (size_t)EMBED_THREADS * N;
    const dim3 grid(blocks_x(args->rows), blocks_y((args->width + slice - 1) / slice));
    LAUNCH((embed_scatter<T, N>), grid, dim3(EMBED_THREADS), 0, stream, *args);
}

template <typename T>
static void choose_forward(cudaStream_t stream, const struct cuda_embed_forward *args)
{
    if (in_packs<T>(args->width, args->out, args->wte, args->wpe)) {
        launch_forward<T, PACK<T>>(stream, args);
    } else {
        launch_forward<T, 1>(stream, args);
    }
}

/* The table is fp32: a thread reads and writes a pack's columns of it 16 bytes at a time, as its
 * alignment is that of 4 floats at least. */
template <typename T> static void choose_scatter(cudaStream_t stream, const struct scatter *args)
{
    if (in_packs<T>(args->width, args->table, args->dout)) {
        launch_scatter<T, PACK<T>>(stream, args);
    } else {
        launch_scatter<T, 1>(stream, args);
    }
}

void cuda_launch_embed_forward(cudaStream_t stream, const struct cuda_embed_forward *args)
{
    if (args->rows == 0 || args->width == 0) {
        return;
    }
    if (args->dtype == DTYPE_BF16) {
        choose_forward<bf16>(stream, args);
    } else {
        choose_forward<float>(stream, args);
    }
}

void cuda_launch_embed_backward(cudaStream_t stream, const struct cuda_embed_backward *args)
{
    if (args->rows == 0 || args->width == 0) {
        return;
    }
    const struct scatter tables[2] = {
        {args->dwte, args->dout, args->tokens, args->rows, args->width},
        {args->dwpe, args->dout, args->positions, args->rows, args->width}};
    for (int i = 0; i < 2; i++) {
        if (tables[i].table == NULL) {
            continue;
        }
        if (args->dtype == DTYPE_BF16) {
            choose_scatter<bf16>(stream, &tables[i]);
        } else {
            choose_scatter<float>(stream, &tables[i]);
        }
    }
}
