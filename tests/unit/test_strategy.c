/* The strategy's table: text forms, domains, rules, what this version refuses.
 * links: base proto */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/strategy.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static const struct strategy_limits limits = {.n_layers = 4,
                                              .world_size = 2,
                                              .global_batch = 16,
                                              .seq_len = 128,
                                              .n_heads = 6,
                                              .n_kv_heads = 3};

static struct strategy defaults(void)
{
    struct strategy strategy;
    memset(&strategy, 0xA5, sizeof strategy);
    strategy_default(&strategy, &limits);
    return strategy;
}

static void set(struct strategy *strategy, const char *key, const char *value)
{
    struct failure why = {0};
    if (strategy_set(strategy, key, value, &why) != STATUS_OK) {
        fail_msg("%s", why.text);
    }
}

static void assert_contains(const char *text, const char *part)
{
    if (strstr(text, part) == NULL) {
        fail_msg("'%s' is not in '%s'", part, text);
    }
}

static void defaults_hold(void **state)
{
    (void)state;
    struct strategy strategy = defaults();
    char text[STRATEGY_TEXT_BYTES];
    assert_string_equal(
        strategy_format(NULL, &strategy, text),
        "checkpointing=none checkpointing.layers=4 offload.optimizer=none offload.params=none "
        "offload.grads=none offload.activations=none offload.optimizer.fraction=1 "
        "offload.activations.layers=4 zero.stage=0 micro_batch=1 grad_sync=last "
        "sequence_parallel=1 sequence_parallel.kind=auto loss_tile=0 mlp_tile=0 "
        "optimizer.state=fp32");
    assert_string_equal(strategy_format(&strategy, &strategy, text), "");
    struct failure why = {0};
    assert_int_equal(strategy_check(&strategy, &limits, &why), STATUS_OK);
    assert_int_equal(strategy_accumulation(&strategy, &limits), 8);
}

static const struct {
    const char *key, *values[5];
} legal[] = {
    {"checkpointing", {"none", "selective", "split", "block:1", "block:4294967295"}},
    {"checkpointing.layers", {"0", "3", "4294967295"}},
    {"offload.optimizer", {"none", "cpu", "nvme"}},
    {"offload.params", {"none", "cpu", "nvme"}},
    {"offload.grads", {"none", "cpu"}},
    {"offload.activations", {"none", "cpu"}},
    {"offload.optimizer.fraction", {"0", "0.1", "0.3333333333333333", "1"}},
    {"offload.activations.layers", {"0", "2"}},
    {"zero.stage", {"0", "1", "2", "3"}},
    {"micro_batch", {"1", "4294967295"}},
    {"grad_sync", {"last", "each"}},
    {"sequence_parallel", {"1", "8"}},
    {"sequence_parallel.kind", {"auto", "ulysses", "ring"}},
    {"loss_tile", {"0", "512"}},
    {"mlp_tile", {"0", "512"}},
    {"optimizer.state", {"fp32", "bf16"}},
};
enum { N_LEGAL = sizeof legal / sizeof legal[0] };

static void every_key_round_trips(void **state)
{
    (void)state;
    assert_int_equal(strategy_n_keys(), N_LEGAL);
    struct strategy base = defaults();
    for (size_t i = 0; i < N_LEGAL; i++) {
        assert_string_equal(strategy_key(i)->name, legal[i].key);
        assert_true(strlen(strategy_key(i)->values) > 0 && strlen(strategy_key(i)->help) > 0);
        assert_true(strategy_has_key(legal[i].key));
        for (size_t j = 0; j < 5 && legal[i].values[j] != NULL; j++) {
            const char *value = legal[i].values[j];
            struct strategy strategy = base, again = base;
            char got[STRATEGY_VALUE_BYTES], old[STRATEGY_VALUE_BYTES];
            char text[STRATEGY_TEXT_BYTES], expected[STRATEGY_TEXT_BYTES];
            set(&strategy, legal[i].key, value);
            assert_true(strategy_get(&strategy, legal[i].key, got));
            assert_string_equal(got, value);
            assert_true(strategy_get(&base, legal[i].key, old));
            bool same = strcmp(old, value) == 0;
            snprintf(expected, sizeof expected, "%s=%s", legal[i].key, value);
            assert_string_equal(strategy_format(&base, &strategy, text), same ? "" : expected);
            assert_int_equal(strategy_equal(&base, &strategy), same);
            set(&again, legal[i].key, got);
            assert_true(strategy_equal(&again, &strategy));
        }
    }
}

