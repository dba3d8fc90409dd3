/* Switching the strategy of a running job, and answering what a switch would do. */
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "proto/convert.h"
#include "worker/run.h"
#include "worker/save/agree.h"
#include "worker/strategy/advise.h"
#include "worker/strategy/transition.h"

enum status run_make_plan(void *user, const struct strategy *strategy, struct plan *out_plan,
                          struct failure *why)
{
    struct run *run = user;
    return rehearse(&run->rehearsal, strategy, out_plan, NULL, why);
}

static enum status predict(void *user, const struct strategy *strategy,
                           struct prediction *out_prediction, struct failure *why)
{
    const struct rehearsal *rehearsal = user;
    struct plan plan;
    struct rehearsal_cost cost;
    const enum status status = rehearse(rehearsal, strategy, &plan, &cost, why);
    if (status != STATUS_OK) {
        return status;
    }
    *out_prediction =
        (struct prediction){.committed_bytes = plan.committed_bytes, .flops = cost.flops};
    for (int phase = 0; phase < N_PHASES; phase++) {
        if (plan.phases[phase].used) {
            out_prediction->peak_bytes[phase] = plan.phases[phase].peak_bytes;
        }
    }
    plan_fini(&plan);
    return STATUS_OK;
}

struct predictor run_predictor(struct run *run)
{
    return (struct predictor){predict, &run->rehearsal};
}

static enum status vote(void *user, const char *name, bool yes, struct failure *why)
{
    struct run *run = user;
    const struct save_io io = {.comm = &run->comm};
    const enum status mine = yes                        ? STATUS_OK
                             : why->status == STATUS_OK ? STATUS_REFUSED
                                                        : why->status;
    return save_agree(&io, name, mine, why);
}

static void publish(struct run *run, const struct strategy *strategy)
{
    pthread_mutex_lock(&run->shared.lock);
    run->shared.strategy = *strategy;
    run->shared.generation = run->generation;
    pthread_mutex_unlock(&run->shared.lock);
}

/* The switch's event: what changed and what it moved. */
static void report_switch(struct run *run, const struct strategy *old,
                          const struct transition_result *moved, const char *who, double seconds)
{
    char before[STRATEGY_TEXT_BYTES];
    char after[STRATEGY_TEXT_BYTES];
    char old_bytes[UNITS_TEXT_BYTES];
    char new_bytes[UNITS_TEXT_BYTES];
    const struct strategy *now = &run->training.strategy;
    strategy_format(now, old, before);
    strategy_format(old, now, after);
    json_t *details = json_pack(
        "{s:I, s:I, s:I, s:I, s:f, s:s, s:s}", "committed_before",
        (json_int_t)moved->committed_before, "committed_after", (json_int_t)moved->committed_after,
        "resident_before", (json_int_t)moved->resident_before, "resident_after",
        (json_int_t)moved->resident_after, "ms", seconds * 1e3, "before", before, "after", after);
    run_event_with(run, "switch", who, details, "%s (was %s): device memory %s -> %s in %.1f ms",
                   after, before, units_format_bytes(moved->committed_before, old_bytes),
                   units_format_bytes(moved->committed_after, new_bytes), seconds * 1e3);
}

