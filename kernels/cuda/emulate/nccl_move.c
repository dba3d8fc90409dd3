/* The side of NCCL that moves bytes: the executor takes a step of an operation at a time. Owns what
 * is mapped of the shared memory. See nccl.c. */
#include "kernels/cuda/emulate/nccl_comm.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "kernels/cuda/emulate/nccl_reduce.h"

enum {
    LOOK_EVERY = 64, /* steps without progress between looks at the peers' processes */
    PURPOSE_CHUNK = 3
};

/* ---- peers ---- */

static bool has_died(const struct ncclComm *comm, int rank)
{
    struct pollfd watch = {.fd = comm->watches[rank], .events = POLLIN};
    return watch.fd >= 0 && poll(&watch, 1, 0) > 0;
}

/* Has a peer died or aborted? One that left in peace has gone as well when it is needed. */
static bool is_gone(const struct ncclComm *comm, int rank, bool is_needed)
{
    const int state = comm->world->members[rank].state;
    if (state == MEMBER_ABORTED) {
        return true;
    }
    if (state == MEMBER_LEFT) {
        return is_needed;
    }
    return rank != comm->rank && has_died(comm, rank);
}

void nccl_look_at_peers(struct ncclComm *comm)
{
    for (int rank = 0; rank < comm->n_ranks; rank++) {
        if (comm->error == ncclSuccess && is_gone(comm, rank, false)) {
            comm->error = ncclRemoteError;
        }
    }
}

void nccl_watch_peer(struct ncclComm *comm, int rank)
{
    const struct member *member = &comm->world->members[rank];
    if (comm->watches[rank] >= 0 || member->state == MEMBER_NONE || rank == comm->rank) {
        return;
    }
    comm->watches[rank] = (int)syscall(SYS_pidfd_open, member->pid, 0);
    if (comm->watches[rank] < 0 && errno == ESRCH && member->state == MEMBER_HERE) {
        comm->error = ncclRemoteError;
    }
}

/* ---- rings ---- */

