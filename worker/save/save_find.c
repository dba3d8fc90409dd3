/* Find a save that can be trusted: newest first, every byte checked, work shared by all ranks.
 *
 * Rank 0 looks at folders and reads manifests; what it finds goes to all ranks, which check
 * pieces and agree. Owns nothing after it returns but the manifest it gives away. Main thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/save/agree.h"
#include "worker/save/folders.h"
#include "worker/save/io.h"
#include "worker/save/manifest.h"
#include "worker/save/save.h"
#include "worker/save/shard.h"

enum { MAX_MANIFEST_BYTES = 1 << 30 };

/* n bytes in new memory, rank 0's content on all ranks; *bytes is rank 0's, or NULL elsewhere. */
static enum status share(const struct save_io *io, const char *name, char **bytes, size_t *n,
                         struct failure *why)
{
    uint64_t total = *n;
    enum status status = io->comm->table->broadcast(io->comm, name, &total, sizeof total, why);
    if (status != STATUS_OK) {
        return status;
    }
    if (io->comm->rank != 0) {
        *bytes = heap_alloc((size_t)total + 1);
    }
    status = *bytes != NULL ? STATUS_OK
                            : fail(why, STATUS_OUT_OF_MEMORY,
                                   "no memory for %" PRIu64 " bytes (%s)", total, name);
    status = save_agree(io, name, status, why);
    if (status == STATUS_OK) {
        status = io->comm->table->broadcast(io->comm, name, *bytes, (size_t)total, why);
    }
    if (status == STATUS_OK) {
        *n = (size_t)total;
    }
    return status;
}

/* The saves there are, on all ranks. */
static enum status share_list(const struct save_io *io, struct save_entry **out_entries,
                              size_t *out_n, struct failure *why)
{
    struct save_entry *entries = NULL;
    size_t n = 0;
    enum status status = STATUS_OK;
    if (io->comm->rank == 0) {
        status = folders_list(io->run_dir, &entries, &n, why);
    }
    status = save_agree(io, "save: list", status, why);
    uint64_t total = n;
    if (status == STATUS_OK) {
        status = io->comm->table->broadcast(io->comm, "save: list", &total, sizeof total, why);
    }
    size_t bytes = (size_t)total * sizeof *entries;
    char *raw = (char *)entries;
    if (status == STATUS_OK && total > 0) {
        status = share(io, "save: list", &raw, &bytes, why);
    }
    if (status != STATUS_OK) {
        heap_free(raw);
        return status;
    }
    *out_entries = (struct save_entry *)(void *)raw;
    *out_n = (size_t)total;
    return STATUS_OK;
}

/* A folder's manifest, read by rank 0, unsealed and checked by all. */
static enum status load(const struct save_io *io, const char *folder, const char *name,
                        json_t **out_json, struct failure *why)
{
    char path[IO_PATH_BYTES];
    char *text = NULL;
    size_t n = 0;
    enum status status = io_path(path, why, "%s/manifest.json", folder);
    if (status == STATUS_OK && io->comm->rank == 0) {
        status = io_read_file(path, MAX_MANIFEST_BYTES, &text, &n, why);
    }
    status = save_agree(io, "save: read manifest", status, why);
    if (status == STATUS_OK) {
        status = share(io, "save: manifest", &text, &n, why);
    }
    if (status != STATUS_OK) {
        heap_free(text);
        return status;
    }
    json_t *json = NULL;
    status = manifest_unseal(text, n, path, &json, why);
    heap_free(text);
    if (status == STATUS_OK && json_object_set_new(json, "folder", json_string(name)) != 0) {
        status = fail(why, STATUS_OUT_OF_MEMORY, "no memory for the manifest of %s", folder);
    }
    status = save_agree(io, "save: check manifest", status, why);
    if (status != STATUS_OK) {
        json_decref(json);
        return status;
    }
    *out_json = json;
    return STATUS_OK;
}

/* The pieces whose middle lies in this rank's part of all bytes: [*out_first, *out_end). */
static uint64_t share_of_pieces(const struct manifest *manifest, uint32_t rank, uint32_t size,
                                size_t *out_first, size_t *out_end)
{
    uint64_t total = 0, before = 0, mine = 0;
    for (size_t i = 0; i < manifest->n_pieces; i++) {
        total += manifest->pieces[i].n;
    }
    /* In doubles: the product would not fit, and all ranks compute the same. */
    double low = (double)total / size * rank, high = (double)total / size * (rank + 1);
    *out_first = *out_end = manifest->n_pieces;
    for (size_t i = 0; i < manifest->n_pieces; i++) {
        double middle = (double)before + (double)manifest->pieces[i].n / 2;
        before += manifest->pieces[i].n;
        bool from = middle >= low || rank == 0, to = middle < high || rank == size - 1;
        if (from && *out_first == manifest->n_pieces) {
            *out_first = i;
        }
        if (from && to) {
            *out_end = i + 1;
            mine += manifest->pieces[i].n;
        }
    }
    if (*out_end == manifest->n_pieces && mine == 0) {
        *out_first = manifest->n_pieces;
    }
    return mine * sizeof(float);
}

