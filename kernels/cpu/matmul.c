/* Matrix products through oneDNN.
 *
 * Owns the engine, the stream and one primitive per (form, shape, bias, accumulate) that was
 * asked for; a shape whose scratch was only asked about holds a descriptor, no code and
 * no memory. All operands are plain row-major matrices: nothing is packed or kept. The
 * library's scratch is the caller's (scratchpad mode "user"). Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>
#include <oneapi/dnnl/dnnl.h>
#include "proto/base/heap.h"

struct matmul_shape {
    enum matmul_form form;
    size_t m, n, k;
    bool bias, accumulate;
};

enum operand { OPERAND_A, OPERAND_B, OPERAND_C, OPERAND_BIAS, OPERAND_SCRATCH, N_OPERANDS };

struct matmul_entry {
    struct matmul_shape shape;
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

static void fail_shape(struct cpu_ops *cpu, const struct matmul_shape *shape, const char *doing,
                       dnnl_status_t status)
{
    cpu_fail(cpu, status == dnnl_out_of_memory ? STATUS_OUT_OF_MEMORY : STATUS_UNSUPPORTED,
             "matrix product %s m=%zu n=%zu k=%zu: oneDNN %s: %s", form_text(shape->form), shape->m,
             shape->n, shape->k, doing, library_text(status));
}

static struct matmul_shape shape_of(const struct matmul *call)
{
    return (struct matmul_shape){.form = call->form,
                                 .m = call->m,
                                 .n = call->n,
                                 .k = call->k,
                                 .bias = call->bias != NULL,
                                 .accumulate = call->accumulate};
}

static bool same_shape(const struct matmul_shape *a, const struct matmul_shape *b)
{
    return a->form == b->form && a->m == b->m && a->n == b->n && a->k == b->k &&
           a->bias == b->bias && a->accumulate == b->accumulate;
}

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
    dnnl_post_ops_t sum = NULL;
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_status_t status = dnnl_primitive_attr_create(&attributes);
    if (status != dnnl_success)
        return status;
    status = dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
    if (status == dnnl_success && accumulate) {
        status = dnnl_post_ops_create(&sum);
        if (status == dnnl_success)
            status = dnnl_post_ops_append_sum(sum, 1.0f);
        if (status == dnnl_success)
            status = dnnl_primitive_attr_set_post_ops(attributes, sum);
        dnnl_post_ops_destroy(sum);
    }
    if (status != dnnl_success) {
        dnnl_primitive_attr_destroy(attributes);
        return status;
    }
    *out = attributes;
    return dnnl_success;
}

static dnnl_status_t make_descriptor(const struct matmul_cache *cache,
                                     const struct matmul_shape *shape, dnnl_primitive_desc_t *out)
{
    dnnl_memory_desc_t a, b, bias, c;
    dnnl_status_t status = describe_matrix(&a, shape->m, shape->k, shape->form == MATMUL_TN);
    if (status == dnnl_success)
        status = describe_matrix(&b, shape->k, shape->n, shape->form == MATMUL_NT);
    if (status == dnnl_success)
        status = describe_matrix(&bias, 1, shape->n, false);
    if (status == dnnl_success)
        status = describe_matrix(&c, shape->m, shape->n, false);
    dnnl_matmul_desc_t product;
    if (status == dnnl_success)
        status = dnnl_matmul_desc_init(&product, &a, &b, shape->bias ? &bias : NULL, &c);
    if (status != dnnl_success)
        return status;
    dnnl_primitive_attr_t attributes;
    status = make_attributes(shape->accumulate, &attributes);
    if (status != dnnl_success)
        return status;
    status = dnnl_primitive_desc_create(out, &product, attributes, cache->engine, NULL);
    dnnl_primitive_attr_destroy(attributes);
    return status;
}

/* The entry of a shape, made when it is new; NULL with the error kept. The pointer holds
 * until the next call. */
