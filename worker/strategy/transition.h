/* A switch of strategy between two steps, as a transaction over all ranks.
 *
 *   prepare   plan the new strategy; acquire all it needs     -> vote
 *   convert   fill what was acquired: parameters cut or gathered, optimizer states gathered
 *   verify    the ledger closes and the new plan is covered   -> vote
 *   drop      give back what the new plan does not need, and see it gone
 *   commit    generation + 1
 *
 * Anything that fails before the second vote leaves the old strategy in force, bit for bit.
 * The planner, the vote and the exchange are passed in. Main thread, collective, at a step
 * boundary: no tickets, no prefetch, an empty workspace. */
#ifndef BALLAST_WORKER_STRATEGY_TRANSITION_H
#define BALLAST_WORKER_STRATEGY_TRANSITION_H

#include "proto/strategy.h"
#include "worker/memory/admit.h"
#include "worker/memory/ledger.h"
#include "worker/memory/plan.h"
#include "worker/memory/workspace.h"
#include "worker/state/state.h"

struct transition {
    struct workspace *workspace;  /* borrowed */
    struct ledger *ledger;
    struct state *state;
    struct ops *ops;
    struct comm *comm;
    struct admit *admit;
    struct plan *plan;            /* in force; replaced on success */
    const struct strategy *old;
    const struct strategy *wanted;
    const struct strategy_limits *limits;
    const struct layout *layout;  /* of the state under `wanted` */
    uint64_t capacity_bytes;      /* of the device, 0: none */
    enum status (*make_plan)(void *user, const struct strategy *strategy, struct plan *out_plan,
                             struct failure *why);
    /* Do all ranks say yes? With a no, `why` brings this rank's reason along. A failure names the
     * lowest rank that did not, and its reason. */
    enum status (*vote)(void *user, const char *name, bool yes, struct failure *why);
    void *user;
};

struct transition_result {
    uint64_t committed_before, committed_after; /* device */
    uint64_t committed_peak;                    /* while both are held */
    uint64_t resident_before, resident_after;   /* workspace, as the system sees it */
};

/* Can a switch from `old` to `wanted` be asked for at all? Pure; whether it fits is not looked
 * at. */
enum status transition_check(const struct strategy *old, const struct strategy *wanted,
                             const struct strategy_limits *limits, struct failure *why) MUST_CHECK;

/* On success the new plan is in force (in *transition->plan) and fully committed on every rank.
 * DOES_NOT_FIT, OUT_OF_MEMORY, VOTED_DOWN or the rules' own refusal otherwise, and nothing has
 * changed. */
enum status transition_run(struct transition *transition, struct transition_result *out_result,
                           struct failure *why) MUST_CHECK;

#endif
