/* Matrix products through oneDNN: fp32 for processors without an instruction set of their own in
 * kernels/cpu/simd/, bf16 for those that are fast at it (matmul.c says when).
 *
 * Owns the engine, the streams and one entry per shape that was asked for; an entry whose
 * scratch was only asked about holds a descriptor, no code and no memory. All operands are plain
 * row-major matrices: nothing is rearranged or kept. The library's scratch is the caller's
 * (scratchpad mode "user").
 *
 * The library may divide the inner dimension among its threads, which changes values with their
 * number. So a bf16 product is cut here, by shape alone, into blocks that our threads take one
 * after the other, each computed by the library on one thread. Sums are fp32 and are rounded once.
 * An fp32 product is one block on all the library's threads. Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>
#include <stdatomic.h>
#include <oneapi/dnnl/dnnl.h>
#include "proto/base/heap.h"

/* A block of C: tall, since every one rearranges its columns of B anew. */
enum { BLOCK_ROWS = 512, BLOCK_COLUMNS = 384 };

/* What a primitive is made for: a part of C, all of k. */
struct block {
    enum matmul_form form;
    size_t m, n, k;
    size_t a_row, b_row, c_row; /* elements from one row in memory to the next */
    bool bias, accumulate, bf16, c_fp32;
};

enum operand { OPERAND_A, OPERAND_B, OPERAND_C, OPERAND_BIAS, OPERAND_SCRATCH, N_OPERANDS };

struct matmul_entry {
    struct block block;
    dnnl_primitive_desc_t descriptor;   /* owned */
    dnnl_primitive_t primitive;         /* owned; NULL until the shape is first computed */
    dnnl_memory_t (*views)[N_OPERANDS]; /* owned, per lane; made with the primitive, NULL: unused */
    size_t scratch_bytes;
};

/* A lane is what one thread needs to compute beside others: a stream, views and scratch. */
struct matmul_cache {
    dnnl_engine_t engine;
    dnnl_stream_t *streams; /* owned, per lane */
    size_t n_lanes;
    int library_threads;
    struct matmul_entry *entries; /* owned */
    size_t n_entries, capacity;
};

static const char *library_text(dnnl_status_t status)
{
    switch ((int)status) {
    case dnnl_out_of_memory:
        return "out of memory";
    case dnnl_invalid_arguments:
        return "invalid arguments";
    case dnnl_unimplemented:
        return "not implemented for this machine";
    case dnnl_runtime_error:
        return "run-time error";
    default:
        return "internal error";
    }
}

static const char *form_text(enum matmul_form form)
{
    switch (form) {
    case MATMUL_NT:
        return "NT";
    case MATMUL_NN:
        return "NN";
    case MATMUL_TN:
        return "TN";
    }
    return "?";
}

static void fail_block(struct cpu_ops *cpu, const struct block *block, const char *doing,
                       dnnl_status_t status)
{
    cpu_fail(cpu, status == dnnl_out_of_memory ? STATUS_OUT_OF_MEMORY : STATUS_UNSUPPORTED,
             "matrix product %s m=%zu n=%zu k=%zu: oneDNN %s: %s", form_text(block->form), block->m,
             block->n, block->k, doing, library_text(status));
}

/* The first block of a call, the whole of it or as large as blocks get. */
static struct block block_of(const struct cpu_ops *cpu, const struct matmul *call)
{
    return (struct block){.form = call->form,
                          .m = call->m,
                          .n = call->n,
                          .k = call->k,
                          .a_row = call->form == MATMUL_TN ? call->m : call->k,
                          .b_row = call->form == MATMUL_NT ? call->k : call->n,
                          .c_row = call->n,
                          .bias = call->bias != NULL,
                          .accumulate = call->accumulate,
                          .bf16 = cpu->base.dtype == DTYPE_BF16,
                          .c_fp32 = cpu->base.dtype == DTYPE_FP32 || call->c_fp32};
}

