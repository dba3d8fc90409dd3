/* The run's state machine: each transition by hand, then random lives with invariants.
 * links: base proto daemon */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "daemon/health.h"
#include "daemon/run.h"
#include "proto/base/heap.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static struct run run; /* too large for a stack */

static void begin(bool restarted)
{
    struct run_options options = {.now_ms = 1000, .first_command_id = 500, .restarted = restarted};
    run_init(&run, &options);
}

static void expect_action(enum run_action_kind kind)
{
    struct run_action action;
    assert_true(run_next_action(&run, &action));
    assert_int_equal(action.kind, kind);
}

static void expect_nothing(void)
{
    struct run_action action;
    assert_false(run_next_action(&run, &action));
}

static void link_up(uint32_t rank, uint32_t world, int64_t now_ms)
{
    struct failure why;
    assert_int_equal(run_link_up(&run, rank, world, (int32_t)(100 + rank), now_ms, &why),
                     STATUS_OK);
}

static void test_nobody_comes(void **state)
{
    (void)state;
    begin(false);
    run_tick(&run, 10999);
    expect_nothing();
    run_tick(&run, 11000);
    expect_action(RUN_ACTION_EXIT);
    assert_int_equal(run.stage, RUN_OVER);
    run_fini(&run);
    begin(true);
    run_tick(&run, 11000);
    expect_action(RUN_ACTION_DAEMON_LOST);
    expect_action(RUN_ACTION_EXIT);
    expect_nothing();
    run_fini(&run);
}

static void test_clean_end(void **state)
{
    (void)state;
    begin(false);
    link_up(0, 2, 1100);
    link_up(1, 2, 1200);
    run_rank_ended(&run, 1, 0, 2000);
    expect_nothing();
    run_link_closed(&run, 1, 2001); /* no loss: it said goodbye */
    run_tick(&run, 9000);
    expect_nothing();
    run_rank_ended(&run, 0, 0, 9500);
    expect_action(RUN_ACTION_END);
    expect_action(RUN_ACTION_ACK_END);
    expect_nothing();
    assert_int_equal(run.stage, RUN_ENDED);
    run_tick(&run, 60000); /* clients are served as long as a link is open */
    expect_nothing();
    run_link_closed(&run, 0, 60001);
    expect_action(RUN_ACTION_CLOSE);
    run_tick(&run, 60001 + RUN_LINGER_MS - 1);
    expect_nothing();
    run_tick(&run, 60001 + RUN_LINGER_MS);
    expect_action(RUN_ACTION_EXIT);
    struct failure why;
    assert_int_equal(run_link_up(&run, 0, 2, 100, 61000, &why), STATUS_STOPPED);
    run_fini(&run);
}

static void test_loss(void **state)
{
    (void)state;
    begin(false);
    for (uint32_t rank = 0; rank < 4; rank++)
        link_up(rank, 4, 1100);
    run_rank_at(&run, 2, PHASE_BACKWARD, 7, 3, 1500);
    run_link_closed(&run, 2, 2000);
    run_link_closed(&run, 1, 2000); /* within the same millisecond, but later */
    run_tick(&run, 2999);
    expect_nothing();
    run_tick(&run, 3000);
    expect_action(RUN_ACTION_RANK_LOST);
    expect_nothing();
    assert_int_equal(run.culprit, 2);
    assert_int_equal(run.ranks[2].phase, PHASE_BACKWARD);
    assert_int_equal(run.stage, RUN_BROKEN);
    run_link_closed(&run, 3, 4000); /* a consequence: no story of its own */
    run_rank_ended(&run, 0, 5, 4500);
    expect_action(RUN_ACTION_END);
    expect_action(RUN_ACTION_ACK_END);
    run_link_closed(&run, 0, 4600);
    expect_action(RUN_ACTION_CLOSE);
    run_tick(&run, 6600);
    expect_action(RUN_ACTION_EXIT);
    expect_nothing();
    uint32_t lost[4];
    assert_int_equal(run_lost_ranks(&run, lost, 4), 3);
    assert_int_equal(lost[0], 2);
    assert_int_equal(lost[1], 1);
    assert_int_equal(lost[2], 3);
    run_fini(&run);
}

