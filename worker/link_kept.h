/* What the next daemon has to be told again: the plan in force, the newest state of the run, the
 * last shortage and the last step, as the frames in which they were said.
 *
 * A daemon that is started again knows its journal and nothing else. A frame comes here when it has
 * been written, so what still waits in the queue is newer. Link thread; no lock. */
#ifndef BALLAST_WORKER_LINK_KEPT_H
#define BALLAST_WORKER_LINK_KEPT_H

#include "worker/link_queue.h"

/* Zero-initialise. */
struct link_kept {
    struct link_frame frames[N_LINK_ROLES]; /* by role; owned */
    int next;                               /* the role to be repeated next */
};

/* Take a frame that was written (always): in place of the one before, or free it. */
void link_kept_take(struct link_kept *kept, struct link_frame frame);
/* A new connection: all is to be repeated, the plan first. */
void link_kept_rewind(struct link_kept *kept);
/* The next frame to repeat, NULL when there is none left; borrowed. It stays the next until
 * link_kept_advance(). */
struct link_frame *link_kept_next(struct link_kept *kept);
void link_kept_advance(struct link_kept *kept);
void link_kept_fini(struct link_kept *kept);

#endif
