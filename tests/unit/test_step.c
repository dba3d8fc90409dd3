/* The optimizer step: what the loss is divided by, what must not change it, what gives it up.
 * links: testing worker kernels proto base
 * labels: step */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "tests/lib/reference_file.h"
#include "tests/lib/small_training.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last of the foreign ones: it has a macro `fail` */
#include "tests/unit/step_batches.h"

/* ---- the loss is a sum over valid labels divided by their number ---- */

/* A cross-entropy that only looks up: the label says what the loss is. */
static const float loss_of_label[4] = {2.0f, 4.0f, 1.0f, 0.5f};
static float seen_scale;

static void looked_up(struct ops *ops, float *losses, void *logits, const int32_t *labels,
                      size_t rows, size_t vocab, float grad_scale, bool with_gradient)
{
    for (size_t row = 0; row < rows; row++) {
        losses[row] = labels[row] < 0 ? 0.0f : loss_of_label[labels[row]];
    }
    if (with_gradient) {
        memset(logits, 0, rows * vocab * ops->elem_bytes);
        seen_scale = grad_scale;
    }
}

/* Rows with 1, 2, 7 and 30 valid labels, of losses 2, 4, 1 and 0.5: 32 / 40. */
static void the_mean_is_over_labels_not_over_means(void **state)
{
    (void)state;
    for (uint32_t micro_batch = 1; micro_batch <= 4; micro_batch *= 2) {
        struct small_training small;
        struct uneven_batch batch;
        open_uneven(&small, &batch, micro_batch, NULL);
        for (uint32_t row = 0; row < UNEVEN_ROWS; row++) {
            for (uint32_t t = 0; t < UNEVEN_TOKENS; t++) {
                int32_t *label = &batch.labels[row * UNEVEN_TOKENS + t];
                *label = *label < 0 ? -1 : (int32_t)row;
            }
        }
        small.ops->cross_entropy = looked_up;
        const struct batch_source source = small_rows_source(&batch.rows);
        const struct step_result result = small_step(&small, &source, 0);
        assert_int_equal(result.labels, 40);
        assert_true(fabs(result.loss - 0.8) < 1e-15);
        assert_true(seen_scale == 1.0f / 40.0f);
        small_close(&small);
    }
}

/* Four rows with 1, 2, 7 and 30 valid labels, cut into micro-batches in every way. */
static void accumulation_does_not_change_the_step(void **state)
{
    (void)state;
    double loss[2];
    for (int dropping = 0; dropping < 2; dropping++) {
        struct uneven_run whole;
        /* Masks are keyed by the sample's place in the global batch. */
        uneven_dropout = dropping ? 0.1f : 0.0f;
        run_uneven(&whole, 4, NULL);
        assert_true(whole.loss[0] > 5.0 && whole.loss[UNEVEN_STEPS - 1] < whole.loss[0]);
        for (uint32_t micro_batch = 1; micro_batch <= 2; micro_batch++) {
            struct uneven_run run;
            run_uneven(&run, micro_batch, NULL);
            check_same_run(&run, &whole);
            free_run(&run);
        }
        loss[dropping] = whole.loss[0];
        free_run(&whole);
    }
    uneven_dropout = 0.0f;
    assert_true(loss[0] != loss[1]);
}

/* A step whose labels are all ignored has no loss and no gradient, and still decays. */
static void no_label_at_all(void **state)
{
    (void)state;
    struct small_training small;
    struct uneven_batch batch;
    open_uneven(&small, &batch, 2, NULL);
    for (size_t i = 0; i < UNEVEN_ROWS * UNEVEN_TOKENS; i++) {
        batch.labels[i] = -1;
    }
    const struct batch_source source = small_rows_source(&batch.rows);
    const struct step_result result = small_step(&small, &source, 0);
    assert_int_equal(result.labels, 0);
    assert_true(result.loss == 0.0 && result.grad_norm == 0.0);
    assert_false(result.skipped);
    small_close(&small);
}

/* A vocabulary that is no round number takes no part of the probability for padding. */
static void an_odd_vocabulary_is_whole(void **state)
{
    (void)state;
    struct small_training small;
    small_init(&small, "t0");
    small.spec.vocab = 250;
    small_open(&small);
    size_t n;
    float *head = small_param(&small, "lm_head.weight", &n);
    assert_int_equal(n, 250 * 64);
    memset(head, 0, n * sizeof *head);
    struct small_series series = {250, 1, 64};
    const struct batch_source source = small_series_source(&series);
    const struct step_result result = small_step(&small, &source, 0);
    assert_true(fabs(result.loss - 5.521461) < 1e-6);
    small_close(&small);
}

