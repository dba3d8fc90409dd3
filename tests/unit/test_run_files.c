/* `oom` and `events` when the daemon is gone: read from the run's folder.
 * links: base messages proto client */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "client/run_files.h"
#include "proto/oom_file.h"
#include "tests/lib/fake_daemon.h"

static char folder[64], journal[96], control[96], report_path[96];
static struct failure why;

static int set_up(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/ballast-test-XXXXXX");
    if (!mkdtemp(folder))
        return 1;
    snprintf(journal, sizeof journal, "%s/events.jsonl", folder);
    snprintf(control, sizeof control, "%s/control.json", folder);
    snprintf(report_path, sizeof report_path, "%s/oom.pb", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    unlink(journal);
    unlink(control);
    unlink(report_path);
    return rmdir(folder) != 0 || heap_live() != 0;
}

static void write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    fclose(file);
}

/* A run whose socket is gone. */
static void leave_a_run(const char *events)
{
    write_text(control, "{\"socket\":\"/tmp/ballast-nobody-listens-here\"}\n");
    write_text(journal, events);
}

static const char three_events[] =
    "{\"time\":\"2026-01-02T03:04:05.000Z\",\"type\":\"start\",\"step\":0,\"text\":\"begins\"}\n"
    "{\"time\":\"2026-01-02T03:04:06.000Z\",\"type\":\"oom\",\"step\":4,\"rank\":1,\"phase\":"
    "\"backward\",\"generation\":2,\"text\":\"no room\",\"asked_bytes\":4096}\n"
    "{\"time\":\"2026-01-02T03:04:07.000Z\",\"type\":\"end\",\"step\":4,\"text\":\"is over\"}\n";

/* Run a command on the folder; the outputs hold these parts, and `not_out` is not there. */
static void check_folder(const char *command, int code, const char *in_out, const char *not_out,
                         const char *in_err)
{
    char line[256], *out, *err;
    snprintf(line, sizeof line, "%s --run-dir %s", command, folder);
    int got = run_line(line, &out, &err);
    if (got != code || !strstr(out, in_out) || (not_out && strstr(out, not_out)) ||
        !strstr(err, in_err))
        fail_msg("'%s' exited with %d, not %d\nout: %s\nerr: %s", command, got, code, out, err);
    free(out);
    free(err);
}

static void write_report(void)
{
    Ballast__V1__OomReport report = BALLAST__V1__OOM_REPORT__INIT;
    char tensor[] = "losses", cause[] = "capacity";
    report.step = 4;
    report.rank = 1;
    report.phase = BALLAST__V1__PHASE__PHASE_BACKWARD;
    report.tensor = tensor;
    report.cause = cause;
    report.asked_bytes = 4096;
    assert_int_equal(oom_file_write(folder, &report, &why), STATUS_OK);
}

static void oom_answers_after_the_end(void **state)
{
    (void)state;
    leave_a_run(three_events);
    check_folder("oom", 1, "", NULL, "nothing ran out of memory in this run");
    write_report();
    check_folder("oom", 0, "losses", NULL, "the run has ended; read from /tmp/ballast-test-");
    check_folder("oom --json", 0, "{\"report\":{\"step\":4,\"rank\":1,", NULL, "the run has ended");
    write_text(report_path, "\xff");
    check_folder("oom", 1, "", NULL, "is not an out-of-memory report");
}

static void events_answer_after_the_end(void **state)
{
    (void)state;
    leave_a_run(three_events);
    check_folder("events", 0, "no room", NULL, "the run has ended");
    check_folder("events", 0, "begins", NULL, "the run has ended");
    check_folder("events --count 2", 0, "no room", "begins", "the run has ended");
    check_folder("events --after 1 --count 1", 0, "no room", "is over", "the run has ended");
    check_folder("events --after 3 --json", 0, "{\"events\":[]}", NULL, "the run has ended");
    check_folder("events --json", 0, "\"asked_bytes\":4096}", NULL, "the run has ended");
    check_folder("events --follow", 0, "is over", NULL, "the run has ended");
    check_folder("events --follow --json", 0, "\"sequence\":3}\n", NULL, "the run has ended");
}

/* It does not end in `end`: the run was killed, or its daemon is being restarted. */
static void a_run_without_an_end_is_said(void **state)
{
    (void)state;
    leave_a_run("{\"type\":\"start\",\"text\":\"begins\"}\nno event\n{\"type\":\"sa");
    check_folder("events", 0, "begins", NULL, "no socket at /tmp/ballast-nobody");
    struct run_events events;
    assert_int_equal(run_files_events(folder, 0, 50, &events, &why), STATUS_OK);
    assert_int_equal(events.n, 1);
    assert_int_equal(events.items[0]->sequence, 1);
    run_events_fini(&events);
}

/* No events.jsonl: no run was ever here, and that is what is said. */
static void other_folders_are_not_taken_for_runs(void **state)
{
    (void)state;
    check_folder("oom", 3, "", NULL, "control.json; has the run started");
    check_folder("events", 3, "", NULL, "control.json; has the run started");
    leave_a_run(three_events);
    check_folder("status", 3, "", NULL, "no socket at");
}

static void serve_then_close(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    drop(take(fd, &reader));
    frame_reader_fini(&reader);
}

/* It went away between the question and the answer. */
static void the_daemon_leaves_meanwhile(void **state)
{
    (void)state;
    struct server server;
    leave_a_run(three_events);
    write_report();
    start(&server, 1, (serve_connection *const[]){serve_then_close}, NULL);
    char text[160];
    snprintf(text, sizeof text, "{\"socket\":\"%s\"}\n", server.path);
    write_text(control, text);
    check_folder("oom", 0, "losses", NULL, "the run has ended");
    stop(&server);
}

static void survives_every_failed_allocation(void **state)
{
    (void)state;
    write_text(journal, three_events);
    bool failed = true;
    uint64_t n = 0;
    while (failed) {
        struct run_events events = {0};
        heap_fail(++n, false);
        enum status status = run_files_events(folder, 0, 2, &events, &why);
        failed = heap_failures() > 0;
        heap_fail(0, false);
        assert_int_equal(status, failed ? STATUS_OUT_OF_MEMORY : STATUS_OK);
        assert_int_equal(events.n, failed ? 0 : 2);
        run_events_fini(&events);
        assert_int_equal(heap_live(), 0);
    }
    assert_true(n > 20);
}

int main(void)
{
    json_use_heap();
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(oom_answers_after_the_end),
        TEST(events_answer_after_the_end),
        TEST(a_run_without_an_end_is_said),
        TEST(other_folders_are_not_taken_for_runs),
        TEST(the_daemon_leaves_meanwhile),
        TEST(survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
