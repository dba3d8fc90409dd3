/* What happens when ranks, clients, disks and the daemon itself die. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "daemon/daemon.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "proto/oom_file.h"
#include "tests/control/harness.h"
#include "tests/control/tests.h"
#include "worker/spawn.h"
#include <cmocka.h> /* last: it has a macro `fail` */

#define REQUEST(name) BALLAST__CONTROL__V1__REQUEST__BODY_##name
#define REPLY(name) BALLAST__CONTROL__V1__REPLY__BODY_##name

static int count_of(const char *text, const char *part)
{
    int count = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part))
        count++;
    return count;
}

/* A rank dies, the other follows: the first is named, once, then the end; gone within 2 s. */
static void test_rank_lost(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    harness_begin(&harness);
    harness_open(&harness, &client);
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        assert_int_equal(fake_worker_tell_rank(&harness.workers[rank], PHASE_BACKWARD, 7),
                         STATUS_OK);
    Ballast__Control__V1__SaveRequest save = BALLAST__CONTROL__V1__SAVE_REQUEST__INIT;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = REQUEST(SAVE);
    request.save = &save;
    assert_int_equal(raw_client_send(&client, &request), STATUS_OK);
    Ballast__Link__V1__DaemonMessage *message = harness_command(&harness);
    frame_free(&message->base);

    fake_worker_drop(&harness.workers[1]);
    Ballast__Control__V1__Reply *reply = NULL;
    do { /* until the daemon has seen the link close */
        frame_free(reply ? &reply->base : NULL);
        reply = harness_status(&client);
    } while (reply->status->linked_ranks != 1);
    frame_free(&reply->base);
    fake_worker_drop(&harness.workers[0]);
    /* The command that rank 0 never answered is answered all the same. */
    harness_expect_error(harness_next(&client, request.id), STATUS_LINK_LOST, "rank 0");
    double took_s = harness_wait_exit(&harness, 2.0, 0);
    assert_true(took_s < 2.0);
    raw_client_close(&client);

    char *journal = harness_journal(&harness);
    assert_int_equal(count_of(journal, "\"type\":\"rank_lost\""), 1);
    const char *line = strstr(journal, "\"type\":\"rank_lost\"");
    assert_non_null(strstr(line, "\"step\":7,\"rank\":1,\"phase\":\"backward\""));
    assert_non_null(strstr(line, "all-reduce number 7"));
    assert_non_null(strstr(line, "\"also_lost\":[0]"));
    const char *end = strstr(journal, "\"type\":\"end\"");
    assert_non_null(end);
    assert_true(end > line);
    assert_non_null(strstr(end, "\"culprit\":1,\"lost_ranks\":[1,0]"));
    free(journal);
    harness_fini(&harness);
}

/* A link that comes back within a second was no loss. */
static void test_link_comes_back(void **state)
{
    (void)state;
    struct harness harness;
    harness_begin(&harness);
    fake_worker_drop(&harness.workers[1]);
    struct fake_hello hello = {.link_path = harness.link_path, .run_id = harness.run_id,
                               .rank = 1, .world_size = HARNESS_WORLD, .n_steps = 1000};
    assert_int_equal(fake_worker_link(&harness.workers[1], &hello), STATUS_OK);
    struct fake_worker wrong;
    hello.rank = 2;
    assert_int_equal(fake_worker_link(&wrong, &hello), STATUS_REFUSED);
    assert_non_null(strstr(wrong.error, "rank 2"));
    hello.rank = 0;
    hello.world_size = 3;
    assert_int_equal(fake_worker_link(&wrong, &hello), STATUS_REFUSED);
    assert_non_null(strstr(wrong.error, "world size 3"));
    hello.world_size = HARNESS_WORLD;
    hello.run_id = "another";
    assert_int_equal(fake_worker_link(&wrong, &hello), STATUS_REFUSED);
    assert_non_null(strstr(wrong.error, "another"));
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        assert_int_equal(fake_worker_tell_end(&harness.workers[rank], 0), STATUS_OK);
    Ballast__Link__V1__DaemonMessage *message = NULL;
    assert_int_equal(fake_worker_receive(&harness.workers[1], 2000, &message), STATUS_OK);
    frame_free(&message->base);
    char *journal = harness_journal(&harness);
    assert_null(strstr(journal, "rank_lost"));
    free(journal);
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        fake_worker_drop(&harness.workers[rank]);
    harness_wait_exit(&harness, 2.0, 0);
    harness_fini(&harness);
}

