/* The parts' regions and addresses, and the way from one layout to another. See state.h. */
#include "worker/state/state.h"
#include <assert.h>
#include <string.h>
#include <unistd.h>

static void use_parts(struct state *state, const struct layout *layout)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        if (state->parts[part].base != NULL) {
            region_use(&state->parts[part], layout->parts[part].used_bytes);
        }
        region_use(&state->host_parts[part], layout->parts[part].host_bytes);
    }
}

/* Address space for all that the host may ever hold of a part. */
static size_t host_reserve(const struct layout *layout, enum state_part part)
{
    if (part == PART_STAGING) {
        return STAGING_BUFFERS * (size_t)STAGING_MAX_ELEMS * sizeof(float);
    }
    if (part == PART_INPUTS) {
        const size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
        return layout->inputs_most < machine ? layout->inputs_most : machine;
    }
    const bool movable = part == PART_MASTER || part == PART_MOMENT_M || part == PART_MOMENT_V ||
                         part == PART_PARAMS || part == PART_PARAMS_SHARD;
    return movable ? layout->parts[part].reserve_bytes : 0;
}

static enum status open_part(struct state *state, const struct layout *layout,
                             enum state_part part, struct ledger *ledger, struct failure *why)
{
    const size_t bytes = layout->parts[part].reserve_bytes;
    enum status status = STATUS_OK;
    if (bytes > 0) {
        status = region_init(&state->parts[part], part_name(part), part_category(part),
                             state->device, ledger, bytes, why);
    }
    if (status == STATUS_OK) {
        struct region *host = &state->host_parts[part];
        const size_t reserved = host_reserve(layout, part);
        status = region_init(host, part_name(part), part_category(part), state->host.device,
                             ledger, reserved == 0 ? 1 : reserved, why);
        host->tier = TIER_HOST;
    }
    return status;
}

enum status state_init(struct state *state, const struct layout_facts *facts,
                       const struct layout *layout, struct device *device,
                       const struct state_host *host, struct ledger *ledger, struct failure *why)
{
    *state = (struct state){
        .units = facts->units,
        .dtype = facts->dtype,
        .rank = facts->rank,
        .device = device,
        .host = *host,
        .layout = {.first_host = facts->units->n_units},
    };
    enum status status = STATUS_OK;
    for (int part = 0; part < N_STATE_PARTS && status == STATUS_OK; part++) {
        status = open_part(state, layout, (enum state_part)part, ledger, why);
    }
    if (status == STATUS_OK) {
        status = state_acquire(state, layout, why);
    }
    if (status != STATUS_OK) {
        state_fini(state);
        return status;
    }
    state_settle(state, layout);
    return STATUS_OK;
}

void state_fini(struct state *state)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        region_fini(&state->parts[part]);
        region_fini(&state->host_parts[part]);
    }
}

/* ---- from one layout to another ---- */

/* Device and host of one part, or neither. */
static enum status acquire_part(struct state *state, const struct layout *next, int part,
                                struct failure *why)
{
    struct region *region = &state->parts[part];
    enum status status = STATUS_OK;
    if (region->base != NULL) {
        status = region_acquire(region, &next->parts[part].extent, why);
    }
    if (status == STATUS_OK) {
        status = region_acquire(&state->host_parts[part], &next->parts[part].host, why);
        if (status != STATUS_OK && region->base != NULL) {
            region_revert(region, &next->parts[part].extent);
        }
    }
    return status;
}

static void revert_part(struct state *state, const struct layout *next, int part)
{
    if (state->parts[part].base != NULL) {
        region_revert(&state->parts[part], &next->parts[part].extent);
    }
    region_revert(&state->host_parts[part], &next->parts[part].host);
}

enum status state_acquire(struct state *state, const struct layout *next, struct failure *why)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        const enum status status = acquire_part(state, next, part, why);
        if (status != STATUS_OK) {
            while (part-- > 0) {
                revert_part(state, next, part);
            }
            return status;
        }
    }
    return STATUS_OK;
}

