/* The parts' regions and addresses, and the way from one layout to another. See state.h. */
#include "worker/state/state.h"
#include <assert.h>

static void use_parts(struct state *state, const struct layout *layout)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        if (state->parts[part].base != NULL) {
            region_use(&state->parts[part], layout->parts[part].used_bytes);
        }
    }
}

enum status state_init(struct state *state, const struct layout_facts *facts,
                       const struct layout *layout, struct device *device, struct ledger *ledger,
                       struct failure *why)
{
    *state = (struct state){.units = facts->units, .dtype = facts->dtype, .rank = facts->rank};
    for (int part = 0; part < N_STATE_PARTS; part++) {
        const size_t bytes = layout->parts[part].reserve_bytes;
        if (bytes == 0) {
            continue;
        }
        const enum status status =
            region_init(&state->parts[part], part_name((enum state_part)part),
                        part_category((enum state_part)part), device, ledger, bytes, why);
        if (status != STATUS_OK) {
            state_fini(state);
            return status;
        }
    }
    const enum status status = state_acquire(state, layout, why);
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
    }
}

/* ---- from one layout to another ---- */

enum status state_acquire(struct state *state, const struct layout *next, struct failure *why)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        struct region *region = &state->parts[part];
        if (region->base == NULL) {
            continue;
        }
        const enum status status = region_acquire(region, &next->parts[part].extent, why);
        if (status != STATUS_OK) {
            while (part-- > 0) {
                if (state->parts[part].base != NULL) {
                    region_revert(&state->parts[part], &next->parts[part].extent);
                }
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
    }
    state->layout = *next;
    use_parts(state, next);
}

void state_revert(struct state *state, const struct layout *next)
{
    for (int part = 0; part < N_STATE_PARTS; part++) {
        if (state->parts[part].base != NULL) {
            region_revert(&state->parts[part], &next->parts[part].extent);
        }
    }
}

/* Every rank's own block to all: slice-major parts are N equal blocks. */
static enum status gather_blocks(struct state *state, enum state_part part, struct comm *comm,
                                 struct failure *why)
{
    struct region *region = &state->parts[part];
    if (region->base == NULL) {
        return STATUS_OK;
    }
    struct ticket ticket;
    const size_t stride = state->layout.block_bytes / sizeof(float);
    const enum status status =
        comm->table->gather_slices(comm, region->base, sizeof(float), stride, 0,
                                   state->units->block_elems, &ticket, why);
    return status == STATUS_OK ? comm->table->wait(comm, &ticket, why) : status;
}

/* params_shard -> params, on all ranks. */
static enum status gather_params(struct state *state, struct ops *ops, struct comm *comm,
                                 struct failure *why)
{
    const struct units *units = state->units;
    const size_t elem = dtype_bytes(state->dtype);
    for (uint32_t unit = 0; unit < units->n_units; unit++) {
        const struct unit *u = &units->units[unit];
        char *whole = state->parts[PART_PARAMS].base + u->offset * elem;
        const char *mine = state->parts[PART_PARAMS_SHARD].base + u->slice_offset * elem;
        ops->copy(ops, whole + state->rank * u->slice_elems * elem, mine, u->slice_elems * elem);
        struct ticket ticket;
        enum status status = comm->table->gather_slices(comm, whole, elem, u->slice_elems, 0,
                                                        u->slice_elems, &ticket, why);
        if (status == STATUS_OK) {
            status = comm->table->wait(comm, &ticket, why);
        }
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

/* params -> params_shard. */
static void cut_params(struct state *state, struct ops *ops)
{
    const struct units *units = state->units;
    const size_t elem = dtype_bytes(state->dtype);
    for (uint32_t unit = 0; unit < units->n_units; unit++) {
        const struct unit *u = &units->units[unit];
        const char *whole = state->parts[PART_PARAMS].base + u->offset * elem;
        char *mine = state->parts[PART_PARAMS_SHARD].base + u->slice_offset * elem;
        ops->copy(ops, mine, whole + state->rank * u->slice_elems * elem, u->slice_elems * elem);
    }
}

enum status state_convert(struct state *state, const struct layout *next, struct ops *ops,
                          struct comm *comm, struct failure *why)
{
    const struct layout *now = &state->layout;
    enum status status = STATUS_OK;
    if (now->params_whole && !next->params_whole) {
        cut_params(state, ops);
    } else if (!now->params_whole && next->params_whole) {
        status = gather_params(state, ops, comm, why);
    }
    static const enum state_part sliced[] = {PART_MASTER, PART_MOMENT_M, PART_MOMENT_V};
    for (size_t i = 0; i < sizeof sliced / sizeof *sliced && status == STATUS_OK; i++) {
        if (!now->states_whole && next->states_whole) {
            status = gather_blocks(state, sliced[i], comm, why);
        }
    }
    /* Gradients are dead between steps. */
    return status == STATUS_OK ? ops->check(ops, why) : status;
}

/* ---- addresses ---- */

void *state_params(const struct state *state, uint32_t unit, size_t offset)
{
    assert(state->layout.params_whole);
    return state->parts[PART_PARAMS].base +
           (state->units->units[unit].offset + offset) * dtype_bytes(state->dtype);
}

void *state_params_slice(const struct state *state, uint32_t unit, uint32_t slice)
{
    const struct unit *u = &state->units->units[unit];
    if (state->layout.params_whole) {
        return state_params(state, unit, slice * u->slice_elems);
    }
    assert(slice == state->rank);
    return state->parts[PART_PARAMS_SHARD].base + u->slice_offset * dtype_bytes(state->dtype);
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
    char *block = state->parts[part].base + slice * state->layout.block_bytes;
    return (float *)(void *)block + state->units->units[unit].slice_offset;
}
