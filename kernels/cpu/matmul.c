/* Matrix products through oneDNN.
 *
 * Owns the engine, the stream and one entry per kind of block that was asked for; an entry
 * whose scratch was only asked about holds descriptors, no code and no memory. All operands
 * are plain row-major matrices. The library's scratch is the caller's (scratchpad mode "user").
 *
 * The library is slow with a plain right operand whose rows lie far apart (NN and TN: 55 instead
 * of 140 GFLOP/s at 3072 columns), so with enough rows the operand is first rearranged
 * into the library's own order, in scratch, a block at a time. Blocks of columns are
 * independent; blocks of the inner dimension add up in order. They are cut by shape alone. Main
 * thread. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>
#include <oneapi/dnnl/dnnl.h>
#include "proto/base/heap.h"

enum {
    PACK_ROWS = 128,              /* rows of C from which rearranging pays */
    PACK_INNER = 4096,            /* most rows of B that are rearranged at once */
    PACK_ELEMENTS = 4 << 20,      /* most elements */
    SCRATCH_ALIGNMENT = 64
};

/* One call of the library: a block of a product. */
struct block {
    enum matmul_form form;
    size_t m, n, k;
    size_t a_row, b_row, c_row; /* distance of rows of the stored matrices */
    bool bias, accumulate, packed;
};

enum operand {
    OPERAND_A,
    OPERAND_B, /* packed: in the library's order */
    OPERAND_C,
    OPERAND_BIAS,
    OPERAND_SCRATCH,
    OPERAND_PLAIN_B, /* packed: what is rearranged */
    N_OPERANDS
};

struct matmul_entry {
    struct block block;
    dnnl_primitive_desc_t descriptor; /* owned */
    dnnl_primitive_t primitive;       /* owned; NULL until the block is first computed */
    dnnl_primitive_t rearrange;       /* owned; NULL when B stays as it is */
    dnnl_memory_t memory[N_OPERANDS]; /* owned views; made with the primitive, NULL: unused */
    size_t packed_bytes, library_bytes;
};

struct matmul_cache {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
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

static bool same_block(const struct block *a, const struct block *b)
{
    return a->form == b->form && a->m == b->m && a->n == b->n && a->k == b->k &&
           a->a_row == b->a_row && a->b_row == b->b_row && a->c_row == b->c_row &&
           a->bias == b->bias && a->accumulate == b->accumulate && a->packed == b->packed;
}

/* ---- cutting a product into blocks ---- */

struct cut {
    bool packed;
    size_t n_step, k_step;
};

/* Equal parts of at most `limit`, in multiples of `unit`. */
static size_t equal_parts(size_t whole, size_t limit, size_t unit)
{
    const size_t n_parts = (whole + limit - 1) / limit;
    const size_t part = (whole + n_parts - 1) / n_parts;
    return (part + unit - 1) / unit * unit;
}

static struct cut cut_of(const struct matmul *call)
{
    struct cut cut = {false, call->n, call->k};
    if (call->form == MATMUL_NT || call->m < PACK_ROWS || call->n < 64 || call->k < 64)
        return cut;
    cut.packed = true;
    cut.k_step = equal_parts(call->k, PACK_INNER, 16);
    cut.n_step = equal_parts(call->n, PACK_ELEMENTS / cut.k_step, 64);
    return cut;
}

static struct block block_at(const struct matmul *call, const struct cut *cut, size_t n_at,
                             size_t k_at)
{
    return (struct block){
        .form = call->form,
        .m = call->m,
        .n = call->n - n_at < cut->n_step ? call->n - n_at : cut->n_step,
        .k = call->k - k_at < cut->k_step ? call->k - k_at : cut->k_step,
        .a_row = call->form == MATMUL_TN ? call->m : call->k,
        .b_row = call->form == MATMUL_NT ? call->k : call->n,
        .c_row = call->n,
        .bias = call->bias != NULL,
        .accumulate = call->accumulate || k_at > 0,
        .packed = cut->packed};
}

/* ---- what the library is told ---- */

/* A matrix (rows, columns) whose stored rows are `row` apart; transposed: what is stored is
 * (columns, rows). */
static dnnl_status_t describe_matrix(dnnl_memory_desc_t *out, size_t rows, size_t columns,
                                     size_t row, bool transposed)
{
    const dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)columns};
    const dnnl_dims_t plain = {(dnnl_dim_t)row, 1};
    const dnnl_dims_t swapped = {1, (dnnl_dim_t)row};
    return dnnl_memory_desc_init_by_strides(out, 2, dims, dnnl_f32, transposed ? swapped : plain);
}

