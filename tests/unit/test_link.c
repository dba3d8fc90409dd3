/* The link against a daemon that this test plays itself, on a real Unix socket. What happens when
 * the daemon goes away is in test_link_restart.c.
 * links: worker kernels proto base
 * labels: tsan
 * timeout: 120
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "proto/version.h"
#include "worker/link.h"
#include "tests/unit/link_fixture.h"

/* ---- tests ---- */

static void test_hello(void **state)
{
    (void)state;
    start_link(0); /* before there is a daemon: it waits for one */
    assert_false(link_connected(rank_link));
    listener = listen_at_path();
    accept_peer();
    worker_message *message = read_message(units_monotonic_s() + patience_s);
    assert_non_null(message);
    assert_int_equal(message->body_case, BODY(HELLO));
    const Ballast__Link__V1__WorkerHello *hello = message->hello;
    assert_string_equal(hello->hello->magic, PROTOCOL_MAGIC);
    assert_int_equal(hello->hello->major, PROTOCOL_MAJOR);
    assert_string_equal(hello->hello->run_id, "one");
    assert_int_equal(hello->rank, 0);
    assert_int_equal(hello->world_size, 4);
    assert_int_equal(hello->pid, getpid());
    assert_string_equal(hello->run_dir, "/runs/one");
    assert_int_equal(hello->n_steps, 100);
    assert_false(hello->restarted);
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    assert_string_equal(hello->host, host);
    free_message(message);
    assert_false(link_connected(rank_link));
    tell_ready("");
    free_message(expect(BODY(RANK)));
    assert_true(link_connected(rank_link));
    /* and again, though nothing happens, at least every 500 ms */
    double start_s = units_monotonic_s();
    free_message(expect(BODY(RANK)));
    assert_true(units_monotonic_s() - start_s < 2);
    assert_int_equal(atomic_load(&n_restarts), 0);
}

static void test_state(void **state)
{
    (void)state;
    start_greeted(2);
    atomic_store(&telemetry.step, 41);
    atomic_store(&telemetry.micro_step, 3);
    atomic_store(&telemetry.layer, 7);
    atomic_store(&telemetry.bytes[TIER_DEVICE][CATEGORY_PARAMS], 1000);
    atomic_store(&telemetry.bytes[TIER_HOST][CATEGORY_EXTERNAL], 50);
    atomic_store(&telemetry.committed_bytes, 4096);
    atomic_store(&telemetry.limit_bytes, 1ull << 40);
    atomic_store(&comm.collective, "grads");
    atomic_store(&comm.n_collectives, 12);
    telemetry_phase(&telemetry, PHASE_BACKWARD);
    worker_message *message;
    for (;;) {
        message = expect(BODY(RANK));
        if (message->rank->phase == BALLAST__V1__PHASE__PHASE_BACKWARD) {
            break;
        }
        free_message(message);
    }
    const Ballast__V1__RankState *rank = message->rank;
    assert_int_equal(rank->rank, 2);
    assert_int_equal(rank->pid, getpid());
    assert_int_equal(rank->step, 41);
    assert_int_equal(rank->micro_step, 3);
    assert_int_equal(rank->layer, 7);
    assert_int_equal(rank->n_memory, 2);
    assert_int_equal(rank->memory[0]->tier, BALLAST__V1__TIER__TIER_DEVICE);
    assert_int_equal(rank->memory[0]->category, BALLAST__V1__CATEGORY__CATEGORY_PARAMS);
    assert_int_equal(rank->memory[0]->bytes, 1000);
    assert_int_equal(rank->memory[1]->tier, BALLAST__V1__TIER__TIER_HOST);
    assert_int_equal(rank->memory[1]->category, BALLAST__V1__CATEGORY__CATEGORY_EXTERNAL);
    assert_int_equal(rank->committed_bytes, 4096);
    assert_int_equal(rank->limit_bytes, 1ull << 40);
    assert_string_equal(rank->collective, "grads");
    assert_int_equal(rank->collective_number, 12);
    assert_true(rank->resident_bytes > 1000000 && rank->resident_bytes < 1ull << 40);
    assert_int_equal(rank->heartbeat, 1);
    free_message(message);
}

