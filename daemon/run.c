/* The run's state machine. Pure; see run.h for the diagram. */
#include "daemon/run.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"

static void push(struct run *run, struct run_action action)
{
    assert(run->n_actions < RUN_MAX_ACTIONS);
    run->actions[(run->first_action + run->n_actions++) % RUN_MAX_ACTIONS] = action;
}

static void push_kind(struct run *run, enum run_action_kind kind)
{
    push(run, (struct run_action){.kind = kind});
}

static void push_failed(struct run *run, struct run_request request, enum status status,
                        const char *text)
{
    push(run, (struct run_action){
                  .kind = RUN_ACTION_FAILED, .request = request, .status = status, .text = text});
}

bool run_next_action(struct run *run, struct run_action *out_action)
{
    if (run->n_actions == 0)
        return false;
    *out_action = run->actions[run->first_action];
    run->first_action = (run->first_action + 1) % RUN_MAX_ACTIONS;
    run->n_actions--;
    return true;
}

/* The only place where the stage changes. */
static void move(struct run *run, enum run_stage to)
{
    static const bool allowed[][RUN_OVER + 1] = {
        [RUN_AWAITING] = {[RUN_RUNNING] = true, [RUN_OVER] = true},
        [RUN_RUNNING] = {[RUN_BROKEN] = true, [RUN_ENDED] = true, [RUN_CLOSING] = true},
        [RUN_BROKEN] = {[RUN_ENDED] = true, [RUN_CLOSING] = true},
        [RUN_ENDED] = {[RUN_CLOSING] = true},
        [RUN_CLOSING] = {[RUN_OVER] = true},
        [RUN_OVER] = {false},
    };
    assert(allowed[run->stage][to]);
    run->stage = to;
}

void run_init(struct run *run, const struct run_options *options)
{
    memset(run, 0, sizeof *run);
    run->stage = RUN_AWAITING;
    run->restarted = options->restarted;
    run->was_restarted = options->restarted;
    run->started_ms = options->now_ms;
    run->next_command_id = options->first_command_id;
}

void run_fini(struct run *run)
{
    heap_free(run->ranks);
    run->ranks = NULL;
    run->world_size = 0;
}

/* ---- waits and commands ---- */

static bool satisfied(const struct run *run, const struct run_wait *wait)
{
    switch (wait->kind) {
    case RUN_WAIT_STEP:
        return run->step >= wait->value;
    case RUN_WAIT_GENERATION:
        return run->generation >= wait->value;
    case RUN_WAIT_PAUSED:
        return run->paused == (wait->value != 0);
    case RUN_WAIT_END:
        return run->end_told;
    case RUN_WAIT_EVENT:
        return false;
    }
    return false;
}

static void remove_wait(struct run *run, size_t index)
{
    run->waits[index] = run->waits[--run->n_waits];
}

static void wake(struct run *run, const char *event)
{
    for (size_t i = 0; i < run->n_waits;) {
        const struct run_wait *wait = &run->waits[i];
        bool by_event = event && ((wait->kind == RUN_WAIT_EVENT && !strcmp(wait->event, event)) ||
                                  (wait->kind == RUN_WAIT_END && !strcmp(event, "end")));
        if (!by_event && !satisfied(run, wait)) {
            i++;
            continue;
        }
        push(run, (struct run_action){.kind = RUN_ACTION_WOKEN,
                                      .request = wait->request,
                                      .with_event = by_event});
        remove_wait(run, i);
    }
}

static void fail_waits(struct run *run, enum status status, const char *text)
{
    while (run->n_waits > 0) {
        push_failed(run, run->waits[0].request, status, text);
        remove_wait(run, 0);
    }
}

static void fail_pending(struct run *run, enum status status, const char *text)
{
    for (size_t i = 0; i < run->n_pending; i++) {
        if (run->pending[i].request.client)
            push_failed(run, run->pending[i].request, status, text);
    }
    run->n_pending = 0;
}

