/* The walk over a payload's bytes. Owns nothing; pure; any thread. */
#include "proto/wire.h"

#include <string.h>
#include "proto/base/utf8.h"

enum { MAX_VARINT_BYTES = 10 };
enum { WIRE_VARINT = 0, WIRE_64BIT = 1, WIRE_BYTES = 2, WIRE_32BIT = 5 };

static enum status check_message(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes,
                                 size_t n, int depth);

enum status wire_varint(const uint8_t *bytes, size_t n, uint64_t *out_value, size_t *out_n)
{
    uint64_t value = 0;
    for (size_t i = 0; i < n && i < MAX_VARINT_BYTES; i++) {
        if (i == MAX_VARINT_BYTES - 1 && bytes[i] > 1) {
            return STATUS_MALFORMED;
        }
        value |= (uint64_t)(bytes[i] & 0x7F) << 7 * i;
        if ((bytes[i] & 0x80) == 0) {
            *out_value = value;
            *out_n = i + 1;
            return STATUS_OK;
        }
    }
    return n < MAX_VARINT_BYTES ? STATUS_AGAIN : STATUS_MALFORMED;
}

/* A varint that has to be whole, moved past. */
static enum status take_varint(const uint8_t **bytes, size_t *n, uint64_t *out_value)
{
    size_t used;
    if (wire_varint(*bytes, *n, out_value, &used) != STATUS_OK) {
        return STATUS_MALFORMED;
    }
    *bytes += used;
    *n -= used;
    return STATUS_OK;
}

static bool known_enum(const ProtobufCFieldDescriptor *field, uint64_t value)
{
    int64_t number = (int64_t)value;
    return number >= INT32_MIN && number <= INT32_MAX &&
           protobuf_c_enum_descriptor_get_value(field->descriptor, (int)number) != NULL;
}

/* The inside of a length-delimited field. */
static enum status check_bytes(const ProtobufCFieldDescriptor *field, const uint8_t *bytes,
                               size_t n, int depth)
{
    if (field->type == PROTOBUF_C_TYPE_STRING) {
        bool good = memchr(bytes, '\0', n) == NULL && utf8_valid((const char *)bytes, n);
        return good ? STATUS_OK : STATUS_MALFORMED;
    }
    if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
        return depth == WIRE_MAX_DEPTH ? STATUS_MALFORMED
                                       : check_message(field->descriptor, bytes, n, depth + 1);
    }
    if (field->type == PROTOBUF_C_TYPE_ENUM) { /* packed */
        while (n > 0) {
            uint64_t value;
            if (take_varint(&bytes, &n, &value) != STATUS_OK || !known_enum(field, value)) {
                return STATUS_MALFORMED;
            }
        }
    }
    return STATUS_OK;
}

/* One field after its tag; `field` is NULL for an unknown one. */
static enum status check_field(const ProtobufCFieldDescriptor *field, unsigned wire_type,
                               const uint8_t **bytes, size_t *n, int depth)
{
    uint64_t value = 0;
    size_t skip = 0;
    enum status status = STATUS_OK;
    switch (wire_type) {
    case WIRE_VARINT:
        status = take_varint(bytes, n, &value);
        if (status == STATUS_OK && field != NULL && field->type == PROTOBUF_C_TYPE_ENUM &&
            !known_enum(field, value)) {
            status = STATUS_MALFORMED;
        }
        break;
    case WIRE_64BIT:
        skip = 8;
        break;
    case WIRE_32BIT:
        skip = 4;
        break;
    case WIRE_BYTES:
        status = take_varint(bytes, n, &value);
        if (status == STATUS_OK && value > *n) {
            status = STATUS_MALFORMED;
        }
        skip = status == STATUS_OK ? (size_t)value : 0;
        if (status == STATUS_OK && field != NULL) {
            status = check_bytes(field, *bytes, skip, depth);
        }
        break;
    default: /* groups, which no message of ours has */
        status = STATUS_MALFORMED;
    }
    if (status == STATUS_OK && skip > *n) {
        status = STATUS_MALFORMED;
    }
    if (status == STATUS_OK) {
        *bytes += skip;
        *n -= skip;
    }
    return status;
}

static enum status check_message(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes,
                                 size_t n, int depth)
{
    while (n > 0) {
        uint64_t tag;
        if (take_varint(&bytes, &n, &tag) != STATUS_OK || tag >> 3 == 0 || tag > UINT32_MAX) {
            return STATUS_MALFORMED;
        }
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field(descriptor, (unsigned)(tag >> 3));
        enum status status = check_field(field, (unsigned)(tag & 7), &bytes, &n, depth);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

enum status wire_check(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes, size_t n)
{
    return check_message(descriptor, bytes, n, 1);
}
