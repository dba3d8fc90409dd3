/* Packing again. See repack.h.
 *
 * Two ways follow one another. A skyline builds from the ground up: into the lowest stretch of time
 * goes the buffer that suits it best (after Burke, Kendall and Whitwell's best fit for strip
 * packing), and each of three tastes says what "best" is. Where that is not enough, the
 * result is read as an order of placing and improved by moving one buffer of the highest pile
 * forward in it. Random numbers are fixed, so that equal records give equal layouts. */
#include "worker/memory/repack.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/memory/pack.h"

enum {
    REPACK_MAX_BUFFERS = 6000,   /* past this many the quadratic ways cost more than they save */
    CLIMB_WORK = 8 * 1000 * 1000 /* pairs of buffers that one climb may look at */
};

/* A buffer's place in time and in the workspace. */
struct interval {
    uint32_t id;
    uint32_t first, last; /* events of reserve and release */
    enum phase phase;
    size_t padded;
    size_t offset;
};

/* A packing being tried: intervals in the order in which they are placed. */
struct packing {
    struct interval *intervals; /* owned; in the order of placing */
    struct interval *saved;     /* owned; the former order, to go back to */
    size_t n;
    size_t high_water;
    struct pack_live meeting; /* owned scratch */
    uint64_t work;            /* pairs looked at so far */
    bool out_of_heap;
};

static void packing_fini(struct packing *packing)
{
    heap_free(packing->intervals);
    heap_free(packing->saved);
    pack_live_fini(&packing->meeting);
}

static void list_intervals(const struct plan_section *section, struct interval *intervals)
{
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
}

static bool meet(const struct interval *a, const struct interval *b)
{
    return a->first < b->last && b->first < a->last;
}

static bool packing_init(struct packing *packing, const struct plan_section *section)
{
    *packing = (struct packing){.n = section->n_buffers};
    packing->intervals = heap_calloc(packing->n, sizeof *packing->intervals);
    packing->saved = heap_calloc(packing->n, sizeof *packing->saved);
    if (packing->intervals == NULL || packing->saved == NULL) {
        packing_fini(packing);
        return false;
    }
    list_intervals(section, packing->intervals);
    return true;
}

/* Offset for one interval among those placed before it. */
static size_t fit(struct packing *packing, size_t index)
{
    struct pack_live *meeting = &packing->meeting;
    const struct interval *interval = &packing->intervals[index];
    meeting->n = 0;
    for (size_t j = 0; j < index; j++) {
        const struct interval *other = &packing->intervals[j];
        if (meet(interval, other) && !pack_live_add(meeting, other->offset, other->padded)) {
            packing->out_of_heap = true;
        }
    }
    packing->work += index + meeting->n;
    /* Spans of buffers that never meet each other may overlap: walk with a running end. */
    size_t best_offset = 0;
    size_t best_gap = SIZE_MAX;
    size_t end = 0;
    for (size_t j = 0; j < meeting->n; j++) {
        const size_t start = meeting->spans[j].offset;
        if (start > end && start - end >= interval->padded && start - end < best_gap) {
            best_gap = start - end;
            best_offset = end;
        }
        end = meeting->spans[j].end > end ? meeting->spans[j].end : end;
    }
    return best_gap == SIZE_MAX ? end : best_offset;
}

/* Place everything from position `from` on; what comes before stays where it is. */
static void place(struct packing *packing, size_t from)
{
    for (size_t i = from; i < packing->n; i++) {
        packing->intervals[i].offset = fit(packing, i);
    }
    packing->high_water = 0;
    for (size_t i = 0; i < packing->n; i++) {
        const size_t end = packing->intervals[i].offset + packing->intervals[i].padded;
        packing->high_water = end > packing->high_water ? end : packing->high_water;
    }
}

