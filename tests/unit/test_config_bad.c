/* The configuration of a run: every refusal, with its line and its reason.
 * links: base proto worker */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "worker/config.h"
#include "tests/unit/config_fixture.h"

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
     {"run.json:3: fp16.enabled", "computes in fp32 or bf16"}},
    {TOP("\"bf16\": {\"bf16_optimizer_states\": true},"), 1, STATUS_UNSUPPORTED, {"fp32"}},
    {TOP("\"bf16\": {\"enabled\": 1},"), 1, STATUS_INVALID, {"bf16.enabled"}},
    {TOP("\"bf16\": {\"enabled\": true}, \"bfloat16\": {\"enabled\": false},"),
     1,
     STATUS_CONFLICT,
     {"bfloat16.enabled", "opposite"}},
    {TOP("\"zero_optimization\": {\"stage\": 4},"),
     2,
     STATUS_OUT_OF_RANGE,
     {"run.json:2: zero_optimization.stage", "4", "0..3"}},
    {TOP("\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"nvme\"}},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_optimization.offload_optimizer.device", "offload.optimizer=nvme"}},
    {TOP("\"zero_optimization\": {\"offload_param\": {\"device\": \"nvme\"}},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_optimization.offload_param.device", "offload.params=nvme"}},
    {TOP("\"zero_optimization\": {\"offload_param\": {\"device\": \"tape\"}},"),
     1,
     STATUS_INVALID,
     {"tape"}},
    {TOP("\"zero_optimization\": {\"zero_quantized_weights\": true},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_quantized_weights", "false"}},
    {TOP("\"zero_optimization\": {\"zero_hpz_partition_size\": 8},"),
     1,
     STATUS_UNSUPPORTED,
     {"zero_hpz_partition_size", "8", "1"}},
    {TOP("\"zero_optimization\": {\"zenflow\": {}},"), 1, STATUS_UNSUPPORTED, {"zenflow"}},
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
    {OURS("\"device\": \"tpu\","), 1, STATUS_INVALID, {"tpu", "auto, cpu, cuda"}},
    {OURS("\"data_format\": \"megatron\","), 1, STATUS_UNSUPPORTED, {"megatron"}},
    {OURS("\"strategy\": {\"offload.grads\": \"cpu\"},"),
     1,
     STATUS_UNSUPPORTED,
     {"run.json:3: ballast.strategy.offload.grads"}},
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(malformed_files),
        cmocka_unit_test(nesting_has_a_limit),
        cmocka_unit_test(bad_files),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
