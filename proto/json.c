/* The walk from a message to JSON. Owns nothing; any thread. */
#include "proto/json.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/base/utf8.h"
#include "proto/run.pb-c.h"

enum { ENUM_NAME_BYTES = 64 };

void json_use_heap(void)
{
    json_set_alloc_funcs(heap_alloc, heap_free);
}

json_t *json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *json_count(uint64_t value)
{
    return value <= INT64_MAX ? json_integer((json_int_t)value) : json_real((double)value);
}

json_t *json_text(const char *text)
{
    size_t bytes = strlen(text);
    if (utf8_valid(text, bytes)) {
        return json_stringn_nocheck(text, bytes);
    }
    char *clean = heap_strdup(text);
    if (clean == NULL) {
        return NULL;
    }
    utf8_clean(clean);
    json_t *string = json_stringn_nocheck(clean, bytes);
    heap_free(clean);
    return string;
}

static json_t *base64(const ProtobufCBinaryData *data)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t bytes = (data->len + 2) / 3 * 4;
    char *text = heap_alloc(bytes);
    if (text == NULL) {
        return NULL;
    }
    char *at = text;
    for (size_t i = 0; i < data->len; i += 3) {
        size_t left = data->len - i;
        unsigned group = (unsigned)data->data[i] << 16 |
                         (left > 1 ? (unsigned)data->data[i + 1] << 8 : 0) |
                         (left > 2 ? (unsigned)data->data[i + 2] : 0);
        *at++ = digits[group >> 18];
        *at++ = digits[group >> 12 & 63];
        *at++ = left > 1 ? digits[group >> 6 & 63] : '=';
        *at++ = left > 2 ? digits[group & 63] : '=';
    }
    json_t *string = json_stringn_nocheck(text, bytes);
    heap_free(text);
    return string;
}

/* "PHASE_FORWARD" of the enum Phase -> "forward"; a number nobody named -> its digits. */
static const char *enum_name(const ProtobufCEnumDescriptor *descriptor, int value,
                             char text[static ENUM_NAME_BYTES])
{
    const ProtobufCEnumValue *known = protobuf_c_enum_descriptor_get_value(descriptor, value);
    if (known == NULL) {
        snprintf(text, ENUM_NAME_BYTES, "%d", value);
        return text;
    }
    size_t prefix = strlen(descriptor->short_name);
    const char *name = known->name;
    if (strncasecmp(name, descriptor->short_name, prefix) == 0 && name[prefix] == '_') {
        name += prefix + 1;
    }
    size_t i = 0;
    for (; name[i] != '\0' && i < ENUM_NAME_BYTES - 1; i++) {
        text[i] = (char)tolower((unsigned char)name[i]);
    }
    text[i] = '\0';
    return text;
}

static json_t *json_from_enum(const ProtobufCEnumDescriptor *descriptor, int value)
{
    char text[ENUM_NAME_BYTES];
    return json_string(enum_name(descriptor, value, text));
}

/* One value at `at`, as it lies in the message or in its array. */
static json_t *json_from_value(const ProtobufCFieldDescriptor *field, const void *at)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        return json_integer(*(const int32_t *)at);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        return json_integer(*(const uint32_t *)at);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        return json_integer(*(const int64_t *)at);
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        return json_count(*(const uint64_t *)at);
    case PROTOBUF_C_TYPE_FLOAT:
        return json_number((double)*(const float *)at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return json_number(*(const double *)at);
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return json_from_enum(field->descriptor, *(const int *)at);
    case PROTOBUF_C_TYPE_STRING:
        return json_text(*(const char *const *)at);
    case PROTOBUF_C_TYPE_BYTES:
        return base64(at);
    case PROTOBUF_C_TYPE_MESSAGE:
        return json_from_message(*(const ProtobufCMessage *const *)at);
    }
    return NULL;
}

/* Decimal text is a number, all else a string: "4" -> 4, "0.5" -> 0.5, "block:2" stays. */
static json_t *json_from_setting(const char *value)
{
    int64_t whole;
    double real;
    if (units_parse_int(value, INT64_MIN, INT64_MAX, &whole) == STATUS_OK) {
        return json_integer(whole);
    }
    if (units_parse_double(value, &real) == STATUS_OK) {
        return json_number(real);
    }
    return json_text(value);
}

