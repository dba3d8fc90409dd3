/* Start `ballastd` beside rank 0.
 *
 * The daemon gets its own session (setsid), stdin and stdout on /dev/null, stderr on
 * RUN_DIR/daemon.log until it has opened its own log, no other descriptor but the pipe on which it
 * reports, no blocked signals. The command line is the one that daemon/main.c defines. Owns
 * nothing after it returns: the process is the caller's child, to be reaped with
 * spawn_reap(). Any thread; safe beside running threads (nothing runs between fork and exec). */
#ifndef BALLAST_WORKER_SPAWN_H
#define BALLAST_WORKER_SPAWN_H

#include <stdbool.h>
#include <sys/types.h>
#include "proto/base/status.h"

enum { SPAWN_READY_MS = 5000 };

struct spawn_options {
    const char *run_dir;     /* absolute, exists */
    const char *run_id;
    const char *socket_path; /* for clients; see proto/socket_path.h */
    const char *link_path;   /* for workers */
    bool restarted;          /* it replaces a daemon that died */
    const char *executable;  /* NULL: "ballastd" beside this process's own executable */
};

/* Start the daemon and wait, at most 5 s, until it listens on both sockets. On failure nothing
 * is left running, and the failure carries the daemon's own reason. */
enum status spawn_daemon(const struct spawn_options *options, pid_t *out_pid,
                         struct failure *why) MUST_CHECK;

/* Has the daemon died? Reaps it without waiting. `out_exit` (may be NULL) gets its exit code,
 * or 128 + signal. */
bool spawn_reap(pid_t pid, int *out_exit);

#endif
