/* Owns: the walk over a document and the verdict on every key. Not: single values (config_value),
 * nor rules between keys (config_resolve). Main thread, at start. */
#include "worker/config_read.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/base/utf8.h"
#include "worker/config_value.h"
#include "worker/config_words.h"

struct reader {
    const struct config_doc *doc;
    struct config_draft *draft;
    struct config_findings *findings; /* NULL: stop at the first refusal */
    struct strategy scratch;          /* for checking values of strategy keys one by one */
};

static enum status read_object(struct reader *r, const json_t *object, const char *section,
                               struct failure *why);

/* DeepSpeed reads null and "auto" as the default; in our own section they are mistakes. */
static bool is_ours(const char *path)
{
    return strncmp(path, "ballast", 7) == 0 && (path[7] == '.' || path[7] == '\0');
}

/* ---- findings ---- */

static enum status note(struct reader *r, const char *path, const json_t *value,
                        enum config_verdict verdict, const char *reason, struct failure *why)
{
    struct config_findings *all = r->findings;
    const struct config_place *place = config_doc_place(r->doc, path);

    if (verdict == VERDICT_WITHOUT_EFFECT) {
        char *notes = r->draft->config.notes;
        const size_t room = sizeof(r->draft->config.notes), n = strlen(notes);
        const char *comma = n ? ", " : "";
        if (place && place->origin == ORIGIN_FILE) {
            snprintf(notes + n, room - n, "%s%s (line %d)", comma, path, place->line);
        } else {
            snprintf(notes + n, room - n, "%s%s", comma, path);
        }
    }
    if (!all) {
        return STATUS_OK;
    }
    if (all->n == all->max) {
        const size_t max = all->max ? 2 * all->max : 64;
        struct config_finding *grown = heap_realloc(all->items, max * sizeof(*grown));
        if (!grown) {
            return fail(why, STATUS_OUT_OF_MEMORY, "out of host memory for the list of verdicts");
        }
        all->items = grown;
        all->max = max;
    }
    struct config_finding *finding = &all->items[all->n++];
    *finding = (struct config_finding){.verdict = verdict};
    if (place && place->origin == ORIGIN_FILE) {
        finding->line = place->line;
    } else if (place) {
        snprintf(finding->origin, sizeof(finding->origin), "%.63s", place->text);
    }
    snprintf(finding->path, sizeof(finding->path), "%s", path);
    config_value_text(value, finding->value);
    snprintf(finding->why, sizeof(finding->why), "%.255s", reason);
    return STATUS_OK;
}

void config_findings_fini(struct config_findings *findings)
{
    heap_free(findings->items);
    *findings = (struct config_findings){.items = NULL};
}

/* ---- strategy keys ---- */

static bool claim_text(const json_t *value, char *text, size_t room)
{
    char number[UNITS_TEXT_BYTES];
    int64_t count;
    double real;

    if (json_is_string(value)) {
        snprintf(text, room, "%s", json_string_value(value));
    } else if (config_value_whole(value, &real, &count)) {
        snprintf(text, room, "%lld", (long long)count);
    } else if (json_is_real(value)) {
        snprintf(text, room, "%s", units_format_double(json_real_value(value), number));
    } else {
        return false;
    }
    return true;
}

static enum status claim(struct reader *r, const char *key, const char *path, const char *text,
                         struct failure *why)
{
    struct config_draft *draft = r->draft;
    char where[CONFIG_WHERE_BYTES];

    const enum status status = strategy_set(&r->scratch, key, text, why);
    if (status) {
        return fail_within(why, "%s", config_doc_where(r->doc, path, where));
    }
    /* Every row and every strategy key comes at most once, so there is always room. */
    assert(draft->n_claims < CONFIG_MAX_CLAIMS);
    struct config_claim *made = &draft->claims[draft->n_claims++];
    for (size_t i = 0; i < strategy_n_keys(); i++) {
        if (strcmp(strategy_key(i)->name, key) == 0) {
            made->key = strategy_key(i)->name;
        }
    }
    strategy_get(&r->scratch, key, made->value);
    snprintf(made->path, sizeof(made->path), "%s", path);
    made->origin = config_doc_origin(r->doc, path);
    return STATUS_OK;
}

