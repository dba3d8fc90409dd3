/* The emulator that runs kernels on the CPU: that its instructions do what a GPU's do, and that
 * it catches the faults it promises to (kernels/cuda/emulate/fibres.h).
 *
 * links: fibres
 *
 * C++ because it holds kernels. Faults end the process, so each runs in a child. */
#include "kernels/cuda/portable.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static int n_failed;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                 \
            n_failed++;                                                                            \
        }                                                                                          \
    } while (0)

/* A launch runs at once, or is kept for the test to run. */
static bool keep_launch;
static void (*kept_run)(void *closure);
static void *kept_closure;

void emulate_enqueue(cudaStream_t stream, const char *name, void (*run)(void *closure),
                     const void *closure, size_t bytes)
{
    void *copy = malloc(bytes);
    CHECK(stream == NULL && name != NULL);
    memcpy(copy, closure, bytes);
    if (keep_launch) {
        kept_run = run;
        kept_closure = copy;
        return;
    }
    run(copy);
    free(copy);
}

static const uint32_t ALL = 0xFFFFFFFFu;
static const char *const ORDERS[] = {"forward", "reverse", "1", "2", "3", "4", "5", "6"};
enum { N_ORDERS = sizeof ORDERS / sizeof *ORDERS };

static uint32_t next_random(void)
{
    static uint32_t state = 12345;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static float next_float(void)
{
    return (float)next_random() / 8388608.0f - 1.0f;
}

/* ---- every thread once, arguments by value ---- */

struct counted {
    int shape[3];
    int *count;
};

static __global__ void count_threads(struct counted by_value, int n)
{
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;
    by_value.count[i] += i < (unsigned)n ? by_value.shape[0]++ : 0; /* own copy: always 1 */
}

static void every_thread_once(void)
{
    const dim3 grid(3, 5, 2), block(7, 3, 4);
    enum { N = 3 * 5 * 2 * 7 * 3 * 4 };
    for (int o = 0; o < N_ORDERS; o++) {
        int count[N] = {0};
        struct counted counted = {{1, 2, 3}, count};
        setenv("BALLAST_FIBRES_ORDER", ORDERS[o], 1);
        LAUNCH(count_threads, grid, block, 0, NULL, counted, N);
        for (int i = 0; i < N; i++) {
            CHECK(count[i] == 1);
        }
    }
}

/* Arguments are taken when it is launched; a captured launch may be run again. */
static void launches_can_wait(void)
{
    int count[6] = {0};
    struct counted counted = {{1, 0, 0}, count};
    int n = 6;
    keep_launch = true;
    LAUNCH(count_threads, n / 3, 3, 0, NULL, counted, n);
    keep_launch = false;
    counted.shape[0] = 100;
    counted.count = NULL;
    n = 1;
    CHECK(count[0] == 0);
    kept_run(kept_closure);
    kept_run(kept_closure);
    free(kept_closure);
    for (int i = 0; i < 6; i++) {
        CHECK(count[i] == 2);
    }
}

static __global__ void record_order(int *order, int *n)
{
    order[atomicAdd(n, 1)] = (int)(blockIdx.x * blockDim.x + threadIdx.x);
}

static void orders_differ(void)
{
    enum { N = 5 * 77 };
    int orders[4][N];
    const char *const names[4] = {"forward", "reverse", "7", "8"};
    for (int o = 0; o < 4; o++) {
        int n = 0, sum = 0, n_forward = 0, n_reverse = 0;
        setenv("BALLAST_FIBRES_ORDER", names[o], 1);
        LAUNCH(record_order, 5, 77, 0, NULL, orders[o], &n);
        for (int i = 0; i < N; i++) {
            sum += orders[o][i];
            n_forward += orders[o][i] == i;
            n_reverse += orders[o][i] == N - 1 - i;
        }
        CHECK(n == N && sum == N * (N - 1) / 2);
        CHECK((n_forward == N) == (o == 0));
        CHECK((n_reverse == N) == (o == 1));
    }
    CHECK(memcmp(orders[2], orders[3], sizeof orders[2]) != 0);
}

/* ---- shuffles and votes ---- */

static __global__ void shuffle_all(int width, int *got)
{
    const int lane = threadIdx.x, value = 100 + lane;
    got += blockIdx.x * 32 * 8 + lane * 8;
    got[0] = __shfl_sync(ALL, value, lane + 3, width);
    got[1] = __shfl_xor_sync(ALL, value, 5, width);
    got[2] = __shfl_down_sync(ALL, value, 3, width);
    got[3] = __shfl_up_sync(ALL, value, 3, width);
    got[4] = (int)__ballot_sync(ALL, lane % 3 == 0);
    got[5] = __any_sync(ALL, lane == 17) + 2 * __any_sync(ALL, lane == 40);
    got[6] = __all_sync(ALL, lane < 32) + 2 * __all_sync(ALL, lane != 17);
    got[7] = (int)(__shfl_xor_sync(ALL, 0.5 + lane, 1, 32) * 2.0);
}

static void shuffles_move(void)
{
    int got[2 * 32 * 8];
    for (int width = 2; width <= 32; width *= 2) {
        LAUNCH(shuffle_all, 2, 32, 0, NULL, width, got);
        for (int i = 0; i < 64; i++) {
            const int lane = i % 32, base = lane / width * width, last = base + width - 1;
            const int *g = got + 8 * i, next = (lane ^ 5) <= last ? lane ^ 5 : lane;
            CHECK(g[0] == 100 + base + (lane + 3) % width);
            CHECK(g[1] == 100 + next);
            CHECK(g[2] == 100 + (lane + 3 <= last ? lane + 3 : lane));
            CHECK(g[3] == 100 + (lane - 3 >= base ? lane - 3 : lane));
            CHECK((unsigned)g[4] == 0x49249249u);
            CHECK(g[5] == 1 && g[6] == 1 && g[7] == 2 * (lane ^ 1) + 1);
        }
    }
}

/* Halves of a warp go ways of their own, at different speeds. */
static __global__ void halves_apart(int *got)
{
    const int lane = threadIdx.x;
    int value = lane;
    if (lane < 16) {
        for (int i = 0; i < 5; i++) {
            value = __shfl_xor_sync(0x0000FFFFu, value, 1 + i) + 1;
        }
    } else {
        value = __shfl_sync(0xFFFF0000u, value, 20);
        __syncwarp(0xFFFF0000u);
    }
    value += 1000 * __shfl_xor_sync(ALL, lane, 16);
    got[lane] = value;
}

static void masks_split_a_warp(void)
{
    int got[32];
    LAUNCH(halves_apart, 1, 32, 0, NULL, got);
    for (int lane = 0; lane < 32; lane++) {
        const int own = lane < 16 ? (lane ^ 1 ^ 2 ^ 3 ^ 4 ^ 5) + 5 : 20;
        CHECK(got[lane] == own + 1000 * (lane ^ 16));
    }
}

/* ---- barriers, and what is missing without them ---- */

/* mode 0: right; 1: no barrier between write and read; 2: none before the next write. */
static __global__ void pass_around(int mode, int rounds, int *got)
{
    DYNAMIC_SHARED(int, shared);
    const unsigned t = threadIdx.x, n = blockDim.x;
    int value = (int)(t + blockIdx.x);
    for (int round = 0; round < rounds; round++) {
        shared[t] = value;
        if (mode != 1) {
            __syncthreads();
        }
        value = 3 * shared[(t + 37) % n] + 1;
        if (mode != 2) {
            __syncthreads();
        }
    }
    got[blockIdx.x * n + t] = value;
}

/* Whether some order gives a wrong result. */
static bool passes_wrongly(int mode, int rounds, int n)
{
    int got[2 * 192];
    bool wrong = false;
    for (int o = 0; o < N_ORDERS; o++) {
        setenv("BALLAST_FIBRES_ORDER", ORDERS[o], 1);
        LAUNCH(pass_around, 2, n, (size_t)n * sizeof(int), NULL, mode, rounds, got);
        for (int i = 0; i < 2 * n; i++) {
            int value = i / n + (i % n + 37 * rounds) % n;
            for (int round = 0; round < rounds; round++) {
                value = 3 * value + 1;
            }
            wrong = wrong || value != got[i];
        }
    }
    return wrong;
}

static void order_shows_missing_barriers(void)
{
    CHECK(!passes_wrongly(0, 5, 192));
    CHECK(!passes_wrongly(0, 5, 77));
    CHECK(passes_wrongly(1, 1, 192));
    CHECK(passes_wrongly(2, 2, 192));
    CHECK(passes_wrongly(1, 1, 20)); /* inside a warp, too */
}

static __global__ void sum_block(const float *values, float *sums)
{
    __shared__ float parts[32];
    float sum = values[blockIdx.x * blockDim.x + threadIdx.x];
    for (int bits = 16; bits > 0; bits /= 2) {
        sum += __shfl_xor_sync(ALL, sum, bits);
    }
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32) {
        for (int bits = 16; bits > 0; bits /= 2) {
            sum += __shfl_xor_sync(ALL, sum, bits);
        }
        if (threadIdx.x == 0) {
            sums[blockIdx.x] = sum;
        }
    }
}

