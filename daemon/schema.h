/* The protocol's own description, made by protoc when the daemon was built. */
#ifndef BALLAST_DAEMON_SCHEMA_H
#define BALLAST_DAEMON_SCHEMA_H

#include <stddef.h>
#include <stdint.h>

/* A serialised FileDescriptorSet of control.proto and what it imports; n is 0 when protoc was not
 * there. */
extern const uint8_t schema_bytes[];
extern const size_t schema_n_bytes;

#endif
