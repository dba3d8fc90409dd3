/* Write a save: shards by all ranks, then manifest and names by rank 0.
 *
 * Every part ends in an agreement of all ranks, so that a failure anywhere is everybody's and
 * nobody waits for a rank that gave up. Until the folder gets its final name the save does not
 * exist. Owns nothing after it returns. Main thread. */
#include "worker/save/save.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/save/agree.h"
#include "worker/save/folders.h"
#include "worker/save/io.h"
#include "worker/save/manifest.h"
#include "worker/save/shard.h"

enum { MAX_TABLE_BYTES = 1 << 30 };

struct job {
    const struct save_io *io;
    uint64_t step;
    char tmp[IO_PATH_BYTES];
    char final[IO_PATH_BYTES];
};

/* Rank 0: the folder of all saves, without leftovers, and in it this save's folder. */
static enum status prepare(const struct job *job, struct failure *why)
{
    char folder[IO_PATH_BYTES];
    enum status status = io_path(folder, why, "%s/save", job->io->run_dir);
    if (status != STATUS_OK) {
        return status;
    }
    if (!io_exists(folder)) {
        status = io_make_folder(folder, why);
        if (status == STATUS_OK) {
            status = io_sync_folder(job->io->run_dir, why);
        }
        if (status != STATUS_OK) {
            return status;
        }
    }
    folders_clean(job->io->run_dir);
    return io_make_folder(job->tmp, why);
}

/* This rank's shard, and beside it its entry of the manifest as a sealed text for rank 0. */
static enum status write_shard(const struct job *job, const struct save_piece *pieces,
                               size_t n_pieces, struct failure *why)
{
    json_t *entry = NULL;
    char *text = NULL;
    size_t n = 0;
    char path[IO_PATH_BYTES];
    enum status status = shard_write(job->io, job->tmp, job->step, pieces, n_pieces, &entry, why);
    if (status == STATUS_OK) {
        status = manifest_seal(entry, &text, &n, why);
    }
    if (status == STATUS_OK) {
        status = io_path(path, why, "%s/rank-%u.json", job->tmp, job->io->comm->rank);
    }
    if (status == STATUS_OK) {
        status = io_write_file(path, text, n, why);
    }
    heap_free(text);
    json_decref(entry);
    return status;
}

/* Rank 0: one rank's entry, read back and removed. */
static enum status take_entry(const struct job *job, uint32_t rank, json_t *shards,
                              struct failure *why)
{
    char path[IO_PATH_BYTES];
    char *text = NULL;
    size_t n = 0;
    json_t *entry = NULL;
    enum status status = io_path(path, why, "%s/rank-%u.json", job->tmp, rank);
    if (status == STATUS_OK) {
        status = io_read_file(path, MAX_TABLE_BYTES, &text, &n, why);
    }
    if (status == STATUS_OK) {
        status = manifest_unseal(text, n, path, &entry, why);
    }
    heap_free(text);
    if (status == STATUS_OK && json_array_append_new(shards, entry) != 0) {
        status = fail(why, STATUS_OUT_OF_MEMORY, "no memory for the manifest of %u ranks",
                      job->io->comm->size);
    }
    return status == STATUS_OK ? io_unlink(path, why) : status;
}

/* The manifest as it will be read, so what could not be read is not written. */
static enum status check_manifest(const json_t *json, struct failure *why)
{
    struct manifest manifest;
    enum status status = manifest_parse(json, &manifest, why);
    if (status == STATUS_OK) {
        status = manifest_check_complete(&manifest, why);
        manifest_fini(&manifest);
    }
    return status;
}

static enum status make_manifest(const struct job *job, json_t *meta, json_t **out_manifest,
                                 struct failure *why)
{
    json_t *shards = json_array();
    json_t *manifest = json_pack("{s:s, s:i, s:I, s:I, s:O, s:o}", "format", "ballast save",
                                 "version", MANIFEST_VERSION, "step", (json_int_t)job->step,
                                 "world_size", (json_int_t)job->io->comm->size, "meta",
                                 meta != NULL ? meta : json_null(), "shards", shards);
    if (manifest == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the manifest of %u ranks",
                    job->io->comm->size);
    }
    enum status status = STATUS_OK;
    for (uint32_t rank = 0; status == STATUS_OK && rank < job->io->comm->size; rank++) {
        status = take_entry(job, rank, shards, why);
    }
    if (status == STATUS_OK) {
        status = check_manifest(manifest, why);
    }
    if (status != STATUS_OK) {
        json_decref(manifest);
        return status;
    }
    *out_manifest = manifest;
    return STATUS_OK;
}