static void fields_are_the_right_ones(void **state)
{
    (void)state;
    struct strategy strategy = defaults();
    set(&strategy, "checkpointing", "block:3");
    assert_int_equal(strategy.checkpointing, CHECKPOINTING_BLOCK);
    assert_int_equal(strategy.checkpoint_blocks, 3);
    set(&strategy, "checkpointing", "split");
    assert_int_equal(strategy.checkpointing, CHECKPOINTING_SPLIT);
    assert_int_equal(strategy.checkpoint_blocks, 1);
    set(&strategy, "checkpointing", "block");
    assert_int_equal(strategy.checkpoint_blocks, 1);
    char got[STRATEGY_VALUE_BYTES];
    assert_true(strategy_get(&strategy, "checkpointing", got));
    assert_string_equal(got, "block:1");
    set(&strategy, "checkpointing.layers", "2");
    assert_int_equal(strategy.checkpointing_layers, 2);
    set(&strategy, "offload.optimizer", "nvme");
    assert_int_equal(strategy.offload_optimizer, OFFLOAD_NVME);
    set(&strategy, "offload.params", "cpu");
    assert_int_equal(strategy.offload_params, OFFLOAD_CPU);
    set(&strategy, "offload.grads", "cpu");
    assert_int_equal(strategy.offload_grads, OFFLOAD_CPU);
    set(&strategy, "offload.activations", "cpu");
    assert_int_equal(strategy.offload_activations, OFFLOAD_CPU);
    set(&strategy, "offload.optimizer.fraction", "0.25");
    assert_true(strategy.offload_optimizer_fraction == 0.25);
    set(&strategy, "offload.activations.layers", "1");
    assert_int_equal(strategy.offload_activations_layers, 1);
    set(&strategy, "zero.stage", "3");
    assert_int_equal(strategy.zero_stage, 3);
    set(&strategy, "micro_batch", "8");
    assert_int_equal(strategy.micro_batch, 8);
    set(&strategy, "grad_sync", "each");
    assert_int_equal(strategy.grad_sync, GRAD_SYNC_EACH);
    set(&strategy, "sequence_parallel", "2");
    assert_int_equal(strategy.sequence_parallel, 2);
    set(&strategy, "sequence_parallel.kind", "ring");
    assert_int_equal(strategy.sequence_parallel_kind, SEQUENCE_RING);
    set(&strategy, "loss_tile", "64");
    assert_int_equal(strategy.loss_tile, 64);
    set(&strategy, "mlp_tile", "32");
    assert_int_equal(strategy.mlp_tile, 32);
    set(&strategy, "optimizer.state", "bf16");
    assert_int_equal(strategy.optimizer_state, STATE_BF16);
}

