/* The link when the daemon dies, comes back or does not: who starts another, what is told again.
 * links: worker kernels proto base
 * labels: tsan
 * timeout: 120
 */
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>
#include "worker/link.h"
#include "tests/unit/link_fixture.h"

static void await_restart(void)
{
    assert_true(readable(restarted_event, units_monotonic_s() + patience_s));
    uint64_t count;
    assert_int_equal(read(restarted_event, &count, sizeof count), sizeof count);
    close_fd(&listener);
    listener = atomic_load(&restarted_listener);
}

static void test_daemon_dies(void **state)
{
    (void)state;
    start_greeted(0);
    telemetry_phase(&telemetry, PHASE_EVAL);
    /* kill -9: the socket file stays, nobody listens */
    close_fd(&listener);
    close_fd(&peer);
    send_event(7);
    await_restart();
    accept_peer();
    worker_message *message = read_message(units_monotonic_s() + patience_s);
    assert_non_null(message);
    assert_int_equal(message->body_case, BODY(HELLO));
    assert_true(message->hello->restarted);
    free_message(message);
    tell_ready("");
    /* the newest state and what waited both come */
    bool got_state = false, got_event = false;
    double until_s = units_monotonic_s() + patience_s;
    while (!got_state || !got_event) {
        message = read_message(until_s);
        assert_non_null(message);
        got_state |= message->body_case == BODY(RANK) &&
                     message->rank->phase == BALLAST__V1__PHASE__PHASE_EVAL;
        got_event |= message->body_case == BODY(EVENT) && message->event->step == 7;
        free_message(message);
    }
    assert_int_equal(atomic_load(&n_restarts), 1);
    assert_true(link_connected(rank_link));
}

/* Only the connection broke: the daemon is still there, so no other is started. */
static void test_connection_breaks(void **state)
{
    (void)state;
    start_greeted(0);
    accept_peer(); /* closes the old one; the link comes again */
    worker_message *message = expect(BODY(HELLO));
    assert_false(message->hello->restarted);
    free_message(message);
    tell_ready("");
    send_event(9);
    message = expect(BODY(EVENT));
    assert_int_equal(message->event->step, 9);
    free_message(message);
    assert_int_equal(atomic_load(&n_restarts), 0);
}

static void test_restarts_are_limited(void **state)
{
    (void)state;
    start_greeted(0);
    atomic_store(&restart_works, false);
    close_fd(&listener);
    close_fd(&peer);
    double until_s = units_monotonic_s() + patience_s;
    while (atomic_load(&n_restarts) < 5 && units_monotonic_s() < until_s) {
        usleep(10000);
    }
    usleep(1000000); /* two more would have followed in this time */
    assert_int_equal(atomic_load(&n_restarts), 5);
}

static void test_other_ranks_do_not_restart(void **state)
{
    (void)state;
    start_greeted(3);
    close_fd(&listener);
    close_fd(&peer);
    usleep(100000); /* several attempts fail in this time */
    assert_int_equal(atomic_load(&n_restarts), 0);
    listener = listen_at_path();
    accept_peer();
    free_message(expect(BODY(HELLO)));
}

static void *end_link(void *argument)
{
    (void)argument;
    link_end(rank_link, 6, "saved on a signal");
    return NULL;
}

/* The daemon dies with the end in its hands: the next one is told again. */
static void test_end_survives_the_daemon(void **state)
{
    (void)state;
    start_greeted(0);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, end_link, NULL), 0);
    free_message(expect(BODY(END)));
    close_fd(&listener);
    close_fd(&peer);
    await_restart();
    accept_peer();
    free_message(expect(BODY(HELLO)));
    tell_ready("");
    uint32_t code = 0;
    assert_ptr_equal(acknowledge(&code), &code);
    assert_int_equal(code, 6);
    pthread_join(thread, NULL);
}

static void send_run(uint64_t step, bool paused, uint64_t plan_limit)
{
    Ballast__V1__PlanSummary plan = BALLAST__V1__PLAN_SUMMARY__INIT;
    Ballast__Link__V1__RunState run = BALLAST__LINK__V1__RUN_STATE__INIT;
    plan.limit_bytes = plan_limit;
    run.step = step;
    run.paused = paused;
    run.plan = plan_limit > 0 ? &plan : NULL;
    worker_message message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BODY(RUN);
    message.run = &run;
    link_send(rank_link, &message);
}

