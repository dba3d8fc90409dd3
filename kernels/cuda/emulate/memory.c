/* Device memory: reserved address space that physical memory is mapped into, blocks from
 * cudaMalloc, and pinned host memory. Owns all of them. Any thread.
 *
 * Fresh memory is NaN (0xFF in every byte). Memory that is not mapped, not accessible or freed
 * cannot be touched: a fault says what touched it. While no work runs, none of it can be, so
 * that a host that reads device memory directly shows as well.
 *
 * Blocks from cudaMalloc end at a page nobody may touch, and their addresses are not used again. */
#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "kernels/cuda/emulate/emulate.h"

enum { GRANULE = 2 * 1024 * 1024, BLOCK_ALIGN = 256, POISON = 0xff };

/* Physical memory, from cuMemCreate. */
struct handle {
    size_t bytes;
    bool is_mapped, is_released;
};

struct reservation {
    struct reservation *next;
    unsigned char *base;
    size_t bytes;
    struct handle **handles; /* per granule; NULL: nothing mapped */
    bool *accessible;        /* per granule */
};

struct block {
    struct block *next;
    unsigned char *pages, *start; /* start: what the caller knows */
    size_t page_bytes, bytes;     /* page_bytes without the page behind them */
    bool is_pinned, is_freed;
};

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static struct reservation *reservations;
static struct block *blocks;
static bool is_open;
static struct sigaction previous_action;

static size_t round_to(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* ---- who may touch it ---- */

static void protect(void *start, size_t bytes, bool allow)
{
    if (mprotect(start, bytes, allow ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) {
        emulate_misuse("mprotect of %zu bytes failed", bytes);
    }
}

/* Apply is_open to the accessible granules [from, to) of a reservation, run by run. */
static void protect_granules(const struct reservation *r, size_t from, size_t to)
{
    for (size_t i = from; i < to;) {
        size_t end = i;
        while (end < to && r->accessible[end]) {
            end++;
        }
        if (end > i) {
            protect(r->base + i * GRANULE, (end - i) * GRANULE, is_open);
        }
        i = end + 1;
    }
}

static void set_open(bool open)
{
    pthread_mutex_lock(&memory_lock);
    if (is_open != open) {
        is_open = open;
        for (struct reservation *r = reservations; r != NULL; r = r->next) {
            protect_granules(r, 0, r->bytes / GRANULE);
        }
        for (struct block *b = blocks; b != NULL; b = b->next) {
            if (!b->is_pinned && !b->is_freed) {
                protect(b->pages, b->page_bytes, open);
            }
        }
    }
    pthread_mutex_unlock(&memory_lock);
}

void emulate_memory_open(void)
{
    if (!is_open) {
        set_open(true);
    }
}

void emulate_memory_close(void)
{
    static int guarded = -1;
    if (guarded < 0) {
        guarded = emulate_setting("BALLAST_STANDIN_GUARD", 1) != 0;
    }
    if (guarded && is_open) {
        set_open(false);
    }
}

/* Without the lock: a fault has to be explained even when it happens inside of it. */
static void explain_fault(int signal_number, siginfo_t *info, void *context)
{
    char text[256];
    int length = 0;
    if (emulate_is_device(info->si_addr) || emulate_is_pinned(info->si_addr)) {
        const char *name = emulate_running();
        if (emulate_is_executor()) {
            length = snprintf(text, sizeof text,
                              "stand-in: %s touched %p: device memory that is not mapped, or a "
                              "freed block\n",
                              name != NULL ? name : "the executor", info->si_addr);
        } else {
            length = snprintf(text, sizeof text,
                              "stand-in: the host touched device memory or a freed block: %p\n",
                              info->si_addr);
        }
        const ssize_t written = write(STDERR_FILENO, text, (size_t)length);
        (void)written;
        abort();
    }
    if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
        previous_action.sa_sigaction(signal_number, info, context);
    } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
        previous_action.sa_handler(signal_number);
    } else {
        sigaction(signal_number, &previous_action, NULL);
    }
}

