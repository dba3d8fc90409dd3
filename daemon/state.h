/* What the daemon knows: everything a request can be answered from.
 *
 * daemon.c owns it and changes it; control, command and answer read it. Loop thread. */
#ifndef BALLAST_DAEMON_STATE_H
#define BALLAST_DAEMON_STATE_H

#include <limits.h>
#include <stdint.h>
#include "daemon/disk.h"
#include "daemon/heard.h"
#include "daemon/history.h"
#include "daemon/journal.h"
#include "daemon/run.h"
#include "proto/socket_path.h"

struct state {
    char run_id[SOCKET_PATH_MAX_RUN_ID_BYTES + 1];
    char run_dir[PATH_MAX];
    char started[UNITS_TEXT_BYTES]; /* when the run started, RFC 3339 */
    int64_t started_unix_ms;
    struct run run;
    struct heard heard;
    struct history history;
    struct journal journal;
    struct disk disk;
};

#endif
