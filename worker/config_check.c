/* Owns: --check-config, the printed table of what becomes of every key. Main thread, at start.
 *
 * Reads on after a refusal, so that one run of it shows every mistake of a file. */
#include "worker/config.h"

#include <inttypes.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/json.h"
#include "proto/json_parse.h"
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

/* ---- as JSON ---- */

/* Puts a member that must not be missing; `ok` stays false once it is. json_pack() is avoided: it
 * does not survive a failed allocation. */
static void put(json_t *object, const char *key, json_t *value, bool *ok)
{
    if (json_object_set_new(object, key, value)) {
        *ok = false;
    }
}

static json_t *whole_or_nothing(json_t *object, bool ok)
{
    if (!ok) {
        json_decref(object);
        return NULL;
    }
    return object;
}

static json_t *finding_json(const struct config_finding *finding)
{
    json_t *object = json_object();
    json_t *value = NULL;
    json_error_t error;
    bool ok = object != NULL && json_parse(finding->value, strlen(finding->value), JSON_DECODE_ANY,
                                           &value, &error) != STATUS_OUT_OF_MEMORY;

    if (finding->line) {
        put(object, "line", json_integer(finding->line), &ok);
    }
    if (finding->origin[0]) {
        put(object, "origin", json_text(finding->origin), &ok);
    }
    put(object, "key", json_text(finding->path), &ok);
    put(object, "value", value ? value : json_text(finding->value), &ok); /* a long one is cut */
    put(object, "verdict", json_text(verdict_text(finding->verdict)), &ok);
    put(object, "why", json_text(finding->why), &ok);
    return whole_or_nothing(object, ok);
}

static json_t *resolved_json(const struct config *config)
{
    json_t *object = json_object();
    bool ok = object != NULL;

    put(object, "model", json_text(config->spec.name), &ok);
    put(object, "parameters", json_count(spec_n_parameters(&config->spec)), &ok);
    put(object, "train_batch_size", json_integer(config->global_batch), &ok);
    put(object, "micro_batch", json_integer(config->strategy.micro_batch), &ok);
    put(object, "seq_len", json_integer(config->seq_len), &ok);
    put(object, "run_dir", json_text(config->run_dir), &ok);
    return whole_or_nothing(object, ok);
}

static json_t *failure_json(const struct failure *why)
{
    json_t *object = json_object();
    bool ok = object != NULL;

    put(object, "status", json_text(status_name(why->status)), &ok);
    put(object, "text", json_text(why->text), &ok);
    return whole_or_nothing(object, ok);
}

static json_t *findings_json(const struct config_findings *findings)
{
    json_t *keys = json_array();
    bool ok = keys != NULL;

    for (size_t i = 0; ok && i < findings->n; i++) {
        ok = json_array_append_new(keys, finding_json(&findings->items[i])) == 0;
    }
    return whole_or_nothing(keys, ok);
}

static enum status print_json(const struct config_findings *findings, const char *source,
                              const struct config *config, const struct failure *why, FILE *out)
{
    json_t *root = json_object();
    bool ok = root != NULL;

    put(root, "source", json_text(source), &ok);
    put(root, "ok", json_boolean(why->status == STATUS_OK), &ok);
    put(root, "keys", findings_json(findings), &ok);
    if (why->status) {
        put(root, "failure", failure_json(why), &ok);
    } else {
        put(root, "resolved", resolved_json(config), &ok);
    }
    ok = ok && json_dumpf(root, out, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) == 0;
    fputc('\n', out);
    json_decref(root);
    return ok ? STATUS_OK : STATUS_OUT_OF_MEMORY;
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
        const enum status printed = print_json(&findings, source, &draft->config, &here, out);
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