static bool same_block(const struct block *a, const struct block *b)
{
    return a->form == b->form && a->m == b->m && a->n == b->n && a->k == b->k &&
           a->a_row == b->a_row && a->b_row == b->b_row && a->c_row == b->c_row &&
           a->bias == b->bias && a->accumulate == b->accumulate && a->bf16 == b->bf16 &&
           a->c_fp32 == b->c_fp32;
}

/* ---- what the library is told ---- */

/* A matrix (rows, columns) whose rows in memory are `row` elements apart, or the transpose of such
 * a (columns, rows). */
static dnnl_status_t describe_matrix(dnnl_memory_desc_t *out, size_t rows, size_t columns,
                                     size_t row, bool transposed, bool bf16)
{
    const dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)columns};
    const dnnl_dims_t plain = {(dnnl_dim_t)row, 1};
    const dnnl_dims_t swapped = {1, (dnnl_dim_t)row};
    return dnnl_memory_desc_init_by_strides(out, 2, dims, bf16 ? dnnl_bf16 : dnnl_f32,
                                            transposed ? swapped : plain);
}

static dnnl_status_t make_attributes(bool accumulate, dnnl_primitive_attr_t *out)
{
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_status_t status = dnnl_primitive_attr_create(&attributes);
    if (status != dnnl_success)
        return status;
    status = dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
    if (status == dnnl_success && accumulate) {
        dnnl_post_ops_t sum = NULL;
        status = dnnl_post_ops_create(&sum);
        if (status == dnnl_success) {
            status = dnnl_post_ops_append_sum(sum, 1.0f);
            if (status == dnnl_success)
                status = dnnl_primitive_attr_set_post_ops(attributes, sum);
            dnnl_post_ops_destroy(sum);
        }
    }
    if (status != dnnl_success) {
        dnnl_primitive_attr_destroy(attributes);
        return status;
    }
    *out = attributes;
    return dnnl_success;
}

static dnnl_status_t make_descriptor(const struct matmul_cache *cache, const struct block *block,
                                     dnnl_primitive_desc_t *out)
{
    dnnl_memory_desc_t a, b, bias, c;
    dnnl_status_t status = describe_matrix(&a, block->m, block->k, block->a_row,
                                           block->form == MATMUL_TN, block->bf16);
    if (status == dnnl_success)
        status = describe_matrix(&b, block->k, block->n, block->b_row, block->form == MATMUL_NT,
                                 block->bf16);
    if (status == dnnl_success)
        status = describe_matrix(&bias, 1, block->n, block->n, false, block->bf16);
    if (status == dnnl_success)
        status = describe_matrix(&c, block->m, block->n, block->c_row, false, !block->c_fp32);
    dnnl_matmul_desc_t product;
    if (status == dnnl_success)
        status = dnnl_matmul_desc_init(&product, &a, &b, block->bias ? &bias : NULL, &c);
    if (status != dnnl_success)
        return status;
    dnnl_primitive_attr_t attributes;
    status = make_attributes(block->accumulate, &attributes);
    if (status != dnnl_success)
        return status;
    status = dnnl_primitive_desc_create(out, &product, attributes, cache->engine, NULL);
    dnnl_primitive_attr_destroy(attributes);
    return status;
}

/* ---- the cache ---- */

/* The number of a block's entry, made when it is new; false with the error kept. */
static bool find_entry(struct cpu_ops *cpu, const struct block *block, size_t *out_index)
{
    struct matmul_cache *cache = cpu->matmuls;
    for (size_t i = 0; i < cache->n_entries; i++)
        if (same_block(&cache->entries[i].block, block)) {
            *out_index = i;
            return true;
        }
    if (cache->n_entries == cache->capacity) {
        const size_t capacity = cache->capacity ? 2 * cache->capacity : 32;
        struct matmul_entry *grown = heap_realloc(cache->entries, capacity * sizeof *grown);
        if (!grown) {
            fail_block(cpu, block, "entry", dnnl_out_of_memory);
            return false;
        }
        cache->entries = grown;
        cache->capacity = capacity;
    }
    cpu_set_library_threads(cache->library_threads);
    struct matmul_entry entry = {.block = *block};
    const dnnl_status_t status = make_descriptor(cache, block, &entry.descriptor);
    if (status != dnnl_success) {
        fail_block(cpu, block, "descriptor", status);
        return false;
    }
    const dnnl_memory_desc_t *scratch =
        dnnl_primitive_desc_query_md(entry.descriptor, dnnl_query_scratchpad_md, 0);
    entry.scratch_bytes = scratch ? dnnl_memory_desc_get_size(scratch) : 0;
    *out_index = cache->n_entries;
    cache->entries[cache->n_entries++] = entry;
    return true;
}

