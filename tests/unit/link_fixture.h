/* The daemon's side of a link, as test_link plays it: a listener, one peer, messages both ways.
 *
 * Included once, after cmocka.h. */
#ifndef BALLAST_TESTS_UNIT_LINK_FIXTURE_H
#define BALLAST_TESTS_UNIT_LINK_FIXTURE_H

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/frame.h"
#include "proto/link.pb-c.h"

#define BODY(name) BALLAST__LINK__V1__WORKER_MESSAGE__BODY_##name

enum { PATIENCE_MS = 8000 };
static const double patience_s = PATIENCE_MS / 1000.0;

typedef Ballast__Link__V1__WorkerMessage worker_message;

static char folder[] = "/tmp/ballast-link-XXXXXX";
static char path[sizeof folder + 16];

static int listener = -1;
static int peer = -1;
static struct frame_reader reader;

static int listen_at_path(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    unlink(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(fd, 8) != 0) {
        abort();
    }
    return fd;
}

static void close_fd(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
    }
    *fd = -1;
}

static bool readable(int fd, double until_s)
{
    double left_s = until_s - units_monotonic_s();
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    return left_s > 0 && poll(&polled, 1, (int)(left_s * 1000) + 1) == 1;
}

static void accept_peer(void)
{
    close_fd(&peer);
    frame_reader_fini(&reader);
    reader.max_bytes = FRAME_MAX_BYTES;
    assert_true(readable(listener, units_monotonic_s() + patience_s));
    peer = accept(listener, NULL, NULL);
    assert_true(peer >= 0);
}

/* The next message, NULL when none came in time or the connection ended. */
static worker_message *read_message(double until_s)
{
    for (;;) {
        const uint8_t *bytes;
        size_t n;
        enum status status = frame_reader_next(&reader, &bytes, &n);
        if (status == STATUS_OK) {
            ProtobufCMessage *message;
            assert_int_equal(
                frame_decode(&ballast__link__v1__worker_message__descriptor, bytes, n, &message),
                STATUS_OK);
            return (worker_message *)message;
        }
        assert_int_equal(status, STATUS_AGAIN);
        uint8_t buffer[8192];
        ssize_t got = readable(peer, until_s) ? recv(peer, buffer, sizeof buffer, 0) : 0;
        if (got <= 0) {
            return NULL;
        }
        assert_int_equal(frame_reader_feed(&reader, buffer, (size_t)got), STATUS_OK);
    }
}

static void free_message(worker_message *message)
{
    frame_free(&message->base);
}

/* The next message of this kind; others are passed over. */
static worker_message *expect(Ballast__Link__V1__WorkerMessage__BodyCase body)
{
    double until_s = units_monotonic_s() + patience_s;
    for (;;) {
        worker_message *message = read_message(until_s);
        assert_non_null(message);
        if (message->body_case == body) {
            return message;
        }
        free_message(message);
    }
}

static void tell(const Ballast__Link__V1__DaemonMessage *message)
{
    uint8_t *bytes;
    size_t n;
    assert_int_equal(frame_encode(&message->base, &bytes, &n), STATUS_OK);
    assert_int_equal(send(peer, bytes, n, MSG_NOSIGNAL), n);
    heap_free(bytes);
}

static void tell_ready(const char *error)
{
    char text[64];
    snprintf(text, sizeof text, "%s", error);
    Ballast__Link__V1__LinkReady ready = BALLAST__LINK__V1__LINK_READY__INIT;
    ready.error = text;
    Ballast__Link__V1__DaemonMessage message = BALLAST__LINK__V1__DAEMON_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_READY;
    message.ready = &ready;
    tell(&message);
}

static void tell_command(Ballast__Link__V1__Command *command)
{
    Ballast__Link__V1__DaemonMessage message = BALLAST__LINK__V1__DAEMON_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_COMMAND;
    message.command = command;
    tell(&message);
}

static void tell_set(uint64_t id, bool dry_run)
{
    Ballast__Link__V1__SetCommand set = BALLAST__LINK__V1__SET_COMMAND__INIT;
    set.dry_run = dry_run;
    Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
    command.id = id;
    command.body_case = BALLAST__LINK__V1__COMMAND__BODY_SET;
    command.set = &set;
    tell_command(&command);
}

static void tell_simple(uint64_t id, const char *verb)
{
    char text[16];
    snprintf(text, sizeof text, "%s", verb);
    Ballast__Link__V1__SimpleCommand simple = BALLAST__LINK__V1__SIMPLE_COMMAND__INIT;
    simple.verb = text;
    Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
    command.id = id;
    command.body_case = BALLAST__LINK__V1__COMMAND__BODY_SIMPLE;
    command.simple = &simple;
    tell_command(&command);
}

#endif