static dnnl_status_t describe_b(const struct block *block, dnnl_memory_desc_t *out)
{
    return describe_matrix(out, block->k, block->n, block->b_row, block->form == MATMUL_NT);
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
    const dnnl_dims_t b_dims = {(dnnl_dim_t)block->k, (dnnl_dim_t)block->n};
    dnnl_status_t status =
        describe_matrix(&a, block->m, block->k, block->a_row, block->form == MATMUL_TN);
    if (status == dnnl_success)
        status = block->packed ? dnnl_memory_desc_init_by_tag(&b, 2, b_dims, dnnl_f32,
                                                              dnnl_format_tag_any)
                               : describe_b(block, &b);
    if (status == dnnl_success)
        status = describe_matrix(&bias, 1, block->n, block->n, false);
    if (status == dnnl_success)
        status = describe_matrix(&c, block->m, block->n, block->c_row, false);
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

static size_t described_bytes(const_dnnl_primitive_desc_t descriptor, dnnl_query_t query)
{
    const dnnl_memory_desc_t *memory = dnnl_primitive_desc_query_md(descriptor, query, 0);
    const size_t bytes = memory ? dnnl_memory_desc_get_size(memory) : 0;
    return (bytes + SCRATCH_ALIGNMENT - 1) / SCRATCH_ALIGNMENT * SCRATCH_ALIGNMENT;
}

/* ---- the cache ---- */

/* The entry of a block, made when it is new; NULL with the error kept. The pointer holds
 * until the next call. */
static struct matmul_entry *find_entry(struct cpu_ops *cpu, const struct block *block)
{
    struct matmul_cache *cache = cpu->matmuls;
    for (size_t i = 0; i < cache->n_entries; i++)
        if (same_block(&cache->entries[i].block, block))
            return &cache->entries[i];
    if (cache->n_entries == cache->capacity) {
        const size_t capacity = cache->capacity ? 2 * cache->capacity : 32;
        struct matmul_entry *grown = heap_realloc(cache->entries, capacity * sizeof *grown);
        if (!grown) {
            fail_block(cpu, block, "entry", dnnl_out_of_memory);
            return NULL;
        }
        cache->entries = grown;
        cache->capacity = capacity;
    }
    cpu_set_library_threads(cpu->n_threads);
    struct matmul_entry entry = {.block = *block};
    const dnnl_status_t status = make_descriptor(cache, block, &entry.descriptor);
    if (status != dnnl_success) {
        fail_block(cpu, block, "descriptor", status);
        return NULL;
    }
    entry.library_bytes = described_bytes(entry.descriptor, dnnl_query_scratchpad_md);
    if (block->packed)
        entry.packed_bytes = described_bytes(entry.descriptor, dnnl_query_weights_md);
    cache->entries[cache->n_entries] = entry;
    return &cache->entries[cache->n_entries++];
}

static dnnl_status_t make_view(const struct matmul_cache *cache, struct matmul_entry *entry,
                               enum operand operand, const dnnl_memory_desc_t *description)
{
    if (entry->memory[operand])
        return dnnl_success;
    const dnnl_status_t status = dnnl_memory_create(&entry->memory[operand], description,
                                                    cache->engine, DNNL_MEMORY_NONE);
    if (status != dnnl_success)
        entry->memory[operand] = NULL;
    return status;
}

static dnnl_status_t make_views(const struct matmul_cache *cache, struct matmul_entry *entry)
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
            (i == OPERAND_SCRATCH && entry->library_bytes == 0))
            continue;
        const dnnl_status_t status =
            make_view(cache, entry, (enum operand)i,
                      dnnl_primitive_desc_query_md(entry->descriptor, source[i].query,
                                                   source[i].index));
        if (status != dnnl_success)
            return status;
    }
    return dnnl_success;
}

