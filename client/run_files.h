/* What a run leaves in its folder, read when its daemon is gone: events.jsonl and oom.pb.
 *
 * Reads files and nothing else; single-threaded, since parsing changes jansson's allocator for a
 * moment. */
#ifndef BALLAST_CLIENT_RUN_FILES_H
#define BALLAST_CLIENT_RUN_FILES_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"
#include "proto/run.pb-c.h"

/* The last whole line of RUN_DIR/events.jsonl as JSON, the caller's; NULL when there is none. */
json_t *run_files_last_event(const char *run_dir);

struct run_events {
    Ballast__V1__Event **items; /* owned; ascending */
    size_t n;
};
void run_events_fini(struct run_events *events);
/* From RUN_DIR/events.jsonl the first `count` events after sequence number `after`, or the newest
 * `count` when `after` is 0. Lines that are no events are passed over. NOT_FOUND: no such file, so
 * no run was here; TOO_LARGE, OUT_OF_MEMORY, PERMISSION, IO. */
enum status run_files_events(const char *run_dir, uint64_t after, size_t count,
                             struct run_events *out_events, struct failure *why) MUST_CHECK;

#endif
