/* Operation graphs of attention for cuDNN: what attention_cudnn.c and its graphs share; nobody else
 * includes it.
 *
 * A graph is built by calls that return nothing: the first error stays in it, and every later call
 * does nothing. Main thread. */
#ifndef BALLAST_KERNELS_CUDA_ATTENTION_CUDNN_GRAPH_H
#define BALLAST_KERNELS_CUDA_ATTENTION_CUDNN_GRAPH_H

#include <stdbool.h>
#include <stdint.h>
#include "kernels/cuda/attention_cudnn.h"

/* Names and values of cuDNN 9's graph interface, so that no header of it is needed to build.
 * Where there is one they are compared (attention_cudnn_graph.c). */
// clang-format off
#define CUDNN_NAMES(X)                                                                             \
    X(STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, 4003)                                          \
    X(STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, 4004) X(BACKEND_POINTWISE_DESCRIPTOR, 0)     \
    X(BACKEND_ENGINE_DESCRIPTOR, 2) X(BACKEND_ENGINECFG_DESCRIPTOR, 3)                             \
    X(BACKEND_ENGINEHEUR_DESCRIPTOR, 4) X(BACKEND_EXECUTION_PLAN_DESCRIPTOR, 5)                    \
    X(BACKEND_OPERATION_POINTWISE_DESCRIPTOR, 13) X(BACKEND_OPERATIONGRAPH_DESCRIPTOR, 15)         \
    X(BACKEND_VARIANT_PACK_DESCRIPTOR, 16) X(BACKEND_TENSOR_DESCRIPTOR, 17)                        \
    X(BACKEND_MATMUL_DESCRIPTOR, 18) X(BACKEND_OPERATION_MATMUL_DESCRIPTOR, 19)                    \
    X(BACKEND_REDUCTION_DESCRIPTOR, 21) X(BACKEND_OPERATION_REDUCTION_DESCRIPTOR, 22)              \
    X(BACKEND_OPERATION_RESHAPE_DESCRIPTOR, 31) X(TYPE_HANDLE, 0) X(TYPE_DATA_TYPE, 1)             \
    X(TYPE_BOOLEAN, 2) X(TYPE_INT64, 3) X(TYPE_VOID_PTR, 6) X(TYPE_HEUR_MODE, 8)                   \
    X(TYPE_NUMERICAL_NOTE, 11) X(TYPE_POINTWISE_MODE, 14) X(TYPE_BACKEND_DESCRIPTOR, 15)           \
    X(TYPE_REDUCTION_OPERATOR_TYPE, 18) X(DATA_FLOAT, 0) X(DATA_INT32, 4) X(DATA_BFLOAT16, 9)      \
    X(DATA_BOOLEAN, 11) X(POINTWISE_ADD, 0) X(POINTWISE_MUL, 1) X(POINTWISE_DIV, 6)                \
    X(POINTWISE_SUB, 9) X(POINTWISE_EXP, 13) X(POINTWISE_LOG, 15) X(POINTWISE_CMP_GE, 303)         \
    X(POINTWISE_GEN_INDEX, 501) X(POINTWISE_BINARY_SELECT, 601) X(REDUCE_TENSOR_ADD, 0)            \
    X(REDUCE_TENSOR_MAX, 3) X(HEUR_MODE_FALLBACK, 2) X(HEUR_MODE_A, 3)                             \
    X(NUMERICAL_NOTE_NONDETERMINISTIC, 4) X(ATTR_POINTWISE_MODE, 0)                                \
    X(ATTR_POINTWISE_MATH_PREC, 1) X(ATTR_POINTWISE_AXIS, 9) X(ATTR_ENGINEHEUR_MODE, 200)          \
    X(ATTR_ENGINEHEUR_OPERATION_GRAPH, 201) X(ATTR_ENGINEHEUR_RESULTS, 202)                        \
    X(ATTR_ENGINECFG_ENGINE, 300) X(ATTR_EXECUTION_PLAN_HANDLE, 400)                               \
    X(ATTR_EXECUTION_PLAN_ENGINE_CONFIG, 401) X(ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, 402)           \
    X(ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, 750) X(ATTR_OPERATION_POINTWISE_XDESC, 751)          \
    X(ATTR_OPERATION_POINTWISE_BDESC, 752) X(ATTR_OPERATION_POINTWISE_YDESC, 753)                  \
    X(ATTR_OPERATION_POINTWISE_TDESC, 758) X(ATTR_OPERATIONGRAPH_HANDLE, 800)                      \
    X(ATTR_OPERATIONGRAPH_OPS, 801) X(ATTR_TENSOR_BYTE_ALIGNMENT, 900)                             \
    X(ATTR_TENSOR_DATA_TYPE, 901) X(ATTR_TENSOR_DIMENSIONS, 902) X(ATTR_TENSOR_STRIDES, 903)       \
    X(ATTR_TENSOR_UNIQUE_ID, 906) X(ATTR_TENSOR_IS_VIRTUAL, 907) X(ATTR_TENSOR_IS_BY_VALUE, 908)   \
    X(ATTR_VARIANT_PACK_UNIQUE_IDS, 1000) X(ATTR_VARIANT_PACK_DATA_POINTERS, 1001)                 \
    X(ATTR_VARIANT_PACK_WORKSPACE, 1003) X(ATTR_ENGINE_NUMERICAL_NOTE, 1303)                       \
    X(ATTR_MATMUL_COMP_TYPE, 1500) X(ATTR_OPERATION_MATMUL_ADESC, 1520)                            \
    X(ATTR_OPERATION_MATMUL_BDESC, 1521) X(ATTR_OPERATION_MATMUL_CDESC, 1522)                      \
    X(ATTR_OPERATION_MATMUL_DESC, 1523) X(ATTR_REDUCTION_OPERATOR, 1600)                           \
    X(ATTR_REDUCTION_COMP_TYPE, 1601) X(ATTR_OPERATION_REDUCTION_XDESC, 1610)                      \
    X(ATTR_OPERATION_REDUCTION_YDESC, 1611) X(ATTR_OPERATION_REDUCTION_DESC, 1612)                 \
    X(ATTR_OPERATION_RESHAPE_XDESC, 2200) X(ATTR_OPERATION_RESHAPE_YDESC, 2201)                    \
    X(BACKEND_DEVICEPROP_DESCRIPTOR, 38) X(TYPE_CHAR, 24) X(ATTR_ENGINEHEUR_DEVICEPROP, 204)       \
    X(ATTR_EXECUTION_PLAN_DEVICEPROP, 407) X(ATTR_DEVICEPROP_JSON_REPRESENTATION, 2702)
