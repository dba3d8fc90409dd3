/* A device without memory: addresses are numbers, commits are counted. */
#include "kernels/device.h"

/* Far from anything mapped, so that a stray access is a fault and not a surprise. */
static const uintptr_t first_address = (uintptr_t)1 << 46;

static enum status dry_reserve(struct device *device, size_t bytes, void **out_base,
                               struct failure *why)
{
    (void)why;
    uintptr_t next = device->self == NULL ? first_address : (uintptr_t)device->self;
    *out_base = (void *)next;
    device->self = (void *)(next + device_round(device, bytes) + device->granule_bytes);
    return STATUS_OK;
}

static void dry_unreserve(struct device *device, void *base, size_t bytes)
{
    (void)device;
    (void)base;
    (void)bytes;
}

static enum status dry_commit(struct device *device, void *base, size_t offset, size_t bytes,
                              struct failure *why)
{
    (void)base;
    (void)offset;
    const uint64_t held = atomic_load(&device->committed_bytes);
    if (device->capacity_bytes != 0 && bytes > device->capacity_bytes - held) {
        return fail(why, STATUS_OUT_OF_MEMORY,
                    "device memory: %zu bytes asked, %llu held, limit %llu (device_memory)", bytes,
                    (unsigned long long)held, (unsigned long long)device->capacity_bytes);
    }
    atomic_store(&device->committed_bytes, held + bytes);
    return STATUS_OK;
}

static void dry_decommit(struct device *device, void *base, size_t offset, size_t bytes)
{
    (void)base;
    (void)offset;
    atomic_fetch_sub(&device->committed_bytes, bytes);
}

static size_t dry_resident(struct device *device, const void *base, size_t bytes)
{
    (void)device;
    (void)base;
    (void)bytes;
    return 0;
}

static enum status dry_copy(struct device *device, void *dst, const void *src, size_t bytes,
                            enum copy_kind kind, struct ticket *out_ticket, struct failure *why)
{
    (void)device;
    (void)dst;
    (void)src;
    (void)bytes;
    (void)kind;
    (void)why;
    out_ticket->serial = 0;
    return STATUS_OK;
}

static enum status dry_wait(struct device *device, struct ticket *ticket, struct failure *why)
{
    (void)device;
    (void)why;
    ticket->serial = 0;
    return STATUS_OK;
}

static void dry_free(struct device *device)
{
    device->self = NULL;
}

static const struct device_table dry_table = {
    .reserve = dry_reserve,
    .unreserve = dry_unreserve,
    .commit = dry_commit,
    .decommit = dry_decommit,
    .resident = dry_resident,
    .copy = dry_copy,
    .wait = dry_wait,
    .free = dry_free,
};

void dry_device_init(struct device *device, uint64_t capacity_bytes, size_t granule_bytes)
{
    *device = (struct device){
        .table = &dry_table,
        .kind = DEVICE_DRY,
        .capacity_bytes = capacity_bytes,
        .granule_bytes = granule_bytes,
    };
}
