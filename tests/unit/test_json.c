/* Messages as JSON.
 * links: base proto */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/control.pb-c.h"
#include "proto/json.h"
#include "proto/run.pb-c.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static int use_heap(void **state)
{
    (void)state;
    json_use_heap();
    return 0;
}

static void assert_json(json_t *value, const char *expected)
{
    assert_non_null(value);
    char *text = json_format(value, JSON_LINE_FLAGS | JSON_ENCODE_ANY);
    assert_non_null(text);
    assert_string_equal(text, expected);
    heap_free(text);
    json_decref(value);
}

/* A step record whose parts live in the caller's frame. */
struct example {
    Ballast__V1__StepRecord step;
    Ballast__V1__PhaseTime time, *times[1];
    Ballast__V1__PhaseBytes peaks[2], *peak_list[2];
    Ballast__V1__Setting settings[3], *setting_list[3];
};

static void make_example(struct example *example)
{
    ballast__v1__step_record__init(&example->step);
    ballast__v1__phase_time__init(&example->time);
    example->time.phase = BALLAST__V1__PHASE__PHASE_FORWARD;
    example->time.ms = 12.5;
    example->times[0] = &example->time;
    static char *const keys[] = {"checkpointing", "zero.stage", "offload.optimizer.fraction"};
    static char *const values[] = {"block:2", "2", "0.25"};
    for (int i = 0; i < 3; i++) {
        ballast__v1__setting__init(&example->settings[i]);
        example->settings[i].key = keys[i];
        example->settings[i].value = values[i];
        example->setting_list[i] = &example->settings[i];
    }
    for (int i = 0; i < 2; i++) {
        ballast__v1__phase_bytes__init(&example->peaks[i]);
        example->peaks[i].phase = (Ballast__V1__Phase)(BALLAST__V1__PHASE__PHASE_BACKWARD + i);
        example->peaks[i].bytes = UINT64_C(9007199254740993) + (unsigned)i;
        example->peak_list[i] = &example->peaks[i];
    }
    Ballast__V1__StepRecord *step = &example->step;
    step->time = "2026-01-02T03:04:05.678Z";
    step->loss = 0.1;
    step->grad_norm = NAN;
    step->lr = 3;
    step->tokens = 4096;
    step->n_phase_ms = 1;
    step->phase_ms = example->times;
    step->n_peak_bytes = 2;
    step->peak_bytes = example->peak_list;
    step->n_strategy = 3;
    step->strategy = example->setting_list;
    step->skipped = 1;
}

static const char example_text[] =
    "{\"time\":\"2026-01-02T03:04:05.678Z\",\"step\":0,\"loss\":0.10000000000000001,"
    "\"grad_norm\":null,\"lr\":3.0,\"tokens\":4096,\"tokens_per_second\":0.0,\"step_ms\":0.0,"
    "\"phase_ms\":{\"forward\":12.5},"
    "\"peak_bytes\":{\"backward\":9007199254740993,\"step\":9007199254740994},"
    "\"planned_bytes\":{},\"generation\":0,"
    "\"strategy\":{\"checkpointing\":\"block:2\",\"zero.stage\":2,"
    "\"offload.optimizer.fraction\":0.25},\"loss_scale\":0.0,\"skipped\":true}";

static void a_step_record(void **state)
{
    (void)state;
    struct example example;
    make_example(&example);
    assert_json(json_from_message(&example.step.base), example_text);
}

static void what_is_absent_is_omitted(void **state)
{
    (void)state;
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    event.type = "save";
    event.rank = -1;
    assert_json(json_from_message(&event.base),
                "{\"type\":\"save\",\"step\":0,\"rank\":-1,\"generation\":0,\"sequence\":0}");
    event.phase = BALLAST__V1__PHASE__PHASE_SAVE;
    event.text = "not \xFF text";
    assert_json(json_from_message(&event.base),
                "{\"type\":\"save\",\"step\":0,\"rank\":-1,\"phase\":\"save\",\"generation\":0,"
                "\"text\":\"not ? text\",\"sequence\":0}");
    event.phase = (Ballast__V1__Phase)99;
    json_t *object = json_from_message(&event.base);
    assert_string_equal(json_string_value(json_object_get(object, "phase")), "99");
    json_decref(object);
}

