/* Every request against a state without sockets: what is refused changes nothing, sends
 * nothing, and says why.
 * links: base proto daemon uv */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "daemon/command.h"
#include "proto/base/heap.h"
#include <cmocka.h> /* last: it has a macro `fail` */

#define REQUEST(name) BALLAST__CONTROL__V1__REQUEST__BODY_##name

static struct state state_of_run;
static int n_replies, n_sent;
static enum status send_outcome;
static Ballast__Control__V1__Reply__BodyCase last_body;
static bool last_more;
static char last_error[FAILURE_TEXT_BYTES], last_status[32];

static enum status on_reply(void *owner, struct run_request to, Ballast__Control__V1__Reply *reply)
{
    (void)owner, (void)to;
    n_replies++;
    last_body = reply->body_case;
    last_more = reply->more;
    if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY_ERROR) {
        snprintf(last_error, sizeof last_error, "%s", reply->error->text);
        snprintf(last_status, sizeof last_status, "%s", reply->error->status);
    }
    return STATUS_OK;
}

static enum status on_send(void *owner, const Ballast__Link__V1__Command *command)
{
    (void)owner;
    assert_string_equal(command->who, "uid 7 pid 8");
    n_sent++;
    return send_outcome;
}

static const struct command_port port = {.reply = on_reply, .send = on_send};

static int setup(void **context)
{
    (void)context;
    struct failure why;
    memset(&state_of_run, 0, sizeof state_of_run);
    struct run_options options = {.first_command_id = 1};
    run_init(&state_of_run.run, &options);
    state_of_run.journal.next_sequence = 1;
    struct strategy_limits limits = {.n_layers = 4, .world_size = 1, .global_batch = 8,
                                     .seq_len = 64, .n_heads = 4, .n_kv_heads = 2};
    struct strategy strategy;
    strategy_default(&strategy, &limits);
    run_limits(&state_of_run.run, &limits);
    run_strategy(&state_of_run.run, &strategy);
    n_replies = n_sent = 0;
    send_outcome = STATUS_OK;
    return history_init(&state_of_run.history, &why) != STATUS_OK ||
           run_link_up(&state_of_run.run, 0, 1, 1, 0, &why) != STATUS_OK;
}

static int teardown(void **context)
{
    (void)context;
    history_fini(&state_of_run.history);
    run_fini(&state_of_run.run);
    heard_fini(&state_of_run.heard);
    return heap_live() != 0;
}

static struct command_result result;
static struct failure why;

static enum status ask(Ballast__Control__V1__Request__BodyCase body_case, void *body)
{
    static uint64_t id;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    struct command_caller caller = {.request = {.client = 1, .id = ++id}, .uid = 7, .pid = 8};
    request.id = caller.request.id;
    request.body_case = body_case;
    request.status = body; /* one pointer for every member of the union */
    why.text[0] = '\0';
    return command_handle(&state_of_run, &port, &caller, &request, 100, &result, &why);
}

static enum status ask_set(const char *key, const char *value)
{
    Ballast__V1__Setting setting = BALLAST__V1__SETTING__INIT;
    Ballast__V1__Setting *settings[] = {&setting};
    Ballast__Control__V1__SetRequest set = BALLAST__CONTROL__V1__SET_REQUEST__INIT;
    setting.key = (char *)key;
    setting.value = (char *)value;
    set.n_changes = 1;
    set.changes = settings;
    return ask(REQUEST(SET), &set);
}

static void test_bad_settings(void **context)
{
    (void)context;
    static const char *const cases[][3] = {
        {"checkpointing", "blok", "blok"},
        {"checkpointing", "block:0", "block:0"},
        {"checkpointing", "block:-1", "-1"},
        {"checkpointing", "", "checkpointing"},
        {"checkpointing.layers", "5", "5"},
        {"checkpointing.layers", "99999999999999999999", "99999999999999999999"},
        {"micro_batch", "3", "3"},
        {"micro_batch", "0", "micro_batch"},
        {"micro_batch", "1e3", "1e3"},
        {"zero.stage", "4", "4"},
        {"no.such.key", "1", "no.such.key"},
        {"", "1", ""},
        {"sequence_parallel", "3", "3"},
        {"checkpointing", "0123456789012345678901234567890123456789", "too long"},
    };
    struct strategy before = state_of_run.run.strategy;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum status status = ask_set(cases[i][0], cases[i][1]);
        if (status == STATUS_OK || !strstr(why.text, cases[i][2]))
            print_error("%s=%s: %d '%s'\n", cases[i][0], cases[i][1], (int)status, why.text);
        assert_int_not_equal(status, STATUS_OK);
        assert_non_null(strstr(why.text, cases[i][2]));
    }
    assert_int_equal(n_sent + n_replies, 0);
    assert_int_equal(state_of_run.run.n_pending, 0);
    assert_true(strategy_equal(&before, &state_of_run.run.strategy));
    assert_int_equal(ask_set("checkpointing", "block:2"), STATUS_OK);
    assert_int_equal(result.outcome, COMMAND_OPEN);
    assert_int_equal(n_sent, 1);
    /* Nothing changes before rank 0 says so. */
    assert_true(strategy_equal(&before, &state_of_run.run.strategy));
}

static void test_set_needs_rank_0(void **context)
{
    (void)context;
    send_outcome = STATUS_OUT_OF_MEMORY;
    assert_int_equal(ask_set("checkpointing", "split"), STATUS_OUT_OF_MEMORY);
    assert_int_equal(state_of_run.run.n_pending, 0); /* taken back */
    send_outcome = STATUS_OK;
    run_link_closed(&state_of_run.run, 0, 200);
    assert_int_equal(ask_set("checkpointing", "split"), STATUS_LINK_LOST);
    state_of_run.run.limits_known = false;
    assert_int_equal(ask_set("checkpointing", "split"), STATUS_AGAIN);
    assert_int_equal(n_sent, 1);
}

