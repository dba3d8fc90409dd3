/* Text forms of sizes, times and numbers. Pure; any thread. */
#ifndef BALLAST_PROTO_BASE_UNITS_H
#define BALLAST_PROTO_BASE_UNITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"

enum { UNITS_TEXT_BYTES = 48 };

/* "1536", "512 KiB", "1.5GiB" -> bytes. Decimal integer or KiB/MiB/GiB/TiB suffix; a
 * fraction only with a suffix. No sign, no other suffix, no overflow. */
enum status units_parse_bytes(const char *text, uint64_t *out_bytes) MUST_CHECK;
/* Whole-string decimal parse with range. */
enum status units_parse_int(const char *text, int64_t low, int64_t high, int64_t *out) MUST_CHECK;
enum status units_parse_double(const char *text, double *out) MUST_CHECK;
bool units_parse_bool(const char *text, bool *out);

/* "1.50 GiB" (three significant digits), exact integer below 1 KiB. Returns `text`. */
const char *units_format_bytes(uint64_t bytes, char text[static UNITS_TEXT_BYTES]);
/* "1.23 M", "4.56 G". */
const char *units_format_count(double count, char text[static UNITS_TEXT_BYTES]);
/* "850 ms", "12.3 s", "4 min 05 s", "2 h 03 min". */
const char *units_format_duration(double seconds, char text[static UNITS_TEXT_BYTES]);
/* RFC 3339 UTC with milliseconds, e.g. 2026-01-02T03:04:05.678Z. */
const char *units_format_time(int64_t unix_ms, char text[static UNITS_TEXT_BYTES]);
/* Shortest decimal that reads back to the same double; "null" when not finite. */
const char *units_format_double(double value, char text[static UNITS_TEXT_BYTES]);

/* Wall clock and monotonic clock. Not for pure code: it takes time as an argument. */
int64_t units_unix_ms(void);
double units_monotonic_s(void);

#endif
