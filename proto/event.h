/* An event of a run: a message of its own, and a line of events.jsonl.
 *
 * A line is one JSON object. What every event has comes first, under fixed names; what the type
 * adds (details_json) stands beside it. Its number in the file is the event's sequence number and
 * not written. Parsing changes jansson's allocator for a moment, as json_parse() does. */
#ifndef BALLAST_PROTO_EVENT_H
#define BALLAST_PROTO_EVENT_H

#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"
#include "proto/run.pb-c.h"

/* As a message that frame_free() frees. NULL: out of memory, or too large for a frame. */
Ballast__V1__Event *event_copy(const Ballast__V1__Event *event);
/* As a line without its newline; heap_free() it. NULL: out of memory. */
char *event_format(const Ballast__V1__Event *event);
/* The reverse; frame_free() it. MALFORMED: the line is no event; OUT_OF_MEMORY. */
enum status event_parse(const char *line, size_t n, uint64_t sequence,
                        Ballast__V1__Event **out_event) MUST_CHECK;

#endif