/* Ten thousand changes in no time: few messages, and the last change among them. */
static void test_states_coalesce(void **state)
{
    (void)state;
    start_greeted(0);
    double start_s = units_monotonic_s();
    for (int i = 0; i < 10000; i++) {
        telemetry_phase(&telemetry, i % 2 == 0 ? PHASE_FORWARD : PHASE_BACKWARD);
    }
    telemetry_phase(&telemetry, PHASE_SAVE);
    double n = 0;
    for (bool last = false; !last; n++) {
        worker_message *message = expect(BODY(RANK));
        last = message->rank->phase == BALLAST__V1__PHASE__PHASE_SAVE;
        free_message(message);
    }
    double took_s = units_monotonic_s() - start_s;
    assert_true(n <= took_s / 0.002 + 3);
}

static void test_commands(void **state)
{
    (void)state;
    start_greeted(0);
    assert_null(link_take(rank_link));
    assert_null(link_wait(rank_link, 5));
    tell_set(11, false);
    tell_simple(12, "save");
    Ballast__Link__V1__Command *command = link_wait(rank_link, PATIENCE_MS);
    assert_non_null(command);
    assert_int_equal(command->id, 11);
    assert_int_equal(command->body_case, BALLAST__LINK__V1__COMMAND__BODY_SET);
    link_free_command(command);
    command = link_wait(rank_link, PATIENCE_MS);
    assert_non_null(command);
    assert_int_equal(command->id, 12);
    assert_string_equal(command->simple->verb, "save");
    link_free_command(command);
    assert_int_equal(atomic_load(&n_plans), 0);

    /* questions are answered on the link thread, though the main thread takes nothing */
    tell_set(13, true);
    tell_simple(14, "advise");
    Ballast__Link__V1__PlanCommand plan = BALLAST__LINK__V1__PLAN_COMMAND__INIT;
    Ballast__Link__V1__Command ask = BALLAST__LINK__V1__COMMAND__INIT;
    ask.id = 15;
    ask.body_case = BALLAST__LINK__V1__COMMAND__BODY_PLAN;
    ask.plan = &plan;
    tell_command(&ask);
    for (uint64_t id = 13; id <= 15; id++) {
        worker_message *message = expect(BODY(RESULT));
        assert_int_equal(message->result->id, id);
        assert_string_equal(message->result->status, "OK");
        assert_string_equal(message->result->text, "it would fit");
        assert_true(message->result->final);
        free_message(message);
    }
    assert_int_equal(atomic_load(&n_plans), 3);
    assert_false(atomic_load(&plan_on_main_thread));
    assert_null(link_take(rank_link));

    Ballast__Link__V1__Command unknown = BALLAST__LINK__V1__COMMAND__INIT;
    unknown.id = 16;
    tell_command(&unknown);
    worker_message *message = expect(BODY(RESULT));
    assert_int_equal(message->result->id, 16);
    assert_string_equal(message->result->status, "UNSUPPORTED");
    free_message(message);
}

static void test_command_queue_is_bounded(void **state)
{
    (void)state;
    start_greeted(0);
    for (uint64_t id = 1; id <= 66; id++) {
        tell_set(id, false);
    }
    for (uint64_t id = 65; id <= 66; id++) {
        worker_message *message = expect(BODY(RESULT));
        assert_int_equal(message->result->id, id);
        assert_string_equal(message->result->status, "BUSY");
        assert_true(message->result->final);
        free_message(message);
    }
    for (uint64_t id = 1; id <= 64; id++) {
        Ballast__Link__V1__Command *command = link_take(rank_link);
        assert_non_null(command);
        assert_int_equal(command->id, id);
        link_free_command(command);
    }
    assert_null(link_take(rank_link));
    tell_set(67, false); /* left in the queue: link_stop() frees it */
    link_free_command(link_wait(rank_link, PATIENCE_MS));
    tell_set(68, false);
}

