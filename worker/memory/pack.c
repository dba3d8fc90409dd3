/* Packing of a section's buffers. See pack.h. */
#include "worker/memory/pack.h"
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/memory/repack.h"

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

/* Live peak / high water that is worth no more work. */
static const double goal = 0.995;

enum status pack_section(struct plan_section *section, struct failure *why)
{
    const enum status status = pack_in_order_of_start(section, why);
    if (status == STATUS_OK &&
        (double)section->live_peak_bytes < goal * (double)section->high_water_bytes) {
        repack_section(section, (size_t)((double)section->live_peak_bytes / goal));
    }
    return status;
}

/* The span at `at` keeps clear of its neighbours. */
static bool clear_of_neighbours(const struct pack_live *live, size_t at)
{
    return (at == 0 || live->spans[at - 1].end <= live->spans[at].offset) &&
           (at + 1 == live->n || live->spans[at].end <= live->spans[at + 1].offset);
}

bool pack_is_sound(const struct plan_section *section)
{
    struct pack_live live = {0};
    bool sound = true;
    for (uint32_t at = 0; at < section->n_events && sound; at++) {
        const struct plan_event event = section->events[at];
        if (event.kind == PLAN_PHASE) {
            continue;
        }
        const struct plan_buffer *buffer = &section->buffers[event.id];
        if (event.kind == PLAN_RELEASE) {
            pack_live_remove(&live, buffer->offset);
            continue;
        }
        sound = buffer->offset % PLAN_ALIGN_BYTES == 0 &&
                buffer->offset + buffer->padded <= section->high_water_bytes &&
                pack_live_add(&live, buffer->offset, buffer->padded) &&
                clear_of_neighbours(&live, lower_bound(&live, buffer->offset));
    }
    pack_live_fini(&live);
    return sound;
}
