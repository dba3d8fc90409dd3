/* Checks the bytes of a message before anything is unpacked from them.
 *
 * protobuf-c takes any bytes as a string, cuts it at its first NUL, and any number as an enum.
 * Here a payload is walked along its descriptor without allocating. Pure; any thread. */
#ifndef BALLAST_PROTO_WIRE_H
#define BALLAST_PROTO_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <protobuf-c/protobuf-c.h>
#include "proto/base/status.h"

/* Nothing that travels nests deeper; recursion stops here whatever a descriptor says. */
enum { WIRE_MAX_DEPTH = 8 };

/* The varint at bytes[0..n). OK; AGAIN when it is not all there; MALFORMED when it does not fit
 * 64 bits. */
enum status wire_varint(const uint8_t *bytes, size_t n, uint64_t *out_value,
                        size_t *out_n) MUST_CHECK;
/* Are these bytes a message of this type: every field whole, every string UTF-8 without NUL,
 * every enum value known? Unknown fields pass. MALFORMED otherwise. */
enum status wire_check(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes,
                       size_t n) MUST_CHECK;

#endif
