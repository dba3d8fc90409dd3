/* Planning large models without a device: packing, layout, time.
 * links: testing worker kernels proto base
 * labels: plan */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "tests/lib/kernel_ops.h"
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

static void check_preset(const char *preset, uint32_t world_size)
{
    struct large large;
    open_large(&large, preset, world_size);
    const uint32_t layers[] = {large.spec.n_layers, large.spec.n_layers / 3};
    double worst = 1.0;
    double slowest = 0.0;
    for (size_t mode = 0; mode < N_MODES; mode++) {
        for (size_t i = 0; i < sizeof layers / sizeof layers[0]; i++) {
            const struct strategy strategy = strategy_of(&large, mode, layers[i]);
            struct failure why = {0};
            struct plan plan;
            /* The first time asks the library for the scratch of every shape. */
            assert_int_equal(rehearse(&large.rehearsal, &strategy, &plan, NULL, &why), STATUS_OK);
            plan_fini(&plan);
            const double started = units_monotonic_s();
            assert_int_equal(rehearse(&large.rehearsal, &strategy, &plan, NULL, &why), STATUS_OK);
            const double seconds = units_monotonic_s() - started;
            slowest = seconds > slowest ? seconds : slowest;
            worst = plan.packing_efficiency < worst ? plan.packing_efficiency : worst;
            char text[STRATEGY_TEXT_BYTES];
            struct strategy plain;
            strategy_default(&plain, &large.options.limits);
            print_message("%s on %u: %s: efficiency %.4f, %.1f ms, %u buffers\n", preset, world_size,
                          strategy_format(&plain, &strategy, text), plan.packing_efficiency,
                          seconds * 1e3, plan.sections[SECTION_LATER].n_buffers);
            plan_fini(&plan);
        }
    }
    print_message("%s on %u: worst efficiency %.4f, slowest plan %.1f ms\n", preset, world_size,
                  worst, slowest * 1e3);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_124m),
        cmocka_unit_test(llama_7b),
        cmocka_unit_test(llama_70b),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
