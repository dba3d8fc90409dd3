/* The daemon: one libuv loop that holds everything together.
 *
 * Owns the loop, the timers, the state and the order of start and end. Carries out what run.c
 * decides. One thread (libuv's pool only walks the run folder). */
#ifndef BALLAST_DAEMON_DAEMON_H
#define BALLAST_DAEMON_DAEMON_H

#include <stdbool.h>
#include "proto/base/status.h"

struct daemon_options {
    const char *run_dir;     /* absolute, exists */
    const char *run_id;
    const char *socket_path; /* for clients */
    const char *link_path;   /* for workers */
    bool restarted;          /* this daemon replaces one that died */
    /* Called once, when both sockets are served. */
    void (*on_ready)(void *context);
    void *context;
};

/* Serve until the run is over (OK) or a SIGTERM (STOPPED). Any other status: it did not start,
 * and nothing is left behind but what it repaired in events.jsonl. */
enum status daemon_run(const struct daemon_options *options, struct failure *why) MUST_CHECK;

#endif
