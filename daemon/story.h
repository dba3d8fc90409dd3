/* The events that the daemon itself has to tell: a lost rank, a lost daemon, the end. Loop
 * thread. */
#ifndef BALLAST_DAEMON_STORY_H
#define BALLAST_DAEMON_STORY_H

#include "daemon/state.h"

/* New events in memory of their own (frame_free()), without a sequence number; NULL when out of
 * memory. */
Ballast__V1__Event *story_rank_lost(const struct state *state);
Ballast__V1__Event *story_daemon_lost(const struct state *state);
/* For a run whose rank 0 sent no `end` of its own. */
Ballast__V1__Event *story_end(const struct state *state);

#endif
