/* A whole training of a small model inside a test: layout, plan, device, state, workspace.
 *
 * What a run puts together at its start, without launch, daemon or files. With no communicator
 * given it is a world of one rank, for which the dry communicator behaves as a real one. Calls the
 * worker and the kernels (links: testing worker kernels). Every step fails the running test
 * with the reason. Main thread. */
#ifndef BALLAST_TESTS_LIB_SMALL_TRAINING_H
#define BALLAST_TESTS_LIB_SMALL_TRAINING_H

#include "worker/eval.h"
#include "worker/rehearsal.h"
#include "worker/step.h"

struct small_training {
    /* Chosen by the test between small_init() and small_open(). */
    struct model_spec spec;
    struct training_options options; /* limits are completed by small_open() */
    struct strategy strategy;        /* checkpointing.layers above L means L */
    uint64_t capacity_bytes;         /* of the device, 0: none */
    uint32_t n_slices;               /* of the layout; 0: as many as ranks */
    enum dtype dtype;                /* fp32 unless chosen */
    int n_threads;
    struct comm *comm; /* borrowed; NULL: one rank */
    char label[512];   /* what is being run, for messages of failures */
    /* Made by small_open(). */
    struct comm alone;
    struct units units;
    struct ops *ops;
    struct device device, host;
    struct telemetry telemetry;
    struct rehearsal rehearsal;
    struct rehearsal_cost cost;
    struct plan plan;
    struct training training;
    struct failure why;
};

/* Defaults: this preset, one sequence per step and the model's longest length, AdamW with the
 * usual constants, no clipping, seed 1. */
void small_init(struct small_training *small, const char *preset);
/* Everything up, the whole workspace committed, seeded weights. Follows the plan from here on. */
void small_open(struct small_training *small);
void small_close(struct small_training *small);

/* One step, which must succeed. */
struct step_result small_step(struct small_training *small, const struct batch_source *source,
                              uint64_t step);
/* Plan the strategy anew (after a change of small->strategy), at a step boundary. */
void small_switch(struct small_training *small);

/* Measured peak of a phase since the workspace's peaks were last cleared. */
uint64_t small_measured(const struct small_training *small, enum phase phase);
/* Measured and planned peak of the phase must be equal; painted, the touched bytes too. */
void small_check_peak(struct small_training *small, enum phase phase);

/* The first element of a named tensor among the parameters or the gradients, and its size. */
float *small_param(struct small_training *small, const char *name, size_t *out_n);
float *small_grad(struct small_training *small, const char *name, size_t *out_n);

/* A batch that is the same in every step: inputs and labels (global batch, T), borrowed. */
struct small_rows {
    const int32_t *inputs, *labels;
    size_t seq_len;
};
struct batch_source small_rows_source(struct small_rows *rows);

/* Tokens t[i] = (7 i + i i / 3) mod vocab, read one sequence after the other; all labels valid. */
struct small_series {
    uint32_t vocab, global_batch, seq_len;
};
struct batch_source small_series_source(struct small_series *series);
struct eval_source small_series_eval(struct small_series *series, uint64_t n_samples);

#endif