/* The run's own `end` is written last and as it was sent. */
static void test_end_of_rank_0(void **state)
{
    (void)state;
    struct harness harness;
    harness_begin(&harness);
    assert_int_equal(fake_worker_tell_event(&harness.workers[0], "end", "all done",
                                            "{\"weights_xxh3\":\"00ff\"}"), STATUS_OK);
    assert_int_equal(fake_worker_tell_event(&harness.workers[0], "save", "the last", ""),
                     STATUS_OK);
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        assert_int_equal(fake_worker_tell_end(&harness.workers[rank], 0), STATUS_OK);
    for (int rank = 0; rank < HARNESS_WORLD; rank++) {
        Ballast__Link__V1__DaemonMessage *message = NULL;
        assert_int_equal(fake_worker_receive(&harness.workers[rank], 2000, &message), STATUS_OK);
        assert_int_equal(message->body_case, BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_END_ACK);
        frame_free(&message->base);
    }
    char *journal = harness_journal(&harness);
    assert_int_equal(count_of(journal, "\"type\":\"end\""), 1);
    assert_int_equal(count_of(journal, "\n"), 2);
    const char *end = strstr(journal, "\"type\":\"end\"");
    assert_non_null(strstr(end, "\"weights_xxh3\":\"00ff\"}\n"));
    assert_true(strstr(journal, "\"type\":\"save\"") < end);
    free(journal);
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        fake_worker_drop(&harness.workers[rank]);
    harness_wait_exit(&harness, 2.0, 0);
    harness_fini(&harness);
}

/* kill -9: the next one takes over the sockets, goes on with the journal, says what happened. */
static void test_restart(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    harness_begin(&harness);
    assert_int_equal(fake_worker_tell_event(&harness.workers[0], "start", "begins", ""),
                     STATUS_OK);
    assert_int_equal(fake_worker_tell_step(&harness.workers[0], 0, 2.0), STATUS_OK);
    harness_open(&harness, &client);
    harness_wait_step(&client, 1);
    raw_client_close(&client);
    kill(harness.pid, SIGKILL);
    int code = 0;
    while (!spawn_reap(harness.pid, &code))
        ;
    assert_int_equal(code, 128 + SIGKILL);
    assert_int_equal(access(harness.socket_path, F_OK), 0);
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        fake_worker_drop(&harness.workers[rank]);
    /* It died in the middle of a line. */
    char path[128];
    snprintf(path, sizeof path, "%s/events.jsonl", harness.folder);
    FILE *file = fopen(path, "ae");
    assert_non_null(file);
    fputs("{\"time\":\"2026-01-01T00:00:00.000Z\",\"type\":\"sav", file);
    fclose(file);

    harness_start(&harness, true);
    harness.workers[0].step = 1;
    harness_link(&harness, true);
    harness_open(&harness, &client);
    Ballast__Control__V1__EventsRequest events = BALLAST__CONTROL__V1__EVENTS_REQUEST__INIT;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = REQUEST(EVENTS);
    request.events = &events;
    Ballast__Control__V1__Reply *reply = harness_ask(&client, &request);
    assert_int_equal(reply->events->n_events, 2);
    assert_string_equal(reply->events->events[0]->type, "start");
    assert_string_equal(reply->events->events[0]->text, "begins");
    assert_int_equal(reply->events->events[0]->sequence, 1);
    assert_string_equal(reply->events->events[1]->type, "daemon_lost");
    assert_int_equal(reply->events->events[1]->sequence, 2);
    frame_free(&reply->base);
    reply = harness_status(&client);
    assert_int_equal(reply->status->step, 1);
    frame_free(&reply->base);
    raw_client_close(&client);
    char *journal = harness_journal(&harness);
    assert_int_equal(count_of(journal, "\n"), 2);
    assert_null(strstr(journal, "\"sav"));
    free(journal);

    /* A second daemon of the same run leaves the first alone and names it. */
    struct spawn_options options = {.run_dir = harness.folder, .run_id = harness.run_id,
                                    .socket_path = harness.socket_path,
                                    .link_path = harness.link_path,
                                    .executable = harness_ballastd};
    struct failure why = {.text = ""};
    pid_t second = 0;
    char first[32];
    snprintf(first, sizeof first, "process %d", (int)harness.pid);
    assert_int_equal(spawn_daemon(&options, &second, &why), STATUS_ADDRESS_IN_USE);
    assert_non_null(strstr(why.text, first));
    harness_open(&harness, &client);
    raw_client_close(&client);
    harness_end(&harness);
}

