/* The request table and its checks. See command.h. */
#include "daemon/command.h"

#include <stdio.h>
#include <string.h>
#include "daemon/answer.h"
#include "daemon/schema.h"
#include "proto/convert.h"

enum { PART_RECORDS = 64 };

/* Everything one request is handled with. */
struct context {
    struct state *state;
    const struct command_port *port;
    const struct command_caller *caller;
    const Ballast__Control__V1__Request *request;
    int64_t now_ms;
    struct command_result *result;
    struct failure *why;
};

#define REPLY_BODY(name) BALLAST__CONTROL__V1__REPLY__BODY_##name

/* ---- replies ---- */

static enum status send_reply(const struct context *context, Ballast__Control__V1__Reply *reply,
                              bool more)
{
    reply->more = more;
    const struct command_port *port = context->port;
    enum status status = port->reply(port->owner, context->caller->request, reply);
    if (status != STATUS_OK)
        return fail(context->why, status, "the answer could not be sent: %s", status_text(status));
    return STATUS_OK;
}

void command_error(const struct state *state, const struct failure *why,
                   Ballast__Control__V1__ErrorReply *out_error,
                   Ballast__Control__V1__Reply *out_reply)
{
    ballast__control__v1__error_reply__init(out_error);
    out_error->status = (char *)status_name(why->status);
    out_error->text = (char *)why->text;
    out_error->generation = state->run.generation;
    ballast__control__v1__reply__init(out_reply);
    out_reply->body_case = REPLY_BODY(ERROR);
    out_reply->error = out_error;
}

/* ---- answered from the state ---- */

static enum status handle_status(struct context *context)
{
    struct answer_status answer;
    answer_status(context->state, context->now_ms, false, &answer);
    Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.body_case = REPLY_BODY(STATUS);
    reply.status = &answer.message;
    return send_reply(context, &reply, false);
}

static enum status handle_ranks(struct context *context)
{
    uint32_t cursor = 0;
    bool more = true;
    while (more) {
        Ballast__V1__RankState *ranks[ANSWER_RANKS_A_PART];
        Ballast__Control__V1__RanksReply body = BALLAST__CONTROL__V1__RANKS_REPLY__INIT;
        body.n_ranks = answer_ranks(context->state, context->now_ms, &cursor, ranks);
        body.ranks = ranks;
        more = answer_more_ranks(context->state, cursor);
        Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
        reply.body_case = REPLY_BODY(RANKS);
        reply.ranks = &body;
        enum status status = send_reply(context, &reply, more);
        if (status != STATUS_OK)
            return status;
    }
    return STATUS_OK;
}

static enum status find_phase_plan(const struct context *context, Ballast__V1__Phase wire,
                                   Ballast__V1__PhasePlan **out_plan)
{
    enum phase phase = N_PHASES;
    if (!convert_phase_from_wire(wire, &phase))
        return fail(context->why, STATUS_INVALID,
                    "at_peak: no such phase (%d); it is one of setup forward backward step eval "
                    "save switch", (int)wire);
    const Ballast__V1__PlanSummary *plan = context->state->heard.plan;
    for (size_t i = 0; plan && i < plan->n_phases; i++) {
        if (plan->phases[i]->phase == wire) {
            *out_plan = plan->phases[i];
            return STATUS_OK;
        }
    }
    return fail(context->why, STATUS_NOT_FOUND,
                plan ? "the plan in force has no phase %s"
                     : "no plan has been heard from rank 0 yet, so not that of phase %s",
                phase_name(phase));
}

