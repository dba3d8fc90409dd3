/* Finding a run's socket. Main thread; reads environment and files, connects to probe. */
#include "client/discover.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/json_parse.h"
#include "proto/socket_path.h"

enum { CONTROL_MAX_BYTES = 16 * 1024, LIST_TEXT_BYTES = 512 };

static enum status give(const char *path, char out_path[static DISCOVER_PATH_BYTES],
                        struct failure *why)
{
    size_t n = strlen(path);
    if (n == 0 || n >= DISCOVER_PATH_BYTES)
        return fail(why, STATUS_NOT_FOUND,
                    n ? "the socket path is too long" : "the socket path is empty");
    memcpy(out_path, path, n + 1);
    return STATUS_OK;
}

/* The whole of a small file into `text`; the number of bytes, or -1 with errno. */
static ssize_t read_file(const char *path, char text[static CONTROL_MAX_BYTES])
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -1;
    size_t used = 0;
    ssize_t n = 0;
    while (used < CONTROL_MAX_BYTES &&
           ((n = read(fd, text + used, CONTROL_MAX_BYTES - used)) > 0 || (n < 0 && errno == EINTR)))
        used += n > 0 ? (size_t)n : 0;
    int error = errno;
    close(fd);
    errno = error;
    return n < 0 ? -1 : (ssize_t)used;
}

/* The socket that DIR/control.json names. */
static enum status from_run_dir(const char *run_dir, char out_path[static DISCOVER_PATH_BYTES],
                                struct failure *why)
{
    char file[DISCOVER_PATH_BYTES], text[CONTROL_MAX_BYTES];
    int n = snprintf(file, sizeof file, "%s/control.json", run_dir);
    if (n < 0 || (size_t)n >= sizeof file)
        return fail(why, STATUS_NOT_FOUND, "the run directory's path is too long");
    ssize_t length = read_file(file, text);
    if (length < 0 && (errno == ENOENT || errno == ENOTDIR))
        return fail(why, STATUS_NOT_FOUND,
                    "no %s; has the run started, and is this its "
                    "directory?",
                    file);
    if (length < 0)
        return fail(why, status_from_errno(errno), "cannot read %s: %s", file, strerror(errno));
    /* Empty: just being written. */
    if (length == 0)
        return fail(why, STATUS_NOT_FOUND, "%s is empty; the run is starting", file);
    json_error_t error = {0};
    json_t *root = NULL;
    enum status parsed = json_parse(text, (size_t)length, JSON_REJECT_DUPLICATES, &root, &error);
    if (parsed == STATUS_OUT_OF_MEMORY)
        return fail(why, STATUS_OUT_OF_MEMORY, "out of memory while reading %s", file);
    const char *socket_path = json_string_value(json_object_get(root, "socket"));
    enum status status = socket_path ? give(socket_path, out_path, why)
                                     : fail(why, STATUS_CORRUPT, "%s does not name a socket%s%s",
                                            file, root ? "" : ": ", root ? "" : error.text);
    json_decref(root);
    return status;
}

/* Does somebody listen there? The connection is closed at once. */
static bool listens(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if (n >= sizeof address.sun_path)
        return false;
    memcpy(address.sun_path, path, n);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return false;
    /* EAGAIN: it does, with a full backlog. */
    bool answer =
        connect(fd, (const struct sockaddr *)&address, sizeof address) == 0 || errno == EAGAIN;
    close(fd);
    return answer;
}

static void list_run(char text[static LIST_TEXT_BYTES], const char *path)
{
    size_t used = strlen(text);
    if (used + strlen(path) + 4 < LIST_TEXT_BYTES)
        snprintf(text + used, LIST_TEXT_BYTES - used, "%s%s", used ? ", " : "", path);
}

/* The only listening socket of this user in the default folders. */
static enum status from_default_folders(char out_path[static DISCOVER_PATH_BYTES],
                                        struct failure *why)
{
    struct socket_path_list list;
    enum status status = socket_path_discover(&list, why);
    if (status != STATUS_OK)
        return status;
    char live[LIST_TEXT_BYTES] = "", folder[SOCKET_PATH_BYTES];
    const char *only = NULL;
    size_t n_live = 0;
    for (size_t i = 0; i < list.count; i++) {
        if (!listens(list.paths[i]))
            continue;
        only = list.paths[i];
        n_live++;
        list_run(live, list.paths[i]);
    }
    socket_path_directory(folder);
    if (n_live == 1)
        status = give(only, out_path, why);
    else if (n_live > 1)
        status = fail(why, STATUS_CONFLICT,
                      "%zu runs are up; choose one with --socket or "
                      "--run-dir: %s",
                      n_live, live);
    else
        status = fail(why, STATUS_NOT_FOUND,
                      "no run of this user is up (looked in %s); name "
                      "one with --run-dir or --socket",
                      folder);
    socket_path_list_fini(&list);
    return status;
}

enum status discover_socket(const struct target *target, char out_path[static DISCOVER_PATH_BYTES],
                            struct failure *why)
{
    if (target->socket)
        return give(target->socket, out_path, why);
    if (target->run_dir)
        return from_run_dir(target->run_dir, out_path, why);
    const char *from_environment = getenv("BALLAST_SOCKET");
    if (from_environment && *from_environment)
        return give(from_environment, out_path, why);
    return from_default_folders(out_path, why);
}
