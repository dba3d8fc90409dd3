/* Owns: configuration text -> JSON document with places. Not: the meaning of keys.
 * Main thread, at start.
 *
 * Three passes over the text, each linear and without recursion: blank() turns comments and
 * trailing commas into spaces in place, so that every later line number is the file's own;
 * jansson parses; map_lines() notes the line of every key. jansson keeps no positions, and
 * messages without a line are of little use in a file of a hundred keys. */
#include "worker/config_json.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/utf8.h"
#include "proto/json_parse.h"

/* ---- comments and trailing commas ---- */

struct blanker {
    char *text;
    size_t n, at;
    int line, depth;
    const char *name;
    size_t last[3]; /* positions of the last significant characters, newest first */
    int n_last;
};

static char last_char(const struct blanker *b, int age)
{
    return age < b->n_last ? b->text[b->last[age]] : '\0';
}

static void push_significant(struct blanker *b, size_t at)
{
    b->last[2] = b->last[1];
    b->last[1] = b->last[0];
    b->last[0] = at;
    if (b->n_last < 3) {
        b->n_last++;
    }
}

/* At the opening quote: move behind the closing one. An unfinished string is left to the
 * parser, which says so with its position. */
static void skip_string(struct blanker *b)
{
    push_significant(b, b->at);
    b->at++;
    while (b->at < b->n && b->text[b->at] != '"' && b->text[b->at] != '\n') {
        if (b->text[b->at] == '\\' && b->at + 1 < b->n && b->text[b->at + 1] != '\n') {
            b->at++;
        }
        b->at++;
    }
    if (b->at < b->n && b->text[b->at] == '"') {
        b->at++;
    }
}

static enum status blank_comment(struct blanker *b, struct failure *why)
{
    const bool block = b->text[b->at + 1] == '*';
    const int first_line = b->line;

    b->text[b->at] = b->text[b->at + 1] = ' ';
    b->at += 2;
    for (; b->at < b->n; b->at++) {
        char *c = &b->text[b->at];
        if (*c == '\n') {
            if (!block) {
                return STATUS_OK;
            }
            b->line++;
            continue;
        }
        if (block && *c == '*' && b->at + 1 < b->n && c[1] == '/') {
            c[0] = c[1] = ' ';
            b->at += 2;
            return STATUS_OK;
        }
        if (*c != '\r') {
            *c = ' ';
        }
    }
    if (block) {
        return fail(why, STATUS_MALFORMED, "%s:%d: the comment that starts here with /* never ends",
                    b->name, first_line);
    }
    return STATUS_OK;
}

static enum status blank_bracket(struct blanker *b, struct failure *why)
{
    const char c = b->text[b->at];

    if (c == '{' || c == '[') {
        if (++b->depth > CONFIG_MAX_DEPTH) {
            return fail(why, STATUS_MALFORMED, "%s:%d: nested deeper than %d levels", b->name,
                        b->line, CONFIG_MAX_DEPTH);
        }
    } else {
        if (b->depth > 0) {
            b->depth--;
        }
        /* "[1, 2,]" loses its comma; "[,]" keeps it and is refused by the parser. */
        const char before = last_char(b, 1);
        if (last_char(b, 0) == ',' && before != ',' && before != '[' && before != '{' &&
            before != ':' && before != '\0') {
            b->text[b->last[0]] = ' ';
        }
    }
    push_significant(b, b->at);
    b->at++;
    return STATUS_OK;
}

static enum status blank(char *text, size_t n, const char *name, struct failure *why)
{
    struct blanker b = {.text = text, .n = n, .line = 1, .name = name};

    if (n >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) {
        memset(text, ' ', 3); /* byte order mark */
    }
    while (b.at < b.n) {
        const char c = text[b.at];
        enum status status = STATUS_OK;
        if (c == '"') {
            skip_string(&b);
        } else if (c == '/' && b.at + 1 < n && (text[b.at + 1] == '/' || text[b.at + 1] == '*')) {
            status = blank_comment(&b, why);
        } else if (c == '{' || c == '[' || c == '}' || c == ']') {
            status = blank_bracket(&b, why);
        } else {
            if (c == '\n') {
                b.line++;
            } else if (c != ' ' && c != '\t' && c != '\r') {
                push_significant(&b, b.at);
            }
            b.at++;
        }
        if (status) {
            return status;
        }
    }
    return STATUS_OK;
}