static void sums_in_any_order(void)
{
    float values[3 * 1024], sums[3];
    for (int i = 0; i < 3 * 1024; i++) {
        values[i] = (float)(next_random() % 1000);
    }
    for (int o = 0; o < N_ORDERS; o++) {
        setenv("BALLAST_FIBRES_ORDER", ORDERS[o], 1);
        LAUNCH(sum_block, 3, 1024, 0, NULL, values, sums);
        for (int block = 0; block < 3; block++) {
            float sum = 0.0f;
            for (int i = 0; i < 1024; i++) {
                sum += values[block * 1024 + i];
            }
            CHECK(sum == sums[block]);
        }
    }
}

static __global__ void read_dynamic(int *n_numbers)
{
    DYNAMIC_SHARED(uint32_t, shared);
    const uint32_t found = shared[threadIdx.x];
    if (__uint_as_float(found) == __uint_as_float(found) ||
        bf16_to_float(bf16{(uint16_t)found}) == bf16_to_float(bf16{(uint16_t)found})) {
        atomicAdd(n_numbers, 1);
    }
    shared[threadIdx.x] = 0; /* for the next block to find, if it could */
}

static void dynamic_shared_begins_as_nan(void)
{
    int n_numbers = 0;
    LAUNCH(read_dynamic, 3, 64, 64 * sizeof(uint32_t), NULL, &n_numbers);
    CHECK(n_numbers == 0);
}

