/* What the files of the CUDA device layer share; nobody else but comm_nccl.c includes it.
 *
 *   device.c    address space, commits, the plug-in's open
 *   streams.c   the four streams, the order between them, copies, waits of the host
 *   ops.c       the table of operations; every one becomes a record {function, arguments}
 *   body.c      what happens to a record: run, or kept, compared, captured and replayed
 *   matmul.c    products by cuBLASLt
 *   attention_choice.c  whose attention runs: ours or cuDNN's
 *   external.c  what others hold of the GPU's memory
 *
 * Everything that computes is queued on STREAM_COMPUTE. Another stream that reads or writes
 * device memory first waits for compute, and compute waits for it when the ticket is waited for.
 * The host waits by polling only, so that a deadline and the peers' fate are looked at.
 *
 * One `struct cuda_device` per process; main thread only. */
#ifndef BALLAST_KERNELS_CUDA_CUDA_DEVICE_H
#define BALLAST_KERNELS_CUDA_CUDA_DEVICE_H

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/plugin.h"

/* ---- the device ---- */

/* The driver's calls, found by name: linking against it would keep the program from starting
 * where there is none. */
struct cuda_driver {
    CUresult (*reserve)(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr address,
                        unsigned long long flags);
    CUresult (*unreserve)(CUdeviceptr base, size_t bytes);
    CUresult (*create)(CUmemGenericAllocationHandle *out, size_t bytes,
                       const CUmemAllocationProp *prop, unsigned long long flags);
    CUresult (*release)(CUmemGenericAllocationHandle handle);
    CUresult (*map)(CUdeviceptr at, size_t bytes, size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags);
    CUresult (*unmap)(CUdeviceptr at, size_t bytes);
    CUresult (*set_access)(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t n);
    CUresult (*granularity)(size_t *out, const CUmemAllocationProp *prop,
                            CUmemAllocationGranularity_flags which);
    CUresult (*error_name)(CUresult error, const char **out);
    CUresult (*error_text)(CUresult error, const char **out);
};

enum stream_name { STREAM_COMPUTE, STREAM_COMM, STREAM_COPY_IN, STREAM_COPY_OUT, N_STREAMS };

enum {
    CUDA_SLOT_BYTES = 4 * 1024 * 1024, /* one pinned buffer; two for each direction */
    CUDA_N_SLOTS = 2,
    CUDA_MAX_FLIGHTS = 64, /* copies not waited for */
    CUDA_MAX_WATCHES = 4
};

/* A pinned buffer; the event says when its copy is through. */
struct cuda_slot {
    unsigned char *host;
    cudaEvent_t event;
};

/* A copy that has not been waited for. */
struct cuda_flight {
    uint64_t serial; /* of its ticket; 0: free */
    enum copy_kind kind;
    cudaEvent_t event;  /* FROM_HOST: all is there. TO_HOST: src is ready to be read */
    unsigned char *dst; /* TO_HOST: borrowed until the wait, and src */
    const unsigned char *src;
    size_t bytes, queued, done; /* TO_HOST: in all, in slots so far, in dst */
};

/* The management library, as far as it is asked; found at run time. */
struct cuda_nvml {
    bool tried;
    void *library; /* owned; NULL: not there, or in the process already */
    void *gpu;     /* its handle for this GPU; NULL: it does not know it */
    int (*memory)(void *gpu, void *out_memory);
    int (*processes)(void *gpu, unsigned *n, void *out_processes);
    int (*shutdown)(void); /* NULL: it was not started */
};

struct cuda_reservation; /* device.c */
struct cuda_products;    /* matmul.c */
struct attention_cudnn;  /* attention_cudnn.c */

struct cuda_device {
    struct cuda_gpu gpu;
    int driver_version, runtime_version;
    struct cuda_driver driver;
    struct cuda_reservation *reservations; /* owned list */

    cudaStream_t streams[N_STREAMS];
    cudaEvent_t order; /* of cuda_order() */
    struct cuda_slot in[CUDA_N_SLOTS], out[CUDA_N_SLOTS];
    unsigned next_in;
    uint64_t serial; /* of the last ticket */
    struct cuda_flight flights[CUDA_MAX_FLIGHTS];
    struct cuda_flight *out_owner; /* whose pieces lie in the out slots; NULL: nobody's */

    struct cuda_watch watches[CUDA_MAX_WATCHES];
    uint32_t n_watches;

    /* Shared by all tables of the device, made with the first, gone with the last. */
    uint32_t n_ops;
    struct cuda_ops *ops; /* borrowed list of them */
    void *scratch;        /* owned, device memory: varying, then partials */
    struct cuda_varying *varying;
    double *partials;
    struct cuda_varying varying_now; /* what was last queued to be written there */
    bool varying_known;
    struct cuda_products *products;
    struct attention_cudnn *cudnn; /* owned; NULL: our attention serves everything */
    void *cudnn_scratch;           /* owned */
    bool cudnn_tried, cudnn_backward;
    bool in_body; /* no copy, commit or collective now */

    struct cuda_nvml nvml;
    struct cuda_external external; /* as measured at each start */
    struct failure error;          /* first of the calls that cannot return one */
    struct failure lost;           /* why a wait failed; every later one ends at once */
};

static inline struct cuda_device *cuda_of(const struct device *device)
{
    return device->self;
}

/* A call of the runtime failed: its name and text. OUT_OF_MEMORY for memory, else IO. */
enum status cuda_failed(cudaError_t error, const char *what, struct failure *why);
/* The same, kept for ops->check(), where the caller cannot return it. The first stays. */
void cuda_note(struct cuda_device *cuda, cudaError_t error, const char *what);

