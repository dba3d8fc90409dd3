/* Reference files: see the header. The text part is checked in full before anything of it is
 * used, so that a damaged file is a message and not a wrong number. */
#include "tests/lib/reference_file.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#undef fail /* in this file the project's own, not cmocka's macro */
#include "proto/base/heap.h"
#include "proto/base/units.h"

static const size_t max_file_bytes = (size_t)16 << 20;
static const char first_line[] = "ballast-reference 1";

struct reference_file {
    size_t n_entries;
    struct reference_entry *entries; /* owned */
    unsigned char *data;             /* owned; the raw part */
    size_t n_data_bytes;
};

/* A position in the text part, which ends at `end`; one line at a time. */
struct reader {
    const char *name;
    const char *at, *end;
    unsigned line_number;
};

enum { LINE_BYTES = 384, MAX_WORDS = 4 + REFERENCE_MAX_DIMENSIONS };

struct line {
    char text[LINE_BYTES];
    char *words[MAX_WORDS];
    unsigned n_words;
};

static enum status malformed(const struct reader *reader, const char *what, struct failure *why)
{
    return fail(why, STATUS_MALFORMED, "%s:%u: %s", reader->name, reader->line_number, what);
}

static enum status read_line(struct reader *reader, struct line *line, struct failure *why)
{
    reader->line_number++;
    const char *newline = memchr(reader->at, '\n', (size_t)(reader->end - reader->at));
    if (newline == NULL)
        return malformed(reader, "the text part has no line 'end'", why);
    size_t length = (size_t)(newline - reader->at);
    if (length >= LINE_BYTES)
        return malformed(reader, "the line is too long", why);
    memcpy(line->text, reader->at, length);
    line->text[length] = '\0';
    reader->at = newline + 1;
    line->n_words = 0;
    char *state = NULL;
    for (char *word = strtok_r(line->text, " ", &state); word != NULL;
         word = strtok_r(NULL, " ", &state)) {
        if (line->n_words == MAX_WORDS)
            return malformed(reader, "too many words", why);
        line->words[line->n_words++] = word;
    }
    if (line->n_words == 0)
        return malformed(reader, "an empty line", why);
    return STATUS_OK;
}

static bool parse_size(const char *word, size_t *out)
{
    int64_t value = 0;
    if (units_parse_int(word, 0, (int64_t)max_file_bytes, &value) != STATUS_OK)
        return false;
    *out = (size_t)value;
    return true;
}

/* "tensor NAME NDIM d0 .. OFFSET" */
static enum status parse_array(const struct reader *reader, const struct line *line,
                               const struct reference_file *file, struct reference_entry *entry,
                               struct failure *why)
{
    size_t n_dimensions = 0, offset = 0;
    if (line->n_words < 5 || !parse_size(line->words[2], &n_dimensions) || n_dimensions == 0 ||
        n_dimensions > REFERENCE_MAX_DIMENSIONS || line->n_words != 4 + n_dimensions)
        return malformed(reader, "expected NAME, 1 to 4 dimensions and an offset", why);
    size_t n = 1;
    for (size_t i = 0; i < n_dimensions; i++) {
        size_t extent = 0;
        if (!parse_size(line->words[3 + i], &extent) || extent == 0 || extent > max_file_bytes / n)
            return malformed(reader, "a dimension is out of range", why);
        entry->shape[i] = extent;
        n *= extent;
    }
    if (!parse_size(line->words[3 + n_dimensions], &offset) || offset % 4 != 0 ||
        offset > file->n_data_bytes || n > (file->n_data_bytes - offset) / 4)
        return malformed(reader, "the tensor reaches past the end of the file", why);
    entry->n_dimensions = (uint32_t)n_dimensions;
    entry->n = n;
    const void *values = file->data + offset; /* aligned: heap memory and a multiple of 4 */
    if (entry->kind == REFERENCE_FLOATS)
        entry->floats = values;
    else
        entry->ints = values;
    return STATUS_OK;
}

static enum status parse_entry(const struct reader *reader, const struct line *line,
                               const struct reference_file *file, struct reference_entry *entry,
                               struct failure *why)
{
    memset(entry, 0, sizeof *entry);
    if (line->n_words < 3)
        return malformed(reader, "expected a kind, a name and a value", why);
    size_t name_bytes = strlen(line->words[1]) + 1;
    if (name_bytes > REFERENCE_NAME_BYTES)
        return malformed(reader, "the name is too long", why);
    memcpy(entry->name, line->words[1], name_bytes);
    if (strcmp(line->words[0], "tensor") == 0) {
        entry->kind = REFERENCE_FLOATS;
        return parse_array(reader, line, file, entry, why);
    }
    if (strcmp(line->words[0], "ints") == 0) {
        entry->kind = REFERENCE_INTS;
        return parse_array(reader, line, file, entry, why);
    }
    if (strcmp(line->words[0], "scalar") != 0)
        return malformed(reader, "expected tensor, ints, scalar or end", why);
    entry->kind = REFERENCE_SCALAR;
    if (line->n_words != 3 || units_parse_double(line->words[2], &entry->scalar) != STATUS_OK)
        return malformed(reader, "expected one number", why);
    return STATUS_OK;
}

/* Where the text part ends: after the first line that is just "end". NULL when there is none. */
static const char *find_data(const char *content, size_t n_bytes)
{
    static const char mark[] = "\nend\n";
    const char *found = memmem(content, n_bytes, mark, sizeof mark - 1);
    return found == NULL ? NULL : found + sizeof mark - 1;
}

