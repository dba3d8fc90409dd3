/* Status, ranks and greeting from the state. See answer.h. */
#include "daemon/answer.h"

#include <math.h>
#include <string.h>
#include "proto/base/units.h"
#include "proto/convert.h"
#include "proto/version.h"

static void gather_facts(const struct state *state, int64_t now_ms, struct health_facts *facts)
{
    const Ballast__V1__StepRecord *step = history_newest_step(&state->history);
    const Ballast__V1__OomReport *oom = state->heard.oom;
    *facts = (struct health_facts){
        .now_ms = now_ms,
        .disk_known = state->disk.known,
        .disk_free_bytes = state->disk.free_bytes,
        .journal_broken = state->journal.broken,
        .step_skipped = step && step->skipped,
        .loss_not_finite = step && !isfinite(step->loss),
        .oom_reported = oom != NULL && !state->heard.oom_is_past,
    };
    if (facts->oom_reported) {
        enum phase phase = PHASE_SETUP;
        facts->oom_step = oom->step;
        facts->oom_rank = oom->rank;
        facts->oom_phase = convert_phase_from_wire(oom->phase, &phase) ? phase_name(phase) : NULL;
    }
}

static const char *doing(const struct state *state)
{
    switch (state->run.stage) {
    case RUN_AWAITING:
        return "waiting for workers";
    case RUN_RUNNING:
    case RUN_BROKEN:
        if (state->heard.run && state->heard.run->doing[0])
            return state->heard.run->doing;
        return "starting";
    case RUN_ENDED:
    case RUN_CLOSING:
    case RUN_OVER:
        return "ended";
    }
    return "";
}

/* A plan without what lies at its peaks. */
static void brief_plan(struct answer_status *answer)
{
    size_t n = answer->plan.n_phases < N_PHASES ? answer->plan.n_phases : N_PHASES;
    for (size_t i = 0; i < n; i++) {
        answer->phases[i] = *answer->plan.phases[i];
        answer->phases[i].n_at_peak = 0;
        answer->phases[i].n_live = 0;
        answer->phase_list[i] = &answer->phases[i];
    }
    answer->plan.n_phases = n;
    answer->plan.phases = answer->phase_list;
    answer->plan.n_strategy = 0; /* the status has it */
}

void answer_status(const struct state *state, int64_t now_ms, bool brief,
                   struct answer_status *out_answer)
{
    struct answer_status *answer = out_answer;
    Ballast__Control__V1__StatusReply *message = &answer->message;
    const struct heard *heard = &state->heard;
    ballast__control__v1__status_reply__init(message);
    message->run_id = (char *)state->run_id;
    message->run_dir = (char *)state->run_dir;
    message->started = (char *)state->started;
    message->uptime_ms = (uint64_t)(units_unix_ms() - state->started_unix_ms);
    message->world_size = state->run.world_size;
    message->linked_ranks = state->run.n_linked;
    message->step = state->run.step;
    message->generation = state->run.generation;
    message->paused = state->run.paused;
    message->doing = (char *)doing(state);
    message->disk_used_bytes = state->disk.used_bytes;
    message->disk_free_bytes = state->disk.free_bytes;
    message->last_step = (Ballast__V1__StepRecord *)history_newest_step(&state->history);
    if (heard->hello) {
        message->model = heard->hello->model;
        message->device = heard->hello->device;
        message->n_steps = heard->hello->n_steps;
        message->n_strategy = heard->hello->n_strategy;
        message->strategy = heard->hello->strategy;
    }
    if (heard->run) {
        message->has_save = heard->run->has_save;
        message->last_save_step = heard->run->last_save_step;
        message->n_strategy = heard->run->n_strategy;
        message->strategy = heard->run->strategy;
    }
    if (heard->plan) {
        answer->plan = *heard->plan;
        if (brief)
            brief_plan(answer);
        message->plan = &answer->plan;
    }
    struct health_facts facts;
    gather_facts(state, now_ms, &facts);
    health_judge(&state->run, &facts, &answer->health);
    message->health = (char *)health_name(answer->health.level);
    for (size_t i = 0; i < answer->health.n_reasons; i++)
        answer->reasons[i] = answer->health.reasons[i];
    message->n_reasons = answer->health.n_reasons;
    message->reasons = answer->reasons;
}

bool answer_more_ranks(const struct state *state, uint32_t cursor)
{
    for (uint32_t i = cursor; i < state->heard.n_ranks; i++) {
        if (state->heard.ranks[i])
            return true;
    }
    return false;
}

size_t answer_ranks(const struct state *state, int64_t now_ms, uint32_t *cursor,
                    Ballast__V1__RankState *out_ranks[static ANSWER_RANKS_A_PART])
{
    size_t count = 0;
    uint32_t i = *cursor;
    for (; i < state->heard.n_ranks && count < ANSWER_RANKS_A_PART; i++) {
        Ballast__V1__RankState *rank = state->heard.ranks[i];
        if (!rank)
            continue;
        int64_t age_ms = now_ms - state->run.ranks[i].heard_ms;
        rank->age_ms = age_ms > 0 ? (uint64_t)age_ms : 0;
        rank->linked = state->run.ranks[i].linked;
        out_ranks[count++] = rank;
    }
    *cursor = i;
    return count;
}

void answer_hello(const struct state *state, Ballast__V1__Hello *out_hello)
{
    static char magic[] = PROTOCOL_MAGIC, build[] = BALLAST_VERSION;
    static char operate[] = "operate", follow[] = "follow", watch[] = "watch", schema[] = "schema";
    static char *capabilities[] = {operate, follow, watch, schema};
    ballast__v1__hello__init(out_hello);
    out_hello->magic = magic;
    out_hello->major = PROTOCOL_MAJOR;
    out_hello->minor = PROTOCOL_MINOR;
    out_hello->build = build;
    out_hello->run_id = (char *)state->run_id;
    out_hello->n_capabilities = sizeof capabilities / sizeof *capabilities;
    out_hello->capabilities = capabilities;
}
