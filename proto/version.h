/* The protocol's version, spoken in the first message each way on every connection.
 *
 * Peers of another major version refuse each other; a newer minor version only adds. */
#ifndef BALLAST_PROTO_VERSION_H
#define BALLAST_PROTO_VERSION_H

#define PROTOCOL_MAGIC "ballast"

enum { PROTOCOL_MAJOR = 1, PROTOCOL_MINOR = 0 };

#endif
