/* UTF-8: is it, where may it be cut, make it so. Pure; any thread.
 *
 * Strict: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef BALLAST_PROTO_BASE_UTF8_H
#define BALLAST_PROTO_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>

/* Are these bytes UTF-8 throughout? A NUL counts as a character like any other. */
bool utf8_valid(const char *text, size_t bytes);
/* The largest n <= limit at which a UTF-8 text of at least `limit` bytes may be cut. */
size_t utf8_cut(const char *text, size_t limit);
/* Overwrite every byte that is not part of a character with '?'. */
void utf8_clean(char *text);

#endif
