/* Operation graphs of attention for cuDNN. See attention_cudnn_graph.h.
 *
 * cuDNN has no causal attention as one operation in its C interface. It recognises it in a graph of
 * small operations, and fuses that into one or two kernels. The graph has to be the one it looks
 * for, node by node; that is why some nodes here compute nothing (a product with one). */
#include "kernels/cuda/attention_cudnn_graph.h"
#include <assert.h>
#include "proto/base/heap.h"

/* Not beside the emulated runtime, whose headers declare less. */
#if defined(__has_include) && !defined(BALLAST_EMULATE_CUDA_RUNTIME_API_H)
#if __has_include(<cudnn_graph.h>)
#include <cudnn_graph.h>
#define X(name, value) _Static_assert((int)CUDNN_##name == value, #name);
CUDNN_NAMES(X)
#undef X
#endif
#endif

enum { ALIGNMENT = 16, N_DIMS = 4 };

/* ---- descriptors ---- */

enum status cudnn_failed(const struct cudnn_calls *calls, int result, const char *what,
                         struct failure *why)
{
    char last[256] = "";
    if (calls->last_error != NULL) {
        calls->last_error(last, sizeof last);
        last[sizeof last - 1] = '\0';
    }
    enum status status = STATUS_IO;
    if (result / 1000 == 3) {
        status = STATUS_UNSUPPORTED;
    } else if (result == DNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
               result == DNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED) {
        status = STATUS_OUT_OF_MEMORY;
    }
    return fail(why, status, "cuDNN, %s: %s (%d)%s%s", what, calls->error_string(result), result,
                last[0] == '\0' ? "" : ": ", last);
}

void cudnn_check(struct cudnn_graph *graph, int result, const char *what)
{
    if (result != 0 && graph->status == STATUS_OK) {
        graph->status = cudnn_failed(graph->calls, result, what, &graph->why);
    }
}

void *cudnn_create(struct cudnn_graph *graph, int kind)
{
    void *descriptor = NULL;
    if (graph->status != STATUS_OK) {
        return NULL;
    }
    assert(graph->n_owned < CUDNN_MAX_DESCRIPTORS);
    cudnn_check(graph, graph->calls->create_descriptor(kind, &descriptor), "a descriptor");
    if (graph->status != STATUS_OK) {
        return NULL;
    }
    graph->owned[graph->n_owned++] = descriptor;
    return descriptor;
}

void cudnn_set(struct cudnn_graph *graph, void *descriptor, int name, int type, int64_t n,
               const void *values)
{
    if (graph->status == STATUS_OK) {
        cudnn_check(graph, graph->calls->set(descriptor, name, type, n, values), "an attribute");
    }
}

static void set_int(struct cudnn_graph *graph, void *descriptor, int name, int64_t value)
{
    cudnn_set(graph, descriptor, name, DNN_TYPE_INT64, 1, &value);
}

void cudnn_set_enum(struct cudnn_graph *graph, void *descriptor, int name, int type, int value)
{
    cudnn_set(graph, descriptor, name, type, 1, &value);
}

