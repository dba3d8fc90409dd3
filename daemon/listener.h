/* A listening Unix socket: its file, its mode, and accepting.
 *
 * Owns the socket's path in the file system: a stale socket is taken over, a live one and what is
 * not a socket never; the file is 0600 before anybody can connect; on closing it is unlinked
 * only while it is still ours (libuv would unlink a successor's, so binding and unlinking are
 * done here). Running out of descriptors never spins: a spare one lets the newcomer be
 * told why, else accepting rests for a moment. Loop thread. */
#ifndef BALLAST_DAEMON_LISTENER_H
#define BALLAST_DAEMON_LISTENER_H

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <uv.h>
#include "proto/base/status.h"
#include "proto/socket_path.h"

enum { LISTENER_BACKLOG = 512, LISTENER_REST_MS = 100 };

/* A bound socket's file. */
struct listener_file {
    int fd;
    char path[SOCKET_PATH_BYTES];
    dev_t device;
    ino_t inode;
};

/* Bind and listen at `path`. ADDRESS_IN_USE names the process that serves it; PERMISSION,
 * TOO_LARGE and INVALID name what is wrong with path or folder. Needs no loop. */
enum status listener_bind(const char *path, struct listener_file *out_file,
                          struct failure *why) MUST_CHECK;
/* Close, and unlink the path if it still names this socket. */
void listener_unbind(struct listener_file *file);

struct listener;
/* A new connection: the callee owns `fd` (non-blocking, close-on-exec). */
typedef void (*listener_accept_cb)(struct listener *listener, int fd, const struct ucred *peer);
/* No descriptor is left to serve this connection; say so on `fd`, which stays the listener's. */
typedef void (*listener_refuse_cb)(struct listener *listener, int fd);

struct listener {
    struct listener_file file;
    uv_poll_t poll;
    uv_timer_t rest;
    int n_open_handles;
    int spare_fd; /* -1 while it is in use or could not be had */
    bool closing;
    listener_accept_cb on_accept;
    listener_refuse_cb on_refuse;
    void *owner;
};

/* Bind and accept from now on. */
enum status listener_open(struct listener *listener, uv_loop_t *loop, const char *path,
                          listener_accept_cb on_accept, listener_refuse_cb on_refuse, void *owner,
                          struct failure *why) MUST_CHECK;
/* Stop accepting and unlink; the struct has to live until the loop has run its close
 * callbacks. Closing twice is fine. */
void listener_close(struct listener *listener);

#endif
