/* What wrappers of a comm share: the control path, forwarded to the comm that is wrapped.
 *
 * A wrapper's `self` begins with struct comm_wrap. The wrapper is what the run looks at, so
 * its own fields say what goes on and its own settings count. Header only, because one wrapper
 * lives in the plug-in and one in the worker. Main thread. */
#ifndef BALLAST_WORKER_PARALLEL_COMM_WRAP_H
#define BALLAST_WORKER_PARALLEL_COMM_WRAP_H

#include "worker/parallel/comm.h"

struct comm_wrap {
    struct comm *control; /* borrowed until the wrapper is freed */
};

static inline struct comm *comm_wrap_control(struct comm *comm)
{
    const struct comm_wrap *wrap = comm->self;
    struct comm *control = wrap->control;
    control->timeout_s = comm->timeout_s;
    control->piece_bytes = comm->piece_bytes;
    control->abort_flag = comm->abort_flag;
    return control;
}

/* The wrapper's places are control's. */
static inline void comm_wrap_init(struct comm *comm, const struct comm *control,
                                  const struct comm_table *table, void *self)
{
    *comm = (struct comm){
        .table = table,
        .rank = control->rank,
        .size = control->size,
        .node_rank = control->node_rank,
        .node_size = control->node_size,
        .node = control->node,
        .timeout_s = control->timeout_s,
        .piece_bytes = control->piece_bytes,
        .bytes_sent = control->bytes_sent,
        .abort_flag = control->abort_flag,
        .self = self,
    };
    atomic_store(&comm->n_collectives, atomic_load(&control->n_collectives));
}

/* Counts it; returns its number. */
static inline uint64_t comm_wrap_begin(struct comm *comm, const char *name)
{
    atomic_store_explicit(&comm->collective, name, memory_order_relaxed);
    return atomic_fetch_add_explicit(&comm->n_collectives, 1, memory_order_relaxed) + 1;
}

static inline enum status comm_wrap_end(struct comm *comm, enum status status)
{
    atomic_store_explicit(&comm->collective, NULL, memory_order_relaxed);
    return status;
}

static inline enum status comm_wrap_exchange(struct comm *comm, const char *name, const void *mine,
                                             size_t bytes, void *all, struct failure *why)
{
    struct comm *control = comm_wrap_control(comm);
    comm_wrap_begin(comm, name);
    return comm_wrap_end(comm, control->table->exchange(control, name, mine, bytes, all, why));
}

static inline enum status comm_wrap_broadcast(struct comm *comm, const char *name, void *bytes,
                                              size_t n, struct failure *why)
{
    struct comm *control = comm_wrap_control(comm);
    comm_wrap_begin(comm, name);
    return comm_wrap_end(comm, control->table->broadcast(control, name, bytes, n, why));
}

static inline void comm_wrap_progress(struct comm *comm)
{
    struct comm *control = comm_wrap_control(comm);
    control->table->progress(control);
}

#endif
