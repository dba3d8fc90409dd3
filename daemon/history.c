/* Rings of step records and events. See history.h. */
#include "daemon/history.h"

#include <assert.h>
#include "proto/base/heap.h"
#include "proto/frame.h"

enum status history_init(struct history *history, struct failure *why)
{
    *history = (struct history){0};
    history->steps.items = heap_calloc(HISTORY_CAPACITY, sizeof *history->steps.items);
    history->events.items = heap_calloc(HISTORY_CAPACITY, sizeof *history->events.items);
    if (!history->steps.items || !history->events.items) {
        history_fini(history);
        return fail(why, STATUS_OUT_OF_MEMORY, "out of memory for the history of %d steps",
                    HISTORY_CAPACITY);
    }
    return STATUS_OK;
}

static ProtobufCMessage *record_at(const struct history_ring *ring, size_t i)
{
    return i < ring->count ? ring->items[(ring->first + i) % HISTORY_CAPACITY] : NULL;
}

static void drop_oldest(struct history_ring *ring)
{
    ProtobufCMessage *oldest = record_at(ring, 0);
    ring->bytes -= protobuf_c_message_get_packed_size(oldest);
    frame_free(oldest);
    ring->first = (ring->first + 1) % HISTORY_CAPACITY;
    ring->count--;
}

static void add(struct history_ring *ring, ProtobufCMessage *message)
{
    size_t bytes = protobuf_c_message_get_packed_size(message);
    while (ring->count > 0 &&
           (ring->count == HISTORY_CAPACITY || ring->bytes + bytes > HISTORY_MAX_BYTES))
        drop_oldest(ring);
    ring->items[(ring->first + ring->count) % HISTORY_CAPACITY] = message;
    ring->count++;
    ring->bytes += bytes;
}

static void ring_fini(struct history_ring *ring)
{
    while (ring->items && ring->count > 0)
        drop_oldest(ring);
    heap_free(ring->items);
    *ring = (struct history_ring){0};
}

void history_fini(struct history *history)
{
    ring_fini(&history->steps);
    ring_fini(&history->events);
}

void history_add_step(struct history *history, Ballast__V1__StepRecord *step)
{
    add(&history->steps, &step->base);
}

void history_add_event(struct history *history, Ballast__V1__Event *event)
{
    const Ballast__V1__Event *newest = history_newest_event(history);
    assert(!newest || event->sequence > newest->sequence);
    add(&history->events, &event->base);
}

const Ballast__V1__StepRecord *history_step(const struct history *history, size_t i)
{
    return (const Ballast__V1__StepRecord *)record_at(&history->steps, i);
}

const Ballast__V1__Event *history_event(const struct history *history, size_t i)
{
    return (const Ballast__V1__Event *)record_at(&history->events, i);
}

const Ballast__V1__StepRecord *history_newest_step(const struct history *history)
{
    return history_step(history, history->steps.count - 1);
}

const Ballast__V1__Event *history_newest_event(const struct history *history)
{
    return history_event(history, history->events.count - 1);
}

size_t history_part(const struct history_ring *ring, size_t at, size_t end, size_t max_bytes,
                    void **out_part, size_t capacity)
{
    size_t n = 0, bytes = 0;
    while (at + n < end && n < capacity) {
        ProtobufCMessage *record = record_at(ring, at + n);
        /* In a list: a field number and a length before it. */
        bytes += protobuf_c_message_get_packed_size(record) + FRAME_PREFIX_BYTES + 1;
        if (n > 0 && bytes > max_bytes)
            break;
        out_part[n++] = record;
    }
    return n;
}

size_t history_find_step(const struct history *history, uint64_t step)
{
    size_t i = 0;
    while (i < history->steps.count && history_step(history, i)->step < step)
        i++;
    return i;
}

size_t history_find_event(const struct history *history, uint64_t sequence)
{
    /* Ascending, so by bisection. */
    size_t low = 0, high = history->events.count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (history_event(history, middle)->sequence > sequence)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}
