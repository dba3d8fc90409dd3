/* Owns: merging what several keys say about the strategy, and DeepSpeed's batch arithmetic. Not:
 * the strategy's own rules (proto/strategy). Pure; main thread, at start.
 *
 * Every key that speaks about the strategy makes a claim. Claims of one origin must agree, and a
 * later origin (--set) beats an earlier one (the file). */
#include "worker/config_strategy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- claims ---- */

static void claim_also(struct config_draft *draft, const struct config_doc *doc, const char *key,
                       const char *path, const char *value)
{
    if (!config_is_seen(draft, path) || draft->n_claims == CONFIG_MAX_CLAIMS) {
        return;
    }
    struct config_claim *claim = &draft->claims[draft->n_claims++];
    *claim = (struct config_claim){.key = key, .origin = config_doc_origin(doc, path)};
    snprintf(claim->value, sizeof(claim->value), "%s", value);
    snprintf(claim->path, sizeof(claim->path), "%s", path);
}

/* Keys that say something about the strategy in words of their own. */
static void translate_claims(const struct config_resolver *r)
{
    struct config_draft *draft = r->draft;
    const uint32_t n_layers = r->config->spec.n_layers, n = draft->number_checkpoints;
    char block[STRATEGY_VALUE_BYTES];

    snprintf(block, sizeof(block), "block:%u", n && n < n_layers ? (n_layers - 1) / n + 1 : 1);
    claim_also(draft, r->doc, "checkpointing", "activation_checkpointing.number_checkpoints",
               block);
    claim_also(draft, r->doc, "offload.activations", "activation_checkpointing.cpu_checkpointing",
               draft->cpu_checkpointing ? "cpu" : "none");
    claim_also(draft, r->doc, "offload.optimizer", "zero_optimization.cpu_offload",
               draft->cpu_offload ? "cpu" : "none");
    claim_also(draft, r->doc, "offload.params", "zero_optimization.cpu_offload_param",
               draft->cpu_offload_param ? "cpu" : "none");
}

/* The claim that decides a key: the one of the latest origin (--set over the file); claims of
 * the same origin must agree. NULL when nobody claims it. */
static enum status winning_claim(const struct config_resolver *r, const char *key,
                                 const struct config_claim **out_claim, struct failure *why)
{
    const struct config_claim *winner = NULL;

    for (size_t i = 0; i < r->draft->n_claims; i++) {
        const struct config_claim *claim = &r->draft->claims[i];
        if (strcmp(claim->key, key) == 0 && (!winner || claim->origin > winner->origin)) {
            winner = claim;
        }
    }
    for (size_t i = 0; winner && i < r->draft->n_claims; i++) {
        const struct config_claim *claim = &r->draft->claims[i];
        if (strcmp(claim->key, key) == 0 && claim->origin == winner->origin &&
            strcmp(claim->value, winner->value) != 0) {
            char a[CONFIG_WHERE_BYTES], b[CONFIG_WHERE_BYTES];
            return fail(why, STATUS_CONFLICT, "%s says %s=%s, but %s says %s=%s: keep one of them",
                        config_doc_where(r->doc, winner->path, a), key, winner->value,
                        config_doc_where(r->doc, claim->path, b), key, claim->value);
        }
    }
    *out_claim = winner;
    return STATUS_OK;
}

static enum status merge_claims(const struct config_resolver *r, struct failure *why)
{
    for (size_t i = 0; i < strategy_n_keys(); i++) {
        const char *key = strategy_key(i)->name;
        const struct config_claim *claim;
        enum status status = winning_claim(r, key, &claim, why);
        if (!status && claim) {
            status = strategy_set(&r->config->strategy, key, claim->value, why);
        }
        if (status) {
            return status;
        }
    }
    return STATUS_OK;
}

/* A rule of the strategy was broken: say which line is to blame where one key alone is. */
static enum status blame(const struct config_resolver *r, struct failure *why)
{
    const struct config_claim *found = NULL;
    char where[CONFIG_WHERE_BYTES];

    for (size_t i = 0; i < r->draft->n_claims; i++) {
        const struct config_claim *claim = &r->draft->claims[i];
        const size_t n = strlen(claim->key);
        if (strncmp(why->text, claim->key, n) == 0 && why->text[n] == '=' &&
            (!found || claim->origin > found->origin)) {
            found = claim;
        }
    }
    if (found) {
        return fail_within(why, "%s", config_doc_where(r->doc, found->path, where));
    }
    return r->doc->name[0] ? fail_within(why, "%s", r->doc->name) : why->status;
}

/* ---- batch ---- */

/* One of the three batch sizes. 0: not given. */
struct batch_part {
    uint64_t value;
    enum config_origin origin;
    char path[CONFIG_KEY_BYTES];
};

struct batch {
    struct batch_part total, micro, accumulation;
    uint64_t data_parallel;
};

static void batch_parts(const struct config_resolver *r, const struct config_claim *micro,
                        struct batch *b)
{
    b->total.value = r->draft->train_batch;
    b->accumulation.value = r->draft->accumulation;
    snprintf(b->total.path, sizeof(b->total.path), "train_batch_size");
    snprintf(b->accumulation.path, sizeof(b->accumulation.path), "gradient_accumulation_steps");
    snprintf(b->micro.path, sizeof(b->micro.path), "%s",
             micro ? micro->path : "train_micro_batch_size_per_gpu");
    b->micro.value = micro ? r->config->strategy.micro_batch : 0;
    b->total.origin = config_doc_origin(r->doc, b->total.path);
    b->accumulation.origin = config_doc_origin(r->doc, b->accumulation.path);
    b->micro.origin = config_doc_origin(r->doc, b->micro.path);
}