/* ---- places ---- */

static void place_fini(struct config_place *place)
{
    heap_free(place->path);
    heap_free(place->text);
}

static enum status out_of_memory(const char *name, struct failure *why)
{
    return fail(why, STATUS_OUT_OF_MEMORY, "%s: out of host memory while reading the configuration",
                name[0] ? name : "configuration");
}

static enum status add_place(struct config_doc *doc, const char *path, int line,
                             enum config_origin origin, const char *text, struct failure *why)
{
    if (doc->n_places == doc->max_places) {
        const size_t n = doc->max_places ? 2 * doc->max_places : 64;
        struct config_place *grown = heap_realloc(doc->places, n * sizeof(*grown));
        if (!grown) {
            return out_of_memory(doc->name, why);
        }
        doc->places = grown;
        doc->max_places = n;
    }
    struct config_place place = {.line = line, .origin = origin};
    place.path = heap_strdup(path);
    if (!place.path) {
        return out_of_memory(doc->name, why);
    }
    if (text) {
        place.text = heap_strdup(text);
        if (!place.text) {
            heap_free(place.path);
            return out_of_memory(doc->name, why);
        }
    }
    doc->places[doc->n_places++] = place;
    return STATUS_OK;
}

static bool path_within(const char *path, const char *prefix)
{
    const size_t n = strlen(prefix);
    return strncmp(path, prefix, n) == 0 && (path[n] == '\0' || path[n] == '.');
}

/* A replaced value takes the places of everything that was inside it along. */
static void drop_places(struct config_doc *doc, const char *prefix)
{
    size_t kept = 0;
    for (size_t i = 0; i < doc->n_places; i++) {
        if (path_within(doc->places[i].path, prefix)) {
            place_fini(&doc->places[i]);
        } else {
            doc->places[kept++] = doc->places[i];
        }
    }
    doc->n_places = kept;
}

struct mapper {
    struct config_doc *doc;
    const char *text;
    size_t n, at;
    int line, depth;
    bool is_object[CONFIG_MAX_DEPTH + 1];
    bool key_next[CONFIG_MAX_DEPTH + 1];
    size_t path_bytes[CONFIG_MAX_DEPTH + 1]; /* length of the enclosing path */
    bool in_array;                           /* nothing in an array has a place of its own */
    char path[CONFIG_KEY_BYTES];
};

static enum status map_string(struct mapper *m, struct failure *why)
{
    const size_t first = m->at + 1;
    size_t end = first;

    while (end < m->n && m->text[end] != '"') {
        end += m->text[end] == '\\' ? 2 : 1;
    }
    m->at = end + 1;
    if (m->in_array || !m->is_object[m->depth] || !m->key_next[m->depth]) {
        return STATUS_OK;
    }
    m->key_next[m->depth] = false;

    const size_t base = m->path_bytes[m->depth];
    const size_t dot = base ? 1 : 0;
    if (end - first + base + dot >= sizeof(m->path)) {
        m->path[base] = '\0'; /* no known key is this long: its message has the parent's line */
        return STATUS_OK;
    }
    if (dot) {
        m->path[base] = '.';
    }
    memcpy(m->path + base + dot, m->text + first, end - first);
    m->path[base + dot + (end - first)] = '\0';
    return add_place(m->doc, m->path, m->line, ORIGIN_FILE, NULL, why);
}

static void map_open(struct mapper *m, bool object)
{
    m->depth++;
    m->is_object[m->depth] = object;
    m->key_next[m->depth] = object;
    m->path_bytes[m->depth] = m->depth == 1 ? 0 : strlen(m->path);
    if (!object) {
        m->in_array = true;
    }
}

static void map_close(struct mapper *m)
{
    m->path[m->path_bytes[m->depth]] = '\0';
    m->depth--;
    m->in_array = false;
    for (int d = 1; d <= m->depth; d++) {
        if (!m->is_object[d]) {
            m->in_array = true;
        }
    }
}

