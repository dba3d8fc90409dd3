/* Saves of one rank: round trips, other ranges, damage found and named, what is kept.
 * links: worker kernels proto base
 */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/save/io.h"
#include "worker/save/manifest.h"
#include "worker/save/save.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>
#include "tests/unit/save_fixture.h"

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

static struct fixture_model loaded;

static int set_up(void **state)
{
    (void)state;
    comm_dry_init(&fixture_comm, 0, 1);
    fixture_empty();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return heap_live() == 0 ? 0 : -1;
}

static void test_round_trip(void **state)
{
    (void)state;
    uint64_t step = 0;
    assert_false(save_exists(fixture_run));
    assert_int_equal(fixture_load(&step, &loaded), STATUS_NO_SAVE);
    assert_ok(fixture_write(7, 1, 0));
    assert_true(save_exists(fixture_run));
    assert_ok(fixture_load(&step, &loaded));
    assert_int_equal(step, 7);
    assert_true(fixture_is(&loaded, 1));
    assert_false(fixture_is(&loaded, 2));
    /* written again: replaced */
    assert_ok(fixture_write(7, 2, 0));
    assert_ok(fixture_load(&step, &loaded));
    assert_true(fixture_is(&loaded, 2));
    assert_true(fixture_comm.timeout_s == 60); /* put back */
}

static void test_files(void **state)
{
    (void)state;
    struct stat info;
    char path[2 * FIXTURE_PATH_BYTES];
    assert_ok(fixture_write(3, 1, 0));
    snprintf(path, sizeof path, "%s/save/step-3", fixture_run);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0700);
    size_t n = 0;
    DIR *folder = opendir(path);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        n += entry->d_name[0] != '.';
    }
    closedir(folder);
    assert_int_equal(n, 2); /* nothing but these two */
    snprintf(path, sizeof path, "%s/save/step-3/manifest.json", fixture_run);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    snprintf(path, sizeof path, "%s/save/step-3/rank-0.bin", fixture_run);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    /* header, then three states of four tensors, each from a multiple of 64 on */
    assert_int_equal(info.st_size, 64 + 3 * (20032 + 64 + 4096 + 1152) - (1152 - 277 * 4));
}

static void test_meta(void **state)
{
    (void)state;
    struct save_io io = fixture_io();
    json_t *manifest = NULL, *meta = fixture_meta(9);
    uint64_t step;
    assert_ok(fixture_write(9, 1, 0));
    assert_ok(save_find(&io, false, 9, &manifest, &step, &fixture_why));
    assert_true(json_equal(json_object_get(manifest, "meta"), meta));
    assert_int_equal(json_integer_value(json_object_get(manifest, "version")), 1);
    assert_int_equal(json_integer_value(json_object_get(manifest, "step")), 9);
    json_decref(meta);
    json_decref(manifest);
    assert_int_equal(save_find(&io, false, 8, &manifest, &step, &fixture_why), STATUS_NO_SAVE);
    assert_non_null(strstr(fixture_why.text, "step 8"));
}

static uint64_t last_done, last_total;

static void watch_progress(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    assert_true(done > last_done && done <= total);
    last_done = done;
    last_total = total;
}

static void test_progress(void **state)
{
    (void)state;
    static struct fixture_model model;
    struct save_piece pieces[12];
    struct save_io io = fixture_io();
    char path[FIXTURE_PATH_BYTES];
    json_t *manifest;
    uint64_t step;
    size_t n = fixture_pieces(&model, 0, 1, pieces);
    uint64_t bytes = sizeof model;
    io.progress = watch_progress;
    last_done = 0;
    assert_ok(save_write(&io, 1, pieces, n, NULL, 0, path, sizeof path, &fixture_why));
    assert_int_equal(last_done, bytes);
    assert_int_equal(last_total, bytes);
    assert_non_null(strstr(path, "/save/step-1"));
    last_done = 0;
    assert_ok(save_find(&io, true, 0, &manifest, &step, &fixture_why));
    assert_int_equal(last_done, bytes);
    last_done = 0;
    assert_ok(save_read(&io, manifest, pieces, n, &fixture_why));
    assert_int_equal(last_done, bytes);
    json_decref(manifest);
}

