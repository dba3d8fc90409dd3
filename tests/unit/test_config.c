/* The configuration of a run: good files and what becomes of every key. Files that are refused are
 * in test_config_bad.c, the command line in test_config_args.c.
 * links: base proto worker */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "proto/base/log.h"
#include "worker/config_table.h"
#include "tests/unit/config_fixture.h"

static void defaults(void **state)
{
    char path[256];
    (void)state;
    load_ok(TOP(""), 1);
    assert_string_equal(config.model, "t0");
    assert_int_equal(config.spec.n_layers, 2);
    assert_int_equal(config.data.n, 1);
    in_folder("data.txt", path);
    assert_string_equal(config.data.path[0], path);
    assert_int_equal(config.eval_data.n, 0);
    assert_int_equal(config.data_format, DATA_AUTO);
    assert_true(config.shuffle);
    assert_int_equal(config.seq_len, 64); /* t0's longest */
    assert_int_equal(config.steps, 10);
    assert_int_equal(config.seed, 0);
    assert_int_equal(config.global_batch, 1);
    assert_int_equal(config.strategy.micro_batch, 1);
    assert_true(config.lr == 1e-3 && config.beta1 == 0.9 && config.beta2 == 0.999);
    assert_true(config.eps == 1e-8 && config.weight_decay == 0 && config.gradient_clipping == 0);
    assert_int_equal(config.schedule, SCHEDULE_CONSTANT);
    assert_int_equal(config.warmup_steps, 0);
    assert_int_equal(config.total_steps, 10);
    assert_int_equal(config.device, DEVICE_CHOICE_AUTO);
    assert_int_equal(config.device_memory, 0);
    assert_int_equal(config.threads, 0);
    assert_string_equal(config.run_dir, "runs/run");
    assert_int_equal(config.strategy.checkpointing, CHECKPOINTING_NONE);
    assert_int_equal(config.strategy.checkpointing_layers, 2);
    assert_int_equal(config.oom_policy, OOM_REPORT);
    assert_int_equal(config.save_every, 0);
    assert_int_equal(config.eval_micro_batch, 1);
    assert_int_equal(config.n_pause_at, 0);
    assert_int_equal(config.steps_per_print, 10);
    assert_true(config.daemon);
    assert_false(config.paint);
    assert_true(config.step_timeout_s == 600);
    assert_int_equal(config.world_size, 1);
    assert_string_equal(config.notes, "");
    load_ok("{\"ballast\":{\"model\":\"gpt2-124m\",\"data\":\"data.txt\",\"steps\":1}}", 1);
    assert_int_equal(config.seq_len, 1024);
}