static enum status claim_value(struct reader *r, const char *key, const char *path,
                               const json_t *value, struct failure *why)
{
    char where[CONFIG_WHERE_BYTES], shown[CONFIG_VALUE_BYTES], text[CONFIG_VALUE_BYTES];

    if (!claim_text(value, text, sizeof(text))) {
        return fail(why, STATUS_INVALID,
                    "%s: %s is not valid here; it has to be a text or a number",
                    config_doc_where(r->doc, path, where), config_value_text(value, shown));
    }
    return claim(r, key, path, text, why);
}

/* ---- keys ---- */

static enum status unknown_key(const struct reader *r, const char *section, const char *key,
                               const char *path, struct failure *why)
{
    char where[CONFIG_WHERE_BYTES];
    const char *nearest = config_nearest(section, key);
    const char *dot = *section ? "." : "";

    if (nearest) {
        return fail(why, STATUS_UNKNOWN_KEY, "%s: unknown key; did you mean %s%s%s?",
                    config_doc_where(r->doc, path, where), section, dot, nearest);
    }
    return fail(why, STATUS_UNKNOWN_KEY,
                "%s: unknown key in %s; ballast-worker --help lists all keys",
                config_doc_where(r->doc, path, where), *section ? section : "the top level");
}

static enum status read_section(struct reader *r, const struct config_row *row, const char *path,
                                const json_t *value, struct failure *why)
{
    if (json_is_boolean(value) && strcmp(path, "zero_optimization") == 0) {
        /* DeepSpeed's oldest form: true is stage 1. */
        return claim(r, "zero.stage", path, json_is_true(value) ? "1" : "0", why);
    }
    if (!json_is_object(value)) {
        return config_value_wrong(r->doc, row, path, value, STATUS_INVALID, why);
    }
    return read_object(r, value, path, why);
}

/* Is `text` one of the JSON values "a|b|c"? */
static bool is_among(const char *values, const char *text)
{
    const size_t n = strlen(text);

    for (const char *at = values; at; at = strchr(at, '|'), at = at ? at + 1 : NULL) {
        if (strncmp(at, text, n) == 0 && (at[n] == '|' || at[n] == '\0')) {
            return n > 0;
        }
    }
    return false;
}

static enum status read_only(struct reader *r, const struct config_row *row, const char *path,
                             const json_t *value, struct failure *why)
{
    char where[CONFIG_WHERE_BYTES], text[CONFIG_VALUE_BYTES], range[CONFIG_RANGE_BYTES];

    if (!is_among(row->choices, config_value_text(value, text))) {
        return fail(why, STATUS_UNSUPPORTED, "%s: %s is not in this version: %s; it has to be %s",
                    config_doc_where(r->doc, path, where), text, row->help,
                    config_range_text(row, range));
    }
    return note(r, path, value, VERDICT_HONOURED, row->help, why);
}

static enum status read_switched_off(struct reader *r, const struct config_row *row,
                                     const char *path, const json_t *value, struct failure *why)
{
    char where[CONFIG_WHERE_BYTES], text[CONFIG_VALUE_BYTES];
    const json_t *enabled = json_object_get(value, "enabled");

    if (!json_is_object(value) || (enabled && !json_is_false(enabled))) {
        return fail(why, STATUS_UNSUPPORTED,
                    "%s: %s is not in this version: %s; leave it out or set \"enabled\": false",
                    config_doc_where(r->doc, path, where), config_value_text(value, text),
                    row->help);
    }
    return note(r, path, value, VERDICT_WITHOUT_EFFECT, "it is switched off", why);
}

static enum status read_refused(const struct reader *r, const struct config_row *row,
                                const char *path, const json_t *value, struct failure *why)
{
    char where[CONFIG_WHERE_BYTES], text[CONFIG_VALUE_BYTES];

    return fail(why, STATUS_UNSUPPORTED, "%s: %s is not in this version: %s; leave the key out",
                config_doc_where(r->doc, path, where), config_value_text(value, text), row->help);
}

static enum status read_honoured(struct reader *r, const struct config_row *row, const char *path,
                                 const json_t *value, struct failure *why)
{
    enum status status = config_value_read(r->doc, row, path, value, r->draft, why);

    if (!status && row->strategy_key) {
        status = claim_value(r, row->strategy_key, path, value, why);
    }
    if (status) {
        return status;
    }
    r->draft->seen[row - config_row_at(0)] = SEEN_GIVEN;
    return note(r, path, value, VERDICT_HONOURED, row->help, why);
}