enum status run_command(struct run *run, struct run_request request, int kind,
                        uint64_t *out_command_id, struct failure *why)
{
    if (run->stage >= RUN_ENDED || (run->ranks && run->ranks[0].ended))
        return fail(why, STATUS_STOPPED, "the run has ended at step %llu; nothing was changed",
                    (unsigned long long)run->step);
    if (!run->ranks || !run->ranks[0].linked)
        return fail(why, STATUS_LINK_LOST,
                    "rank 0 is not linked to the daemon, so nobody can carry this out; nothing "
                    "was changed; try again in a second");
    if (run->n_pending == RUN_MAX_PENDING)
        return fail(why, STATUS_BUSY, "%d commands are under way already; try again when some "
                    "are done", RUN_MAX_PENDING);
    run->pending[run->n_pending++] = (struct run_pending){
        .request = request, .command_id = run->next_command_id, .kind = kind};
    *out_command_id = run->next_command_id++;
    return STATUS_OK;
}

static bool find_pending(const struct run *run, uint64_t command_id, size_t *out_index)
{
    for (size_t i = 0; i < run->n_pending; i++) {
        if (run->pending[i].command_id == command_id) {
            *out_index = i;
            return true;
        }
    }
    return false;
}

void run_take_back(struct run *run, uint64_t command_id)
{
    size_t index = 0;
    if (find_pending(run, command_id, &index))
        run->pending[index] = run->pending[--run->n_pending];
}

bool run_result(struct run *run, uint64_t command_id, bool final, struct run_pending *out_pending)
{
    size_t index = 0;
    if (!find_pending(run, command_id, &index))
        return false;
    *out_pending = run->pending[index];
    if (final)
        run->pending[index] = run->pending[--run->n_pending];
    return true;
}

enum status run_wait(struct run *run, const struct run_wait *wait, struct failure *why)
{
    if (!satisfied(run, wait) && run->end_told)
        return fail(why, STATUS_STOPPED, "the run has ended at step %llu; this will not happen",
                    (unsigned long long)run->step);
    if (run->n_waits == RUN_MAX_WAITS)
        return fail(why, STATUS_BUSY, "%d requests are waiting already", RUN_MAX_WAITS);
    run->waits[run->n_waits++] = *wait;
    wake(run, NULL);
    return STATUS_OK;
}

static bool same_request(struct run_request a, struct run_request b)
{
    return a.client == b.client && a.id == b.id;
}

bool run_cancel_wait(struct run *run, struct run_request request)
{
    for (size_t i = 0; i < run->n_waits; i++) {
        if (same_request(run->waits[i].request, request)) {
            remove_wait(run, i);
            return true;
        }
    }
    return false;
}

bool run_is_pending(const struct run *run, struct run_request request)
{
    for (size_t i = 0; i < run->n_pending; i++) {
        if (same_request(run->pending[i].request, request))
            return true;
    }
    return false;
}

void run_forget_client(struct run *run, uint64_t client)
{
    for (size_t i = 0; i < run->n_waits;) {
        if (run->waits[i].request.client == client)
            remove_wait(run, i);
        else
            i++;
    }
    for (size_t i = 0; i < run->n_pending; i++) {
        if (run->pending[i].request.client == client)
            run->pending[i].request = (struct run_request){0};
    }
}

/* ---- ranks ---- */

static bool is_missing(const struct run_rank *rank)
{
    return rank->seen && !rank->linked && !rank->ended && !rank->lost;
}

/* Every rank has said goodbye or is known to be lost. */
static bool all_accounted(const struct run *run)
{
    for (uint32_t i = 0; i < run->world_size; i++) {
        if (!run->ranks[i].ended && !run->ranks[i].lost)
            return false;
    }
    return run->world_size > 0;
}

static void tell_end(struct run *run)
{
    if (run->end_told)
        return;
    run->end_told = true;
    push_kind(run, RUN_ACTION_END);
    push_kind(run, RUN_ACTION_ACK_END);
}

static void begin_closing(struct run *run, int64_t now_ms)
{
    tell_end(run);
    move(run, RUN_CLOSING);
    run->close_at_ms = now_ms + RUN_LINGER_MS;
    push_kind(run, RUN_ACTION_CLOSE);
}