static void count_nonzero(void *user, size_t offset, size_t n)
{
    const float *unit = user;
    for (size_t i = 0; i < n; i++) {
        assert_true(unit[offset + i] == 0.0f);
    }
}

/* What lies between and behind the tensors stays zero: it counts in no norm. */
static void gaps_stay_zero(void **state)
{
    (void)state;
    struct small_training small;
    struct uneven_batch batch;
    open_uneven(&small, &batch, 1, NULL);
    const struct batch_source source = small_rows_source(&batch.rows);
    for (uint64_t step = 0; step < 2; step++) {
        small_step(&small, &source, step);
    }
    for (uint32_t unit = 0; unit < small.units.n_units; unit++) {
        units_each_gap(&small.units, unit, count_nonzero,
                       grads_slice(&small.training.grads, unit, 0));
        units_each_gap(&small.units, unit, count_nonzero, params_get(&small.training.params, unit, 0));
    }
    small_close(&small);
}

/* ---- what must change nothing, bit for bit ---- */

struct trace {
    double loss[4], norm[4];
    float *weights;
    size_t n;
};

static void copy_weights(struct small_training *small, struct trace *trace)
{
    trace->n = small->units.n_elems;
    trace->weights = values_copy(params_get(&small->training.params, 0, 0), trace->n);
}

enum { SWITCH_BEFORE = 2 };

static float dropout = 0.1f;

/* Four steps with dropout; `other` is taken from step 2 on, with an evaluation before it. */
static void trace_run(struct trace *trace, const char *preset, const struct strategy *strategy,
                      const struct strategy *other)
{
    struct small_training small;
    small_init(&small, preset);
    small.spec.n_layers = 5;
    small.options.limits.seq_len = 24;
    small.options.limits.global_batch = 4;
    small.options.seed = 7;
    small.spec.dropout_embed = small.spec.dropout_attention = small.spec.dropout_residual = dropout;
    small.strategy = *strategy;
    small.strategy.micro_batch = 2;
    small.options.paint = true;
    small_open(&small);
    struct small_series series = {256, 4, 24};
    const struct batch_source source = small_series_source(&series);
    for (uint64_t step = 0; step < 4; step++) {
        if (step == SWITCH_BEFORE && other != NULL) {
            const struct eval_source samples = small_series_eval(&series, 3);
            struct eval_result evaluated;
            assert_int_equal(eval_run(&small.training, &samples, 0, &evaluated, &small.why),
                             STATUS_OK);
            small.strategy = *other;
            small.strategy.micro_batch = 2;
            small_switch(&small);
        }
        const struct step_result result = small_step(&small, &source, step);
        trace->loss[step] = result.loss;
        trace->norm[step] = result.grad_norm;
    }
    copy_weights(&small, trace);
    small_close(&small);
}

static void check_same_bits(const struct trace *a, const struct trace *b)
{
    assert_memory_equal(a->loss, b->loss, sizeof a->loss);
    assert_memory_equal(a->norm, b->norm, sizeof a->norm);
    assert_int_equal(a->n, b->n);
    assert_true(values_equal(a->weights, b->weights, a->n));
}

/* Recomputation is a pure replay, also with dropout, with an evaluation between the steps, and when
 * it is switched on in the middle. */
static void checkpointing_changes_no_bit(void **state)
{
    (void)state;
    static const char *const presets[] = {"t0", "gpt2-tiny"};
    struct strategy none = {.checkpoint_blocks = 1,
                            .checkpointing_layers = UINT32_MAX,
                            .offload_optimizer_fraction = 1.0,
                            .sequence_parallel = 1};
    for (size_t p = 0; p < 2; p++) {
        struct trace reference;
        trace_run(&reference, presets[p], &none, NULL);
        const struct {
            enum checkpointing mode;
            uint32_t blocks, layers;
        } modes[] = {{CHECKPOINTING_SELECTIVE, 1, 5}, {CHECKPOINTING_SPLIT, 1, 5},
                     {CHECKPOINTING_BLOCK, 1, 5},     {CHECKPOINTING_BLOCK, 2, 5},
                     {CHECKPOINTING_BLOCK, 5, 5},     {CHECKPOINTING_BLOCK, 2, 3},
                     {CHECKPOINTING_SPLIT, 1, 2},     {CHECKPOINTING_SELECTIVE, 1, 0}};
        for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
            struct strategy strategy = none;
            strategy.checkpointing = modes[i].mode;
            strategy.checkpoint_blocks = modes[i].blocks;
            strategy.checkpointing_layers = modes[i].layers;
            struct trace trace;
            trace_run(&trace, presets[p], &strategy, NULL);
            check_same_bits(&trace, &reference);
            free(trace.weights);
            trace_run(&trace, presets[p], &none, &strategy);
            check_same_bits(&trace, &reference);
            free(trace.weights);
        }
        /* The dropout was really there. */
        struct trace dry;
        dropout = 0.0f;
        trace_run(&dry, presets[p], &none, NULL);
        dropout = 0.1f;
        assert_true(dry.loss[0] != reference.loss[0] && dry.norm[3] != reference.norm[3]);
        free(dry.weights);
        free(reference.weights);
    }
}

