/* The configuration of a run: every key, every refusal, the command line.
 * links: base proto worker */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/json.h"
#include "worker/config.h"
#include "worker/config_table.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static char folder[] = "/tmp/ballast-config-XXXXXX";
static struct config config; /* too large for the stack of a test */

static void in_folder(const char *name, char path[static 256])
{
    snprintf(path, 256, "%s/%s", folder, name);
}

static void write_text(const char *name, const char *text)
{
    char path[256];
    in_folder(name, path);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

static enum status load(const char *text, uint32_t world_size, struct failure *why)
{
    char name[256];
    in_folder("run.json", name);
    return config_from_text(text, strlen(text), name, world_size, &config, why);
}

static void load_ok(const char *text, uint32_t world_size)
{
    struct failure why;
    const enum status status = load(text, world_size, &why);
    if (status) {
        print_error("%s\n%s: %s\n", text, status_name(status), why.text);
    }
    assert_int_equal(status, STATUS_OK);
}

static void has(const char *text, const char *part)
{
    if (!strstr(text, part)) {
        print_error("'%s' lacks '%s'\n", text, part);
    }
    assert_non_null(strstr(text, part));
}

#define PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void refused(const char *text, uint32_t world_size, enum status expected,
                    const char *const *parts)
{
    struct failure why;
    const int64_t live = heap_live();
    config.steps = 4711;
    const enum status status = load(text, world_size, &why);
    if (status != expected) {
        print_error("%.300s\n%s: %s\n", text, status_name(status), status ? why.text : "accepted");
    }
    assert_int_equal(status, expected);
    assert_int_equal(why.status, expected);
    assert_int_equal(config.steps, 4711); /* no output on failure */
    assert_int_equal(heap_live(), live);
    for (; *parts; parts++) {
        has(why.text, *parts);
    }
}

/* A file whose second line holds `top` and whose third holds `ours`; both may be empty. */
#define FILE_OF(top, ours)                                                                         \
    "{\n" top "\n\"ballast\": {" ours "\n"                                                         \
    "\"model\": \"t0\", \"data\": \"data.txt\", \"steps\": 10}}\n"
#define OURS(ours) FILE_OF("", ours)
#define TOP(top) FILE_OF(top, "")

/* ---- good files ---- */

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

/* ---- bad files ---- */

static void malformed_files(void **state)
{
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "JSON"},
        {"{", "run.json:1"},
        {"[]", "object"},
        {"3", "JSON"},
        {"{\"ballast\": {}", "JSON"},
        {"{\n\n\"steps\" 5}", "run.json:3:"},
        {"{\"steps\": 5,, }", "JSON"},
        {"{,}", "JSON"},
        {"{\"a\": [,]}", "JSON"},
        {"{\"a\": ,}", "JSON"},
        {"{\"a\": 'x'}", "JSON"},
        {"{\"a\": NaN}", "JSON"},
        {"{\"a\": 1e999}", "JSON"},
        {"{\"a\": 99999999999999999999}", "JSON"},
        {"{\"a\": \"\\u0000\"}", "JSON"},
        {"{\"a\": \"unfinished\n}", "JSON"},
        {"{\"a\": \"\xFF\"}", "JSON"},
        {"{}\n/* never\nends", "run.json:2: the comment"},
        {"/* 1\n2 */\n{}/* never", "run.json:3: the comment"},
        {"{} {}", "JSON"},
        {"{\n\"seed\": 1,\n\"seed\": 2}", "duplicate"},
        {"{\"ballast\": {\"steps\": 1,\n\"steps\": 2}}", "run.json:2"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        refused(cases[i].text, 1, STATUS_MALFORMED, PARTS("run.json:", cases[i].part));
    }
}

static void nesting_has_a_limit(void **state)
{
    enum { DEPTH = 10000 };
    static char text[2 * DEPTH + 20];
    (void)state;
    strcpy(text, "{\"a\":");
    memset(text + 5, '[', DEPTH);
    memset(text + 5 + DEPTH, ']', DEPTH);
    text[5 + 2 * DEPTH] = '}';
    refused(text, 1, STATUS_MALFORMED, PARTS("run.json:1", "32 levels"));
    memset(text, '{', DEPTH); /* unfinished as well */
    text[DEPTH] = '\0';
    refused(text, 1, STATUS_MALFORMED, PARTS("32 levels"));
    struct failure why;
    char *large = calloc(1, 1 << 20);
    assert_non_null(large);
    memset(large, ' ', (256 << 10) + 1);
    assert_int_equal(config_from_text(large, (256 << 10) + 1, "large.json", 1, &config, &why),
                     STATUS_TOO_LARGE);
    has(why.text, "262145");
    free(large);
}

