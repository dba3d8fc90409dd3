/* The host heap: every small allocation of the program goes through here.
 *
 * Counts calls so that the n-th can be made to fail (fault point `alloc`), and gives
 * libraries their allocator hooks. Not for tensors: those live in regions. Any thread. */
#ifndef BALLAST_PROTO_BASE_HEAP_H
#define BALLAST_PROTO_BASE_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As malloc, calloc, realloc, strdup, free; NULL when out of memory or made to fail. */
void *heap_alloc(size_t bytes) __attribute__((malloc));
void *heap_calloc(size_t n, size_t bytes) __attribute__((malloc));
void *heap_realloc(void *old, size_t bytes);
char *heap_strdup(const char *text) __attribute__((malloc));
void heap_free(void *memory);

/* Make allocation number `nth` (1-based, counted from this call) fail, and every later
 * one too when `for_ever`. 0 switches it off. */
void heap_fail(uint64_t nth, bool for_ever);
/* Allocations since heap_fail() was last called, and how many of them were failed. */
uint64_t heap_calls(void);
uint64_t heap_failures(void);
/* Blocks allocated and not freed: a leak check for tests. */
int64_t heap_live(void);

#endif
