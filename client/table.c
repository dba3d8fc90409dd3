/* Column widths, alignment, wrapping. Pure but for the heap. */
#include "client/table.h"

#include <assert.h>
#include <string.h>
#include "proto/base/units.h"

enum { GAP_COLUMNS = 2, MIN_WRAP_COLUMNS = 16 };

void table_init(struct table *table, const char *const *headings)
{
    *table = (struct table){0};
    while (headings[table->n_columns]) {
        assert(table->n_columns < TABLE_MAX_COLUMNS);
        table->headings[table->n_columns] = headings[table->n_columns];
        table->n_columns++;
    }
}

void table_fini(struct table *table)
{
    text_fini(&table->cells);
}

static void add_cell(struct table *table, enum color color, const char *format, va_list arguments)
{
    struct text raw = {0};
    text_vprintf(&raw, format, arguments);
    char code = (char)('0' + color);
    text_append(&table->cells, &code, 1);
    text_put_wire(&table->cells, text_get(&raw));
    text_append(&table->cells, "", 1);
    table->cells.failed |= raw.failed;
    table->n_cells++;
    text_fini(&raw);
}

void table_cell(struct table *table, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    add_cell(table, COLOR_NONE, format, arguments);
    va_end(arguments);
}

void table_cell_colored(struct table *table, enum color color, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    add_cell(table, color, format, arguments);
    va_end(arguments);
}

void table_cell_bytes(struct table *table, unsigned long long bytes)
{
    char text[UNITS_TEXT_BYTES];
    if (bytes == 0)
        table_cell(table, "-");
    else
        table_cell(table, "%s", units_format_bytes(bytes, text));
}

static bool column_is_right(const struct table *table, size_t column)
{
    return table->headings[column][0] == '>';
}

static const char *column_heading(const struct table *table, size_t column)
{
    return table->headings[column] + column_is_right(table, column);
}

static void measure(const struct table *table, size_t widths[TABLE_MAX_COLUMNS])
{
    for (size_t i = 0; i < table->n_columns; i++)
        widths[i] = text_columns(column_heading(table, i), strlen(column_heading(table, i)));
    const char *cell = text_get(&table->cells);
    for (size_t i = 0; i < table->n_cells; i++) {
        size_t n = strlen(cell + 1);
        size_t columns = text_columns(cell + 1, n);
        size_t *width = &widths[i % table->n_columns];
        if (columns > *width)
            *width = columns;
        cell += n + 2;
    }
}

/* Bytes of the longest prefix that fits `columns`, preferably ending before a space. */
static size_t wrap_point(const char *string, size_t columns)
{
    size_t at = 0, used = 0, space = 0;
    while (string[at] && used < columns) {
        if (string[at] == ' ')
            space = at;
        at++;
        while (((unsigned char)string[at] & 0xc0) == 0x80)
            at++;
        used++;
    }
    if (!string[at] || string[at] == ' ')
        return at;
    return space > 0 ? space : at;
}

/* The last column of a row: wrapped, continued below itself. */
static void put_wrapped(struct text *out, const char *string, size_t start, size_t columns)
{
    size_t n = wrap_point(string, columns);
    text_append(out, string, n);
    while (string[n]) {
        string += n;
        while (*string == ' ')
            string++;
        n = wrap_point(string, columns);
        if (n == 0)
            break;
        text_put(out, "\n");
        text_spaces(out, start);
        text_append(out, string, n);
    }
}

static void put_cell(const struct table *table, const struct style *style, size_t column,
                     enum color color, const char *string, const size_t *widths, size_t start,
                     struct text *out)
{
    size_t columns = text_columns(string, strlen(string));
    size_t padding = widths[column] > columns ? widths[column] - columns : 0;
    bool is_last = column + 1 == table->n_columns;
    if (column_is_right(table, column))
        text_spaces(out, padding);
    text_color(out, style, color);
    if (is_last && !column_is_right(table, column))
        put_wrapped(out, string, start, widths[column]);
    else
        text_put(out, string);
    text_color_end(out, style, color);
    if (!is_last && !column_is_right(table, column))
        text_spaces(out, padding);
    if (!is_last)
        text_spaces(out, GAP_COLUMNS);
}

/* Remove the blanks that padding left at the end of a line. */
static void end_line(struct text *out)
{
    while (out->used > 0 && out->bytes[out->used - 1] == ' ')
        out->bytes[--out->used] = '\0';
    text_put(out, "\n");
}

static bool has_headings(const struct table *table)
{
    for (size_t i = 0; i < table->n_columns; i++)
        if (*column_heading(table, i))
            return true;
    return false;
}

static void put_headings(const struct table *table, const struct style *style, const size_t *widths,
                         const size_t *starts, struct text *out)
{
    text_spaces(out, starts[0]);
    for (size_t i = 0; i < table->n_columns; i++)
        put_cell(table, style, i, COLOR_DIM, column_heading(table, i), widths, starts[i], out);
    end_line(out);
}

void table_print(const struct table *table, const struct style *style, size_t indent,
                 struct text *out)
{
    if (table->cells.failed) {
        out->failed = true;
        return;
    }
    assert(table->n_cells % table->n_columns == 0);
    size_t widths[TABLE_MAX_COLUMNS], starts[TABLE_MAX_COLUMNS], at = indent;
    measure(table, widths);
    for (size_t i = 0; i < table->n_columns; i++) {
        starts[i] = at;
        at += widths[i] + GAP_COLUMNS;
    }
    size_t last = table->n_columns - 1;
    size_t room = style->width > starts[last] + MIN_WRAP_COLUMNS ? style->width - starts[last]
                                                                 : MIN_WRAP_COLUMNS;
    if (widths[last] > room)
        widths[last] = room;
    if (has_headings(table))
        put_headings(table, style, widths, starts, out);
    const char *cell = text_get(&table->cells);
    for (size_t i = 0; i < table->n_cells; i++) {
        size_t column = i % table->n_columns;
        if (column == 0)
            text_spaces(out, indent);
        put_cell(table, style, column, (enum color)(cell[0] - '0'), cell + 1, widths,
                 starts[column], out);
        if (column == last)
            end_line(out);
        cell += strlen(cell + 1) + 2;
    }
}
