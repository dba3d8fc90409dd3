/* The ladder of remedies. See advise.h. */
#include "worker/strategy/advise.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/units.h"

enum { MAX_CANDIDATES = 40 };

struct candidates {
    struct oom_remedy list[MAX_CANDIDATES];
    size_t n;
};

struct advice {
    const struct predictor *predictor;
    const struct strategy *current;
    const struct strategy_limits *limits;
    uint64_t limit_bytes;
    double current_flops;
    struct candidates candidates;
};

static bool seen(const struct candidates *candidates, const struct strategy *strategy)
{
    for (size_t i = 0; i < candidates->n; i++) {
        if (strategy_equal(&candidates->list[i].strategy, strategy)) {
            return true;
        }
    }
    return false;
}

/* Predict a candidate and keep it, unless the rules refuse it. */
static void consider(struct advice *advice, const struct strategy *strategy)
{
    struct candidates *candidates = &advice->candidates;
    struct prediction prediction;
    if (candidates->n == MAX_CANDIDATES || strategy_equal(strategy, advice->current) ||
        seen(candidates, strategy) ||
        strategy_check(strategy, advice->limits, NULL) != STATUS_OK ||
        advice->predictor->predict(advice->predictor->user, strategy, &prediction, NULL) !=
            STATUS_OK) {
        return;
    }
    struct oom_remedy *remedy = &candidates->list[candidates->n++];
    *remedy = (struct oom_remedy){
        .strategy = *strategy,
        .committed_bytes = prediction.committed_bytes,
        .relative_flops =
            advice->current_flops > 0.0 ? prediction.flops / advice->current_flops : 1.0,
        .fits = advice->limit_bytes == 0 || prediction.committed_bytes <= advice->limit_bytes,
        .exact = strategy->micro_batch == advice->current->micro_batch,
    };
    memcpy(remedy->peak_bytes, prediction.peak_bytes, sizeof remedy->peak_bytes);
}

/* Each checkpointing mode, alone and with a loss tile. */
static void consider_ladder(struct advice *advice, struct strategy base)
{
    static const enum checkpointing modes[] = {CHECKPOINTING_NONE, CHECKPOINTING_SELECTIVE,
                                               CHECKPOINTING_SPLIT, CHECKPOINTING_BLOCK};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        struct strategy strategy = base;
        if (modes[i] != CHECKPOINTING_NONE) {
            strategy.checkpointing = modes[i];
            strategy.checkpoint_blocks = 1;
            strategy.checkpointing_layers = advice->limits->n_layers;
        }
        consider(advice, &strategy);
        const uint32_t rows = base.micro_batch * advice->limits->seq_len;
        if (base.loss_tile == 0 && rows > 64) {
            strategy.loss_tile = rows / 8 > 32 ? rows / 8 : 32;
            consider(advice, &strategy);
        }
    }
}

static int better_first(const void *a, const void *b)
{
    const struct oom_remedy *x = a;
    const struct oom_remedy *y = b;
    if (x->fits != y->fits) {
        return x->fits ? -1 : 1;
    }
    if (x->fits && x->exact != y->exact) {
        return x->exact ? -1 : 1;
    }
    if (x->fits && x->relative_flops != y->relative_flops) {
        return x->relative_flops < y->relative_flops ? -1 : 1;
    }
    if (x->committed_bytes != y->committed_bytes) {
        return x->committed_bytes < y->committed_bytes ? -1 : 1;
    }
    return 0;
}

static void describe(const struct advice *advice, struct oom_remedy *remedy)
{
    char changes[STRATEGY_TEXT_BYTES];
    char peak[UNITS_TEXT_BYTES];
    strategy_format(advice->current, &remedy->strategy, changes);
    snprintf(remedy->text, sizeof remedy->text, "%.90s: needs %s%s, %+.0f %% work%s", changes,
             units_format_bytes(remedy->committed_bytes, peak),
             remedy->fits ? "" : " (still does not fit)", 100.0 * (remedy->relative_flops - 1.0),
             remedy->exact ? "" : ", sums in another order");
}

size_t advise_remedies(const struct predictor *predictor, const struct strategy *current,
                       const struct strategy_limits *limits, uint64_t limit_bytes,
                       struct oom_remedy remedies[static OOM_REMEDIES])
{
    struct advice advice = {.predictor = predictor,
                            .current = current,
                            .limits = limits,
                            .limit_bytes = limit_bytes};
    struct prediction now;
    if (predictor->predict(predictor->user, current, &now, NULL) == STATUS_OK) {
        advice.current_flops = now.flops;
    }
    consider_ladder(&advice, *current);
    for (uint32_t micro = current->micro_batch / 2; micro >= 1; micro /= 2) {
        struct strategy smaller = *current;
        smaller.micro_batch = micro;
        consider(&advice, &smaller);
        consider_ladder(&advice, smaller);
    }
    qsort(advice.candidates.list, advice.candidates.n, sizeof advice.candidates.list[0],
          better_first);
    const size_t n = advice.candidates.n < OOM_REMEDIES ? advice.candidates.n : OOM_REMEDIES;
    for (size_t i = 0; i < n; i++) {
        describe(&advice, &advice.candidates.list[i]);
        remedies[i] = advice.candidates.list[i];
    }
    return n;
}
