/* The GPU as a device: reserved address space, memory committed and released in granules.
 *
 * A reservation keeps a table of its mappings, one entry a granule: where a handle starts, how
 * many granules it spans, which are in use. Runs of 32 MiB are one handle, since a call of the
 * driver costs the same for any size; one that is cut later is replaced by small handles. Main
 * thread. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/cuda_device.h"
#include "proto/base/heap.h"

enum {
    LARGE_SPAN = 16, /* granules of a large handle */
    LARGE_BYTES = LARGE_SPAN * DEVICE_GRANULE_BYTES,
    ENTRY_POINTS_OF = 12000 /* the CUDA version whose forms of the driver's calls are meant */
};

struct cuda_reservation {
    struct cuda_reservation *next;
    unsigned char *base;
    size_t n; /* granules */
    /* By granule. A handle is noted where it starts, with its span; `live` granules are
     * committed. A mapped granule that is not live belongs to a handle that could not be cut. */
    CUmemGenericAllocationHandle *handles; /* owned, and spans and live */
    unsigned char *spans;
    bool *live;
};

/* ---- errors ---- */

enum status cuda_failed(cudaError_t error, const char *what, struct failure *why)
{
    return fail(why, error == cudaErrorMemoryAllocation ? STATUS_OUT_OF_MEMORY : STATUS_IO,
                "%s: CUDA says %s (%d): %s", what, cudaGetErrorName(error), (int)error,
                cudaGetErrorString(error));
}

void cuda_note(struct cuda_device *cuda, cudaError_t error, const char *what)
{
    if (error != cudaSuccess && cuda->error.status == STATUS_OK) {
        (void)cuda_failed(error, what, &cuda->error);
    }
}

static const char *driver_text(const struct cuda_device *cuda, CUresult error)
{
    const char *text = NULL;
    if (cuda->driver.error_name(error, &text) != CUDA_SUCCESS || text == NULL) {
        return "an unknown error";
    }
    return text;
}

static enum status driver_failed(const struct cuda_device *cuda, CUresult error, const char *what,
                                 struct failure *why)
{
    const char *text = NULL;
    if (cuda->driver.error_text(error, &text) != CUDA_SUCCESS || text == NULL) {
        text = "no text";
    }
    return fail(why, error == CUDA_ERROR_OUT_OF_MEMORY ? STATUS_OUT_OF_MEMORY : STATUS_IO,
                "%s: the driver says %s (%d): %s", what, driver_text(cuda, error), (int)error,
                text);
}

/* Where the caller cannot be told: kept for ops->check(). */
static void note_driver(struct cuda_device *cuda, CUresult error, const char *what)
{
    if (error != CUDA_SUCCESS && cuda->error.status == STATUS_OK) {
        (void)driver_failed(cuda, error, what, &cuda->error);
    }
}

/* ---- mappings ---- */

static CUmemAllocationProp allocation_of(const struct cuda_device *cuda)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->gpu.index},
    };
}

static CUdeviceptr address_of(const unsigned char *base, size_t granule)
{
    return (CUdeviceptr)(uintptr_t)(base + granule * DEVICE_GRANULE_BYTES);
}

static CUresult set_access(const struct cuda_device *cuda, CUdeviceptr at, size_t bytes)
{
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->gpu.index},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    return cuda->driver.set_access(at, bytes, &access, 1);
}

static CUresult create(const struct cuda_device *cuda, size_t span,
                       CUmemGenericAllocationHandle *out_handle)
{
    const CUmemAllocationProp prop = allocation_of(cuda);
    return cuda->driver.create(out_handle, span * DEVICE_GRANULE_BYTES, &prop, 0);
}

/* Back [granule, granule + span) with one new handle. Not accessible yet. */
static CUresult map_new(const struct cuda_device *cuda, struct cuda_reservation *reservation,
                        size_t granule, size_t span)
{
    CUmemGenericAllocationHandle handle;
    CUresult result = create(cuda, span, &handle);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = cuda->driver.map(address_of(reservation->base, granule), span * DEVICE_GRANULE_BYTES,
                              0, handle, 0);
    if (result != CUDA_SUCCESS) {
        cuda->driver.release(handle);
        return result;
    }
    reservation->handles[granule] = handle;
    reservation->spans[granule] = (unsigned char)span;
    return CUDA_SUCCESS;
}

