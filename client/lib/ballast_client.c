/* The connection of libballast-client: socket, greeting, frames. Blocking on poll(); runs on
 * its caller's thread. What bytes mean belongs to proto/frame. */
#include "client/lib/ballast_client.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/frame.h"
#include "proto/version.h"

enum { READ_BYTES = 16 * 1024, FULL_BACKLOG_RETRY_MS = 10 };

struct ballast_client {
    int fd;
    char *path;                         /* owned */
    struct frame_reader reader;         /* owned */
    Ballast__Control__V1__Reply *hello; /* owned; the daemon's greeting */
    uint64_t last_id;
};

/* Milliseconds for poll(): 0 when the deadline has passed, -1 for none. */
static int remaining_ms(double deadline_s)
{
    if (isinf(deadline_s))
        return -1;
    double ms = ceil((deadline_s - units_monotonic_s()) * 1000.0);
    if (ms <= 0.0)
        return 0;
    return ms > 1e9 ? 1000000000 : (int)ms;
}

/* Wait until the socket is ready for `events`. */
static enum status wait_ready(struct ballast_client *client, short events, double deadline_s,
                              struct failure *why)
{
    for (;;) {
        struct pollfd entry = {.fd = client->fd, .events = events};
        int n = poll(&entry, 1, remaining_ms(deadline_s));
        if (n > 0)
            return STATUS_OK;
        if (n < 0 && errno != EINTR)
            return fail(why, status_from_errno(errno), "waiting for %s: %s", client->path,
                        strerror(errno));
        if (n == 0 && remaining_ms(deadline_s) == 0)
            return fail(why, STATUS_DEADLINE,
                        "no answer from %s in time; the daemon may be busy, try a longer --timeout",
                        client->path);
    }
}

static enum status connect_failed(const char *path, int error, struct failure *why)
{
    switch (error) {
    case ENOENT:
        return fail(why, STATUS_NOT_FOUND, "no socket at %s; is the run up?", path);
    case ECONNREFUSED:
        return fail(why, STATUS_NOT_FOUND,
                    "nobody listens at %s; the run has ended or its "
                    "daemon is being restarted",
                    path);
    case EACCES:
    case EPERM:
        return fail(why, STATUS_PERMISSION,
                    "not allowed to connect to %s; only the user who "
                    "started the run may, and the run's observers",
                    path);
    case ENOTSOCK:
    case EPROTOTYPE:
        return fail(why, STATUS_NOT_FOUND, "%s is not a control socket", path);
    default:
        return fail(why, STATUS_LINK_LOST, "cannot connect to %s: %s", path, strerror(error));
    }
}

static enum status connect_socket(struct ballast_client *client, double deadline_s,
                                  struct failure *why)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(client->path);
    if (length >= sizeof address.sun_path)
        return fail(why, STATUS_NOT_FOUND,
                    "the socket path is %zu bytes long, the system's limit is %zu: %s", length,
                    sizeof address.sun_path - 1, client->path);
    memcpy(address.sun_path, client->path, length);
    client->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (client->fd < 0)
        return fail(why, status_from_errno(errno), "cannot make a socket: %s", strerror(errno));
    /* A local connect is immediate; EAGAIN means that the listener's backlog is full. */
    while (connect(client->fd, (const struct sockaddr *)&address, sizeof address) != 0) {
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN)
            return connect_failed(client->path, errno, why);
        int left_ms = remaining_ms(deadline_s);
        if (left_ms == 0)
            return fail(why, STATUS_DEADLINE,
                        "%s accepted no connection in time; its daemon "
                        "has too many clients or is stopped",
                        client->path);
        poll(NULL, 0,
             left_ms < 0 || left_ms > FULL_BACKLOG_RETRY_MS ? FULL_BACKLOG_RETRY_MS : left_ms);
    }
    return STATUS_OK;
}

