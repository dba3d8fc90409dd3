/* The layout of parameters: counts, slices, gaps, groups.
 * links: worker kernels proto base */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/state/units.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static struct failure why;

static void open_units(struct units *units, struct model_spec *spec, const char *preset,
                       uint32_t world_size)
{
    assert_int_equal(spec_preset(preset, spec, &why), STATUS_OK);
    assert_int_equal(units_init(units, spec, world_size, &why), STATUS_OK);
}

static uint64_t count_elements(const struct units *units)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < units->n_tensors; i++) {
        n += units->tensors[i].rows * units->tensors[i].cols;
    }
    return n;
}

static void t0_has_its_parameters(void **state)
{
    (void)state;
    struct units units;
    struct model_spec spec;
    open_units(&units, &spec, "t0", 1);
    assert_int_equal(count_elements(&units), 123712);
    assert_int_equal(units.n_units, 4);
    units_fini(&units);
    spec.tied = true;
    assert_int_equal(units_init(&units, &spec, 3, &why), STATUS_OK);
    assert_int_equal(count_elements(&units), 107328);
    assert_null(units_find(&units, "lm_head.weight"));
    assert_int_equal(units.head_slots[HEAD_WEIGHT], SIZE_MAX);
    units_fini(&units);
}

static void every_preset_is_whole(void **state)
{
    (void)state;
    for (const char *const *name = spec_preset_names(); *name != NULL; name++) {
        struct units units;
        struct model_spec spec;
        open_units(&units, &spec, *name, 8);
        assert_int_equal(count_elements(&units), spec_n_parameters(&spec));
        units_fini(&units);
    }
}

struct walk {
    size_t gaps, last_end;
};

static void add_gap(void *user, size_t offset, size_t n)
{
    struct walk *walk = user;
    assert_true(n > 0 && offset >= walk->last_end);
    walk->last_end = offset + n;
    walk->gaps += n;
}

/* Slices are equal multiples of 256 and cover the unit; tensors do not overlap and, with the
 * gaps, are all of it. */
static void slices_and_gaps_add_up(void **state)
{
    (void)state;
    static const char *const presets[] = {"t0", "gpt2-tiny", "llama-tiny-bytes"};
    for (size_t p = 0; p < 3; p++) {
        for (uint32_t world_size = 1; world_size <= 7; world_size++) {
            struct units units;
            struct model_spec spec;
            open_units(&units, &spec, presets[p], world_size);
            size_t offset = 0;
            size_t slice_offset = 0;
            for (uint32_t u = 0; u < units.n_units; u++) {
                const struct unit *unit = &units.units[u];
                assert_int_equal(unit->slice_elems % UNIT_SLICE_ELEMS, 0);
                assert_int_equal(unit->slice_elems * world_size, unit->n_elems);
                assert_int_equal(unit->offset, offset);
                assert_int_equal(unit->slice_offset, slice_offset);
                offset += unit->n_elems;
                slice_offset += unit->slice_elems;
                struct walk walk = {0};
                units_each_gap(&units, u, add_gap, &walk);
                size_t elements = 0;
                size_t end = 0;
                for (uint32_t i = 0; i < unit->n_tensors; i++) {
                    const struct tensor *tensor = &units.tensors[unit->first_tensor + i];
                    assert_int_equal(tensor->unit, u);
                    assert_true(tensor->offset >= end);
                    end = tensor->offset + tensor->rows * tensor->cols;
                    elements += tensor->rows * tensor->cols;
                }
                assert_true(end <= unit->n_elems);
                assert_int_equal(elements + walk.gaps, unit->n_elems);
            }
            assert_int_equal(units.n_elems, offset);
            assert_int_equal(units.block_elems, slice_offset);
            units_fini(&units);
        }
    }
}

/* q, k, v and gate, up lie behind one another, so that one product serves all of them. */
static void fused_tensors_touch(void **state)
{
    (void)state;
    struct units units;
    struct model_spec spec;
    open_units(&units, &spec, "t0", 2);
    static const char *const chains[][3] = {
        {"model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight",
         "model.layers.1.self_attn.v_proj.weight"},
        {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight", NULL},
    };
    const size_t slots[] = {units.block_slots[BLOCK_QKV_WEIGHT],
                            units.block_slots[BLOCK_UP_WEIGHT]};
    for (size_t c = 0; c < 2; c++) {
        size_t expected = slots[c];
        assert_int_equal(expected % UNIT_ALIGN_ELEMS, 0);
        for (size_t i = 0; i < 3 && chains[c][i] != NULL; i++) {
            const struct tensor *tensor = units_find(&units, chains[c][i]);
            assert_non_null(tensor);
            assert_int_equal(tensor->offset, expected);
            expected += tensor->rows * tensor->cols;
        }
    }
    assert_int_equal(units.block_slots[BLOCK_QKV_BIAS], SIZE_MAX);
    assert_int_equal(units.block_slots[BLOCK_NORM1_BIAS], SIZE_MAX);
    assert_int_equal(units.embed_slots[EMBED_POSITIONS], SIZE_MAX);
    assert_null(units_find(&units, "model.layers.2.mlp.up_proj.weight"));
    units_fini(&units);
}

/* Matrices decay, vectors do not; norms start at 1, biases at 0. */
static void groups_follow_the_tensor(void **state)
{
    (void)state;
    static const char *const presets[] = {"t0", "gpt2-tiny"};
    for (size_t p = 0; p < 2; p++) {
        struct units units;
        struct model_spec spec;
        open_units(&units, &spec, presets[p], 4);
        for (uint32_t i = 0; i < units.n_tensors; i++) {
            const struct tensor *tensor = &units.tensors[i];
            assert_int_equal(tensor->decay, tensor->rows > 1);
            const bool bias = strstr(tensor->name, ".bias") != NULL;
            assert_int_equal(tensor->init, tensor->rows > 1 ? INIT_NORMAL
                                           : bias           ? INIT_ZEROS
                                                            : INIT_ONES);
        }
        units_fini(&units);
    }
}

static void survives_failed_allocations(void **state)
{
    (void)state;
    struct model_spec spec;
    struct units units;
    assert_int_equal(spec_preset("t0", &spec, &why), STATUS_OK);
    const int64_t live = heap_live();
    for (uint64_t nth = 1; nth <= 2; nth++) {
        heap_fail(nth, false);
        assert_int_equal(units_init(&units, &spec, 2, &why), STATUS_OUT_OF_MEMORY);
        heap_fail(0, false);
        assert_int_equal(heap_live(), live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(t0_has_its_parameters),    cmocka_unit_test(every_preset_is_whole),
        cmocka_unit_test(slices_and_gaps_add_up),   cmocka_unit_test(fused_tensors_touch),
        cmocka_unit_test(groups_follow_the_tensor), cmocka_unit_test(survives_failed_allocations),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
