/* Sizes, times and numbers as text. Owns nothing; pure but for the two clocks; any thread. */
#include "proto/base/units.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const byte_suffixes[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
enum { N_PARSED_SUFFIXES = 4, N_BYTE_SUFFIXES = 6, MAX_FRACTION_DIGITS = 18 };

/* The digits at *at, moved past; false when there are none or the number overflows. */
static bool read_digits(const char **at, int max_digits, uint64_t *out, int *out_n_digits)
{
    uint64_t value = 0;
    int n = 0;
    for (; **at >= '0' && **at <= '9'; ++*at, n++) {
        if (n == max_digits || __builtin_mul_overflow(value, 10U, &value) ||
            __builtin_add_overflow(value, (uint64_t)(**at - '0'), &value)) {
            return false;
        }
    }
    *out = value;
    *out_n_digits = n;
    return n > 0;
}

enum status units_parse_bytes(const char *text, uint64_t *out_bytes)
{
    uint64_t whole = 0, fraction = 0;
    int n_digits = 0, n_fraction = 0;
    const char *at = text;
    if (!read_digits(&at, 20, &whole, &n_digits)) {
        return *at >= '0' && *at <= '9' ? STATUS_OUT_OF_RANGE : STATUS_INVALID;
    }
    if (*at == '.') {
        at++;
        if (!read_digits(&at, MAX_FRACTION_DIGITS, &fraction, &n_fraction)) {
            return STATUS_INVALID;
        }
    }
    if (*at == '\0') {
        if (n_fraction > 0) {
            return STATUS_INVALID;
        }
        *out_bytes = whole;
        return STATUS_OK;
    }
    if (*at == ' ') {
        at++;
    }
    for (unsigned i = 0; i < N_PARSED_SUFFIXES; i++) {
        if (strcmp(at, byte_suffixes[i]) != 0) {
            continue;
        }
        uint64_t unit = UINT64_C(1) << 10 * (i + 1), scale = 1, bytes;
        for (int digit = 0; digit < n_fraction; digit++) {
            scale *= 10;
        }
        uint64_t part = (uint64_t)((unsigned __int128)fraction * unit / scale);
        if (__builtin_mul_overflow(whole, unit, &bytes) ||
            __builtin_add_overflow(bytes, part, &bytes)) {
            return STATUS_OUT_OF_RANGE;
        }
        *out_bytes = bytes;
        return STATUS_OK;
    }
    return STATUS_INVALID;
}

enum status units_parse_int(const char *text, int64_t low, int64_t high, int64_t *out)
{
    const char *at = text[0] == '-' ? text + 1 : text;
    if (*at == '\0') {
        return STATUS_INVALID;
    }
    for (const char *digit = at; *digit != '\0'; digit++) {
        if (*digit < '0' || *digit > '9') {
            return STATUS_INVALID;
        }
    }
    errno = 0;
    long long value = strtoll(text, NULL, 10);
    if (errno == ERANGE || value < low || value > high) {
        return STATUS_OUT_OF_RANGE;
    }
    *out = value;
    return STATUS_OK;
}

enum status units_parse_double(const char *text, double *out)
{
    /* strtod also takes spaces, hexadecimal, "inf" and "nan": none of these are meant. */
    bool digit = false;
    for (const char *at = text; *at != '\0'; at++) {
        if (strchr("0123456789+-.eE", *at) == NULL) {
            return STATUS_INVALID;
        }
        digit = digit || (*at >= '0' && *at <= '9');
    }
    if (!digit) {
        return STATUS_INVALID;
    }
    char *end = NULL;
    double value = strtod(text, &end);
    if (*end != '\0') {
        return STATUS_INVALID;
    }
    if (!isfinite(value)) {
        return STATUS_OUT_OF_RANGE;
    }
    *out = value;
    return STATUS_OK;
}

bool units_parse_bool(const char *text, bool *out)
{
    if (strcmp(text, "true") == 0 || strcmp(text, "1") == 0) {
        *out = true;
        return true;
    }
    if (strcmp(text, "false") == 0 || strcmp(text, "0") == 0) {
        *out = false;
        return true;
    }
    return false;
}

