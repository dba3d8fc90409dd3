/* Data collectives through host memory. See comm_staged.h.
 *
 * The staging buffer has a part for each rank to send and one to receive; pieces are as large as
 * these parts. Control's own collectives move them, so order, deadlines and faults are its. */
#include "worker/parallel/comm_staged.h"
#include <assert.h>
#include "proto/base/heap.h"
#include "worker/parallel/comm_wrap.h"

struct staged {
    struct comm_wrap wrap;   /* first: comm_wrap.h */
    struct device *device;   /* borrowed */
    size_t part_bytes;       /* of one rank, one way */
    uint8_t *send, *receive; /* owned, one block that starts at send: [size][part_bytes] each */
};

static struct staged *staged_of(struct comm *comm)
{
    return comm->self;
}

static size_t piece_bytes(const struct comm *comm, size_t left)
{
    const struct staged *staged = comm->self;
    size_t piece = staged->part_bytes < comm->piece_bytes ? staged->part_bytes : comm->piece_bytes;
    return left < piece ? left : piece;
}

static enum status copy(struct comm *comm, void *dst, const void *src, size_t bytes,
                        enum copy_kind kind, struct failure *why)
{
    struct device *device = staged_of(comm)->device;
    struct ticket ticket;
    enum status status = device->table->copy(device, dst, src, bytes, kind, &ticket, why);
    return status == STATUS_OK ? device->table->wait(device, &ticket, why) : status;
}

/* [at, at + piece) of every rank's part to that rank, and what it has for this one. */
static enum status scatter_piece(struct comm *comm, const uint8_t *base, size_t stride, size_t at,
                                 size_t piece, size_t part, uint8_t *parts, struct failure *why)
{
    struct staged *staged = staged_of(comm);
    struct comm *control = comm_wrap_control(comm);
    enum status status = STATUS_OK;
    for (uint32_t rank = 0; rank < comm->size && status == STATUS_OK; rank++) {
        if (rank != comm->rank) {
            status = copy(comm, staged->send + rank * piece, base + rank * stride + at, piece,
                          COPY_TO_HOST, why);
        }
    }
    struct ticket ticket = {0};
    if (status == STATUS_OK) {
        status = control->table->scatter_parts(control, staged->send, 1, piece, 0, piece,
                                               staged->receive, &ticket, why);
    }
    if (status == STATUS_OK) {
        status = control->table->wait(control, &ticket, why);
    }
    for (uint32_t rank = 0; rank < comm->size && status == STATUS_OK; rank++) {
        if (rank != comm->rank) {
            status = copy(comm, parts + rank * part + at, staged->receive + rank * piece, piece,
                          COPY_FROM_HOST, why);
        }
    }
    return status;
}

static enum status staged_scatter_parts(struct comm *comm, const void *base, size_t elem_bytes,
                                        size_t stride, size_t offset, size_t n, void *parts,
                                        struct ticket *out_ticket, struct failure *why)
{
    assert(offset + n <= stride);
    const uint8_t *from = (const uint8_t *)base + offset * elem_bytes;
    const size_t bytes = n * elem_bytes;
    size_t at = 0;
    comm_wrap_begin(comm, "scatter_parts");
    enum status status = STATUS_OK;
    do { /* once also for nothing, so that control counts and checks it */
        const size_t piece = piece_bytes(comm, bytes - at);
        status = scatter_piece(comm, from, stride * elem_bytes, at, piece, bytes, parts, why);
        at += piece;
    } while (status == STATUS_OK && at < bytes);
    if (status == STATUS_OK && bytes > 0) {
        status = copy(comm, (uint8_t *)parts + comm->rank * bytes,
                      from + comm->rank * stride * elem_bytes, bytes, COPY_WITHIN, why);
    }
    if (status == STATUS_OK) {
        comm->bytes_sent += (uint64_t)(comm->size - 1) * bytes;
        *out_ticket = (struct ticket){0};
    }
    return comm_wrap_end(comm, status);
}

static enum status gather_piece(struct comm *comm, uint8_t *base, size_t stride, size_t at,
                                size_t piece, struct failure *why)
{
    struct staged *staged = staged_of(comm);
    struct comm *control = comm_wrap_control(comm);
    enum status status = copy(comm, staged->receive + comm->rank * piece,
                              base + comm->rank * stride + at, piece, COPY_TO_HOST, why);
    struct ticket ticket = {0};
    if (status == STATUS_OK) {
        status = control->table->gather_slices(control, staged->receive, 1, piece, 0, piece,
                                               &ticket, why);
    }
    if (status == STATUS_OK) {
        status = control->table->wait(control, &ticket, why);
    }
    for (uint32_t rank = 0; rank < comm->size && status == STATUS_OK; rank++) {
        if (rank != comm->rank) {
            status = copy(comm, base + rank * stride + at, staged->receive + rank * piece, piece,
                          COPY_FROM_HOST, why);
        }
    }
    return status;
}

static enum status staged_gather_slices(struct comm *comm, void *base, size_t elem_bytes,
                                        size_t stride, size_t offset, size_t n,
                                        struct ticket *out_ticket, struct failure *why)
{
    assert(offset + n <= stride);
    uint8_t *to = (uint8_t *)base + offset * elem_bytes;
    const size_t bytes = n * elem_bytes;
    size_t at = 0;
    comm_wrap_begin(comm, "gather_slices");
    enum status status = STATUS_OK;
    do {
        const size_t piece = piece_bytes(comm, bytes - at);
        status = gather_piece(comm, to, stride * elem_bytes, at, piece, why);
        at += piece;
    } while (status == STATUS_OK && at < bytes);
    if (status == STATUS_OK) {
        comm->bytes_sent += (uint64_t)(comm->size - 1) * bytes;
        *out_ticket = (struct ticket){0};
    }
    return comm_wrap_end(comm, status);
}

static enum status staged_wait(struct comm *comm, struct ticket *ticket, struct failure *why)
{
    (void)comm, (void)why;
    assert(ticket->serial == 0); /* complete when it was given out */
    return STATUS_OK;
}

static void staged_abort(struct comm *comm, int exit_code)
{
    struct comm *control = staged_of(comm)->wrap.control;
    control->table->abort(control, exit_code);
}

static void staged_free(struct comm *comm)
{
    struct staged *staged = staged_of(comm);
    heap_free(staged->send);
    heap_free(staged);
    comm->table = NULL;
    comm->self = NULL;
}

static const struct comm_table staged_table = {
    .exchange = comm_wrap_exchange,
    .broadcast = comm_wrap_broadcast,
    .scatter_parts = staged_scatter_parts,
    .gather_slices = staged_gather_slices,
    .wait = staged_wait,
    .progress = comm_wrap_progress,
    .abort = staged_abort,
    .free = staged_free,
};

enum status comm_staged_init(struct comm *comm, struct comm *control, struct device *device,
                             struct failure *why)
{
    struct staged *staged = heap_calloc(1, sizeof *staged);
    uint8_t *block = heap_alloc(COMM_STAGED_BYTES);
    if (staged == NULL || block == NULL) {
        heap_free(block);
        heap_free(staged);
        return fail(why, STATUS_OUT_OF_MEMORY,
                    "no host memory for %d bytes of staging between ranks", COMM_STAGED_BYTES);
    }
    staged->wrap.control = control;
    staged->device = device;
    staged->part_bytes = COMM_STAGED_BYTES / 2 / control->size;
    staged->send = block;
    staged->receive = block + staged->part_bytes * control->size;
    comm_wrap_init(comm, control, &staged_table, staged);
    return STATUS_OK;
}
