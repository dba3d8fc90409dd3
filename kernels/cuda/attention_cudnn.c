/* Attention by cuDNN's graph interface. See attention_cudnn.h; the graphs are in
 * attention_cudnn_graph.c. In order:
 *   library      the functions, found at run time
 *   plans        an engine for a graph, chosen and kept
 *   calls        addresses for a plan, queued */
#include "kernels/cuda/attention_cudnn.h"
#include <assert.h>
#include <dlfcn.h>
#include <float.h>
#include <math.h>
#include <string.h>
#include "kernels/cuda/attention_cudnn_graph.h"
#include "proto/base/heap.h"

/* The emulated runtime's device memory is not a GPU's: cuDNN must never be handed it. */
#ifdef BALLAST_EMULATE_CUDA_RUNTIME_API_H
static const bool runtime_is_real = false;
#else
static const bool runtime_is_real = true;
#endif

enum {
    OLDEST = 90000,         /* 9.0 */
    NEXT_SERIES = 100000,   /* 10.0: other numbers */
    DESCRIBED_FROM = 90800, /* plans for a GPU that is not there */
    FAULTY_FROM = 91000,    /* attention is known to be wrong in 9.10.0 and 9.10.1 */
    FAULTY_TO = 91001,
    MINUS_INFINITY_FROM = 91000, /* before, the mask has to be the lowest number */
    PART_TILE_FROM = 91501,      /* before, the backward needs T in full tiles */
    TILE = 128,
    OLDEST_MAJOR = 8,
    /* From here on a deterministic backward is one engine with certain settings, asked for by
     * number. Nobody has tried that here; our own kernels do it. */
    NO_BACKWARD_MAJOR = 10,
    MAX_HEAD_DIM = 128,
    HEAD_DIM_STEP = 8,
    ALIGNMENT = 16,
    BF16_BYTES = 2,
    MAX_CONFIGS = 24, /* engines that are considered */
    MAX_NOTES = 32,
    MAX_POINTERS = 16
};

/* ---- library ---- */

enum status attention_cudnn_load(const char *file, struct cudnn_calls *out_calls,
                                 struct failure *why)
{
    void *library = dlopen(file, RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL) {
        return fail(why, STATUS_UNSUPPORTED, "no cuDNN: %s", dlerror());
    }
    struct cudnn_calls calls;
    const struct {
        const char *name;
        void *at;
        bool optional;
    } wanted[] = {{"cudnnGetVersion", &calls.version, false},
                  {"cudnnCreate", &calls.create, false},
                  {"cudnnDestroy", &calls.destroy, false},
                  {"cudnnSetStream", &calls.set_stream, false},
                  {"cudnnGetErrorString", &calls.error_string, false},
                  {"cudnnGetLastErrorString", &calls.last_error, true},
                  {"cudnnBackendCreateDescriptor", &calls.create_descriptor, false},
                  {"cudnnBackendDestroyDescriptor", &calls.destroy_descriptor, false},
                  {"cudnnBackendFinalize", &calls.finalize, false},
                  {"cudnnBackendSetAttribute", &calls.set, false},
                  {"cudnnBackendGetAttribute", &calls.get, false},
                  {"cudnnBackendExecute", &calls.execute, false}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *function = dlsym(library, wanted[i].name);
        if (function == NULL && !wanted[i].optional) {
            dlclose(library);
            return fail(why, STATUS_UNSUPPORTED, "%s is no cuDNN 9: it has no %s", file,
                        wanted[i].name);
        }
        memcpy(wanted[i].at, &function, sizeof function);
    }
    *out_calls = calls; /* it stays loaded: its parts cannot be unloaded safely */
    return STATUS_OK;
}

enum status attention_cudnn_check_graph(const struct cudnn_calls *calls,
                                        const struct attention *attention, bool backward,
                                        struct failure *why)
{
    struct cudnn_graph *graph = NULL;
    const enum status status = cudnn_graph_new(calls, NULL, attention, backward, &graph, why);
    if (status == STATUS_OK) {
        cudnn_graph_free(graph);
    }
    return status;
}

/* ---- plans ---- */

struct shape {
    size_t batch, seq_len;
    uint32_t n_heads, n_kv_heads, head_dim;
    bool backward;
};

