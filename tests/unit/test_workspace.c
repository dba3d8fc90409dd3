/* The workspace: what is recorded is followed to the letter, peaks are measured, paint tells.
 * links: testing worker kernels proto base
 * labels: memory */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/memory/workspace.h"
#include <cmocka.h> /* last of the foreign ones: it has a macro `fail` */
#include "tests/lib/must_abort.h"

/* A recording and a running workspace over one plan. */
struct fixture {
    struct device dry, device;
    struct telemetry dry_telemetry, telemetry;
    struct ledger dry_ledger, ledger;
    struct workspace recorder, workspace;
    struct plan plan;
    struct failure why;
};

/* A little step. What it does to the buffers is up to the caller. */
struct held {
    struct buffer stream, kept, logits, grad;
};

static void forward(struct workspace *workspace, struct held *held)
{
    workspace_begin(workspace, SECTION_FIRST);
    workspace_phase(workspace, PHASE_FORWARD);
    held->stream = workspace_reserve(workspace, "stream", CATEGORY_ACTIVATIONS, 1000);
    workspace->layer = 2;
    held->kept = workspace_reserve(workspace, "kept", CATEGORY_ACTIVATIONS, 500);
    workspace->layer = -1;
    held->logits = workspace_reserve(workspace, "logits", CATEGORY_TEMP, 3000);
    workspace_release(workspace, &held->logits);
}

static void backward(struct workspace *workspace, struct held *held)
{
    workspace_phase(workspace, PHASE_BACKWARD);
    held->grad = workspace_reserve(workspace, "grad", CATEGORY_GRADS, 400);
    workspace_release(workspace, &held->kept);
    workspace_release(workspace, &held->grad);
    workspace_release(workspace, &held->stream);
}

static void open_fixture(struct fixture *f, bool paint)
{
    memset(f, 0, sizeof *f);
    struct held held;
    const struct plan_resident nothing = {0};
    dry_device_init(&f->dry, 0, 4096);
    ledger_init(&f->dry_ledger, &f->dry_telemetry);
    ledger_init(&f->ledger, &f->telemetry);
    assert_int_equal(workspace_init(&f->recorder, &f->dry, &f->dry_ledger, 1 << 30, paint, &f->why),
                     STATUS_OK);
    plan_init(&f->plan, 4096, workspace_red_zone(paint));
    workspace_record(&f->recorder, &f->plan);
    forward(&f->recorder, &held);
    backward(&f->recorder, &held);
    assert_int_equal(workspace_end(&f->recorder, &f->why), STATUS_OK);
    workspace_fini(&f->recorder);
    assert_int_equal(plan_finish(&f->plan, &nothing, &f->why), STATUS_OK);

    assert_int_equal(cpu_device_init(&f->device, 0, &f->why), STATUS_OK);
    f->device.granule_bytes = 4096;
    assert_int_equal(workspace_init(&f->workspace, &f->device, &f->ledger, 1 << 20, paint, &f->why),
                     STATUS_OK);
    assert_int_equal(region_resize(&f->workspace.region, f->plan.workspace_bytes, &f->why),
                     STATUS_OK);
    assert_int_equal(workspace_follow(&f->workspace, &f->plan, &f->why), STATUS_OK);
}

static void close_fixture(struct fixture *f)
{
    workspace_fini(&f->workspace);
    plan_fini(&f->plan);
    device_fini(&f->device);
}

/* ---- following ---- */

static void buffers_lie_where_the_plan_says(void **state)
{
    (void)state;
    struct fixture f;
    struct held held;
    open_fixture(&f, false);
    assert_int_equal(f.plan.phases[PHASE_FORWARD].workspace_bytes, 1024 + 512 + 3072);
    assert_int_equal(f.plan.phases[PHASE_BACKWARD].workspace_bytes, 1024 + 512 + 512);
    assert_int_equal(f.plan.sections[SECTION_FIRST].buffers[1].layer, 2);
    for (int round = 0; round < 2; round++) {
        workspace_clear_peaks(&f.workspace);
        forward(&f.workspace, &held);
        const char *base = f.workspace.region.base;
        assert_ptr_equal(held.stream.data, base);
        assert_ptr_equal(held.kept.data, base + 1024);
        assert_null(held.logits.data);
        /* Padded bytes, live, by category. */
        assert_int_equal(f.ledger.workspace_bytes[CATEGORY_ACTIVATIONS], 1536);
        assert_int_equal(f.ledger.workspace_bytes[CATEGORY_TEMP], 0);
        memset(held.kept.data, 1, 500);
        backward(&f.workspace, &held);
        assert_int_equal(workspace_end(&f.workspace, &f.why), STATUS_OK);
        assert_int_equal(ledger_check(&f.ledger, &f.why), STATUS_OK);
        assert_int_equal(f.ledger.workspace_bytes[CATEGORY_ACTIVATIONS], 0);
        assert_int_equal(f.workspace.high_water[PHASE_FORWARD], 4608);
        assert_int_equal(f.workspace.high_water[PHASE_BACKWARD], 2048);
        assert_int_equal(f.workspace.high_water[PHASE_STEP], 0);
    }
    close_fixture(&f);
}

