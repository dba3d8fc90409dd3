/* Packing: no overlap, nested phases, little waste.
 * links: worker kernels proto base
 * labels: plan */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/memory/pack.h"
#include "worker/memory/repack.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static uint64_t random_state;

static uint32_t pick(uint32_t low, uint32_t high)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return low + (uint32_t)((random_state >> 33) % (high - low + 1));
}

static uint32_t reserve(struct plan *plan, size_t bytes)
{
    const struct plan_buffer buffer = {.name = "b",
                                       .layer = -1,
                                       .category = CATEGORY_TEMP,
                                       .phase = PHASE_FORWARD,
                                       .bytes = bytes,
                                       .padded = (bytes + 255) / 256 * 256};
    uint32_t id;
    assert_true(plan_record_reserve(plan, SECTION_FIRST, &buffer, &id));
    return id;
}

static void release(struct plan *plan, uint32_t id)
{
    assert_true(plan_record_event(plan, SECTION_FIRST, (struct plan_event){PLAN_RELEASE, id}));
}

/* Overlap, asked of every pair at every moment: slow, and not the way the packing itself asks. */
static bool overlaps(const struct plan_section *section)
{
    enum { MOST = 512 };
    uint32_t live[MOST];
    size_t n = 0;
    for (uint32_t at = 0; at < section->n_events; at++) {
        const struct plan_event event = section->events[at];
        if (event.kind == PLAN_RELEASE) {
            for (size_t i = 0; i < n; i++) {
                if (live[i] == event.id) {
                    live[i] = live[--n];
                    break;
                }
            }
            continue;
        }
        const struct plan_buffer *a = &section->buffers[event.id];
        for (size_t i = 0; i < n; i++) {
            const struct plan_buffer *b = &section->buffers[live[i]];
            if (a->offset < b->offset + b->padded && b->offset < a->offset + a->padded) {
                return true;
            }
        }
        assert_true(n < MOST);
        live[n++] = event.id;
    }
    return false;
}

static size_t highest_end(const struct plan_section *section)
{
    size_t high = 0;
    for (uint32_t i = 0; i < section->n_buffers; i++) {
        const size_t end = section->buffers[i].offset + section->buffers[i].padded;
        high = end > high ? end : high;
    }
    return high;
}

/* A trace of up to `most` buffers that come and go in any order. */
static void record_random(struct plan *plan, uint32_t most)
{
    uint32_t live[64];
    size_t n = 0;
    for (uint32_t i = 0; i < most; i++) {
        while (n == 64 || (n > 0 && pick(0, 2) == 0)) {
            const uint32_t at = pick(0, (uint32_t)n - 1);
            release(plan, live[at]);
            live[at] = live[--n];
        }
        live[n++] = reserve(plan, pick(1, 1u << pick(2, 20)));
    }
    /* Some are never released: they live to the end. */
    while (n > 3) {
        release(plan, live[--n]);
    }
}

static void random_traces_do_not_overlap(void **state)
{
    (void)state;
    random_state = 42;
    double worst = 1.0;
    for (int round = 0; round < 60; round++) {
        struct plan plan;
        struct failure why;
        plan_init(&plan, 4096, 0);
        record_random(&plan, pick(1, 120));
        struct plan_section *section = &plan.sections[SECTION_FIRST];
        assert_int_equal(pack_section(section, &why), STATUS_OK);
        assert_false(overlaps(section));
        assert_true(pack_is_sound(section));
        assert_int_equal(highest_end(section), section->high_water_bytes);
        assert_true(section->live_peak_bytes <= section->high_water_bytes);
        const double efficiency =
            (double)section->live_peak_bytes / (double)section->high_water_bytes;
        worst = efficiency < worst ? efficiency : worst;
        /* An overlap is seen: move one buffer into another that lives at the same time. */
        if (section->n_buffers > 1 && section->events[1].kind == PLAN_RESERVE) {
            section->buffers[1].offset = section->buffers[0].offset;
            assert_false(pack_is_sound(section));
        }
        plan_fini(&plan);
    }
    print_message("random traces: worst efficiency %.4f\n", worst);
    assert_true(worst > 0.9);
}

/* What comes and goes like a stack is packed without a gap, and a place depends on earlier
 * events only. */
