/* Owns: what messages and help say about rows: ranges, choices, the name that was meant. Pure; any
 * thread. */
#include "worker/config_words.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static void print_choices(const char *choices, char text[static CONFIG_RANGE_BYTES])
{
    size_t n = (size_t)snprintf(text, CONFIG_RANGE_BYTES, strchr(choices, '|') ? "one of " : "");

    for (const char *c = choices; *c && n + 3 < CONFIG_RANGE_BYTES; c++) {
        text[n++] = *c == '|' ? ',' : *c;
        if (*c == '|') {
            text[n++] = ' ';
        }
    }
    text[n] = '\0';
}

const char *config_range_text(const struct config_row *row, char text[static CONFIG_RANGE_BYTES])
{
    const char *words = "";

    switch (row->type) {
    case TYPE_BOOL:
        words = "true or false";
        break;
    case TYPE_COUNT32:
    case TYPE_COUNT64:
    case TYPE_STEPS:
        snprintf(text, CONFIG_RANGE_BYTES, "a whole number from %.0f to %.0f", row->low, row->high);
        return text;
    case TYPE_NUMBER:
        snprintf(text, CONFIG_RANGE_BYTES, "a number from %g to %s%g", row->low,
                 row->below_high ? "below " : "", row->high);
        return text;
    case TYPE_BYTES:
        snprintf(text, CONFIG_RANGE_BYTES, "bytes, or a text such as \"512 MiB\", from %.0f",
                 row->low);
        return text;
    case TYPE_BETAS:
        words = "two numbers, each at least 0 and below 1";
        break;
    case TYPE_CHOICE:
        print_choices(row->choices, text);
        return text;
    case TYPE_ANY:
        if (row->choices) {
            print_choices(row->choices, text);
            return text;
        }
        words = "any value";
        break;
    case TYPE_TEXT:
        words = "a text";
        break;
    case TYPE_PATHS:
        words = "a path or a list of paths";
        break;
    case TYPE_STRATEGY:
    case TYPE_SECTION:
        words = "an object { ... }";
        break;
    }
    snprintf(text, CONFIG_RANGE_BYTES, "%s", words);
    return text;
}

int config_choice(const char *choices, const char *value)
{
    const size_t n = strlen(value);
    int index = 0;

    if (n == 0 || strchr(value, '|')) {
        return -1;
    }
    for (const char *c = choices; c; index++) {
        if (strncasecmp(c, value, n) == 0 && (c[n] == '|' || c[n] == '\0')) {
            return index;
        }
        c = strchr(c, '|');
        if (c) {
            c++;
        }
    }
    return -1;
}

/* ---- nearest names ---- */

enum { NAME_MAX_CHARS = 63 };

/* Edits (insert, delete, replace) from a to b, counted on their first NAME_MAX_CHARS. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[NAME_MAX_CHARS + 1];
    const size_t n_a = strnlen(a, NAME_MAX_CHARS), n_b = strnlen(b, NAME_MAX_CHARS);

    for (size_t j = 0; j <= n_b; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= n_a; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            const size_t replace = diagonal + (a[i - 1] != b[j - 1]);
            const size_t insert = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replace < insert ? replace : insert;
        }
    }
    return row[n_b];
}

void config_nearer(const char *name, const char *candidate, const char **best, size_t *distance)
{
    const size_t n = strnlen(name, NAME_MAX_CHARS);
    const size_t far = n / 3 > 2 ? n / 3 : 2;
    const size_t d = edit_distance(name, candidate);

    if (d <= far && d < n && (!*best || d < *distance)) {
        *best = candidate;
        *distance = d;
    }
}

const char *config_nearest(const char *section, const char *name)
{
    const size_t n = strlen(section);
    const char *best = NULL;
    size_t distance = 0;

    if (strcmp(section, "ballast.strategy") == 0) {
        for (size_t i = 0; i < strategy_n_keys(); i++) {
            config_nearer(name, strategy_key(i)->name, &best, &distance);
        }
        return best;
    }
    for (size_t i = 0; i < config_n_rows(); i++) {
        const char *path = config_row_at(i)->path;
        if (n) {
            if (strncmp(path, section, n) != 0 || path[n] != '.') {
                continue;
            }
            path += n + 1;
        }
        if (!strchr(path, '.')) {
            config_nearer(name, path, &best, &distance);
        }
    }
    return best;
}