static dnnl_status_t make_view(const struct matmul_cache *cache, struct matmul_entry *entry,
                               size_t lane, enum operand operand,
                               const dnnl_memory_desc_t *description)
{
    dnnl_memory_t *view = &entry->views[lane][operand];
    if (*view)
        return dnnl_success;
    const dnnl_status_t status =
        dnnl_memory_create(view, description, cache->engine, DNNL_MEMORY_NONE);
    if (status != dnnl_success)
        *view = NULL;
    return status;
}

static dnnl_status_t make_views(const struct matmul_cache *cache, struct matmul_entry *entry,
                                size_t lane)
{
    static const struct {
        dnnl_query_t query;
        int index;
    } source[] = {
        [OPERAND_A] = {dnnl_query_src_md, 0},
        [OPERAND_B] = {dnnl_query_weights_md, 0},
        [OPERAND_C] = {dnnl_query_dst_md, 0},
        [OPERAND_BIAS] = {dnnl_query_weights_md, 1},
        [OPERAND_SCRATCH] = {dnnl_query_scratchpad_md, 0},
    };
    for (int i = OPERAND_A; i <= OPERAND_SCRATCH; i++) {
        if ((i == OPERAND_BIAS && !entry->block.bias) ||
            (i == OPERAND_SCRATCH && entry->scratch_bytes == 0))
            continue;
        const dnnl_status_t status = make_view(
            cache, entry, lane, (enum operand)i,
            dnnl_primitive_desc_query_md(entry->descriptor, source[i].query, source[i].index));
        if (status != dnnl_success)
            return status;
    }
    return dnnl_success;
}

/* Code and views, when the block is first computed. */
static dnnl_status_t complete_entry(const struct matmul_cache *cache, struct matmul_entry *entry)
{
    if (entry->primitive)
        return dnnl_success;
    if (!entry->views)
        entry->views = heap_calloc(cache->n_lanes, sizeof *entry->views);
    if (!entry->views)
        return dnnl_out_of_memory;
    dnnl_status_t status = dnnl_success;
    for (size_t lane = 0; lane < cache->n_lanes && status == dnnl_success; lane++)
        status = make_views(cache, entry, lane);
    if (status == dnnl_success)
        status = dnnl_primitive_create(&entry->primitive, entry->descriptor);
    if (status != dnnl_success)
        entry->primitive = NULL;
    return status;
}

/* ---- cutting ---- */

/* A call in blocks: all alike but for those of the last row and the last column. */
struct cut {
    size_t rows, columns;     /* of a block */
    size_t n_rows, n_columns; /* blocks one below and beside the other */
    size_t entry[2][2];       /* by: is it in the last row, in the last column */
    size_t lane_bytes;        /* scratch of one lane */
};

static size_t parts(size_t whole, size_t part)
{
    return (whole + part - 1) / part;
}

