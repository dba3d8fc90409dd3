/* Starting, linking and ending a real ballastd. See harness.h. */
#include "tests/control/harness.h"

#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "proto/base/units.h"
#include "proto/socket_path.h"
#include "worker/spawn.h"
#include <cmocka.h> /* last: it has a macro `fail` */

const char *harness_ballastd;
bool harness_full;

enum { JOURNAL_BYTES = 16 << 20 };

static int n_harnesses;

void harness_init(struct harness *harness)
{
    struct failure why;
    memset(harness, 0, sizeof *harness);
    for (int i = 0; i < HARNESS_WORLD; i++)
        harness->workers[i].fd = -1;
    snprintf(harness->folder, sizeof harness->folder, "/tmp/ballast-test-XXXXXX");
    assert_non_null(mkdtemp(harness->folder));
    assert_int_equal(setenv("XDG_RUNTIME_DIR", harness->folder, 1), 0);
    snprintf(harness->run_id, sizeof harness->run_id, "run-%d", ++n_harnesses);
    assert_int_equal(socket_path_for_run(harness->run_id, harness->socket_path,
                                         harness->link_path, &why), STATUS_OK);
}

void harness_start(struct harness *harness, bool restarted)
{
    struct spawn_options options = {.run_dir = harness->folder,
                                    .run_id = harness->run_id,
                                    .socket_path = harness->socket_path,
                                    .link_path = harness->link_path,
                                    .restarted = restarted,
                                    .executable = harness_ballastd};
    struct failure why = {.text = ""};
    enum status status = spawn_daemon(&options, &harness->pid, &why);
    if (status != STATUS_OK)
        print_error("%s\n", why.text);
    assert_int_equal(status, STATUS_OK);
}

void harness_link(struct harness *harness, bool restarted)
{
    for (uint32_t rank = 0; rank < HARNESS_WORLD; rank++) {
        struct fake_hello hello = {.link_path = harness->link_path, .run_id = harness->run_id,
                                   .rank = rank, .world_size = HARNESS_WORLD, .n_steps = 1000,
                                   .step = harness->workers[rank].step,
                                   .generation = harness->workers[rank].generation,
                                   .restarted = restarted};
        assert_int_equal(fake_worker_link(&harness->workers[rank], &hello), STATUS_OK);
    }
    assert_int_equal(fake_worker_tell_run(&harness->workers[0], false, "training", true),
                     STATUS_OK);
    struct raw_client client;
    harness_open(harness, &client);
    for (bool heard = false; !heard;) {
        Ballast__Control__V1__Reply *reply = harness_status(&client);
        heard = strcmp(reply->status->doing, "training") == 0;
        frame_free(&reply->base);
    }
    raw_client_close(&client);
}

void harness_begin(struct harness *harness)
{
    harness_init(harness);
    harness_start(harness, false);
    harness_link(harness, false);
}

void harness_end(struct harness *harness)
{
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        assert_int_equal(fake_worker_tell_end(&harness->workers[rank], 0), STATUS_OK);
    for (int rank = 0; rank < HARNESS_WORLD; rank++) {
        bool acknowledged = false;
        while (!acknowledged) {
            Ballast__Link__V1__DaemonMessage *message = NULL;
            assert_int_equal(fake_worker_receive(&harness->workers[rank], 2000, &message),
                             STATUS_OK);
            acknowledged =
                message->body_case == BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_END_ACK;
            frame_free(&message->base);
        }
        /* The acknowledgement says that the journal is complete. */
        char *journal = harness_journal(harness);
        assert_non_null(strstr(journal, "\"type\":\"end\""));
        free(journal);
    }
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        fake_worker_drop(&harness->workers[rank]);
    harness_wait_exit(harness, 2.0, 0);
    harness_fini(harness);
}

double harness_wait_exit(struct harness *harness, double limit_s, int expected_exit)
{
    double start_s = units_monotonic_s();
    int code = -1;
    while (!spawn_reap(harness->pid, &code)) {
        assert_true(units_monotonic_s() - start_s < limit_s);
        harness_pause();
    }
    harness->pid = 0;
    assert_int_equal(code, expected_exit);
    /* Whoever ends cleans up after itself. */
    if (expected_exit == 0)
        assert_int_equal(access(harness->socket_path, F_OK), -1);
    return units_monotonic_s() - start_s;
}