/* Rank 0: manifest.json comes to be, whole and synced, as the last file of the folder. */
static enum status write_manifest(const struct job *job, json_t *meta, struct failure *why)
{
    json_t *manifest = NULL;
    char *text = NULL;
    size_t n = 0;
    char tmp[IO_PATH_BYTES], final[IO_PATH_BYTES];
    enum status status = make_manifest(job, meta, &manifest, why);
    if (status == STATUS_OK) {
        status = manifest_seal(manifest, &text, &n, why);
    }
    if (status == STATUS_OK) {
        status = io_path(tmp, why, "%s/manifest.json.tmp", job->tmp);
    }
    if (status == STATUS_OK) {
        status = io_path(final, why, "%s/manifest.json", job->tmp);
    }
    if (status == STATUS_OK) {
        status = io_write_file(tmp, text, n, why);
    }
    if (status == STATUS_OK) {
        status = io_rename(tmp, final, why);
    }
    if (status == STATUS_OK) {
        status = io_sync_folder(job->tmp, why);
    }
    heap_free(text);
    json_decref(manifest);
    return status;
}

/* Rank 0, after a failure that all ranks know of: nobody writes into the folder any more. */
static void discard(const struct job *job)
{
    struct failure why = {0};
    if (job->io->comm->rank == 0 && io_exists(job->tmp) &&
        io_remove_folder(job->tmp, &why) != STATUS_OK) {
        log_warn("save: leftovers stay until the next save: %s", why.text);
    }
}

static enum status write_parts(const struct job *job, const struct save_piece *pieces,
                               size_t n_pieces, json_t *meta, struct failure *why)
{
    const struct save_io *io = job->io;
    bool root = io->comm->rank == 0;
    enum status status = root ? prepare(job, why) : STATUS_OK;
    status = save_agree(io, "save: folder", status, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = write_shard(job, pieces, n_pieces, why);
    status = save_agree(io, "save: shards", status, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = root ? write_manifest(job, meta, why) : STATUS_OK;
    if (root && status == STATUS_OK) {
        status = folders_publish(io->run_dir, job->tmp, job->final, why);
    }
    return save_agree(io, "save: manifest", status, why);
}

enum status save_write(const struct save_io *io, uint64_t step, const struct save_piece *pieces,
                       size_t n_pieces, json_t *meta, uint64_t keep, char *out_path,
                       size_t out_path_bytes, struct failure *why)
{
    struct job job = {.io = io, .step = step};
    struct save_entry entry = {.step = step};
    struct failure local; /* agreement needs a text, also when the caller wants none */
    why = why != NULL ? why : &local;
    char name[FOLDERS_NAME_BYTES];
    folders_name(&entry, name);
    enum status status = io_path(job.final, why, "%s/save/%s", io->run_dir, name);
    if (status == STATUS_OK) {
        status = io_path(job.tmp, why, "%s.tmp", job.final);
    }
    if (status != STATUS_OK) {
        return status; /* on all ranks alike: they share the folder's name */
    }
    double former_s = save_begin_waits(io);
    status = write_parts(&job, pieces, n_pieces, meta, why);
    save_end_waits(io, former_s);
    if (status == STATUS_RANK_LOST || status == STATUS_DEADLINE || status == STATUS_STOPPED) {
        return status; /* another rank may still be writing: the next save cleans up */
    }
    if (status != STATUS_OK) {
        discard(&job);
        return status;
    }
    if (io->comm->rank == 0) {
        folders_prune(io->run_dir, keep, step);
    }
    snprintf(out_path, out_path_bytes, "%s", job.final);
    return STATUS_OK;
}

bool save_exists(const char *run_dir)
{
    struct save_entry *entries;
    size_t n;
    struct failure why;
    if (folders_list(run_dir, &entries, &n, &why) != STATUS_OK) {
        return false;
    }
    heap_free(entries);
    return n > 0;
}