static enum status handle_memory(struct context *context)
{
    const Ballast__Control__V1__MemoryRequest *request = context->request->memory;
    const Ballast__V1__StepRecord *step = history_newest_step(&context->state->history);
    Ballast__Control__V1__MemoryReply body = BALLAST__CONTROL__V1__MEMORY_REPLY__INIT;
    if (request->at_peak_case == BALLAST__CONTROL__V1__MEMORY_REQUEST__AT_PEAK_PHASE) {
        enum status status = find_phase_plan(context, request->phase, &body.at_peak);
        if (status != STATUS_OK)
            return status;
    }
    if (step) {
        body.n_peak_bytes = step->n_peak_bytes;
        body.peak_bytes = step->peak_bytes;
    }
    if (context->state->heard.plan)
        body.limit_bytes = context->state->heard.plan->limit_bytes;
    uint32_t cursor = 0;
    bool more = true;
    while (more) {
        Ballast__V1__RankState *ranks[ANSWER_RANKS_A_PART];
        body.n_ranks = answer_ranks(context->state, context->now_ms, &cursor, ranks);
        body.ranks = ranks;
        more = answer_more_ranks(context->state, cursor);
        Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
        reply.body_case = REPLY_BODY(MEMORY);
        reply.memory = &body;
        enum status status = send_reply(context, &reply, more);
        if (status != STATUS_OK)
            return status;
        body = (Ballast__Control__V1__MemoryReply)BALLAST__CONTROL__V1__MEMORY_REPLY__INIT;
    }
    return STATUS_OK;
}

static enum status check_count(const struct context *context, uint32_t count, size_t *out_count)
{
    if (count > COMMAND_MAX_RECORDS)
        return fail(context->why, STATUS_OUT_OF_RANGE,
                    "count %u is above %d, the most one answer may hold; ask again from the last "
                    "one received", count, COMMAND_MAX_RECORDS);
    *out_count = count ? count : COMMAND_DEFAULT_RECORDS;
    return STATUS_OK;
}

static enum status handle_steps(struct context *context)
{
    const struct history *history = &context->state->history;
    const Ballast__Control__V1__StepsRequest *request = context->request->steps;
    size_t count = 0, total = history->steps.count;
    enum status status = check_count(context, request->count, &count);
    if (status != STATUS_OK)
        return status;
    size_t at = request->from ? history_find_step(history, request->from)
                              : (total > count ? total - count : 0);
    size_t end = total - at > count ? at + count : total;
    do {
        void *part[PART_RECORDS];
        Ballast__Control__V1__StepsReply body = BALLAST__CONTROL__V1__STEPS_REPLY__INIT;
        body.n_steps =
            history_part(&history->steps, at, end, COMMAND_PART_BYTES, part, PART_RECORDS);
        body.steps = (Ballast__V1__StepRecord **)part;
        at += body.n_steps;
        Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
        reply.body_case = REPLY_BODY(STEPS);
        reply.steps = &body;
        status = send_reply(context, &reply, at < end);
    } while (status == STATUS_OK && at < end);
    return status;
}

static enum status handle_events(struct context *context)
{
    const struct history *history = &context->state->history;
    const Ballast__Control__V1__EventsRequest *request = context->request->events;
    size_t count = 0, total = history->events.count;
    enum status status = check_count(context, request->count, &count);
    if (status != STATUS_OK)
        return status;
    size_t at = request->after_sequence ? history_find_event(history, request->after_sequence)
                                        : (total > count ? total - count : 0);
    /* Who follows must not miss those between the backlog's end and now. */
    size_t end = !request->follow && total - at > count ? at + count : total;
    do {
        void *part[PART_RECORDS];
        Ballast__Control__V1__EventsReply body = BALLAST__CONTROL__V1__EVENTS_REPLY__INIT;
        body.n_events =
            history_part(&history->events, at, end, COMMAND_PART_BYTES, part, PART_RECORDS);
        body.events = (Ballast__V1__Event **)part;
        at += body.n_events;
        Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
        reply.body_case = REPLY_BODY(EVENTS);
        reply.events = &body;
        status = send_reply(context, &reply, request->follow || at < end);
    } while (status == STATUS_OK && at < end);
    if (request->follow) {
        context->result->outcome = COMMAND_FOLLOW;
        context->result->after_sequence = context->state->journal.next_sequence - 1;
    }
    return status;
}

