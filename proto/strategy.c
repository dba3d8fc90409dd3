/* The table of strategy keys, and all that follows from it: text form, help, rules.
 *
 * Owns which keys there are, what each may hold, and which of them this version can carry out.
 * Pure: no allocation, no clock; any thread. */
#include "proto/strategy.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/units.h"

enum kind {
    KIND_CHECKPOINTING, /* a name, or block:K with its second field */
    KIND_NAME,          /* an enum, by its names in order */
    KIND_COUNT,         /* uint32_t within [low, high] */
    KIND_FRACTION       /* double within [0, 1] */
};

struct row {
    struct strategy_key key;
    enum kind kind;
    size_t offset;
    uint32_t low, high;       /* counts; for names, high is how many there are */
    const char *const *names; /* names */
};

static const char *const checkpointing_names[] = {"none", "selective", "split", "block"};
static const char *const offload_names[] = {"none", "cpu", "nvme"};
static const char *const grad_sync_names[] = {"last", "each"};
static const char *const sequence_names[] = {"auto", "ulysses", "ring"};
static const char *const state_names[] = {"fp32", "bf16"};

_Static_assert(sizeof(enum checkpointing) == sizeof(unsigned) &&
                   sizeof(enum offload) == sizeof(unsigned) &&
                   sizeof(enum grad_sync) == sizeof(unsigned) &&
                   sizeof(enum sequence_parallel_kind) == sizeof(unsigned) &&
                   sizeof(enum state_type) == sizeof(unsigned),
               "named fields are read and written as unsigned");

#define NAMES(key, values, help, field, names, n)                                                  \
    {                                                                                              \
        {key, values, help}, KIND_NAME, offsetof(struct strategy, field), 0, n, names              \
    }
#define COUNT(key, values, help, field, low, high)                                                 \
    {                                                                                              \
        {key, values, help}, KIND_COUNT, offsetof(struct strategy, field), low, high, NULL         \
    }
#define FRACTION(key, values, help, field)                                                         \
    {                                                                                              \
        {key, values, help}, KIND_FRACTION, offsetof(struct strategy, field), 0, 0, NULL           \
    }

