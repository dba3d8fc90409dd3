/* Owns nothing; any thread. */
#include "proto/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/heap.h"

static enum status read_all(int fd, const char *path, size_t size, char **out_text,
                            size_t *out_bytes, struct failure *why)
{
    char *text = heap_alloc(size + 1);
    size_t n = 0;

    if (!text) {
        return fail(why, STATUS_OUT_OF_MEMORY, "%.256s: out of host memory for its %zu bytes", path,
                    size);
    }
    while (n < size) {
        const ssize_t got = read(fd, text + n, size - n);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            const int error = errno;
            heap_free(text);
            return fail(why, status_from_errno(error), "%.256s: %s", path, strerror(error));
        }
        if (got == 0) {
            break; /* somebody shortened it meanwhile */
        }
        n += (size_t)got;
    }
    text[n] = '\0';
    *out_text = text;
    *out_bytes = n;
    return STATUS_OK;
}

enum status text_file_read(const char *path, size_t max_bytes, char **out_text, size_t *out_bytes,
                           struct failure *why)
{
    struct stat info;
    enum status status;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0 || fstat(fd, &info)) {
        const int error = errno;
        if (fd >= 0) {
            close(fd);
        }
        status = error == ENOENT || error == ENOTDIR ? STATUS_NOT_FOUND : status_from_errno(error);
        return fail(why, status, "%.256s: %s", path, strerror(error));
    }
    if (!S_ISREG(info.st_mode)) {
        status = fail(why, STATUS_INVALID, "%.256s is not a regular file", path);
    } else if ((unsigned long long)info.st_size > max_bytes) {
        status = fail(why, STATUS_TOO_LARGE, "%.256s has %lld bytes; at most %zu are allowed", path,
                      (long long)info.st_size, max_bytes);
    } else {
        status = read_all(fd, path, (size_t)info.st_size, out_text, out_bytes, why);
    }
    close(fd);
    return status;
}

/* 0 or errno. */
static int write_all(int fd, const char *bytes, size_t n)
{
    for (size_t done = 0; done < n;) {
        const ssize_t wrote = write(fd, bytes + done, n - done);
        if (wrote < 0 && errno != EINTR) {
            return errno;
        }
        done += wrote > 0 ? (size_t)wrote : 0;
    }
    return fsync(fd) == 0 ? 0 : errno;
}

enum status text_file_replace(const char *path, const void *bytes, size_t n, struct failure *why)
{
    char part[PATH_MAX];

    if (snprintf(part, sizeof(part), "%s.part", path) >= (int)sizeof(part)) {
        return fail(why, STATUS_TOO_LARGE, "the path is too long: '%.200s...'", path);
    }
    const int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    int error = fd < 0 ? errno : write_all(fd, bytes, n);
    if (fd >= 0 && close(fd) != 0 && error == 0) {
        error = errno;
    }
    if (error == 0 && rename(part, path) != 0) {
        error = errno;
    }
    if (error != 0) {
        if (fd >= 0) {
            unlink(part);
        }
        return fail(why, status_from_errno(error), "cannot write %.256s: %s", path,
                    strerror(error));
    }
    return STATUS_OK;
}
