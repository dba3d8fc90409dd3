/* Saves under failing and dying: every system call of a save fails, once and for ever, in every
 * way; the process dies at every one of them, with what was not synced lost.
 * links: worker kernels proto base
 * timeout: 120
 *
 * The C library's calls that worker/save/io.c makes are replaced in this program, so what is swept
 * is what the kernel would be asked. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/save/save.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>
#include "tests/unit/save_fixture.h"

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

/* ---- the system, as it may be ---- */

enum { KILLED = 77, MAX_DIRTY = 64, MAX_NAMES = 64 };

/* Folders by what they are, since they change their names too. */
struct name_change {
    int from_folder, to_folder;
    char from[64], to[64];
    unsigned flags;
};

static struct {
    bool on;       /* count calls and strike */
    long n, at;    /* calls so far; the one that is struck, 0: none */
    bool for_ever; /* and all after it */
    int error;
    bool die;         /* instead of failing */
    bool lose;        /* and what was not synced is lost */
    bool short_write; /* the struck write does half */
    bool no_swap;     /* the file system cannot exchange names */
    int n_dirty;
    int dirty[MAX_DIRTY]; /* files with bytes that no sync covered */
    int n_names;
    struct name_change names[MAX_NAMES]; /* changes of names that no sync of a folder covered */
} machine;

/* A power cut: bytes and names since the last sync of their file and folder are gone. */
static void lose_unsynced(void)
{
    for (int i = 0; i < machine.n_dirty; i++) {
        if (machine.dirty[i] >= 0) {
            syscall(SYS_ftruncate, machine.dirty[i], 10);
        }
    }
    for (int i = machine.n_names - 1; i >= 0; i--) {
        const struct name_change *change = &machine.names[i];
        syscall(SYS_renameat2, change->to_folder, change->to, change->from_folder, change->from,
                change->flags);
    }
}

static bool struck(void)
{
    if (!machine.on) {
        return false;
    }
    machine.n++;
    bool now =
        machine.at > 0 && (machine.n == machine.at || (machine.for_ever && machine.n > machine.at));
    if (now && machine.die) {
        if (machine.lose) {
            lose_unsynced();
        }
        _exit(KILLED);
    }
    errno = machine.error;
    return now;
}

static bool same_file(int a, int b)
{
    struct stat one, other;
    return fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_ino == other.st_ino &&
           one.st_dev == other.st_dev;
}

static void mark_dirty(int fd)
{
    for (int i = 0; i < machine.n_dirty; i++) {
        if (machine.dirty[i] >= 0 && same_file(machine.dirty[i], fd)) {
            return;
        }
    }
    if (machine.lose && machine.n_dirty < MAX_DIRTY) {
        machine.dirty[machine.n_dirty++] = dup(fd);
    }
}

static void mark_synced(int fd)
{
    for (int i = 0; i < machine.n_dirty; i++) {
        if (machine.dirty[i] >= 0 && same_file(machine.dirty[i], fd)) {
            close(machine.dirty[i]);
            machine.dirty[i] = -1;
        }
    }
    /* a folder: the names changed in it are safe */
    for (int i = 0; i < machine.n_names; i++) {
        if (same_file(machine.names[i].to_folder, fd)) {
            close(machine.names[i].from_folder);
            close(machine.names[i].to_folder);
            machine.names[i] = machine.names[--machine.n_names];
            i--;
        }
    }
}

/* The folder of a path, and the name in it. */
static int split(const char *path, char name[static 64])
{
    char folder[FIXTURE_PATH_BYTES];
    const char *slash = strrchr(path, '/');
    snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
    snprintf(name, 64, "%s", slash + 1);
    return (int)syscall(SYS_openat, AT_FDCWD, folder, O_PATH | O_DIRECTORY, 0);
}

static void mark_name(const char *from, const char *to, unsigned flags)
{
    if (machine.lose && machine.n_names < MAX_NAMES) {
        struct name_change *change = &machine.names[machine.n_names++];
        change->from_folder = split(from, change->from);
        change->to_folder = split(to, change->to);
        change->flags = flags;
    }
}

int open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
    va_end(list);
    return struck() ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

ssize_t pwrite(int fd, const void *bytes, size_t n, off_t offset)
{
    mark_dirty(fd);
    if (struck()) {
        if (!machine.short_write) {
            return -1;
        }
        n = n / 2 + 1;
    }
    return (ssize_t)syscall(SYS_pwrite64, fd, bytes, n, offset);
}

