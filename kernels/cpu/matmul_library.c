/* Matrix products through oneDNN, for processors without an instruction set of their own in
 * kernels/cpu/simd/ (matmul.c says when).
 *
 * Owns the engine, the stream and one entry per shape that was asked for; an entry whose
 * scratch was only asked about holds a descriptor, no code and no memory. All operands are plain
 * row-major matrices: nothing is rearranged or kept. The library's scratch is the caller's
 * (scratchpad mode "user"). Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>
#include <oneapi/dnnl/dnnl.h>
#include "proto/base/heap.h"

/* What a primitive is made for. */
struct block {
    enum matmul_form form;
    size_t m, n, k;
    bool bias, accumulate;
};

enum operand { OPERAND_A, OPERAND_B, OPERAND_C, OPERAND_BIAS, OPERAND_SCRATCH, N_OPERANDS };

struct matmul_entry {
    struct block block;
    dnnl_primitive_desc_t descriptor; /* owned */
    dnnl_primitive_t primitive;       /* owned; NULL until the shape is first computed */
    dnnl_memory_t memory[N_OPERANDS]; /* owned views; made with the primitive, NULL: unused */
    size_t scratch_bytes;
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

static struct block block_of(const struct matmul *call)
{
    return (struct block){.form = call->form,
                          .m = call->m,
                          .n = call->n,
                          .k = call->k,
                          .bias = call->bias != NULL,
                          .accumulate = call->accumulate};
}

static bool same_block(const struct block *a, const struct block *b)
{
    return a->form == b->form && a->m == b->m && a->n == b->n && a->k == b->k &&
           a->bias == b->bias && a->accumulate == b->accumulate;
}

/* ---- what the library is told ---- */

/* A matrix (rows, columns) in plain order, or the transpose of a plain (columns, rows). */
static dnnl_status_t describe_matrix(dnnl_memory_desc_t *out, size_t rows, size_t columns,
                                     bool transposed)
{
    const dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)columns};
    const dnnl_dims_t plain = {(dnnl_dim_t)columns, 1};
    const dnnl_dims_t swapped = {1, (dnnl_dim_t)rows};
    return dnnl_memory_desc_init_by_strides(out, 2, dims, dnnl_f32, transposed ? swapped : plain);
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
    dnnl_status_t status = describe_matrix(&a, block->m, block->k, block->form == MATMUL_TN);
    if (status == dnnl_success)
        status = describe_matrix(&b, block->k, block->n, block->form == MATMUL_NT);
    if (status == dnnl_success)
        status = describe_matrix(&bias, 1, block->n, false);
    if (status == dnnl_success)
        status = describe_matrix(&c, block->m, block->n, false);
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
    const dnnl_memory_desc_t *scratch =
        dnnl_primitive_desc_query_md(entry.descriptor, dnnl_query_scratchpad_md, 0);
    entry.scratch_bytes = scratch ? dnnl_memory_desc_get_size(scratch) : 0;
    cache->entries[cache->n_entries] = entry;
    return &cache->entries[cache->n_entries++];
}

static dnnl_status_t make_view(const struct matmul_cache *cache, struct matmul_entry *entry,
                               enum operand operand, const dnnl_memory_desc_t *description)
{
    if (entry->memory[operand])
        return dnnl_success;
    const dnnl_status_t status =
        dnnl_memory_create(&entry->memory[operand], description, cache->engine, DNNL_MEMORY_NONE);
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
            (i == OPERAND_SCRATCH && entry->scratch_bytes == 0))
            continue;
        const dnnl_status_t status = make_view(
            cache, entry, (enum operand)i,
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
    dnnl_status_t status = make_views(cache, entry);
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
        arguments[n_arguments++] = (dnnl_exec_arg_t){argument[i], entry->memory[i]};
    }
    const dnnl_status_t status =
        dnnl_primitive_execute(entry->primitive, cache->stream, n_arguments, arguments);
    return status == dnnl_success ? dnnl_stream_wait(cache->stream) : status;
}

size_t cpu_library_scratch(struct cpu_ops *cpu, const struct matmul *shape)
{
    const struct block block = block_of(shape);
    const struct matmul_entry *entry = find_entry(cpu, &block);
    return entry ? entry->scratch_bytes : 0;
}

void cpu_library_matmul(struct cpu_ops *cpu, const struct matmul *call)
{
    const struct block block = block_of(call);
    struct matmul_entry *entry = find_entry(cpu, &block);
    if (!entry)
        return;
    assert(call->scratch || entry->scratch_bytes == 0);
    cpu_set_library_threads(cpu->n_threads);
    dnnl_status_t status = complete_entry(cpu->matmuls, entry);
    if (status != dnnl_success) {
        fail_block(cpu, &block, "code", status);
        return;
    }
    /* The library's views are not const; it writes C and scratch only. */
    void *const data[N_OPERANDS] = {[OPERAND_A] = (void *)(uintptr_t)call->a,
                                    [OPERAND_B] = (void *)(uintptr_t)call->b,
                                    [OPERAND_C] = call->c,
                                    [OPERAND_BIAS] = (void *)(uintptr_t)call->bias,
                                    [OPERAND_SCRATCH] = call->scratch};
    status = run(cpu->matmuls, entry, data);
    if (status != dnnl_success)
        fail_block(cpu, &block, "execution", status);
}

enum status cpu_library_init(struct cpu_ops *cpu, struct failure *why)
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
    return STATUS_OK;

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
        for (int j = 0; j < N_OPERANDS; j++)
            if (entry->memory[j])
                dnnl_memory_destroy(entry->memory[j]);
        if (entry->primitive)
            dnnl_primitive_destroy(entry->primitive);
        dnnl_primitive_desc_destroy(entry->descriptor);
    }
    heap_free(cache->entries);
    dnnl_stream_destroy(cache->stream);
    dnnl_engine_destroy(cache->engine);
    heap_free(cache);
    cpu->matmuls = NULL;
}
