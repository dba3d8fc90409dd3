/* Evaluation: a mean over labels, memory that does not grow, nothing else touched.
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
#include <cmocka.h> /* last: it has a macro `fail` */

static struct eval_result evaluate(struct small_training *small, const struct eval_source *source,
                                   uint64_t max_samples)
{
    struct eval_result result;
    if (eval_run(&small->training, source, max_samples, &result, &small->why) != STATUS_OK) {
        fail_msg("%s", small->why.text);
    }
    return result;
}

/* ---- a mean over labels, not over batches ---- */

/* Sums and label counts of the rows: (8,4) (8,4) (6,1). */
static const int valid_of_row[3] = {4, 4, 1};

static void fill_counted(void *user, uint64_t sample, int32_t *inputs, int32_t *labels)
{
    (void)user;
    for (int t = 0; t < 8; t++) {
        inputs[t] = t;
        labels[t] = t < valid_of_row[sample] ? (int32_t)sample : -1;
    }
}

static void looked_up(struct ops *ops, float *losses, void *logits, const int32_t *labels,
                      size_t rows, size_t vocab, float grad_scale, bool with_gradient)
{
    static const float loss_of_row[3] = {2.0f, 2.0f, 6.0f};
    (void)ops;
    (void)logits;
    (void)vocab;
    (void)grad_scale;
    assert_false(with_gradient);
    for (size_t row = 0; row < rows; row++) {
        losses[row] = labels[row] < 0 ? 0.0f : loss_of_row[labels[row]];
    }
}

static void the_mean_is_over_labels(void **state)
{
    (void)state;
    for (uint32_t batch = 1; batch <= 4; batch++) {
        struct small_training small;
        small_init(&small, "t0");
        small.options.limits.seq_len = 8;
        small.options.eval_micro_batch = batch;
        small_open(&small);
        small.ops->cross_entropy = looked_up;
        const struct eval_source source = {3, fill_counted, NULL};
        const struct eval_result result = evaluate(&small, &source, 0);
        assert_true(fabs(result.loss - 22.0 / 9.0) < 1e-12);
        assert_int_equal(result.labels, 9);
        assert_int_equal(result.samples, 3);
        small_close(&small);
    }
}

/* ---- the same loss whatever the batch, and equal to the training's ---- */

static void batches_do_not_matter(void **state)
{
    (void)state;
    double first = 0.0;
    for (uint32_t batch = 1; batch <= 8; batch++) {
        struct small_training small;
        struct small_series series = {256, 7, 16};
        small_init(&small, "gpt2-tiny");
        small.options.limits.seq_len = 16;
        small.options.limits.global_batch = 7;
        small.strategy.micro_batch = 7;
        small.options.eval_micro_batch = batch;
        small.options.paint = true;
        small.spec.dropout_residual = 0.5f; /* of the training alone */
        small_open(&small);
        const struct eval_source source = small_series_eval(&series, 7);
        const struct eval_result result = evaluate(&small, &source, 0);
        assert_int_equal(result.labels, 7 * 16);
        first = batch == 1 ? result.loss : first;
        assert_true(fabs(result.loss - first) <= 1e-5 * first);
        small_check_peak(&small, PHASE_EVAL);
        small_close(&small);
    }
    /* The training's own loss of the same rows, before its first update, without dropout. */
    struct small_training small;
    struct small_series series = {256, 7, 16};
    small_init(&small, "gpt2-tiny");
    small.options.limits.seq_len = 16;
    small.options.limits.global_batch = 7;
    small.strategy.micro_batch = 7;
    small_open(&small);
    const struct batch_source source = small_series_source(&series);
    const struct step_result step = small_step(&small, &source, 0);
    assert_true(fabs(step.loss - first) <= 1e-5 * first);
    small_close(&small);
}

/* ---- memory ---- */