static void bad_values_name_key_value_and_domain(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value;
        enum status status;
        const char *text;
    } cases[] = {
        {"zero.stages", "1", STATUS_UNKNOWN_KEY, "unknown strategy key 'zero.stages'"},
        {"zero.stages", "1", STATUS_UNKNOWN_KEY, "checkpointing.layers"},
        {"zero.stages", "1", STATUS_UNKNOWN_KEY, "optimizer.state"},
        {"Zero.stage", "1", STATUS_UNKNOWN_KEY, "must be one of"},
        {"", "1", STATUS_UNKNOWN_KEY, "unknown strategy key ''"},
        {"checkpointing", "all", STATUS_INVALID,
         "checkpointing=all: must be none|selective|split|block:K"},
        {"checkpointing", "block:0", STATUS_OUT_OF_RANGE,
         "checkpointing=block:0: the K of block:K"},
        {"checkpointing", "block:", STATUS_INVALID, "checkpointing=block::"},
        {"checkpointing", "block:2x", STATUS_INVALID, "checkpointing=block:2x:"},
        {"checkpointing", "block:4294967296", STATUS_OUT_OF_RANGE, "block:4294967296"},
        {"checkpointing", "None", STATUS_INVALID, "checkpointing=None: must be"},
        {"checkpointing.layers", "-1", STATUS_OUT_OF_RANGE, "checkpointing.layers=-1"},
        {"checkpointing.layers", "1.5", STATUS_INVALID, "checkpointing.layers=1.5"},
        {"checkpointing.layers", "", STATUS_INVALID, "must be a whole number from 0"},
        {"checkpointing.layers", "4294967296", STATUS_OUT_OF_RANGE, "to 4294967295 (0..L)"},
        {"offload.optimizer", "gpu", STATUS_INVALID,
         "offload.optimizer=gpu: must be none|cpu|nvme"},
        {"offload.params", "", STATUS_INVALID, "offload.params=: must be none|cpu|nvme"},
        {"offload.grads", "nvme", STATUS_INVALID, "offload.grads=nvme: must be none|cpu"},
        {"offload.activations", "nvme", STATUS_INVALID,
         "offload.activations=nvme: must be none|cpu"},
        {"offload.optimizer.fraction", "1.01", STATUS_OUT_OF_RANGE,
         "offload.optimizer.fraction=1.01: must be 0..1"},
        {"offload.optimizer.fraction", "-0.1", STATUS_OUT_OF_RANGE, "must be 0..1"},
        {"offload.optimizer.fraction", "nan", STATUS_INVALID, "must be 0..1"},
        {"offload.activations.layers", "x", STATUS_INVALID, "offload.activations.layers=x"},
        {"zero.stage", "4", STATUS_OUT_OF_RANGE, "zero.stage=4: must be 0..3"},
        {"zero.stage", "2 ", STATUS_INVALID, "zero.stage=2 : must be 0..3"},
        {"zero.stage", "+2", STATUS_INVALID, "zero.stage=+2: must be 0..3"},
        {"micro_batch", "0", STATUS_OUT_OF_RANGE, "micro_batch=0: must be a whole number from 1"},
        {"micro_batch", "0x4", STATUS_INVALID, "micro_batch=0x4"},
        {"grad_sync", "always", STATUS_INVALID, "grad_sync=always: must be last|each"},
        {"sequence_parallel", "0", STATUS_OUT_OF_RANGE, "sequence_parallel=0"},
        {"sequence_parallel.kind", "tree", STATUS_INVALID, "must be auto|ulysses|ring"},
        {"loss_tile", "-5", STATUS_OUT_OF_RANGE, "loss_tile=-5"},
        {"mlp_tile", "big", STATUS_INVALID, "mlp_tile=big"},
        {"optimizer.state", "fp16", STATUS_INVALID, "optimizer.state=fp16: must be fp32|bf16"},
    };
    struct strategy base = defaults();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct strategy strategy = base;
        struct failure why = {0};
        assert_int_equal(strategy_set(&strategy, cases[i].key, cases[i].value, &why),
                         cases[i].status);
        assert_int_equal(why.status, cases[i].status);
        assert_contains(why.text, cases[i].text);
        assert_memory_equal(&strategy, &base, sizeof base);
    }
    char value[STRATEGY_VALUE_BYTES];
    assert_false(strategy_get(&base, "nothing", value));
    assert_false(strategy_has_key("checkpoint"));
    /* A value as long as one likes is cut in the text, and does not overflow anything. */
    static char huge[100000];
    memset(huge, '9', sizeof huge - 1);
    struct failure why;
    struct strategy strategy = base;
    for (size_t i = 0; i < N_LEGAL; i++) {
        assert_int_not_equal(strategy_set(&strategy, legal[i].key, huge, &why), STATUS_OK);
    }
    assert_int_equal(strategy_set(&strategy, huge, huge, &why), STATUS_UNKNOWN_KEY);
}

