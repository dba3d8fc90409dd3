/* Messages as JSON, for files and for `--json`: one walk over the descriptors.
 *
 * Field names stay as they are. An enum is its lower-case name without the type's prefix
 * ("forward"); the unspecified value, an empty string, an unset message and the members of a
 * oneof that are not set are omitted. Numbers and booleans are always there; a number that is
 * not finite is null. Lists are arrays, except:
 *   Setting    -> {"checkpointing": "block:2", "micro_batch": 4}  (decimal text as a number)
 *   PhaseBytes -> {"forward": 1024}
 *   PhaseTime  -> {"forward": 12.5}
 * `bytes` fields are base64. Bytes that are not UTF-8 become '?'.
 * Any thread; the caller owns what is returned (json_decref). */
#ifndef BALLAST_PROTO_JSON_H
#define BALLAST_PROTO_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <protobuf-c/protobuf-c.h>

/* Flags for json_format() that the files of a run are written with: one line, and floats that
 * read back to the same bits. */
#define JSON_LINE_FLAGS (JSON_COMPACT | JSON_REAL_PRECISION(17))

/* Make jansson allocate through the heap. Call once, before any thread starts. */
void json_use_heap(void);
/* NULL when out of memory. */
json_t *json_from_message(const ProtobufCMessage *message);
/* A real; null when not finite. NULL when out of memory. */
json_t *json_number(double value);
/* An integer; a real above INT64_MAX, which JSON integers here cannot hold. */
json_t *json_count(uint64_t value);
/* As json_dumps(), which writes on without what it had no memory for. heap_free() the text; NULL
 * when out of memory. */
char *json_format(const json_t *value, size_t flags);
/* Give `object` what it lacks of `other`. As json_object_update_missing(), which does not notice
 * when memory runs out; false here. */
bool json_add_missing(json_t *object, json_t *other);
/* A string, with bytes that are not UTF-8 as '?'. NULL when out of memory. */
json_t *json_text(const char *text);

#endif
