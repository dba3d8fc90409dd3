/* A link between its two sides, for the tests of links: the daemon's, a listener with one peer and
 * messages both ways, and the worker's, what it calls and is called for.
 *
 * Included once and last: it includes cmocka.h. */
#ifndef BALLAST_TESTS_UNIT_LINK_FIXTURE_H
#define BALLAST_TESTS_UNIT_LINK_FIXTURE_H

#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "proto/frame.h"
#include "proto/link.pb-c.h"
#include "worker/link.h"
#include <cmocka.h> /* last: it has a macro `fail` */

#define BODY(name) BALLAST__LINK__V1__WORKER_MESSAGE__BODY_##name

enum { PATIENCE_MS = 8000 };
static const double patience_s = PATIENCE_MS / 1000.0;

typedef Ballast__Link__V1__WorkerMessage worker_message;

static char folder[] = "/tmp/ballast-link-XXXXXX";
static char path[sizeof folder + 16];

static int listener = -1;
static int peer = -1;
static struct frame_reader reader;

static inline int listen_at_path(void)
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

static inline void close_fd(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
    }
    *fd = -1;
}

static inline bool readable(int fd, double until_s)
{
    double left_s = until_s - units_monotonic_s();
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    return left_s > 0 && poll(&polled, 1, (int)(left_s * 1000) + 1) == 1;
}

static inline void accept_peer(void)
{
    close_fd(&peer);
    frame_reader_fini(&reader);
    reader.max_bytes = FRAME_MAX_BYTES;
    assert_true(readable(listener, units_monotonic_s() + patience_s));
    peer = accept(listener, NULL, NULL);
    assert_true(peer >= 0);
}

/* The next message, NULL when none came in time or the connection ended. */
static inline worker_message *read_message(double until_s)
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

static inline void free_message(worker_message *message)
{
    frame_free(&message->base);
}

/* The next message of this kind; others are passed over. */
static inline worker_message *expect(Ballast__Link__V1__WorkerMessage__BodyCase body)
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

static inline void tell(const Ballast__Link__V1__DaemonMessage *message)
{
    uint8_t *bytes;
    size_t n;
    assert_int_equal(frame_encode(&message->base, &bytes, &n), STATUS_OK);
    assert_int_equal(send(peer, bytes, n, MSG_NOSIGNAL), n);
    heap_free(bytes);
}

static inline void tell_ready(const char *error)
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

static inline void tell_command(Ballast__Link__V1__Command *command)
{
    Ballast__Link__V1__DaemonMessage message = BALLAST__LINK__V1__DAEMON_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_COMMAND;
    message.command = command;
    tell(&message);
}

static inline void tell_set(uint64_t id, bool dry_run)
{
    Ballast__Link__V1__SetCommand set = BALLAST__LINK__V1__SET_COMMAND__INIT;
    set.dry_run = dry_run;
    Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
    command.id = id;
    command.body_case = BALLAST__LINK__V1__COMMAND__BODY_SET;
    command.set = &set;
    tell_command(&command);
}

static inline void tell_simple(uint64_t id, const char *verb)
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

/* The body of a thread: read until the end, acknowledge it, give its exit code. NULL: none came. */
static inline void *acknowledge(void *out_code)
{
    double until_s = units_monotonic_s() + patience_s;
    for (;;) {
        worker_message *message = read_message(until_s);
        if (message == NULL) {
            return NULL;
        }
        bool end = message->body_case == BODY(END);
        if (end) {
            *(uint32_t *)out_code = message->end->exit_code;
        }
        free_message(message);
        if (end) {
            break;
        }
    }
    Ballast__Link__V1__EndAck ack = BALLAST__LINK__V1__END_ACK__INIT;
    Ballast__Link__V1__DaemonMessage message = BALLAST__LINK__V1__DAEMON_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_END_ACK;
    message.end_ack = &ack;
    tell(&message);
    return out_code;
}

static struct failure why;
static struct telemetry telemetry;
static struct comm comm;
static struct link *rank_link;

/* ---- the worker's side ---- */