static void test_link_comes_back(void **state)
{
    (void)state;
    begin(false);
    link_up(0, 2, 1100);
    link_up(1, 2, 1100);
    run_link_closed(&run, 0, 2000);
    run_link_closed(&run, 1, 2100); /* all links gone: wait out the second all the same */
    expect_nothing();
    link_up(1, 2, 2500);
    link_up(0, 2, 2600);
    run_tick(&run, 3000);
    run_tick(&run, 9000);
    expect_nothing();
    assert_int_equal(run.stage, RUN_RUNNING);
    assert_int_equal(run.n_linked, 2);
    struct failure why;
    assert_int_equal(run_link_up(&run, 0, 2, 999, 9100, &why), STATUS_CONFLICT);
    assert_non_null(strstr(why.text, "process 100"));
    assert_int_equal(run_link_up(&run, 2, 2, 999, 9100, &why), STATUS_OUT_OF_RANGE);
    assert_int_equal(run_link_up(&run, 0, 3, 100, 9100, &why), STATUS_CONFLICT);
    run_fini(&run);
    begin(false);
    assert_int_equal(run_link_up(&run, 0, 0, 1, 1000, &why), STATUS_OUT_OF_RANGE);
    assert_int_equal(run_link_up(&run, 0, RUN_MAX_RANKS + 1, 1, 1000, &why), STATUS_OUT_OF_RANGE);
    heap_fail(1, true);
    assert_int_equal(run_link_up(&run, 0, 2, 1, 1000, &why), STATUS_OUT_OF_MEMORY);
    heap_fail(0, false);
    link_up(0, 2, 1000);
    run_fini(&run);
}

static void test_commands(void **state)
{
    (void)state;
    struct failure why;
    struct run_action action;
    struct run_pending pending;
    uint64_t id = 0, second = 0;
    struct run_request request = {.client = 5, .id = 6};
    begin(false);
    assert_int_equal(run_command(&run, request, 1, &id, &why), STATUS_LINK_LOST);
    link_up(0, 1, 1100);
    assert_int_equal(run_command(&run, request, 1, &id, &why), STATUS_OK);
    assert_int_equal(id, 500);
    assert_true(run_is_pending(&run, request));
    assert_false(run_result(&run, 499, true, &pending));
    assert_true(run_result(&run, 500, false, &pending));
    assert_int_equal(pending.request.id, 6);
    assert_true(run_result(&run, 500, true, &pending));
    assert_false(run_result(&run, 500, true, &pending)); /* once only */
    for (int i = 0; i < RUN_MAX_PENDING; i++) {
        request.id = 100 + (uint64_t)i;
        assert_int_equal(run_command(&run, request, 1, &second, &why), STATUS_OK);
    }
    assert_int_equal(run_command(&run, request, 1, &id, &why), STATUS_BUSY);
    run_take_back(&run, second);
    run_forget_client(&run, 5);
    request.client = 9;
    assert_int_equal(run_command(&run, request, 1, &id, &why), STATUS_OK);
    run_rank_ended(&run, 0, 0, 2000);
    /* Only the client that is still there hears of it. */
    assert_true(run_next_action(&run, &action));
    assert_int_equal(action.kind, RUN_ACTION_FAILED);
    assert_int_equal(action.request.client, 9);
    assert_int_equal(action.status, STATUS_STOPPED);
    expect_action(RUN_ACTION_END);
    assert_int_equal(run_command(&run, request, 1, &id, &why), STATUS_STOPPED);
    run_fini(&run);
}

