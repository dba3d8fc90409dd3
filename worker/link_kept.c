/* The frames to repeat, one a role. */
#include "worker/link_kept.h"

#include "proto/base/heap.h"

static void drop(struct link_frame *frame)
{
    heap_free(frame->bytes);
    *frame = (struct link_frame){0};
}

void link_kept_take(struct link_kept *kept, struct link_frame frame)
{
    if (frame.role == LINK_ROLE_NONE) {
        heap_free(frame.bytes);
        return;
    }
    /* A state that carries a plan is newer than the state kept so far. */
    if (frame.role == LINK_ROLE_PLAN) {
        drop(&kept->frames[LINK_ROLE_STATE]);
    }
    drop(&kept->frames[frame.role]);
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
        drop(&kept->frames[role]);
    }
}