/* An engine for a shape, or why there is none. */
struct plan {
    struct plan *next;
    struct shape shape;
    struct cudnn_graph *graph; /* owned; NULL: no engine */
    void *descriptor;          /* the graph's */
    size_t scratch_bytes;
    struct failure why; /* of the last engine refused, or the reason not to ask for one */
};

struct attention_cudnn {
    struct cudnn_calls calls;
    void *handle;     /* NULL: the GPU is only described */
    void *properties; /* that description, a descriptor; else NULL */
    size_t version;
    int major; /* the GPU's compute capability */
    bool stream_known;
    cudaStream_t stream; /* the handle's */
    struct plan *plans;  /* owned list */
};

/* All but the handle. */
static enum status make(const struct cudnn_calls *calls, int major,
                        struct attention_cudnn **out_cudnn, struct failure *why)
{
    const size_t version = calls->version();
    if (version < OLDEST || version >= NEXT_SERIES) {
        return fail(why, STATUS_UNSUPPORTED, "cuDNN's version is %zu: %d to %d are supported",
                    version, OLDEST, NEXT_SERIES - 1);
    }
    if (version >= FAULTY_FROM && version <= FAULTY_TO) {
        return fail(why, STATUS_UNSUPPORTED, "cuDNN %zu computes attention wrongly: use another",
                    version);
    }
    if (major < OLDEST_MAJOR) {
        return fail(why, STATUS_UNSUPPORTED,
                    "cuDNN's attention in bf16 needs compute capability %d.0, the GPU has %d.x",
                    OLDEST_MAJOR, major);
    }
    struct attention_cudnn *cudnn = heap_calloc(1, sizeof *cudnn);
    if (cudnn == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for cuDNN's plans");
    }
    cudnn->calls = *calls;
    cudnn->version = version;
    cudnn->major = major;
    *out_cudnn = cudnn;
    return STATUS_OK;
}

enum status attention_cudnn_new_with(const struct cudnn_calls *calls, int major,
                                     struct attention_cudnn **out_cudnn, struct failure *why)
{
    struct attention_cudnn *cudnn = NULL;
    const enum status status = make(calls, major, &cudnn, why);
    if (status != STATUS_OK) {
        return status;
    }
    const int result = calls->create(&cudnn->handle);
    if (result != 0) {
        struct failure cause;
        (void)cudnn_failed(calls, result, "a handle", &cause);
        heap_free(cudnn);
        return fail(why, STATUS_UNSUPPORTED, "%s", cause.text);
    }
    *out_cudnn = cudnn;
    return STATUS_OK;
}

enum status attention_cudnn_new_described(const struct cudnn_calls *calls, const char *gpu,
                                          int major, struct attention_cudnn **out_cudnn,
                                          struct failure *why)
{
    struct attention_cudnn *cudnn = NULL;
    const enum status status = make(calls, major, &cudnn, why);
    if (status != STATUS_OK) {
        return status;
    }
    if (cudnn->version < DESCRIBED_FROM) {
        heap_free(cudnn);
        return fail(why, STATUS_UNSUPPORTED, "cuDNN %zu plans for no GPU that is not there",
                    calls->version());
    }
    int result = calls->create_descriptor(DNN_BACKEND_DEVICEPROP_DESCRIPTOR, &cudnn->properties);
    if (result == 0) {
        result = calls->set(cudnn->properties, DNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                            DNN_TYPE_CHAR, (int64_t)strlen(gpu), gpu);
    }
    if (result == 0) {
        result = calls->finalize(cudnn->properties);
    }
    if (result != 0) {
        const enum status failed = cudnn_failed(calls, result, "a GPU's description", why);
        attention_cudnn_free(cudnn);
        return failed;
    }
    *out_cudnn = cudnn;
    return STATUS_OK;
}

enum status attention_cudnn_new(struct attention_cudnn **out_cudnn, struct failure *why)
{
    struct cudnn_calls calls;
    const enum status status = attention_cudnn_load("libcudnn.so.9", &calls, why);
    if (status != STATUS_OK) {
        return status;
    }
    if (!runtime_is_real) {
        return fail(why, STATUS_UNSUPPORTED, "cuDNN cannot run on the stand-in for the runtime");
    }
    int device = 0, major = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (error != cudaSuccess) {
        (void)cudaGetLastError(); /* it is reported here */
        return fail(why, STATUS_UNSUPPORTED, "no GPU for cuDNN: %s (%d)", cudaGetErrorString(error),
                    (int)error);
    }
    return attention_cudnn_new_with(&calls, major, out_cudnn, why);
}

