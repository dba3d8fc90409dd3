/* Owns: reading single values: types and ranges by the row. Not: verdicts (config_read) and rules
 * between keys (config_resolve). Pure; main thread, at start. */
#include "worker/config_value.h"

#include <math.h>
#include <string.h>
#include "proto/base/units.h"
#include "worker/config_words.h"

enum status config_value_wrong(const struct config_doc *doc, const struct config_row *row,
                               const char *path, const json_t *value, enum status status,
                               struct failure *why)
{
    char where[CONFIG_WHERE_BYTES], text[CONFIG_VALUE_BYTES], range[CONFIG_RANGE_BYTES];

    return fail(why, status, "%s: %s %s; it has to be %s", config_doc_where(doc, path, where),
                config_value_text(value, text),
                status == STATUS_OUT_OF_RANGE ? "is out of range" : "is not valid here",
                config_range_text(row, range));
}

bool config_value_whole(const json_t *value, double *out_number, int64_t *out)
{
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
        *out_number = (double)*out;
        return true;
    }
    if (!json_is_real(value)) {
        return false;
    }
    const double number = json_real_value(value);
    if (floor(number) != number || fabs(number) >= 9223372036854775808.0) {
        return false;
    }
    *out_number = number;
    *out = (int64_t)number;
    return true;
}

static enum status read_count(const struct config_doc *doc, const struct config_row *row,
                              const char *path, const json_t *value, int64_t *out,
                              struct failure *why)
{
    double number;
    int64_t count;

    if (!config_value_whole(value, &number, &count)) {
        return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
    }
    if (number < row->low || number > row->high) {
        return config_value_wrong(doc, row, path, value, STATUS_OUT_OF_RANGE, why);
    }
    *out = count;
    return STATUS_OK;
}

static enum status read_number(const struct config_doc *doc, const struct config_row *row,
                               const char *path, const json_t *value, double *out,
                               struct failure *why)
{
    if (!json_is_number(value)) {
        return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
    }
    const double number = json_number_value(value);
    if (!(number >= row->low && number <= row->high) || (row->below_high && number >= row->high)) {
        return config_value_wrong(doc, row, path, value, STATUS_OUT_OF_RANGE, why);
    }
    *out = number;
    return STATUS_OK;
}

static enum status read_bytes(const struct config_doc *doc, const struct config_row *row,
                              const char *path, const json_t *value, uint64_t *out,
                              struct failure *why)
{
    uint64_t bytes = 0;
    int64_t count;

    if (!json_is_string(value)) {
        const enum status status = read_count(doc, row, path, value, &count, why);
        if (!status) {
            *out = (uint64_t)count;
        }
        return status;
    }
    if (units_parse_bytes(json_string_value(value), &bytes)) {
        return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
    }
    if ((double)bytes < row->low || (double)bytes > row->high) {
        return config_value_wrong(doc, row, path, value, STATUS_OUT_OF_RANGE, why);
    }
    *out = bytes;
    return STATUS_OK;
}

static enum status read_text(const struct config_doc *doc, const struct config_row *row,
                             const char *path, const json_t *value, char *out, struct failure *why)
{
    char where[CONFIG_WHERE_BYTES];

    if (!json_is_string(value) || json_string_length(value) == 0) {
        return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
    }
    if (json_string_length(value) >= CONFIG_PATH_BYTES) {
        return fail(why, STATUS_TOO_LARGE, "%s: %zu bytes long; it may have at most %d",
                    config_doc_where(doc, path, where), json_string_length(value),
                    CONFIG_PATH_BYTES - 1);
    }
    memcpy(out, json_string_value(value), json_string_length(value) + 1);
    return STATUS_OK;
}

static enum status read_paths(const struct config_doc *doc, const struct config_row *row,
                              const char *path, const json_t *value, struct config_paths *out,
                              struct failure *why)
{
    char where[CONFIG_WHERE_BYTES];
    const size_t n = json_is_array(value) ? json_array_size(value) : 1;

    if (n == 0) {
        return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
    }
    if (n > CONFIG_MAX_FILES) {
        return fail(why, STATUS_TOO_LARGE, "%s: %zu files; at most %d are allowed",
                    config_doc_where(doc, path, where), n, CONFIG_MAX_FILES);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_is_array(value) ? json_array_get(value, i) : value;
        const enum status status = read_text(doc, row, path, item, out->path[i], why);
        if (status) {
            return status;
        }
    }
    out->n = (uint32_t)n;
    return STATUS_OK;
}

