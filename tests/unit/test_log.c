/* The log's two line forms, its file, rotation and threads.
 * links: base */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/log.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static char folder[] = "/tmp/ballast-log-XXXXXX";
static char path[64], aside[64], captured[64];
static int real_stderr;

static int set_up(void **state)
{
    (void)state;
    real_stderr = dup(STDERR_FILENO);
    if (mkdtemp(folder) == NULL || real_stderr < 0) {
        return -1;
    }
    snprintf(path, sizeof path, "%s/log", folder);
    snprintf(aside, sizeof aside, "%s/log.1", folder);
    snprintf(captured, sizeof captured, "%s/stderr", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    unlink(path);
    unlink(aside);
    unlink(captured);
    return rmdir(folder);
}

/* stderr goes to a file until restore(). */
static void capture(void)
{
    int file = open(captured, O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0600);
    assert_true(file >= 0);
    assert_int_equal(dup2(file, STDERR_FILENO), STDERR_FILENO);
    close(file);
}

static void restore(void)
{
    dup2(real_stderr, STDERR_FILENO);
}

static void read_file(const char *name, char *text, size_t bytes)
{
    FILE *file = fopen(name, "r");
    assert_non_null(file);
    size_t n = fread(text, 1, bytes - 1, file);
    text[n] = '\0';
    fclose(file);
}

static void logfmt(void **state)
{
    (void)state;
    char text[8192];
    capture();
    log_init("ballastd", -1, LOG_INFO);
    unsigned before = log_error_count();
    errno = ENOENT;
    log_warn("limit %d \"x\"\nnext\x1b[31m", 7);
    assert_int_equal(errno, ENOENT);
    log_debug("not at this level");
    log_init("ballast-worker", 3, LOG_DEBUG);
    log_debug("now");
    log_quiet(true);
    log_warn("quiet");
    log_error("errors always");
    log_quiet(false);
    restore();
    read_file(captured, text, sizeof text);
    char *first = text, *second = strchr(first, '\n');
    assert_non_null(second);
    *second++ = '\0';
    int year, month, day, hour, minute, second_of, ms, used = 0;
    assert_int_equal(sscanf(first, "time=%d-%d-%dT%d:%d:%d.%dZ%n", &year, &month, &day, &hour,
                            &minute, &second_of, &ms, &used),
                     7);
    assert_true(year >= 2024);
    assert_string_equal(first + used,
                        " level=warn program=ballastd text=\"limit 7 \\\"x\\\"\\nnext\\x1b[31m\"");
    char *third = strchr(second, '\n');
    assert_non_null(third);
    *third++ = '\0';
    assert_non_null(strstr(second, " level=debug program=ballast-worker rank=3 text=\"now\""));
    assert_non_null(
        strstr(third, "level=error program=ballast-worker rank=3 text=\"errors always\"\n"));
    assert_null(strstr(third, "quiet"));
    assert_int_equal(log_error_count(), before + 1);
}

static void terminal(void **state)
{
    (void)state;
    int master, slave;
    assert_int_equal(openpty(&master, &slave, NULL, NULL, NULL), 0);
    assert_int_equal(dup2(slave, STDERR_FILENO), STDERR_FILENO);
    log_init("ballast-worker", 0, LOG_INFO);
    log_info("step %d\x1b", 5);
    log_init("ballastd", -1, LOG_INFO);
    restore();
    char text[256];
    ssize_t n = read(master, text, sizeof text - 1);
    close(master);
    close(slave);
    assert_true(n > 0);
    text[n] = '\0';
    int hour, minute, second, used = 0;
    assert_int_equal(sscanf(text, "%2d:%2d:%2d%n", &hour, &minute, &second, &used), 3);
    assert_int_equal(used, 8);
    assert_string_equal(text + used, " info rank 0: step 5\\x1b\r\n");
    log_init("test", -1, LOG_INFO);
}

static void long_text_is_cut_to_one_line(void **state)
{
    (void)state;
    static char text[9000], out[16384];
    memset(text, '\n', sizeof text - 1);
    capture();
    log_init("test", 1, LOG_INFO);
    log_info("%s", text);
    restore();
    read_file(captured, out, sizeof out);
    size_t n = strlen(out);
    assert_true(n > 2000 && n <= 5120);
    assert_ptr_equal(strchr(out, '\n'), out + n - 1);
    assert_int_equal(out[n - 2], '"');
}

static void file_rotates(void **state)
{
    (void)state;
    enum { LIMIT = 64 * 1024 * 1024 };
    capture();
    log_init("test", -1, LOG_INFO);
    log_quiet(true);
    assert_int_equal(log_to_file(path), STATUS_OK);
    log_info("first");
    struct stat stat_old, stat_new;
    assert_int_equal(stat(path, &stat_old), 0);
    assert_true(stat_old.st_size > 40);
    assert_int_equal(stat_old.st_mode & 0777, 0600);
    /* Grown from outside (a sparse file), as if by a long run before. */
    assert_int_equal(truncate(path, LIMIT - 10), 0);
    assert_int_equal(log_to_file(path), STATUS_OK);
    log_info("second");
    assert_int_equal(stat(aside, &stat_old), 0);
    assert_int_equal(stat_old.st_size, LIMIT - 10);
    assert_int_equal(stat(path, &stat_new), 0);
    assert_true(stat_new.st_size > 40 && stat_new.st_size < 200);
    assert_int_equal(log_to_file(NULL), STATUS_OK);
    log_info("third");
    log_quiet(false);
    restore();
    char text[512];
    read_file(path, text, sizeof text);
    assert_non_null(strstr(text, "text=\"second\"\n"));
    assert_null(strstr(text, "third"));
    assert_int_equal(log_to_file("/nowhere/at/all"), STATUS_NOT_FOUND);
    static char long_path[8192];
    memset(long_path, 'a', sizeof long_path - 1);
    assert_int_equal(log_to_file(long_path), STATUS_TOO_LARGE);
}

static void a_full_disk_is_told_once(void **state)
{
    (void)state;
    char text[1024];
    capture();
    log_init("test", -1, LOG_INFO);
    assert_int_equal(log_to_file("/dev/full"), STATUS_OK);
    errno = ENOENT;
    log_info("one");
    assert_int_equal(errno, ENOENT);
    log_info("two");
    assert_int_equal(log_to_file(NULL), STATUS_OK);
    restore();
    read_file(captured, text, sizeof text);
    char *told = strstr(text, "cannot be written");
    assert_non_null(told);
    assert_null(strstr(told + 1, "cannot be written"));
    assert_non_null(strstr(text, "text=\"two\""));
}

enum { N_THREADS = 4, N_LINES = 200 };

static void *write_lines(void *data)
{
    for (int i = 0; i < N_LINES; i++) {
        log_info("thread %d line %03d %s", *(int *)data, i,
                 "0123456789012345678901234567890123456789");
    }
    return NULL;
}

static void lines_of_threads_do_not_mix(void **state)
{
    (void)state;
    pthread_t threads[N_THREADS];
    int numbers[N_THREADS];
    capture();
    log_init("test", -1, LOG_INFO);
    for (int i = 0; i < N_THREADS; i++) {
        numbers[i] = i;
        assert_int_equal(pthread_create(&threads[i], NULL, write_lines, &numbers[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    restore();
    FILE *file = fopen(captured, "r");
    assert_non_null(file);
    char line[512];
    int n = 0;
    for (; fgets(line, sizeof line, file) != NULL; n++) {
        assert_memory_equal(line, "time=", 5);
        assert_non_null(strstr(line, "9012345678901234567890123456789\"\n"));
    }
    fclose(file);
    assert_int_equal(n, N_THREADS * N_LINES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logfmt),
        cmocka_unit_test(terminal),
        cmocka_unit_test(long_text_is_cut_to_one_line),
        cmocka_unit_test(file_rotates),
        cmocka_unit_test(a_full_disk_is_told_once),
        cmocka_unit_test(lines_of_threads_do_not_mix),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
