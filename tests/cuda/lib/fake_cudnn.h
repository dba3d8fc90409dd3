/* A pretended cuDNN: descriptors that remember what matters, and engines, notes, scratch and errors
 * as the test sets them. It checks how it is called. For one test; header only. */
#ifndef BALLAST_TESTS_CUDA_LIB_FAKE_CUDNN_H
#define BALLAST_TESTS_CUDA_LIB_FAKE_CUDNN_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_cudnn_graph.h"
#include "proto/base/heap.h"
#include "tests/cuda/lib/typed.h"
#include <cmocka.h> /* last: it defines fail() as a macro */

enum { MAX_ENGINES = 4, MAX_TENSORS = 16, FAKE_BAD = 2000, FAKE_ALLOC = 4003 };

struct fake_descriptor {
    int kind;
    bool finalized;
    int engine; /* of a configuration, an engine, a plan */
    int mode;   /* of a heuristic */
    int64_t n_ids, n_pointers;
    int64_t ids[MAX_TENSORS];
    void *pointers[MAX_TENSORS];
    void *workspace;
    /* of a tensor, and of an operation: what it computes and its operands */
    int64_t dims[4], strides[4], id, axis;
    int type, rule;
    const struct fake_descriptor *how, *x, *b, *t, *y;
};

static struct fake {
    size_t version;
    int n_engines[2]; /* proposed by mode A, by the fallback */
    bool random[MAX_ENGINES], no_plan[MAX_ENGINES];
    int64_t scratch[MAX_ENGINES];
    int create_result;
    int fail_at, n_calls; /* the call that fails; 0: none */
    /* what was seen */
    int descriptors, handles, operations, n_set_stream, n_executed;
    cudaStream_t stream;
    struct fake_descriptor last; /* the pack last executed */
    int last_engine;
    const struct fake_descriptor *graph[CUDNN_MAX_OPERATIONS]; /* the last one described */
    /* called by execute, after it has noted the above */
    void (*compute)(const struct fake_descriptor *pack);
} fake;

static int fake_step(void)
{
    return ++fake.n_calls == fake.fail_at ? FAKE_ALLOC : 0;
}

static size_t fake_version(void)
{
    return fake.version;
}

static int fake_create(void **out_handle)
{
    if (fake.create_result != 0) {
        return fake.create_result;
    }
    const int result = fake_step();
    if (result == 0) {
        fake.handles++;
        *out_handle = &fake;
    }
    return result;
}

static int fake_destroy(void *handle)
{
    assert_ptr_equal(handle, &fake);
    fake.handles--;
    return 0;
}

static int fake_set_stream(void *handle, cudaStream_t stream)
{
    assert_ptr_equal(handle, &fake);
    fake.n_set_stream++;
    fake.stream = stream;
    return fake_step();
}

static const char *fake_error_string(int status)
{
    return status == FAKE_ALLOC ? "PRETENDED_ALLOC_FAILED" : "PRETENDED_ERROR";
}

static void fake_last_error(char *out_text, size_t bytes)
{
    snprintf(out_text, bytes, "the cause");
}

static int fake_create_descriptor(int kind, void **out_descriptor)
{
    const int result = fake_step();
    if (result != 0) {
        return result;
    }
    struct fake_descriptor *descriptor = calloc(1, sizeof *descriptor);
    assert_non_null(descriptor);
    descriptor->kind = kind;
    descriptor->engine = -1;
    fake.descriptors++;
    *out_descriptor = descriptor;
    return 0;
}

static int fake_destroy_descriptor(void *descriptor)
{
    assert_non_null(descriptor);
    fake.descriptors--;
    free(descriptor);
    return 0;
}

static int fake_finalize(void *at)
{
    struct fake_descriptor *descriptor = at;
    const int result = fake_step();
    assert_false(descriptor->finalized);
    if (result == 0 && descriptor->kind == DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
        assert_in_range(descriptor->engine, 0, MAX_ENGINES - 1);
        if (fake.no_plan[descriptor->engine]) {
            return 3000;
        }
    }
    if (result == 0) {
        descriptor->finalized = true;
    }
    return result;
}

