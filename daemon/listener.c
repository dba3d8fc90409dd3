/* Binding safely, accepting boundedly. See listener.h. */
#include "daemon/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "daemon/uv_heap.h"
#include "proto/base/log.h"

enum { ACCEPTS_PER_TURN = 32, LOCK_TRIES = 200, LOCK_WAIT_NS = 10 * 1000 * 1000 };

/* ---- the file ---- */

/* Starters exclude one another by a lock on the folder; a dead one's lock is gone with it. */
static enum status lock_directory(const char *path, int *out_fd, struct failure *why)
{
    char folder[SOCKET_PATH_BYTES];
    size_t length = (size_t)(strrchr(path, '/') - path);
    memcpy(folder, path, length);
    folder[length] = '\0';
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return fail(why, status_from_errno(errno), "cannot open the sockets' folder %s: %s",
                    folder, strerror(errno));
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
            *out_fd = fd;
            return STATUS_OK;
        }
        nanosleep(&(struct timespec){.tv_nsec = LOCK_WAIT_NS}, NULL);
    }
    close(fd);
    return fail(why, STATUS_BUSY, "another daemon has held the sockets' folder %s for 2 s", folder);
}

static void fill_address(const char *path, struct sockaddr_un *out_address)
{
    *out_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out_address->sun_path, path, strlen(path));
}

/* Is somebody listening there? OK: nobody, the file is stale. */
static enum status check_stale(const char *path, struct failure *why)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fail(why, status_from_errno(errno), "cannot make a socket: %s", strerror(errno));
    struct sockaddr_un address;
    fill_address(path, &address);
    enum status status = STATUS_OK;
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) {
        struct ucred peer = {0};
        socklen_t n = sizeof peer;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) != 0)
            peer.pid = 0;
        status = fail(why, STATUS_ADDRESS_IN_USE,
                      "%s is served by process %d; it was left alone: end that run first or give "
                      "this one another run id", path, (int)peer.pid);
    } else if (errno == EAGAIN) {
        status = fail(why, STATUS_ADDRESS_IN_USE,
                      "%s is served by a process whose queue is full; it was left alone", path);
    } else if (errno != ECONNREFUSED && errno != ENOENT) {
        status = fail(why, STATUS_ADDRESS_IN_USE,
                      "cannot tell whether somebody serves %s (%s); it was left alone", path,
                      strerror(errno));
    }
    close(fd);
    return status;
}

/* Make way for a new socket at `path`; the lock is held. */
static enum status clear_path(const char *path, struct failure *why)
{
    struct stat info;
    if (lstat(path, &info) != 0) {
        if (errno == ENOENT)
            return STATUS_OK;
        return fail(why, status_from_errno(errno), "cannot look at %s: %s", path, strerror(errno));
    }
    if (!S_ISSOCK(info.st_mode))
        return fail(why, STATUS_ADDRESS_IN_USE,
                    "%s exists and is not a socket; it was left alone: move it away", path);
    enum status status = check_stale(path, why);
    if (status != STATUS_OK)
        return status;
    if (unlink(path) != 0 && errno != ENOENT)
        return fail(why, status_from_errno(errno), "cannot remove the stale socket %s: %s", path,
                    strerror(errno));
    log_info("removed the stale socket %s", path);
    return STATUS_OK;
}

static enum status bind_and_listen(const char *path, struct listener_file *file,
                                   struct failure *why)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fail(why, status_from_errno(errno), "cannot make a socket: %s", strerror(errno));
    struct sockaddr_un address;
    fill_address(path, &address);
    /* The mode is right from the first moment; nobody can connect before listen(). */
    mode_t old_mask = umask(0177);
    int bound = bind(fd, (const struct sockaddr *)&address, sizeof address);
    int error = errno;
    umask(old_mask);
    if (bound != 0) {
        close(fd);
        return fail(why, status_from_errno(error), "cannot bind %s: %s", path, strerror(error));
    }
    struct stat info;
    if (lstat(path, &info) != 0 || listen(fd, LISTENER_BACKLOG) != 0) {
        error = errno;
        unlink(path);
        close(fd);
        return fail(why, status_from_errno(error), "cannot listen at %s: %s", path,
                    strerror(error));
    }
    *file = (struct listener_file){.fd = fd, .device = info.st_dev, .inode = info.st_ino};
    memcpy(file->path, path, strlen(path) + 1);
    return STATUS_OK;
}

