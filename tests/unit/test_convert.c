/* C nouns to messages and back.
 * links: base proto */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static const struct strategy_limits limits = {4, 2, 16, 128, 6, 3};

static void assert_contains(const char *text, const char *part)
{
    if (strstr(text, part) == NULL) {
        fail_msg("'%s' is not in '%s'", part, text);
    }
}

/* PHASE_FORWARD of the wire is "forward" of ours. */
static void assert_same_name(const ProtobufCEnumDescriptor *descriptor, int wire, const char *ours)
{
    const ProtobufCEnumValue *value = protobuf_c_enum_descriptor_get_value(descriptor, wire);
    assert_non_null(value);
    const char *name = strchr(value->name, '_') + 1;
    for (size_t i = 0; i <= strlen(ours); i++) {
        assert_int_equal(tolower((unsigned char)name[i]), ours[i]);
    }
}

static void enums(void **state)
{
    (void)state;
    for (unsigned i = 0; i < N_PHASES; i++) {
        enum phase back = N_PHASES;
        Ballast__V1__Phase wire = convert_phase_to_wire((enum phase)i);
        assert_same_name(&ballast__v1__phase__descriptor, (int)wire, phase_name((enum phase)i));
        assert_true(convert_phase_from_wire(wire, &back));
        assert_int_equal(back, i);
    }
    for (unsigned i = 0; i < N_TIERS; i++) {
        enum tier back = N_TIERS;
        Ballast__V1__Tier wire = convert_tier_to_wire((enum tier)i);
        assert_same_name(&ballast__v1__tier__descriptor, (int)wire, tier_name((enum tier)i));
        assert_true(convert_tier_from_wire(wire, &back));
        assert_int_equal(back, i);
    }
    for (unsigned i = 0; i < N_CATEGORIES; i++) {
        enum category back = N_CATEGORIES;
        Ballast__V1__Category wire = convert_category_to_wire((enum category)i);
        assert_same_name(&ballast__v1__category__descriptor, (int)wire,
                         category_name((enum category)i));
        assert_true(convert_category_from_wire(wire, &back));
        assert_int_equal(back, i);
    }
    enum phase phase = PHASE_STEP;
    assert_int_equal(convert_phase_to_wire(N_PHASES), BALLAST__V1__PHASE__PHASE_UNSPECIFIED);
    assert_false(convert_phase_from_wire(BALLAST__V1__PHASE__PHASE_UNSPECIFIED, &phase));
    assert_false(convert_phase_from_wire((Ballast__V1__Phase)8, &phase));
    assert_false(convert_phase_from_wire((Ballast__V1__Phase)-1, &phase));
    assert_int_equal(phase, PHASE_STEP);
}

static void strategy_round_trip(void **state)
{
    (void)state;
    int64_t live = heap_live();
    struct failure why = {0};
    struct strategy base, changed, back;
    strategy_default(&base, &limits);
    changed = base;
    assert_int_equal(strategy_set(&changed, "checkpointing", "block:2", &why), STATUS_OK);
    assert_int_equal(strategy_set(&changed, "offload.optimizer.fraction", "0.125", &why),
                     STATUS_OK);
    Ballast__V1__Setting **settings;
    size_t n;
    assert_int_equal(convert_strategy_to_settings(NULL, &changed, &settings, &n), STATUS_OK);
    assert_int_equal(n, strategy_n_keys());
    back = base;
    assert_int_equal(convert_settings_to_strategy(settings, n, &back, &why), STATUS_OK);
    assert_true(strategy_equal(&back, &changed));
    heap_free(settings);
    assert_int_equal(convert_strategy_to_settings(&base, &changed, &settings, &n), STATUS_OK);
    assert_int_equal(n, 2);
    assert_string_equal(settings[0]->key, "checkpointing");
    assert_string_equal(settings[0]->value, "block:2");
    assert_string_equal(settings[1]->key, "offload.optimizer.fraction");
    assert_string_equal(settings[1]->value, "0.125");
    /* It packs like any other message. */
    Ballast__V1__PlanSummary plan = BALLAST__V1__PLAN_SUMMARY__INIT;
    plan.n_strategy = n;
    plan.strategy = settings;
    uint8_t *bytes;
    size_t n_bytes;
    assert_int_equal(frame_encode(&plan.base, &bytes, &n_bytes), STATUS_OK);
    heap_free(bytes);
    heap_free(settings);
    assert_int_equal(convert_strategy_to_settings(&base, &base, &settings, &n), STATUS_OK);
    assert_int_equal(n, 0);
    heap_free(settings);
    assert_int_equal(heap_live(), live);
}

static void bad_settings(void **state)
{
    (void)state;
    struct strategy strategy, base;
    strategy_default(&base, &limits);
    strategy = base;
    Ballast__V1__Setting a = BALLAST__V1__SETTING__INIT, b = BALLAST__V1__SETTING__INIT;
    Ballast__V1__Setting *list[] = {&a, &b};
    struct failure why = {0};
    a.key = "micro_batch";
    a.value = "2";
    b.key = "zero.stage";
    b.value = "9";
    assert_int_equal(convert_settings_to_strategy(list, 2, &strategy, &why), STATUS_OUT_OF_RANGE);
    assert_contains(why.text, "zero.stage=9: must be 0..3");
    assert_memory_equal(&strategy, &base, sizeof base);
    b.key = "micro_batch";
    b.value = "4";
    assert_int_equal(convert_settings_to_strategy(list, 2, &strategy, &why), STATUS_CONFLICT);
    assert_contains(why.text, "micro_batch is given twice: 2 and 4");
    b.key = "nothing";
    assert_int_equal(convert_settings_to_strategy(list, 2, &strategy, &why), STATUS_UNKNOWN_KEY);
    assert_memory_equal(&strategy, &base, sizeof base);
    assert_int_equal(convert_settings_to_strategy(NULL, 0, &strategy, &why), STATUS_OK);
}

