/* The comm over MPI: the only file that knows MPI.
 *
 * Owns two communicators (control and data), and a table of flights: exchanges that have started
 * and not been waited for. Every exchange is one flight of plain sends and receives between
 * pairs, cut into pieces, so that no MPI count is ever near 2^31 and a deadline can name the rank
 * that did not come. MPI's own large reductions are not used: their order of sums is not ours.
 *
 * A flight that ends in a failure leaves requests in MPI's hands, and with them the caller's
 * buffers; from then on every call is refused and the job has to end. Main thread only. */
#include <assert.h>
#include <malloc.h>
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "worker/parallel/comm.h"

enum {
    MAX_FLIGHTS = 64,
    TAGS = 16384,       /* below the 32767 that MPI promises */
    MAX_NAMED_RANKS = 8 /* in one message */
};
/* Waits start by yielding the core; one that lasts gives it up for longer. */
static const double yield_s = 0.05;
static const long pause_ns = 20000;

/* One exchange: to every rank p `bytes` from send + p * send_stride, and from every rank as
 * much to receive + p * receive_stride; NULL for nothing. In a broadcast only rank 0 sends. */
struct flight {
    bool active;
    uint64_t serial;  /* of its ticket */
    uint64_t number;  /* n_collectives when it started */
    const char *name; /* static text */
    MPI_Comm on;
    int tag;
    bool from_root_only;
    const uint8_t *send; /* borrowed until it ends, and receive */
    uint8_t *receive;
    size_t send_stride, receive_stride;
    size_t bytes; /* to each rank in all */
    size_t done;  /* of them, in finished pieces */
    size_t piece; /* in the air; 0: none */
    int n_active;
    MPI_Request *requests; /* borrowed: [2 * size]: receive from p, send to p */
};

struct mpi_world {
    MPI_Comm control, data;
    uint64_t n_control, n_data; /* flights started on each */
    struct flight exchange;     /* the control path has one at a time */
    struct flight flights[MAX_FLIGHTS];
    MPI_Request *requests; /* owned: [MAX_FLIGHTS + 1][2 * size] */
    int *indices;          /* owned: [2 * size] */
    MPI_Status *statuses;  /* owned: [2 * size] */
    uint8_t *mine, *all;   /* owned: an exchange's own copies, which outlive a failed call */
    bool broken;
    char broken_by[160];
};

static struct mpi_world *world_of(struct comm *comm)
{
    return comm->self;
}

/* Nothing can be sent any more: ranks may disagree about what was exchanged. */
static void break_world(struct comm *comm, const struct flight *flight)
{
    struct mpi_world *world = world_of(comm);
    world->broken = true;
    snprintf(world->broken_by, sizeof world->broken_by, "collective '%s' number %llu", flight->name,
             (unsigned long long)flight->number);
}

static enum status mpi_failed(struct comm *comm, const struct flight *flight, int code,
                              struct failure *why)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    break_world(comm, flight);
    return fail(why, STATUS_RANK_LOST, "collective '%s' number %llu: rank %u: MPI says: %s",
                flight->name, (unsigned long long)flight->number, comm->rank, text);
}

static bool sends(const struct comm *comm, const struct flight *flight)
{
    return !flight->from_root_only || comm->rank == 0;
}

static bool receives_from(const struct comm *comm, const struct flight *flight, uint32_t peer)
{
    return flight->from_root_only ? comm->rank != 0 && peer == 0 : true;
}

/* Put the next piece into the air: receives first, peers in turn from the next rank on. */
static enum status post_piece(struct comm *comm, struct flight *flight, struct failure *why)
{
    size_t left = flight->bytes - flight->done;
    flight->piece = left < comm->piece_bytes ? left : comm->piece_bytes;
    assert(flight->piece <= COMM_PIECE_BYTES);
    int count = (int)flight->piece;
    for (int way = 0; way < 2; way++) {
        for (uint32_t i = 1; i < comm->size; i++) {
            uint32_t peer = (comm->rank + i) % comm->size;
            int code = MPI_SUCCESS;
            if (way == 0 && receives_from(comm, flight, peer)) {
                code = MPI_Irecv(flight->receive + peer * flight->receive_stride + flight->done,
                                 count, MPI_BYTE, (int)peer, flight->tag, flight->on,
                                 &flight->requests[2 * peer]);
            } else if (way == 1 && sends(comm, flight)) {
                code = MPI_Isend(flight->send + peer * flight->send_stride + flight->done, count,
                                 MPI_BYTE, (int)peer, flight->tag, flight->on,
                                 &flight->requests[2 * peer + 1]);
            } else {
                continue;
            }
            if (code != MPI_SUCCESS) {
                return mpi_failed(comm, flight, code, why);
            }
            flight->n_active++;
        }
    }
    return STATUS_OK;
}

