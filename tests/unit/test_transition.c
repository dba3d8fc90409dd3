/* A switch: all of it or nothing, whatever fails before the second vote.
 * links: testing worker kernels proto base
 * labels: memory */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "tests/lib/small_training.h"
#include "tests/lib/values.h"
#include "worker/strategy/transition.h"
#include <cmocka.h> /* last: it has a macro `fail` */

struct fixture {
    struct small_training small;
    struct small_series series;
    struct batch_source source;
    struct admit admit;
    struct strategy wanted;
    struct transition transition;
    struct layout layout;
    /* What is made to fail. */
    int n_votes, no_at_vote;        /* this vote is lost by another rank; 0: none */
    int n_exchanges, lose_exchange; /* this exchange fails; 0: none */
    bool plan_fails;
};

static enum status exchange(void *user, const char *name, const void *mine, size_t bytes, void *all,
                            struct failure *why)
{
    struct fixture *f = user;
    (void)name;
    if (++f->n_exchanges == f->lose_exchange) {
        return (fail)(why, STATUS_RANK_LOST, "somebody is gone");
    }
    memcpy(all, mine, bytes);
    return STATUS_OK;
}

static uint64_t plenty(void)
{
    return UINT64_MAX;
}

static enum status make_plan(void *user, const struct strategy *strategy, struct plan *out_plan,
                             struct failure *why)
{
    struct fixture *f = user;
    if (f->plan_fails) {
        return (fail)(why, STATUS_OUT_OF_MEMORY, "no plan today");
    }
    return rehearse(&f->small.rehearsal, strategy, out_plan, NULL, why);
}

static enum status vote(void *user, const char *name, bool yes, struct failure *why)
{
    struct fixture *f = user;
    f->n_votes++;
    if (!yes || f->n_votes == f->no_at_vote) {
        return (fail)(why, STATUS_VOTED_DOWN, "%s: rank %d could not", name, yes ? 1 : 0);
    }
    return STATUS_OK;
}

/* A training in block:1 that is to go to no checkpointing, which needs more than a
 * granule more. */
static void open_fixture(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    small_init(&f->small, "t0");
    f->small.spec.n_layers = 6;
    f->small.options.limits.global_batch = 8;
    f->small.strategy.micro_batch = 8;
    f->small.strategy.checkpointing = CHECKPOINTING_BLOCK;
    small_open(&f->small);
    f->series = (struct small_series){256, 8, 64};
    f->source = small_series_source(&f->series);
    f->wanted = f->small.strategy;
    f->wanted.checkpointing = CHECKPOINTING_NONE;
    f->admit = (struct admit){.workspace = &f->small.training.workspace,
                              .plan = &f->small.plan,
                              .host_backed = true,
                              .size = 1,
                              .exchange = exchange,
                              .user = f,
                              .node_headroom = plenty};
    training_layout(&f->small.training, &f->wanted, &f->layout);
    f->transition = (struct transition){.workspace = &f->small.training.workspace,
                                        .state = &f->small.training.state,
                                        .layout = &f->layout,
                                        .ops = f->small.ops,
                                        .comm = f->small.comm,
                                        .ledger = &f->small.training.ledger,
                                        .admit = &f->admit,
                                        .plan = &f->small.plan,
                                        .old = &f->small.strategy,
                                        .wanted = &f->wanted,
                                        .limits = &f->small.options.limits,
                                        .make_plan = make_plan,
                                        .vote = vote,
                                        .user = f};
    small_step(&f->small, &f->source, 0);
}

static size_t committed(const struct fixture *f)
{
    return f->small.training.workspace.region.committed_bytes;
}

static void switches(void **state)
{
    (void)state;
    struct fixture f;
    struct transition_result result;
    open_fixture(&f);
    const size_t before = committed(&f);
    const uint64_t old_workspace = f.small.plan.workspace_bytes;
    assert_int_equal(transition_run(&f.transition, &result, &f.small.why), STATUS_OK);
    f.small.strategy = f.small.training.strategy = f.wanted;
    assert_true(f.small.plan.workspace_bytes > old_workspace);
    assert_true(committed(&f) > before);
    assert_int_equal(result.committed_after - result.committed_before, committed(&f) - before);
    assert_int_equal(result.resident_before, before);
    assert_int_equal(result.resident_after, committed(&f));
    assert_ptr_equal(f.small.training.workspace.plan, &f.small.plan);
    assert_ptr_equal(f.admit.plan, &f.small.plan);
    assert_true(f.admit.admitted[PHASE_FORWARD] && f.admit.admitted[PHASE_EVAL]);
    assert_int_equal(f.n_votes, 2);
    /* It trains on, and the new plan is exact. */
    workspace_clear_peaks(&f.small.training.workspace);
    small_step(&f.small, &f.source, 1);
    small_check_peak(&f.small, PHASE_FORWARD);
    small_check_peak(&f.small, PHASE_BACKWARD);

    /* And back: what was taken is given back, and seen to be gone. */
    f.wanted.checkpointing = CHECKPOINTING_BLOCK;
    assert_int_equal(transition_run(&f.transition, &result, &f.small.why), STATUS_OK);
    f.small.strategy = f.small.training.strategy = f.wanted;
    assert_int_equal(committed(&f), before);
    assert_true(result.committed_after < result.committed_before);
    assert_int_equal(region_resident(&f.small.training.workspace.region), before);
    assert_int_equal(f.small.plan.workspace_bytes, old_workspace);
    workspace_clear_peaks(&f.small.training.workspace);
    small_step(&f.small, &f.source, 2);
    small_check_peak(&f.small, PHASE_BACKWARD);
    small_close(&f.small);
}

