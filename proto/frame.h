/* Frames on the wire: a varint length, then one protobuf message.
 *
 * Pure: bytes in, bytes out, no sockets. Unpacking uses an allocator with a budget, so
 * a hostile frame can neither grow memory nor recurse (no message type is recursive). */
#ifndef BALLAST_PROTO_FRAME_H
#define BALLAST_PROTO_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <protobuf-c/protobuf-c.h>
#include "proto/base/status.h"

enum {
    FRAME_MAX_BYTES = 64 * 1024,
    FRAME_MAX_BYTES_BEFORE_HELLO = 1024,
    FRAME_PREFIX_BYTES = 3,                 /* of a length up to FRAME_MAX_BYTES */
    FRAME_UNPACK_BUDGET_BYTES = 1024 * 1024 /* per message, all its allocations */
};

/* Reassembles frames from a byte stream. Zero-initialise; owns its buffer. */
struct frame_reader {
    uint8_t *buffer; /* owned */
    size_t capacity;
    size_t used;     /* bytes held */
    size_t start;    /* first unconsumed byte */
    size_t max_bytes; /* cap in force; 0 means FRAME_MAX_BYTES_BEFORE_HELLO */
};

void frame_reader_fini(struct frame_reader *reader);
/* Append received bytes. TOO_LARGE when more than one capped frame would have to be held
 * without one being complete; OUT_OF_MEMORY. */
enum status frame_reader_feed(struct frame_reader *reader, const uint8_t *bytes,
                              size_t n) MUST_CHECK;
/* The next whole frame's payload, borrowed until the next feed. OK; AGAIN when incomplete;
 * TOO_LARGE over the cap; MALFORMED for a bad varint. */
enum status frame_reader_next(struct frame_reader *reader, const uint8_t **out_bytes,
                              size_t *out_n) MUST_CHECK;

/* Pack a message with its length prefix into new memory (heap_free it).
 * TOO_LARGE over FRAME_MAX_BYTES; MALFORMED when a string is not UTF-8, which the other side
 * would drop the connection for; OUT_OF_MEMORY. */
enum status frame_encode(const ProtobufCMessage *message, uint8_t **out_bytes,
                         size_t *out_n) MUST_CHECK;
/* Unpack one payload within the budget; also checks that strings are UTF-8 and enums known.
 * Free the result with frame_free(). MALFORMED, TOO_LARGE or OUT_OF_MEMORY otherwise. */
enum status frame_decode(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes,
                         size_t n, ProtobufCMessage **out_message) MUST_CHECK;
void frame_free(ProtobufCMessage *message);
/* A copy whose parts are all its own; frame_free() it. As frame_decode(). */
enum status frame_copy(const ProtobufCMessage *message, ProtobufCMessage **out_copy) MUST_CHECK;

#endif
