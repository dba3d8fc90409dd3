/* Verbs with more than one answer against a small server: acceptance and outcome, events in parts
 * and streams, watch, and wait through restarts, a late start and the end of the run.
 * links: base messages proto client */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "tests/lib/fake_daemon.h"

static void serve_accept_and_do(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    assert_int_equal(request->body_case, BALLAST__CONTROL__V1__REQUEST__BODY_SET);
    assert_int_equal(request->set->n_changes, 2);
    assert_string_equal(request->set->changes[0]->key, "checkpointing");
    assert_string_equal(request->set->changes[0]->value, "block:1");
    assert_string_equal(request->set->changes[1]->value, "2=3");
    assert_int_equal(request->set->expected_case,
                     BALLAST__CONTROL__V1__SET_REQUEST__EXPECTED_IF_GENERATION);
    assert_int_equal(request->set->if_generation, 2);
    give_command(fd, request->id, true);
    give_command(fd, request->id, false);
    drop(request);
    frame_reader_fini(&reader);
}

static void serve_accept_only(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    give_command(fd, request->id, true);
    drop(request);
    while ((request = take(fd, &reader)) != NULL)
        drop(request);
    frame_reader_fini(&reader);
}

/* Accepts, then goes away, as the daemon of a stopped run does. */
static void serve_accept_and_close(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    give_command(fd, request->id, true);
    drop(request);
    frame_reader_fini(&reader);
}

static void set_waits_as_told(void **state)
{
    (void)state;
    static const char set[] = "set checkpointing=block:1 micro_batch=2=3 --if-generation 2";
    char waiting[128];
    snprintf(waiting, sizeof waiting, "%s --wait", set);
    CHECK(set, serve_accept_and_do, 0, "accepted\n", "");
    CHECK(waiting, serve_accept_and_do, 0,
          "generation 3 from step 41: checkpointing none -> block:1\n", "");
    CHECK("set a=b --wait --timeout 0.2", serve_accept_only, 4, "", "accepted, but not done");
    CHECK("set a=b --wait", serve_accept_and_close, 3, "", "closed the connection");
    CHECK("stop", serve_accept_and_close, 0, "the run has ended\n", "");
    CHECK("save --no-wait", serve_accept_only, 0, "accepted\n", "");
}

static void give_events(int fd, uint64_t id, bool more, size_t n, const char *const *types,
                        uint64_t first_sequence)
{
    Ballast__V1__Event events[4], *list[4];
    assert_true(n <= 4);
    for (size_t i = 0; i < n; i++) {
        events[i] = (Ballast__V1__Event)BALLAST__V1__EVENT__INIT;
        events[i].type = (char *)types[i];
        events[i].sequence = first_sequence + i;
        events[i].rank = -1;
        events[i].details_json = (char *)"{\"released_bytes\":17,\"step\":99}";
        list[i] = &events[i];
    }
    Ballast__Control__V1__EventsReply body = BALLAST__CONTROL__V1__EVENTS_REPLY__INIT;
    body.events = list;
    body.n_events = n;
    reply_message reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.id = id;
    reply.more = more;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_EVENTS;
    reply.events = &body;
    give(fd, &reply);
}

static void serve_events_in_parts(int fd, void *data)
{
    (void)data;
    static const char *const types[] = {"start", "switch", "save"};
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    give_events(fd, request->id, true, 2, types, 1);
    give_events(fd, request->id, true, 0, types, 1);
    give_events(fd, request->id, false, 1, types + 2, 3);
    drop(request);
    frame_reader_fini(&reader);
}

static void serve_events_to_the_end(int fd, void *data)
{
    (void)data;
    static const char *const types[] = {"start", "end"};
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    assert_true(request->events->follow);
    give_events(fd, request->id, true, 1, types, 1);
    give_events(fd, request->id, true, 1, types + 1, 2);
    drop(request);
    frame_reader_fini(&reader);
}

static void serve_events_to_a_crash(int fd, void *data)
{
    (void)data;
    static const char *const types[] = {"end", "start"};
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    give_events(fd, request->id, true, 2, types, 1);
    drop(request);
    frame_reader_fini(&reader);
}

static void events_come_in_parts_and_streams(void **state)
{
    (void)state;
    /* What an event's type adds are keys of its own, and never hide the event's. */
    CHECK("events --json", serve_events_in_parts, 0, "\"type\":\"switch\"", "");
    CHECK("events --json", serve_events_in_parts, 0, "\"released_bytes\":17", "");
    CHECK("events --json", serve_events_in_parts, 0, "\"step\":0", "");
    CHECK("events", serve_events_in_parts, 0, "save", "");
    CHECK("events -f", serve_events_to_the_end, 0, "end", "");
    CHECK("events -f --json", serve_events_to_the_end, 0, "}\n{", "");
    CHECK("events -f", serve_events_to_a_crash, 3, "start", "closed the connection");
}

