/* Evaluation. See eval.h. */
#include "worker/eval.h"
#include "worker/batch.h"

/* One micro-batch, already in the host buffers. */
static enum status eval_micro_batch(struct training *training, double *out_loss,
                                    struct failure *why)
{
    struct model_context *model = &training->model;
    model->micro = (struct micro_batch){.batch = training->options.eval_micro_batch,
                                        .seq_len = training->options.limits.seq_len,
                                        .seed = training->options.seed};
    workspace_begin(&training->workspace, SECTION_EVAL);
    enum status status = training_enter(training, PHASE_EVAL, why);
    if (status == STATUS_OK) {
        status = batch_load(training, micro_rows(model), why);
    }
    if (status == STATUS_OK) {
        status = decoder_evaluate(model, training->device, &training->strategy, &training->decoder,
                                  out_loss, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    batch_release(training);
    return workspace_end(&training->workspace, why);
}

enum status eval_rehearse(struct training *training, struct failure *why)
{
    double loss = 0.0;
    return eval_micro_batch(training, &loss, why);
}

/* Serves rows of one micro-batch; rows past the end are padding. */
struct eval_rows {
    const struct eval_source *source;
    uint64_t first, end;
    size_t seq_len;
};

static void fill_row(void *user, uint64_t step, uint32_t row, int32_t *inputs, int32_t *labels)
{
    (void)step;
    const struct eval_rows *rows = user;
    const uint64_t sample = rows->first + row;
    if (sample < rows->end) {
        rows->source->fill(rows->source->user, sample, inputs, labels);
        return;
    }
    for (size_t t = 0; t < rows->seq_len; t++) {
        inputs[t] = 0;
        labels[t] = -1;
    }
}

struct eval_sum {
    double loss;
    uint64_t labels;
};

static enum status sum_ranks(struct comm *comm, struct eval_sum mine, struct eval_sum *out_sum,
                             struct failure *why)
{
    struct eval_sum all[COMM_EXCHANGE_MAX_BYTES / sizeof mine];
    const enum status status = comm->table->exchange(comm, "eval", &mine, sizeof mine, all, why);
    if (status != STATUS_OK) {
        return status;
    }
    *out_sum = (struct eval_sum){0};
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        out_sum->loss += all[rank].loss;
        out_sum->labels += all[rank].labels;
    }
    return STATUS_OK;
}

enum status eval_run(struct training *training, const struct eval_source *source,
                     uint64_t max_samples, struct eval_result *out_result, struct failure *why)
{
    struct comm *comm = training->comm;
    const uint32_t batch = training->options.eval_micro_batch;
    const size_t seq_len = training->options.limits.seq_len;
    const uint64_t n = max_samples != 0 && max_samples < source->n_samples ? max_samples
                                                                          : source->n_samples;
    const uint64_t per_round = (uint64_t)batch * comm->size;
    struct eval_sum mine = {0};
    enum status status = STATUS_OK;
    for (uint64_t first = 0; first < n && status == STATUS_OK; first += per_round) {
        struct eval_rows rows = {source, first + (uint64_t)comm->rank * batch, n, seq_len};
        batch_fill(training, &(struct batch_source){fill_row, &rows}, 0, 0, batch);
        const int32_t *labels = batch_labels(training, batch * seq_len);
        for (size_t i = 0; i < batch * seq_len; i++) {
            mine.labels += labels[i] >= 0;
        }
        status = eval_micro_batch(training, &mine.loss, why);
    }
    struct eval_sum sum = {0};
    if (status == STATUS_OK) {
        status = sum_ranks(comm, mine, &sum, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    *out_result = (struct eval_result){
        .loss = sum.labels == 0 ? 0.0 : sum.loss / (double)sum.labels,
        .labels = sum.labels,
        .samples = n,
    };
    return STATUS_OK;
}