enum status run_switch(struct run *run, const struct strategy *wanted, const char *who,
                       Ballast__Link__V1__CommandResult *result, struct failure *why)
{
    const double started = units_monotonic_s();
    const struct strategy old = run->training.strategy;
    struct transition_result moved = {0};
    struct layout layout;
    training_layout(&run->training, wanted, &layout);
    struct transition transition = {
        .workspace = &run->training.workspace,
        .state = &run->training.state,
        .ops = run->ops,
        .comm = &run->comm,
        .layout = &layout,
        .ledger = &run->training.ledger,
        .admit = &run->admit,
        .plan = &run->plan,
        .old = &old,
        .wanted = wanted,
        .limits = &run->options.limits,
        .capacity_bytes = run->device.capacity_bytes,
        .make_plan = run_make_plan,
        .vote = vote,
        .user = run,
    };
    run->phase = PHASE_SWITCH;
    fault_here((int)run->comm.rank, (int64_t)run->step, PHASE_SWITCH);
    telemetry_phase(&run->telemetry, PHASE_SWITCH);
    ops_body_forget(run->ops); /* what was captured names the old plan's places */
    const enum status status = transition_run(&transition, &moved, why);
    if (status != STATUS_OK) {
        run->admit.shortage.any = false; /* a refusal, which ends nothing */
        return status;
    }
    run->previous = old;
    run->can_undo = true;
    run->training.strategy = *wanted;
    run->generation++;
    run_publish_committed(run);
    publish(run, wanted);
    const double seconds = units_monotonic_s() - started;
    report_switch(run, &old, &moved, who, seconds);
    result->step = run->step;
    result->generation = run->generation;
    result->took_ms = seconds * 1e3;
    if (moved.committed_before > moved.committed_after) {
        result->released_bytes = moved.committed_before - moved.committed_after;
    }
    return STATUS_OK;
}

/* ---- the link thread's answers ---- */

/* Kept until the next call: the result borrows them until it is packed. */
struct plan_answer {
    Ballast__V1__PlanSummary *before, *after;
    struct failure why;
};

static Ballast__V1__PlanSummary *summarize(struct run *run, const struct strategy *strategy,
                                           struct failure *why)
{
    struct plan plan;
    struct rehearsal_cost cost;
    if (rehearse(&run->planning, strategy, &plan, &cost, why) != STATUS_OK) {
        return NULL;
    }
    Ballast__V1__PlanSummary *summary = run_plan_summary(run, strategy, &plan, &cost);
    plan_fini(&plan);
    if (summary == NULL) {
        (void)fail(why, STATUS_OUT_OF_MEMORY, "no host memory for the answer");
    }
    return summary;
}

static void requested(const Ballast__Link__V1__Command *command, Ballast__V1__Setting ***settings,
                      size_t *n)
{
    if (command->body_case == BALLAST__LINK__V1__COMMAND__BODY_SET) {
        *settings = command->set->changes;
        *n = command->set->n_changes;
    } else if (command->body_case == BALLAST__LINK__V1__COMMAND__BODY_PLAN) {
        *settings = command->plan->changes;
        *n = command->plan->n_changes;
    }
}

void run_answer_plan(void *user, const Ballast__Link__V1__Command *command,
                     Ballast__Link__V1__CommandResult *result)
{
    static struct plan_answer answer; /* link thread only */
    struct run *run = user;
    run_free_plan_summary(answer.before);
    run_free_plan_summary(answer.after);
    answer = (struct plan_answer){0};

    pthread_mutex_lock(&run->shared.lock);
    const struct strategy current = run->shared.strategy;
    result->generation = run->shared.generation;
    result->step = run->shared.step;
    pthread_mutex_unlock(&run->shared.lock);

    struct strategy wanted = current;
    Ballast__V1__Setting **settings = NULL;
    size_t n = 0;
    requested(command, &settings, &n);
    enum status status = convert_settings_to_strategy(settings, n, &wanted, &answer.why);
    if (status == STATUS_OK) {
        /* A plan may ask what another start would need, a dry run only what a switch can do. */
        status = command->body_case == BALLAST__LINK__V1__COMMAND__BODY_SET
                     ? transition_check(&current, &wanted, &run->options.limits, &answer.why)
                     : strategy_check(&wanted, &run->options.limits, &answer.why);
    }
    if (status == STATUS_OK) {
        answer.before = summarize(run, &current, &answer.why);
        answer.after = answer.before == NULL ? NULL : summarize(run, &wanted, &answer.why);
        status = answer.after == NULL ? answer.why.status : STATUS_OK;
    }
    result->before = answer.before;
    result->after = answer.after;
    result->status = (char *)(uintptr_t)status_name(status);
    result->text = status == STATUS_OK ? result->text : answer.why.text;
    result->final = true;
}
