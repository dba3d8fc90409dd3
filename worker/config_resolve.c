/* Owns: rules between keys. Not: single values (config_read). Main thread, at start; looks at the
 * file system for the model, the data and nothing else. */
#include "worker/config_resolve.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "worker/config_strategy.h"

/* ---- model ---- */

/* The folder of the file, without its last slash; "" when it lies in the working directory. */
static void folder_of(const char *file, char *folder, size_t room)
{
    const char *slash = strrchr(file, '/');
    const size_t n = !slash ? 0 : slash == file ? 1 : (size_t)(slash - file);
    const size_t n_kept = n < room ? n : room - 1;

    memcpy(folder, file, n_kept);
    folder[n_kept] = '\0';
}

/* Make `path`, which `key` names, relative to where it was written. */
static enum status locate(const struct config_resolver *r, const char *key, char *path,
                          struct failure *why)
{
    char folder[CONFIG_PATH_BYTES], joined[2 * CONFIG_PATH_BYTES], where[CONFIG_WHERE_BYTES];

    folder_of(r->config->source, folder, sizeof(folder));
    if (path[0] == '/' || !folder[0] || config_doc_origin(r->doc, key) != ORIGIN_FILE) {
        return STATUS_OK;
    }
    const int n = snprintf(joined, sizeof(joined), "%s/%s", folder, path);
    if (n >= CONFIG_PATH_BYTES) {
        return fail(why, STATUS_TOO_LARGE, "%s: the path is %d bytes long; at most %d are allowed",
                    config_doc_where(r->doc, key, where), n, CONFIG_PATH_BYTES - 1);
    }
    memcpy(path, joined, (size_t)n + 1);
    return STATUS_OK;
}

static bool is_preset(const char *name)
{
    for (const char *const *preset = spec_preset_names(); *preset; preset++) {
        if (strcmp(*preset, name) == 0) {
            return true;
        }
    }
    return false;
}

static enum status missing(const struct config_resolver *r, const char *key, const char *flag,
                           const char *what, struct failure *why)
{
    return fail(why, STATUS_INVALID, "%s%s%s is not set: give %s in the file or with %s",
                r->doc->name, r->doc->name[0] ? ": " : "", key, what, flag);
}

static enum status resolve_model(const struct config_resolver *r, struct failure *why)
{
    struct config *config = r->config;
    char where[CONFIG_WHERE_BYTES];

    if (!config->model[0]) {
        return missing(r, "ballast.model", "--model",
                       "a preset such as gpt2-124m or a folder with config.json", why);
    }
    if (!is_preset(config->model)) {
        const enum status status = locate(r, "ballast.model", config->model, why);
        if (status) {
            return status;
        }
    }
    if (spec_load(config->model, &config->spec, why)) {
        return fail_within(why, "%s", config_doc_where(r->doc, "ballast.model", where));
    }
    if (config_is_seen(r->draft, "ballast.dropout")) {
        const float p = (float)r->draft->dropout;
        config->spec.dropout_embed = p;
        config->spec.dropout_attention = p;
        config->spec.dropout_residual = p;
    }
    return STATUS_OK;
}

static enum status resolve_lengths(const struct config_resolver *r, struct failure *why)
{
    struct config *config = r->config;
    char where[CONFIG_WHERE_BYTES];
    const uint32_t longest = config->spec.max_positions;

    if (!config_is_seen(r->draft, "ballast.seq_len")) {
        config->seq_len = longest < 1024 ? longest : 1024;
    }
    if (config->seq_len > longest) {
        return fail(why, STATUS_OUT_OF_RANGE,
                    "%s: %u tokens, but the model %s takes sequences of at most %u",
                    config_doc_where(r->doc, "ballast.seq_len", where), config->seq_len,
                    config->spec.name, longest);
    }
    if (config->data_format == DATA_BYTES && config->spec.vocab < 256) {
        return fail(why, STATUS_CONFLICT,
                    "%s: bytes are 256 different tokens, but the model %s has a vocabulary of %u",
                    config_doc_where(r->doc, "ballast.data_format", where), config->spec.name,
                    config->spec.vocab);
    }
    return STATUS_OK;
}

/* ---- schedule ---- */

