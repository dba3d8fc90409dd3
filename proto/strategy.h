/* The memory strategy of a run: what may change between two steps.
 *
 * One table describes every key: parsing, text form, JSON, protobuf, help and
 * validation come from it. Pure; any thread. design: "Strategy and switching". */
#ifndef BALLAST_PROTO_STRATEGY_H
#define BALLAST_PROTO_STRATEGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"

enum checkpointing {
    CHECKPOINTING_NONE,      /* keep every activation that backward reads */
    CHECKPOINTING_SELECTIVE, /* recompute norms and activation functions */
    CHECKPOINTING_SPLIT,     /* checkpoint attention and MLP separately */
    CHECKPOINTING_BLOCK,     /* checkpoint every K blocks */
};

enum offload { OFFLOAD_NONE, OFFLOAD_CPU, OFFLOAD_NVME };
enum grad_sync { GRAD_SYNC_LAST, GRAD_SYNC_EACH };
enum sequence_parallel_kind { SEQUENCE_AUTO, SEQUENCE_ULYSSES, SEQUENCE_RING };
enum state_type { STATE_FP32, STATE_BF16 };

struct strategy {
    enum checkpointing checkpointing;
    uint32_t checkpoint_blocks;     /* the K of block:K, >= 1; 1 for other modes */
    uint32_t checkpointing_layers;  /* blocks it applies to, counted from the first; 0..L */
    enum offload offload_optimizer;
    enum offload offload_params;
    enum offload offload_grads;
    enum offload offload_activations;
    double offload_optimizer_fraction;    /* 0..1 */
    uint32_t offload_activations_layers;  /* 0..L */
    uint32_t zero_stage;                  /* 0..3 */
    uint32_t micro_batch;                 /* sequences per sequence-parallel group and micro-step */
    enum grad_sync grad_sync;
    uint32_t sequence_parallel;
    enum sequence_parallel_kind sequence_parallel_kind;
    uint32_t loss_tile;  /* tokens, 0 = whole */
    uint32_t mlp_tile;   /* tokens, 0 = whole */
    enum state_type optimizer_state;
};

/* The run's facts that the rules compare a strategy with. */
struct strategy_limits {
    uint32_t n_layers;
    uint32_t world_size;
    uint32_t global_batch; /* sequences per optimizer step */
    uint32_t seq_len;
    uint32_t n_heads, n_kv_heads;
};

enum { STRATEGY_TEXT_BYTES = 640, STRATEGY_VALUE_BYTES = 32 };

/* One row of the table, for help, completion and documentation. */
struct strategy_key {
    const char *name;   /* "checkpointing.layers" */
    const char *values; /* "0..L" */
    const char *help;
};
size_t strategy_n_keys(void);
const struct strategy_key *strategy_key(size_t index);
bool strategy_has_key(const char *name);

/* Defaults: no checkpointing (layers = n_layers), no offload, stage 0, micro_batch 1. */
void strategy_default(struct strategy *strategy, const struct strategy_limits *limits);

/* Set one key from text. Unknown key, unparsable or out-of-domain value: a failure that
 * names key, value and what is allowed; `strategy` is unchanged then. */
enum status strategy_set(struct strategy *strategy, const char *key, const char *value,
                         struct failure *why) MUST_CHECK;
/* The text of one key's value ("block:2"). False if the key is unknown. */
bool strategy_get(const struct strategy *strategy, const char *key,
                  char out_value[static STRATEGY_VALUE_BYTES]);

/* Cross-key rules against the run's facts: layers <= L, accumulation integral, divisors,
 * keys whose mode this version does not have. The failure names both numbers. */
enum status strategy_check(const struct strategy *strategy, const struct strategy_limits *limits,
                           struct failure *why) MUST_CHECK;

/* Micro-steps per optimizer step: global_batch / (micro_batch * N / SP); 0 if not integral. */
uint32_t strategy_accumulation(const struct strategy *strategy,
                               const struct strategy_limits *limits);

bool strategy_equal(const struct strategy *a, const struct strategy *b);
/* "checkpointing=block:1 micro_batch=4": the keys of b that differ from a, all when a is NULL.
 * Returns `text`. */
const char *strategy_format(const struct strategy *a, const struct strategy *b,
                            char text[static STRATEGY_TEXT_BYTES]);

#endif
