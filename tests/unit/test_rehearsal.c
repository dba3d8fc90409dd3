/* Rehearsals: large models planned without a device, and what a plan says of small ones.
 * links: testing worker kernels proto base
 * labels: plan */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "proto/base/heap.h"
#include "tests/lib/kernel_ops.h"
#include "tests/lib/small_training.h"
#include "worker/memory/admit.h"
#include "worker/rehearsal.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static const struct {
    enum checkpointing mode;
    uint32_t blocks;
    uint32_t loss_tile;
} modes[] = {
    {CHECKPOINTING_NONE, 1, 0},      {CHECKPOINTING_NONE, 1, 1024},
    {CHECKPOINTING_SELECTIVE, 1, 0}, {CHECKPOINTING_SELECTIVE, 1, 1024},
    {CHECKPOINTING_SPLIT, 1, 0},     {CHECKPOINTING_SPLIT, 1, 1024},
    {CHECKPOINTING_BLOCK, 1, 0},     {CHECKPOINTING_BLOCK, 1, 1024},
    {CHECKPOINTING_BLOCK, 2, 0},     {CHECKPOINTING_BLOCK, 2, 1024},
    {CHECKPOINTING_BLOCK, 5, 0},     {CHECKPOINTING_BLOCK, 8, 1024},
};
enum { N_MODES = sizeof modes / sizeof modes[0] };

struct large {
    struct model_spec spec;
    struct units units;
    struct training_options options;
    struct rehearsal rehearsal;
    struct ops *ops;
};

static void open_large(struct large *large, const char *preset, uint32_t world_size)
{
    struct failure why = {0};
    assert_int_equal(spec_preset(preset, &large->spec, &why), STATUS_OK);
    assert_int_equal(units_init(&large->units, &large->spec, world_size, &why), STATUS_OK);
    large->ops = kernel_ops(1);
    large->options = (struct training_options){
        .limits = {.n_layers = large->spec.n_layers,
                   .world_size = world_size,
                   .global_batch = 4 * world_size,
                   .seq_len = large->spec.max_positions,
                   .n_heads = large->spec.n_heads,
                   .n_kv_heads = large->spec.n_kv_heads},
        .reduce_bucket_bytes = 64 << 20,
        .eval_micro_batch = 2,
    };
    large->rehearsal = (struct rehearsal){.options = &large->options,
                                          .units = &large->units,
                                          .target = large->ops,
                                          .granule_bytes = DEVICE_GRANULE_BYTES,
                                          .world_size = world_size};
}

static void close_large(struct large *large)
{
    units_fini(&large->units);
    kernel_ops_free(large->ops);
}

static struct strategy strategy_of(const struct large *large, size_t mode, uint32_t layers)
{
    struct strategy strategy;
    strategy_default(&strategy, &large->options.limits);
    strategy.micro_batch = 2;
    strategy.checkpointing = modes[mode].mode;
    strategy.checkpoint_blocks = modes[mode].blocks;
    strategy.checkpointing_layers = layers;
    strategy.loss_tile = modes[mode].loss_tile;
    return strategy;
}

/* ---- large models ---- */

/* A dry plan has to be cheap enough to ask for while training; far from it would be a mistake. In
 * seconds of this thread's own, so that a busy machine does not count. */
static const double most_seconds = 0.5;

static double thread_seconds(void)
{
    struct timespec now;
    assert_int_equal(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now), 0);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct worst {
    double efficiency, first_s, again_s;
};

static void plan_one(struct large *large, const struct strategy *strategy, struct worst *worst)
{
    struct failure why = {0};
    for (int again = 0; again < 2; again++) {
        struct plan plan;
        const double started = thread_seconds();
        assert_int_equal(rehearse(&large->rehearsal, strategy, &plan, NULL, &why), STATUS_OK);
        const double seconds = thread_seconds() - started;
        double *slowest = again ? &worst->again_s : &worst->first_s;
        *slowest = seconds > *slowest ? seconds : *slowest;
        const double efficiency = plan.packing_efficiency;
        worst->efficiency = efficiency < worst->efficiency ? efficiency : worst->efficiency;
        if (efficiency < 0.995) {
            char text[STRATEGY_TEXT_BYTES];
            fail_msg("%s %s: packing efficiency %.4f", large->spec.name,
                     strategy_format(NULL, strategy, text), efficiency);
        }
        assert_true(plan_layout_is_sound(&plan));
        plan_fini(&plan);
    }
}

