/* A small daemon in a thread of a test's own process, for the client's tests: it listens, does to
 * each connection what the test says, and closes. All inline, so that only the tests that use it
 * need what it calls (links: base messages proto client).
 *
 * Every wait of the server is bounded; start() and stop() come in pairs. */
#ifndef BALLAST_TESTS_FAKE_DAEMON_H
#define BALLAST_TESTS_FAKE_DAEMON_H

#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>
#include "client/verbs.h"
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/frame.h"
#include "proto/json.h"
/* Last: its fail() is a macro. */
#include <cmocka.h>

typedef Ballast__Control__V1__Reply reply_message;
typedef Ballast__Control__V1__Request request_message;

enum { MAX_CONNECTIONS = 3, SERVER_PATIENCE_S = 10 };

/* What the server does with one accepted connection; it is closed afterwards. */
typedef void serve_connection(int fd, void *data);

struct server {
    char folder[40], path[80];
    int listen_fd;
    pthread_t thread;
    serve_connection *serve[MAX_CONNECTIONS];
    size_t n_connections;
    void *data;
};

static inline void *server_main(void *argument)
{
    struct server *server = argument;
    for (size_t i = 0; i < server->n_connections; i++) {
        struct pollfd entry = {.fd = server->listen_fd, .events = POLLIN};
        if (poll(&entry, 1, SERVER_PATIENCE_S * 1000) != 1)
            break;
        int fd = accept(server->listen_fd, NULL, NULL);
        struct timeval patience = {.tv_sec = SERVER_PATIENCE_S};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        if (server->serve[i])
            server->serve[i](fd, server->data);
        close(fd);
    }
    /* Whoever comes now finds nobody. */
    close(server->listen_fd);
    return NULL;
}

static inline void start_listening(struct server *server)
{
    strcpy(server->folder, "/tmp/ballast-test-XXXXXX");
    assert_non_null(mkdtemp(server->folder));
    snprintf(server->path, sizeof server->path, "%s/s", server->folder);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, server->path);
    server->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(server->listen_fd >= 0);
    assert_int_equal(bind(server->listen_fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(server->listen_fd, 8), 0);
}

static inline void start(struct server *server, size_t n, serve_connection *const *serve,
                         void *data)
{
    *server = (struct server){.n_connections = n, .data = data};
    for (size_t i = 0; i < n; i++)
        server->serve[i] = serve[i];
    start_listening(server);
    assert_int_equal(pthread_create(&server->thread, NULL, server_main, server), 0);
}

static inline void stop(struct server *server)
{
    pthread_join(server->thread, NULL);
    unlink(server->path);
    rmdir(server->folder);
}

/* The next request; NULL when the client has gone. */
static inline request_message *take(int fd, struct frame_reader *reader)
{
    for (;;) {
        const uint8_t *payload;
        size_t n;
        enum status status = frame_reader_next(reader, &payload, &n);
        ProtobufCMessage *message = NULL;
        if (status == STATUS_OK) {
            assert_int_equal(
                frame_decode(&ballast__control__v1__request__descriptor, payload, n, &message),
                STATUS_OK);
            return (request_message *)message;
        }
        uint8_t bytes[4096];
        ssize_t got = recv(fd, bytes, sizeof bytes, 0);
        if (got <= 0)
            return NULL;
        assert_int_equal(frame_reader_feed(reader, bytes, (size_t)got), STATUS_OK);
    }
}

static inline void drop(request_message *request)
{
    if (request)
        frame_free(&request->base);
}

static inline void give(int fd, const reply_message *reply)
{
    uint8_t *bytes;
    size_t n;
    assert_int_equal(frame_encode(&reply->base, &bytes, &n), STATUS_OK);
    (void)!send(fd, bytes, n, MSG_NOSIGNAL);
    heap_free(bytes);
}

static inline void give_hello(int fd, uint32_t major)
{
    Ballast__V1__Hello hello = BALLAST__V1__HELLO__INIT;
    hello.magic = (char *)"ballast";
    hello.major = major;
    hello.run_id = (char *)"test-run";
    reply_message reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.id = 1;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_HELLO;
    reply.hello = &hello;
    give(fd, &reply);
}