/* Two saves of which the newer gets damaged; exact and latest are asked. */
static void check_found(const char *file, const char *what, uint64_t byte)
{
    struct save_io io = fixture_io();
    json_t *manifest = NULL;
    uint64_t step = 0;
    if (save_find(&io, false, 2, &manifest, &step, &fixture_why) != STATUS_NO_SAVE ||
        strstr(fixture_why.text, file) == NULL) {
        print_error("%s at byte %" PRIu64 " of %s: %s\n", what, byte, file, fixture_why.text);
        assert_true(false);
    }
    assert_null(manifest);
}

static void check_falls_back(void)
{
    uint64_t step = 0;
    assert_ok(fixture_load(&step, &loaded));
    assert_int_equal(step, 1);
    assert_true(fixture_is(&loaded, 11));
}

static void write_two(void)
{
    assert_ok(fixture_write(1, 11, 0));
    assert_ok(fixture_write(2, 12, 0));
}

static int open_file(const char *file)
{
    char path[2 * FIXTURE_PATH_BYTES];
    snprintf(path, sizeof path, "%s/save/step-2/%s", fixture_run, file);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    return fd;
}

static void flip(int fd, uint64_t byte, uint8_t mask)
{
    uint8_t value;
    assert_int_equal(pread(fd, &value, 1, (off_t)byte), 1);
    value ^= mask;
    assert_int_equal(pwrite(fd, &value, 1, (off_t)byte), 1);
}

static void test_flips_in_shard(void **state)
{
    (void)state;
    write_two();
    int fd = open_file("rank-0.bin");
    uint64_t bytes = (uint64_t)lseek(fd, 0, SEEK_END);
    unsigned n = 0;
    for (uint64_t byte = 0; byte < bytes; n++) {
        flip(fd, byte, (uint8_t)(1U << n % 8));
        check_found("rank-0.bin", "flip", byte);
        unsigned long long at = 0, length = 0;
        const char *text = strstr(fixture_why.text, "rank-0.bin: ") + strlen("rank-0.bin: ");
        if (sscanf(text, "%llu bytes at byte %llu", &length, &at) == 2) {
            assert_true(at <= byte && byte < at + length);
        } else {
            assert_int_equal(sscanf(text, "byte %llu", &at), 1);
            assert_int_equal(at, byte);
        }
        flip(fd, byte, (uint8_t)(1U << n % 8));
        /* the header byte by byte, the gap after the first piece, then one in 4 KiB */
        byte += byte < 64 || (byte >= 64 + 20000 && byte < 64 + 20032) ? 1 : 4000 + n * 37 % 96;
        if (byte > 64 + 4000 * 4 && byte < 64 + 20000) {
            byte = 64 + 20000;
        }
    }
    assert_true(n > 64 + 32 + 12);
    close(fd);
    uint64_t step = 0;
    assert_ok(fixture_load(&step, &loaded)); /* all put right again */
    assert_int_equal(step, 2);
}

static void test_flips_in_manifest(void **state)
{
    (void)state;
    write_two();
    int fd = open_file("manifest.json");
    uint64_t bytes = (uint64_t)lseek(fd, 0, SEEK_END);
    assert_true(bytes > 1000);
    for (uint64_t byte = 0; byte < bytes; byte++) {
        flip(fd, byte, (uint8_t)(1U << byte % 8));
        check_found("manifest.json", "flip", byte);
        flip(fd, byte, (uint8_t)(1U << byte % 8));
    }
    flip(fd, 5, 1);
    close(fd);
    check_falls_back();
}

static void test_truncation(void **state)
{
    (void)state;
    static const char *const files[] = {"rank-0.bin", "manifest.json"};
    for (size_t f = 0; f < 2; f++) {
        fixture_empty();
        write_two();
        int fd = open_file(files[f]);
        off_t bytes = lseek(fd, 0, SEEK_END);
        uint8_t *copy = heap_alloc((size_t)bytes);
        assert_int_equal(pread(fd, copy, (size_t)bytes, 0), bytes);
        for (off_t i = 0; i < 20; i++) {
            off_t length = i < 3 ? i : i == 19 ? bytes - 1 : bytes * i / 20;
            assert_int_equal(ftruncate(fd, length), 0);
            check_found(files[f], "cut", (uint64_t)length);
        }
        check_falls_back();
        assert_int_equal(pwrite(fd, copy, (size_t)bytes, 0), bytes);
        assert_int_equal(pwrite(fd, "", 1, bytes), 1); /* one byte too long */
        check_found(files[f], "longer", (uint64_t)bytes);
        close(fd);
        heap_free(copy);
    }
    char path[2 * FIXTURE_PATH_BYTES];
    snprintf(path, sizeof path, "%s/save/step-2/rank-0.bin", fixture_run);
    fixture_empty();
    write_two();
    assert_int_equal(unlink(path), 0);
    check_found("rank-0.bin", "missing", 0);
    check_falls_back();
}