/* Take in what has arrived; post the next piece when one is through. */
static enum status advance(struct comm *comm, struct flight *flight, struct failure *why)
{
    struct mpi_world *world = world_of(comm);
    if (flight->done == flight->bytes) {
        return STATUS_OK;
    }
    int n = 0;
    int code =
        MPI_Testsome((int)(2 * comm->size), flight->requests, &n, world->indices, world->statuses);
    if (code == MPI_ERR_IN_STATUS) {
        for (int i = 0; i < n; i++) {
            if (world->statuses[i].MPI_ERROR != MPI_SUCCESS) {
                code = world->statuses[i].MPI_ERROR;
                break;
            }
        }
    }
    if (code != MPI_SUCCESS) {
        return mpi_failed(comm, flight, code, why);
    }
    if (n != MPI_UNDEFINED) {
        flight->n_active -= n;
    }
    if (flight->n_active > 0) {
        return STATUS_OK;
    }
    flight->done += flight->piece;
    return flight->done < flight->bytes ? post_piece(comm, flight, why) : STATUS_OK;
}

static enum status advance_all(struct comm *comm, struct failure *why)
{
    struct mpi_world *world = world_of(comm);
    if (world->broken) {
        return fail(why, STATUS_RANK_LOST,
                    "rank %u cannot exchange anything more: %s did not complete", comm->rank,
                    world->broken_by);
    }
    for (size_t i = 0; i < MAX_FLIGHTS; i++) {
        if (world->flights[i].active) {
            enum status status = advance(comm, &world->flights[i], why);
            if (status != STATUS_OK) {
                return status;
            }
        }
    }
    return STATUS_OK;
}

/* The ranks a flight still waits for, as text: those not heard from, else those that did not
 * take their part. */
static void name_missing(const struct comm *comm, const struct flight *flight, size_t out_bytes,
                         char *out)
{
    for (uint32_t way = 0; way < 2; way++) {
        size_t used = 0;
        uint32_t found = 0;
        for (uint32_t peer = 0; peer < comm->size; peer++) {
            if (flight->requests[2 * peer + way] == MPI_REQUEST_NULL) {
                continue;
            }
            if (found++ < MAX_NAMED_RANKS && used < out_bytes) {
                used += (size_t)snprintf(out + used, out_bytes - used, "%s%u",
                                         found == 1 ? "" : ", ", peer);
            }
        }
        if (found > 0) {
            if (found > MAX_NAMED_RANKS && used < out_bytes) {
                snprintf(out + used, out_bytes - used, " and %u more", found - MAX_NAMED_RANKS);
            }
            return;
        }
    }
    snprintf(out, out_bytes, "nobody");
}

static void give_way(double waited_s)
{
    if (waited_s < yield_s) {
        sched_yield();
    } else {
        nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
    }
}

/* Until this flight is through, the deadline passes or the run is being ended. */
static enum status finish(struct comm *comm, struct flight *flight, struct failure *why)
{
    double start_s = units_monotonic_s();
    enum status status;
    atomic_store_explicit(&comm->collective, flight->name, memory_order_relaxed);
    for (;;) {
        status = advance_all(comm, why);
        if (status == STATUS_OK) {
            status = advance(comm, flight, why);
        }
        if (status != STATUS_OK || flight->done == flight->bytes) {
            break;
        }
        double waited_s = units_monotonic_s() - start_s;
        if (comm->abort_flag != NULL && atomic_load(comm->abort_flag)) {
            break_world(comm, flight);
            status = fail(why, STATUS_STOPPED,
                          "collective '%s' number %llu: given up, the run is being ended",
                          flight->name, (unsigned long long)flight->number);
            break;
        }
        if (waited_s > comm->timeout_s) {
            char missing[128];
            name_missing(comm, flight, sizeof missing, missing);
            break_world(comm, flight);
            status = fail(why, STATUS_DEADLINE,
                          "collective '%s' number %llu: rank %u waited %.1f s (limit %.1f s) "
                          "for rank %s of %u",
                          flight->name, (unsigned long long)flight->number, comm->rank, waited_s,
                          comm->timeout_s, missing, comm->size);
            break;
        }
        give_way(waited_s);
    }
    atomic_store_explicit(&comm->collective, NULL, memory_order_relaxed);
    return status;
}