void state_settle(struct state *state, const struct layout *next)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        if (state->parts[part].base != NULL) {
            region_settle(&state->parts[part], &next->parts[part].extent);
        }
        region_settle(&state->host_parts[part], &next->parts[part].host);
    }
    state->layout = *next;
    use_parts(state, next);
}

void state_revert(struct state *state, const struct layout *next)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        revert_part(state, next, part);
    }
}

/* Copy, and see it done: the source may be given back next. */
static enum status move(struct state *state, void *dst, const void *src, size_t bytes,
                        enum copy_kind kind, struct failure *why)
{
    struct ticket ticket = {0};
    const enum status status =
        state->device->table->copy(state->device, dst, src, bytes, kind, &ticket, why);
    return status == STATUS_OK ? state->device->table->wait(state->device, &ticket, why) : status;
}

/* Slice `slice` of the units that change sides, to where `next` has them. They are neighbours. */
static enum status move_slice(struct state *state, const struct layout *next, enum state_part part,
                              uint32_t slice, struct failure *why)
{
    const size_t now = state->layout.host_prefix, then = next->host_prefix;
    const size_t first = now < then ? now : then;
    const size_t bytes = (now < then ? then - now : now - then) * sizeof(float);
    const size_t at = slice * next->block_bytes + first * sizeof(float);
    if (bytes == 0 || state->parts[part].base == NULL) {
        return STATUS_OK;
    }
    char *device = state->parts[part].base + at;
    char *host = state->host_parts[part].base + at;
    return then > now ? move(state, device, host, bytes, COPY_FROM_HOST, why)
                      : move(state, host, device, bytes, COPY_TO_HOST, why);
}

static enum status gather(struct comm *comm, char *base, size_t stride, size_t first, size_t n,
                          struct failure *why)
{
    struct ticket ticket = {0};
    if (n == 0) {
        return STATUS_OK;
    }
    const enum status status =
        comm->table->gather_slices(comm, base, sizeof(float), stride, first, n, &ticket, why);
    return status == STATUS_OK ? comm->table->wait(comm, &ticket, why) : status;
}

/* Every rank's own block to all: slice-major parts are N equal blocks. */
static enum status gather_blocks(struct state *state, const struct layout *next,
                                 enum state_part part, struct comm *comm, struct failure *why)
{
    if (state->parts[part].base == NULL) {
        return STATUS_OK;
    }
    const size_t stride = next->block_bytes / sizeof(float);
    const enum status status =
        gather(comm, state->parts[part].base, stride, 0, next->host_prefix, why);
    return status == STATUS_OK
               ? gather(state->host.comm, state->host_parts[part].base, stride, next->host_prefix,
                        state->units->block_elems - next->host_prefix, why)
               : status;
}

/* Where a layout has the unit's parameters: all of it, or this rank's slice. */
static char *params_place(const struct state *state, const struct layout *layout, uint32_t unit)
{
    const struct unit *u = &state->units->units[unit];
    const struct region *parts = layout->params_host ? state->host_parts : state->parts;
    const size_t elem = dtype_bytes(state->dtype);
    return layout->params_whole ? parts[PART_PARAMS].base + u->offset * elem
                                : parts[PART_PARAMS_SHARD].base + u->slice_offset * elem;
}

static enum status move_params(struct state *state, const struct layout *next, char *dst,
                               const char *src, size_t bytes, struct failure *why)
{
    const bool from_host = state->layout.params_host, to_host = next->params_host;
    if (from_host && to_host) {
        memcpy(dst, src, bytes);
        return STATUS_OK;
    }
    return move(state, dst, src, bytes,
                from_host ? COPY_FROM_HOST : to_host ? COPY_TO_HOST : COPY_WITHIN, why);
}

