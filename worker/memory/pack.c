/* Packing of a section's buffers. See pack.h. */
#include "worker/memory/pack.h"
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"

/* The first span whose offset is not below `offset`. */
static size_t lower_bound(const struct pack_live *live, size_t offset)
{
    size_t low = 0;
    size_t high = live->n;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (live->spans[middle].offset < offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

bool pack_live_add(struct pack_live *live, size_t offset, size_t bytes)
{
    if (live->n == live->capacity) {
        const size_t wanted = live->capacity == 0 ? 128 : live->capacity * 2;
        struct pack_span *larger = heap_realloc(live->spans, wanted * sizeof *larger);
        if (larger == NULL) {
            return false;
        }
        live->spans = larger;
        live->capacity = wanted;
    }
    const size_t at = lower_bound(live, offset);
    memmove(&live->spans[at + 1], &live->spans[at], (live->n - at) * sizeof *live->spans);
    live->spans[at] = (struct pack_span){offset, offset + bytes};
    live->n++;
    return true;
}

void pack_live_remove(struct pack_live *live, size_t offset)
{
    const size_t at = lower_bound(live, offset);
    assert(at < live->n && live->spans[at].offset == offset);
    live->n--;
    memmove(&live->spans[at], &live->spans[at + 1], (live->n - at) * sizeof *live->spans);
}

size_t pack_live_top(const struct pack_live *live)
{
    /* Spans do not overlap, so the last one ends highest. */
    return live->n == 0 ? 0 : live->spans[live->n - 1].end;
}

void pack_live_fini(struct pack_live *live)
{
    heap_free(live->spans);
    *live = (struct pack_live){0};
}

/* The smallest gap that holds `bytes`; the top when none does. */
static size_t best_fit(const struct pack_live *live, size_t bytes)
{
    size_t best_offset = pack_live_top(live);
    size_t best_gap = SIZE_MAX;
    size_t end = 0;
    for (size_t i = 0; i < live->n; i++) {
        const size_t gap = live->spans[i].offset - end;
        if (gap >= bytes && gap < best_gap) {
            best_gap = gap;
            best_offset = end;
        }
        end = live->spans[i].end;
    }
    return best_offset;
}

static enum status pack_in_order_of_start(struct plan_section *section, struct failure *why)
{
    struct pack_live live = {0};
    size_t live_bytes = 0;
    section->live_peak_bytes = 0;
    section->high_water_bytes = 0;
    for (uint32_t at = 0; at < section->n_events; at++) {
        const struct plan_event event = section->events[at];
        if (event.kind == PLAN_PHASE) {
            continue;
        }
        struct plan_buffer *buffer = &section->buffers[event.id];
        if (event.kind == PLAN_RELEASE) {
            pack_live_remove(&live, buffer->offset);
            live_bytes -= buffer->padded;
            continue;
        }
        buffer->offset = best_fit(&live, buffer->padded);
        if (!pack_live_add(&live, buffer->offset, buffer->padded)) {
            pack_live_fini(&live);
            return fail(why, STATUS_OUT_OF_MEMORY, "planning: out of host memory");
        }
        live_bytes += buffer->padded;
        if (live_bytes > section->live_peak_bytes) {
            section->live_peak_bytes = live_bytes;
        }
        if (buffer->offset + buffer->padded > section->high_water_bytes) {
            section->high_water_bytes = buffer->offset + buffer->padded;
        }
    }
    pack_live_fini(&live);
    return STATUS_OK;
}

/* A buffer's place in time, for packing in another order than that of start. */
struct interval {
    uint32_t id;
    uint32_t first, last; /* events of reserve and release */
    enum phase phase;
    size_t padded;
    size_t offset;
    bool placed;
};

/* Phases stay nested: what an earlier phase reserves is placed first. Inside a phase the
 * long-lived go first, then the large. */
static int long_lived_first(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    if (x->phase != y->phase) {
        return x->phase < y->phase ? -1 : 1;
    }
    const uint32_t x_life = x->last - x->first;
    const uint32_t y_life = y->last - y->first;
    if (x_life != y_life) {
        return x_life > y_life ? -1 : 1;
    }
    return x->id < y->id ? -1 : 1;
}

static int large_first(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    if (x->phase != y->phase) {
        return x->phase < y->phase ? -1 : 1;
    }
    if (x->padded != y->padded) {
        return x->padded > y->padded ? -1 : 1;
    }
    return x->id < y->id ? -1 : 1;
}

static bool meet(const struct interval *a, const struct interval *b)
{
    return a->first < b->last && b->first < a->last;
}

/* Place intervals in the given order, each in the best gap among those it meets. Returns the
 * high water, SIZE_MAX when the heap is exhausted. */
static size_t place(struct interval *intervals, size_t n)
{
    size_t high_water = 0;
    for (size_t i = 0; i < n; i++) {
        struct pack_live meeting = {0};
        bool room = true;
        for (size_t j = 0; j < i && room; j++) {
            if (meet(&intervals[i], &intervals[j])) {
                room = pack_live_add(&meeting, intervals[j].offset, intervals[j].padded);
            }
        }
        /* Spans of buffers that never meet each other may overlap: walk with a running end. */
        size_t best_offset = 0;
        size_t best_gap = SIZE_MAX;
        size_t end = 0;
        for (size_t j = 0; j < meeting.n; j++) {
            const size_t start = meeting.spans[j].offset;
            if (start > end && start - end >= intervals[i].padded && start - end < best_gap) {
                best_gap = start - end;
                best_offset = end;
            }
            end = meeting.spans[j].end > end ? meeting.spans[j].end : end;
        }
        pack_live_fini(&meeting);
        if (!room) {
            return SIZE_MAX;
        }
        intervals[i].offset = best_gap == SIZE_MAX ? end : best_offset;
        if (intervals[i].offset + intervals[i].padded > high_water) {
            high_water = intervals[i].offset + intervals[i].padded;
        }
    }
    return high_water;
}

static struct interval *list_intervals(const struct plan_section *section)
{
    struct interval *intervals = heap_calloc(section->n_buffers, sizeof *intervals);
    if (intervals == NULL) {
        return NULL;
    }
    for (uint32_t at = 0; at < section->n_events; at++) {
        const struct plan_event event = section->events[at];
        if (event.kind == PLAN_RESERVE) {
            const struct plan_buffer *buffer = &section->buffers[event.id];
            intervals[event.id] = (struct interval){.id = event.id,
                                                    .first = at,
                                                    .last = section->n_events,
                                                    .phase = buffer->phase,
                                                    .padded = buffer->padded};
        } else if (event.kind == PLAN_RELEASE) {
            intervals[event.id].last = at;
        }
    }
    return intervals;
}

/* Past this many buffers the quadratic orders cost more than they save. */
enum { REPACK_MAX_BUFFERS = 3000 };

static void try_other_orders(struct plan_section *section)
{
    static int (*const orders[])(const void *, const void *) = {long_lived_first, large_first};
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        struct interval *intervals = list_intervals(section);
        if (intervals == NULL) {
            return; /* the first packing stands */
        }
        qsort(intervals, section->n_buffers, sizeof *intervals, orders[i]);
        const size_t high_water = place(intervals, section->n_buffers);
        if (high_water < section->high_water_bytes) {
            for (uint32_t j = 0; j < section->n_buffers; j++) {
                section->buffers[intervals[j].id].offset = intervals[j].offset;
            }
            section->high_water_bytes = high_water;
        }
        heap_free(intervals);
    }
}

enum status pack_section(struct plan_section *section, struct failure *why)
{
    const enum status status = pack_in_order_of_start(section, why);
    if (status == STATUS_OK && section->n_buffers <= REPACK_MAX_BUFFERS &&
        (double)section->live_peak_bytes < 0.995 * (double)section->high_water_bytes) {
        try_other_orders(section);
    }
    return status;
}

bool pack_is_sound(const struct plan_section *section)
{
    if (section->n_buffers == 0) {
        return true;
    }
    struct interval *intervals = list_intervals(section);
    if (intervals == NULL) {
        return false;
    }
    bool sound = true;
    for (uint32_t i = 0; i < section->n_buffers && sound; i++) {
        const struct plan_buffer *a = &section->buffers[i];
        for (uint32_t j = 0; j < i && sound; j++) {
            const struct plan_buffer *b = &section->buffers[j];
            sound = !meet(&intervals[i], &intervals[j]) || a->offset + a->padded <= b->offset ||
                    b->offset + b->padded <= a->offset;
        }
    }
    heap_free(intervals);
    return sound;
}
