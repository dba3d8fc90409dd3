/* Parameters: a few calls per unit, so that replicas, ZeRO-3 and offload differ only behind
 * these names.
 *
 *   prefetch  start bringing the unit here              (no-op for replicas)
 *   gather    see it here; the pointer is valid         until the matching release
 *   get       the pointer
 *   release   the buffer may be reused
 *
 * The optimizer works on a master copy in fp32. In fp32 the parameters are their own master;
 * otherwise an update writes both. Under stage 3 a unit's buffer is in the workspace from its
 * prefetch to its last release. A collective's failure is kept until params_check(). Main
 * thread. */
#ifndef BALLAST_WORKER_STATE_PARAMS_H
#define BALLAST_WORKER_STATE_PARAMS_H

#include "worker/memory/workspace.h"
#include "worker/state/state.h"

/* A unit of which this rank holds a slice only, while it is whole. */
struct gathered {
    struct buffer buffer; /* data NULL: not here */
    struct ticket ticket; /* of its gathering; waited for by gather */
    uint32_t users;
};

struct params {
    struct state *state;         /* borrowed, with what follows */
    struct workspace *workspace;
    struct ops *ops;
    struct comm *comm;
    struct gathered *gathered;   /* owned, one a unit */
    struct failure error;        /* the first since params_check() */
};

enum status params_init(struct params *params, struct state *state, struct workspace *workspace,
                        struct ops *ops, struct comm *comm, struct failure *why) MUST_CHECK;
void params_fini(struct params *params);
/* Seeded start values; a value depends on seed, tensor and element only, not on the layout.
 * Collective. */
enum status params_seed(struct params *params, uint64_t seed, struct failure *why) MUST_CHECK;

void params_prefetch(struct params *params, uint32_t unit);
void params_gather(struct params *params, uint32_t unit);
/* Element `offset` of the unit in the compute type. */
void *params_get(struct params *params, uint32_t unit, size_t offset);
void params_release(struct params *params, uint32_t unit);
/* A step that was given up: the workspace's buffers are gone. */
void params_abandon(struct params *params);
/* What went wrong in a call that cannot say so. */
enum status params_check(struct params *params, struct failure *why) MUST_CHECK;

/* This unit's master copy of slice `slice`, fp32, slice_elems long. */
float *params_slice(struct params *params, uint32_t unit, uint32_t slice);
/* The same elements in the compute type; NULL when the master is the parameters. */
void *params_copy(struct params *params, uint32_t unit, uint32_t slice);
/* Make the compute copies again from the master, after it was loaded: of the slices whose master
 * is here; the others' come from their ranks. Collective. */
enum status params_refresh(struct params *params, struct failure *why) MUST_CHECK;
/* After an update of own slices: the others' slices of the whole parameters. Collective; nothing
 * where every rank updates all. */
enum status params_share(struct params *params, struct failure *why) MUST_CHECK;

#endif