static void serve_watch(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    assert_int_equal(request->watch->interval_ms, 60);
    Ballast__Control__V1__StatusReply status;
    Ballast__Control__V1__WatchReply watch = BALLAST__CONTROL__V1__WATCH_REPLY__INIT;
    reply_message reply;
    for (int i = 0; i < 3; i++) {
        make_status(&status, &reply, request->id);
        status.step = 98 + (uint64_t)i;
        watch.status = &status;
        reply.more = true;
        reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_WATCH;
        reply.watch = &watch;
        give(fd, &reply);
    }
    drop(request);
    frame_reader_fini(&reader);
}

static void watch_counts_and_ends(void **state)
{
    (void)state;
    CHECK("watch --interval 60 --count 2", serve_watch, 0, "     99  training", "");
    /* All steps done, then the connection closes: that is the end, not a fault. */
    CHECK("watch --interval 60", serve_watch, 0, "    100  training", "");
    CHECK("watch --interval 60 --json", serve_watch, 0, "}\n{", "");
}

/* The daemon dies while it is waited on... */
static void serve_wait_then_die(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    for (;;) {
        request_message *request = take(fd, &reader);
        bool is_wait = !request || request->body_case == BALLAST__CONTROL__V1__REQUEST__BODY_WAIT;
        if (!is_wait)
            give_status(fd, request->id);
        drop(request);
        if (is_wait)
            break;
    }
    frame_reader_fini(&reader);
}

/* ... and the next one answers. */
static void serve_wait(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    for (;;) {
        request_message *request = take(fd, &reader);
        if (request && request->body_case != BALLAST__CONTROL__V1__REQUEST__BODY_WAIT) {
            give_status(fd, request->id);
            drop(request);
            continue;
        }
        if (request) {
            assert_int_equal(request->wait->step, 50);
            Ballast__Control__V1__WaitReply wait = BALLAST__CONTROL__V1__WAIT_REPLY__INIT;
            wait.step = 50;
            wait.generation = 2;
            reply_message reply = BALLAST__CONTROL__V1__REPLY__INIT;
            reply.id = request->id;
            reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_WAIT;
            reply.wait = &wait;
            give(fd, &reply);
        }
        drop(request);
        break;
    }
    frame_reader_fini(&reader);
}

static void wait_survives_a_restart(void **state)
{
    (void)state;
    check("wait --for step=50 --timeout 9", 3,
          (serve_connection *const[]){serve_wait_then_die, serve_too_many, serve_wait}, 0,
          "50 steps completed, generation 2\n", "");
    check("wait --for step=50 --json", 1, (serve_connection *const[]){serve_wait}, 0,
          "{\"step\":50,\"generation\":2}\n", "");
}

/* The run directory appears, and its socket after it, while we wait. */
static void *appear_later(void *argument)
{
    struct server *server = argument;
    char file[96], content[160];
    int n = snprintf(content, sizeof content, "{\"socket\": \"%s\"}\n", server->path);
    snprintf(file, sizeof file, "%s/control.json", server->folder);
    struct timespec moment = {.tv_nsec = 150000000};
    nanosleep(&moment, NULL);
    FILE *control = fopen(file, "w");
    fwrite(content, 1, (size_t)n, control);
    fclose(control);
    nanosleep(&moment, NULL);
    listen(server->listen_fd, 8);
    return server_main(server);
}

static void wait_for_a_run_to_appear(void **state)
{
    (void)state;
    struct server server = {.n_connections = 1, .serve = {serve_wait}};
    strcpy(server.folder, "/tmp/ballast-test-XXXXXX");
    assert_non_null(mkdtemp(server.folder));
    snprintf(server.path, sizeof server.path, "%s/s", server.folder);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, server.path);
    server.listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(server.listen_fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(pthread_create(&server.thread, NULL, appear_later, &server), 0);

    char command[128], *out, *err;
    snprintf(command, sizeof command, "wait --for step=50 --timeout 9 --run-dir %s", server.folder);
    assert_int_equal(run_line(command, &out, &err), 0);
    assert_string_equal(out, "50 steps completed, generation 2\n");
    free(out);
    free(err);
    char file[96];
    snprintf(file, sizeof file, "%s/control.json", server.folder);
    unlink(file);
    stop(&server);
}