static void everything_of_ours(void **state)
{
    char path[256];
    (void)state;
    load_ok("{\"train_batch_size\": 16, \"gradient_clipping\": 1.5, \"steps_per_print\": 3,\n"
            "\"ballast\": {\"model\": \"llama-tiny-bytes\", \"dropout\": 0.25,\n"
            "\"data\": [\"data.txt\", \"/dev/../etc/passwd\"], \"data_format\": \"bytes\",\n"
            "\"shuffle\": false, \"eval_data\": \"data.txt\", \"seq_len\": 128, \"steps\": 2000,\n"
            "\"seed\": 9223372036854775807, \"device\": \"cpu\", \"device_memory\": \"1.5 GiB\",\n"
            "\"host_memory\": 8388608, \"threads\": 3, \"run_dir\": \"here/there\",\n"
            "\"pause_at\": [30, 10, 20], \"link\": \"auto\", \"step_timeout\": 12.5,\n"
            "\"daemon\": false, \"debug\": {\"paint\": true}, \"oom\": {\"policy\": \"abort\"},\n"
            "\"save\": {\"every\": 100, \"keep\": 3},\n"
            "\"eval\": {\"every\": 50, \"micro_batch\": 7, \"batches\": 9},\n"
            "\"strategy\": {\"checkpointing\": \"block:2\", \"checkpointing.layers\": 3,\n"
            "\"micro_batch\": 2, \"loss_tile\": 64, \"offload.optimizer.fraction\": 0.5}}}",
            4);
    assert_int_equal(config.global_batch, 16);
    assert_int_equal(config.strategy.micro_batch, 2);
    assert_true(config.gradient_clipping == 1.5);
    assert_int_equal(config.steps_per_print, 3);
    assert_true(config.spec.dropout_embed == 0.25F && config.spec.dropout_attention == 0.25F &&
                config.spec.dropout_residual == 0.25F);
    in_folder("data.txt", path);
    assert_int_equal(config.data.n, 2);
    assert_string_equal(config.data.path[0], path);
    assert_string_equal(config.data.path[1], "/dev/../etc/passwd");
    assert_string_equal(config.eval_data.path[0], path);
    assert_int_equal(config.data_format, DATA_BYTES);
    assert_false(config.shuffle);
    assert_int_equal(config.seq_len, 128);
    assert_true(config.seed == UINT64_C(9223372036854775807));
    assert_int_equal(config.device, DEVICE_CHOICE_CPU);
    assert_true(config.device_memory == UINT64_C(1610612736));
    assert_int_equal(config.host_memory, 8388608);
    assert_int_equal(config.threads, 3);
    assert_string_equal(config.run_dir, "here/there");
    assert_int_equal(config.n_pause_at, 3);
    assert_int_equal(config.pause_at[0], 10); /* sorted */
    assert_int_equal(config.pause_at[1], 20);
    assert_int_equal(config.pause_at[2], 30);
    assert_true(config.step_timeout_s == 12.5);
    assert_false(config.daemon);
    assert_true(config.paint);
    assert_int_equal(config.oom_policy, OOM_ABORT);
    assert_int_equal(config.save_every, 100);
    assert_int_equal(config.save_keep, 3);
    assert_int_equal(config.eval_every, 50);
    assert_int_equal(config.eval_micro_batch, 7);
    assert_int_equal(config.eval_batches, 9);
    assert_int_equal(config.strategy.checkpointing, CHECKPOINTING_BLOCK);
    assert_int_equal(config.strategy.checkpoint_blocks, 2);
    assert_int_equal(config.strategy.checkpointing_layers, 3);
    assert_int_equal(config.strategy.loss_tile, 64);
    struct strategy_limits limits;
    config_limits(&config, &limits);
    assert_int_equal(limits.n_layers, 4);
    assert_int_equal(limits.world_size, 4);
    assert_int_equal(limits.global_batch, 16);
    assert_int_equal(limits.seq_len, 128);
    assert_int_equal(limits.n_heads, 8);
    assert_int_equal(limits.n_kv_heads, 4);
    assert_int_equal(strategy_accumulation(&config.strategy, &limits), 2);
}

static void comments_and_trailing_commas(void **state)
{
    (void)state;
    load_ok("\xEF\xBB\xBF// a comment\n"
            "{ /* one\n more */ \"train_batch_size\": 4, // \"gradient_clipping\": 9,\n"
            "\"ballast\": {\"model\": \"t0\",\n"
            "  \"data\": [\"data.txt\",], /* , */\n"
            "  \"run_dir\": \"a//b/*c*/,]\\\"//\", // in a text they are text\n"
            "  \"steps\": 10, /**/\n"
            "}, }\n// end",
            1);
    assert_int_equal(config.global_batch, 4);
    assert_true(config.gradient_clipping == 0);
    assert_string_equal(config.run_dir, "a//b/*c*/,]\"//");
    /* Lines are the file's own, also behind comments. */
    refused("/* 1\n 2\n 3 */\n{\n\"ballast\": { // 5\n\"model\": \"t0\",\n\"steps\": 0,}}", 1,
            STATUS_OUT_OF_RANGE, PARTS("run.json:7: ballast.steps"));
}