static void test_waits(void **state)
{
    (void)state;
    struct failure why;
    struct run_action action;
    struct run_wait wait = {.request = {1, 1}, .kind = RUN_WAIT_STEP, .value = 10};
    begin(false);
    link_up(0, 1, 1100);
    assert_int_equal(run_wait(&run, &wait, &why), STATUS_OK);
    run_progress(&run, 9);
    expect_nothing();
    run_progress(&run, 10);
    expect_action(RUN_ACTION_WOKEN);
    assert_int_equal(run_wait(&run, &wait, &why), STATUS_OK); /* true already */
    expect_action(RUN_ACTION_WOKEN);
    run_state(&run, 3, 5, true); /* steps and generations do not go back */
    assert_int_equal(run.step, 10);
    run_state(&run, 11, 4, true);
    assert_int_equal(run.generation, 5);
    wait.kind = RUN_WAIT_EVENT;
    snprintf(wait.event, sizeof wait.event, "save");
    assert_int_equal(run_wait(&run, &wait, &why), STATUS_OK);
    run_event(&run, "skip");
    expect_nothing();
    run_event(&run, "save");
    assert_true(run_next_action(&run, &action));
    assert_true(action.kind == RUN_ACTION_WOKEN && action.with_event);
    wait.request.id = 2;
    assert_int_equal(run_wait(&run, &wait, &why), STATUS_OK);
    assert_true(run_cancel_wait(&run, wait.request));
    assert_false(run_cancel_wait(&run, wait.request));
    assert_int_equal(run_wait(&run, &wait, &why), STATUS_OK);
    run_rank_ended(&run, 0, 0, 2000);
    expect_action(RUN_ACTION_END);
    expect_action(RUN_ACTION_ACK_END);
    run_event(&run, "end");
    assert_true(run_next_action(&run, &action));
    assert_true(action.kind == RUN_ACTION_FAILED && action.status == STATUS_STOPPED);
    assert_int_equal(run_wait(&run, &wait, &why), STATUS_STOPPED);
    wait.kind = RUN_WAIT_END;
    assert_int_equal(run_wait(&run, &wait, &why), STATUS_OK);
    expect_action(RUN_ACTION_WOKEN);
    run_fini(&run);
}

static void test_health(void **state)
{
    (void)state;
    struct health health;
    struct health_facts facts = {.now_ms = 1000, .disk_known = true, .disk_free_bytes = 1ULL << 40};
    begin(false);
    health_judge(&run, &facts, &health);
    assert_int_equal(health.level, HEALTH_WARN); /* nobody has come */
    link_up(0, 2, 1000);
    link_up(1, 2, 1000);
    health_judge(&run, &facts, &health);
    assert_int_equal(health.level, HEALTH_OK);
    assert_int_equal(health.n_reasons, 0);
    run_rank_at(&run, 1, PHASE_EVAL, 4, 1, 1000);
    run_heard(&run, 0, 20000);
    facts.now_ms = 20000;
    health_judge(&run, &facts, &health);
    assert_int_equal(health.level, HEALTH_WARN);
    assert_int_equal(health.n_reasons, 1);
    assert_non_null(strstr(health.reasons[0], "rank 1 has said nothing for 19 s"));
    assert_non_null(strstr(health.reasons[0], "eval of step 4"));
    facts.disk_free_bytes = 500ULL << 20;
    health_judge(&run, &facts, &health);
    assert_int_equal(health.n_reasons, 2);
    facts.disk_free_bytes = 50ULL << 20;
    health_judge(&run, &facts, &health);
    assert_int_equal(health.level, HEALTH_ERROR);
    run_fini(&run);
}

/* ---- random lives ---- */

enum { WORLD = 3, N_CLIENTS = 4, MAX_REQUESTS = 4000 };

