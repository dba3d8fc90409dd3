/* A plan from a record: the phases' peaks, what is alive at them, what is committed.
 * links: worker kernels proto base
 * labels: plan */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/memory/plan.h"
#include <cmocka.h> /* last: it has a macro `fail` */

enum { GRANULE = 4096 };

static enum section section;
static enum phase phase;

static bool enter(struct plan *plan, enum phase next)
{
    phase = next;
    return plan_record_event(plan, section, (struct plan_event){PLAN_PHASE, next});
}

static bool reserve(struct plan *plan, const char *name, enum category category, int layer,
                    size_t bytes, uint32_t *out_id)
{
    const struct plan_buffer buffer = {.name = name,
                                       .layer = layer,
                                       .category = category,
                                       .phase = phase,
                                       .bytes = bytes,
                                       .padded = (bytes + 255) / 256 * 256};
    return plan_record_reserve(plan, section, &buffer, out_id);
}

static bool release(struct plan *plan, uint32_t id)
{
    return plan_record_event(plan, section, (struct plan_event){PLAN_RELEASE, id});
}

/* forward: stream 1000 -> 1024, qkv 2 x 512 (layers 0, 1), logits 2048 and gone; backward: a
 * gradient of 512 on top of what is left; step: one buffer of 256. */
static bool record_step(struct plan *plan)
{
    uint32_t stream, qkv[2], logits, grad, parts;
    section = SECTION_FIRST;
    bool ok = enter(plan, PHASE_FORWARD) &&
              reserve(plan, "stream", CATEGORY_ACTIVATIONS, -1, 1000, &stream) &&
              reserve(plan, "qkv", CATEGORY_ACTIVATIONS, 0, 512, &qkv[0]) &&
              reserve(plan, "qkv", CATEGORY_ACTIVATIONS, 1, 512, &qkv[1]) &&
              reserve(plan, "logits", CATEGORY_TEMP, -1, 2048, &logits) && release(plan, logits) &&
              enter(plan, PHASE_BACKWARD) &&
              reserve(plan, "grad", CATEGORY_GRADS, -1, 512, &grad) && release(plan, qkv[1]) &&
              release(plan, qkv[0]) && release(plan, grad) && release(plan, stream);
    section = SECTION_UPDATE;
    return ok && enter(plan, PHASE_STEP) && reserve(plan, "parts", CATEGORY_COMM, -1, 1, &parts) &&
           release(plan, parts);
}

static const struct plan_resident resident = {
    .bytes = {[CATEGORY_PARAMS] = 5000, [CATEGORY_OPTIMIZER] = 10000},
    .committed_bytes = 8 * GRANULE,
};

static void phases_have_their_peaks(void **state)
{
    (void)state;
    struct plan plan;
    struct failure why;
    plan_init(&plan, GRANULE, 0);
    assert_true(record_step(&plan));
    assert_int_equal(plan_finish(&plan, &resident, &why), STATUS_OK);
    const struct plan_phase *forward = &plan.phases[PHASE_FORWARD];
    const struct plan_phase *backward = &plan.phases[PHASE_BACKWARD];
    const struct plan_phase *step = &plan.phases[PHASE_STEP];
    assert_true(forward->used && backward->used && step->used);
    assert_false(plan.phases[PHASE_EVAL].used);
    assert_int_equal(forward->workspace_bytes, 1024 + 2 * 512 + 2048);
    assert_int_equal(backward->workspace_bytes, 1024 + 2 * 512 + 512);
    assert_int_equal(step->workspace_bytes, 256);
    assert_int_equal(forward->peak_bytes, 15000 + 4096);
    assert_int_equal(forward->committed_bytes, 8 * GRANULE + GRANULE);
    assert_int_equal(step->committed_bytes, 8 * GRANULE + GRANULE);
    assert_int_equal(plan.workspace_bytes, 4096);
    assert_int_equal(plan.peak_bytes, 15000 + 4096);
    assert_int_equal(plan.binding_phase, PHASE_FORWARD);
    assert_true(plan.packing_efficiency == 1.0);
    assert_true(plan_layout_is_sound(&plan));
    plan_fini(&plan);
}

