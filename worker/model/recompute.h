/* Activation checkpointing as a rule: what a block keeps for its backward pass, and which
 * blocks are recomputed together. Pure; any thread. */
#ifndef BALLAST_WORKER_MODEL_RECOMPUTE_H
#define BALLAST_WORKER_MODEL_RECOMPUTE_H

#include <stdbool.h>
#include <stdint.h>
#include "proto/strategy.h"

/* Activations of one block; true = kept from forward to backward. A norm's statistics
 * go with its output, the attention's log-sum-exp with its output. */
struct recompute_keep {
    bool norm1, qkv, attention, residual, norm2, up, act;
};

/* Blocks [first, end) that share one checkpoint: only the input of `first` is kept. Without
 * block checkpointing every block is its own group. */
struct recompute_group {
    uint32_t first, end;
    bool checkpointed; /* backward starts by recomputing the group from its input */
};

struct recompute_keep recompute_keep_of(const struct strategy *strategy, uint32_t layer);
struct recompute_group recompute_group_of(const struct strategy *strategy, uint32_t n_layers,
                                          uint32_t layer);
extern const struct recompute_keep recompute_keep_all;

/* Does the input of this block wait for backward on the host (offload.activations)? */
bool recompute_is_away(const struct strategy *strategy, uint32_t n_layers, uint32_t layer);
/* Its place among those that do, 0.. ; for layer n_layers: how many there are. */
uint32_t recompute_away_slot(const struct strategy *strategy, uint32_t n_layers, uint32_t layer);

#endif
