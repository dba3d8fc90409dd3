/* The configuration of a run: the command line, alone and against the file.
 * links: base proto worker */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "worker/config.h"
#include "tests/unit/config_fixture.h"

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
    args_refused(ARGS(BASE, "--device", "tpu"), STATUS_INVALID, PARTS("--device tpu"));
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
               "{\"train_batch_size\": 4,\n\"fp16\": {\"enabled\": true},\n"
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
    has(why.text, "check.json:2: fp16.enabled"); /* the first mistake */
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
        {"fp16.enabled", "refused", 2},
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flags_suffice_without_a_file),
        cmocka_unit_test(set_beats_flags_which_beat_the_file),
        cmocka_unit_test(planning_needs_no_data),
        cmocka_unit_test(wrong_command_lines),
        cmocka_unit_test(check_prints_every_verdict),
        cmocka_unit_test(check_sums_up_a_good_file),
        cmocka_unit_test(help_and_version_stop),
        cmocka_unit_test(every_allocation_of_a_start_may_fail),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
