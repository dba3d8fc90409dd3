/* Parameters under every layout. See params.h. */
#include "worker/state/params.h"
#include <assert.h>
#include "proto/base/heap.h"

enum status params_init(struct params *params, struct state *state, struct workspace *workspace,
                        struct ops *ops, struct comm *comm, struct failure *why)
{
    *params = (struct params){
        .state = state, .workspace = workspace, .ops = ops, .comm = comm};
    params->gathered = heap_calloc(state->units->n_units, sizeof *params->gathered);
    if (params->gathered == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory for %u units",
                    state->units->n_units);
    }
    return STATUS_OK;
}

void params_fini(struct params *params)
{
    heap_free(params->gathered);
    params->gathered = NULL;
}

/* ---- start values ---- */

/* Is the unit's master in host memory? In fp32 it is the parameters. */
static bool master_on_host(const struct params *params, uint32_t unit)
{
    const struct state *state = params->state;
    return state->dtype == DTYPE_FP32 ? state->layout.params_host : state_on_host(state, unit);
}

/* Operations on that side. */
static struct ops *master_ops(struct params *params, uint32_t unit)
{
    return master_on_host(params, unit) ? params->state->host.ops : params->ops;
}

/* Elements of the tensor that lie in the slice. */
static void seed_slice(struct params *params, uint64_t seed, uint32_t index, uint32_t slice)
{
    const struct tensor *tensor = &params->state->units->tensors[index];
    const size_t slice_elems = params->state->units->units[tensor->unit].slice_elems;
    const size_t start = slice * slice_elems;
    const size_t end = tensor->offset + tensor->rows * tensor->cols;
    const size_t first = tensor->offset > start ? tensor->offset : start;
    const size_t last = end < start + slice_elems ? end : start + slice_elems;
    if (first >= last) {
        return;
    }
    float *values = params_slice(params, tensor->unit, slice) + (first - start);
    struct ops *ops = master_ops(params, tensor->unit);
    if (tensor->init == INIT_NORMAL) {
        ops->random_normal(ops, values, last - first, tensor->init_std, seed, index,
                           first - tensor->offset);
    } else {
        ops->fill(ops, values, last - first, tensor->init == INIT_ONES ? 1.0f : 0.0f);
    }
}

/* Is the master of this slice here? */
static bool has_master(const struct params *params, uint32_t slice)
{
    return params->state->dtype == DTYPE_FP32 ? state_has_params(params->state, slice)
                                              : state_has_slice(params->state, slice);
}

/* n elements of a slice's compute copy from its master, one or both on the host. Rounded on the
 * host, since that is where there is room. */
static enum status narrow_piece(struct params *params, char *to, const float *from, size_t n,
                                bool from_host, struct failure *why)
{
    struct state *state = params->state;
    struct device *device = state->device;
    struct ticket ticket = {0};
    enum status status = STATUS_OK;
    if (!from_host) {
        float *master = state_staging(state, 1);
        status = device->table->copy(device, master, from, n * sizeof(float), COPY_TO_HOST,
                                     &ticket, why);
        if (status == STATUS_OK) {
            status = device->table->wait(device, &ticket, why);
        }
        from = master;
    }
    void *rounded = state->layout.params_host ? (void *)to : state_staging(state, 0);
    if (status == STATUS_OK) {
        state->host.ops->narrow(state->host.ops, rounded, from, n);
    }
    if (status == STATUS_OK && rounded != to) {
        status = device->table->copy(device, to, rounded, n * dtype_bytes(state->dtype),
                                     COPY_FROM_HOST, &ticket, why);
        if (status == STATUS_OK) {
            status = device->table->wait(device, &ticket, why);
        }
    }
    return status;
}

static enum status narrow_by_host(struct params *params, uint32_t unit, uint32_t slice,
                                  struct failure *why)
{
    const size_t n = params->state->units->units[unit].slice_elems;
    const size_t most = params->state->layout.staging_elems;
    char *to = params_copy(params, unit, slice);
    const float *from = params_slice(params, unit, slice);
    enum status status = STATUS_OK;
    for (size_t at = 0; at < n && status == STATUS_OK; at += most) {
        status = narrow_piece(params, to + at * dtype_bytes(params->state->dtype), from + at,
                              n - at < most ? n - at : most, master_on_host(params, unit), why);
    }
    return status;
}

static enum status narrow_slices(struct params *params, struct failure *why)
{
    enum status status = STATUS_OK;
    const struct units *units = params->state->units;
    for (uint32_t unit = 0; unit < units->n_units; unit++) {
        for (uint32_t slice = 0; slice < units->world_size; slice++) {
            if (params->state->dtype == DTYPE_FP32 || !has_master(params, slice)) {
                continue;
            }
            if (master_on_host(params, unit) || params->state->layout.params_host) {
                status = status == STATUS_OK ? narrow_by_host(params, unit, slice, why) : status;
            } else {
                params->ops->narrow(params->ops, params_copy(params, unit, slice),
                                    params_slice(params, unit, slice),
                                    units->units[unit].slice_elems);
            }
        }
    }
    return status;
}

enum status params_seed(struct params *params, uint64_t seed, struct failure *why)
{
    const struct units *units = params->state->units;
    for (uint32_t i = 0; i < units->n_tensors; i++) {
        for (uint32_t slice = 0; slice < units->world_size; slice++) {
            if (has_master(params, slice)) {
                seed_slice(params, seed, i, slice);
            }
        }
    }
    return params_refresh(params, why);
}