// clang-format on
enum {
#define X(name, value) DNN_##name = value,
    CUDNN_NAMES(X)
#undef X
};

enum { CUDNN_MAX_DESCRIPTORS = 256, CUDNN_MAX_OPERATIONS = 32 };

/* A graph and its descriptors, which live as long as a plan made from them. */
struct cudnn_graph {
    const struct cudnn_calls *calls; /* borrowed */
    int64_t batch, heads, kv_heads, tokens, head_dim;
    uint32_t n_owned, n_operations;
    void *owned[CUDNN_MAX_DESCRIPTORS];
    void *operations[CUDNN_MAX_OPERATIONS];
    int64_t next_virtual;
    void *descriptor; /* of the graph itself */
    enum status status;
    struct failure why; /* of status */
};

/* The graph of forward or backward, finalized. Without a handle (NULL) no engine can be asked for
 * it. */
enum status cudnn_graph_new(const struct cudnn_calls *calls, void *handle,
                            const struct attention *shape, bool backward,
                            struct cudnn_graph **out_graph, struct failure *why) MUST_CHECK;
void cudnn_graph_free(struct cudnn_graph *graph); /* NULL-safe */

/* A descriptor that the graph owns; NULL after an error. */
void *cudnn_create(struct cudnn_graph *graph, int kind);
void cudnn_set(struct cudnn_graph *graph, void *descriptor, int name, int type, int64_t n,
               const void *values);
void cudnn_set_descriptor(struct cudnn_graph *graph, void *descriptor, int name, void *value);
/* `type`'s values are an enumeration's, which are int-sized in C. */
void cudnn_set_enum(struct cudnn_graph *graph, void *descriptor, int name, int type, int value);
void cudnn_finalize(struct cudnn_graph *graph, void *descriptor, const char *what);
/* Keep the error of a call, if it is one and the first. */
void cudnn_check(struct cudnn_graph *graph, int result, const char *what);

/* A call failed: its text and number. UNSUPPORTED, OUT_OF_MEMORY, else IO. */
enum status cudnn_failed(const struct cudnn_calls *calls, int result, const char *what,
                         struct failure *why);

#endif