static bool put_keyed(json_t *object, const ProtobufCMessage *item)
{
    const ProtobufCEnumDescriptor *phases = &ballast__v1__phase__descriptor;
    char name[ENUM_NAME_BYTES];
    if (item->descriptor == &ballast__v1__setting__descriptor) {
        const Ballast__V1__Setting *setting = (const void *)item;
        json_t *key = json_text(setting->key);
        bool put = key != NULL && json_object_set_new(object, json_string_value(key),
                                                      json_from_setting(setting->value)) == 0;
        json_decref(key);
        return put;
    }
    if (item->descriptor == &ballast__v1__phase_bytes__descriptor) {
        const Ballast__V1__PhaseBytes *bytes = (const void *)item;
        return json_object_set_new(object, enum_name(phases, (int)bytes->phase, name),
                                   json_count(bytes->bytes)) == 0;
    }
    const Ballast__V1__PhaseTime *time = (const void *)item;
    return json_object_set_new(object, enum_name(phases, (int)time->phase, name),
                               json_number(time->ms)) == 0;
}

static size_t element_bytes(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
    case PROTOBUF_C_TYPE_ENUM:
        return 4;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
    return sizeof(void *);
}

static json_t *json_from_list(const ProtobufCFieldDescriptor *field, const char *items, size_t n)
{
    bool keyed = field->descriptor == &ballast__v1__setting__descriptor ||
                 field->descriptor == &ballast__v1__phase_bytes__descriptor ||
                 field->descriptor == &ballast__v1__phase_time__descriptor;
    json_t *list = keyed ? json_object() : json_array();
    if (list == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        const char *at = items + i * element_bytes(field);
        bool put = keyed ? put_keyed(list, *(const ProtobufCMessage *const *)(const void *)at)
                         : json_array_append_new(list, json_from_value(field, at)) == 0;
        if (!put) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* Is a singular field there at all? A member of a oneof is when it is the one that is set. */
static bool is_set(const ProtobufCMessage *message, const ProtobufCFieldDescriptor *field)
{
    const char *base = (const char *)message;
    const void *at = base + field->offset;
    if ((field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0 &&
        *(const uint32_t *)(const void *)(base + field->quantifier_offset) != field->id) {
        return false;
    }
    if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
        return *(const ProtobufCMessage *const *)at != NULL;
    }
    if (field->type == PROTOBUF_C_TYPE_STRING) {
        const char *text = *(const char *const *)at;
        return text != NULL && *text != '\0';
    }
    return field->type != PROTOBUF_C_TYPE_ENUM || *(const int *)at != 0;
}

json_t *json_from_message(const ProtobufCMessage *message)
{
    json_t *object = json_object();
    if (object == NULL) {
        return NULL;
    }
    const char *base = (const char *)message;
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        const void *at = base + field->offset;
        json_t *value;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t n = *(const size_t *)(const void *)(base + field->quantifier_offset);
            value = json_from_list(field, *(const char *const *)at, n);
        } else if (is_set(message, field)) {
            value = json_from_value(field, at);
        } else {
            continue;
        }
        if (json_object_set_new(object, field->name, value) != 0) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

char *json_format(const json_t *value, size_t flags)
{
    /* Into memory of the right size: jansson looks only at some of its growing's failures. */
    size_t n = json_dumpb(value, NULL, 0, flags);
    char *text = n > 0 ? heap_alloc(n + 1) : NULL;
    if (text == NULL || json_dumpb(value, text, n, flags) != n) {
        heap_free(text);
        return NULL;
    }
    text[n] = '\0';
    return text;
}

bool json_add_missing(json_t *object, json_t *other)
{
    const char *key;
    json_t *value;
    json_object_foreach(other, key, value)
    {
        if (json_object_get(object, key) == NULL && json_object_set(object, key, value) != 0) {
            return false;
        }
    }
    return true;
}