static void limits_round_trip(void **state)
{
    (void)state;
    Ballast__V1__Setting **settings;
    size_t n;
    struct failure why = {0};
    struct strategy_limits back = {0};
    assert_int_equal(convert_limits_to_settings(&limits, &settings, &n), STATUS_OK);
    assert_int_equal(n, 6);
    assert_string_equal(settings[2]->key, "global_batch");
    assert_string_equal(settings[2]->value, "16");
    assert_int_equal(convert_limits_from_settings(settings, n, &back, &why), STATUS_OK);
    assert_memory_equal(&back, &limits, sizeof limits);
    memset(&back, 0, sizeof back);
    assert_int_equal(convert_limits_from_settings(settings, n - 1, &back, &why), STATUS_INVALID);
    assert_contains(why.text, "limit n_kv_heads is missing");
    settings[0]->key = "n_blocks";
    assert_int_equal(convert_limits_from_settings(settings, n, &back, &why), STATUS_INVALID);
    assert_contains(why.text, "limit n_layers is missing");
    settings[1]->value[0] = 'x';
    assert_int_equal(convert_limits_from_settings(settings, n, &back, &why), STATUS_INVALID);
    assert_contains(why.text, "limit world_size=x: must be");
    assert_int_equal(back.seq_len, 0);
    heap_free(settings);
}

static void accounts_and_phases(void **state)
{
    (void)state;
    struct account account = {0}, back;
    account.bytes[TIER_DEVICE][CATEGORY_PARAMS] = 100;
    account.bytes[TIER_HOST][CATEGORY_EXTERNAL] = UINT64_C(1) << 40;
    Ballast__V1__MemoryEntry **entries;
    size_t n;
    assert_int_equal(convert_account_to_entries(&account, &entries, &n), STATUS_OK);
    assert_int_equal(n, 2);
    assert_int_equal(entries[1]->tier, BALLAST__V1__TIER__TIER_HOST);
    assert_int_equal(entries[1]->category, BALLAST__V1__CATEGORY__CATEGORY_EXTERNAL);
    convert_entries_to_account(entries, n, &back);
    assert_memory_equal(&back, &account, sizeof account);
    entries[0]->tier = BALLAST__V1__TIER__TIER_UNSPECIFIED;
    convert_entries_to_account(entries, n, &back);
    assert_int_equal(back.bytes[TIER_DEVICE][CATEGORY_PARAMS], 0);
    heap_free(entries);

    const uint64_t bytes[N_PHASES] = {1, 2, 3, 4, 5, 6, 7};
    const double ms[N_PHASES] = {0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5};
    unsigned phases = 1U << PHASE_FORWARD | 1U << PHASE_STEP;
    Ballast__V1__PhaseBytes **sizes;
    Ballast__V1__PhaseTime **times;
    assert_int_equal(convert_phase_bytes(bytes, phases, &sizes, &n), STATUS_OK);
    assert_int_equal(n, 2);
    assert_int_equal(sizes[1]->phase, BALLAST__V1__PHASE__PHASE_STEP);
    assert_int_equal(sizes[1]->bytes, 4);
    heap_free(sizes);
    assert_int_equal(convert_phase_times(ms, phases, &times, &n), STATUS_OK);
    assert_int_equal(n, 2);
    assert_int_equal(times[0]->phase, BALLAST__V1__PHASE__PHASE_FORWARD);
    assert_true(times[0]->ms == 1.5);
    heap_free(times);
}

static void out_of_memory(void **state)
{
    (void)state;
    struct strategy strategy;
    strategy_default(&strategy, &limits);
    struct account account = {0};
    const uint64_t bytes[N_PHASES] = {0};
    const double ms[N_PHASES] = {0};
    Ballast__V1__Setting **settings = NULL;
    Ballast__V1__MemoryEntry **entries = NULL;
    Ballast__V1__PhaseBytes **sizes = NULL;
    Ballast__V1__PhaseTime **times = NULL;
    size_t n = 99;
    heap_fail(1, true);
    assert_int_equal(convert_strategy_to_settings(NULL, &strategy, &settings, &n),
                     STATUS_OUT_OF_MEMORY);
    assert_int_equal(convert_limits_to_settings(&limits, &settings, &n), STATUS_OUT_OF_MEMORY);
    assert_int_equal(convert_account_to_entries(&account, &entries, &n), STATUS_OUT_OF_MEMORY);
    assert_int_equal(convert_phase_bytes(bytes, 127, &sizes, &n), STATUS_OUT_OF_MEMORY);
    assert_int_equal(convert_phase_times(ms, 127, &times, &n), STATUS_OUT_OF_MEMORY);
    heap_fail(0, false);
    assert_int_equal(n, 99);
    assert_null(settings);
}

static void now(void **state)
{
    (void)state;
    char text[UNITS_TEXT_BYTES];
    convert_now(text);
    int year, month, day, hour, minute, second, ms, used = 0;
    assert_int_equal(sscanf(text, "%4d-%2d-%2dT%2d:%2d:%2d.%3dZ%n", &year, &month, &day, &hour,
                            &minute, &second, &ms, &used),
                     7);
    assert_int_equal(used, 24);
    assert_int_equal(strlen(text), 24);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(enums),
        cmocka_unit_test(strategy_round_trip),
        cmocka_unit_test(bad_settings),
        cmocka_unit_test(limits_round_trip),
        cmocka_unit_test(accounts_and_phases),
        cmocka_unit_test(out_of_memory),
        cmocka_unit_test(now),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
