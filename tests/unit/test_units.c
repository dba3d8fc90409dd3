/* Sizes, numbers and times, from and to text.
 * links: base */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/units.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static void parses_bytes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"0", 0},
        {"1536", 1536},
        {"512 KiB", 512 * 1024},
        {"512KiB", 512 * 1024},
        {"1.5GiB", UINT64_C(1610612736)},
        {"0.5 KiB", 512},
        {"2TiB", UINT64_C(2199023255552)},
        {"16777215TiB", UINT64_C(16777215) << 40},
        {"18446744073709551615", UINT64_MAX},
        {"007", 7},
        {"1.000000000000000001KiB", 1024},
    };
    static const struct {
        const char *text;
        enum status status;
    } bad[] = {
        {"", STATUS_INVALID},
        {" 1", STATUS_INVALID},
        {"-1", STATUS_INVALID},
        {"+1", STATUS_INVALID},
        {"1.5", STATUS_INVALID},
        {"1.", STATUS_INVALID},
        {".5KiB", STATUS_INVALID},
        {"1KB", STATUS_INVALID},
        {"1kib", STATUS_INVALID},
        {"1  KiB", STATUS_INVALID},
        {"1 ", STATUS_INVALID},
        {"1KiB ", STATUS_INVALID},
        {"1e3", STATUS_INVALID},
        {"0x10", STATUS_INVALID},
        {"1.KiB", STATUS_INVALID},
        {"1B", STATUS_INVALID},
        {"1..5KiB", STATUS_INVALID},
        {"KiB", STATUS_INVALID},
        {"16777216TiB", STATUS_OUT_OF_RANGE},
        {"18446744073709551616", STATUS_OUT_OF_RANGE},
        {"99999999999999999999999999", STATUS_OUT_OF_RANGE},
        {"1.0000000000000000001KiB", STATUS_INVALID},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        uint64_t bytes = 1;
        assert_int_equal(units_parse_bytes(good[i].text, &bytes), STATUS_OK);
        assert_int_equal(bytes, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t bytes = 77;
        assert_int_equal(units_parse_bytes(bad[i].text, &bytes), bad[i].status);
        assert_int_equal(bytes, 77);
    }
}

static void parses_numbers(void **state)
{
    (void)state;
    int64_t whole = 5;
    assert_int_equal(units_parse_int("-12", -20, 20, &whole), STATUS_OK);
    assert_int_equal(whole, -12);
    assert_int_equal(units_parse_int("9223372036854775807", INT64_MIN, INT64_MAX, &whole),
                     STATUS_OK);
    assert_int_equal(whole, INT64_MAX);
    assert_int_equal(units_parse_int("9223372036854775808", INT64_MIN, INT64_MAX, &whole),
                     STATUS_OUT_OF_RANGE);
    assert_int_equal(units_parse_int("21", -20, 20, &whole), STATUS_OUT_OF_RANGE);
    static const char *const bad_int[] = {"", "-", "+1", " 1", "1 ", "1x", "0x1", "1.0", "--1"};
    for (size_t i = 0; i < sizeof bad_int / sizeof bad_int[0]; i++) {
        assert_int_equal(units_parse_int(bad_int[i], -20, 20, &whole), STATUS_INVALID);
    }
    assert_int_equal(whole, INT64_MAX);
    double real = 5;
    assert_int_equal(units_parse_double("-1.25e-3", &real), STATUS_OK);
    assert_true(real == -1.25e-3);
    static const char *const bad_double[] = {"",   "-",  "inf", "nan", "0x1p3",
                                             " 1", "1 ", "1e",  ".",   "1,5"};
    for (size_t i = 0; i < sizeof bad_double / sizeof bad_double[0]; i++) {
        assert_int_equal(units_parse_double(bad_double[i], &real), STATUS_INVALID);
    }
    assert_int_equal(units_parse_double("1e999", &real), STATUS_OUT_OF_RANGE);
    assert_true(real == -1.25e-3);
    bool flag = false;
    assert_true(units_parse_bool("true", &flag) && flag);
    assert_true(units_parse_bool("0", &flag) && !flag);
    assert_false(units_parse_bool("yes", &flag));
}