/* All three are given and do not fit together. When --set gave some of them, the part that the
 * file gave yields: accumulation first, so that the global batch is held. */
static bool drop_older(struct batch *b)
{
    struct batch_part *order[] = {&b->accumulation, &b->micro, &b->total};
    enum config_origin newest = ORIGIN_FILE;

    for (size_t i = 0; i < 3; i++) {
        newest = order[i]->origin > newest ? order[i]->origin : newest;
    }
    for (size_t i = 0; i < 3; i++) {
        if (order[i]->origin < newest) {
            order[i]->value = 0;
            return true;
        }
    }
    return false;
}

static enum status batch_conflict(const struct config_resolver *r, const struct batch *b,
                                  struct failure *why)
{
    char where[CONFIG_WHERE_BYTES];
    char micro[CONFIG_KEY_BYTES + 32] = "", accumulation[CONFIG_KEY_BYTES + 32] = "";
    double product = (double)b->data_parallel;

    if (b->micro.value) {
        snprintf(micro, sizeof(micro), "%s %" PRIu64 " x ", b->micro.path, b->micro.value);
        product *= (double)b->micro.value;
    }
    if (b->accumulation.value) {
        snprintf(accumulation, sizeof(accumulation), "%s %" PRIu64 " x ", b->accumulation.path,
                 b->accumulation.value);
        product *= (double)b->accumulation.value;
    }
    return fail(why, STATUS_CONFLICT,
                "%s is %" PRIu64 ", which is not %s%s%sdata-parallel size %" PRIu64
                " (%u ranks / sequence_parallel %u) = %.0f",
                config_doc_where(r->doc, b->total.path, where), b->total.value,
                b->micro.value && b->accumulation.value ? "" : "a multiple of ", micro,
                accumulation, b->data_parallel, r->world_size,
                r->config->strategy.sequence_parallel, product);
}

/* DeepSpeed's arithmetic: total = micro x accumulation x data-parallel size. Any two give the
 * third, and what is given once means accumulation 1. */
static enum status solve_batch(const struct config_resolver *r, struct batch *b,
                               struct failure *why)
{
    char where[CONFIG_WHERE_BYTES];
    const uint64_t dp = b->data_parallel;

    /* Each is below 2^32 and dp is at most 2^20, so the product is checked by division. */
    if (b->total.value && b->micro.value && b->accumulation.value &&
        (b->total.value / b->micro.value / b->accumulation.value != dp ||
         b->total.value != b->micro.value * b->accumulation.value * dp) &&
        !drop_older(b)) {
        return batch_conflict(r, b, why);
    }
    if (b->total.value) {
        const bool by_micro = b->micro.value != 0;
        const uint64_t known = by_micro                ? b->micro.value
                               : b->accumulation.value ? b->accumulation.value
                                                       : 1;
        if (b->total.value % (known * dp) != 0) {
            return batch_conflict(r, b, why);
        }
        (by_micro ? &b->accumulation : &b->micro)->value = b->total.value / (known * dp);
        return STATUS_OK;
    }
    b->micro.value = b->micro.value ? b->micro.value : 1;
    b->accumulation.value = b->accumulation.value ? b->accumulation.value : 1;
    if (b->micro.value > UINT32_MAX / b->accumulation.value ||
        b->micro.value * b->accumulation.value > UINT32_MAX / dp) {
        return fail(why, STATUS_OUT_OF_RANGE,
                    "%s is %" PRIu64 ", and with gradient_accumulation_steps %" PRIu64
                    " and data-parallel size %" PRIu64 " the global batch exceeds %u sequences",
                    config_doc_where(r->doc, b->micro.path, where), b->micro.value,
                    b->accumulation.value, dp, UINT32_MAX);
    }
    b->total.value = b->micro.value * b->accumulation.value * dp;
    return STATUS_OK;
}

static enum status resolve_batch(const struct config_resolver *r, struct failure *why)
{
    struct config *config = r->config;
    struct batch b = {.data_parallel = 1};
    const struct config_claim *micro, *degree;
    char where[CONFIG_WHERE_BYTES];
    enum status status = winning_claim(r, "micro_batch", &micro, why);

    if (!status) {
        status = winning_claim(r, "sequence_parallel", &degree, why);
    }
    if (status) {
        return status;
    }
    const uint32_t sp = config->strategy.sequence_parallel;
    if (r->world_size % sp != 0) {
        return fail(
            why, STATUS_CONFLICT, "%s is %u, which does not divide the %u ranks",
            config_doc_where(r->doc, degree ? degree->path : "sequence_parallel_size", where), sp,
            r->world_size);
    }
    b.data_parallel = r->world_size / sp;
    batch_parts(r, micro, &b);
    status = solve_batch(r, &b, why);
    if (status) {
        return status;
    }
    config->global_batch = (uint32_t)b.total.value;
    config->strategy.micro_batch = (uint32_t)b.micro.value;
    return STATUS_OK;
}

enum status config_resolve_strategy(const struct config_resolver *r, struct failure *why)
{
    struct config *config = r->config;
    struct strategy_limits limits;

    config->world_size = r->world_size;
    config_limits(config, &limits);
    strategy_default(&config->strategy, &limits);
    translate_claims(r);
    enum status status = merge_claims(r, why);
    if (!status) {
        status = resolve_batch(r, why);
    }
    if (status) {
        return status;
    }
    config_limits(config, &limits); /* now with the global batch */
    if (strategy_check(&config->strategy, &limits, why)) {
        return blame(r, why);
    }
    return STATUS_OK;
}