static void categories_add_up_to_the_peak(void **state)
{
    (void)state;
    struct plan plan;
    struct failure why;
    plan_init(&plan, GRANULE, 0);
    assert_true(record_step(&plan));
    assert_int_equal(plan_finish(&plan, &resident, &why), STATUS_OK);
    for (int p = 0; p < N_PHASES; p++) {
        uint64_t sum = 0;
        for (int c = 0; c < N_CATEGORIES; c++) {
            sum += plan.phases[p].at_peak[c];
        }
        assert_int_equal(sum, plan.phases[p].peak_bytes);
    }
    assert_int_equal(plan.phases[PHASE_FORWARD].at_peak[CATEGORY_ACTIVATIONS], 2048);
    assert_int_equal(plan.phases[PHASE_FORWARD].at_peak[CATEGORY_TEMP], 2048);
    assert_int_equal(plan.phases[PHASE_FORWARD].at_peak[CATEGORY_PARAMS], 5000);
    assert_int_equal(plan.phases[PHASE_BACKWARD].at_peak[CATEGORY_GRADS], 512);
    assert_int_equal(plan.phases[PHASE_STEP].at_peak[CATEGORY_COMM], 256);
    plan_fini(&plan);
}

/* Buffers of one name are one line, the largest first; what was released is not there. */
static void the_live_set_is_folded(void **state)
{
    (void)state;
    struct plan plan;
    struct failure why;
    struct plan_live lines[4];
    plan_init(&plan, GRANULE, 0);
    assert_true(record_step(&plan));
    assert_int_equal(plan_finish(&plan, &resident, &why), STATUS_OK);
    assert_int_equal(plan_live_set(&plan, PHASE_FORWARD, lines, 4), 3);
    assert_string_equal(lines[0].name, "logits");
    assert_int_equal(lines[0].bytes, 2048);
    assert_string_equal(lines[1].name, "qkv");
    assert_int_equal(lines[1].bytes, 1024);
    assert_int_equal(lines[1].count, 2);
    assert_int_equal(lines[1].layer, 0);
    assert_string_equal(lines[2].name, "stream");
    assert_int_equal(plan_live_set(&plan, PHASE_FORWARD, lines, 2), 2);
    assert_string_equal(lines[1].name, "qkv");
    assert_int_equal(plan_live_set(&plan, PHASE_BACKWARD, lines, 4), 3);
    assert_string_equal(lines[2].name, "grad");
    assert_int_equal(lines[2].category, CATEGORY_GRADS);
    assert_int_equal(plan_live_set(&plan, PHASE_EVAL, lines, 4), 0);
    plan_fini(&plan);
}

