/* Fill the pieces of this rank from a save that was found good, whatever ranks wrote it.
 *
 * First all ranks check that everything asked for is there, and that nothing there was not
 * asked for; only then is a byte of the state changed. Owns nothing. Main thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/save/agree.h"
#include "worker/save/io.h"
#include "worker/save/manifest.h"
#include "worker/save/save.h"
#include "worker/save/shard.h"

/* Is the piece in the save, with the right element count, and covered? */
static enum status check_piece(const struct manifest *manifest, const struct save_piece *piece,
                               struct failure *why)
{
    size_t at;
    const char *state = manifest_state_name(piece->state);
    size_t count = manifest_find(manifest, piece->tensor, piece->state, &at);
    if (count == 0) {
        return fail(why, STATUS_CORRUPT, "the save of step %" PRIu64 " has no tensor %s, %s",
                    manifest->step, piece->tensor, state);
    }
    if (manifest->sorted[at]->tensor_n != piece->tensor_n) {
        return fail(why, STATUS_CORRUPT,
                    "the save of step %" PRIu64 ": tensor %s has %" PRIu64
                    " elements there, %" PRIu64 " in the model",
                    manifest->step, piece->tensor, manifest->sorted[at]->tensor_n, piece->tensor_n);
    }
    uint64_t covered = piece->first, end = piece->first + piece->n;
    for (size_t i = at; i < at + count && manifest->sorted[i]->first <= covered; i++) {
        uint64_t reach = manifest->sorted[i]->first + manifest->sorted[i]->n;
        covered = reach > covered ? reach : covered;
    }
    if (covered < end) {
        return fail(why, STATUS_CORRUPT,
                    "the save of step %" PRIu64 " lacks element %" PRIu64 " of tensor %s, %s",
                    manifest->step, covered, piece->tensor, state);
    }
    return STATUS_OK;
}

/* Mark the tensors that this rank has pieces of; tensors are numbered in sorted order. Returns
 * how many there are. */
static size_t mark_wanted(const struct manifest *manifest, const struct save_piece *pieces,
                          size_t n_pieces, uint8_t *wanted)
{
    size_t n_tensors = 0;
    /* The number of each piece's tensor is found by walking, so the asked ones are marked per
     * distinct name below. */
    for (size_t i = 0; i < manifest->n_pieces;) {
        const char *tensor = manifest->sorted[i]->tensor;
        for (size_t k = 0; wanted != NULL && k < n_pieces; k++) {
            if (strcmp(pieces[k].tensor, tensor) == 0) {
                wanted[n_tensors / 8] |= (uint8_t)(1U << n_tensors % 8);
                break;
            }
        }
        n_tensors++;
        while (i < manifest->n_pieces && strcmp(manifest->sorted[i]->tensor, tensor) == 0) {
            i++;
        }
    }
    return n_tensors;
}

static const char *tensor_number(const struct manifest *manifest, size_t number)
{
    size_t i = 0;
    for (size_t n = 0; n < number; n++) {
        const char *tensor = manifest->sorted[i]->tensor;
        while (strcmp(manifest->sorted[i]->tensor, tensor) == 0) {
            i++;
        }
    }
    return manifest->sorted[i]->tensor;
}

/* Every tensor of the save must be asked for by some rank. */
static enum status check_extra(const struct save_io *io, const struct manifest *manifest,
                               size_t n_tensors, const uint8_t *wanted, struct failure *why)
{
    uint8_t all[COMM_MAX_RANKS];
    size_t bytes = (n_tensors + 7) / 8, portion = sizeof all / io->comm->size;
    for (size_t at = 0; at < bytes; at += portion) {
        size_t n = bytes - at < portion ? bytes - at : portion;
        enum status status =
            io->comm->table->exchange(io->comm, "save: tensors", wanted + at, n, all, why);
        if (status != STATUS_OK) {
            return status;
        }
        for (size_t i = 0; i < n * 8 && at * 8 + i < n_tensors; i++) {
            unsigned found = 0;
            for (uint32_t rank = 0; rank < io->comm->size; rank++) {
                found |= (unsigned)all[rank * n + i / 8] >> i % 8 & 1U;
            }
            if (found == 0) {
                return fail(why, STATUS_CORRUPT,
                            "the save of step %" PRIu64 " has tensor %s, which the model lacks",
                            manifest->step, tensor_number(manifest, at * 8 + i));
            }
        }
    }
    return STATUS_OK;
}

static enum status check_all(const struct save_io *io, const struct manifest *manifest,
                             const struct save_piece *pieces, size_t n_pieces, struct failure *why)
{
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < n_pieces; i++) {
        status = check_piece(manifest, &pieces[i], why);
    }
    size_t n_tensors = mark_wanted(manifest, NULL, 0, NULL);
    uint8_t *wanted = heap_calloc(n_tensors / 8 + 1, 1);
    if (status == STATUS_OK && wanted == NULL) {
        status = fail(why, STATUS_OUT_OF_MEMORY, "no memory for a list of %zu tensors", n_tensors);
    }
    status = save_agree(io, "save: coverage", status, why);
    if (status == STATUS_OK) {
        mark_wanted(manifest, pieces, n_pieces, wanted);
        status = check_extra(io, manifest, n_tensors, wanted, why);
    }
    heap_free(wanted);
    return status;
}

static enum status fill(const struct save_io *io, const struct manifest *manifest,
                        const char *folder, const struct save_piece *pieces, size_t n_pieces,
                        struct failure *why)
{
    uint64_t done = 0, total = 0;
    for (size_t i = 0; i < n_pieces; i++) {
        total += pieces[i].n * sizeof(float);
    }
    for (size_t i = 0; i < n_pieces; i++) {
        size_t at;
        size_t count = manifest_find(manifest, pieces[i].tensor, pieces[i].state, &at);
        enum status status = shard_read(io, manifest, folder, at, count, pieces[i].first,
                                        pieces[i].n, pieces[i].data, why);
        if (status != STATUS_OK) {
            return status;
        }
        done += pieces[i].n * sizeof(float);
        if (io->progress != NULL) {
            io->progress(io->user, done, total);
        }
    }
    return STATUS_OK;
}

static enum status read_pieces(const struct save_io *io, const json_t *json,
                               const struct save_piece *pieces, size_t n_pieces,
                               struct failure *why)
{
    char folder[IO_PATH_BYTES];
    struct manifest manifest = {0};
    const char *name = json_string_value(json_object_get(json, "folder"));
    enum status status =
        name != NULL ? io_path(folder, why, "%s/save/%s", io->run_dir, name)
                     : fail(why, STATUS_INVALID, "this manifest was not found by save_find()");
    if (status == STATUS_OK) {
        status = manifest_parse(json, &manifest, why);
    }
    status = save_agree(io, "save: manifest", status, why);
    if (status == STATUS_OK) {
        status = check_all(io, &manifest, pieces, n_pieces, why);
    }
    if (status == STATUS_OK) {
        status = fill(io, &manifest, folder, pieces, n_pieces, why);
        status = save_agree(io, "save: read", status, why);
    }
    manifest_fini(&manifest);
    return status;
}

enum status save_read(const struct save_io *io, json_t *manifest, const struct save_piece *pieces,
                      size_t n_pieces, struct failure *why)
{
    struct failure local;
    double former_s = save_begin_waits(io);
    enum status status = read_pieces(io, manifest, pieces, n_pieces, why != NULL ? why : &local);
    save_end_waits(io, former_s);
    return status;
}
