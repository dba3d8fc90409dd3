/* Bodies: operations that come by again and again, captured into a graph and replayed.
 *
 * Between begin and end an operation is written down, not carried out. At the end what was written
 * is compared, byte by byte, with what came under the same key before:
 *
 *     new, or another than before    run it, keep the list
 *     the same a second time         capture it into a graph, launch that
 *     the same again                 launch the graph
 *
 * so that a caller who breaks the promise of `struct body` loses speed, not correctness. What
 * varies with the step is read from device memory by the operations. All of this is host memory,
 * taken when the table is made and when a list is kept. Main thread. */
#include <assert.h>
#include <string.h>
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/nvtx.h"
#include "proto/base/heap.h"

enum {
    MAX_RECORDS = 512,
    ARENA_BYTES = 128 * 1024,
    ARGS_ALIGN = 16,
    TABLE_SLOTS = 4096, /* a power of two */
    MAX_USED = 3072
};

struct record {
    const struct cuda_operation *operation;
    uint32_t offset, bytes; /* of its arguments */
};

struct list {
    uint32_t n;
    uint32_t used; /* bytes of args */
    struct record *records;
    unsigned char *args;
};

struct kept {
    bool used;
    bool refused; /* CUDA would not capture it */
    uint32_t section, layer, pass;
    struct list list; /* owned, one block that starts at records */
    cudaGraphExec_t graph;
};

struct cuda_bodies {
    bool active;   /* between begin and end */
    bool overflow; /* this one is too long to be kept: it is carried out as it comes */
    struct body body;
    struct list now; /* owned */
    uint32_t n_used;
    struct cuda_body_counts counts;
    struct nvtx_ranges ranges;
    struct kept table[TABLE_SLOTS];
};

enum status cuda_bodies_new(struct cuda_bodies **out_bodies, struct failure *why)
{
    struct cuda_bodies *bodies = heap_calloc(1, sizeof *bodies);
    if (bodies != NULL) {
        bodies->now.records = heap_calloc(MAX_RECORDS, sizeof *bodies->now.records);
        bodies->now.args = heap_calloc(1, ARENA_BYTES);
    }
    if (bodies == NULL || bodies->now.records == NULL || bodies->now.args == NULL) {
        cuda_bodies_free(bodies);
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory for the lists of operations");
    }
    *out_bodies = bodies;
    return STATUS_OK;
}

static void drop(struct cuda_bodies *bodies, struct kept *kept)
{
    if (kept->graph != NULL) {
        cudaGraphExecDestroy(kept->graph);
        bodies->counts.alive--;
    }
    heap_free(kept->list.records);
    kept->graph = NULL;
    kept->refused = false;
    kept->list = (struct list){0};
}

static void drop_all(struct cuda_bodies *bodies)
{
    for (size_t i = 0; i < TABLE_SLOTS; i++) {
        drop(bodies, &bodies->table[i]);
        bodies->table[i].used = false;
    }
    bodies->n_used = 0;
}

void cuda_bodies_free(struct cuda_bodies *bodies)
{
    if (bodies == NULL) {
        return;
    }
    nvtx_close(&bodies->ranges);
    drop_all(bodies);
    heap_free(bodies->now.args);
    heap_free(bodies->now.records);
    heap_free(bodies);
}

/* ---- carrying out ---- */

static void perform(struct cuda_ops *self, const struct cuda_operation *operation, const void *args)
{
    operation->run(self, args);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        struct failure why = {0};
        (void)cuda_failed(error, operation->name, &why);
        cuda_ops_note(self, why.status, "GPU %d: operation %s", self->cuda->gpu.index, why.text);
    }
}

static void perform_all(struct cuda_ops *self, const struct list *list)
{
    for (uint32_t i = 0; i < list->n; i++) {
        perform(self, list->records[i].operation, list->args + list->records[i].offset);
    }
}

