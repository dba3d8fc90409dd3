/* The link to the daemon: telemetry out, commands in. One thread per rank; it never touches
 * MPI, and training never waits for it except in link_end().
 *
 * Reconnects when the daemon is started again. Messages wait in bounded queues; when they
 * are full the oldest telemetry is dropped, never an event, a result or a report. The plan, the
 * newest state of the run, the last shortage and the last step are repeated to every daemon. */
#ifndef BALLAST_WORKER_LINK_H
#define BALLAST_WORKER_LINK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include "proto/base/status.h"
#include "proto/link.pb-c.h"
#include "worker/parallel/comm.h"
#include "worker/telemetry.h"

struct link; /* opaque */

struct link_options {
    const char *path;   /* of the daemon's link socket; borrowed until link_stop() */
    const char *run_id; /* of the run the daemon must be of; borrowed likewise. May be NULL */
    uint32_t rank, world_size;
    struct telemetry *telemetry; /* borrowed until link_stop() */
    struct comm *comm;           /* borrowed; only its atomics are read */
    /* Called on the link thread, rank 0 only: fill a WorkerHello's run fields at every
     * (re)connect. Strings are borrowed until the call after. */
    void (*fill_hello)(void *user, Ballast__Link__V1__WorkerHello *hello);
    /* Called on the link thread, rank 0 only: answer a plan or dry-run command. The result is
     * packed before the next call. */
    void (*answer_plan)(void *user, const Ballast__Link__V1__Command *command,
                        Ballast__Link__V1__CommandResult *result);
    /* Called on the link thread, rank 0 only, when the daemon is gone: start another. */
    enum status (*restart_daemon)(void *user, struct failure *why);
    void *user;
};

enum status link_start(const struct link_options *options, struct link **out_link,
                       struct failure *why) MUST_CHECK;
/* Queue a message (packed here, so the caller keeps it). Never blocks. A NULL link is allowed
 * everywhere below and does nothing: a run without a daemon. */
void link_send(struct link *link, const Ballast__Link__V1__WorkerMessage *message);
/* The next command, NULL if none is waiting; free with link_free_command(). */
Ballast__Link__V1__Command *link_take(struct link *link);
/* As link_take(), waiting up to timeout_ms for one. */
Ballast__Link__V1__Command *link_wait(struct link *link, int timeout_ms);
void link_free_command(Ballast__Link__V1__Command *command);
bool link_connected(const struct link *link);
/* Send WorkerEnd and wait up to 2 s for the daemon to acknowledge it, so that every file is
 * complete when mpirun returns. */
void link_end(struct link *link, uint32_t exit_code, const char *text);
void link_stop(struct link *link);

#endif