static void releasing_nothing_is_fine(void **state)
{
    (void)state;
    struct fixture f;
    struct buffer none = {0};
    open_fixture(&f, false);
    workspace_release(&f.workspace, &none);
    assert_int_equal(f.workspace.cursor, 0);
    close_fixture(&f);
}

static void an_abandoned_section_starts_over(void **state)
{
    (void)state;
    struct fixture f;
    struct held held;
    open_fixture(&f, false);
    forward(&f.workspace, &held);
    assert_true(f.ledger.workspace_bytes[CATEGORY_ACTIVATIONS] > 0);
    workspace_abandon(&f.workspace);
    assert_int_equal(f.ledger.workspace_bytes[CATEGORY_ACTIVATIONS], 0);
    assert_int_equal(ledger_check(&f.ledger, &f.why), STATUS_OK);
    forward(&f.workspace, &held);
    backward(&f.workspace, &held);
    assert_int_equal(workspace_end(&f.workspace, &f.why), STATUS_OK);
    close_fixture(&f);
}

/* ---- departures ---- */

static void another_name(void)
{
    struct fixture f;
    open_fixture(&f, false);
    workspace_begin(&f.workspace, SECTION_FIRST);
    workspace_phase(&f.workspace, PHASE_FORWARD);
    workspace_reserve(&f.workspace, "scream", CATEGORY_ACTIVATIONS, 1000);
}

static void another_size(void)
{
    struct fixture f;
    open_fixture(&f, false);
    workspace_begin(&f.workspace, SECTION_FIRST);
    workspace_phase(&f.workspace, PHASE_FORWARD);
    workspace_reserve(&f.workspace, "stream", CATEGORY_ACTIVATIONS, 999);
}

static void another_category(void)
{
    struct fixture f;
    open_fixture(&f, false);
    workspace_begin(&f.workspace, SECTION_FIRST);
    workspace_phase(&f.workspace, PHASE_FORWARD);
    workspace_reserve(&f.workspace, "stream", CATEGORY_TEMP, 1000);
}

static void another_phase(void)
{
    struct fixture f;
    open_fixture(&f, false);
    workspace_begin(&f.workspace, SECTION_FIRST);
    workspace_phase(&f.workspace, PHASE_STEP);
}

static void another_order(void)
{
    struct fixture f;
    struct held held;
    open_fixture(&f, false);
    forward(&f.workspace, &held);
    workspace_phase(&f.workspace, PHASE_BACKWARD);
    held.grad = workspace_reserve(&f.workspace, "grad", CATEGORY_GRADS, 400);
    workspace_release(&f.workspace, &held.grad);
}

static void a_leftover(void)
{
    struct fixture f;
    struct held held;
    open_fixture(&f, false);
    forward(&f.workspace, &held);
    (void)!workspace_end(&f.workspace, &f.why);
}

static void too_much(void)
{
    struct fixture f;
    struct held held;
    open_fixture(&f, false);
    forward(&f.workspace, &held);
    backward(&f.workspace, &held);
    workspace_phase(&f.workspace, PHASE_STEP);
}

static void too_little_committed(void)
{
    struct fixture f;
    struct held held;
    open_fixture(&f, false);
    region_shrink(&f.workspace.region, 4096);
    forward(&f.workspace, &held);
}

static void missized(void)
{
    struct fixture f;
    struct held held;
    open_fixture(&f, false);
    f.workspace.missize = "logits";
    forward(&f.workspace, &held);
}

static void departures_end_the_process(void **state)
{
    (void)state;
    must_abort(another_name, "reserve of scream where the plan has stream");
    must_abort(another_size, "stream asks 999 bytes (activations), the plan has 1000");
    must_abort(another_category, "stream asks 1000 bytes (temp), the plan has 1000 (activations)");
    must_abort(another_phase, "phase step where the plan has forward");
    must_abort(another_order, "release of grad where the plan releases buffer 1");
    must_abort(a_leftover, "ended with 2 live buffers");
    must_abort(too_much, "step after the last planned event");
    must_abort(too_little_committed, "logits ends at 4608, committed are 4096 bytes");
    must_abort(missized, "logits asks 3256 bytes (temp), the plan has 3000");
}