static const struct row rows[] = {
    {{"checkpointing", "none|selective|split|block:K",
      "keep every activation; recompute norms and activation functions; checkpoint attention and "
      "MLP separately; checkpoint every K blocks"},
     KIND_CHECKPOINTING,
     offsetof(struct strategy, checkpointing),
     0,
     4,
     checkpointing_names},
    COUNT("checkpointing.layers", "0..L", "blocks it applies to, counted from the first",
          checkpointing_layers, 0, UINT32_MAX),
    NAMES("offload.optimizer", "none|cpu|nvme", "where the optimizer's states live",
          offload_optimizer, offload_names, 3),
    NAMES("offload.params", "none|cpu|nvme", "where parameters live between uses", offload_params,
          offload_names, 3),
    NAMES("offload.grads", "none|cpu", "where accumulated gradients live", offload_grads,
          offload_names, 2),
    NAMES("offload.activations", "none|cpu", "where checkpointed block inputs live",
          offload_activations, offload_names, 2),
    FRACTION("offload.optimizer.fraction", "0..1", "share of the optimizer's states to offload",
             offload_optimizer_fraction),
    COUNT("offload.activations.layers", "0..L", "blocks whose inputs are offloaded",
          offload_activations_layers, 0, UINT32_MAX),
    COUNT("zero.stage", "0..3", "what is sliced over ranks: 1 optimizer, 2 gradients, 3 parameters",
          zero_stage, 0, 3),
    COUNT("micro_batch", "1..", "sequences per sequence-parallel group and micro-step", micro_batch,
          1, UINT32_MAX),
    NAMES("grad_sync", "last|each", "reduce gradients after the last micro-step or after each",
          grad_sync, grad_sync_names, 2),
    COUNT("sequence_parallel", "1..N", "ranks that share one sequence, a divisor of N",
          sequence_parallel, 1, UINT32_MAX),
    NAMES("sequence_parallel.kind", "auto|ulysses|ring", "how attention exchanges among them",
          sequence_parallel_kind, sequence_names, 3),
    COUNT("loss_tile", "tokens, 0 = whole", "tile the logits and the cross-entropy", loss_tile, 0,
          UINT32_MAX),
    COUNT("mlp_tile", "tokens, 0 = whole", "tile the MLP", mlp_tile, 0, UINT32_MAX),
    NAMES("optimizer.state", "fp32|bf16", "type of the moments; bf16 rounds stochastically (lossy)",
          optimizer_state, state_names, 2),
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

/* What this version does not have yet: these keys stay at the one value it can carry out.
 * A version that brings a mode deletes its row. */
static const struct {
    const char *key, *only, *reason;
} not_yet[] = {
    {"offload.optimizer", "none|cpu", "there is no NVMe tier"},
    {"offload.params", "none|cpu", "there is no NVMe tier"},
    {"offload.grads", "none", "gradients stay on the device"},
    {"sequence_parallel", "1", "every rank holds whole sequences"},
    {"mlp_tile", "0", "the MLP runs whole"},
    {"optimizer.state", "fp32", "moments are kept in fp32"},
};

size_t strategy_n_keys(void)
{
    return N_ROWS;
}

const struct strategy_key *strategy_key(size_t index)
{
    assert(index < N_ROWS);
    return &rows[index].key;
}

static const struct row *find_row(const char *name)
{
    for (size_t i = 0; i < N_ROWS; i++) {
        if (strcmp(rows[i].key.name, name) == 0) {
            return &rows[i];
        }
    }
    return NULL;
}

bool strategy_has_key(const char *name)
{
    return find_row(name) != NULL;
}

void strategy_default(struct strategy *strategy, const struct strategy_limits *limits)
{
    *strategy = (struct strategy){
        .checkpointing = CHECKPOINTING_NONE,
        .checkpoint_blocks = 1,
        .checkpointing_layers = limits->n_layers,
        .offload_optimizer_fraction = 1.0,
        .offload_activations_layers = limits->n_layers,
        .micro_batch = 1,
        .grad_sync = GRAD_SYNC_LAST,
        .sequence_parallel = 1,
        .sequence_parallel_kind = SEQUENCE_AUTO,
        .optimizer_state = STATE_FP32,
    };
}

static unsigned get_unsigned(const struct strategy *strategy, const struct row *row)
{
    unsigned value;
    memcpy(&value, (const char *)strategy + row->offset, sizeof value);
    return value;
}

static double get_double(const struct strategy *strategy, const struct row *row)
{
    double value;
    memcpy(&value, (const char *)strategy + row->offset, sizeof value);
    return value;
}

static enum status refuse(const struct row *row, enum status status, const char *value,
                          struct failure *why)
{
    return fail(why, status, "%s=%.64s: must be %s", row->key.name, value, row->key.values);
}

static enum status set_name(struct strategy *strategy, const struct row *row, const char *value,
                            struct failure *why)
{
    for (unsigned i = 0; i < row->high; i++) {
        if (strcmp(row->names[i], value) == 0) {
            memcpy((char *)strategy + row->offset, &i, sizeof i);
            return STATUS_OK;
        }
    }
    return refuse(row, STATUS_INVALID, value, why);
}

static enum status set_checkpointing(struct strategy *strategy, const struct row *row,
                                     const char *value, struct failure *why)
{
    static const char prefix[] = "block:";
    if (strncmp(value, prefix, sizeof prefix - 1) != 0) {
        enum status status = set_name(strategy, row, value, why);
        if (status == STATUS_OK) {
            strategy->checkpoint_blocks = 1;
        }
        return status;
    }
    int64_t blocks;
    enum status status = units_parse_int(value + sizeof prefix - 1, 1, UINT32_MAX, &blocks);
    if (status != STATUS_OK) {
        return fail(why, status, "%s=%.64s: the K of block:K must be a whole number from 1",
                    row->key.name, value);
    }
    strategy->checkpointing = CHECKPOINTING_BLOCK;
    strategy->checkpoint_blocks = (uint32_t)blocks;
    return STATUS_OK;
}

static enum status set_count(struct strategy *strategy, const struct row *row, const char *value,
                             struct failure *why)
{
    int64_t count;
    enum status status = units_parse_int(value, row->low, row->high, &count);
    if (status != STATUS_OK) {
        return row->high == UINT32_MAX
                   ? fail(why, status, "%s=%.64s: must be a whole number from %u to %u (%s)",
                          row->key.name, value, row->low, row->high, row->key.values)
                   : refuse(row, status, value, why);
    }
    uint32_t number = (uint32_t)count;
    memcpy((char *)strategy + row->offset, &number, sizeof number);
    return STATUS_OK;
}

static enum status set_fraction(struct strategy *strategy, const struct row *row, const char *value,
                                struct failure *why)
{
    double fraction;
    enum status status = units_parse_double(value, &fraction);
    if (status == STATUS_OK && !(fraction >= 0 && fraction <= 1)) {
        status = STATUS_OUT_OF_RANGE;
    }
    if (status != STATUS_OK) {
        return refuse(row, status, value, why);
    }
    fraction += 0.0; /* no negative zero */
    memcpy((char *)strategy + row->offset, &fraction, sizeof fraction);
    return STATUS_OK;
}

enum status strategy_set(struct strategy *strategy, const char *key, const char *value,
                         struct failure *why)
{
    const struct row *row = find_row(key);
    if (row == NULL) {
        char known[STRATEGY_TEXT_BYTES];
        size_t used = 0;
        for (size_t i = 0; i < N_ROWS; i++) {
            used += (size_t)snprintf(known + used, sizeof known - used, " %s", rows[i].key.name);
        }
        return fail(why, STATUS_UNKNOWN_KEY, "unknown strategy key '%.64s': must be one of%s", key,
                    known);
    }
    switch (row->kind) {
    case KIND_CHECKPOINTING:
        return set_checkpointing(strategy, row, value, why);
    case KIND_NAME:
        return set_name(strategy, row, value, why);
    case KIND_COUNT:
        return set_count(strategy, row, value, why);
    case KIND_FRACTION:
        break;
    }
    return set_fraction(strategy, row, value, why);
}

static void get_row(const struct strategy *strategy, const struct row *row,
                    char out_value[static STRATEGY_VALUE_BYTES])
{
    char number[UNITS_TEXT_BYTES];
    unsigned value = row->kind == KIND_FRACTION ? 0 : get_unsigned(strategy, row);
    switch (row->kind) {
    case KIND_CHECKPOINTING:
    case KIND_NAME:
        assert(value < row->high);
        if (row->kind == KIND_CHECKPOINTING && value == CHECKPOINTING_BLOCK) {
            snprintf(out_value, STRATEGY_VALUE_BYTES, "block:%u", strategy->checkpoint_blocks);
        } else {
            snprintf(out_value, STRATEGY_VALUE_BYTES, "%s", row->names[value]);
        }
        break;
    case KIND_COUNT:
        snprintf(out_value, STRATEGY_VALUE_BYTES, "%u", value);
        break;
    case KIND_FRACTION:
        units_format_double(get_double(strategy, row), number);
        snprintf(out_value, STRATEGY_VALUE_BYTES, "%.31s", number);
        break;
    }
}

bool strategy_get(const struct strategy *strategy, const char *key,
                  char out_value[static STRATEGY_VALUE_BYTES])
{
    const struct row *row = find_row(key);
    if (row == NULL) {
        return false;
    }
    get_row(strategy, row, out_value);
    return true;
}

static enum status check_layers(const struct strategy *strategy,
                                const struct strategy_limits *limits, struct failure *why)
{
    if (strategy->checkpoint_blocks < 1 || (strategy->checkpointing == CHECKPOINTING_BLOCK &&
                                            strategy->checkpoint_blocks > limits->n_layers)) {
        return fail(why, STATUS_OUT_OF_RANGE,
                    "checkpointing=block:%u: K must be from 1 to %u, the model's layers",
                    strategy->checkpoint_blocks, limits->n_layers);
    }
    if (strategy->checkpointing_layers > limits->n_layers) {
        return fail(why, STATUS_OUT_OF_RANGE,
                    "checkpointing.layers=%u: must be from 0 to %u, the model's layers",
                    strategy->checkpointing_layers, limits->n_layers);
    }
    if (strategy->offload_activations_layers > limits->n_layers) {
        return fail(why, STATUS_OUT_OF_RANGE,
                    "offload.activations.layers=%u: must be from 0 to %u, the model's layers",
                    strategy->offload_activations_layers, limits->n_layers);
    }
    if (strategy->offload_activations != OFFLOAD_NONE &&
        strategy->checkpointing == CHECKPOINTING_NONE) {
        return fail(
            why, STATUS_CONFLICT,
            "offload.activations=%s moves checkpointed block inputs, but checkpointing=none "
            "keeps none: set checkpointing=block:1 too",
            offload_names[strategy->offload_activations]);
    }
    return STATUS_OK;
}

static enum status check_sequence(const struct strategy *strategy,
                                  const struct strategy_limits *limits, struct failure *why)
{
    uint32_t degree = strategy->sequence_parallel;
    if (degree < 1 || limits->world_size % degree != 0) {
        return fail(why, STATUS_CONFLICT, "sequence_parallel=%u: must divide the %u ranks", degree,
                    limits->world_size);
    }
    if (strategy->sequence_parallel_kind != SEQUENCE_ULYSSES || degree == 1) {
        return STATUS_OK;
    }
    if (limits->n_heads % degree != 0) {
        return fail(why, STATUS_CONFLICT,
                    "sequence_parallel=%u with sequence_parallel.kind=ulysses: must divide the %u "
                    "attention heads; take another degree or kind=ring",
                    degree, limits->n_heads);
    }
    uint32_t n_kv = limits->n_kv_heads;
    if (n_kv == 0 || (n_kv >= degree ? n_kv % degree : degree % n_kv) != 0) {
        return fail(why, STATUS_CONFLICT,
                    "sequence_parallel=%u with sequence_parallel.kind=ulysses: must divide or be a "
                    "multiple of the %u key/value heads; take another degree or kind=ring",
                    degree, n_kv);
    }
    return STATUS_OK;
}

/* Sequences that all ranks together take through one micro-step; 0 when no number of them. */
static uint64_t micro_step_sequences(const struct strategy *strategy,
                                     const struct strategy_limits *limits)
{
    uint32_t degree = strategy->sequence_parallel;
    return degree == 0 || limits->world_size % degree != 0
               ? 0
               : (uint64_t)strategy->micro_batch * (limits->world_size / degree);
}

static enum status check_batch(const struct strategy *strategy,
                               const struct strategy_limits *limits, struct failure *why)
{
    if (strategy_accumulation(strategy, limits) != 0) {
        return STATUS_OK;
    }
    return fail(why, STATUS_CONFLICT,
                "micro_batch=%u: the global batch of %u sequences is not a whole multiple of the "
                "%llu sequences of one micro-step (micro_batch %u on %u data-parallel ranks)",
                strategy->micro_batch, limits->global_batch,
                (unsigned long long)micro_step_sequences(strategy, limits), strategy->micro_batch,
                limits->world_size / strategy->sequence_parallel);
}

/* Is `value` one of "a|b|c"? */
static bool is_one_of(const char *value, const char *choices)
{
    const size_t n = strlen(value);
    for (const char *at = choices; at != NULL; at = strchr(at, '|')) {
        at += *at == '|';
        if (strncmp(at, value, n) == 0 && (at[n] == '|' || at[n] == '\0')) {
            return true;
        }
    }
    return false;
}

static enum status check_not_yet(const struct strategy *strategy, struct failure *why)
{
    for (size_t i = 0; i < sizeof not_yet / sizeof not_yet[0]; i++) {
        char value[STRATEGY_VALUE_BYTES];
        bool known = strategy_get(strategy, not_yet[i].key, value);
        assert(known);
        if (known && !is_one_of(value, not_yet[i].only)) {
            return fail(why, STATUS_UNSUPPORTED,
                        "%s=%s is not in this version: %s; only %s=%s can be asked for",
                        not_yet[i].key, value, not_yet[i].reason, not_yet[i].key, not_yet[i].only);
        }
    }
    return STATUS_OK;
}

enum status strategy_check(const struct strategy *strategy, const struct strategy_limits *limits,
                           struct failure *why)
{
    enum status status = check_layers(strategy, limits, why);
    if (status == STATUS_OK) {
        status = check_sequence(strategy, limits, why);
    }
    if (status == STATUS_OK) {
        status = check_batch(strategy, limits, why);
    }
    if (status == STATUS_OK) {
        status = check_not_yet(strategy, why);
    }
    return status;
}

uint32_t strategy_accumulation(const struct strategy *strategy,
                               const struct strategy_limits *limits)
{
    uint64_t sequences = micro_step_sequences(strategy, limits);
    return sequences == 0 || limits->global_batch % sequences != 0
               ? 0
               : (uint32_t)(limits->global_batch / sequences);
}

bool strategy_equal(const struct strategy *a, const struct strategy *b)
{
    char text[STRATEGY_TEXT_BYTES];
    return *strategy_format(a, b, text) == '\0';
}

const char *strategy_format(const struct strategy *a, const struct strategy *b,
                            char text[static STRATEGY_TEXT_BYTES])
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < N_ROWS; i++) {
        char old[STRATEGY_VALUE_BYTES] = "", new[STRATEGY_VALUE_BYTES];
        get_row(b, &rows[i], new);
        if (a != NULL) {
            get_row(a, &rows[i], old);
        }
        if (strcmp(old, new) != 0) {
            used += (size_t)snprintf(text + used, STRATEGY_TEXT_BYTES - used, "%s%s=%s",
                                     used == 0 ? "" : " ", rows[i].key.name, new);
            assert(used < STRATEGY_TEXT_BYTES);
        }
    }
    return text;
}