static void test_only_rank_0_is_commanded(void **state)
{
    (void)state;
    start_greeted(1);
    tell_set(5, false);
    worker_message *message = expect(BODY(RESULT));
    assert_string_equal(message->result->status, "REFUSED");
    free_message(message);
    assert_null(link_take(rank_link));
}

/* Nobody listens for long: telemetry is dropped, oldest first, events are not. */
static void test_full_queue(void **state)
{
    (void)state;
    start_link(1);
    for (uint64_t i = 0; i < 100; i++) {
        send_event(i);
        send_step(3 * i);
        send_step(3 * i + 1);
        send_step(3 * i + 2);
    }
    listener = listen_at_path();
    accept_peer();
    free_message(expect(BODY(HELLO)));
    tell_ready("");
    uint64_t n_events = 0, n_steps = 0;
    while (n_events + n_steps < 256) {
        worker_message *message = read_message(units_monotonic_s() + patience_s);
        assert_non_null(message);
        if (message->body_case == BODY(EVENT)) {
            assert_int_equal(message->event->step, n_events);
            n_events++;
        } else if (message->body_case == BODY(STEP)) {
            assert_int_equal(message->step->step, 300 - 156 + n_steps);
            n_steps++;
        }
        free_message(message);
    }
    assert_int_equal(n_events, 100);
    assert_int_equal(n_steps, 156);
}

/* More events than the queue's bound: none is lost, and the main thread never waits. */
static void test_daemon_that_does_not_read(void **state)
{
    (void)state;
    start_greeted(0);
    double start_s = units_monotonic_s();
    for (uint64_t i = 0; i < 3000; i++) {
        send_event(i);
    }
    telemetry_phase(&telemetry, PHASE_SWITCH);
    assert_true(units_monotonic_s() - start_s < 2);
    bool got_state = false;
    for (uint64_t n = 0; n < 3000 || !got_state;) {
        worker_message *message = read_message(units_monotonic_s() + patience_s);
        assert_non_null(message);
        if (message->body_case == BODY(EVENT)) {
            assert_int_equal(message->event->step, n);
            n++;
        }
        got_state |= message->body_case == BODY(RANK) &&
                     message->rank->phase == BALLAST__V1__PHASE__PHASE_SWITCH;
        free_message(message);
    }
}

static void test_end(void **state)
{
    (void)state;
    start_greeted(0);
    uint32_t code = 0;
    pthread_t thread;
    send_event(1);
    assert_int_equal(pthread_create(&thread, NULL, acknowledge, &code), 0);
    double start_s = units_monotonic_s();
    link_end(rank_link, 4, "out of memory");
    assert_true(units_monotonic_s() - start_s < 1.5);
    void *done;
    pthread_join(thread, &done);
    assert_ptr_equal(done, &code);
    assert_int_equal(code, 4);
    /* The daemon may go now; nobody wants another. */
    close_fd(&listener);
    close_fd(&peer);
    usleep(100000);
    assert_int_equal(atomic_load(&n_restarts), 0);
}

static void test_end_without_daemon(void **state)
{
    (void)state;
    start_link(1);
    double start_s = units_monotonic_s();
    link_end(rank_link, 0, "done");
    double took_s = units_monotonic_s() - start_s;
    assert_true(took_s >= 1.9 && took_s < 3);
}

