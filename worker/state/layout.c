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

/* A part that is one stretch: there or not. */
static struct part_layout stretch(const struct layout_facts *facts, size_t bytes, bool there)
{
    struct part_layout part = {.reserve_bytes = bytes};
    if (there) {
        part.extent = (struct extent){.stride = rounded(facts, bytes),
                                      .n = 1,
                                      .to = rounded(facts, bytes)};
        part.used_bytes = bytes;
    }
    return part;
}

/* A slice-major part: all blocks, or this rank's. */
static struct part_layout blocks(const struct layout_facts *facts, size_t block_bytes, bool whole)
{
    const struct units *units = facts->units;
    return (struct part_layout){
        .reserve_bytes = block_bytes * units->world_size,
        .extent = {.stride = block_bytes,
                   .first = whole ? 0 : facts->rank,
                   .n = whole ? units->world_size : 1,
                   .to = block_bytes},
        .used_bytes = (whole ? units->n_elems : units->block_elems) * sizeof(float),
    };
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
        .states_whole = strategy->zero_stage < 1,
        .reduce_each = strategy->grad_sync == GRAD_SYNC_EACH ||
                       (strategy->zero_stage >= 2 && !several),
    };
    layout.grads_whole = strategy->zero_stage < 2 || !layout.reduce_each;
    struct part_layout *parts = layout.parts;
    parts[PART_PARAMS] = stretch(facts, units->n_elems * elem, layout.params_whole);
    parts[PART_PARAMS_SHARD] = stretch(facts, units->block_elems * elem, !layout.params_whole);
    parts[PART_GRADS] = stretch(facts, units->n_elems * sizeof(float), layout.grads_whole);
    parts[PART_GRADS_SHARD] =
        stretch(facts, units->block_elems * sizeof(float), !layout.grads_whole);
    parts[PART_MOMENT_M] = blocks(facts, layout.block_bytes, layout.states_whole);
    parts[PART_MOMENT_V] = parts[PART_MOMENT_M];
    if (facts->dtype != DTYPE_FP32) {
        parts[PART_MASTER] = parts[PART_MOMENT_M];
    }
    *out_layout = layout;
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
