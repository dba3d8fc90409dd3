/* The comm that moves nothing: it counts what a world of `size` ranks would send.
 *
 * Plans are made with it, for ranks that need not exist, so no pointer given to it is followed
 * but an exchange's. Owns nothing. Main or planning thread, whichever made it. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include "worker/parallel/comm.h"

static enum status dry_exchange(struct comm *comm, const char *name, const void *mine, size_t bytes,
                                void *all, struct failure *why)
{
    (void)name;
    (void)why;
    assert(bytes <= COMM_EXCHANGE_MAX_BYTES);
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        memcpy((uint8_t *)all + rank * bytes, mine, bytes);
    }
    atomic_fetch_add_explicit(&comm->n_collectives, 1, memory_order_relaxed);
    return STATUS_OK;
}

static enum status dry_broadcast(struct comm *comm, const char *name, void *bytes, size_t n,
                                 struct failure *why)
{
    (void)name;
    (void)bytes;
    (void)n;
    (void)why;
    atomic_fetch_add_explicit(&comm->n_collectives, 1, memory_order_relaxed);
    return STATUS_OK;
}

/* Both halves of a reduction send n elements to every other rank. */
static enum status count(struct comm *comm, size_t elem_bytes, size_t n, struct ticket *out_ticket)
{
    comm->bytes_sent += (uint64_t)(comm->size - 1) * n * elem_bytes;
    atomic_fetch_add_explicit(&comm->n_collectives, 1, memory_order_relaxed);
    *out_ticket = (struct ticket){0};
    return STATUS_OK;
}

static enum status dry_scatter_parts(struct comm *comm, const void *base, size_t elem_bytes,
                                     size_t stride, size_t offset, size_t n, void *parts,
                                     struct ticket *out_ticket, struct failure *why)
{
    (void)base;
    (void)parts;
    (void)why;
    assert(offset + n <= stride);
    return count(comm, elem_bytes, n, out_ticket);
}

static enum status dry_gather_slices(struct comm *comm, void *base, size_t elem_bytes,
                                     size_t stride, size_t offset, size_t n,
                                     struct ticket *out_ticket, struct failure *why)
{
    (void)base;
    (void)why;
    assert(offset + n <= stride);
    return count(comm, elem_bytes, n, out_ticket);
}

static enum status dry_reduce_slices(struct comm *comm, float *base, size_t n, float *mine,
                                     struct ticket *out_ticket, struct failure *why)
{
    (void)base;
    (void)mine;
    (void)why;
    return count(comm, sizeof(float), n, out_ticket);
}

static enum status dry_wait(struct comm *comm, struct ticket *ticket, struct failure *why)
{
    (void)comm;
    (void)why;
    assert(ticket->serial == 0);
    return STATUS_OK;
}

static void dry_progress(struct comm *comm)
{
    (void)comm;
}

static void dry_abort(struct comm *comm, int exit_code)
{
    (void)comm;
    exit(exit_code);
}

static void dry_free(struct comm *comm)
{
    comm->table = NULL;
}

static const struct comm_table dry_table = {
    .exchange = dry_exchange,
    .broadcast = dry_broadcast,
    .scatter_parts = dry_scatter_parts,
    .gather_slices = dry_gather_slices,
    .reduce_slices = dry_reduce_slices,
    .wait = dry_wait,
    .progress = dry_progress,
    .abort = dry_abort,
    .free = dry_free,
};

void comm_dry_init(struct comm *comm, uint32_t rank, uint32_t size)
{
    assert(rank < size && size <= COMM_MAX_RANKS);
    *comm = (struct comm){
        .table = &dry_table,
        .rank = rank,
        .size = size,
        .node_rank = rank,
        .node_size = size,
        .timeout_s = 60,
        .piece_bytes = COMM_PIECE_BYTES,
    };
}
