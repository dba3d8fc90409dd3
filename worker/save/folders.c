/* The folders of saves on disk; see the header. Owns nothing. Rank 0. */
#include "worker/save/folders.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"

void folders_name(const struct save_entry *entry, char out_name[static FOLDERS_NAME_BYTES])
{
    snprintf(out_name, FOLDERS_NAME_BYTES, "step-%" PRIu64 "%s", entry->step,
             entry->old ? ".old" : "");
}

/* The step in "step-N" + suffix, spelled as we spell it. */
static bool step_from_name(const char *name, const char *suffix, uint64_t *out_step)
{
    uint64_t step;
    char again[64];
    if (sscanf(name, "step-%" SCNu64, &step) != 1) {
        return false;
    }
    snprintf(again, sizeof again, "step-%" PRIu64 "%s", step, suffix);
    if (strcmp(name, again) != 0) {
        return false;
    }
    *out_step = step;
    return true;
}

/* Newest first; of the same step, the one in place before the former one. */
static int compare_entries(const void *a, const void *b)
{
    const struct save_entry *left = a, *right = b;
    if (left->step != right->step) {
        return left->step < right->step ? 1 : -1;
    }
    return (int)left->old - (int)right->old;
}

static bool has_manifest(const char *run_dir, const char *name)
{
    char path[IO_PATH_BYTES];
    return io_path(path, NULL, "%s/save/%s/manifest.json", run_dir, name) == STATUS_OK &&
           io_exists(path);
}

static enum status open_saves(const char *run_dir, DIR **out_folder, struct failure *why)
{
    char path[IO_PATH_BYTES];
    enum status status = io_path(path, why, "%s/save", run_dir);
    if (status != STATUS_OK) {
        return status;
    }
    if (fault_fires(FAULT_IO)) {
        return fail(why, STATUS_IO, "cannot open folder %s: a fault on purpose (EIO)", path);
    }
    DIR *folder = opendir(path);
    if (folder == NULL) {
        return fail(why, status_from_errno(errno), "cannot open folder %s: %s (%s)", path,
                    strerrordesc_np(errno), strerrorname_np(errno));
    }
    *out_folder = folder;
    return STATUS_OK;
}