/* ---- dropout ---- */

/* The loss of step 0 after moving the weights by `distance` along their gradient. */
static double loss_along(struct small_training *small, const struct batch_source *source,
                         const float *start, const float *gradient, double norm, double distance)
{
    float *weights = params_get(&small->training.params, 0, 0);
    for (size_t i = 0; i < small->units.n_elems; i++) {
        weights[i] = start[i] + (float)(distance / norm * (double)gradient[i]);
    }
    return small_step(small, source, 0).loss;
}

/* Along the gradient the loss rises by its norm: backward uses forward's masks, everywhere. */
static void the_gradient_is_of_the_dropped_loss(void **state)
{
    (void)state;
    static const char *const presets[] = {"t0", "gpt2-tiny"};
    for (size_t p = 0; p < 2; p++) {
        struct small_training small;
        small_init(&small, presets[p]);
        small.spec.dropout_embed = small.spec.dropout_attention = 0.3f;
        small.spec.dropout_residual = 0.3f;
        small.spec.init_std = 0.1f;
        small.options.limits.seq_len = 20;
        small.options.limits.global_batch = 3;
        small.options.schedule.lr = 0.0;
        small_open(&small);
        struct small_series series = {256, 3, 20};
        const struct batch_source source = small_series_source(&series);
        const size_t n = small.units.n_elems;
        const double norm = small_step(&small, &source, 0).grad_norm;
        float *start = values_copy(params_get(&small.training.params, 0, 0), n);
        float *gradient = values_copy(grads_slice(&small.training.grads, 0, 0), n);
        const double distance = 3e-3;
        const double slope = (loss_along(&small, &source, start, gradient, norm, distance) -
                              loss_along(&small, &source, start, gradient, norm, -distance)) /
                             (2.0 * distance);
        if (!(fabs(slope / norm - 1.0) < 1e-3)) {
            fail_msg("%s: slope %.7g, norm %.7g", presets[p], slope, norm);
        }
        free(start);
        free(gradient);
        small_close(&small);
    }
}

/* Every mask of a step has a key of its own. */
static struct dropout seen[256];
static size_t n_seen;
static void (*true_residual_dropout)(struct ops *ops, void *out, const void *residual,
                                     const void *branch, size_t rows, size_t width,
                                     const struct dropout *dropout);

static void noted_dropout(struct ops *ops, void *out, const void *residual, const void *branch,
                          size_t rows, size_t width, const struct dropout *call)
{
    assert_true(n_seen < 256);
    seen[n_seen++] = *call;
    true_residual_dropout(ops, out, residual, branch, rows, width, call);
}

static void no_mask_is_used_twice(void **state)
{
    (void)state;
    struct small_training small;
    struct uneven_batch batch;
    uneven_dropout = 0.1f;
    open_uneven(&small, &batch, 2, NULL);
    uneven_dropout = 0.0f;
    true_residual_dropout = small.ops->residual_dropout;
    small.ops->residual_dropout = noted_dropout;
    const struct batch_source source = small_rows_source(&batch.rows);
    n_seen = 0;
    for (uint64_t step = 0; step < 2; step++) {
        small_step(&small, &source, step);
    }
    /* Two steps of two micro-steps: the embedding and two residuals in each of two layers. */
    assert_int_equal(n_seen, 2 * 2 * (1 + 2 * 2));
    for (size_t i = 0; i < n_seen; i++) {
        assert_true(seen[i].p == 0.1f && seen[i].seed == small.options.seed);
        for (size_t j = 0; j < i; j++) {
            assert_true(seen[i].step != seen[j].step ||
                        seen[i].first_sample != seen[j].first_sample ||
                        seen[i].layer != seen[j].layer || seen[i].use != seen[j].use);
        }
    }
    small_close(&small);
}