/* Which operand of an operation an attribute sets. */
static void fake_operand(struct fake_descriptor *at, int name, const struct fake_descriptor *other)
{
    switch (name) {
    case DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR:
    case DNN_ATTR_OPERATION_MATMUL_DESC:
    case DNN_ATTR_OPERATION_REDUCTION_DESC:
        at->how = other;
        break;
    case DNN_ATTR_OPERATION_POINTWISE_XDESC:
    case DNN_ATTR_OPERATION_MATMUL_ADESC:
    case DNN_ATTR_OPERATION_REDUCTION_XDESC:
    case DNN_ATTR_OPERATION_RESHAPE_XDESC:
        at->x = other;
        break;
    case DNN_ATTR_OPERATION_POINTWISE_BDESC:
    case DNN_ATTR_OPERATION_MATMUL_BDESC:
        at->b = other;
        break;
    case DNN_ATTR_OPERATION_POINTWISE_TDESC:
        at->t = other;
        break;
    case DNN_ATTR_OPERATION_POINTWISE_YDESC:
    case DNN_ATTR_OPERATION_MATMUL_CDESC:
    case DNN_ATTR_OPERATION_REDUCTION_YDESC:
    case DNN_ATTR_OPERATION_RESHAPE_YDESC:
        at->y = other;
        break;
    default:
        break;
    }
}

static void fake_keep(void *to, size_t room, int64_t n, size_t each, const void *values)
{
    assert_true((size_t)n * each <= room);
    memcpy(to, values, (size_t)n * each);
}

/* What is not a descriptor. */
static void fake_value(struct fake_descriptor *at, int name, int64_t n, const void *values)
{
    const size_t wide = sizeof(int64_t);
    switch (name) {
    case DNN_ATTR_ENGINEHEUR_MODE:
        fake_keep(&at->mode, sizeof at->mode, n, sizeof at->mode, values);
        break;
    case DNN_ATTR_VARIANT_PACK_UNIQUE_IDS:
        at->n_ids = n;
        fake_keep(at->ids, sizeof at->ids, n, wide, values);
        break;
    case DNN_ATTR_VARIANT_PACK_DATA_POINTERS:
        at->n_pointers = n;
        fake_keep(at->pointers, sizeof at->pointers, n, sizeof *at->pointers, values);
        break;
    case DNN_ATTR_VARIANT_PACK_WORKSPACE:
        fake_keep(&at->workspace, sizeof at->workspace, n, sizeof at->workspace, values);
        break;
    case DNN_ATTR_TENSOR_DIMENSIONS:
        fake_keep(at->dims, sizeof at->dims, n, wide, values);
        break;
    case DNN_ATTR_TENSOR_STRIDES:
        fake_keep(at->strides, sizeof at->strides, n, wide, values);
        break;
    case DNN_ATTR_TENSOR_UNIQUE_ID:
        fake_keep(&at->id, sizeof at->id, n, wide, values);
        break;
    case DNN_ATTR_POINTWISE_AXIS:
        fake_keep(&at->axis, sizeof at->axis, n, wide, values);
        break;
    case DNN_ATTR_TENSOR_DATA_TYPE:
        fake_keep(&at->type, sizeof at->type, n, sizeof at->type, values);
        break;
    case DNN_ATTR_POINTWISE_MODE:
    case DNN_ATTR_REDUCTION_OPERATOR:
        fake_keep(&at->rule, sizeof at->rule, n, sizeof at->rule, values);
        break;
    default:
        break;
    }
}

static int fake_set(void *at, int name, int type, int64_t n, const void *values)
{
    struct fake_descriptor *descriptor = at;
    const int result = fake_step();
    if (result != 0) {
        return result;
    }
    assert_non_null(descriptor);
    assert_non_null(values);
    assert_false(descriptor->finalized);
    if (type != DNN_TYPE_BACKEND_DESCRIPTOR) {
        fake_value(descriptor, name, n, values);
        return 0;
    }
    struct fake_descriptor *const *others = values;
    for (int64_t i = 0; i < n; i++) {
        if (others[i] == NULL || (!others[i]->finalized && others[i]->engine < 0)) {
            return FAKE_BAD; /* an operand that is not ready */
        }
        if (name == DNN_ATTR_OPERATIONGRAPH_OPS) {
            assert_in_range(i, 0, CUDNN_MAX_OPERATIONS - 1);
            fake.graph[i] = others[i];
            fake.operations = (int)n;
        }
    }
    fake_operand(descriptor, name, others[0]);
    if (name == DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) {
        descriptor->engine = others[0]->engine;
    }
    return 0;
}

