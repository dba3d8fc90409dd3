/* The rules of where state lies. See layout.h. */
#include "worker/state/layout.h"
#include <assert.h>

const char *part_name(enum state_part part)
{
    static const char *const names[N_STATE_PARTS] = {
        [PART_PARAMS] = "params",           [PART_PARAMS_SHARD] = "params_shard",
        [PART_MASTER] = "master",           [PART_GRADS] = "grads",
        [PART_GRADS_SHARD] = "grads_shard", [PART_MOMENT_M] = "moment_m",
        [PART_MOMENT_V] = "moment_v",
        [PART_STAGING] = "staging",         [PART_INPUTS] = "inputs",
    };
    return names[part];
}

enum category part_category(enum state_part part)
{
    switch (part) {
    case PART_PARAMS:
    case PART_PARAMS_SHARD:
        return CATEGORY_PARAMS;
    case PART_GRADS:
    case PART_GRADS_SHARD:
        return CATEGORY_GRADS;
    case PART_STAGING:
        return CATEGORY_TEMP;
    case PART_INPUTS:
        return CATEGORY_ACTIVATIONS;
    case PART_MASTER:
    case PART_MOMENT_M:
    case PART_MOMENT_V:
    case N_STATE_PARTS:
        break;
    }
    return CATEGORY_OPTIMIZER;
}

static size_t rounded(const struct layout_facts *facts, size_t bytes)
{
    return (bytes + facts->granule_bytes - 1) / facts->granule_bytes * facts->granule_bytes;
}

/* One stretch from the start. */
static struct extent extent_of(const struct layout_facts *facts, size_t bytes)
{
    return (struct extent){.stride = rounded(facts, bytes), .n = 1, .to = rounded(facts, bytes)};
}

/* A part that is one stretch: there or not. */
static struct part_layout stretch(const struct layout_facts *facts, size_t bytes, bool there)
{
    struct part_layout part = {.reserve_bytes = bytes};
    if (there) {
        part.extent = extent_of(facts, bytes);
        part.used_bytes = bytes;
    }
    return part;
}

static void to_host(struct part_layout *part)
{
    part->host = part->extent;
    part->host_bytes = part->used_bytes;
    part->extent = (struct extent){0};
    part->used_bytes = 0;
}

/* A slice-major part: all blocks, or this rank's; each cut between device and host. The granule that
 * the cut goes through is on both sides. */
static struct part_layout blocks(const struct layout_facts *facts, const struct layout *layout)
{
    const struct units *units = facts->units;
    const bool whole = layout->states_whole;
    const size_t n = whole ? units->world_size : 1;
    const size_t prefix_bytes = layout->host_prefix * sizeof(float);
    const size_t rest = units->block_elems - layout->host_prefix;
    struct part_layout part = {.reserve_bytes = layout->block_bytes * units->world_size};
    const struct extent extent = {.stride = layout->block_bytes,
                                  .first = whole ? 0 : facts->rank,
                                  .n = n,
                                  .to = layout->block_bytes};
    if (prefix_bytes > 0) {
        part.extent = extent;
        part.extent.to = rounded(facts, prefix_bytes);
        part.used_bytes = n * prefix_bytes;
    }
    if (rest > 0) {
        part.host = extent;
        part.host.from = prefix_bytes / facts->granule_bytes * facts->granule_bytes;
        part.host_bytes = n * rest * sizeof(float);
    }
    return part;
}

/* The optimizer states of the last units go to the host, until they are the fraction asked for. */
static void cut_states(const struct layout_facts *facts, const struct strategy *strategy,
                       struct layout *layout)
{
    const struct units *units = facts->units;
    const double wanted = strategy->offload_optimizer == OFFLOAD_NONE
                              ? 0.0
                              : strategy->offload_optimizer_fraction * (double)units->block_elems;
    uint32_t first = units->n_units;
    size_t largest = 0, moved = 0;
    while (first > 0 && (double)moved < wanted) {
        first--;
        moved += units->units[first].slice_elems;
        largest = units->units[first].slice_elems > largest ? units->units[first].slice_elems
                                                            : largest;
    }
    layout->first_host = first;
    layout->host_prefix = units->block_elems - moved;
    for (uint32_t unit = 0; unit < units->n_units && layout->params_host; unit++) {
        largest = units->units[unit].slice_elems > largest ? units->units[unit].slice_elems
                                                           : largest;
    }
    layout->staging_elems = largest < STAGING_MAX_ELEMS ? largest : STAGING_MAX_ELEMS;
}

