/* Embedding, blocks, head. See decoder.h. */
#include "worker/model/away.h"

static const void *embed_weight(const struct model_context *model, enum embed_slot slot)
{
    const size_t offset = model->units->embed_slots[slot];
    return offset == SIZE_MAX ? NULL : params_get(model->params, 0, offset);
}

static const void *head_param(const struct model_context *model, enum head_slot slot)
{
    const size_t offset = model->units->head_slots[slot];
    return offset == SIZE_MAX ? NULL
                              : params_get(model->params, units_head(model->units), offset);
}

static const void *head_weight(const struct model_context *model)
{
    return model->spec->tied ? embed_weight(model, EMBED_TOKENS) : head_param(model, HEAD_WEIGHT);
}

static struct buffer reserve_stream(struct model_context *model, const char *name)
{
    return workspace_reserve(model->workspace, name, CATEGORY_ACTIVATIONS,
                             activation_bytes(model, model->spec->width));
}

static void embed(struct model_context *model, const struct decoder_state *state, void *out)
{
    params_gather(model->params, 0);
    model->ops->embed_forward(model->ops, out, state->input.tokens.data,
                              state->input.positions.data, embed_weight(model, EMBED_TOKENS),
                              embed_weight(model, EMBED_POSITIONS), micro_rows(model),
                              model->spec->width);
    params_release(model->params, 0);
    const struct dropout dropout =
        model_dropout(model, model->spec->dropout_embed, 0, RANDOM_EMBED_DROPOUT);
    if (dropout.p > 0.0f) {
        model->ops->residual_dropout(model->ops, out, NULL, out, micro_rows(model),
                                     model->spec->width, &dropout);
    }
}

/* ---- the head, tile by tile ---- */

struct head {
    const void *x;      /* (N,H) output of the final norm */
    const void *weight;
    float *dweight;     /* complete after the last tile; NULL in evaluation */
    char *dx;           /* (N,H); NULL in evaluation */
    const int32_t *labels;
    float *losses;
    float grad_scale;
};

static void head_tile(struct model_context *model, const struct head *head, size_t first, size_t n)
{
    const struct model_spec *spec = model->spec;
    const size_t row_bytes = spec->width * model->ops->elem_bytes;
    const char *x = (const char *)head->x + first * row_bytes;
    struct buffer logits = workspace_reserve(model->workspace, "logits", CATEGORY_TEMP,
                                             n * spec->vocab * model->ops->elem_bytes);
    model_matmul(model, (struct matmul){.form = MATMUL_NT,
                                        .m = n,
                                        .n = spec->vocab,
                                        .k = spec->width,
                                        .a = x,
                                        .b = head->weight,
                                        .c = logits.data});
    model->ops->cross_entropy(model->ops, head->losses + first, logits.data, head->labels + first,
                              n, spec->vocab, head->grad_scale, head->dx != NULL);
    if (head->dx != NULL) {
        model_matmul(model, (struct matmul){.form = MATMUL_NN,
                                            .m = n,
                                            .n = spec->width,
                                            .k = spec->vocab,
                                            .a = logits.data,
                                            .b = head->weight,
                                            .c = head->dx + first * row_bytes});
        model_matmul(model, (struct matmul){.form = MATMUL_TN,
                                            .m = spec->vocab,
                                            .n = spec->width,
                                            .k = n,
                                            .a = logits.data,
                                            .b = x,
                                            .c = head->dweight,
                                            .c_fp32 = true,
                                            .accumulate = first > 0});
    }
    workspace_release(model->workspace, &logits);
}

/* Copy one double from the device. */
static enum status read_sum(struct device *device, const double *from, double *out_value,
                            struct failure *why)
{
    struct ticket ticket;
    double value = 0.0;
    enum status status =
        device->table->copy(device, &value, from, sizeof value, COPY_TO_HOST, &ticket, why);
    if (status == STATUS_OK) {
        status = device->table->wait(device, &ticket, why);
    }
    if (status == STATUS_OK) {
        *out_value += value;
    }
    return status;
}

/* The head's parameters; with tied weights its matrix is the embedding's. */
static void gather_head(struct model_context *model)
{
    params_gather(model->params, units_head(model->units));
    if (model->spec->tied) {
        params_gather(model->params, 0);
    }
}

static void release_head(struct model_context *model)
{
    params_release(model->params, units_head(model->units));
    if (model->spec->tied) {
        params_release(model->params, 0);
    }
}

/* Final norm, head and loss. With gradients: leaves final_grad, the norm's statistics and the head's
 * parameters, which its backward wants first. */