static int fake_get(void *at, int name, int type, int64_t room, int64_t *out_n, void *out_values)
{
    struct fake_descriptor *descriptor = at;
    const int result = fake_step();
    (void)type;
    if (result != 0) {
        return result;
    }
    if (name == DNN_ATTR_ENGINEHEUR_RESULTS) {
        const bool fallback = descriptor->mode == DNN_HEUR_MODE_FALLBACK;
        const int n = fake.n_engines[fallback];
        assert_true(descriptor->finalized);
        *out_n = n;
        struct fake_descriptor **configs = out_values;
        for (int i = 0; i < n && i < room; i++) {
            configs[i]->engine = fallback ? fake.n_engines[0] + i : i;
        }
    } else if (name == DNN_ATTR_ENGINECFG_ENGINE) {
        struct fake_descriptor **engine = out_values;
        engine[0]->engine = descriptor->engine;
        *out_n = 1;
    } else if (name == DNN_ATTR_ENGINE_NUMERICAL_NOTE) {
        int *notes = out_values;
        notes[0] = 0; /* uses tensor cores */
        notes[1] = DNN_NUMERICAL_NOTE_NONDETERMINISTIC;
        *out_n = fake.random[descriptor->engine] ? 2 : 1;
    } else if (name == DNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
        memcpy(out_values, &fake.scratch[descriptor->engine], sizeof(int64_t));
        *out_n = 1;
    } else {
        return FAKE_BAD;
    }
    return 0;
}

static int fake_execute(void *handle, void *plan, void *pack)
{
    assert_ptr_equal(handle, &fake);
    const int result = fake_step();
    if (result != 0) {
        return result;
    }
    const struct fake_descriptor *what = plan, *with = pack;
    assert_true(what->finalized && with->finalized);
    assert_int_equal(with->n_ids, with->n_pointers);
    fake.n_executed++;
    fake.last = *with;
    fake.last_engine = what->engine;
    if (fake.compute != NULL) {
        fake.compute(with);
    }
    return 0;
}

/* ---- what a graph means ---- */

enum { FAKE_MAX_VIRTUAL = 32 };
/* Tensors between operations, dense, in double. */
static double *fake_virtual[FAKE_MAX_VIRTUAL];

static void *fake_pointer(int64_t number)
{
    for (int64_t i = 0; i < fake.last.n_ids; i++) {
        if (fake.last.ids[i] == number) {
            return fake.last.pointers[i];
        }
    }
    return NULL;
}

/* Where element (index) of a tensor lies; an index beyond a size divides (query heads share a key
 * head) or, where the size is 1, is 0. */
static int64_t fake_offset(const struct fake_descriptor *tensor, const int64_t index[4],
                           int64_t heads)
{
    int64_t offset = 0;
    for (int i = 0; i < 4; i++) {
        const int64_t size = tensor->dims[i];
        int64_t at = index[i];
        if (i == 1 && size != heads && size != 0 && heads % size == 0) {
            at /= heads / size;
        }
        at = size == 1 ? 0 : at;
        assert_in_range(at, 0, size - 1);
        /* between operations strides mean nothing: they are kept dense */
        offset = tensor->id >= CUDNN_TENSOR_FIRST_VIRTUAL ? offset * size + at
                                                          : offset + at * tensor->strides[i];
    }
    return offset;
}

/* Read (write NULL) or write one element. */
static double fake_element(const struct fake_descriptor *tensor, const int64_t index[4],
                           int64_t heads, const double *write)
{
    const int64_t offset = fake_offset(tensor, index, heads);
    if (tensor->id >= CUDNN_TENSOR_FIRST_VIRTUAL) {
        const int64_t which = tensor->id - CUDNN_TENSOR_FIRST_VIRTUAL;
        assert_in_range(which, 0, FAKE_MAX_VIRTUAL - 1);
        if (fake_virtual[which] == NULL) {
            const int64_t *d = tensor->dims;
            fake_virtual[which] = calloc((size_t)(d[0] * d[1] * d[2] * d[3]), sizeof(double));
            assert_non_null(fake_virtual[which]);
        }
        return write != NULL ? (fake_virtual[which][offset] = *write) : fake_virtual[which][offset];
    }
    char *at = fake_pointer(tensor->id);
    assert_non_null(at);
    if (tensor->type == DNN_DATA_BFLOAT16) {
        uint16_t half = write != NULL ? typed_round((float)*write) : 0;
        memcpy(write != NULL ? at + offset * 2 : (char *)&half,
               write != NULL ? (char *)&half : at + offset * 2, sizeof half);
        return (double)typed_widen_one(half);
    }
    float value = write != NULL ? (float)*write : 0;
    memcpy(write != NULL ? at + offset * 4 : (char *)&value,
           write != NULL ? (char *)&value : at + offset * 4, sizeof value);
    return (double)value;
}