void cudnn_set_descriptor(struct cudnn_graph *graph, void *descriptor, int name, void *value)
{
    cudnn_set(graph, descriptor, name, DNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

void cudnn_finalize(struct cudnn_graph *graph, void *descriptor, const char *what)
{
    if (graph->status == STATUS_OK) {
        cudnn_check(graph, graph->calls->finalize(descriptor), what);
    }
}

void cudnn_graph_free(struct cudnn_graph *graph)
{
    if (graph != NULL) {
        while (graph->n_owned > 0) {
            (void)graph->calls->destroy_descriptor(graph->owned[--graph->n_owned]);
        }
        heap_free(graph);
    }
}

/* ---- tensors and operations ---- */

struct tensor {
    void *descriptor;
    int64_t dims[N_DIMS], strides[N_DIMS];
};

enum placement { IN_DEVICE_MEMORY, BY_VALUE, BETWEEN_OPERATIONS };

static struct tensor tensor_new(struct cudnn_graph *graph, enum placement placement, int64_t number,
                                int type, struct tensor shape)
{
    static const bool yes = true;
    struct tensor tensor = shape;
    tensor.descriptor = cudnn_create(graph, DNN_BACKEND_TENSOR_DESCRIPTOR);
    cudnn_set_enum(graph, tensor.descriptor, DNN_ATTR_TENSOR_DATA_TYPE, DNN_TYPE_DATA_TYPE, type);
    cudnn_set(graph, tensor.descriptor, DNN_ATTR_TENSOR_DIMENSIONS, DNN_TYPE_INT64, N_DIMS,
              tensor.dims);
    cudnn_set(graph, tensor.descriptor, DNN_ATTR_TENSOR_STRIDES, DNN_TYPE_INT64, N_DIMS,
              tensor.strides);
    set_int(graph, tensor.descriptor, DNN_ATTR_TENSOR_UNIQUE_ID, number);
    set_int(graph, tensor.descriptor, DNN_ATTR_TENSOR_BYTE_ALIGNMENT, ALIGNMENT);
    if (placement == BETWEEN_OPERATIONS) {
        cudnn_set(graph, tensor.descriptor, DNN_ATTR_TENSOR_IS_VIRTUAL, DNN_TYPE_BOOLEAN, 1, &yes);
    } else if (placement == BY_VALUE) {
        cudnn_set(graph, tensor.descriptor, DNN_ATTR_TENSOR_IS_BY_VALUE, DNN_TYPE_BOOLEAN, 1, &yes);
    }
    cudnn_finalize(graph, tensor.descriptor, "a tensor");
    return tensor;
}

/* One after the other, the last index fastest. */
static struct tensor dense(int64_t d0, int64_t d1, int64_t d2, int64_t d3)
{
    return (struct tensor){.dims = {d0, d1, d2, d3}, .strides = {d1 * d2 * d3, d2 * d3, d3, 1}};
}

/* (B, heads, T, hd) in token-major rows of `width` elements. */
static struct tensor in_rows(const struct cudnn_graph *graph, int64_t heads, int64_t width)
{
    const int64_t d = graph->head_dim;
    return (struct tensor){.dims = {graph->batch, heads, graph->tokens, d},
                           .strides = {graph->tokens * width, d, width, 1}};
}

static struct tensor transposed(struct tensor tensor)
{
    struct tensor other = tensor;
    for (int i = 0; i < 2; i++) {
        other.dims[2 + i] = tensor.dims[3 - i];
        other.strides[2 + i] = tensor.strides[3 - i];
    }
    return other;
}

static struct tensor score_shape(const struct cudnn_graph *graph)
{
    return dense(graph->batch, graph->heads, graph->tokens, graph->tokens);
}

static struct tensor row_shape(const struct cudnn_graph *graph)
{
    return dense(graph->batch, graph->heads, graph->tokens, 1);
}

/* One of qkv, out or their gradients. */
static struct tensor operand(struct cudnn_graph *graph, enum cudnn_tensor number,
                             struct tensor shape)
{
    return tensor_new(graph, IN_DEVICE_MEMORY, number, DNN_DATA_BFLOAT16, shape);
}

static struct tensor scalar(struct cudnn_graph *graph, enum cudnn_tensor number)
{
    return tensor_new(graph, BY_VALUE, number, DNN_DATA_FLOAT, dense(1, 1, 1, 1));
}

static struct tensor between(struct cudnn_graph *graph, int type, struct tensor shape)
{
    return tensor_new(graph, BETWEEN_OPERATIONS, graph->next_virtual++, type, shape);
}

/* An operation: its descriptor, with the one that says what it does where it has such. */
static void *operation_new(struct cudnn_graph *graph, int kind, int attribute, void *how)
{
    void *operation = cudnn_create(graph, kind);
    if (how != NULL) {
        cudnn_set_descriptor(graph, operation, attribute, how);
    }
    return operation;
}

static void operation_add(struct cudnn_graph *graph, void *operation, const char *what)
{
    cudnn_finalize(graph, operation, what);
    assert(graph->n_operations < CUDNN_MAX_OPERATIONS);
    graph->operations[graph->n_operations++] = operation;
}

static void *pointwise_new(struct cudnn_graph *graph, int mode, int compute, int64_t axis)
{
    void *how = cudnn_create(graph, DNN_BACKEND_POINTWISE_DESCRIPTOR);
    cudnn_set_enum(graph, how, DNN_ATTR_POINTWISE_MODE, DNN_TYPE_POINTWISE_MODE, mode);
    cudnn_set_enum(graph, how, DNN_ATTR_POINTWISE_MATH_PREC, DNN_TYPE_DATA_TYPE, compute);
    if (axis >= 0) {
        set_int(graph, how, DNN_ATTR_POINTWISE_AXIS, axis);
    }
    cudnn_finalize(graph, how, "an element-wise operation's description");
    return operation_new(graph, DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
                         DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
}

/* y = mode(x, b, t), element by element; b and t may be NULL, and are broadcast. */
static void pointwise(struct cudnn_graph *graph, int mode, struct tensor x, const struct tensor *b,
                      const struct tensor *t, struct tensor y)
{
    const int compute = mode == DNN_POINTWISE_CMP_GE ? DNN_DATA_BOOLEAN : DNN_DATA_FLOAT;
    void *operation = pointwise_new(graph, mode, compute, -1);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_POINTWISE_XDESC, x.descriptor);
    if (b != NULL) {
        cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_POINTWISE_BDESC, b->descriptor);
    }
    if (t != NULL) {
        cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_POINTWISE_TDESC, t->descriptor);
    }
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_POINTWISE_YDESC, y.descriptor);
    operation_add(graph, operation, "an element-wise operation");
}