static enum status handle_oom(struct context *context)
{
    Ballast__Control__V1__OomReply body = BALLAST__CONTROL__V1__OOM_REPLY__INIT;
    body.report = context->state->heard.oom;
    if (!body.report)
        return fail(context->why, STATUS_NOT_FOUND, "nothing ran out of memory in this run so far");
    Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.body_case = REPLY_BODY(OOM);
    reply.oom = &body;
    return send_reply(context, &reply, false);
}

static enum status handle_schema(struct context *context)
{
    if (schema_n_bytes == 0)
        return fail(context->why, STATUS_UNSUPPORTED,
                    "this daemon was built without protoc, so it does not carry its schema");
    Ballast__Control__V1__SchemaReply body = BALLAST__CONTROL__V1__SCHEMA_REPLY__INIT;
    body.file_descriptor_set.data = (uint8_t *)schema_bytes;
    body.file_descriptor_set.len = schema_n_bytes;
    Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.body_case = REPLY_BODY(SCHEMA);
    reply.schema = &body;
    return send_reply(context, &reply, false);
}

/* ---- opened ---- */

static enum status handle_watch(struct context *context)
{
    uint32_t interval_ms = context->request->watch->interval_ms;
    if (interval_ms < COMMAND_MIN_INTERVAL_MS || interval_ms > COMMAND_MAX_INTERVAL_MS)
        return fail(context->why, STATUS_OUT_OF_RANGE, "interval_ms %u is not within %d..%d",
                    interval_ms, COMMAND_MIN_INTERVAL_MS, COMMAND_MAX_INTERVAL_MS);
    context->result->outcome = COMMAND_WATCH;
    context->result->interval_ms = interval_ms;
    return STATUS_OK;
}

static enum status handle_cancel(struct context *context)
{
    context->result->outcome = COMMAND_CANCEL;
    context->result->cancel_id = context->request->cancel->request_id;
    return STATUS_OK;
}

static const char *const event_types[] = {"start", "switch", "refused",   "oom",
                                          "save",  "skip",   "pause",     "resume",
                                          "eval",  "end",    "rank_lost", "daemon_lost",
                                          "external"};

bool command_is_event_type(const char *type)
{
    for (size_t i = 0; i < sizeof event_types / sizeof *event_types; i++) {
        if (strcmp(event_types[i], type) == 0)
            return true;
    }
    return false;
}

static enum status handle_wait(struct context *context)
{
    const Ballast__Control__V1__WaitRequest *request = context->request->wait;
    struct run_wait wait = {.request = context->caller->request};
    switch (request->condition_case) {
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_STEP:
        wait.kind = RUN_WAIT_STEP;
        wait.value = request->step;
        break;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_GENERATION:
        wait.kind = RUN_WAIT_GENERATION;
        wait.value = request->generation;
        break;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_EVENT:
        if (!command_is_event_type(request->event))
            return fail(context->why, STATUS_INVALID,
                        "event '%.40s' is not one of start switch refused oom save skip pause "
                        "resume rank_lost daemon_lost end eval external", request->event);
        wait.kind = RUN_WAIT_EVENT;
        snprintf(wait.event, sizeof wait.event, "%s", request->event);
        break;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_END:
        if (!request->end)
            return fail(context->why, STATUS_INVALID, "end can only be waited for as true");
        wait.kind = RUN_WAIT_END;
        break;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_PAUSED:
        wait.kind = RUN_WAIT_PAUSED;
        wait.value = request->paused ? 1 : 0;
        break;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION__NOT_SET:
    case _BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION__CASE_IS_INT_SIZE:
    default:
        return fail(context->why, STATUS_INVALID,
                    "wait needs a condition: step, generation, event, end or paused");
    }
    uint64_t n_steps = context->state->heard.hello ? context->state->heard.hello->n_steps : 0;
    if (wait.kind == RUN_WAIT_STEP && n_steps > 0 && wait.value > n_steps)
        return fail(context->why, STATUS_OUT_OF_RANGE,
                    "step %llu will not come: the run has %llu steps",
                    (unsigned long long)wait.value, (unsigned long long)n_steps);
    context->result->outcome = COMMAND_OPEN;
    return run_wait(&context->state->run, &wait, context->why);
}

