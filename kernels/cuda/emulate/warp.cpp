/* What the lanes of a warp do together: shuffles, ballots, and the twins of the matrix
 * instructions. Each function is called once for all lanes that met; see fibres.h. */
#include "kernels/cuda/emulate/fibres.h"

namespace {

enum { LANES = 32, MATRIX_ROWS = 8, M = 16, N = 8, K = 16 };

/* Two elements of two bytes, the first in the lower half. */
uint32_t pair_of(const unsigned char *first, const unsigned char *second)
{
    uint16_t low, high;
    memcpy(&low, first, sizeof low);
    memcpy(&high, second, sizeof high);
    return (uint32_t)high << 16 | low;
}

void load_matrices(struct fibre_warp_call *const calls[LANES], int n_matrices, bool transposed)
{
    for (int lane = 0; lane < LANES; lane++) {
        const int major = lane / 4, minor = lane % 4 * 2;
        for (int i = 0; i < n_matrices; i++) {
            struct fibre_warp_call *const *owner = calls + MATRIX_ROWS * i;
            const auto *row = static_cast<const unsigned char *>(owner[major]->row);
            const auto *first = static_cast<const unsigned char *>(owner[minor]->row);
            const auto *second = static_cast<const unsigned char *>(owner[minor + 1]->row);
            calls[lane]->r[i] = transposed ? pair_of(first + 2 * major, second + 2 * major)
                                           : pair_of(row + 2 * minor, row + 2 * minor + 2);
        }
    }
}

void load_2(struct fibre_warp_call *const calls[LANES])
{
    load_matrices(calls, 2, false);
}

void load_4(struct fibre_warp_call *const calls[LANES])
{
    load_matrices(calls, 4, false);
}

void load_2_transposed(struct fibre_warp_call *const calls[LANES])
{
    load_matrices(calls, 2, true);
}

void load_4_transposed(struct fibre_warp_call *const calls[LANES])
{
    load_matrices(calls, 4, true);
}

void load(uint32_t *r, const void *row, int n_rows,
          void (*perform)(struct fibre_warp_call *const calls[LANES]), struct fibre_place place)
{
    struct fibre_warp_call call = {};
    if (fibre_lane() < n_rows && (uintptr_t)row % 16 != 0) {
        fibre_die("%s at %s:%d: row at %p is not 16-byte aligned", place.what, place.file,
                  place.line, row);
    }
    call.place = place;
    call.mask = 0xFFFFFFFFu;
    call.aligned = true;
    call.row = row;
    call.r = r;
    call.perform = perform;
    fibre_sync_warp(&call);
}

float low_half(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

float high_half(uint32_t pair)
{
    return __uint_as_float(pair & 0xFFFF0000u);
}

/* Products of two bf16 are exact in fp32, so each k adds one rounding. */
void multiply(struct fibre_warp_call *const calls[LANES])
{
    float a[M][K], b[K][N], d[M][N];
    for (int lane = 0; lane < LANES; lane++) {
        const struct fibre_warp_call *call = calls[lane];
        const int g = lane / 4, t = lane % 4 * 2;
        for (int i = 0; i < 4; i++) {
            const int row = g + i % 2 * 8, column = t + i / 2 * 8;
            a[row][column] = low_half(call->a[i]);
            a[row][column + 1] = high_half(call->a[i]);
            d[g + i / 2 * 8][t + i % 2] = call->d[i];
        }
        for (int i = 0; i < 2; i++) {
            b[t + i * 8][g] = low_half(call->b[i]);
            b[t + i * 8 + 1][g] = high_half(call->b[i]);
        }
    }
    for (int m = 0; m < M; m++) {
        for (int k = 0; k < K; k++) {
            for (int n = 0; n < N; n++) {
                d[m][n] += a[m][k] * b[k][n];
            }
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < 4; i++) {
            calls[lane]->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
        }
    }
}

} /* namespace */

void fibre_perform_nothing(struct fibre_warp_call *const calls[LANES])
{
    (void)calls;
}

void fibre_perform_shuffle(struct fibre_warp_call *const calls[LANES])
{
    uint32_t values[LANES][4] = {};
    for (int lane = 0; lane < LANES; lane++) {
        if (calls[lane] != NULL) {
            memcpy(values[lane], calls[lane]->value, sizeof values[lane]);
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        struct fibre_warp_call *call = calls[lane];
        if (call == NULL) {
            continue;
        }
        if (calls[call->source] == NULL) {
            fibre_die("lane %d in %s at %s:%d reads lane %d, which takes no part", lane,
                      call->place.what, call->place.file, call->place.line, call->source);
        }
        memcpy(call->value, values[call->source], call->bytes);
    }
}

void fibre_perform_ballot(struct fibre_warp_call *const calls[LANES])
{
    uint32_t ballot = 0;
    for (int lane = 0; lane < LANES; lane++) {
        ballot |= (calls[lane] != NULL ? calls[lane]->value[0] : 0) << lane;
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (calls[lane] != NULL) {
            calls[lane]->value[0] = ballot;
        }
    }
}

void ldmatrix_x2(uint32_t r[2], const void *row, const char *file, int line)
{
    load(r, row, 16, load_2, {"ldmatrix_x2", file, line});
}

void ldmatrix_x4(uint32_t r[4], const void *row, const char *file, int line)
{
    load(r, row, 32, load_4, {"ldmatrix_x4", file, line});
}

void ldmatrix_x2_trans(uint32_t r[2], const void *row, const char *file, int line)
{
    load(r, row, 16, load_2_transposed, {"ldmatrix_x2_trans", file, line});
}

void ldmatrix_x4_trans(uint32_t r[4], const void *row, const char *file, int line)
{
    load(r, row, 32, load_4_transposed, {"ldmatrix_x4_trans", file, line});
}

void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], const char *file,
                       int line)
{
    struct fibre_warp_call call = {};
    call.place = {"mma_m16n8k16_bf16", file, line};
    call.mask = 0xFFFFFFFFu;
    call.aligned = true;
    call.a = a;
    call.b = b;
    call.d = d;
    call.perform = multiply;
    fibre_sync_warp(&call);
}