/* The same into a new fp32 tensor of x's shape, between operations. */
static struct tensor mapped(struct cudnn_graph *graph, int mode, struct tensor x,
                            const struct tensor *b)
{
    struct tensor y = between(graph, DNN_DATA_FLOAT, x);
    pointwise(graph, mode, x, b, NULL, y);
    return y;
}

/* Each element's index along an axis. */
static struct tensor indices(struct cudnn_graph *graph, struct tensor x, int64_t axis)
{
    struct tensor y = between(graph, DNN_DATA_INT32, x);
    void *operation = pointwise_new(graph, DNN_POINTWISE_GEN_INDEX, DNN_DATA_FLOAT, axis);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_POINTWISE_XDESC, x.descriptor);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_POINTWISE_YDESC, y.descriptor);
    operation_add(graph, operation, "indices");
    return y;
}

/* c = a b over the last two indices; a head of b serves as many of a's as there are more. */
static void product(struct cudnn_graph *graph, struct tensor a, struct tensor b, struct tensor c)
{
    void *how = cudnn_create(graph, DNN_BACKEND_MATMUL_DESCRIPTOR);
    cudnn_set_enum(graph, how, DNN_ATTR_MATMUL_COMP_TYPE, DNN_TYPE_DATA_TYPE, DNN_DATA_FLOAT);
    cudnn_finalize(graph, how, "a product's description");
    void *operation = operation_new(graph, DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
                                    DNN_ATTR_OPERATION_MATMUL_DESC, how);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_MATMUL_ADESC, a.descriptor);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_MATMUL_BDESC, b.descriptor);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_MATMUL_CDESC, c.descriptor);
    operation_add(graph, operation, "a product");
}

/* y = x summed, or its greatest, over the indices in which y is shorter. */
static void reduction(struct cudnn_graph *graph, int kind, struct tensor x, struct tensor y)
{
    void *how = cudnn_create(graph, DNN_BACKEND_REDUCTION_DESCRIPTOR);
    cudnn_set_enum(graph, how, DNN_ATTR_REDUCTION_OPERATOR, DNN_TYPE_REDUCTION_OPERATOR_TYPE, kind);
    cudnn_set_enum(graph, how, DNN_ATTR_REDUCTION_COMP_TYPE, DNN_TYPE_DATA_TYPE, DNN_DATA_FLOAT);
    cudnn_finalize(graph, how, "a reduction's description");
    void *operation = operation_new(graph, DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
                                    DNN_ATTR_OPERATION_REDUCTION_DESC, how);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_REDUCTION_XDESC, x.descriptor);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_REDUCTION_YDESC, y.descriptor);
    operation_add(graph, operation, "a reduction");
}

/* x with its last two indices exchanged. */
static struct tensor turned(struct cudnn_graph *graph, struct tensor x, int type)
{
    struct tensor y = between(graph, type, transposed(x));
    void *operation = operation_new(graph, DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, 0, NULL);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_RESHAPE_XDESC, x.descriptor);
    cudnn_set_descriptor(graph, operation, DNN_ATTR_OPERATION_RESHAPE_YDESC, y.descriptor);
    operation_add(graph, operation, "a transposition");
    return y;
}

