/* Events: copies, lines of events.jsonl, and back.
 * links: base proto */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/event.h"
#include "proto/frame.h"
#include "proto/json.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static Ballast__V1__Event *new_event(const char *details)
{
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    char time[] = "2026-01-02T03:04:05.678Z", type[] = "switch";
    char text[] = "a \"text\"\nof two lines";
    event.time = time;
    event.type = type;
    event.step = 12;
    event.rank = -1;
    event.text = text;
    event.details_json = (char *)details;
    event.sequence = 7;
    Ballast__V1__Event *copy = event_copy(&event);
    assert_non_null(copy);
    return copy;
}

static void copies_are_their_own(void **state)
{
    (void)state;
    Ballast__V1__Event *event = new_event("{}");
    Ballast__V1__Event *copy = event_copy(event);
    assert_ptr_not_equal(copy->text, event->text);
    frame_free(&event->base);
    assert_string_equal(copy->text, "a \"text\"\nof two lines");
    assert_int_equal(copy->sequence, 7);
    frame_free(&copy->base);
    Ballast__V1__Event large = BALLAST__V1__EVENT__INIT;
    large.text = calloc(1, FRAME_MAX_BYTES + 1);
    memset(large.text, 'x', FRAME_MAX_BYTES);
    assert_null(event_copy(&large));
    free(large.text);
    assert_int_equal(heap_live(), 0);
}

static void lines_and_back(void **state)
{
    (void)state;
    Ballast__V1__Event *event = new_event("{\"bytes\":3,\"x\":0.1,\"type\":\"other\"}");
    char *line = event_format(event);
    assert_string_equal(line, "{\"time\":\"2026-01-02T03:04:05.678Z\",\"type\":\"switch\","
                              "\"step\":12,\"generation\":0,"
                              "\"text\":\"a \\\"text\\\"\\nof two lines\","
                              "\"bytes\":3,\"x\":0.10000000000000001}");
    frame_free(&event->base);
    assert_int_equal(event_parse(line, strlen(line), 9, &event), STATUS_OK);
    assert_string_equal(event->time, "2026-01-02T03:04:05.678Z");
    assert_string_equal(event->type, "switch");
    assert_int_equal(event->step, 12);
    assert_int_equal(event->rank, -1);
    assert_int_equal(event->phase, BALLAST__V1__PHASE__PHASE_UNSPECIFIED);
    assert_string_equal(event->text, "a \"text\"\nof two lines");
    assert_string_equal(event->details_json, "{\"bytes\":3,\"x\":0.10000000000000001}");
    assert_int_equal(event->sequence, 9);
    event->rank = 3;
    event->phase = BALLAST__V1__PHASE__PHASE_SAVE;
    heap_free(line);
    line = event_format(event);
    assert_non_null(strstr(line, "\"step\":12,\"rank\":3,\"phase\":\"save\",\"generation\":0"));
    frame_free(&event->base);
    assert_int_equal(event_parse(line, strlen(line), 9, &event), STATUS_OK);
    assert_int_equal(event->rank, 3);
    assert_int_equal(event->phase, BALLAST__V1__PHASE__PHASE_SAVE);
    frame_free(&event->base);
    heap_free(line);
    assert_int_equal(heap_live(), 0);
}

static void bad_details_are_left_out(void **state)
{
    (void)state;
    static const char *const bad[] = {"{", "[1]", "nonsense", "{\"a\":1,\"a\":2}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Ballast__V1__Event *event = new_event(bad[i]);
        char *line = event_format(event);
        assert_string_equal(line,
                            "{\"time\":\"2026-01-02T03:04:05.678Z\",\"type\":\"switch\","
                            "\"step\":12,\"generation\":0,"
                            "\"text\":\"a \\\"text\\\"\\nof two lines\"}");
        heap_free(line);
        frame_free(&event->base);
    }
}

static void bad_lines_are_no_events(void **state)
{
    (void)state;
    static const char *const bad[] = {"",           "[]",              "{}",
                                      "{\"type\":3}", "{\"type\":\"x\"", "nonsense"};
    Ballast__V1__Event *event = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(event_parse(bad[i], strlen(bad[i]), 1, &event), STATUS_MALFORMED);
    assert_null(event);
    assert_int_equal(heap_live(), 0);
}

/* Allocation number 1, 2, 3, ... fails: nothing is half there, nothing is lost. */
static void survives_every_failed_allocation(void **state)
{
    (void)state;
    Ballast__V1__Event *event = new_event("{\"bytes\":3}");
    char *whole = event_format(event);
    bool failed = true;
    uint64_t n = 0;
    while (failed) {
        heap_fail(++n, false);
        char *line = event_format(event);
        Ballast__V1__Event *parsed = NULL;
        enum status status = event_parse(whole, strlen(whole), 1, &parsed);
        failed = heap_failures() > 0;
        heap_fail(0, false);
        if (line)
            assert_string_equal(line, whole);
        if (status == STATUS_OK)
            assert_string_equal(parsed->details_json, "{\"bytes\":3}");
        else
            assert_int_equal(status, STATUS_OUT_OF_MEMORY);
        assert_true(failed || (line && parsed));
        heap_free(line);
        frame_free(parsed ? &parsed->base : NULL);
    }
    assert_true(n > 20);
    heap_free(whole);
    frame_free(&event->base);
    assert_int_equal(heap_live(), 0);
}

int main(void)
{
    json_use_heap();
    log_quiet(true); /* bad details are said */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_are_their_own),
        cmocka_unit_test(lines_and_back),
        cmocka_unit_test(bad_details_are_left_out),
        cmocka_unit_test(bad_lines_are_no_events),
        cmocka_unit_test(survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
