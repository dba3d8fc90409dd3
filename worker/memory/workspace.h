/* The workspace: one region for everything that lives inside a step, laid out by the plan.
 *
 * No allocator at run time. A dry run records reserves and releases into a plan; a real
 * run follows that record event by event and gets each buffer at its planned offset.
 * A run that departs from its record (another name, another size, another order) is a mistake of
 * ours and ends the process with both versions in the message.
 *
 * The peaks are measured by what is really reserved, not read from the plan. With `paint`
 * on, buffers are filled with a pattern, separated by red zones, and the bytes really
 * touched are compared as well. Main thread. */
#ifndef BALLAST_WORKER_MEMORY_WORKSPACE_H
#define BALLAST_WORKER_MEMORY_WORKSPACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "worker/memory/ledger.h"
#include "worker/memory/plan.h"
#include "worker/memory/region.h"

/* A planned buffer in use. `data` is NULL when none is held. */
struct buffer {
    void *data;
    uint32_t id;
};

struct workspace {
    struct region region;
    struct ledger *ledger; /* borrowed */
    bool recording;
    bool paint;
    struct plan *plan;     /* borrowed: written when recording, followed otherwise */
    enum section section;
    enum phase phase;
    int layer;             /* of the buffers reserved next; -1 outside the blocks */
    uint32_t cursor;       /* next event of the record */
    uintptr_t next_address; /* of a recorded buffer; never read or written */
    bool out_of_heap;      /* recording failed; reported by workspace_end() */
    uint32_t *live;        /* owned; ids of live buffers, running */
    size_t n_live, live_capacity;
    uint64_t high_water[N_PHASES];   /* measured, since workspace_clear_peaks() */
    uint64_t touched[N_PHASES];      /* as high_water, from the paint */
    enum phase *reserved_in;         /* owned; per live buffer, for `touched` */
    const char *missize;   /* for tests: the buffer of this name asks for too much */
};

/* Reserves address space of `reserve_bytes` for the region. */
enum status workspace_init(struct workspace *workspace, struct device *device,
                           struct ledger *ledger, size_t reserve_bytes, bool paint,
                           struct failure *why) MUST_CHECK;
void workspace_fini(struct workspace *workspace);

/* Record into `plan` from now on, or follow it. The plan is borrowed until the next call. Fails
 * when the heap is exhausted; then the former plan stays. Between sections only. */
void workspace_record(struct workspace *workspace, struct plan *plan);
enum status workspace_follow(struct workspace *workspace, struct plan *plan,
                             struct failure *why) MUST_CHECK;
/* Bytes of red zone behind each buffer: 0 without paint. */
size_t workspace_red_zone(bool paint);

void workspace_begin(struct workspace *workspace, enum section section);
void workspace_phase(struct workspace *workspace, enum phase phase);
/* Every buffer must have been released. */
enum status workspace_end(struct workspace *workspace, struct failure *why) MUST_CHECK;
/* Drop everything that is live: a section that was given up half-way. */
void workspace_abandon(struct workspace *workspace);

/* `bytes` of the given category, uninitialised. `name` is static text. Cannot fail: the
 * phase's prefix was committed when the phase was admitted. */
struct buffer workspace_reserve(struct workspace *workspace, const char *name,
                                enum category category, size_t bytes);
/* Scratch for a library's call: what of it the library touches is its own affair, so
 * paint counts it as touched. */
struct buffer workspace_reserve_scratch(struct workspace *workspace, size_t bytes);
/* Does nothing when no data is held. */
void workspace_release(struct workspace *workspace, struct buffer *buffer);

void workspace_clear_peaks(struct workspace *workspace);

#endif