/* A unit's parameters to where `next` has them; gathered there if they were a slice. */
static enum status convert_params(struct state *state, const struct layout *next, uint32_t unit,
                                  struct comm *comm, struct failure *why)
{
    const struct layout *now = &state->layout;
    const size_t n = state->units->units[unit].slice_elems;
    const size_t bytes = n * dtype_bytes(state->dtype);
    const size_t mine = state->rank * bytes;
    char *src = params_place(state, now, unit), *dst = params_place(state, next, unit);
    if (now->params_whole && next->params_whole) {
        return move_params(state, next, dst, src, bytes * state->units->world_size, why);
    }
    enum status status = move_params(state, next, next->params_whole ? dst + mine : dst,
                                     now->params_whole ? src + mine : src, bytes, why);
    if (status != STATUS_OK || !next->params_whole) {
        return status;
    }
    struct comm *by = next->params_host ? state->host.comm : comm;
    struct ticket ticket = {0};
    status = by->table->gather_slices(by, dst, dtype_bytes(state->dtype), n, 0, n, &ticket, why);
    return status == STATUS_OK ? by->table->wait(by, &ticket, why) : status;
}

enum status state_convert(struct state *state, const struct layout *next, struct ops *ops,
                          struct comm *comm, struct failure *why)
{
    const struct layout *now = &state->layout;
    enum status status = STATUS_OK;
    const bool same = now->params_whole == next->params_whole &&
                      now->params_host == next->params_host;
    for (uint32_t unit = 0; unit < state->units->n_units && !same && status == STATUS_OK;
         unit++) {
        status = convert_params(state, next, unit, comm, why);
    }
    static const enum state_part sliced[] = {PART_MASTER, PART_MOMENT_M, PART_MOMENT_V};
    for (size_t i = 0; i < sizeof sliced / sizeof *sliced && status == STATUS_OK; i++) {
        const bool both = now->states_whole && next->states_whole;
        const uint32_t first = both ? 0 : state->rank;
        const uint32_t end = both ? state->units->world_size : state->rank + 1;
        for (uint32_t slice = first; slice < end && status == STATUS_OK; slice++) {
            status = move_slice(state, next, sliced[i], slice, why);
        }
        if (status == STATUS_OK && !now->states_whole && next->states_whole) {
            status = gather_blocks(state, next, sliced[i], comm, why);
        }
    }
    /* Gradients are dead between steps. */
    return status == STATUS_OK ? ops->check(ops, why) : status;
}

/* ---- addresses ---- */

void *state_params(const struct state *state, uint32_t unit, size_t offset)
{
    assert(state->layout.params_whole);
    return params_place(state, &state->layout, unit) + offset * dtype_bytes(state->dtype);
}

void *state_params_slice(const struct state *state, uint32_t unit, uint32_t slice)
{
    if (state->layout.params_whole) {
        return state_params(state, unit, slice * state->units->units[unit].slice_elems);
    }
    assert(slice == state->rank);
    return params_place(state, &state->layout, unit);
}

float *state_grads(const struct state *state, uint32_t unit)
{
    assert(state->layout.grads_whole);
    return (float *)(void *)state->parts[PART_GRADS].base + state->units->units[unit].offset;
}

float *state_grads_slice(const struct state *state, uint32_t unit, uint32_t slice)
{
    const struct unit *u = &state->units->units[unit];
    if (state->layout.grads_whole) {
        return state_grads(state, unit) + slice * u->slice_elems;
    }
    assert(slice == state->rank);
    return (float *)(void *)state->parts[PART_GRADS_SHARD].base + u->slice_offset;
}

float *state_block_slice(const struct state *state, enum state_part part, uint32_t unit,
                         uint32_t slice)
{
    assert(state_has_slice(state, slice));
    const struct region *parts = state_on_host(state, unit) ? state->host_parts : state->parts;
    char *block = parts[part].base + slice * state->layout.block_bytes;
    return (float *)(void *)block + state->units->units[unit].slice_offset;
}

bool state_is_host(const struct state *state, const void *address)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        const struct region *region = &state->host_parts[part];
        const char *at = address;
        if (at >= region->base && at < region->base + region->reserved_bytes) {
            return true;
        }
    }
    return false;
}

void *state_inputs(const struct state *state)
{
    return state->host_parts[PART_INPUTS].base;
}

float *state_staging(const struct state *state, uint32_t buffer)
{
    assert(buffer < STAGING_BUFFERS && state->layout.staging_elems > 0);
    return (float *)(void *)state->host_parts[PART_STAGING].base +
           buffer * state->layout.staging_elems;
}
