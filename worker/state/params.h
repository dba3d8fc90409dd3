/* Parameters: three calls per unit, so that replicas, ZeRO-3 and offload differ only behind
 * these names.
 *
 *   gather   start bringing the unit here          (no-op for replicas)
 *   get      wait for it; the pointer is valid     until the matching release
 *   release  the buffer may be reused
 *
 * fp32: the parameters are their own master copy. Main thread. */
#ifndef BALLAST_WORKER_STATE_PARAMS_H
#define BALLAST_WORKER_STATE_PARAMS_H

#include "worker/memory/region.h"
#include "worker/state/units.h"

struct params {
    const struct units *units; /* borrowed */
    struct region region;      /* unit-major, all units */
};

/* Commits the region; contents are zero. */
enum status params_init(struct params *params, const struct units *units, struct device *device,
                        struct ledger *ledger, struct failure *why) MUST_CHECK;
void params_fini(struct params *params);
/* Seeded start values; a value depends on seed, tensor and element only, not on the layout. */
void params_seed(struct params *params, struct ops *ops, uint64_t seed);

void params_gather(struct params *params, uint32_t unit);
float *params_get(struct params *params, uint32_t unit);
void params_release(struct params *params, uint32_t unit);

/* This unit's master copy of slice `slice`, fp32, slice_elems long. */
float *params_slice(struct params *params, uint32_t unit, uint32_t slice);

#endif