/* Views and code of the rearrangement of B. */
static dnnl_status_t make_rearrangement(const struct matmul_cache *cache,
                                        struct matmul_entry *entry)
{
    dnnl_memory_desc_t plain;
    dnnl_status_t status = describe_b(&entry->block, &plain);
    if (status == dnnl_success)
        status = make_view(cache, entry, OPERAND_PLAIN_B, &plain);
    if (status != dnnl_success)
        return status;
    dnnl_primitive_attr_t attributes;
    status = make_attributes(false, &attributes);
    if (status != dnnl_success)
        return status;
    dnnl_primitive_desc_t descriptor;
    status = dnnl_reorder_primitive_desc_create(
        &descriptor, &plain, cache->engine,
        dnnl_primitive_desc_query_md(entry->descriptor, dnnl_query_weights_md, 0), cache->engine,
        attributes);
    dnnl_primitive_attr_destroy(attributes);
    if (status != dnnl_success)
        return status;
    /* A rearrangement that wanted scratch of its own would need it planned. */
    if (described_bytes(descriptor, dnnl_query_scratchpad_md) > 0)
        status = dnnl_unimplemented;
    else
        status = dnnl_primitive_create(&entry->rearrange, descriptor);
    if (status != dnnl_success)
        entry->rearrange = NULL;
    dnnl_primitive_desc_destroy(descriptor);
    return status;
}

/* Code and views, when the block is first computed. */
static dnnl_status_t complete_entry(const struct matmul_cache *cache, struct matmul_entry *entry)
{
    if (entry->primitive)
        return dnnl_success;
    dnnl_status_t status = make_views(cache, entry);
    if (status == dnnl_success && entry->block.packed && !entry->rearrange)
        status = make_rearrangement(cache, entry);
    if (status == dnnl_success)
        status = dnnl_primitive_create(&entry->primitive, entry->descriptor);
    if (status != dnnl_success)
        entry->primitive = NULL;
    return status;
}

/* ---- computing ---- */

static dnnl_status_t run(const struct matmul_cache *cache, struct matmul_entry *entry,
                         void *const data[N_OPERANDS])
{
    static const int argument[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS,
                                   DNNL_ARG_SCRATCHPAD};
    dnnl_exec_arg_t arguments[N_OPERANDS];
    int n_arguments = 0;
    for (int i = 0; i < N_OPERANDS; i++) {
        if (!entry->memory[i])
            continue;
        const dnnl_status_t status = dnnl_memory_set_data_handle(entry->memory[i], data[i]);
        if (status != dnnl_success)
            return status;
        if (i != OPERAND_PLAIN_B)
            arguments[n_arguments++] = (dnnl_exec_arg_t){argument[i], entry->memory[i]};
    }
    if (entry->rearrange) {
        const dnnl_exec_arg_t moved[] = {{DNNL_ARG_FROM, entry->memory[OPERAND_PLAIN_B]},
                                         {DNNL_ARG_TO, entry->memory[OPERAND_B]}};
        const dnnl_status_t status =
            dnnl_primitive_execute(entry->rearrange, cache->stream, 2, moved);
        if (status != dnnl_success)
            return status;
    }
    const dnnl_status_t status =
        dnnl_primitive_execute(entry->primitive, cache->stream, n_arguments, arguments);
    return status == dnnl_success ? dnnl_stream_wait(cache->stream) : status;
}

static bool compute_block(struct cpu_ops *cpu, const struct matmul *call, const struct block *block,
                          size_t n_at, size_t k_at)
{
    struct matmul_entry *entry = find_entry(cpu, block);
    if (!entry)
        return false;
    assert(call->scratch || entry->packed_bytes + entry->library_bytes == 0);
    dnnl_status_t status = complete_entry(cpu->matmuls, entry);
    if (status != dnnl_success) {
        fail_block(cpu, block, "code", status);
        return false;
    }
    /* The library's views are not const; it writes C and scratch only. */
    const float *a = (const float *)call->a + (block->form == MATMUL_TN ? k_at * call->m : k_at);
    const float *b = (const float *)call->b + k_at * block->b_row + n_at;
    unsigned char *scratch = call->scratch;
    void *const data[N_OPERANDS] = {
        [OPERAND_A] = (void *)(uintptr_t)a,
        [OPERAND_B] = block->packed ? (void *)scratch : (void *)(uintptr_t)b,
        [OPERAND_C] = (float *)call->c + n_at,
        [OPERAND_BIAS] = (void *)(uintptr_t)call->bias,
        [OPERAND_SCRATCH] = scratch ? scratch + entry->packed_bytes : NULL,
        [OPERAND_PLAIN_B] = (void *)(uintptr_t)b};
    status = run(cpu->matmuls, entry, data);
    if (status != dnnl_success)
        fail_block(cpu, block, "execution", status);
    return status == dnnl_success;
}

