/* oom.pb: the last out-of-memory report of a run, in its folder, for whoever asks after the end.
 *
 * The daemon writes it and reads it when it is started again; a client reads it when there is no
 * daemon any more. One OomReport, packed. Any thread. */
#ifndef BALLAST_PROTO_OOM_FILE_H
#define BALLAST_PROTO_OOM_FILE_H

#include "proto/base/status.h"
#include "proto/run.pb-c.h"

/* Replace RUN_DIR/oom.pb, whole or not at all. What text_file_replace() says. */
enum status oom_file_write(const char *run_dir, const Ballast__V1__OomReport *report,
                           struct failure *why) MUST_CHECK;
/* The report is the caller's (frame_free). NOT_FOUND: there was no shortage in this run; CORRUPT:
 * the file is something else; OUT_OF_MEMORY, PERMISSION, IO. */
enum status oom_file_read(const char *run_dir, Ballast__V1__OomReport **out_report,
                          struct failure *why) MUST_CHECK;

#endif
