/* One optimizer step, to be read aloud.
 *
 *     count the valid labels of the global batch
 *     for each micro-step
 *         forward: embed, blocks, head and loss
 *         backward: blocks in reverse, recomputing what was not kept
 *     step: sum gradients over ranks, norm, is it finite everywhere?, clip, update
 *
 * The loss is the sum over valid labels divided by their number in the whole optimizer step,
 * over micro-steps and ranks alike; so is the gradient, since the head scales by that
 * number and everything after it only adds.
 *
 * Up to the finiteness vote a step can be given up and replayed. After it nothing can fail. */
#include "worker/step.h"
#include <math.h>
#include "worker/batch.h"
#include "worker/state/clip.h"

/* ---- data ---- */


/* This rank's rows are contiguous in the global batch, so changing the micro-batch changes the
 * grouping and not who computes what. */
static uint32_t first_sample_of(const struct training *training, uint32_t micro_step)
{
    const uint32_t per_rank = training_accumulation(training) * training->strategy.micro_batch;
    return training->comm->rank * per_rank + micro_step * training->strategy.micro_batch;
}

static uint64_t count_labels(struct training *training, const struct batch_source *source,
                             uint64_t step)
{
    const uint32_t batch = training->strategy.micro_batch;
    const size_t n = batch * (size_t)training->options.limits.seq_len;
    const uint32_t accumulation = training_accumulation(training);
    uint64_t valid = 0;
    for (uint32_t micro = 0; micro < accumulation; micro++) {
        batch_fill(training, source, step, first_sample_of(training, micro), batch);
        const int32_t *labels = training->host_batch + n;
        for (size_t i = 0; i < n; i++) {
            valid += labels[i] >= 0;
        }
    }
    return valid;
}

/* ---- one micro-step ---- */

