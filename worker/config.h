/* The configuration of a run: DeepSpeed's keys and ours, one table.
 *
 * From the table come parsing, validation, `--check-config`'s list of verdicts and the
 * documentation. Reads files before any memory is taken. Main thread, at start. */
#ifndef BALLAST_WORKER_CONFIG_H
#define BALLAST_WORKER_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include "proto/base/status.h"
#include "proto/strategy.h"
#include "worker/data/tokens.h"
#include "worker/model/spec.h"

enum oom_policy { OOM_REPORT, OOM_ABORT, OOM_ADAPT };
enum device_choice { DEVICE_CHOICE_AUTO, DEVICE_CHOICE_CPU, DEVICE_CHOICE_CUDA };

enum { CONFIG_MAX_FILES = 64, CONFIG_PATH_BYTES = 1024, CONFIG_MAX_FAULTS = 16 };

struct config_paths {
    uint32_t n;
    char path[CONFIG_MAX_FILES][CONFIG_PATH_BYTES];
};

struct config {
    char source[CONFIG_PATH_BYTES]; /* the file, "" when there is none */
    /* what to train */
    char model[CONFIG_PATH_BYTES]; /* folder or preset */
    struct model_spec spec;        /* with dropout overrides applied */
    struct config_paths data, eval_data;
    enum data_format data_format;
    bool shuffle;
    uint32_t seq_len;
    uint64_t steps;
    uint64_t seed;
    /* optimizer and schedule */
    uint32_t global_batch; /* train_batch_size, sequences per optimizer step */
    double lr, beta1, beta2, eps, weight_decay;
    double gradient_clipping; /* 0: none */
    enum { SCHEDULE_CONSTANT, SCHEDULE_COSINE, SCHEDULE_LINEAR } schedule;
    uint64_t warmup_steps;
    double warmup_min_lr;  /* lr at step 0 of the warm-up */
    double lr_min_ratio;   /* final lr / peak lr of the decay */
    uint64_t total_steps;  /* of the schedule; defaults to steps */
    enum dtype dtype; /* compute type of weights and activations */
    /* where */
    enum device_choice device;
    uint64_t device_memory, host_memory; /* bytes, 0: default */
    enum { REDUCTIONS_ORDERED, REDUCTIONS_LIBRARY } reductions; /* sums over ranks */
    uint64_t reduce_bucket;              /* bytes of staging of an ordered sum */
    int threads;                         /* compute threads a rank, 0: from the affinity mask */
    char run_dir[CONFIG_PATH_BYTES];
    /* how */
    struct strategy strategy;
    enum oom_policy oom_policy;
    uint64_t save_every, save_keep;  /* steps; 0: never; keep 0: all */
    uint64_t eval_every;             /* steps; 0: never */
    uint32_t eval_micro_batch;
    uint64_t eval_batches;           /* cap on evaluated micro-batches, 0: all */
    uint64_t pause_at[16];           /* completed steps at which to pause */
    uint32_t n_pause_at;
    uint32_t steps_per_print;
    double step_timeout_s;           /* deadline of waits in a step */
    bool daemon;                     /* start ballastd (default true) */
    bool paint;                      /* paint the workspace and put red zones (slow, for tests) */
    char notes[1024]; /* keys accepted without effect, for config_log_notes(); "" if none */
    /* command line only */
    uint32_t world_size;             /* ranks: of the launch, or --world */
    bool plan_only, check_only;
    bool json;
    bool resume;
    bool resume_latest;
    uint64_t resume_step;
    uint32_t expect_ranks;           /* 0: any */
    uint32_t n_faults;
    char faults[CONFIG_MAX_FAULTS][128];
    bool allow_faults;
};

/* Everything from argv: flags, the file they name, --set. Order of precedence: --set, flags,
 * file, defaults. `world_size` is what the launcher says (1 without one); --world overrides
 * it for --plan. INVALID, OUT_OF_RANGE, UNKNOWN_KEY, UNSUPPORTED, MALFORMED, NOT_FOUND name file,
 * line, key, value and limit. Prints --help / --version itself and then returns STATUS_STOPPED.
 * With --check-config only the command line is read: check_only and json are set, nothing else,
 * and config_check() with the same arguments does the rest.
 * Reads no data file and takes no memory for the model. */
enum status config_from_args(int argc, char **argv, uint32_t world_size, struct config *out_config,
                             struct failure *why) MUST_CHECK;
/* Only a file's text (for tests and the fuzzer); `name` is used in messages. */
enum status config_from_text(const char *text, size_t n_bytes, const char *name,
                             uint32_t world_size, struct config *out_config,
                             struct failure *why) MUST_CHECK;
/* The verdict table of --check-config: line, key, value, honoured | accepted without effect |
 * refused, and why. `json` prints it as one JSON object. */
enum status config_check(int argc, char **argv, uint32_t world_size, FILE *out, bool json,
                         struct failure *why) MUST_CHECK;
/* Say once, on one rank, which keys of the file have no effect. */
void config_log_notes(const struct config *config);
/* The facts that the strategy rules need. */
void config_limits(const struct config *config, struct strategy_limits *out_limits);

#endif