/* plugin.h's count and open, and the table's free. */
enum status cuda_device_count(int *out_n, struct failure *why) MUST_CHECK;
enum status cuda_device_open(struct device *device, int index, uint64_t capacity_bytes,
                             struct cuda_gpu *out_gpu, struct failure *why) MUST_CHECK;

/* The plug-in's one symbol; plugin.c. */
__attribute__((visibility("default"))) cuda_plugin_entry ballast_cuda;

/* ---- streams.c ---- */

enum status cuda_streams_init(struct cuda_device *cuda, struct failure *why) MUST_CHECK;
/* Undoes a part of init, too. */
void cuda_streams_fini(struct cuda_device *cuda);
/* What is queued on `then` from now on waits for what is queued on `first` now. */
cudaError_t cuda_order(struct cuda_device *cuda, cudaStream_t first, cudaStream_t then);
/* The host waits, watched. `what` names what for. */
enum status cuda_wait_stream(struct cuda_device *cuda, enum stream_name name, const char *what,
                             struct failure *why) MUST_CHECK;
enum status cuda_wait_event(struct cuda_device *cuda, cudaEvent_t event, const char *what,
                            struct failure *why) MUST_CHECK;
/* All streams. */
enum status cuda_drain(struct cuda_device *cuda, struct failure *why) MUST_CHECK;
/* A query's "not yet" is an error code that the runtime may keep; real ones stay noted. */
bool cuda_not_ready(struct cuda_device *cuda, cudaError_t result);
/* plugin.h's watch; one with the same `user` is replaced, and with look NULL removed. */
void cuda_watch_add(struct cuda_device *cuda, const struct cuda_watch *watch);
/* The table's copy and wait. */
enum status cuda_copy(struct device *device, void *dst, const void *src, size_t bytes,
                      enum copy_kind kind, struct ticket *out_ticket, struct failure *why);
enum status cuda_wait(struct device *device, struct ticket *ticket, struct failure *why);

/* ---- external.c ---- */

/* Memory of the GPU in use, by whomever; 0 when it cannot be said. */
uint64_t cuda_used_bytes(void);
/* The same from NVML, which needs no context; 0 when it cannot be said. */
uint64_t cuda_nvml_used_bytes(struct cuda_device *cuda);
void cuda_nvml_close(struct cuda_device *cuda);
/* plugin.h's external. */
void cuda_external_now(struct device *device, struct cuda_external *out_external);

/* ---- the operations ---- */

struct cuda_bodies; /* body.c */

struct cuda_ops {
    struct ops base;
    struct cuda_device *cuda; /* borrowed */
    struct cuda_ops *next;    /* in the device's list */
    const struct cuda_kernels *kernels;
    struct cuda_bodies *bodies; /* owned */
    bool queued;                /* something since the last check */
    struct failure error;       /* first since the last check */
    char fingerprint[256];
};

static inline struct cuda_ops *cuda_ops_of(struct ops *ops)
{
    return (struct cuda_ops *)(void *)ops;
}

/* Which launchers this library was built with. The product: its kernels; the stand-in has
 * its own, in kernels/cuda/emulate. */
const struct cuda_kernels *cuda_kernels_choose(void);

enum status cuda_ops_new(struct device *device, enum dtype dtype, struct ops **out_ops,
                         struct failure *why) MUST_CHECK;
void cuda_ops_note(struct cuda_ops *self, enum status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* How an operation is carried out: `run` queues it on compute. One static object each. */
struct cuda_operation {
    const char *name;
    void (*run)(struct cuda_ops *self, const void *args);
};

/* ---- body.c ---- */

enum status cuda_bodies_new(struct cuda_bodies **out_bodies, struct failure *why) MUST_CHECK;
void cuda_bodies_free(struct cuda_bodies *bodies); /* NULL-safe */
/* Carry out now, or with the body it belongs to. `args` is copied, and has no padding that is not
 * zero, so that records can be compared byte by byte. */
void cuda_submit(struct cuda_ops *self, const struct cuda_operation *operation, const void *args,
                 size_t bytes);
/* The body that is being written down; NULL outside. */
const struct body *cuda_body_now(const struct cuda_ops *self);
void cuda_body_begin(struct ops *ops, const struct body *body);
void cuda_body_end(struct ops *ops);
void cuda_body_forget(struct ops *ops);
/* Make device memory say these values for what is queued from now on. */
void cuda_set_varying(struct cuda_ops *self, uint32_t step, uint32_t first_sample);
/* Figures for tests and logs. */
struct cuda_body_counts {
    uint64_t eager, captured, replayed, alive;
};
struct cuda_body_counts cuda_body_counts(const struct cuda_ops *self);

/* ---- attention_choice.c ---- */

/* Look for cuDNN and compare it with our kernels; once a device. Without it nothing changes. */
void cuda_attention_choose(struct cuda_device *cuda, const struct cuda_kernels *ours);
void cuda_attention_forget(struct cuda_device *cuda);
/* cuDNN's, where it is used; else 0. */
size_t cuda_attention_version(const struct cuda_device *cuda);
/* args: struct cuda_attention_forward, _backward. */
void cuda_attention_forward(struct cuda_ops *self, const void *args);
void cuda_attention_backward(struct cuda_ops *self, const void *args);

/* ---- matmul.c ---- */

enum status cuda_products_new(struct cuda_device *cuda, struct failure *why) MUST_CHECK;
void cuda_products_free(struct cuda_device *cuda);
/* Scratch of a product on a GPU of this compute capability: pure. */
size_t cuda_matmul_scratch(int major, const struct matmul *shape);
/* args: struct matmul. */
void cuda_matmul_run(struct cuda_ops *self, const void *args);
/* cuBLASLt's version, and a hash over its answers to a few fixed shapes of this dtype. */
size_t cuda_products_version(void);
uint64_t cuda_products_hash(struct cuda_ops *self);

#endif