static uint64_t peak_of(struct small_training *small, uint64_t n_samples)
{
    struct small_series series = {256, 1, 64};
    const struct eval_source source = small_series_eval(&series, n_samples);
    workspace_clear_peaks(&small->training.workspace);
    evaluate(small, &source, 0);
    small_check_peak(small, PHASE_EVAL);
    return small_measured(small, PHASE_EVAL);
}

static void the_peak_does_not_grow(void **state)
{
    (void)state;
    struct small_training small;
    small_init(&small, "t0");
    small.options.eval_micro_batch = 2;
    small_open(&small);
    const uint64_t committed = atomic_load(&small.device.committed_bytes);
    const int64_t live = heap_live();
    assert_int_equal(peak_of(&small, 4), peak_of(&small, 40));
    assert_int_equal(atomic_load(&small.device.committed_bytes), committed);
    assert_int_equal(heap_live(), live);
    /* It keeps no activations: less than a forward that does. */
    small_close(&small);
}

static void depth_costs_nothing(void **state)
{
    (void)state;
    uint64_t workspace[2];
    for (uint32_t i = 0; i < 2; i++) {
        struct small_training small;
        small_init(&small, "t0");
        small.spec.n_layers = i == 0 ? 2 : 8;
        small_open(&small);
        workspace[i] = small.plan.phases[PHASE_EVAL].workspace_bytes;
        small_close(&small);
    }
    assert_int_equal(workspace[0], workspace[1]);
}

/* ---- nothing else ---- */

static void training_is_left_alone(void **state)
{
    (void)state;
    struct small_training small;
    struct small_series series = {256, 2, 64};
    small_init(&small, "t0");
    small.options.limits.global_batch = 2;
    small_open(&small);
    const struct batch_source source = small_series_source(&series);
    small_step(&small, &source, 0);
    const size_t n = small.units.n_elems;
    float *weights = values_copy(params_get(&small.training.params, 0, 0), n);
    float *grads = values_copy(grads_slice(&small.training.grads, 0, 0), n);
    float *moments = values_copy(optim_m(&small.training.optim, 0, 0), small.units.block_elems);
    const struct eval_source samples = small_series_eval(&series, 5);
    evaluate(&small, &samples, 0);
    assert_true(values_equal(params_get(&small.training.params, 0, 0), weights, n));
    assert_true(values_equal(grads_slice(&small.training.grads, 0, 0), grads, n));
    assert_true(
        values_equal(optim_m(&small.training.optim, 0, 0), moments, small.units.block_elems));
    assert_int_equal(small.training.updates, 1);
    free(weights);
    free(grads);
    free(moments);
    small_close(&small);
}

static uint64_t seen[8];
static size_t n_seen;

static void fill_noted(void *user, uint64_t sample, int32_t *inputs, int32_t *labels)
{
    (void)user;
    seen[n_seen++] = sample;
    memset(inputs, 0, 64 * sizeof *inputs);
    memset(labels, 0xFF, 64 * sizeof *labels);
}

/* Each sample once and none beyond the last or the most asked for; no label at all is no loss. */
static void samples_are_read_once(void **state)
{
    (void)state;
    struct small_training small;
    small_init(&small, "t0");
    small.options.eval_micro_batch = 3;
    small_open(&small);
    const struct eval_source source = {7, fill_noted, NULL};
    for (uint64_t most = 0; most <= 5; most += 5) {
        n_seen = 0;
        const struct eval_result result = evaluate(&small, &source, most);
        const size_t expected = most == 0 ? 7 : 5;
        assert_int_equal(n_seen, expected);
        for (size_t i = 0; i < expected; i++) {
            assert_int_equal(seen[i], i);
        }
        assert_int_equal(result.samples, expected);
        assert_int_equal(result.labels, 0);
        assert_true(result.loss == 0.0);
    }
    small_close(&small);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_mean_is_over_labels), cmocka_unit_test(batches_do_not_matter),
        cmocka_unit_test(the_peak_does_not_grow),  cmocka_unit_test(depth_costs_nothing),
        cmocka_unit_test(training_is_left_alone),  cmocka_unit_test(samples_are_read_once),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
