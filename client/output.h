/* Where a verb's answer goes: text or JSON to its output, a failure to its error stream. */
#ifndef BALLAST_CLIENT_OUTPUT_H
#define BALLAST_CLIENT_OUTPUT_H

#include <jansson.h>
#include "client/verbs.h"

/* Print a rendered text and free it. FAILED when it is incomplete or cannot be written. */
enum exit_code output_text(struct call *call, struct text *text);
/* Print one JSON value as a line and release it. NULL means out of memory. */
enum exit_code output_json(struct call *call, json_t *value);
/* Say the session's failure on the error stream, with --json also as {"error": ...}.
 * Returns `code`. */
enum exit_code output_failure(struct call *call, enum exit_code code);

/* The body of a reply as JSON; several parts merged: lists joined, objects united, later
 * numbers win. NULL when out of memory. */
json_t *output_merge(const struct replies *replies);
/* Events as a table or {"events": [...]}; one as a line. */
enum exit_code output_events(struct call *call, Ballast__V1__Event *const *events, size_t n);
enum exit_code output_event_line(struct call *call, const Ballast__V1__Event *event);
/* The last out-of-memory report; NULL: there was none. */
enum exit_code output_oom(struct call *call, Ballast__V1__OomReport *report);

/* An event with what its type adds as keys of its own, as in events.jsonl. */
json_t *output_event(const Ballast__V1__Event *event);

/* The items of one repeated field over all parts, borrowed from the replies; the array is the
 * caller's (heap_free). `field` names the field of the reply's body. False: out of memory. */
bool output_gather(const struct replies *replies, const char *field, void ***out_items,
                   size_t *out_n);

#endif
