/* Saves: the whole training state on disk, keyed by logical tensor and element range.
 *
 * Layout: RUN/save/step-N/ holds one shard file per rank and manifest.json, which is renamed into
 * place last: a save exists when its manifest does. Every file and folder is fsynced before
 * that. The manifest lists, for every piece, tensor, kind of state, element range, file, offset and
 * XXH3-128, and the run's position. A save is verified before it is trusted.
 *
 * Collective: all ranks call save_write() and save_read() together, on the main thread. */
#ifndef BALLAST_WORKER_SAVE_SAVE_H
#define BALLAST_WORKER_SAVE_SAVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <jansson.h>
#include "proto/base/status.h"
#include "worker/parallel/comm.h"

enum save_state { SAVE_PARAM, SAVE_MOMENT_M, SAVE_MOMENT_V, N_SAVE_STATES };

/* Elements [first, first+n) of one logical tensor's state, fp32, at `data` in device memory
 * (readable here: on devices whose memory the host cannot read, through `copy`). */
struct save_piece {
    const char *tensor; /* borrowed; Hugging Face's name */
    enum save_state state;
    uint64_t first, n;
    uint64_t tensor_n; /* elements of the whole tensor */
    float *data;       /* borrowed; read by save_write(), written by save_read() */
};

struct save_io {
    const char *run_dir;
    struct comm *comm;
    /* Bounded staging in host memory, from the plan; at least 4096 bytes. */
    void *staging;
    size_t staging_bytes;
    enum status (*copy_out)(void *user, void *host, const float *device, size_t bytes,
                            struct failure *why);
    enum status (*copy_in)(void *user, float *device, const void *host, size_t bytes,
                           struct failure *why);
    void *user;
    /* Deadline of one wait within a save, whose ranks may be minutes apart; 0: 600 s. A comm that
     * waits longer anyway keeps its own. */
    double timeout_s;
    /* Called with bytes done so far, for progress; may be NULL. */
    void (*progress)(void *user, uint64_t bytes_done, uint64_t bytes_total);
};

/* Write step N's save: this rank's pieces, then the manifest. `meta` (borrowed, rank 0's is used)
 * goes into the manifest as is. On any rank's failure the save does not exist, its files
 * are removed, former saves stay, and every rank gets a failure naming the rank, path and errno.
 * Afterwards only the newest `keep` saves stay (0: all). out_path: the folder. */
enum status save_write(const struct save_io *io, uint64_t step, const struct save_piece *pieces,
                       size_t n_pieces, json_t *meta, uint64_t keep, char *out_path,
                       size_t out_path_bytes, struct failure *why) MUST_CHECK;

/* Find a save that verifies (sizes, checksums of all shard files, format version): `step` exactly,
 * or with latest the newest good one, falling back to older ones with a warning naming what is
 * damaged (file and offset). Collective: ranks share the work and agree. Returns the manifest
 * (owned by the caller). NO_SAVE when there is none; VERSION names both format versions. */
enum status save_find(const struct save_io *io, bool latest, uint64_t step, json_t **out_manifest,
                      uint64_t *out_step, struct failure *why) MUST_CHECK;
/* Is there any save folder with a manifest? Local, no verification. */
bool save_exists(const char *run_dir);

/* Fill the pieces (any element ranges, whatever ranks wrote them) from a save found above. A tensor
 * that is missing, has another element count, or is not covered: CORRUPT, naming it; and extra
 * tensors likewise. */
enum status save_read(const struct save_io *io, json_t *manifest, const struct save_piece *pieces,
                      size_t n_pieces, struct failure *why) MUST_CHECK;

#endif