static struct matmul_entry *find_entry(struct cpu_ops *cpu, const struct matmul_shape *shape)
{
    struct matmul_cache *cache = cpu->matmuls;
    for (size_t i = 0; i < cache->n_entries; i++)
        if (same_shape(&cache->entries[i].shape, shape))
            return &cache->entries[i];
    if (cache->n_entries == cache->capacity) {
        const size_t capacity = cache->capacity ? 2 * cache->capacity : 32;
        struct matmul_entry *grown = heap_realloc(cache->entries, capacity * sizeof *grown);
        if (!grown) {
            fail_shape(cpu, shape, "entry", dnnl_out_of_memory);
            return NULL;
        }
        cache->entries = grown;
        cache->capacity = capacity;
    }
    cpu_set_library_threads(cpu->n_threads);
    struct matmul_entry entry = {.shape = *shape};
    const dnnl_status_t status = make_descriptor(cache, shape, &entry.descriptor);
    if (status != dnnl_success) {
        fail_shape(cpu, shape, "descriptor", status);
        return NULL;
    }
    const dnnl_memory_desc_t *scratch =
        dnnl_primitive_desc_query_md(entry.descriptor, dnnl_query_scratchpad_md, 0);
    entry.scratch_bytes = scratch ? dnnl_memory_desc_get_size(scratch) : 0;
    cache->entries[cache->n_entries] = entry;
    return &cache->entries[cache->n_entries++];
}

static dnnl_status_t make_views(const struct matmul_cache *cache, struct matmul_entry *entry)
{
    static const struct {
        dnnl_query_t query;
        int index;
    } source[N_OPERANDS] = {
        [OPERAND_A] = {dnnl_query_src_md, 0},
        [OPERAND_B] = {dnnl_query_weights_md, 0},
        [OPERAND_C] = {dnnl_query_dst_md, 0},
        [OPERAND_BIAS] = {dnnl_query_weights_md, 1},
        [OPERAND_SCRATCH] = {dnnl_query_scratchpad_md, 0},
    };
    for (int i = 0; i < N_OPERANDS; i++) {
        if ((i == OPERAND_BIAS && !entry->shape.bias) ||
            (i == OPERAND_SCRATCH && entry->scratch_bytes == 0) || entry->memory[i])
            continue;
        const dnnl_memory_desc_t *description =
            dnnl_primitive_desc_query_md(entry->descriptor, source[i].query, source[i].index);
        const dnnl_status_t status =
            dnnl_memory_create(&entry->memory[i], description, cache->engine, DNNL_MEMORY_NONE);
        if (status != dnnl_success) {
            entry->memory[i] = NULL;
            return status;
        }
    }
    return dnnl_success;
}

static dnnl_status_t execute(const struct matmul_cache *cache, struct matmul_entry *entry,
                             const struct matmul *call)
{
    static const int argument[N_OPERANDS] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST,
                                             DNNL_ARG_BIAS, DNNL_ARG_SCRATCHPAD};
    /* The library's views are not const; it writes C and scratch only. */
    void *const data[N_OPERANDS] = {(void *)(uintptr_t)call->a, (void *)(uintptr_t)call->b,
                                    call->c, (void *)(uintptr_t)call->bias, call->scratch};
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

static size_t matmul_scratch(struct ops *ops, const struct matmul *shape)
{
    const struct matmul_shape wanted = shape_of(shape);
    if (wanted.m == 0 || wanted.n == 0 || wanted.k == 0)
        return 0;
    const struct matmul_entry *entry = find_entry(cpu_of(ops), &wanted);
    return entry ? entry->scratch_bytes : 0;
}

static void matmul(struct ops *ops, const struct matmul *call)
{
    struct cpu_ops *cpu = cpu_of(ops);
    const struct matmul_shape shape = shape_of(call);
    assert(shape.k > 0);
    assert(!shape.bias || shape.form == MATMUL_NT);
    if (shape.m == 0 || shape.n == 0)
        return;
    struct matmul_entry *entry = find_entry(cpu, &shape);
    if (!entry)
        return;
    assert(call->scratch || entry->scratch_bytes == 0);
    cpu_set_library_threads(cpu->n_threads);
    dnnl_status_t status = dnnl_success;
    if (!entry->primitive) {
        status = dnnl_primitive_create(&entry->primitive, entry->descriptor);
        if (status != dnnl_success) {
            entry->primitive = NULL;
            fail_shape(cpu, &shape, "primitive", status);
            return;
        }
    }
    status = make_views(cpu->matmuls, entry);
    if (status == dnnl_success)
        status = execute(cpu->matmuls, entry, call);
    if (status != dnnl_success)
        fail_shape(cpu, &shape, "execution", status);
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
        dnnl_primitive_desc_destroy(entry->descriptor);
    }
    heap_free(cache->entries);
    dnnl_stream_destroy(cache->stream);
    dnnl_engine_destroy(cache->engine);
    heap_free(cache);
    cpu->matmuls = NULL;
}