static void unmap(struct cuda_device *cuda, struct cuda_reservation *reservation, size_t granule)
{
    const size_t bytes = reservation->spans[granule] * (size_t)DEVICE_GRANULE_BYTES;
    note_driver(cuda, cuda->driver.unmap(address_of(reservation->base, granule), bytes),
                "cuMemUnmap");
    note_driver(cuda, cuda->driver.release(reservation->handles[granule]), "cuMemRelease");
    reservation->spans[granule] = 0;
}

/* The granule at which the handle that backs `granule` starts; SIZE_MAX: it is not backed. */
static size_t start_of(const struct cuda_reservation *reservation, size_t granule)
{
    for (size_t back = 0; back < LARGE_SPAN && back <= granule; back++) {
        const size_t span = reservation->spans[granule - back];
        if (span != 0) {
            return span > back ? granule - back : SIZE_MAX;
        }
    }
    return SIZE_MAX;
}

static size_t n_live(const struct cuda_reservation *reservation, size_t start)
{
    size_t n = 0;
    for (size_t i = 0; i < reservation->spans[start]; i++) {
        n += reservation->live[start + i];
    }
    return n;
}

/* ---- cutting a large handle ---- */

/* Small handles for the live granules of the large one at `start`; all or none. */
static bool make_pieces(struct cuda_device *cuda, const struct cuda_reservation *reservation,
                        size_t start, CUmemGenericAllocationHandle pieces[LARGE_SPAN])
{
    for (size_t i = 0; i < LARGE_SPAN; i++) {
        if (!reservation->live[start + i] || create(cuda, 1, &pieces[i]) == CUDA_SUCCESS) {
            continue;
        }
        while (i-- > 0) {
            if (reservation->live[start + i]) {
                cuda->driver.release(pieces[i]);
            }
        }
        return false;
    }
    return true;
}

/* Memory that holds the live granules while their place changes hands. */
struct shelter {
    CUdeviceptr base;
    CUmemGenericAllocationHandle handle;
    size_t bytes;
};

static bool open_shelter(struct cuda_device *cuda, size_t span, struct shelter *out)
{
    const struct cuda_driver *driver = &cuda->driver;
    out->bytes = span * DEVICE_GRANULE_BYTES;
    if (driver->reserve(&out->base, out->bytes, DEVICE_GRANULE_BYTES, 0, 0) != CUDA_SUCCESS) {
        return false;
    }
    if (create(cuda, span, &out->handle) != CUDA_SUCCESS) {
        driver->unreserve(out->base, out->bytes);
        return false;
    }
    if (driver->map(out->base, out->bytes, 0, out->handle, 0) != CUDA_SUCCESS) {
        driver->release(out->handle);
        driver->unreserve(out->base, out->bytes);
        return false;
    }
    note_driver(cuda, set_access(cuda, out->base, out->bytes), "cuMemSetAccess");
    return true;
}

static void close_shelter(struct cuda_device *cuda, const struct shelter *shelter)
{
    note_driver(cuda, cuda->driver.unmap(shelter->base, shelter->bytes), "cuMemUnmap");
    note_driver(cuda, cuda->driver.release(shelter->handle), "cuMemRelease");
    note_driver(cuda, cuda->driver.unreserve(shelter->base, shelter->bytes), "cuMemAddressFree");
}

/* Copy the live granules of [start, start + LARGE_SPAN) into the shelter, or back; the host
 * waits. */
