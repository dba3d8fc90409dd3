/* The log: one line a message, to stderr and, when set, to a rotated file.
 *
 * On a terminal `HH:MM:SS level rank 0: text`; otherwise logfmt with time, level, rank.
 * One of the two globals of the project (the other is the fault switch). Any thread. */
#ifndef BALLAST_PROTO_BASE_LOG_H
#define BALLAST_PROTO_BASE_LOG_H

#include <stdbool.h>
#include "proto/base/status.h"

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

/* Program name and rank (-1: none) that every line carries. Call once, first. */
void log_init(const char *program, int rank, enum log_level level);
/* Also append to this file, rotating to `path.1` at 64 MiB. NULL closes it. */
enum status log_to_file(const char *path) MUST_CHECK;
/* Stop or resume writing to stderr (errors are always written). */
void log_quiet(bool quiet);

void log_at(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define log_error(...) log_at(LOG_ERROR, __VA_ARGS__)
#define log_warn(...) log_at(LOG_WARN, __VA_ARGS__)
#define log_info(...) log_at(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_at(LOG_DEBUG, __VA_ARGS__)

/* For tests: how many error lines were written so far. */
unsigned log_error_count(void);

#endif
