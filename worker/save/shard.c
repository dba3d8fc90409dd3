/* Shard files; see the header. Owns an open file at a time. */
#include "worker/save/shard.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/save/hash.h"
#include "worker/save/io.h"

/* Bytes on their way into the file: the staging buffer holds those from `start` on. */
struct writer {
    const struct save_io *io;
    int fd;
    char path[IO_PATH_BYTES];
    uint64_t start;       /* in the file */
    size_t used;          /* of the staging buffer */
    uint64_t done, total; /* payload, for progress */
};

static enum status flush(struct writer *writer, struct failure *why)
{
    if (writer->used == 0) {
        return STATUS_OK;
    }
    enum status status = io_write_at(writer->fd, writer->path, writer->io->staging, writer->used,
                                     writer->start, why);
    if (status == STATUS_OK) {
        writer->start += writer->used;
        writer->used = 0;
    }
    return status;
}

static enum status put_bytes(struct writer *writer, const uint8_t *bytes, size_t n,
                             struct failure *why)
{
    if (writer->io->staging_bytes - writer->used < n) {
        enum status status = flush(writer, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    memcpy((uint8_t *)writer->io->staging + writer->used, bytes, n);
    writer->used += n;
    return STATUS_OK;
}

/* The floats of one piece, from the device into the buffer, hashed on the way. */
static enum status put_piece(struct writer *writer, const struct save_piece *piece,
                             struct manifest_hash *out_hash, struct failure *why)
{
    const struct save_io *io = writer->io;
    struct hash hash;
    hash_init(&hash);
    for (uint64_t at = 0; at < piece->n;) {
        size_t room = (io->staging_bytes - writer->used) / sizeof(float);
        if (room == 0) {
            enum status status = flush(writer, why);
            if (status != STATUS_OK) {
                return status;
            }
            continue;
        }
        uint64_t left = piece->n - at;
        size_t n = left < room ? (size_t)left : room;
        uint8_t *host = (uint8_t *)io->staging + writer->used;
        enum status status = io->copy_out(io->user, host, piece->data + at, n * sizeof(float), why);
        if (status != STATUS_OK) {
            return status;
        }
        hash_add(&hash, host, n * sizeof(float));
        writer->used += n * sizeof(float);
        writer->done += n * sizeof(float);
        at += n;
        if (io->progress != NULL) {
            io->progress(io->user, writer->done, writer->total);
        }
    }
    *out_hash = hash_text(&hash);
    return STATUS_OK;
}

/* Append a piece's entry; takes nothing. */
static enum status add_entry(json_t *entries, const struct save_piece *piece, uint64_t offset,
                             const struct manifest_hash *hash, struct failure *why)
{
    json_t *entry =
        json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:s}", "tensor", piece->tensor, "state",
                  manifest_state_name(piece->state), "tensor_n", (json_int_t)piece->tensor_n,
                  "first", (json_int_t)piece->first, "n", (json_int_t)piece->n, "offset",
                  (json_int_t)offset, "xxh3", hash->hex);
    if (entry == NULL || json_array_append_new(entries, entry) != 0) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the manifest's entry of tensor %s",
                    piece->tensor);
    }
    return STATUS_OK;
}