/* This rank's part of the proof. */
static enum status verify_share(const struct save_io *io, const json_t *json, const char *folder,
                                uint64_t step, struct failure *why)
{
    struct manifest manifest;
    enum status status = manifest_parse(json, &manifest, why);
    if (status != STATUS_OK) {
        return status;
    }
    uint32_t rank = io->comm->rank, size = io->comm->size;
    if (manifest.step != step) {
        status =
            fail(why, STATUS_CORRUPT, "%s holds a save of step %" PRIu64, folder, manifest.step);
    }
    for (uint32_t shard = rank; status == STATUS_OK && shard < manifest.n_shards; shard += size) {
        status = shard_check_file(&manifest, folder, shard, why);
    }
    size_t first, end;
    uint64_t done = 0, total = share_of_pieces(&manifest, rank, size, &first, &end);
    if (status == STATUS_OK) {
        status = shard_check_pieces(io, &manifest, folder, first, end, &done, total, why);
    }
    manifest_fini(&manifest);
    return status;
}

static enum status verify(const struct save_io *io, const struct save_entry *entry,
                          json_t **out_json, struct failure *why)
{
    char name[FOLDERS_NAME_BYTES], folder[IO_PATH_BYTES];
    json_t *json = NULL;
    folders_name(entry, name);
    enum status status = io_path(folder, why, "%s/save/%s", io->run_dir, name);
    if (status == STATUS_OK) {
        status = load(io, folder, name, &json, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    status = verify_share(io, json, folder, entry->step, why);
    status = save_agree(io, "save: verify", status, why);
    if (status != STATUS_OK) {
        json_decref(json);
        return status;
    }
    *out_json = json;
    return STATUS_OK;
}

/* Does this failure say that the save is bad, rather than that we could not look? */
static bool is_damage(enum status status)
{
    return status == STATUS_CORRUPT || status == STATUS_IO || status == STATUS_NOT_FOUND ||
           status == STATUS_PERMISSION || status == STATUS_TOO_LARGE;
}

static enum status none_found(const struct save_io *io, bool latest, uint64_t step,
                              size_t n_damaged, const char *damage, struct failure *why)
{
    if (n_damaged > 0) {
        return fail(why, STATUS_NO_SAVE, "no good save in %s/save: %zu damaged, the newest: %s",
                    io->run_dir, n_damaged, damage);
    }
    if (latest) {
        return fail(why, STATUS_NO_SAVE, "there is no save in %s/save", io->run_dir);
    }
    return fail(why, STATUS_NO_SAVE, "there is no complete save of step %" PRIu64 " in %s/save",
                step, io->run_dir);
}

static enum status find(const struct save_io *io, bool latest, uint64_t step, json_t **out_manifest,
                        uint64_t *out_step, struct failure *why)
{
    struct save_entry *entries = NULL;
    size_t n = 0, n_damaged = 0;
    char damage[FAILURE_TEXT_BYTES] = "";
    enum status status = share_list(io, &entries, &n, why);
    if (status != STATUS_OK) {
        return status;
    }
    for (size_t i = 0; i < n; i++) {
        if (!latest && entries[i].step != step) {
            continue;
        }
        status = verify(io, &entries[i], out_manifest, why);
        if (status == STATUS_OK) {
            *out_step = entries[i].step;
        }
        if (!is_damage(status)) {
            goto done;
        }
        if (io->comm->rank == 0) {
            log_warn("save of step %" PRIu64 " is damaged and not used: %s", entries[i].step,
                     why->text);
        }
        if (n_damaged++ == 0) {
            memcpy(damage, why->text, sizeof damage);
        }
    }
    status = none_found(io, latest, step, n_damaged, damage, why);

done:
    heap_free(entries);
    return status;
}

enum status save_find(const struct save_io *io, bool latest, uint64_t step, json_t **out_manifest,
                      uint64_t *out_step, struct failure *why)
{
    struct failure local;
    double former_s = save_begin_waits(io);
    enum status status = find(io, latest, step, out_manifest, out_step, why != NULL ? why : &local);
    save_end_waits(io, former_s);
    return status;
}
