/* A training: everything one rank's step works on, put together on a device.
 *
 * The same assembly is made on the real device and, to plan, on the dry one. Owns the
 * state, the regions and the workspace; borrows device, operations and communicator. Main
 * thread (a dry one: whichever thread plans). */
#ifndef BALLAST_WORKER_TRAINING_H
#define BALLAST_WORKER_TRAINING_H

#include <stdbool.h>
#include <stdint.h>
#include "worker/memory/plan.h"
#include "worker/memory/workspace.h"
#include "worker/model/decoder.h"
#include "worker/parallel/comm.h"
#include "worker/state/optim.h"
#include "worker/state/schedule.h"

/* Where samples come from. Row `sample` (its index in the global batch) of step `step`:
 * inputs(T) and labels(T), label -1 ignored. */
struct batch_source {
    void (*fill)(void *user, uint64_t step, uint32_t sample, int32_t *inputs, int32_t *labels);
    void *user;
};

/* What stays the same for the whole run. */
struct training_options {
    struct strategy_limits limits;
    uint64_t seed;
    double beta1, beta2, eps, weight_decay;
    double gradient_clipping; /* 0: none */
    struct schedule schedule;
    size_t reduce_bucket_bytes;
    bool reduce_by_library;   /* gives up that sums over ranks have one order */
    uint32_t eval_micro_batch;
    size_t save_staging_bytes;
    bool paint;
};

struct training {
    struct training_options options;
    struct strategy strategy;     /* in force */
    struct device *device;        /* borrowed, with ops, comm, units and plan */
    struct ops *ops;
    struct comm *comm;
    const struct units *units;
    struct plan *plan;
    struct telemetry *telemetry;  /* borrowed */
    struct ledger ledger;
    struct state state;
    struct params params;
    struct grads grads;
    struct optim optim;
    struct workspace workspace;
    struct model_context model;
    struct decoder_state decoder;
    struct buffer *residual;      /* owned scratch of `decoder` */
    struct block_acts *acts;
    int32_t *host_batch;          /* owned: inputs, labels, positions of one micro-batch */
    size_t host_batch_bytes;
    uint64_t updates;             /* applied so far; AdamW's t */
    uint64_t skipped;             /* steps skipped for a non-finite gradient */
    /* Called on entry to a phase; a failure gives the section up. Set by whoever drives the
     * training: admission in a run, nothing when planning. */
    enum status (*enter_phase)(void *user, enum phase phase, struct failure *why);
    void *user;
};

enum status training_init(struct training *training, const struct training_options *options,
                          const struct strategy *strategy, const struct units *units,
                          struct device *device, struct ops *ops, struct comm *comm,
                          const struct state_host *host, struct telemetry *telemetry,
                          struct failure *why) MUST_CHECK;
void training_fini(struct training *training);

/* Sequences of a micro-step on this rank. */
static inline uint32_t training_micro_batch(const struct training *training)
{
    return training->strategy.micro_batch;
}
uint32_t training_accumulation(const struct training *training);
/* Enter a phase: admission, then the workspace's own mark. */
enum status training_enter(struct training *training, enum phase phase,
                           struct failure *why) MUST_CHECK;
/* Where the state lies under a strategy. Pure. */
void training_layout(const struct training *training, const struct strategy *strategy,
                     struct layout *out_layout);
/* A section was given up: what lives in the workspace is dropped. */
void training_abandon(struct training *training);
/* What lives outside the workspace, for the plan. */
void training_resident(const struct training *training, struct plan_resident *out_resident);

#endif
