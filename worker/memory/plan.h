/* The plan: what every section of a step reserves, where it lies, and each phase's peak.
 *
 * A section is a stretch of the step at whose ends the workspace is empty: the first
 * micro-step (gradients assigned), a later one (gradients added; it repeats), the update,
 * an evaluation batch, a save. Running a section on the dry device records its reserves
 * and releases; packing gives every buffer its offset; the run then follows the record
 * event by event. Pure but for the heap; main or planning thread. */
#ifndef BALLAST_WORKER_MEMORY_PLAN_H
#define BALLAST_WORKER_MEMORY_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/account.h"
#include "proto/base/status.h"

enum section {
    SECTION_FIRST,  /* forward and backward of micro-step 0 */
    SECTION_LATER,  /* forward and backward of micro-steps 1.. */
    SECTION_UPDATE, /* reduce, norm, clip, update */
    SECTION_EVAL,   /* one evaluation micro-batch */
    SECTION_SAVE,
    N_SECTIONS
};
const char *section_name(enum section section);

/* Buffers start at multiples of this; 256 suits every vector unit and GPU access. */
enum { PLAN_ALIGN_BYTES = 256 };

struct plan_buffer {
    const char *name; /* static text */
    int layer;        /* -1 outside the blocks */
    enum category category;
    enum phase phase; /* in which it is reserved */
    size_t bytes;     /* as asked */
    size_t padded;    /* bytes + red zone, rounded to PLAN_ALIGN_BYTES */
    size_t offset;    /* in the workspace, by packing */
};

enum plan_event_kind { PLAN_RESERVE, PLAN_RELEASE, PLAN_PHASE };

struct plan_event {
    enum plan_event_kind kind;
    uint32_t id; /* buffer, or enum phase */
};

struct plan_section {
    struct plan_buffer *buffers; /* owned; in order of reserve */
    struct plan_event *events;   /* owned; in program order */
    uint32_t n_buffers, n_events;
    uint32_t buffers_capacity, events_capacity;
    uint32_t repeat;             /* how often it runs in one step */
    double flops[N_PHASES];      /* of one run */
    uint64_t comm_bytes[N_PHASES];
    size_t live_peak_bytes;      /* largest sum of live padded buffers */
    size_t high_water_bytes;     /* largest offset + padded: what packing needs */
};

struct plan_phase {
    bool used;                 /* does the run enter this phase at all? */
    uint64_t peak_bytes;       /* regions in use + high-water offset */
    uint64_t workspace_bytes;  /* the high-water offset alone: the prefix to commit */
    uint64_t live_bytes;       /* of workspace buffers alive at the peak */
    uint64_t committed_bytes;  /* regions and prefix, rounded to granules */
    uint64_t at_peak[N_CATEGORIES];
    enum section section;      /* where the peak is, and after which event; of several such
                                * moments the one with the most alive */
    uint32_t event;
};

/* What lives outside the workspace, from the dry run of the state. */
struct plan_resident {
    uint64_t bytes[N_CATEGORIES]; /* in use, device */
    uint64_t committed_bytes;     /* device */
    uint64_t host_bytes[N_CATEGORIES];
};
/* All of them together. */
uint64_t plan_host_bytes(const struct plan_resident *resident);

struct plan {
    struct plan_section sections[N_SECTIONS];
    struct plan_phase phases[N_PHASES];
    struct plan_resident resident;
    size_t granule_bytes;
    size_t red_zone_bytes;
    size_t workspace_bytes;    /* largest prefix of all phases */
    double packing_efficiency; /* live peak / workspace, both maxima over sections */
    uint64_t peak_bytes;       /* largest over phases */
    uint64_t committed_bytes;  /* largest over phases */
    enum phase binding_phase;
};

void plan_init(struct plan *plan, size_t granule_bytes, size_t red_zone_bytes);
void plan_fini(struct plan *plan);

/* Recording, called by the workspace. False when the heap is exhausted. */
bool plan_record_reserve(struct plan *plan, enum section section, const struct plan_buffer *buffer,
                         uint32_t *out_id);
bool plan_record_event(struct plan *plan, enum section section, struct plan_event event);

/* Pack all sections and derive the phases from the record. */
enum status plan_finish(struct plan *plan, const struct plan_resident *resident,
                        struct failure *why) MUST_CHECK;

/* One line of a live set. */
struct plan_live {
    const char *name;
    int layer; /* of the first such buffer */
    enum category category;
    uint64_t bytes; /* of all `count` together */
    uint32_t count;
};
/* The workspace buffers alive at a phase's peak, buffers of equal name folded, the largest
 * `capacity` of them, largest first. Returns how many were written. */
size_t plan_live_set(const struct plan *plan, enum phase phase, struct plan_live *lines,
                     size_t capacity);
/* Prove the layout: no two buffers that are alive together overlap. For tests. */
bool plan_layout_is_sound(const struct plan *plan);

#endif
