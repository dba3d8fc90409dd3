/* Status codes and failures as text; UTF-8, which failures are cut by.
 * links: base */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "proto/base/status.h"
#include "proto/base/utf8.h"
#include <cmocka.h>
#undef fail /* cmocka has a macro of that name */

static void names_and_texts(void **state)
{
    (void)state;
    assert_string_equal(status_name(STATUS_OUT_OF_RANGE), "OUT_OF_RANGE");
    assert_string_equal(status_text(STATUS_OUT_OF_RANGE), "out of range");
    assert_string_equal(status_name((enum status)9999), "UNKNOWN");
    assert_string_equal(status_text((enum status)9999), "unknown status");
#define X(name, value, text) assert_int_equal(status_from_name(#name), STATUS_##name);
    STATUS_LIST(X)
#undef X
    assert_int_equal(status_from_name("ok"), STATUS_INVALID);
    assert_int_equal(status_from_name(""), STATUS_INVALID);
}

static void errno_codes(void **state)
{
    (void)state;
    static const struct {
        int error;
        enum status status;
    } cases[] = {
        {0, STATUS_OK},
        {ENOMEM, STATUS_OUT_OF_MEMORY},
        {ENOSPC, STATUS_NO_SPACE},
        {EACCES, STATUS_PERMISSION},
        {EPERM, STATUS_PERMISSION},
        {ENOENT, STATUS_NOT_FOUND},
        {EIO, STATUS_IO},
        {EADDRINUSE, STATUS_ADDRESS_IN_USE},
        {EPIPE, STATUS_LINK_LOST},
        {EAGAIN, STATUS_AGAIN},
        {ETIMEDOUT, STATUS_DEADLINE},
        {12345, STATUS_IO},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(status_from_errno(cases[i].error), cases[i].status);
    }
}

static void failure_text(void **state)
{
    (void)state;
    struct failure why = {0};
    assert_int_equal(fail(&why, STATUS_OUT_OF_RANGE, "layers=%d: at most %d", 9, 4),
                     STATUS_OUT_OF_RANGE);
    assert_int_equal(why.status, STATUS_OUT_OF_RANGE);
    assert_string_equal(why.text, "layers=9: at most 4");
    assert_int_equal(fail_within(&why, "file %s", "run.json"), STATUS_OUT_OF_RANGE);
    assert_string_equal(why.text, "file run.json: layers=9: at most 4");
    assert_int_equal(fail(NULL, STATUS_BUSY, "%d", 1), STATUS_BUSY);
    /* The old text may be an argument. */
    fail(&why, STATUS_IO, "again: %s", why.text);
    assert_string_equal(why.text, "again: file run.json: layers=9: at most 4");
}

static void failure_is_cut_between_characters(void **state)
{
    (void)state;
    char text[FAILURE_TEXT_BYTES + 64];
    for (size_t shift = 0; shift < 4; shift++) {
        size_t n = 0;
        memset(text, 'x', shift);
        for (n = shift; n + 3 < sizeof text; n += 3) {
            memcpy(text + n, "\xE2\x82\xAC", 3);
        }
        text[n] = '\0';
        struct failure why;
        fail(&why, STATUS_IO, "%s", text);
        size_t kept = strlen(why.text);
        assert_true(kept > FAILURE_TEXT_BYTES - 5 && kept < FAILURE_TEXT_BYTES);
        assert_true(utf8_valid(why.text, kept));
        fail_within(&why, "%s", text + shift);
        assert_true(utf8_valid(why.text, strlen(why.text)));
        fail_within(&why, "p");
        assert_memory_equal(why.text, "p: ", 3);
        assert_true(utf8_valid(why.text, strlen(why.text)));
        assert_true(strlen(why.text) > FAILURE_TEXT_BYTES - 5);
    }
}

static void utf8(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool valid;
    } cases[] = {
        {"", true},
        {"plain", true},
        {"\xC3\xA9", true},
        {"\xE2\x82\xAC", true},
        {"\xF0\x9F\x98\x80", true},
        {"\xF4\x8F\xBF\xBF", true},
        {"\xF4\x90\x80\x80", false}, /* above U+10FFFF */
        {"\xED\xA0\x80", false},     /* surrogate */
        {"\xC0\xAF", false},         /* overlong */
        {"\xE0\x80\xAF", false},     /* overlong */
        {"\xF0\x80\x80\xAF", false}, /* overlong */
        {"\x80", false},
        {"a\xE2\x82", false},
        {"\xFF", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(utf8_valid(cases[i].text, strlen(cases[i].text)), cases[i].valid);
    }
    assert_true(utf8_valid("a\0b", 3));
    assert_int_equal(utf8_cut("ab\xE2\x82\xAC", 2), 2);
    assert_int_equal(utf8_cut("ab\xE2\x82\xAC", 3), 2);
    assert_int_equal(utf8_cut("ab\xE2\x82\xAC", 4), 2);
    assert_int_equal(utf8_cut("ab\xE2\x82\xAC", 5), 5);
    assert_int_equal(utf8_cut("\xF0\x9F\x98\x80", 3), 0);
    assert_int_equal(utf8_cut("", 0), 0);
    char text[] = "a\xFF\xE2\x82\xAC\xE2\x82z";
    utf8_clean(text);
    assert_string_equal(text, "a?\xE2\x82\xAC??z");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_texts),
        cmocka_unit_test(errno_codes),
        cmocka_unit_test(failure_text),
        cmocka_unit_test(failure_is_cut_between_characters),
        cmocka_unit_test(utf8),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