static void batch_arithmetic(void **state)
{
    static const struct {
        const char *text;
        uint32_t world, total, micro, accumulation;
    } cases[] = {
        {TOP(""), 4, 4, 1, 1},
        {TOP("\"train_batch_size\": 12,"), 2, 12, 6, 1},
        {TOP("\"train_micro_batch_size_per_gpu\": 3,"), 2, 6, 3, 1},
        {TOP("\"gradient_accumulation_steps\": 5,"), 2, 10, 1, 5},
        {TOP("\"train_batch_size\": 12, \"train_micro_batch_size_per_gpu\": 3,"), 2, 12, 3, 2},
        {TOP("\"train_batch_size\": 12, \"gradient_accumulation_steps\": 3,"), 2, 12, 2, 3},
        {TOP("\"train_micro_batch_size_per_gpu\": 3, \"gradient_accumulation_steps\": 2,"), 2, 12,
         3, 2},
        {TOP("\"train_batch_size\": 12, \"train_micro_batch_size_per_gpu\": 3,"
             "\"gradient_accumulation_steps\": 2,"),
         2, 12, 3, 2},
        {TOP("\"train_batch_size\": \"auto\", \"train_micro_batch_size_per_gpu\": 2,"
             "\"gradient_accumulation_steps\": \"auto\","),
         3, 6, 2, 1},
        {FILE_OF("\"train_batch_size\": 12,", "\"strategy\": {\"micro_batch\": 2},"), 2, 12, 2, 3},
        {FILE_OF("\"train_micro_batch_size_per_gpu\": 2,", "\"strategy\": {\"micro_batch\": 2},"),
         1, 2, 2, 1},
        {TOP("\"train_batch_size\": 1.2e1,"), 1, 12, 12, 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct strategy_limits limits;
        load_ok(cases[i].text, cases[i].world);
        config_limits(&config, &limits);
        assert_int_equal(config.global_batch, cases[i].total);
        assert_int_equal(config.strategy.micro_batch, cases[i].micro);
        assert_int_equal(strategy_accumulation(&config.strategy, &limits), cases[i].accumulation);
        assert_int_equal(config.eval_micro_batch, cases[i].micro);
    }
}

static void schedules(void **state)
{
    (void)state;
    load_ok(
        TOP("\"optimizer\": {\"type\": \"adamw\", \"params\": {\"lr\": 3e-4, \"betas\": "
            "[0.8, 0.95], \"eps\": 1e-6, \"weight_decay\": 0.1}},"
            "\"scheduler\": {\"type\": \"WarmupCosineLR\", \"params\": {\"warmup_num_steps\": 4,"
            "\"warmup_min_ratio\": 0.5, \"cos_min_ratio\": 0.25}},"),
        1);
    assert_true(config.lr == 3e-4 && config.beta1 == 0.8 && config.beta2 == 0.95);
    assert_true(config.eps == 1e-6 && config.weight_decay == 0.1);
    assert_int_equal(config.schedule, SCHEDULE_COSINE);
    assert_int_equal(config.warmup_steps, 4);
    assert_int_equal(config.total_steps, 10);
    assert_true(config.warmup_min_lr == 1.5e-4 && config.lr_min_ratio == 0.25);

    load_ok(TOP("\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"warmup_num_steps\": 5,"
                "\"total_num_steps\": 50, \"warmup_min_lr\": 0.125, \"warmup_max_lr\": 0.25}},"),
            1);
    assert_int_equal(config.schedule, SCHEDULE_LINEAR);
    assert_int_equal(config.total_steps, 50);
    assert_true(config.lr == 0.25 && config.warmup_min_lr == 0.125 && config.lr_min_ratio == 0);

    load_ok(
        TOP("\"optimizer\": {\"params\": {\"lr\": \"auto\", \"betas\": \"auto\"}},"
            "\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_num_steps\": \"auto\","
            "\"warmup_max_lr\": \"auto\", \"warmup_min_lr\": \"auto\"}},"),
        1);
    assert_int_equal(config.schedule, SCHEDULE_CONSTANT);
    assert_int_equal(config.warmup_steps, 0);
    assert_true(config.lr == 1e-3 && config.beta1 == 0.9);

    load_ok(TOP("\"scheduler\": {\"type\": \"WarmupLR\"},"), 1);
    assert_int_equal(config.warmup_steps, 1000); /* DeepSpeed's default */
    load_ok(TOP("\"optimizer\": {\"params\": {\"lr\": 0.5}}, \"scheduler\": {\"type\": "
                "\"WarmupLR\", \"params\": {\"warmup_max_lr\": 0.5}},"),
            1);
    assert_true(config.lr == 0.5);
}

/* A file as people have them: everything is named, much of it without effect. */
/* DeepSpeed's keys of offload are our tiers. */
static void deepspeed_offload(void **state)
{
    (void)state;
    load_ok("{\"train_batch_size\": 4,\n\"bf16\": {\"enabled\": true},\n"
            "\"zero_optimization\": {\"stage\": 3,\n"
            "\"offload_optimizer\": {\"device\": \"cpu\", \"ratio\": 0.25},\n"
            "\"offload_param\": {\"device\": \"cpu\", \"pin_memory\": true}},\n"
            "\"activation_checkpointing\": {\"cpu_checkpointing\": true},\n"
            "\"ballast\": {\"model\": \"t0\", \"data\": \"data.txt\", \"steps\": 10,\n"
            "\"strategy\": {\"checkpointing\": \"block:1\"}}}",
            2);
    assert_int_equal(config.dtype, DTYPE_BF16);
    assert_int_equal(config.strategy.zero_stage, 3);
    assert_int_equal(config.strategy.offload_optimizer, OFFLOAD_CPU);
    assert_true(config.strategy.offload_optimizer_fraction == 0.25);
    assert_int_equal(config.strategy.offload_params, OFFLOAD_CPU);
    assert_int_equal(config.strategy.offload_activations, OFFLOAD_CPU);
    assert_int_equal(config.strategy.checkpointing, CHECKPOINTING_BLOCK);
}

static void a_deepspeed_file(void **state)
{
    (void)state;
    load_ok(
        "{\"train_batch_size\": \"auto\",\n\"train_micro_batch_size_per_gpu\": \"auto\",\n"
        "\"zero_optimization\": {\"stage\": 0, \"overlap_comm\": true,\n"
        "\"reduce_bucket_size\": 5e8, \"allgather_bucket_size\": \"auto\",\n"
        "\"offload_optimizer\": {\"device\": \"none\", \"pin_memory\": true, \"ratio\": 1.0},\n"
        "\"offload_param\": {\"device\": \"none\", \"buffer_count\": 5}},\n"
        "\"bf16\": {\"enabled\": \"auto\"}, \"fp16\": {\"enabled\": false, \"loss_scale\": 0},\n"
        "\"activation_checkpointing\": {\"partition_activations\": true, \"cpu_checkpointing\":\n"
        "false, \"number_checkpoints\": null, \"profile\": false}, \"wandb\": {\"enabled\": "
        "true},\n"
        "\"communication_data_type\": null, \"prescale_gradients\": false,\n"
        "\"wall_clock_breakdown\": false, \"zero_allow_untested_optimizer\": true,\n"
        "\"elasticity\": {\"enabled\": false, \"max_train_batch_size\": 2000},\n"
        "\"ballast\": {\"model\": \"t0\", \"data\": \"data.txt\", \"steps\": 10}}",
        2);
    assert_int_equal(config.dtype, DTYPE_FP32); /* "auto": the default */
    assert_int_equal(config.strategy.zero_stage, 0);
    assert_int_equal(config.strategy.offload_optimizer, OFFLOAD_NONE);
    has(config.notes, "zero_optimization.overlap_comm (line 3)");
    has(config.notes, "zero_optimization.reduce_bucket_size (line 4)");
    has(config.notes, "wandb.enabled (line 9)");
    has(config.notes, "elasticity (line 12)");
    assert_null(strstr(config.notes, "allgather_bucket_size")); /* auto: nothing was asked for */
    assert_null(strstr(config.notes, "zero_optimization.stage"));
    log_quiet(true);
    config_log_notes(&config);
}

static void checkpoints_become_blocks(void **state)
{
    static const struct {
        const char *text;
        uint32_t blocks;
    } cases[] = {{"1", 4}, {"2", 2}, {"3", 2}, {"4", 1}, {"100", 1}};
    char text[400];
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        snprintf(text, sizeof(text),
                 "{\"activation_checkpointing\": {\"number_checkpoints\": %s}, \"ballast\": {"
                 "\"model\": \"llama-tiny-bytes\", \"data\": \"data.txt\", \"steps\": 1}}",
                 cases[i].text);
        load_ok(text, 1);
        assert_int_equal(config.strategy.checkpointing, CHECKPOINTING_BLOCK);
        assert_int_equal(config.strategy.checkpoint_blocks, cases[i].blocks);
    }
    load_ok(FILE_OF("\"activation_checkpointing\": {\"number_checkpoints\": 2},",
                    "\"strategy\": {\"checkpointing\": \"block:1\"},"),
            1); /* both say the same */
}