/* What follows from links and goodbyes; safe to call at any time. */
static void settle(struct run *run, int64_t now_ms)
{
    bool live = run->stage == RUN_RUNNING || run->stage == RUN_BROKEN;
    if (live && all_accounted(run)) {
        tell_end(run);
        move(run, RUN_ENDED);
    }
    live = run->stage == RUN_RUNNING || run->stage == RUN_BROKEN || run->stage == RUN_ENDED;
    if (live && run->n_linked == 0 && !run->story_open)
        begin_closing(run, now_ms);
}

/* Mark what is missing as lost; the first loss of the run is told, with its culprit. */
static void tell_loss(struct run *run)
{
    run->story_open = false;
    bool any = false;
    uint32_t first = 0;
    for (uint32_t i = 0; i < run->world_size; i++) {
        struct run_rank *rank = &run->ranks[i];
        if (!is_missing(rank))
            continue;
        if (!any || rank->closed_order < run->ranks[first].closed_order)
            first = i;
        any = true;
        rank->lost = true;
    }
    if (!any || run->loss_told)
        return;
    run->loss_told = true;
    run->culprit = first;
    push_kind(run, RUN_ACTION_RANK_LOST);
    move(run, RUN_BROKEN);
}

static enum status adopt_world(struct run *run, uint32_t world_size, struct failure *why)
{
    if (world_size == 0 || world_size > RUN_MAX_RANKS)
        return fail(why, STATUS_OUT_OF_RANGE, "world size %u is not within 1..%d", world_size,
                    RUN_MAX_RANKS);
    if (run->world_size != 0 && run->world_size != world_size)
        return fail(why, STATUS_CONFLICT, "world size %u does not agree with %u of the other ranks",
                    world_size, run->world_size);
    if (run->world_size == 0) {
        run->ranks = heap_calloc(world_size, sizeof *run->ranks);
        if (!run->ranks)
            return fail(why, STATUS_OUT_OF_MEMORY, "out of memory for %u ranks", world_size);
        run->world_size = world_size;
    }
    return STATUS_OK;
}

enum status run_link_up(struct run *run, uint32_t rank_number, uint32_t world_size, int32_t pid,
                        int64_t now_ms, struct failure *why)
{
    if (run->stage == RUN_CLOSING || run->stage == RUN_OVER)
        return fail(why, STATUS_STOPPED, "the run has ended; this daemon is about to exit");
    if (rank_number >= world_size)
        return fail(why, STATUS_OUT_OF_RANGE, "rank %u does not exist in a world of %u",
                    rank_number, world_size);
    enum status status = adopt_world(run, world_size, why);
    if (status != STATUS_OK)
        return status;
    struct run_rank *rank = &run->ranks[rank_number];
    if (rank->linked && rank->pid != pid)
        return fail(why, STATUS_CONFLICT, "rank %u is linked already, by process %d", rank_number,
                    rank->pid);
    if (!rank->linked)
        run->n_linked++;
    bool was_moving = rank->seen;
    rank->linked = rank->seen = true;
    rank->lost = false;
    rank->pid = pid;
    rank->heard_ms = now_ms;
    if (!was_moving)
        rank->moved_ms = now_ms;
    if (run->stage == RUN_AWAITING)
        move(run, RUN_RUNNING);
    if (run->restarted && rank_number == 0) {
        run->restarted = false;
        push_kind(run, RUN_ACTION_DAEMON_LOST);
    }
    return STATUS_OK;
}

void run_link_closed(struct run *run, uint32_t rank_number, int64_t now_ms)
{
    assert(rank_number < run->world_size && run->ranks[rank_number].linked);
    struct run_rank *rank = &run->ranks[rank_number];
    rank->linked = false;
    rank->closed_ms = now_ms;
    rank->closed_order = ++run->n_closed;
    run->n_linked--;
    if (!rank->ended) {
        if (run->loss_told) {
            rank->lost = true; /* a consequence of the loss that was told */
        } else if (!run->story_open) {
            run->story_open = true;
            run->story_since_ms = now_ms;
        }
    }
    if (rank_number == 0)
        fail_pending(run, STATUS_LINK_LOST,
                     "the link to rank 0 closed before it answered; look at `status` to see "
                     "whether the change took effect");
    settle(run, now_ms);
}