static void remove_folder(const char *folder)
{
    DIR *handle = opendir(folder);
    if (!handle)
        return;
    for (struct dirent *entry; (entry = readdir(handle));) {
        char path[512];
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (lstat(path, &info) == 0 && S_ISDIR(info.st_mode))
            remove_folder(path);
        else
            unlink(path);
    }
    closedir(handle);
    rmdir(folder);
}

void harness_fini(struct harness *harness)
{
    for (int rank = 0; rank < HARNESS_WORLD; rank++)
        fake_worker_drop(&harness->workers[rank]);
    if (harness->pid > 0) {
        kill(harness->pid, SIGKILL);
        while (waitpid(harness->pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    harness->pid = 0;
    remove_folder(harness->folder);
}

void harness_open(struct harness *harness, struct raw_client *out_client)
{
    assert_int_equal(raw_client_open(out_client, harness->socket_path), STATUS_OK);
}

Ballast__Control__V1__Reply *harness_ask(struct raw_client *client,
                                         Ballast__Control__V1__Request *request)
{
    Ballast__Control__V1__Reply *reply = NULL;
    assert_int_equal(raw_client_ask(client, request, &reply), STATUS_OK);
    return reply;
}

Ballast__Control__V1__Reply *harness_status(struct raw_client *client)
{
    Ballast__Control__V1__StatusRequest body = BALLAST__CONTROL__V1__STATUS_REQUEST__INIT;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_STATUS;
    request.status = &body;
    Ballast__Control__V1__Reply *reply = harness_ask(client, &request);
    assert_int_equal(reply->body_case, BALLAST__CONTROL__V1__REPLY__BODY_STATUS);
    return reply;
}

Ballast__Control__V1__Reply *harness_next(struct raw_client *client, uint64_t id)
{
    for (;;) {
        Ballast__Control__V1__Reply *reply = NULL;
        assert_int_equal(raw_client_receive(client, 5000, &reply), STATUS_OK);
        if (reply->id == id)
            return reply;
        frame_free(&reply->base);
    }
}

void harness_expect_error(Ballast__Control__V1__Reply *reply, enum status status,
                          const char *part_of_text)
{
    assert_int_equal(reply->body_case, BALLAST__CONTROL__V1__REPLY__BODY_ERROR);
    assert_false(reply->more);
    assert_string_equal(reply->error->status, status_name(status));
    if (!strstr(reply->error->text, part_of_text))
        print_error("'%s' does not say '%s'\n", reply->error->text, part_of_text);
    assert_non_null(strstr(reply->error->text, part_of_text));
    frame_free(&reply->base);
}

Ballast__Link__V1__DaemonMessage *harness_command(struct harness *harness)
{
    Ballast__Link__V1__DaemonMessage *message = NULL;
    assert_int_equal(fake_worker_receive(&harness->workers[0], 5000, &message), STATUS_OK);
    assert_int_equal(message->body_case, BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_COMMAND);
    return message;
}

char *harness_journal(const struct harness *harness)
{
    char path[128];
    snprintf(path, sizeof path, "%s/events.jsonl", harness->folder);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    char *text = malloc(JOURNAL_BYTES);
    assert_non_null(text);
    size_t n = fread(text, 1, JOURNAL_BYTES - 1, file);
    text[n] = '\0';
    fclose(file);
    return text;
}

void harness_wait_step(struct raw_client *client, uint64_t step)
{
    Ballast__Control__V1__WaitRequest body = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    body.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_STEP;
    body.step = step;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_WAIT;
    request.wait = &body;
    Ballast__Control__V1__Reply *reply = harness_ask(client, &request);
    assert_int_equal(reply->body_case, BALLAST__CONTROL__V1__REPLY__BODY_WAIT);
    assert_true(reply->wait->step >= step);
    frame_free(&reply->base);
}

void harness_pause(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 5 * 1000 * 1000}, NULL);
}

int harness_count_descriptors(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *handle = opendir(path);
    assert_non_null(handle);
    int count = 0;
    while (readdir(handle))
        count++;
    closedir(handle);
    return count - 2;
}

uint64_t harness_resident(pid_t pid)
{
    char path[64];
    unsigned long long size = 0, resident = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%llu %llu", &size, &resident), 2);
    fclose(file);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}
