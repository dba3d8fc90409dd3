/* Matrix products in fp32, of fp32 operands or of bf16 ones that are widened on the way.
 *
 * The textbook scheme (Goto and van de Geijn, 2008): the right operand is rearranged into
 * panels, a block of it at a time, in the caller's scratch; each thread rearranges blocks of
 * rows of the left operand on its stack; a small kernel multiplies panels with C in registers.
 * So one speed serves all three forms, whatever the distance of rows in memory, and scratch is
 * small and known. An element of C adds its products in order of k, in slices of INNER, which
 * makes its value independent of threads, of the other rows and of the instruction set.
 *
 * Sizes: a right panel (INNER by 48) streams from the second cache, where a left block lies
 * beside the part of C that it adds to; that part stays for all slices of a right block, so C
 * seldom goes to memory. Other sizes were measured and are no faster (README.md).
 *
 * A C in bf16 is added up in fp32 in the scratch, some rows by some columns at a time, and
 * rounded once: its values are those of the fp32 table for the same operands, rounded.
 *
 * fp32 on a processor without fused multiply-adds goes through the library instead, and so does
 * bf16 on one that is fast at it (matmul_library.c). Owns nothing. Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>

enum {
    INNER = 384,     /* k of one slice; part of the values, so one for all machines */
    COLUMNS = 1536,  /* most columns of a right block */
    LEFT_ROWS = 192, /* most rows of a left block; 288 KiB of a thread's stack */
    RIGHT_ELEMENTS = 4 * INNER * COLUMNS, /* most of a right block: 9 MiB */
    SUM_ROWS = 1024                       /* most rows of a C that is added up in scratch: 6 MiB */
};

/* A block of the right operand (columns [n_at, n_at + n), inner [k_at, k_at + k)), and the rows
 * [m_at, m_at + m) of the left one. */
struct product_call {
    const struct simd_table *simd;
    const struct matmul *matmul;
    float *right; /* rearranged: slice after slice, each of slice_elements but the last */
    float *sums;  /* (m, n): C before it is rounded; NULL when C is fp32 */
    size_t m_at, m, n_at, n, k_at, k;
    size_t n_panels, n_slices, slice_elements;
    size_t row_step, n_row_blocks;
    size_t column_step; /* columns of one item */
};

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t parts(size_t whole, size_t part)
{
    return (whole + part - 1) / part;
}

static size_t round_up(size_t value, size_t unit)
{
    return parts(value, unit) * unit;
}

/* Inner elements of slice i of the block. */
static size_t slice_inner(const struct product_call *c, size_t slice)
{
    return smaller(c->k - slice * INNER, INNER);
}

/* Items are (slice, panel of the right block). */
static void arrange_right(const void *call, size_t begin, size_t end)
{
    const struct product_call *c = call;
    const struct matmul *m = c->matmul;
    for (size_t i = begin; i < end; i++) {
        const size_t slice = i / c->n_panels, k = slice_inner(c, slice);
        const size_t first = i % c->n_panels * c->simd->panel_columns;
        const size_t n = smaller(c->n - first, c->simd->panel_columns);
        const size_t column = c->n_at + first, inner = c->k_at + slice * INNER;
        float *out = c->right + slice * c->slice_elements + first * k;
        if (m->form == MATMUL_NT)
            c->simd->arrange_right(out, const_elem_at(c->simd, m->b, column * m->k + inner), m->k,
                                   false, n, k);
        else
            c->simd->arrange_right(out, const_elem_at(c->simd, m->b, inner * m->n + column), m->n,
                                   true, n, k);
    }
}

/* The left block of rows [row, row + rows) and inner [inner, inner + k). */
static void arrange_left(const struct product_call *c, float *out, size_t row, size_t rows,
                         size_t inner, size_t k)
{
    const struct matmul *m = c->matmul;
    if (m->form == MATMUL_TN)
        c->simd->arrange_left(out, const_elem_at(c->simd, m->a, inner * m->m + row), m->m, true,
                              rows, k);
    else
        c->simd->arrange_left(out, const_elem_at(c->simd, m->a, row * m->k + inner), m->k, false,
                              rows, k);
}