static void expect_oom(struct harness *harness, uint64_t step, const char *health)
{
    struct raw_client client;
    harness_open(harness, &client);
    Ballast__Control__V1__OomRequest oom = BALLAST__CONTROL__V1__OOM_REQUEST__INIT;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = REQUEST(OOM);
    request.oom = &oom;
    Ballast__Control__V1__Reply *reply = harness_ask(&client, &request);
    assert_int_equal(reply->body_case, REPLY(OOM));
    assert_int_equal(reply->oom->report->step, step);
    assert_string_equal(reply->oom->report->tensor, "attention");
    frame_free(&reply->base);
    reply = harness_status(&client);
    assert_string_equal(reply->status->health, health);
    frame_free(&reply->base);
    raw_client_close(&client);
}

/* Tell a report at this step and wait until the daemon has taken it: what follows it on the link is
 * an event in the journal. */
static void tell_oom(struct harness *harness, int rank, uint64_t step, const char *time)
{
    struct fake_worker *worker = &harness->workers[rank];
    char mark[32];
    snprintf(mark, sizeof mark, "after %s", time);
    worker->step = step;
    worker->oom_time = time;
    assert_int_equal(fake_worker_tell_oom(worker, PHASE_BACKWARD), STATUS_OK);
    assert_int_equal(fake_worker_tell_event(worker, "oom", mark, ""), STATUS_OK);
    for (bool heard = false; !heard;) {
        char *journal = harness_journal(harness);
        heard = strstr(journal, mark) != NULL;
        free(journal);
        harness_pause();
    }
}

static void lose_daemon(struct harness *harness)
{
    int code = 0;
    kill(harness->pid, SIGKILL);
    while (!spawn_reap(harness->pid, &code))
        ;
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        fake_worker_drop(&harness->workers[rank]);
}

/* The report outlives the daemon that was told it; of several ranks' the newest counts. */
static void test_oom_is_kept(void **state)
{
    (void)state;
    struct harness harness;
    struct failure why;
    Ballast__V1__OomReport *report = NULL;
    harness_begin(&harness);
    assert_int_equal(oom_file_read(harness.folder, &report, &why), STATUS_NOT_FOUND);
    tell_oom(&harness, 1, 3, "T3");
    expect_oom(&harness, 3, "ERROR");
    tell_oom(&harness, 0, 4, "T4");
    lose_daemon(&harness);
    assert_int_equal(oom_file_read(harness.folder, &report, &why), STATUS_OK);
    assert_int_equal(report->step, 4);
    frame_free(&report->base);

    harness_start(&harness, true);
    harness_link(&harness, true);
    expect_oom(&harness, 4, "ERROR");
    /* After the reconnect a rank repeats its last one, which is not the run's last one. */
    tell_oom(&harness, 1, 3, "T3");
    expect_oom(&harness, 4, "ERROR");
    lose_daemon(&harness);

    /* Resumed later: still told, but no reason for worry any more. */
    harness_start(&harness, false);
    harness_link(&harness, false);
    expect_oom(&harness, 4, "OK");
    tell_oom(&harness, 1, 5, "T5");
    expect_oom(&harness, 5, "ERROR");
    harness_end(&harness);
}

/* Rank 0 repeats its last step after a reconnect, and states without a plan leave the plan. */
static void test_repeats_change_nothing(void **state)
{
    (void)state;
    struct harness harness;
    struct raw_client client;
    harness_begin(&harness);
    for (uint64_t step = 0; step < 3; step++)
        assert_int_equal(fake_worker_tell_step(&harness.workers[0], step, 2.0), STATUS_OK);
    assert_int_equal(fake_worker_tell_step(&harness.workers[0], 2, 2.0), STATUS_OK);
    assert_int_equal(fake_worker_tell_run(&harness.workers[0], false, "saving", false), STATUS_OK);
    harness_open(&harness, &client);
    for (bool heard = false; !heard;) {
        Ballast__Control__V1__Reply *reply = harness_status(&client);
        heard = strcmp(reply->status->doing, "saving") == 0;
        if (heard) {
            assert_non_null(reply->status->plan);
            assert_int_equal(reply->status->plan->phases[0]->peak_bytes, 123456);
        }
        frame_free(&reply->base);
    }
    Ballast__Control__V1__StepsRequest steps = BALLAST__CONTROL__V1__STEPS_REQUEST__INIT;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = REQUEST(STEPS);
    request.steps = &steps;
    Ballast__Control__V1__Reply *reply = harness_ask(&client, &request);
    assert_int_equal(reply->steps->n_steps, 3);
    assert_int_equal(reply->steps->steps[2]->step, 2);
    frame_free(&reply->base);
    raw_client_close(&client);
    harness_end(&harness);
}

