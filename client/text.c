/* Growing text, escaping, colours, bars. Pure but for the heap. */
#include "client/text.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"

void text_fini(struct text *text)
{
    heap_free(text->bytes);
    *text = (struct text){0};
}

void text_clear(struct text *text)
{
    text->used = 0;
    text->failed = false;
    if (text->bytes)
        text->bytes[0] = '\0';
}

const char *text_get(const struct text *text)
{
    return text->bytes ? text->bytes : "";
}

/* Room for `n` more bytes and the final NUL. */
static bool text_reserve(struct text *text, size_t n)
{
    if (text->failed)
        return false;
    size_t needed = text->used + n + 1;
    if (needed <= text->capacity)
        return true;
    size_t capacity = text->capacity ? text->capacity * 2 : 256;
    if (capacity < needed)
        capacity = needed;
    char *bytes = heap_realloc(text->bytes, capacity);
    if (!bytes) {
        text->failed = true;
        return false;
    }
    text->bytes = bytes;
    text->capacity = capacity;
    return true;
}

void text_append(struct text *text, const char *bytes, size_t n)
{
    if (!text_reserve(text, n))
        return;
    memcpy(text->bytes + text->used, bytes, n);
    text->used += n;
    text->bytes[text->used] = '\0';
}

void text_put(struct text *text, const char *string)
{
    text_append(text, string, strlen(string));
}

void text_vprintf(struct text *text, const char *format, va_list arguments)
{
    va_list again;
    va_copy(again, arguments);
    int n = vsnprintf(NULL, 0, format, arguments);
    if (n < 0)
        text->failed = true;
    if (n >= 0 && text_reserve(text, (size_t)n)) {
        vsnprintf(text->bytes + text->used, (size_t)n + 1, format, again);
        text->used += (size_t)n;
    }
    va_end(again);
}

void text_printf(struct text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    text_vprintf(text, format, arguments);
    va_end(arguments);
}

void text_spaces(struct text *text, size_t n)
{
    if (!text_reserve(text, n))
        return;
    memset(text->bytes + text->used, ' ', n);
    text->used += n;
    text->bytes[text->used] = '\0';
}

/* Length of the UTF-8 sequence at `bytes` and its code point; 0 when broken. */
static size_t decode_point(const unsigned char *bytes, uint32_t *out_point)
{
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t n = bytes[0] < 0x80             ? 1
               : (bytes[0] & 0xe0) == 0xc0 ? 2
               : (bytes[0] & 0xf0) == 0xe0 ? 3
               : (bytes[0] & 0xf8) == 0xf0 ? 4
                                           : 0;
    if (n == 0)
        return 0;
    uint32_t point = n == 1 ? bytes[0] : bytes[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((bytes[i] & 0xc0) != 0x80) /* also stops at the final NUL */
            return 0;
        point = point << 6 | (bytes[i] & 0x3fu);
    }
    if (point < smallest[n] || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff))
        return 0;
    *out_point = point;
    return n;
}

/* Code points that a terminal acts on or that hide or reorder their neighbours. */
static bool point_is_unsafe(uint32_t point)
{
    return point < 0x20 || (point >= 0x7f && point < 0xa0) || point == 0xad || point == 0x61c ||
           (point >= 0x200b && point <= 0x200f) || (point >= 0x2028 && point <= 0x202e) ||
           (point >= 0x2060 && point <= 0x206f) || point == 0xfeff ||
           (point >= 0xfff9 && point <= 0xfffb) || (point >= 0xe0000 && point <= 0xe007f);
}

void text_put_wire(struct text *text, const char *string)
{
    const unsigned char *at = (const unsigned char *)string;
    while (*at) {
        uint32_t point = 0;
        size_t n = decode_point(at, &point);
        if (n == 0) {
            text_printf(text, "\\x%02x", *at);
            at++;
            continue;
        }
        if (!point_is_unsafe(point))
            text_append(text, (const char *)at, n);
        else if (point == '\n')
            text_put(text, "\\n");
        else if (point == '\t')
            text_put(text, "\\t");
        else if (point < 0x80)
            text_printf(text, "\\x%02x", point);
        else
            text_printf(text, "\\u%04x", point);
        at += n;
    }
}

void text_put_cut(struct text *text, const struct text *from, size_t columns)
{
    struct text clean = {0};
    text_put_wire(&clean, text_get(from));
    text->failed |= clean.failed || from->failed;
    const char *bytes = text_get(&clean);
    if (text_columns(bytes, clean.used) <= columns) {
        text_append(text, bytes, clean.used);
    } else {
        size_t n = 0;
        for (size_t used = 0; used + 3 < columns; used++)
            do
                n++;
            while (((unsigned char)bytes[n] & 0xc0) == 0x80);
        text_append(text, bytes, n);
        text_put(text, "...");
    }
    text_fini(&clean);
}

static const char *color_code(enum color color)
{
    switch (color) {
    case COLOR_BOLD:
        return "\033[1m";
    case COLOR_DIM:
        return "\033[2m";
    case COLOR_RED:
        return "\033[31m";
    case COLOR_GREEN:
        return "\033[32m";
    case COLOR_YELLOW:
        return "\033[33m";
    case COLOR_NONE:
        break;
    }
    return "";
}

void text_color(struct text *text, const struct style *style, enum color color)
{
    if (style->color)
        text_put(text, color_code(color));
}

void text_color_end(struct text *text, const struct style *style, enum color color)
{
    if (style->color && color != COLOR_NONE)
        text_put(text, "\033[0m");
}

void text_colored(struct text *text, const struct style *style, enum color color,
                  const char *string)
{
    text_color(text, style, color);
    text_put(text, string);
    text_color_end(text, style, color);
}

void text_bar(struct text *text, const struct style *style, double fraction, size_t n)
{
    if (!isfinite(fraction) || fraction < 0.0)
        fraction = 0.0;
    if (fraction > 1.0)
        fraction = 1.0;
    size_t full = (size_t)(fraction * (double)n + 0.5);
    text_put(text, "[");
    for (size_t i = 0; i < n; i++) {
        if (style->unicode)
            text_put(text, i < full ? "\u2588" : "\u2591");
        else
            text_put(text, i < full ? "#" : ".");
    }
    text_put(text, "]");
}

size_t text_columns(const char *bytes, size_t n)
{
    size_t columns = 0;
    for (size_t i = 0; i < n; i++)
        columns += ((unsigned char)bytes[i] & 0xc0) != 0x80;
    return columns;
}
