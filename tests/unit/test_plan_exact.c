/* The promise: predicted bytes equal measured bytes, to the byte, in every phase. Random
 * configurations on one rank; a mis-sized buffer and a write past an end are caught.
 * links: testing worker kernels proto base
 * labels: plan
 * timeout: 300
 *
 * BALLAST_FULL=1 runs 1000 configurations instead of 100. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include <cmocka.h> /* last of the foreign ones: it has a macro `fail` */
#include "tests/lib/must_abort.h"
#include "tests/unit/plan_exact.h"

static void random_configurations(void **state)
{
    (void)state;
    const uint32_t n = exact_count(100, 1000);
    const double worst = exact_sweep(NULL, n);
    print_message("%u configurations, worst packing efficiency %.4f\n", n, worst);
}

static void open_t0(struct small_training *small, bool paint)
{
    small_init(small, "t0");
    small->options.paint = paint;
    small_open(small);
}

static struct small_series series = {256, 1, 64};

static void run_missized(void)
{
    struct small_training small;
    open_t0(&small, false);
    small.training.workspace.missize = "qkv_grad";
    const struct batch_source source = small_series_source(&series);
    small_step(&small, &source, 0);
}

static void a_missized_buffer_is_caught(void **state)
{
    (void)state;
    must_abort(run_missized, "qkv_grad asks");
}

static void (*true_sum)(struct ops *ops, double *out, const float *values, size_t n);

/* The sum, and one float too many written behind its input. */
static void careless_sum(struct ops *ops, double *out, const float *values, size_t n)
{
    true_sum(ops, out, values, n);
    float *behind = (float *)(uintptr_t)(values + n);
    *behind = 1.0f;
}

static void run_careless(void)
{
    struct small_training small;
    series.seq_len = 61; /* no multiple of the alignment: the next float is padding */
    small_init(&small, "t0");
    small.options.paint = true;
    small.options.limits.seq_len = 61;
    small_open(&small);
    true_sum = small.ops->sum;
    small.ops->sum = careless_sum;
    const struct batch_source source = small_series_source(&series);
    small_step(&small, &source, 0);
}

static void a_write_past_an_end_is_caught(void **state)
{
    (void)state;
    must_abort(run_careless, "losses (244 bytes) was written past its end");
}

/* A peak that is smaller than planned is no better than one that is larger. */
static void a_wrong_plan_is_seen(void **state)
{
    (void)state;
    struct small_training small;
    open_t0(&small, false);
    const struct batch_source source = small_series_source(&(struct small_series){256, 1, 64});
    small_step(&small, &source, 0);
    for (int phase = PHASE_FORWARD; phase <= PHASE_STEP; phase++) {
        assert_int_equal(small_measured(&small, (enum phase)phase),
                         small.plan.phases[phase].peak_bytes);
        /* Nobody copies the plan: clearing the marks clears the measurement. */
        assert_true(small.training.workspace.high_water[phase] > 0);
    }
    workspace_clear_peaks(&small.training.workspace);
    assert_true(small_measured(&small, PHASE_FORWARD) <
                small.plan.phases[PHASE_FORWARD].peak_bytes);
    small_close(&small);
}

int main(void)
{
    log_init("test_plan_exact", 0, LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_configurations),
        cmocka_unit_test(a_missized_buffer_is_caught),
        cmocka_unit_test(a_write_past_an_end_is_caught),
        cmocka_unit_test(a_wrong_plan_is_seen),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
