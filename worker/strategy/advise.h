/* Remedies: which strategies would bring the peak under the limit, and at what price.
 *
 * Tries the ladder that this version has (checkpointing, loss tiles, then a smaller micro-batch)
 * with the exact planner and ranks what fits by the work it adds. Pure but for the predictor, which
 * is passed in. Same answer on every rank. */
#ifndef BALLAST_WORKER_STRATEGY_ADVISE_H
#define BALLAST_WORKER_STRATEGY_ADVISE_H

#include "worker/memory/oom.h"

struct prediction {
    uint64_t peak_bytes[N_PHASES]; /* 0 for phases the run does not enter */
    uint64_t committed_bytes;      /* largest over phases */
    double flops;
};

/* Plan one strategy. */
struct predictor {
    enum status (*predict)(void *user, const struct strategy *strategy,
                           struct prediction *out_prediction, struct failure *why);
    void *user;
};

/* Fill report remedies for `current` under limit_bytes (0: none). At most OOM_REMEDIES; those that
 * fit first, cheapest first; when none fits, the ones with the lowest peak, saying so. */
size_t advise_remedies(const struct predictor *predictor, const struct strategy *current,
                       const struct strategy_limits *limits, uint64_t limit_bytes,
                       struct oom_remedy remedies[static OOM_REMEDIES]);

#endif
