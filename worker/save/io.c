/* The file operations of saves; see the header. Owns nothing. */
#include "worker/save/io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"

enum status io_path(char out_path[static IO_PATH_BYTES], struct failure *why, const char *format,
                    ...)
{
    char path[IO_PATH_BYTES];
    va_list list;
    va_start(list, format);
    int n = vsnprintf(path, sizeof path, format, list);
    va_end(list);
    if (n < 0 || (size_t)n >= sizeof path) {
        return fail(why, STATUS_TOO_LARGE,
                    "save: a path of %d bytes is too long (limit %d): %.60s...", n,
                    IO_PATH_BYTES - 1, path);
    }
    memcpy(out_path, path, (size_t)n + 1);
    return STATUS_OK;
}

/* "cannot DO PATH: No such file or directory (ENOENT)". */
static enum status failed(struct failure *why, int error, const char *what, const char *path)
{
    return fail(why, status_from_errno(error), "cannot %s %s: %s (%s)", what, path,
                strerrordesc_np(error), strerrorname_np(error));
}

/* The fault point; a fault is what a broken disk says. */
static bool faulty(struct failure *why, const char *what, const char *path, enum status *out_status)
{
    if (!fault_fires(FAULT_IO)) {
        return false;
    }
    *out_status = fail(why, STATUS_IO, "cannot %s %s: %s (EIO), a fault on purpose", what, path,
                       strerrordesc_np(EIO));
    return true;
}

static enum status open_as(const char *path, int flags, const char *what, int *out_fd,
                           struct failure *why)
{
    enum status status;
    if (faulty(why, what, path, &status)) {
        return status;
    }
    int fd;
    do {
        fd = open(path, flags | O_CLOEXEC, 0600);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        return failed(why, errno, what, path);
    }
    *out_fd = fd;
    return STATUS_OK;
}

enum status io_create(const char *path, int *out_fd, struct failure *why)
{
    return open_as(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, "create", out_fd, why);
}

enum status io_open(const char *path, int *out_fd, struct failure *why)
{
    return open_as(path, O_RDONLY, "open", out_fd, why);
}

void io_close(int fd)
{
    close(fd);
}

/* A write that failed: what a person needs to make room. */
static enum status write_failed(int fd, const char *path, size_t n, uint64_t offset, int error,
                                struct failure *why)
{
    struct statvfs fs;
    if (status_from_errno(error) == STATUS_NO_SPACE && fstatvfs(fd, &fs) == 0) {
        return fail(why, STATUS_NO_SPACE,
                    "cannot write %zu bytes at byte %llu of %s: %s (%s); %llu bytes are free there",
                    n, (unsigned long long)offset, path, strerrordesc_np(error),
                    strerrorname_np(error), (unsigned long long)fs.f_bavail * fs.f_frsize);
    }
    return fail(why, status_from_errno(error), "cannot write %zu bytes at byte %llu of %s: %s (%s)",
                n, (unsigned long long)offset, path, strerrordesc_np(error),
                strerrorname_np(error));
}

enum status io_write_at(int fd, const char *path, const void *bytes, size_t n, uint64_t offset,
                        struct failure *why)
{
    enum status status;
    if (faulty(why, "write", path, &status)) {
        return status;
    }
    size_t done = 0;
    while (done < n) {
        ssize_t wrote = pwrite(fd, (const uint8_t *)bytes + done, n - done, (off_t)(offset + done));
        if (wrote > 0) {
            done += (size_t)wrote;
        } else if (wrote == 0 || errno != EINTR) {
            /* A write of nothing would be repeated for ever. */
            return write_failed(fd, path, n - done, offset + done, wrote == 0 ? EIO : errno, why);
        }
    }
    return STATUS_OK;
}

enum status io_read_at(int fd, const char *path, void *out_bytes, size_t n, uint64_t offset,
                       struct failure *why)
{
    enum status status;
    if (faulty(why, "read", path, &status)) {
        return status;
    }
    size_t done = 0;
    while (done < n) {
        ssize_t got = pread(fd, (uint8_t *)out_bytes + done, n - done, (off_t)(offset + done));
        if (got > 0) {
            done += (size_t)got;
        } else if (got == 0) {
            return fail(why, STATUS_CORRUPT, "%s ends at byte %llu, where %zu more should follow",
                        path, (unsigned long long)(offset + done), n - done);
        } else if (errno != EINTR) {
            return fail(why, status_from_errno(errno),
                        "cannot read %zu bytes at byte %llu of %s: %s (%s)", n - done,
                        (unsigned long long)(offset + done), path, strerrordesc_np(errno),
                        strerrorname_np(errno));
        }
    }
    return STATUS_OK;
}

enum status io_size(int fd, const char *path, uint64_t *out_bytes, struct failure *why)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return failed(why, errno, "examine", path);
    }
    *out_bytes = (uint64_t)info.st_size;
    return STATUS_OK;
}