/* ---- handed to rank 0 ---- */

static enum status forward(struct context *context, Ballast__Link__V1__Command *command)
{
    char who[64];
    snprintf(who, sizeof who, "uid %u pid %d", context->caller->uid, context->caller->pid);
    command->who = who;
    enum status status = run_command(&context->state->run, context->caller->request,
                                     (int)context->request->body_case, &command->id, context->why);
    if (status != STATUS_OK)
        return status;
    status = context->port->send(context->port->owner, command);
    if (status != STATUS_OK) {
        run_take_back(&context->state->run, command->id);
        return fail(context->why, status, "the command could not be handed to rank 0: %s; nothing "
                    "was changed", status_text(status));
    }
    context->result->outcome = COMMAND_OPEN;
    return STATUS_OK;
}

static enum status forward_verb(struct context *context, const char *verb)
{
    Ballast__Link__V1__SimpleCommand body = BALLAST__LINK__V1__SIMPLE_COMMAND__INIT;
    body.verb = (char *)verb;
    Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
    command.body_case = BALLAST__LINK__V1__COMMAND__BODY_SIMPLE;
    command.simple = &body;
    return forward(context, &command);
}

/* The changes, applied to a copy of the strategy in force, have to give a legal strategy. */
static enum status check_changes(const struct context *context,
                                 Ballast__V1__Setting *const *changes, size_t n)
{
    const struct run *run = &context->state->run;
    if (n > COMMAND_MAX_CHANGES)
        return fail(context->why, STATUS_TOO_LARGE, "%zu changes in one request; at most %d", n,
                    COMMAND_MAX_CHANGES);
    if (!run->strategy_known || !run->limits_known)
        return fail(context->why, STATUS_AGAIN,
                    "rank 0 has not told its strategy yet; try again in a second");
    for (size_t i = 0; i < n; i++) {
        /* Long ones would fill the error text; no key and no value is that long. */
        if (strlen(changes[i]->key) > 64 || strlen(changes[i]->value) >= STRATEGY_VALUE_BYTES)
            return fail(context->why, STATUS_INVALID,
                        "change %zu: key '%.64s' or its value is too long (limits 64 and %d bytes)",
                        i + 1, changes[i]->key, STRATEGY_VALUE_BYTES - 1);
    }
    struct strategy strategy = run->strategy;
    enum status status = convert_settings_to_strategy(changes, n, &strategy, context->why);
    if (status != STATUS_OK)
        return status;
    return strategy_check(&strategy, &run->limits, context->why);
}

static enum status check_generation(const struct context *context, uint64_t expected)
{
    uint64_t generation = context->state->run.generation;
    if (expected != generation)
        return fail(context->why, STATUS_CONFLICT,
                    "the run is at generation %llu, not %llu: somebody changed the strategy since "
                    "you looked; look again and repeat", (unsigned long long)generation,
                    (unsigned long long)expected);
    return STATUS_OK;
}

static enum status handle_set(struct context *context)
{
    const Ballast__Control__V1__SetRequest *request = context->request->set;
    if (request->n_changes == 0)
        return fail(context->why, STATUS_INVALID,
                    "set needs at least one KEY=VALUE, e.g. checkpointing=block:1");
    Ballast__Link__V1__SetCommand body = BALLAST__LINK__V1__SET_COMMAND__INIT;
    enum status status = STATUS_OK;
    if (request->expected_case == BALLAST__CONTROL__V1__SET_REQUEST__EXPECTED_IF_GENERATION) {
        status = check_generation(context, request->if_generation);
        body.if_generation_plus_one = request->if_generation + 1;
    }
    if (status == STATUS_OK)
        status = check_changes(context, request->changes, request->n_changes);
    if (status != STATUS_OK)
        return status;
    body.n_changes = request->n_changes;
    body.changes = request->changes;
    body.dry_run = request->dry_run;
    Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
    command.body_case = BALLAST__LINK__V1__COMMAND__BODY_SET;
    command.set = &body;
    return forward(context, &command);
}