static void move(struct cuda_device *cuda, const struct cuda_reservation *reservation, size_t start,
                 const struct shelter *shelter, bool back)
{
    unsigned char *sheltered = (unsigned char *)(uintptr_t)shelter->base;
    for (size_t i = 0; i < LARGE_SPAN; i++) {
        if (!reservation->live[start + i]) {
            continue;
        }
        unsigned char *place = reservation->base + (start + i) * DEVICE_GRANULE_BYTES;
        cuda_note(cuda,
                  cudaMemcpyAsync(back ? place : sheltered, back ? sheltered : place,
                                  DEVICE_GRANULE_BYTES, cudaMemcpyDeviceToDevice,
                                  cuda->streams[STREAM_COMPUTE]),
                  "moving memory");
        sheltered += DEVICE_GRANULE_BYTES;
    }
    struct failure why = {0};
    if (cuda_wait_stream(cuda, STREAM_COMPUTE, "moving memory", &why) != STATUS_OK &&
        cuda->error.status == STATUS_OK) {
        cuda->error = why;
    }
}

/* Replace the large handle at `start` by small ones for what is live. Where there is no memory for
 * them it stays as it is, and resident() says so. */
static void cut(struct cuda_device *cuda, struct cuda_reservation *reservation, size_t start)
{
    CUmemGenericAllocationHandle pieces[LARGE_SPAN] = {0};
    struct shelter shelter;
    if (!make_pieces(cuda, reservation, start, pieces)) {
        return;
    }
    if (!open_shelter(cuda, n_live(reservation, start), &shelter)) {
        for (size_t i = 0; i < LARGE_SPAN; i++) {
            if (reservation->live[start + i]) {
                cuda->driver.release(pieces[i]);
            }
        }
        return;
    }
    move(cuda, reservation, start, &shelter, false);
    unmap(cuda, reservation, start);
    for (size_t i = 0; i < LARGE_SPAN; i++) {
        if (!reservation->live[start + i]) {
            continue;
        }
        const CUdeviceptr at = address_of(reservation->base, start + i);
        note_driver(cuda, cuda->driver.map(at, DEVICE_GRANULE_BYTES, 0, pieces[i], 0), "cuMemMap");
        note_driver(cuda, set_access(cuda, at, DEVICE_GRANULE_BYTES), "cuMemSetAccess");
        reservation->handles[start + i] = pieces[i];
        reservation->spans[start + i] = 1;
    }
    move(cuda, reservation, start, &shelter, true);
    close_shelter(cuda, &shelter);
}

/* Give back every handle in the range that nobody uses; what is cut gets smaller handles. */
static void release_range(struct cuda_device *cuda, struct cuda_reservation *reservation,
                          size_t first, size_t n)
{
    /* Whole ones first: cutting needs memory. */
    for (size_t i = first; i < first + n; i++) {
        const size_t start = start_of(reservation, i);
        if (start != SIZE_MAX && n_live(reservation, start) == 0) {
            unmap(cuda, reservation, start);
        }
    }
    for (size_t i = first; i < first + n; i++) {
        const size_t start = start_of(reservation, i);
        if (start != SIZE_MAX && n_live(reservation, start) < reservation->spans[start]) {
            cut(cuda, reservation, start);
            i = start + LARGE_SPAN - 1;
        }
    }
}

/* ---- the table ---- */

static struct cuda_reservation *find(const struct cuda_device *cuda, const void *base)
{
    const unsigned char *at = base;
    struct cuda_reservation *reservation = cuda->reservations;
    while (reservation != NULL &&
           (at < reservation->base ||
            at >= reservation->base + reservation->n * DEVICE_GRANULE_BYTES)) {
        reservation = reservation->next;
    }
    assert(reservation != NULL); /* only what was reserved is asked about */
    return reservation;
}

static void free_table(struct cuda_reservation *reservation)
{
    if (reservation != NULL) {
        heap_free(reservation->live);
        heap_free(reservation->spans);
        heap_free(reservation->handles);
        heap_free(reservation);
    }
}

static struct cuda_reservation *new_table(size_t n)
{
    struct cuda_reservation *reservation = heap_calloc(1, sizeof *reservation);
    if (reservation == NULL) {
        return NULL;
    }
    reservation->n = n;
    reservation->handles = heap_calloc(n, sizeof *reservation->handles);
    reservation->spans = heap_calloc(n, sizeof *reservation->spans);
    reservation->live = heap_calloc(n, sizeof *reservation->live);
    if (reservation->handles == NULL || reservation->spans == NULL || reservation->live == NULL) {
        free_table(reservation);
        return NULL;
    }
    return reservation;
}

