/* The folders of a run's saves: their names, what is there, what goes.
 *
 *   RUN/save/step-N       a save, if manifest.json is in it
 *   RUN/save/step-N.tmp   one being written, or what is left of one; removed at the next save
 *   RUN/save/step-N.old   step N's former save while it is replaced on a file system that cannot
 *                         exchange names; counts while step-N is not there
 *
 * Rank 0, main thread. */
#ifndef BALLAST_WORKER_SAVE_FOLDERS_H
#define BALLAST_WORKER_SAVE_FOLDERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"
#include "worker/save/io.h"

struct save_entry {
    uint64_t step;
    bool old; /* step-N.old stands for step N */
};

enum { FOLDERS_NAME_BYTES = 32 };

/* "step-N" or "step-N.old". */
void folders_name(const struct save_entry *entry, char out_name[static FOLDERS_NAME_BYTES]);
/* All saves (folders with a manifest), newest first, in new memory (heap_free it). None when
 * there is no save folder yet. */
enum status folders_list(const char *run_dir, struct save_entry **out_entries, size_t *out_n,
                         struct failure *why) MUST_CHECK;
/* Remove what unfinished saves left, and put back a former save that was being replaced.
 * What cannot be removed is warned about. */
void folders_clean(const char *run_dir);
/* Make `tmp`, complete and synced, the save `final`; the former one of that name, if any, is
 * replaced such that at every instant one of the two is there. On failure the former is back. */
enum status folders_publish(const char *run_dir, const char *tmp, const char *final,
                            struct failure *why) MUST_CHECK;
/* Remove all saves but the newest `keep`, of which step `written` is always one. Failures are
 * warned about: the next save tries again. */
void folders_prune(const char *run_dir, uint64_t keep, uint64_t written);

#endif
