/* The out-of-memory report: what is filled in, and how it reads.
 * links: worker kernels proto base
 * labels: memory */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/memory/oom.h"
#include <cmocka.h> /* last: it has a macro `fail` */

enum { MIB = 1 << 20 };

/* forward: stream 1 MiB, then per layer qkv 2 MiB; backward: logits_grad of 4 MiB on top. */
static void make_plan(struct plan *plan)
{
    struct failure why;
    const struct plan_resident resident = {
        .bytes = {[CATEGORY_PARAMS] = 8 * MIB, [CATEGORY_OPTIMIZER] = 16 * MIB},
        .committed_bytes = 24 * MIB};
    plan_init(plan, 4096, 0);
    const struct {
        const char *name;
        int layer;
        enum phase phase;
        enum category category;
        size_t bytes;
    } rows[] = {
        {"stream", -1, PHASE_FORWARD, CATEGORY_ACTIVATIONS, MIB},
        {"qkv", 0, PHASE_FORWARD, CATEGORY_ACTIVATIONS, 2 * MIB},
        {"qkv", 1, PHASE_FORWARD, CATEGORY_ACTIVATIONS, 2 * MIB},
        {"logits_grad", -1, PHASE_BACKWARD, CATEGORY_TEMP, 4 * MIB},
    };
    enum phase phase = PHASE_SETUP;
    uint32_t ids[4];
    for (size_t i = 0; i < 4; i++) {
        if (rows[i].phase != phase) {
            phase = rows[i].phase;
            assert_true(
                plan_record_event(plan, SECTION_FIRST, (struct plan_event){PLAN_PHASE, phase}));
        }
        assert_true(plan_record_reserve(plan, SECTION_FIRST,
                                        &(struct plan_buffer){.name = rows[i].name,
                                                              .layer = rows[i].layer,
                                                              .category = rows[i].category,
                                                              .phase = phase,
                                                              .bytes = rows[i].bytes,
                                                              .padded = rows[i].bytes},
                                        &ids[i]));
    }
    for (size_t i = 4; i-- > 0;) {
        assert_true(
            plan_record_event(plan, SECTION_FIRST, (struct plan_event){PLAN_RELEASE, ids[i]}));
    }
    assert_int_equal(plan_finish(plan, &resident, &why), STATUS_OK);
}

static const uint64_t held[N_CATEGORIES] = {
    [CATEGORY_PARAMS] = 8 * MIB, [CATEGORY_OPTIMIZER] = 16 * MIB};
static const uint64_t actual[N_PHASES] = {[PHASE_FORWARD] = 29 * MIB};

static struct shortage shortage_in(enum phase phase)
{
    return (struct shortage){.any = true,
                             .rank = 3,
                             .phase = phase,
                             .asked_bytes = 4 * MIB,
                             .held_bytes = 29 * MIB,
                             .limit_bytes = 30 * MIB};
}

static void the_first_buffer_without_room_is_named(void **state)
{
    (void)state;
    struct plan plan;
    struct oom_report report;
    make_plan(&plan);
    const struct shortage forward = shortage_in(PHASE_FORWARD);
    /* 2 MiB are there: the first qkv begins below and ends above. */
    oom_fill(&report, &forward, &plan, 2 * MIB, 7, 2, held, actual);
    assert_string_equal(report.tensor, "qkv");
    assert_int_equal(report.layer, 0);
    assert_int_equal(report.category, CATEGORY_ACTIVATIONS);
    oom_fill(&report, &forward, &plan, 3 * MIB, 7, 2, held, actual);
    assert_int_equal(report.layer, 1);
    const struct shortage backward = shortage_in(PHASE_BACKWARD);
    oom_fill(&report, &backward, &plan, 5 * MIB, 7, 2, held, actual);
    assert_string_equal(report.tensor, "logits_grad");
    assert_int_equal(report.layer, -1);
    /* Room for all: the largest at the peak. */
    oom_fill(&report, &backward, &plan, 64 * MIB, 7, 2, held, actual);
    assert_string_equal(report.tensor, "logits_grad");
    /* A phase without a buffer. */
    const struct shortage save = shortage_in(PHASE_SAVE);
    oom_fill(&report, &save, &plan, 0, 7, 2, held, actual);
    assert_string_equal(report.tensor, "workspace");
    plan_fini(&plan);
}

static void numbers_are_carried_over(void **state)
{
    (void)state;
    struct plan plan;
    struct oom_report report;
    make_plan(&plan);
    struct shortage shortage = shortage_in(PHASE_BACKWARD);
    oom_fill(&report, &shortage, &plan, 5 * MIB, 7, 2, held, actual);
    assert_int_equal(report.step, 7);
    assert_int_equal(report.rank, 3);
    assert_int_equal(report.micro_step, 2);
    assert_int_equal(report.phase, PHASE_BACKWARD);
    assert_int_equal(report.tier, TIER_DEVICE);
    assert_int_equal(report.asked_bytes, 4 * MIB);
    assert_int_equal(report.held_bytes, 29 * MIB);
    assert_int_equal(report.limit_bytes, 30 * MIB);
    assert_int_equal(report.planned[PHASE_FORWARD], 29 * MIB);
    assert_int_equal(report.planned[PHASE_BACKWARD], 33 * MIB);
    assert_int_equal(report.planned[PHASE_EVAL], 0); /* never entered */
    assert_int_equal(report.actual[PHASE_FORWARD], 29 * MIB);
    assert_int_equal(report.n_live, 3);
    uint64_t live = 0;
    for (size_t i = 0; i < report.n_live; i++) {
        live += report.live[i].bytes;
    }
    assert_int_equal(live, 9 * MIB);
    assert_string_equal(report.cause, "over the device's capacity");
    shortage.node = true;
    oom_fill(&report, &shortage, &plan, 0, 7, 2, held, actual);
    assert_int_equal(report.tier, TIER_HOST);
    assert_string_equal(report.cause, "the node has no more memory");
    shortage.on_purpose = true;
    oom_fill(&report, &shortage, &plan, 0, 7, 2, held, actual);
    assert_string_equal(report.cause, "fault on purpose");
    plan_fini(&plan);
}

static void it_reads_like_this(void **state)
{
    (void)state;
    struct plan plan;
    struct oom_report report;
    make_plan(&plan);
    const struct shortage shortage = shortage_in(PHASE_FORWARD);
    oom_fill(&report, &shortage, &plan, 2 * MIB, 7, 2, held, actual);
    snprintf(report.remedies[0].text, sizeof report.remedies[0].text, "checkpointing=block:1");
    report.n_remedies = 1;
    snprintf(report.outcome, sizeof report.outcome, "saved step 7");
    char *text;
    size_t n;
    FILE *out = open_memstream(&text, &n);
    oom_print(&report, out);
    fclose(out);
    static const char *const parts[] = {
        "out of memory: forward phase, step 7, micro-step 2, rank 3 (over the device's capacity)\n",
        "qkv (activations, layer 0): ",
        "asked, ",
        "limit ",
        "params",
        "optimizer",
        "stream",
        "\n  1. checkpointing=block:1\n",
        "\n  saved step 7\n"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (strstr(text, parts[i]) == NULL) {
            fail_msg("'%s' is missing in:\n%s", parts[i], text);
        }
    }
    assert_null(strstr(text, "grads")); /* nothing held, not told */
    free(text);
    plan_fini(&plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_buffer_without_room_is_named),
        cmocka_unit_test(numbers_are_carried_over),
        cmocka_unit_test(it_reads_like_this),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