static void plan_free(struct plan *plan)
{
    cudnn_graph_free(plan->graph);
    heap_free(plan);
}

void attention_cudnn_free(struct attention_cudnn *cudnn)
{
    if (cudnn == NULL) {
        return;
    }
    while (cudnn->plans != NULL) {
        struct plan *plan = cudnn->plans;
        cudnn->plans = plan->next;
        plan_free(plan);
    }
    if (cudnn->properties != NULL) {
        (void)cudnn->calls.destroy_descriptor(cudnn->properties);
    }
    if (cudnn->handle != NULL) {
        (void)cudnn->calls.destroy(cudnn->handle);
    }
    heap_free(cudnn);
}

size_t attention_cudnn_version(const struct attention_cudnn *cudnn)
{
    return cudnn->version;
}

bool attention_cudnn_serves(const struct attention_cudnn *cudnn, const struct attention *attention,
                            enum dtype dtype)
{
    (void)cudnn;
    const struct attention *a = attention;
    return dtype == DTYPE_BF16 && a->segments == NULL && !(a->dropout.p > 0.0f) &&
           a->head_dim > 0 && a->head_dim <= MAX_HEAD_DIM && a->head_dim % HEAD_DIM_STEP == 0 &&
           a->n_kv_heads > 0 && a->n_heads % a->n_kv_heads == 0 && a->n_heads > 0 && a->batch > 0 &&
           a->batch <= INT32_MAX && a->seq_len > 1 && a->seq_len <= INT32_MAX;
}

/* Does the engine of this configuration promise the same bits every time? An error in the graph if
 * it does not, or does not say. */
static void require_deterministic(struct cudnn_graph *graph, void *config)
{
    void *engine = cudnn_create(graph, DNN_BACKEND_ENGINE_DESCRIPTOR);
    int notes[MAX_NOTES] = {0};
    int64_t n = 0;
    if (graph->status == STATUS_OK) {
        cudnn_check(graph,
                    graph->calls->get(config, DNN_ATTR_ENGINECFG_ENGINE,
                                      DNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine),
                    "a configuration's engine");
    }
    if (graph->status != STATUS_OK) {
        return;
    }
    n = 0;
    cudnn_check(graph,
                graph->calls->get(engine, DNN_ATTR_ENGINE_NUMERICAL_NOTE, DNN_TYPE_NUMERICAL_NOTE,
                                  MAX_NOTES, &n, notes),
                "an engine's notes");
    for (int64_t i = 0; i < n && i < MAX_NOTES; i++) {
        if (notes[i] == DNN_NUMERICAL_NOTE_NONDETERMINISTIC && graph->status == STATUS_OK) {
            graph->status = fail(&graph->why, STATUS_UNSUPPORTED,
                                 "cuDNN's engine for it does not give the same bits every time");
        }
    }
}

