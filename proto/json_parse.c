/* Owns: an arena that jansson parses in. Not: the tree, which is copied out. One thread.
 *
 * The arena is taken before parsing and large enough for any text of its length, so no allocation
 * fails half-way through a token. Per character jansson needs at most 120 bytes, for "{}": an
 * object of 96 bytes and its table of 128; arrays, numbers, texts and keys with their tables need
 * less, and the token buffer, which doubles, at most 4. */
#include "proto/json_parse.h"

#include <stdint.h>
#include "proto/base/heap.h"

enum { BYTES_PER_CHARACTER = 256, SPARE_BYTES = 16384, ALIGNMENT = 16 };

/* jansson's hooks have no argument of their own, so the arena in use is known by name. */
static struct {
    char *memory;
    size_t used, bytes;
} arena;

static void *arena_alloc(size_t bytes)
{
    const size_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;

    if (whole > arena.bytes - arena.used) {
        return NULL;
    }
    void *memory = arena.memory + arena.used;
    arena.used += whole;
    return memory;
}

static void arena_free(void *memory)
{
    (void)memory; /* the arena goes as a whole */
}

enum status json_parse(const char *text, size_t n_bytes, size_t flags, json_t **out_root,
                       json_error_t *out_error)
{
    json_malloc_t old_alloc;
    json_free_t old_free;
    size_t bytes;

    if (__builtin_mul_overflow(n_bytes, (size_t)BYTES_PER_CHARACTER, &bytes) ||
        __builtin_add_overflow(bytes, (size_t)SPARE_BYTES, &bytes)) {
        return STATUS_OUT_OF_MEMORY;
    }
    arena.memory = heap_alloc(bytes);
    if (!arena.memory) {
        return STATUS_OUT_OF_MEMORY;
    }
    arena.used = 0;
    arena.bytes = bytes;
    json_get_alloc_funcs(&old_alloc, &old_free);
    json_set_alloc_funcs(arena_alloc, arena_free);
    json_t *parsed = json_loadb(text, n_bytes, flags, out_error);
    json_set_alloc_funcs(old_alloc, old_free);
    json_t *root = parsed ? json_deep_copy(parsed) : NULL;
    const enum status status = !parsed                            ? STATUS_MALFORMED
                               : root && json_equal(root, parsed) ? STATUS_OK
                                                                  : STATUS_OUT_OF_MEMORY;
    heap_free(arena.memory);
    arena.memory = NULL;
    if (status) {
        json_decref(root);
        return status;
    }
    *out_root = root;
    return STATUS_OK;
}