static void send_oom(uint64_t step)
{
    Ballast__V1__OomReport report = BALLAST__V1__OOM_REPORT__INIT;
    report.step = step;
    worker_message message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BODY(OOM);
    message.oom = &report;
    link_send(rank_link, &message);
}

/* What comes up to the event of this step, states of the rank left out: a letter and the step of
 * each, "p" for a state of the run with a plan, "r" without, "o" a shortage, "s" a step. */
static const char *told_before(uint64_t event_step)
{
    static char told[256];
    size_t used = 0;
    told[0] = '\0';
    double until_s = units_monotonic_s() + patience_s;
    for (bool done = false; !done;) {
        worker_message *message = read_message(until_s);
        assert_non_null(message);
        char kind = '?';
        uint64_t step = 0;
        if (message->body_case == BODY(RUN)) {
            kind = message->run->plan != NULL ? 'p' : 'r';
            step = message->run->step;
        } else if (message->body_case == BODY(OOM)) {
            kind = 'o';
            step = message->oom->step;
        } else if (message->body_case == BODY(STEP)) {
            kind = 's';
            step = message->step->step;
        } else if (message->body_case == BODY(EVENT)) {
            done = message->event->step == event_step;
        }
        if (message->body_case != BODY(RANK) && !done) {
            used += (size_t)snprintf(told + used, sizeof told - used, "%c%" PRIu64 " ", kind, step);
        }
        free_message(message);
    }
    return told;
}

/* Another daemon takes the link; `meanwhile` is sent before. */
static void change_daemon(void (*meanwhile)(void))
{
    close_fd(&listener);
    close_fd(&peer);
    if (meanwhile != NULL) {
        meanwhile();
    }
    await_restart();
    accept_peer();
    free_message(expect(BODY(HELLO)));
    tell_ready("");
}

static void send_a_step(void)
{
    send_step(12);
}

/* The next daemon knows nothing but its journal: it is told the plan in force, where the run is,
 * the last shortage and the last step. What waited comes behind it. */
static void test_next_daemon_is_told(void **state)
{
    (void)state;
    start_greeted(0);
    send_run(9, false, 70);
    send_run(10, false, 77);
    send_step(9);
    send_step(10);
    send_run(11, true, 0);
    send_oom(4);
    send_oom(5);
    send_event(1);
    assert_string_equal(told_before(1), "p9 p10 s9 s10 r11 o4 o5 ");
    send_event(2);
    assert_string_equal(told_before(2), "");

    change_daemon(send_a_step);
    send_event(3);
    assert_string_equal(told_before(3), "p10 r11 o5 s10 s12 ");
    change_daemon(NULL);
    send_event(4);
    assert_string_equal(told_before(4), "p10 r11 o5 s12 ");

    /* A newer plan makes the state of before it old. */
    send_run(20, false, 80);
    send_event(5);
    assert_string_equal(told_before(5), "p20 ");
    change_daemon(NULL);
    send_event(6);
    assert_string_equal(told_before(6), "p20 o5 s12 ");
}

/* Gone again before it had read it all: the third is told all of it. */
static void test_telling_starts_over(void **state)
{
    (void)state;
    start_greeted(0);
    send_run(10, false, 77);
    send_step(10);
    send_event(1);
    assert_string_equal(told_before(1), "p10 s10 ");
    change_daemon(NULL);
    worker_message *message = expect(BODY(RUN));
    assert_int_equal(message->run->plan->limit_bytes, 77);
    free_message(message);
    change_daemon(NULL);
    send_event(2);
    assert_string_equal(told_before(2), "p10 s10 ");
}

int main(void)
{
    if (!begin_links("test_link_restart")) {
        return 1;
    }
    const struct CMUnitTest tests[] = {
        TEST(test_daemon_dies),
        TEST(test_connection_breaks),
        TEST(test_restarts_are_limited),
        TEST(test_other_ranks_do_not_restart),
        TEST(test_end_survives_the_daemon),
        TEST(test_next_daemon_is_told),
        TEST(test_telling_starts_over),
    };
    return end_links(cmocka_run_group_tests(tests, NULL, NULL));
}