static void test_terminated(void **state)
{
    (void)state;
    struct harness harness;
    harness_begin(&harness);
    kill(harness.pid, SIGTERM);
    harness_wait_exit(&harness, 2.0, 0);
    assert_int_equal(access(harness.link_path, F_OK), -1);
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        fake_worker_drop(&harness.workers[rank]);
    harness_start(&harness, true);
    harness_link(&harness, true);
    harness_end(&harness);
}

static void test_not_started(void **state)
{
    (void)state;
    struct harness harness;
    harness_init(&harness);
    struct spawn_options options = {.run_dir = "/nonexistent", .run_id = harness.run_id,
                                    .socket_path = harness.socket_path,
                                    .link_path = harness.link_path,
                                    .executable = harness_ballastd};
    struct failure why = {.text = ""};
    pid_t pid = 0;
    assert_int_not_equal(spawn_daemon(&options, &pid, &why), STATUS_OK);
    assert_int_equal(pid, 0);
    options.run_dir = harness.folder;
    options.run_id = "bad id";
    assert_int_equal(spawn_daemon(&options, &pid, &why), STATUS_INVALID);
    assert_non_null(strstr(why.text, "0x20"));
    options.executable = "/nonexistent/ballastd";
    assert_int_equal(spawn_daemon(&options, &pid, &why), STATUS_NOT_FOUND);
    harness_fini(&harness);
}

/* ---- allocation failures ---- */

/* In a child: a daemon whose nth allocation fails. Exit 0: none was failed; 1: some were. */
static void serve_failing(const struct harness *harness, uint64_t nth, bool for_ever)
{
    struct daemon_options options = {.run_dir = harness->folder, .run_id = harness->run_id,
                                     .socket_path = harness->socket_path,
                                     .link_path = harness->link_path};
    struct failure why;
    freopen("/dev/null", "w", stderr);
    heap_fail(nth, for_ever);
    enum status status = daemon_run(&options, &why);
    (void)status;
    _exit(heap_failures() > 0 ? 1 : 0);
}

static bool ask_something(struct raw_client *client, Ballast__Control__V1__Request__BodyCase kind,
                          void *body)
{
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    Ballast__Control__V1__Reply *reply = NULL;
    request.body_case = kind;
    request.status = body;
    enum status status = raw_client_ask(client, &request, &reply);
    if (status == STATUS_DEADLINE)
        print_error("request %d was met with silence\n", (int)kind);
    assert_int_not_equal(status, STATUS_DEADLINE); /* an answer or a closed connection */
    if (status != STATUS_OK)
        return false;
    frame_free(&reply->base);
    return true;
}

