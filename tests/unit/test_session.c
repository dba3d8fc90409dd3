/* Sessions of ballastctl against a small server in a thread of this process: greeting, versions,
 * deadlines, refusals, garbage, torn frames, failing allocations.
 * links: base messages proto client */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "tests/lib/fake_daemon.h"

static void serve_status(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    assert_int_equal(request->body_case, BALLAST__CONTROL__V1__REQUEST__BODY_STATUS);
    /* Somebody else's reply first: it is not for this request. */
    give_error(fd, request->id + 1000, "REFUSED", "not yours");
    give_status(fd, request->id);
    drop(request);
    frame_reader_fini(&reader);
}

static void status_is_answered(void **state)
{
    (void)state;
    CHECK("status", serve_status, 0, "41 of 100 steps", "");
    CHECK("--json status", serve_status, 0, "\"run_id\":\"test-run\"", "");
}

static void serve_other_version(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    drop(take(fd, &reader));
    give_hello(fd, 2);
    frame_reader_fini(&reader);
}

static void serve_refusal_of_version(int fd, void *data)
{
    (void)data;
    give_error(fd, 0, "VERSION", "this daemon speaks 2.0");
}

static void serve_no_permission(int fd, void *data)
{
    (void)data;
    give_error(fd, 0, "PERMISSION", "uid 7 may not");
}

static void versions_and_permission_are_5(void **state)
{
    (void)state;
    CHECK("status", serve_other_version, 5, "", "speaks protocol 2.0, this client 1.0");
    CHECK("status", serve_refusal_of_version, 5, "", "this daemon speaks 2.0");
    CHECK("status", serve_no_permission, 5, "", "uid 7 may not");
    CHECK("status --json", serve_no_permission, 5, "{\"error\":{\"status\":\"PERMISSION\"",
          "uid 7");
    CHECK("status", serve_too_many, 3, "", "64 clients are connected already");
}

/* Greets, takes everything, answers nothing; returns when the client has gone. */
static void serve_silence(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    for (request_message *request; (request = take(fd, &reader)) != NULL;)
        drop(request);
    frame_reader_fini(&reader);
}

/* Not even a greeting. */
static void serve_nothing(int fd, void *data)
{
    (void)data;
    uint8_t byte;
    while (recv(fd, &byte, 1, 0) > 0)
        continue;
}

static void silence_is_4(void **state)
{
    (void)state;
    double began = units_monotonic_s();
    CHECK("status --timeout 0.1", serve_silence, 4, "", "no answer from");
    CHECK("status --timeout 0.1", serve_nothing, 4, "", "no answer from");
    CHECK("events -f --timeout 0.1", serve_silence, 4, "", "no answer from");
    CHECK("watch --timeout 0.1", serve_silence, 4, "", "no answer from");
    CHECK("wait --for end --timeout 0.1", serve_silence, 4, "", "no answer from");
    assert_true(units_monotonic_s() - began < 5.0);
}

static void serve_refused(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    give_error(fd, request->id, "OUT_OF_RANGE",
               "checkpointing.layers=9: this model has 4 layers\033[2J");
    drop(request);
    frame_reader_fini(&reader);
}

static void serve_refused_after_acceptance(int fd, void *data)
{
    (void)data;
    struct frame_reader reader = {0};
    greet(fd, &reader);
    request_message *request = take(fd, &reader);
    give_command(fd, request->id, true);
    give_error(fd, request->id, "DOES_NOT_FIT", "needs 3 GiB of 2 GiB");
    drop(request);
    frame_reader_fini(&reader);
}

static void refusals_are_1(void **state)
{
    (void)state;
    /* Escaped: what a daemon says never reaches the terminal raw. */
    CHECK("set checkpointing.layers=9", serve_refused, 1, "", "4 layers\\x1b[2J\n");
    CHECK("set a=b --wait --json", serve_refused, 1, "{\"error\":{\"status\":\"OUT_OF_RANGE\"",
          "4 layers");
    CHECK("set zero.stage=0 --wait", serve_refused_after_acceptance, 1, "", "needs 3 GiB of 2 GiB");
}

/* Raw bytes in place of a greeting, or behind one. */
struct bytes {
    const char *bytes;
    size_t n;
    bool after_hello;
};

static void serve_bytes(int fd, void *data)
{
    const struct bytes *raw = data;
    struct frame_reader reader = {0};
    if (raw->after_hello) {
        greet(fd, &reader);
        drop(take(fd, &reader));
    }
    (void)!send(fd, raw->bytes, raw->n, MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    for (request_message *request; (request = take(fd, &reader)) != NULL;)
        drop(request);
    frame_reader_fini(&reader);
}

static void garbage_is_3(void **state)
{
    (void)state;
#define RAW(text, after)                                                                           \
    {                                                                                              \
        text, sizeof(text) - 1, after                                                              \
    }
    static const struct bytes cases[] = {
        RAW("HTTP/1.1 400 Bad Request\r\n\r\n", false),
        RAW("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", false), /* no varint */
        RAW("\x81\x08", false),             /* 1025 bytes before the greeting */
        RAW("\x03\x12\x01", false),         /* closed inside a frame */
        RAW("\x02\x08\x01", false),         /* a reply without a body */
        RAW("\x02\x2a\x00", false),         /* a status in place of a greeting */
        RAW("\x04\x22\x02\x0a\x00", false), /* a greeting without its magic word */
        RAW("", false),
        RAW("\x81\x80\x04", true), /* over 64 KiB */
        RAW("\x05hello", true),
        RAW("\x04\x08\x02\x22\x00", true), /* id 2: a greeting in place of a status */
        RAW("\x7f", true),
        RAW("", true),
    };
#undef RAW
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct server server;
        char *out, *err;
        start(&server, 1, (serve_connection *const[]){serve_bytes}, (void *)&cases[i]);
        int code = run(&server, "status --timeout 5", &out, &err);
        stop(&server);
        if (code != 3 || *out || strncmp(err, "ballastctl: ", 12) != 0 || strlen(err) < 30)
            fail_msg("case %zu exited with %d\nout: %s\nerr: %s", i, code, out, err);
        free(out);
        free(err);
    }
}