static _Atomic int n_restarts;
static _Atomic bool restart_works;
static _Atomic int restarted_listener;
static int restarted_event;
static _Atomic int n_plans;
static pthread_t main_thread;
static _Atomic bool plan_on_main_thread;

static inline void fill_hello(void *user, Ballast__Link__V1__WorkerHello *hello)
{
    static char run_dir[] = "/runs/one", run_id[] = "one";
    assert_ptr_equal(user, &telemetry);
    hello->run_dir = run_dir;
    hello->hello->run_id = run_id;
    hello->n_steps = 100;
    hello->generation = 3;
}

static inline void answer_plan(void *user, const Ballast__Link__V1__Command *command,
                        Ballast__Link__V1__CommandResult *result)
{
    static char text[] = "it would fit";
    (void)user;
    (void)command;
    result->text = text;
    atomic_store(&plan_on_main_thread, pthread_equal(pthread_self(), main_thread) != 0);
    atomic_fetch_add(&n_plans, 1);
}

static inline enum status restart_daemon(void *user, struct failure *reason)
{
    (void)user;
    atomic_fetch_add(&n_restarts, 1);
    if (!atomic_load(&restart_works)) {
        return (fail)(reason, STATUS_IO, "no daemon today"); /* not cmocka's macro */
    }
    atomic_store(&restarted_listener, listen_at_path());
    uint64_t one = 1;
    assert_int_equal(write(restarted_event, &one, sizeof one), sizeof one);
    return STATUS_OK;
}

static inline void start_link(uint32_t rank)
{
    struct link_options options = {
        .path = path,
        .rank = rank,
        .world_size = 4,
        .telemetry = &telemetry,
        .comm = &comm,
        .fill_hello = fill_hello,
        .answer_plan = answer_plan,
        .restart_daemon = restart_daemon,
        .user = &telemetry,
    };
    telemetry.wake_fd = -1;
    assert_int_equal(link_start(&options, &rank_link, &why), STATUS_OK);
    assert_true(telemetry.wake_fd >= 0);
}

/* A link that is through the greeting. */
static inline void start_greeted(uint32_t rank)
{
    listener = listen_at_path();
    start_link(rank);
    accept_peer();
    free_message(expect(BODY(HELLO)));
    tell_ready("");
    free_message(expect(BODY(RANK)));
}

static inline void send_event(uint64_t step)
{
    static char type[] = "save";
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    event.type = type;
    event.step = step;
    worker_message message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BODY(EVENT);
    message.event = &event;
    link_send(rank_link, &message);
}

static inline void send_step(uint64_t step)
{
    Ballast__V1__StepRecord record = BALLAST__V1__STEP_RECORD__INIT;
    record.step = step;
    worker_message message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BODY(STEP);
    message.step = &record;
    link_send(rank_link, &message);
}

static inline int set_up(void **state)
{
    (void)state;
    memset(&telemetry, 0, sizeof telemetry);
    atomic_store(&telemetry.layer, -1);
    comm_dry_init(&comm, 0, 4);
    atomic_store(&n_restarts, 0);
    atomic_store(&n_plans, 0);
    atomic_store(&restart_works, true);
    return 0;
}

static inline int tear_down(void **state)
{
    (void)state;
    link_stop(rank_link);
    rank_link = NULL;
    close_fd(&peer);
    close_fd(&listener);
    frame_reader_fini(&reader);
    unlink(path);
    return heap_live() == 0 ? 0 : -1;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

/* Around all tests of a program; false when there is no folder for the socket. */
static inline bool begin_links(const char *program)
{
    alarm(110);
    log_init(program, -1, LOG_ERROR);
    main_thread = pthread_self();
    restarted_event = eventfd(0, EFD_CLOEXEC);
    bool made = mkdtemp(folder) != NULL;
    snprintf(path, sizeof path, "%s/link.sock", folder);
    return made;
}

/* Returns n_failed. */
static inline int end_links(int n_failed)
{
    rmdir(folder);
    close(restarted_event);
    return n_failed;
}

#endif
