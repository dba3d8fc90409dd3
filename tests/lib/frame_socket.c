/* Frames over a Unix socket. See frame_socket.h. */
#include "tests/lib/frame_socket.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "proto/base/units.h"

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

enum status frame_socket_connect(const char *path, int *out_fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return STATUS_IO;
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        return STATUS_LINK_LOST;
    }
    *out_fd = fd;
    return STATUS_OK;
}

enum status frame_socket_write(int fd, const void *bytes, size_t n)
{
    double deadline_s = units_monotonic_s() + 5.0;
    const uint8_t *at = bytes;
    while (n > 0) {
        ssize_t sent = send(fd, at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            at += sent;
            n -= (size_t)sent;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN)
            return STATUS_LINK_LOST;
        enum status status = wait_for(fd, POLLOUT, deadline_s);
        if (status != STATUS_OK)
            return status;
    }
    return STATUS_OK;
}

enum status frame_socket_receive(int fd, struct frame_reader *reader,
                                 const ProtobufCMessageDescriptor *descriptor, int timeout_ms,
                                 ProtobufCMessage **out_message)
{
    double deadline_s = units_monotonic_s() + timeout_ms / 1000.0;
    for (;;) {
        const uint8_t *bytes = NULL;
        size_t n = 0;
        enum status status = frame_reader_next(reader, &bytes, &n);
        if (status == STATUS_OK)
            return frame_decode(descriptor, bytes, n, out_message);
        if (status != STATUS_AGAIN)
            return status;
        status = wait_for(fd, POLLIN, deadline_s);
        if (status != STATUS_OK)
            return status;
        uint8_t piece[16384];
        ssize_t got = recv(fd, piece, sizeof piece, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            return STATUS_LINK_LOST;
        if (got > 0)
            status = frame_reader_feed(reader, piece, (size_t)got);
        if (status != STATUS_OK)
            return status;
    }
}
