/* A micro-batch's way to the device. See batch.h. */
#include "worker/batch.h"

void batch_fill(struct training *training, const struct batch_source *source, uint64_t step,
                uint32_t first_sample, size_t batch)
{
    const size_t seq_len = training->options.limits.seq_len;
    int32_t *inputs = training->host_batch;
    int32_t *labels = inputs + batch * seq_len;
    int32_t *positions = labels + batch * seq_len;
    for (size_t row = 0; row < batch; row++) {
        source->fill(source->user, step, first_sample + (uint32_t)row, inputs + row * seq_len,
                     labels + row * seq_len);
        for (size_t t = 0; t < seq_len; t++) {
            positions[row * seq_len + t] = (int32_t)t;
        }
    }
}

const int32_t *batch_labels(const struct training *training, size_t rows)
{
    return training->host_batch + rows;
}

static enum status copy_in(struct training *training, struct buffer *out, const char *name,
                           const int32_t *host, size_t n, struct failure *why)
{
    *out = workspace_reserve(&training->workspace, name, CATEGORY_ACTIVATIONS,
                             n * sizeof(int32_t));
    struct ticket ticket;
    const enum status status =
        training->device->table->copy(training->device, out->data, host, n * sizeof(int32_t),
                                      COPY_FROM_HOST, &ticket, why);
    return status == STATUS_OK ? training->device->table->wait(training->device, &ticket, why)
                               : status;
}

enum status batch_load(struct training *training, size_t rows, struct failure *why)
{
    struct decoder_input *input = &training->decoder.input;
    const int32_t *host = training->host_batch;
    enum status status = copy_in(training, &input->tokens, "tokens", host, rows, why);
    if (status == STATUS_OK) {
        status = copy_in(training, &input->labels, "labels", host + rows, rows, why);
    }
    if (status == STATUS_OK) {
        status = copy_in(training, &input->positions, "positions", host + 2 * rows, rows, why);
    }
    return status;
}

void batch_release(struct training *training)
{
    workspace_release(&training->workspace, &training->decoder.input.tokens);
    workspace_release(&training->workspace, &training->decoder.input.labels);
    workspace_release(&training->workspace, &training->decoder.input.positions);
}
