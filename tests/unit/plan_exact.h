/* Random small trainings whose plan must be met to the byte: what test_plan_exact.c (one rank) and
 * test_plan_exact_ranks.c (several) share. Include once, after cmocka.h. */
#ifndef BALLAST_TESTS_UNIT_PLAN_EXACT_H
#define BALLAST_TESTS_UNIT_PLAN_EXACT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tests/lib/small_training.h"
#include <cmocka.h> /* last: it has a macro `fail` */

/* The same sequence on every rank: a generator of its own, so that no test depends on the
 * project's random source. */
static uint64_t exact_random = 0x9E3779B97F4A7C15u;

static uint32_t exact_pick(uint32_t low, uint32_t high)
{
    exact_random ^= exact_random << 13;
    exact_random ^= exact_random >> 7;
    exact_random ^= exact_random << 17;
    return low + (uint32_t)((exact_random >> 32) % (high - low + 1));
}

static bool exact_flip(void)
{
    return exact_pick(0, 1) == 1;
}

static void exact_model(struct model_spec *spec)
{
    const bool gpt2 = spec->family == FAMILY_GPT2;
    spec->n_layers = exact_pick(1, 6);
    spec->n_heads = exact_pick(1, 4);
    spec->head_dim = 2 * exact_pick(1, 9);
    spec->n_kv_heads = spec->n_heads;
    spec->width = spec->n_heads * spec->head_dim;
    spec->inner = exact_pick(3, 150);
    spec->vocab = exact_pick(11, 300);
    if (!gpt2) {
        while (spec->n_heads % spec->n_kv_heads != 0 || exact_pick(0, 2) == 0) {
            spec->n_kv_heads = exact_pick(1, spec->n_heads);
        }
        spec->width = exact_pick(3, 70);
        spec->attention_bias = exact_flip();
        spec->attention_out_bias = exact_flip();
        spec->mlp_bias = exact_flip();
        spec->tied = exact_flip();
    }
    if (exact_flip()) {
        spec->dropout_embed = 0.1f;
        spec->dropout_attention = exact_flip() ? 0.1f : 0.0f;
        spec->dropout_residual = exact_flip() ? 0.1f : 0.0f;
    }
}

static void exact_strategy(struct small_training *small)
{
    static const enum checkpointing modes[] = {CHECKPOINTING_NONE, CHECKPOINTING_SELECTIVE,
                                               CHECKPOINTING_SPLIT, CHECKPOINTING_BLOCK,
                                               CHECKPOINTING_BLOCK};
    struct strategy *strategy = &small->strategy;
    const uint32_t rows = strategy->micro_batch * small->options.limits.seq_len;
    strategy->checkpointing = modes[exact_pick(0, 4)];
    strategy->checkpoint_blocks =
        strategy->checkpointing == CHECKPOINTING_BLOCK ? exact_pick(1, small->spec.n_layers) : 1;
    strategy->checkpointing_layers =
        exact_flip() ? small->spec.n_layers : exact_pick(0, small->spec.n_layers);
    strategy->loss_tile = exact_flip() ? 0 : exact_pick(1, rows + 3);
}

static void exact_describe(struct small_training *small, uint32_t number)
{
    const struct model_spec *spec = &small->spec;
    char text[STRATEGY_TEXT_BYTES];
    struct strategy plain;
    strategy_default(&plain, &small->options.limits);
    snprintf(small->label, sizeof small->label,
             "configuration %u: %s layers %u heads %u/%u x %u width %u inner %u vocab %u, batch %u "
             "x %u, %s, paint %d, dropout %g %g, %.200s",
             number, spec->name, spec->n_layers, spec->n_heads, spec->n_kv_heads, spec->head_dim,
             spec->width, spec->inner, spec->vocab, small->options.limits.global_batch,
             small->options.limits.seq_len, dtype_name(small->dtype), small->options.paint, (double)spec->dropout_embed,
             (double)spec->dropout_residual, strategy_format(&plain, &small->strategy, text));
}

