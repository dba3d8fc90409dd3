/* Socket files: the seven ways a path can be somebody else's, and the rules for names.
 * links: base proto daemon uv */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include "daemon/control.h"
#include "daemon/listener.h"
#include "proto/base/heap.h"
#include "proto/socket_path.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static char folder[64], path[100], name[160];

static int setup(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/ballast-test-XXXXXX");
    if (!mkdtemp(folder))
        return 1;
    snprintf(path, sizeof path, "%s/a.sock", folder);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

static bool can_connect(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    bool ok = connect(fd, (const struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return ok;
}

/* (a) kill -9, restart: nobody listens, so the file is taken over. */
static void test_stale(void **state)
{
    (void)state;
    struct listener_file file;
    struct failure why;
    struct stat info;
    assert_int_equal(listener_bind(path, &file, &why), STATUS_OK);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0600);
    close(file.fd); /* as a killed process leaves it */
    assert_false(can_connect());
    assert_int_equal(listener_bind(path, &file, &why), STATUS_OK);
    assert_true(can_connect());
    listener_unbind(&file);
    assert_int_equal(access(path, F_OK), -1);
}

/* (b) a second instance while the first lives. */
static void test_live(void **state)
{
    (void)state;
    struct listener_file first, second = {.fd = -7};
    struct failure why;
    char pid[32];
    assert_int_equal(listener_bind(path, &first, &why), STATUS_OK);
    assert_int_equal(listener_bind(path, &second, &why), STATUS_ADDRESS_IN_USE);
    snprintf(pid, sizeof pid, "process %d", (int)getpid());
    assert_non_null(strstr(why.text, pid));
    assert_int_equal(second.fd, -7); /* no output on failure */
    assert_true(can_connect());
    listener_unbind(&first);
}

/* (c) the old instance closes late: the successor's path stays. */
static void test_successor(void **state)
{
    (void)state;
    struct listener_file old, new;
    struct failure why;
    assert_int_equal(listener_bind(path, &old, &why), STATUS_OK);
    assert_int_equal(unlink(path), 0); /* somebody tidied up */
    assert_int_equal(listener_bind(path, &new, &why), STATUS_OK);
    listener_unbind(&old);
    assert_true(can_connect());
    listener_unbind(&new);
    assert_int_equal(access(path, F_OK), -1);
}

/* (d) a regular file (and a folder, and a link) at the path. */
static void test_not_a_socket(void **state)
{
    (void)state;
    struct listener_file file;
    struct failure why;
    char text[8] = "";
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    assert_int_equal(write(fd, "keep me", 7), 7);
    close(fd);
    assert_int_equal(listener_bind(path, &file, &why), STATUS_ADDRESS_IN_USE);
    assert_non_null(strstr(why.text, "not a socket"));
    fd = open(path, O_RDONLY);
    assert_int_equal(read(fd, text, 7), 7);
    close(fd);
    assert_string_equal(text, "keep me");
    unlink(path);
    assert_int_equal(symlink("/dev/null", path), 0);
    assert_int_equal(listener_bind(path, &file, &why), STATUS_ADDRESS_IN_USE);
}

/* (e) 150 characters. */
static void test_too_long(void **state)
{
    (void)state;
    struct listener_file file;
    struct failure why;
    memset(name, 'x', sizeof name);
    memcpy(name, folder, strlen(folder));
    name[strlen(folder)] = '/';
    name[150] = '\0';
    assert_int_equal(listener_bind(name, &file, &why), STATUS_TOO_LARGE);
    assert_non_null(strstr(why.text, "150"));
    assert_non_null(strstr(why.text, "107"));
    name[107] = '\0';
    assert_int_equal(listener_bind(name, &file, &why), STATUS_OK);
    struct stat info;
    assert_int_equal(lstat(name, &info), 0); /* the whole name, not a cut one */
    listener_unbind(&file);
    name[108] = '\0';
    name[107] = 'x';
    assert_int_equal(listener_bind(name, &file, &why), STATUS_TOO_LARGE);
}

/* (f) is about TCP, which this daemon does not serve. (g) the folder is not ours. */
static void test_folder(void **state)
{
    (void)state;
    struct listener_file file;
    struct failure why;
    assert_int_equal(chmod(folder, 0755), 0);
    assert_int_equal(listener_bind(path, &file, &why), STATUS_PERMISSION);
    assert_non_null(strstr(why.text, "0755"));
    assert_int_equal(chmod(folder, 0700), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(folder, 12345, 0), 0);
        assert_int_equal(listener_bind(path, &file, &why), STATUS_PERMISSION);
        assert_non_null(strstr(why.text, "12345"));
        assert_int_equal(chown(folder, 0, 0), 0);
    }
    char link[96], inside[160];
    snprintf(link, sizeof link, "%s-link", folder);
    snprintf(inside, sizeof inside, "%s/a.sock", link);
    assert_int_equal(symlink(folder, link), 0);
    assert_int_equal(listener_bind(inside, &file, &why), STATUS_PERMISSION);
    assert_non_null(strstr(why.text, "symbolic link"));
    unlink(link);
    /* One that is missing is made, closed to others. */
    snprintf(inside, sizeof inside, "%s/new/a.sock", folder);
    assert_int_equal(listener_bind(inside, &file, &why), STATUS_OK);
    listener_unbind(&file);
    snprintf(link, sizeof link, "%s/new", folder);
    struct stat info;
    assert_int_equal(stat(link, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0700);
    rmdir(link);
    snprintf(inside, sizeof inside, "%s/no/such/a.sock", folder);
    assert_int_not_equal(listener_bind(inside, &file, &why), STATUS_OK);
    assert_int_equal(listener_bind("relative.sock", &file, &why), STATUS_INVALID);
    assert_int_equal(listener_bind("/tmp/../tmp/x.sock", &file, &why), STATUS_INVALID);
}

static void test_names(void **state)
{
    (void)state;
    struct failure why;
    char control[SOCKET_PATH_BYTES], link[SOCKET_PATH_BYTES], expected[SOCKET_PATH_BYTES];
    static const char *const good[] = {"a", "run-1_B.2", "x.link.y"};
    static const char *const bad[] = {"", ".hidden", "a/b", "a b", "a\n", "..", "x.link",
                                      "0123456789012345678901234567890123456789012345678"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_int_equal(socket_path_check_run_id(good[i], &why), STATUS_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(socket_path_check_run_id(bad[i], &why), STATUS_INVALID);
    setenv("XDG_RUNTIME_DIR", folder, 1);
    assert_int_equal(socket_path_for_run("r", control, link, &why), STATUS_OK);
    snprintf(expected, sizeof expected, "%s/ballast/r.sock", folder);
    assert_string_equal(control, expected);
    snprintf(expected, sizeof expected, "%s/ballast/r.link.sock", folder);
    assert_string_equal(link, expected);
    /* A runtime folder that is not there, or too long, is passed over. */
    static const char *const useless[] = {
        "/nonexistent", "relative",
        ("/tmp/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
         "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")};
    for (size_t i = 0; i < sizeof useless / sizeof *useless; i++) {
        setenv("XDG_RUNTIME_DIR", useless[i], 1);
        assert_int_equal(socket_path_for_run("r", control, link, &why), STATUS_OK);
        snprintf(expected, sizeof expected, "/tmp/ballast-%u/r.sock", (unsigned)geteuid());
        assert_string_equal(control, expected);
    }
}

static void test_discover(void **state)
{
    (void)state;
    struct listener_file one, two;
    struct failure why;
    struct socket_path_list list;
    char first[SOCKET_PATH_BYTES], second[SOCKET_PATH_BYTES], link[SOCKET_PATH_BYTES];
    setenv("XDG_RUNTIME_DIR", folder, 1);
    assert_int_equal(socket_path_for_run("one", first, link, &why), STATUS_OK);
    assert_int_equal(listener_bind(first, &one, &why), STATUS_OK);
    assert_int_equal(socket_path_for_run("two", second, link, &why), STATUS_OK);
    assert_int_equal(listener_bind(link, &two, &why), STATUS_OK); /* the workers' door only */
    assert_int_equal(socket_path_discover(&list, &why), STATUS_OK);
    bool found = false;
    for (size_t i = 0; i < list.count; i++) {
        found = found || !strcmp(list.paths[i], first);
        assert_string_not_equal(list.paths[i], link);
        assert_string_not_equal(list.paths[i], second);
    }
    assert_true(found);
    socket_path_list_fini(&list);
    listener_unbind(&one);
    listener_unbind(&two);
    heap_fail(1, true);
    assert_int_equal(socket_path_discover(&list, &why), STATUS_OUT_OF_MEMORY);
    heap_fail(2, false);
    assert_int_equal(socket_path_discover(&list, &why), STATUS_OUT_OF_MEMORY);
    heap_fail(0, false);
    assert_int_equal(heap_live(), 0);
    char made[96];
    snprintf(made, sizeof made, "%s/ballast", folder);
    assert_int_equal(rmdir(made), 0);
}

static void test_who_may(void **state)
{
    (void)state;
    assert_true(control_may_operate(1000, 1000));
    assert_true(control_may_operate(0, 1000));
    assert_false(control_may_operate(1001, 1000));
    assert_false(control_may_operate(1000, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_stale, setup, teardown),
        cmocka_unit_test_setup_teardown(test_live, setup, teardown),
        cmocka_unit_test_setup_teardown(test_successor, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_a_socket, setup, teardown),
        cmocka_unit_test_setup_teardown(test_too_long, setup, teardown),
        cmocka_unit_test_setup_teardown(test_folder, setup, teardown),
        cmocka_unit_test_setup_teardown(test_names, setup, teardown),
        cmocka_unit_test_setup_teardown(test_discover, setup, teardown),
        cmocka_unit_test(test_who_may),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
