/* Where a run's sockets live, and the rules for their names and folder.
 *
 * `$XDG_RUNTIME_DIR/ballast/RUN.sock` (clients) and `RUN.link.sock` (workers) beside it, or
 * `/tmp/ballast-UID/` where there is no runtime folder. The folder is 0700 and ours: a symbolic
 * link, a folder of somebody else or an open one is refused. Shared by worker (chooses), daemon
 * (binds) and client (finds). Looks at the environment and the file system; binds nothing. Any
 * thread. */
#ifndef BALLAST_PROTO_SOCKET_PATH_H
#define BALLAST_PROTO_SOCKET_PATH_H

#include <stddef.h>
#include "proto/base/status.h"

enum {
    SOCKET_PATH_BYTES = 108,            /* of sockaddr_un.sun_path, with the closing zero */
    SOCKET_PATH_MAX_RUN_ID_BYTES = 48,
    SOCKET_PATH_MAX_FOUND = 256
};

/* Is this a legal run id: 1..48 letters, digits, '.', '_', '-', not starting with '.' and not
 * ending in ".link"? */
enum status socket_path_check_run_id(const char *run_id, struct failure *why) MUST_CHECK;
/* Is this path absolute, without "..", and at most 107 bytes long? */
enum status socket_path_check(const char *path, struct failure *why) MUST_CHECK;

/* The folder a run started now would use. Nothing is created. */
void socket_path_directory(char out_path[static SOCKET_PATH_BYTES]);
/* The two sockets of a run in that folder. */
enum status socket_path_for_run(const char *run_id, char out_control[static SOCKET_PATH_BYTES],
                                char out_link[static SOCKET_PATH_BYTES],
                                struct failure *why) MUST_CHECK;

/* Create the folder that holds `socket_path` (0700, one level) if it is missing, then check that
 * it is a real folder, ours, and closed to others. PERMISSION says what is wrong with it. */
enum status socket_path_prepare_directory(const char *socket_path, struct failure *why) MUST_CHECK;

/* Control sockets of this user in both possible folders, newest first; whether somebody listens
 * is for the caller to try. Free with socket_path_list_fini(). */
struct socket_path_list {
    size_t count;
    char (*paths)[SOCKET_PATH_BYTES]; /* owned */
};
enum status socket_path_discover(struct socket_path_list *out_list, struct failure *why) MUST_CHECK;
void socket_path_list_fini(struct socket_path_list *list);

#endif