/* Every checkpointing mode, for all blocks and for a third of them. */
static void check_preset(const char *preset, uint32_t world_size)
{
    struct large large;
    struct worst worst = {.efficiency = 1.0};
    open_large(&large, preset, world_size);
    const uint32_t layers[] = {large.spec.n_layers, large.spec.n_layers / 3};
    for (size_t mode = 0; mode < N_MODES; mode++) {
        for (size_t i = 0; i < sizeof layers / sizeof layers[0]; i++) {
            const struct strategy strategy = strategy_of(&large, mode, layers[i]);
            plan_one(&large, &strategy, &worst);
        }
    }
    print_message("%s on %u ranks: worst packing efficiency %.4f; slowest plan %.1f ms the first "
                  "time, %.1f ms again\n",
                  preset, world_size, worst.efficiency, worst.first_s * 1e3, worst.again_s * 1e3);
    assert_true(worst.first_s < most_seconds && worst.again_s < most_seconds);
    close_large(&large);
}

static void gpt2_124m(void **state)
{
    (void)state;
    check_preset("gpt2-124m", 1);
}

static void llama_7b(void **state)
{
    (void)state;
    check_preset("llama-7b", 2);
}

static void llama_70b(void **state)
{
    (void)state;
    check_preset("llama-70b", 8);
}

/* ---- what is counted ---- */

static struct plan plan_of(const struct large *large, const struct strategy *strategy,
                           struct rehearsal_cost *out_cost)
{
    struct plan plan;
    struct failure why = {0};
    if (rehearse(&large->rehearsal, strategy, &plan, out_cost, &why) != STATUS_OK) {
        fail_msg("%s", why.text);
    }
    return plan;
}

static void work_is_counted(void **state)
{
    (void)state;
    struct large large;
    struct rehearsal_cost none;
    struct rehearsal_cost block;
    open_large(&large, "llama-7b", 2);
    struct strategy strategy = strategy_of(&large, 0, large.spec.n_layers);
    struct plan plan = plan_of(&large, &strategy, &none);
    assert_int_equal(plan.sections[SECTION_LATER].repeat, 1); /* 8 sequences, 2 ranks, 2 each */
    plan_fini(&plan);
    strategy.checkpointing = CHECKPOINTING_BLOCK;
    plan = plan_of(&large, &strategy, &block);
    plan_fini(&plan);
    /* Forward and backward are 1 : 2, and attention's backward a little more; this rank has half of
     * the tokens. The quoted count leaves half of the products out that attention's backward
     * makes again. */
    const double tokens = 4.0 * large.options.limits.seq_len;
    const double quoted = spec_flops_per_token(&large.spec, large.options.limits.seq_len) * tokens;
    assert_true(none.flops > 0.99 * quoted && none.flops < 1.03 * quoted);
    /* Recomputing a block is its forward once more, without the last product: nobody reads it. */
    const struct model_spec *spec = &large.spec;
    const double h = spec->width;
    const double again = 2.0 * tokens * (4.0 * h * h + 2.0 * h * spec->inner) +
                         2.0 * tokens * h * ((double)large.options.limits.seq_len + 1.0);
    assert_true(fabs((block.flops - none.flops) / (spec->n_layers * again) - 1.0) < 1e-12);
    /* To every other rank its slice of each sum, and to all of them the own one: 2 (N-1)/N. */
    assert_int_equal(none.comm_bytes, large.units.n_elems * sizeof(float));
    close_large(&large);
}

static void every_rank_plans_the_same(void **state)
{
    (void)state;
    struct large large;
    open_large(&large, "gpt2-124m", 4);
    const struct strategy strategy = strategy_of(&large, 6, 12);
    struct plan first = plan_of(&large, &strategy, NULL);
    for (uint32_t rank = 1; rank < 4; rank++) {
        large.rehearsal.rank = rank;
        struct plan other = plan_of(&large, &strategy, NULL);
        assert_memory_equal(other.phases, first.phases, sizeof first.phases);
        for (int section = 0; section < N_SECTIONS; section++) {
            const struct plan_section *a = &first.sections[section];
            const struct plan_section *b = &other.sections[section];
            assert_int_equal(a->n_buffers, b->n_buffers);
            assert_int_equal(a->n_events, b->n_events);
            for (uint32_t i = 0; i < a->n_buffers; i++) {
                assert_int_equal(a->buffers[i].offset, b->buffers[i].offset);
            }
        }
        plan_fini(&other);
    }
    plan_fini(&first);
    close_large(&large);
}

