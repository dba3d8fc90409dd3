/* Owns: --check-config, the printed table of what becomes of every key. Main thread, at start.
 *
 * Reads on after a refusal, so that one run of it shows every mistake of a file. */
#include "worker/config.h"

#include <inttypes.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/json.h"
#include "worker/config_args.h"
#include "worker/config_read.h"
#include "worker/config_resolve.h"

static const char *verdict_text(enum config_verdict verdict)
{
    switch (verdict) {
    case VERDICT_HONOURED:
    case VERDICT_ONLY:
    case VERDICT_SECTION:
        return "honoured";
    case VERDICT_WITHOUT_EFFECT:
    case VERDICT_SWITCHED_OFF:
        return "accepted without effect";
    case VERDICT_REFUSED:
        break;
    }
    return "refused";
}

static void print_summary(const struct config *config, FILE *out)
{
    struct strategy_limits limits;
    char text[STRATEGY_TEXT_BYTES];

    config_limits(config, &limits);
    fprintf(out, "\nmodel     %s, %" PRIu64 " parameters, sequences of %u tokens\n",
            config->spec.name, spec_n_parameters(&config->spec), config->seq_len);
    fprintf(out,
            "batch     %u sequences a step = micro_batch %u x accumulation %u x %u of %u ranks\n",
            config->global_batch, config->strategy.micro_batch,
            strategy_accumulation(&config->strategy, &limits),
            limits.world_size / config->strategy.sequence_parallel, limits.world_size);
    fprintf(out, "strategy  %s\n", strategy_format(NULL, &config->strategy, text));
    fprintf(out, "run       %s\n", config->run_dir);
}

static void print_table(const struct config_findings *findings, FILE *out)
{
    int width = 3;

    for (size_t i = 0; i < findings->n; i++) {
        const int n = (int)strlen(findings->items[i].path);
        width = n > width ? n : width;
    }
    fprintf(out, "%5s  %-*s  %-20s %-24s %s\n", "line", width, "key", "value", "verdict", "why");
    for (size_t i = 0; i < findings->n; i++) {
        const struct config_finding *finding = &findings->items[i];
        if (finding->line) {
            fprintf(out, "%5d", finding->line);
        } else {
            fprintf(out, "%5s", "-");
        }
        fprintf(out, "  %-*s  %-20s %-24s %s%s%s\n", width, finding->path, finding->value,
                verdict_text(finding->verdict), finding->origin, finding->origin[0] ? ": " : "",
                finding->why);
    }
}

static json_t *finding_json(const struct config_finding *finding)
{
    const uint64_t failures = heap_failures();
    json_t *value = json_loads(finding->value, JSON_DECODE_ANY, NULL);

    if (!value && heap_failures() == failures) {
        value = json_text(finding->value); /* a long one, cut */
    }
    return json_pack("{s:o*, s:o*, s:o, s:o, s:s, s:o}", "line",
                     finding->line ? json_integer(finding->line) : NULL, "origin",
                     finding->origin[0] ? json_text(finding->origin) : NULL, "key",
                     json_text(finding->path), "value", value, "verdict",
                     verdict_text(finding->verdict), "why", json_text(finding->why));
}

static json_t *resolved_json(const struct config *config)
{
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:o}", "model", config->spec.name, "parameters",
                     (json_int_t)spec_n_parameters(&config->spec), "train_batch_size",
                     (json_int_t)config->global_batch, "micro_batch",
                     (json_int_t)config->strategy.micro_batch, "seq_len",
                     (json_int_t)config->seq_len, "run_dir", json_text(config->run_dir));
}

static enum status print_json(const struct config_findings *findings, const char *source,
                              const struct config *config, enum status status, FILE *out,
                              const struct failure *why)
{
    json_t *keys = json_array();
    json_t *root = json_pack("{s:o, s:b}", "source", json_text(source), "ok", status == STATUS_OK);
    int failed = !keys || !root;

    for (size_t i = 0; !failed && i < findings->n; i++) {
        failed = json_array_append_new(keys, finding_json(&findings->items[i]));
    }
    if (!failed) {
        failed = json_object_set(root, "keys", keys);
    }
    if (!failed && status) {
        failed = json_object_set_new(
            root, "failure",
            json_pack("{s:s, s:o}", "status", status_name(status), "text", json_text(why->text)));
    } else if (!failed) {
        failed = json_object_set_new(root, "resolved", resolved_json(config));
    }
    if (!failed) {
        failed = json_dumpf(root, out, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
        fputc('\n', out);
    }
    json_decref(root);
    json_decref(keys);
    return failed ? STATUS_OUT_OF_MEMORY : STATUS_OK;
}

enum status config_check(int argc, char **argv, uint32_t world_size, FILE *out, bool json,
                         struct failure *why)
{
    struct config_command command;
    struct config_doc doc;
    struct config_findings findings = {.items = NULL};
    struct failure here = {.status = STATUS_OK}; /* `why` may be NULL; the text is printed */
    enum status status = config_command_parse(argc, argv, world_size, &command, &here);

    if (status) {
        return fail(why, status, "%s", here.text);
    }
    const char *source = command.file ? command.file : "";
    status = config_command_doc(&command, &doc, &here);
    if (status) {
        return fail(why, status, "%s", here.text);
    }
    struct config_draft *draft = heap_alloc(sizeof(*draft));
    if (!draft) {
        status = fail(why, STATUS_OUT_OF_MEMORY, "out of host memory for the configuration");
        goto undo_doc;
    }
    config_draft_init(draft);
    snprintf(draft->config.source, sizeof(draft->config.source), "%s", source);
    status = config_read(&doc, draft, &findings, &here);
    if (!status) {
        status = config_resolve(draft, &doc, command.world_size, command.plan, &here);
    }
    if (json) {
        const enum status printed =
            print_json(&findings, source, &draft->config, status, out, &here);
        if (printed) {
            status = fail(&here, printed, "out of host memory for the table");
        }
    } else {
        print_table(&findings, out);
        if (status) {
            fprintf(out, "\nrefused: %s\n", here.text);
        } else {
            print_summary(&draft->config, out);
        }
    }
    if (status) {
        status = fail(why, status, "%s", here.text);
    }
    config_findings_fini(&findings);
    heap_free(draft);
undo_doc:
    config_doc_fini(&doc);
    return status;
}