static enum status micro_step(struct training *training, uint64_t step, uint32_t micro,
                              float grad_scale, double *out_loss, struct failure *why)
{
    struct model_context *model = &training->model;
    const bool first = micro == 0;
    model->micro = (struct micro_batch){
        .batch = training->strategy.micro_batch,
        .seq_len = training->options.limits.seq_len,
        .micro_step = micro,
        .step = (uint32_t)step,
        .first_sample = first_sample_of(training, micro),
        .seed = training->options.seed,
        .train = true,
    };
    atomic_store_explicit(&training->telemetry->micro_step, micro, memory_order_relaxed);
    workspace_begin(&training->workspace, first ? SECTION_FIRST : SECTION_LATER);

    enum status status = training_enter(training, PHASE_FORWARD, why);
    if (status == STATUS_OK) {
        status = batch_load(training, micro_rows(model), why);
    }
    if (status == STATUS_OK) {
        status = decoder_forward(model, training->device, &training->strategy, &training->decoder,
                                 first, grad_scale, out_loss, why);
    }
    if (status == STATUS_OK) {
        status = training_enter(training, PHASE_BACKWARD, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    status = decoder_backward(model, &training->strategy, &training->decoder, first, why);
    if (status != STATUS_OK) {
        return status;
    }
    batch_release(training);
    return workspace_end(&training->workspace, why);
}

/* ---- the update ---- */

/* Sum over ranks, norm, vote. *out_apply is the same on every rank. */
static enum status agree_on_gradients(struct training *training, double *out_norm, bool *out_apply,
                                      struct failure *why)
{
    enum status status = grads_reduce(&training->grads, why);
    if (status == STATUS_OK) {
        status = clip_norm(&training->grads, training->device, out_norm, why);
    }
    if (status == STATUS_OK) {
        status = training->ops->check(training->ops, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    int first_no = -1;
    status = comm_vote(training->comm, "finite", isfinite(*out_norm), &first_no, why);
    *out_apply = first_no < 0;
    return status;
}

static enum status update(struct training *training, uint64_t step, struct step_result *result,
                          struct failure *why)
{
    workspace_begin(&training->workspace, SECTION_UPDATE);
    enum status status = training_enter(training, PHASE_STEP, why);
    bool apply = true;
    if (status == STATUS_OK) {
        status = agree_on_gradients(training, &result->grad_norm, &apply, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    /* The point of no return: nothing below can fail. */
    result->lr = schedule_lr(&training->options.schedule, step);
    result->skipped = !apply;
    if (apply) {
        training->updates++;
        const struct optim_step optim_step = {
            .t = training->updates,
            .lr = result->lr,
            .beta1 = training->options.beta1,
            .beta2 = training->options.beta2,
            .eps = training->options.eps,
            .weight_decay = training->options.weight_decay,
            .grad_scale = clip_factor(result->grad_norm, training->options.gradient_clipping),
        };
        for (uint32_t slice = 0; slice < training->units->world_size; slice++) {
            if (state_has_slice(&training->state, slice)) {
                optim_update(&training->optim, &training->params, &training->grads, training->ops,
                             slice, &optim_step);
            }
        }
        status = optim_check(&training->optim, why);
        if (status == STATUS_OK) {
            status = params_share(&training->params, why); /* fails only with the job */
        }
    } else {
        training->skipped++;
    }
    return status == STATUS_OK ? workspace_end(&training->workspace, why) : status;
}

/* ---- the step ---- */

/* Sum of all ranks' losses, added in rank order. */
static enum status sum_losses(struct comm *comm, double mine, double *out_sum, struct failure *why)
{
    enum { MAX_CHUNK = COMM_EXCHANGE_MAX_BYTES / sizeof(double) };
    double all[MAX_CHUNK];
    if (comm->size > MAX_CHUNK) {
        return fail(why, STATUS_OUT_OF_RANGE, "%u ranks, at most %d are supported", comm->size,
                    (int)MAX_CHUNK);
    }
    const enum status status =
        comm->table->exchange(comm, "loss", &mine, sizeof mine, all, why);
    if (status != STATUS_OK) {
        return status;
    }
    double sum = 0.0;
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        sum += all[rank];
    }
    *out_sum = sum;
    return STATUS_OK;
}

enum status step_run(struct training *training, const struct batch_source *source, uint64_t step,
                     struct step_result *out_result, struct failure *why)
{
    struct step_result result = {0};
    const uint32_t accumulation = training_accumulation(training);
    enum status status =
        comm_sum_u64(training->comm, "labels", count_labels(training, source, step), &result.labels,
                     why);
    /* A batch without a single label has loss 0 and gradient 0. */
    const float grad_scale = result.labels == 0 ? 0.0f : (float)(1.0 / (double)result.labels);
    double loss = 0.0;
    for (uint32_t micro = 0; micro < accumulation && status == STATUS_OK; micro++) {
        batch_fill(training, source, step, first_sample_of(training, micro),
                   training->strategy.micro_batch);
        status = micro_step(training, step, micro, grad_scale, &loss, why);
    }
    if (status == STATUS_OK) {
        status = update(training, step, &result, why);
    }
    if (status == STATUS_OK) {
        status = sum_losses(training->comm, loss, &loss, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    result.loss = result.labels == 0 ? 0.0 : loss / (double)result.labels;
    result.tokens = (uint64_t)training->options.limits.global_batch *
                    training->options.limits.seq_len;
    *out_result = result;
    return STATUS_OK;
}

/* ---- rehearsal on the dry device ---- */

enum status step_rehearse(struct training *training, enum section section, struct failure *why)
{
    struct step_result result = {0};
    double loss = 0.0;
    switch (section) {
    case SECTION_FIRST:
        return micro_step(training, 0, 0, 1.0f, &loss, why);
    case SECTION_LATER:
        return training_accumulation(training) > 1 ? micro_step(training, 0, 1, 1.0f, &loss, why)
                                                   : STATUS_OK;
    case SECTION_UPDATE:
        return update(training, 0, &result, why);
    case SECTION_EVAL:
    case SECTION_SAVE:
    case N_SECTIONS:
        break; /* not a part of the step */
    }
    return STATUS_OK;
}