static double fake_pointwise(const struct fake_descriptor *how, double x, double b, double t,
                             const int64_t index[4])
{
    switch (how->rule) {
    case DNN_POINTWISE_ADD:
        return x + b;
    case DNN_POINTWISE_MUL:
        return x * b;
    case DNN_POINTWISE_DIV:
        return x / b;
    case DNN_POINTWISE_SUB:
        return x - b;
    case DNN_POINTWISE_EXP:
        return exp(x);
    case DNN_POINTWISE_LOG:
        return log(x);
    case DNN_POINTWISE_CMP_GE:
        return x >= b;
    case DNN_POINTWISE_GEN_INDEX:
        return (double)index[how->axis];
    case DNN_POINTWISE_BINARY_SELECT:
        return t != 0 ? x : b;
    default:
        fail_msg("an element-wise operation %d", how->rule);
        return 0;
    }
}

/* One element of an operation's result: for a sum or product over `inner` more. */
static double fake_result(const struct fake_descriptor *op, const int64_t index[4], int64_t heads)
{
    int64_t i[4] = {index[0], index[1], index[2], index[3]};
    const struct fake_descriptor *x = op->x;
    if (op->kind == DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR) {
        const int64_t other[4] = {i[0], i[1], i[3], i[2]};
        return fake_element(x, other, x->dims[1], NULL);
    }
    if (op->kind == DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) {
        return fake_pointwise(op->how, fake_element(x, i, heads, NULL),
                              op->b == NULL ? 0 : fake_element(op->b, i, heads, NULL),
                              op->t == NULL ? 0 : fake_element(op->t, i, heads, NULL), i);
    }
    double sum = 0;
    if (op->kind == DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
        for (int64_t k = 0; k < x->dims[3]; k++) {
            const int64_t left[4] = {i[0], i[1], i[2], k}, right[4] = {i[0], i[1], k, i[3]};
            sum += fake_element(x, left, heads, NULL) * fake_element(op->b, right, heads, NULL);
        }
        return sum;
    }
    assert_int_equal(op->kind, DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    const bool greatest = op->how->rule == DNN_REDUCE_TENSOR_MAX;
    const int64_t over_heads = x->dims[1] / op->y->dims[1];
    const int64_t over_last = x->dims[3] / op->y->dims[3];
    sum = greatest ? -INFINITY : 0;
    for (int64_t h = 0; h < over_heads; h++) {
        for (int64_t k = 0; k < over_last; k++) {
            const int64_t at[4] = {i[0], i[1] * over_heads + h, i[2], i[3] * over_last + k};
            const double value = fake_element(x, at, x->dims[1], NULL);
            sum = greatest ? fmax(sum, value) : sum + value;
        }
    }
    return sum;
}

/* Carry out the graph last described, operation by operation, on host memory. */
static inline void fake_evaluate(const struct fake_descriptor *pack)
{
    (void)pack;
    for (int o = 0; o < fake.operations; o++) {
        const struct fake_descriptor *op = fake.graph[o];
        const int64_t *d = op->y->dims;
        int64_t i[4];
        for (i[0] = 0; i[0] < d[0]; i[0]++) {
            for (i[1] = 0; i[1] < d[1]; i[1]++) {
                for (i[2] = 0; i[2] < d[2]; i[2]++) {
                    for (i[3] = 0; i[3] < d[3]; i[3]++) {
                        const double value = fake_result(op, i, d[1]);
                        (void)fake_element(op->y, i, d[1], &value);
                    }
                }
            }
        }
    }
    for (int i = 0; i < FAKE_MAX_VIRTUAL; i++) {
        free(fake_virtual[i]);
        fake_virtual[i] = NULL;
    }
}

__attribute__((unused)) static const struct cudnn_calls fake_calls = {
    .version = fake_version,
    .create = fake_create,
    .destroy = fake_destroy,
    .set_stream = fake_set_stream,
    .error_string = fake_error_string,
    .last_error = fake_last_error,
    .create_descriptor = fake_create_descriptor,
    .destroy_descriptor = fake_destroy_descriptor,
    .finalize = fake_finalize,
    .set = fake_set,
    .get = fake_get,
    .execute = fake_execute};

static int64_t fake_live; /* blocks on the heap when the test began */

/* One good engine. */
static inline int fake_reset(void **state)
{
    (void)state;
    fake = (struct fake){.version = 91900, .n_engines = {1, 0}};
    fake_live = heap_live();
    return 0;
}

static inline int fake_all_gone(void **state)
{
    (void)state;
    return fake.descriptors != 0 || fake.handles != 0 || heap_live() != fake_live;
}

#endif