static enum status send_all(struct ballast_client *client, const uint8_t *bytes, size_t n,
                            double deadline_s, struct failure *why)
{
    while (n > 0) {
        ssize_t sent = send(client->fd, bytes, n, MSG_NOSIGNAL);
        if (sent >= 0) {
            bytes += sent;
            n -= (size_t)sent;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return fail(why, STATUS_LINK_LOST, "%s closed the connection: %s", client->path,
                        strerror(errno));
        enum status status = wait_ready(client, POLLOUT, deadline_s, why);
        if (status != STATUS_OK)
            return status;
    }
    return STATUS_OK;
}

static enum status read_some(struct ballast_client *client, double deadline_s, struct failure *why)
{
    uint8_t bytes[READ_BYTES];
    for (;;) {
        ssize_t n = recv(client->fd, bytes, sizeof bytes, 0);
        if (n > 0) {
            enum status status = frame_reader_feed(&client->reader, bytes, (size_t)n);
            if (status == STATUS_OK)
                return STATUS_OK;
            return fail(why, status,
                        status == STATUS_OUT_OF_MEMORY
                            ? "out of memory while reading from %s"
                            : "what %s sends is not Ballast's protocol; is it "
                              "another program's socket?",
                        client->path);
        }
        if (n == 0)
            return fail(why, STATUS_LINK_LOST,
                        client->hello ? "%s closed the connection; the run has ended or its "
                                        "daemon is being restarted"
                                      : "%s closed the connection before its greeting; it is "
                                        "not a Ballast daemon, or one with too many clients",
                        client->path);
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return fail(why, STATUS_LINK_LOST, "the connection to %s broke: %s", client->path,
                        strerror(errno));
        enum status status = wait_ready(client, POLLIN, deadline_s, why);
        if (status != STATUS_OK)
            return status;
    }
}

static enum status decode_reply(struct ballast_client *client, const uint8_t *bytes, size_t n,
                                Ballast__Control__V1__Reply **out_reply, struct failure *why)
{
    ProtobufCMessage *message = NULL;
    enum status status = frame_decode(&ballast__control__v1__reply__descriptor, bytes, n, &message);
    if (status == STATUS_OUT_OF_MEMORY)
        return fail(why, status, "out of memory while decoding a reply of %zu bytes", n);
    if (status != STATUS_OK)
        return fail(why, STATUS_MALFORMED,
                    "%s sent %zu bytes that are not a reply of Ballast's "
                    "protocol (%s); is it another program's socket?",
                    client->path, n, status_text(status));
    Ballast__Control__V1__Reply *reply = (Ballast__Control__V1__Reply *)message;
    if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY__NOT_SET) {
        frame_free(message);
        return fail(why, STATUS_MALFORMED, "%s sent a reply of a kind this client does not know",
                    client->path);
    }
    *out_reply = reply;
    return STATUS_OK;
}

enum status ballast_client_receive(struct ballast_client *client, double deadline_s,
                                   Ballast__Control__V1__Reply **out_reply, struct failure *why)
{
    for (;;) {
        const uint8_t *bytes = NULL;
        size_t n = 0;
        enum status status = frame_reader_next(&client->reader, &bytes, &n);
        if (status == STATUS_OK)
            return decode_reply(client, bytes, n, out_reply, why);
        if (status != STATUS_AGAIN)
            return fail(why, status,
                        "what %s sends is not Ballast's protocol (frame %s); is it "
                        "another program's socket?",
                        client->path, status_text(status));
        status = read_some(client, deadline_s, why);
        if (status != STATUS_OK)
            return status;
    }
}

enum status ballast_client_receive_for(struct ballast_client *client, uint64_t id,
                                       double deadline_s, Ballast__Control__V1__Reply **out_reply,
                                       struct failure *why)
{
    for (;;) {
        Ballast__Control__V1__Reply *reply = NULL;
        enum status status = ballast_client_receive(client, deadline_s, &reply, why);
        if (status != STATUS_OK)
            return status;
        if (reply->id == id) {
            *out_reply = reply;
            return STATUS_OK;
        }
        ballast_reply_free(reply);
    }
}

enum status ballast_client_send(struct ballast_client *client,
                                Ballast__Control__V1__Request *request, double deadline_s,
                                struct failure *why)
{
    request->id = ++client->last_id;
    uint8_t *bytes = NULL;
    size_t n = 0;
    enum status status = frame_encode(&request->base, &bytes, &n);
    if (status == STATUS_TOO_LARGE)
        return fail(why, STATUS_INVALID, "the request is larger than a frame of %d bytes",
                    FRAME_MAX_BYTES);
    if (status == STATUS_MALFORMED)
        return fail(why, STATUS_INVALID, "the request has a text that is not UTF-8");
    if (status != STATUS_OK)
        return fail(why, status, "cannot encode the request: %s", status_text(status));
    status = send_all(client, bytes, n, deadline_s, why);
    heap_free(bytes);
    return status;
}