static enum status check_scheduler_keys(const struct config_resolver *r, struct failure *why)
{
    static const struct {
        const char *path;
        bool warmup, decay, cosine; /* the types that know it */
    } keys[] = {
        {"scheduler.params.warmup_num_steps", true, true, true},
        {"scheduler.params.total_num_steps", false, true, true},
        {"scheduler.params.warmup_min_lr", true, true, false},
        {"scheduler.params.warmup_max_lr", true, true, false},
        {"scheduler.params.warmup_min_ratio", false, false, true},
        {"scheduler.params.cos_min_ratio", false, false, true},
        {"scheduler.params.warmup_type", true, true, true},
    };
    const bool typed = config_is_seen(r->draft, "scheduler.type");
    const int type = r->draft->scheduler;
    char where[CONFIG_WHERE_BYTES];

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (!config_is_seen(r->draft, keys[i].path)) {
            continue;
        }
        if (!typed) {
            return fail(why, STATUS_INVALID, "%s: it needs scheduler.type beside it",
                        config_doc_where(r->doc, keys[i].path, where));
        }
        const bool known = type == SCHEDULER_WARMUP         ? keys[i].warmup
                           : type == SCHEDULER_WARMUP_DECAY ? keys[i].decay
                                                            : keys[i].cosine;
        if (!known) {
            return fail(why, STATUS_CONFLICT, "%s: not a parameter of scheduler.type %s",
                        config_doc_where(r->doc, keys[i].path, where),
                        type == SCHEDULER_WARMUP         ? "WarmupLR"
                        : type == SCHEDULER_WARMUP_DECAY ? "WarmupDecayLR"
                                                         : "WarmupCosineLR");
        }
    }
    return STATUS_OK;
}

/* The peak learning rate stands in the optimizer's section, in the scheduler's, or in both. */
static enum status resolve_lr(const struct config_resolver *r, struct failure *why)
{
    static const char optimizer[] = "optimizer.params.lr";
    static const char scheduler[] = "scheduler.params.warmup_max_lr";
    char a[CONFIG_WHERE_BYTES], b[CONFIG_WHERE_BYTES];
    const double peak = r->draft->warmup_max_lr;

    if (!config_is_seen(r->draft, scheduler)) {
        return STATUS_OK;
    }
    if (config_is_seen(r->draft, optimizer) && peak != r->config->lr) {
        const enum config_origin of_lr = config_doc_origin(r->doc, optimizer);
        const enum config_origin of_peak = config_doc_origin(r->doc, scheduler);
        if (of_lr == of_peak) {
            return fail(why, STATUS_CONFLICT, "%s is %g, but %s is %g: keep one of them",
                        config_doc_where(r->doc, optimizer, a), r->config->lr,
                        config_doc_where(r->doc, scheduler, b), peak);
        }
        if (of_lr > of_peak) {
            return STATUS_OK;
        }
    }
    r->config->lr = peak;
    return STATUS_OK;
}

static enum status resolve_schedule(const struct config_resolver *r, struct failure *why)
{
    const struct config_draft *draft = r->draft;
    struct config *config = r->config;
    char where[CONFIG_WHERE_BYTES];
    const struct config_row *warmup = config_row("scheduler.params.warmup_num_steps");
    enum status status = check_scheduler_keys(r, why);

    if (!status) {
        status = resolve_lr(r, why);
    }
    if (status) {
        return status;
    }
    config->schedule = SCHEDULE_CONSTANT;
    config->total_steps = config->steps;
    if (!config_is_seen(draft, "scheduler.type")) {
        return STATUS_OK;
    }
    config->warmup_steps =
        draft->seen[warmup - config_row_at(0)] == SEEN_AUTO ? 0 : draft->warmup_num_steps;
    config->warmup_min_lr = draft->warmup_min_lr;
    if (draft->scheduler == SCHEDULER_WARMUP_COSINE) {
        config->schedule = SCHEDULE_COSINE;
        config->warmup_min_lr = draft->warmup_min_ratio * config->lr;
        config->lr_min_ratio = draft->cos_min_ratio;
    } else if (draft->scheduler == SCHEDULER_WARMUP_DECAY) {
        config->schedule = SCHEDULE_LINEAR;
    }
    if (config_is_seen(draft, "scheduler.params.total_num_steps")) {
        config->total_steps = draft->total_num_steps;
    }
    if (config->schedule != SCHEDULE_CONSTANT && config->warmup_steps > config->total_steps) {
        return fail(why, STATUS_OUT_OF_RANGE,
                    "%s: the warm-up has %" PRIu64 " steps, but the whole schedule only %" PRIu64
                    "; set warmup_num_steps or total_num_steps",
                    config_doc_where(r->doc, warmup->path, where), config->warmup_steps,
                    config->total_steps);
    }
    if (config->warmup_min_lr > config->lr) {
        return fail(why, STATUS_OUT_OF_RANGE, "%s is %g, above the learning rate %g it warms up to",
                    config_doc_where(r->doc, "scheduler.params.warmup_min_lr", where),
                    config->warmup_min_lr, config->lr);
    }
    return STATUS_OK;
}

/* ---- files and steps ---- */

static enum status check_file(const struct config_resolver *r, const char *key, const char *path,
                              struct failure *why)
{
    char where[CONFIG_WHERE_BYTES];
    struct stat info;

    config_doc_where(r->doc, key, where);
    if (stat(path, &info)) {
        const int error = errno;
        const enum status status =
            error == ENOENT || error == ENOTDIR ? STATUS_NOT_FOUND : status_from_errno(error);
        return fail(why, status, "%s: %.256s: %s", where, path, strerror(error));
    }
    if (!S_ISREG(info.st_mode)) {
        return fail(why, STATUS_INVALID, "%s: %.256s is not a regular file", where, path);
    }
    return STATUS_OK;
}