static void test_all_damaged(void **state)
{
    (void)state;
    uint64_t step;
    assert_ok(fixture_write(2, 12, 0));
    int fd = open_file("rank-0.bin");
    flip(fd, 100, 1);
    close(fd);
    assert_int_equal(fixture_load(&step, &loaded), STATUS_NO_SAVE);
    assert_non_null(strstr(fixture_why.text, "1 damaged"));
    assert_non_null(strstr(fixture_why.text, "rank-0.bin"));
    /* a folder without a manifest is no save, whatever its name */
    char path[2 * FIXTURE_PATH_BYTES];
    snprintf(path, sizeof path, "%s/save/step-2/manifest.json", fixture_run);
    assert_int_equal(unlink(path), 0);
    assert_false(save_exists(fixture_run));
    assert_int_equal(fixture_load(&step, &loaded), STATUS_NO_SAVE);
}

/* The manifest of step 2, changed by a test and sealed again. */
static json_t *take_manifest(void)
{
    char path[2 * FIXTURE_PATH_BYTES];
    char *text;
    size_t n;
    json_t *json;
    snprintf(path, sizeof path, "%s/save/step-2/manifest.json", fixture_run);
    assert_ok(io_read_file(path, 1 << 20, &text, &n, &fixture_why));
    assert_ok(manifest_unseal(text, n, path, &json, &fixture_why));
    heap_free(text);
    assert_int_equal(unlink(path), 0);
    return json;
}

static void put_manifest(json_t *json)
{
    char path[2 * FIXTURE_PATH_BYTES];
    char *text;
    size_t n;
    snprintf(path, sizeof path, "%s/save/step-2/manifest.json", fixture_run);
    assert_ok(manifest_seal(json, &text, &n, &fixture_why));
    assert_ok(io_write_file(path, text, n, &fixture_why));
    heap_free(text);
    json_decref(json);
}

static void test_version(void **state)
{
    (void)state;
    uint64_t step;
    write_two();
    json_t *json = take_manifest();
    json_object_set_new(json, "version", json_integer(2));
    put_manifest(json);
    /* not damage: an older save is not taken silently */
    assert_int_equal(fixture_load(&step, &loaded), STATUS_VERSION);
    assert_non_null(strstr(fixture_why.text, "version 2"));
    assert_non_null(strstr(fixture_why.text, "version 1"));
}

static json_t *piece_of(json_t *json, size_t i)
{
    json_t *shard = json_array_get(json_object_get(json, "shards"), 0);
    return json_array_get(json_object_get(shard, "pieces"), i);
}

/* A manifest that is sealed but says what cannot be: refused, not believed. */
static void test_hostile_manifest(void **state)
{
    (void)state;
    static const struct {
        const char *key;
        json_int_t value;
    } lies[] = {{"first", 1},       {"first", INT64_MAX}, {"n", 5001},       {"n", INT64_MAX},
                {"n", -1},          {"offset", 0},        {"offset", 128},   {"offset", INT64_MAX},
                {"tensor_n", 4999}, {"tensor_n", -5},     {"tensor_n", 5001}};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        fixture_empty();
        write_two();
        json_t *json = take_manifest();
        json_object_set_new(piece_of(json, 0), lies[i].key, json_integer(lies[i].value));
        put_manifest(json);
        check_found("manifest", lies[i].key, i);
        check_falls_back();
    }
    fixture_empty();
    write_two();
    json_t *json = take_manifest();
    json_object_set_new(json_array_get(json_object_get(json, "shards"), 0), "file",
                        json_string("../../../etc/passwd"));
    put_manifest(json);
    check_found("rank-0.bin", "file", 0);
}

