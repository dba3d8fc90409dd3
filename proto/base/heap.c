/* The host heap: malloc with a counter in front.
 *
 * Owns the counters; not what is allocated. Any thread. The `alloc` fault point is asked here,
 * so nothing that it calls may allocate. */
#include "proto/base/heap.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/fault.h"

static _Atomic uint64_t n_calls;
static _Atomic uint64_t n_failures;
static _Atomic int64_t n_live;
/* The order of heap_fail() in one word, so that no thread sees half of it: the call that fails,
 * times two, plus one when all later ones do too. 0: none. */
static _Atomic uint64_t order;

static bool must_fail(void)
{
    uint64_t call = atomic_fetch_add_explicit(&n_calls, 1, memory_order_relaxed) + 1;
    uint64_t now = atomic_load_explicit(&order, memory_order_relaxed);
    uint64_t nth = now >> 1;
    bool for_ever = (now & 1) != 0;
    bool ordered = nth != 0 && (call == nth || (for_ever && call > nth));
    if (!ordered && !fault_fires(FAULT_ALLOC)) {
        return false;
    }
    atomic_fetch_add_explicit(&n_failures, 1, memory_order_relaxed);
    return true;
}

static void *counted(void *memory)
{
    if (memory != NULL) {
        atomic_fetch_add_explicit(&n_live, 1, memory_order_relaxed);
    }
    return memory;
}

void *heap_alloc(size_t bytes)
{
    /* Zero bytes give a pointer of their own: NULL always means failure. */
    return must_fail() ? NULL : counted(malloc(bytes == 0 ? 1 : bytes));
}

void *heap_calloc(size_t n, size_t bytes)
{
    size_t whole;
    if (n == 0 || bytes == 0) {
        n = bytes = 1;
    }
    /* Too many is out of memory as well; sanitizers take it for an error of ours. */
    bool impossible = __builtin_mul_overflow(n, bytes, &whole);
    return must_fail() || impossible ? NULL : counted(calloc(n, bytes));
}

void *heap_realloc(void *old, size_t bytes)
{
    if (old == NULL) {
        return heap_alloc(bytes);
    }
    return must_fail() ? NULL : realloc(old, bytes == 0 ? 1 : bytes);
}

char *heap_strdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = heap_alloc(bytes);
    if (copy != NULL) {
        memcpy(copy, text, bytes);
    }
    return copy;
}

void heap_free(void *memory)
{
    if (memory != NULL) {
        atomic_fetch_sub_explicit(&n_live, 1, memory_order_relaxed);
        free(memory);
    }
}

void heap_fail(uint64_t nth, bool for_ever)
{
    atomic_store(&order, 0);
    atomic_store(&n_calls, 0);
    atomic_store(&n_failures, 0);
    atomic_store(&order, nth == 0 ? 0 : nth << 1 | (for_ever ? 1U : 0U));
}

uint64_t heap_calls(void)
{
    return atomic_load(&n_calls);
}

uint64_t heap_failures(void)
{
    return atomic_load(&n_failures);
}

int64_t heap_live(void)
{
    return atomic_load(&n_live);
}