static void a_model_folder_lies_beside_the_file(void **state)
{
    char path[256];
    (void)state;
    in_folder("model", path);
    assert_int_equal(mkdir(path, 0700), 0);
    write_text("model/config.json",
               "{\"model_type\": \"gpt2\", \"vocab_size\": 256, \"n_embd\": 64, \"n_layer\": 2,"
               "\"n_head\": 4, \"n_positions\": 100}");
    load_ok("{\"ballast\":{\"model\":\"model\",\"data\":\"data.txt\",\"steps\":1}}", 1);
    assert_string_equal(config.model, path);
    assert_string_equal(config.spec.name, "model");
    assert_int_equal(config.seq_len, 100);
    assert_true(config.spec.dropout_residual == 0.1F);
    load_ok("{\"ballast\":{\"model\":\"model\",\"data\":\"data.txt\",\"steps\":1,\"dropout\":0}}",
            1);
    assert_true(config.spec.dropout_residual == 0.0F && config.spec.dropout_embed == 0.0F);
    write_text("model/config.json",
               "{\"model_type\": \"gpt2\", \"vocab_size\": 200, \"n_embd\": 64,"
               "\"n_layer\": 2, \"n_head\": 4, \"n_positions\": 100}");
    refused("{\"ballast\":{\"model\":\"model\",\"data\":\"data.txt\",\"data_format\":\"bytes\","
            "\"steps\":1}}",
            1, STATUS_CONFLICT, PARTS("run.json:1: ballast.data_format", "256", "200"));
    write_text("model/config.json", "{}");
    refused("{\"ballast\":{\n\"model\":\"model\",\"data\":\"data.txt\",\"steps\":1}}", 1,
            STATUS_INVALID, PARTS("run.json:2: ballast.model", "config.json", "model_type"));
}