/* Make the plan of one configuration. False: not this one, plan->why says why. */
static bool try_config(struct attention_cudnn *cudnn, struct plan *plan, struct cudnn_graph *graph,
                       void *config)
{
    int64_t bytes = 0, n = 0;
    require_deterministic(graph, config);
    void *descriptor = cudnn_create(graph, DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    if (cudnn->handle == NULL) {
        cudnn_set_descriptor(graph, descriptor, DNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
                             cudnn->properties);
    } else {
        cudnn_set(graph, descriptor, DNN_ATTR_EXECUTION_PLAN_HANDLE, DNN_TYPE_HANDLE, 1,
                  &cudnn->handle);
    }
    cudnn_set_descriptor(graph, descriptor, DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    cudnn_finalize(graph, descriptor, "a plan");
    if (graph->status == STATUS_OK) {
        cudnn_check(graph,
                    cudnn->calls.get(descriptor, DNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                     DNN_TYPE_INT64, 1, &n, &bytes),
                    "a plan's scratch");
    }
    if (graph->status != STATUS_OK || bytes < 0) {
        plan->why = graph->why;
        graph->status = STATUS_OK; /* the next may do */
        return false;
    }
    plan->descriptor = descriptor;
    plan->scratch_bytes = (size_t)bytes;
    return true;
}

/* Go through what cuDNN proposes, best first. */
static bool try_heuristic(struct attention_cudnn *cudnn, struct plan *plan,
                          struct cudnn_graph *graph, int mode)
{
    void *heuristic = cudnn_create(graph, DNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnn_set_descriptor(graph, heuristic, DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph->descriptor);
    cudnn_set_enum(graph, heuristic, DNN_ATTR_ENGINEHEUR_MODE, DNN_TYPE_HEUR_MODE, mode);
    if (cudnn->handle == NULL) {
        cudnn_set_descriptor(graph, heuristic, DNN_ATTR_ENGINEHEUR_DEVICEPROP, cudnn->properties);
    }
    cudnn_finalize(graph, heuristic, "engines for the graph");
    void *configs[MAX_CONFIGS] = {NULL};
    int64_t n = 0;
    if (graph->status == STATUS_OK) {
        cudnn_check(graph,
                    cudnn->calls.get(heuristic, DNN_ATTR_ENGINEHEUR_RESULTS,
                                     DNN_TYPE_BACKEND_DESCRIPTOR, 0, &n, NULL),
                    "the number of engines");
    }
    n = n > MAX_CONFIGS ? MAX_CONFIGS : n;
    for (int64_t i = 0; i < n; i++) {
        configs[i] = cudnn_create(graph, DNN_BACKEND_ENGINECFG_DESCRIPTOR);
    }
    if (n > 0 && graph->status == STATUS_OK) {
        const int64_t room = n;
        cudnn_check(graph,
                    cudnn->calls.get(heuristic, DNN_ATTR_ENGINEHEUR_RESULTS,
                                     DNN_TYPE_BACKEND_DESCRIPTOR, room, &n, configs),
                    "the engines");
        n = n > room ? room : n;
    }
    if (graph->status != STATUS_OK) {
        plan->why = graph->why;
        graph->status = STATUS_OK;
        return false;
    }
    for (int64_t i = 0; i < n; i++) {
        if (try_config(cudnn, plan, graph, configs[i])) {
            return true;
        }
    }
    return false;
}

/* What is known without asking. */
static enum status refuse(const struct attention_cudnn *cudnn, const struct shape *shape,
                          struct failure *why)
{
    if (shape->backward && cudnn->major >= NO_BACKWARD_MAJOR) {
        return fail(why, STATUS_UNSUPPORTED,
                    "cuDNN's deterministic backward is not tried on compute capability %d.x",
                    cudnn->major);
    }
    if (shape->backward && cudnn->version < PART_TILE_FROM && shape->seq_len % TILE != 0) {
        return fail(why, STATUS_UNSUPPORTED,
                    "cuDNN %zu's backward needs a sequence length of whole tiles of %d, not %zu",
                    cudnn->version, TILE, shape->seq_len);
    }
    return STATUS_OK;
}

/* Sets plan->graph if there is an engine, else plan->why. */
static void plan_make(struct attention_cudnn *cudnn, const struct attention *attention,
                      struct plan *plan)
{
    struct cudnn_graph *graph = NULL;
    if (refuse(cudnn, &plan->shape, &plan->why) != STATUS_OK ||
        cudnn_graph_new(&cudnn->calls, cudnn->handle, attention, plan->shape.backward, &graph,
                        &plan->why) != STATUS_OK) {
        return;
    }
    (void)fail(&plan->why, STATUS_UNSUPPORTED, "cuDNN %zu proposes no engine for it",
               cudnn->version);
    if (try_heuristic(cudnn, plan, graph, DNN_HEUR_MODE_A) ||
        try_heuristic(cudnn, plan, graph, DNN_HEUR_MODE_FALLBACK)) {
        plan->graph = graph;
    } else {
        cudnn_graph_free(graph);
    }
}

/* The plan of this shape, made if need be. Its graph is NULL where there is no engine. NULL: no
 * memory. */
static struct plan *plan_of(struct attention_cudnn *cudnn, const struct attention *attention,
                            bool backward)
{
    const struct shape s = {attention->batch,      attention->seq_len,  attention->n_heads,
                            attention->n_kv_heads, attention->head_dim, backward};
    for (struct plan *plan = cudnn->plans; plan != NULL; plan = plan->next) {
        const struct shape *p = &plan->shape;
        if (p->batch == s.batch && p->seq_len == s.seq_len && p->n_heads == s.n_heads &&
            p->n_kv_heads == s.n_kv_heads && p->head_dim == s.head_dim &&
            p->backward == s.backward) {
            return plan;
        }
    }
    struct plan *plan = heap_calloc(1, sizeof *plan);
    if (plan == NULL) {
        return NULL;
    }
    plan->shape = s;
    plan_make(cudnn, attention, plan);
    plan->next = cudnn->plans;
    cudnn->plans = plan;
    return plan;
}

/* The same for a call that is served, with a graph. */
static enum status plan_for(struct attention_cudnn *cudnn, const struct attention *attention,
                            enum dtype dtype, bool backward, struct plan **out_plan,
                            struct failure *why)
{
    if (!attention_cudnn_serves(cudnn, attention, dtype)) {
        return fail(why, STATUS_UNSUPPORTED,
                    "this attention (%s, dropout %g, head dimension %u, sequence length %zu) is "
                    "not of cuDNN's kind",
                    dtype_name(dtype), (double)attention->dropout.p, attention->head_dim,
                    attention->seq_len);
    }
    struct plan *plan = plan_of(cudnn, attention, backward);
    if (plan == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for a plan of cuDNN");
    }
    if (plan->graph == NULL) {
        return fail(why, plan->why.status, "%s", plan->why.text);
    }
    *out_plan = plan;
    return STATUS_OK;
}

size_t attention_cudnn_scratch(struct attention_cudnn *cudnn, const struct attention *attention,
                               bool backward, struct failure *why)
{
    struct plan *plan = NULL;
    if (plan_for(cudnn, attention, DTYPE_BF16, backward, &plan, why) != STATUS_OK) {
        return SIZE_MAX;
    }
    return plan->scratch_bytes;
}

/* ---- calls ---- */

/* Addresses of a graph's tensors. */
struct pack {
    int64_t n;
    int64_t numbers[MAX_POINTERS];
    void *at[MAX_POINTERS];
    float scale, masked, one; /* what by-value tensors point to */
    bool aligned;
};

static void pack_add(struct pack *pack, enum cudnn_tensor number, const void *at)
{
    assert(pack->n < MAX_POINTERS);
    pack->numbers[pack->n] = number;
    memcpy(&pack->at[pack->n], &at, sizeof at); /* cuDNN takes inputs as pointers to non-const */
    pack->n++;
}

static void pack_device(struct pack *pack, enum cudnn_tensor number, const void *at)
{
    pack->aligned = pack->aligned && at != NULL && (uintptr_t)at % ALIGNMENT == 0;
    pack_add(pack, number, at);
}

static void pack_init(struct pack *pack, const struct attention_cudnn *cudnn,
                      const struct attention *attention)
{
    *pack = (struct pack){.scale = attention->scale,
                          .masked = cudnn->version < MINUS_INFINITY_FROM ? -FLT_MAX : -INFINITY,
                          .one = 1.0f,
                          .aligned = true};
    pack_add(pack, CUDNN_TENSOR_SCALE, &pack->scale);
    pack_add(pack, CUDNN_TENSOR_MASKED, &pack->masked);
}

/* The three parts of packed rows. */
static void pack_parts(struct pack *pack, const struct attention *attention, const void *rows,
                       const enum cudnn_tensor numbers[3])
{
    const char *at = rows;
    const size_t head = attention->head_dim * (size_t)BF16_BYTES;
    pack_device(pack, numbers[0], at);
    pack_device(pack, numbers[1], at + attention->n_heads * head);
    pack_device(pack, numbers[2], at + (attention->n_heads + attention->n_kv_heads) * head);
}

static enum status pack_run(struct attention_cudnn *cudnn, const struct plan *plan,
                            cudaStream_t stream, const struct pack *pack, void *scratch,
                            struct failure *why)
{
    const struct cudnn_calls *calls = &cudnn->calls;
    assert(cudnn->handle != NULL);
    if (!pack->aligned || (uintptr_t)scratch % ALIGNMENT != 0 ||
        (scratch == NULL && plan->scratch_bytes > 0)) {
        return fail(why, STATUS_INVALID,
                    "cuDNN's attention needs operands and %zu bytes of scratch aligned to %d bytes",
                    plan->scratch_bytes, ALIGNMENT);
    }
    if (!cudnn->stream_known || cudnn->stream != stream) {
        const int result = calls->set_stream(cudnn->handle, stream);
        if (result != 0) {
            return cudnn_failed(calls, result, "a stream", why);
        }
        cudnn->stream = stream;
        cudnn->stream_known = true;
    }
    void *descriptor = NULL;
    int result = calls->create_descriptor(DNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &descriptor);
    if (result != 0) {
        return cudnn_failed(calls, result, "a descriptor", why);
    }
    result = calls->set(descriptor, DNN_ATTR_VARIANT_PACK_UNIQUE_IDS, DNN_TYPE_INT64, pack->n,
                        pack->numbers);
    if (result == 0) {
        result = calls->set(descriptor, DNN_ATTR_VARIANT_PACK_DATA_POINTERS, DNN_TYPE_VOID_PTR,
                            pack->n, pack->at);
    }
    if (result == 0) {
        result =
            calls->set(descriptor, DNN_ATTR_VARIANT_PACK_WORKSPACE, DNN_TYPE_VOID_PTR, 1, &scratch);
    }
    if (result == 0) {
        result = calls->finalize(descriptor);
    }
    if (result == 0) {
        result = calls->execute(cudnn->handle, plan->descriptor, descriptor);
    }
    enum status status = STATUS_OK;
    if (result != 0) {
        status = cudnn_failed(calls, result,
                              plan->shape.backward ? "attention's backward" : "attention", why);
    }
    (void)calls->destroy_descriptor(descriptor);
    return status;
}

static const enum cudnn_tensor qkv_numbers[3] = {CUDNN_TENSOR_Q, CUDNN_TENSOR_K, CUDNN_TENSOR_V};
static const enum cudnn_tensor dqkv_numbers[3] = {CUDNN_TENSOR_DQ, CUDNN_TENSOR_DK,
                                                  CUDNN_TENSOR_DV};

enum status attention_cudnn_forward(struct attention_cudnn *cudnn, cudaStream_t stream,
                                    const struct cuda_attention_forward *args, void *scratch,
                                    struct failure *why)
{
    struct plan *plan = NULL;
    const enum status status = plan_for(cudnn, &args->attention, args->dtype, false, &plan, why);
    if (status != STATUS_OK) {
        return status;
    }
    struct pack pack;
    pack_init(&pack, cudnn, &args->attention);
    pack_parts(&pack, &args->attention, args->qkv, qkv_numbers);
    pack_device(&pack, CUDNN_TENSOR_OUT, args->out);
    pack_device(&pack, CUDNN_TENSOR_LSE, args->lse);
    return pack_run(cudnn, plan, stream, &pack, scratch, why);
}

enum status attention_cudnn_backward(struct attention_cudnn *cudnn, cudaStream_t stream,
                                     const struct cuda_attention_backward *args, void *scratch,
                                     struct failure *why)
{
    struct plan *plan = NULL;
    const enum status status = plan_for(cudnn, &args->attention, args->dtype, true, &plan, why);
    if (status != STATUS_OK) {
        return status;
    }
    struct pack pack;
    pack_init(&pack, cudnn, &args->attention);
    pack_add(&pack, CUDNN_TENSOR_ONE, &pack.one);
    pack_parts(&pack, &args->attention, args->qkv, qkv_numbers);
    pack_device(&pack, CUDNN_TENSOR_OUT, args->out);
    pack_device(&pack, CUDNN_TENSOR_DOUT, args->dout);
    pack_device(&pack, CUDNN_TENSOR_LSE, args->lse);
    pack_parts(&pack, &args->attention, args->dqkv, dqkv_numbers);
    pack_device(&pack, CUDNN_TENSOR_DELTA, args->delta);
    return pack_run(cudnn, plan, stream, &pack, scratch, why);
}
