/* Philox4x32-10: the one source of randomness (Salmon et al., SC'11, "Parallel random
 * numbers: as easy as 1, 2, 3").
 *
 * A counter-based generator: the value depends on the key and the counter only, so it does
 * not matter which rank, tile or recomputation asks for it. Header only, pure, C and C++; shared by
 * all devices, so that dropout masks are equal in value everywhere. */
#ifndef BALLAST_KERNELS_PHILOX_H
#define BALLAST_KERNELS_PHILOX_H

#include <stdint.h>

struct philox {
    uint32_t word[4];
};

/* What a random number is for; part of the counter, so streams never meet. */
enum random_use {
    RANDOM_INIT = 1,
    RANDOM_EMBED_DROPOUT = 2,
    RANDOM_ATTENTION_DROPOUT = 3,
    RANDOM_ATTENTION_OUT_DROPOUT = 4,
    RANDOM_MLP_OUT_DROPOUT = 5,
    RANDOM_DATA_ORDER = 6,
    RANDOM_STOCHASTIC_ROUNDING = 7,
};

static inline struct philox philox4x32(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1,
                                       uint32_t c2, uint32_t c3)
{
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        const uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ key0;
        const uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ key1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    const struct philox drawn = {{c0, c1, c2, c3}};
    return drawn;
}

/* The key of one step's draws: the seed, with the step mixed into its upper word. What has
 * no step (initial weights, data order) passes 0. */
struct philox_key {
    uint32_t key0, key1;
};

static inline struct philox_key philox_key(uint64_t seed, uint32_t step)
{
    const struct philox_key key = {(uint32_t)seed,
                                   (uint32_t)(seed >> 32) ^ (step * 0x9E3779B9u + 0x85EBCA6Bu)};
    return key;
}

/* How dropout draws, on every device. The global element (sample s of the batch, token t of
 * the sequence, column c; c is the global key position for attention probabilities, t the
 * query) uses the counter
 *     (c / 4, t, s, philox_stream(layer, use, head)),   head 0 outside of attention,
 * and of its four words word[c % 4]. The element is dropped when the word is below
 * dropout_threshold(p), and a kept one is multiplied by dropout_scale(p). */
static inline uint32_t dropout_threshold(float p)
{
    const double scaled = (double)p * 4294967296.0;
    return scaled >= 4294967295.0 ? UINT32_MAX : scaled > 0.0 ? (uint32_t)scaled : 0u;
}

static inline float dropout_scale(float p)
{
    return (float)(1.0 / (1.0 - (double)p));
}

/* The counter's last word: layer, use and head of the operation that draws. */
static inline uint32_t philox_stream(uint32_t layer, enum random_use use, uint32_t head)
{
    return (layer << 20) | ((uint32_t)use << 16) | (head & 0xFFFFu);
}

#endif
