/* Host memory that behaves as a device: a set capacity, commits in granules, real release.
 *
 * Address space is reserved without memory behind it. A commit checks the capacity, asks
 * the kernel to populate the pages (so that a later touch cannot fail), and a release
 * gives them back at once. Main thread, except the counter. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "kernels/device.h"
#include "proto/base/units.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static enum status cpu_reserve(struct device *device, size_t bytes, void **out_base,
                               struct failure *why)
{
    void *base = mmap(NULL, device_round(device, bytes), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return fail(why, STATUS_OUT_OF_MEMORY, "cannot reserve %zu bytes of address space: %s",
                    bytes, strerror(errno));
    }
    *out_base = base;
    return STATUS_OK;
}

static void cpu_unreserve(struct device *device, void *base, size_t bytes)
{
    munmap(base, device_round(device, bytes));
}

/* Kernels before 5.14 do not know MADV_POPULATE_WRITE: touch every page instead. */
static void touch_pages(char *base, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t at = 0; at < bytes; at += page) {
        ((volatile char *)base)[at] = 0;
    }
}

static enum status populate(char *base, size_t bytes)
{
    while (madvise(base, bytes, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINVAL) {
            touch_pages(base, bytes);
            return STATUS_OK;
        }
        if (errno != EINTR && errno != EAGAIN) {
            return status_from_errno(errno);
        }
    }
    return STATUS_OK;
}

static enum status cpu_commit(struct device *device, void *base, size_t offset, size_t bytes,
                              struct failure *why)
{
    const uint64_t held = atomic_load(&device->committed_bytes);
    if (device->capacity_bytes != 0 && bytes > device->capacity_bytes - held) {
        return fail(why, STATUS_OUT_OF_MEMORY,
                    "%s memory: %zu bytes asked, %llu held, limit %llu (%s)",
                    device->limit == NULL ? "device" : "host", bytes, (unsigned long long)held,
                    (unsigned long long)device->capacity_bytes,
                    device->limit == NULL ? "device_memory" : device->limit);
    }
    char *start = (char *)base + offset;
    if (mprotect(start, bytes, PROT_READ | PROT_WRITE) != 0) {
        return fail(why, STATUS_OUT_OF_MEMORY, "cannot map %zu bytes: %s", bytes, strerror(errno));
    }
    if (populate(start, bytes) != STATUS_OK) {
        const int error = errno;
        madvise(start, bytes, MADV_DONTNEED);
        mprotect(start, bytes, PROT_NONE);
        return fail(why, STATUS_OUT_OF_MEMORY, "the machine has no %zu bytes left: %s", bytes,
                    strerror(error));
    }
    atomic_store(&device->committed_bytes, held + bytes);
    return STATUS_OK;
}

static void cpu_decommit(struct device *device, void *base, size_t offset, size_t bytes)
{
    char *start = (char *)base + offset;
    madvise(start, bytes, MADV_DONTNEED);
    mprotect(start, bytes, PROT_NONE);
    atomic_fetch_sub(&device->committed_bytes, bytes);
}

static size_t cpu_resident(struct device *device, const void *base, size_t bytes)
{
    (void)device;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char seen[512];
    size_t resident = 0;
    for (size_t at = 0; at < bytes; at += sizeof seen * page) {
        const size_t span = bytes - at < sizeof seen * page ? bytes - at : sizeof seen * page;
        /* mincore wants a non-const pointer though it only reads the page tables. */
        void *start = (void *)((uintptr_t)base + at);
        if (mincore(start, span, seen) != 0) {
            continue;
        }
        for (size_t i = 0; i < (span + page - 1) / page; i++) {
            resident += (seen[i] & 1u) != 0 ? page : 0;
        }
    }
    return resident;
}

static enum status cpu_copy(struct device *device, void *dst, const void *src, size_t bytes,
                            enum copy_kind kind, struct ticket *out_ticket, struct failure *why)
{
    (void)device;
    (void)kind;
    (void)why;
    memcpy(dst, src, bytes);
    out_ticket->serial = 0;
    return STATUS_OK;
}

static enum status cpu_wait(struct device *device, struct ticket *ticket, struct failure *why)
{
    (void)device;
    (void)why;
    ticket->serial = 0;
    return STATUS_OK;
}

static void cpu_free(struct device *device)
{
    (void)device;
}

static const struct device_table cpu_table = {
    .reserve = cpu_reserve,
    .unreserve = cpu_unreserve,
    .commit = cpu_commit,
    .decommit = cpu_decommit,
    .resident = cpu_resident,
    .copy = cpu_copy,
    .wait = cpu_wait,
    .free = cpu_free,
};

enum status cpu_device_init(struct device *device, uint64_t capacity_bytes, struct failure *why)
{
    (void)why;
    *device = (struct device){
        .table = &cpu_table,
        .kind = DEVICE_CPU,
        .capacity_bytes = capacity_bytes,
        .granule_bytes = DEVICE_GRANULE_BYTES,
    };
    return STATUS_OK;
}