static enum status reserve(struct device *device, size_t bytes, void **out_base,
                           struct failure *why)
{
    struct cuda_device *cuda = cuda_of(device);
    const size_t rounded = device_round(device, bytes);
    struct cuda_reservation *reservation = new_table(rounded / DEVICE_GRANULE_BYTES);
    if (reservation == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY,
                    "no host memory for the table of a reservation of %zu bytes", rounded);
    }
    CUdeviceptr base = 0;
    const CUresult result = cuda->driver.reserve(&base, rounded, DEVICE_GRANULE_BYTES, 0, 0);
    if (result != CUDA_SUCCESS) {
        free_table(reservation);
        (void)driver_failed(cuda, result, "cuMemAddressReserve", why);
        return fail_within(why, "cannot reserve %zu bytes of the GPU's address space", rounded);
    }
    reservation->base = (unsigned char *)(uintptr_t)base;
    reservation->next = cuda->reservations;
    cuda->reservations = reservation;
    *out_base = reservation->base;
    return STATUS_OK;
}

static void unreserve(struct device *device, void *base, size_t bytes)
{
    struct cuda_device *cuda = cuda_of(device);
    struct cuda_reservation *reservation = find(cuda, base);
    assert(reservation->base == base &&
           reservation->n * DEVICE_GRANULE_BYTES == device_round(device, bytes));
    for (size_t i = 0; i < reservation->n; i++) {
        if (reservation->spans[i] != 0) {
            unmap(cuda, reservation, i);
        }
    }
    note_driver(
        cuda,
        cuda->driver.unreserve((CUdeviceptr)(uintptr_t)base, reservation->n * DEVICE_GRANULE_BYTES),
        "cuMemAddressFree");
    struct cuda_reservation **link = &cuda->reservations;
    while (*link != reservation) {
        link = &(*link)->next;
    }
    *link = reservation->next;
    free_table(reservation);
}

/* Handles for the granules of [first, first + n) that have none. */
static CUresult map_range(struct cuda_device *cuda, struct cuda_reservation *reservation,
                          size_t first, size_t n)
{
    size_t from = first; /* mapped from here on, not accessible yet */
    CUresult result = CUDA_SUCCESS;
    for (size_t i = first; i < first + n && result == CUDA_SUCCESS;) {
        if (start_of(reservation, i) != SIZE_MAX) { /* of a handle that could not be cut */
            if (i > from) {
                result = set_access(cuda, address_of(reservation->base, from),
                                    (i - from) * DEVICE_GRANULE_BYTES);
            }
            from = ++i;
            continue;
        }
        size_t span = i % LARGE_SPAN == 0 && first + n - i >= LARGE_SPAN ? LARGE_SPAN : 1;
        for (size_t j = i; j < i + span; j++) {
            span = start_of(reservation, j) != SIZE_MAX ? 1 : span;
        }
        result = map_new(cuda, reservation, i, span);
        if (result == CUDA_ERROR_OUT_OF_MEMORY && span > 1) {
            span = 1; /* there may be no 32 MiB in one piece */
            result = map_new(cuda, reservation, i, span);
        }
        i += span;
    }
    if (result == CUDA_SUCCESS && from < first + n) {
        result = set_access(cuda, address_of(reservation->base, from),
                            (first + n - from) * DEVICE_GRANULE_BYTES);
    }
    return result;
}

static enum status commit_failed(const struct device *device, CUresult result, size_t bytes,
                                 struct failure *why)
{
    const struct cuda_device *cuda = cuda_of(device);
    size_t free_bytes = 0, total_bytes = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    return fail(why, result == CUDA_ERROR_OUT_OF_MEMORY ? STATUS_OUT_OF_MEMORY : STATUS_IO,
                "GPU %d has no %zu bytes left: %llu held by this run, limit %llu (device_memory), "
                "%zu free of %zu; the driver says %s (%d)",
                cuda->gpu.index, bytes, (unsigned long long)atomic_load(&device->committed_bytes),
                (unsigned long long)device->capacity_bytes, free_bytes, total_bytes,
                driver_text(cuda, result), (int)result);
}

