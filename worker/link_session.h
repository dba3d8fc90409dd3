/* The link thread: connects, writes, reads, brings the daemon back. Private to link*.c.
 *
 *   AWAY -> GREETING   connected, hello is on its way       [try_connect]
 *   GREETING -> READY  the daemon said LinkReady            [on_ready]
 *   GREETING, READY -> AWAY   anything failed               [lose]
 *   READY -> DONE      the daemon acknowledged the end      [on_message]
 *
 * `struct link` is what the main thread and the link thread share; what is below the line
 * belongs to the link thread alone. */
#ifndef BALLAST_WORKER_LINK_SESSION_H
#define BALLAST_WORKER_LINK_SESSION_H

#include <pthread.h>
#include <stdatomic.h>
#include "proto/frame.h"
#include "worker/link.h"
#include "worker/link_kept.h"
#include "worker/link_queue.h"
#include "worker/link_state.h"

enum { LINK_MAX_COMMANDS = 64, LINK_MAX_RESTARTS_A_MINUTE = 5 };

enum link_state { LINK_AWAY, LINK_GREETING, LINK_READY, LINK_DONE };

struct link {
    struct link_options options;
    int wake_fd;            /* eventfd, owned */
    _Atomic bool connected; /* READY */
    _Atomic bool stopping;
    _Atomic bool answer_dropped; /* a command's result found no memory */
    pthread_t thread;

    pthread_mutex_t lock;   /* guards up to the line */
    pthread_cond_t changed; /* a command came, or the end was acknowledged */
    struct link_queue out;
    Ballast__Link__V1__Command *commands[LINK_MAX_COMMANDS]; /* ring, owned */
    size_t first_command, n_commands;
    struct link_frame end; /* WorkerEnd, kept until it is acknowledged */
    bool end_wanted, end_acked;

    /* ---- link thread only ---- */
    enum link_state state;
    int fd; /* -1: none */
    char host[LINK_HOST_BYTES];
    int statm_fd;
    struct frame_reader reader;
    struct link_frame hello;    /* owned: to be sent first on this connection */
    struct link_frame current;  /* owned: being written; begins anew on a new connection */
    struct link_kept kept;
    struct link_frame *writing; /* &hello, one of kept, &current or NULL */
    bool writing_end;           /* current is WorkerEnd */
    size_t written;             /* of it */
    bool blocked;               /* the socket takes no more just now */
    bool end_sent;              /* on this connection */
    double retry_at_s, backoff_s;
    double greeting_until_s;
    double away_since_s;
    bool lost;      /* since the last READY a connection was lost: no patience */
    bool restarted; /* a daemon was started since the last READY */
    bool refusal_told;
    double restarts_s[LINK_MAX_RESTARTS_A_MINUTE]; /* when, ring */
    size_t n_restarts;
    double state_sent_s; /* 0: not on this connection */
    struct link_place place_sent;
};

/* The thread's body; returns when `stopping` is set. */
void *link_session_run(void *link);
/* Any thread: interrupt the link thread's wait. */
void link_wake(struct link *link);
/* Any thread: put a packed message into the queue. */
void link_enqueue(struct link *link, const Ballast__Link__V1__WorkerMessage *message);

#endif
