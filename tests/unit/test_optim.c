/* AdamW over slices: against a plain update in double, the same bits for every number of slices,
 * and decay that follows the tensor.
 * links: testing worker kernels proto base */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "tests/lib/small_training.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it has a macro `fail` */

/* Random gradients of one tensor, the same for every layout. */
static void set_gradients(struct small_training *small, uint64_t seed)
{
    memset(grads_slice(&small->training.grads, 0, 0), 0, small->units.n_elems * sizeof(float));
    for (uint32_t i = 0; i < small->units.n_tensors; i++) {
        size_t n;
        float *grad = small_grad(small, small->units.tensors[i].name, &n);
        float *values = values_random(n, 1.0f, seed + i);
        memcpy(grad, values, n * sizeof *grad);
        free(values);
    }
}

static struct optim_step step_of(uint64_t t)
{
    return (struct optim_step){.t = t,
                               .lr = 1e-2,
                               .beta1 = 0.9,
                               .beta2 = 0.95,
                               .eps = 1e-8,
                               .weight_decay = 0.1,
                               .grad_scale = 0.5};
}

static void update_all(struct small_training *small, uint64_t t)
{
    const struct optim_step step = step_of(t);
    set_gradients(small, 100 * t);
    for (uint32_t slice = 0; slice < small->units.world_size; slice++) {
        optim_update(&small->training.optim, &small->training.params, &small->training.grads,
                     small->ops, slice, &step);
    }
}

static void matches_a_plain_update(void **state)
{
    (void)state;
    struct small_training small;
    small_init(&small, "gpt2-tiny");
    small.n_slices = 3;
    small_open(&small);
    for (uint32_t i = 0; i < small.units.n_tensors; i++) {
        const struct tensor *tensor = &small.units.tensors[i];
        size_t n;
        float *param = small_param(&small, tensor->name, &n);
        double *p = values_widen(param, n);
        double *m = values_zero_double(n);
        double *v = values_zero_double(n);
        /* Three updates of everything; this tensor is followed in double. */
        float *start = values_copy(params_get(&small.training.params, 0, 0), small.units.n_elems);
        for (uint64_t t = 1; t <= 3; t++) {
            update_all(&small, t);
            const float *grad = small_grad(&small, tensor->name, &n);
            for (size_t j = 0; j < n; j++) {
                const double g = 0.5 * (double)grad[j];
                m[j] = 0.9 * m[j] + 0.1 * g;
                v[j] = 0.95 * v[j] + 0.05 * g * g;
                const double step = m[j] / (1.0 - pow(0.9, (double)t)) /
                                    (sqrt(v[j] / (1.0 - pow(0.95, (double)t))) + 1e-8);
                p[j] -= 1e-2 * (step + (tensor->decay ? 0.1 : 0.0) * p[j]);
            }
        }
        assert_true(values_distance(param, p, n) < 1e-6);
        /* From the start again for the next tensor. */
        memcpy(params_get(&small.training.params, 0, 0), start, small.units.n_elems * sizeof *start);
        for (uint32_t slice = 0; slice < small.units.world_size; slice++) {
            memset(optim_m(&small.training.optim, 0, slice), 0,
                   small.units.block_elems * sizeof(float));
            memset(optim_v(&small.training.optim, 0, slice), 0,
                   small.units.block_elems * sizeof(float));
        }
        free(start);
        free(p);
        free(m);
        free(v);
    }
    small_close(&small);
}

static float *weights_after(uint32_t n_slices, size_t *out_n)
{
    struct small_training small;
    small_init(&small, "t0");
    small.n_slices = n_slices;
    small_open(&small);
    for (uint64_t t = 1; t <= 3; t++) {
        update_all(&small, t);
    }
    const size_t total = spec_n_parameters(&small.spec);
    float *copy = values_zero(total);
    size_t at = 0;
    for (uint32_t i = 0; i < small.units.n_tensors; i++) {
        size_t n;
        const float *param = small_param(&small, small.units.tensors[i].name, &n);
        memcpy(copy + at, param, n * sizeof *copy);
        at += n;
    }
    *out_n = total;
    small_close(&small);
    return copy;
}

