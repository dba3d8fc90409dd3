/* One rank's shard file: written, checked, read piece by piece through a bounded buffer.
 *
 * The host buffer is save_io's staging; nothing else is held. Main thread. */
#ifndef BALLAST_WORKER_SAVE_SHARD_H
#define BALLAST_WORKER_SAVE_SHARD_H

#include "worker/save/manifest.h"
#include "worker/save/save.h"

/* The entry of this rank's shard for the manifest: file, rank, step, bytes, pieces with their
 * checksums, written to FOLDER/rank-R.bin and synced. */
enum status shard_write(const struct save_io *io, const char *folder, uint64_t step,
                        const struct save_piece *pieces, size_t n_pieces, json_t **out_entry,
                        struct failure *why) MUST_CHECK;
/* Do size and header of shard `rank` fit the manifest? */
enum status shard_check_file(const struct manifest *manifest, const char *folder, uint32_t rank,
                             struct failure *why) MUST_CHECK;
/* Do the bytes of these pieces, and the gaps before them, fit the manifest? CORRUPT names file
 * and byte. `out_done` (may be NULL) grows with the bytes read. */
enum status shard_check_pieces(const struct save_io *io, const struct manifest *manifest,
                               const char *folder, size_t first, size_t end, uint64_t *done,
                               uint64_t total, struct failure *why) MUST_CHECK;
/* Elements [first, first + n) of the tensor from the pieces sorted[at, at + count), which cover
 * them, to `data` through copy_in. */
enum status shard_read(const struct save_io *io, const struct manifest *manifest,
                       const char *folder, size_t at, size_t count, uint64_t first, uint64_t n,
                       float *data, struct failure *why) MUST_CHECK;

#endif
