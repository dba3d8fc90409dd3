/* Four rows with 1, 2, 7 and 30 valid labels: what test_step.c (one rank) and test_step_ranks.c
 * (several) train on. Include once, after cmocka.h. */
#ifndef BALLAST_TESTS_UNIT_STEP_BATCHES_H
#define BALLAST_TESTS_UNIT_STEP_BATCHES_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "tests/lib/reference_file.h"
#include "tests/lib/small_training.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it has a macro `fail` */

enum { UNEVEN_ROWS = 4, UNEVEN_TOKENS = 64, UNEVEN_STEPS = 20 };

/* Of everything that can be dropped, in the trainings opened next. */
static float uneven_dropout;

struct uneven_batch {
    int32_t inputs[UNEVEN_ROWS * UNEVEN_TOKENS], labels[UNEVEN_ROWS * UNEVEN_TOKENS];
    struct small_rows rows;
};

static void fill_uneven(struct uneven_batch *batch)
{
    static const uint32_t valid[UNEVEN_ROWS] = {1, 2, 7, 30};
    for (uint32_t row = 0; row < UNEVEN_ROWS; row++) {
        for (uint32_t t = 0; t < UNEVEN_TOKENS; t++) {
            const uint32_t i = row * UNEVEN_TOKENS + t;
            batch->inputs[i] = (int32_t)((7 * i + i * i / 3) % 256);
            /* The valid ones lie spread, from the row's second token on. */
            const uint32_t k = (t - 1) / 2;
            batch->labels[i] = t % 2 == 1 && k < valid[row] ? (int32_t)((11 * i + 5) % 256) : -1;
        }
    }
    batch->rows = (struct small_rows){batch->inputs, batch->labels, UNEVEN_TOKENS};
}

/* T0 on the four rows. comm NULL: one rank. */
static void open_uneven(struct small_training *small, struct uneven_batch *batch,
                        uint32_t micro_batch, struct comm *comm)
{
    fill_uneven(batch);
    small_init(small, "t0");
    small->comm = comm;
    small->options.limits.global_batch = UNEVEN_ROWS;
    small->options.gradient_clipping = 0.5;
    small->spec.dropout_embed = uneven_dropout;
    small->spec.dropout_attention = uneven_dropout;
    small->spec.dropout_residual = uneven_dropout;
    small->strategy.micro_batch = micro_batch;
    small_open(small);
}

struct uneven_run {
    double loss[UNEVEN_STEPS], norm[UNEVEN_STEPS];
    float *first_grads, *weights; /* owned; all tensors without gaps */
    size_t n;
};

static float *copy_tensors(struct small_training *small, size_t *out_n,
                           float *(*of)(struct small_training *, const char *, size_t *))
{
    *out_n = spec_n_parameters(&small->spec);
    float *copy = values_zero(*out_n);
    size_t at = 0;
    for (uint32_t i = 0; i < small->units.n_tensors; i++) {
        size_t n;
        const float *values = of(small, small->units.tensors[i].name, &n);
        memcpy(copy + at, values, n * sizeof *copy);
        at += n;
    }
    assert_int_equal(at, *out_n);
    return copy;
}

static void run_uneven(struct uneven_run *run, uint32_t micro_batch, struct comm *comm)
{
    struct small_training small;
    struct uneven_batch batch;
    open_uneven(&small, &batch, micro_batch, comm);
    const struct batch_source source = small_rows_source(&batch.rows);
    for (uint64_t step = 0; step < UNEVEN_STEPS; step++) {
        const struct step_result result = small_step(&small, &source, step);
        assert_int_equal(result.labels, 40);
        assert_int_equal(result.tokens, UNEVEN_ROWS * UNEVEN_TOKENS);
        run->loss[step] = result.loss;
        run->norm[step] = result.grad_norm;
        if (step == 0) {
            run->first_grads = copy_tensors(&small, &run->n, small_grad);
        }
    }
    run->weights = copy_tensors(&small, &run->n, small_param);
    small_close(&small);
}

static void free_run(struct uneven_run *run)
{
    free(run->first_grads);
    free(run->weights);
}

static void check_close(double got, double want, const char *what, uint32_t step)
{
    if (!(fabs(got - want) <= 1e-5 * fabs(want))) {
        fail_msg("step %u: %s %.9g, not %.9g", step, what, got, want);
    }
}

/* Losses, norms (so the clipping factors), gradients of the first step, weights after the last. */
static void check_same_run(const struct uneven_run *run, const struct uneven_run *reference)
{
    for (uint32_t step = 0; step < UNEVEN_STEPS; step++) {
        check_close(run->loss[step], reference->loss[step], "loss", step);
        check_close(run->norm[step], reference->norm[step], "norm", step);
    }
    assert_int_equal(run->n, reference->n);
    assert_true(reference_distance(run->first_grads, reference->first_grads, run->n) <= 1e-5);
    for (size_t i = 0; i < run->n; i++) {
        if (!(fabsf(run->weights[i] - reference->weights[i]) <= 1e-5f)) {
            fail_msg("weight %zu: %.9g, not %.9g", i, (double)run->weights[i],
                     (double)reference->weights[i]);
        }
    }
}

#endif
