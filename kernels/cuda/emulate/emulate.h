/* What the files of the stand-in share. No file outside this folder includes it, but for the
 * stand-in's own tests.
 *
 * Locks, in the order in which they are taken: emulate_lock (streams, events, captures, queued
 * work), then memory.c's own (reservations, mappings), then nvml.c's (bytes per process).
 * Work runs with none of them held, on the executor's thread only. */
#ifndef BALLAST_KERNELS_CUDA_EMULATE_EMULATE_H
#define BALLAST_KERNELS_CUDA_EMULATE_EMULATE_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/cuda/emulate/enqueue.h"
#include "kernels/ops.h"

/* What the real libraries leave undefined, or punish in ways that are hard to see: say what was
 * wrong, and abort. */
_Noreturn void emulate_misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- gpus.c: the machine ---- */

enum { EMULATE_MAX_GPUS = 64, EMULATE_DRIVER_VERSION = 13000, EMULATE_UUID_TEXT = 48 };

/* A number from the environment, or `otherwise` when it is unset or empty. */
uint64_t emulate_setting(const char *name, uint64_t otherwise);
/* First in every call that has to do with a context: makes that of the calling thread's GPU
 * when the process has none. A second GPU, or a process forked since, is misuse. An error when
 * there is no driver or no GPU. */
cudaError_t emulate_enter(const char *call);
/* Keep an error for cudaGetLastError, and return it. */
cudaError_t emulate_error(cudaError_t error);
/* The GPU of this process's context in the machine's numbering; -1: none yet. */
int emulate_gpu(void);
void emulate_uuid(int gpu, unsigned char out_uuid[16]);
/* "GPU-xxxxxxxx-xxxx-..." of EMULATE_UUID_TEXT bytes at most. */
void emulate_uuid_text(int gpu, char *out_text);
/* GPUs of the machine, before CUDA_VISIBLE_DEVICES; 0: no driver. */
int emulate_n_gpus(void);

/* A stream of pseudo-random numbers of its own (splitmix64). */
struct emulate_random {
    uint64_t state;
};
/* Seeded by BALLAST_STANDIN_SEED and `purpose`. */
void emulate_random_init(struct emulate_random *random, uint64_t purpose);
/* Uniform in [0, limit); limit > 0. */
uint64_t emulate_random_below(struct emulate_random *random, uint64_t limit);

/* ---- nvml.c: bytes of GPU memory per process ---- */

/* List this process as a user of `gpu`. */
void emulate_account_open(int gpu);
/* Count bytes as taken; false, and nothing counted, when the GPU has not as many. */
bool emulate_account_take(size_t bytes);
void emulate_account_give(size_t bytes);
void emulate_account_info(size_t *out_free, size_t *out_total);

/* ---- memory.c: device memory and pinned memory ---- */

/* Memory that a piece of work reads or writes. */
struct emulate_range {
    const void *start;
    size_t bytes;
};
/* Is all of it device memory that is mapped and accessible? Misuse otherwise: `what` says whose
 * operand it is. Zero bytes are always. */
void emulate_check_device(const char *what, const void *start, size_t bytes);
/* Does the address lie in reserved device address space, or in pinned memory? */
bool emulate_is_device(const void *address);
bool emulate_is_pinned(const void *address);
enum emulate_side { EMULATE_DEVICE, EMULATE_PINNED, EMULATE_PAGEABLE };
/* Where an operand lies; misuse when it is not all there. */
enum emulate_side emulate_side_of(const char *what, const void *start, size_t bytes);
/* While no work runs device memory is closed, so that the host cannot touch it unseen
 * (BALLAST_STANDIN_GUARD=0: it stays open). The executor's thread, with emulate_lock held. */
void emulate_memory_open(void);
void emulate_memory_close(void);
/* Say clearly what a fault on device memory was. Once, when the context is made. */
void emulate_memory_watch(void);

/* ---- stream.c: queues and the executor ---- */

