/* What each request means: the request table and the checking of everything a client sends.
 *
 * A request is answered from the state, opened (a wait, a watch, events that follow) or handed
 * to rank 0. Whatever is refused is refused before anything changes. Does not know sockets:
 * replies and commands go out through the port. Loop thread. */
#ifndef BALLAST_DAEMON_COMMAND_H
#define BALLAST_DAEMON_COMMAND_H

#include <stdbool.h>
#include <stdint.h>
#include "daemon/state.h"
#include "proto/control.pb-c.h"
#include "proto/link.pb-c.h"

enum {
    COMMAND_MAX_CHANGES = 32,
    COMMAND_MAX_RECORDS = 1000,    /* steps or events in one answer */
    COMMAND_DEFAULT_RECORDS = 100, /* when the count is 0 */
    COMMAND_PART_BYTES = 48 * 1024,
    COMMAND_MIN_INTERVAL_MS = 50,
    COMMAND_MAX_INTERVAL_MS = 60000,
    COMMAND_MAX_FOR_STEPS = 1000000000,
};

/* Where replies and commands go. */
struct command_port {
    void *owner;
    /* Queue one reply; its id is filled in. One without `more` ends the request. */
    enum status (*reply)(void *owner, struct run_request to, Ballast__Control__V1__Reply *reply);
    /* To rank 0's link. */
    enum status (*send)(void *owner, const Ballast__Link__V1__Command *command);
};

struct command_caller {
    struct run_request request;
    uint32_t uid;
    int32_t pid;
};

enum command_outcome {
    COMMAND_ANSWERED, /* the last reply is out */
    COMMAND_OPEN,     /* answered later, by run.c or rank 0 */
    COMMAND_WATCH,    /* a sample every interval_ms from now on */
    COMMAND_FOLLOW,   /* every event after `after_sequence` from now on */
    COMMAND_CANCEL,   /* end the open request `cancel_id` of the same client */
};

struct command_result {
    enum command_outcome outcome;
    uint32_t interval_ms;
    uint64_t after_sequence;
    uint64_t cancel_id;
};

/* Carry out one request after the greeting. On failure nothing has changed, and the caller
 * sends the error. */
enum status command_handle(struct state *state, const struct command_port *port,
                           const struct command_caller *caller,
                           const Ballast__Control__V1__Request *request, int64_t now_ms,
                           struct command_result *out_result, struct failure *why) MUST_CHECK;

/* Pass rank 0's answer on to whoever asked. */
void command_finish(struct state *state, const struct command_port *port,
                    const struct run_pending *pending,
                    const Ballast__Link__V1__CommandResult *result);

/* Fill an error reply; it points to `why` and static text. */
void command_error(const struct state *state, const struct failure *why,
                   Ballast__Control__V1__ErrorReply *out_error,
                   Ballast__Control__V1__Reply *out_reply);

/* The name of a request as users know it ("set"); "unknown" for none. */
const char *command_name(const Ballast__Control__V1__Request *request);

/* Is this an event type of the journal? */
bool command_is_event_type(const char *type);

#endif