static void formats_bytes(void **state)
{
    (void)state;
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {
        {0, "0 B"},
        {1023, "1023 B"},
        {1024, "1.00 KiB"},
        {1536, "1.50 KiB"},
        {10235, "10.0 KiB"}, /* 9.995 and above is 10.0 */
        {UINT64_C(3) << 29, "1.50 GiB"},
        {UINT64_C(150) << 20, "150 MiB"},
        {UINT64_C(1010) << 10, "1010 KiB"},
        {(UINT64_C(1) << 20) - 1, "1.00 MiB"},
        {UINT64_MAX, "16.0 EiB"},
    };
    char text[UNITS_TEXT_BYTES];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_string_equal(units_format_bytes(cases[i].bytes, text), cases[i].text);
    }
}

static void formats_counts_and_durations(void **state)
{
    (void)state;
    char text[UNITS_TEXT_BYTES];
    assert_string_equal(units_format_count(0, text), "0");
    assert_string_equal(units_format_count(999, text), "999");
    assert_string_equal(units_format_count(1234567, text), "1.23 M");
    assert_string_equal(units_format_count(4.56e9, text), "4.56 G");
    assert_string_equal(units_format_count(999999, text), "1.00 M");
    assert_string_equal(units_format_count(-1500, text), "-1.50 k");
    assert_string_equal(units_format_count(0.25, text), "0.25");
    assert_string_equal(units_format_count(NAN, text), "null");
    assert_string_equal(units_format_count(1e300, text), "1e+300");
    assert_string_equal(units_format_duration(0, text), "0 ms");
    assert_string_equal(units_format_duration(0.00123, text), "1.23 ms");
    assert_string_equal(units_format_duration(0.85, text), "850 ms");
    assert_string_equal(units_format_duration(0.9999, text), "1.00 s");
    assert_string_equal(units_format_duration(12.34, text), "12.3 s");
    assert_string_equal(units_format_duration(59.97, text), "1 min 00 s");
    assert_string_equal(units_format_duration(245, text), "4 min 05 s");
    assert_string_equal(units_format_duration(3599.7, text), "1 h 00 min");
    assert_string_equal(units_format_duration(7380, text), "2 h 03 min");
    assert_string_equal(units_format_duration(INFINITY, text), "null");
}

static void formats_time(void **state)
{
    (void)state;
    char text[UNITS_TEXT_BYTES];
    assert_string_equal(units_format_time(0, text), "1970-01-01T00:00:00.000Z");
    assert_string_equal(units_format_time(INT64_C(1767323045678), text),
                        "2026-01-02T03:04:05.678Z");
    assert_string_equal(units_format_time(-1, text), "1969-12-31T23:59:59.999Z");
    assert_string_equal(units_format_time(INT64_MAX, text), "9999-12-31T23:59:59.999Z");
    assert_string_equal(units_format_time(INT64_MIN, text), "0000-01-01T00:00:00.000Z");
    assert_true(units_unix_ms() > INT64_C(1700000000000));
    double before = units_monotonic_s();
    assert_true(units_monotonic_s() >= before);
}

static void doubles_read_back(void **state)
{
    (void)state;
    char text[UNITS_TEXT_BYTES];
    assert_string_equal(units_format_double(0.1, text), "0.1");
    assert_string_equal(units_format_double(5, text), "5");
    assert_string_equal(units_format_double(1.0 / 3, text), "0.3333333333333333");
    assert_string_equal(units_format_double(NAN, text), "null");
    assert_string_equal(units_format_double(-INFINITY, text), "null");
    uint64_t seed = 42;
    for (int i = 0; i < 20000; i++) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        double value, back;
        memcpy(&value, &seed, sizeof value);
        if (!isfinite(value)) {
            continue;
        }
        back = strtod(units_format_double(value, text), NULL);
        assert_memory_equal(&back, &value, sizeof value);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parses_bytes),  cmocka_unit_test(parses_numbers),
        cmocka_unit_test(formats_bytes), cmocka_unit_test(formats_counts_and_durations),
        cmocka_unit_test(formats_time),  cmocka_unit_test(doubles_read_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