/* ---- bf16 ---- */

static void bf16_rounds_to_nearest_even(void)
{
    for (uint32_t i = 0; i < 65536; i++) {
        const float x = bf16_to_float(bf16{(uint16_t)i});
        CHECK(float_to_bf16(x).bits == (x != x ? 0x7FFF : i));
        if ((i & 0x7F80) == 0x7F80 || (i & 0x7FFF) == 0x7F7F) {
            continue;
        }
        /* Exactly between two neighbours, and one unit of fp32 to either side. */
        const uint32_t half = i << 16 | 0x8000;
        CHECK(float_to_bf16(__uint_as_float(half - 1)).bits == i);
        CHECK(float_to_bf16(__uint_as_float(half)).bits == i + i % 2);
        CHECK(float_to_bf16(__uint_as_float(half + 1)).bits == i + 1);
    }
    CHECK(float_to_bf16(3.4e38f).bits == 0x7F80 && float_to_bf16(-3.4e38f).bits == 0xFF80);
    CHECK(floats_to_bf16x2(1.0f, -2.0f) == 0xC0003F80u);
    CHECK(bf16x2_to_floats(0xC0003F80u).x == 1.0f && bf16x2_to_floats(0xC0003F80u).y == -2.0f);
}

/* ---- matrix instructions ---- */

