/* A second, slower packing of a section, for records on which the order of start leaves gaps.
 *
 * Bounded in work; phases are not kept nested. Pure but for the heap. */
#ifndef BALLAST_WORKER_MEMORY_REPACK_H
#define BALLAST_WORKER_MEMORY_REPACK_H

#include <stddef.h>
#include "worker/memory/plan.h"

/* Look for offsets whose high water is at most goal_bytes, and take the best ones found if they are
 * better than the section's own, which stand otherwise, also when the heap is exhausted. */
void repack_section(struct plan_section *section, size_t goal_bytes);

#endif