static enum status read_key(struct reader *r, const struct config_row *row, const char *path,
                            const json_t *value, struct failure *why)
{
    enum status status = STATUS_OK;
    char reason[CONFIG_VALUE_BYTES];

    if (!is_ours(path) && json_is_null(value)) {
        return note(r, path, value, VERDICT_HONOURED, "null stands for the default", why);
    }
    if (!is_ours(path) && json_is_string(value) && strcmp(json_string_value(value), "auto") == 0 &&
        row->verdict != VERDICT_SECTION && row->verdict != VERDICT_REFUSED) {
        r->draft->seen[row - config_row_at(0)] = SEEN_AUTO;
        snprintf(reason, sizeof(reason), "auto stands for the default%s%.32s",
                 row->standard ? ": " : "", row->standard ? row->standard : "");
        return note(r, path, value, VERDICT_HONOURED, reason, why);
    }
    switch (row->verdict) {
    case VERDICT_SECTION:
        status = read_section(r, row, path, value, why);
        break;
    case VERDICT_HONOURED:
        status = read_honoured(r, row, path, value, why);
        break;
    case VERDICT_WITHOUT_EFFECT:
        status = config_value_read(r->doc, row, path, value, r->draft, why);
        if (!status) {
            status = note(r, path, value, VERDICT_WITHOUT_EFFECT, row->help, why);
        }
        break;
    case VERDICT_ONLY:
        status = read_only(r, row, path, value, why);
        break;
    case VERDICT_SWITCHED_OFF:
        status = read_switched_off(r, row, path, value, why);
        break;
    case VERDICT_REFUSED:
        status = read_refused(r, row, path, value, why);
        break;
    }
    return status;
}

/* One member of an object: a strategy key, a key with a row, or an unknown one. */
static enum status read_member(struct reader *r, const char *section, const char *key,
                               const char *path, const json_t *value, struct failure *why)
{
    const bool strategy = strcmp(section, "ballast.strategy") == 0;
    const struct config_row *row = NULL;

    if (strategy && strategy_has_key(key)) {
        const enum status status = claim_value(r, key, path, value, why);
        return status ? status : note(r, path, value, VERDICT_HONOURED, "a strategy key", why);
    }
    /* A dot inside a key would make it look like a nested one. */
    if (!strategy && !strchr(key, '.')) {
        row = config_row(path);
    }
    return row ? read_key(r, row, path, value, why) : unknown_key(r, section, key, path, why);
}

static void member_path(const char *section, const char *key, char path[static CONFIG_KEY_BYTES])
{
    char text[CONFIG_KEY_BYTES + 1];

    snprintf(text, sizeof(text), "%s%s%s", section, *section ? "." : "", key);
    const size_t n = strlen(text);
    const size_t cut = n < CONFIG_KEY_BYTES ? n : utf8_cut(text, CONFIG_KEY_BYTES - 1);
    for (size_t i = 0; i < cut; i++) {
        path[i] = (unsigned char)text[i] < ' ' ? '?' : text[i];
    }
    path[cut] = '\0';
}

static enum status read_object(struct reader *r, const json_t *object, const char *section,
                               struct failure *why)
{
    json_t *mutable_object = (json_t *)(uintptr_t)object; /* jansson's iterator wants it so */
    enum status first = STATUS_OK;
    const char *key;
    json_t *value;

    json_object_foreach(mutable_object, key, value)
    {
        struct failure here;
        char path[CONFIG_KEY_BYTES];

        member_path(section, key, path);
        const bool nested = json_is_object(value) && config_row(path) &&
                            config_row(path)->verdict == VERDICT_SECTION;
        const enum status status = read_member(r, section, key, path, value, &here);
        if (!status) {
            continue;
        }
        if (!first) {
            first = fail(why, status, "%s", here.text);
        }
        if (!r->findings || status == STATUS_OUT_OF_MEMORY) {
            return first;
        }
        if (!nested && note(r, path, value, VERDICT_REFUSED, here.text, why)) {
            return STATUS_OUT_OF_MEMORY;
        }
    }
    return first;
}

enum status config_read(const struct config_doc *doc, struct config_draft *draft,
                        struct config_findings *findings, struct failure *why)
{
    struct reader r = {.doc = doc, .draft = draft, .findings = findings};
    const struct strategy_limits limits = {.n_layers = SPEC_MAX_LAYERS, .world_size = 1};

    strategy_default(&r.scratch, &limits);
    return read_object(&r, doc->root, "", why);
}
