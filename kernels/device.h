/* A device: memory that is committed and released in granules, copies, streams.
 *
 * `cpu` is host memory with a set capacity that behaves as a device; `dry` has no memory
 * and only counts. `cuda` maps GPU memory behind the same table. The device
 * does not know what the bytes are for: worker/memory/region.h does. Main thread only,
 * except the counters, which any thread may read. */
#ifndef BALLAST_KERNELS_DEVICE_H
#define BALLAST_KERNELS_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"

enum { DEVICE_GRANULE_BYTES = 2 * 1024 * 1024 };

enum device_kind { DEVICE_CPU, DEVICE_DRY, DEVICE_CUDA };

enum copy_kind { COPY_WITHIN, COPY_TO_HOST, COPY_FROM_HOST };

/* An asynchronous call in flight. Buffers named in the call live until the ticket is waited
 * for, in program order. Zero: nothing in flight (every CPU call).
 *
 * A wait orders: operations called after it see the result. It holds the host up only where the
 * host itself is to read (COPY_TO_HOST). */
struct ticket {
    uint64_t serial;
};

struct device {
    const struct device_table *table;
    enum device_kind kind;
    uint64_t capacity_bytes;          /* what regions may commit in all */
    const char *limit;                /* the setting that says so; NULL: device_memory */
    size_t granule_bytes;
    _Atomic uint64_t committed_bytes; /* by all regions, rounded to granules */
    size_t pinned_bytes;              /* host memory the device keeps for its copies; 0: none */
    void *self;                       /* owned by the implementation */
};

struct device_table {
    /* Reserve address space; no memory is taken. `bytes` is rounded up to granules. */
    enum status (*reserve)(struct device *device, size_t bytes, void **out_base,
                           struct failure *why);
    void (*unreserve)(struct device *device, void *base, size_t bytes);
    /* Back [offset, offset+bytes) of a reservation with memory, populated, so that no later touch
     * can fail. Multiples of the granule. OUT_OF_MEMORY names asked, held and limit. Does
     * not change the counters on failure. */
    enum status (*commit)(struct device *device, void *base, size_t offset, size_t bytes,
                          struct failure *why);
    /* Give the memory back to the system. */
    void (*decommit)(struct device *device, void *base, size_t offset, size_t bytes);
    /* Bytes of the range that are really backed, as the operating system or driver sees it. */
    size_t (*resident)(struct device *device, const void *base, size_t bytes);
    /* Any host memory will do. With COPY_FROM_HOST the source may be changed as soon as the
     * call returns; with COPY_TO_HOST dst is valid after the wait. In order with the operations
     * around it. */
    enum status (*copy)(struct device *device, void *dst, const void *src, size_t bytes,
                        enum copy_kind kind, struct ticket *out_ticket, struct failure *why);
    enum status (*wait)(struct device *device, struct ticket *ticket, struct failure *why);
    void (*free)(struct device *device);
};

/* Host memory as a device. capacity_bytes 0: no limit but the machine's. */
enum status cpu_device_init(struct device *device, uint64_t capacity_bytes,
                            struct failure *why) MUST_CHECK;
/* No memory at all: addresses are numbers, commits only count against the capacity. */
void dry_device_init(struct device *device, uint64_t capacity_bytes, size_t granule_bytes);
void device_fini(struct device *device);

/* bytes rounded up to the device's granule. */
size_t device_round(const struct device *device, size_t bytes);

#endif