static void a_stack_is_packed_tight(void **state)
{
    (void)state;
    struct plan plan;
    struct failure why;
    uint32_t ids[8];
    plan_init(&plan, 4096, 0);
    for (uint32_t i = 0; i < 8; i++) {
        ids[i] = reserve(&plan, 1000 * (i + 1));
    }
    for (uint32_t i = 8; i-- > 0;) {
        release(&plan, ids[i]);
    }
    struct plan_section *section = &plan.sections[SECTION_FIRST];
    assert_int_equal(pack_section(section, &why), STATUS_OK);
    size_t expected = 0;
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(section->buffers[i].offset, expected);
        expected += section->buffers[i].padded;
    }
    assert_int_equal(section->high_water_bytes, expected);
    assert_int_equal(section->live_peak_bytes, expected);
    plan_fini(&plan);
}

/* The order of start leaves a hole that another layout does not: a (long) between two short ones,
 * then one as large as both. */
static void a_hole_is_packed_away(void **state)
{
    (void)state;
    struct plan plan;
    struct failure why;
    plan_init(&plan, 4096, 0);
    const uint32_t a = reserve(&plan, 4096);
    const uint32_t b = reserve(&plan, 1024);
    const uint32_t c = reserve(&plan, 4096);
    release(&plan, a);
    release(&plan, c);
    const uint32_t d = reserve(&plan, 8192);
    release(&plan, d);
    release(&plan, b);
    struct plan_section *section = &plan.sections[SECTION_FIRST];
    assert_int_equal(pack_section(section, &why), STATUS_OK);
    assert_int_equal(section->live_peak_bytes, 9216);
    assert_int_equal(section->high_water_bytes, 9216);
    assert_false(overlaps(section));
    plan_fini(&plan);
}

/* Better or nothing: a goal that is met already changes no offset. */
static void repacking_never_makes_it_worse(void **state)
{
    (void)state;
    random_state = 7;
    for (int round = 0; round < 10; round++) {
        struct plan plan;
        struct failure why;
        plan_init(&plan, 4096, 0);
        record_random(&plan, 60);
        struct plan_section *section = &plan.sections[SECTION_FIRST];
        assert_int_equal(pack_section(section, &why), STATUS_OK);
        const size_t before = section->high_water_bytes;
        repack_section(section, before);
        assert_int_equal(section->high_water_bytes, before);
        repack_section(section, 0);
        assert_true(section->high_water_bytes <= before);
        assert_true(section->high_water_bytes >= section->live_peak_bytes);
        assert_true(pack_is_sound(section) && !overlaps(section));
        plan_fini(&plan);
    }
}

/* Out of memory at any allocation: a status or a sound layout, and no leak. */
static void survives_every_failed_allocation(void **state)
{
    (void)state;
    struct plan plan;
    plan_init(&plan, 4096, 0);
    random_state = 3;
    record_random(&plan, 150);
    const int64_t live = heap_live();
    bool clean = false;
    for (uint64_t nth = 1; !clean; nth++) {
        struct failure why = {0};
        heap_fail(nth, false);
        const enum status status = pack_section(&plan.sections[SECTION_FIRST], &why);
        clean = heap_failures() == 0;
        heap_fail(0, false);
        assert_int_equal(heap_live(), live);
        if (status == STATUS_OK) {
            assert_true(pack_is_sound(&plan.sections[SECTION_FIRST]));
        } else {
            assert_int_equal(status, STATUS_OUT_OF_MEMORY);
        }
        assert_true(nth < 1000);
    }
    plan_fini(&plan);
}

static void live_spans_are_ordered(void **state)
{
    (void)state;
    struct pack_live live = {0};
    assert_int_equal(pack_live_top(&live), 0);
    assert_true(pack_live_add(&live, 512, 256));
    assert_true(pack_live_add(&live, 0, 256));
    assert_true(pack_live_add(&live, 256, 256));
    assert_int_equal(pack_live_top(&live), 768);
    pack_live_remove(&live, 512);
    assert_int_equal(pack_live_top(&live), 512);
    for (size_t i = 0; i < live.n; i++) {
        assert_int_equal(live.spans[i].offset, i * 256);
    }
    pack_live_fini(&live);
    assert_null(live.spans);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_traces_do_not_overlap),
        cmocka_unit_test(a_stack_is_packed_tight),
        cmocka_unit_test(a_hole_is_packed_away),
        cmocka_unit_test(repacking_never_makes_it_worse),
        cmocka_unit_test(survives_every_failed_allocation),
        cmocka_unit_test(live_spans_are_ordered),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