/* Write it down; false when there is no room. */
static bool append(struct list *list, const struct cuda_operation *operation, const void *args,
                   size_t bytes)
{
    const size_t offset = (list->used + ARGS_ALIGN - 1) / ARGS_ALIGN * ARGS_ALIGN;
    if (list->n == MAX_RECORDS || offset + bytes > ARENA_BYTES) {
        return false;
    }
    memset(list->args + list->used, 0, offset - list->used);
    memcpy(list->args + offset, args, bytes);
    list->records[list->n++] = (struct record){operation, (uint32_t)offset, (uint32_t)bytes};
    list->used = (uint32_t)(offset + bytes);
    return true;
}

void cuda_submit(struct cuda_ops *self, const struct cuda_operation *operation, const void *args,
                 size_t bytes)
{
    struct cuda_bodies *bodies = self->bodies;
    self->queued = true;
    if (!bodies->active || bodies->overflow) {
        perform(self, operation, args);
        return;
    }
    if (!append(&bodies->now, operation, args, bytes)) {
        bodies->overflow = true;
        bodies->counts.eager++;
        perform_all(self, &bodies->now);
        perform(self, operation, args);
    }
}

const struct body *cuda_body_now(const struct cuda_ops *self)
{
    return self->bodies->active ? &self->bodies->body : NULL;
}

struct cuda_body_counts cuda_body_counts(const struct cuda_ops *self)
{
    return self->bodies->counts;
}

static void run_set_varying(struct cuda_ops *self, const void *args)
{
    self->kernels->set_varying(self->cuda->streams[STREAM_COMPUTE], args);
}

void cuda_set_varying(struct cuda_ops *self, uint32_t step, uint32_t first_sample)
{
    static const struct cuda_operation operation = {"set_varying", run_set_varying};
    struct cuda_device *cuda = self->cuda;
    if (cuda->varying_known && cuda->varying_now.step == step &&
        cuda->varying_now.first_sample == first_sample) {
        return;
    }
    cuda->varying_now = (struct cuda_varying){step, first_sample};
    cuda->varying_known = true;
    const struct cuda_set_varying args = {cuda->varying, cuda->varying_now};
    assert(!self->bodies->active); /* what a body reads is set before it */
    cuda_submit(self, &operation, &args, sizeof args);
}

/* ---- capturing ---- */

static bool same(const struct list *a, const struct list *b)
{
    return a->n == b->n && a->used == b->used &&
           memcmp(a->records, b->records, a->n * sizeof *a->records) == 0 &&
           memcmp(a->args, b->args, a->used) == 0;
}

/* A graph may not go while it runs. What goes wrong here is seen by check(). */
static void let_graphs_end(struct cuda_ops *self)
{
    struct failure why = {0};
    if (cuda_wait_stream(self->cuda, STREAM_COMPUTE, "waiting for captured bodies", &why) !=
        STATUS_OK) {
        cuda_ops_note(self, why.status, "%s", why.text);
    }
}

/* Keep a copy of the list; without memory for it nothing is kept. */
static void keep(struct cuda_ops *self, struct kept *kept)
{
    struct cuda_bodies *bodies = self->bodies;
    const struct list *now = &bodies->now;
    const size_t records_bytes = now->n * sizeof *now->records;
    if (kept->graph != NULL) {
        let_graphs_end(self);
    }
    drop(bodies, kept);
    unsigned char *block = heap_alloc(records_bytes + now->used);
    if (block == NULL) {
        return;
    }
    memcpy(block, now->records, records_bytes);
    memcpy(block + records_bytes, now->args, now->used);
    kept->list =
        (struct list){now->n, now->used, (struct record *)(void *)block, block + records_bytes};
}

/* The place of the body's key; NULL when the table is full. */
static struct kept *place_of(struct cuda_bodies *bodies, const struct body *body)
{
    const uint32_t mixed = (body->section * 31u + body->pass) * 2654435761u + body->layer * 40503u;
    size_t slot = mixed % TABLE_SLOTS;
    while (bodies->table[slot].used) {
        struct kept *kept = &bodies->table[slot];
        if (kept->section == body->section && kept->layer == body->layer &&
            kept->pass == body->pass) {
            return kept;
        }
        slot = (slot + 1) % TABLE_SLOTS;
    }
    if (bodies->n_used == MAX_USED) {
        return NULL;
    }
    bodies->n_used++;
    bodies->table[slot] = (struct kept){
        .used = true, .section = body->section, .layer = body->layer, .pass = body->pass};
    return &bodies->table[slot];
}