static size_t matmul_scratch(struct ops *ops, const struct matmul *shape)
{
    size_t most = 0;
    if (shape->m == 0 || shape->n == 0 || shape->k == 0)
        return 0;
    const struct cut cut = cut_of(shape);
    for (size_t n_at = 0; n_at < shape->n; n_at += cut.n_step)
        for (size_t k_at = 0; k_at < shape->k; k_at += cut.k_step) {
            const struct block block = block_at(shape, &cut, n_at, k_at);
            const struct matmul_entry *entry = find_entry(cpu_of(ops), &block);
            if (!entry)
                return 0;
            if (entry->packed_bytes + entry->library_bytes > most)
                most = entry->packed_bytes + entry->library_bytes;
        }
    return most;
}

static void matmul(struct ops *ops, const struct matmul *call)
{
    struct cpu_ops *cpu = cpu_of(ops);
    assert(call->k > 0);
    assert(!call->bias || call->form == MATMUL_NT);
    if (call->m == 0 || call->n == 0)
        return;
    cpu_set_library_threads(cpu->n_threads);
    const struct cut cut = cut_of(call);
    for (size_t n_at = 0; n_at < call->n; n_at += cut.n_step)
        for (size_t k_at = 0; k_at < call->k; k_at += cut.k_step) {
            const struct block block = block_at(call, &cut, n_at, k_at);
            if (!compute_block(cpu, call, &block, n_at, k_at))
                return;
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

enum status cpu_matmul_init(struct cpu_ops *cpu, struct failure *why)
{
    struct matmul_cache *cache = heap_calloc(1, sizeof *cache);
    if (!cache)
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the cache of matrix products");
    dnnl_status_t status = dnnl_engine_create(&cache->engine, dnnl_cpu, 0);
    if (status != dnnl_success) {
        fail(why, STATUS_UNSUPPORTED, "oneDNN has no cpu engine: %s", library_text(status));
        goto undo_cache;
    }
    status = dnnl_stream_create(&cache->stream, cache->engine, dnnl_stream_default_flags);
    if (status != dnnl_success) {
        fail(why, STATUS_UNSUPPORTED, "oneDNN has no cpu stream: %s", library_text(status));
        goto undo_engine;
    }
    cpu->matmuls = cache;
    cpu->base.matmul_scratch = matmul_scratch;
    cpu->base.matmul = matmul;
    cpu->base.bias_backward = bias_backward;
    return STATUS_OK;

undo_engine:
    dnnl_engine_destroy(cache->engine);
undo_cache:
    heap_free(cache);
    return why ? why->status : STATUS_UNSUPPORTED;
}

void cpu_matmul_fini(struct cpu_ops *cpu)
{
    struct matmul_cache *cache = cpu->matmuls;
    for (size_t i = 0; i < cache->n_entries; i++) {
        struct matmul_entry *entry = &cache->entries[i];
        for (int j = 0; j < N_OPERANDS; j++)
            if (entry->memory[j])
                dnnl_memory_destroy(entry->memory[j]);
        if (entry->primitive)
            dnnl_primitive_destroy(entry->primitive);
        if (entry->rearrange)
            dnnl_primitive_destroy(entry->rearrange);
        dnnl_primitive_desc_destroy(entry->descriptor);
    }
    heap_free(cache->entries);
    dnnl_stream_destroy(cache->stream);
    dnnl_engine_destroy(cache->engine);
    heap_free(cache);
    cpu->matmuls = NULL;
}