/* The daemon's first word has to be a greeting of our major version. An error in its place
 * (too many clients, version, permission) is passed on with its own text. */
static enum status check_hello(struct ballast_client *client,
                               const Ballast__Control__V1__Reply *reply, struct failure *why)
{
    if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY_ERROR) {
        enum status status = status_from_name(reply->error->status);
        /* Only these two mean something to the caller of open; the rest: no connection. */
        if (status != STATUS_VERSION && status != STATUS_PERMISSION)
            status = STATUS_LINK_LOST;
        return fail(why, status, "%s refused the connection: %s", client->path, reply->error->text);
    }
    if (reply->body_case != BALLAST__CONTROL__V1__REPLY__BODY_HELLO ||
        strcmp(reply->hello->magic, PROTOCOL_MAGIC) != 0)
        return fail(why, STATUS_MALFORMED,
                    "%s did not greet as a Ballast daemon; is it another "
                    "program's socket?",
                    client->path);
    if (reply->hello->major != PROTOCOL_MAJOR)
        return fail(why, STATUS_VERSION,
                    "the daemon speaks protocol %u.%u, this client %d.%d; "
                    "use the ballastctl that was built with the run's ballast-worker",
                    reply->hello->major, reply->hello->minor, PROTOCOL_MAJOR, PROTOCOL_MINOR);
    return STATUS_OK;
}

static enum status greet(struct ballast_client *client, double deadline_s, struct failure *why)
{
    Ballast__V1__Hello hello = BALLAST__V1__HELLO__INIT;
    char magic[] = PROTOCOL_MAGIC, build[] = BALLAST_VERSION;
    hello.magic = magic;
    hello.major = PROTOCOL_MAJOR;
    hello.minor = PROTOCOL_MINOR;
    hello.build = build;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_HELLO;
    request.hello = &hello;
    enum status sent = ballast_client_send(client, &request, deadline_s, why);
    /* A daemon that refuses may have said why and closed before our greeting arrived. */
    if (sent != STATUS_OK && sent != STATUS_LINK_LOST)
        return sent;
    Ballast__Control__V1__Reply *reply = NULL;
    enum status status = ballast_client_receive(client, deadline_s, &reply, why);
    if (status != STATUS_OK)
        return status;
    status = check_hello(client, reply, why);
    if (status != STATUS_OK) {
        ballast_reply_free(reply);
        return status;
    }
    client->hello = reply;
    client->reader.max_bytes = FRAME_MAX_BYTES;
    return STATUS_OK;
}

enum status ballast_client_open(const char *path, double deadline_s,
                                struct ballast_client **out_client, struct failure *why)
{
    struct ballast_client *client = heap_calloc(1, sizeof *client);
    if (!client)
        return fail(why, STATUS_OUT_OF_MEMORY, "out of memory for a connection to %s", path);
    client->fd = -1;
    client->reader.max_bytes = FRAME_MAX_BYTES_BEFORE_HELLO;
    client->path = heap_strdup(path);
    enum status status = STATUS_OK;
    if (!client->path)
        status = fail(why, STATUS_OUT_OF_MEMORY, "out of memory for a connection to %s", path);
    if (status == STATUS_OK)
        status = connect_socket(client, deadline_s, why);
    if (status == STATUS_OK)
        status = greet(client, deadline_s, why);
    if (status != STATUS_OK) {
        ballast_client_close(client);
        return status;
    }
    *out_client = client;
    return STATUS_OK;
}

void ballast_client_close(struct ballast_client *client)
{
    if (!client)
        return;
    if (client->fd >= 0)
        close(client->fd);
    ballast_reply_free(client->hello);
    frame_reader_fini(&client->reader);
    heap_free(client->path);
    heap_free(client);
}

const Ballast__V1__Hello *ballast_client_peer(const struct ballast_client *client)
{
    assert(client->hello);
    return client->hello->hello;
}

const char *ballast_client_path(const struct ballast_client *client)
{
    return client->path;
}

void ballast_reply_free(Ballast__Control__V1__Reply *reply)
{
    if (reply)
        frame_free(&reply->base);
}
