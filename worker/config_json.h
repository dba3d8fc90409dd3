/* A configuration file as a document: JSON with comments and trailing commas, and the place
 * (line, flag or --set) that every key came from.
 *
 * Knows nothing of what keys mean: that is config_table's. Main thread, at start; everything
 * it allocates is freed by config_doc_fini(). */
#ifndef BALLAST_WORKER_CONFIG_JSON_H
#define BALLAST_WORKER_CONFIG_JSON_H

#include <jansson.h>
#include <stddef.h>
#include "proto/base/status.h"

enum {
    CONFIG_MAX_BYTES = 256 << 10, /* of a file */
    CONFIG_MAX_DEPTH = 32,      /* nested objects and arrays */
    CONFIG_KEY_BYTES = 128,     /* a dotted key path */
    CONFIG_WHERE_BYTES = 384,
    CONFIG_VALUE_BYTES = 72, /* a value in a message, cut */
};

/* Later ones win over earlier ones. */
enum config_origin { ORIGIN_FILE, ORIGIN_FLAG, ORIGIN_SET };

struct config_place {
    char *path; /* "zero_optimization.stage"; owned */
    int line;   /* 1.., of the file; 0 otherwise */
    enum config_origin origin;
    char *text; /* "--set zero.stage=2"; NULL in a file; owned */
};

struct config_doc {
    char name[256]; /* the file, for messages; "" when there is none */
    json_t *root;   /* an object; owned */
    struct config_place *places;
    size_t n_places, max_places;
};

/* Parse `text` (not NUL-terminated). MALFORMED with name, line and column for broken JSON,
 * duplicate keys, nesting deeper than CONFIG_MAX_DEPTH and a root that is no object;
 * TOO_LARGE; OUT_OF_MEMORY. n_bytes 0 with text NULL makes an empty document. */
enum status config_doc_parse(const char *text, size_t n_bytes, const char *name,
                             struct config_doc *out_doc, struct failure *why) MUST_CHECK;
void config_doc_fini(struct config_doc *doc);

/* Put `value` (taken over, also on failure) at the nested keys, making objects on the way and
 * replacing what was there. `text` says where it came from. */
enum status config_doc_put(struct config_doc *doc, const char *const *keys, size_t n_keys,
                           json_t *value, enum config_origin origin, const char *text,
                           struct failure *why) MUST_CHECK;

/* The place of a key, or of the nearest enclosing key that has one; NULL if none. */
const struct config_place *config_doc_place(const struct config_doc *doc, const char *path);
enum config_origin config_doc_origin(const struct config_doc *doc, const char *path);
/* "run.json:12: ballast.steps" or "--steps 5: ballast.steps". Returns `where`. */
const char *config_doc_where(const struct config_doc *doc, const char *path,
                             char where[static CONFIG_WHERE_BYTES]);
/* A value as JSON text, cut with "..." when long. Returns `text`. */
const char *config_value_text(const json_t *value, char text[static CONFIG_VALUE_BYTES]);

#endif
