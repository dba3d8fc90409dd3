/* The frames to repeat, one a role. */
#include "worker/link_kept.h"

void link_kept_take(struct link_kept *kept, struct link_frame frame)
{
    if (frame.role == LINK_ROLE_NONE) {
        link_frame_drop(&frame);
        return;
    }
    /* A state that carries a plan is newer than the state kept so far. */
    if (frame.role == LINK_ROLE_PLAN) {
        link_frame_drop(&kept->frames[LINK_ROLE_STATE]);
    }
    link_frame_drop(&kept->frames[frame.role]);
    kept->frames[frame.role] = frame;
}

void link_kept_rewind(struct link_kept *kept)
{
    kept->next = LINK_ROLE_NONE + 1;
}

struct link_frame *link_kept_next(struct link_kept *kept)
{
    while (kept->next < N_LINK_ROLES && kept->frames[kept->next].bytes == NULL) {
        kept->next++;
    }
    return kept->next < N_LINK_ROLES ? &kept->frames[kept->next] : NULL;
}

void link_kept_advance(struct link_kept *kept)
{
    kept->next++;
}

void link_kept_fini(struct link_kept *kept)
{
    for (int role = 0; role < N_LINK_ROLES; role++) {
        link_frame_drop(&kept->frames[role]);
    }
}