/* ---- paint ---- */

static void paint_is_not_a_number(void **state)
{
    (void)state;
    struct fixture f;
    struct held held;
    open_fixture(&f, true);
    forward(&f.workspace, &held);
    const float *values = held.stream.data;
    for (size_t i = 0; i < 250; i++) {
        assert_true(isnan(values[i]));
    }
    close_fixture(&f);
}

/* Touched bytes follow what was written, reserved bytes do not. */
static void touched_is_what_was_written(void **state)
{
    (void)state;
    struct fixture f;
    struct held held;
    open_fixture(&f, true);
    forward(&f.workspace, &held);
    memset(held.stream.data, 0, 1000);
    memset(held.kept.data, 0, 500);
    backward(&f.workspace, &held);
    assert_int_equal(workspace_end(&f.workspace, &f.why), STATUS_OK);
    const struct plan_section *section = &f.plan.sections[SECTION_FIRST];
    /* Nobody wrote logits, nor grad. */
    const size_t kept_end = section->buffers[1].offset + section->buffers[1].padded;
    const size_t logits = section->buffers[2].offset;
    assert_int_equal(f.workspace.high_water[PHASE_FORWARD], logits + section->buffers[2].padded);
    assert_int_equal(f.workspace.touched[PHASE_FORWARD],
                     logits + 256 > kept_end ? logits + 256 : kept_end);
    /* Alive in both phases, counted in both. */
    assert_true(f.workspace.touched[PHASE_BACKWARD] >= kept_end);
    workspace_clear_peaks(&f.workspace);
    assert_int_equal(f.workspace.touched[PHASE_FORWARD], 0);
    close_fixture(&f);
}

/* One byte behind the last of the contents, and one in the last word of the red zone. */
static size_t damage_at;

static void damage(void)
{
    struct fixture f;
    struct held held;
    open_fixture(&f, true);
    forward(&f.workspace, &held);
    ((char *)held.stream.data)[damage_at] = 0;
    backward(&f.workspace, &held);
}

static void red_zones_are_checked(void **state)
{
    (void)state;
    damage_at = 1000;
    must_abort(damage, "stream (1000 bytes) was written past its end");
    damage_at = 1024 + 255;
    must_abort(damage, "stream (1000 bytes) was written past its end");
    struct fixture f;
    struct held held;
    open_fixture(&f, true);
    forward(&f.workspace, &held);
    ((char *)held.stream.data)[999] = 0;
    backward(&f.workspace, &held);
    close_fixture(&f);
}

/* ---- memory ---- */

static void follow_survives_a_failed_allocation(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, false);
    struct plan larger;
    const struct plan_resident nothing = {0};
    plan_init(&larger, 4096, 0);
    for (uint32_t i = 0; i < 9; i++) {
        uint32_t id;
        const struct plan_buffer buffer = {.name = "x", .bytes = 4, .padded = 256};
        assert_true(plan_record_reserve(&larger, SECTION_EVAL, &buffer, &id));
    }
    assert_int_equal(plan_finish(&larger, &nothing, &f.why), STATUS_OK);
    const int64_t live = heap_live();
    for (uint64_t nth = 1; nth <= 2; nth++) {
        heap_fail(nth, false);
        assert_int_equal(workspace_follow(&f.workspace, &larger, &f.why), STATUS_OUT_OF_MEMORY);
        heap_fail(0, false);
        assert_ptr_equal(f.workspace.plan, &f.plan); /* the former plan stays */
        assert_int_equal(heap_live(), live);
    }
    assert_int_equal(workspace_follow(&f.workspace, &larger, &f.why), STATUS_OK);
    assert_ptr_equal(f.workspace.plan, &larger);
    plan_fini(&larger);
    close_fixture(&f);
}

int main(void)
{
    log_init("test_workspace", 0, LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buffers_lie_where_the_plan_says),
        cmocka_unit_test(releasing_nothing_is_fine),
        cmocka_unit_test(an_abandoned_section_starts_over),
        cmocka_unit_test(departures_end_the_process),
        cmocka_unit_test(paint_is_not_a_number),
        cmocka_unit_test(touched_is_what_was_written),
        cmocka_unit_test(red_zones_are_checked),
        cmocka_unit_test(follow_survives_a_failed_allocation),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
