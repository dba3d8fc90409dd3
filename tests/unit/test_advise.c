/* The ladder of remedies and its ranking, with a made-up predictor.
 * links: worker kernels proto base
 * labels: memory */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "worker/strategy/advise.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static const struct strategy_limits limits = {.n_layers = 4,
                                              .world_size = 2,
                                              .global_batch = 16,
                                              .seq_len = 64,
                                              .n_heads = 4,
                                              .n_kv_heads = 2};

static int n_predictions;

/* More recomputation: less memory, more work. A tile saves a little for nothing; each sequence less
 * saves a quarter. */
static enum status predict(void *user, const struct strategy *strategy,
                           struct prediction *out_prediction, struct failure *why)
{
    (void)user;
    (void)why;
    static const uint64_t mode_bytes[] = {1000, 800, 500, 400};
    static const double mode_flops[] = {100, 101, 130, 133};
    n_predictions++;
    uint64_t bytes = mode_bytes[strategy->checkpointing] - (strategy->loss_tile != 0 ? 50 : 0);
    bytes = bytes * strategy->micro_batch / 4;
    *out_prediction =
        (struct prediction){.committed_bytes = bytes, .flops = mode_flops[strategy->checkpointing]};
    out_prediction->peak_bytes[PHASE_FORWARD] = bytes - 1;
    return STATUS_OK;
}

static const struct predictor predictor = {.predict = predict};

static struct strategy current_strategy(void)
{
    struct strategy strategy;
    strategy_default(&strategy, &limits);
    strategy.micro_batch = 4;
    return strategy;
}

static void the_cheapest_that_fits_comes_first(void **state)
{
    (void)state;
    struct oom_remedy remedies[OOM_REMEDIES];
    const struct strategy current = current_strategy();
    assert_int_equal(advise_remedies(&predictor, &current, &limits, 900, remedies), OOM_REMEDIES);
    /* 950 does not fit; selective (800) adds 1 %, and with a tile needs less for the same work. */
    assert_int_equal(remedies[0].strategy.checkpointing, CHECKPOINTING_SELECTIVE);
    assert_true(remedies[0].strategy.loss_tile > 0);
    assert_int_equal(remedies[0].committed_bytes, 750);
    assert_int_equal(remedies[1].committed_bytes, 800);
    assert_true(remedies[0].fits && remedies[0].exact);
    assert_true(remedies[0].relative_flops == 1.01);
    assert_int_equal(remedies[0].peak_bytes[PHASE_FORWARD], 749);
    assert_int_equal(remedies[0].strategy.checkpointing_layers, 4);
    assert_non_null(strstr(remedies[0].text, "checkpointing=selective"));
    assert_non_null(strstr(remedies[0].text, "+1 % work"));
    assert_null(strstr(remedies[0].text, "sums in another order"));
}

/* What can be switched now is better than what needs a new start, whatever it costs. */
static void live_ones_come_before_restarts(void **state)
{
    (void)state;
    struct oom_remedy remedies[OOM_REMEDIES];
    const struct strategy current = current_strategy();
    assert_int_equal(advise_remedies(&predictor, &current, &limits, 360, remedies), OOM_REMEDIES);
    assert_int_equal(remedies[0].strategy.checkpointing, CHECKPOINTING_BLOCK);
    assert_int_equal(remedies[0].strategy.micro_batch, 4);
    assert_true(remedies[0].exact);
    assert_int_equal(remedies[0].committed_bytes, 350);
    /* Then the smaller micro-batch without recomputation that fits: 950/4 at one sequence. */
    assert_false(remedies[1].exact);
    assert_true(remedies[1].fits);
    assert_true(remedies[1].relative_flops == 1.0);
    assert_non_null(strstr(remedies[1].text, "sums in another order"));
}

static void when_nothing_fits_the_smallest_are_told(void **state)
{
    (void)state;
    struct oom_remedy remedies[OOM_REMEDIES];
    const struct strategy current = current_strategy();
    assert_int_equal(advise_remedies(&predictor, &current, &limits, 10, remedies), OOM_REMEDIES);
    assert_false(remedies[0].fits);
    /* One sequence of 64 tokens leaves nothing to tile: its best is block:1, 400/4. */
    assert_true(remedies[0].committed_bytes <= remedies[1].committed_bytes &&
                remedies[1].committed_bytes <= remedies[2].committed_bytes);
    assert_int_equal(remedies[0].committed_bytes, 100);
    assert_non_null(strstr(remedies[0].text, "(still does not fit)"));
}

/* No limit: everything fits. The strategy in force is never its own remedy; none comes twice. */
static void candidates_are_others_and_legal(void **state)
{
    (void)state;
    struct oom_remedy remedies[OOM_REMEDIES];
    struct strategy current = current_strategy();
    current.checkpointing = CHECKPOINTING_BLOCK;
    current.checkpointing_layers = 4;
    n_predictions = 0;
    const size_t n = advise_remedies(&predictor, &current, &limits, 0, remedies);
    assert_int_equal(n, OOM_REMEDIES);
    for (size_t i = 0; i < n; i++) {
        assert_true(remedies[i].fits);
        assert_false(strategy_equal(&remedies[i].strategy, &current));
        assert_int_equal(strategy_check(&remedies[i].strategy, &limits, NULL), STATUS_OK);
        for (size_t j = 0; j < i; j++) {
            assert_false(strategy_equal(&remedies[i].strategy, &remedies[j].strategy));
        }
    }
    /* The one in force once, and no more than the ladder: 3 micro-batches x 4 modes x 2. */
    assert_true(n_predictions > 4 && n_predictions <= 1 + 24);
    /* Cheaper than what is in force: less work. */
    assert_true(remedies[0].relative_flops < 1.0);
}

/* A micro-batch that the global batch does not allow is not offered. */
static void illegal_micro_batches_are_left_out(void **state)
{
    (void)state;
    struct strategy_limits odd = limits;
    odd.global_batch = 6;
    odd.world_size = 1;
    struct strategy current = current_strategy();
    current.micro_batch = 6; /* then 3, then 1 */
    struct oom_remedy remedies[OOM_REMEDIES];
    const size_t n = advise_remedies(&predictor, &current, &odd, 100, remedies);
    assert_true(n > 0);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(odd.global_batch % remedies[i].strategy.micro_batch, 0);
    }
}

static enum status refuse(void *user, const struct strategy *strategy,
                          struct prediction *out_prediction, struct failure *why)
{
    (void)user;
    (void)strategy;
    (void)out_prediction;
    return (fail)(why, STATUS_OUT_OF_MEMORY, "no plan");
}

static void no_plan_no_remedy(void **state)
{
    (void)state;
    struct oom_remedy remedies[OOM_REMEDIES];
    const struct strategy current = current_strategy();
    const struct predictor silent = {.predict = refuse};
    assert_int_equal(advise_remedies(&silent, &current, &limits, 900, remedies), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_cheapest_that_fits_comes_first),
        cmocka_unit_test(live_ones_come_before_restarts),
        cmocka_unit_test(when_nothing_fits_the_smallest_are_told),
        cmocka_unit_test(candidates_are_others_and_legal),
        cmocka_unit_test(illegal_micro_batches_are_left_out),
        cmocka_unit_test(no_plan_no_remedy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