enum { PITCH = 24 }; /* elements a row of shared memory takes: 48 bytes */

/* c(16,8) += a(16,16) b(8,16)^T, operands by ldmatrix or gathered by hand. */
static __global__ void multiply_tile(const bf16 *a, const bf16 *b, float *c, bool by_hand)
{
    __shared__ __align__(16) bf16 sa[16 * PITCH], sb[8 * PITCH];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4 * 2;
    for (int i = lane; i < 256; i += 32) {
        sa[i / 16 * PITCH + i % 16] = a[i];
    }
    for (int i = lane; i < 128; i += 32) {
        sb[i / 16 * PITCH + i % 16] = b[i];
    }
    __syncwarp();
    uint32_t ra[4], rb[2];
    float d[4];
    ldmatrix_x4(ra, sa + lane % 16 * PITCH + lane / 16 * 8);
    ldmatrix_x2(rb, sb + lane % 8 * PITCH + lane / 8 % 2 * 8);
    if (by_hand) {
        for (int i = 0; i < 4; i++) {
            memcpy(&ra[i], sa + (g + i % 2 * 8) * PITCH + t + i / 2 * 8, 4);
        }
        for (int i = 0; i < 2; i++) {
            memcpy(&rb[i], sb + g * PITCH + t + i * 8, 4);
        }
    }
    for (int i = 0; i < 4; i++) {
        d[i] = c[(g + i / 2 * 8) * 8 + t + i % 2];
    }
    mma_m16n8k16_bf16(d, ra, rb);
    for (int i = 0; i < 4; i++) {
        c[(g + i / 2 * 8) * 8 + t + i % 2] = d[i];
    }
}

static void mma_multiplies(void)
{
    bf16 a[256], b[128];
    float c[128], got[2][128];
    for (int i = 0; i < 256; i++) {
        a[i] = float_to_bf16(next_float());
    }
    for (int i = 0; i < 128; i++) {
        b[i] = float_to_bf16(next_float());
        got[0][i] = got[1][i] = c[i] = next_float();
    }
    for (int i = 0; i < 128; i++) {
        for (int k = 0; k < 16; k++) {
            c[i] += bf16_to_float(a[i / 8 * 16 + k]) * bf16_to_float(b[i % 8 * 16 + k]);
        }
    }
    LAUNCH(multiply_tile, 1, 32, 0, NULL, a, b, got[0], false);
    LAUNCH(multiply_tile, 1, 32, 0, NULL, a, b, got[1], true);
    CHECK(memcmp(c, got[0], sizeof c) == 0);
    CHECK(memcmp(c, got[1], sizeof c) == 0);
}

/* Four matrices of 8x8 one below the other, element = its number; what each lane gets. */
static __global__ void load_matrices(uint32_t *plain, uint32_t *transposed)
{
    __shared__ __align__(16) uint16_t matrices[32 * PITCH];
    const int lane = threadIdx.x;
    for (int i = 0; i < 8; i++) {
        matrices[lane * PITCH + i] = (uint16_t)(lane * 8 + i);
    }
    __syncwarp();
    ldmatrix_x4(plain + lane * 6, matrices + lane * PITCH);
    ldmatrix_x4_trans(transposed + lane * 6, matrices + lane * PITCH);
    /* x2 takes no notice of the upper half's addresses. */
    const uint16_t *row = lane < 16 ? matrices + lane * PITCH : matrices + 1;
    ldmatrix_x2(plain + lane * 6 + 4, row);
    ldmatrix_x2_trans(transposed + lane * 6 + 4, row);
}

static void ldmatrix_distributes(void)
{
    uint32_t plain[32 * 6], transposed[32 * 6];
    LAUNCH(load_matrices, 1, 32, 0, NULL, plain, transposed);
    for (uint32_t lane = 0; lane < 32; lane++) {
        for (uint32_t i = 0; i < 6; i++) {
            const uint32_t first = i % 4 * 64, major = lane / 4, minor = lane % 4 * 2;
            const uint32_t row = first + major * 8 + minor, column = first + minor * 8 + major;
            CHECK(plain[lane * 6 + i] == (row | (row + 1) << 16));
            CHECK(transposed[lane * 6 + i] == (column | (column + 8) << 16));
        }
    }
}