static enum status handle_undo(struct context *context)
{
    const Ballast__Control__V1__UndoRequest *request = context->request->undo;
    Ballast__Link__V1__SetCommand body = BALLAST__LINK__V1__SET_COMMAND__INIT;
    body.undo = true;
    if (request->expected_case == BALLAST__CONTROL__V1__UNDO_REQUEST__EXPECTED_IF_GENERATION) {
        enum status status = check_generation(context, request->if_generation);
        if (status != STATUS_OK)
            return status;
        body.if_generation_plus_one = request->if_generation + 1;
    }
    Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
    command.body_case = BALLAST__LINK__V1__COMMAND__BODY_SET;
    command.set = &body;
    return forward(context, &command);
}

static enum status handle_plan(struct context *context)
{
    const Ballast__Control__V1__PlanRequest *request = context->request->plan;
    enum status status = check_changes(context, request->changes, request->n_changes);
    if (status != STATUS_OK)
        return status;
    Ballast__Link__V1__PlanCommand body = BALLAST__LINK__V1__PLAN_COMMAND__INIT;
    body.n_changes = request->n_changes;
    body.changes = request->changes;
    Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
    command.body_case = BALLAST__LINK__V1__COMMAND__BODY_PLAN;
    command.plan = &body;
    return forward(context, &command);
}

static enum status handle_resume(struct context *context)
{
    uint64_t for_steps = context->request->resume->for_steps;
    if (for_steps > COMMAND_MAX_FOR_STEPS)
        return fail(context->why, STATUS_OUT_OF_RANGE, "for_steps %llu is above %d",
                    (unsigned long long)for_steps, COMMAND_MAX_FOR_STEPS);
    Ballast__Link__V1__ResumeCommand body = BALLAST__LINK__V1__RESUME_COMMAND__INIT;
    body.for_steps = for_steps;
    Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
    command.body_case = BALLAST__LINK__V1__COMMAND__BODY_RESUME;
    command.resume = &body;
    return forward(context, &command);
}

static enum status handle_save(struct context *context)
{
    return forward_verb(context, "save");
}

static enum status handle_eval(struct context *context)
{
    return forward_verb(context, "eval");
}

static enum status handle_pause(struct context *context)
{
    return forward_verb(context, "pause");
}

static enum status handle_stop(struct context *context)
{
    return forward_verb(context, "stop");
}

static enum status handle_hello(struct context *context)
{
    return fail(context->why, STATUS_INVALID, "this connection has been greeted already");
}

/* ---- the table ---- */

#define REQUEST_BODY(name) BALLAST__CONTROL__V1__REQUEST__BODY_##name

static const struct row {
    Ballast__Control__V1__Request__BodyCase body;
    const char *name;
    enum status (*handle)(struct context *context);
} table[] = {
    {REQUEST_BODY(HELLO), "hello", handle_hello},
    {REQUEST_BODY(STATUS), "status", handle_status},
    {REQUEST_BODY(MEMORY), "memory", handle_memory},
    {REQUEST_BODY(RANKS), "ranks", handle_ranks},
    {REQUEST_BODY(STEPS), "steps", handle_steps},
    {REQUEST_BODY(EVENTS), "events", handle_events},
    {REQUEST_BODY(WATCH), "watch", handle_watch},
    {REQUEST_BODY(CANCEL), "cancel", handle_cancel},
    {REQUEST_BODY(PLAN), "plan", handle_plan},
    {REQUEST_BODY(SET), "set", handle_set},
    {REQUEST_BODY(UNDO), "undo", handle_undo},
    {REQUEST_BODY(WAIT), "wait", handle_wait},
    {REQUEST_BODY(SAVE), "save", handle_save},
    {REQUEST_BODY(EVAL), "eval", handle_eval},
    {REQUEST_BODY(PAUSE), "pause", handle_pause},
    {REQUEST_BODY(RESUME), "resume", handle_resume},
    {REQUEST_BODY(STOP), "stop", handle_stop},
    {REQUEST_BODY(OOM), "oom", handle_oom},
    {REQUEST_BODY(SCHEMA), "schema", handle_schema},
};

