/* The newest step records and events of the run, for clients that ask.
 *
 * Two rings, bounded by count and by bytes; the oldest go first. Owns the messages it is given.
 * Pure but for its memory, which is taken once. Loop thread. */
#ifndef BALLAST_DAEMON_HISTORY_H
#define BALLAST_DAEMON_HISTORY_H

#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"
#include "proto/run.pb-c.h"

enum { HISTORY_CAPACITY = 4096, HISTORY_MAX_BYTES = 8 * 1024 * 1024 };

struct history_ring {
    ProtobufCMessage **items; /* owned, HISTORY_CAPACITY slots */
    size_t first, count, bytes;
};

struct history {
    struct history_ring steps;  /* StepRecord, in the order of arrival */
    struct history_ring events; /* Event, ascending in sequence */
};

enum status history_init(struct history *history, struct failure *why) MUST_CHECK;
void history_fini(struct history *history);

/* Take over a message that frame_decode() made (or event_copy()). */
void history_add_step(struct history *history, Ballast__V1__StepRecord *step);
void history_add_event(struct history *history, Ballast__V1__Event *event);

/* Number i of those kept, oldest first; NULL beyond the end. Borrowed until the next add. */
const Ballast__V1__StepRecord *history_step(const struct history *history, size_t i);
const Ballast__V1__Event *history_event(const struct history *history, size_t i);
const Ballast__V1__StepRecord *history_newest_step(const struct history *history);
const Ballast__V1__Event *history_newest_event(const struct history *history);

/* The records number at, at + 1, ... below `end`, at most `capacity` and as many as fit max_bytes
 * of a reply, but one at least. Borrowed likewise; returns how many. */
size_t history_part(const struct history_ring *ring, size_t at, size_t end, size_t max_bytes,
                    void **out_part, size_t capacity);

/* Index of the first step record with step >= `step`, or of the first event with sequence >
 * `sequence`; the count when there is none. */
size_t history_find_step(const struct history *history, uint64_t step);
size_t history_find_event(const struct history *history, uint64_t sequence);

#endif
