/* A run: one rank's whole life from launch to end. The top of the worker; everything below
 * is passed what it needs.
 *
 * Main thread, except `shared`, which the link thread reads under its lock. */
#ifndef BALLAST_WORKER_RUN_H
#define BALLAST_WORKER_RUN_H

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include "worker/config.h"
#include "worker/data/sampler.h"
#include "worker/eval.h"
#include "worker/link.h"
#include "worker/memory/admit.h"
#include "worker/memory/oom.h"
#include "worker/plugin.h"
#include "worker/rehearsal.h"
#include "worker/save/save.h"
#include "worker/spawn.h"
#include "worker/step.h"

/* Exit codes of ballast-worker. */
enum exit_code {
    EXIT_CODE_DONE = 0,
    EXIT_CODE_FAILED = 1,
    EXIT_CODE_CONFIG = 2,
    EXIT_CODE_DOES_NOT_FIT = 3,
    EXIT_CODE_OUT_OF_MEMORY = 4,
    EXIT_CODE_RANK_LOST = 5,
    EXIT_CODE_SAVED_ON_SIGNAL = 6,
    EXIT_CODE_NO_SAVE = 7,
};

enum { RUN_ID_BYTES = 49 };

/* What the link thread may want to know at any time. */
struct run_shared {
    pthread_mutex_t lock;
    struct strategy strategy;
    uint64_t generation;
    uint64_t step;   /* completed */
    bool paused;
};

struct run {
    const struct config *config;   /* borrowed */
    char run_dir[CONFIG_PATH_BYTES]; /* absolute */
    char run_id[RUN_ID_BYTES];
    char model_text[160];
    /* parts, in order of bringing up */
    struct comm comm;
    struct comm control;           /* what a GPU's `comm` wraps; table NULL: comm is all there is */
    struct plugin plugin;          /* of a GPU */
    struct cuda_gpu gpu;
    struct cuda_external external; /* on the device, as measured at start */
    uint64_t looked_at;            /* generation + 1 at the last look at the driver; 0: never */
    struct device device;
    struct device host;            /* host memory for what is offloaded, under host_memory */
    struct ops *host_ops;          /* of a GPU's run: the host's own table */
    struct ops *ops;
    struct ops *planning_ops;      /* rank 0: the link thread's own, for its rehearsals; NULL where
                                      sizes are plain formulas */
    struct units units;
    struct tokens *data, *eval_data; /* eval_data NULL: no evaluation */
    struct sampler sampler;
    struct telemetry telemetry;
    struct training_options options;
    struct rehearsal rehearsal;
    struct rehearsal planning;     /* the link thread's */
    struct plan plan;
    struct rehearsal_cost cost;
    struct training training;
    struct admit admit;
    void *save_staging;
    json_t *manifest;              /* owned: of the save to resume from, until it is loaded */
    struct strategy start_strategy; /* the configuration's, or that of the save */
    struct link *link;             /* NULL: no daemon */
    char socket_path[128], link_path[128];
    pid_t daemon_pid;
    struct run_shared shared;
    /* where the run is */
    uint64_t step;                 /* completed steps */
    uint64_t generation;
    uint64_t sequence;             /* of the boundary exchange */
    struct strategy previous;      /* before the last switch, for undo */
    bool can_undo;
    bool paused;
    uint64_t resume_until;         /* pause again at this step; 0: no */
    uint64_t last_save_step;
    bool has_save;
    bool stopping;                 /* told to stop; the loop ends at this boundary */
    enum exit_code exit_code;
    /* this step's measurements */
    double phase_seconds[N_PHASES];
    double phase_started;
    enum phase phase;
    uint64_t peak_bytes[N_PHASES]; /* largest over ranks, of the last step */
    double tokens_per_second;      /* of the last step */
    struct step_result result;     /* of the last step */
    double step_seconds;
    bool unreported;               /* a step ended and its line is not written yet */
    double train_started;
    uint64_t first_step;           /* of this process */
    FILE *steps_file;              /* rank 0: steps.jsonl */
    struct oom_report oom;         /* of the last shortage */
};

/* ---- launch.c ---- */
/* Bring everything up, or say why not and log it; *out_code is the exit code then. Collective. On
 * failure everything is down again. */
enum status run_open(struct run *run, const struct config *config, int *argc, char ***argv,
                     enum exit_code *out_code, struct failure *why) MUST_CHECK;
void run_close(struct run *run);
/* All ranks take the same turn: the failing one keeps its own words, the others name it. The exit
 * code is the lowest failing rank's everywhere, since the launcher returns the first it sees. */
enum status run_agree(struct run *run, const char *what, enum status local, struct failure *why);
/* The options that a configuration gives the training; pure. */
void launch_options(const struct config *config, struct training_options *out_options);

/* ---- launch_device.c ---- */
/* Device, operations, layout, and how data travel between ranks. Collective. */
enum status run_open_device(struct run *run, struct failure *why) MUST_CHECK;
void run_close_device(struct run *run);
/* After the first step under a strategy: what the driver counts for this process, told if it
 * has grown beyond ours and what libraries took at start. Nothing on the CPU device. */