static const struct bad {
    const char *text;
    uint32_t world;
    enum status status;
    const char *parts[4];
} bad[] = {
    /* unknown keys and their neighbours */
    {TOP("\"train_batchsize\": 4,"),
     1,
     STATUS_UNKNOWN_KEY,
     {"run.json:2: train_batchsize", "did you mean train_batch_size?"}},
    {TOP("\"zero_optimization\": {\"stag\": 1},"),
     1,
     STATUS_UNKNOWN_KEY,
     {"run.json:2: zero_optimization.stag:", "zero_optimization.stage?"}},
    {TOP("\"optimizer\": {\"params\": {\"learning_rate\": 1}},"),
     1,
     STATUS_UNKNOWN_KEY,
     {"optimizer.params.learning_rate", "unknown key"}},
    {OURS("\"step\": 5,"), 1, STATUS_UNKNOWN_KEY, {"run.json:3: ballast.step:", "ballast.steps?"}},
    {OURS("\"strategy\": {\"zero\": {\"stage\": 1}},"),
     1,
     STATUS_UNKNOWN_KEY,
     {"ballast.strategy.zero"}},
    {OURS("\"strategy\": {\"checkpointng\": \"none\"},"),
     1,
     STATUS_UNKNOWN_KEY,
     {"run.json:3: ballast.strategy.checkpointng", "ballast.strategy.checkpointing?"}},
    {TOP("\"completely_different\": 4,"),
     1,
     STATUS_UNKNOWN_KEY,
     {"completely_different", "the top level", "--help"}},
    {TOP("\"ballast.steps\": 4,"), 1, STATUS_UNKNOWN_KEY, {"ballast.steps"}},
    {TOP("\"\": 4,"), 1, STATUS_UNKNOWN_KEY, {"unknown key"}},
    {TOP("\"a\\nb\": 4,"), 1, STATUS_UNKNOWN_KEY, {"a?b"}},
    /* ranges: one below, one above */
    {OURS("\"seq_len\": 0,"),
     1,
     STATUS_OUT_OF_RANGE,
     {"run.json:3: ballast.seq_len", "0 is out of range", "from 1"}},
    {OURS("\"seq_len\": 65,"), 1, STATUS_OUT_OF_RANGE, {"ballast.seq_len", "65", "t0", "64"}},
    {OURS("\"seq_len\": 16777217,"), 1, STATUS_OUT_OF_RANGE, {"16777217", "16777216"}},
    {TOP("\"train_batch_size\": 0,"), 1, STATUS_OUT_OF_RANGE, {"train_batch_size", "from 1 to"}},
    {TOP("\"train_batch_size\": -4,"), 1, STATUS_OUT_OF_RANGE, {"-4"}},
    {TOP("\"train_batch_size\": 4294967296,"),
     1,
     STATUS_OUT_OF_RANGE,
     {"4294967296", "4294967295"}},
    {TOP("\"train_micro_batch_size_per_gpu\": 0,"),
     1,
     STATUS_OUT_OF_RANGE,
     {"train_micro_batch_size_per_gpu", "micro_batch"}},
    {TOP("\"gradient_accumulation_steps\": 0,"),
     1,
     STATUS_OUT_OF_RANGE,
     {"gradient_accumulation_steps"}},
    {TOP("\"gradient_clipping\": -0.5,"), 1, STATUS_OUT_OF_RANGE, {"gradient_clipping", "-0.5"}},
    {TOP("\"optimizer\": {\"params\": {\"lr\": -1}},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"optimizer.params.lr", "-1", "from 0"}},
    {TOP("\"optimizer\": {\"params\": {\"lr\": 101}},"), 1, STATUS_OUT_OF_RANGE, {"101", "100"}},
    {TOP("\"optimizer\": {\"params\": {\"betas\": [0.9, 1]}},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"betas", "below 1"}},
    {TOP("\"optimizer\": {\"params\": {\"betas\": [-0.1, 0.9]}},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"betas"}},
    {TOP("\"optimizer\": {\"params\": {\"eps\": 0}},"), 1, STATUS_OUT_OF_RANGE, {"eps"}},
    {OURS("\"dropout\": 1,"), 1, STATUS_OUT_OF_RANGE, {"ballast.dropout", "below 1"}},
    {OURS("\"dropout\": -0.01,"), 1, STATUS_OUT_OF_RANGE, {"ballast.dropout", "-0.01"}},
    {OURS("\"seed\": -1,"), 1, STATUS_OUT_OF_RANGE, {"ballast.seed", "-1"}},
    {OURS("\"threads\": 4097,"), 1, STATUS_OUT_OF_RANGE, {"ballast.threads", "4096"}},
    {OURS("\"device_memory\": 1048575,"), 1, STATUS_OUT_OF_RANGE, {"1048575", "1048576"}},
    {OURS("\"device_memory\": \"1 KiB\","), 1, STATUS_OUT_OF_RANGE, {"1 KiB"}},
    {OURS("\"pause_at\": 11,"), 1, STATUS_OUT_OF_RANGE, {"ballast.pause_at", "11", "10"}},
    {OURS("\"pause_at\": [1, -1],"), 1, STATUS_OUT_OF_RANGE, {"ballast.pause_at"}},
    {OURS("\"step_timeout\": 0,"), 1, STATUS_OUT_OF_RANGE, {"ballast.step_timeout"}},
    {OURS("\"step_timeout\": 86401,"), 1, STATUS_OUT_OF_RANGE, {"86400"}},
    {OURS("\"eval\": {\"micro_batch\": 0},"), 1, STATUS_OUT_OF_RANGE, {"ballast.eval.micro_batch"}},
    {OURS("\"strategy\": {\"zero.stage\": 4},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"run.json:3: ballast.strategy.zero.stage", "4", "0..3"}},
    {OURS("\"strategy\": {\"checkpointing.layers\": 3},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"run.json:3: ballast.strategy.checkpointing.layers", "3", "2"}},
    {OURS("\"strategy\": {\"checkpointing\": \"block:3\"},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"run.json:3: ballast.strategy.checkpointing", "block:3", "2"}},
    {OURS("\"strategy\": {\"offload.optimizer.fraction\": 1.5},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"offload.optimizer.fraction", "1.5"}},
    /* wrong types */
    {OURS("\"seq_len\": \"64\","), 1, STATUS_INVALID, {"\"64\"", "whole number"}},
    {OURS("\"seq_len\": 63.5,"), 1, STATUS_INVALID, {"63.5", "whole number"}},
    {OURS("\"seq_len\": true,"), 1, STATUS_INVALID, {"true"}},
    {OURS("\"seq_len\": null,"), 1, STATUS_INVALID, {"null"}},
    {OURS("\"seq_len\": \"auto\","), 1, STATUS_INVALID, {"auto"}},
    {OURS("\"shuffle\": 1,"), 1, STATUS_INVALID, {"ballast.shuffle", "true or false"}},
    {OURS("\"eval_data\": 5,"), 1, STATUS_INVALID, {"ballast.eval_data", "list of paths"}},
    {OURS("\"eval_data\": [],"), 1, STATUS_INVALID, {"ballast.eval_data"}},
    {OURS("\"eval_data\": [\"data.txt\", 5],"), 1, STATUS_INVALID, {"5"}},
    {OURS("\"run_dir\": \"\","), 1, STATUS_INVALID, {"ballast.run_dir"}},
    {OURS("\"device\": \"tpu\","), 1, STATUS_INVALID, {"tpu", "one of auto, cpu"}},
    {OURS("\"device_memory\": \"lots\","), 1, STATUS_INVALID, {"lots", "512 MiB"}},
    {OURS("\"device_memory\": \"512 MB\","), 1, STATUS_INVALID, {"512 MB"}},
    {OURS("\"save\": 5,"), 1, STATUS_INVALID, {"ballast.save", "object"}},
    {OURS("\"strategy\": [],"), 1, STATUS_INVALID, {"ballast.strategy", "object"}},
    {OURS("\"strategy\": {\"micro_batch\": {}},"), 1, STATUS_INVALID, {"micro_batch", "{}"}},
    {OURS("\"strategy\": {\"checkpointing\": \"some\"},"),
     1,
     STATUS_INVALID,
     {"ballast.strategy.checkpointing", "some"}},
    {OURS("\"data_format\": \"csv\","), 1, STATUS_INVALID, {"csv", "nanogpt"}},
    {"{\"ballast\": 5}", 1, STATUS_INVALID, {"run.json:1: ballast", "object"}},
    {TOP("\"optimizer\": \"AdamW\","), 1, STATUS_INVALID, {"optimizer", "object"}},
    {TOP("\"optimizer\": {\"params\": {\"betas\": [0.9]}},"), 1, STATUS_INVALID, {"two numbers"}},
    {TOP("\"optimizer\": {\"params\": {\"betas\": 0.9}},"), 1, STATUS_INVALID, {"two numbers"}},
    {TOP("\"zero_optimization\": {\"overlap_comm\": 5},"),
     1,
     STATUS_INVALID,
     {"zero_optimization.overlap_comm", "true or false"}},
    {TOP("\"zero_optimization\": {\"reduce_bucket_size\": 0.5},"), 1, STATUS_INVALID, {"0.5"}},
    {TOP("\"scheduler\": {\"type\": \"Sometimes\"},"),
     1,
     STATUS_INVALID,
     {"Sometimes", "WarmupLR"}},
    /* what this version does not have */
    {TOP("\"fp16\": {\n\"enabled\": true},"),
     1,
     STATUS_UNSUPPORTED,
     {"run.json:3: fp16.enabled", "computes in fp32"}},
    {TOP("\"bf16\": {\"enabled\": true},"), 1, STATUS_UNSUPPORTED, {"bf16.enabled", "fp32"}},
    {TOP("\"bfloat16\": {\"enabled\": true},"), 1, STATUS_UNSUPPORTED, {"bfloat16.enabled"}},
    {TOP("\"zero_optimization\": {\"stage\": 2},"),
     2,
     STATUS_UNSUPPORTED,
     {"run.json:2: zero_optimization.stage", "zero.stage=2", "replica"}},
    {TOP("\"zero_optimization\": true,"),
     2,
     STATUS_UNSUPPORTED,
     {"run.json:2: zero_optimization", "zero.stage=1"}},
    {TOP("\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"cpu\"}},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_optimization.offload_optimizer.device", "offload.optimizer=cpu"}},
    {TOP("\"zero_optimization\": {\"offload_param\": {\"device\": \"nvme\"}},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_optimization.offload_param.device", "offload.params=nvme"}},
    {TOP("\"zero_optimization\": {\"offload_param\": {\"device\": \"tape\"}},"),
     1,
     STATUS_INVALID,
     {"tape"}},
    {TOP("\"zero_optimization\": {\"cpu_offload\": true},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_optimization.cpu_offload", "offload.optimizer=cpu"}},
    {TOP("\"zero_optimization\": {\"zero_quantized_weights\": true},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_quantized_weights", "false"}},
    {TOP("\"zero_optimization\": {\"zero_hpz_partition_size\": 8},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_hpz_partition_size", "8", "1"}},
    {TOP("\"zero_optimization\": {\"zenflow\": {}},"), 1, STATUS_UNSUPPORTED, {"zenflow"}},
    {FILE_OF("\"activation_checkpointing\": {\"cpu_checkpointing\": true},",
             "\"strategy\": {\"checkpointing\": \"block:1\"},"),
     1,
     STATUS_UNSUPPORTED,
     {"run.json:2: activation_checkpointing.cpu_checkpointing", "offload.activations=cpu"}},
    {TOP("\"activation_checkpointing\": {\"cpu_checkpointing\": true},"),
     1,
     STATUS_CONFLICT,
     {"cpu_checkpointing", "checkpointing=block:1"}},
    {TOP("\"sequence_parallel_size\": 2,"),
     2,
     STATUS_UNSUPPORTED,
     {"sequence_parallel_size", "sequence_parallel=2"}},
    {TOP("\"optimizer\": {\"type\": \"Lion\"},"), 1, STATUS_UNSUPPORTED, {"Lion", "AdamW"}},
    {TOP("\"optimizer\": {\"params\": {\"adam_w_mode\": false}},"),
     1,
     STATUS_UNSUPPORTED,
     {"adam_w_mode"}},
    {TOP("\"scheduler\": {\"type\": \"OneCycle\"},"), 1, STATUS_UNSUPPORTED, {"OneCycle"}},
    {TOP("\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_type\": \"log\"}},"),
     1,
     STATUS_UNSUPPORTED,
     {"warmup_type", "log", "linear"}},
    {TOP("\"communication_data_type\": \"fp16\","), 1, STATUS_UNSUPPORTED, {"fp16", "fp32"}},
    {TOP("\"data_types\": {\"grad_accum_dtype\": \"bf16\"},"), 1, STATUS_UNSUPPORTED, {"bf16"}},
    {TOP("\"gradient_predivide_factor\": 2.0,"), 1, STATUS_UNSUPPORTED, {"2.0"}},
    {TOP("\"elasticity\": {\"enabled\": true},"), 1, STATUS_UNSUPPORTED, {"elasticity", "fixed"}},
    {TOP("\"pipeline\": {},"), 1, STATUS_UNSUPPORTED, {"pipeline"}},
    {OURS("\"http\": \"127.0.0.1:80\","), 1, STATUS_UNSUPPORTED, {"ballast.http", "HTTP"}},
    {OURS("\"link\": \"tcp\","), 1, STATUS_UNSUPPORTED, {"ballast.link", "Unix"}},
    {OURS("\"observers\": \"staff\","), 1, STATUS_UNSUPPORTED, {"ballast.observers"}},
    {OURS("\"oom\": {\"policy\": \"adapt\"},"),
     1,
     STATUS_UNSUPPORTED,
     {"ballast.oom.policy", "adapt", "report, abort"}},
    {OURS("\"oom\": {\"give_back\": true},"), 1, STATUS_UNSUPPORTED, {"give_back"}},
    {OURS("\"device\": \"cuda\","), 1, STATUS_UNSUPPORTED, {"cuda", "auto, cpu"}},
    {OURS("\"data_format\": \"megatron\","), 1, STATUS_UNSUPPORTED, {"megatron"}},
    {OURS("\"strategy\": {\"grad_sync\": \"each\"},"),
     1,
     STATUS_UNSUPPORTED,
     {"run.json:3: ballast.strategy.grad_sync"}},
    /* keys against one another */
    {TOP("\"train_batch_size\": 16, \"train_micro_batch_size_per_gpu\": 2,\n"
         "\"gradient_accumulation_steps\": 3,"),
     4,
     STATUS_CONFLICT,
     {"run.json:2: train_batch_size is 16", "train_micro_batch_size_per_gpu 2",
      "gradient_accumulation_steps 3", "= 24"}},
    {TOP("\"train_batch_size\": 7, \"train_micro_batch_size_per_gpu\": 2,"),
     1,
     STATUS_CONFLICT,
     {"is 7", "multiple of train_micro_batch_size_per_gpu 2"}},
    {TOP("\"train_batch_size\": 7,"), 2, STATUS_CONFLICT, {"is 7", "data-parallel size 2"}},
    {TOP("\"train_batch_size\": 8, \"gradient_accumulation_steps\": 3,"),
     1,
     STATUS_CONFLICT,
     {"is 8", "gradient_accumulation_steps 3"}},
    {TOP("\"train_micro_batch_size_per_gpu\": 65536, \"gradient_accumulation_steps\": 65536,"),
     1,
     STATUS_OUT_OF_RANGE,
     {"65536", "4294967295"}},
    {TOP("\"sequence_parallel_size\": 3,"),
     4,
     STATUS_CONFLICT,
     {"sequence_parallel_size is 3", "4 ranks"}},
    {FILE_OF("\"zero_optimization\": {\"stage\": 1},", "\"strategy\": {\"zero.stage\": 2},"),
     1,
     STATUS_CONFLICT,
     {"zero_optimization.stage", "zero.stage=1", "run.json:3: ballast.strategy.zero.stage",
      "zero.stage=2"}},
    {FILE_OF("\"train_micro_batch_size_per_gpu\": 1,", "\"strategy\": {\"micro_batch\": 2},"),
     1,
     STATUS_CONFLICT,
     {"run.json:2: train_micro_batch_size_per_gpu", "micro_batch=1", "micro_batch=2"}},
    {FILE_OF("\"activation_checkpointing\": {\"number_checkpoints\": 2},",
             "\"strategy\": {\"checkpointing\": \"none\"},"),
     1,
     STATUS_CONFLICT,
     {"number_checkpoints", "block:1", "checkpointing=none"}},
    {TOP("\"zero_optimization\": {\"cpu_offload\": true, \"offload_optimizer\": {\"device\": "
         "\"none\"}},"),
     1,
     STATUS_CONFLICT,
     {"cpu_offload", "offload_optimizer.device"}},
    {TOP("\"optimizer\": {\"params\": {\"lr\": 0.1}},\n\"scheduler\": {\"type\": \"WarmupLR\", "
         "\"params\": {\"warmup_max_lr\": 0.2}},"),
     1,
     STATUS_CONFLICT,
     {"run.json:2: optimizer.params.lr is 0.1",
      "run.json:3: scheduler.params.warmup_max_lr is 0.2"}},
    {TOP("\"scheduler\": {\"params\": {\"warmup_num_steps\": 5}},"),
     1,
     STATUS_INVALID,
     {"scheduler.type"}},
    {TOP("\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"cos_min_ratio\": 0.5}},"),
     1,
     STATUS_CONFLICT,
     {"cos_min_ratio", "WarmupLR"}},
    {TOP("\"scheduler\": {\"type\": \"WarmupDecayLR\"},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"1000 steps", "10", "warmup_num_steps"}},
    {TOP("\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_min_lr\": 0.5}},"),
     1,
     STATUS_OUT_OF_RANGE,
     {"0.5", "0.001"}},
    {OURS("\"eval\": {\"every\": 5},"),
     1,
     STATUS_CONFLICT,
     {"run.json:3: ballast.eval.every is 5", "ballast.eval_data"}},
    {OURS("\"pause_at\": [1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8],"), 1, STATUS_TOO_LARGE, {"17", "16"}},
    /* files */
    {"{\"ballast\": {\"model\": \"t0\", \"steps\": 5}}",
     1,
     STATUS_INVALID,
     {"ballast.data is not set", "--data"}},
    {"{\"ballast\": {\"model\": \"t0\", \"data\": \"data.txt\"}}",
     1,
     STATUS_INVALID,
     {"ballast.steps is not set", "--steps"}},
    {"{\"ballast\": {\"data\": \"data.txt\", \"steps\": 5}}",
     1,
     STATUS_INVALID,
     {"ballast.model is not set", "--model"}},
    {"{}", 1, STATUS_INVALID, {"run.json: ballast.model"}},
    {"{\"ballast\":\n{\"model\": \"t1\", \"data\": \"data.txt\", \"steps\": 5}}",
     1,
     STATUS_NOT_FOUND,
     {"run.json:2: ballast.model", "t1", "gpt2-124m"}},
    {"{\"ballast\":\n{\"model\": \"t0\", \"data\": \"none.txt\", \"steps\": 5}}",
     1,
     STATUS_NOT_FOUND,
     {"run.json:2: ballast.data", "none.txt", "No such file"}},
    {"{\"ballast\": {\"model\": \"t0\", \"data\": \".\", \"steps\": 5}}",
     1,
     STATUS_INVALID,
     {"ballast.data", "regular file"}},
    {OURS("\"eval_data\": \"gone\","), 1, STATUS_NOT_FOUND, {"ballast.eval_data", "gone"}},
};

static void bad_files(void **state)
{
    (void)state;
    assert_true(sizeof(bad) / sizeof(bad[0]) >= 60);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        const char *parts[5] = {0};
        memcpy(parts, bad[i].parts, sizeof(bad[i].parts));
        refused(bad[i].text, bad[i].world, bad[i].status, parts);
    }
}

/* ---- the command line ---- */

enum { MAX_ARGS = 24 };

static enum status args(uint32_t world_size, struct failure *why, const char *const *words)
{
    static char copies[MAX_ARGS][512];
    char *argv[MAX_ARGS + 2];
    int argc = 1;
    argv[0] = (char *)(uintptr_t) "ballast-worker";
    for (; words[argc - 1]; argc++) {
        assert_true(argc < MAX_ARGS);
        snprintf(copies[argc], sizeof(copies[argc]), "%s", words[argc - 1]);
        argv[argc] = copies[argc];
    }
    argv[argc] = NULL;
    return config_from_args(argc, argv, world_size, &config, why);
}

static void args_ok(uint32_t world_size, const char *const *words)
{
    struct failure why;
    const enum status status = args(world_size, &why, words);
    if (status) {
        print_error("%s: %s\n", status_name(status), why.text);
    }
    assert_int_equal(status, STATUS_OK);
}

static void args_refused(const char *const *words, enum status expected, const char *const *parts)
{
    struct failure why;
    const int64_t live = heap_live();
    const enum status status = args(2, &why, words);
    if (status != expected) {
        print_error("%s...: %s: %s\n", words[0], status_name(status),
                    status ? why.text : "accepted");
    }
    assert_int_equal(status, expected);
    assert_int_equal(heap_live(), live);
    for (; *parts; parts++) {
        has(why.text, *parts);
    }
}

#define ARGS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void flags_suffice_without_a_file(void **state)
{
    char data[256];
    (void)state;
    in_folder("data.txt", data);
    args_ok(3, ARGS("--model", "t0", "--data", data, "--data", data, "--steps=7", "--run-dir",
                    "x/y", "--device", "cpu", "--device-memory", "64 MiB", "--resume", "latest",
                    "--expect-ranks", "3", "--fault", "commit:rank=1", "--fault", "io:nth=2",
                    "--allow-faults"));
    assert_string_equal(config.source, "");
    assert_int_equal(config.data.n, 2);
    assert_string_equal(config.data.path[1], data);
    assert_int_equal(config.steps, 7);
    assert_string_equal(config.run_dir, "x/y");
    assert_int_equal(config.device, DEVICE_CHOICE_CPU);
    assert_int_equal(config.device_memory, 64 << 20);
    assert_int_equal(config.world_size, 3);
    assert_int_equal(config.global_batch, 3);
    assert_true(config.resume && config.resume_latest && config.allow_faults);
    assert_int_equal(config.expect_ranks, 3);
    assert_int_equal(config.n_faults, 2);
    assert_string_equal(config.faults[1], "io:nth=2");
    assert_false(config.plan_only || config.check_only || config.json);
    args_ok(1, ARGS("--model", "t0", "--data", data, "--steps", "7", "--resume", "40"));
    assert_true(config.resume && !config.resume_latest);
    assert_int_equal(config.resume_step, 40);
    assert_string_equal(config.run_dir, "runs/t0");
}

static void set_beats_flags_which_beat_the_file(void **state)
{
    char file[256];
    (void)state;
    write_text("good.json",
               "{\"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 4,\n"
               "\"gradient_accumulation_steps\": 1, \"optimizer\": {\"params\": {\"lr\": 0.5}},\n"
               "\"activation_checkpointing\": {\"number_checkpoints\": 2},\n"
               "\"ballast\": {\"model\": \"t0\", \"data\": \"data.txt\", \"steps\": 10,\n"
               "\"strategy\": {\"checkpointing\": \"block:1\"}, \"eval\": {\"batches\": 3}}}");
    in_folder("good.json", file);
    args_ok(2, ARGS("--config", file));
    assert_int_equal(config.steps, 10);
    assert_int_equal(config.strategy.micro_batch, 4);
    assert_string_equal(config.source, file);
    assert_string_equal(config.run_dir, "runs/good");
    args_ok(2, ARGS("--config", file, "--steps", "11"));
    assert_int_equal(config.steps, 11);
    args_ok(2, ARGS("--set", "steps=12", "--config", file, "--steps", "11"));
    assert_int_equal(config.steps, 12);
    args_ok(2,
            ARGS("--config", file, "--set", "checkpointing=selective", "--set", "seq_len=32",
                 "--set", "optimizer.params.lr=0.25", "--set", "eval.batches=4", "--set",
                 "ballast.seed=5", "--set", "ballast.strategy.loss_tile=16", "--set",
                 "data_format=bytes", "--set", "device_memory=2 MiB", "--set", "pause_at=[3,2]"));
    assert_int_equal(config.strategy.checkpointing, CHECKPOINTING_SELECTIVE);
    assert_int_equal(config.seq_len, 32);
    assert_true(config.lr == 0.25);
    assert_int_equal(config.eval_batches, 4);
    assert_int_equal(config.seed, 5);
    assert_int_equal(config.strategy.loss_tile, 16);
    assert_int_equal(config.data_format, DATA_BYTES);
    assert_int_equal(config.device_memory, 2 << 20);
    assert_int_equal(config.n_pause_at, 2);
    assert_int_equal(config.pause_at[0], 2);
    /* The global batch of the file is held when --set changes the micro-batch. */
    args_ok(2, ARGS("--config", file, "--set", "micro_batch=2"));
    assert_int_equal(config.global_batch, 8);
    assert_int_equal(config.strategy.micro_batch, 2);
    args_ok(2, ARGS("--config", file, "--set", "gradient_accumulation_steps=4"));
    assert_int_equal(config.global_batch, 8);
    assert_int_equal(config.strategy.micro_batch, 1);
    args_ok(2, ARGS("--config", file, "--set", "train_batch_size=16"));
    assert_int_equal(config.global_batch, 16);
    assert_int_equal(config.strategy.micro_batch, 4);
    args_ok(2, ARGS("--config", file, "--set", "micro_batch=3", "--set",
                    "gradient_accumulation_steps=5"));
    assert_int_equal(config.global_batch, 30);
    args_ok(2, ARGS("--config", file, "--set", "eval={\"batches\": 9}"));
    assert_int_equal(config.eval_batches, 9);
}

static void planning_needs_no_data(void **state)
{
    (void)state;
    args_ok(1, ARGS("--plan", "--world", "64", "--model", "llama-70b", "--set", "seq_len=4096"));
    assert_true(config.plan_only);
    assert_int_equal(config.world_size, 64);
    assert_int_equal(config.spec.n_layers, 80);
    assert_int_equal(config.seq_len, 4096);
    args_ok(1, ARGS("--plan", "--json", "--model", "t0", "--data", "not/here.txt"));
    assert_true(config.json);
    assert_string_equal(config.data.path[0], "not/here.txt");
}

static void wrong_command_lines(void **state)
{
    char data[256], file[256], loose[256];
    (void)state;
    in_folder("data.txt", data);
    in_folder("good.json", file);
    in_folder("missing.json", loose);
#define BASE "--model", "t0", "--data", data, "--steps", "5"
    args_refused(ARGS("--stepz", "5"), STATUS_UNKNOWN_KEY,
                 PARTS("--stepz", "did you mean --steps?"));
    args_refused(ARGS("--frobnicate"), STATUS_UNKNOWN_KEY, PARTS("--frobnicate", "--help"));
    args_refused(ARGS("-x"), STATUS_UNKNOWN_KEY, PARTS("x"));
    args_refused(ARGS("--steps"), STATUS_INVALID, PARTS("--steps needs a value"));
    args_refused(ARGS("--plan=5"), STATUS_INVALID, PARTS("--plan takes no value"));
    args_refused(ARGS("run.json"), STATUS_INVALID, PARTS("run.json", "--config"));
    args_refused(ARGS("--config", loose), STATUS_NOT_FOUND, PARTS("missing.json", "No such file"));
    args_refused(ARGS("--config", folder), STATUS_INVALID, PARTS("regular file"));
    args_refused(ARGS(BASE, "--steps", "many"), STATUS_INVALID,
                 PARTS("--steps many: ballast.steps", "whole number"));
    args_refused(ARGS(BASE, "--steps", "0"), STATUS_OUT_OF_RANGE, PARTS("--steps 0"));
    args_refused(ARGS(BASE, "--device", "gpu"), STATUS_INVALID, PARTS("--device gpu"));
    args_refused(ARGS(BASE, "--device", "cuda"), STATUS_UNSUPPORTED, PARTS("--device cuda"));
    args_refused(ARGS(BASE, "--device-memory", "x"), STATUS_INVALID, PARTS("--device-memory x"));
    args_refused(ARGS(BASE, "--world", "4"), STATUS_CONFLICT, PARTS("--world 4", "--plan", "2"));
    args_refused(ARGS(BASE, "--plan", "--world", "0"), STATUS_OUT_OF_RANGE, PARTS("--world 0"));
    args_refused(ARGS(BASE, "--expect-ranks", "3"), STATUS_REFUSED, PARTS("3", "2"));
    args_refused(ARGS(BASE, "--resume", "last"), STATUS_INVALID, PARTS("--resume last", "latest"));
    args_refused(ARGS(BASE, "--fault", "commit:rank=1"), STATUS_REFUSED, PARTS("--allow-faults"));
    args_refused(ARGS(BASE, "--fit"), STATUS_UNSUPPORTED, PARTS("--fit"));
    args_refused(ARGS(BASE, "--nodes", "f"), STATUS_UNSUPPORTED, PARTS("--nodes"));
    args_refused(ARGS(BASE, "--export", "d"), STATUS_UNSUPPORTED, PARTS("--export"));
    args_refused(ARGS(BASE, "--set", "steps"), STATUS_INVALID, PARTS("--set steps", "KEY=VALUE"));
    args_refused(ARGS(BASE, "--set", "=5"), STATUS_INVALID, PARTS("KEY=VALUE"));
    args_refused(ARGS(BASE, "--set", "stepss=5"), STATUS_UNKNOWN_KEY,
                 PARTS("--set stepss=5", "did you mean steps?"));
    args_refused(ARGS(BASE, "--set", "zero.stag=1"), STATUS_UNKNOWN_KEY, PARTS("zero.stage?"));
    args_refused(ARGS(BASE, "--set", "optimizer.params.lrr=1"), STATUS_UNKNOWN_KEY,
                 PARTS("optimizer.params.lr?"));
    args_refused(ARGS(BASE, "--set", "zero.stage=9"), STATUS_OUT_OF_RANGE,
                 PARTS("--set zero.stage=9", "0..3"));
    args_refused(ARGS(BASE, "--set", "seq_len=70000"), STATUS_OUT_OF_RANGE,
                 PARTS("--set seq_len=70000: ballast.seq_len", "64"));
    args_refused(ARGS(BASE, "--set", "run_dir=\xFF"), STATUS_INVALID, PARTS("UTF-8"));
    args_refused(ARGS(BASE, "--set", "zero.stage=1", "--set", "zero_optimization.stage=2"),
                 STATUS_CONFLICT, PARTS("zero.stage=1", "zero.stage=2"));
    args_refused(ARGS("--config", file, "--set", "zero_optimization=true", "--set",
                      "zero_optimization.stage=1"),
                 STATUS_INVALID, PARTS("zero_optimization", "no keys inside"));
    args_refused(ARGS("--plan"), STATUS_INVALID, PARTS("ballast.model is not set"));
#undef BASE
}

/* --check-config reads on after a mistake and has a verdict for every key. */
static void check_prints_every_verdict(void **state)
{
    static char out[16384];
    char file[256];
    struct failure why;
    (void)state;
    write_text("check.json",
               "{\"train_batch_size\": 4,\n\"bf16\": {\"enabled\": true},\n"
               "\"zero_optimization\": {\"overlap_comm\": true, \"stage\": \"auto\"},\n"
               "\"unknown\": [1, 2],\n"
               "\"ballast\": {\"model\": \"t0\", \"data\": \"data.txt\", \"steps\": 0}}");
    in_folder("check.json", file);
    char *argv[] = {(char *)(uintptr_t) "ballast-worker",
                    (char *)(uintptr_t) "--check-config",
                    (char *)(uintptr_t) "--config",
                    file,
                    (char *)(uintptr_t) "--set",
                    (char *)(uintptr_t) "seed=3",
                    NULL};
    assert_int_equal(config_from_args(6, argv, 1, &config, &why), STATUS_OK);
    assert_true(config.check_only); /* the file is left to config_check */

    FILE *stream = fmemopen(out, sizeof(out), "w");
    assert_non_null(stream);
    assert_int_equal(config_check(6, argv, 1, stream, false, &why), STATUS_UNSUPPORTED);
    fclose(stream);
    has(why.text, "check.json:2: bf16.enabled"); /* the first mistake */
    has(out, "train_batch_size");
    has(out, "accepted without effect");
    has(out, "unknown key");
    has(out, "--set seed=3");
    has(out, "\nrefused: ");

    memset(out, 0, sizeof(out));
    stream = fmemopen(out, sizeof(out), "w");
    assert_non_null(stream);
    assert_int_equal(config_check(6, argv, 1, stream, true, &why), STATUS_UNSUPPORTED);
    fclose(stream);
    json_t *root = json_loads(out, 0, NULL);
    assert_non_null(root);
    static const struct {
        const char *key, *verdict;
        int line;
    } rows[] = {
        {"train_batch_size", "honoured", 1},
        {"bf16.enabled", "refused", 2},
        {"zero_optimization.overlap_comm", "accepted without effect", 3},
        {"zero_optimization.stage", "honoured", 3},
        {"unknown", "refused", 4},
        {"ballast.model", "honoured", 5},
        {"ballast.data", "honoured", 5},
        {"ballast.steps", "refused", 5},
        {"ballast.seed", "honoured", 0},
    };
    const json_t *keys = json_object_get(root, "keys");
    assert_int_equal(json_array_size(keys), sizeof(rows) / sizeof(rows[0]));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const json_t *row = json_array_get(keys, i);
        assert_string_equal(json_string_value(json_object_get(row, "key")), rows[i].key);
        assert_string_equal(json_string_value(json_object_get(row, "verdict")), rows[i].verdict);
        assert_int_equal(json_integer_value(json_object_get(row, "line")), rows[i].line);
        assert_true(json_string_length(json_object_get(row, "why")) > 0);
    }
    assert_true(json_is_false(json_object_get(root, "ok")));
    json_decref(root);
}

static void check_sums_up_a_good_file(void **state)
{
    static char out[16384];
    char file[256];
    struct failure why;
    (void)state;
    in_folder("good.json", file);
    char *argv[] = {(char *)(uintptr_t) "ballast-worker",
                    (char *)(uintptr_t) "--check-config",
                    (char *)(uintptr_t) "--config",
                    file,
                    (char *)(uintptr_t) "--world",
                    (char *)(uintptr_t) "2",
                    NULL};
    FILE *stream = fmemopen(out, sizeof(out), "w");
    assert_non_null(stream);
    assert_int_equal(config_check(6, argv, 1, stream, false, &why), STATUS_OK);
    fclose(stream);
    has(out, "123712 parameters");
    has(out, "8 sequences a step = micro_batch 4 x accumulation 1 x 2 of 2 ranks");
    has(out, "checkpointing=block:1");
}

static void help_and_version_stop(void **state)
{
    struct failure why;
    (void)state;
    /* Help goes to stdout: into a file, to be looked at. */
    char path[256];
    static char text[65536];
    in_folder("help.txt", path);
    fflush(stdout);
    const int saved = dup(1);
    assert_true(saved >= 0);
    assert_non_null(freopen(path, "w", stdout));
    const enum status help = args(1, &why, ARGS("--help"));
    const enum status version = args(1, &why, ARGS("--version"));
    fflush(stdout);
    dup2(saved, 1);
    close(saved);
    assert_int_equal(help, STATUS_STOPPED);
    assert_int_equal(version, STATUS_STOPPED);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    const size_t n = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[n] = '\0';
    has(text, "--device-memory BYTES");
    has(text, "ballast.seq_len");
    has(text, "checkpointing.layers");
    has(text, "default 0.001");
    has(text, "zero_optimization.overlap_comm");
    has(text, BALLAST_VERSION);
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

static void every_allocation_of_a_start_may_fail(void **state)
{
    char file[256], data[256];
    static char out[16384];
    const int64_t live = heap_live();
    (void)state;
    in_folder("good.json", file);
    in_folder("data.txt", data);
    bool clean = false;
    for (uint64_t nth = 1; nth <= 2000 && !clean; nth++) {
        struct failure why;
        heap_fail(nth, false);
        const enum status status = args(2, &why,
                                        ARGS("--config", file, "--data", data, "--steps", "5",
                                             "--set", "seq_len=32", "--set", "micro_batch=2"));
        clean = heap_failures() == 0;
        heap_fail(0, false);
        assert_int_equal(status, clean ? STATUS_OK : STATUS_OUT_OF_MEMORY);
        assert_int_equal(heap_live(), live);
    }
    assert_true(clean);
    char *argv[] = {(char *)(uintptr_t) "ballast-worker",
                    (char *)(uintptr_t) "--check-config",
                    (char *)(uintptr_t) "--config",
                    file,
                    (char *)(uintptr_t) "--world",
                    (char *)(uintptr_t) "2",
                    NULL};
    clean = false;
    for (uint64_t nth = 1; nth <= 4000 && !clean; nth++) {
        struct failure why;
        FILE *stream = fmemopen(out, sizeof(out), "w");
        assert_non_null(stream);
        heap_fail(nth, false);
        const enum status status = config_check(6, argv, 1, stream, true, &why);
        clean = heap_failures() == 0;
        heap_fail(0, false);
        fclose(stream);
        assert_true(status == STATUS_OK || (!clean && status == STATUS_OUT_OF_MEMORY));
        assert_int_equal(heap_live(), live);
    }
    assert_true(clean);
}

static int make_folder(void **state)
{
    (void)state;
    json_use_heap();
    if (!mkdtemp(folder)) {
        return -1;
    }
    write_text("data.txt", "In the beginning God created the heaven and the earth.\n");
    return 0;
}

static int remove_folder(void **state)
{
    static const char *const names[] = {"data.txt", "good.json",         "check.json",
                                        "help.txt", "model/config.json", "model"};
    char path[256];
    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        in_folder(names[i], path);
        remove(path);
    }
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(everything_of_ours),
        cmocka_unit_test(comments_and_trailing_commas),
        cmocka_unit_test(batch_arithmetic),
        cmocka_unit_test(schedules),
        cmocka_unit_test(a_deepspeed_file),
        cmocka_unit_test(checkpoints_become_blocks),
        cmocka_unit_test(a_model_folder_lies_beside_the_file),
        cmocka_unit_test(malformed_files),
        cmocka_unit_test(nesting_has_a_limit),
        cmocka_unit_test(bad_files),
        cmocka_unit_test(flags_suffice_without_a_file),
        cmocka_unit_test(set_beats_flags_which_beat_the_file),
        cmocka_unit_test(planning_needs_no_data),
        cmocka_unit_test(wrong_command_lines),
        cmocka_unit_test(check_prints_every_verdict),
        cmocka_unit_test(check_sums_up_a_good_file),
        cmocka_unit_test(help_and_version_stop),
        cmocka_unit_test(the_table_is_consistent),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(every_allocation_of_a_start_may_fail),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