ssize_t pread(int fd, void *bytes, size_t n, off_t offset)
{
    if (struck()) {
        if (!machine.short_write) {
            return -1;
        }
        n = n / 2 + 1;
    }
    return (ssize_t)syscall(SYS_pread64, fd, bytes, n, offset);
}

int fsync(int fd)
{
    if (struck()) {
        return -1;
    }
    mark_synced(fd);
    return 0; /* the disk itself is not what is tested */
}

int rename(const char *from, const char *to)
{
    if (struck()) {
        return -1;
    }
    mark_name(from, to, 0);
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags)
{
    if (struck()) {
        return -1;
    }
    if (machine.no_swap) {
        errno = EINVAL;
        return -1;
    }
    mark_name(from, to, flags);
    return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
}

int unlink(const char *path)
{
    return struck() ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int mkdir(const char *path, mode_t mode)
{
    return struck() ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int rmdir(const char *path)
{
    return struck() ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}

static void calm(void)
{
    for (int i = 0; i < machine.n_dirty; i++) {
        if (machine.dirty[i] >= 0) {
            close(machine.dirty[i]);
        }
    }
    memset(&machine, 0, sizeof machine);
}

/* ---- sweeps ---- */

enum { OLD_SEED = 31, NEW_SEED = 32, OLD_STEP = 1 };

static struct fixture_model loaded;

static int set_up(void **state)
{
    (void)state;
    calm();
    comm_dry_init(&fixture_comm, 0, 1);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    calm();
    fault_disarm_all();
    return heap_live() == 0 ? 0 : -1;
}

/* A run with one good save, and leftovers of another for the save to clean. */
static void begin_run(void)
{
    char command[2 * FIXTURE_PATH_BYTES];
    fixture_empty();
    assert_ok(fixture_write(OLD_STEP, OLD_SEED, 0));
    snprintf(command, sizeof command, "%s/save/step-0.tmp", fixture_run);
    assert_int_equal(mkdir(command, 0700), 0);
    snprintf(command, sizeof command, "%s/save/step-0.tmp/rank-0.bin", fixture_run);
    int fd = open(command, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
}

/* What must hold whatever happened: the newest save that is listed is whole, and it is the old
 * one or the new one. */
static void check_whole(uint64_t new_step, bool new_is_certain, bool old_is_certain)
{
    uint64_t step = 99;
    struct save_io io = fixture_io();
    assert_ok(fixture_load(&step, &loaded));
    bool is_new = step == new_step && fixture_is(&loaded, NEW_SEED);
    bool is_old = step == OLD_STEP && fixture_is(&loaded, OLD_SEED);
    assert_true(is_new || is_old);
    assert_true(!new_is_certain || is_new);
    assert_true(!old_is_certain || is_old);
    /* no torn save is there to be found either */
    for (uint64_t s = 0; s <= 2; s++) {
        char name[64];
        snprintf(name, sizeof name, "step-%" PRIu64 "/manifest.json", s);
        if (fixture_exists(name)) {
            json_t *manifest = NULL;
            assert_ok(save_find(&io, false, s, &manifest, &step, &fixture_why));
            json_decref(manifest);
        }
    }
}

/* The next save works, and leaves nothing behind. */
static void check_next_save(void)
{
    uint64_t step;
    assert_ok(fixture_write(3, 33, 1));
    assert_ok(fixture_load(&step, &loaded));
    assert_int_equal(step, 3);
    assert_true(fixture_is(&loaded, 33));
    char path[2 * FIXTURE_PATH_BYTES];
    size_t n = 0;
    snprintf(path, sizeof path, "%s/save", fixture_run);
    DIR *folder = opendir(path);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        n += entry->d_name[0] != '.';
    }
    closedir(folder);
    assert_int_equal(n, 1);
}

/* A child saves and dies at its n-th call, for every n. Returns the number of calls. */
static long sweep_deaths(uint64_t new_step, bool no_swap, bool lose)
{
    for (long n = 1;; n++) {
        begin_run();
        fflush(NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            machine.no_swap = no_swap;
            machine.at = n;
            machine.die = true;
            machine.lose = lose;
            machine.on = true;
            _exit(fixture_write(new_step, NEW_SEED, 1) == STATUS_OK ? 0 : 1);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_true(WEXITSTATUS(status) == KILLED || WEXITSTATUS(status) == 0);
        bool finished = WEXITSTATUS(status) == 0;
        check_whole(new_step, finished, n < 8);
        check_next_save();
        if (finished) {
            return n - 1;
        }
        assert_true(n < 200);
    }
}

static void test_killed_at_every_call(void **state)
{
    (void)state;
    assert_true(sweep_deaths(2, false, false) > 20);
    assert_true(sweep_deaths(OLD_STEP, false, false) > 20);
    assert_true(sweep_deaths(OLD_STEP, true, false) > 20);
}

static void test_power_cut_at_every_call(void **state)
{
    (void)state;
    assert_true(sweep_deaths(2, false, true) > 20);
    assert_true(sweep_deaths(OLD_STEP, false, true) > 20);
    assert_true(sweep_deaths(OLD_STEP, true, true) > 20);
}

static void check_failure_text(int error)
{
    assert_non_null(strstr(fixture_why.text, "rank 0: "));
    assert_non_null(strstr(fixture_why.text, fixture_run)); /* the path */
    assert_non_null(strstr(fixture_why.text, strerrorname_np(error)));
}

/* Call number n fails with this errno, once or for ever, for every n. */
static void sweep_errors(uint64_t new_step, int error, bool for_ever, bool no_swap)
{
    bool struck_any = true;
    for (long n = 1; struck_any; n++) {
        begin_run();
        machine.no_swap = no_swap;
        machine.at = n;
        machine.error = error;
        machine.for_ever = for_ever;
        machine.on = true;
        enum status status = fixture_write(new_step, NEW_SEED, 1);
        machine.on = false;
        struck_any = machine.n >= n;
        calm();
        if (status != STATUS_OK) {
            assert_true(struck_any);
            assert_int_equal(status, status_from_errno(error));
            check_failure_text(error);
        }
        /* For ever failing, what was done cannot be undone either. */
        check_whole(new_step, status == STATUS_OK, status != STATUS_OK && !for_ever);
        check_next_save();
        assert_true(n < 200);
    }
}

static void test_every_call_fails_once(void **state)
{
    (void)state;
    log_quiet(true); /* what cannot be removed is warned about */
    sweep_errors(2, ENOSPC, false, false);
    sweep_errors(OLD_STEP, EIO, false, false);
    sweep_errors(OLD_STEP, EIO, false, true);
    log_quiet(false);
}

static void test_every_call_fails_for_ever(void **state)
{
    (void)state;
    log_quiet(true);
    sweep_errors(2, ENOSPC, true, false);
    sweep_errors(OLD_STEP, EIO, true, false);
    sweep_errors(OLD_STEP, EACCES, true, true);
    log_quiet(false);
}

static void test_no_space_names_bytes(void **state)
{
    (void)state;
    /* the first write of the shard; what is before it: clean, make, create */
    bool found = false;
    for (long n = 1; n < 12 && !found; n++) {
        begin_run();
        machine.at = n;
        machine.error = ENOSPC;
        machine.for_ever = false;
        machine.n = 0;
        machine.on = true;
        log_quiet(true);
        enum status status = fixture_write(2, NEW_SEED, 0);
        log_quiet(false);
        calm();
        found = status == STATUS_NO_SPACE &&
                strstr(fixture_why.text, "cannot write 4096 bytes at byte 0 of ") != NULL &&
                strstr(fixture_why.text, "rank-0.bin: No space left on device (ENOSPC); ") != NULL;
    }
    assert_true(found);
}

/* Interrupted calls and short transfers are not errors. */
static void test_interrupted_and_short(void **state)
{
    (void)state;
    for (int way = 0; way < 2; way++) {
        bool struck_any = true;
        for (long n = 1; struck_any; n++) {
            begin_run();
            machine.at = n;
            machine.error = EINTR;
            machine.short_write = way == 1;
            machine.on = true;
            log_quiet(true);
            enum status status = fixture_write(2, NEW_SEED, 0);
            log_quiet(false);
            struck_any = machine.n >= n;
            calm();
            /* renames and the like are not interruptible: there it may count as an error */
            if (status == STATUS_OK) {
                check_whole(2, true, false);
            } else {
                assert_int_equal(status, STATUS_AGAIN);
                assert_null(strstr(fixture_why.text, "write"));
                assert_null(strstr(fixture_why.text, "sync"));
                assert_null(strstr(fixture_why.text, "open"));
                assert_null(strstr(fixture_why.text, "read"));
                check_whole(2, false, true);
            }
        }
    }
}

/* The same seam from outside: the fault point `io`. */
static void test_fault_point(void **state)
{
    (void)state;
    fault_here(0, 0, PHASE_SAVE);
    log_quiet(true);
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        bool fired = true;
        for (int n = 1; fired; n++) {
            char spec[64], unfired[160];
            begin_run();
            snprintf(spec, sizeof spec, "io:nth=%d%s", n, for_ever ? ",repeat=0" : "");
            assert_ok(fault_arm(spec, &fixture_why));
            enum status status = fixture_write(2, NEW_SEED, 0);
            fired = !fault_unfired(0, unfired, sizeof unfired);
            fault_disarm_all();
            if (status != STATUS_OK) {
                assert_int_equal(status, STATUS_IO);
                check_failure_text(EIO);
                assert_non_null(strstr(fixture_why.text, "on purpose"));
            }
            check_whole(2, status == STATUS_OK, status != STATUS_OK && !for_ever);
            check_next_save();
            assert_true(n < 200);
        }
    }
    log_quiet(false);
}

/* Reading: a call that fails makes the save unusable, and the one before is taken. */
static void test_reads_fail(void **state)
{
    (void)state;
    bool struck_any = true;
    log_quiet(true);
    for (long n = 1; struck_any; n++) {
        begin_run();
        assert_ok(fixture_write(2, NEW_SEED, 0));
        uint64_t step = 0;
        machine.at = n;
        machine.error = EIO;
        machine.on = true;
        enum status status = fixture_load(&step, &loaded);
        machine.on = false;
        struck_any = machine.n >= n;
        calm();
        if (status == STATUS_OK) {
            assert_true(step == (struck_any ? OLD_STEP : 2));
            assert_true(fixture_is(&loaded, struck_any ? OLD_SEED : NEW_SEED));
        } else {
            assert_int_equal(status, STATUS_IO); /* in save_read() */
            check_failure_text(EIO);
        }
        assert_true(n < 300);
    }
    log_quiet(false);
}

/* Allocation number n fails while saving and while loading. */
static void test_every_allocation_fails(void **state)
{
    (void)state;
    log_quiet(true);
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        for (uint64_t n = 1, failures = 1; failures > 0; n++) {
            begin_run();
            int64_t live = heap_live();
            heap_fail(n, for_ever == 1);
            enum status status = fixture_write(2, NEW_SEED, 0);
            failures = heap_failures();
            heap_fail(0, false);
            assert_int_equal(heap_live(), live);
            assert_true(status == STATUS_OK || status == STATUS_OUT_OF_MEMORY);
            assert_true(status == STATUS_OK || failures > 0);
            check_whole(2, status == STATUS_OK, status != STATUS_OK);
            assert_false(fixture_exists("step-2.tmp"));
        }
        begin_run();
        for (uint64_t n = 1, failures = 1; failures > 0; n++) {
            int64_t live = heap_live();
            uint64_t step = 0;
            heap_fail(n, for_ever == 1);
            enum status status = fixture_load(&step, &loaded);
            failures = heap_failures();
            heap_fail(0, false);
            assert_int_equal(heap_live(), live);
            if (status == STATUS_OK) {
                assert_true(failures <= 1); /* one is made up for by a second try */
                assert_true(fixture_is(&loaded, OLD_SEED));
            } else {
                assert_int_equal(status, STATUS_OUT_OF_MEMORY);
            }
        }
    }
    log_quiet(false);
}

int main(void)
{
    alarm(110);
    log_init("test_save_faults", 0, LOG_ERROR);
    fixture_make_run();
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_killed_at_every_call),
        TEST(test_power_cut_at_every_call),
        TEST(test_every_call_fails_once),
        TEST(test_every_call_fails_for_ever),
        TEST(test_no_space_names_bytes),
        TEST(test_interrupted_and_short),
        TEST(test_fault_point),
        TEST(test_reads_fail),
        TEST(test_every_allocation_fails),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    fixture_remove_run();
    return failed;
}