static void test_no_link(void **state)
{
    (void)state;
    worker_message message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    link_send(NULL, &message);
    assert_null(link_take(NULL));
    assert_null(link_wait(NULL, 1));
    assert_false(link_connected(NULL));
    link_end(NULL, 0, "");
    link_stop(NULL);
    telemetry.wake_fd = -1;
    telemetry_phase(&telemetry, PHASE_STEP);
    assert_int_equal(atomic_load(&telemetry.phase), PHASE_STEP);
    struct link_options options = {.telemetry = &telemetry};
    char longer[200];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    options.path = longer;
    assert_int_equal(link_start(&options, &rank_link, &why), STATUS_TOO_LARGE);
    assert_non_null(strstr(why.text, "199"));
}

static void test_refused(void **state)
{
    (void)state;
    listener = listen_at_path();
    start_link(0);
    accept_peer();
    free_message(expect(BODY(HELLO)));
    tell_ready("another run");
    double start_s = units_monotonic_s();
    accept_peer(); /* it tries again, not at once */
    assert_true(units_monotonic_s() - start_s > 0.3);
    assert_false(link_connected(rank_link));
}

static void test_fault(void **state)
{
    (void)state;
    fault_here(0, 0, PHASE_SETUP);
    assert_int_equal(fault_arm("link:nth=3", &why), STATUS_OK); /* hello, state, this event */
    start_greeted(0);
    send_event(77);
    for (worker_message *seen; (seen = read_message(units_monotonic_s() + patience_s)) != NULL;) {
        assert_int_not_equal(seen->body_case, BODY(EVENT));
        free_message(seen);
    }
    accept_peer();
    free_message(expect(BODY(HELLO)));
    tell_ready("");
    worker_message *message = expect(BODY(EVENT));
    assert_int_equal(message->event->step, 77);
    free_message(message);
    char spec[160];
    assert_false(fault_unfired(0, spec, sizeof spec));
    fault_disarm_all();
    assert_int_equal(atomic_load(&n_restarts), 0);
}

/* Greet whoever comes, as often as it takes, until an event of this step arrives. */
static void reach(uint64_t step)
{
    double until_s = units_monotonic_s() + patience_s;
    for (;;) {
        accept_peer();
        send_event(step);
        for (worker_message *message; (message = read_message(until_s)) != NULL;) {
            bool hello = message->body_case == BODY(HELLO);
            bool found = message->body_case == BODY(EVENT) && message->event->step == step;
            free_message(message);
            if (found) {
                return;
            }
            if (hello) {
                tell_ready("");
            }
        }
        assert_true(units_monotonic_s() < until_s);
    }
}

/* Allocation number n fails: at worst a message is missing or the connection is made anew;
 * afterwards all works. */
static void test_allocation_failures(void **state)
{
    for (uint64_t n = 1; n <= 24; n++) {
        listener = listen_at_path();
        struct link_options options = {
            .path = path, .rank = 1, .world_size = 4, .telemetry = &telemetry, .comm = &comm};
        heap_fail(n, false);
        enum status status = link_start(&options, &rank_link, &why);
        for (uint64_t i = 0; status == STATUS_OK && i < 20; i++) {
            send_event(i);
        }
        heap_fail(0, false);
        if (status == STATUS_OK) {
            reach(1000);
        } else {
            assert_int_equal(status, STATUS_OUT_OF_MEMORY);
            assert_int_equal(n, 1);
            rank_link = NULL;
        }
        assert_int_equal(tear_down(state), 0);
    }
}

int main(void)
{
    if (!begin_links("test_link")) {
        return 1;
    }
    const struct CMUnitTest tests[] = {
        TEST(test_hello),
        TEST(test_state),
        TEST(test_states_coalesce),
        TEST(test_commands),
        TEST(test_command_queue_is_bounded),
        TEST(test_only_rank_0_is_commanded),
        TEST(test_full_queue),
        TEST(test_daemon_that_does_not_read),
        TEST(test_end),
        TEST(test_end_without_daemon),
        TEST(test_no_link),
        TEST(test_refused),
        TEST(test_fault),
        TEST(test_allocation_failures),
    };
    return end_links(cmocka_run_group_tests(tests, NULL, NULL));
}
