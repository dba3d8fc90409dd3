/* Owns: the order of samples. Pure; any thread.
 *
 * A keyed permutation without a table: a Feistel network of Philox rounds permutes the smallest
 * even-bit domain that holds all samples, and a result outside them is permuted again until it
 * falls inside ("cycle walking", Black and Rogaway 2002). The domain has fewer than four times
 * as many values as there are samples, so this takes a few turns on average. */
#include "worker/data/sampler.h"

#include <assert.h>
#include "kernels/philox.h"

enum { FEISTEL_ROUNDS = 6 };

struct permutation {
    uint32_t key[2];
    uint64_t epoch;
    unsigned half_bits; /* 1..32 */
};

static uint64_t permute(const struct permutation *permutation, uint64_t value)
{
    const uint32_t mask = (uint32_t)((UINT64_C(1) << permutation->half_bits) - 1);
    uint32_t left = (uint32_t)(value >> permutation->half_bits) & mask;
    uint32_t right = (uint32_t)value & mask;

    for (uint32_t round = 0; round < FEISTEL_ROUNDS; round++) {
        const struct philox random = philox4x32(
            permutation->key[0], permutation->key[1], right, (uint32_t)permutation->epoch,
            (uint32_t)(permutation->epoch >> 32), philox_stream(0, RANDOM_DATA_ORDER, round));
        const uint32_t next = (left ^ random.word[0]) & mask;
        left = right;
        right = next;
    }
    return (uint64_t)left << permutation->half_bits | right;
}

uint64_t sampler_at(const struct sampler *sampler, uint64_t position)
{
    const uint64_t n = sampler->n_samples;
    assert(n >= 1);
    const uint64_t epoch = position / n;
    uint64_t value = position % n;

    if (!sampler->shuffle || n == 1) {
        return value;
    }
    const unsigned bits = 64 - (unsigned)__builtin_clzll(n - 1);
    const struct permutation permutation = {
        .key = {(uint32_t)sampler->seed, (uint32_t)(sampler->seed >> 32)},
        .epoch = epoch,
        .half_bits = (bits + 1) / 2,
    };
    do {
        value = permute(&permutation, value);
    } while (value >= n);
    return value;
}