/* Common start: counts the exchange, asks the fault point, posts the first piece. The flight's
 * name, communicator, addresses and bytes are set. */
static enum status begin(struct comm *comm, struct flight *flight, struct failure *why)
{
    struct mpi_world *world = world_of(comm);
    flight->number = atomic_fetch_add_explicit(&comm->n_collectives, 1, memory_order_relaxed) + 1;
    flight->done = 0;
    flight->n_active = 0;
    if (world->broken) {
        return fail(why, STATUS_RANK_LOST,
                    "collective '%s' number %llu: refused on rank %u, because %s did not complete",
                    flight->name, (unsigned long long)flight->number, comm->rank, world->broken_by);
    }
    if (fault_fires(FAULT_COLLECTIVE)) {
        break_world(comm, flight);
        return fail(why, STATUS_DEADLINE,
                    "collective '%s' number %llu: rank %u failed it on purpose (fault point "
                    "collective)",
                    flight->name, (unsigned long long)flight->number, comm->rank);
    }
    uint64_t *serial = flight->on == world->control ? &world->n_control : &world->n_data;
    flight->serial = ++*serial;
    flight->tag = (int)(flight->serial % TAGS);
    if (comm->size == 1 || flight->bytes == 0) {
        flight->done = flight->bytes;
        return STATUS_OK;
    }
    return post_piece(comm, flight, why);
}

static enum status mpi_exchange(struct comm *comm, const char *name, const void *mine, size_t bytes,
                                void *all, struct failure *why)
{
    struct mpi_world *world = world_of(comm);
    struct flight *flight = &world->exchange;
    assert(bytes <= COMM_EXCHANGE_MAX_BYTES);
    flight->name = name;
    flight->on = world->control;
    flight->from_root_only = false;
    flight->send = world->mine;
    flight->send_stride = 0;
    flight->receive = world->all;
    flight->receive_stride = bytes;
    flight->bytes = bytes;
    if (!world->broken) {
        memcpy(world->mine, mine, bytes);
        memcpy(world->all + comm->rank * bytes, mine, bytes);
    }
    enum status status = begin(comm, flight, why);
    if (status == STATUS_OK) {
        status = finish(comm, flight, why);
    }
    if (status == STATUS_OK) {
        memcpy(all, world->all, comm->size * bytes);
    }
    return status;
}

static enum status mpi_broadcast(struct comm *comm, const char *name, void *bytes, size_t n,
                                 struct failure *why)
{
    struct mpi_world *world = world_of(comm);
    struct flight *flight = &world->exchange;
    flight->name = name;
    flight->on = world->control;
    flight->from_root_only = true;
    flight->send = bytes;
    flight->send_stride = 0;
    flight->receive = bytes;
    flight->receive_stride = 0;
    flight->bytes = n;
    enum status status = begin(comm, flight, why);
    return status == STATUS_OK ? finish(comm, flight, why) : status;
}

/* A free place in the table of flights, for `name`. */
static enum status take_flight(struct comm *comm, const char *name, struct flight **out_flight,
                               struct failure *why)
{
    struct mpi_world *world = world_of(comm);
    for (size_t i = 0; i < MAX_FLIGHTS; i++) {
        if (!world->flights[i].active) {
            world->flights[i].name = name;
            world->flights[i].on = world->data;
            world->flights[i].from_root_only = false;
            *out_flight = &world->flights[i];
            return STATUS_OK;
        }
    }
    return fail(why, STATUS_BUSY, "collective '%s': %d are in flight already; wait for one first",
                name, MAX_FLIGHTS);
}

static enum status launch(struct comm *comm, struct flight *flight, struct ticket *out_ticket,
                          struct failure *why)
{
    enum status status = begin(comm, flight, why);
    if (status != STATUS_OK) {
        return status;
    }
    comm->bytes_sent += (uint64_t)(comm->size - 1) * flight->bytes;
    if (flight->done == flight->bytes) {
        *out_ticket = (struct ticket){0};
        return STATUS_OK;
    }
    flight->active = true;
    out_ticket->serial = flight->serial;
    return STATUS_OK;
}

