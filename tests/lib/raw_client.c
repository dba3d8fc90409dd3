/* Raw access to the control socket. See raw_client.h. */
#include "tests/lib/raw_client.h"

#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/version.h"
#include "tests/lib/frame_socket.h"

enum status raw_client_connect(struct raw_client *client, const char *path)
{
    *client = (struct raw_client){.fd = -1, .reader = {.max_bytes = FRAME_MAX_BYTES}};
    return frame_socket_connect(path, &client->fd);
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
    return frame_socket_write(client->fd, bytes, n);
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
    ProtobufCMessage *message = NULL;
    enum status status =
        frame_socket_receive(client->fd, &client->reader, &ballast__control__v1__reply__descriptor,
                             timeout_ms, &message);
    if (status == STATUS_OK)
        *out_reply = (Ballast__Control__V1__Reply *)message;
    return status;
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