/* ---- asynchronous copies ---- */

/* Sum of tiles of 32*4 floats, `stages` buffers, waiting until `pending` groups are left. */
template <int PENDING>
static __global__ void sum_tiles(const float *from, float *to, int n_tiles, int n_stages, bool wait)
{
    DYNAMIC_SHARED(float, tiles);
    const int lane = threadIdx.x;
    float sum[4] = {0};
    for (int tile = 0; tile < n_tiles + n_stages - 1; tile++) {
        if (tile < n_tiles) {
            cp_async16(tiles + (tile % n_stages * 32 + lane) * 4, from + (tile * 32 + lane) * 4);
        }
        cp_async_commit(); /* also an empty group: the count stays even */
        const int ready = tile - (n_stages - 1);
        if (ready < 0) {
            continue;
        }
        if (wait) {
            cp_async_wait<PENDING>();
        }
        __syncthreads();
        const int other = (lane + 1) % 32; /* another thread's copy */
        for (int i = 0; i < 4; i++) {
            sum[i] += tiles[(ready % n_stages * 32 + other) * 4 + i];
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        to[lane * 4 + i] = sum[i];
    }
}

template <int PENDING> static bool sums_tiles(int n_stages, bool wait)
{
    enum { TILES = 7, N = TILES * 128 };
    static __align__(16) float from[N];
    float to[128];
    bool right = true;
    for (int i = 0; i < N; i++) {
        from[i] = (float)(i % 97);
    }
    LAUNCH((sum_tiles<PENDING>), 1, 32, (size_t)n_stages * 512, NULL, from, to, TILES, n_stages,
           wait);
    for (int i = 0; i < 128; i++) {
        float sum = 0.0f;
        for (int tile = 0; tile < TILES; tile++) {
            sum += from[tile * 128 + (i + 4) % 128];
        }
        right = right && sum == to[i];
        CHECK(sum == to[i] || to[i] != to[i]); /* right, or seen to be wrong */
    }
    return right;
}

static void copies_arrive_at_the_wait(void)
{
    CHECK(sums_tiles<0>(1, true));
    CHECK(sums_tiles<0>(3, true));
    CHECK(sums_tiles<2>(3, true));
    CHECK(sums_tiles<1>(2, true));
    CHECK(!sums_tiles<3>(3, true)); /* one group too many may be in flight */
    CHECK(!sums_tiles<0>(1, false));
}

static __global__ void copy_zeros(const float *from, float *to)
{
    DYNAMIC_SHARED(float, shared);
    const int lane = threadIdx.x;
    const bool valid = lane % 2 == 0;
    for (int i = 0; i < 4; i++) {
        shared[lane * 4 + i] = 1.0f;
    }
    cp_async16_zfill(shared + lane * 4, from + lane * 4, valid);
    to[lane * 8] = shared[lane * 4 + 3]; /* too early */
    cp_async_commit();
    cp_async_wait<0>();
    for (int i = 0; i < 4; i++) {
        to[lane * 8 + 1 + i] = shared[lane * 4 + i];
    }
}

static void copies_fill_with_zeros(void)
{
    static __align__(16) float from[128];
    float to[256];
    for (int i = 0; i < 128; i++) {
        from[i] = (float)(i + 1);
    }
    LAUNCH(copy_zeros, 1, 32, 512, NULL, from, to);
    for (int lane = 0; lane < 32; lane++) {
        CHECK(to[lane * 8] != to[lane * 8]);
        for (int i = 0; i < 4; i++) {
            CHECK(to[lane * 8 + 1 + i] == (lane % 2 == 0 ? (float)(lane * 4 + i + 1) : 0.0f));
        }
    }
}

/* ---- faults: each ends the process with a text that says what ---- */

enum fault {
    BARRIER_SOME,
    BARRIER_RETURNED,
    BARRIER_LEFT,
    BARRIER_PLACES,
    SHUFFLE_AT_BARRIER,
    SHUFFLE_RETURNED,
    SHUFFLE_ABSENT,
    SHUFFLE_MASKS,
    SHUFFLE_NOT_IN_MASK,
    SHUFFLE_VOTE,
    MMA_SOME,
    MMA_PLACES,
    LDMATRIX_MISALIGNED,
    COPY_FROM_MISALIGNED,
    COPY_TO_MISALIGNED,
    NO_DYNAMIC
};

/* Faults of threads that do not meet. */
static void apart(enum fault fault, int t)
{
    if (fault == BARRIER_SOME && t % 32 != 5) {
        __syncthreads();
    } else if (fault == BARRIER_RETURNED) {
        if (t >= 32) {
            return;
        }
        __syncthreads();
    } else if (fault == BARRIER_LEFT) {
        for (int i = 0; i < (t == 40 ? 2 : 3); i++) {
            __syncthreads();
        }
    } else if (fault == BARRIER_PLACES) {
        if (t >= 32) {
            __syncthreads();
        } else {
            __syncthreads();
        }
    } else if (fault == SHUFFLE_AT_BARRIER) {
        if (t % 2 == 0) {
            __syncthreads();
        }
        __shfl_xor_sync(ALL, t, 1);
    } else if (fault == SHUFFLE_RETURNED) {
        if (t % 32 != 9) {
            __syncwarp();
        }
    } else if (fault == SHUFFLE_ABSENT) {
        __shfl_xor_sync(ALL, t, 16);
    } else if (fault == SHUFFLE_MASKS) {
        __shfl_xor_sync(t % 32 < 16 ? ALL : 0xFFFF0001u, t, 1);
    } else if (fault == SHUFFLE_NOT_IN_MASK) {
        __shfl_xor_sync(0x0000FFFFu, t, 1);
    } else if (fault == SHUFFLE_VOTE) {
        if (t % 2 == 0) {
            __shfl_xor_sync(ALL, t, 1);
        } else {
            __ballot_sync(ALL, 1);
        }
    }
}

static __global__ void go_wrong(enum fault fault, const unsigned char *global)
{
    __shared__ __align__(16) unsigned char shared[1024];
    const int t = threadIdx.x;
    uint32_t a[4] = {0}, b[2] = {0};
    float d[4] = {0};
    if (fault == MMA_SOME) {
        mma_m16n8k16_bf16(d, a, b);
    } else if (fault == MMA_PLACES) {
        if (t < 16) {
            mma_m16n8k16_bf16(d, a, b);
        } else {
            mma_m16n8k16_bf16(d, a, b);
        }
    } else if (fault == LDMATRIX_MISALIGNED) {
        ldmatrix_x4(a, shared + 16 * t + (t == 21 ? 8 : 0));
    } else if (fault == COPY_FROM_MISALIGNED) {
        cp_async16(shared, global + 8);
    } else if (fault == COPY_TO_MISALIGNED) {
        cp_async16(shared + 4, global);
    } else if (fault == NO_DYNAMIC) {
        DYNAMIC_SHARED(float, dynamic);
        dynamic[t] = 0.0f;
    } else {
        apart(fault, t);
    }
}

struct launch_shape {
    enum fault fault;
    dim3 grid, block;
    size_t shared_bytes;
};

static void launch_wrong(struct launch_shape shape)
{
    static __align__(16) unsigned char global[64];
    LAUNCH(go_wrong, shape.grid, shape.block, shape.shared_bytes, NULL, shape.fault, global);
}

/* The child aborts and says the text. */
static void dies(struct launch_shape shape, const char *order, const char *text)
{
    int ends[2];
    char said[4096];
    size_t n = 0;
    fflush(stdout);
    if (pipe(ends) != 0) {
        abort();
    }
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        setenv("BALLAST_FIBRES_ORDER", order, 1);
        launch_wrong(shape);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; n < sizeof said - 1; n += (size_t)got) {
        got = read(ends[0], said + n, sizeof said - 1 - n);
        if (got <= 0) {
            break;
        }
    }
    said[n] = '\0';
    close(ends[0]);
    int status = 0;
    if (waitpid(child, &status, 0) != child) {
        abort();
    }
    const bool right = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT &&
                       strstr(said, "kernel go_wrong") != NULL && strstr(said, text) != NULL;
    if (!right) {
        printf("fault %d, order %s: status 0x%x, said: %s\n", shape.fault, order, status, said);
    }
    CHECK(right);
}