enum status listener_bind(const char *path, struct listener_file *out_file, struct failure *why)
{
    int lock = -1;
    enum status status = socket_path_prepare_directory(path, why);
    if (status == STATUS_OK)
        status = lock_directory(path, &lock, why);
    if (status != STATUS_OK)
        return status;
    status = clear_path(path, why);
    if (status == STATUS_OK)
        status = bind_and_listen(path, out_file, why);
    close(lock);
    return status;
}

void listener_unbind(struct listener_file *file)
{
    int lock = -1;
    struct failure why;
    /* Without the lock the check is still right but for a moment between look and unlink. */
    bool locked = lock_directory(file->path, &lock, &why) == STATUS_OK;
    struct stat info;
    if (lstat(file->path, &info) == 0 && S_ISSOCK(info.st_mode) &&
        info.st_dev == file->device && info.st_ino == file->inode)
        unlink(file->path);
    close(file->fd);
    file->fd = -1;
    if (locked)
        close(lock);
}

/* ---- accepting ---- */

static void on_readable(uv_poll_t *poll, int status, int events);

static void open_spare(struct listener *listener)
{
    if (listener->spare_fd < 0)
        listener->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void on_rested(uv_timer_t *timer)
{
    struct listener *listener = timer->data;
    open_spare(listener);
    int code = uv_poll_start(&listener->poll, UV_READABLE, on_readable);
    if (code)
        log_error("cannot accept at %s any more: %s", listener->file.path, uv_strerror(code));
}

/* Look away for a moment, since the descriptor stays readable. */
static void rest(struct listener *listener)
{
    uv_poll_stop(&listener->poll);
    uv_timer_start(&listener->rest, on_rested, LISTENER_REST_MS, 0);
}

/* Out of descriptors: tell one newcomer why, through the spare one. */
static void refuse_one(struct listener *listener)
{
    if (listener->spare_fd < 0) {
        rest(listener);
        return;
    }
    close(listener->spare_fd);
    listener->spare_fd = -1;
    int fd = accept4(listener->file.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
        listener->on_refuse(listener, fd);
        close(fd);
    }
    open_spare(listener);
    if (listener->spare_fd < 0)
        rest(listener);
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    struct listener *listener = poll->data;
    (void)events;
    if (status < 0) {
        rest(listener);
        return;
    }
    for (int i = 0; i < ACCEPTS_PER_TURN && !listener->closing; i++) {
        int fd = accept4(listener->file.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            refuse_one(listener);
            return;
        }
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0 && errno == EAGAIN)
            return;
        if (fd < 0) {
            log_warn("accepting at %s: %s", listener->file.path, strerror(errno));
            rest(listener);
            return;
        }
        struct ucred peer = {0};
        socklen_t n = sizeof peer;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) != 0) {
            close(fd);
            continue;
        }
        listener->on_accept(listener, fd, &peer);
    }
}

enum status listener_open(struct listener *listener, uv_loop_t *loop, const char *path,
                          listener_accept_cb on_accept, listener_refuse_cb on_refuse, void *owner,
                          struct failure *why)
{
    *listener = (struct listener){
        .on_accept = on_accept, .on_refuse = on_refuse, .owner = owner, .spare_fd = -1};
    enum status status = listener_bind(path, &listener->file, why);
    if (status != STATUS_OK)
        return status;
    int code = uv_poll_init(loop, &listener->poll, listener->file.fd);
    if (code)
        goto undo_bind;
    listener->poll.data = listener;
    uv_timer_init(loop, &listener->rest);
    listener->rest.data = listener;
    listener->n_open_handles = 2;
    open_spare(listener);
    code = uv_poll_start(&listener->poll, UV_READABLE, on_readable);
    if (code) {
        listener_close(listener);
        return fail(why, uv_heap_status(code), "cannot accept at %s: %s", path, uv_strerror(code));
    }
    return STATUS_OK;
undo_bind:
    listener_unbind(&listener->file);
    return fail(why, uv_heap_status(code), "cannot watch %s: %s", path, uv_strerror(code));
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct listener *listener = handle->data;
    listener->n_open_handles--;
}

void listener_close(struct listener *listener)
{
    if (listener->closing || listener->n_open_handles == 0)
        return;
    listener->closing = true;
    uv_close((uv_handle_t *)&listener->poll, on_handle_closed);
    uv_close((uv_handle_t *)&listener->rest, on_handle_closed);
    if (listener->spare_fd >= 0)
        close(listener->spare_fd);
    listener->spare_fd = -1;
    listener_unbind(&listener->file);
}
