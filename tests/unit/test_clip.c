/* The global norm: every parameter once, summed over slices; and the factor that follows from it.
 * links: testing worker kernels proto base */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "proto/base/heap.h"
#include "tests/lib/small_training.h"
#include "worker/state/clip.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static void factor(void **state)
{
    (void)state;
    assert_true(clip_factor(0.8, 1.0) == 1.0); /* below: not clipped */
    assert_true(clip_factor(1.0, 1.0) == 1.0);
    assert_true(clip_factor(4.0, 1.0) == 0.25);
    assert_true(clip_factor(4.0, 0.0) == 1.0); /* no limit */
    assert_true(clip_factor(0.0, 0.5) == 1.0);
}

static void open_slices(struct small_training *small, uint32_t n_slices)
{
    small_init(small, "t0");
    small->n_slices = n_slices;
    small_open(small);
    memset(grads_slice(&small->training.grads, 0, 0), 0, small->units.n_elems * sizeof(float));
}

static double norm_of(struct small_training *small)
{
    struct workspace *workspace = &small->training.workspace;
    double norm = -1.0;
    workspace_begin(workspace, SECTION_UPDATE);
    workspace_phase(workspace, PHASE_STEP);
    assert_int_equal(clip_norm(&small->training.grads, &small->device, &norm, &small->why),
                     STATUS_OK);
    assert_int_equal(workspace_end(workspace, &small->why), STATUS_OK);
    return norm;
}

/* Two slices whose norms are 3 and 4: 5, and neither 7 nor 3.5. */
static void slices_add_as_squares(void **state)
{
    (void)state;
    struct small_training small;
    open_slices(&small, 2);
    grads_slice(&small.training.grads, 1, 0)[0] = 3.0f;
    grads_slice(&small.training.grads, 1, 1)[10] = -4.0f;
    assert_true(norm_of(&small) == 5.0);
    assert_true(clip_factor(5.0, 1.0) == 0.2);
    small_close(&small);
}

/* Every element counts once, whatever unit, tensor and number of slices. */
static void every_element_counts_once(void **state)
{
    (void)state;
    for (uint32_t n_slices = 1; n_slices <= 4; n_slices++) {
        struct small_training small;
        open_slices(&small, n_slices);
        for (uint32_t i = 0; i < small.units.n_tensors; i++) {
            size_t n;
            float *grad = small_grad(&small, small.units.tensors[i].name, &n);
            for (size_t j = 0; j < n; j++) {
                grad[j] = 2.0f;
            }
        }
        assert_true(norm_of(&small) == sqrt(4.0 * 123712.0));
        small_close(&small);
    }
}

static void what_is_not_finite_shows(void **state)
{
    (void)state;
    struct small_training small;
    open_slices(&small, 3);
    grads_slice(&small.training.grads, 2, 2)[5] = NAN;
    assert_true(!isfinite(norm_of(&small)));
    grads_slice(&small.training.grads, 2, 2)[5] = -INFINITY;
    assert_true(!isfinite(norm_of(&small)));
    small_close(&small);
}

/* More partial sums than are brought to the host at once. */
static void many_slices(void **state)
{
    (void)state;
    struct small_training small;
    open_slices(&small, 50);
    for (uint32_t slice = 0; slice < 50; slice++) {
        grads_slice(&small.training.grads, 3, slice)[255] = 1.0f;
    }
    assert_true(norm_of(&small) == sqrt(50.0));
    small_close(&small);
}

/* Clipping at half the norm halves what AdamW sees; the reported norm is the one before. */
static void clipped_steps_report_the_full_norm(void **state)
{
    (void)state;
    double norms[2][2];
    double first_v[2];
    for (int clipped = 0; clipped < 2; clipped++) {
        struct small_training small;
        struct small_series series = {256, 4, 64};
        const struct batch_source source = small_series_source(&series);
        small_init(&small, "t0");
        small.options.limits.global_batch = 4;
        small.strategy.micro_batch = 4;
        small.options.gradient_clipping = clipped ? norms[0][0] / 2.0 : 0.0;
        small_open(&small);
        norms[clipped][0] = small_step(&small, &source, 0).grad_norm;
        /* The second moment has seen the scaled gradient. */
        first_v[clipped] = 0.0;
        for (size_t i = 0; i < small.units.units[1].slice_elems; i++) {
            first_v[clipped] += (double)optim_v(&small.training.optim, 1, 0)[i];
        }
        small_close(&small);
    }
    assert_true(norms[1][0] == norms[0][0]);
    assert_true(fabs(first_v[1] / first_v[0] - 0.25) < 1e-5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(factor),
        cmocka_unit_test(slices_add_as_squares),
        cmocka_unit_test(every_element_counts_once),
        cmocka_unit_test(what_is_not_finite_shows),
        cmocka_unit_test(many_slices),
        cmocka_unit_test(clipped_steps_report_the_full_norm),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