/* The next configuration, open. comm NULL: one rank. */
static void exact_open(struct small_training *small, struct comm *comm, uint32_t number)
{
    const uint32_t size = comm == NULL ? 1 : comm->size;
    small_init(small, exact_flip() ? "gpt2-tiny" : "t0");
    exact_model(&small->spec);
    small->comm = comm;
    small->strategy.micro_batch = exact_pick(1, 4);
    small->options.limits.seq_len = exact_pick(1, 40);
    small->spec.max_positions = small->options.limits.seq_len + exact_pick(0, 3);
    small->options.limits.global_batch = small->strategy.micro_batch * exact_pick(1, 3) * size;
    small->options.limits.n_layers = small->spec.n_layers;
    small->options.limits.world_size = size;
    small->options.eval_micro_batch = exact_pick(1, 3);
    small->options.reduce_bucket_bytes = (size_t)1 << exact_pick(8, 20);
    small->options.gradient_clipping = exact_flip() ? 0.5 : 0.0;
    small->options.paint = exact_flip();
    small->dtype = exact_flip() ? DTYPE_BF16 : DTYPE_FP32;
    exact_strategy(small);
    exact_describe(small, number);
    small_open(small);
}

/* Two steps and an evaluation; in every one each phase's measured peak is the planned one. */
static void exact_check(struct small_training *small)
{
    static const enum phase phases[] = {PHASE_FORWARD, PHASE_BACKWARD, PHASE_STEP};
    struct small_series series = {small->spec.vocab, small->options.limits.global_batch,
                                  small->options.limits.seq_len};
    const struct batch_source source = small_series_source(&series);
    struct workspace *workspace = &small->training.workspace;
    for (uint64_t step = 0; step < 2; step++) {
        workspace_clear_peaks(workspace);
        const struct step_result result = small_step(small, &source, step);
        if (result.skipped || !(result.loss > 0.0) || !(result.grad_norm > 0.0)) {
            fail_msg("loss %g, norm %g\n  %s", result.loss, result.grad_norm, small->label);
        }
        for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
            small_check_peak(small, phases[i]);
        }
    }
    workspace_clear_peaks(workspace);
    const struct eval_source samples = small_series_eval(&series, exact_pick(1, 7));
    struct eval_result result;
    if (eval_run(&small->training, &samples, 0, &result, &small->why) != STATUS_OK) {
        fail_msg("%s\n  %s", small->why.text, small->label);
    }
    assert_int_equal(result.labels, samples.n_samples * series.seq_len);
    small_check_peak(small, PHASE_EVAL);
    assert_int_equal(workspace->high_water[PHASE_FORWARD], 0);
    /* What is committed is really there, and is what the plan says. */
    assert_int_equal(region_resident(&workspace->region), workspace->region.committed_bytes);
    assert_int_equal(atomic_load(&small->device.committed_bytes), small->plan.committed_bytes);
    assert_true(plan_layout_is_sound(&small->plan));
}

/* How many configurations: the slice, or with BALLAST_FULL the whole sweep. */
static uint32_t exact_count(uint32_t slice, uint32_t full)
{
    const char *wanted = getenv("BALLAST_FULL");
    return wanted != NULL && strcmp(wanted, "1") == 0 ? full : slice;
}

/* Runs `n` configurations; returns the worst packing efficiency. */
static double exact_sweep(struct comm *comm, uint32_t n)
{
    double worst = 1.0;
    for (uint32_t i = 0; i < n; i++) {
        struct small_training small;
        exact_open(&small, comm, i);
        exact_check(&small);
        const double efficiency = small.plan.packing_efficiency;
        worst = efficiency < worst ? efficiency : worst;
        if (efficiency < 0.995) {
            fail_msg("packing efficiency %.4f\n  %s", efficiency, small.label);
        }
        small_close(&small);
    }
    return worst;
}

#endif