static enum status commit(struct device *device, void *base, size_t offset, size_t bytes,
                          struct failure *why)
{
    struct cuda_device *cuda = cuda_of(device);
    struct cuda_reservation *reservation = find(cuda, base);
    assert(!cuda->in_body && offset % DEVICE_GRANULE_BYTES == 0 &&
           bytes % DEVICE_GRANULE_BYTES == 0);
    const uint64_t held = atomic_load(&device->committed_bytes);
    if (bytes > device->capacity_bytes - held) {
        return fail(why, STATUS_OUT_OF_MEMORY,
                    "device memory: %zu bytes asked, %llu held, limit %llu (device_memory)", bytes,
                    (unsigned long long)held, (unsigned long long)device->capacity_bytes);
    }
    if (bytes == 0) {
        return STATUS_OK;
    }
    const size_t first =
        (size_t)((unsigned char *)base + offset - reservation->base) / DEVICE_GRANULE_BYTES;
    const size_t n = bytes / DEVICE_GRANULE_BYTES;
    assert(first + n <= reservation->n);
    const CUresult result = map_range(cuda, reservation, first, n);
    /* What is committed starts from zero, as on the CPU. */
    const cudaError_t zeroed = result != CUDA_SUCCESS
                                   ? cudaSuccess
                                   : cudaMemsetAsync((unsigned char *)base + offset, 0, bytes,
                                                     cuda->streams[STREAM_COMPUTE]);
    if (result != CUDA_SUCCESS || zeroed != cudaSuccess) {
        const enum status status = result != CUDA_SUCCESS
                                       ? commit_failed(device, result, bytes, why)
                                       : cuda_failed(zeroed, "clearing new memory", why);
        release_range(cuda, reservation, first, n);
        return status;
    }
    memset(reservation->live + first, true, n);
    atomic_store(&device->committed_bytes, held + bytes);
    return STATUS_OK;
}

static void decommit(struct device *device, void *base, size_t offset, size_t bytes)
{
    struct cuda_device *cuda = cuda_of(device);
    struct cuda_reservation *reservation = find(cuda, base);
    assert(!cuda->in_body);
    atomic_fetch_sub(&device->committed_bytes, bytes);
    /* A captured graph may name these addresses. */
    for (struct cuda_ops *ops = cuda->ops; ops != NULL; ops = ops->next) {
        ops->base.body_forget(&ops->base);
    }
    const size_t first =
        (size_t)((unsigned char *)base + offset - reservation->base) / DEVICE_GRANULE_BYTES;
    const size_t n = bytes / DEVICE_GRANULE_BYTES;
    memset(reservation->live + first, false, n);
    struct failure why = {0};
    if (cuda_drain(cuda, &why) != STATUS_OK) {
        /* Something may still use it, and the run is about to end: leave it in place. */
        if (cuda->error.status == STATUS_OK) {
            cuda->error = why;
        }
        return;
    }
    release_range(cuda, reservation, first, n);
}

static size_t resident(struct device *device, const void *base, size_t bytes)
{
    const struct cuda_device *cuda = cuda_of(device);
    const struct cuda_reservation *reservation = find(cuda, base);
    const size_t first =
        (size_t)((const unsigned char *)base - reservation->base) / DEVICE_GRANULE_BYTES;
    const size_t n = device_round(device, bytes) / DEVICE_GRANULE_BYTES;
    size_t mapped = 0;
    for (size_t i = first; i < first + n && i < reservation->n; i++) {
        mapped += start_of(reservation, i) != SIZE_MAX;
    }
    return mapped * DEVICE_GRANULE_BYTES;
}