static struct ring *ring_of(const struct ncclComm *comm, int from, int to)
{
    return &comm->world->rings[(size_t)from * (size_t)comm->n_ranks + (size_t)to];
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t ring_write(struct ring *ring, const void *bytes, size_t n)
{
    const uint64_t at = ring->n_written;
    n = least(n, RING_BYTES - (size_t)(at - ring->n_read));
    const size_t offset = (size_t)(at % RING_BYTES), first = least(n, RING_BYTES - offset);
    memcpy(ring->bytes + offset, bytes, first);
    memcpy(ring->bytes, (const unsigned char *)bytes + first, n - first);
    ring->n_written = at + n;
    return n;
}

static size_t ring_read(struct ring *ring, void *bytes, size_t n)
{
    const uint64_t at = ring->n_read;
    n = least(n, (size_t)(ring->n_written - at));
    const size_t offset = (size_t)(at % RING_BYTES), first = least(n, RING_BYTES - offset);
    memcpy(bytes, ring->bytes + offset, first);
    memcpy((unsigned char *)bytes + first, ring->bytes, n - first);
    ring->n_read = at + n;
    return n;
}

/* ---- the executor's side ---- */

static struct emulate_random *chunks(void)
{
    static struct emulate_random random;
    static bool is_ready;
    if (!is_ready) {
        is_ready = true;
        emulate_random_init(&random, PURPOSE_CHUNK);
    }
    return &random;
}

static void check_header(const struct ncclComm *comm, const struct transfer *t,
                         const struct header *header)
{
    if (header->bytes != t->bytes || header->kind != (uint64_t)t->kind) {
        emulate_misuse("NCCL: rank %d expects %zu bytes from rank %d (kind %d), which sends %llu "
                       "(kind %llu)",
                       comm->rank, t->bytes, t->peer, (int)t->kind,
                       (unsigned long long)header->bytes, (unsigned long long)header->kind);
    }
}

/* Did anything move? */
static bool move(struct ncclComm *comm, struct transfer *t)
{
    struct ring *ring =
        t->is_send ? ring_of(comm, comm->rank, t->peer) : ring_of(comm, t->peer, comm->rank);
    if (!t->has_header) {
        struct header header = {t->bytes, (uint64_t)t->kind};
        const uint64_t n = ring->n_written - ring->n_read;
        if (t->is_send ? RING_BYTES - n < sizeof header : n < sizeof header) {
            return false;
        }
        if (t->is_send) {
            ring_write(ring, &header, sizeof header);
        } else {
            ring_read(ring, &header, sizeof header);
            check_header(comm, t, &header);
        }
        t->has_header = true;
        return true;
    }
    const size_t chunk =
        least(t->bytes - t->n_moved, (size_t)emulate_random_below(chunks(), RING_BYTES) + 1);
    const size_t n = t->is_send ? ring_write(ring, t->start + t->n_moved, chunk)
                                : ring_read(ring, t->start + t->n_moved, chunk);
    t->n_moved += n;
    return n > 0;
}

static bool is_finished(const struct transfer *t)
{
    return t->has_header && t->n_moved == t->bytes;
}

/* Transfers with one peer in one direction follow one another. */
static bool is_behind(const struct operation *op, size_t i)
{
    for (size_t j = 0; j < i; j++) {
        const struct transfer *before = &op->transfers[j], *t = &op->transfers[i];
        if (before->is_send == t->is_send && before->peer == t->peer && !is_finished(before)) {
            return true;
        }
    }
    return false;
}

static void look_for_needed(struct operation *op)
{
    struct ncclComm *comm = op->comm;
    for (size_t i = 0; i < op->n_transfers && comm->error == ncclSuccess; i++) {
        const struct transfer *t = &op->transfers[i];
        const struct ring *ring = ring_of(comm, t->peer, comm->rank);
        /* What it sent before it went is still there. */
        if (!is_finished(t) && is_gone(comm, t->peer, !t->is_send) &&
            (t->is_send || ring->n_written == ring->n_read)) {
            comm->error = ncclRemoteError;
        }
    }
}

static enum emulate_step step_operation(void *closure)
{
    struct operation *op;
    memcpy(&op, closure, sizeof op);
    struct ncclComm *comm = op->comm;
    if (comm->is_aborted) {
        return EMULATE_DONE;
    }
    if (comm->n_done != op->serial) {
        return EMULATE_WAIT;
    }
    bool any = false, all = true;
    for (size_t i = 0; i < op->n_transfers; i++) {
        struct transfer *t = &op->transfers[i];
        if (!is_finished(t) && !is_behind(op, i)) {
            any = move(comm, t) || any;
        }
        all = all && is_finished(t);
    }
    if (!all) {
        op->n_idle = any ? 0 : op->n_idle + 1;
        if (op->n_idle % LOOK_EVERY == LOOK_EVERY - 1) {
            look_for_needed(op);
        }
        return any ? EMULATE_MORE : EMULATE_WAIT;
    }
    for (size_t i = 0; i < op->n_reductions; i++) {
        const struct reduction *r = &op->reductions[i];
        emulate_nccl_reduce(r->out, r->parts, r->n, (size_t)comm->n_ranks, comm->first_rank,
                            r->type, r->op);
    }
    comm->n_done++;
    return EMULATE_DONE;
}

void nccl_release(struct ncclComm *comm)
{
    if (--comm->references > 0) {
        return;
    }
    for (int rank = 0; rank < comm->n_ranks; rank++) {
        if (comm->watches[rank] >= 0) {
            close(comm->watches[rank]);
        }
    }
    munmap(comm->world, comm->world_bytes);
    emulate_account_give(COMM_BYTES);
    free(comm->watches);
    free(comm);
}

void nccl_free_operation(struct operation *op)
{
    for (size_t i = 0; i < op->n_reductions; i++) {
        free(op->reductions[i].parts);
    }
    nccl_release(op->comm);
    free(op->reductions);
    free(op->transfers);
    free(op->ranges);
    free(op);
}

static void dispose_operation(void *closure)
{
    struct operation *op;
    memcpy(&op, closure, sizeof op);
    nccl_free_operation(op);
}

void nccl_issue(struct operation *op)
{
    op->serial = op->comm->n_issued++;
    emulate_submit(op->stream, &(struct emulate_work){.name = "NCCL operation",
                                                      .step = step_operation,
                                                      .dispose = dispose_operation,
                                                      .closure = &op,
                                                      .bytes = sizeof op,
                                                      .ranges = op->ranges,
                                                      .n_ranges = op->n_ranges});
}