static inline void give_error(int fd, uint64_t id, const char *status, const char *text)
{
    Ballast__Control__V1__ErrorReply error = BALLAST__CONTROL__V1__ERROR_REPLY__INIT;
    error.status = (char *)status;
    error.text = (char *)text;
    reply_message reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.id = id;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_ERROR;
    reply.error = &error;
    give(fd, &reply);
}

static inline void make_status(Ballast__Control__V1__StatusReply *status, reply_message *reply,
                               uint64_t id)
{
    *status = (Ballast__Control__V1__StatusReply)BALLAST__CONTROL__V1__STATUS_REPLY__INIT;
    status->run_id = (char *)"test-run";
    status->health = (char *)"OK";
    status->doing = (char *)"training";
    status->step = 41;
    status->n_steps = 100;
    *reply = (reply_message)BALLAST__CONTROL__V1__REPLY__INIT;
    reply->id = id;
    reply->body_case = BALLAST__CONTROL__V1__REPLY__BODY_STATUS;
    reply->status = status;
}

static inline void give_status(int fd, uint64_t id)
{
    Ballast__Control__V1__StatusReply status;
    reply_message reply;
    make_status(&status, &reply, id);
    give(fd, &reply);
}

static inline void give_command(int fd, uint64_t id, bool accepted)
{
    Ballast__Control__V1__CommandReply command = BALLAST__CONTROL__V1__COMMAND_REPLY__INIT;
    command.accepted = accepted;
    command.generation = accepted ? 0 : 3;
    command.step = 41;
    command.text = (char *)"checkpointing none -> block:1";
    reply_message reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.id = id;
    reply.more = accepted;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_COMMAND;
    reply.command = &command;
    give(fd, &reply);
}

/* Greet; the client's first request, which must be a greeting of ours. */
static inline void greet(int fd, struct frame_reader *reader)
{
    request_message *request = take(fd, reader);
    if (request) {
        assert_int_equal(request->body_case, BALLAST__CONTROL__V1__REQUEST__BODY_HELLO);
        assert_string_equal(request->hello->magic, "ballast");
        assert_int_equal(request->hello->major, 1);
    }
    drop(request);
    give_hello(fd, 1);
    reader->max_bytes = FRAME_MAX_BYTES;
}

/* A daemon with too many clients already. */
static inline void serve_too_many(int fd, void *data)
{
    (void)data;
    give_error(fd, 0, "BUSY", "64 clients are connected already");
}

/* Run the whole program; the exit code, outputs to be freed. */
static inline int run_line(const char *command, char **out, char **err)
{
    char text[512], *argv[32];
    int argc = 0;
    snprintf(text, sizeof text, "ballastctl %s", command);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " "))
        argv[argc++] = word;
    argv[argc] = NULL;
    size_t n_out, n_err;
    FILE *out_file = open_memstream(out, &n_out), *err_file = open_memstream(err, &n_err);
    int code = verbs_main(argc, argv, out_file, err_file);
    fclose(out_file);
    fclose(err_file);
    return code;
}

static inline int run(const struct server *server, const char *command, char **out, char **err)
{
    char line[400];
    snprintf(line, sizeof line, "%s --socket %s", command, server->path);
    return run_line(line, out, err);
}

/* One command against one server; `in_out` and `in_err` must be part of what is printed. */
static inline void check(const char *command, size_t n, serve_connection *const *serve, int code,
                         const char *in_out, const char *in_err)
{
    struct server server;
    char *out, *err;
    start(&server, n, serve, NULL);
    int got = run(&server, command, &out, &err);
    stop(&server);
    if (got != code || !strstr(out, in_out) || !strstr(err, in_err) || (!*in_err && *err))
        fail_msg("'%s' exited with %d, not %d\nout: %s\nerr: %s", command, got, code, out, err);
    free(out);
    free(err);
}
#define CHECK(command, server, code, in_out, in_err)                                               \
    check(command, 1, (serve_connection *const[]){server}, code, in_out, in_err)

#endif
