/* The switch's transaction. See transition.h. */
#include "worker/strategy/transition.h"
#include "proto/base/units.h"

enum status transition_check(const struct strategy *old, const struct strategy *wanted,
                             const struct strategy_limits *limits, struct failure *why)
{
    (void)old; /* whatever may be started may be switched to */
    return strategy_check(wanted, limits, why);
}

/* The rules, the plan and the capacity: everything that can be refused without touching memory. */
static enum status prepare_plan(const struct transition *transition, struct plan *out_plan,
                                struct failure *why)
{
    enum status status =
        transition_check(transition->old, transition->wanted, transition->limits, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = transition->make_plan(transition->user, transition->wanted, out_plan, why);
    if (status != STATUS_OK) {
        return status;
    }
    if (transition->capacity_bytes != 0 &&
        out_plan->committed_bytes > transition->capacity_bytes) {
        char needs[UNITS_TEXT_BYTES];
        char limit[UNITS_TEXT_BYTES];
        const enum phase phase = out_plan->binding_phase;
        status = fail(why, STATUS_DOES_NOT_FIT,
                      "does not fit: %s needs %s (%llu bytes), the limit is %s (%llu bytes)",
                      phase_name(phase), units_format_bytes(out_plan->committed_bytes, needs),
                      (unsigned long long)out_plan->committed_bytes,
                      units_format_bytes(transition->capacity_bytes, limit),
                      (unsigned long long)transition->capacity_bytes);
        plan_fini(out_plan);
    }
    return status;
}

/* The plan made here may have failed for lack of host memory on one rank only. */
static enum status vote_on(const struct transition *transition, const char *name,
                           enum status local, struct failure *why)
{
    struct failure vote_why = {0};
    if (local != STATUS_OK && why != NULL) {
        vote_why = *why;
    }
    const enum status status =
        transition->vote(transition->user, name, local == STATUS_OK, &vote_why);
    if (local != STATUS_OK) {
        return local; /* the own reason says more */
    }
    if (status != STATUS_OK && why != NULL) {
        *why = vote_why;
    }
    return status;
}

static enum status verify(const struct transition *transition, const struct plan *plan,
                          struct failure *why)
{
    const size_t committed = transition->workspace->region.committed_bytes;
    if (committed < plan->workspace_bytes) {
        return fail(why, STATUS_CORRUPT, "switch: %zu bytes committed, the new plan needs %zu",
                    committed, plan->workspace_bytes);
    }
    return ledger_check(transition->ledger, why);
}

/* The second vote has passed: put the new plan in force and give the rest back. */
static void drop_old(struct transition *transition, struct plan *plan,
                     struct transition_result *result)
{
    plan_fini(transition->plan);
    *transition->plan = *plan;
    region_shrink(&transition->workspace->region, transition->plan->workspace_bytes);
    state_settle(transition->state, transition->layout);
    admit_follow(transition->admit, transition->plan);
    result->committed_after = atomic_load(&transition->workspace->region.device->committed_bytes);
    result->resident_after = region_resident(&transition->workspace->region);
}

static enum status acquire_state(void *user, struct failure *why)
{
    const struct transition *transition = user;
    return state_acquire(transition->state, transition->layout, why);
}

static void revert_state(void *user)
{
    const struct transition *transition = user;
    state_revert(transition->state, transition->layout);
}

enum status transition_run(struct transition *transition, struct transition_result *out_result,
                           struct failure *why)
{
    struct region *region = &transition->workspace->region;
    const size_t held = region->committed_bytes;
    struct transition_result result = {
        .committed_before = atomic_load(&region->device->committed_bytes),
        .resident_before = region_resident(region),
    };
    struct plan plan = {0}; /* stays so when it could not be made */
    enum status status =
        vote_on(transition, "switch: plan", prepare_plan(transition, &plan, why), why);
    if (status != STATUS_OK) {
        goto undo_plan; /* made here, but not on another rank */
    }
    const struct admit_more more = {
        .bytes = layout_committed_both(&transition->state->layout, transition->layout) -
                 layout_committed(&transition->state->layout) +
                 layout_host_missing(&transition->state->layout, transition->layout),
        .acquire = acquire_state,
        .revert = revert_state,
        .user = transition,
    };
    status = admit_bytes(transition->admit, PHASE_SWITCH, plan.workspace_bytes, &more, why);
    if (status != STATUS_OK) {
        goto undo_plan;
    }
    result.committed_peak = atomic_load(&region->device->committed_bytes);
    status = state_convert(transition->state, transition->layout, transition->ops,
                           transition->comm, why);
    /* Room for the new plan's live list is the last thing that can fail. */
    if (status == STATUS_OK) {
        status = workspace_follow(transition->workspace, &plan, why);
    }
    if (status == STATUS_OK) {
        status = verify(transition, &plan, why);
    }
    status = vote_on(transition, "switch: verify", status, why);
    if (status != STATUS_OK) {
        goto undo_commit;
    }
    drop_old(transition, &plan, &result);
    /* Same number of buffers as just above, so this cannot fail. */
    status = workspace_follow(transition->workspace, transition->plan, why);
    *out_result = result;
    return status;
undo_commit:
    transition->workspace->plan = transition->plan;
    region_shrink(region, held);
    revert_state(transition);
undo_plan:
    plan_fini(&plan);
    return status;
}
