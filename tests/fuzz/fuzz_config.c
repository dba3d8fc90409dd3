/* Any bytes as a configuration file.
 * links: base proto worker
 * cases: 20000
 *
 * The first byte picks the number of ranks. What is accepted obeys the rules that the rest of
 * the worker relies on; what is refused says why, and nothing leaks either way. The data file of
 * the seeds is one that every machine has. */
#include <math.h>
#include <string.h>
#include "proto/base/heap.h"
#include "tests/fuzz/fuzz.h"
#include "worker/config.h"

static struct config config; /* too large for a stack */

static void check_accepted(uint32_t world_size)
{
    struct strategy_limits limits;
    struct failure why;
    config_limits(&config, &limits);
    fuzz_check(config.world_size == world_size);
    fuzz_check(spec_check(&config.spec, &why) == STATUS_OK);
    fuzz_check(strategy_check(&config.strategy, &limits, &why) == STATUS_OK);
    fuzz_check(strategy_accumulation(&config.strategy, &limits) >= 1);
    fuzz_check(config.global_batch >= 1 && config.steps >= 1 && config.eval_micro_batch >= 1);
    fuzz_check(config.seq_len >= 1 && config.seq_len <= config.spec.max_positions);
    fuzz_check(config.data.n >= 1 && config.data.n <= CONFIG_MAX_FILES);
    fuzz_check(isfinite(config.lr) && config.lr >= 0 && config.eps > 0);
    fuzz_check(config.beta1 >= 0 && config.beta1 < 1 && config.beta2 >= 0 && config.beta2 < 1);
    fuzz_check(config.n_pause_at <= 16 && config.step_timeout_s > 0);
    fuzz_check(config.run_dir[0] != '\0');
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    struct failure why = {.status = STATUS_OK};
    const int64_t live = heap_live();
    if (n == 0) {
        return 0;
    }
    const uint32_t world_size = 1 + bytes[0] % 8;
    const enum status status =
        config_from_text((const char *)bytes + 1, n - 1, "fuzz.json", world_size, &config, &why);
    if (status == STATUS_OK) {
        check_accepted(world_size);
    } else {
        fuzz_check(why.status == status && why.text[0] != '\0');
        fuzz_check(memchr(why.text, '\0', sizeof(why.text)) != NULL);
    }
    fuzz_check(heap_live() == live);
    return 0;
}

size_t fuzz_seed(size_t index, uint8_t *out, size_t capacity)
{
    static const char *const seeds[] = {
        "\0{\"train_batch_size\": 8, // comment\n\"train_micro_batch_size_per_gpu\": 4,\n"
        "\"gradient_accumulation_steps\": 2, \"gradient_clipping\": 1.0,\n"
        "\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 3e-4, \"betas\": [0.9, "
        "0.95]}},\n"
        "\"scheduler\": {\"type\": \"WarmupCosineLR\", \"params\": {\"warmup_num_steps\": 5}},\n"
        "\"zero_optimization\": {\"stage\": 0, \"overlap_comm\": true, \"offload_optimizer\":\n"
        "{\"device\": \"none\"}}, \"bf16\": {\"enabled\": \"auto\"},\n"
        "\"ballast\": {\"model\": \"t0\", \"data\": \"/etc/passwd\", \"steps\": 10,\n"
        "\"strategy\": {\"checkpointing\": \"block:1\", \"checkpointing.layers\": 1},\n"
        "\"device_memory\": \"64 MiB\", \"pause_at\": [1, 2,], /* x */},}",
        "\1{\"activation_checkpointing\": {\"number_checkpoints\": 2}, \"fp16\": {\"enabled\": "
        "false},\n"
        "\"ballast\": {\"model\": \"gpt2-tiny\", \"data\": [\"/etc/passwd\"], \"steps\": 3,\n"
        "\"eval_data\": \"/etc/passwd\", \"eval\": {\"every\": 2, \"batches\": 1}, \"seq_len\": "
        "16,\n"
        "\"save\": {\"every\": 1, \"keep\": 2}, \"oom\": {\"policy\": \"report\"}, \"dropout\": "
        "0.1}}",
    };
    if (index >= sizeof(seeds) / sizeof(seeds[0])) {
        return 0;
    }
    const size_t n = 1 + strlen(seeds[index] + 1); /* the first byte may be 0 */
    if (n > capacity) {
        return 0;
    }
    memcpy(out, seeds[index], n);
    return n;
}
