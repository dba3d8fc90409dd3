/* The workers' links: greeting, telemetry in, commands and acknowledgements out.
 *
 * Owns every link. Puts what comes into the state and passes on what others have to carry out.
 * A worker is trusted more than a client (same user, checked), but what it says is
 * still checked, since it may be of another build. Loop thread. */
#ifndef BALLAST_DAEMON_RANKS_H
#define BALLAST_DAEMON_RANKS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include "daemon/channel.h"
#include "daemon/state.h"
#include "proto/link.pb-c.h"

enum {
    RANKS_HELLO_MS = 10000,
    RANKS_MAX_STRANGERS = 64,       /* links that have not said hello */
    RANKS_MAX_RECORD_BYTES = 48 * 1024, /* so that a record fits into a reply */
};

/* What ranks.c cannot do itself. */
struct ranks_port {
    void *owner;
    /* Journal and pass on; takes over the event. */
    void (*event)(void *owner, Ballast__V1__Event *event);
    /* A rank ran out of memory; takes over the report. */
    void (*oom)(void *owner, Ballast__V1__OomReport *report);
    /* Rank 0 has answered a command. */
    void (*result)(void *owner, const Ballast__Link__V1__CommandResult *result);
    /* Carry out what run.c decided. */
    void (*settle)(void *owner);
};

struct link;

struct ranks {
    struct state *state;       /* borrowed */
    struct channel_pool *pool; /* borrowed */
    struct ranks_port port;
    struct link *first; /* owned list */
    size_t n_strangers;
    bool closing;
};

void ranks_init(struct ranks *ranks, struct state *state, struct channel_pool *pool,
                const struct ranks_port *port);

/* A new connection; takes over `fd`. */
void ranks_accept(struct ranks *ranks, int fd, const struct ucred *peer);
/* Queue a command for rank 0. LINK_LOST without its link. */
enum status ranks_send(struct ranks *ranks, const Ballast__Link__V1__Command *command) MUST_CHECK;
/* Acknowledge the end to every rank that said goodbye and was not told yet. */
void ranks_acknowledge_end(struct ranks *ranks);
/* Deadline of the greeting; about once a second. */
void ranks_check(struct ranks *ranks, int64_t now_ms);
void ranks_close(struct ranks *ranks);

#endif
