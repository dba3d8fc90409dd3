/* XXH3-128 of bytes as text. Owns nothing. */
#include "worker/save/hash.h"

#include <stdio.h>

void hash_init(struct hash *hash)
{
    XXH3_128bits_reset(&hash->state);
}

void hash_add(struct hash *hash, const void *bytes, size_t n)
{
    XXH3_128bits_update(&hash->state, bytes, n);
}

static struct manifest_hash text_of(XXH128_hash_t value)
{
    struct manifest_hash text;
    snprintf(text.hex, sizeof text.hex, "%016llx%016llx", (unsigned long long)value.high64,
             (unsigned long long)value.low64);
    return text;
}

struct manifest_hash hash_text(const struct hash *hash)
{
    return text_of(XXH3_128bits_digest(&hash->state));
}

struct manifest_hash hash_of(const void *bytes, size_t n)
{
    return text_of(XXH3_128bits(bytes, n));
}
