/* Regions: the named ranges of device memory that live longer than a step.
 *
 * A region reserves address space once, commits and releases granules, and tells the ledger what is
 * in use. "Used" is what the contents need, to the byte; "committed" is what
 * the device gave, rounded to granules. Main thread. */
#ifndef BALLAST_WORKER_MEMORY_REGION_H
#define BALLAST_WORKER_MEMORY_REGION_H

#include <stddef.h>
#include <stdint.h>
#include "kernels/device.h"
#include "proto/account.h"
#include "worker/memory/ledger.h"

/* Bytes [from, to) of each of the blocks first, first+1, ..., first+n-1, which are `stride` bytes
 * long. All multiples of the granule. n = 0: nothing. */
struct extent {
    size_t stride, first, n;
    size_t from, to;
};
size_t extent_bytes(const struct extent *extent);
/* Bytes of `wanted` that `held` does not have. Of one region: equal strides, unless one is empty. */
size_t extent_missing(const struct extent *held, const struct extent *wanted);

struct region {
    const char *name;       /* static text */
    enum tier tier;         /* device, unless set after region_init() */
    enum category category; /* ignored for the workspace: its buffers have their own */
    struct device *device;  /* borrowed */
    struct ledger *ledger;  /* borrowed */
    char *base;             /* owned address space */
    size_t reserved_bytes;
    size_t used_bytes;      /* counted in the ledger */
    size_t committed_bytes; /* a prefix, unless committed by blocks */
    struct extent extent;   /* of a region that is committed by blocks */
};

/* Reserve address space; nothing is committed. */
enum status region_init(struct region *region, const char *name, enum category category,
                        struct device *device, struct ledger *ledger, size_t reserve_bytes,
                        struct failure *why) MUST_CHECK;
void region_fini(struct region *region);

/* Make the first `bytes` of the region usable, growing or shrinking its committed prefix. Consults
 * fault point `commit`. On failure nothing has changed. */
enum status region_resize(struct region *region, size_t bytes, struct failure *why) MUST_CHECK;
/* Give back everything above the first `bytes`; cannot fail. */
void region_shrink(struct region *region, size_t bytes);
/* ---- by blocks: a region is used by these or by the calls above, not by both ---- */

/* Commit what of `wanted` is missing; what is held stays. Consults fault point `commit` when
 * something is missing. On failure nothing has changed. */
enum status region_acquire(struct region *region, const struct extent *wanted,
                           struct failure *why) MUST_CHECK;
/* After an acquire: give back what is not of `wanted`, which is held from now on. */
void region_settle(struct region *region, const struct extent *wanted);
/* After an acquire: give back what it brought. */
void region_revert(struct region *region, const struct extent *wanted);

/* Tell the ledger how many bytes the contents use. */
void region_use(struct region *region, size_t bytes);
/* What the operating system says is really there. */
size_t region_resident(const struct region *region);

#endif