/* The top is reached twice: the live set is that of the fuller moment. */
static void the_fuller_moment_is_the_peak(void **state)
{
    (void)state;
    struct plan plan;
    struct failure why;
    struct plan_live lines[4];
    uint32_t low, top, more;
    plan_init(&plan, GRANULE, 0);
    section = SECTION_FIRST;
    assert_true(enter(&plan, PHASE_FORWARD) &&
                reserve(&plan, "low", CATEGORY_TEMP, -1, 512, &low) &&
                reserve(&plan, "top", CATEGORY_TEMP, -1, 256, &top) && release(&plan, low) &&
                reserve(&plan, "half", CATEGORY_TEMP, -1, 256, &low) &&
                reserve(&plan, "more", CATEGORY_COMM, -1, 256, &more) && release(&plan, more) &&
                release(&plan, low) && release(&plan, top));
    assert_int_equal(plan_finish(&plan, &resident, &why), STATUS_OK);
    assert_int_equal(plan.phases[PHASE_FORWARD].workspace_bytes, 768);
    assert_int_equal(plan.phases[PHASE_FORWARD].live_bytes, 768);
    assert_int_equal(plan_live_set(&plan, PHASE_FORWARD, lines, 4), 2);
    plan_fini(&plan);

    /* The first of them is less full here: "low" is gone when the top is reached first. */
    plan_init(&plan, GRANULE, 0);
    assert_true(
        enter(&plan, PHASE_FORWARD) && reserve(&plan, "low", CATEGORY_TEMP, -1, 512, &low) &&
        reserve(&plan, "top", CATEGORY_TEMP, -1, 256, &top) && release(&plan, low) &&
        enter(&plan, PHASE_BACKWARD) && reserve(&plan, "half", CATEGORY_TEMP, -1, 256, &low) &&
        reserve(&plan, "more", CATEGORY_COMM, -1, 256, &more) && release(&plan, more) &&
        release(&plan, low) && release(&plan, top));
    assert_int_equal(plan_finish(&plan, &resident, &why), STATUS_OK);
    const struct plan_phase *backward = &plan.phases[PHASE_BACKWARD];
    assert_int_equal(backward->workspace_bytes, 768);
    assert_int_equal(backward->live_bytes, 768);
    assert_int_equal(plan_live_set(&plan, PHASE_BACKWARD, lines, 4), 3);
    assert_int_equal(backward->at_peak[CATEGORY_COMM], 256);
    assert_int_equal(backward->at_peak[CATEGORY_TEMP], 512);
    plan_fini(&plan);
}

/* A phase that reserves nothing still holds what the ones before it left. */
static void a_phase_inherits_what_is_alive(void **state)
{
    (void)state;
    struct plan plan;
    struct failure why;
    uint32_t id;
    plan_init(&plan, GRANULE, 0);
    section = SECTION_EVAL;
    assert_true(enter(&plan, PHASE_FORWARD) &&
                reserve(&plan, "kept", CATEGORY_ACTIVATIONS, -1, 700, &id) &&
                enter(&plan, PHASE_BACKWARD) && release(&plan, id));
    assert_int_equal(plan_finish(&plan, &resident, &why), STATUS_OK);
    assert_int_equal(plan.phases[PHASE_BACKWARD].workspace_bytes, 768);
    plan_fini(&plan);
}

/* A plan of nothing: the state is all there is. */
static void an_empty_record(void **state)
{
    (void)state;
    struct plan plan;
    struct failure why;
    struct plan_live line;
    plan_init(&plan, GRANULE, 0);
    assert_int_equal(plan_finish(&plan, &resident, &why), STATUS_OK);
    assert_int_equal(plan.peak_bytes, 15000);
    assert_int_equal(plan.committed_bytes, 8 * GRANULE);
    assert_int_equal(plan.workspace_bytes, 0);
    assert_true(plan.packing_efficiency == 1.0);
    assert_int_equal(plan_live_set(&plan, PHASE_FORWARD, &line, 1), 0);
    plan_fini(&plan);
}

static void survives_every_failed_allocation(void **state)
{
    (void)state;
    const int64_t live = heap_live();
    bool clean = false;
    for (uint64_t nth = 1; !clean; nth++) {
        struct plan plan;
        struct failure why = {0};
        heap_fail(nth, false);
        plan_init(&plan, GRANULE, 0);
        const bool recorded = record_step(&plan);
        const enum status status = recorded ? plan_finish(&plan, &resident, &why) : STATUS_OK;
        clean = heap_failures() == 0;
        heap_fail(0, false);
        assert_true(clean ? recorded && status == STATUS_OK
                          : !recorded || status == STATUS_OUT_OF_MEMORY);
        plan_fini(&plan);
        assert_int_equal(heap_live(), live);
        assert_true(nth < 100);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(phases_have_their_peaks),
        cmocka_unit_test(categories_add_up_to_the_peak),
        cmocka_unit_test(the_live_set_is_folded),
        cmocka_unit_test(the_fuller_moment_is_the_peak),
        cmocka_unit_test(a_phase_inherits_what_is_alive),
        cmocka_unit_test(an_empty_record),
        cmocka_unit_test(survives_every_failed_allocation),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