/* What the outside has to see, kept beside the machine. */
struct shadow {
    uint64_t seed;
    int64_t now_ms;
    bool linked[WORLD], ended[WORLD];
    uint64_t next_id;
    /* By request id: 0 unknown, 1 open, 2 answered. */
    uint8_t requests[MAX_REQUESTS];
    uint64_t client_of[MAX_REQUESTS];
    uint64_t commands[RUN_MAX_PENDING]; /* command ids sent to rank 0 and not finally answered */
    size_t n_commands;
    uint64_t step, generation, last_generation;
    int n_lost_told, n_ends, n_exits;
};

static uint64_t draw(struct shadow *shadow, uint64_t below)
{
    shadow->seed ^= shadow->seed << 13;
    shadow->seed ^= shadow->seed >> 7;
    shadow->seed ^= shadow->seed << 17;
    return shadow->seed % below;
}

static void answer(struct shadow *shadow, struct run_request request)
{
    assert_true(request.id < MAX_REQUESTS);
    assert_int_equal(shadow->requests[request.id], 1); /* exactly once */
    assert_int_equal(shadow->client_of[request.id], request.client);
    shadow->requests[request.id] = 2;
}

static void drain(struct shadow *shadow)
{
    struct run_action action;
    while (run_next_action(&run, &action)) {
        switch (action.kind) {
        case RUN_ACTION_WOKEN:
        case RUN_ACTION_FAILED:
            answer(shadow, action.request);
            break;
        case RUN_ACTION_RANK_LOST:
            shadow->n_lost_told++;
            assert_false(shadow->ended[run.culprit]);
            assert_false(shadow->linked[run.culprit]);
            run_event(&run, "rank_lost");
            break;
        case RUN_ACTION_END:
            shadow->n_ends++;
            run_event(&run, "end");
            break;
        case RUN_ACTION_EXIT:
            shadow->n_exits++;
            break;
        case RUN_ACTION_DAEMON_LOST:
        case RUN_ACTION_ACK_END:
        case RUN_ACTION_CLOSE:
            break;
        }
    }
    assert_true(run.generation >= shadow->last_generation);
    shadow->last_generation = run.generation;
}

static struct run_request new_request(struct shadow *shadow)
{
    struct run_request request = {.client = 1 + draw(shadow, N_CLIENTS), .id = ++shadow->next_id};
    assert_true(request.id < MAX_REQUESTS);
    shadow->requests[request.id] = 1;
    shadow->client_of[request.id] = request.client;
    return request;
}

static void do_command(struct shadow *shadow)
{
    struct run_request request = new_request(shadow);
    struct failure why;
    uint64_t id = 0;
    if (run_command(&run, request, 0, &id, &why) == STATUS_OK)
        shadow->commands[shadow->n_commands++] = id;
    else
        shadow->requests[request.id] = 2; /* refused at once: the caller answers */
}

static void do_result(struct shadow *shadow)
{
    if (shadow->n_commands == 0)
        return;
    size_t index = draw(shadow, shadow->n_commands);
    bool final = draw(shadow, 3) > 0;
    struct run_pending pending;
    bool known = run_result(&run, shadow->commands[index], final, &pending);
    if (known && final && pending.request.client)
        answer(shadow, pending.request);
    if (!known || final)
        shadow->commands[index] = shadow->commands[--shadow->n_commands];
}

static void do_wait(struct shadow *shadow)
{
    struct run_wait wait = {.request = new_request(shadow)};
    struct failure why;
    wait.kind = (enum run_wait_kind)draw(shadow, 5);
    wait.value = wait.kind == RUN_WAIT_STEP ? shadow->step + draw(shadow, 9) : draw(shadow, 4);
    snprintf(wait.event, sizeof wait.event, "%s", draw(shadow, 2) ? "save" : "rank_lost");
    if (run_wait(&run, &wait, &why) != STATUS_OK)
        shadow->requests[wait.request.id] = 2;
}