/* Read any ranges, in any order, one element at a time too. */
static void test_other_ranges(void **state)
{
    (void)state;
    static struct fixture_model model, expected;
    struct save_io io = fixture_io();
    json_t *manifest;
    uint64_t step;
    assert_ok(fixture_write(4, 21, 0));
    assert_ok(save_find(&io, true, 0, &manifest, &step, &fixture_why));
    fixture_fill(&expected, 21);
    for (uint32_t size = 1; size <= 7; size++) {
        memset(&model, 0, sizeof model);
        for (uint32_t rank = 0; rank < size; rank++) {
            struct save_piece pieces[FIXTURE_TENSORS * N_SAVE_STATES + 1];
            size_t n = fixture_pieces(&model, rank, size, pieces);
            /* every tensor has to be asked for by somebody; here there is one rank only */
            float first;
            pieces[n] = (struct save_piece){"h.0.ln.bias", SAVE_PARAM, 0, 1, 3, &first};
            assert_ok(save_read(&io, manifest, pieces, n + 1, &fixture_why));
        }
        assert_memory_equal(&model, &expected, sizeof model);
    }
    json_decref(manifest);
}

static void check_read_refused(struct save_piece *pieces, size_t n, const char *tensor,
                               const char *detail)
{
    struct save_io io = fixture_io();
    json_t *manifest;
    uint64_t step;
    assert_ok(save_find(&io, false, 2, &manifest, &step, &fixture_why));
    memset(&loaded, 0x5C, sizeof loaded);
    assert_int_equal(save_read(&io, manifest, pieces, n, &fixture_why), STATUS_CORRUPT);
    assert_non_null(strstr(fixture_why.text, tensor));
    assert_non_null(strstr(fixture_why.text, detail));
    for (size_t i = 0; i < sizeof loaded; i++) {
        assert_int_equal(((const uint8_t *)&loaded)[i], 0x5C); /* nothing was changed */
    }
    json_decref(manifest);
}

static void test_tensors_must_match(void **state)
{
    (void)state;
    struct save_piece pieces[FIXTURE_TENSORS * N_SAVE_STATES + 1];
    size_t n = fixture_pieces(&loaded, 0, 1, pieces);
    write_two();
    pieces[n] = (struct save_piece){"lm_head.weight", SAVE_PARAM, 0, 3, 3, loaded.data[0]};
    check_read_refused(pieces, n + 1, "lm_head.weight", "no tensor");
    pieces[n] = (struct save_piece){"wte.weight", SAVE_PARAM, 0, 3, 4999, loaded.data[0]};
    check_read_refused(pieces, n + 1, "wte.weight", "5000");
    check_read_refused(pieces, n + 1, "wte.weight", "4999");
    /* tensor 3 of every state is not asked for */
    struct save_piece fewer[FIXTURE_TENSORS * N_SAVE_STATES];
    size_t n_fewer = 0;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(pieces[i].tensor, "ln_f.weight") != 0) {
            fewer[n_fewer++] = pieces[i];
        }
    }
    check_read_refused(fewer, n_fewer, "ln_f.weight", "the model lacks");
}

/* A state that some of the pieces lack, in a manifest that is sound otherwise. */
static void test_missing_state(void **state)
{
    (void)state;
    struct save_piece pieces[FIXTURE_TENSORS * N_SAVE_STATES];
    struct save_io io = fixture_io();
    json_t *manifest;
    uint64_t step;
    size_t n = fixture_pieces(&loaded, 0, 1, pieces);
    assert_ok(fixture_write(2, 12, 0));
    assert_ok(save_find(&io, true, 0, &manifest, &step, &fixture_why));
    json_t *shard = json_array_get(json_object_get(manifest, "shards"), 0);
    json_t *before = piece_of(manifest, n - 2);
    json_int_t end = json_integer_value(json_object_get(before, "offset")) +
                     4 * json_integer_value(json_object_get(before, "n"));
    json_array_remove(json_object_get(shard, "pieces"), n - 1);
    assert_int_equal(save_read(&io, manifest, pieces, n, &fixture_why), STATUS_CORRUPT);
    assert_non_null(strstr(fixture_why.text, "should end at"));
    json_object_set_new(shard, "bytes", json_integer(end));
    memset(&loaded, 0, sizeof loaded);
    assert_int_equal(save_read(&io, manifest, pieces, n, &fixture_why), STATUS_CORRUPT);
    assert_non_null(strstr(fixture_why.text, "no tensor ln_f.weight, moment_v"));
    assert_true(loaded.data[0][0] == 0);
    /* who does not want it is not kept from the rest */
    assert_ok(save_read(&io, manifest, pieces, n - 1, &fixture_why));
    json_decref(manifest);
}