static enum status mpi_scatter_parts(struct comm *comm, const void *base, size_t elem_bytes,
                                     size_t stride, size_t offset, size_t n, void *parts,
                                     struct ticket *out_ticket, struct failure *why)
{
    struct flight *flight = NULL;
    assert(offset + n <= stride);
    enum status status = take_flight(comm, "scatter_parts", &flight, why);
    if (status != STATUS_OK) {
        return status;
    }
    flight->send = (const uint8_t *)base + offset * elem_bytes;
    flight->send_stride = stride * elem_bytes;
    flight->receive = parts;
    flight->receive_stride = n * elem_bytes;
    flight->bytes = n * elem_bytes;
    status = launch(comm, flight, out_ticket, why);
    if (status == STATUS_OK) {
        memcpy(flight->receive + comm->rank * flight->receive_stride,
               flight->send + comm->rank * flight->send_stride, flight->bytes);
    }
    return status;
}

static enum status mpi_gather_slices(struct comm *comm, void *base, size_t elem_bytes,
                                     size_t stride, size_t offset, size_t n,
                                     struct ticket *out_ticket, struct failure *why)
{
    struct flight *flight = NULL;
    assert(offset + n <= stride);
    enum status status = take_flight(comm, "gather_slices", &flight, why);
    if (status != STATUS_OK) {
        return status;
    }
    flight->receive = (uint8_t *)base + offset * elem_bytes;
    flight->receive_stride = stride * elem_bytes;
    flight->send = flight->receive + comm->rank * flight->receive_stride;
    flight->send_stride = 0;
    flight->bytes = n * elem_bytes;
    return launch(comm, flight, out_ticket, why);
}

static enum status mpi_wait(struct comm *comm, struct ticket *ticket, struct failure *why)
{
    struct mpi_world *world = world_of(comm);
    if (ticket->serial == 0) {
        return STATUS_OK;
    }
    struct flight *flight = NULL;
    for (size_t i = 0; i < MAX_FLIGHTS; i++) {
        if (world->flights[i].active && world->flights[i].serial == ticket->serial) {
            flight = &world->flights[i];
        }
    }
    assert(flight != NULL); /* a ticket is waited for once */
    enum status status = finish(comm, flight, why);
    if (status == STATUS_OK) {
        flight->active = false;
        ticket->serial = 0;
    }
    return status;
}

static void mpi_progress(struct comm *comm)
{
    /* A failure breaks the world; the next exchange or wait says so. */
    enum status status = advance_all(comm, NULL);
    (void)status;
}

static void mpi_abort(struct comm *comm, int exit_code)
{
    (void)comm;
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    _exit(exit_code);
}

static void mpi_free(struct comm *comm)
{
    struct mpi_world *world = world_of(comm);
    comm->table = NULL;
    if (world->broken) {
        return; /* MPI may still write into these buffers; the process is about to end */
    }
    MPI_Comm_free(&world->data);
    MPI_Comm_free(&world->control);
    heap_free(world->all);
    heap_free(world->mine);
    heap_free(world->statuses);
    heap_free(world->indices);
    heap_free(world->requests);
    heap_free(world);
    comm->self = NULL;
}

static const struct comm_table mpi_table = {
    .exchange = mpi_exchange,
    .broadcast = mpi_broadcast,
    .scatter_parts = mpi_scatter_parts,
    .gather_slices = mpi_gather_slices,
    .wait = mpi_wait,
    .progress = mpi_progress,
    .abort = mpi_abort,
    .free = mpi_free,
};

/* Who shares this host, and which host it is in order of lowest rank. */
static int find_node(struct comm *comm)
{
    MPI_Comm node;
    int code = MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, (int)comm->rank,
                                   MPI_INFO_NULL, &node);
    if (code != MPI_SUCCESS) {
        return code;
    }
    int node_rank = 0, node_size = 1;
    MPI_Comm_rank(node, &node_rank);
    MPI_Comm_size(node, &node_size);
    uint32_t leader = comm->rank; /* the node's lowest rank */
    code = MPI_Bcast(&leader, 1, MPI_UINT32_T, 0, node);
    uint32_t leaders[COMM_MAX_RANKS];
    if (code == MPI_SUCCESS) {
        code = MPI_Allgather(&leader, 1, MPI_UINT32_T, leaders, 1, MPI_UINT32_T, MPI_COMM_WORLD);
    }
    MPI_Comm_free(&node);
    if (code != MPI_SUCCESS) {
        return code;
    }
    comm->node_rank = (uint32_t)node_rank;
    comm->node_size = (uint32_t)node_size;
    comm->node = 0;
    for (uint32_t rank = 0; rank < leader; rank++) {
        comm->node += leaders[rank] == rank ? 1 : 0;
    }
    return MPI_SUCCESS;
}