/* "1.50", "15.0", "150": three significant digits of a value in [0.9995, 1024). */
static void three_digits(double value, const char *unit, char text[static UNITS_TEXT_BYTES])
{
    int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    snprintf(text, UNITS_TEXT_BYTES, "%.*f%s%s", decimals, value, *unit ? " " : "", unit);
}

const char *units_format_bytes(uint64_t bytes, char text[static UNITS_TEXT_BYTES])
{
    if (bytes < 1024) {
        snprintf(text, UNITS_TEXT_BYTES, "%d B", (int)bytes);
        return text;
    }
    double value = (double)bytes / 1024.0;
    unsigned i = 0;
    /* What would round to 1024 is one of the next unit. */
    while (value >= 1023.5 && i + 1 < N_BYTE_SUFFIXES) {
        value /= 1024.0;
        i++;
    }
    three_digits(value, byte_suffixes[i], text);
    return text;
}

const char *units_format_count(double count, char text[static UNITS_TEXT_BYTES])
{
    static const char *const suffixes[] = {"", "k", "M", "G", "T", "P", "E"};
    if (!isfinite(count)) {
        snprintf(text, UNITS_TEXT_BYTES, "null");
        return text;
    }
    double size = fabs(count);
    if (size < 999.5 && size == floor(size)) {
        snprintf(text, UNITS_TEXT_BYTES, "%.0f", count);
        return text;
    }
    unsigned i = 0;
    while (size >= 999.5 && i + 1 < sizeof suffixes / sizeof suffixes[0]) {
        size /= 1000.0;
        i++;
    }
    char magnitude[UNITS_TEXT_BYTES];
    if (size >= 999.5) {
        snprintf(text, UNITS_TEXT_BYTES, "%.3g", count);
        return text;
    }
    three_digits(size, suffixes[i], magnitude);
    snprintf(text, UNITS_TEXT_BYTES, "%s%.40s", count < 0 ? "-" : "", magnitude);
    return text;
}

const char *units_format_duration(double seconds, char text[static UNITS_TEXT_BYTES])
{
    if (!isfinite(seconds) || seconds < 0 || seconds > 1e15) {
        snprintf(text, UNITS_TEXT_BYTES, "null");
    } else if (seconds < 0.9995) {
        double ms = seconds * 1e3;
        int decimals = ms == 0 || ms >= 99.95 ? 0 : ms >= 9.995 ? 1 : 2;
        snprintf(text, UNITS_TEXT_BYTES, "%.*f ms", decimals, ms);
    } else if (seconds < 59.95) {
        snprintf(text, UNITS_TEXT_BYTES, seconds < 9.995 ? "%.2f s" : "%.1f s", seconds);
    } else if (seconds < 3599.5) {
        long whole = lround(seconds);
        snprintf(text, UNITS_TEXT_BYTES, "%ld min %02ld s", whole / 60, whole % 60);
    } else {
        long long minutes = llround(seconds / 60);
        snprintf(text, UNITS_TEXT_BYTES, "%lld h %02lld min", minutes / 60, minutes % 60);
    }
    return text;
}

const char *units_format_time(int64_t unix_ms, char text[static UNITS_TEXT_BYTES])
{
    /* The years 0000 to 9999, the ones RFC 3339 can write. */
    const int64_t low = INT64_C(-62167219200000), high = INT64_C(253402300799999);
    int64_t ms = unix_ms < low ? low : unix_ms > high ? high : unix_ms;
    int64_t rest = ((ms % 1000) + 1000) % 1000;
    time_t seconds = (time_t)((ms - rest) / 1000);
    struct tm utc;
    gmtime_r(&seconds, &utc);
    snprintf(text, UNITS_TEXT_BYTES, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", utc.tm_year + 1900,
             utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, (int)rest);
    return text;
}

const char *units_format_double(double value, char text[static UNITS_TEXT_BYTES])
{
    if (!isfinite(value)) {
        snprintf(text, UNITS_TEXT_BYTES, "null");
        return text;
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, UNITS_TEXT_BYTES, "%.*g", digits, value);
        if (strtod(text, NULL) == value) {
            break;
        }
    }
    return text;
}

int64_t units_unix_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

double units_monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}
