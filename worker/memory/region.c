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

void region_use(struct region *region, size_t bytes)
{
    ledger_region(region->ledger, region->category, region->used_bytes, bytes);
    region->used_bytes = bytes;
}

size_t region_resident(const struct region *region)
{
    return region->device->table->resident(region->device, region->base, region->committed_bytes);
}