/* Activations come and go with the mode: each keeps less than the one before. */
static void modes_are_a_ladder(void **state)
{
    (void)state;
    struct large large;
    open_large(&large, "gpt2-124m", 1);
    static const size_t ladder[] = {0, 2, 4, 6}; /* none, selective, split, block:1 */
    uint64_t former = UINT64_MAX;
    for (size_t i = 0; i < 4; i++) {
        const struct strategy strategy = strategy_of(&large, ladder[i], 12);
        struct plan plan = plan_of(&large, &strategy, NULL);
        assert_true(plan.peak_bytes < former);
        former = plan.peak_bytes;
        assert_true(plan.phases[PHASE_SAVE].used && plan.phases[PHASE_EVAL].used);
        assert_false(plan.phases[PHASE_SWITCH].used);
        /* params, grads and two moments, in fp32 */
        assert_int_equal(plan.resident.bytes[CATEGORY_PARAMS], large.units.n_elems * 4);
        assert_int_equal(plan.resident.bytes[CATEGORY_OPTIMIZER], large.units.n_elems * 8);
        plan_fini(&plan);
    }
    close_large(&large);
}

/* Without accumulation there is no later micro-step. */
static void one_micro_step(void **state)
{
    (void)state;
    struct large large;
    open_large(&large, "t0", 1);
    struct strategy strategy = strategy_of(&large, 0, 2);
    strategy.micro_batch = 4;
    struct plan plan = plan_of(&large, &strategy, NULL);
    assert_int_equal(plan.sections[SECTION_LATER].n_events, 0);
    assert_int_equal(plan.sections[SECTION_LATER].repeat, 0);
    assert_int_equal(plan.sections[SECTION_FIRST].repeat, 1);
    plan_fini(&plan);
    close_large(&large);
}

/* ---- a budget between two peaks ---- */

static enum status alone(void *user, const char *name, const void *mine, size_t bytes, void *all,
                         struct failure *why)
{
    (void)user;
    (void)name;
    (void)why;
    memcpy(all, mine, bytes);
    return STATUS_OK;
}

/* Enough for forward and backward with half of the optimizer's states: the plan says so before the
 * first step, and a run that starts all the same is refused in its first phase. */
static void optimizer_states_are_in_every_peak(void **state)
{
    (void)state;
    struct small_training small;
    small_init(&small, "t0");
    small.options.limits.global_batch = small.strategy.micro_batch = 4;
    small_open(&small);
    const struct plan *plan = &small.plan;
    const uint64_t states = plan->resident.bytes[CATEGORY_OPTIMIZER];
    assert_int_equal(states, 8 * small.units.n_elems);
    const uint64_t budget = plan->peak_bytes - states / 2;
    for (int phase = PHASE_FORWARD; phase <= PHASE_STEP; phase++) {
        assert_true(plan->phases[phase].at_peak[CATEGORY_OPTIMIZER] >= states);
    }
    assert_true(plan->committed_bytes > budget);
    /* All but the workspace is there; now the first phase asks for its part. */
    region_shrink(&small.training.workspace.region, 0);
    small.device.capacity_bytes = atomic_load(&small.device.committed_bytes);
    struct admit admit = {
        .workspace = &small.training.workspace, .plan = &small.plan, .size = 1, .exchange = alone};
    assert_int_equal(admit_phase(&admit, PHASE_FORWARD, &small.why), STATUS_OUT_OF_MEMORY);
    assert_int_equal(admit.shortage.phase, PHASE_FORWARD);
    assert_int_equal(admit.shortage.held_bytes, small.device.capacity_bytes);
    assert_int_equal(admit.shortage.asked_bytes,
                     device_round(&small.device, plan->phases[PHASE_FORWARD].workspace_bytes));
    small_close(&small);
}

/* ---- no host memory ---- */

static void survives_every_failed_allocation(void **state)
{
    (void)state;
    struct large large;
    open_large(&large, "t0", 2);
    const struct strategy strategy = strategy_of(&large, 8, 2);
    struct plan warm = plan_of(&large, &strategy, NULL); /* the library keeps what it made */
    plan_fini(&warm);
    const int64_t live = heap_live();
    bool clean = false;
    for (uint64_t nth = 1; !clean; nth++) {
        struct plan plan;
        struct failure why = {0};
        heap_fail(nth, false);
        const enum status status = rehearse(&large.rehearsal, &strategy, &plan, NULL, &why);
        clean = heap_failures() == 0;
        heap_fail(0, false);
        if (status == STATUS_OK) {
            assert_true(plan_layout_is_sound(&plan));
            plan_fini(&plan);
        } else {
            assert_int_equal(status, STATUS_OUT_OF_MEMORY);
            assert_true(why.text[0] != '\0');
        }
        assert_int_equal(heap_live(), live);
        assert_true(nth < 500);
    }
    close_large(&large);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_124m),
        cmocka_unit_test(llama_7b),
        cmocka_unit_test(llama_70b),
        cmocka_unit_test(work_is_counted),
        cmocka_unit_test(every_rank_plans_the_same),
        cmocka_unit_test(modes_are_a_ladder),
        cmocka_unit_test(one_micro_step),
        cmocka_unit_test(optimizer_states_are_in_every_peak),
        cmocka_unit_test(survives_every_failed_allocation),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
