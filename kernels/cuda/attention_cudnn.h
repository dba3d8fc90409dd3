/* cuDNN's fused attention as a faster choice than kernels/cuda/attention_*.cu, where the library is
 * installed and the call is of the plain kind: bf16, causal, no dropout, one document.
 *
 * **This has not run on a GPU yet.** What is proven without one (tests/cuda/test_cuda_cudnn.c):
 * cuDNN 9.19 takes the operation graphs; for a described H100 and A100 it proposes an engine for
 * each, and the engine's kernel compiles; the choice of an engine, the addresses handed over and
 * every error path work against a stand-in for its table of functions. Not proven: the results and
 * the speed. Hence attention_cudnn_agrees(), which a caller asks before the first use.
 *
 * The library is looked up at run time ("libcudnn.so.9"), and no header of it is needed to build.
 *
 * The tensors are the packed buffers themselves, described by strides (B, heads, T, hd):
 *   qkv, dqkv  rows [q heads | k heads | v heads]; q at 0, k at nh hd, v at (nh + nkv) hd
 *   out, dout  rows of nh heads
 *   lse, delta (B, nh, T) fp32, natural logarithm: the same numbers as our kernels', so that the
 *              forward of one may be followed by the backward of the other
 * All buffers are aligned to 16 bytes.
 *
 * Deterministic. cuDNN's usual backward adds to an fp32 dq by atomics, and its engine does not say
 * so: it has no such note in 9.19. So the graph is in the other form, where dq is written once by a
 * product dS k; engines with the note are refused besides; agrees() compares bits. That form keeps
 * dS, so its scratch is that of T^2 scores in bf16, 2 B nh T^2 bytes with T rounded up to 64 and
 * 128, and with fewer key heads than query heads two gradients for every query head more: 96 MiB
 * for B 4, nh 12, T 1024, where the forward takes 256 bytes. A caller that has not as much to spare
 * uses cuDNN for the forward alone. From compute capability 10 on there is no backward: which
 * engines are deterministic there has not been found out.
 *
 * Plans (an engine for a shape) are made once per shape and kept. Making one may compile code and
 * take seconds: attention_cudnn_scratch() is called for every shape in setup. All of it on the
 * main thread; everything is queued on the stream given, and nothing waits but agrees(). */
#ifndef BALLAST_KERNELS_CUDA_ATTENTION_CUDNN_H
#define BALLAST_KERNELS_CUDA_ATTENTION_CUDNN_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/cuda/kernels.h"

struct attention_cudnn;

/* Find the library and make a handle on the current GPU (which takes GPU memory of its own).
 * UNSUPPORTED, with the reason: no library, older than 9.0 or of a series not known, a version with
 * known faults in attention, no driver, a GPU before sm_80, the stand-in for the runtime. */
enum status attention_cudnn_new(struct attention_cudnn **out_cudnn, struct failure *why) MUST_CHECK;
void attention_cudnn_free(struct attention_cudnn *cudnn); /* NULL-safe */

/* The library's version, e.g. 91900: part of the kernel fingerprint where it is used. */
size_t attention_cudnn_version(const struct attention_cudnn *cudnn);

/* Is the call of the kind that is described above? A function of shape and type alone. Whether
 * there is a plan, attention_cudnn_scratch() says. */
bool attention_cudnn_serves(const struct attention_cudnn *cudnn, const struct attention *attention,
                            enum dtype dtype);

/* Bytes of scratch that forward or backward of this shape needs; SIZE_MAX: cuDNN has no
 * deterministic engine for it here (`why`, which may be NULL, says what it said), or
 * attention_cudnn_serves() is false. Depends on shape, version and GPU model only. */
size_t attention_cudnn_scratch(struct attention_cudnn *cudnn, const struct attention *attention,
                               bool backward, struct failure *why);

/* As cuda_launch_attention_forward and _backward (kernels/cuda/kernels.h), for a shape whose
 * scratch is not SIZE_MAX; `scratch` is that many bytes of device memory, in use until what is
 * queued here has run. INVALID for an operand that is not aligned, UNSUPPORTED where there is no
 * plan, OUT_OF_MEMORY or IO with cuDNN's text; nothing useful is queued then. */
