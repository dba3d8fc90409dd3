/* Allocator hooks for libuv, with a reserve for the one allocation it cannot do without. */
#include "daemon/uv_heap.h"

#include <fcntl.h>
#include <malloc.h>
#include <string.h>
#include <unistd.h>
#include "proto/base/heap.h"

/* Enough for a table of 4096 descriptors. */
enum { RESERVE_BYTES = 40 * 1024 };

/* libuv's hooks take no context, so the reserve cannot live in the daemon's struct. */
static void *reserve;

static void *realloc_or_reserve(void *old, size_t bytes)
{
    void *memory = heap_realloc(old, bytes);
    if (memory)
        return memory;
    size_t held = old ? malloc_usable_size(old) : 0;
    if (held >= bytes)
        return old; /* it is the reserve, given out before */
    if (!reserve || bytes > RESERVE_BYTES)
        return NULL;
    memory = reserve;
    reserve = NULL;
    if (old) {
        memcpy(memory, old, held < bytes ? held : bytes);
        heap_free(old);
    }
    return memory;
}

enum status uv_heap_install(struct failure *why)
{
    if (!reserve) {
        reserve = heap_alloc(RESERVE_BYTES);
        if (!reserve)
            return fail(why, STATUS_OUT_OF_MEMORY, "out of memory at start");
    }
    int code = uv_replace_allocator(heap_alloc, realloc_or_reserve, heap_calloc, heap_free);
    if (code)
        return fail(why, uv_heap_status(code), "cannot set libuv's allocator: %s",
                    uv_strerror(code));
    return STATUS_OK;
}

void uv_heap_uninstall(void)
{
    heap_free(reserve);
    reserve = NULL;
}

static void ignore_poll(uv_poll_t *poll, int status, int events)
{
    (void)poll, (void)status, (void)events;
}

enum status uv_heap_reserve_descriptors(uv_loop_t *loop, int n_descriptors, struct failure *why)
{
    /* The highest free number below the limit is as good as the limit. */
    int pair[2] = {-1, -1}, high = -1;
    if (pipe2(pair, O_CLOEXEC) != 0)
        return fail(why, STATUS_IO, "no descriptors left at start");
    for (int at = n_descriptors - 1; high < 0 && at > 2; at /= 2)
        high = fcntl(pair[0], F_DUPFD_CLOEXEC, at);
    enum status status = STATUS_OK;
    if (high < 0) {
        status = fail(why, STATUS_IO, "no descriptors left at start");
    } else {
        uv_poll_t poll;
        int code = uv_poll_init(loop, &poll, high);
        if (!code) {
            code = uv_poll_start(&poll, UV_READABLE, ignore_poll);
            uv_close((uv_handle_t *)&poll, NULL);
            uv_run(loop, UV_RUN_NOWAIT); /* lets the close finish while `poll` lives */
        }
        if (code)
            status = fail(why, uv_heap_status(code), "cannot watch descriptors: %s",
                          uv_strerror(code));
        close(high);
    }
    close(pair[0]);
    close(pair[1]);
    return status;
}

enum status uv_heap_status(int uv_code)
{
    return uv_code >= 0 ? STATUS_OK : status_from_errno(-uv_code);
}
