/* A client of the control socket that can also misbehave. Blocking with deadlines; for tests. */
#ifndef BALLAST_TESTS_LIB_RAW_CLIENT_H
#define BALLAST_TESTS_LIB_RAW_CLIENT_H

#include <stdint.h>
#include "proto/base/status.h"
#include "proto/control.pb-c.h"
#include "proto/frame.h"

struct raw_client {
    int fd;
    struct frame_reader reader; /* owned */
    uint64_t last_id;
};

/* Connect only. */
enum status raw_client_connect(struct raw_client *client, const char *path) MUST_CHECK;
/* Connect and greet. */
enum status raw_client_open(struct raw_client *client, const char *path) MUST_CHECK;
void raw_client_close(struct raw_client *client);

/* Any bytes, all of them, within 5 s. */
enum status raw_client_write(struct raw_client *client, const void *bytes, size_t n) MUST_CHECK;
/* A request; its id is filled in when it is 0. */
enum status raw_client_send(struct raw_client *client,
                            Ballast__Control__V1__Request *request) MUST_CHECK;
/* The next reply; frame_free() it. DEADLINE; LINK_LOST when the daemon closed. */
enum status raw_client_receive(struct raw_client *client, int timeout_ms,
                               Ballast__Control__V1__Reply **out_reply) MUST_CHECK;
/* Send, and wait up to 5 s for the next reply under its id. */
enum status raw_client_ask(struct raw_client *client, Ballast__Control__V1__Request *request,
                           Ballast__Control__V1__Reply **out_reply) MUST_CHECK;

#endif
