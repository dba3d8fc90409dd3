/* The real daemon end to end: greeting, every request, loss and end of ranks, restart.
 *
 * test_ballastd BALLASTD [--full] [NAME-PATTERN] */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/units.h"
#include "tests/control/harness.h"
#include "tests/control/tests.h"
#include "worker/spawn.h"
#include <cmocka.h> /* last: it has a macro `fail` */

#define REQUEST(name) BALLAST__CONTROL__V1__REQUEST__BODY_##name
#define REPLY(name) BALLAST__CONTROL__V1__REPLY__BODY_##name

static Ballast__Control__V1__Request new_request(Ballast__Control__V1__Request__BodyCase body_case,
                                                 void *body)
{
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = body_case;
    request.status = body; /* one pointer for every member of the union */
    return request;
}

/* An empty message serves as the body of any request without fields. */
static Ballast__Control__V1__Reply *ask_empty(struct raw_client *client,
                                              Ballast__Control__V1__Request__BodyCase body_case,
                                              void *body)
{
    Ballast__Control__V1__Request request = new_request(body_case, body);
    return harness_ask(client, &request);
}

/* ---- requests answered from the state ---- */

static void test_greeting(void **state)
{
    (void)state;
    struct harness harness;
    struct stat info;
    harness_begin(&harness);
    assert_int_equal(stat(harness.socket_path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0600);

    struct raw_client client;
    Ballast__V1__Hello hello = BALLAST__V1__HELLO__INIT;
    char magic[] = "ballast", other[] = "other-run";
    hello.magic = magic;
    hello.major = 9;
    Ballast__Control__V1__Request request = new_request(REQUEST(HELLO), &hello);
    assert_int_equal(raw_client_connect(&client, harness.socket_path), STATUS_OK);
    harness_expect_error(harness_ask(&client, &request), STATUS_VERSION, "9.0");
    Ballast__Control__V1__Reply *reply = NULL;
    assert_int_equal(raw_client_receive(&client, 2000, &reply), STATUS_LINK_LOST);
    raw_client_close(&client);

    hello.major = 1;
    hello.run_id = other;
    request.id = 0;
    assert_int_equal(raw_client_connect(&client, harness.socket_path), STATUS_OK);
    harness_expect_error(harness_ask(&client, &request), STATUS_NOT_FOUND, "other-run");
    raw_client_close(&client);

    Ballast__Control__V1__StatusRequest body = BALLAST__CONTROL__V1__STATUS_REQUEST__INIT;
    request = new_request(REQUEST(STATUS), &body);
    assert_int_equal(raw_client_connect(&client, harness.socket_path), STATUS_OK);
    harness_expect_error(harness_ask(&client, &request), STATUS_MALFORMED, "greeting");
    raw_client_close(&client);

    harness_open(&harness, &client);
    reply = harness_status(&client);
    assert_string_equal(reply->status->run_id, harness.run_id);
    assert_string_equal(reply->status->run_dir, harness.folder);
    assert_int_equal(reply->status->world_size, 2);
    assert_int_equal(reply->status->linked_ranks, 2);
    assert_string_equal(reply->status->health, "OK");
    assert_string_equal(reply->status->doing, "training");
    assert_int_equal(reply->status->plan->phases[0]->peak_bytes, 123456);
    assert_int_equal(reply->status->n_strategy, strategy_n_keys());
    frame_free(&reply->base);
    raw_client_close(&client);
    harness_end(&harness);
}

static void test_steps(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    harness_begin(&harness);
    harness_open(&harness, &client);
    for (uint64_t step = 0; step < 70; step++)
        assert_int_equal(
            fake_worker_tell_step(&harness.workers[0], step, 5.0 - 0.01 * (double)step),
            STATUS_OK);
    harness_wait_step(&client, 70);

    Ballast__Control__V1__StepsRequest steps = BALLAST__CONTROL__V1__STEPS_REQUEST__INIT;
    steps.count = 66;
    Ballast__Control__V1__Request request = new_request(REQUEST(STEPS), &steps);
    Ballast__Control__V1__Reply *reply = harness_ask(&client, &request);
    assert_int_equal(reply->body_case, REPLY(STEPS));
    assert_true(reply->more);
    assert_int_equal(reply->steps->n_steps, 64);
    assert_int_equal(reply->steps->steps[0]->step, 4);
    frame_free(&reply->base);
    reply = harness_next(&client, request.id);
    assert_false(reply->more);
    assert_int_equal(reply->steps->n_steps, 2);
    assert_int_equal(reply->steps->steps[1]->step, 69);
    assert_true(reply->steps->steps[1]->loss == 5.0 - 0.01 * 69.0);
    frame_free(&reply->base);
    steps.from = 10;
    steps.count = 3;
    request.id = 0;
    reply = harness_ask(&client, &request);
    assert_int_equal(reply->steps->n_steps, 3);
    assert_int_equal(reply->steps->steps[0]->step, 10);
    frame_free(&reply->base);
    steps.count = 5000;
    request.id = 0;
    harness_expect_error(harness_ask(&client, &request), STATUS_OUT_OF_RANGE, "5000");

    raw_client_close(&client);
    harness_end(&harness);
}

static void test_memory_and_ranks(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    Ballast__Control__V1__Reply *reply = NULL;
    harness_begin(&harness);
    harness_open(&harness, &client);
    Ballast__Control__V1__MemoryRequest memory = BALLAST__CONTROL__V1__MEMORY_REQUEST__INIT;
    assert_int_equal(fake_worker_tell_rank(&harness.workers[1], PHASE_BACKWARD, 70), STATUS_OK);
    assert_int_equal(fake_worker_tell_step(&harness.workers[0], 70, 1.0), STATUS_OK);
    harness_wait_step(&client, 71);
    memory.at_peak_case = BALLAST__CONTROL__V1__MEMORY_REQUEST__AT_PEAK_PHASE;
    memory.phase = BALLAST__V1__PHASE__PHASE_FORWARD;
    reply = ask_empty(&client, REQUEST(MEMORY), &memory);
    assert_int_equal(reply->memory->at_peak->peak_bytes, 123456);
    assert_string_equal(reply->memory->at_peak->live[0]->name, "logits");
    assert_int_equal(reply->memory->peak_bytes[0]->bytes, 1070);
    assert_int_equal(reply->memory->limit_bytes, 1 << 20);
    frame_free(&reply->base);
    memory.phase = BALLAST__V1__PHASE__PHASE_SAVE;
    harness_expect_error(ask_empty(&client, REQUEST(MEMORY), &memory), STATUS_NOT_FOUND, "save");
    memory.phase = BALLAST__V1__PHASE__PHASE_UNSPECIFIED;
    harness_expect_error(ask_empty(&client, REQUEST(MEMORY), &memory), STATUS_INVALID, "at_peak");

    Ballast__Control__V1__RanksRequest ranks = BALLAST__CONTROL__V1__RANKS_REQUEST__INIT;
    reply = ask_empty(&client, REQUEST(RANKS), &ranks);
    assert_int_equal(reply->ranks->n_ranks, 2);
    assert_int_equal(reply->ranks->ranks[1]->phase, BALLAST__V1__PHASE__PHASE_BACKWARD);
    assert_int_equal(reply->ranks->ranks[1]->memory[0]->bytes, 8192);
    assert_true(reply->ranks->ranks[1]->linked);
    assert_true(reply->ranks->ranks[1]->age_ms < 5000);
    frame_free(&reply->base);

    Ballast__Control__V1__SchemaRequest schema = BALLAST__CONTROL__V1__SCHEMA_REQUEST__INIT;
    reply = ask_empty(&client, REQUEST(SCHEMA), &schema);
    if (reply->body_case == REPLY(SCHEMA)) {
        assert_true(reply->schema->file_descriptor_set.len > 1000);
        assert_non_null(memmem(reply->schema->file_descriptor_set.data,
                               reply->schema->file_descriptor_set.len, "SetRequest", 10));
        frame_free(&reply->base);
    } else {
        harness_expect_error(reply, STATUS_UNSUPPORTED, "protoc");
    }
    raw_client_close(&client);
    harness_end(&harness);
}

static void test_oom_and_events(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    Ballast__Control__V1__Request request;
    Ballast__Control__V1__Reply *reply = NULL;
    harness_begin(&harness);
    harness_open(&harness, &client);
    Ballast__Control__V1__OomRequest oom = BALLAST__CONTROL__V1__OOM_REQUEST__INIT;
    harness_expect_error(ask_empty(&client, REQUEST(OOM), &oom), STATUS_NOT_FOUND, "out of memory");
    assert_int_equal(fake_worker_tell_oom(&harness.workers[1], PHASE_BACKWARD), STATUS_OK);
    assert_int_equal(fake_worker_tell_event(&harness.workers[1], "oom", "no room",
                                            "{\"asked_bytes\":4194304}"), STATUS_OK);
    Ballast__Control__V1__EventsRequest events = BALLAST__CONTROL__V1__EVENTS_REQUEST__INIT;
    events.follow = true;
    request = new_request(REQUEST(EVENTS), &events);
    reply = harness_ask(&client, &request);
    while (reply->events->n_events == 0) {
        frame_free(&reply->base);
        reply = harness_next(&client, request.id);
    }
    assert_string_equal(reply->events->events[0]->type, "oom");
    assert_int_equal(reply->events->events[0]->sequence, 1);
    assert_true(reply->events->events[0]->time[0] == '2');
    assert_true(reply->more);
    frame_free(&reply->base);
    reply = ask_empty(&client, REQUEST(OOM), &oom);
    assert_string_equal(reply->oom->report->tensor, "attention");
    assert_int_equal(reply->oom->report->phase, BALLAST__V1__PHASE__PHASE_BACKWARD);
    frame_free(&reply->base);
    reply = harness_status(&client);
    assert_string_equal(reply->status->health, "ERROR");
    assert_non_null(strstr(reply->status->reasons[0], "rank 1 ran out of memory in backward"));
    frame_free(&reply->base);

    /* The follower gets what comes, until it cancels. */
    assert_int_equal(fake_worker_tell_event(&harness.workers[0], "skip", "overflow", ""),
                     STATUS_OK);
    reply = harness_next(&client, request.id);
    assert_string_equal(reply->events->events[0]->type, "skip");
    frame_free(&reply->base);
    Ballast__Control__V1__CancelRequest cancel = BALLAST__CONTROL__V1__CANCEL_REQUEST__INIT;
    cancel.request_id = request.id;
    Ballast__Control__V1__Request cancelling = new_request(REQUEST(CANCEL), &cancel);
    assert_int_equal(raw_client_send(&client, &cancelling), STATUS_OK);
    reply = harness_next(&client, request.id);
    assert_int_equal(reply->body_case, REPLY(DONE));
    assert_false(reply->more);
    frame_free(&reply->base);
    reply = harness_next(&client, cancelling.id);
    assert_int_equal(reply->body_case, REPLY(DONE));
    frame_free(&reply->base);
    harness_expect_error(ask_empty(&client, REQUEST(CANCEL), &cancel), STATUS_NOT_FOUND, "open");

    raw_client_close(&client);
    harness_end(&harness);
}

static void test_watch(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    harness_begin(&harness);
    harness_open(&harness, &client);
    Ballast__Control__V1__WatchRequest watch = BALLAST__CONTROL__V1__WATCH_REQUEST__INIT;
    watch.interval_ms = 49;
    harness_expect_error(ask_empty(&client, REQUEST(WATCH), &watch), STATUS_OUT_OF_RANGE, "49");
    watch.interval_ms = 50;
    Ballast__Control__V1__Request request = new_request(REQUEST(WATCH), &watch);
    double start_s = units_monotonic_s();
    assert_int_equal(raw_client_send(&client, &request), STATUS_OK);
    for (int i = 0; i < 10; i++) {
        Ballast__Control__V1__Reply *reply = harness_next(&client, request.id);
        assert_int_equal(reply->body_case, REPLY(WATCH));
        assert_true(reply->more);
        assert_int_equal(reply->watch->n_ranks, 2);
        assert_int_equal(reply->watch->status->linked_ranks, 2);
        assert_int_equal(reply->watch->dropped, 0);
        assert_int_equal(reply->watch->status->plan->phases[0]->n_live, 0);
        frame_free(&reply->base);
    }
    double took_s = units_monotonic_s() - start_s;
    assert_true(took_s > 0.3 && took_s < 5.0);
    raw_client_close(&client);
    harness_end(&harness);
}

/* ---- commands ---- */

static void test_set(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    harness_begin(&harness);
    harness_open(&harness, &client);
    char key[64] = "checkpointing", value[64] = "block:2";
    Ballast__V1__Setting setting = BALLAST__V1__SETTING__INIT;
    Ballast__V1__Setting *settings[] = {&setting, &setting};
    Ballast__Control__V1__SetRequest set = BALLAST__CONTROL__V1__SET_REQUEST__INIT;
    setting.key = key;
    setting.value = value;
    set.changes = settings;
    set.n_changes = 1;
    harness_wait_step(&client, 0);

    /* Refused at the door; rank 0 hears nothing. */
    set.n_changes = 0;
    harness_expect_error(ask_empty(&client, REQUEST(SET), &set), STATUS_INVALID, "KEY=VALUE");
    set.n_changes = 2;
    harness_expect_error(ask_empty(&client, REQUEST(SET), &set), STATUS_CONFLICT, "checkpointing");
    set.n_changes = 1;
    snprintf(value, sizeof value, "block:99");
    Ballast__Control__V1__Reply *reply = ask_empty(&client, REQUEST(SET), &set);
    assert_int_equal(reply->body_case, REPLY(ERROR));
    frame_free(&reply->base);
    snprintf(key, sizeof key, "checkpoint");
    harness_expect_error(ask_empty(&client, REQUEST(SET), &set), STATUS_UNKNOWN_KEY, "checkpoint");
    snprintf(key, sizeof key, "checkpointing");
    snprintf(value, sizeof value, "block:2");
    set.expected_case = BALLAST__CONTROL__V1__SET_REQUEST__EXPECTED_IF_GENERATION;
    set.if_generation = 3;
    harness_expect_error(ask_empty(&client, REQUEST(SET), &set), STATUS_CONFLICT, "generation 0");
    Ballast__Link__V1__DaemonMessage *none = NULL;
    assert_int_equal(fake_worker_receive(&harness.workers[0], 0, &none), STATUS_DEADLINE);

    /* Accepted: rank 0 gets it, answers twice; so does the daemon. */
    set.if_generation = 0;
    Ballast__Control__V1__Request request = new_request(REQUEST(SET), &set);
    assert_int_equal(raw_client_send(&client, &request), STATUS_OK);
    Ballast__Link__V1__DaemonMessage *message = harness_command(&harness);
    char who[64];
    snprintf(who, sizeof who, "uid %u pid %d", (unsigned)getuid(), (int)getpid());
    assert_string_equal(message->command->who, who);
    assert_int_equal(message->command->set->if_generation_plus_one, 1);
    assert_string_equal(message->command->set->changes[0]->value, "block:2");
    uint64_t id = message->command->id;
    frame_free(&message->base);
    assert_int_equal(fake_worker_tell_result(&harness.workers[0], id, STATUS_OK, "queued", false),
                     STATUS_OK);
    reply = harness_next(&client, request.id);
    assert_true(reply->more && reply->command->accepted);
    frame_free(&reply->base);

    /* The id is taken while the request is open; it cannot be called back. */
    Ballast__Control__V1__StatusRequest body = BALLAST__CONTROL__V1__STATUS_REQUEST__INIT;
    Ballast__Control__V1__Request again = new_request(REQUEST(STATUS), &body);
    again.id = request.id;
    harness_expect_error(harness_ask(&client, &again), STATUS_INVALID, "in use");
    Ballast__Control__V1__CancelRequest cancel = BALLAST__CONTROL__V1__CANCEL_REQUEST__INIT;
    cancel.request_id = request.id;
    harness_expect_error(ask_empty(&client, REQUEST(CANCEL), &cancel), STATUS_REFUSED, "rank 0");

    harness.workers[0].generation = 1;
    assert_int_equal(strategy_set(&harness.workers[0].strategy, "checkpointing", "block:2", NULL),
                     STATUS_OK);
    assert_int_equal(fake_worker_tell_run(&harness.workers[0], false, "training", false),
                     STATUS_OK);
    assert_int_equal(fake_worker_tell_result(&harness.workers[0], id, STATUS_OK, "done", true),
                     STATUS_OK);
    reply = harness_next(&client, request.id);
    assert_false(reply->more);
    assert_int_equal(reply->body_case, REPLY(COMMAND));
    assert_int_equal(reply->command->generation, 1);
    assert_false(reply->command->accepted);
    frame_free(&reply->base);
    reply = harness_status(&client);
    assert_int_equal(reply->status->generation, 1);
    bool shown = false;
    for (size_t i = 0; i < reply->status->n_strategy; i++)
        shown = shown || !strcmp(reply->status->strategy[i]->value, "block:2");
    assert_true(shown);
    frame_free(&reply->base);

    /* A refusal of rank 0 reaches the client with its text. */
    set.expected_case = BALLAST__CONTROL__V1__SET_REQUEST__EXPECTED__NOT_SET;
    set.dry_run = true;
    request = new_request(REQUEST(SET), &set);
    assert_int_equal(raw_client_send(&client, &request), STATUS_OK);
    message = harness_command(&harness);
    assert_true(message->command->set->dry_run);
    assert_int_equal(fake_worker_tell_result(&harness.workers[0], message->command->id,
                                             STATUS_DOES_NOT_FIT, "forward needs 9 GiB", false),
                     STATUS_OK);
    frame_free(&message->base);
    harness_expect_error(harness_next(&client, request.id), STATUS_DOES_NOT_FIT, "9 GiB");
    raw_client_close(&client);
    harness_end(&harness);
}

/* Each other command: what rank 0 gets, and that its answer comes back. */
static void test_commands(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    harness_begin(&harness);
    harness_open(&harness, &client);
    harness_wait_step(&client, 0);
    Ballast__Control__V1__SaveRequest save = BALLAST__CONTROL__V1__SAVE_REQUEST__INIT;
    Ballast__Control__V1__EvalRequest eval = BALLAST__CONTROL__V1__EVAL_REQUEST__INIT;
    Ballast__Control__V1__PauseRequest pause = BALLAST__CONTROL__V1__PAUSE_REQUEST__INIT;
    Ballast__Control__V1__StopRequest stop = BALLAST__CONTROL__V1__STOP_REQUEST__INIT;
    Ballast__Control__V1__ResumeRequest resume = BALLAST__CONTROL__V1__RESUME_REQUEST__INIT;
    Ballast__Control__V1__UndoRequest undo = BALLAST__CONTROL__V1__UNDO_REQUEST__INIT;
    Ballast__Control__V1__PlanRequest plan = BALLAST__CONTROL__V1__PLAN_REQUEST__INIT;
    resume.for_steps = 5;
    const struct {
        Ballast__Control__V1__Request__BodyCase body_case;
        void *body;
        const char *verb; /* NULL: not a simple command */
    } cases[] = {{REQUEST(SAVE), &save, "save"},    {REQUEST(EVAL), &eval, "eval"},
                 {REQUEST(PAUSE), &pause, "pause"}, {REQUEST(STOP), &stop, "stop"},
                 {REQUEST(RESUME), &resume, NULL},  {REQUEST(UNDO), &undo, NULL},
                 {REQUEST(PLAN), &plan, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Ballast__Control__V1__Request request = new_request(cases[i].body_case, cases[i].body);
        assert_int_equal(raw_client_send(&client, &request), STATUS_OK);
        Ballast__Link__V1__DaemonMessage *message = harness_command(&harness);
        const Ballast__Link__V1__Command *command = message->command;
        if (cases[i].verb)
            assert_string_equal(command->simple->verb, cases[i].verb);
        else if (cases[i].body == &resume)
            assert_int_equal(command->resume->for_steps, 5);
        else if (cases[i].body == &undo)
            assert_true(command->set->undo);
        else
            assert_int_equal(command->body_case, BALLAST__LINK__V1__COMMAND__BODY_PLAN);
        assert_int_equal(fake_worker_tell_result(&harness.workers[0], command->id, STATUS_OK,
                                                 "done", true), STATUS_OK);
        frame_free(&message->base);
        Ballast__Control__V1__Reply *reply = harness_next(&client, request.id);
        assert_int_equal(reply->body_case,
                         cases[i].body == &plan ? REPLY(PLAN) : REPLY(COMMAND));
        assert_false(reply->more);
        frame_free(&reply->base);
    }
    raw_client_close(&client);
    harness_end(&harness);
}

static void test_waits(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    harness_begin(&harness);
    harness_open(&harness, &client);
    Ballast__Control__V1__WaitRequest wait = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    harness_expect_error(ask_empty(&client, REQUEST(WAIT), &wait), STATUS_INVALID, "condition");
    char type[16] = "sawe";
    wait.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_EVENT;
    wait.event = type;
    harness_expect_error(ask_empty(&client, REQUEST(WAIT), &wait), STATUS_INVALID, "sawe");
    Ballast__Control__V1__WaitRequest by_step = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    by_step.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_STEP;
    by_step.step = 1001;
    harness_expect_error(ask_empty(&client, REQUEST(WAIT), &by_step), STATUS_OUT_OF_RANGE, "1000");

    snprintf(type, sizeof type, "save");
    by_step.step = 900;
    Ballast__Control__V1__WaitRequest by_pause = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    by_pause.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_PAUSED;
    by_pause.paused = true;
    Ballast__Control__V1__WaitRequest by_end = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    by_end.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_END;
    by_end.end = true;
    Ballast__Control__V1__Request event_request = new_request(REQUEST(WAIT), &wait);
    Ballast__Control__V1__Request step_request = new_request(REQUEST(WAIT), &by_step);
    Ballast__Control__V1__Request pause_request = new_request(REQUEST(WAIT), &by_pause);
    Ballast__Control__V1__Request end_request = new_request(REQUEST(WAIT), &by_end);
    assert_int_equal(raw_client_send(&client, &event_request), STATUS_OK);
    assert_int_equal(raw_client_send(&client, &step_request), STATUS_OK);
    assert_int_equal(raw_client_send(&client, &pause_request), STATUS_OK);
    assert_int_equal(raw_client_send(&client, &end_request), STATUS_OK);
    Ballast__Control__V1__Reply *reply = harness_status(&client);
    frame_free(&reply->base);

    assert_int_equal(fake_worker_tell_run(&harness.workers[0], true, "paused", false), STATUS_OK);
    reply = harness_next(&client, pause_request.id);
    assert_int_equal(reply->body_case, REPLY(WAIT));
    frame_free(&reply->base);
    assert_int_equal(fake_worker_tell_event(&harness.workers[0], "save", "saved", ""), STATUS_OK);
    reply = harness_next(&client, event_request.id);
    assert_string_equal(reply->wait->event->type, "save");
    frame_free(&reply->base);
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        assert_int_equal(fake_worker_tell_end(&harness.workers[rank], 0), STATUS_OK);
    reply = harness_next(&client, end_request.id);
    assert_string_equal(reply->wait->event->type, "end");
    frame_free(&reply->base);
    harness_expect_error(harness_next(&client, step_request.id), STATUS_STOPPED, "ended");
    raw_client_close(&client);
    harness_end(&harness);
}

int main(int count, char **words)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greeting), cmocka_unit_test(test_steps),
        cmocka_unit_test(test_memory_and_ranks), cmocka_unit_test(test_oom_and_events),
        cmocka_unit_test(test_watch),    cmocka_unit_test(test_set),
        cmocka_unit_test(test_commands), cmocka_unit_test(test_waits),
    };
    const char *full = getenv("BALLAST_FULL");
    harness_full = full && *full && strcmp(full, "0");
    for (int i = 1; i < count; i++) {
        if (!strcmp(words[i], "--full"))
            harness_full = true;
        else if (!harness_ballastd)
            harness_ballastd = words[i];
        else
            cmocka_set_test_filter(words[i]);
    }
    if (!harness_ballastd) {
        fprintf(stderr, "usage: test_ballastd BALLASTD [--full] [PATTERN]\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    int n_failed = cmocka_run_group_tests_name("requests", tests, NULL, NULL);
    n_failed += run_failure_tests();
    n_failed += run_hostile_tests();
    return n_failed ? 1 : 0;
}
