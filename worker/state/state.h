/* The training state's memory: parameters, gradients, optimizer states, as parts of a layout.
 *
 * Owns one region a part. Knows addresses and how to get from one layout to another; what the
 * values mean is for params, grads and optim. A change of layout is four calls, at a step
 * boundary:
 *
 *   acquire   what the next layout has and this one lacks      may fail, undone by revert
 *   convert   fill it; nothing that is in force is written     may fail, undone by revert
 *   settle    give back what the next layout lacks             cannot fail
 *
 * Main thread. */
#ifndef BALLAST_WORKER_STATE_STATE_H
#define BALLAST_WORKER_STATE_STATE_H

#include "worker/memory/region.h"
#include "worker/parallel/comm.h"
#include "worker/state/layout.h"

/* The other side of offload. */
struct state_host {
    struct device *device; /* host memory under its own limit */
    struct ops *ops;       /* a CPU table of the same compute type; the device's own on a CPU */
    struct comm *comm;     /* moves host memory */
};

struct state {
    const struct units *units; /* borrowed */
    enum dtype dtype;          /* compute type */
    uint32_t rank;
    struct layout layout;      /* in force */
    struct device *device;     /* borrowed */
    struct state_host host;    /* borrowed */
    struct region parts[N_STATE_PARTS];
    struct region host_parts[N_STATE_PARTS];
};

/* All parts of `layout` committed; contents are zero. */
enum status state_init(struct state *state, const struct layout_facts *facts,
                       const struct layout *layout, struct device *device,
                       const struct state_host *host, struct ledger *ledger,
                       struct failure *why) MUST_CHECK;
void state_fini(struct state *state);

enum status state_acquire(struct state *state, const struct layout *next,
                          struct failure *why) MUST_CHECK;
/* Collective. */
enum status state_convert(struct state *state, const struct layout *next, struct ops *ops,
                          struct comm *comm, struct failure *why) MUST_CHECK;
void state_settle(struct state *state, const struct layout *next);
void state_revert(struct state *state, const struct layout *next);

/* Does this rank hold slice `slice` of the master and the moments? Of the parameters? */
static inline bool state_has_slice(const struct state *state, uint32_t slice)
{
    return state->layout.states_whole || slice == state->rank;
}
static inline bool state_has_params(const struct state *state, uint32_t slice)
{
    return state->layout.params_whole || slice == state->rank;
}

/* Are the unit's master and moments in host memory? */
static inline bool state_on_host(const struct state *state, uint32_t unit)
{
    return unit >= state->layout.first_host;
}
/* Is this an address of the host's parts? */
bool state_is_host(const struct state *state, const void *address);

/* Is the step's own copy of the unit's parameters where it computes? */
static inline bool state_params_ready(const struct state *state)
{
    return state->layout.params_whole && !state->layout.params_host;
}

/* Addresses; the part has to be there, and the slice held. Parameters are in host memory with
 * layout.params_host. */
void *state_params(const struct state *state, uint32_t unit, size_t offset); /* compute type */
void *state_params_slice(const struct state *state, uint32_t unit, uint32_t slice);
float *state_grads(const struct state *state, uint32_t unit);
float *state_grads_slice(const struct state *state, uint32_t unit, uint32_t slice);
/* Staging buffer 0..STAGING_BUFFERS-1, layout.staging_elems floats. */
float *state_staging(const struct state *state, uint32_t buffer);
/* The host's room for block inputs. */
void *state_inputs(const struct state *state);
/* Of master or a moment; host memory where state_on_host(). */
float *state_block_slice(const struct state *state, enum state_part part, uint32_t unit,
                         uint32_t slice);

#endif
