/* Collectives between ranks. One mechanism: everything that crosses ranks goes through here.
 *
 * `mpi` is the CPU device's; `dry` counts bytes. Sums over ranks are never left to a library: ranks
 * exchange parts and add them in rank order (worker/state/grads.h), unless a run asks for the
 * library's sums (ballast.reductions). Every wait has a deadline
 * and looks at the abort flag. Main thread only. */
#ifndef BALLAST_WORKER_PARALLEL_COMM_H
#define BALLAST_WORKER_PARALLEL_COMM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/device.h"
#include "proto/base/status.h"

enum {
    COMM_HOST_BYTES = 64,
    COMM_EXCHANGE_MAX_BYTES = 4096,
    COMM_MAX_RANKS = 4096,    /* a larger world is refused */
    COMM_PIECE_BYTES = 1 << 30 /* default of the largest single message */
};

struct comm {
    const struct comm_table *table;
    uint32_t rank, size;             /* in the world */
    uint32_t node_rank, node_size;   /* among the ranks of this host */
    uint32_t node;                   /* index of this host, 0.. in order of lowest rank */
    double timeout_s;                /* deadline of one wait */
    size_t piece_bytes;              /* of the largest single message; equal on all ranks */
    uint64_t bytes_sent;             /* payload this rank sent in data collectives */
    const char *_Atomic collective;  /* name of the exchange in progress, NULL outside */
    _Atomic uint64_t n_collectives;  /* exchanges started so far */
    _Atomic bool *abort_flag;        /* borrowed; a true value ends every wait. May be NULL */
    void *self;                      /* owned by the implementation */
};

struct comm_table {
    /* All ranks' `bytes` (<= COMM_EXCHANGE_MAX_BYTES) in rank order into all[size][bytes]. The
     * control path: votes, the end-of-step exchange, counts. Own communicator. */
    enum status (*exchange)(struct comm *comm, const char *name, const void *mine, size_t bytes,
                            void *all, struct failure *why);
    /* Rank 0's bytes to all; any size. */
    enum status (*broadcast)(struct comm *comm, const char *name, void *bytes, size_t n,
                             struct failure *why);
    /* Ordered reduction, first half. base is [size][stride] elements of elem_bytes; every rank
     * sends base[r][offset .. offset+n) to rank r, and receives the `size` parts of its own slice
     * into parts[p*n ..] in rank order. Its own part is copied. n differs not between ranks. */
    enum status (*scatter_parts)(struct comm *comm, const void *base, size_t elem_bytes,
                                 size_t stride, size_t offset, size_t n, void *parts,
                                 struct ticket *out_ticket, struct failure *why);
    /* Second half: base[rank][offset .. offset+n) of every rank to all ranks, in place. */
    enum status (*gather_slices)(struct comm *comm, void *base, size_t elem_bytes, size_t stride,
                                 size_t offset, size_t n, struct ticket *out_ticket,
                                 struct failure *why);
    /* base is (size, n) floats; mine(n) = the ranks' slices number `rank`, summed by the library in
     * an order of its own. May write into base. NULL where there is none: parts and their
     * ordered sum do it then. */
    enum status (*reduce_slices)(struct comm *comm, float *base, size_t n, float *mine,
                                 struct ticket *out_ticket, struct failure *why);
    /* Wait for a ticket: DEADLINE names the collective and its number, RANK_LOST when the
     * library says so. */
    enum status (*wait)(struct comm *comm, struct ticket *ticket, struct failure *why);
    /* Let the library move data; call between long computations. Cheap. */
    void (*progress)(struct comm *comm);
    /* End the whole job with this exit code; does not return. */
    void (*abort)(struct comm *comm, int exit_code);
    void (*free)(struct comm *comm);
};

/* MPI_Init_thread and the world. Sets malloc options first (fresh pages are dear). */
enum status comm_mpi_init(struct comm *comm, double timeout_s, int *argc, char ***argv,
                          struct failure *why) MUST_CHECK;
/* MPI_Finalize after free; skipped when the job is being aborted. */
void comm_mpi_fini(struct comm *comm);
/* Counts what `size` ranks would send; moves nothing. The caller is rank `rank`. */
void comm_dry_init(struct comm *comm, uint32_t rank, uint32_t size);

/* Do all ranks say yes? out_first_no is the lowest rank that did not, -1 when none. Failure
 * only when the exchange itself fails. */
enum status comm_vote(struct comm *comm, const char *name, bool yes, int *out_first_no,
                      struct failure *why) MUST_CHECK;
enum status comm_sum_u64(struct comm *comm, const char *name, uint64_t mine, uint64_t *out_sum,
                         struct failure *why) MUST_CHECK;

#endif
