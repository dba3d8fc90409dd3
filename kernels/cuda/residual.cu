/* The residual stream: sum and dropout in one pass. A dropped element is a function of its place
 * in the run (kernels/philox.h), so the backward pass draws again instead of keeping a mask.
 * Owns nothing. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.h"

enum { RESIDUAL_THREADS = 256, COUNTER_WORDS = 4 };

struct residual_call {
    void *out;
    const void *residual, *branch; /* residual NULL: none */
    size_t rows, width;
    uint32_t threshold; /* 0: no dropout */
    float scale;
    uint64_t seed;
    uint32_t first_token, seq_len, stream;
    const struct cuda_varying *varying; /* read when there is dropout */
};

/* The random words of N columns from `column` on, of a counter's last three words. */
template <int N>
static __device__ __forceinline__ void draw(uint32_t (&word)[N], struct philox_key key,
                                            size_t column, uint32_t token, uint32_t sample,
                                            uint32_t stream)
{
    if constexpr (N == 1) {
        const struct philox drawn = philox4x32(
            key.key0, key.key1, (uint32_t)(column / COUNTER_WORDS), token, sample, stream);
        const unsigned which = (unsigned)(column % COUNTER_WORDS);
        word[0] = which < 2 ? (which == 0 ? drawn.word[0] : drawn.word[1])
                            : (which == 2 ? drawn.word[2] : drawn.word[3]);
    } else {
        for (int i = 0; i < N; i += COUNTER_WORDS) {
            const struct philox drawn =
                philox4x32(key.key0, key.key1, (uint32_t)((column + (size_t)i) / COUNTER_WORDS),
                           token, sample, stream);
            for (int j = 0; j < COUNTER_WORDS; j++) {
                word[i + j] = drawn.word[j];
            }
        }
    }
}

/* blockIdx.y goes over rows, blockIdx.x over their columns. out may be residual or branch. */
template <typename T, int N>
__global__ void __launch_bounds__(RESIDUAL_THREADS) residual_rows(struct residual_call c)
{
    const size_t column = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    const bool drops = c.threshold != 0;
    struct philox_key key = {0, 0};
    uint32_t first_sample = 0;
    if (drops) {
        key = philox_key(c.seed, c.varying->step);
        first_sample = c.varying->first_sample;
    }
    for (size_t r = blockIdx.y; r < c.rows && column < c.width; r += gridDim.y) {
        const size_t at = r * c.width + column;
        float v[N];
        load(v, (const T *)c.branch + at);
        if (drops) {
            uint32_t word[N];
            draw(word, key, column, c.first_token + (uint32_t)(r % c.seq_len),
                 first_sample + (uint32_t)(r / c.seq_len), c.stream);
            for (int j = 0; j < N; j++) {
                v[j] = word[j] >= c.threshold ? __fmul_rn(v[j], c.scale) : 0.0f;
            }
        }
        if (c.residual != NULL || drops) { /* a dropped -0 becomes 0, as it does on the CPU */
            float base[N];
            set(base, 0.0f);
            if (c.residual != NULL) {
                load(base, (const T *)c.residual + at);
            }
            for (int j = 0; j < N; j++) {
                v[j] = __fadd_rn(base[j], v[j]);
            }
        }
        store((T *)c.out + at, v);
    }
}

template <typename T, int N>
static void launch(cudaStream_t stream, const struct residual_call *args)
{
    const size_t items = (args->width + N - 1) / N;
    const unsigned threads = block_threads(items, RESIDUAL_THREADS);
    const dim3 grid(blocks_x((items + threads - 1) / threads), blocks_y(args->rows));
    LAUNCH((residual_rows<T, N>), grid, dim3(threads), 0, stream, *args);
}

template <typename T> static void choose(cudaStream_t stream, const struct residual_call *args)
{
    if (in_packs<T>(args->width, args->out, args->residual, args->branch)) {
        launch<T, PACK<T>>(stream, args);
    } else {
        launch<T, 1>(stream, args);
    }
}

static void residual(cudaStream_t stream, enum dtype dtype, struct residual_call *args,
                     const struct dropout *d, const struct cuda_varying *varying)
{
    if (args->rows == 0 || args->width == 0) {
        return;
    }
    if (d->p > 0.0f) {
        args->threshold = dropout_threshold(d->p);
        args->scale = dropout_scale(d->p);
        args->seed = d->seed;
        args->first_token = d->first_token;
        args->seq_len = d->seq_len;
        args->stream = philox_stream(d->layer, (enum random_use)d->use, 0);
        args->varying = varying;
    }
    if (args->threshold == 0 && args->residual == NULL && args->out == args->branch) {
        return;
    }
    if (dtype == DTYPE_BF16) {
        choose<bf16>(stream, args);
    } else {
        choose<float>(stream, args);
    }
}

void cuda_launch_residual_dropout(cudaStream_t stream, const struct cuda_residual_dropout *args)
{
    struct residual_call call = {};
    call.out = args->out;
    call.residual = args->residual;
    call.branch = args->branch;
    call.rows = args->rows;
    call.width = args->width;
    residual(stream, args->dtype, &call, &args->dropout, args->varying);
}

void cuda_launch_dropout_backward(cudaStream_t stream, const struct cuda_dropout_backward *args)
{
    struct residual_call call = {};
    call.out = args->dbranch;
    call.branch = args->dout;
    call.rows = args->rows;
    call.width = args->width;
    residual(stream, args->dtype, &call, &args->dropout, args->varying);
}
