/* The rule of activation checkpointing. See recompute.h. */
#include "worker/model/recompute.h"

const struct recompute_keep recompute_keep_all = {true, true, true, true, true, true, true};

static bool applies(const struct strategy *strategy, uint32_t layer)
{
    return strategy->checkpointing != CHECKPOINTING_NONE && layer < strategy->checkpointing_layers;
}

struct recompute_keep recompute_keep_of(const struct strategy *strategy, uint32_t layer)
{
    struct recompute_keep keep = recompute_keep_all;
    if (!applies(strategy, layer)) {
        return keep;
    }
    switch (strategy->checkpointing) {
    case CHECKPOINTING_NONE:
        break;
    case CHECKPOINTING_SELECTIVE:
        /* Cheap to compute again: no matrix product among them. */
        keep.norm1 = keep.norm2 = keep.act = false;
        break;
    case CHECKPOINTING_SPLIT:
        /* The input of each half: of the attention (the block's own) and of the MLP. */
        keep = (struct recompute_keep){.residual = true};
        break;
    case CHECKPOINTING_BLOCK:
        keep = (struct recompute_keep){0};
        break;
    }
    return keep;
}

struct recompute_group recompute_group_of(const struct strategy *strategy, uint32_t n_layers,
                                          uint32_t layer)
{
    struct recompute_group group = {layer, layer + 1, false};
    if (strategy->checkpointing != CHECKPOINTING_BLOCK || !applies(strategy, layer)) {
        return group;
    }
    const uint32_t k = strategy->checkpoint_blocks;
    const uint32_t end = strategy->checkpointing_layers < n_layers ? strategy->checkpointing_layers
                                                                   : n_layers;
    group.first = layer / k * k;
    group.end = group.first + k < end ? group.first + k : end;
    group.checkpointed = true;
    return group;
}

bool recompute_is_away(const struct strategy *strategy, uint32_t n_layers, uint32_t layer)
{
    return strategy->offload_activations != OFFLOAD_NONE && applies(strategy, layer) &&
           layer < strategy->offload_activations_layers &&
           layer == recompute_group_of(strategy, n_layers, layer).first;
}

uint32_t recompute_away_slot(const struct strategy *strategy, uint32_t n_layers, uint32_t layer)
{
    uint32_t slot = 0;
    for (uint32_t below = 0; below < layer; below++) {
        slot += recompute_is_away(strategy, n_layers, below);
    }
    return slot;
}