static enum status run_head(struct model_context *model, struct device *device,
                            struct decoder_state *state, const void *stream, uint32_t tile,
                            bool train, bool first_micro_step, float grad_scale, double *out_loss,
                            struct failure *why)
{
    struct workspace *workspace = model->workspace;
    const struct model_spec *spec = model->spec;
    const size_t rows = micro_rows(model);
    const uint32_t unit = units_head(model->units);
    gather_head(model);
    struct buffer x = reserve_stream(model, "final_norm");
    if (spec->norm == NORM_LAYER) {
        state->final_mean =
            workspace_reserve(workspace, "final_mean", CATEGORY_ACTIVATIONS, rows * sizeof(float));
    }
    state->final_rstd =
        workspace_reserve(workspace, "final_rstd", CATEGORY_ACTIVATIONS, rows * sizeof(float));
    model->ops->norm_forward(model->ops, spec->norm, x.data, state->final_mean.data,
                             state->final_rstd.data, stream, head_param(model, HEAD_NORM_WEIGHT),
                             head_param(model, HEAD_NORM_BIAS), rows, spec->width, spec->norm_eps);
    struct head head = {.x = x.data,
                        .weight = head_weight(model),
                        .labels = state->input.labels.data,
                        .grad_scale = grad_scale};
    if (train) {
        state->head_grad = grads_begin(model->grads, unit, first_micro_step);
        if (spec->tied) {
            state->table_grad = grads_begin(model->grads, 0, first_micro_step);
            head.dweight = state->table_grad.data + model->units->embed_slots[EMBED_TOKENS];
        } else {
            head.dweight = state->head_grad.data + model->units->head_slots[HEAD_WEIGHT];
        }
        state->final_grad = reserve_stream(model, "final_grad");
        head.dx = state->final_grad.data;
    }
    struct buffer losses =
        workspace_reserve(workspace, "losses", CATEGORY_TEMP, rows * sizeof(float));
    head.losses = losses.data;
    const size_t step = tile == 0 || tile > rows ? rows : tile;
    for (size_t first = 0; first < rows; first += step) {
        head_tile(model, &head, first, rows - first < step ? rows - first : step);
    }
    struct buffer sum = workspace_reserve(workspace, "loss_sum", CATEGORY_TEMP, sizeof(double));
    model->ops->sum(model->ops, sum.data, losses.data, rows);
    const enum status status = read_sum(device, sum.data, out_loss, why);
    workspace_release(workspace, &sum);
    workspace_release(workspace, &losses);
    workspace_release(workspace, &x);
    if (!train) {
        release_head(model);
    }
    return status == STATUS_OK ? params_check(model->params, why) : status;
}

/* ---- the whole model ---- */