static bool cut_call(struct cpu_ops *cpu, const struct matmul *call, struct cut *out)
{
    enum { CACHE_LINE = 64 };
    struct block block = block_of(cpu, call);
    out->rows = block.bf16 && call->m > BLOCK_ROWS ? BLOCK_ROWS : call->m;
    out->columns = block.bf16 && call->n > BLOCK_COLUMNS ? BLOCK_COLUMNS : call->n;
    out->n_rows = parts(call->m, out->rows);
    out->n_columns = parts(call->n, out->columns);
    out->lane_bytes = 0;
    for (size_t i = 0; i < 4; i++) {
        const size_t last_row = i / 2, last_column = i % 2;
        block.m = last_row ? call->m - (out->n_rows - 1) * out->rows : out->rows;
        block.n = last_column ? call->n - (out->n_columns - 1) * out->columns : out->columns;
        size_t *entry = &out->entry[last_row][last_column];
        if (!find_entry(cpu, &block, entry))
            return false;
        const size_t bytes = cpu->matmuls->entries[*entry].scratch_bytes;
        out->lane_bytes = bytes > out->lane_bytes ? bytes : out->lane_bytes;
    }
    out->lane_bytes = parts(out->lane_bytes, CACHE_LINE) * CACHE_LINE;
    return true;
}

/* ---- computing ---- */

struct library_call {
    const struct matmul_cache *cache;
    const struct matmul *matmul;
    const struct cut *cut;
    atomic_int *status; /* of the library; the last failure */
};

static dnnl_status_t run(const struct matmul_cache *cache, const struct matmul_entry *entry,
                         size_t lane, void *const data[N_OPERANDS])
{
    static const int argument[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS,
                                   DNNL_ARG_SCRATCHPAD};
    dnnl_exec_arg_t arguments[N_OPERANDS];
    int n_arguments = 0;
    for (int i = 0; i < N_OPERANDS; i++) {
        dnnl_memory_t view = entry->views[lane][i];
        if (!view)
            continue;
        const dnnl_status_t status = dnnl_memory_set_data_handle(view, data[i]);
        if (status != dnnl_success)
            return status;
        arguments[n_arguments++] = (dnnl_exec_arg_t){argument[i], view};
    }
    const dnnl_status_t status =
        dnnl_primitive_execute(entry->primitive, cache->streams[lane], n_arguments, arguments);
    return status == dnnl_success ? dnnl_stream_wait(cache->streams[lane]) : status;
}

/* The library's views are not const; it writes C and scratch only. */
static void *offset(const void *elements, size_t i, size_t bytes)
{
    return elements ? (unsigned char *)(uintptr_t)elements + i * bytes : NULL;
}

static void run_blocks(const void *call, size_t begin, size_t end)
{
    const struct library_call *c = call;
    const struct matmul *m = c->matmul;
    const struct cut *cut = c->cut;
    const size_t lane = cpu_thread_index();
    for (size_t i = begin; i < end; i++) {
        const size_t block_row = i % cut->n_rows, block_column = i / cut->n_rows;
        const size_t row = block_row * cut->rows, column = block_column * cut->columns;
        const struct matmul_entry *entry =
            &c->cache->entries[cut->entry[block_row == cut->n_rows - 1]
                                         [block_column == cut->n_columns - 1]];
        const size_t bytes = entry->block.bf16 ? 2 : 4, c_bytes = entry->block.c_fp32 ? 4 : 2;
        void *const data[N_OPERANDS] = {
            [OPERAND_A] = offset(m->a, m->form == MATMUL_TN ? row : row * m->k, bytes),
            [OPERAND_B] = offset(m->b, m->form == MATMUL_NT ? column * m->k : column, bytes),
            [OPERAND_C] = offset(m->c, row * m->n + column, c_bytes),
            [OPERAND_BIAS] = offset(m->bias, column, bytes),
            [OPERAND_SCRATCH] = offset(m->scratch, lane, cut->lane_bytes)};
        const dnnl_status_t status = run(c->cache, entry, lane, data);
        if (status != dnnl_success)
            atomic_store(c->status, (int)status);
    }
}

size_t cpu_library_scratch(struct cpu_ops *cpu, const struct matmul *shape)
{
    struct cut cut;
    return cut_call(cpu, shape, &cut) ? cpu->matmuls->n_lanes * cut.lane_bytes : 0;
}