enum status io_sync(int fd, const char *path, struct failure *why)
{
    enum status status;
    if (faulty(why, "sync", path, &status)) {
        return status;
    }
    int code;
    do {
        code = fsync(fd);
    } while (code != 0 && errno == EINTR);
    return code == 0 ? STATUS_OK : failed(why, errno, "sync", path);
}

enum status io_sync_folder(const char *path, struct failure *why)
{
    int fd;
    enum status status = open_as(path, O_RDONLY | O_DIRECTORY, "open folder", &fd, why);
    if (status == STATUS_OK) {
        status = io_sync(fd, path, why);
        io_close(fd);
    }
    return status;
}

enum status io_rename(const char *from, const char *to, struct failure *why)
{
    enum status status;
    if (faulty(why, "rename to", to, &status)) {
        return status;
    }
    return rename(from, to) == 0 ? STATUS_OK : failed(why, errno, "rename to", to);
}

enum status io_swap(const char *one, const char *other, struct failure *why)
{
    enum status status;
    if (faulty(why, "swap with", other, &status)) {
        return status;
    }
    if (renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0) {
        return STATUS_OK;
    }
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) {
        return fail(why, STATUS_UNSUPPORTED, "the file system of %s cannot exchange names", other);
    }
    return failed(why, errno, "swap with", other);
}

enum status io_unlink(const char *path, struct failure *why)
{
    enum status status;
    if (faulty(why, "remove", path, &status)) {
        return status;
    }
    return unlink(path) == 0 ? STATUS_OK : failed(why, errno, "remove", path);
}

enum status io_make_folder(const char *path, struct failure *why)
{
    enum status status;
    if (faulty(why, "make folder", path, &status)) {
        return status;
    }
    if (mkdir(path, 0700) == 0) {
        return STATUS_OK;
    }
    if (errno == EEXIST) {
        return fail(why, STATUS_CONFLICT, "cannot make folder %s: it exists", path);
    }
    return failed(why, errno, "make folder", path);
}

/* Remove what is in a folder; goes on after a failure and keeps the first. */
static enum status remove_files(const char *path, DIR *folder, struct failure *why)
{
    enum status first = STATUS_OK;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) {
            continue;
        }
        char file[IO_PATH_BYTES];
        struct failure here = {0};
        enum status status = io_path(file, &here, "%s/%s", path, entry->d_name);
        if (status == STATUS_OK) {
            status = io_unlink(file, &here);
        }
        if (status != STATUS_OK && first == STATUS_OK) {
            first = fail(why, status, "%s", here.text);
        }
    }
    return first;
}

enum status io_remove_folder(const char *path, struct failure *why)
{
    char manifest[IO_PATH_BYTES];
    enum status status = io_path(manifest, why, "%s/manifest.json", path);
    if (status == STATUS_OK && io_exists(manifest)) {
        status = io_unlink(manifest, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    DIR *folder = opendir(path);
    if (folder == NULL) {
        return failed(why, errno, "open folder", path);
    }
    status = remove_files(path, folder, why);
    closedir(folder);
    if (status == STATUS_OK && !faulty(why, "remove folder", path, &status) && rmdir(path) != 0) {
        status = failed(why, errno, "remove folder", path);
    }
    return status;
}

bool io_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

enum status io_write_file(const char *path, const void *bytes, size_t n, struct failure *why)
{
    int fd;
    enum status status = io_create(path, &fd, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = io_write_at(fd, path, bytes, n, 0, why);
    if (status == STATUS_OK) {
        status = io_sync(fd, path, why);
    }
    io_close(fd);
    return status;
}

enum status io_read_file(const char *path, size_t limit, char **out_text, size_t *out_n,
                         struct failure *why)
{
    int fd;
    enum status status = io_open(path, &fd, why);
    if (status != STATUS_OK) {
        return status;
    }
    uint64_t n = 0;
    char *text = NULL;
    status = io_size(fd, path, &n, why);
    if (status == STATUS_OK && n > limit) {
        status = fail(why, STATUS_TOO_LARGE, "%s has %llu bytes, at most %zu are read", path,
                      (unsigned long long)n, limit);
    }
    if (status == STATUS_OK) {
        text = heap_alloc((size_t)n + 1);
        if (text == NULL) {
            status = fail(why, STATUS_OUT_OF_MEMORY, "no memory for the %llu bytes of %s",
                          (unsigned long long)n, path);
        }
    }
    if (status == STATUS_OK) {
        status = io_read_at(fd, path, text, (size_t)n, 0, why);
    }
    io_close(fd);
    if (status != STATUS_OK) {
        heap_free(text);
        return status;
    }
    text[n] = '\0';
    *out_text = text;
    *out_n = (size_t)n;
    return STATUS_OK;
}
