/* Putting a training together. See training.h. */
#include "worker/training.h"
#include <math.h>
#include <unistd.h>
#include "proto/base/heap.h"

/* Address space for the workspace: all that the device could ever commit, which costs nothing. A
 * device without a limit is the machine's memory; a rehearsal is of any machine. */
static size_t workspace_reserve_bytes(const struct device *device)
{
    const size_t most = (size_t)1 << 42;
    size_t bytes = device->capacity_bytes;
    if (bytes == 0 && device->kind != DEVICE_DRY) {
        bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    }
    return bytes != 0 && bytes < most ? bytes : most;
}

static void init_rotary(struct rotary *rotary, const struct model_spec *spec)
{
    *rotary = (struct rotary){.n_pairs = spec->head_dim / 2};
    for (uint32_t i = 0; i < rotary->n_pairs && i < ROTARY_MAX_PAIRS; i++) {
        rotary->inv_freq[i] =
            (float)(1.0 / pow((double)spec->rope_theta, 2.0 * i / (double)spec->head_dim));
    }
}

static enum status init_scratch(struct training *training, struct failure *why)
{
    const struct model_spec *spec = training->units->spec;
    const uint32_t most = training->options.eval_micro_batch > training->options.limits.global_batch
                              ? training->options.eval_micro_batch
                              : training->options.limits.global_batch;
    training->residual = heap_calloc((size_t)spec->n_layers + 1, sizeof *training->residual);
    training->acts = heap_calloc(spec->n_layers, sizeof *training->acts);
    training->host_batch_bytes =
        3 * (size_t)most * training->options.limits.seq_len * sizeof(int32_t);
    if (training->device->kind != DEVICE_DRY) {
        training->host_batch = heap_alloc(training->host_batch_bytes);
    }
    if (training->residual == NULL || training->acts == NULL ||
        (training->device->kind != DEVICE_DRY && training->host_batch == NULL)) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory for a batch of %zu bytes",
                    training->host_batch_bytes);
    }
    training->decoder.residual = training->residual;
    training->decoder.acts = training->acts;
    ledger_add(&training->ledger, TIER_HOST, CATEGORY_TEMP, training->host_batch_bytes);
    return STATUS_OK;
}

static void free_scratch(struct training *training)
{
    heap_free(training->residual);
    heap_free(training->acts);
    heap_free(training->host_batch);
    training->residual = NULL;
    training->acts = NULL;
    training->host_batch = NULL;
}

static struct layout_facts facts_of(const struct training *training)
{
    return (struct layout_facts){
        .units = training->units,
        .dtype = training->ops->dtype,
        .rank = training->comm->rank,
        .granule_bytes = training->device->granule_bytes,
        .limits = &training->options.limits,
    };
}

void training_layout(const struct training *training, const struct strategy *strategy,
                     struct layout *out_layout)
{
    const struct layout_facts facts = facts_of(training);
    layout_of(&facts, strategy, out_layout);
    const uint32_t n_layers = training->units->spec->n_layers;
    const size_t rows = (size_t)strategy->micro_batch * training->options.limits.seq_len;
    layout_add_inputs(&facts,
                      recompute_away_slot(strategy, n_layers, n_layers) * rows *
                          training->units->spec->width * training->ops->elem_bytes,
                      out_layout);
}

void training_abandon(struct training *training)
{
    workspace_abandon(&training->workspace);
    params_abandon(&training->params);
    training->grads.error = (struct failure){0};
    training->decoder.leaving = training->decoder.coming = (struct decoder_journey){0};
}

enum status training_init(struct training *training, const struct training_options *options,
                          const struct strategy *strategy, const struct units *units,
                          struct device *device, struct ops *ops, struct comm *comm,
                          const struct state_host *host, struct telemetry *telemetry,
                          struct failure *why)
{
    *training = (struct training){
        .options = *options,
        .strategy = *strategy,
        .device = device,
        .ops = ops,
        .comm = comm,
        .units = units,
        .telemetry = telemetry,
    };
    ledger_init(&training->ledger, telemetry);
    ledger_add(&training->ledger, TIER_PINNED, CATEGORY_TEMP, device->pinned_bytes);
    enum status status = init_scratch(training, why);
    if (status != STATUS_OK) {
        goto undo_scratch;
    }
    struct layout layout;
    training_layout(training, strategy, &layout);
    const struct layout_facts facts = facts_of(training);
    status = state_init(&training->state, &facts, &layout, device, host, &training->ledger, why);
    if (status != STATUS_OK) {
        goto undo_scratch;
    }
    status = workspace_init(&training->workspace, device, &training->ledger,
                            workspace_reserve_bytes(device), options->paint, why);
    if (status != STATUS_OK) {
        goto undo_state;
    }
    status = params_init(&training->params, &training->state, &training->workspace, ops, comm, why);
    if (status != STATUS_OK) {
        goto undo_workspace;
    }
    training->grads = (struct grads){
        .state = &training->state,
        .workspace = &training->workspace,
        .ops = ops,
        .comm = comm,
        .bucket_bytes = options->reduce_bucket_bytes,
        .by_library = options->reduce_by_library,
    };
    training->optim = (struct optim){.state = &training->state, .workspace = &training->workspace};
    training->model = (struct model_context){
        .spec = units->spec,
        .units = units,
        .params = &training->params,
        .grads = &training->grads,
        .ops = ops,
        .comm = comm,
        .workspace = &training->workspace,
        .telemetry = telemetry,
    };
    init_rotary(&training->model.rotary, units->spec);
    return STATUS_OK;
undo_workspace:
    workspace_fini(&training->workspace);
undo_state:
    state_fini(&training->state);
undo_scratch:
    free_scratch(training);
    training->ops = NULL;
    return status;
}

void training_fini(struct training *training)
{
    params_fini(&training->params);
    workspace_fini(&training->workspace);
    state_fini(&training->state);
    free_scratch(training);
    training->ops = NULL;
}

uint32_t training_accumulation(const struct training *training)
{
    return strategy_accumulation(&training->strategy, &training->options.limits);
}

enum status training_enter(struct training *training, enum phase phase, struct failure *why)
{
    if (training->enter_phase != NULL) {
        const enum status status = training->enter_phase(training->user, phase, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    workspace_phase(&training->workspace, phase);
    return STATUS_OK;
}

void training_resident(const struct training *training, struct plan_resident *out_resident)
{
    *out_resident = (struct plan_resident){0};
    for (int category = 0; category < N_CATEGORIES; category++) {
        out_resident->bytes[category] = training->ledger.region_bytes[category];
    }
    out_resident->committed_bytes = atomic_load(&training->device->committed_bytes) -
                                    training->workspace.region.committed_bytes;
    out_resident->host_bytes[CATEGORY_TEMP] =
        training->host_batch_bytes + training->options.save_staging_bytes;
    for (int part = 0; part < N_STATE_PARTS; part++) {
        out_resident->host_bytes[part_category((enum state_part)part)] +=
            training->state.layout.parts[part].host_bytes;
    }
}