static void oneofs_and_lists(void **state)
{
    (void)state;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    Ballast__Control__V1__WaitRequest wait = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    request.id = 3;
    assert_json(json_from_message(&request.base), "{\"id\":3}");
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_WAIT;
    request.wait = &wait;
    assert_json(json_from_message(&request.base), "{\"id\":3,\"wait\":{}}");
    wait.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_GENERATION;
    wait.generation = 0;
    assert_json(json_from_message(&request.base), "{\"id\":3,\"wait\":{\"generation\":0}}");
    wait.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_END;
    wait.end = 1;
    assert_json(json_from_message(&request.base), "{\"id\":3,\"wait\":{\"end\":true}}");

    Ballast__V1__MemoryEntry entry = BALLAST__V1__MEMORY_ENTRY__INIT, *entries[] = {&entry};
    Ballast__V1__PhasePlan plan = BALLAST__V1__PHASE_PLAN__INIT;
    entry.tier = BALLAST__V1__TIER__TIER_NVME;
    entry.category = BALLAST__V1__CATEGORY__CATEGORY_OPTIMIZER;
    entry.bytes = UINT64_MAX;
    plan.n_at_peak = 1;
    plan.at_peak = entries;
    json_t *object = json_from_message(&plan.base);
    json_t *first = json_array_get(json_object_get(object, "at_peak"), 0);
    assert_string_equal(json_string_value(json_object_get(first, "tier")), "nvme");
    assert_string_equal(json_string_value(json_object_get(first, "category")), "optimizer");
    assert_true(json_real_value(json_object_get(first, "bytes")) == 18446744073709551616.0);
    assert_int_equal(json_array_size(json_object_get(object, "live")), 0);
    assert_true(json_is_array(json_object_get(object, "live")));
    json_decref(object);

    char *reasons[] = {"a", "b"};
    Ballast__Control__V1__StatusReply status = BALLAST__CONTROL__V1__STATUS_REPLY__INIT;
    status.n_reasons = 2;
    status.reasons = reasons;
    object = json_from_message(&status.base);
    assert_json(json_incref(json_object_get(object, "reasons")), "[\"a\",\"b\"]");
    json_decref(object);
}

static void bytes_are_base64(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *text;
    } cases[] = {{"", "{\"file_descriptor_set\":\"\"}"},
                 {"f", "{\"file_descriptor_set\":\"Zg==\"}"},
                 {"fo", "{\"file_descriptor_set\":\"Zm8=\"}"},
                 {"foo\xFF\xFE\xFD", "{\"file_descriptor_set\":\"Zm9v//79\"}"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Ballast__Control__V1__SchemaReply reply = BALLAST__CONTROL__V1__SCHEMA_REPLY__INIT;
        reply.file_descriptor_set.len = strlen(cases[i].bytes);
        reply.file_descriptor_set.data = (uint8_t *)(uintptr_t)cases[i].bytes;
        assert_json(json_from_message(&reply.base), cases[i].text);
    }
}

static void numbers(void **state)
{
    (void)state;
    assert_json(json_number(1.0 / 3), "0.33333333333333331");
    assert_json(json_number(INFINITY), "null");
    assert_json(json_count(INT64_MAX), "9223372036854775807");
    assert_json(json_text("\xC3\xA9\x80"), "\"\xC3\xA9?\"");
    json_t *text = json_number(1.0 / 3);
    assert_true(json_real_value(text) == 1.0 / 3);
    json_decref(text);
}

static void every_allocation_fails(void **state)
{
    (void)state;
    struct example example;
    make_example(&example);
    example.settings[0].value = "\xFF";
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        int64_t live = heap_live();
        uint64_t nth = 1, failures = 1;
        for (; failures > 0; nth++) {
            assert_true(nth < 1000);
            heap_fail(nth, for_ever == 1);
            json_t *object = json_from_message(&example.step.base);
            failures = heap_failures();
            heap_fail(0, false);
            assert_int_equal(object == NULL, failures > 0);
            json_decref(object);
            assert_int_equal(heap_live(), live);
        }
        assert_true(nth > 20);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_record),    cmocka_unit_test(what_is_absent_is_omitted),
        cmocka_unit_test(oneofs_and_lists), cmocka_unit_test(bytes_are_base64),
        cmocka_unit_test(numbers),          cmocka_unit_test(every_allocation_fails),
    };
    return cmocka_run_group_tests(tests, use_heap, NULL);
}
