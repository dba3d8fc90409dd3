/* One conversation of ballastctl with a run: find it, connect, ask, and say what went wrong
 * as an exit code.
 *
 * Owns the connection (client/lib) and the last failure; does not print. Main thread. */
#ifndef BALLAST_CLIENT_SESSION_H
#define BALLAST_CLIENT_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include "client/discover.h"
#include "client/lib/ballast_client.h"
#include "proto/base/status.h"

/* What ballastctl exits with; scripts rely on it. */
enum exit_code {
    EXIT_CODE_OK = 0,
    EXIT_CODE_FAILED = 1, /* refused by the run, or failed here */
    EXIT_CODE_USAGE = 2,
    EXIT_CODE_CONNECT = 3, /* no run, no daemon, connection lost, not a daemon */
    EXIT_CODE_TIMEOUT = 4,
    EXIT_CODE_VERSION = 5, /* other protocol version, or not permitted */
};

struct session {
    struct target target;          /* strings borrowed for the session's life */
    struct ballast_client *client; /* owned; NULL when not connected */
    struct failure why;            /* of the last call that did not return OK */
};

/* All replies to one request, in order. replies_fini() frees them. */
struct replies {
    Ballast__Control__V1__Reply **items; /* owned */
    size_t n;
};
void replies_fini(struct replies *replies);

void session_init(struct session *session, const struct target *target);
void session_fini(struct session *session);

/* Find the socket and connect, once. */
enum exit_code session_open(struct session *session, double deadline_s);
/* The same, again every 100 ms while there is no run, no socket or nobody listening; no new try
 * after `until_s`. A try that has begun may take until `deadline_s`. */
enum exit_code session_open_patiently(struct session *session, double until_s, double deadline_s);

/* Send a request and take all its replies. An error reply becomes FAILED, TIMEOUT or VERSION. */
enum exit_code session_ask(struct session *session, Ballast__Control__V1__Request *request,
                           double deadline_s, struct replies *out_replies);
/* Send without waiting; the id is in request->id. */
enum exit_code session_send(struct session *session, Ballast__Control__V1__Request *request,
                            double deadline_s);
/* The next reply to request `id`, an error reply as in session_ask(). Caller frees it. */
enum exit_code session_next(struct session *session, uint64_t id, double deadline_s,
                            Ballast__Control__V1__Reply **out_reply);

#endif