/* Run a switch that has to fail, and see that nothing has changed: then the next step has the same
 * bits as without the attempt. */
static void must_change_nothing(struct fixture *f, enum status expected, const char *text)
{
    const size_t held = committed(f);
    const struct plan plan = f->small.plan;
    const struct strategy strategy = f->small.training.strategy;
    const uint64_t all = atomic_load(&f->small.device.committed_bytes);
    const int64_t live = heap_live();
    struct transition_result result = {.committed_after = 77};
    struct failure why = {0};
    assert_int_equal(transition_run(&f->transition, &result, &why), expected);
    if (strstr(why.text, text) == NULL) {
        fail_msg("'%s' is not in '%s'", text, why.text);
    }
    assert_int_equal(result.committed_after, 77);
    assert_int_equal(committed(f), held);
    assert_int_equal(atomic_load(&f->small.device.committed_bytes), all);
    assert_int_equal(region_resident(&f->small.training.workspace.region), held);
    assert_memory_equal(&f->small.plan, &plan, sizeof plan);
    assert_ptr_equal(f->small.training.workspace.plan, &f->small.plan);
    assert_true(strategy_equal(&strategy, &f->small.training.strategy));
    assert_int_equal(ledger_check(&f->small.training.ledger, &why), STATUS_OK);
    /* The plan that was not taken is gone. A larger live list may stay. */
    assert_int_equal(heap_live(), live);
    workspace_clear_peaks(&f->small.training.workspace);
    small_step(&f->small, &f->source, 1);
    small_check_peak(&f->small, PHASE_FORWARD);
    small_check_peak(&f->small, PHASE_BACKWARD);
    small_check_peak(&f->small, PHASE_STEP);
}

static float *reference_weights;
static size_t n_weights;

static int make_reference(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f);
    small_step(&f.small, &f.source, 1);
    n_weights = f.small.units.n_elems;
    reference_weights = values_copy(params_get(&f.small.training.params, 0, 0), n_weights);
    small_close(&f.small);
    return 0;
}

static int drop_reference(void **state)
{
    (void)state;
    free(reference_weights);
    return 0;
}

static void close_unchanged(struct fixture *f)
{
    assert_true(
        values_equal(params_get(&f->small.training.params, 0, 0), reference_weights, n_weights));
    small_close(&f->small);
}

static void the_rules_refuse(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f);
    f.wanted.checkpointing_layers = 99;
    must_change_nothing(&f, STATUS_OUT_OF_RANGE, "99");
    assert_int_equal(f.n_exchanges, 0);
    close_unchanged(&f);
}

/* The global batch is held, so the next step has twice as many micro-steps, and the same loss but
 * for the order of sums. */
static void another_micro_batch(void **state)
{
    (void)state;
    struct fixture f;
    struct transition_result result;
    open_fixture(&f);
    const double loss = small_step(&f.small, &f.source, 1).loss;
    small_close(&f.small);
    open_fixture(&f);
    f.wanted = f.small.strategy;
    f.wanted.micro_batch = 4;
    assert_int_equal(transition_run(&f.transition, &result, &f.small.why), STATUS_OK);
    f.small.strategy = f.small.training.strategy = f.wanted;
    assert_int_equal(training_accumulation(&f.small.training), 2);
    workspace_clear_peaks(&f.small.training.workspace);
    assert_true(fabs(small_step(&f.small, &f.source, 1).loss - loss) < 1e-5 * loss);
    small_check_peak(&f.small, PHASE_FORWARD);
    small_check_peak(&f.small, PHASE_BACKWARD);
    small_close(&f.small);
}

static void no_plan(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f);
    f.plan_fails = true;
    must_change_nothing(&f, STATUS_OUT_OF_MEMORY, "no plan today");
    assert_int_equal(f.n_votes, 1); /* the others have to hear of it */
    close_unchanged(&f);
}