/* ---- units ---- */

static void note(struct params *params, enum status status, const struct failure *why)
{
    if (status != STATUS_OK && params->error.status == STATUS_OK) {
        params->error = *why;
    }
}

enum status params_check(struct params *params, struct failure *why)
{
    if (params->error.status == STATUS_OK) {
        return STATUS_OK;
    }
    const enum status status = params->error.status;
    *why = params->error;
    params->error = (struct failure){0};
    return status;
}

/* A copy to the device; what is called next sees it. */
static enum status bring(struct params *params, void *dst, const void *src, size_t bytes,
                         struct failure *why)
{
    struct device *device = params->state->device;
    struct ticket ticket = {0};
    const enum status status = device->table->copy(
        device, dst, src, bytes, params->state->layout.params_host ? COPY_FROM_HOST : COPY_WITHIN,
        &ticket, why);
    return status == STATUS_OK ? device->table->wait(device, &ticket, why) : status;
}

/* The whole unit into its buffer: from the host's whole copy, or from all ranks' slices. */
static enum status fetch(struct params *params, uint32_t unit, struct gathered *gathered,
                         struct failure *why)
{
    const struct state *state = params->state;
    const struct unit *u = &state->units->units[unit];
    const size_t elem = dtype_bytes(state->dtype);
    char *whole = gathered->buffer.data;
    if (state->layout.params_whole) {
        return bring(params, whole, state_params(state, unit, 0), u->n_elems * elem, why);
    }
    const size_t bytes = u->slice_elems * elem;
    const enum status status = bring(params, whole + state->rank * bytes,
                                     state_params_slice(state, unit, state->rank), bytes, why);
    return status == STATUS_OK
               ? params->comm->table->gather_slices(params->comm, whole, elem, u->slice_elems, 0,
                                                    u->slice_elems, &gathered->ticket, why)
               : status;
}

void params_prefetch(struct params *params, uint32_t unit)
{
    struct gathered *gathered = &params->gathered[unit];
    const struct state *state = params->state;
    if (state_params_ready(state) || gathered->buffer.data != NULL) {
        return;
    }
    const struct unit *u = &state->units->units[unit];
    const size_t elem = dtype_bytes(state->dtype);
    gathered->buffer = workspace_reserve(params->workspace, "unit_params", CATEGORY_PARAMS,
                                         u->n_elems * elem);
    struct failure why = {0};
    note(params, fetch(params, unit, gathered, &why), &why);
}

void params_gather(struct params *params, uint32_t unit)
{
    struct gathered *gathered = &params->gathered[unit];
    params_prefetch(params, unit);
    gathered->users++;
    if (gathered->ticket.serial != 0 && params->error.status == STATUS_OK) {
        struct failure why = {0};
        note(params, params->comm->table->wait(params->comm, &gathered->ticket, &why), &why);
    }
}

void *params_get(struct params *params, uint32_t unit, size_t offset)
{
    if (state_params_ready(params->state)) {
        return state_params(params->state, unit, offset);
    }
    assert(params->gathered[unit].users > 0);
    return (char *)params->gathered[unit].buffer.data +
           offset * dtype_bytes(params->state->dtype);
}

void params_release(struct params *params, uint32_t unit)
{
    struct gathered *gathered = &params->gathered[unit];
    assert(gathered->users > 0);
    if (--gathered->users == 0) {
        workspace_release(params->workspace, &gathered->buffer);
    }
}

void params_abandon(struct params *params)
{
    for (uint32_t unit = 0; unit < params->state->units->n_units; unit++) {
        params->gathered[unit] = (struct gathered){0};
    }
    params->error = (struct failure){0};
}

/* ---- slices ---- */

float *params_slice(struct params *params, uint32_t unit, uint32_t slice)
{
    return params->state->dtype == DTYPE_FP32
               ? state_params_slice(params->state, unit, slice)
               : state_block_slice(params->state, PART_MASTER, unit, slice);
}

void *params_copy(struct params *params, uint32_t unit, uint32_t slice)
{
    return params->state->dtype == DTYPE_FP32 ? NULL
                                              : state_params_slice(params->state, unit, slice);
}

enum status params_share(struct params *params, struct failure *why)
{
    const struct state *state = params->state;
    if (!state->layout.params_whole || state->layout.states_whole || params->comm->size == 1) {
        return STATUS_OK;
    }
    struct comm *comm = state->layout.params_host ? state->host.comm : params->comm;
    /* One on its way while the next is posted. */
    struct ticket before = {0};
    enum status status = STATUS_OK;
    for (uint32_t unit = 0; unit < state->units->n_units && status == STATUS_OK; unit++) {
        const size_t n = state->units->units[unit].slice_elems;
        struct ticket ticket = {0};
        status = comm->table->gather_slices(comm, state_params(state, unit, 0),
                                            dtype_bytes(state->dtype), n, 0, n, &ticket, why);
        if (status == STATUS_OK) {
            status = comm->table->wait(comm, &before, why);
        }
        before = ticket;
    }
    return status == STATUS_OK ? comm->table->wait(comm, &before, why) : status;
}

enum status params_refresh(struct params *params, struct failure *why)
{
    if (params->state->dtype == DTYPE_FP32) {
        return STATUS_OK;
    }
    const enum status status = narrow_slices(params, why);
    return status == STATUS_OK ? params_share(params, why) : status;
}