static void free_device(struct device *device)
{
    struct cuda_device *cuda = device == NULL ? NULL : cuda_of(device);
    if (cuda == NULL) {
        return;
    }
    assert(cuda->n_ops == 0); /* tables go first */
    struct failure why = {0};
    (void)(cuda_drain(cuda, &why) == STATUS_OK); /* whatever it says, this is the end */
    while (cuda->reservations != NULL) {
        struct cuda_reservation *reservation = cuda->reservations;
        unreserve(device, reservation->base, reservation->n * DEVICE_GRANULE_BYTES);
    }
    cuda_streams_fini(cuda);
    cuda_nvml_close(cuda);
    heap_free(cuda);
    device->self = NULL;
}

static const struct device_table cuda_table = {
    .reserve = reserve,
    .unreserve = unreserve,
    .commit = commit,
    .decommit = decommit,
    .resident = resident,
    .copy = cuda_copy,
    .wait = cuda_wait,
    .free = free_device,
};

/* ---- opening ---- */

static enum status no_driver(struct failure *why)
{
    int has = 0, needs = 0;
    (void)cudaDriverGetVersion(&has);
    (void)cudaRuntimeGetVersion(&needs);
    if (has == 0) {
        return fail(why, STATUS_UNSUPPORTED,
                    "this machine has no NVIDIA driver: install one (nvidia-smi has to list the "
                    "GPUs), or choose --device cpu");
    }
    return fail(why, STATUS_UNSUPPORTED,
                "the NVIDIA driver supports CUDA %d.%d, this build needs %d.%d: update the driver, "
                "or choose --device cpu",
                has / 1000, has % 1000 / 10, needs / 1000, needs % 1000 / 10);
}

enum status cuda_device_count(int *out_n, struct failure *why)
{
    int n = 0;
    const cudaError_t error = cudaGetDeviceCount(&n);
    if (error == cudaErrorInsufficientDriver) {
        return no_driver(why);
    }
    if (error == cudaErrorNoDevice || (error == cudaSuccess && n == 0)) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        return fail(why, STATUS_UNSUPPORTED,
                    "CUDA finds no GPU (CUDA_VISIBLE_DEVICES %s%s): give this process one, or "
                    "choose --device cpu",
                    visible == NULL ? "is not set" : "= ", visible == NULL ? "" : visible);
    }
    if (error != cudaSuccess) {
        (void)cuda_failed(error, "counting the GPUs", why);
        return why == NULL ? STATUS_UNSUPPORTED : (why->status = STATUS_UNSUPPORTED);
    }
    *out_n = n;
    return STATUS_OK;
}

static enum status find_driver(struct cuda_driver *driver, struct failure *why)
{
    const struct {
        const char *name;
        void **at;
    } calls[] = {
        {"cuMemAddressReserve", (void **)(void *)&driver->reserve},
        {"cuMemAddressFree", (void **)(void *)&driver->unreserve},
        {"cuMemCreate", (void **)(void *)&driver->create},
        {"cuMemRelease", (void **)(void *)&driver->release},
        {"cuMemMap", (void **)(void *)&driver->map},
        {"cuMemUnmap", (void **)(void *)&driver->unmap},
        {"cuMemSetAccess", (void **)(void *)&driver->set_access},
        {"cuMemGetAllocationGranularity", (void **)(void *)&driver->granularity},
        {"cuGetErrorName", (void **)(void *)&driver->error_name},
        {"cuGetErrorString", (void **)(void *)&driver->error_text},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            calls[i].name, calls[i].at, ENTRY_POINTS_OF, cudaEnableDefault, &found);
        if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || *calls[i].at == NULL) {
            return fail(why, STATUS_UNSUPPORTED,
                        "the NVIDIA driver has no %s of CUDA %d.%d: update it", calls[i].name,
                        ENTRY_POINTS_OF / 1000, ENTRY_POINTS_OF % 1000 / 10);
        }
    }
    return STATUS_OK;
}

