/* Frames that wait for the link, bounded.
 *
 * Holds packed frames in order. When LINK_QUEUE_FRAMES wait, the oldest telemetry makes room;
 * an event, a result or a report is dropped only when LINK_QUEUE_MAX_FRAMES of them wait, which
 * a daemon that is away for hours could not reach. No lock of its own. */
#ifndef BALLAST_WORKER_LINK_QUEUE_H
#define BALLAST_WORKER_LINK_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LINK_QUEUE_FRAMES = 256, LINK_QUEUE_MAX_FRAMES = 4096 };

/* What a frame is to a daemon that is started later (link_kept.h), in the order of repeating. */
enum link_role {
    LINK_ROLE_NONE,  /* nothing: it is said once */
    LINK_ROLE_PLAN,  /* a state of the run with the plan in force */
    LINK_ROLE_STATE, /* a state of the run without */
    LINK_ROLE_OOM,
    LINK_ROLE_STEP,
    N_LINK_ROLES
};

struct link_frame {
    uint8_t *bytes; /* owned by who holds the frame; NULL: none */
    size_t n;
    bool telemetry; /* may be dropped */
    enum link_role role;
};

/* Free what it holds; empty afterwards. */
void link_frame_drop(struct link_frame *frame);

/* Zero-initialise. */
struct link_queue {
    struct link_frame *frames; /* owned */
    size_t n, capacity;
    uint64_t n_dropped;           /* telemetry */
    uint64_t n_dropped_important; /* anything else */
};

/* Take the frame (always) and put it last, or drop it or an older one. */
void link_queue_push(struct link_queue *queue, struct link_frame frame);
/* Give away the first frame; bytes NULL when there is none. */
struct link_frame link_queue_pop(struct link_queue *queue);
void link_queue_fini(struct link_queue *queue);

#endif
