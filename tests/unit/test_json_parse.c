/* JSON text to a tree: what jansson accepts, in any memory.
 * links: base proto */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/json.h"
#include "proto/json_parse.h"
#include "proto/text_file.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static enum status parse(const char *text, json_t **out_root)
{
    json_error_t error;
    return json_parse(text, strlen(text), JSON_REJECT_DUPLICATES, out_root, &error);
}

static void trees_are_the_callers(void **state)
{
    json_t *root = NULL;
    const int64_t live = heap_live();
    (void)state;
    assert_int_equal(parse("{\"a\": [1, 2.5, \"x\", null], \"b\": {}}", &root), STATUS_OK);
    assert_int_equal(json_integer_value(json_array_get(json_object_get(root, "a"), 0)), 1);
    assert_int_equal(json_object_set_new(root, "c", json_true()), 0); /* it can be changed */
    assert_int_equal(json_object_size(root), 3);
    json_decref(root);
    assert_int_equal(heap_live(), live);
    json_error_t error;
    root = NULL;
    assert_int_equal(json_parse("{\"a\":1,\n\"a\":2}", 15, JSON_REJECT_DUPLICATES, &root, &error),
                     STATUS_MALFORMED);
    assert_int_equal(error.line, 2);
    assert_null(root);
    assert_int_equal(heap_live(), live);
}

/* The texts that need most memory per character still parse. */
static void the_arena_is_large_enough(void **state)
{
    enum { BYTES = 200000 };
    static const char *const pieces[] = {"{},", "[],", "1,", "\"\",", "[{}],", "[[[]]],", "1.5,"};
    static char text[BYTES + 64];
    (void)state;
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        size_t n = 0;
        json_t *root = NULL;
        text[n++] = '[';
        while (n + 16 < BYTES) {
            memcpy(text + n, pieces[i], strlen(pieces[i]));
            n += strlen(pieces[i]);
        }
        strcpy(text + n - 1, "]");
        assert_int_equal(parse(text, &root), STATUS_OK);
        json_decref(root);
    }
    size_t n = 0;
    json_t *root = NULL;
    text[n++] = '{';
    for (unsigned key = 0; n + 32 < BYTES; key++) { /* short keys: the table is doubled often */
        n += (size_t)snprintf(text + n, 32, "\"%x\":{},", key);
    }
    strcpy(text + n - 1, "}");
    assert_int_equal(parse(text, &root), STATUS_OK);
    json_decref(root);
    memset(text, 'a', BYTES); /* one long token */
    text[0] = '[';
    text[1] = '"';
    strcpy(text + BYTES - 2, "\"]");
    assert_int_equal(parse(text, &root), STATUS_OK);
    assert_int_equal(json_string_length(json_array_get(root, 0)), BYTES - 4);
    json_decref(root);
}

static void every_allocation_may_fail(void **state)
{
    static const char text[] = "{\"a_rather_long_key_of_a_file\": [1, 2, 3, 4, 5, 6, 7, 8, 9, {}],"
                               "\"b\": \"a rather long text in a file\", \"c\": 1, \"d\": 2,"
                               "\"e\": 3, \"f\": 4, \"g\": 5, \"h\": 6, \"i\": 7}";
    const int64_t live = heap_live();
    (void)state;
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        bool clean = false;
        for (uint64_t nth = 1; nth <= 200 && !clean; nth++) {
            json_t *root = NULL;
            heap_fail(nth, for_ever != 0);
            const enum status status = parse(text, &root);
            clean = heap_failures() == 0;
            heap_fail(0, false);
            assert_int_equal(status, clean ? STATUS_OK : STATUS_OUT_OF_MEMORY);
            json_decref(root);
            assert_int_equal(heap_live(), live);
        }
        assert_true(clean);
    }
}

static void small_files_are_read_whole(void **state)
{
    char path[] = "/tmp/ballast-text-XXXXXX";
    struct failure why;
    char *text = NULL;
    size_t n = 0;
    (void)state;
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "hello", 5), 5);
    close(fd);
    assert_int_equal(text_file_read(path, 5, &text, &n, &why), STATUS_OK);
    assert_int_equal(n, 5);
    assert_string_equal(text, "hello");
    heap_free(text);
    assert_int_equal(text_file_read(path, 4, &text, &n, &why), STATUS_TOO_LARGE);
    assert_non_null(strstr(why.text, path));
    assert_non_null(strstr(why.text, "5 bytes; at most 4"));
    heap_fail(1, false);
    assert_int_equal(text_file_read(path, 5, &text, &n, &why), STATUS_OUT_OF_MEMORY);
    heap_fail(0, false);
    unlink(path);
    assert_int_equal(text_file_read(path, 5, &text, &n, &why), STATUS_NOT_FOUND);
    assert_int_equal(text_file_read("/tmp", 5, &text, &n, &why), STATUS_INVALID);
}

static int use_heap(void **state)
{
    (void)state;
    json_use_heap();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trees_are_the_callers),
        cmocka_unit_test(the_arena_is_large_enough),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(small_files_are_read_whole),
    };
    return cmocka_run_group_tests(tests, use_heap, NULL);
}