/* Keep this packing if it is better than the section's. */
static void keep(const struct packing *packing, struct plan_section *section)
{
    if (packing->out_of_heap || packing->high_water >= section->high_water_bytes) {
        return;
    }
    for (size_t i = 0; i < packing->n; i++) {
        section->buffers[packing->intervals[i].id].offset = packing->intervals[i].offset;
    }
    section->high_water_bytes = packing->high_water;
}

/* ---- skyline ---- */

/* A stretch of time at whose every moment the same height is taken. */
struct stretch {
    uint32_t first, last;
    size_t height;
};

struct skyline {
    struct stretch *stretches; /* owned; one after the other, covering all events */
    size_t n;
};

static size_t lowest(const struct skyline *line)
{
    size_t at = 0;
    for (size_t i = 1; i < line->n; i++) {
        at = line->stretches[i].height < line->stretches[at].height ? i : at;
    }
    return at;
}

/* Raise events [first, last) of stretch `at` to `height`; what is left and right of them stays. */
static void raise_stretch(struct skyline *line, size_t at, uint32_t first, uint32_t last,
                          size_t height)
{
    const struct stretch old = line->stretches[at];
    struct stretch parts[3];
    size_t n = 0;
    if (old.first < first) {
        parts[n++] = (struct stretch){old.first, first, old.height};
    }
    parts[n++] = (struct stretch){first, last, height};
    if (last < old.last) {
        parts[n++] = (struct stretch){last, old.last, old.height};
    }
    memmove(&line->stretches[at + n], &line->stretches[at + 1], (line->n - at - 1) * sizeof old);
    memcpy(&line->stretches[at], parts, n * sizeof old);
    line->n += n - 1;
}

/* Nothing fits into the lowest stretch: fill it up to its lower neighbour. */
static void level(struct skyline *line, size_t at)
{
    const size_t left = at == 0 ? SIZE_MAX : line->stretches[at - 1].height;
    const size_t right = at + 1 == line->n ? SIZE_MAX : line->stretches[at + 1].height;
    line->stretches[at].height = left < right ? left : right;
    for (size_t i = at == 0 ? 0 : at - 1; i + 1 < line->n && i <= at;) {
        if (line->stretches[i].height != line->stretches[i + 1].height) {
            i++;
            continue;
        }
        line->stretches[i].last = line->stretches[i + 1].last;
        memmove(&line->stretches[i + 1], &line->stretches[i + 2],
                (line->n - i - 2) * sizeof *line->stretches);
        line->n--;
    }
}

/* Which of two that fit goes first. */
enum taste { TASTE_LIFE, TASTE_SIZE, TASTE_AREA, N_TASTES };

static double worth(const struct interval *interval, enum taste taste)
{
    const double life = interval->last - interval->first;
    switch (taste) {
    case TASTE_LIFE:
        return life;
    case TASTE_SIZE:
        return (double)interval->padded;
    case TASTE_AREA:
    case N_TASTES:
        break;
    }
    return life * (double)interval->padded;
}

/* The worthiest of those that fit into a stretch of time; n when none does. */
static size_t best_inside(const struct packing *packing, size_t placed,
                          const struct stretch *stretch, enum taste taste)
{
    size_t best = packing->n;
    for (size_t i = placed; i < packing->n; i++) {
        const struct interval *interval = &packing->intervals[i];
        if (interval->first < stretch->first || interval->last > stretch->last) {
            continue;
        }
        if (best == packing->n ||
            worth(interval, taste) > worth(&packing->intervals[best], taste)) {
            best = i;
        }
    }
    return best;
}

/* Build from the ground: into the lowest place goes the worthiest that fits there. */
static void build_skyline(struct packing *packing, uint32_t n_events, enum taste taste)
{
    struct skyline line = {heap_calloc(2 * packing->n + 3, sizeof *line.stretches), 1};
    if (line.stretches == NULL) {
        packing->out_of_heap = true;
        return;
    }
    line.stretches[0] = (struct stretch){0, n_events, 0};
    packing->high_water = 0;
    for (size_t placed = 0; placed < packing->n;) {
        const size_t at = lowest(&line);
        const struct stretch stretch = line.stretches[at];
        const size_t next = best_inside(packing, placed, &stretch, taste);
        if (next == packing->n) {
            level(&line, at);
            continue;
        }
        struct interval chosen = packing->intervals[next];
        packing->intervals[next] = packing->intervals[placed];
        chosen.offset = stretch.height;
        packing->intervals[placed++] = chosen;
        const size_t end = stretch.height + chosen.padded;
        packing->high_water = end > packing->high_water ? end : packing->high_water;
        raise_stretch(&line, at, chosen.first, chosen.last, end);
    }
    heap_free(line.stretches);
}

