/* What libballast-cuda.so offers to the worker, which loads it at run time.
 *
 * One exported symbol, `ballast_cuda`, so that the same installation runs with and without a
 * driver. The stand-in library of the tests exports the same symbol. No CUDA header is
 * needed to include this one. */
#ifndef BALLAST_KERNELS_CUDA_PLUGIN_H
#define BALLAST_KERNELS_CUDA_PLUGIN_H

#include "kernels/device.h"
#include "kernels/ops.h"
#include "proto/base/fault.h"

enum { CUDA_PLUGIN_VERSION = 2, CUDA_UUID_BYTES = 16, CUDA_NAME_BYTES = 96 };

/* The GPU of this rank. */
struct cuda_gpu {
    int index;                         /* in CUDA's numbering, after CUDA_VISIBLE_DEVICES */
    unsigned char uuid[CUDA_UUID_BYTES];
    char name[CUDA_NAME_BYTES];
    int major, minor;                  /* compute capability */
    uint64_t total_bytes, free_bytes;  /* when opened, after the context was made */
};

/* Bytes that are not ours, by who took them, measured by difference around their start. */
struct cuda_external {
    uint64_t context_bytes, library_bytes, nccl_bytes;
    uint64_t process_bytes; /* NVML's figure for this process; 0: not known */
    uint64_t free_bytes;    /* of the GPU, now */
};

/* Called while the host waits for the device, about every millisecond: the deadline and the
 * peers' fate. A failure ends the wait with it. */
struct cuda_watch {
    enum status (*look)(void *user, double waited_s, struct failure *why);
    void *user;
};

struct cuda_device; /* behind struct device's `self` */
struct comm;        /* worker/parallel/comm.h: handed through, never looked into here */

struct cuda_plugin {
    uint32_t version; /* CUDA_PLUGIN_VERSION */
    /* The library has its own copy of proto/base: whether a fault on purpose fires is asked of
     * the program. Before anything else. */
    void (*host)(bool (*fault_fires)(enum fault_point point));
    /* How many GPUs there are, without a context on any. UNSUPPORTED says why there is none:
     * no driver, a driver too old, no GPU. */
    enum status (*count)(int *out_n, struct failure *why);
    /* Choose GPU `index` before anything else touches CUDA, make its context, streams and events.
     * capacity_bytes 0: what is free then. */
    enum status (*open)(struct device *device, int index, uint64_t capacity_bytes,
                        struct cuda_gpu *out_gpu, struct failure *why);
    /* Operations on that device. The table is freed before the device. */
    enum status (*ops_new)(struct device *device, enum dtype dtype, struct ops **out_ops,
                           struct failure *why);
    /* Also watch this while waiting. */
    void (*watch)(struct device *device, const struct cuda_watch *watch);
    /* What others hold, as of now. Slow the first time; never called within a step. */
    void (*external)(struct device *device, struct cuda_external *out_external);
    /* NCCL for data: wraps `control` (all of whose table but the data collectives stays in
     * use) into `comm`. UNSUPPORTED where two ranks share a GPU: stage through the host then. */
    enum status (*nccl_init)(struct comm *comm, struct comm *control, struct device *device,
                             struct failure *why);
};

typedef const struct cuda_plugin *cuda_plugin_entry(void);

#endif
