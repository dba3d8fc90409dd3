/* The journal: events.jsonl, one JSON object a line, written by the daemon alone.
 *
 * An event's sequence number is its line's number, counted from 1, so a daemon that is started
 * again goes on where the last one stopped. A torn last line is cut off. A line is written whole
 * or not at all; what could not be written (disk full) is kept by the history and caught up with
 * later. Loop thread. */
#ifndef BALLAST_DAEMON_JOURNAL_H
#define BALLAST_DAEMON_JOURNAL_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include "daemon/history.h"
#include "proto/base/status.h"
#include "proto/base/units.h"

struct journal {
    int fd;
    off_t size;
    uint64_t next_sequence;    /* of the next event to come */
    uint64_t written_sequence; /* the newest on disk */
    bool broken;               /* the last write failed */
    char started[UNITS_TEXT_BYTES]; /* time of the newest `start` in it; "" if none */
};

/* Open or create RUN_DIR/events.jsonl, repair its end, and load its newest events into
 * `history`. */
enum status journal_open(struct journal *journal, const char *run_dir, struct history *history,
                         struct failure *why) MUST_CHECK;
void journal_close(struct journal *journal);

/* Write every event of the history that is not on disk yet, in order. Stops at the first
 * failure, which is logged once; call again later. */
enum status journal_catch_up(struct journal *journal, const struct history *history) MUST_CHECK;
/* Make what was written durable. */
enum status journal_sync(struct journal *journal) MUST_CHECK;

#endif