void run_look_at_driver(struct run *run);

/* ---- train.c ---- */
/* From the present step to the last; returns the exit code. Collective. */
enum exit_code run_train(struct run *run);
/* The line of a finished step, then what the schedule asks for: evaluation, save. */
enum status run_after_step(struct run *run, struct failure *why) MUST_CHECK;
/* Save, evaluate, end on a signal: with phase, event and state told. Collective. */
enum status run_save_now(struct run *run, const char *who, char *out_path, size_t path_bytes,
                         struct failure *why) MUST_CHECK;
enum status run_eval_now(struct run *run, const char *who, struct eval_result *out_result,
                         struct failure *why) MUST_CHECK;
enum status run_end_on_signal(struct run *run, bool save, struct failure *why) MUST_CHECK;

/* ---- phases.c ---- */
/* Admission, telemetry and clock at the entry of a phase; training->enter_phase. */
enum status run_enter_phase(void *user, enum phase phase, struct failure *why) MUST_CHECK;
void run_leave_phase(struct run *run);
void run_publish_committed(struct run *run);
/* Measured peak of a phase in this step: regions in use and the high-water offset. */
uint64_t run_measured_peak(const struct run *run, enum phase phase);
/* Prove that this rank's peaks are the planned ones; departs loudly otherwise. */
enum status run_check_peaks(const struct run *run, struct failure *why) MUST_CHECK;

/* ---- boundary.c ---- */
/* The one small exchange that ends every step: sequence, generation, signals, peaks, and
 * whether rank 0 has commands, which are then carried out by all ranks. */
enum status run_boundary(struct run *run, struct failure *why) MUST_CHECK;
/* A signal arrived: SIGUSR1 saves and ends, SIGTERM and SIGINT end. Async-signal-safe. */
void run_note_signal(int signal_number);

/* ---- switch.c ---- */
enum status run_switch(struct run *run, const struct strategy *wanted, const char *who,
                       Ballast__Link__V1__CommandResult *result, struct failure *why) MUST_CHECK;
/* For transition and predictor: plan a strategy with the main thread's rehearsal. */
enum status run_make_plan(void *user, const struct strategy *strategy, struct plan *out_plan,
                          struct failure *why) MUST_CHECK;
struct predictor;
struct predictor run_predictor(struct run *run);
/* Link thread: answer a plan or dry-run command. */
void run_answer_plan(void *user, const Ballast__Link__V1__Command *command,
                     Ballast__Link__V1__CommandResult *result);

/* ---- persist.c ---- */
/* Save the state after `run->step` completed steps. */
enum status run_save(struct run *run, char *out_path, size_t path_bytes,
                     struct failure *why) MUST_CHECK;
/* Find the save that the configuration asks for and take over its strategy; STOPPED when the run
 * was finished before. Collective, before the plan. */
enum status run_find_save(struct run *run, struct failure *why) MUST_CHECK;
/* Fill the state from it. */
enum status run_load_save(struct run *run, struct failure *why) MUST_CHECK;
/* XXH3 of all parameters (their fp32 master), the same however they are spread over ranks.
 * Collective. */
enum status run_weights_checksum(struct run *run, uint64_t *out_hash,
                                 struct failure *why) MUST_CHECK;

/* ---- report.c, report_oom.c: what goes to the daemon, the log and the files ---- */
__attribute__((format(printf, 4, 5))) void run_event(struct run *run, const char *type,
                                                     const char *who, const char *format, ...);
/* As run_event, with a JSON object of what the type adds (owned by the call; may be NULL). */
__attribute__((format(printf, 5, 6))) void run_event_with(struct run *run, const char *type,
                                                          const char *who, json_t *details,
                                                          const char *format, ...);
/* As the two above, about one rank and phase. Rank 0 speaks for all; `details` is consumed. */
void run_event_at(struct run *run, const char *type, const char *who, int rank, enum phase phase,
                  json_t *details, const char *text);
void run_report_step(struct run *run);
void run_report_state(struct run *run, const char *doing, bool with_plan);
/* The shortage that admission found: log, event and report. Same call on every rank. */
void run_report_oom(struct run *run, const char *outcome);
/* A plan's summary as a message, one heap block chain; free with run_free_plan_summary(). NULL
 * when out of memory. */
Ballast__V1__PlanSummary *run_plan_summary(const struct run *run, const struct strategy *strategy,
                                           const struct plan *plan,
                                           const struct rehearsal_cost *cost);
void run_free_plan_summary(Ballast__V1__PlanSummary *summary);
/* Open steps.jsonl; on resume drop the lines of steps that will be done again. Rank 0. */
enum status run_open_steps_file(struct run *run, struct failure *why) MUST_CHECK;
/* Steps that steps.jsonl tells of: the last whole line's step + 1, 0 without one. */
uint64_t run_steps_in_file(const struct run *run);

#endif
