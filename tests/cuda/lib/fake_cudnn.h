/* A pretended cuDNN: descriptors that remember what matters, and engines, notes, scratch and errors
 * as the test sets them. It checks how it is called. For one test; header only. */
#ifndef BALLAST_TESTS_CUDA_LIB_FAKE_CUDNN_H
#define BALLAST_TESTS_CUDA_LIB_FAKE_CUDNN_H

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
    if (type == DNN_TYPE_BACKEND_DESCRIPTOR) {
        struct fake_descriptor *const *others = values;
        for (int64_t i = 0; i < n; i++) {
            if (others[i] == NULL || (!others[i]->finalized && others[i]->engine < 0)) {
                return FAKE_BAD; /* an operand that is not ready */
            }
        }
        if (name == DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) {
            descriptor->engine = others[0]->engine;
        } else if (name == DNN_ATTR_OPERATIONGRAPH_OPS) {
            fake.operations = (int)n;
        }
    } else if (name == DNN_ATTR_ENGINEHEUR_MODE) {
        memcpy(&descriptor->mode, values, sizeof descriptor->mode);
    } else if (name == DNN_ATTR_VARIANT_PACK_UNIQUE_IDS) {
        assert_in_range(n, 1, MAX_TENSORS);
        descriptor->n_ids = n;
        memcpy(descriptor->ids, values, (size_t)n * sizeof *descriptor->ids);
    } else if (name == DNN_ATTR_VARIANT_PACK_DATA_POINTERS) {
        assert_in_range(n, 1, MAX_TENSORS);
        descriptor->n_pointers = n;
        memcpy(descriptor->pointers, values, (size_t)n * sizeof *descriptor->pointers);
    } else if (name == DNN_ATTR_VARIANT_PACK_WORKSPACE) {
        memcpy(&descriptor->workspace, values, sizeof descriptor->workspace);
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

static const struct cudnn_calls fake_calls = {.version = fake_version,
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
static int fake_reset(void **state)
{
    (void)state;
    fake = (struct fake){.version = 91900, .n_engines = {1, 0}};
    fake_live = heap_live();
    return 0;
}

static int fake_all_gone(void **state)
{
    (void)state;
    return fake.descriptors != 0 || fake.handles != 0 || heap_live() != fake_live;
}

#endif
