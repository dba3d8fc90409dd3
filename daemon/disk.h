/* How much the run folder holds and how much room is left.
 *
 * The walk runs on libuv's thread pool, since a run folder may lie on a slow network file
 * system; the numbers are read on the loop thread. */
#ifndef BALLAST_DAEMON_DISK_H
#define BALLAST_DAEMON_DISK_H

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

enum { DISK_INTERVAL_MS = 10000, DISK_MAX_ENTRIES = 200000, DISK_MAX_DEPTH = 8 };

struct disk {
    bool known;
    uint64_t used_bytes; /* allocated blocks of what lies in the folder */
    uint64_t free_bytes; /* for this user, on its file system */
    bool running;
    bool ever_started;
    int64_t started_ms;
    /* The pool thread's while running. */
    uv_work_t work;
    atomic_bool stop;
    char path[PATH_MAX];
    uint64_t walked_bytes, walked_free_bytes;
    bool walked;
};

void disk_init(struct disk *disk, const char *path);
/* Start a walk when the last one is old enough. */
void disk_refresh(struct disk *disk, uv_loop_t *loop, int64_t now_ms);
/* Ask a running walk to end soon; it is over when the loop has no more to do. */
void disk_stop(struct disk *disk);

#endif