static void faults_are_caught(void)
{
    const struct {
        struct launch_shape shape;
        const char *text;
    } cases[] = {
        {{BARRIER_SOME, 1, 64, 0}, "which has returned"},
        {{BARRIER_RETURNED, 2, 64, 0}, "for thread (32, 0, 0), which has returned"},
        {{BARRIER_LEFT, 1, 64, 0}, "for thread (40, 0, 0), which has returned"},
        {{BARRIER_PLACES, 1, 64, 0}, "which waits in __syncthreads at"},
        {{SHUFFLE_AT_BARRIER, 1, 64, 0}, "for lane 0, which waits in __syncthreads at"},
        {{SHUFFLE_RETURNED, 1, 64, 0}, "for lane 9, which has returned"},
        {{SHUFFLE_ABSENT, 1, 40, 0}, "which takes no part"},
        {{SHUFFLE_MASKS, 1, 64, 0}, "with another mask"},
        {{SHUFFLE_NOT_IN_MASK, 1, 64, 0}, "is not in its mask 0x0000FFFF"},
        {{SHUFFLE_VOTE, 1, 32, 0}, "which waits in __ballot_sync at"},
        {{MMA_SOME, 1, 48, 0}, "in a warp of 16 threads; it takes 32"},
        {{MMA_PLACES, 1, 32, 0}, "which waits in mma_m16n8k16_bf16 at"},
        {{LDMATRIX_MISALIGNED, 1, 32, 0}, "thread (21, 0, 0): ldmatrix_x4"},
        {{COPY_FROM_MISALIGNED, 1, 32, 0}, "not 16-byte aligned"},
        {{COPY_TO_MISALIGNED, 1, 32, 0}, "not 16-byte aligned"},
        {{NO_DYNAMIC, 1, 32, 0}, "launched with none"},
        {{BARRIER_SOME, 0, 32, 0}, "the grid is empty"},
        {{BARRIER_SOME, dim3(1, 65536), 32, 0}, "the grid is over"},
        {{BARRIER_SOME, 1, 0, 0}, "a block has 1 to 1024 threads"},
        {{BARRIER_SOME, 1, 1025, 0}, "a block has 1 to 1024 threads"},
        {{BARRIER_SOME, 1, dim3(32, 33), 0}, "a block has 1 to 1024 threads"},
        {{BARRIER_SOME, 1, dim3(1, 1, 65), 0}, "a block has 1 to 1024 threads"},
        {{BARRIER_SOME, 1, 32, 227 * 1024 + 1}, "dynamic shared memory is at most"},
    };
    const char *const orders[] = {"forward", "reverse", "11"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int o = 0; o < 3; o++) {
            dies(cases[i].shape, orders[o], cases[i].text);
        }
    }
    dies({COPY_TO_MISALIGNED, 1, 32, 0}, "sideways", "use forward, reverse or a number");
}

int main(void)
{
    faults_are_caught(); /* first: ThreadSanitizer takes fibres for threads, which trouble fork */
    every_thread_once();
    launches_can_wait();
    orders_differ();
    shuffles_move();
    masks_split_a_warp();
    order_shows_missing_barriers();
    sums_in_any_order();
    dynamic_shared_begins_as_nan();
    bf16_rounds_to_nearest_even();
    mma_multiplies();
    ldmatrix_distributes();
    copies_arrive_at_the_wait();
    copies_fill_with_zeros();
    printf("%d checks failed\n", n_failed);
    return n_failed != 0;
}
