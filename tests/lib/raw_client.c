/* Raw access to the control socket. See raw_client.h. */
#include "tests/lib/raw_client.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/version.h"

static enum status wait_for(int fd, short events, double deadline_s)
{
    for (;;) {
        double left_s = deadline_s - units_monotonic_s();
        struct pollfd entry = {.fd = fd, .events = events};
        int n = poll(&entry, 1, left_s > 0 ? (int)(left_s * 1000.0) + 1 : 0);
        if (n > 0)
            return STATUS_OK;
        if (n == 0 && left_s <= 0)
            return STATUS_DEADLINE;
        if (n < 0 && errno != EINTR)
            return STATUS_IO;
    }
}

enum status raw_client_connect(struct raw_client *client, const char *path)
{
    *client = (struct raw_client){.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    client->reader.max_bytes = FRAME_MAX_BYTES;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    if (client->fd < 0)
        return STATUS_IO;
    if (connect(client->fd, (const struct sockaddr *)&address, sizeof address) != 0) {
        raw_client_close(client);
        return STATUS_LINK_LOST;
    }
    return STATUS_OK;
}

void raw_client_close(struct raw_client *client)
{
    if (client->fd >= 0)
        close(client->fd);
    client->fd = -1;
    frame_reader_fini(&client->reader);
}

enum status raw_client_write(struct raw_client *client, const void *bytes, size_t n)
{
    double deadline_s = units_monotonic_s() + 5.0;
    const uint8_t *at = bytes;
    while (n > 0) {
        ssize_t sent = send(client->fd, at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            at += sent;
            n -= (size_t)sent;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN)
            return STATUS_LINK_LOST;
        enum status status = wait_for(client->fd, POLLOUT, deadline_s);
        if (status != STATUS_OK)
            return status;
    }
    return STATUS_OK;
}

enum status raw_client_send(struct raw_client *client, Ballast__Control__V1__Request *request)
{
    uint8_t *bytes = NULL;
    size_t n = 0;
    if (request->id == 0)
        request->id = ++client->last_id;
    enum status status = frame_encode(&request->base, &bytes, &n);
    if (status == STATUS_OK)
        status = raw_client_write(client, bytes, n);
    heap_free(bytes);
    return status;
}

enum status raw_client_receive(struct raw_client *client, int timeout_ms,
                               Ballast__Control__V1__Reply **out_reply)
{
    double deadline_s = units_monotonic_s() + timeout_ms / 1000.0;
    for (;;) {
        const uint8_t *bytes = NULL;
        size_t n = 0;
        enum status status = frame_reader_next(&client->reader, &bytes, &n);
        if (status == STATUS_OK) {
            ProtobufCMessage *message = NULL;
            status = frame_decode(&ballast__control__v1__reply__descriptor, bytes, n, &message);
            if (status == STATUS_OK)
                *out_reply = (Ballast__Control__V1__Reply *)message;
            return status;
        }
        if (status != STATUS_AGAIN)
            return status;
        status = wait_for(client->fd, POLLIN, deadline_s);
        if (status != STATUS_OK)
            return status;
        uint8_t piece[16384];
        ssize_t got = recv(client->fd, piece, sizeof piece, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            return STATUS_LINK_LOST;
        if (got > 0)
            status = frame_reader_feed(&client->reader, piece, (size_t)got);
        if (status != STATUS_OK)
            return status;
    }
}

enum status raw_client_ask(struct raw_client *client, Ballast__Control__V1__Request *request,
                           Ballast__Control__V1__Reply **out_reply)
{
    enum status status = raw_client_send(client, request);
    double deadline_s = units_monotonic_s() + 5.0;
    while (status == STATUS_OK) {
        Ballast__Control__V1__Reply *reply = NULL;
        int left_ms = (int)((deadline_s - units_monotonic_s()) * 1000.0);
        status = raw_client_receive(client, left_ms > 0 ? left_ms : 0, &reply);
        if (status == STATUS_OK && reply->id == request->id) {
            *out_reply = reply;
            return STATUS_OK;
        }
        if (status == STATUS_OK)
            frame_free(&reply->base);
    }
    return status;
}

enum status raw_client_open(struct raw_client *client, const char *path)
{
    enum status status = raw_client_connect(client, path);
    if (status != STATUS_OK)
        return status;
    Ballast__V1__Hello hello = BALLAST__V1__HELLO__INIT;
    char magic[] = PROTOCOL_MAGIC;
    hello.magic = magic;
    hello.major = PROTOCOL_MAJOR;
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_HELLO;
    request.hello = &hello;
    Ballast__Control__V1__Reply *reply = NULL;
    status = raw_client_ask(client, &request, &reply);
    if (status == STATUS_OK && reply->body_case != BALLAST__CONTROL__V1__REPLY__BODY_HELLO)
        status = STATUS_REFUSED;
    frame_free(reply ? &reply->base : NULL);
    if (status != STATUS_OK)
        raw_client_close(client);
    return status;
}
