/* Parameters: three calls per unit, so that replicas, ZeRO-3 and offload differ only behind
 * these names.
 *
 *   gather   start bringing the unit here          (no-op for replicas)
 *   get      wait for it; the pointer is valid     until the matching release
 *   release  the buffer may be reused
 *
 * `params` holds what the step computes with, in the compute type, unit-major. The optimizer
 * works on a master copy in fp32. In fp32 the parameters are their own master; otherwise
 * `master` is slice-major like the moments (optim.h), and an update writes both. Main
 * thread. */
#ifndef BALLAST_WORKER_STATE_PARAMS_H
#define BALLAST_WORKER_STATE_PARAMS_H

#include "worker/memory/region.h"
#include "worker/state/units.h"

struct params {
    const struct units *units; /* borrowed */
    enum dtype dtype;          /* compute type */
    struct region region;      /* unit-major, all units, in the compute type */
    struct region master;      /* fp32, slice-major; not there when dtype is fp32 */
    size_t block_bytes;        /* of master: one rank's slices, rounded to granules */
};

/* Commits the regions; contents are zero. */
enum status params_init(struct params *params, const struct units *units, enum dtype dtype,
                        struct device *device, struct ledger *ledger,
                        struct failure *why) MUST_CHECK;
void params_fini(struct params *params);
/* Seeded start values; a value depends on seed, tensor and element only, not on the layout. */
void params_seed(struct params *params, struct ops *ops, uint64_t seed);

void params_gather(struct params *params, uint32_t unit);
/* The unit in the compute type; element `offset` of it. */
void *params_get(struct params *params, uint32_t unit, size_t offset);
void params_release(struct params *params, uint32_t unit);

/* This unit's master copy of slice `slice`, fp32, slice_elems long. */
float *params_slice(struct params *params, uint32_t unit, uint32_t slice);
/* The same elements in the compute type; NULL when the master is the parameters. */
void *params_copy(struct params *params, uint32_t unit, uint32_t slice);
/* Make the compute copies again from the master, after it was loaded. */
void params_refresh(struct params *params, struct ops *ops);

#endif
