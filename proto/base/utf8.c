/* UTF-8 checks. Owns nothing; pure; any thread. */
#include "proto/base/utf8.h"

#include <stdint.h>
#include <string.h>

/* Bytes of the character at `text`, 0 when there is no whole, legal one within `left`. */
static size_t character_bytes(const unsigned char *text, size_t left)
{
    unsigned char first = text[0];
    if (first < 0x80) {
        return 1;
    }
    size_t n = first >= 0xC2 && first <= 0xDF   ? 2
               : first >= 0xE0 && first <= 0xEF ? 3
               : first >= 0xF0 && first <= 0xF4 ? 4
                                                : 0;
    if (n == 0 || n > left) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    unsigned char second = text[1];
    bool overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
    bool surrogate = first == 0xED && second > 0x9F;
    bool too_high = first == 0xF4 && second > 0x8F;
    return overlong || surrogate || too_high ? 0 : n;
}

bool utf8_valid(const char *text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text;
    size_t n;
    for (size_t i = 0; i < bytes; i += n) {
        n = character_bytes(at + i, bytes - i);
        if (n == 0) {
            return false;
        }
    }
    return true;
}

size_t utf8_cut(const char *text, size_t limit)
{
    const unsigned char *at = (const unsigned char *)text;
    /* Step back to the start of the last character, then ask whether it is whole. */
    size_t start = limit;
    while (start > 0 && limit - start < 4) {
        start--;
        if ((at[start] & 0xC0) != 0x80) {
            return character_bytes(at + start, limit - start) == limit - start ? limit : start;
        }
    }
    return limit;
}

void utf8_clean(char *text)
{
    unsigned char *at = (unsigned char *)text;
    size_t bytes = strlen(text);
    for (size_t i = 0; i < bytes;) {
        size_t n = character_bytes(at + i, bytes - i);
        if (n == 0) {
            at[i] = '?';
            n = 1;
        }
        i += n;
    }
}