/* Scores of keys after the query become minus infinity. */
static struct tensor causal(struct cudnn_graph *graph, struct tensor scores)
{
    struct tensor query = indices(graph, scores, 2), key = indices(graph, scores, 3);
    struct tensor kept = between(graph, DNN_DATA_BOOLEAN, scores);
    pointwise(graph, DNN_POINTWISE_CMP_GE, query, &key, NULL, kept);
    struct tensor instead = scalar(graph, CUDNN_TENSOR_MASKED);
    struct tensor masked = between(graph, DNN_DATA_FLOAT, scores);
    pointwise(graph, DNN_POINTWISE_BINARY_SELECT, scores, &instead, &kept, masked);
    return masked;
}

/* ---- the two graphs ---- */

/* What both directions read. cuDNN wants k transposed, and in backward v, too. */
struct inputs {
    struct tensor q, k, v, scale;
};

static struct inputs inputs_new(struct cudnn_graph *graph, bool backward)
{
    const int64_t width = (graph->heads + 2 * graph->kv_heads) * graph->head_dim;
    const struct tensor kv = in_rows(graph, graph->kv_heads, width);
    struct inputs in;
    in.q = operand(graph, CUDNN_TENSOR_Q, in_rows(graph, graph->heads, width));
    in.k = operand(graph, CUDNN_TENSOR_K, transposed(kv));
    in.v = operand(graph, CUDNN_TENSOR_V, backward ? transposed(kv) : kv);
    in.scale = scalar(graph, CUDNN_TENSOR_SCALE);
    return in;
}

/* scale q k^T */
static struct tensor scores_new(struct cudnn_graph *graph, const struct inputs *in)
{
    struct tensor scores = between(graph, DNN_DATA_FLOAT, score_shape(graph));
    product(graph, in->q, in->k, scores);
    return mapped(graph, DNN_POINTWISE_MUL, scores, &in->scale);
}

static struct tensor rows_new(struct cudnn_graph *graph, enum cudnn_tensor number)
{
    return tensor_new(graph, IN_DEVICE_MEMORY, number, DNN_DATA_FLOAT, row_shape(graph));
}

/* out = softmax(mask(scale q k^T)) v, lse = max + log(sum(exp(. - max))) */
static void describe_forward(struct cudnn_graph *graph)
{
    const struct inputs in = inputs_new(graph, false);
    struct tensor scores = causal(graph, scores_new(graph, &in));
    struct tensor greatest = between(graph, DNN_DATA_FLOAT, row_shape(graph));
    reduction(graph, DNN_REDUCE_TENSOR_MAX, scores, greatest);
    struct tensor below = mapped(graph, DNN_POINTWISE_SUB, scores, &greatest);
    struct tensor weights = mapped(graph, DNN_POINTWISE_EXP, below, NULL);
    struct tensor sum = between(graph, DNN_DATA_FLOAT, row_shape(graph));
    reduction(graph, DNN_REDUCE_TENSOR_ADD, weights, sum);
    struct tensor log_sum = mapped(graph, DNN_POINTWISE_LOG, sum, NULL);
    struct tensor lse = rows_new(graph, CUDNN_TENSOR_LSE);
    pointwise(graph, DNN_POINTWISE_ADD, greatest, &log_sum, NULL, lse);
    struct tensor probabilities = between(graph, DNN_DATA_BFLOAT16, score_shape(graph));
    pointwise(graph, DNN_POINTWISE_DIV, weights, &sum, NULL, probabilities);
    struct tensor out = operand(graph, CUDNN_TENSOR_OUT,
                                in_rows(graph, graph->heads, graph->heads * graph->head_dim));
    product(graph, probabilities, in.v, out);
}

/* dk or dv = a^T b, where several query heads share a key head summed over them. */
static void key_gradient(struct cudnn_graph *graph, struct tensor a, struct tensor b,
                         struct tensor out)
{
    struct tensor turned_a = turned(graph, a, DNN_DATA_BFLOAT16);
    if (graph->heads == graph->kv_heads) {
        product(graph, turned_a, b, out);
        return;
    }
    struct tensor each = between(graph, DNN_DATA_BFLOAT16,
                                 dense(graph->batch, graph->heads, graph->tokens, graph->head_dim));
    product(graph, turned_a, b, each);
    reduction(graph, DNN_REDUCE_TENSOR_ADD, each, out);
}

