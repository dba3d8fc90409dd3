/* Every file operation of a save, in one place.
 *
 * Each call asks the fault point `io` first, goes on after EINTR and short writes, and on
 * failure says what it did to which file and what errno said. Files are made 0600, folders
 * 0700. Main thread. */
#ifndef BALLAST_WORKER_SAVE_IO_H
#define BALLAST_WORKER_SAVE_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"

enum { IO_PATH_BYTES = 4096 };

/* A path from a format; TOO_LARGE when it does not fit. */
enum status io_path(char out_path[static IO_PATH_BYTES], struct failure *why, const char *format,
                    ...) __attribute__((format(printf, 3, 4))) MUST_CHECK;

/* A file that must not exist yet, for writing. */
enum status io_create(const char *path, int *out_fd, struct failure *why) MUST_CHECK;
enum status io_open(const char *path, int *out_fd, struct failure *why) MUST_CHECK;
/* After io_sync() nothing can go wrong any more, so nothing is returned. */
void io_close(int fd);
enum status io_write_at(int fd, const char *path, const void *bytes, size_t n, uint64_t offset,
                        struct failure *why) MUST_CHECK;
/* Exactly n bytes; CORRUPT when the file ends before. */
enum status io_read_at(int fd, const char *path, void *out_bytes, size_t n, uint64_t offset,
                       struct failure *why) MUST_CHECK;
enum status io_size(int fd, const char *path, uint64_t *out_bytes, struct failure *why) MUST_CHECK;
enum status io_sync(int fd, const char *path, struct failure *why) MUST_CHECK;
enum status io_sync_folder(const char *path, struct failure *why) MUST_CHECK;
enum status io_rename(const char *from, const char *to, struct failure *why) MUST_CHECK;
/* Exchange two names atomically; UNSUPPORTED where the file system cannot. */
enum status io_swap(const char *one, const char *other, struct failure *why) MUST_CHECK;
enum status io_unlink(const char *path, struct failure *why) MUST_CHECK;
/* CONFLICT when it exists. */
enum status io_make_folder(const char *path, struct failure *why) MUST_CHECK;
/* A folder and the files in it (it has no folders). The manifest goes first, so that what is
 * left after a failure is no save. */
enum status io_remove_folder(const char *path, struct failure *why) MUST_CHECK;
bool io_exists(const char *path);

/* A whole small file. Written: created, written, synced, closed. Read: into new memory with
 * a closing zero (heap_free it); TOO_LARGE above the limit. */
enum status io_write_file(const char *path, const void *bytes, size_t n,
                          struct failure *why) MUST_CHECK;
enum status io_read_file(const char *path, size_t limit, char **out_text, size_t *out_n,
                         struct failure *why) MUST_CHECK;

#endif
