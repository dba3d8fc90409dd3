/* NCCL for the data collectives. See comm_nccl.h. The only file that knows NCCL.
 *
 * The communicator does not block: whatever may wait for a peer is asked about until it is through,
 * the deadline passes or the run is being ended. Work that is queued is looked after while the host
 * waits for the device (look()). After a failure the communicator is aborted, which ends what it
 * has on the GPU, and every later call is refused. */
#include "worker/parallel/comm_nccl.h"
#include <assert.h>
#include <nccl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "kernels/cuda/cuda_device.h"
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "worker/parallel/comm_wrap.h"

enum { MAX_FLIGHTS = 64, WARM_BYTES = 256 };
static const long pause_ns = 20000;

struct flight {
    uint64_t serial;  /* of its ticket; 0: waited for */
    uint64_t number;  /* n_collectives when it started; 0: never used, or known to be through */
    const char *name; /* static text */
    cudaEvent_t event;
};

struct world {
    struct comm_wrap wrap;    /* first: comm_wrap.h */
    struct comm *comm;        /* borrowed: the wrapper, for look() */
    struct cuda_device *cuda; /* borrowed */
    ncclComm_t nccl;          /* owned; NULL after it was aborted */
    uint64_t n_data;
    struct flight flights[MAX_FLIGHTS];
    bool broken;
    char broken_by[160];
};

static struct world *world_of(struct comm *comm)
{
    return comm->self;
}

/* ---- failures ---- */

static void break_world(struct world *world, const char *name, uint64_t number)
{
    if (!world->broken) {
        snprintf(world->broken_by, sizeof world->broken_by, "collective '%s' number %llu", name,
                 (unsigned long long)number);
    }
    world->broken = true;
    if (world->nccl != NULL) {
        ncclCommAbort(world->nccl);
        world->nccl = NULL;
    }
}

static enum status nccl_failed(struct world *world, ncclResult_t result, const char *name,
                               uint64_t number, struct failure *why)
{
    break_world(world, name, number);
    return fail(why, STATUS_RANK_LOST, "collective '%s' number %llu: rank %u: NCCL says %d: %s",
                name, (unsigned long long)number, world->comm->rank, (int)result,
                ncclGetErrorString(result));
}

/* The run is being ended, or it has taken too long. */
static enum status overdue(struct world *world, const char *name, uint64_t number, double waited_s,
                           struct failure *why)
{
    const struct comm *comm = world->comm;
    if (comm->abort_flag != NULL && atomic_load(comm->abort_flag)) {
        break_world(world, name, number);
        return fail(why, STATUS_STOPPED,
                    "collective '%s' number %llu: given up, the run is being ended", name,
                    (unsigned long long)number);
    }
    if (waited_s > comm->timeout_s) {
        break_world(world, name, number);
        return fail(why, STATUS_DEADLINE,
                    "collective '%s' number %llu: rank %u waited %.1f s (limit %.1f s)", name,
                    (unsigned long long)number, comm->rank, waited_s, comm->timeout_s);
    }
    return STATUS_OK;
}

/* A call's result; one in progress is asked about until it is not. */
static enum status settle(struct world *world, ncclResult_t result, const char *name,
                          uint64_t number, struct failure *why)
{
    const double start_s = units_monotonic_s();
    while (result == ncclInProgress) {
        const ncclResult_t asked = ncclCommGetAsyncError(world->nccl, &result);
        if (asked != ncclSuccess) {
            result = asked;
        }
        if (result != ncclInProgress) {
            break;
        }
        const enum status status = overdue(world, name, number, units_monotonic_s() - start_s, why);
        if (status != STATUS_OK) {
            return status;
        }
        nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
    }
    return result == ncclSuccess ? STATUS_OK : nccl_failed(world, result, name, number, why);
}