static enum status put_pieces(struct writer *writer, const struct save_piece *pieces,
                              size_t n_pieces, json_t *entries, struct failure *why)
{
    static const uint8_t zeros[SHARD_ALIGN_BYTES];
    for (size_t i = 0; i < n_pieces; i++) {
        uint64_t end = writer->start + writer->used;
        uint64_t offset = manifest_align(end);
        struct manifest_hash hash;
        enum status status = put_bytes(writer, zeros, (size_t)(offset - end), why);
        if (status == STATUS_OK) {
            status = put_piece(writer, &pieces[i], &hash, why);
        }
        if (status == STATUS_OK) {
            status = add_entry(entries, &pieces[i], offset, &hash, why);
        }
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

/* Where the file will end. */
static uint64_t file_bytes(const struct save_piece *pieces, size_t n_pieces, uint64_t *out_payload)
{
    uint64_t end = SHARD_HEADER_BYTES, payload = 0;
    for (size_t i = 0; i < n_pieces; i++) {
        end = manifest_align(end) + pieces[i].n * sizeof(float);
        payload += pieces[i].n * sizeof(float);
    }
    *out_payload = payload;
    return end;
}

static enum status write_all(struct writer *writer, uint64_t step, const struct save_piece *pieces,
                             size_t n_pieces, uint64_t bytes, json_t *entries, struct failure *why)
{
    struct comm *comm = writer->io->comm;
    uint8_t header[SHARD_HEADER_BYTES];
    manifest_shard_header(step, comm->rank, comm->size, n_pieces, bytes, header);
    enum status status = put_bytes(writer, header, sizeof header, why);
    if (status == STATUS_OK) {
        status = put_pieces(writer, pieces, n_pieces, entries, why);
    }
    if (status == STATUS_OK) {
        status = flush(writer, why);
    }
    assert(status != STATUS_OK || writer->start == bytes);
    return status == STATUS_OK ? io_sync(writer->fd, writer->path, why) : status;
}

enum status shard_write(const struct save_io *io, const char *folder, uint64_t step,
                        const struct save_piece *pieces, size_t n_pieces, json_t **out_entry,
                        struct failure *why)
{
    assert(io->staging_bytes >= 4096);
    struct writer writer = {.io = io};
    uint64_t bytes = file_bytes(pieces, n_pieces, &writer.total);
    enum status status = io_path(writer.path, why, "%s/rank-%u.bin", folder, io->comm->rank);
    if (status != STATUS_OK) {
        return status;
    }
    json_t *entries = json_array();
    json_t *entry =
        json_pack("{s:s, s:I, s:I, s:I, s:o}", "file", strrchr(writer.path, '/') + 1, "rank",
                  (json_int_t)io->comm->rank, "step", (json_int_t)step, "bytes", (json_int_t)bytes,
                  "pieces", entries); /* takes `entries`, also when it fails */
    if (entry == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the manifest's entry of %s",
                    writer.path);
    }
    status = io_create(writer.path, &writer.fd, why);
    if (status != STATUS_OK) {
        goto undo_entry;
    }
    status = write_all(&writer, step, pieces, n_pieces, bytes, entries, why);
    io_close(writer.fd);
    if (status != STATUS_OK) {
        goto undo_entry;
    }
    *out_entry = entry;
    return STATUS_OK;

undo_entry:
    json_decref(entry);
    return status;
}

static enum status open_shard(const char *folder, uint32_t rank, char path[static IO_PATH_BYTES],
                              int *out_fd, struct failure *why)
{
    enum status status = io_path(path, why, "%s/rank-%u.bin", folder, rank);
    return status == STATUS_OK ? io_open(path, out_fd, why) : status;
}

static enum status check_open_file(const struct manifest *manifest, uint32_t rank, int fd,
                                   const char *path, struct failure *why)
{
    const struct manifest_shard *shard = &manifest->shards[rank];
    uint8_t expected[SHARD_HEADER_BYTES], header[SHARD_HEADER_BYTES];
    uint64_t bytes = 0;
    enum status status = io_size(fd, path, &bytes, why);
    if (status == STATUS_OK && bytes != shard->bytes) {
        status = fail(why, STATUS_CORRUPT, "%s has %" PRIu64 " bytes, the manifest says %" PRIu64,
                      path, bytes, shard->bytes);
    }
    if (status == STATUS_OK) {
        status = io_read_at(fd, path, header, sizeof header, 0, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    manifest_shard_header(manifest->step, rank, manifest->n_shards, shard->n_pieces, shard->bytes,
                          expected);
    for (size_t i = 0; i < sizeof header; i++) {
        if (header[i] != expected[i]) {
            return fail(why, STATUS_CORRUPT, "%s: byte %zu of its header is %02x, not %02x", path,
                        i, header[i], expected[i]);
        }
    }
    return STATUS_OK;
}

enum status shard_check_file(const struct manifest *manifest, const char *folder, uint32_t rank,
                             struct failure *why)
{
    int fd;
    char path[IO_PATH_BYTES];
    enum status status = open_shard(folder, rank, path, &fd, why);
    if (status == STATUS_OK) {
        status = check_open_file(manifest, rank, fd, path, why);
        io_close(fd);
    }
    return status;
}

static enum status check_gap(int fd, const char *path, const struct manifest_piece *piece,
                             struct failure *why)
{
    uint8_t gap[SHARD_ALIGN_BYTES];
    uint64_t start = piece->offset - piece->gap;
    enum status status =
        piece->gap == 0 ? STATUS_OK : io_read_at(fd, path, gap, (size_t)piece->gap, start, why);
    for (size_t i = 0; status == STATUS_OK && i < piece->gap; i++) {
        if (gap[i] != 0) {
            status =
                fail(why, STATUS_CORRUPT, "%s: byte %" PRIu64 " between pieces is %02x, not 00",
                     path, start + i, gap[i]);
        }
    }
    return status;
}

static enum status check_piece(const struct save_io *io, int fd, const char *path,
                               const struct manifest_piece *piece, uint64_t *done, uint64_t total,
                               struct failure *why)
{
    enum status status = check_gap(fd, path, piece, why);
    struct hash hash;
    hash_init(&hash);
    uint64_t bytes = piece->n * sizeof(float);
    for (uint64_t at = 0; status == STATUS_OK && at < bytes;) {
        size_t n = bytes - at < io->staging_bytes ? (size_t)(bytes - at) : io->staging_bytes;
        status = io_read_at(fd, path, io->staging, n, piece->offset + at, why);
        if (status != STATUS_OK) {
            break;
        }
        hash_add(&hash, io->staging, n);
        at += n;
        *done += n;
        if (io->progress != NULL) {
            io->progress(io->user, *done, total);
        }
    }
    if (status != STATUS_OK) {
        return status;
    }
    struct manifest_hash found = hash_text(&hash);
    if (strcmp(found.hex, piece->hash.hex) != 0) {
        return fail(why, STATUS_CORRUPT,
                    "%s: %" PRIu64 " bytes at byte %" PRIu64
                    " (tensor %s, %s, from element %" PRIu64
                    ") have checksum %s, the manifest says %s",
                    path, bytes, piece->offset, piece->tensor, manifest_state_name(piece->state),
                    piece->first, found.hex, piece->hash.hex);
    }
    return STATUS_OK;
}

enum status shard_check_pieces(const struct save_io *io, const struct manifest *manifest,
                               const char *folder, size_t first, size_t end, uint64_t *done,
                               uint64_t total, struct failure *why)
{
    int fd = -1;
    uint32_t opened = 0;
    char path[IO_PATH_BYTES];
    enum status status = STATUS_OK;
    for (size_t i = first; status == STATUS_OK && i < end; i++) {
        const struct manifest_piece *piece = &manifest->pieces[i];
        if (fd < 0 || opened != piece->shard) {
            if (fd >= 0) {
                io_close(fd);
                fd = -1;
            }
            opened = piece->shard;
            status = open_shard(folder, opened, path, &fd, why);
        }
        if (status == STATUS_OK) {
            status = check_piece(io, fd, path, piece, done, total, why);
        }
    }
    if (fd >= 0) {
        io_close(fd);
    }
    return status;
}

/* n elements of one piece, from its element `skip` on, to `data`. */
static enum status read_piece(const struct save_io *io, const char *folder,
                              const struct manifest_piece *piece, uint64_t skip, uint64_t n,
                              float *data, struct failure *why)
{
    int fd;
    char path[IO_PATH_BYTES];
    enum status status = open_shard(folder, piece->shard, path, &fd, why);
    if (status != STATUS_OK) {
        return status;
    }
    size_t room = io->staging_bytes / sizeof(float);
    for (uint64_t at = 0; status == STATUS_OK && at < n;) {
        size_t some = n - at < room ? (size_t)(n - at) : room;
        uint64_t offset = piece->offset + (skip + at) * sizeof(float);
        status = io_read_at(fd, path, io->staging, some * sizeof(float), offset, why);
        if (status == STATUS_OK) {
            status = io->copy_in(io->user, data + at, io->staging, some * sizeof(float), why);
        }
        at += some;
    }
    io_close(fd);
    return status;
}

enum status shard_read(const struct save_io *io, const struct manifest *manifest,
                       const char *folder, size_t at, size_t count, uint64_t first, uint64_t n,
                       float *data, struct failure *why)
{
    uint64_t position = first, end = first + n;
    while (position < end) {
        /* Of the pieces that hold this element, the one that reaches farthest. */
        const struct manifest_piece *best = NULL;
        for (size_t i = at; i < at + count && manifest->sorted[i]->first <= position; i++) {
            const struct manifest_piece *piece = manifest->sorted[i];
            uint64_t reach = piece->first + piece->n;
            if (reach > position && (best == NULL || reach > best->first + best->n)) {
                best = piece;
            }
        }
        assert(best != NULL); /* the caller checked that they cover */
        uint64_t stop = best->first + best->n < end ? best->first + best->n : end;
        enum status status = read_piece(io, folder, best, position - best->first, stop - position,
                                        data + (position - first), why);
        if (status != STATUS_OK) {
            return status;
        }
        position = stop;
    }
    return STATUS_OK;
}