/* What would leave a hole is not written. */
static void test_incomplete_is_refused(void **state)
{
    (void)state;
    static struct fixture_model model;
    struct save_piece pieces[FIXTURE_TENSORS * N_SAVE_STATES];
    struct save_io io = fixture_io();
    char path[FIXTURE_PATH_BYTES] = "";
    size_t n = fixture_pieces(&model, 0, 1, pieces);
    pieces[2].n--;
    assert_ok(fixture_write(1, 11, 0));
    assert_int_equal(save_write(&io, 2, pieces, n, NULL, 0, path, sizeof path, &fixture_why),
                     STATUS_INVALID);
    assert_non_null(strstr(fixture_why.text, "element 1023 of 1024 of tensor h.0.mlp.weight"));
    assert_int_equal(path[0], '\0');
    assert_false(fixture_exists("step-2"));
    assert_false(fixture_exists("step-2.tmp"));
    check_falls_back();
}

static void test_keep(void **state)
{
    (void)state;
    for (uint64_t step = 1; step <= 5; step++) {
        assert_ok(fixture_write(step * 10, (uint32_t)step, 2));
    }
    assert_false(fixture_exists("step-10"));
    assert_false(fixture_exists("step-30"));
    assert_true(fixture_exists("step-40"));
    assert_true(fixture_exists("step-50"));
    assert_ok(fixture_write(60, 6, 0));
    assert_true(fixture_exists("step-40"));
    /* Resumed from further back: what was just written stays, whatever its number. */
    assert_ok(fixture_write(45, 7, 1));
    assert_true(fixture_exists("step-45"));
    assert_false(fixture_exists("step-60"));
    uint64_t step;
    assert_ok(fixture_load(&step, &loaded));
    assert_int_equal(step, 45);
    assert_true(fixture_is(&loaded, 7));
}

/* Half-written folders of all kinds beside a good save. */
static void test_leftovers(void **state)
{
    (void)state;
    char command[3 * FIXTURE_PATH_BYTES];
    write_two();
    snprintf(command, sizeof command,
             "cd %s/save && mkdir step-3.tmp step-9 && cp step-2/* step-3.tmp/ && : > "
             "step-9/rank-0.bin && : > step-9/manifest.json.tmp && mv step-2 step-2.old && "
             "mkdir step-007 && cp step-2.old/* step-007/ && mkdir step-2",
             fixture_run);
    assert_int_equal(system(command), 0);
    uint64_t step;
    assert_ok(fixture_load(&step, &loaded)); /* step-2.old stands for step 2 */
    assert_int_equal(step, 2);
    assert_true(fixture_is(&loaded, 12));
    snprintf(command, sizeof command, "rmdir %s/save/step-2", fixture_run);
    assert_int_equal(system(command), 0);
    assert_ok(fixture_write(4, 14, 0));
    assert_false(fixture_exists("step-3.tmp"));
    assert_false(fixture_exists("step-2.old"));
    assert_true(fixture_exists("step-2"));
    assert_ok(fixture_load(&step, &loaded));
    assert_int_equal(step, 4);
}

int main(void)
{
    alarm(55);
    log_init("test_save", 0, LOG_ERROR);
    fixture_make_run();
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_round_trip),     TEST(test_files),
        TEST(test_meta),           TEST(test_progress),
        TEST(test_flips_in_shard), TEST(test_flips_in_manifest),
        TEST(test_truncation),     TEST(test_all_damaged),
        TEST(test_version),        TEST(test_hostile_manifest),
        TEST(test_other_ranges),   TEST(test_tensors_must_match),
        TEST(test_missing_state),  TEST(test_incomplete_is_refused),
        TEST(test_keep),           TEST(test_leftovers),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    fixture_remove_run();
    return failed;
}
