/* Frames: bytes to messages and back.
 *
 * Owns the reader's buffer and the memory of unpacked messages; no sockets. A reader belongs to
 * one thread; the rest is pure. */
#include "proto/frame.h"

#include <assert.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/wire.h"

enum {
    FIRST_CAPACITY = 512,
    /* A whole frame may wait while as much again and more arrives; who does not drain the reader
     * is stopped here. */
    MAX_HELD_BYTES = 4 * FRAME_MAX_BYTES,
    /* Longer prefixes are no length at all; the stock readers agree. */
    MAX_PREFIX_BYTES = 5,
    /* Charged per block beyond its size, about what the heap itself adds. */
    BLOCK_OVERHEAD_BYTES = 16
};
_Static_assert(FRAME_MAX_BYTES < 1 << 7 * FRAME_PREFIX_BYTES, "the prefix holds the cap");

void frame_reader_fini(struct frame_reader *reader)
{
    heap_free(reader->buffer);
    *reader = (struct frame_reader){0};
}

/* The length of the first frame held and of its prefix. */
static enum status peek(const struct frame_reader *reader, size_t *out_prefix, size_t *out_n)
{
    size_t held = reader->used - reader->start;
    if (held == 0) {
        return STATUS_AGAIN;
    }
    const uint8_t *first = reader->buffer + reader->start;
    size_t cap = reader->max_bytes == 0 ? FRAME_MAX_BYTES_BEFORE_HELLO : reader->max_bytes;
    uint64_t length;
    size_t prefix;
    enum status status = wire_varint(first, held, &length, &prefix);
    if (status == STATUS_AGAIN && held < MAX_PREFIX_BYTES) {
        return STATUS_AGAIN;
    }
    if (status != STATUS_OK || prefix > MAX_PREFIX_BYTES) {
        return STATUS_MALFORMED;
    }
    if (length > cap) {
        return STATUS_TOO_LARGE;
    }
    *out_prefix = prefix;
    *out_n = (size_t)length;
    return held - prefix < length ? STATUS_AGAIN : STATUS_OK;
}

/* Room for n more bytes behind those held, which move to the front. */
static enum status make_room(struct frame_reader *reader, size_t n)
{
    size_t held = reader->used - reader->start;
    if (reader->start > 0) {
        memmove(reader->buffer, reader->buffer + reader->start, held);
        reader->start = 0;
        reader->used = held;
    }
    size_t capacity = reader->capacity == 0 ? FIRST_CAPACITY : reader->capacity;
    while (capacity < held + n) {
        capacity *= 2;
    }
    if (capacity == reader->capacity) {
        return STATUS_OK;
    }
    uint8_t *buffer = heap_realloc(reader->buffer, capacity);
    if (buffer == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    reader->buffer = buffer;
    reader->capacity = capacity;
    return STATUS_OK;
}

enum status frame_reader_feed(struct frame_reader *reader, const uint8_t *bytes, size_t n)
{
    if (n == 0) {
        return STATUS_OK;
    }
    if (n > MAX_HELD_BYTES || reader->used - reader->start > MAX_HELD_BYTES - n) {
        return STATUS_TOO_LARGE;
    }
    enum status status = make_room(reader, n);
    if (status != STATUS_OK) {
        return status;
    }
    memcpy(reader->buffer + reader->used, bytes, n);
    reader->used += n;
    /* A first frame over its cap never completes: say so now, not after it was held. */
    size_t prefix, length;
    return peek(reader, &prefix, &length) == STATUS_TOO_LARGE ? STATUS_TOO_LARGE : STATUS_OK;
}

enum status frame_reader_next(struct frame_reader *reader, const uint8_t **out_bytes, size_t *out_n)
{
    size_t prefix, length;
    enum status status = peek(reader, &prefix, &length);
    if (status != STATUS_OK) {
        return status;
    }
    *out_bytes = reader->buffer + reader->start + prefix;
    *out_n = length;
    reader->start += prefix + length;
    return STATUS_OK;
}

enum status frame_encode(const ProtobufCMessage *message, uint8_t **out_bytes, size_t *out_n)
{
    size_t length = protobuf_c_message_get_packed_size(message);
    if (length > FRAME_MAX_BYTES) {
        return STATUS_TOO_LARGE;
    }
    uint8_t *bytes = heap_alloc(FRAME_PREFIX_BYTES + length);
    if (bytes == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    size_t prefix = 0;
    for (size_t rest = length; prefix == 0 || rest > 0; rest >>= 7) {
        bytes[prefix++] = (uint8_t)((rest & 0x7F) | (rest >> 7 > 0 ? 0x80 : 0));
    }
    size_t packed = protobuf_c_message_pack(message, bytes + prefix);
    assert(packed == length);
    (void)packed;
    /* The other side would drop the connection over a bad text; the sender can do better. */
    enum status status = wire_check(message->descriptor, bytes + prefix, length);
    if (status != STATUS_OK) {
        heap_free(bytes);
        return status;
    }
    *out_bytes = bytes;
    *out_n = prefix + length;
    return STATUS_OK;
}

/* What unpacking one message may still take, and why it was stopped. */
struct budget {
    size_t left;
    bool exhausted;
    bool out_of_memory;
};

static void *budget_alloc(void *data, size_t bytes)
{
    struct budget *budget = data;
    if (bytes > budget->left || budget->left - bytes < BLOCK_OVERHEAD_BYTES) {
        budget->exhausted = true;
        return NULL;
    }
    void *memory = heap_alloc(bytes);
    if (memory == NULL) {
        budget->out_of_memory = true;
        return NULL;
    }
    /* What is freed again, protobuf-c's scratch, is not given back: the budget bounds the work. */
    budget->left -= bytes + BLOCK_OVERHEAD_BYTES;
    return memory;
}

static void budget_free(void *data, void *memory)
{
    (void)data;
    heap_free(memory);
}

enum status frame_decode(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes,
                         size_t n, ProtobufCMessage **out_message)
{
    if (n > FRAME_MAX_BYTES) {
        return STATUS_TOO_LARGE;
    }
    enum status status = wire_check(descriptor, bytes, n);
    if (status != STATUS_OK) {
        return status;
    }
    struct budget budget = {.left = FRAME_UNPACK_BUDGET_BYTES};
    ProtobufCAllocator allocator = {budget_alloc, budget_free, &budget};
    ProtobufCMessage *message = protobuf_c_message_unpack(descriptor, &allocator, n, bytes);
    /* protobuf-c may give a message with a part missing when that part's memory was refused. */
    if (budget.exhausted || budget.out_of_memory) {
        frame_free(message);
        return budget.exhausted ? STATUS_TOO_LARGE : STATUS_OUT_OF_MEMORY;
    }
    if (message == NULL) {
        return STATUS_MALFORMED;
    }
    *out_message = message;
    return STATUS_OK;
}

void frame_free(ProtobufCMessage *message)
{
    if (message != NULL) {
        ProtobufCAllocator allocator = {budget_alloc, budget_free, NULL};
        protobuf_c_message_free_unpacked(message, &allocator);
    }
}

enum status frame_copy(const ProtobufCMessage *message, ProtobufCMessage **out_copy)
{
    size_t n = protobuf_c_message_get_packed_size(message);
    if (n > FRAME_MAX_BYTES) {
        return STATUS_TOO_LARGE;
    }
    uint8_t *bytes = heap_alloc(n + 1); /* a message of nothing but defaults has no bytes */
    if (bytes == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    protobuf_c_message_pack(message, bytes);
    enum status status = frame_decode(message->descriptor, bytes, n, out_copy);
    heap_free(bytes);
    return status;
}