/* The oldest collective that is not through; NULL: none. */
static struct flight *oldest(struct world *world)
{
    struct flight *found = NULL;
    for (size_t i = 0; i < MAX_FLIGHTS; i++) {
        struct flight *flight = &world->flights[i];
        if (flight->number == 0) {
            continue;
        }
        if (!cuda_not_ready(world->cuda, cudaEventQuery(flight->event))) {
            flight->number = 0;
        } else if (found == NULL || flight->number < found->number) {
            found = flight;
        }
    }
    return found;
}

/* While the host waits for the device: a peer's fate shows here. */
static enum status look(void *user, double waited_s, struct failure *why)
{
    struct world *world = user;
    const struct comm *comm = world->comm;
    const struct flight *flight = oldest(world);
    const char *name = flight == NULL ? "none in flight" : flight->name;
    const uint64_t number = flight == NULL ? atomic_load(&comm->n_collectives) : flight->number;
    atomic_store_explicit(&world->comm->collective, flight == NULL ? NULL : name,
                          memory_order_relaxed);
    if (world->nccl != NULL) {
        ncclResult_t result = ncclSuccess;
        const ncclResult_t asked = ncclCommGetAsyncError(world->nccl, &result);
        result = asked != ncclSuccess ? asked : result;
        if (result != ncclSuccess && result != ncclInProgress) {
            return nccl_failed(world, result, name, number, why);
        }
    }
    if (flight == NULL && waited_s > comm->timeout_s) {
        return fail(why, STATUS_DEADLINE,
                    "rank %u: GPU %d did not finish its own work in %.1f s (limit %.1f s)",
                    comm->rank, world->cuda->gpu.index, waited_s, comm->timeout_s);
    }
    return overdue(world, name, number, waited_s, why);
}

/* ---- the data collectives ---- */

static enum status begin(struct comm *comm, const char *name, struct flight **out_flight,
                         struct failure *why)
{
    struct world *world = world_of(comm);
    const uint64_t number = comm_wrap_begin(comm, name);
    struct flight *flight = NULL;
    assert(!world->cuda->in_body);
    if (world->broken) {
        return fail(why, STATUS_RANK_LOST,
                    "collective '%s' number %llu: refused on rank %u, because %s did not complete",
                    name, (unsigned long long)number, comm->rank, world->broken_by);
    }
    if (fault_fires(FAULT_COLLECTIVE)) {
        break_world(world, name, number);
        return fail(why, STATUS_DEADLINE,
                    "collective '%s' number %llu: rank %u failed it on purpose (fault point "
                    "collective)",
                    name, (unsigned long long)number, comm->rank);
    }
    for (size_t i = 0; i < MAX_FLIGHTS && flight == NULL; i++) {
        flight = world->flights[i].serial == 0 ? &world->flights[i] : NULL;
    }
    if (flight == NULL) {
        return fail(why, STATUS_BUSY,
                    "collective '%s': %d are in flight already; wait for one first", name,
                    MAX_FLIGHTS);
    }
    flight->name = name;
    flight->number = number;
    *out_flight = flight;
    const cudaError_t error = cuda_order(world->cuda, world->cuda->streams[STREAM_COMPUTE],
                                         world->cuda->streams[STREAM_COMM]);
    return error == cudaSuccess ? STATUS_OK : cuda_failed(error, name, why);
}

/* One exchange: to every other rank p `bytes` from send + p * send_stride, and as much from it to
 * receive + p * receive_stride. In pieces, each a group of its own. */