/* delta = rowsum(dout out);  p = exp(mask(scale q k^T - lse));  dv = p^T dout;
 * ds = (dout v^T - delta) p scale;  dk = ds^T q;  dq = ds k */
static void describe_backward(struct cudnn_graph *graph)
{
    const struct inputs in = inputs_new(graph, true);
    const int64_t width = (graph->heads + 2 * graph->kv_heads) * graph->head_dim;
    const struct tensor out_shape = in_rows(graph, graph->heads, graph->heads * graph->head_dim);
    const struct tensor kv_shape = in_rows(graph, graph->kv_heads, width);
    struct tensor dout = operand(graph, CUDNN_TENSOR_DOUT, out_shape);
    struct tensor out = operand(graph, CUDNN_TENSOR_OUT, out_shape);

    struct tensor both = mapped(graph, DNN_POINTWISE_MUL, dout, &out);
    struct tensor sum = between(graph, DNN_DATA_FLOAT, row_shape(graph));
    reduction(graph, DNN_REDUCE_TENSOR_ADD, both, sum);
    struct tensor one = scalar(graph, CUDNN_TENSOR_ONE);
    struct tensor delta = rows_new(graph, CUDNN_TENSOR_DELTA);
    pointwise(graph, DNN_POINTWISE_MUL, sum, &one, NULL, delta);

    struct tensor lse = rows_new(graph, CUDNN_TENSOR_LSE);
    struct tensor below = mapped(graph, DNN_POINTWISE_SUB, scores_new(graph, &in), &lse);
    struct tensor p = mapped(graph, DNN_POINTWISE_EXP, causal(graph, below), NULL);
    key_gradient(graph, p, dout, operand(graph, CUDNN_TENSOR_DV, kv_shape));

    struct tensor dp = between(graph, DNN_DATA_FLOAT, score_shape(graph));
    product(graph, dout, in.v, dp);
    struct tensor centred = mapped(graph, DNN_POINTWISE_SUB, dp, &delta);
    struct tensor weighted = mapped(graph, DNN_POINTWISE_MUL, centred, &p);
    struct tensor ds = mapped(graph, DNN_POINTWISE_MUL, weighted, &in.scale);
    key_gradient(graph, ds, in.q, operand(graph, CUDNN_TENSOR_DK, kv_shape));

    struct tensor k = turned(graph, in.k, DNN_DATA_FLOAT);
    struct tensor dq = operand(graph, CUDNN_TENSOR_DQ, in_rows(graph, graph->heads, width));
    product(graph, ds, k, dq);
}

/* The operation graph, finalized. Without a handle no engine can be asked for it. */
enum status cudnn_graph_new(const struct cudnn_calls *calls, void *handle,
                            const struct attention *shape, bool backward,
                            struct cudnn_graph **out_graph, struct failure *why)
{
    struct cudnn_graph *graph = heap_calloc(1, sizeof *graph);
    if (graph == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the description of an attention");
    }
    graph->calls = calls;
    graph->batch = (int64_t)shape->batch;
    graph->tokens = (int64_t)shape->seq_len;
    graph->heads = (int64_t)shape->n_heads;
    graph->kv_heads = (int64_t)shape->n_kv_heads;
    graph->head_dim = (int64_t)shape->head_dim;
    graph->next_virtual = CUDNN_TENSOR_FIRST_VIRTUAL;
    if (backward) {
        describe_backward(graph);
    } else {
        describe_forward(graph);
    }
    graph->descriptor = cudnn_create(graph, DNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnn_set(graph, graph->descriptor, DNN_ATTR_OPERATIONGRAPH_OPS, DNN_TYPE_BACKEND_DESCRIPTOR,
              graph->n_operations, graph->operations);
    if (handle != NULL) {
        cudnn_set(graph, graph->descriptor, DNN_ATTR_OPERATIONGRAPH_HANDLE, DNN_TYPE_HANDLE, 1,
                  &handle);
    }
    cudnn_finalize(graph, graph->descriptor, "the graph of operations");
    if (graph->status != STATUS_OK) {
        const enum status status = fail(why, graph->status, "%s", graph->why.text);
        cudnn_graph_free(graph);
        return status;
    }
    *out_graph = graph;
    return STATUS_OK;
}