static enum status make_world(struct comm *comm, struct failure *why)
{
    size_t size = comm->size;
    size_t n_requests = (MAX_FLIGHTS + 1) * 2 * size;
    struct mpi_world *world = heap_calloc(1, sizeof *world);
    if (world == NULL) {
        goto out_of_memory;
    }
    world->requests = heap_alloc(n_requests * sizeof *world->requests);
    world->indices = heap_alloc(2 * size * sizeof *world->indices);
    world->statuses = heap_alloc(2 * size * sizeof *world->statuses);
    world->mine = heap_alloc(COMM_EXCHANGE_MAX_BYTES);
    world->all = heap_alloc(size * COMM_EXCHANGE_MAX_BYTES);
    if (world->requests == NULL || world->indices == NULL || world->statuses == NULL ||
        world->mine == NULL || world->all == NULL) {
        goto undo_world;
    }
    for (size_t i = 0; i < n_requests; i++) {
        world->requests[i] = MPI_REQUEST_NULL;
    }
    for (size_t i = 0; i < MAX_FLIGHTS; i++) {
        world->flights[i].requests = world->requests + i * 2 * size;
    }
    world->exchange.requests = world->requests + MAX_FLIGHTS * 2 * size;
    comm->self = world;
    return STATUS_OK;

undo_world:
    heap_free(world->all);
    heap_free(world->mine);
    heap_free(world->statuses);
    heap_free(world->indices);
    heap_free(world->requests);
    heap_free(world);
out_of_memory:
    return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the communicator of %zu ranks", size);
}

/* A second comm (a test makes one after it broke the first) shares the running library. */
static enum status start_mpi(int *argc, char ***argv, struct failure *why)
{
    int initialized = 0, provided = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    if (initialized) {
        return STATUS_OK;
    }
    if (MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
        return fail(why, STATUS_RANK_LOST, "MPI did not start: is this launched by mpirun?");
    }
    if (provided < MPI_THREAD_FUNNELED) {
        return fail(why, STATUS_UNSUPPORTED,
                    "this MPI does not allow other threads beside the one that calls it");
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    return STATUS_OK;
}

enum status comm_mpi_init(struct comm *comm, double timeout_s, int *argc, char ***argv,
                          struct failure *why)
{
    /* MPI's large temporaries come from malloc. Memory that went back to the kernel is dear to
     * get again (every fresh page is cleared), so what was taken is kept. */
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
    mallopt(M_ARENA_MAX, 1);
    enum status status = start_mpi(argc, argv, why);
    if (status != STATUS_OK) {
        return status;
    }
    int rank = 0, size = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size > COMM_MAX_RANKS) {
        return fail(why, STATUS_OUT_OF_RANGE, "%d ranks: at most %d are supported", size,
                    COMM_MAX_RANKS);
    }
    struct comm made = {
        .table = &mpi_table,
        .rank = (uint32_t)rank,
        .size = (uint32_t)size,
        .timeout_s = timeout_s,
        .piece_bytes = COMM_PIECE_BYTES,
    };
    status = make_world(&made, why);
    if (status != STATUS_OK) {
        return status;
    }
    /* Duplicates inherit the error handler. */
    struct mpi_world *world = world_of(&made);
    if (MPI_Comm_dup(MPI_COMM_WORLD, &world->control) != MPI_SUCCESS ||
        MPI_Comm_dup(MPI_COMM_WORLD, &world->data) != MPI_SUCCESS ||
        find_node(&made) != MPI_SUCCESS) {
        /* The world stays allocated: MPI may hold on to it, and the process is about to end. */
        return fail(why, STATUS_RANK_LOST, "MPI could not set up its communicators on rank %d",
                    rank);
    }
    *comm = made;
    return STATUS_OK;
}

void comm_mpi_fini(struct comm *comm)
{
    /* With requests still open MPI_Finalize could wait for ever. */
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (comm->size > 0 && comm->self == NULL && initialized) {
        MPI_Finalize();
    }
}
