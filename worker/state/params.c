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

/* Operations on the side where the unit's master is. */
static struct ops *master_ops(struct params *params, uint32_t unit)
{
    const bool apart = params->state->dtype != DTYPE_FP32;
    return apart && state_on_host(params->state, unit) ? params->state->host.ops : params->ops;
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

/* The compute copy of a slice whose master is on the host, through a staging buffer. */
static enum status narrow_from_host(struct params *params, uint32_t unit, uint32_t slice,
                                    struct failure *why)
{
    struct state *state = params->state;
    const size_t n = state->units->units[unit].slice_elems, most = state->layout.staging_elems;
    const size_t elem = dtype_bytes(state->dtype);
    char *to = params_copy(params, unit, slice);
    const float *from = params_slice(params, unit, slice);
    enum status status = STATUS_OK;
    for (size_t at = 0; at < n && status == STATUS_OK; at += most) {
        const size_t now = n - at < most ? n - at : most;
        void *staging = state_staging(state, 0);
        struct ticket ticket = {0};
        state->host.ops->narrow(state->host.ops, staging, from + at, now);
        status = state->device->table->copy(state->device, to + at * elem, staging, now * elem,
                                            COPY_FROM_HOST, &ticket, why);
        if (status == STATUS_OK) {
            status = state->device->table->wait(state->device, &ticket, why);
        }
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
            if (state_on_host(params->state, unit)) {
                status = status == STATUS_OK ? narrow_from_host(params, unit, slice, why) : status;
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

void params_prefetch(struct params *params, uint32_t unit)
{
    struct gathered *gathered = &params->gathered[unit];
    const struct state *state = params->state;
    if (state->layout.params_whole || gathered->buffer.data != NULL) {
        return;
    }
    const struct unit *u = &state->units->units[unit];
    const size_t elem = dtype_bytes(state->dtype);
    gathered->buffer = workspace_reserve(params->workspace, "unit_params", CATEGORY_PARAMS,
                                         u->n_elems * elem);
    char *whole = gathered->buffer.data;
    params->ops->copy(params->ops, whole + state->rank * u->slice_elems * elem,
                      state_params_slice(state, unit, state->rank), u->slice_elems * elem);
    struct failure why = {0};
    note(params,
         params->comm->table->gather_slices(params->comm, whole, elem, u->slice_elems, 0,
                                            u->slice_elems, &gathered->ticket, &why),
         &why);
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
    if (params->state->layout.params_whole) {
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
    /* One on its way while the next is posted. */
    struct ticket before = {0};
    enum status status = STATUS_OK;
    for (uint32_t unit = 0; unit < state->units->n_units && status == STATUS_OK; unit++) {
        const size_t n = state->units->units[unit].slice_elems;
        struct ticket ticket = {0};
        status = params->comm->table->gather_slices(params->comm, state_params(state, unit, 0),
                                                    dtype_bytes(state->dtype), n, 0, n, &ticket,
                                                    why);
        if (status == STATUS_OK) {
            status = params->comm->table->wait(params->comm, &before, why);
        }
        before = ticket;
    }
    return status == STATUS_OK ? params->comm->table->wait(params->comm, &before, why) : status;
}

enum status params_refresh(struct params *params, struct failure *why)
{
    if (params->state->dtype == DTYPE_FP32) {
        return STATUS_OK;
    }
    const enum status status = narrow_slices(params, why);
    return status == STATUS_OK ? params_share(params, why) : status;
}
