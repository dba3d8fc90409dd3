/* One outcome for all ranks: what every part of a save ends in.
 *
 * Collective; main thread. Allocates nothing, so a rank without memory can still say so. */
#ifndef BALLAST_WORKER_SAVE_AGREE_H
#define BALLAST_WORKER_SAVE_AGREE_H

#include "worker/save/save.h"

/* OK when `mine` is OK on every rank. Otherwise the lowest failing rank's status and text, with
 * "rank R: " before it, on all ranks alike. The failure of the exchange itself, where ranks may
 * know different things, is returned too: RANK_LOST, DEADLINE or STOPPED. */
enum status save_agree(const struct save_io *io, const char *name, enum status mine,
                       struct failure *why) MUST_CHECK;
/* Raise the comm's deadline for the length of a save; returns the former one, to be put back. */
double save_begin_waits(const struct save_io *io);
void save_end_waits(const struct save_io *io, double former_s);

#endif