enum status decoder_forward(struct model_context *model, struct device *device,
                            const struct strategy *strategy, struct decoder_state *state,
                            bool first_micro_step, float grad_scale, double *out_loss,
                            struct failure *why)
{
    const uint32_t n_layers = model->spec->n_layers;
    model->positions = state->input.positions.data;
    state->residual[0] = reserve_stream(model, "stream");
    embed(model, state, state->residual[0].data);
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        const struct recompute_group group = recompute_group_of(strategy, n_layers, layer);
        struct block_acts *acts = &state->acts[layer];
        *acts = (struct block_acts){.x0 = state->residual[layer].data};
        state->residual[layer + 1] = reserve_stream(model, "stream");
        params_prefetch(model->params, layer + 1);
        params_prefetch(model->params, layer + 2); /* while this one computes */
        block_forward(model, layer, acts, recompute_keep_of(strategy, layer),
                      state->residual[layer + 1].data);
        /* Inside a checkpointed group only the first block's input stays. */
        if (layer > group.first) {
            workspace_release(model->workspace, &state->residual[layer]);
        }
        const enum status status = away_send(model, state, strategy, layer, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    const enum status status = away_sent(model, state, why);
    if (status != STATUS_OK) {
        return status;
    }
    return run_head(model, device, state, state->residual[n_layers].data, strategy->loss_tile, true,
                    first_micro_step, grad_scale, out_loss, why);
}

/* Make the inputs of all blocks of a checkpointed group again, and what forward of all but the
 * last keeps; the last block makes its own on demand. */
static void recompute_group(struct model_context *model, struct decoder_state *state,
                            struct recompute_group group)
{
    for (uint32_t layer = group.first; layer + 1 < group.end; layer++) {
        struct block_acts *acts = &state->acts[layer];
        *acts = (struct block_acts){.x0 = state->residual[layer].data};
        state->residual[layer + 1] = reserve_stream(model, "stream");
        params_prefetch(model->params, layer + 1);
        params_prefetch(model->params, layer + 2);
        block_forward(model, layer, acts, recompute_keep_all, state->residual[layer + 1].data);
    }
    state->acts[group.end - 1] = (struct block_acts){.x0 = state->residual[group.end - 1].data};
}

static void embed_backward(struct model_context *model, struct decoder_state *state, void *dx,
                           bool first_micro_step)
{
    struct unit_grad grad = state->table_grad;
    const struct units *units = model->units;
    const struct model_spec *spec = model->spec;
    if (grad.data == NULL) {
        grad = grads_begin(model->grads, 0, first_micro_step);
        model->ops->zero(model->ops, grad.data + units->embed_slots[EMBED_TOKENS],
                         (size_t)spec->vocab * spec->width * sizeof(float));
    }
    float *dpositions = NULL;
    if (spec->learned_positions) {
        dpositions = grad.data + units->embed_slots[EMBED_POSITIONS];
        model->ops->zero(model->ops, dpositions,
                         (size_t)spec->max_positions * spec->width * sizeof(float));
    }
    const struct dropout dropout =
        model_dropout(model, spec->dropout_embed, 0, RANDOM_EMBED_DROPOUT);
    if (dropout.p > 0.0f) {
        model->ops->dropout_backward(model->ops, dx, dx, micro_rows(model), spec->width, &dropout);
    }
    model->ops->embed_backward(model->ops, grad.data + units->embed_slots[EMBED_TOKENS], dpositions,
                               dx, state->input.tokens.data, state->input.positions.data,
                               micro_rows(model), spec->width);
    grads_end(model->grads, 0, &grad);
    state->table_grad = (struct unit_grad){0};
}

/* Turn the gradient of the final norm's output into that of the stream. */
static struct buffer final_norm_backward(struct model_context *model, struct decoder_state *state)
{
    const struct model_spec *spec = model->spec;
    const uint32_t unit = units_head(model->units);
    const uint32_t n_layers = spec->n_layers;
    struct buffer dx = reserve_stream(model, "stream_grad");
    model->ops->zero(model->ops, dx.data, activation_bytes(model, spec->width));
    const size_t bias = model->units->head_slots[HEAD_NORM_BIAS];
    model->ops->norm_backward(
        model->ops, spec->norm, dx.data,
        state->head_grad.data + model->units->head_slots[HEAD_NORM_WEIGHT],
        bias == SIZE_MAX ? NULL : state->head_grad.data + bias, state->final_grad.data,
        state->residual[n_layers].data, head_param(model, HEAD_NORM_WEIGHT),
        state->final_mean.data, state->final_rstd.data, micro_rows(model), spec->width);
    release_head(model);
    grads_end(model->grads, unit, &state->head_grad);
    workspace_release(model->workspace, &state->final_grad);
    workspace_release(model->workspace, &state->final_mean);
    workspace_release(model->workspace, &state->final_rstd);
    workspace_release(model->workspace, &state->residual[n_layers]);
    return dx;
}

/* The block whose parameters are wanted after this one's backward; n_layers for none. */
static uint32_t next_block(const struct strategy *strategy, uint32_t n_layers, uint32_t layer)
{
    const struct recompute_group group = recompute_group_of(strategy, n_layers, layer);
    if (layer == 0) {
        return n_layers;
    }
    if (layer > group.first) {
        return layer - 1;
    }
    const struct recompute_group below = recompute_group_of(strategy, n_layers, layer - 1);
    return below.checkpointed ? below.first : layer - 1;
}

enum status decoder_backward(struct model_context *model, const struct strategy *strategy,
                             struct decoder_state *state, bool first_micro_step,
                             struct failure *why)
{
    const uint32_t n_layers = model->spec->n_layers;
    enum status status = away_fetch(model, state, strategy, n_layers, why);
    if (status != STATUS_OK) {
        return status;
    }
    struct buffer dx = final_norm_backward(model, state);
    for (uint32_t layer = n_layers; layer-- > 0;) {
        const struct recompute_group group = recompute_group_of(strategy, n_layers, layer);
        if (layer + 1 == group.end) {
            status = away_arrive(model, state, strategy, group.first, why);
            if (status != STATUS_OK) {
                return status;
            }
        }
        if (group.checkpointed && layer + 1 == group.end) {
            recompute_group(model, state, group);
        }
        const uint32_t next = next_block(strategy, n_layers, layer);
        params_prefetch(model->params, layer + 1);
        if (next < n_layers) {
            params_prefetch(model->params, next + 1);
        }
        block_backward(model, layer, &state->acts[layer], dx.data, first_micro_step);
        workspace_release(model->workspace, &state->residual[layer]);
    }
    embed_backward(model, state, dx.data, first_micro_step);
    workspace_release(model->workspace, &dx);
    status = params_check(model->params, why);
    return status == STATUS_OK ? grads_check(model->grads, why) : status;
}

enum status decoder_evaluate(struct model_context *model, struct device *device,
                             const struct strategy *strategy, struct decoder_state *state,
                             double *out_loss, struct failure *why)
{
    static const struct recompute_keep keep_nothing = {0};
    model->positions = state->input.positions.data;
    struct buffer stream = reserve_stream(model, "stream");
    embed(model, state, stream.data);
    for (uint32_t layer = 0; layer < model->spec->n_layers; layer++) {
        struct block_acts acts = {.x0 = stream.data};
        struct buffer next = reserve_stream(model, "stream");
        params_prefetch(model->params, layer + 1);
        params_prefetch(model->params, layer + 2);
        block_forward(model, layer, &acts, keep_nothing, next.data);
        workspace_release(model->workspace, &stream);
        stream = next;
    }
    const enum status status = run_head(model, device, state, stream.data, strategy->loss_tile,
                                        false, true, 0.0f, out_loss, why);
    workspace_release(model->workspace, &state->final_mean);
    workspace_release(model->workspace, &state->final_rstd);
    workspace_release(model->workspace, &stream);
    return status;
}