void cpu_library_matmul(struct cpu_ops *cpu, const struct matmul *call)
{
    struct cut cut;
    if (!cut_call(cpu, call, &cut))
        return;
    struct matmul_cache *cache = cpu->matmuls;
    const struct block whole = block_of(cpu, call);
    assert(call->scratch || cut.lane_bytes == 0);
    cpu_set_library_threads(cache->library_threads);
    for (size_t i = 0; i < 4; i++) {
        const dnnl_status_t status =
            complete_entry(cache, &cache->entries[cut.entry[i / 2][i % 2]]);
        if (status != dnnl_success) {
            fail_block(cpu, &whole, "code", status);
            return;
        }
    }
    atomic_int status = dnnl_success;
    const struct library_call library = {cache, call, &cut, &status};
    /* A vector does sixteen or more multiply-adds where the work of other operations counts one. */
    cpu_parallel(cpu, cut.n_rows * cut.n_columns, 1, call->m * call->n * call->k / 64, CPU_UNEVEN,
                 run_blocks, &library);
    if (atomic_load(&status) != dnnl_success)
        fail_block(cpu, &whole, "execution", (dnnl_status_t)atomic_load(&status));
}

static void destroy_streams(struct matmul_cache *cache)
{
    for (size_t lane = 0; lane < cache->n_lanes; lane++)
        if (cache->streams[lane])
            dnnl_stream_destroy(cache->streams[lane]);
    heap_free(cache->streams);
}

enum status cpu_library_init(struct cpu_ops *cpu, struct failure *why)
{
    struct matmul_cache *cache = heap_calloc(1, sizeof *cache);
    if (!cache)
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the cache of matrix products");
    const bool bf16 = cpu->base.dtype == DTYPE_BF16;
    cache->n_lanes = bf16 ? (size_t)cpu->n_threads : 1;
    cache->library_threads = bf16 ? 1 : cpu->n_threads;
    dnnl_status_t status = dnnl_engine_create(&cache->engine, dnnl_cpu, 0);
    if (status != dnnl_success) {
        fail(why, STATUS_UNSUPPORTED, "oneDNN has no cpu engine: %s", library_text(status));
        goto undo_cache;
    }
    cache->streams = heap_calloc(cache->n_lanes, sizeof *cache->streams);
    if (!cache->streams) {
        fail(why, STATUS_OUT_OF_MEMORY, "no memory for %zu streams of matrix products",
             cache->n_lanes);
        goto undo_engine;
    }
    for (size_t lane = 0; lane < cache->n_lanes; lane++) {
        status =
            dnnl_stream_create(&cache->streams[lane], cache->engine, dnnl_stream_default_flags);
        if (status != dnnl_success) {
            cache->streams[lane] = NULL;
            fail(why, STATUS_UNSUPPORTED, "oneDNN has no cpu stream: %s", library_text(status));
            goto undo_streams;
        }
    }
    cpu->matmuls = cache;
    return STATUS_OK;

undo_streams:
    destroy_streams(cache);
undo_engine:
    dnnl_engine_destroy(cache->engine);
undo_cache:
    heap_free(cache);
    return why ? why->status : STATUS_UNSUPPORTED;
}

void cpu_library_fini(struct cpu_ops *cpu)
{
    struct matmul_cache *cache = cpu->matmuls;
    for (size_t i = 0; i < cache->n_entries; i++) {
        struct matmul_entry *entry = &cache->entries[i];
        for (size_t lane = 0; entry->views && lane < cache->n_lanes; lane++)
            for (int j = 0; j < N_OPERANDS; j++)
                if (entry->views[lane][j])
                    dnnl_memory_destroy(entry->views[lane][j]);
        heap_free(entry->views);
        if (entry->primitive)
            dnnl_primitive_destroy(entry->primitive);
        dnnl_primitive_desc_destroy(entry->descriptor);
    }
    heap_free(cache->entries);
    destroy_streams(cache);
    dnnl_engine_destroy(cache->engine);
    heap_free(cache);
    cpu->matmuls = NULL;
}
