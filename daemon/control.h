/* The clients: greeting, requests, samples, events that follow.
 *
 * Owns every client connection and its open requests. What a request means is command.c's;
 * whether a peer may come in is decided here, by its uid. Loop thread. */
#ifndef BALLAST_DAEMON_CONTROL_H
#define BALLAST_DAEMON_CONTROL_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include "daemon/channel.h"
#include "daemon/command.h"
#include "daemon/state.h"

enum {
    CONTROL_MAX_CLIENTS = 1024,
    CONTROL_MAX_OPEN = 64,    /* open requests of one client */
    CONTROL_HELLO_MS = 10000, /* for the greeting to arrive */
};

struct client;

struct control {
    struct state *state;        /* borrowed */
    struct channel_pool *pool;  /* borrowed */
    struct command_port port;   /* where commands go; replies come back here */
    void (*settle)(void *owner); /* carry out what run.c decided */
    void *owner;
    uint32_t max_clients;
    uint32_t n_clients;
    uint64_t n_served; /* ever */
    bool closing;
    int64_t next_due_ms; /* of the next sample; INT64_MAX: none */
    struct client *clients[CONTROL_MAX_CLIENTS]; /* by slot; NULL: free */
};

/* `send` hands a command to rank 0. `max_clients` is lowered to CONTROL_MAX_CLIENTS. */
void control_init(struct control *control, struct state *state, struct channel_pool *pool,
                  uint32_t max_clients,
                  enum status (*send)(void *owner, const Ballast__Link__V1__Command *command),
                  void (*settle)(void *owner), void *owner);

/* A new connection; takes over `fd`. */
void control_accept(struct control *control, int fd, const struct ucred *peer);
/* No descriptor is left: say so on `fd`, which stays the caller's. */
void control_refuse(struct control *control, int fd);

/* Answer an open request; without `more` it is over. LINK_LOST when the client is gone. */
enum status control_reply(struct control *control, struct run_request to,
                          Ballast__Control__V1__Reply *reply) MUST_CHECK;
/* Cut a client off that could not be answered; nothing if it is gone already. */
void control_drop(struct control *control, uint64_t client);
/* The event was journalled: send it to who follows. */
void control_event(struct control *control, const Ballast__V1__Event *event);
/* Send the samples that are due and find next_due_ms. */
void control_tick(struct control *control, int64_t now_ms);
/* Deadlines of all connections; about once a second. */
void control_check(struct control *control, int64_t now_ms);

/* The run is over: end what is open, let clients read what is queued, then close. */
void control_end(struct control *control);
/* Close every connection now. */
void control_close(struct control *control);

/* May a peer with this uid operate a run of `own_uid`? */
bool control_may_operate(uint32_t uid, uint32_t own_uid);

#endif