/* Into a graph. A graph is for speed only: where it fails the operations are run one by one. */
static cudaError_t capture(struct cuda_ops *self, struct kept *kept)
{
    cudaStream_t compute = self->cuda->streams[STREAM_COMPUTE];
    cudaError_t error = cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal);
    if (error != cudaSuccess) {
        return error;
    }
    const struct failure before = self->error;
    perform_all(self, &kept->list);
    const bool noted = self->error.status != before.status;
    self->error = before;
    cudaGraph_t graph = NULL;
    error = cudaStreamEndCapture(compute, &graph);
    if (error == cudaSuccess && noted) {
        error = cudaErrorStreamCaptureInvalidated;
    }
    if (error == cudaSuccess) {
        error = cudaGraphInstantiate(&kept->graph, graph, 0);
    }
    if (graph != NULL) {
        cudaGraphDestroy(graph);
    }
    return error;
}

static void try_capture(struct cuda_ops *self, struct kept *kept)
{
    struct cuda_bodies *bodies = self->bodies;
    if (capture(self, kept) == cudaSuccess) {
        bodies->counts.captured++;
        bodies->counts.alive++;
        return;
    }
    kept->graph = NULL;
    kept->refused = true;
    (void)cudaGetLastError(); /* the operations run on their own are asked for theirs */
}

static void run_graph(struct cuda_ops *self, struct kept *kept)
{
    const cudaError_t error = cudaGraphLaunch(kept->graph, self->cuda->streams[STREAM_COMPUTE]);
    self->bodies->counts.replayed++;
    if (error != cudaSuccess) {
        struct failure why = {0};
        (void)cuda_failed(error, "launching a captured body", &why);
        cuda_ops_note(self, why.status, "GPU %d, section %u, layer %u, pass %u: %s",
                      self->cuda->gpu.index, kept->section, kept->layer, kept->pass, why.text);
    }
}

/* ---- the table's functions ---- */

void cuda_body_begin(struct ops *ops, const struct body *body)
{
    struct cuda_ops *self = cuda_ops_of(ops);
    struct cuda_bodies *bodies = self->bodies;
    assert(!bodies->active && !self->cuda->in_body);
    cuda_set_varying(self, body->step, body->first_sample);
    nvtx_enter(&bodies->ranges, body);
    bodies->body = *body;
    bodies->active = true;
    bodies->overflow = false;
    bodies->now.n = 0;
    bodies->now.used = 0;
    self->cuda->in_body = true;
}

void cuda_body_end(struct ops *ops)
{
    struct cuda_ops *self = cuda_ops_of(ops);
    struct cuda_bodies *bodies = self->bodies;
    assert(bodies->active);
    bodies->active = false;
    self->cuda->in_body = false;
    if (!bodies->overflow && bodies->now.n > 0) {
        struct kept *kept = place_of(bodies, &bodies->body);
        const bool again = kept != NULL && kept->list.n > 0 && same(&kept->list, &bodies->now);
        if (again && kept->graph == NULL && !kept->refused) {
            try_capture(self, kept);
        }
        if (again && kept->graph != NULL) {
            run_graph(self, kept);
        } else {
            bodies->counts.eager++;
            perform_all(self, &bodies->now);
            if (kept != NULL && !again) {
                keep(self, kept);
            }
        }
    }
    nvtx_leave(&bodies->ranges);
}

void cuda_body_forget(struct ops *ops)
{
    struct cuda_ops *self = cuda_ops_of(ops);
    struct cuda_bodies *bodies = self->bodies;
    assert(!bodies->active);
    if (bodies->counts.alive > 0) {
        let_graphs_end(self);
    }
    drop_all(bodies);
}