/* Every byte alone: greeting and answer arrive in as many pieces as can be. */
static void serve_in_pieces(int fd, void *data)
{
    (void)data;
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    struct frame_reader reader = {0};
    drop(take(fd, &reader));
    reader.max_bytes = FRAME_MAX_BYTES;
    give_hello(pair[0], 1);
    request_message *request = NULL;
    uint8_t byte;
    for (int part = 0; part < 2; part++) {
        while (recv(pair[1], &byte, 1, MSG_DONTWAIT) == 1) {
            (void)!send(fd, &byte, 1, MSG_NOSIGNAL);
            struct timespec moment = {.tv_nsec = 100000};
            nanosleep(&moment, NULL);
        }
        if (part == 0) {
            request = take(fd, &reader);
            give_status(pair[0], request->id);
        }
    }
    drop(request);
    frame_reader_fini(&reader);
    close(pair[0]);
    close(pair[1]);
}

static void torn_frames_are_put_together(void **state)
{
    (void)state;
    CHECK("status", serve_in_pieces, 0, "41 of 100 steps", "");
}

/* Answers made beforehand, so that the server allocates nothing while the client may not. */
struct canned {
    uint8_t *bytes[2];
    size_t n[2];
};

static void serve_canned(int fd, void *data)
{
    const struct canned *canned = data;
    uint8_t bytes[4096];
    for (int i = 0; i < 2 && recv(fd, bytes, sizeof bytes, 0) > 0; i++)
        (void)!send(fd, canned->bytes[i], canned->n[i], MSG_NOSIGNAL);
    while (recv(fd, bytes, sizeof bytes, 0) > 0)
        continue;
}

static void make_canned(struct canned *canned)
{
    Ballast__V1__Hello hello = BALLAST__V1__HELLO__INIT;
    hello.magic = (char *)"ballast";
    hello.major = 1;
    reply_message reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.id = 1;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_HELLO;
    reply.hello = &hello;
    assert_int_equal(frame_encode(&reply.base, &canned->bytes[0], &canned->n[0]), STATUS_OK);
    Ballast__Control__V1__StatusReply status;
    Ballast__V1__Setting setting = BALLAST__V1__SETTING__INIT, *settings[] = {&setting};
    make_status(&status, &reply, 2);
    setting.key = (char *)"checkpointing";
    setting.value = (char *)"block:2";
    status.strategy = settings;
    status.n_strategy = 1;
    assert_int_equal(frame_encode(&reply.base, &canned->bytes[1], &canned->n[1]), STATUS_OK);
}

/* Allocation number 1, 2, 3, ... fails, once or from there on for ever, until a run needs fewer:
 * each ends with a clean code, says why, and leaks nothing. */
static void sweep(const char *command, bool for_ever, struct canned *canned)
{
    for (uint64_t nth = 1;; nth++) {
        struct server server;
        start(&server, 1, (serve_connection *const[]){serve_canned}, canned);
        int64_t live = heap_live();
        char *out, *err;
        heap_fail(nth, for_ever);
        int code = run(&server, command, &out, &err);
        bool failed = heap_failures() > 0;
        heap_fail(0, false);
        if (!failed) {
            /* A client that never came would leave the server waiting; this one did. */
            assert_int_equal(code, 0);
        } else if (code != 1 || !strstr(err, "out of memory")) {
            fail_msg("allocation %llu: code %d\nout: %s\nerr: %s", (unsigned long long)nth, code,
                     out, err);
        }
        assert_int_equal(heap_live(), live);
        free(out);
        free(err);
        /* The first allocations come before the connection: let the server have one. */
        if (nth <= 2 && failed) {
            int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
            struct sockaddr_un address = {.sun_family = AF_UNIX};
            strcpy(address.sun_path, server.path);
            (void)!connect(fd, (struct sockaddr *)&address, sizeof address);
            close(fd);
        }
        stop(&server);
        if (!failed)
            return;
        assert_true(nth < 2000);
    }
}

static void failing_allocations_end_cleanly(void **state)
{
    (void)state;
    struct canned canned;
    make_canned(&canned);
    sweep("status", false, &canned);
    sweep("status", true, &canned);
    sweep("status --json", false, &canned);
    sweep("status --json", true, &canned);
    heap_free(canned.bytes[0]);
    heap_free(canned.bytes[1]);
}

int main(void)
{
    json_use_heap();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_is_answered),
        cmocka_unit_test(versions_and_permission_are_5),
        cmocka_unit_test(silence_is_4),
        cmocka_unit_test(refusals_are_1),
        cmocka_unit_test(garbage_is_3),
        cmocka_unit_test(torn_frames_are_put_together),
        cmocka_unit_test(failing_allocations_end_cleanly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