/* ---- the table itself ---- */

static void the_table_is_consistent(void **state)
{
    (void)state;
    for (size_t i = 0; i < config_n_rows(); i++) {
        const struct config_row *row = config_row_at(i);
        char parent[CONFIG_KEY_BYTES];
        assert_ptr_equal(config_row(row->path), row); /* no row twice */
        assert_true(strlen(row->path) < CONFIG_KEY_BYTES);
        snprintf(parent, sizeof(parent), "%s", row->path);
        char *dot = strrchr(parent, '.');
        if (dot) {
            *dot = '\0';
            assert_non_null(config_row(parent));
            assert_int_equal(config_row(parent)->verdict, VERDICT_SECTION);
        }
        if (row->verdict != VERDICT_SECTION) {
            assert_non_null(row->help);
        }
        if (row->verdict == VERDICT_HONOURED && strcmp(row->path, "optimizer.type") != 0) {
            assert_true((row->at != CONFIG_NOWHERE) != (row->strategy_key != NULL));
        }
        if (row->strategy_key) {
            assert_true(strategy_has_key(row->strategy_key));
        }
    }
}

/* ---- allocation failures ---- */

static void every_allocation_may_fail(void **state)
{
    static const char text[] =
        "{ // a file with a bit of everything\n"
        "\"train_batch_size\": 8, \"optimizer\": {\"params\": {\"lr\": 5e-1}},\n"
        "\"zero_optimization\": {\"overlap_comm\": true, \"stage\": 0},\n"
        "\"ballast\": {\"model\": \"t0\", \"data\": [\"data.txt\",],\n"
        "\"strategy\": {\"checkpointing\": \"block:1\"}, \"steps\": 10}}";
    char name[256];
    const int64_t live = heap_live();
    (void)state;
    in_folder("run.json", name);
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        bool clean = false;
        for (uint64_t nth = 1; nth <= 1000 && !clean; nth++) {
            struct failure why;
            heap_fail(nth, for_ever != 0);
            const enum status status =
                config_from_text(text, sizeof(text) - 1, name, 2, &config, &why);
            clean = heap_failures() == 0;
            heap_fail(0, false);
            if (status != (clean ? STATUS_OK : STATUS_OUT_OF_MEMORY)) {
                print_error("allocation %d: %s\n", (int)nth, status ? why.text : "accepted");
            }
            assert_int_equal(status, clean ? STATUS_OK : STATUS_OUT_OF_MEMORY);
            assert_int_equal(heap_live(), live);
        }
        assert_true(clean);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(everything_of_ours),
        cmocka_unit_test(comments_and_trailing_commas),
        cmocka_unit_test(batch_arithmetic),
        cmocka_unit_test(schedules),
        cmocka_unit_test(deepspeed_offload),
        cmocka_unit_test(a_deepspeed_file),
        cmocka_unit_test(checkpoints_become_blocks),
        cmocka_unit_test(a_model_folder_lies_beside_the_file),
        cmocka_unit_test(the_table_is_consistent),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
