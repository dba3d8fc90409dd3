/* A whole small file: into memory, or onto disk in place of the one before. Any thread. */
#ifndef BALLAST_PROTO_TEXT_FILE_H
#define BALLAST_PROTO_TEXT_FILE_H

#include <stddef.h>
#include "proto/base/status.h"

/* Read a regular file of at most max_bytes. The text is NUL-terminated and the caller's
 * (heap_free). NOT_FOUND, INVALID (no regular file; a pipe does not hold the caller), TOO_LARGE,
 * OUT_OF_MEMORY, PERMISSION, IO name the path. */
enum status text_file_read(const char *path, size_t max_bytes, char **out_text, size_t *out_bytes,
                           struct failure *why) MUST_CHECK;
/* Put these bytes in the place of `path`, durably and as a whole: who opens it sees the old ones
 * or the new ones. Writes `path`.part first; mode 0600. On failure the old file stays. TOO_LARGE
 * (the path), NO_SPACE, PERMISSION, IO. */
enum status text_file_replace(const char *path, const void *bytes, size_t n,
                              struct failure *why) MUST_CHECK;

#endif