void emulate_memory_watch(void)
{
    struct sigaction action = {.sa_sigaction = explain_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous_action);
}

/* ---- looking up ---- */

static struct reservation *reservation_of(const void *address)
{
    const uintptr_t at = (uintptr_t)address;
    for (struct reservation *r = reservations; r != NULL; r = r->next) {
        if (at >= (uintptr_t)r->base && at - (uintptr_t)r->base < r->bytes) {
            return r;
        }
    }
    return NULL;
}

/* The block whose pages hold the address, freed or not. */
static struct block *block_of(const void *address)
{
    const uintptr_t at = (uintptr_t)address;
    for (struct block *b = blocks; b != NULL; b = b->next) {
        if (at >= (uintptr_t)b->pages &&
            at - (uintptr_t)b->pages < b->page_bytes + (size_t)getpagesize()) {
            return b;
        }
    }
    return NULL;
}

bool emulate_is_device(const void *address)
{
    const struct block *b = block_of(address);
    return reservation_of(address) != NULL || (b != NULL && !b->is_pinned);
}

bool emulate_is_pinned(const void *address)
{
    const struct block *b = block_of(address);
    return b != NULL && b->is_pinned;
}

/* NULL when [start, start + bytes) is inside the live block, else what is wrong. */
static const char *block_fault(const struct block *b, const void *start, size_t bytes)
{
    if (b->is_freed) {
        return "is freed";
    }
    const unsigned char *at = start;
    if (at < b->start || (size_t)(at - b->start) > b->bytes ||
        bytes > b->bytes - (size_t)(at - b->start)) {
        return "is not inside one block";
    }
    return NULL;
}

static const char *device_fault(const void *start, size_t bytes)
{
    const struct reservation *r = reservation_of(start);
    if (r == NULL) {
        const struct block *b = block_of(start);
        return b == NULL || b->is_pinned ? "is not device memory" : block_fault(b, start, bytes);
    }
    const size_t offset = (size_t)((const unsigned char *)start - r->base);
    if (bytes > r->bytes - offset) {
        return "is not inside one reservation";
    }
    for (size_t i = offset / GRANULE; i * GRANULE < offset + bytes; i++) {
        if (r->handles[i] == NULL) {
            return "is not mapped";
        }
        if (!r->accessible[i]) {
            return "is mapped, but cuMemSetAccess did not make it accessible";
        }
    }
    return NULL;
}

void emulate_check_device(const char *what, const void *start, size_t bytes)
{
    if (bytes == 0) {
        return;
    }
    pthread_mutex_lock(&memory_lock);
    const char *fault = device_fault(start, bytes);
    pthread_mutex_unlock(&memory_lock);
    if (fault != NULL) {
        emulate_misuse("%s: %p, %zu bytes, %s", what, start, bytes, fault);
    }
}

enum emulate_side emulate_side_of(const char *what, const void *start, size_t bytes)
{
    pthread_mutex_lock(&memory_lock);
    const bool is_device = emulate_is_device(start);
    const struct block *b = block_of(start);
    const char *fault = b != NULL && b->is_pinned ? block_fault(b, start, bytes) : NULL;
    pthread_mutex_unlock(&memory_lock);
    if (is_device) {
        emulate_check_device(what, start, bytes);
        return EMULATE_DEVICE;
    }
    if (fault != NULL) {
        emulate_misuse("%s: %p, %zu bytes of pinned memory, %s", what, start, bytes, fault);
    }
    return b != NULL ? EMULATE_PINNED : EMULATE_PAGEABLE;
}

/* ---- virtual memory ---- */