enum status attention_cudnn_forward(struct attention_cudnn *cudnn, cudaStream_t stream,
                                    const struct cuda_attention_forward *args, void *scratch,
                                    struct failure *why) MUST_CHECK;
enum status attention_cudnn_backward(struct attention_cudnn *cudnn, cudaStream_t stream,
                                     const struct cuda_attention_backward *args, void *scratch,
                                     struct failure *why) MUST_CHECK;

/* Run small problems (with fewer key heads than query heads, and with as many) by `ours` and by
 * cuDNN, and compare; cuDNN's backward runs twice and has to give the same bits. OK: use it.
 * UNSUPPORTED: it differs, by how much. Takes device memory for the while, and waits for the
 * stream, a minute at most (DEADLINE). *out_backward says whether a backward was among it. */
enum status attention_cudnn_agrees(struct attention_cudnn *cudnn, cudaStream_t stream,
                                   const struct cuda_kernels *ours, bool *out_backward,
                                   struct failure *why) MUST_CHECK;

/* ---- for tests ---- */

/* What is called of the library. Statuses, kinds and names are its enumerations' values. */
struct cudnn_calls {
    size_t (*version)(void);
    int (*create)(void **out_handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, cudaStream_t stream);
    const char *(*error_string)(int status);
    void (*last_error)(char *out_text, size_t bytes); /* NULL: not there */
    int (*create_descriptor)(int kind, void **out_descriptor);
    int (*destroy_descriptor)(void *descriptor);
    int (*finalize)(void *descriptor);
    int (*set)(void *descriptor, int name, int type, int64_t n, const void *values);
    int (*get)(void *descriptor, int name, int type, int64_t room, int64_t *out_n,
               void *out_values);
    int (*execute)(void *handle, void *plan, void *pack);
};

/* Load a library by file name and find its functions. Stays loaded. UNSUPPORTED. */
enum status attention_cudnn_load(const char *file, struct cudnn_calls *out_calls,
                                 struct failure *why) MUST_CHECK;
/* attention_cudnn_new() with these functions (copied), on a GPU of compute capability `major`. */
enum status attention_cudnn_new_with(const struct cudnn_calls *calls, int major,
                                     struct attention_cudnn **out_cudnn,
                                     struct failure *why) MUST_CHECK;
/* The same for a GPU that is described, not there (`gpu` is what cuDNN 9.8 and later write as a
 * device's properties, in JSON): plans can be made, which says what cuDNN would choose and how
 * much scratch it would take, but not run. UNSUPPORTED for an older library. */
enum status attention_cudnn_new_described(const struct cudnn_calls *calls, const char *gpu,
                                          int major, struct attention_cudnn **out_cudnn,
                                          struct failure *why) MUST_CHECK;
/* Does the library take the operation graph? Needs no GPU and no handle. */
enum status attention_cudnn_check_graph(const struct cudnn_calls *calls,
                                        const struct attention *attention, bool backward,
                                        struct failure *why) MUST_CHECK;

/* The numbers of the graphs' tensors, as attention_cudnn_forward and _backward hand them over. */
enum cudnn_tensor {
    CUDNN_TENSOR_Q = 1,
    CUDNN_TENSOR_K,
    CUDNN_TENSOR_V,
    CUDNN_TENSOR_OUT,
    CUDNN_TENSOR_LSE,
    CUDNN_TENSOR_SCALE, /* these three in host memory */
    CUDNN_TENSOR_MASKED,
    CUDNN_TENSOR_ONE,
    CUDNN_TENSOR_DOUT,
    CUDNN_TENSOR_DQ,
    CUDNN_TENSOR_DK,
    CUDNN_TENSOR_DV,
    CUDNN_TENSOR_DELTA,
    CUDNN_TENSOR_FIRST_VIRTUAL = 100
};

#endif
