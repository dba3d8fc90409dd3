/* Faults on purpose: named points in fallible code that a test can make fail.
 *
 * `commit:rank=1,step=3,phase=backward` fails that commit once. Keys: rank, step, phase,
 * nth (skip the first n-1 matches), repeat (how many times; 0 = for ever), for (seconds
 * from the first match, through later steps and phases too). Several specs may be armed.
 * Every rank knows the whole list, so that an armed commit fault forces admission on all
 * ranks alike.
 *
 * One of the two globals of the project. Armed before threads start; the context is set by
 * the main thread and read by any. */
#ifndef BALLAST_PROTO_BASE_FAULT_H
#define BALLAST_PROTO_BASE_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/account.h"
#include "proto/base/status.h"

enum fault_point {
    FAULT_COMMIT,
    FAULT_HOST,
    FAULT_PINNED,
    FAULT_COLLECTIVE,
    FAULT_IO,
    FAULT_LINK,
    FAULT_ALLOC,
    N_FAULT_POINTS
};

const char *fault_point_name(enum fault_point point);
/* Arm one spec. The failure names the part that is wrong and what is allowed. */
enum status fault_arm(const char *spec, struct failure *why) MUST_CHECK;
void fault_disarm_all(void);
/* Tell where this process is; faults match against it. */
void fault_here(int rank, int64_t step, enum phase phase);
/* Does an armed fault fire here and now? Counts it. Cheap when nothing is armed. */
bool fault_fires(enum fault_point point);
/* For a library with a copy of this file: ask `fires`, the program's own, from now on. */
void fault_ask(bool (*fires)(enum fault_point point));
/* Is a commit fault armed, for any rank, at this step and phase, with shots left? Counts, so ask
 * once each time a phase is entered, on every rank: shots are reckoned by admissions, which all
 * ranks see alike, since where the fault fires only its own rank knows. */
bool fault_forces_admission(int64_t step, enum phase phase);
/* The first armed fault for `rank` (or any rank) that never fired; false if none. */
bool fault_unfired(int rank, char *out_spec, size_t out_bytes);
/* The highest rank that an armed fault names, -1 if none names one. */
int fault_highest_rank(void);

#endif