static enum status exchange_all(struct comm *comm, const struct flight *flight, const uint8_t *send,
                                size_t send_stride, uint8_t *receive, size_t receive_stride,
                                size_t bytes, struct failure *why)
{
    struct world *world = world_of(comm);
    cudaStream_t stream = world->cuda->streams[STREAM_COMM];
    for (size_t at = 0; at < bytes && comm->size > 1; at += comm->piece_bytes) {
        const size_t left = bytes - at;
        const size_t piece = left < comm->piece_bytes ? left : comm->piece_bytes;
        ncclResult_t result = ncclGroupStart();
        for (uint32_t i = 1; i < comm->size && result == ncclSuccess; i++) {
            const uint32_t to = (comm->rank + i) % comm->size;
            const uint32_t from = (comm->rank + comm->size - i) % comm->size;
            result = ncclSend(send + to * send_stride + at, piece, ncclUint8, (int)to, world->nccl,
                              stream);
            if (result == ncclSuccess) {
                result = ncclRecv(receive + from * receive_stride + at, piece, ncclUint8, (int)from,
                                  world->nccl, stream);
            }
        }
        const ncclResult_t ended = ncclGroupEnd();
        const enum status status = settle(world, result != ncclSuccess ? result : ended,
                                          flight->name, flight->number, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

static enum status end(struct comm *comm, struct flight *flight, size_t bytes,
                       struct ticket *out_ticket, struct failure *why)
{
    struct world *world = world_of(comm);
    const cudaError_t error = cudaEventRecord(flight->event, world->cuda->streams[STREAM_COMM]);
    if (error != cudaSuccess) {
        return cuda_failed(error, flight->name, why);
    }
    comm->bytes_sent += (uint64_t)(comm->size - 1) * bytes;
    flight->serial = ++world->n_data;
    out_ticket->serial = flight->serial;
    return STATUS_OK;
}

static enum status nccl_scatter_parts(struct comm *comm, const void *base, size_t elem_bytes,
                                      size_t stride, size_t offset, size_t n, void *parts,
                                      struct ticket *out_ticket, struct failure *why)
{
    struct world *world = world_of(comm);
    struct flight *flight = NULL;
    const size_t bytes = n * elem_bytes;
    assert(offset + n <= stride);
    enum status status = begin(comm, "scatter_parts", &flight, why);
    if (status == STATUS_OK) {
        const uint8_t *send = (const uint8_t *)base + offset * elem_bytes;
        uint8_t *mine = (uint8_t *)parts + comm->rank * bytes;
        const cudaError_t error =
            bytes == 0
                ? cudaSuccess
                : cudaMemcpyAsync(mine, send + comm->rank * stride * elem_bytes, bytes,
                                  cudaMemcpyDeviceToDevice, world->cuda->streams[STREAM_COMM]);
        status = error != cudaSuccess ? cuda_failed(error, "scatter_parts", why)
                                      : exchange_all(comm, flight, send, stride * elem_bytes, parts,
                                                     bytes, bytes, why);
    }
    if (status == STATUS_OK) {
        status = end(comm, flight, bytes, out_ticket, why);
    }
    return comm_wrap_end(comm, status);
}

static enum status nccl_gather_slices(struct comm *comm, void *base, size_t elem_bytes,
                                      size_t stride, size_t offset, size_t n,
                                      struct ticket *out_ticket, struct failure *why)
{
    struct flight *flight = NULL;
    const size_t bytes = n * elem_bytes;
    assert(offset + n <= stride);
    enum status status = begin(comm, "gather_slices", &flight, why);
    if (status == STATUS_OK) {
        uint8_t *receive = (uint8_t *)base + offset * elem_bytes;
        const uint8_t *mine = receive + comm->rank * stride * elem_bytes;
        status = exchange_all(comm, flight, mine, 0, receive, stride * elem_bytes, bytes, why);
    }
    if (status == STATUS_OK) {
        status = end(comm, flight, bytes, out_ticket, why);
    }
    return comm_wrap_end(comm, status);
}

/* NCCL's own order, which depends on its algorithm. */
static enum status nccl_reduce_slices(struct comm *comm, float *base, size_t n, float *mine,
                                      struct ticket *out_ticket, struct failure *why)
{
    struct world *world = world_of(comm);
    struct flight *flight = NULL;
    enum status status = begin(comm, "reduce_slices", &flight, why);
    if (status == STATUS_OK) {
        status = settle(world,
                        ncclReduceScatter(base, mine, n, ncclFloat32, ncclSum, world->nccl,
                                          world->cuda->streams[STREAM_COMM]),
                        flight->name, flight->number, why);
    }
    if (status == STATUS_OK) {
        status = end(comm, flight, n * sizeof(float), out_ticket, why);
    }
    return comm_wrap_end(comm, status);
}

static enum status nccl_wait(struct comm *comm, struct ticket *ticket, struct failure *why)
{
    struct world *world = world_of(comm);
    struct flight *flight = NULL;
    if (ticket->serial == 0) {
        return STATUS_OK;
    }
    for (size_t i = 0; i < MAX_FLIGHTS; i++) {
        if (world->flights[i].serial == ticket->serial) {
            flight = &world->flights[i];
        }
    }
    assert(flight != NULL); /* a ticket is waited for once */
    if (world->broken) {
        return fail(why, STATUS_RANK_LOST,
                    "collective '%s' number %llu: refused on rank %u, because %s did not complete",
                    flight->name, (unsigned long long)flight->number, comm->rank, world->broken_by);
    }
    const cudaError_t error =
        cudaStreamWaitEvent(world->cuda->streams[STREAM_COMPUTE], flight->event, 0);
    if (error != cudaSuccess) {
        return cuda_failed(error, flight->name, why);
    }
    flight->serial = 0;
    ticket->serial = 0;
    return STATUS_OK;
}

static void nccl_abort(struct comm *comm, int exit_code)
{
    struct world *world = world_of(comm);
    break_world(world, "abort", atomic_load(&comm->n_collectives));
    struct comm *control = world->wrap.control;
    control->table->abort(control, exit_code);
}

static void nccl_free(struct comm *comm)
{
    struct world *world = world_of(comm);
    struct failure why = {0};
    enum status status = world->broken ? STATUS_RANK_LOST : STATUS_OK;
    if (status == STATUS_OK) {
        status = cuda_wait_stream(world->cuda, STREAM_COMM, "the last collectives", &why);
    }
    if (status == STATUS_OK && world->nccl != NULL) {
        status = settle(world, ncclCommFinalize(world->nccl), "finalize",
                        atomic_load(&comm->n_collectives), &why);
    }
    if (world->nccl != NULL) {
        if (status == STATUS_OK) {
            ncclCommDestroy(world->nccl);
        } else {
            ncclCommAbort(world->nccl);
        }
    }
    cuda_watch_add(world->cuda, &(struct cuda_watch){.user = world});
    for (size_t i = 0; i < MAX_FLIGHTS; i++) {
        if (world->flights[i].event != NULL) {
            cudaEventDestroy(world->flights[i].event);
        }
    }
    heap_free(world);
    comm->table = NULL;
    comm->self = NULL;
}

static const struct comm_table nccl_table = {
    .exchange = comm_wrap_exchange,
    .broadcast = comm_wrap_broadcast,
    .scatter_parts = nccl_scatter_parts,
    .gather_slices = nccl_gather_slices,
    .reduce_slices = nccl_reduce_slices,
    .wait = nccl_wait,
    .progress = comm_wrap_progress,
    .abort = nccl_abort,
    .free = nccl_free,
};

/* ---- starting ---- */

struct hello {
    int32_t status;
    unsigned char uuid[CUDA_UUID_BYTES];
};

/* All ranks come to the same answer. */
static enum status meet(struct comm *control, const struct cuda_device *cuda, enum status mine,
                        struct failure *why)
{
    struct hello hello = {.status = (int32_t)mine};
    memcpy(hello.uuid, cuda->gpu.uuid, CUDA_UUID_BYTES);
    struct hello all[COMM_MAX_RANKS];
    enum status status =
        control->table->exchange(control, "nccl hello", &hello, sizeof hello, all, why);
    if (mine != STATUS_OK || status != STATUS_OK) {
        return mine != STATUS_OK ? mine : status;
    }
    for (uint32_t b = 0; b < control->size; b++) {
        if (all[b].status != STATUS_OK) {
            return fail(why, STATUS_VOTED_DOWN, "NCCL: rank %u could not start it", b);
        }
        for (uint32_t a = 0; a < b; a++) {
            if (memcmp(all[a].uuid, all[b].uuid, CUDA_UUID_BYTES) == 0) {
                return fail(why, STATUS_UNSUPPORTED,
                            "ranks %u and %u have the same GPU, which NCCL refuses: start at most "
                            "one rank for each GPU, or stage through the host",
                            a, b);
            }
        }
    }
    return STATUS_OK;
}

static enum status make_communicator(struct world *world, struct comm *control, struct failure *why)
{
    struct {
        ncclResult_t result;
        ncclUniqueId id;
    } first;
    memset(&first, 0, sizeof first);
    if (control->rank == 0) {
        first.result = ncclGetUniqueId(&first.id);
    }
    const enum status status =
        control->table->broadcast(control, "nccl id", &first, sizeof first, why);
    if (status != STATUS_OK) {
        return status;
    }
    if (first.result != ncclSuccess) {
        return nccl_failed(world, first.result, "start", 0, why);
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t result = ncclCommInitRankConfig(&world->nccl, (int)control->size, first.id,
                                                       (int)control->rank, &config);
    return settle(world, result, "start", 0, why);
}

/* The first collective sets up connections and takes memory: now rather than in a step. */
static enum status warm(struct comm *comm, struct failure *why)
{
    struct world *world = world_of(comm);
    void *memory = NULL;
    const size_t half = comm->size * (size_t)WARM_BYTES;
    const cudaError_t error = cudaMalloc(&memory, 2 * half);
    if (error != cudaSuccess) {
        return cuda_failed(error, "memory to warm NCCL with", why);
    }
    uint8_t *parts = (uint8_t *)memory + half;
    struct ticket ticket;
    enum status status =
        nccl_scatter_parts(comm, memory, 1, WARM_BYTES, 0, WARM_BYTES, parts, &ticket, why);
    if (status == STATUS_OK) {
        status = nccl_wait(comm, &ticket, why);
    }
    if (status == STATUS_OK) {
        status = nccl_gather_slices(comm, memory, 1, WARM_BYTES, 0, WARM_BYTES, &ticket, why);
    }
    if (status == STATUS_OK) {
        status = nccl_wait(comm, &ticket, why);
    }
    if (status == STATUS_OK) {
        status = cuda_wait_stream(world->cuda, STREAM_COMM, "warming NCCL", why);
    }
    if (status == STATUS_OK) {
        cudaFree(memory);
    } /* else something may still write there, and the run is about to end */
    return status;
}

enum status comm_nccl_init(struct comm *comm, struct comm *control, struct device *device,
                           struct failure *why)
{
    struct cuda_device *cuda = cuda_of(device);
    const uint64_t before = cuda_used_bytes();
    enum status status = STATUS_OK;
    struct world *world = heap_calloc(1, sizeof *world);
    cudaError_t error = cudaSuccess;
    for (size_t i = 0; world != NULL && i < MAX_FLIGHTS && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&world->flights[i].event, cudaEventDisableTiming);
    }
    if (world == NULL) {
        status = fail(why, STATUS_OUT_OF_MEMORY, "no host memory for NCCL's communicator");
    } else if (error != cudaSuccess) {
        status = cuda_failed(error, "events for NCCL", why);
    }
    status = meet(control, cuda, status, why);
    if (world == NULL) {
        return status;
    }
    world->wrap.control = control;
    world->comm = comm;
    world->cuda = cuda;
    struct comm made;
    comm_wrap_init(&made, control, &nccl_table, world);
    world->comm = &made; /* until it is whole */
    if (status == STATUS_OK) {
        status = make_communicator(world, control, why);
    }
    if (status == STATUS_OK) {
        cuda_watch_add(cuda, &(struct cuda_watch){look, world});
        status = warm(&made, why);
    }
    if (status != STATUS_OK) {
        world->broken = true;
        nccl_free(&made);
        return status;
    }
    made.bytes_sent = control->bytes_sent;
    const uint64_t after = cuda_used_bytes();
    cuda->external.nccl_bytes = after > before ? after - before : 0;
    comm_wrap_init(comm, control, &nccl_table, world);
    world->comm = comm;
    return STATUS_OK;
}