static CUresult enter_driver(const char *call)
{
    if (emulate_gpu() < 0) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (emulate_enter(call) != cudaSuccess) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    emulate_not_capturing(call);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option)
{
    (void)option;
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags)
{
    const CUresult error = enter_driver("cuMemAddressReserve");
    if (error != CUDA_SUCCESS) {
        return error;
    }
    if (bytes == 0 || bytes % GRANULE != 0 || (alignment & (alignment - 1)) != 0 || flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    (void)wanted; /* a hint */
    const size_t align = alignment > GRANULE ? alignment : GRANULE;
    struct reservation *r = calloc(1, sizeof *r);
    const size_t n = bytes / GRANULE;
    struct handle **handles = calloc(n, sizeof(struct handle *));
    bool *accessible = calloc(n, sizeof *accessible);
    void *found =
        mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (r == NULL || handles == NULL || accessible == NULL || found == MAP_FAILED) {
        free(accessible);
        free(handles);
        free(r);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    unsigned char *raw = found;
    const size_t skip = (align - (uintptr_t)raw % align) % align;
    if (skip > 0) {
        munmap(raw, skip);
    }
    if (align > skip) {
        munmap(raw + skip + bytes, align - skip);
    }
    *r = (struct reservation){
        .base = raw + skip, .bytes = bytes, .handles = handles, .accessible = accessible};
    pthread_mutex_lock(&memory_lock);
    r->next = reservations;
    reservations = r;
    pthread_mutex_unlock(&memory_lock);
    *pointer = (CUdeviceptr)(uintptr_t)r->base;
    return CUDA_SUCCESS;
}

static void *address_of(CUdeviceptr pointer)
{
    return (void *)(uintptr_t)pointer;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes)
{
    const CUresult error = enter_driver("cuMemAddressFree");
    if (error != CUDA_SUCCESS) {
        return error;
    }
    pthread_mutex_lock(&memory_lock);
    struct reservation *r = reservation_of(address_of(pointer));
    if (r == NULL || r->base != address_of(pointer) || r->bytes != bytes) {
        emulate_misuse("cuMemAddressFree of %p, %zu bytes: not what was reserved",
                       address_of(pointer), bytes);
    }
    for (size_t i = 0; i < bytes / GRANULE; i++) {
        if (r->handles[i] != NULL) {
            emulate_misuse("cuMemAddressFree of %p: memory is still mapped at offset %zu",
                           address_of(pointer), i * GRANULE);
        }
    }
    struct reservation **link = &reservations;
    while (*link != r) {
        link = &(*link)->next;
    }
    *link = r->next;
    pthread_mutex_unlock(&memory_lock);
    munmap(r->base, r->bytes);
    free(r->handles);
    free(r->accessible);
    free(r);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags)
{
    const CUresult error = enter_driver("cuMemCreate");
    if (error != CUDA_SUCCESS) {
        return error;
    }
    if (bytes == 0 || bytes % GRANULE != 0 || flags != 0 ||
        prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || prop->location.id != device) {
        emulate_misuse("cuMemCreate on GPU %d, this process uses GPU %d", prop->location.id,
                       device);
    }
    struct handle *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!emulate_account_take(bytes)) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->bytes = bytes;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
    return CUDA_SUCCESS;
}

/* Memory goes back when it is neither mapped nor held. */
static void release_handle(struct handle *handle)
{
    if (!handle->is_mapped && handle->is_released) {
        emulate_account_give(handle->bytes);
        free(handle);
    }
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    const CUresult error = enter_driver("cuMemRelease");
    if (error != CUDA_SUCCESS) {
        return error;
    }
    struct handle *h = address_of(handle);
    pthread_mutex_lock(&memory_lock);
    if (h->is_released) {
        emulate_misuse("cuMemRelease of a handle twice");
    }
    h->is_released = true;
    release_handle(h);
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    const CUresult error = enter_driver("cuMemMap");
    if (error != CUDA_SUCCESS) {
        return error;
    }
    struct handle *h = address_of(handle);
    unsigned char *start = address_of(pointer);
    pthread_mutex_lock(&memory_lock);
    struct reservation *r = reservation_of(start);
    if (r == NULL || (size_t)(start - r->base) % GRANULE != 0 ||
        bytes > r->bytes - (size_t)(start - r->base)) {
        emulate_misuse("cuMemMap at %p, %zu bytes: not granules of one reservation", (void *)start,
                       bytes);
    }
    if (offset != 0 || flags != 0 || bytes != h->bytes || h->is_mapped || h->is_released) {
        emulate_misuse("cuMemMap of %zu bytes of a handle of %zu at offset %zu: the stand-in maps "
                       "a whole handle, once, before it is released",
                       bytes, h->bytes, offset);
    }
    const size_t first = (size_t)(start - r->base) / GRANULE;
    for (size_t i = 0; i < bytes / GRANULE; i++) {
        if (r->handles[first + i] != NULL) {
            emulate_misuse("cuMemMap at %p: memory is mapped there already",
                           (void *)(start + i * GRANULE));
        }
    }
    if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
             0) == MAP_FAILED) {
        pthread_mutex_unlock(&memory_lock);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(start, POISON, bytes);
    protect(start, bytes, false);
    for (size_t i = 0; i < bytes / GRANULE; i++) {
        r->handles[first + i] = h;
    }
    h->is_mapped = true;
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access,
                        size_t n_access)
{
    const CUresult error = enter_driver("cuMemSetAccess");
    if (error != CUDA_SUCCESS) {
        return error;
    }
    unsigned char *start = address_of(pointer);
    if (n_access != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        emulate_misuse("cuMemSetAccess: the stand-in knows one GPU that reads and writes");
    }
    pthread_mutex_lock(&memory_lock);
    const struct reservation *r = reservation_of(start);
    if (r == NULL || (size_t)(start - r->base) % GRANULE != 0 || bytes % GRANULE != 0 ||
        bytes > r->bytes - (size_t)(start - r->base)) {
        pthread_mutex_unlock(&memory_lock);
        return CUDA_ERROR_INVALID_VALUE;
    }
    const size_t first = (size_t)(start - r->base) / GRANULE, n = bytes / GRANULE;
    for (size_t i = first; i < first + n; i++) {
        if (r->handles[i] == NULL) {
            pthread_mutex_unlock(&memory_lock);
            return CUDA_ERROR_INVALID_VALUE;
        }
        r->accessible[i] = true;
    }
    protect_granules(r, first, first + n);
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

/* Whole handles only: a mapping has to begin and to end where the range does. */
static void check_whole_handles(const struct reservation *r, size_t first, size_t n)
{
    for (size_t i = first; i < first + n;) {
        const struct handle *h = r->handles[i];
        if (h == NULL) {
            emulate_misuse("cuMemUnmap: nothing is mapped at %p", (void *)(r->base + i * GRANULE));
        }
        if ((i > 0 && r->handles[i - 1] == h) || h->bytes > (first + n - i) * GRANULE) {
            emulate_misuse("cuMemUnmap of a part of what was mapped at %p",
                           (void *)(r->base + i * GRANULE));
        }
        i += h->bytes / GRANULE;
    }
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    const CUresult error = enter_driver("cuMemUnmap");
    if (error != CUDA_SUCCESS) {
        return error;
    }
    unsigned char *start = address_of(pointer);
    emulate_check_no_graph("cuMemUnmap", start, bytes);
    pthread_mutex_lock(&emulate_lock);
    emulate_check_unused("cuMemUnmap", start, bytes);
    pthread_mutex_unlock(&emulate_lock);
    pthread_mutex_lock(&memory_lock);
    struct reservation *r = reservation_of(start);
    if (r == NULL || (size_t)(start - r->base) % GRANULE != 0 || bytes == 0 ||
        bytes % GRANULE != 0 || bytes > r->bytes - (size_t)(start - r->base)) {
        emulate_misuse("cuMemUnmap of %p, %zu bytes: not granules of one reservation",
                       (void *)start, bytes);
    }
    const size_t first = (size_t)(start - r->base) / GRANULE, n = bytes / GRANULE;
    check_whole_handles(r, first, n);
    if (mmap(start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
             0) == MAP_FAILED) {
        emulate_misuse("mmap of %zu bytes failed", bytes);
    }
    for (size_t i = first; i < first + n;) {
        struct handle *h = r->handles[i];
        const size_t end = i + h->bytes / GRANULE;
        for (; i < end; i++) {
            r->handles[i] = NULL;
            r->accessible[i] = false;
        }
        h->is_mapped = false;
        release_handle(h);
    }
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

/* ---- blocks ---- */

static struct block *block_new(size_t bytes, bool is_pinned)
{
    struct block *b = calloc(1, sizeof *b);
    if (b == NULL) {
        return NULL;
    }
    const size_t page = (size_t)getpagesize();
    b->bytes = bytes;
    b->is_pinned = is_pinned;
    b->page_bytes = round_to(bytes > 0 ? bytes : 1, page);
    if (!is_pinned && !emulate_account_take(b->page_bytes)) {
        free(b);
        return NULL;
    }
    void *pages = mmap(NULL, b->page_bytes + page, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        if (!is_pinned) {
            emulate_account_give(b->page_bytes);
        }
        free(b);
        return NULL;
    }
    b->pages = pages;
    b->start = b->pages + b->page_bytes - round_to(bytes, BLOCK_ALIGN);
    memset(b->pages, POISON, b->page_bytes);
    protect(b->pages + b->page_bytes, page, false);
    pthread_mutex_lock(&memory_lock);
    if (!is_pinned) {
        protect(b->pages, b->page_bytes, is_open);
    }
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&memory_lock);
    return b;
}

static cudaError_t take_block(const char *call, void **pointer, size_t bytes, bool is_pinned)
{
    const cudaError_t error = emulate_enter(call);
    if (error != cudaSuccess) {
        return error;
    }
    emulate_not_capturing(call);
    if (bytes == 0) {
        *pointer = NULL;
        return cudaSuccess;
    }
    struct block *b = block_new(bytes, is_pinned);
    if (b == NULL) {
        return emulate_error(cudaErrorMemoryAllocation);
    }
    *pointer = b->start;
    return cudaSuccess;
}

static cudaError_t free_block(const char *call, void *pointer, bool is_pinned)
{
    const cudaError_t error = emulate_enter(call);
    if (error != cudaSuccess || pointer == NULL) {
        return error;
    }
    emulate_not_capturing(call);
    if (!is_pinned) {
        emulate_drain(); /* as cudaFree does */
    }
    pthread_mutex_lock(&memory_lock);
    struct block *b = block_of(pointer);
    pthread_mutex_unlock(&memory_lock);
    if (b == NULL || b->start != pointer || b->is_pinned != is_pinned || b->is_freed) {
        emulate_misuse("%s of %p, which is no such block (any more)", call, pointer);
    }
    emulate_check_no_graph(call, b->start, b->bytes);
    pthread_mutex_lock(&emulate_lock);
    emulate_check_unused(call, b->start, b->bytes);
    pthread_mutex_unlock(&emulate_lock);
    pthread_mutex_lock(&memory_lock);
    b->is_freed = true;
    if (mmap(b->pages, b->page_bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
        emulate_misuse("mmap of %zu bytes failed", b->page_bytes);
    }
    pthread_mutex_unlock(&memory_lock);
    if (!is_pinned) {
        emulate_account_give(b->page_bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    return take_block("cudaMalloc", pointer, bytes, false);
}

cudaError_t cudaFree(void *pointer)
{
    return free_block("cudaFree", pointer, false);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return take_block("cudaMallocHost", pointer, bytes, true);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
    (void)flags;
    return take_block("cudaHostAlloc", pointer, bytes, true);
}

cudaError_t cudaFreeHost(void *pointer)
{
    return free_block("cudaFreeHost", pointer, true);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    const cudaError_t error = emulate_enter("cudaMemGetInfo");
    if (error == cudaSuccess) {
        emulate_account_info(free_bytes, total_bytes);
    }
    return error;
}