static void over_the_capacity(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f);
    f.transition.capacity_bytes = atomic_load(&f.small.device.committed_bytes);
    must_change_nothing(&f, STATUS_DOES_NOT_FIT, "does not fit: ");
    close_unchanged(&f);
}

static void another_rank_could_not_plan(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f);
    f.no_at_vote = 1;
    must_change_nothing(&f, STATUS_VOTED_DOWN, "switch: plan: rank 1 could not");
    close_unchanged(&f);
}

static void the_commit_fails(void **state)
{
    (void)state;
    struct fixture f;
    struct failure why;
    open_fixture(&f);
    fault_here(0, 1, PHASE_SWITCH);
    assert_int_equal(fault_arm("commit:rank=0,phase=switch", &why), STATUS_OK);
    must_change_nothing(&f, STATUS_OUT_OF_MEMORY, "fault on purpose");
    assert_true(f.admit.shortage.on_purpose);
    assert_int_equal(f.admit.shortage.phase, PHASE_SWITCH);
    fault_disarm_all();
    close_unchanged(&f);
}

static void a_rank_is_lost_in_admission(void **state)
{
    (void)state;
    for (int lost = 1; lost <= 2; lost++) {
        struct fixture f;
        open_fixture(&f);
        f.lose_exchange = lost;
        must_change_nothing(&f, STATUS_RANK_LOST, "somebody is gone");
        close_unchanged(&f);
    }
}

static void the_ledger_does_not_close(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f);
    /* Only while the switch verifies: put right again before the checks. */
    atomic_fetch_add(&f.small.telemetry.bytes[TIER_DEVICE][CATEGORY_GRADS], 1);
    struct transition_result result;
    struct failure why;
    const size_t held = committed(&f);
    assert_int_equal(transition_run(&f.transition, &result, &why), STATUS_CORRUPT);
    assert_non_null(strstr(why.text, "ledger: grads"));
    assert_int_equal(committed(&f), held);
    assert_int_equal(f.n_votes, 2);
    atomic_fetch_sub(&f.small.telemetry.bytes[TIER_DEVICE][CATEGORY_GRADS], 1);
    f.n_votes = 0;
    f.no_at_vote = 1;
    must_change_nothing(&f, STATUS_VOTED_DOWN, "switch: plan");
    close_unchanged(&f);
}

static void another_rank_could_not_verify(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f);
    f.no_at_vote = 2;
    must_change_nothing(&f, STATUS_VOTED_DOWN, "switch: verify: rank 1 could not");
    close_unchanged(&f);
}

/* No host memory, at every allocation there is on the way. */
static void every_allocation_fails_once(void **state)
{
    (void)state;
    bool clean = false;
    uint64_t nth = 1;
    for (; !clean; nth++) {
        struct fixture f;
        struct transition_result result;
        struct failure why = {0};
        open_fixture(&f);
        const size_t held = committed(&f);
        const struct plan plan = f.small.plan;
        const int64_t live = heap_live();
        heap_fail(nth, false);
        const enum status status = transition_run(&f.transition, &result, &why);
        clean = heap_failures() == 0;
        heap_fail(0, false);
        if (status == STATUS_OK) {
            /* Packing can do without its second attempt. */
            f.small.strategy = f.small.training.strategy = f.wanted;
        } else {
            assert_int_equal(status, STATUS_OUT_OF_MEMORY);
            assert_true(why.text[0] != '\0');
            assert_int_equal(committed(&f), held);
            assert_memory_equal(&f.small.plan, &plan, sizeof plan);
            assert_ptr_equal(f.small.training.workspace.plan, &f.small.plan);
            assert_int_equal(heap_live(), live);
        }
        workspace_clear_peaks(&f.small.training.workspace);
        small_step(&f.small, &f.source, 1);
        small_check_peak(&f.small, PHASE_BACKWARD);
        close_unchanged(&f);
        assert_true(nth < 500);
    }
    assert_true(nth > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(switches),
        cmocka_unit_test(the_rules_refuse),
        cmocka_unit_test(another_micro_batch),
        cmocka_unit_test(no_plan),
        cmocka_unit_test(over_the_capacity),
        cmocka_unit_test(another_rank_could_not_plan),
        cmocka_unit_test(the_commit_fails),
        cmocka_unit_test(a_rank_is_lost_in_admission),
        cmocka_unit_test(the_ledger_does_not_close),
        cmocka_unit_test(another_rank_could_not_verify),
        cmocka_unit_test(every_allocation_fails_once),
    };
    const int failed = cmocka_run_group_tests(tests, make_reference, drop_reference);
    return failed + (heap_live() != 0);
}
