/* oom.pb and the replacing of a small file as a whole.
 * links: base proto */
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
#include "proto/frame.h"
#include "proto/oom_file.h"
#include "proto/text_file.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static char folder[64], path[96], part[96];
static struct failure why;

static int set_up(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/ballast-test-XXXXXX");
    if (!mkdtemp(folder))
        return 1;
    snprintf(path, sizeof path, "%s/oom.pb", folder);
    snprintf(part, sizeof part, "%s/oom.pb.part", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    unlink(path);
    unlink(part);
    return rmdir(folder) != 0 || heap_live() != 0;
}

static enum status write_report(uint64_t step)
{
    Ballast__V1__OomReport report = BALLAST__V1__OOM_REPORT__INIT;
    char tensor[] = "losses";
    report.step = step;
    report.tensor = tensor;
    report.asked_bytes = 1ull << 40;
    return oom_file_write(folder, &report, &why);
}

static void reads_what_was_written_last(void **state)
{
    (void)state;
    Ballast__V1__OomReport *report = NULL;
    assert_int_equal(oom_file_read(folder, &report, &why), STATUS_NOT_FOUND);
    assert_int_equal(write_report(3), STATUS_OK);
    assert_int_equal(write_report(41), STATUS_OK);
    assert_int_equal(oom_file_read(folder, &report, &why), STATUS_OK);
    assert_int_equal(report->step, 41);
    assert_string_equal(report->tensor, "losses");
    assert_int_equal(report->asked_bytes, 1ull << 40);
    frame_free(&report->base);
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(access(part, F_OK), -1);
}

static void a_failed_write_leaves_the_old_one(void **state)
{
    (void)state;
    Ballast__V1__OomReport *report = NULL;
    assert_int_equal(write_report(3), STATUS_OK);
    assert_int_equal(mkdir(part, 0700), 0); /* so that it cannot be opened */
    assert_int_not_equal(write_report(41), STATUS_OK);
    assert_non_null(strstr(why.text, path));
    assert_int_equal(rmdir(part), 0);
    heap_fail(1, false);
    assert_int_equal(write_report(41), STATUS_OUT_OF_MEMORY);
    heap_fail(0, false);
    assert_int_equal(oom_file_read(folder, &report, &why), STATUS_OK);
    assert_int_equal(report->step, 3);
    frame_free(&report->base);
}

static void refuses_what_is_no_report(void **state)
{
    (void)state;
    Ballast__V1__OomReport *report = NULL;
    assert_int_equal(text_file_replace(path, "\xff\xff\xff", 3, &why), STATUS_OK);
    assert_int_equal(oom_file_read(folder, &report, &why), STATUS_CORRUPT);
    assert_non_null(strstr(why.text, path));
    char *large = calloc(1, FRAME_MAX_BYTES + 1);
    assert_int_equal(text_file_replace(path, large, FRAME_MAX_BYTES + 1, &why), STATUS_OK);
    free(large);
    assert_int_equal(oom_file_read(folder, &report, &why), STATUS_TOO_LARGE);
    assert_int_equal(write_report(1), STATUS_OK);
    for (uint64_t n = 1; n <= 3; n++) {
        heap_fail(n, false);
        assert_int_equal(oom_file_read(folder, &report, &why), STATUS_OUT_OF_MEMORY);
        heap_fail(0, false);
    }
    assert_null(report);
    /* A report of nothing but defaults is an empty file, and a report. */
    Ballast__V1__OomReport empty = BALLAST__V1__OOM_REPORT__INIT;
    assert_int_equal(oom_file_write(folder, &empty, &why), STATUS_OK);
    assert_int_equal(oom_file_read(folder, &report, &why), STATUS_OK);
    frame_free(&report->base);
}

static void a_path_that_is_too_long_is_said(void **state)
{
    (void)state;
    char *longer = calloc(1, 8192);
    memset(longer, 'x', 8191);
    Ballast__V1__OomReport *report = NULL;
    assert_int_equal(oom_file_read(longer, &report, &why), STATUS_TOO_LARGE);
    assert_int_equal(text_file_replace(longer, "", 0, &why), STATUS_TOO_LARGE);
    free(longer);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(reads_what_was_written_last),
        TEST(a_failed_write_leaves_the_old_one),
        TEST(refuses_what_is_no_report),
        TEST(a_path_that_is_too_long_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