static enum status parse_entries(struct reader *reader, struct reference_file *file,
                                 struct failure *why)
{
    struct line line;
    enum status status = read_line(reader, &line, why);
    if (status != STATUS_OK)
        return status;
    if (line.n_words != 2 || strcmp(line.words[0], "ballast-reference") != 0 ||
        strcmp(line.words[1], "1") != 0)
        return malformed(reader, "the first line is not 'ballast-reference 1'", why);
    for (;;) {
        status = read_line(reader, &line, why);
        if (status != STATUS_OK)
            return status;
        if (line.n_words == 1 && strcmp(line.words[0], "end") == 0)
            return STATUS_OK;
        struct reference_entry *entry = &file->entries[file->n_entries];
        status = parse_entry(reader, &line, file, entry, why);
        if (status != STATUS_OK)
            return status;
        if (reference_find(file, entry->name) != NULL)
            return malformed(reader, "the name stands there twice", why);
        file->n_entries++;
    }
}

enum status reference_parse(const void *content, size_t n_bytes, const char *name,
                            struct reference_file **out_file, struct failure *why)
{
    const char *text = content;
    if (n_bytes > max_file_bytes)
        return fail(why, STATUS_TOO_LARGE, "%s: %zu bytes, the limit is %zu", name, n_bytes,
                    max_file_bytes);
    if (text == NULL || n_bytes < sizeof first_line ||
        memcmp(text, first_line, sizeof first_line - 1) != 0)
        return fail(why, STATUS_MALFORMED, "%s: does not begin with '%s'", name, first_line);
    const char *data = find_data(text, n_bytes);
    if (data == NULL)
        return fail(why, STATUS_MALFORMED, "%s: the text part has no line 'end'", name);
    size_t n_lines = 0;
    for (const char *at = text; at < data; at++)
        n_lines += *at == '\n';

    enum status status = STATUS_OUT_OF_MEMORY;
    struct reference_file *file = heap_calloc(1, sizeof *file);
    if (file == NULL)
        return fail(why, status, "%s: no memory", name);
    file->n_data_bytes = n_bytes - (size_t)(data - text);
    file->data = heap_alloc(file->n_data_bytes > 0 ? file->n_data_bytes : 1);
    file->entries = heap_calloc(n_lines, sizeof *file->entries);
    if (file->data == NULL || file->entries == NULL) {
        status = fail(why, status, "%s: no memory", name);
        goto undo_file;
    }
    memcpy(file->data, data, file->n_data_bytes);
    struct reader reader = {.name = name, .at = text, .end = data};
    status = parse_entries(&reader, file, why);
    if (status != STATUS_OK)
        goto undo_file;
    *out_file = file;
    return STATUS_OK;

undo_file:
    reference_close(file);
    return status;
}

enum status reference_open(const char *path, struct reference_file **out_file, struct failure *why)
{
    FILE *stream = fopen(path, "rb");
    if (stream == NULL)
        return fail(why, status_from_errno(errno), "%s: %s", path, strerror(errno));
    enum status status = STATUS_OK;
    /* One byte over the limit is enough to know. */
    char *content = heap_alloc(max_file_bytes + 1);
    if (content == NULL) {
        status = fail(why, STATUS_OUT_OF_MEMORY, "%s: no memory", path);
        goto undo_stream;
    }
    size_t n_bytes = fread(content, 1, max_file_bytes + 1, stream);
    if (ferror(stream))
        status = fail(why, STATUS_IO, "%s: cannot be read", path);
    else
        status = reference_parse(content, n_bytes, path, out_file, why);
    heap_free(content);
undo_stream:
    (void)fclose(stream);
    return status;
}

void reference_close(struct reference_file *file)
{
    if (file == NULL)
        return;
    heap_free(file->entries);
    heap_free(file->data);
    heap_free(file);
}

size_t reference_n_entries(const struct reference_file *file)
{
    return file->n_entries;
}

const struct reference_entry *reference_entry(const struct reference_file *file, size_t index)
{
    return index < file->n_entries ? &file->entries[index] : NULL;
}

const struct reference_entry *reference_find(const struct reference_file *file, const char *name)
{
    for (size_t i = 0; i < file->n_entries; i++)
        if (strcmp(file->entries[i].name, name) == 0)
            return &file->entries[i];
    return NULL;
}

static const struct reference_entry *need(const struct reference_file *file, const char *name,
                                          enum reference_kind kind)
{
    const struct reference_entry *entry = reference_find(file, name);
    if (entry == NULL || entry->kind != kind) {
        print_error("the reference has no '%s' of this kind\n", name);
        _fail(__FILE__, __LINE__);
    }
    return entry;
}

static const struct reference_entry *need_array(const struct reference_file *file, const char *name,
                                                enum reference_kind kind, size_t n)
{
    const struct reference_entry *entry = need(file, name, kind);
    if (entry->n != n) {
        print_error("the reference's '%s' has %zu elements, not %zu\n", name, entry->n, n);
        _fail(__FILE__, __LINE__);
    }
    return entry;
}

double reference_scalar(const struct reference_file *file, const char *name)
{
    return need(file, name, REFERENCE_SCALAR)->scalar;
}

const float *reference_floats(const struct reference_file *file, const char *name, size_t n)
{
    return need_array(file, name, REFERENCE_FLOATS, n)->floats;
}

const int32_t *reference_ints(const struct reference_file *file, const char *name, size_t n)
{
    return need_array(file, name, REFERENCE_INTS, n)->ints;
}

double reference_distance(const float *a, const float *b, size_t n)
{
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)b[i];
        difference += d * d;
        size += (double)b[i] * (double)b[i];
    }
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}