/* The part of C that an item computes. */
struct region {
    size_t row, rows; /* counted from the call's and the block's first */
    size_t column, columns;
};

static void widen_region(const struct product_call *c, const struct region *r)
{
    const struct matmul *m = c->matmul;
    for (size_t i = r->row; i < r->row + r->rows; i++)
        c->simd->widen(c->sums + i * c->n + r->column,
                       elem_at(c->simd, m->c, (c->m_at + i) * m->n + c->n_at + r->column),
                       r->columns);
}

static void narrow_region(const struct product_call *c, const struct region *r)
{
    const struct matmul *m = c->matmul;
    for (size_t i = r->row; i < r->row + r->rows; i++)
        c->simd->narrow(elem_at(c->simd, m->c, (c->m_at + i) * m->n + c->n_at + r->column),
                        c->sums + i * c->n + r->column, r->columns);
}

/* The region's bias as fp32, in `room` when it has to be widened. */
static const float *region_bias(const struct product_call *c, const struct region *r, float *room)
{
    const size_t at = c->n_at + r->column;
    if (!c->matmul->bias)
        return NULL;
    if (c->simd->elem_bytes == sizeof(float))
        return (const float *)c->matmul->bias + at;
    c->simd->widen(room, const_elem_at(c->simd, c->matmul->bias, at), r->columns);
    return room;
}

static void multiply_region(const struct product_call *c, const struct region *r, float *left)
{
    const struct matmul *m = c->matmul;
    float room[COLUMNS];
    const float *bias = region_bias(c, r, room);
    float *to;
    if (c->sums)
        to = c->sums + r->row * c->n + r->column;
    else
        to = (float *)m->c + (c->m_at + r->row) * m->n + c->n_at + r->column;
    if (c->sums && m->accumulate && c->k_at == 0)
        widen_region(c, r);
    for (size_t slice = 0; slice < c->n_slices; slice++) {
        const size_t k = slice_inner(c, slice), inner = c->k_at + slice * INNER;
        arrange_left(c, left, c->m_at + r->row, r->rows, inner, k);
        c->simd->multiply_panels(
            to, c->sums ? c->n : m->n, left, c->right + slice * c->slice_elements + r->column * k,
            inner == 0 ? bias : NULL, r->rows, r->columns, k, m->accumulate || inner > 0);
    }
    if (c->sums && c->k_at + c->k == m->k)
        narrow_region(c, r);
}

/* Items are (range of columns, block of rows). */
static void multiply(const void *call, size_t begin, size_t end)
{
    _Alignas(64) float left[LEFT_ROWS * INNER];
    const struct product_call *c = call;
    for (size_t i = begin; i < end; i++) {
        struct region region = {.row = i % c->n_row_blocks * c->row_step,
                                .column = i / c->n_row_blocks * c->column_step};
        region.rows = smaller(c->m - region.row, c->row_step);
        region.columns = smaller(c->n - region.column, c->column_step);
        multiply_region(c, &region, left);
    }
}

/* Enough items for every thread to take several, so that none waits long for the last; but
 * an item rearranges its rows anew, so no more than that. */
static void choose_items(struct product_call *c, size_t n_threads)
{
    const size_t m = c->m, wanted = n_threads > 1 ? 4 * n_threads : 1;
    c->row_step = round_up(parts(m, parts(m, LEFT_ROWS)), c->simd->panel_rows);
    c->n_row_blocks = parts(m, c->row_step);
    c->column_step = round_up(parts(c->n, parts(wanted, c->n_row_blocks)), c->simd->panel_columns);
}