struct violation {
    const char *changes[6]; /* key, value, ... */
    enum status status;
    const char *text;
};

static void check_violation(const struct violation *violation)
{
    struct strategy strategy = defaults();
    for (size_t i = 0; i < 6 && violation->changes[i] != NULL; i += 2) {
        set(&strategy, violation->changes[i], violation->changes[i + 1]);
    }
    struct failure why = {0};
    enum status status = strategy_check(&strategy, &limits, &why);
    if (status != violation->status) {
        fail_msg("%s is %s, not %s: %s", violation->changes[1], status_name(status),
                 status_name(violation->status), why.text);
    }
    assert_contains(why.text, violation->text);
}

static void every_rule_is_checked(void **state)
{
    (void)state;
    static const struct violation violations[] = {
        {{"checkpointing", "block:5"},
         STATUS_OUT_OF_RANGE,
         "checkpointing=block:5: K must be from 1 to 4"},
        {{"checkpointing.layers", "5"},
         STATUS_OUT_OF_RANGE,
         "checkpointing.layers=5: must be from 0 to 4"},
        {{"offload.activations.layers", "6"},
         STATUS_OUT_OF_RANGE,
         "offload.activations.layers=6: must be from 0 to 4"},
        {{"offload.activations", "cpu"},
         STATUS_CONFLICT,
         "offload.activations=cpu moves checkpointed block inputs, but checkpointing=none"},
        {{"sequence_parallel", "3"},
         STATUS_CONFLICT,
         "sequence_parallel=3: must divide the 2 ranks"},
        {{"sequence_parallel", "4"},
         STATUS_CONFLICT,
         "sequence_parallel=4: must divide the 2 ranks"},
        {{"sequence_parallel", "2", "sequence_parallel.kind", "ulysses"},
         STATUS_CONFLICT,
         "sequence_parallel=2 with sequence_parallel.kind=ulysses: must divide or be a multiple of "
         "the 3 key/value heads"},
        {{"micro_batch", "3"},
         STATUS_CONFLICT,
         "micro_batch=3: the global batch of 16 sequences is not a whole multiple of the 6 "
         "sequences of one micro-step (micro_batch 3 on 2 data-parallel ranks)"},
        {{"micro_batch", "16"}, STATUS_CONFLICT, "16 sequences is not a whole multiple of the 32"},
        {{"micro_batch", "4294967295"}, STATUS_CONFLICT, "the 8589934590 sequences"},
    };
    for (size_t i = 0; i < sizeof violations / sizeof violations[0]; i++) {
        check_violation(&violations[i]);
    }
    struct strategy strategy = defaults();
    struct strategy_limits odd_heads = limits;
    struct failure why = {0};
    odd_heads.n_heads = 5;
    set(&strategy, "sequence_parallel", "2");
    set(&strategy, "sequence_parallel.kind", "ulysses");
    assert_int_equal(strategy_check(&strategy, &odd_heads, &why), STATUS_CONFLICT);
    assert_contains(why.text, "must divide the 5 attention heads");
}