/* A worker and a client do one of everything, as far as they get. */
static void exercise(struct harness *harness)
{
    struct fake_hello hello = {.link_path = harness->link_path, .run_id = harness->run_id,
                               .world_size = 1, .n_steps = 10};
    struct fake_worker worker = {.fd = -1};
    struct raw_client client = {.fd = -1};
    if (fake_worker_link(&worker, &hello) == STATUS_OK) {
        bool sent = fake_worker_tell_run(&worker, false, "training", true) == STATUS_OK &&
                    fake_worker_tell_rank(&worker, PHASE_FORWARD, 0) == STATUS_OK &&
                    fake_worker_tell_step(&worker, 0, 1.0) == STATUS_OK &&
                    fake_worker_tell_event(&worker, "save", "x", "{\"a\":1}") == STATUS_OK &&
                    fake_worker_tell_oom(&worker, PHASE_STEP) == STATUS_OK;
        (void)sent;
    }
    Ballast__Control__V1__StatusRequest status = BALLAST__CONTROL__V1__STATUS_REQUEST__INIT;
    Ballast__Control__V1__MemoryRequest memory = BALLAST__CONTROL__V1__MEMORY_REQUEST__INIT;
    Ballast__Control__V1__StepsRequest steps = BALLAST__CONTROL__V1__STEPS_REQUEST__INIT;
    Ballast__Control__V1__EventsRequest events = BALLAST__CONTROL__V1__EVENTS_REQUEST__INIT;
    Ballast__Control__V1__WatchRequest watch = BALLAST__CONTROL__V1__WATCH_REQUEST__INIT;
    Ballast__Control__V1__OomRequest oom = BALLAST__CONTROL__V1__OOM_REQUEST__INIT;
    Ballast__Control__V1__WaitRequest wait = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    watch.interval_ms = 50;
    wait.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_STEP;
    if (raw_client_open(&client, harness->socket_path) == STATUS_OK) {
        bool served = ask_something(&client, REQUEST(STATUS), &status) &&
                      ask_something(&client, REQUEST(MEMORY), &memory) &&
                      ask_something(&client, REQUEST(STEPS), &steps) &&
                      ask_something(&client, REQUEST(EVENTS), &events) &&
                      ask_something(&client, REQUEST(WATCH), &watch) &&
                      ask_something(&client, REQUEST(OOM), &oom) &&
                      ask_something(&client, REQUEST(WAIT), &wait);
        (void)served;
        Ballast__Control__V1__SaveRequest save = BALLAST__CONTROL__V1__SAVE_REQUEST__INIT;
        Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
        Ballast__Link__V1__DaemonMessage *message = NULL;
        request.body_case = REQUEST(SAVE);
        request.save = &save;
        if (client.fd >= 0 && raw_client_send(&client, &request) == STATUS_OK &&
            worker.fd >= 0 && fake_worker_receive(&worker, 20, &message) == STATUS_OK) {
            if (message->body_case == BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_COMMAND &&
                fake_worker_tell_result(&worker, message->command->id, STATUS_OK, "", true) ==
                    STATUS_OK)
                ask_something(&client, REQUEST(STATUS), &status);
            frame_free(&message->base);
        }
    }
    raw_client_close(&client);
    if (worker.fd >= 0 && fake_worker_tell_end(&worker, 0) == STATUS_OK) {
        Ballast__Link__V1__DaemonMessage *message = NULL;
        if (fake_worker_receive(&worker, 20, &message) == STATUS_OK)
            frame_free(&message->base);
    }
    fake_worker_drop(&worker);
}

/* Fail allocation number nth; true while there was one to fail. */
static bool sweep_one(uint64_t nth, bool for_ever)
{
    struct harness harness;
    harness_init(&harness);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        serve_failing(&harness, nth, for_ever);
    int code = 0;
    double deadline_s = units_monotonic_s() + 5.0;
    /* It serves, or it has refused to start. */
    while (access(harness.socket_path, F_OK) != 0 && waitpid(pid, &code, WNOHANG) == 0)
        assert_true(units_monotonic_s() < deadline_s);
    if (access(harness.socket_path, F_OK) == 0) {
        exercise(&harness);
        kill(pid, SIGTERM);
        while (waitpid(pid, &code, WNOHANG) == 0)
            assert_true(units_monotonic_s() < deadline_s);
    }
    harness_fini(&harness);
    /* It was on its way out by itself, its handler gone already. */
    if (WIFSIGNALED(code) && WTERMSIG(code) == SIGTERM)
        return true;
    if (!WIFEXITED(code))
        print_error("allocation %llu%s: signal %d\n", (unsigned long long)nth,
                    for_ever ? " and all later ones" : "", WTERMSIG(code));
    assert_true(WIFEXITED(code));
    return WEXITSTATUS(code) == 1;
}

static void test_allocation_failures(void **state)
{
    (void)state;
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        uint64_t nth = 1;
        /* Start-up one by one; later every few, unless the whole sweep is asked for. */
        while (sweep_one(nth, for_ever))
            nth += harness_full || nth < 60 ? 1 : 7;
        assert_true(nth > 100);
    }
}

int run_failure_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rank_lost),     cmocka_unit_test(test_link_comes_back),
        cmocka_unit_test(test_end_of_rank_0), cmocka_unit_test(test_restart),
        cmocka_unit_test(test_oom_is_kept),   cmocka_unit_test(test_repeats_change_nothing),
        cmocka_unit_test(test_terminated),    cmocka_unit_test(test_not_started),
        cmocka_unit_test(test_allocation_failures),
    };
    return cmocka_run_group_tests_name("failures", tests, NULL, NULL);
}