static void multiply_block(const struct cpu_ops *cpu, struct product_call *c)
{
    c->n_panels = parts(c->n, c->simd->panel_columns);
    c->n_slices = parts(c->k, INNER);
    c->slice_elements = c->n_panels * c->simd->panel_columns * INNER;
    choose_items(c, (size_t)cpu->n_threads);
    const size_t n_items = c->n_row_blocks * parts(c->n, c->column_step);
    cpu_parallel(cpu, c->n_panels * c->n_slices, 2, c->n * c->k, CPU_EVEN, arrange_right, c);
    /* A vector does sixteen multiply-adds where the work of other operations counts one. */
    cpu_parallel(cpu, n_items, 1, c->m * c->n * c->k / 32, CPU_UNEVEN, multiply, c);
}

/* How much of the inner dimension one right block takes: whole slices, or all of it. */
static size_t block_inner(const struct cpu_ops *cpu, const struct matmul *shape)
{
    const size_t columns = round_up(smaller(shape->n, COLUMNS), cpu->simd->panel_columns);
    return smaller(shape->k, RIGHT_ELEMENTS / (columns * INNER) * INNER);
}

static bool by_library(const struct cpu_ops *cpu)
{
    return cpu->base.dtype == DTYPE_BF16 ? cpu->bf16_by_library : cpu->simd->panel_columns == 0;
}

/* C is not fp32 and is added up in scratch, behind the right block. */
static bool needs_sums(const struct cpu_ops *cpu, const struct matmul *shape)
{
    return cpu->base.dtype == DTYPE_BF16 && !shape->c_fp32;
}

static size_t right_floats(const struct cpu_ops *cpu, const struct matmul *shape)
{
    return round_up(smaller(shape->n, COLUMNS), cpu->simd->panel_columns) * block_inner(cpu, shape);
}

static size_t matmul_scratch(struct ops *ops, const struct matmul *shape)
{
    struct cpu_ops *cpu = cpu_of(ops);
    if (shape->m == 0 || shape->n == 0 || shape->k == 0)
        return 0;
    if (by_library(cpu))
        return cpu_library_scratch(cpu, shape);
    size_t n = right_floats(cpu, shape);
    if (needs_sums(cpu, shape))
        n += smaller(shape->m, SUM_ROWS) * smaller(shape->n, COLUMNS);
    return n * sizeof(float);
}

static void multiply_rows(const struct cpu_ops *cpu, const struct matmul *call, size_t m_at,
                          size_t m)
{
    const size_t k_step = block_inner(cpu, call);
    float *scratch = call->scratch;
    for (size_t n_at = 0; n_at < call->n; n_at += COLUMNS)
        for (size_t k_at = 0; k_at < call->k; k_at += k_step) {
            struct product_call block = {
                .simd = cpu->simd,
                .matmul = call,
                .right = scratch,
                .sums = needs_sums(cpu, call) ? scratch + right_floats(cpu, call) : NULL,
                .m_at = m_at,
                .m = m,
                .n_at = n_at,
                .n = smaller(call->n - n_at, COLUMNS),
                .k_at = k_at,
                .k = smaller(call->k - k_at, k_step)};
            multiply_block(cpu, &block);
        }
}

static void matmul(struct ops *ops, const struct matmul *call)
{
    struct cpu_ops *cpu = cpu_of(ops);
    assert(call->k > 0);
    assert(!call->bias || call->form == MATMUL_NT);
    if (call->m == 0 || call->n == 0)
        return;
    if (by_library(cpu)) {
        cpu_library_matmul(cpu, call);
        return;
    }
    assert(call->scratch);
    const size_t m_step = needs_sums(cpu, call) ? SUM_ROWS : call->m;
    for (size_t m_at = 0; m_at < call->m; m_at += m_step)
        multiply_rows(cpu, call, m_at, smaller(call->m - m_at, m_step));
}

struct bias_call {
    const struct simd_table *simd;
    float *dbias;
    const void *dout;
    size_t rows, cols;
};

static void bias_columns(const void *call, size_t begin, size_t end)
{
    const struct bias_call *c = call;
    c->simd->column_sums(c->dbias + begin, const_elem_at(c->simd, c->dout, begin), c->rows, c->cols,
                         end - begin);
}

static void bias_backward(struct ops *ops, float *dbias, const void *dout, size_t rows, size_t cols)
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