/* Only for text that has parsed: brackets match and the depth is within the limit. */
static enum status map_lines(struct config_doc *doc, const char *text, size_t n,
                             struct failure *why)
{
    struct mapper m = {.doc = doc, .text = text, .n = n, .line = 1};

    while (m.at < n) {
        const char c = text[m.at];
        if (c == '"') {
            const enum status status = map_string(&m, why);
            if (status) {
                return status;
            }
            continue;
        }
        if (c == '\n') {
            m.line++;
        } else if (c == '{' || c == '[') {
            map_open(&m, c == '{');
        } else if (c == '}' || c == ']') {
            map_close(&m);
        } else if (c == ',') {
            m.key_next[m.depth] = true;
        }
        m.at++;
    }
    return STATUS_OK;
}

/* ---- the document ---- */

static enum status parse_text(struct config_doc *doc, const char *text, size_t n,
                              struct failure *why)
{
    json_error_t error = {.line = -1};
    const enum status status = json_parse(text, n, JSON_REJECT_DUPLICATES, &doc->root, &error);

    if (status == STATUS_OUT_OF_MEMORY) {
        return out_of_memory(doc->name, why);
    }
    if (status) {
        return fail(why, STATUS_MALFORMED, "%s:%d:%d: not valid JSON: %s", doc->name, error.line,
                    error.column, error.text);
    }
    if (!json_is_object(doc->root)) {
        return fail(why, STATUS_MALFORMED, "%s:1: the file has to be one JSON object { ... }",
                    doc->name);
    }
    return STATUS_OK;
}

enum status config_doc_parse(const char *text, size_t n_bytes, const char *name,
                             struct config_doc *out_doc, struct failure *why)
{
    struct config_doc doc = {.root = NULL};
    enum status status;
    char *copy = NULL;

    snprintf(doc.name, sizeof(doc.name), "%s", name);
    if (n_bytes > CONFIG_MAX_BYTES) {
        return fail(why, STATUS_TOO_LARGE, "%s: %zu bytes, but a configuration has at most %d",
                    doc.name, n_bytes, CONFIG_MAX_BYTES);
    }
    if (!text) {
        doc.root = json_object();
        if (!doc.root) {
            return out_of_memory(doc.name, why);
        }
        *out_doc = doc;
        return STATUS_OK;
    }
    copy = heap_alloc(n_bytes + 1);
    if (!copy) {
        return out_of_memory(doc.name, why);
    }
    memcpy(copy, text, n_bytes);
    copy[n_bytes] = '\0';
    status = blank(copy, n_bytes, doc.name, why);
    if (!status) {
        status = parse_text(&doc, copy, n_bytes, why);
    }
    if (!status) {
        status = map_lines(&doc, copy, n_bytes, why);
    }
    heap_free(copy);
    if (status) {
        config_doc_fini(&doc);
        return status;
    }
    *out_doc = doc;
    return STATUS_OK;
}

void config_doc_fini(struct config_doc *doc)
{
    json_decref(doc->root);
    for (size_t i = 0; i < doc->n_places; i++) {
        place_fini(&doc->places[i]);
    }
    heap_free(doc->places);
    *doc = (struct config_doc){.root = NULL};
}

static enum status descend(struct config_doc *doc, json_t **at, const char *key, const char *path,
                           const char *text, struct failure *why)
{
    json_t *next = json_object_get(*at, key);

    if (!next) {
        next = json_object();
        if (!next || json_object_set_new(*at, key, next)) {
            return out_of_memory(doc->name, why);
        }
    }
    if (!json_is_object(next)) {
        char where[CONFIG_WHERE_BYTES], value[CONFIG_VALUE_BYTES];
        return fail(why, STATUS_INVALID, "%s: %s is %s and has no keys inside", text,
                    config_doc_where(doc, path, where), config_value_text(next, value));
    }
    *at = next;
    return STATUS_OK;
}

enum status config_doc_put(struct config_doc *doc, const char *const *keys, size_t n_keys,
                           json_t *value, enum config_origin origin, const char *text,
                           struct failure *why)
{
    char path[CONFIG_KEY_BYTES] = "";
    size_t n = 0;
    json_t *at = doc->root;

