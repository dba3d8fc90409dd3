/* Regions over a device. See region.h. */
#include "worker/memory/region.h"
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/units.h"

enum status region_init(struct region *region, const char *name, enum category category,
                        struct device *device, struct ledger *ledger, size_t reserve_bytes,
                        struct failure *why)
{
    void *base = NULL;
    const size_t bytes = reserve_bytes == 0 ? 1 : reserve_bytes;
    const enum status status = device->table->reserve(device, bytes, &base, why);
    if (status != STATUS_OK) {
        (void)fail_within(why, "region %s", name);
        return status;
    }
    *region = (struct region){
        .name = name,
        .category = category,
        .device = device,
        .ledger = ledger,
        .base = base,
        .reserved_bytes = device_round(device, bytes),
    };
    return STATUS_OK;
}

void region_fini(struct region *region)
{
    if (region->base == NULL) {
        return;
    }
    region_use(region, 0);
    if (region->extent.n > 0) {
        region_settle(region, &(struct extent){0});
    }
    if (region->committed_bytes > 0) {
        region->device->table->decommit(region->device, region->base, 0, region->committed_bytes);
    }
    region->device->table->unreserve(region->device, region->base, region->reserved_bytes);
    *region = (struct region){0};
}

enum status region_resize(struct region *region, size_t bytes, struct failure *why)
{
    const size_t wanted = device_round(region->device, bytes);
    const size_t held = region->committed_bytes;
    /* A rehearsal commits nothing, so it must not use up a fault that a real commit is to meet. */
    if (region->device->kind != DEVICE_DRY && fault_fires(FAULT_COMMIT)) {
        return fail(why, STATUS_OUT_OF_MEMORY,
                    "region %s: %zu bytes asked, %zu held: fault on purpose", region->name,
                    wanted > held ? wanted - held : 0, held);
    }
    if (wanted > region->reserved_bytes) {
        return fail(why, STATUS_OUT_OF_MEMORY, "region %s: %zu bytes asked, %zu reserved",
                    region->name, wanted, region->reserved_bytes);
    }
    if (wanted > held) {
        const enum status status = region->device->table->commit(region->device, region->base, held,
                                                                 wanted - held, why);
        if (status != STATUS_OK) {
            (void)fail_within(why, "region %s", region->name);
            return status;
        }
        region->committed_bytes = wanted;
    } else {
        region_shrink(region, wanted);
    }
    return STATUS_OK;
}

void region_shrink(struct region *region, size_t bytes)
{
    const size_t wanted = device_round(region->device, bytes);
    const size_t held = region->committed_bytes;
    if (wanted < held) {
        region->device->table->decommit(region->device, region->base, wanted, held - wanted);
        region->committed_bytes = wanted;
    }
}

/* ---- by blocks ---- */

struct span {
    size_t from, to; /* bytes of the region; equal: none */
};

static struct span span_of(const struct extent *extent, size_t block)
{
    if (block < extent->first || block >= extent->first + extent->n) {
        return (struct span){0};
    }
    return (struct span){block * extent->stride + extent->from,
                         block * extent->stride + extent->to};
}

/* What of `a` is not in `b`: at most a piece before it and one behind. */
static size_t without(struct span a, struct span b, struct span pieces[2])
{
    if (b.from >= b.to || b.to <= a.from || b.from >= a.to) {
        pieces[0] = a;
        return a.from < a.to ? 1 : 0;
    }
    size_t n = 0;
    if (a.from < b.from) {
        pieces[n++] = (struct span){a.from, b.from};
    }
    if (b.to < a.to) {
        pieces[n++] = (struct span){b.to, a.to};
    }
    return n;
}

size_t extent_bytes(const struct extent *extent)
{
    return extent->n * (extent->to - extent->from);
}

size_t extent_missing(const struct extent *held, const struct extent *wanted)
{
    size_t bytes = 0;
    for (size_t block = wanted->first; block < wanted->first + wanted->n; block++) {
        struct span pieces[2];
        const size_t n = without(span_of(wanted, block), span_of(held, block), pieces);
        for (size_t i = 0; i < n; i++) {
            bytes += pieces[i].to - pieces[i].from;
        }
    }
    return bytes;
}

/* Decommit what of `from`'s first n blocks is not in `but`. */
static void release_blocks(struct region *region, const struct extent *from, size_t n_blocks,
                           const struct extent *but)
{
    for (size_t block = from->first; block < from->first + n_blocks; block++) {
        struct span pieces[2];
        const size_t n = without(span_of(from, block), span_of(but, block), pieces);
        for (size_t i = 0; i < n; i++) {
            const size_t bytes = pieces[i].to - pieces[i].from;
            region->device->table->decommit(region->device, region->base, pieces[i].from, bytes);
            region->committed_bytes -= bytes;
        }
    }
}

/* The missing pieces of one block; all or none. */
static enum status acquire_block(struct region *region, const struct extent *wanted, size_t block,
                                 struct failure *why)
{
    struct span pieces[2];
    const size_t n = without(span_of(wanted, block), span_of(&region->extent, block), pieces);
    for (size_t i = 0; i < n; i++) {
        const size_t bytes = pieces[i].to - pieces[i].from;
        const enum status status = region->device->table->commit(region->device, region->base,
                                                                 pieces[i].from, bytes, why);
        if (status != STATUS_OK) {
            if (i == 1) {
                region->device->table->decommit(region->device, region->base, pieces[0].from,
                                                pieces[0].to - pieces[0].from);
                region->committed_bytes -= pieces[0].to - pieces[0].from;
            }
            return status;
        }
        region->committed_bytes += bytes;
    }
    return STATUS_OK;
}

enum status region_acquire(struct region *region, const struct extent *wanted, struct failure *why)
{
    const size_t missing = extent_missing(&region->extent, wanted);
    if (missing == 0) {
        return STATUS_OK;
    }
    const size_t end = (wanted->first + wanted->n - 1) * wanted->stride + wanted->to;
    if (region->device->kind != DEVICE_DRY && end > region->reserved_bytes) {
        return fail(why, STATUS_OUT_OF_MEMORY, "region %s: %zu bytes asked, %zu reserved",
                    region->name, end, region->reserved_bytes);
    }
    if (region->device->kind != DEVICE_DRY && fault_fires(FAULT_COMMIT)) {
        return fail(why, STATUS_OUT_OF_MEMORY,
                    "region %s: %zu bytes asked, %zu held: fault on purpose", region->name, missing,
                    region->committed_bytes);
    }
    for (size_t i = 0; i < wanted->n; i++) {
        const enum status status = acquire_block(region, wanted, wanted->first + i, why);
        if (status != STATUS_OK) {
            release_blocks(region, wanted, i, &region->extent);
            (void)fail_within(why, "region %s", region->name);
            return status;
        }
    }
    return STATUS_OK;
}

void region_settle(struct region *region, const struct extent *wanted)
{
    release_blocks(region, &region->extent, region->extent.n, wanted);
    region->extent = *wanted;
}

void region_revert(struct region *region, const struct extent *wanted)
{
    release_blocks(region, wanted, wanted->n, &region->extent);
}

void region_use(struct region *region, size_t bytes)
{
    if (region->tier == TIER_DEVICE) {
        ledger_region(region->ledger, region->category, region->used_bytes, bytes);
    } else {
        ledger_sub(region->ledger, region->tier, region->category, region->used_bytes);
        ledger_add(region->ledger, region->tier, region->category, bytes);
    }
    region->used_bytes = bytes;
}

size_t region_resident(const struct region *region)
{
    return region->device->table->resident(region->device, region->base, region->committed_bytes);
}
