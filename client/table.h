/* Tables of text: columns as wide as their content, the last one wrapped at the style's width.
 *
 * Cells are added row by row; every cell is escaped as text from the wire. Out of memory is
 * sticky and shows in the text that the table is printed into. */
#ifndef BALLAST_CLIENT_TABLE_H
#define BALLAST_CLIENT_TABLE_H

#include "client/text.h"

enum { TABLE_MAX_COLUMNS = 12 };

/* Zero-initialise through table_init(); table_fini() frees. */
struct table {
    const char *headings[TABLE_MAX_COLUMNS]; /* borrowed; '>' in front: aligned right */
    size_t n_columns;
    struct text cells; /* per cell: one byte of colour, the text, a NUL */
    size_t n_cells;
};

/* Headings up to a NULL, at most TABLE_MAX_COLUMNS; string literals. All of them empty: rows
 * only. */
void table_init(struct table *table, const char *const *headings);
void table_fini(struct table *table);
void table_cell(struct table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
void table_cell_colored(struct table *table, enum color color, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* A cell with bytes as "1.23 GiB"; "-" for 0. */
void table_cell_bytes(struct table *table, unsigned long long bytes);
/* Heading and rows, each `indent` columns in. */
void table_print(const struct table *table, const struct style *style, size_t indent,
                 struct text *out);

#endif