void run_heard(struct run *run, uint32_t rank, int64_t now_ms)
{
    assert(rank < run->world_size);
    run->ranks[rank].heard_ms = now_ms;
}

void run_rank_at(struct run *run, uint32_t rank_number, enum phase phase, uint64_t step,
                 uint64_t heartbeat, int64_t now_ms)
{
    assert(rank_number < run->world_size);
    struct run_rank *rank = &run->ranks[rank_number];
    rank->heard_ms = now_ms;
    if (rank->heartbeat != heartbeat || rank->step != step || rank->phase != phase)
        rank->moved_ms = now_ms;
    rank->phase = phase;
    rank->step = step;
    rank->heartbeat = heartbeat;
}

void run_rank_ended(struct run *run, uint32_t rank_number, uint32_t exit_code, int64_t now_ms)
{
    assert(rank_number < run->world_size);
    struct run_rank *rank = &run->ranks[rank_number];
    rank->heard_ms = now_ms;
    if (rank->ended) {
        /* It linked again because the acknowledgement got lost. */
        if (run->end_told)
            push_kind(run, RUN_ACTION_ACK_END);
        return;
    }
    rank->ended = true;
    rank->exit_code = exit_code;
    if (rank_number == 0)
        fail_pending(run, STATUS_STOPPED, "the run ended before this command was carried out");
    if (run->end_told)
        push_kind(run, RUN_ACTION_ACK_END);
    settle(run, now_ms);
}

/* ---- the run ---- */

void run_progress(struct run *run, uint64_t completed_steps)
{
    if (completed_steps > run->step)
        run->step = completed_steps;
    wake(run, NULL);
}

void run_state(struct run *run, uint64_t completed_steps, uint64_t generation, bool paused)
{
    if (completed_steps > run->step)
        run->step = completed_steps;
    if (generation > run->generation)
        run->generation = generation;
    run->paused = paused;
    wake(run, NULL);
}

void run_strategy(struct run *run, const struct strategy *strategy)
{
    run->strategy = *strategy;
    run->strategy_known = true;
}

void run_limits(struct run *run, const struct strategy_limits *limits)
{
    run->limits = *limits;
    run->limits_known = true;
}

void run_event(struct run *run, const char *type)
{
    wake(run, type);
    if (run->end_told && strcmp(type, "end") == 0)
        fail_waits(run, STATUS_STOPPED, "the run ended before this happened");
}

void run_tick(struct run *run, int64_t now_ms)
{
    if (run->stage == RUN_AWAITING && now_ms - run->started_ms >= RUN_FIRST_LINK_MS) {
        if (run->restarted) {
            run->restarted = false;
            push_kind(run, RUN_ACTION_DAEMON_LOST);
        }
        fail_waits(run, STATUS_LINK_LOST, "no worker linked; the daemon ends");
        move(run, RUN_OVER);
        push_kind(run, RUN_ACTION_EXIT);
        return;
    }
    if (run->story_open && now_ms - run->story_since_ms >= RUN_STORY_MS)
        tell_loss(run);
    settle(run, now_ms);
    if (run->stage == RUN_CLOSING && now_ms >= run->close_at_ms) {
        move(run, RUN_OVER);
        push_kind(run, RUN_ACTION_EXIT);
    }
}

size_t run_lost_ranks(const struct run *run, uint32_t *out_ranks, size_t max)
{
    size_t count = 0;
    /* Selection in order: worlds are small and this happens once. */
    for (uint64_t after = 0;;) {
        const struct run_rank *next = NULL;
        for (uint32_t i = 0; i < run->world_size; i++) {
            const struct run_rank *rank = &run->ranks[i];
            if (rank->lost && rank->closed_order > after &&
                (!next || rank->closed_order < next->closed_order))
                next = rank;
        }
        if (!next)
            return count;
        if (count < max)
            out_ranks[count] = (uint32_t)(next - run->ranks);
        count++;
        after = next->closed_order;
    }
}
