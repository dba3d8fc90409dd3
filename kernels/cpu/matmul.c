/* Matrix products, fp32.
 *
 * The textbook scheme (Goto and van de Geijn, 2008): the right operand is rearranged into
 * panels, a block of it at a time, in the caller's scratch; each thread rearranges a block of
 * rows of the left operand on its stack; a small kernel multiplies panels with C in registers.
 * So one speed serves all three forms, whatever the distance of rows in memory, and scratch is
 * small and known. An element of C adds its products in order of k, in blocks of INNER, which
 * makes its value independent of threads, of the other rows and of the instruction set.
 *
 * A processor without fused multiply-adds goes through the library instead
 * (matmul_library.c). Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>

enum {
    INNER = 384,    /* k of one block; part of the values, so one for all machines */
    COLUMNS = 3072, /* most columns of a rearranged right block; a multiple of the panels */
    LEFT_ROWS = 192 /* most rows of a rearranged left block; a multiple of the panels */
};

/* One block of the right operand and all rows. */
struct product_call {
    const struct simd_table *simd;
    const struct matmul *matmul;
    float *right;             /* rearranged */
    size_t n_at, n;           /* columns of the block */
    size_t k_at, k;
    size_t row_step, n_row_blocks;
    size_t column_step;       /* columns of one item */
    bool accumulate;
};

/* Equal parts of at most `limit`, in multiples of `unit`. */
static size_t equal_parts(size_t whole, size_t limit, size_t unit)
{
    const size_t n_parts = (whole + limit - 1) / limit;
    const size_t part = (whole + n_parts - 1) / n_parts;
    return (part + unit - 1) / unit * unit;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Items are panels of the right block. */
static void arrange_right(const void *call, size_t begin, size_t end)
{
    const struct product_call *c = call;
    const struct matmul *m = c->matmul;
    const size_t width = c->simd->panel_columns, first = begin * width;
    const size_t columns = smaller(end * width, c->n) - first;
    const float *b = m->b;
    if (m->form == MATMUL_NT)
        c->simd->arrange_right(c->right + first * c->k, b + (c->n_at + first) * m->k + c->k_at,
                               m->k, false, columns, c->k);
    else
        c->simd->arrange_right(c->right + first * c->k, b + c->k_at * m->n + c->n_at + first,
                               m->n, true, columns, c->k);
}

/* Items are (range of columns, block of rows). */
static void multiply(const void *call, size_t begin, size_t end)
{
    _Alignas(64) float left[LEFT_ROWS * INNER];
    const struct product_call *c = call;
    const struct matmul *m = c->matmul;
    const float *a = m->a, *bias = m->bias;
    for (size_t i = begin; i < end; i++) {
        const size_t row = i % c->n_row_blocks * c->row_step;
        const size_t column = i / c->n_row_blocks * c->column_step;
        const size_t rows = smaller(m->m - row, c->row_step);
        if (m->form == MATMUL_TN)
            c->simd->arrange_left(left, a + c->k_at * m->m + row, m->m, true, rows, c->k);
        else
            c->simd->arrange_left(left, a + row * m->k + c->k_at, m->k, false, rows, c->k);
        c->simd->multiply_panels((float *)m->c + row * m->n + c->n_at + column, m->n, left,
                                 c->right + column * c->k,
                                 bias && c->k_at == 0 ? bias + c->n_at + column : NULL, rows,
                                 smaller(c->n - column, c->column_step), c->k, c->accumulate);
    }
}

/* Enough items for every thread to take several, so that none waits long for the last; but
 * an item rearranges its rows anew, so no more than that. */
static void choose_items(struct product_call *c, size_t n_threads)
{
    const size_t unit = c->simd->panel_columns;
    c->row_step = equal_parts(c->matmul->m, LEFT_ROWS, c->simd->panel_rows);
    c->n_row_blocks = (c->matmul->m + c->row_step - 1) / c->row_step;
    const size_t wanted = n_threads > 1 ? 4 * n_threads : 1;
    const size_t splits = (wanted + c->n_row_blocks - 1) / c->n_row_blocks;
    const size_t step = (c->n + splits - 1) / splits;
    c->column_step = (step + unit - 1) / unit * unit;
}

static void multiply_block(const struct cpu_ops *cpu, struct product_call *c)
{
    const size_t n_panels = (c->n + c->simd->panel_columns - 1) / c->simd->panel_columns;
    choose_items(c, (size_t)cpu->n_threads);
    const size_t n_items = c->n_row_blocks * ((c->n + c->column_step - 1) / c->column_step);
    cpu_parallel(cpu, n_panels, 2, c->n * c->k, CPU_EVEN, arrange_right, c);
    cpu_parallel(cpu, n_items, 1, c->matmul->m * c->n * c->k / 32, CPU_UNEVEN, multiply, c);
}

static size_t matmul_scratch(struct ops *ops, const struct matmul *shape)
{
    struct cpu_ops *cpu = cpu_of(ops);
    if (shape->m == 0 || shape->n == 0 || shape->k == 0)
        return 0;
    if (cpu->simd->panel_columns == 0)
        return cpu_library_scratch(cpu, shape);
    const size_t unit = cpu->simd->panel_columns;
    const size_t columns = (smaller(shape->n, COLUMNS) + unit - 1) / unit * unit;
    return columns * smaller(shape->k, INNER) * sizeof(float);
}

static void matmul(struct ops *ops, const struct matmul *call)
{
    struct cpu_ops *cpu = cpu_of(ops);
    assert(call->k > 0);
    assert(!call->bias || call->form == MATMUL_NT);
    if (call->m == 0 || call->n == 0)
        return;
    if (cpu->simd->panel_columns == 0) {
        cpu_library_matmul(cpu, call);
        return;
    }
    assert(call->scratch);
    for (size_t n_at = 0; n_at < call->n; n_at += COLUMNS)
        for (size_t k_at = 0; k_at < call->k; k_at += INNER) {
            struct product_call block = {.simd = cpu->simd,
                                         .matmul = call,
                                         .right = call->scratch,
                                         .n_at = n_at,
                                         .n = smaller(call->n - n_at, COLUMNS),
                                         .k_at = k_at,
                                         .k = smaller(call->k - k_at, INNER),
                                         .accumulate = call->accumulate || k_at > 0};
            multiply_block(cpu, &block);
        }
}

struct bias_call {
    const struct simd_table *simd;
    float *dbias;
    const float *dout;
    size_t rows, cols;
};

static void bias_columns(const void *call, size_t begin, size_t end)
{
    const struct bias_call *c = call;
    c->simd->column_sums(c->dbias + begin, c->dout + begin, c->rows, c->cols, end - begin);
}

static void bias_backward(struct ops *ops, float *dbias, const void *dout, size_t rows,
                          size_t cols)
{
    const struct cpu_ops *cpu = cpu_of(ops);
    const struct bias_call call = {cpu->simd, dbias, dout, rows, cols};
    cpu_parallel(cpu, cols, 128, rows * cols, CPU_EVEN, bias_columns, &call);
}

void cpu_matmul_init(struct cpu_ops *cpu)
{
    cpu->base.matmul_scratch = matmul_scratch;
    cpu->base.matmul = matmul;
    cpu->base.bias_backward = bias_backward;
}