static void what_this_version_lacks_is_refused(void **state)
{
    (void)state;
    static const struct violation violations[] = {
        {{"offload.optimizer", "nvme"},
         STATUS_UNSUPPORTED,
         "offload.optimizer=nvme is not in this version: there is no NVMe tier; only "
         "offload.optimizer=none|cpu can be asked for"},
        {{"offload.params", "nvme"},
         STATUS_UNSUPPORTED,
         "offload.params=nvme is not in this version"},
        {{"offload.grads", "cpu"}, STATUS_UNSUPPORTED, "offload.grads=cpu is not in this version"},
        {{"sequence_parallel", "2"},
         STATUS_UNSUPPORTED,
         "sequence_parallel=2 is not in this version"},
        {{"mlp_tile", "64"}, STATUS_UNSUPPORTED, "mlp_tile=64 is not in this version"},
        {{"optimizer.state", "bf16"},
         STATUS_UNSUPPORTED,
         "optimizer.state=bf16 is not in this version"},
    };
    for (size_t i = 0; i < sizeof violations / sizeof violations[0]; i++) {
        check_violation(&violations[i]);
    }
}

static void what_it_has_is_accepted(void **state)
{
    (void)state;
    static const char *const changes[][2] = {
        {"checkpointing", "selective"},
        {"checkpointing", "split"},
        {"checkpointing", "block:1"},
        {"checkpointing", "block:4"},
        {"checkpointing.layers", "0"},
        {"checkpointing.layers", "4"},
        {"micro_batch", "2"},
        {"micro_batch", "8"},
        {"loss_tile", "100"},
        {"offload.optimizer.fraction", "0.5"},
        {"offload.activations.layers", "1"},
        {"sequence_parallel.kind", "ring"},
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        struct strategy strategy = defaults();
        struct failure why = {0};
        set(&strategy, changes[i][0], changes[i][1]);
        if (strategy_check(&strategy, &limits, &why) != STATUS_OK) {
            fail_msg("%s", why.text);
        }
    }
}

static void accumulation(void **state)
{
    (void)state;
    struct strategy strategy = defaults();
    set(&strategy, "micro_batch", "4");
    assert_int_equal(strategy_accumulation(&strategy, &limits), 2);
    set(&strategy, "sequence_parallel", "2");
    assert_int_equal(strategy_accumulation(&strategy, &limits), 4);
    set(&strategy, "micro_batch", "16");
    assert_int_equal(strategy_accumulation(&strategy, &limits), 1);
    set(&strategy, "micro_batch", "5");
    assert_int_equal(strategy_accumulation(&strategy, &limits), 0);
    set(&strategy, "sequence_parallel", "3");
    assert_int_equal(strategy_accumulation(&strategy, &limits), 0);
}

static void the_longest_text_fits(void **state)
{
    (void)state;
    struct strategy strategy = defaults();
    static const char *const longest[][2] = {
        {"checkpointing", "block:4294967295"},
        {"checkpointing.layers", "4294967295"},
        {"offload.optimizer", "nvme"},
        {"offload.params", "nvme"},
        {"offload.grads", "none"},
        {"offload.activations", "none"},
        {"offload.optimizer.fraction", "1.2345678901234568e-300"},
        {"offload.activations.layers", "4294967295"},
        {"micro_batch", "4294967295"},
        {"sequence_parallel", "4294967295"},
        {"sequence_parallel.kind", "ulysses"},
        {"loss_tile", "4294967295"},
        {"mlp_tile", "4294967295"},
    };
    for (size_t i = 0; i < sizeof longest / sizeof longest[0]; i++) {
        set(&strategy, longest[i][0], longest[i][1]);
    }
    char text[STRATEGY_TEXT_BYTES];
    strategy_format(NULL, &strategy, text);
    assert_contains(text, "optimizer.state=fp32");
    assert_contains(text, "offload.optimizer.fraction=1.2345678901234568e-300 ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_hold),
        cmocka_unit_test(every_key_round_trips),
        cmocka_unit_test(fields_are_the_right_ones),
        cmocka_unit_test(bad_values_name_key_value_and_domain),
        cmocka_unit_test(every_rule_is_checked),
        cmocka_unit_test(what_this_version_lacks_is_refused),
        cmocka_unit_test(what_it_has_is_accepted),
        cmocka_unit_test(accumulation),
        cmocka_unit_test(the_longest_text_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
