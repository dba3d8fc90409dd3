/* Inputs on their way to the host and back. See away.h. */
#include "worker/model/away.h"

static size_t input_bytes(const struct model_context *model)
{
    return activation_bytes(model, model->spec->width);
}

static void *host_place(const struct model_context *model, const struct strategy *strategy,
                        uint32_t layer)
{
    const uint32_t slot = recompute_away_slot(strategy, model->spec->n_layers, layer);
    return (char *)state_inputs(model->params->state) + slot * input_bytes(model);
}

enum status away_sent(struct model_context *model, struct decoder_state *state,
                      struct failure *why)
{
    struct device *device = model->params->state->device;
    if (!state->leaving.on_its_way) {
        return STATUS_OK;
    }
    state->leaving.on_its_way = false;
    const enum status status = device->table->wait(device, &state->leaving.ticket, why);
    if (status == STATUS_OK) {
        workspace_release(model->workspace, &state->residual[state->leaving.layer]);
    }
    return status;
}

enum status away_send(struct model_context *model, struct decoder_state *state,
                      const struct strategy *strategy, uint32_t layer, struct failure *why)
{
    struct device *device = model->params->state->device;
    if (!recompute_is_away(strategy, model->spec->n_layers, layer)) {
        return STATUS_OK;
    }
    const enum status status = away_sent(model, state, why);
    if (status != STATUS_OK) {
        return status;
    }
    state->leaving = (struct decoder_journey){.layer = layer, .on_its_way = true};
    return device->table->copy(device, host_place(model, strategy, layer),
                               state->residual[layer].data, input_bytes(model), COPY_TO_HOST,
                               &state->leaving.ticket, why);
}

enum status away_fetch(struct model_context *model, struct decoder_state *state,
                       const struct strategy *strategy, uint32_t end, struct failure *why)
{
    struct device *device = model->params->state->device;
    for (uint32_t layer = end; layer-- > 0;) {
        if (recompute_is_away(strategy, model->spec->n_layers, layer)) {
            state->coming = (struct decoder_journey){.layer = layer, .on_its_way = true};
            state->residual[layer] = workspace_reserve(model->workspace, "stream",
                                                       CATEGORY_ACTIVATIONS, input_bytes(model));
            return device->table->copy(device, state->residual[layer].data,
                                       host_place(model, strategy, layer), input_bytes(model),
                                       COPY_FROM_HOST, &state->coming.ticket, why);
        }
    }
    return STATUS_OK;
}

enum status away_arrive(struct model_context *model, struct decoder_state *state,
                        const struct strategy *strategy, uint32_t layer, struct failure *why)
{
    struct device *device = model->params->state->device;
    if (!state->coming.on_its_way || state->coming.layer != layer) {
        return STATUS_OK;
    }
    state->coming.on_its_way = false;
    const enum status status = device->table->wait(device, &state->coming.ticket, why);
    state->acts[layer].x0 = state->residual[layer].data; /* at another place than before */
    return status == STATUS_OK ? away_fetch(model, state, strategy, layer, why) : status;
}
