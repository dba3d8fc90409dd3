/* Frames over a Unix socket, for the tests' own workers and clients. Blocking with deadlines. */
#ifndef BALLAST_TESTS_LIB_FRAME_SOCKET_H
#define BALLAST_TESTS_LIB_FRAME_SOCKET_H

#include <stddef.h>
#include "proto/base/status.h"
#include "proto/frame.h"

/* LINK_LOST: nobody listens there. */
enum status frame_socket_connect(const char *path, int *out_fd) MUST_CHECK;
/* Any bytes, all of them, within 5 s. DEADLINE; LINK_LOST. */
enum status frame_socket_write(int fd, const void *bytes, size_t n) MUST_CHECK;
/* The next message of this type; frame_free() it. DEADLINE; LINK_LOST when the other side closed;
 * what the reader and frame_decode() say. */
enum status frame_socket_receive(int fd, struct frame_reader *reader,
                                 const ProtobufCMessageDescriptor *descriptor, int timeout_ms,
                                 ProtobufCMessage **out_message) MUST_CHECK;

#endif