static void do_link(struct shadow *shadow)
{
    uint32_t rank = (uint32_t)draw(shadow, WORLD);
    struct failure why;
    if (!shadow->linked[rank]) {
        shadow->linked[rank] =
            run_link_up(&run, rank, WORLD, (int32_t)rank, shadow->now_ms, &why) == STATUS_OK;
    } else if (draw(shadow, 4) == 0) {
        shadow->linked[rank] = false;
        run_link_closed(&run, rank, shadow->now_ms);
        if (rank == 0)
            shadow->n_commands = 0;
    }
}

static void do_forget(struct shadow *shadow)
{
    uint64_t client = 1 + draw(shadow, N_CLIENTS);
    run_forget_client(&run, client);
    for (uint64_t id = 1; id <= shadow->next_id; id++) {
        if (shadow->client_of[id] == client)
            shadow->requests[id] = 2; /* nobody to be answered any more */
    }
}

static void one_event(struct shadow *shadow)
{
    uint32_t rank = (uint32_t)draw(shadow, WORLD);
    shadow->now_ms += (int64_t)draw(shadow, 120);
    switch (draw(shadow, 10)) {
    case 0:
        do_link(shadow);
        break;
    case 1:
    case 2:
        do_command(shadow);
        break;
    case 3:
    case 4:
        do_result(shadow);
        break;
    case 5:
        do_wait(shadow);
        break;
    case 6:
        run_progress(&run, shadow->step += draw(shadow, 3));
        break;
    case 7:
        run_state(&run, shadow->step, draw(shadow, 6), draw(shadow, 2));
        break;
    case 8:
        if (draw(shadow, 40) == 0)
            do_forget(shadow);
        run_event(&run, draw(shadow, 2) ? "save" : "skip");
        break;
    default:
        if (shadow->linked[rank] && draw(shadow, 25) == 0) {
            shadow->ended[rank] = true;
            run_rank_ended(&run, rank, 0, shadow->now_ms);
        }
        break;
    }
    drain(shadow);
    run_tick(&run, shadow->now_ms);
    drain(shadow);
}

static void one_life(uint64_t seed)
{
    static struct shadow shadow;
    shadow = (struct shadow){.seed = seed * 2654435761u + 1, .now_ms = 1000};
    begin(seed % 2);
    for (int i = 0; i < 600 && run.stage != RUN_OVER; i++)
        one_event(&shadow);
    /* Everybody dies; then the daemon has to end within 2 s, all said and every request
     * answered. */
    int64_t dead_ms = shadow.now_ms;
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        if (shadow.linked[rank])
            run_link_closed(&run, rank, shadow.now_ms);
        shadow.linked[rank] = false;
    }
    drain(&shadow);
    bool ever_linked = run.world_size > 0;
    int64_t limit_ms = ever_linked ? 2000 : RUN_FIRST_LINK_MS + 100;
    while (run.stage != RUN_OVER) {
        shadow.now_ms += 100;
        assert_true(shadow.now_ms - dead_ms <= limit_ms);
        run_tick(&run, shadow.now_ms);
        drain(&shadow);
    }
    assert_int_equal(shadow.n_exits, 1);
    assert_int_equal(shadow.n_ends, ever_linked ? 1 : 0);
    assert_true(shadow.n_lost_told <= 1);
    for (uint64_t id = 1; id <= shadow.next_id; id++)
        assert_int_equal(shadow.requests[id], 2);
    assert_int_equal(run.n_pending, 0);
    assert_int_equal(run.n_waits, 0);
    run_fini(&run);
}

static void test_random_lives(void **state)
{
    (void)state;
    int n_told = 0;
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        one_life(seed);
        n_told += run.loss_told;
    }
    assert_true(n_told > 500); /* the lives do what they are meant to try */
    assert_int_equal(heap_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_comes), cmocka_unit_test(test_clean_end),
        cmocka_unit_test(test_loss),         cmocka_unit_test(test_link_comes_back),
        cmocka_unit_test(test_commands),     cmocka_unit_test(test_waits),
        cmocka_unit_test(test_health),       cmocka_unit_test(test_random_lives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
