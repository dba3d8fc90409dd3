/* The rule of activation checkpointing, as a table.
 * links: worker kernels proto base */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "worker/model/recompute.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static struct strategy strategy_of(enum checkpointing mode, uint32_t blocks, uint32_t layers)
{
    return (struct strategy){
        .checkpointing = mode, .checkpoint_blocks = blocks, .checkpointing_layers = layers};
}

static void check_keep(struct recompute_keep got, struct recompute_keep want)
{
    assert_int_equal(got.norm1, want.norm1);
    assert_int_equal(got.qkv, want.qkv);
    assert_int_equal(got.attention, want.attention);
    assert_int_equal(got.residual, want.residual);
    assert_int_equal(got.norm2, want.norm2);
    assert_int_equal(got.up, want.up);
    assert_int_equal(got.act, want.act);
}

static void what_is_kept(void **state)
{
    (void)state;
    const struct recompute_keep all = {true, true, true, true, true, true, true};
    const struct {
        enum checkpointing mode;
        struct recompute_keep keep;
    } rows[] = {
        {CHECKPOINTING_NONE, all},
        {CHECKPOINTING_SELECTIVE, {.qkv = true, .attention = true, .residual = true, .up = true}},
        {CHECKPOINTING_SPLIT, {.residual = true}},
        {CHECKPOINTING_BLOCK, {0}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const struct strategy strategy = strategy_of(rows[i].mode, 1, 3);
        check_keep(recompute_keep_of(&strategy, 0), rows[i].keep);
        check_keep(recompute_keep_of(&strategy, 2), rows[i].keep);
        /* Beyond checkpointing.layers everything stays. */
        check_keep(recompute_keep_of(&strategy, 3), all);
    }
    check_keep(recompute_keep_all, all);
}

static void check_group(const struct strategy *strategy, uint32_t n_layers, uint32_t layer,
                        uint32_t first, uint32_t end, bool checkpointed)
{
    const struct recompute_group group = recompute_group_of(strategy, n_layers, layer);
    assert_int_equal(group.first, first);
    assert_int_equal(group.end, end);
    assert_int_equal(group.checkpointed, checkpointed);
}

static void blocks_are_grouped(void **state)
{
    (void)state;
    const struct strategy twos = strategy_of(CHECKPOINTING_BLOCK, 2, 5);
    check_group(&twos, 7, 0, 0, 2, true);
    check_group(&twos, 7, 1, 0, 2, true);
    check_group(&twos, 7, 3, 2, 4, true);
    check_group(&twos, 7, 4, 4, 5, true); /* cut by checkpointing.layers */
    check_group(&twos, 7, 5, 5, 6, false);
    const struct strategy all = strategy_of(CHECKPOINTING_BLOCK, 4, 6);
    check_group(&all, 6, 5, 4, 6, true); /* cut by the model */
    const struct strategy ones = strategy_of(CHECKPOINTING_BLOCK, 1, 6);
    check_group(&ones, 6, 5, 5, 6, true);
    const struct strategy split = strategy_of(CHECKPOINTING_SPLIT, 1, 6);
    check_group(&split, 6, 5, 5, 6, false);
    const struct strategy none = strategy_of(CHECKPOINTING_NONE, 1, 6);
    check_group(&none, 6, 0, 0, 1, false);
}

/* Every layer is in exactly one group, whatever K and the number of layers. */
static void groups_cover_the_model_once(void **state)
{
    (void)state;
    for (uint32_t n_layers = 1; n_layers <= 9; n_layers++) {
        for (uint32_t blocks = 1; blocks <= n_layers; blocks++) {
            for (uint32_t layers = 0; layers <= n_layers; layers++) {
                const struct strategy strategy = strategy_of(CHECKPOINTING_BLOCK, blocks, layers);
                for (uint32_t layer = 0; layer < n_layers;) {
                    const struct recompute_group group =
                        recompute_group_of(&strategy, n_layers, layer);
                    assert_int_equal(group.first, layer);
                    assert_true(group.end > layer && group.end <= n_layers);
                    assert_int_equal(group.checkpointed, layer < layers);
                    for (uint32_t i = group.first; i < group.end; i++) {
                        check_group(&strategy, n_layers, i, group.first, group.end,
                                    group.checkpointed);
                    }
                    layer = group.end;
                }
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_kept),
        cmocka_unit_test(blocks_are_grouped),
        cmocka_unit_test(groups_cover_the_model_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