/* ---- climbing ---- */

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 16;
}

/* An interval of the pile that reaches the top: the topmost, what it lies on, and so on down;
 * `steps` down from the top, or the last. */
static size_t pick_pile(const struct packing *packing, uint64_t steps)
{
    size_t at = 0;
    size_t level_bytes = packing->high_water;
    for (uint64_t step = 0; step <= steps; step++) {
        size_t next = packing->n;
        for (size_t i = 0; i < packing->n && next == packing->n; i++) {
            const struct interval *interval = &packing->intervals[i];
            if (interval->offset + interval->padded == level_bytes &&
                (step == 0 || meet(interval, &packing->intervals[at]))) {
                next = i;
            }
        }
        if (next == packing->n) {
            return at;
        }
        at = next;
        level_bytes = packing->intervals[at].offset;
    }
    return at;
}

/* One of those placed before `index` that it meets; `index` when there is none. */
static size_t pick_before(const struct packing *packing, size_t index, uint64_t random)
{
    size_t n = 0;
    for (size_t i = 0; i < index; i++) {
        n += meet(&packing->intervals[i], &packing->intervals[index]);
    }
    if (n == 0) {
        return index;
    }
    size_t k = (size_t)(random % n);
    for (size_t i = 0; i < index; i++) {
        if (meet(&packing->intervals[i], &packing->intervals[index]) && k-- == 0) {
            return i;
        }
    }
    return index;
}

/* A buffer of the highest pile goes before one that kept it from a lower place; the change stays
 * unless the top rises. */
static void climb(struct packing *packing, size_t goal_bytes, uint64_t most_work)
{
    enum { PILE = 8 };
    uint64_t random = 0x9E3779B97F4A7C15u;
    while (packing->high_water > goal_bytes && packing->work < most_work && !packing->out_of_heap) {
        const size_t former = packing->high_water;
        const size_t moving = pick_pile(packing, next_random(&random) % PILE);
        const size_t before = pick_before(packing, moving, next_random(&random));
        packing->work += packing->n;
        if (before == moving) {
            continue;
        }
        memcpy(packing->saved, packing->intervals, packing->n * sizeof *packing->saved);
        const struct interval moved = packing->intervals[moving];
        memmove(&packing->intervals[before + 1], &packing->intervals[before],
                (moving - before) * sizeof moved);
        packing->intervals[before] = moved;
        place(packing, before);
        if (packing->high_water > former) {
            memcpy(packing->intervals, packing->saved, packing->n * sizeof *packing->saved);
            packing->high_water = former;
        }
    }
}

static int low_first(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    return x->id < y->id ? -1 : 1;
}

/* Each way to build, then each of them climbing. */
void repack_section(struct plan_section *section, size_t goal_bytes)
{
    struct packing packing;
    if (section->n_buffers > REPACK_MAX_BUFFERS || !packing_init(&packing, section)) {
        return;
    }
    for (int round = 0; round < 2 * N_TASTES && section->high_water_bytes > goal_bytes; round++) {
        build_skyline(&packing, section->n_events, (enum taste)(round % N_TASTES));
        if (round >= N_TASTES) {
            qsort(packing.intervals, packing.n, sizeof *packing.intervals, low_first);
            place(&packing, 0);
            climb(&packing, goal_bytes, packing.work + CLIMB_WORK);
        }
        keep(&packing, section);
    }
    packing_fini(&packing);
}
