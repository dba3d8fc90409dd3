/* libballast-client: talk to one run's daemon over its control socket.
 *
 * Owns a connection: connect, greeting both ways, requests out, replies in. Does not look for
 * sockets, print, retry or exit. Blocking, built on poll(); every call takes a deadline. One
 * client belongs to one thread at a time; different clients are independent.
 *
 * Deadlines are absolute times of units_monotonic_s() in seconds; INFINITY waits as long as
 * the connection lives. A failure names the socket and says what to do:
 *   NOT_FOUND    no such socket, or nobody listens there
 *   PERMISSION   this user may not connect
 *   VERSION      the daemon speaks another major version
 *   DEADLINE     nothing (or not enough) came in time
 *   LINK_LOST    the daemon closed the connection
 *   MALFORMED, TOO_LARGE   what came is not Ballast's protocol
 *   OUT_OF_MEMORY
 * After any failure but DEADLINE the connection is good for ballast_client_close() only. A
 * DEADLINE while receiving loses nothing: the next receive goes on where this one stopped.
 *
 * A refused request is not a failure of these calls: it is a reply whose body is ERROR. */
#ifndef BALLAST_CLIENT_LIB_BALLAST_CLIENT_H
#define BALLAST_CLIENT_LIB_BALLAST_CLIENT_H

#include <stdint.h>
#include "proto/base/status.h"
#include "proto/control.pb-c.h"

struct ballast_client;

/* Connect to the Unix socket at `path`, exchange greetings, check the version. The client is
 * the caller's; close it with ballast_client_close(). */
enum status ballast_client_open(const char *path, double deadline_s,
                                struct ballast_client **out_client, struct failure *why) MUST_CHECK;
/* Closes and frees; NULL is fine. */
void ballast_client_close(struct ballast_client *client);

/* The daemon's greeting: run id, version, capabilities. Borrowed until close. */
const Ballast__V1__Hello *ballast_client_peer(const struct ballast_client *client);
/* The socket's path. Borrowed until close. */
const char *ballast_client_path(const struct ballast_client *client);

/* Send one request under a fresh id (written into request->id). `request` stays the
 * caller's. */
enum status ballast_client_send(struct ballast_client *client,
                                Ballast__Control__V1__Request *request, double deadline_s,
                                struct failure *why) MUST_CHECK;
/* The next reply, to whichever request. The reply is the caller's: ballast_reply_free(). */
enum status ballast_client_receive(struct ballast_client *client, double deadline_s,
                                   Ballast__Control__V1__Reply **out_reply,
                                   struct failure *why) MUST_CHECK;
/* The next reply to request `id`; replies to other requests are dropped. */
enum status ballast_client_receive_for(struct ballast_client *client, uint64_t id,
                                       double deadline_s, Ballast__Control__V1__Reply **out_reply,
                                       struct failure *why) MUST_CHECK;
void ballast_reply_free(Ballast__Control__V1__Reply *reply);

#endif
