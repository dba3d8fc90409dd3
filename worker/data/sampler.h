/* Which sample comes when: a pure function of seed and position, so there is no iterator to
 * lose. Each epoch is a keyed permutation of all samples. Any thread. */
#ifndef BALLAST_WORKER_DATA_SAMPLER_H
#define BALLAST_WORKER_DATA_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

struct sampler {
    uint64_t seed;
    uint64_t n_samples; /* >= 1 */
    bool shuffle;       /* false: in file order */
};

/* The sample at `position` (0, 1, 2, ... over the whole run; position / n_samples is the epoch).
 * Within an epoch every sample comes exactly once. */
uint64_t sampler_at(const struct sampler *sampler, uint64_t position);

#endif