/* ---- giving a step up ---- */

struct gate {
    enum phase phase;
    int left; /* entries that pass before one is refused; < 0: all pass */
};

static enum status pass_gate(void *user, enum phase phase, struct failure *why)
{
    struct gate *gate = user;
    if (phase == gate->phase && gate->left-- == 0) {
        return (fail)(why, STATUS_OUT_OF_MEMORY, "no");
    }
    return STATUS_OK;
}

/* Refused at any phase of any micro-step, a step leaves all as it was and can be replayed. */
static void a_refused_step_is_replayed(void **state)
{
    (void)state;
    struct small_training plain;
    struct uneven_batch batch;
    open_uneven(&plain, &batch, 2, NULL);
    const struct batch_source source = small_rows_source(&batch.rows);
    struct trace reference;
    small_step(&plain, &source, 0);
    small_step(&plain, &source, 1);
    copy_weights(&plain, &reference);
    small_close(&plain);
    const struct gate gates[] = {{PHASE_FORWARD, 0},
                                 {PHASE_FORWARD, 1},
                                 {PHASE_BACKWARD, 0},
                                 {PHASE_BACKWARD, 1},
                                 {PHASE_STEP, 0}};
    for (size_t i = 0; i < sizeof gates / sizeof gates[0]; i++) {
        struct small_training small;
        open_uneven(&small, &batch, 2, NULL);
        small_step(&small, &source, 0);
        struct trace before;
        copy_weights(&small, &before);
        struct gate gate = gates[i];
        small.training.enter_phase = pass_gate;
        small.training.user = &gate;
        struct step_result result = {.loss = -1.0};
        assert_int_equal(step_run(&small.training, &source, 1, &result, &small.why),
                         STATUS_OUT_OF_MEMORY);
        assert_true(result.loss == -1.0);
        assert_int_equal(small.training.updates, 1);
        workspace_abandon(&small.training.workspace);
        assert_int_equal(ledger_check(&small.training.ledger, &small.why), STATUS_OK);
        assert_true(values_equal(params_get(&small.training.params, 0, 0), before.weights, before.n));
        small_step(&small, &source, 1);
        assert_true(
            values_equal(params_get(&small.training.params, 0, 0), reference.weights, reference.n));
        free(before.weights);
        small_close(&small);
    }
    free(reference.weights);
}

/* Makes one gradient infinite on the way to the norm. */
static float *poisoned;
static void (*true_sum_squares)(struct ops *ops, double *out, const float *values, size_t n);

static void poison(struct ops *ops, double *out, const float *values, size_t n)
{
    if (poisoned != NULL) {
        *poisoned = INFINITY;
    }
    true_sum_squares(ops, out, values, n);
}

static void a_gradient_that_is_not_finite_skips_the_step(void **state)
{
    (void)state;
    struct small_training small;
    struct uneven_batch batch;
    open_uneven(&small, &batch, 4, NULL);
    const struct batch_source source = small_rows_source(&batch.rows);
    small_step(&small, &source, 0);
    struct trace before;
    copy_weights(&small, &before);
    size_t n;
    poisoned = small_grad(&small, "model.norm.weight", &n);
    true_sum_squares = small.ops->sum_squares;
    small.ops->sum_squares = poison;
    const struct step_result result = small_step(&small, &source, 1);
    assert_true(result.skipped && !isfinite(result.grad_norm) && isfinite(result.loss));
    assert_int_equal(small.training.skipped, 1);
    assert_int_equal(small.training.updates, 1);
    assert_true(values_equal(params_get(&small.training.params, 0, 0), before.weights, before.n));
    poisoned = NULL;
    assert_false(small_step(&small, &source, 2).skipped);
    assert_int_equal(small.training.updates, 2);
    assert_true(memcmp(params_get(&small.training.params, 0, 0), before.weights, 256) != 0);
    free(before.weights);
    small_close(&small);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_mean_is_over_labels_not_over_means),
        cmocka_unit_test(accumulation_does_not_change_the_step),
        cmocka_unit_test(no_label_at_all),
        cmocka_unit_test(an_odd_vocabulary_is_whole),
        cmocka_unit_test(gaps_stay_zero),
        cmocka_unit_test(checkpointing_changes_no_bit),
        cmocka_unit_test(the_gradient_is_of_the_dropped_loss),
        cmocka_unit_test(no_mask_is_used_twice),
        cmocka_unit_test(a_refused_step_is_replayed),
        cmocka_unit_test(a_gradient_that_is_not_finite_skips_the_step),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
