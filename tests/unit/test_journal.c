/* events.jsonl: continuing, torn ends, full disks. And the history beside it.
 * links: base proto daemon */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <signal.h>
#include <unistd.h>
#include "daemon/history.h"
#include "daemon/journal.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/event.h"
#include "proto/frame.h"
#include "proto/json.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static char folder[64], path[128];
static struct history history;
static struct journal journal;

static int setup(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/ballast-test-XXXXXX");
    if (!mkdtemp(folder))
        return 1;
    snprintf(path, sizeof path, "%s/events.jsonl", folder);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

static void open_all(void)
{
    struct failure why;
    assert_int_equal(history_init(&history, &why), STATUS_OK);
    assert_int_equal(journal_open(&journal, folder, &history, &why), STATUS_OK);
}

static void close_all(void)
{
    journal_close(&journal);
    history_fini(&history);
}

static Ballast__V1__Event *new_event(const char *type, const char *details)
{
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    char time[] = "2026-01-02T03:04:05.678Z", text[] = "a \"text\"\nof two lines";
    event.time = time;
    event.type = (char *)type;
    event.step = 12;
    event.rank = -1;
    event.text = text;
    event.details_json = (char *)details;
    event.sequence = journal.next_sequence++;
    Ballast__V1__Event *copy = event_copy(&event);
    assert_non_null(copy);
    return copy;
}

static void record(const char *type)
{
    history_add_event(&history, new_event(type, ""));
    assert_int_equal(journal_catch_up(&journal, &history), STATUS_OK);
}

static size_t read_file(char *text, size_t room)
{
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    size_t n = fread(text, 1, room - 1, file);
    text[n] = '\0';
    fclose(file);
    return n;
}

static void write_file(const char *text, const char *mode)
{
    FILE *file = fopen(path, mode);
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    fclose(file);
}

static void test_continues(void **state)
{
    (void)state;
    open_all();
    assert_int_equal(journal.next_sequence, 1);
    record("start");
    record("save");
    assert_int_equal(journal_sync(&journal), STATUS_OK);
    close_all();
    open_all();
    assert_int_equal(journal.next_sequence, 3);
    assert_string_equal(journal.started, "2026-01-02T03:04:05.678Z");
    assert_int_equal(history.events.count, 2);
    assert_string_equal(history_event(&history, 1)->type, "save");
    assert_int_equal(history_event(&history, 1)->sequence, 2);
    record("end");
    close_all();
    char text[2048];
    size_t n = read_file(text, sizeof text);
    assert_int_equal(text[n - 1], '\n');
    int n_lines = 0;
    for (size_t i = 0; i < n; i++)
        n_lines += text[i] == '\n';
    assert_int_equal(n_lines, 3);
    assert_int_equal(heap_live(), 0);
}

/* Cut the file at every byte: whole lines survive, nothing else is left, and it goes on. */
static void test_torn(void **state)
{
    (void)state;
    char whole[2048], text[4096];
    open_all();
    record("start");
    record("save");
    close_all();
    size_t n = read_file(whole, sizeof whole);
    size_t first = (size_t)(strchr(whole, '\n') - whole) + 1;
    for (size_t cut = 0; cut <= n; cut++) {
        char part[2048];
        memcpy(part, whole, cut);
        part[cut] = '\0';
        write_file(part, "we");
        open_all();
        /* A line that lacks only its newline is whole. */
        uint64_t expected = cut + 1 >= n ? 2 : cut + 1 >= first ? 1 : 0;
        assert_int_equal(history.events.count, expected);
        assert_int_equal(journal.next_sequence, expected + 1);
        record("end");
        close_all();
        size_t length = read_file(text, sizeof text);
        assert_int_equal(text[length - 1], '\n');
        uint64_t n_lines = 0;
        for (size_t i = 0; i < length; i++)
            n_lines += text[i] == '\n';
        assert_int_equal(n_lines, expected + 1);
    }
    /* A bad line in the middle is passed over but counted. */
    write_file("{\"type\":\"start\"}\nnonsense\n{\"type\":\"save\"}\n", "we");
    open_all();
    assert_int_equal(history.events.count, 2);
    assert_int_equal(journal.next_sequence, 4);
    assert_int_equal(history_newest_event(&history)->sequence, 3);
    close_all();
    assert_int_equal(heap_live(), 0);
}

/* A full disk (here: a limit on the file's size): no half lines, caught up with later. */
static void test_full_disk(void **state)
{
    (void)state;
    signal(SIGXFSZ, SIG_IGN);
    open_all();
    record("start");
    off_t size = journal.size;
    struct rlimit old, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit = old;
    limit.rlim_cur = (rlim_t)size + 20;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    history_add_event(&history, new_event("save", ""));
    history_add_event(&history, new_event("end", ""));
    assert_int_not_equal(journal_catch_up(&journal, &history), STATUS_OK);
    assert_true(journal.broken);
    assert_int_equal(lseek(journal.fd, 0, SEEK_END), size);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(journal_catch_up(&journal, &history), STATUS_OK);
    assert_false(journal.broken);
    assert_int_equal(journal.written_sequence, 3);
    close_all();
    open_all();
    assert_int_equal(history.events.count, 3);
    close_all();
}

static void test_not_a_file(void **state)
{
    (void)state;
    struct failure why;
    assert_int_equal(history_init(&history, &why), STATUS_OK);
    assert_int_equal(symlink("/dev/null", path), 0);
    assert_int_not_equal(journal_open(&journal, folder, &history, &why), STATUS_OK);
    assert_int_equal(journal.fd, -1);
    assert_int_not_equal(journal_open(&journal, "/nonexistent", &history, &why), STATUS_OK);
    history_fini(&history);
}

static void test_no_memory(void **state)
{
    (void)state;
    uint64_t nth = 0;
    for (bool failed = true; failed;) {
        struct failure why;
        write_file("{\"type\":\"start\"}\n", "we");
        nth++;
        heap_fail(nth, nth % 2);
        enum status status = history_init(&history, &why);
        if (status == STATUS_OK) {
            status = journal_open(&journal, folder, &history, &why);
            if (status == STATUS_OK) {
                /* A line that could not be read is passed over, never fatal. */
                assert_true(history.events.count <= 1);
                Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
                event.sequence = journal.next_sequence++;
                event.type = (char *)"save";
                Ballast__V1__Event *copy = event_copy(&event);
                if (copy) {
                    history_add_event(&history, copy);
                    if (journal_catch_up(&journal, &history) != STATUS_OK)
                        assert_true(journal.broken);
                }
                journal_close(&journal);
            }
            history_fini(&history);
        }
        failed = heap_failures() > 0;
        heap_fail(0, false);
        assert_int_equal(heap_live(), 0);
    }
    assert_true(nth > 8);
}

static void test_history(void **state)
{
    (void)state;
    struct failure why;
    assert_int_equal(history_init(&history, &why), STATUS_OK);
    assert_null(history_newest_step(&history));
    for (uint64_t step = 0; step < HISTORY_CAPACITY + 100; step++) {
        Ballast__V1__StepRecord record = BALLAST__V1__STEP_RECORD__INIT;
        uint8_t bytes[64];
        record.step = step;
        size_t n = ballast__v1__step_record__pack(&record, bytes);
        ProtobufCMessage *copy = NULL;
        assert_int_equal(frame_decode(&ballast__v1__step_record__descriptor, bytes, n, &copy),
                         STATUS_OK);
        history_add_step(&history, (Ballast__V1__StepRecord *)copy);
    }
    assert_int_equal(history.steps.count, HISTORY_CAPACITY);
    assert_int_equal(history_step(&history, 0)->step, 100);
    assert_int_equal(history_newest_step(&history)->step, HISTORY_CAPACITY + 99);
    assert_int_equal(history_find_step(&history, 0), 0);
    assert_int_equal(history_find_step(&history, 150), 50);
    assert_int_equal(history_find_step(&history, 1 << 20), HISTORY_CAPACITY);
    assert_null(history_step(&history, HISTORY_CAPACITY));
    /* Large events are bounded by their bytes. */
    char *text = calloc(1, 60001);
    memset(text, 'x', 60000);
    for (uint64_t sequence = 1; sequence <= 400; sequence++) {
        Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
        event.text = text;
        event.sequence = 2 * sequence;
        Ballast__V1__Event *copy = event_copy(&event);
        assert_non_null(copy);
        history_add_event(&history, copy);
        assert_true(history.events.bytes <= HISTORY_MAX_BYTES);
    }
    assert_true(history.events.count > 100 && history.events.count < 150);
    size_t at = history_find_event(&history, 2 * 390);
    assert_int_equal(history_event(&history, at)->sequence, 2 * 391);
    assert_int_equal(history_find_event(&history, 0), 0);
    assert_int_equal(history_find_event(&history, 800), history.events.count);
    free(text);
    history_fini(&history);
    assert_int_equal(heap_live(), 0);
}

int main(void)
{
    json_use_heap();
    log_quiet(true); /* hundreds of torn lines are said */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_continues, setup, teardown),
        cmocka_unit_test_setup_teardown(test_torn, setup, teardown),
        cmocka_unit_test_setup_teardown(test_full_disk, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_a_file, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_memory, setup, teardown),
        cmocka_unit_test(test_history),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