static const struct row *find_row(const Ballast__Control__V1__Request *request)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (table[i].body == request->body_case)
            return &table[i];
    }
    return NULL;
}

const char *command_name(const Ballast__Control__V1__Request *request)
{
    const struct row *row = find_row(request);
    return row ? row->name : "unknown";
}

enum status command_handle(struct state *state, const struct command_port *port,
                           const struct command_caller *caller,
                           const Ballast__Control__V1__Request *request, int64_t now_ms,
                           struct command_result *out_result, struct failure *why)
{
    const struct row *row = find_row(request);
    if (!row)
        return fail(why, STATUS_UNSUPPORTED,
                    "request %llu is empty or of a kind this daemon (build %s) does not know",
                    (unsigned long long)request->id, BALLAST_VERSION);
    *out_result = (struct command_result){.outcome = COMMAND_ANSWERED};
    struct context context = {.state = state, .port = port, .caller = caller, .request = request,
                              .now_ms = now_ms, .result = out_result, .why = why};
    return row->handle(&context);
}

/* ---- rank 0's answers ---- */

static void fill_command_reply(const Ballast__Link__V1__CommandResult *result,
                               Ballast__Control__V1__CommandReply *body)
{
    ballast__control__v1__command_reply__init(body);
    body->text = result->text;
    body->step = result->step;
    body->generation = result->generation;
    body->before = result->before;
    body->after = result->after;
    body->path = result->path;
    body->loss = result->loss;
    body->tokens = result->tokens;
    body->released_bytes = result->released_bytes;
    body->took_ms = result->took_ms;
    body->accepted = !result->final;
}

void command_finish(struct state *state, const struct command_port *port,
                    const struct run_pending *pending,
                    const Ballast__Link__V1__CommandResult *result)
{
    if (pending->request.client == 0)
        return;
    Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
    Ballast__Control__V1__ErrorReply error;
    Ballast__Control__V1__CommandReply body;
    Ballast__Control__V1__PlanReply plan = BALLAST__CONTROL__V1__PLAN_REPLY__INIT;
    struct failure why;
    if (strcmp(result->status, status_name(STATUS_OK)) != 0) {
        enum status known = status_from_name(result->status);
        fail(&why, known == STATUS_OK ? STATUS_INVALID : known, "%s", result->text);
        command_error(state, &why, &error, &reply);
        if (result->generation)
            error.generation = result->generation;
    } else if (pending->kind == (int)REQUEST_BODY(PLAN) && result->final) {
        plan.before = result->before;
        plan.after = result->after;
        reply.body_case = REPLY_BODY(PLAN);
        reply.plan = &plan;
    } else {
        fill_command_reply(result, &body);
        reply.body_case = REPLY_BODY(COMMAND);
        reply.command = &body;
    }
    reply.more = !result->final;
    enum status status = port->reply(port->owner, pending->request, &reply);
    if (status == STATUS_OK || !result->final || status == STATUS_LINK_LOST)
        return;
    fail(&why, status, "it was done (step %llu), but its outcome could not be sent: %s",
         (unsigned long long)result->step, status_text(status));
    command_error(state, &why, &error, &reply);
    /* If even this fails the client's connection is cut by the port. */
    (void)port->reply(port->owner, pending->request, &reply);
}
