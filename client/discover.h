/* Which socket is meant: --socket, --run-dir, $BALLAST_SOCKET, or the only run of this user.
 *
 * Reads the environment and files; connects only to see whether somebody listens. */
#ifndef BALLAST_CLIENT_DISCOVER_H
#define BALLAST_CLIENT_DISCOVER_H

#include "proto/base/status.h"

enum { DISCOVER_PATH_BYTES = 4096 };

/* What the command line says; NULL where it says nothing. Strings are borrowed. */
struct target {
    const char *socket;
    const char *run_dir;
};

/* The path of the socket to connect to. What the command line says beats the environment.
 * NOT_FOUND: no such run (yet); CONFLICT: several runs, all listed in the text; CORRUPT: a
 * control.json that is none; PERMISSION, OUT_OF_MEMORY. */
enum status discover_socket(const struct target *target, char out_path[static DISCOVER_PATH_BYTES],
                            struct failure *why) MUST_CHECK;

#endif