/* The daemon is gone for good; the journal says how far the run came. */
static void wait_reads_the_end_in_the_journal(void **state)
{
    (void)state;
    static const struct {
        const char *condition;
        int code;
        const char *out, *err;
    } cases[] = {
        {"end", 0, "the run has ended after 40 steps, generation 1\n", ""},
        {"step=40", 0, "after 40 steps", ""},
        {"step=41", 1, "", "the run has ended after 40 steps; this will not happen"},
        {"generation=1", 0, "generation 1", ""},
        {"paused", 1, "", "this will not happen"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct server server;
        start(&server, 1, (serve_connection *const[]){serve_wait_then_die}, NULL);
        char file[96], control[96], command[128];
        snprintf(file, sizeof file, "%s/events.jsonl", server.folder);
        FILE *journal = fopen(file, "w");
        fputs("{\"time\":\"2020-01-01T00:00:00.000Z\",\"type\":\"start\",\"step\":0}\n"
              "{\"time\":\"2020-01-01T00:00:09.000Z\",\"type\":\"end\",\"step\":40,\"generation\":"
              "1}\n",
              journal);
        fclose(journal);
        snprintf(control, sizeof control, "%s/control.json", server.folder);
        FILE *control_file = fopen(control, "w");
        fprintf(control_file, "{\"socket\":\"%s\"}\n", server.path);
        fclose(control_file);
        snprintf(command, sizeof command, "wait --for %s --timeout 9 --run-dir %s",
                 cases[i].condition, server.folder);
        char *out, *err;
        int code = run_line(command, &out, &err);
        if (code != cases[i].code || !strstr(out, cases[i].out) || !strstr(err, cases[i].err))
            fail_msg("'%s' exited with %d\nout: %s\nerr: %s", command, code, out, err);
        free(out);
        free(err);
        unlink(file);
        unlink(control);
        stop(&server);
    }
}

/* Rank 0 accepts a question before it answers; a thousand ranks do not fit one frame. */
static void serve_plan(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    assert_int_equal(request->body_case, BALLAST__CONTROL__V1__REQUEST__BODY_PLAN);
    give_command(fd, request->id, true);
    Ballast__V1__PlanSummary before = BALLAST__V1__PLAN_SUMMARY__INIT;
    Ballast__V1__PlanSummary after = BALLAST__V1__PLAN_SUMMARY__INIT;
    Ballast__V1__Setting setting = BALLAST__V1__SETTING__INIT, *settings[] = {&setting};
    setting.key = (char *)"micro_batch";
    setting.value = (char *)"4";
    after.strategy = settings;
    after.n_strategy = 1;
    after.fits = true;
    Ballast__Control__V1__PlanReply plan = BALLAST__CONTROL__V1__PLAN_REPLY__INIT;
    plan.before = &before;
    plan.after = &after;
    reply_message reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.id = request->id;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_PLAN;
    reply.plan = &plan;
    give(fd, &reply);
    drop(request);
    frame_reader_fini(&reader);
}

static void serve_ranks_in_parts(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    bool is_memory = request->body_case == BALLAST__CONTROL__V1__REQUEST__BODY_MEMORY;
    for (uint32_t i = 0; i < 2; i++) {
        Ballast__V1__RankState rank = BALLAST__V1__RANK_STATE__INIT, *list[] = {&rank};
        rank.rank = 500 + i;
        rank.linked = true;
        Ballast__Control__V1__RanksReply ranks = BALLAST__CONTROL__V1__RANKS_REPLY__INIT;
        Ballast__Control__V1__MemoryReply memory = BALLAST__CONTROL__V1__MEMORY_REPLY__INIT;
        ranks.ranks = memory.ranks = list;
        ranks.n_ranks = memory.n_ranks = 1;
        reply_message reply = BALLAST__CONTROL__V1__REPLY__INIT;
        reply.id = request->id;
        reply.more = i == 0;
        if (is_memory) {
            reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_MEMORY;
            reply.memory = &memory;
        } else {
            reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_RANKS;
            reply.ranks = &ranks;
        }
        give(fd, &reply);
    }
    drop(request);
    frame_reader_fini(&reader);
}

static void answers_are_put_together(void **state)
{
    (void)state;
    CHECK("plan micro_batch=4", serve_plan, 0, "micro_batch - -> 4\n", "");
    CHECK("plan", serve_plan, 0, "strategy micro_batch=4\n", "");
    CHECK("plan --json micro_batch=4", serve_plan, 0, "\"strategy\":{\"micro_batch\":4}", "");
    for (int i = 0; i < 2; i++) {
        CHECK("ranks", serve_ranks_in_parts, 0, i ? "500" : "501", "");
        CHECK("memory", serve_ranks_in_parts, 0, i ? "rank 500" : "rank 501", "");
        CHECK("ranks --json", serve_ranks_in_parts, 0, i ? "\"rank\":500," : "\"rank\":501,", "");
    }
}

int main(void)
{
    json_use_heap();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_put_together),
        cmocka_unit_test(set_waits_as_told),
        cmocka_unit_test(events_come_in_parts_and_streams),
        cmocka_unit_test(watch_counts_and_ends),
        cmocka_unit_test(wait_survives_a_restart),
        cmocka_unit_test(wait_for_a_run_to_appear),
        cmocka_unit_test(wait_reads_the_end_in_the_journal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
