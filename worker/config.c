/* Owns: the way from text or argv to a configuration: document, draft, rules. Not: any of
 * these three (config_json and config_args, config_read, config_resolve). Main thread, at start. */
#include "worker/config.h"

#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/config_args.h"
#include "worker/config_read.h"
#include "worker/config_resolve.h"

/* Draft and configuration are some 150 kB each, so the draft does not go on the stack. */
static enum status config_from_doc(const struct config_doc *doc, const char *source,
                                   uint32_t world_size, bool plan, struct config *out_config,
                                   struct failure *why)
{
    struct config_draft *draft = heap_alloc(sizeof(*draft));

    if (!draft) {
        return fail(why, STATUS_OUT_OF_MEMORY, "out of host memory for the configuration");
    }
    config_draft_init(draft);
    snprintf(draft->config.source, sizeof(draft->config.source), "%s", source);
    enum status status = config_read(doc, draft, NULL, why);
    if (!status) {
        status = config_resolve(draft, doc, world_size, plan, why);
    }
    if (!status) {
        *out_config = draft->config;
    }
    heap_free(draft);
    return status;
}

enum status config_from_text(const char *text, size_t n_bytes, const char *name,
                             uint32_t world_size, struct config *out_config, struct failure *why)
{
    struct config_doc doc;
    enum status status = config_doc_parse(text, n_bytes, name, &doc, why);

    if (status) {
        return status;
    }
    status = config_from_doc(&doc, name, world_size ? world_size : 1, false, out_config, why);
    config_doc_fini(&doc);
    return status;
}

static void copy_command(const struct config_command *command, struct config *config)
{
    config->world_size = command->world_size;
    config->plan_only = command->plan;
    config->check_only = command->check;
    config->json = command->json;
    config->resume = command->resume;
    config->resume_latest = command->resume_latest;
    config->resume_step = command->resume_step;
    config->expect_ranks = command->expect_ranks;
    config->allow_faults = command->allow_faults;
    config->n_faults = command->n_faults;
    for (uint32_t i = 0; i < command->n_faults; i++) {
        snprintf(config->faults[i], sizeof(config->faults[i]), "%s", command->faults[i]);
    }
}

enum status config_from_args(int argc, char **argv, uint32_t world_size, struct config *out_config,
                             struct failure *why)
{
    struct config_command command;
    struct config_doc doc;
    enum status status = config_command_parse(argc, argv, world_size, &command, why);

    if (status) {
        return status;
    }
    if (command.help || command.version) {
        if (command.help) {
            config_print_help(stdout);
        } else {
            printf("ballast-worker %s\n", BALLAST_VERSION);
        }
        return fail(why, STATUS_STOPPED, "printed what was asked for");
    }
    if (command.check) {
        memset(out_config, 0, sizeof(*out_config));
        copy_command(&command, out_config);
        return STATUS_OK;
    }
    status = config_command_doc(&command, &doc, why);
    if (status) {
        return status;
    }
    status = config_from_doc(&doc, command.file ? command.file : "", command.world_size,
                             command.plan, out_config, why);
    config_doc_fini(&doc);
    if (!status) {
        copy_command(&command, out_config);
    }
    return status;
}

void config_log_notes(const struct config *config)
{
    if (config->notes[0]) {
        log_info("%s: accepted without effect (--check-config says why): %s",
                 config->source[0] ? config->source : "configuration", config->notes);
    }
}

void config_limits(const struct config *config, struct strategy_limits *out_limits)
{
    *out_limits = (struct strategy_limits){
        .n_layers = config->spec.n_layers,
        .world_size = config->world_size,
        .global_batch = config->global_batch,
        .seq_len = config->seq_len,
        .n_heads = config->spec.n_heads,
        .n_kv_heads = config->spec.n_kv_heads,
    };
}