    if (!value) {
        return out_of_memory(doc->name, why);
    }
    for (size_t i = 0; i < n_keys; i++) {
        const int added = snprintf(path + n, sizeof(path) - n, "%s%s", i ? "." : "", keys[i]);
        if (added < 0 || (size_t)added >= sizeof(path) - n) {
            json_decref(value);
            return fail(why, STATUS_UNKNOWN_KEY, "%.80s...: no key has a name this long", text);
        }
        n += (size_t)added;
        if (i + 1 < n_keys) {
            const enum status status = descend(doc, &at, keys[i], path, text, why);
            if (status) {
                json_decref(value);
                return status;
            }
        }
    }
    if (json_object_set_new(at, keys[n_keys - 1], value)) {
        return out_of_memory(doc->name, why);
    }
    drop_places(doc, path);
    return add_place(doc, path, 0, origin, text, why);
}

const struct config_place *config_doc_place(const struct config_doc *doc, const char *path)
{
    char part[CONFIG_KEY_BYTES];

    snprintf(part, sizeof(part), "%s", path);
    for (;;) {
        for (size_t i = 0; i < doc->n_places; i++) {
            if (strcmp(doc->places[i].path, part) == 0) {
                return &doc->places[i];
            }
        }
        char *dot = strrchr(part, '.');
        if (!dot) {
            return NULL;
        }
        *dot = '\0';
    }
}

enum config_origin config_doc_origin(const struct config_doc *doc, const char *path)
{
    const struct config_place *place = config_doc_place(doc, path);
    return place ? place->origin : ORIGIN_FILE;
}

const char *config_doc_where(const struct config_doc *doc, const char *path,
                             char where[static CONFIG_WHERE_BYTES])
{
    const struct config_place *place = config_doc_place(doc, path);

    if (place && place->origin != ORIGIN_FILE) {
        snprintf(where, CONFIG_WHERE_BYTES, "%.120s: %s", place->text, path);
    } else if (place) {
        snprintf(where, CONFIG_WHERE_BYTES, "%s:%d: %s", doc->name, place->line, path);
    } else if (doc->name[0]) {
        snprintf(where, CONFIG_WHERE_BYTES, "%s: %s", doc->name, path);
    } else {
        snprintf(where, CONFIG_WHERE_BYTES, "%s", path);
    }
    return where;
}

struct value_buffer {
    char *text;
    size_t n; /* bytes of the whole value; more than what is kept */
};

static int append_value(const char *part, size_t n, void *data)
{
    struct value_buffer *buffer = data;

    for (size_t i = 0; i < n && buffer->n + i < CONFIG_VALUE_BYTES - 1; i++) {
        buffer->text[buffer->n + i] = part[i];
    }
    buffer->n += n;
    return 0;
}

static void append_text(const char *text, struct value_buffer *buffer)
{
    append_value("\"", 1, buffer);
    for (; *text; text++) {
        const bool escape = *text == '"' || *text == '\\';
        const char plain = (unsigned char)*text < ' ' ? '?' : *text;
        append_value("\\", escape ? 1 : 0, buffer);
        append_value(&plain, 1, buffer);
    }
    append_value("\"", 1, buffer);
}

const char *config_value_text(const json_t *value, char text[static CONFIG_VALUE_BYTES])
{
    const size_t room = CONFIG_VALUE_BYTES - 1;
    const size_t flags = JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15);
    struct value_buffer buffer = {.text = text};

    if (json_is_string(value)) { /* the usual ones without an allocation that could fail */
        append_text(json_string_value(value), &buffer);
    } else if (json_is_integer(value)) {
        snprintf(text, room, "%lld", (long long)json_integer_value(value));
        return text;
    } else if (json_is_boolean(value) || json_is_null(value)) {
        const char *word = json_is_true(value) ? "true" : json_is_false(value) ? "false" : "null";
        snprintf(text, room, "%s", word);
        return text;
    } else if (json_dump_callback(value, append_value, &buffer, flags)) {
        snprintf(text, room, "?");
        return text; /* no memory to print it */
    }
    if (buffer.n <= room) {
        text[buffer.n] = '\0';
    } else {
        const size_t cut = utf8_cut(text, room - 3);
        memcpy(text + cut, "...", 4);
    }
    return text;
}
