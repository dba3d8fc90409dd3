/* Rules for the names of sockets and for the folder they live in. Touches the file system, never
 * a socket. Any thread. */
#include "proto/socket_path.h"

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/heap.h"

static const char control_suffix[] = ".sock";
static const char link_suffix[] = ".link.sock";

static bool ends_with(const char *text, const char *suffix)
{
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && memcmp(text + n - m, suffix, m) == 0;
}

enum status socket_path_check_run_id(const char *run_id, struct failure *why)
{
    size_t length = strlen(run_id);
    if (length == 0 || length > SOCKET_PATH_MAX_RUN_ID_BYTES)
        return fail(why, STATUS_INVALID, "a run id has 1 to %d characters, this one has %zu",
                    SOCKET_PATH_MAX_RUN_ID_BYTES, length);
    for (size_t i = 0; i < length; i++) {
        char c = run_id[i];
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!plain && !strchr("._-", c))
            return fail(why, STATUS_INVALID,
                        "a run id is made of letters, digits, '.', '_' and '-'; byte %zu of this "
                        "one is 0x%02x", i, (unsigned)(unsigned char)c);
    }
    if (run_id[0] == '.' || ends_with(run_id, ".link"))
        return fail(why, STATUS_INVALID,
                    "run id '%s': it may not start with '.' or end in '.link'", run_id);
    return STATUS_OK;
}

enum status socket_path_check(const char *path, struct failure *why)
{
    size_t length = strlen(path);
    if (length == 0 || path[0] != '/')
        return fail(why, STATUS_INVALID, "a socket's path has to be absolute, this one is '%s'",
                    path);
    if (length >= SOCKET_PATH_BYTES)
        return fail(why, STATUS_TOO_LARGE,
                    "the socket's path is %zu bytes long, the system's limit is %d; set "
                    "XDG_RUNTIME_DIR to a shorter folder: %s",
                    length, SOCKET_PATH_BYTES - 1, path);
    if (strstr(path, "/../") || ends_with(path, "/..") || ends_with(path, "/"))
        return fail(why, STATUS_INVALID, "a socket's path may not hold '..' or end in '/': %s",
                    path);
    return STATUS_OK;
}

/* The two folders that may be in use, best first. Returns how many: the runtime folder is left
 * out when it is unset, not there, or too long for a run's socket. */
static int directories(char out_paths[2][SOCKET_PATH_BYTES])
{
    int n = 0;
    /* Leave room for "/RUN.link.sock". */
    size_t room = SOCKET_PATH_BYTES - SOCKET_PATH_MAX_RUN_ID_BYTES - sizeof link_suffix - 1;
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    struct stat info;
    if (runtime && runtime[0] == '/' && strlen(runtime) + strlen("/ballast") <= room &&
        stat(runtime, &info) == 0 && S_ISDIR(info.st_mode))
        snprintf(out_paths[n++], SOCKET_PATH_BYTES, "%s/ballast", runtime);
    snprintf(out_paths[n++], SOCKET_PATH_BYTES, "/tmp/ballast-%u", (unsigned)geteuid());
    return n;
}

void socket_path_directory(char out_path[static SOCKET_PATH_BYTES])
{
    char paths[2][SOCKET_PATH_BYTES];
    directories(paths);
    memcpy(out_path, paths[0], SOCKET_PATH_BYTES);
}

enum status socket_path_for_run(const char *run_id, char out_control[static SOCKET_PATH_BYTES],
                                char out_link[static SOCKET_PATH_BYTES], struct failure *why)
{
    enum status status = socket_path_check_run_id(run_id, why);
    if (status != STATUS_OK)
        return status;
    char folder[SOCKET_PATH_BYTES], control[2 * SOCKET_PATH_BYTES], link[2 * SOCKET_PATH_BYTES];
    socket_path_directory(folder);
    snprintf(control, sizeof control, "%s/%s%s", folder, run_id, control_suffix);
    snprintf(link, sizeof link, "%s/%s%s", folder, run_id, link_suffix);
    status = socket_path_check(link, why); /* the longer of the two */
    if (status != STATUS_OK)
        return status;
    memcpy(out_control, control, SOCKET_PATH_BYTES);
    memcpy(out_link, link, SOCKET_PATH_BYTES);
    return STATUS_OK;
}