static enum status resolve_files(const struct config_resolver *r, const char *key,
                                 struct config_paths *paths, struct failure *why)
{
    for (uint32_t i = 0; i < paths->n; i++) {
        enum status status = locate(r, key, paths->path[i], why);
        if (!status && !r->plan) {
            status = check_file(r, key, paths->path[i], why);
        }
        if (status) {
            return status;
        }
    }
    return STATUS_OK;
}

static enum status resolve_data(const struct config_resolver *r, struct failure *why)
{
    struct config *config = r->config;
    char where[CONFIG_WHERE_BYTES];

    if (!config->data.n && !r->plan) {
        return missing(r, "ballast.data", "--data", "a text or token file", why);
    }
    enum status status = resolve_files(r, "ballast.data", &config->data, why);
    if (!status) {
        status = resolve_files(r, "ballast.eval_data", &config->eval_data, why);
    }
    if (status) {
        return status;
    }
    if (config->eval_every && !config->eval_data.n && !r->plan) {
        return fail(why, STATUS_CONFLICT,
                    "%s is %" PRIu64 ", but ballast.eval_data names nothing to evaluate on",
                    config_doc_where(r->doc, "ballast.eval.every", where), config->eval_every);
    }
    if (!config_is_seen(r->draft, "ballast.eval.micro_batch")) {
        config->eval_micro_batch = config->strategy.micro_batch;
    }
    return STATUS_OK;
}

static int compare_steps(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static enum status resolve_steps(const struct config_resolver *r, struct failure *why)
{
    struct config *config = r->config;
    char where[CONFIG_WHERE_BYTES];

    if (!config->steps) {
        if (!r->plan) {
            return missing(r, "ballast.steps", "--steps", "the number of optimizer steps", why);
        }
        config->steps = 1;
    }
    qsort(config->pause_at, config->n_pause_at, sizeof(config->pause_at[0]), compare_steps);
    for (uint32_t i = 0; i < config->n_pause_at; i++) {
        if (config->pause_at[i] > config->steps) {
            return fail(why, STATUS_OUT_OF_RANGE,
                        "%s: step %" PRIu64 " is never reached; the run has %" PRIu64 " steps",
                        config_doc_where(r->doc, "ballast.pause_at", where), config->pause_at[i],
                        config->steps);
        }
    }
    return STATUS_OK;
}

static void default_run_dir(const struct config_resolver *r)
{
    struct config *config = r->config;
    const char *source = config->source[0] ? config->source : config->model;
    char name[CONFIG_PATH_BYTES];

    if (config->run_dir[0]) {
        return;
    }
    snprintf(name, sizeof(name), "%s", source);
    size_t n = strlen(name);
    while (n > 1 && name[n - 1] == '/') {
        name[--n] = '\0';
    }
    const char *slash = strrchr(name, '/');
    const char *base = slash ? slash + 1 : name;
    n = strlen(base);
    if (n > 5 && strcmp(base + n - 5, ".json") == 0) {
        n -= 5;
    }
    snprintf(config->run_dir, sizeof(config->run_dir), "runs/%.*s", (int)(n < 255 ? n : 255), base);
}

/* A section's old name means the same; both together have to agree. */
static enum status resolve_dtype(const struct config_resolver *r, struct failure *why)
{
    const struct config_draft *draft = r->draft;
    char where[CONFIG_WHERE_BYTES];
    if (config_is_seen(draft, "bf16.enabled") && config_is_seen(draft, "bfloat16.enabled") &&
        draft->bf16 != draft->bfloat16) {
        return fail(why, STATUS_CONFLICT, "%s: bf16.enabled says the opposite",
                    config_doc_where(r->doc, "bfloat16.enabled", where));
    }
    r->config->dtype = draft->bf16 || draft->bfloat16 ? DTYPE_BF16 : DTYPE_FP32;
    return STATUS_OK;
}

enum status config_resolve(struct config_draft *draft, const struct config_doc *doc,
                           uint32_t world_size, bool plan, struct failure *why)
{
    const struct config_resolver r = {.draft = draft,
                                      .config = &draft->config,
                                      .doc = doc,
                                      .world_size = world_size,
                                      .plan = plan};
    enum status status;

    draft->config.beta1 = draft->betas[0];
    draft->config.beta2 = draft->betas[1];
    if ((status = resolve_model(&r, why)) || (status = resolve_lengths(&r, why)) ||
        (status = config_resolve_strategy(&r, why)) || (status = resolve_steps(&r, why)) ||
        (status = resolve_schedule(&r, why)) || (status = resolve_data(&r, why)) ||
        (status = resolve_dtype(&r, why))) {
        return status;
    }
    default_run_dir(&r);
    return STATUS_OK;
}
