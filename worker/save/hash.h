/* XXH3-128 as hexadecimal text, whole or in parts. Pure; any thread. */
#ifndef BALLAST_WORKER_SAVE_HASH_H
#define BALLAST_WORKER_SAVE_HASH_H

#define XXH_STATIC_LINKING_ONLY /* for the size of its state, which lives on our stack */
#include <stddef.h>
#include <xxhash.h>
#include "worker/save/manifest.h"

struct hash {
    XXH3_state_t state;
};

void hash_init(struct hash *hash);
void hash_add(struct hash *hash, const void *bytes, size_t n);
struct manifest_hash hash_text(const struct hash *hash);
struct manifest_hash hash_of(const void *bytes, size_t n);

#endif