static void test_generation(void **context)
{
    (void)context;
    Ballast__Control__V1__UndoRequest undo = BALLAST__CONTROL__V1__UNDO_REQUEST__INIT;
    run_state(&state_of_run.run, 3, 5, false);
    undo.expected_case = BALLAST__CONTROL__V1__UNDO_REQUEST__EXPECTED_IF_GENERATION;
    undo.if_generation = 4;
    assert_int_equal(ask(REQUEST(UNDO), &undo), STATUS_CONFLICT);
    assert_non_null(strstr(why.text, "generation 5, not 4"));
    undo.if_generation = UINT64_MAX;
    assert_int_equal(ask(REQUEST(UNDO), &undo), STATUS_CONFLICT);
    undo.if_generation = 5;
    assert_int_equal(ask(REQUEST(UNDO), &undo), STATUS_OK);
    assert_int_equal(n_sent, 1);
}

static void test_too_many_changes(void **context)
{
    (void)context;
    Ballast__V1__Setting setting = BALLAST__V1__SETTING__INIT;
    Ballast__V1__Setting *settings[COMMAND_MAX_CHANGES + 1];
    Ballast__Control__V1__PlanRequest plan = BALLAST__CONTROL__V1__PLAN_REQUEST__INIT;
    for (int i = 0; i <= COMMAND_MAX_CHANGES; i++)
        settings[i] = &setting;
    plan.n_changes = COMMAND_MAX_CHANGES + 1;
    plan.changes = settings;
    assert_int_equal(ask(REQUEST(PLAN), &plan), STATUS_TOO_LARGE);
    plan.n_changes = 0; /* the plan in force */
    assert_int_equal(ask(REQUEST(PLAN), &plan), STATUS_OK);
}

static void test_bounds(void **context)
{
    (void)context;
    Ballast__Control__V1__WatchRequest watch = BALLAST__CONTROL__V1__WATCH_REQUEST__INIT;
    static const uint32_t intervals[] = {0, 49, 60001, UINT32_MAX};
    for (size_t i = 0; i < 4; i++) {
        watch.interval_ms = intervals[i];
        assert_int_equal(ask(REQUEST(WATCH), &watch), STATUS_OUT_OF_RANGE);
    }
    watch.interval_ms = 60000;
    assert_int_equal(ask(REQUEST(WATCH), &watch), STATUS_OK);
    assert_int_equal(result.outcome, COMMAND_WATCH);
    Ballast__Control__V1__ResumeRequest resume = BALLAST__CONTROL__V1__RESUME_REQUEST__INIT;
    resume.for_steps = UINT64_MAX;
    assert_int_equal(ask(REQUEST(RESUME), &resume), STATUS_OUT_OF_RANGE);
    Ballast__Control__V1__EventsRequest events = BALLAST__CONTROL__V1__EVENTS_REQUEST__INIT;
    events.count = 1001;
    assert_int_equal(ask(REQUEST(EVENTS), &events), STATUS_OUT_OF_RANGE);
    events.count = 0;
    assert_int_equal(ask(REQUEST(EVENTS), &events), STATUS_OK);
    assert_int_equal(last_body, BALLAST__CONTROL__V1__REPLY__BODY_EVENTS);
    assert_false(last_more);
    Ballast__Control__V1__WaitRequest wait = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    wait.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_END;
    assert_int_equal(ask(REQUEST(WAIT), &wait), STATUS_INVALID);
    assert_int_equal(state_of_run.run.n_waits, 0);
    Ballast__V1__Hello hello = BALLAST__V1__HELLO__INIT;
    assert_int_equal(ask(REQUEST(HELLO), &hello), STATUS_INVALID);
    assert_int_equal(ask(BALLAST__CONTROL__V1__REQUEST__BODY__NOT_SET, NULL), STATUS_UNSUPPORTED);
    assert_int_equal(n_sent, 0);
}

static void test_finish(void **context)
{
    (void)context;
    Ballast__Link__V1__CommandResult answer = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
    struct run_pending pending = {.request = {1, 2}, .kind = REQUEST(SET)};
    answer.status = (char *)"OK";
    command_finish(&state_of_run, &port, &pending, &answer);
    assert_true(last_more && last_body == BALLAST__CONTROL__V1__REPLY__BODY_COMMAND);
    answer.final = true;
    command_finish(&state_of_run, &port, &pending, &answer);
    assert_false(last_more);
    answer.status = (char *)"VOTED_DOWN";
    answer.text = (char *)"rank 3 has no room";
    command_finish(&state_of_run, &port, &pending, &answer);
    assert_int_equal(last_body, BALLAST__CONTROL__V1__REPLY__BODY_ERROR);
    assert_string_equal(last_status, "VOTED_DOWN");
    assert_string_equal(last_error, "rank 3 has no room");
    answer.status = (char *)"WHATEVER";
    command_finish(&state_of_run, &port, &pending, &answer);
    assert_string_equal(last_status, "INVALID");
    pending.request.client = 0; /* it went away */
    n_replies = 0;
    command_finish(&state_of_run, &port, &pending, &answer);
    assert_int_equal(n_replies, 0);
}

#define CASE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_bad_settings), CASE(test_set_needs_rank_0), CASE(test_generation),
        CASE(test_too_many_changes), CASE(test_bounds), CASE(test_finish),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