enum emulate_step {
    EMULATE_DONE, /* all of the work is done */
    EMULATE_MORE, /* some of it; other streams may go first */
    EMULATE_WAIT  /* nothing could be done, it depends on another process */
};

/* A piece of work for a stream. Everything is copied. */
struct emulate_work {
    const char *name; /* a literal */
    /* One of them. `step` is called until it says EMULATE_DONE and has no place in a graph. */
    void (*run)(void *closure);
    enum emulate_step (*step)(void *closure);
    void (*dispose)(void *closure); /* when it will not be called again; NULL: nothing to do */
    const void *closure;
    size_t bytes;
    const struct emulate_range *ranges;
    size_t n_ranges;
};

/* A copy of it, in one allocation. */
struct emulate_item {
    struct emulate_item *next;
    struct emulate_work work;
    struct emulate_record *record; /* an event's record, or the wait for one */
    bool is_wait;
    struct emulate_range *ranges; /* inside the allocation */
    _Alignas(max_align_t) unsigned char closure[];
};
struct emulate_item *emulate_item_new(const struct emulate_work *work);
void emulate_item_free(struct emulate_item *item);
/* The work of a captured node, or of a queue; misuse when it names [start, start + bytes). */
void emulate_item_check_unused(const struct emulate_item *item, const char *call, const void *start,
                               size_t bytes);

/* Queue work; record it when the stream is captured. */
void emulate_submit(cudaStream_t stream, const struct emulate_work *work);
/* Misuse when queued work names the range. emulate_lock is held. */
void emulate_check_unused(const char *call, const void *start, size_t bytes);
/* Block the host until all queued work is done. */
void emulate_drain(void);
/* The host polls: the executor need not wait for more work. */
void emulate_poke(void);
/* The name of the work that runs, for messages; NULL: none. The executor sets it. */
const char *emulate_running(void);
void emulate_set_running(const char *name);
/* Is this the executor's thread? */
bool emulate_is_executor(void);
/* A stream that exists, made on this process's GPU; misuse for the default streams. */
void emulate_check_stream(const char *call, cudaStream_t stream);

extern pthread_mutex_t emulate_lock;

/* One recording of an event. Counted references; emulate_lock. */
struct emulate_record {
    unsigned references;
    bool done;
    uint64_t time_ns;
};

/* ---- graph.c: captures ---- */

/* Indices of nodes, ascending. */
struct emulate_nodes {
    uint32_t *at;
    size_t n;
};
struct emulate_capture;

struct CUstream_st {
    struct CUstream_st *next;
    unsigned number;
    int gpu;
    struct emulate_item *head, *tail;
    uint64_t n_queued, n_done;       /* ever */
    uint64_t starved_until;          /* in the executor's picks */
    bool idle;                       /* its head could do nothing when last tried */
    struct emulate_capture *capture; /* NULL outside */
    struct emulate_nodes last;       /* of the capture: what the next node comes after */
};

struct CUevent_st {
    unsigned flags;
    struct emulate_record *latest; /* NULL: never recorded */
    uint64_t capture;              /* recorded in the capture of this number; 0: outside */
    struct emulate_nodes captured; /* then: what it comes after */
};

/* With emulate_lock held: */
void emulate_capture_work(cudaStream_t stream, const struct emulate_work *work);
void emulate_capture_record(cudaStream_t stream, cudaEvent_t event);
void emulate_capture_wait(cudaStream_t stream, cudaEvent_t event);
void emulate_nodes_clear(struct emulate_nodes *nodes);
/* Misuse when a call that a capture forbids is made while one is going on. */
void emulate_not_capturing(const char *call);
/* Misuse when a graph names the range. */
void emulate_check_no_graph(const char *call, const void *start, size_t bytes);

/* ---- launch_cpu.c: arithmetic ---- */

/* The CPU device's operations in fp32 and bf16, one thread; the executor's thread only. */
struct ops *emulate_cpu_ops(enum dtype dtype);

#endif