enum status socket_path_prepare_directory(const char *socket_path, struct failure *why)
{
    enum status status = socket_path_check(socket_path, why);
    if (status != STATUS_OK)
        return status;
    char folder[SOCKET_PATH_BYTES];
    size_t length = (size_t)(strrchr(socket_path, '/') - socket_path);
    memcpy(folder, socket_path, length);
    folder[length] = '\0';
    if (length == 0)
        return fail(why, STATUS_PERMISSION, "sockets do not go into the root folder: %s",
                    socket_path);
    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
        return fail(why, status_from_errno(errno), "cannot create the sockets' folder %s: %s",
                    folder, strerror(errno));
    struct stat info;
    if (lstat(folder, &info) != 0)
        return fail(why, status_from_errno(errno), "cannot look at the sockets' folder %s: %s",
                    folder, strerror(errno));
    if (S_ISLNK(info.st_mode))
        return fail(why, STATUS_PERMISSION,
                    "the sockets' folder %s is a symbolic link, which somebody else could turn; "
                    "remove it", folder);
    if (!S_ISDIR(info.st_mode))
        return fail(why, STATUS_PERMISSION, "the sockets' folder %s is not a folder; remove it",
                    folder);
    if (info.st_uid != geteuid())
        return fail(why, STATUS_PERMISSION,
                    "the sockets' folder %s belongs to uid %u, not to uid %u; remove it or set "
                    "XDG_RUNTIME_DIR", folder, (unsigned)info.st_uid, (unsigned)geteuid());
    if (info.st_mode & 077)
        return fail(why, STATUS_PERMISSION,
                    "the sockets' folder %s has mode %04o and is open to others; chmod 700 it",
                    folder, (unsigned)(info.st_mode & 07777));
    return STATUS_OK;
}

struct found {
    struct timespec changed;
    char path[SOCKET_PATH_BYTES];
};

static int newest_first(const void *left, const void *right)
{
    const struct found *a = left, *b = right;
    if (a->changed.tv_sec != b->changed.tv_sec)
        return a->changed.tv_sec < b->changed.tv_sec ? 1 : -1;
    if (a->changed.tv_nsec != b->changed.tv_nsec)
        return a->changed.tv_nsec < b->changed.tv_nsec ? 1 : -1;
    return strcmp(a->path, b->path);
}

/* Add the control sockets of one folder; one that is not there or not ours adds none. */
static size_t scan(const char *folder, struct found *found, size_t count)
{
    struct stat info;
    if (lstat(folder, &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid())
        return count;
    DIR *handle = opendir(folder);
    if (!handle)
        return count;
    for (struct dirent *entry; count < SOCKET_PATH_MAX_FOUND && (entry = readdir(handle));) {
        if (!ends_with(entry->d_name, control_suffix) || ends_with(entry->d_name, link_suffix))
            continue;
        struct found *next = &found[count];
        int n = snprintf(next->path, sizeof next->path, "%s/%s", folder, entry->d_name);
        if (n >= (int)sizeof next->path || lstat(next->path, &info) != 0 ||
            !S_ISSOCK(info.st_mode) || info.st_uid != geteuid())
            continue;
        next->changed = info.st_ctim;
        count++;
    }
    closedir(handle);
    return count;
}

enum status socket_path_discover(struct socket_path_list *out_list, struct failure *why)
{
    struct found *found = heap_calloc(SOCKET_PATH_MAX_FOUND, sizeof *found);
    if (!found)
        return fail(why, STATUS_OUT_OF_MEMORY, "out of memory while looking for sockets");
    char folders[2][SOCKET_PATH_BYTES];
    size_t count = 0;
    for (int i = 0, n = directories(folders); i < n; i++)
        count = scan(folders[i], found, count);
    qsort(found, count, sizeof *found, newest_first);
    struct socket_path_list list = {.count = count};
    list.paths = heap_calloc(count + 1, SOCKET_PATH_BYTES);
    for (size_t i = 0; list.paths && i < count; i++)
        memcpy(list.paths[i], found[i].path, SOCKET_PATH_BYTES);
    heap_free(found);
    if (!list.paths)
        return fail(why, STATUS_OUT_OF_MEMORY, "out of memory while looking for sockets");
    *out_list = list;
    return STATUS_OK;
}

void socket_path_list_fini(struct socket_path_list *list)
{
    heap_free(list->paths);
    *list = (struct socket_path_list){0};
}