/* Who it is; makes no context. */
static enum status identify(struct cuda_device *cuda, int index, struct failure *why)
{
    struct cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, index);
    if (error != cudaSuccess) {
        return cuda_failed(error, "asking for the GPU's properties", why);
    }
    struct cuda_gpu *gpu = &cuda->gpu;
    gpu->index = index;
    gpu->major = properties.major;
    gpu->minor = properties.minor;
    gpu->total_bytes = properties.totalGlobalMem;
    memcpy(gpu->uuid, properties.uuid.bytes, CUDA_UUID_BYTES);
    const size_t length = strnlen(properties.name, CUDA_NAME_BYTES - 1);
    memcpy(gpu->name, properties.name, length);
    gpu->name[length] = '\0';
    (void)cudaDriverGetVersion(&cuda->driver_version);
    (void)cudaRuntimeGetVersion(&cuda->runtime_version);
    return STATUS_OK;
}

/* The context, and what it took: NVML's difference; without NVML all that is in use. */
static enum status make_context(struct cuda_device *cuda, struct failure *why)
{
    const uint64_t before = cuda_nvml_used_bytes(cuda);
    cudaError_t error = cudaSetDevice(cuda->gpu.index);
    if (error == cudaSuccess) {
        error = cudaFree(NULL); /* older runtimes make the context at the first call */
    }
    size_t free_bytes = 0, total_bytes = 0;
    if (error == cudaSuccess) {
        error = cudaMemGetInfo(&free_bytes, &total_bytes);
    }
    if (error != cudaSuccess) {
        (void)cuda_failed(error, "making a context", why);
        return fail_within(why, "GPU %d (%s)", cuda->gpu.index, cuda->gpu.name);
    }
    const uint64_t after = cuda_nvml_used_bytes(cuda);
    cuda->external.context_bytes =
        before != 0 && after >= before ? after - before : total_bytes - free_bytes;
    cuda->gpu.free_bytes = free_bytes;
    cuda->gpu.total_bytes = total_bytes;
    return STATUS_OK;
}

static enum status check_granularity(const struct cuda_device *cuda, struct failure *why)
{
    const CUmemAllocationProp prop = allocation_of(cuda);
    size_t granularity = 0;
    const CUresult result =
        cuda->driver.granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result != CUDA_SUCCESS) {
        return driver_failed(cuda, result, "cuMemGetAllocationGranularity", why);
    }
    if (granularity == 0 || DEVICE_GRANULE_BYTES % granularity != 0) {
        return fail(why, STATUS_UNSUPPORTED,
                    "GPU %d maps memory in steps of %zu bytes, which %d is no multiple of",
                    cuda->gpu.index, granularity, DEVICE_GRANULE_BYTES);
    }
    return STATUS_OK;
}

enum status cuda_device_open(struct device *device, int index, uint64_t capacity_bytes,
                             struct cuda_gpu *out_gpu, struct failure *why)
{
    int n = 0;
    enum status status = cuda_device_count(&n, why);
    if (status != STATUS_OK) {
        return status;
    }
    if (index < 0 || index >= n) {
        return fail(why, STATUS_OUT_OF_RANGE, "GPU %d: this process sees %d, numbered from 0",
                    index, n);
    }
    struct cuda_device *cuda = heap_calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory for the CUDA device");
    }
    status = identify(cuda, index, why);
    if (status == STATUS_OK) {
        status = make_context(cuda, why);
    }
    if (status == STATUS_OK) {
        status = find_driver(&cuda->driver, why);
    }
    if (status == STATUS_OK) {
        status = check_granularity(cuda, why);
    }
    if (status == STATUS_OK) {
        status = cuda_streams_init(cuda, why);
    }
    if (status != STATUS_OK) {
        cuda_nvml_close(cuda);
        heap_free(cuda);
        return status;
    }
    if (capacity_bytes == 0) {
        capacity_bytes = cuda->gpu.free_bytes / DEVICE_GRANULE_BYTES * DEVICE_GRANULE_BYTES;
    }
    *device = (struct device){
        .table = &cuda_table,
        .kind = DEVICE_CUDA,
        .capacity_bytes = capacity_bytes,
        .granule_bytes = DEVICE_GRANULE_BYTES,
        .pinned_bytes = 2 * (size_t)CUDA_N_SLOTS * CUDA_SLOT_BYTES,
        .self = cuda,
    };
    *out_gpu = cuda->gpu;
    return STATUS_OK;
}