static enum status read_steps(const struct config_doc *doc, const struct config_row *row,
                              const char *path, const json_t *value, struct config *out,
                              struct failure *why)
{
    char where[CONFIG_WHERE_BYTES];
    const size_t max = sizeof(out->pause_at) / sizeof(out->pause_at[0]);
    const size_t n = json_is_array(value) ? json_array_size(value) : 1;

    if (n > max) {
        return fail(why, STATUS_TOO_LARGE, "%s: %zu steps; at most %zu are allowed",
                    config_doc_where(doc, path, where), n, max);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_is_array(value) ? json_array_get(value, i) : value;
        int64_t step;
        const enum status status = read_count(doc, row, path, item, &step, why);
        if (status) {
            return status;
        }
        out->pause_at[i] = (uint64_t)step;
    }
    out->n_pause_at = (uint32_t)n;
    return STATUS_OK;
}

static enum status read_betas(const struct config_doc *doc, const struct config_row *row,
                              const char *path, const json_t *value, double *out,
                              struct failure *why)
{
    double betas[2];

    if (json_array_size(value) != 2) {
        return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
    }
    for (size_t i = 0; i < 2; i++) {
        const json_t *item = json_array_get(value, i);
        if (!json_is_number(item)) {
            return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
        }
        betas[i] = json_number_value(item);
        if (!(betas[i] >= 0 && betas[i] < 1)) {
            return config_value_wrong(doc, row, path, value, STATUS_OUT_OF_RANGE, why);
        }
    }
    memcpy(out, betas, sizeof(betas));
    return STATUS_OK;
}

static enum status read_choice(const struct config_doc *doc, const struct config_row *row,
                               const char *path, const json_t *value, int *out, struct failure *why)
{
    char where[CONFIG_WHERE_BYTES], text[CONFIG_VALUE_BYTES], range[CONFIG_RANGE_BYTES];

    if (!json_is_string(value)) {
        return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
    }
    const int index = config_choice(row->choices, json_string_value(value));
    if (index >= 0) {
        *out = index;
        return STATUS_OK;
    }
    if (row->refused && config_choice(row->refused, json_string_value(value)) >= 0) {
        return fail(why, STATUS_UNSUPPORTED, "%s: %s is not in this version; it has %s",
                    config_doc_where(doc, path, where), config_value_text(value, text),
                    config_range_text(row, range));
    }
    return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
}

static enum status read_bool(const struct config_doc *doc, const struct config_row *row,
                             const char *path, const json_t *value, bool *out, struct failure *why)
{
    if (!json_is_boolean(value)) {
        return config_value_wrong(doc, row, path, value, STATUS_INVALID, why);
    }
    *out = json_is_true(value);
    return STATUS_OK;
}

enum status config_value_read(const struct config_doc *doc, const struct config_row *row,
                              const char *path, const json_t *value, struct config_draft *draft,
                              struct failure *why)
{
    const bool stored = row->at != CONFIG_NOWHERE;
    char *at = stored ? (char *)draft + row->at : NULL;
    enum status status = STATUS_OK;
    char ignored_text[CONFIG_PATH_BYTES];
    uint64_t bytes;
    int64_t count;
    double number;
    bool flag;
    int choice;

    switch (row->type) {
    case TYPE_BOOL:
        status = read_bool(doc, row, path, value, stored ? (bool *)at : &flag, why);
        break;
    case TYPE_COUNT32:
    case TYPE_COUNT64:
        status = read_count(doc, row, path, value, &count, why);
        if (!status && stored && row->type == TYPE_COUNT32) {
            *(uint32_t *)(void *)at = (uint32_t)count;
        } else if (!status && stored) {
            *(uint64_t *)(void *)at = (uint64_t)count;
        }
        break;
    case TYPE_NUMBER:
        status = read_number(doc, row, path, value, stored ? (double *)(void *)at : &number, why);
        break;
    case TYPE_BYTES:
        status = read_bytes(doc, row, path, value, stored ? (uint64_t *)(void *)at : &bytes, why);
        break;
    case TYPE_CHOICE:
        status = read_choice(doc, row, path, value, stored ? (int *)(void *)at : &choice, why);
        break;
    case TYPE_TEXT:
        status = read_text(doc, row, path, value, stored ? at : ignored_text, why);
        break;
    case TYPE_PATHS:
        status = read_paths(doc, row, path, value, &((struct config_paths *)(void *)at)[0], why);
        break;
    case TYPE_STEPS:
        status = read_steps(doc, row, path, value, &draft->config, why);
        break;
    case TYPE_BETAS:
        status = read_betas(doc, row, path, value, draft->betas, why);
        break;
    case TYPE_STRATEGY:
    case TYPE_SECTION:
    case TYPE_ANY:
        break;
    }
    return status;
}
