/* Rotary position embedding, by rows. Angles are computed in double, so that long positions
 * keep their precision. Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>
#include <math.h>

struct rotary_call {
    const struct simd_table *simd;
    void *qkv;
    const int32_t *positions;
    const struct rotary *rotary;
    size_t row_width, head_dim, n_rotated; /* n_rotated: query heads + key heads */
    double direction;
};

static void rotate_rows(const void *call, size_t begin, size_t end)
{
    const struct rotary_call *c = call;
    const size_t n_pairs = c->rotary->n_pairs;
    float cosine[ROTARY_MAX_PAIRS], sine[ROTARY_MAX_PAIRS];
    for (size_t r = begin; r < end; r++) {
        for (size_t i = 0; i < n_pairs; i++) {
            const double angle = (double)c->positions[r] * (double)c->rotary->inv_freq[i];
            cosine[i] = (float)cos(angle);
            sine[i] = (float)(c->direction * sin(angle));
        }
        void *row = elem_at(c->simd, c->qkv, r * c->row_width);
        for (size_t head = 0; head < c->n_rotated; head++)
            c->simd->rotate(elem_at(c->simd, row, head * c->head_dim), cosine, sine, n_pairs);
    }
}

static void rotary(struct ops *ops, void *qkv, const int32_t *positions,
                   const struct rotary *rotary, size_t rows, uint32_t n_heads, uint32_t n_kv_heads,
                   uint32_t head_dim, int direction)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    assert(rotary->n_pairs == head_dim / 2 && rotary->n_pairs <= ROTARY_MAX_PAIRS);
    const struct rotary_call call = {.simd = cpu->simd,
                                     .qkv = qkv,
                                     .positions = positions,
                                     .rotary = rotary,
                                     .row_width =
                                         ((size_t)n_heads + 2 * (size_t)n_kv_heads) * head_dim,
                                     .head_dim = head_dim,
                                     .n_rotated = (size_t)n_heads + n_kv_heads,
                                     .direction = direction < 0 ? -1.0 : 1.0};
    cpu_parallel(cpu, rows, 4, rows * call.row_width, CPU_EVEN, rotate_rows, &call);
}

void cpu_rotary_init(struct cpu_ops *cpu)
{
    cpu->base.rotary = rotary;
}