enum status folders_list(const char *run_dir, struct save_entry **out_entries, size_t *out_n,
                         struct failure *why)
{
    DIR *folder = NULL;
    struct save_entry *entries = NULL;
    size_t n = 0, capacity = 0;
    enum status status = open_saves(run_dir, &folder, why);
    if (status != STATUS_OK && status != STATUS_NOT_FOUND) {
        return status;
    }
    for (struct dirent *item; folder != NULL && (item = readdir(folder)) != NULL;) {
        struct save_entry entry = {0};
        entry.old = step_from_name(item->d_name, ".old", &entry.step);
        if ((!entry.old && !step_from_name(item->d_name, "", &entry.step)) ||
            !has_manifest(run_dir, item->d_name)) {
            continue;
        }
        if (n == capacity) {
            capacity = capacity == 0 ? 16 : 2 * capacity;
            struct save_entry *more = heap_realloc(entries, capacity * sizeof *more);
            if (more == NULL) {
                heap_free(entries);
                closedir(folder);
                return fail(why, STATUS_OUT_OF_MEMORY, "no memory for a list of %zu saves",
                            capacity);
            }
            entries = more;
        }
        entries[n++] = entry;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    if (n > 1) {
        qsort(entries, n, sizeof *entries, compare_entries);
    }
    *out_entries = entries;
    *out_n = n;
    return STATUS_OK;
}

/* One leftover. */
static void clean_one(const char *run_dir, const char *name)
{
    uint64_t step;
    char path[IO_PATH_BYTES], back[IO_PATH_BYTES];
    struct failure why = {0};
    enum status status = io_path(path, &why, "%s/save/%s", run_dir, name);
    if (status == STATUS_OK && step_from_name(name, ".tmp", &step)) {
        status = io_remove_folder(path, &why);
    } else if (status == STATUS_OK && step_from_name(name, ".old", &step)) {
        struct save_entry entry = {.step = step};
        char now[FOLDERS_NAME_BYTES];
        folders_name(&entry, now);
        status = io_path(back, &why, "%s/save/%s", run_dir, now);
        if (status == STATUS_OK && has_manifest(run_dir, now)) {
            status = io_remove_folder(path, &why);
        } else if (status == STATUS_OK) {
            status = io_rename(path, back, &why);
        }
    }
    if (status != STATUS_OK) {
        log_warn("save: leftovers stay: %s", why.text);
    }
}

void folders_clean(const char *run_dir)
{
    DIR *folder;
    struct failure why = {0};
    if (open_saves(run_dir, &folder, &why) != STATUS_OK) {
        log_warn("save: leftovers stay: %s", why.text);
        return;
    }
    for (struct dirent *item; (item = readdir(folder)) != NULL;) {
        clean_one(run_dir, item->d_name);
    }
    closedir(folder);
}

/* How a folder got its final name, and so how to take it back. */
enum publication { RENAMED, EXCHANGED, STEPPED_ASIDE };

/* Give `tmp` the name `final`. Where names cannot be exchanged, the former save steps aside under
 * a name that counts while the new one is not in its place. */
static enum status put_in_place(const char *tmp, const char *final, const char *old,
                                enum publication *out_how, struct failure *why)
{
    if (!io_exists(final)) {
        *out_how = RENAMED;
        return io_rename(tmp, final, why);
    }
    *out_how = EXCHANGED;
    enum status status = io_swap(tmp, final, why);
    if (status != STATUS_UNSUPPORTED) {
        return status;
    }
    *out_how = STEPPED_ASIDE;
    status = io_rename(final, old, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = io_rename(tmp, final, why);
    if (status != STATUS_OK) {
        struct failure ignored; /* what fails here is put right by folders_clean() */
        enum status back = io_rename(old, final, &ignored);
        (void)back;
    }
    return status;
}

/* The names as they were, as far as the disk allows. */
static void take_back(const char *tmp, const char *final, const char *old, enum publication how)
{
    struct failure ignored;
    enum status status =
        how == EXCHANGED ? io_swap(tmp, final, &ignored) : io_rename(final, tmp, &ignored);
    if (status == STATUS_OK && how == STEPPED_ASIDE) {
        status = io_rename(old, final, &ignored);
    }
    (void)status;
}

static enum status sync_saves(const char *run_dir, struct failure *why)
{
    char folder[IO_PATH_BYTES];
    enum status status = io_path(folder, why, "%s/save", run_dir);
    return status == STATUS_OK ? io_sync_folder(folder, why) : status;
}

enum status folders_publish(const char *run_dir, const char *tmp, const char *final,
                            struct failure *why)
{
    char old[IO_PATH_BYTES];
    enum status status = io_path(old, why, "%s.old", final);
    enum publication how = RENAMED;
    if (status == STATUS_OK) {
        status = put_in_place(tmp, final, old, &how, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    status = sync_saves(run_dir, why);
    if (status != STATUS_OK) {
        take_back(tmp, final, old, how); /* it may not last, so it is not promised */
        return status;
    }
    struct failure left = {0};
    if (how != RENAMED && io_remove_folder(how == EXCHANGED ? tmp : old, &left) != STATUS_OK) {
        log_warn("save: leftovers stay: %s", left.text);
    }
    return STATUS_OK;
}

/* A save ends at once by losing its name; what is left in between, folders_clean() removes. */
static enum status remove_save(const char *run_dir, const char *name, struct failure *why)
{
    char path[IO_PATH_BYTES], tmp[IO_PATH_BYTES];
    enum status status = io_path(path, why, "%s/save/%s", run_dir, name);
    if (status == STATUS_OK) {
        status = io_path(tmp, why, "%s.tmp", path);
    }
    if (status == STATUS_OK) {
        status = io_rename(path, tmp, why);
    }
    if (status == STATUS_OK) {
        /* Lest a crash gives it back its name when it is half empty. */
        status = sync_saves(run_dir, why);
    }
    return status == STATUS_OK ? io_remove_folder(tmp, why) : status;
}

void folders_prune(const char *run_dir, uint64_t keep, uint64_t written)
{
    struct save_entry *entries;
    size_t n;
    struct failure why = {0};
    if (keep == 0) {
        return;
    }
    if (folders_list(run_dir, &entries, &n, &why) != STATUS_OK) {
        log_warn("save: former saves stay: %s", why.text);
        return;
    }
    uint64_t kept = 1; /* the one just written */
    for (size_t i = 0; i < n; i++) {
        if (entries[i].step == written && !entries[i].old) {
            continue;
        }
        if (kept < keep) {
            kept++;
            continue;
        }
        char name[FOLDERS_NAME_BYTES];
        folders_name(&entries[i], name);
        if (remove_save(run_dir, name, &why) != STATUS_OK) {
            log_warn("save: a former save stays: %s", why.text);
        }
    }
    heap_free(entries);
}