static void slicing_changes_no_bit(void **state)
{
    (void)state;
    size_t n;
    float *whole = weights_after(1, &n);
    for (uint32_t n_slices = 2; n_slices <= 5; n_slices++) {
        size_t other_n;
        float *sliced = weights_after(n_slices, &other_n);
        assert_int_equal(n, other_n);
        assert_true(values_equal(sliced, whole, n));
        free(sliced);
    }
    free(whole);
}

/* Slice-major: block r holds slice r of every unit, each block starts at a granule. */
static void moments_are_slice_major(void **state)
{
    (void)state;
    struct small_training small;
    small_init(&small, "t0");
    small.n_slices = 4;
    small_open(&small);
    struct optim *optim = &small.training.optim;
    const struct region *parts = small.training.state.parts;
    const size_t block_bytes = small.training.state.layout.block_bytes;
    assert_int_equal(block_bytes % small.device.granule_bytes, 0);
    assert_true(block_bytes >= small.units.block_elems * sizeof(float));
    assert_int_equal(parts[PART_MOMENT_M].used_bytes, small.units.n_elems * sizeof(float));
    assert_int_equal(parts[PART_MOMENT_M].committed_bytes, 4 * block_bytes);
    for (uint32_t slice = 0; slice < 4; slice++) {
        const char *block = parts[PART_MOMENT_V].base + slice * block_bytes;
        for (uint32_t unit = 0; unit < small.units.n_units; unit++) {
            assert_ptr_equal(optim_v(optim, unit, slice),
                             block + small.units.units[unit].slice_offset * sizeof(float));
        }
    }
    small_close(&small);
}

/* ---- decay ---- */

/* Ten updates of 1e-2 with decay 0.1 and no gradient at all. */
static void decay_only(const char *preset, uint32_t n_slices, uint32_t width, bool *out_cut)
{
    struct small_training small;
    small_init(&small, preset);
    small.n_slices = n_slices;
    if (width != 0) {
        small.spec.head_dim = width / small.spec.n_heads;
        small.spec.width = width;
    }
    small.options.schedule.lr = 1e-2;
    small_open(&small);
    const size_t n_all = small.units.n_elems;
    float *start = values_copy(params_get(&small.training.params, 0, 0), n_all);
    memset(grads_slice(&small.training.grads, 0, 0), 0, n_all * sizeof(float));
    struct optim_step step = step_of(0);
    for (step.t = 1; step.t <= 10; step.t++) {
        for (uint32_t slice = 0; slice < n_slices; slice++) {
            optim_update(&small.training.optim, &small.training.params, &small.training.grads,
                         small.ops, slice, &step);
        }
    }
    *out_cut = false;
    for (uint32_t i = 0; i < small.units.n_tensors; i++) {
        const struct tensor *tensor = &small.units.tensors[i];
        const struct unit *unit = &small.units.units[tensor->unit];
        size_t n;
        const float *param = small_param(&small, tensor->name, &n);
        const float *before = start + unit->offset + tensor->offset;
        if (!tensor->decay) {
            assert_memory_equal(param, before, n * sizeof *param);
            const float expected = tensor->init == INIT_ONES ? 1.0f : 0.0f;
            assert_true(param[0] == expected && param[n - 1] == expected);
            const bool norm = tensor->init == INIT_ONES;
            *out_cut |= norm && tensor->offset / unit->slice_elems !=
                                    (tensor->offset + n - 1) / unit->slice_elems;
            continue;
        }
        for (size_t j = 0; j < n; j++) {
            assert_true(fabs((double)param[j] - 0.990045 * (double)before[j]) <=
                        1e-6 * fabs((double)before[j]));
        }
    }
    free(start);
    small_close(&small);
}

static void decay_spares_norms_and_biases(void **state)
{
    (void)state;
    bool cut;
    decay_only("t0", 1, 0, &cut);
    decay_only("t0", 4, 0, &cut);
    decay_only("gpt2-tiny", 4, 0, &cut);
    /* Wide enough for a slice to end inside a norm's weight. */
    decay_only("gpt2-tiny", 4, 320, &cut);
    assert_true(cut);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_a_plain_update),
        cmocka_unit_test(slicing_changes_no_bit),
        cmocka_unit_test(moments_are_slice_major),
        cmocka_unit_test(decay_spares_norms_and_biases),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
