/* Disk use of the run folder. See disk.h. */
#include "daemon/disk.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

void disk_init(struct disk *disk, const char *path)
{
    memset(disk, 0, sizeof *disk);
    snprintf(disk->path, sizeof disk->path, "%s", path);
    disk->work.data = disk;
}

struct walk {
    struct disk *disk;
    uint64_t bytes;
    int n_entries;
};

/* Adds up the blocks below `folder`, which it closes. Links are not followed. */
static void walk_folder(struct walk *walk, int folder, int depth)
{
    DIR *handle = fdopendir(folder);
    if (!handle) {
        close(folder);
        return;
    }
    for (struct dirent *entry; (entry = readdir(handle));) {
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (++walk->n_entries > DISK_MAX_ENTRIES || atomic_load(&walk->disk->stop))
            break;
        if (fstatat(folder, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        walk->bytes += (uint64_t)info.st_blocks * 512;
        if (!S_ISDIR(info.st_mode) || depth == DISK_MAX_DEPTH)
            continue;
        int inner = openat(folder, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (inner >= 0)
            walk_folder(walk, inner, depth + 1);
    }
    closedir(handle);
}

static void work(uv_work_t *request)
{
    struct disk *disk = request->data;
    struct statvfs space;
    disk->walked = false;
    int folder = open(disk->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return;
    bool ok = fstatvfs(folder, &space) == 0;
    struct walk walk = {.disk = disk};
    walk_folder(&walk, folder, 0);
    disk->walked_bytes = walk.bytes;
    disk->walked_free_bytes = ok ? (uint64_t)space.f_bavail * space.f_frsize : 0;
    disk->walked = ok;
}

static void done(uv_work_t *request, int code)
{
    struct disk *disk = request->data;
    disk->running = false;
    if (code || !disk->walked)
        return;
    disk->known = true;
    disk->used_bytes = disk->walked_bytes;
    disk->free_bytes = disk->walked_free_bytes;
}

void disk_refresh(struct disk *disk, uv_loop_t *loop, int64_t now_ms)
{
    if (disk->running || atomic_load(&disk->stop) ||
        (disk->ever_started && now_ms - disk->started_ms < DISK_INTERVAL_MS))
        return;
    disk->started_ms = now_ms;
    disk->ever_started = true;
    disk->running = uv_queue_work(loop, &disk->work, work, done) == 0;
}

void disk_stop(struct disk *disk)
{
    atomic_store(&disk->stop, true);
}
