/* The strategy and the batch that a configuration asks for, DeepSpeed's words and ours
 * together. Main thread, at start. */
#ifndef BALLAST_WORKER_CONFIG_STRATEGY_H
#define BALLAST_WORKER_CONFIG_STRATEGY_H

#include "worker/config_table.h"

/* What the rules between keys work on. All borrowed for the call. */
struct config_resolver {
    struct config_draft *draft;
    struct config *config;
    const struct config_doc *doc;
    uint32_t world_size;
    bool plan;
};

/* Sets config->strategy, global_batch and world_size; config->spec and seq_len are there. CONFLICT
 * names both keys and all numbers; UNSUPPORTED what this version does not have. */
enum status config_resolve_strategy(const struct config_resolver *r,
                                    struct failure *why) MUST_CHECK;

#endif