void layout_of(const struct layout_facts *facts, const struct strategy *strategy,
               struct layout *out_layout)
{
    const struct units *units = facts->units;
    const size_t elem = dtype_bytes(facts->dtype);
    const bool several = strategy_accumulation(strategy, facts->limits) > 1;
    struct layout layout = {
        .block_bytes = rounded(facts, units->block_elems * sizeof(float)),
        .params_whole = strategy->zero_stage < 3,
        .params_host = strategy->offload_params != OFFLOAD_NONE,
        .states_whole = strategy->zero_stage < 1,
        .reduce_each = strategy->grad_sync == GRAD_SYNC_EACH ||
                       (strategy->zero_stage >= 2 && !several),
    };
    layout.inputs_most = (size_t)units->spec->n_layers * units->spec->width * elem *
                         facts->limits->seq_len *
                         (facts->limits->global_batch / units->world_size + 1);
    layout.grads_whole = strategy->zero_stage < 2 || !layout.reduce_each;
    cut_states(facts, strategy, &layout);
    struct part_layout *parts = layout.parts;
    parts[PART_PARAMS] = stretch(facts, units->n_elems * elem, layout.params_whole);
    parts[PART_PARAMS_SHARD] = stretch(facts, units->block_elems * elem, !layout.params_whole);
    if (layout.params_host) {
        to_host(&parts[PART_PARAMS]);
        to_host(&parts[PART_PARAMS_SHARD]);
    }
    parts[PART_GRADS] = stretch(facts, units->n_elems * sizeof(float), layout.grads_whole);
    parts[PART_GRADS_SHARD] =
        stretch(facts, units->block_elems * sizeof(float), !layout.grads_whole);
    parts[PART_MOMENT_M] = blocks(facts, &layout);
    parts[PART_MOMENT_V] = parts[PART_MOMENT_M];
    if (facts->dtype != DTYPE_FP32) {
        parts[PART_MASTER] = parts[PART_MOMENT_M];
    }
    const size_t staging = STAGING_BUFFERS * layout.staging_elems * sizeof(float);
    if (staging > 0) {
        parts[PART_STAGING].host = extent_of(facts, staging);
        parts[PART_STAGING].host_bytes = staging;
    }
    *out_layout = layout;
}

void layout_add_inputs(const struct layout_facts *facts, size_t bytes, struct layout *layout)
{
    if (bytes > 0) {
        layout->parts[PART_INPUTS].host = extent_of(facts, bytes);
        layout->parts[PART_INPUTS].host_bytes = bytes;
    }
}

size_t layout_host_missing(const struct layout *a, const struct layout *b)
{
    size_t bytes = 0;
    for (int part = 0; part < N_STATE_PARTS; part++) {
        bytes += extent_missing(&a->parts[part].host, &b->parts[part].host);
    }
    return bytes;
}

size_t layout_committed(const struct layout *layout)
{
    size_t bytes = 0;
    for (int part = 0; part < N_STATE_PARTS; part++) {
        bytes += extent_bytes(&layout->parts[part].extent);
    }
    return bytes;
}

size_t layout_committed_both(const struct layout *a, const struct layout *b)
{
    size_t bytes = 0;
    for (int part = 0; part < N_STATE_PARTS; part++) {
        bytes += extent_bytes(&a->parts[part].extent) +
                 extent_missing(&a->parts[part].extent, &b->parts[part].extent);
    }
    return bytes;
}
