/* A growing text that the client renders into before anything is printed.
 *
 * Owns escaping: whatever came over the wire goes through text_put_wire(), so that no name
 * or message can move the cursor, change colours or forge a line. Out of memory is sticky:
 * later puts do nothing and `failed` stays set, so that a renderer needs one check at its end.
 * Any thread, one at a time. */
#ifndef BALLAST_CLIENT_TEXT_H
#define BALLAST_CLIENT_TEXT_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

/* How to write for a reader: a terminal or a file. */
struct style {
    bool color;     /* ANSI colours */
    bool unicode;   /* block characters in bars */
    unsigned width; /* columns */
};
enum { STYLE_PLAIN_WIDTH = 100 };

enum color { COLOR_NONE, COLOR_BOLD, COLOR_DIM, COLOR_RED, COLOR_GREEN, COLOR_YELLOW };

/* Zero-initialise; text_fini() frees. `bytes` is NUL-terminated, NULL while empty. */
struct text {
    char *bytes; /* owned */
    size_t used, capacity;
    bool failed; /* out of memory: something is missing */
};

void text_fini(struct text *text);
/* Forget the content, keep the memory. */
void text_clear(struct text *text);
/* The content; "" while empty. */
const char *text_get(const struct text *text);

void text_append(struct text *text, const char *bytes, size_t n);
void text_put(struct text *text, const char *string);
/* A string from outside: control characters, invisible direction marks and broken UTF-8
 * become \n, \t, \xNN, \uNNNN. */
void text_put_wire(struct text *text, const char *string);
void text_printf(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void text_vprintf(struct text *text, const char *format, va_list arguments)
    __attribute__((format(printf, 2, 0)));
/* As text_put_wire() of another text, cut to `columns` with "..." at the end where it is longer. */
void text_put_cut(struct text *text, const struct text *from, size_t columns);
void text_spaces(struct text *text, size_t n);
/* Start and end a colour; nothing when the style has none. */
void text_color(struct text *text, const struct style *style, enum color color);
void text_color_end(struct text *text, const struct style *style, enum color color);
void text_colored(struct text *text, const struct style *style, enum color color,
                  const char *string);
/* "[######....]" of `n` cells for a fraction of 0..1 (clamped; not finite: empty). */
void text_bar(struct text *text, const struct style *style, double fraction, size_t n);

/* Columns that `n` bytes of UTF-8 take (one per code point). */
size_t text_columns(const char *bytes, size_t n);

#endif
