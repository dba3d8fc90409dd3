/* Packing: give every buffer of a section an offset, so that buffers alive together do not
 * overlap and the highest end is as low as can be.
 *
 * Best fit in order of start first: it is what a perfect stack would do on a step's trace, and it
 * nests the phases, since a buffer's place depends only on earlier events. When that leaves more
 * than half a percent, repack.h looks for something better. Pure but for the heap. */
#ifndef BALLAST_WORKER_MEMORY_PACK_H
#define BALLAST_WORKER_MEMORY_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include "worker/memory/plan.h"

/* Fills offset of every buffer, live_peak_bytes and high_water_bytes. */
enum status pack_section(struct plan_section *section, struct failure *why) MUST_CHECK;
/* No two buffers that are alive together overlap; all lie aligned below the high water. */
bool pack_is_sound(const struct plan_section *section);

/* The placed buffers alive at one moment, ordered by offset. Zero-initialise. */
struct pack_live {
    struct pack_span {
        size_t offset, end;
    } *spans; /* owned */
    size_t n, capacity;
};
bool pack_live_add(struct pack_live *live, size_t offset, size_t bytes);
/* The span at this offset must be there. */
void pack_live_remove(struct pack_live *live, size_t offset);
/* Highest end, 0 when empty. */
size_t pack_live_top(const struct pack_live *live);
void pack_live_fini(struct pack_live *live);

#endif
