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

/* ---- other orders ---- */

/* Live peak / high water that is worth no more work. */
#define PACK_GOAL 0.995

enum {
    REPACK_MAX_BUFFERS = 3000, /* past this many the quadratic orders cost more than they save */
    CLIMB_WORK = 20 * 1000 * 1000 /* pairs: some 20 ms */
};

/* A buffer's place in time and in the workspace. */
struct interval {
    uint32_t id;
    uint32_t first, last; /* events of reserve and release */
    enum phase phase;
    size_t padded;
    size_t crowd;         /* the most bytes alive together during its life, itself included */
    size_t offset;
};

/* Packing in an order of choice: intervals are placed one after the other, each in the best gap
 * among those before it that it meets in time. */
struct packing {
    struct interval *intervals; /* owned; in the order of placing */
    struct interval *saved;     /* owned; the former order, to go back to */
    size_t n;
    size_t high_water;
    struct pack_live meeting;   /* owned scratch */
    uint64_t work;              /* pairs looked at so far */
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

/* While `intervals` is still ordered by id, which is the order of start. */
static void find_crowds(const struct plan_section *section, struct packing *packing)
{
    size_t live = 0;
    for (uint32_t at = 0; at < section->n_events; at++) {
        const struct plan_event event = section->events[at];
        if (event.kind == PLAN_RELEASE) {
            live -= packing->intervals[event.id].padded;
        }
        if (event.kind != PLAN_RESERVE) {
            continue;
        }
        live += packing->intervals[event.id].padded;
        for (uint32_t id = 0; id <= event.id; id++) {
            struct interval *interval = &packing->intervals[id];
            if (interval->last > at && live > interval->crowd) {
                interval->crowd = live;
            }
        }
    }
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
    find_crowds(section, packing);
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

static int by_id(const struct interval *x, const struct interval *y)
{
    return x->id < y->id ? -1 : x->id > y->id;
}

static int larger(size_t x, size_t y)
{
    return x > y ? -1 : x < y;
}

/* Phases nested: what an earlier phase reserves is placed first; inside a phase the long-lived. */
static int long_lived_first(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    if (x->phase != y->phase) {
        return x->phase < y->phase ? -1 : 1;
    }
    const int order = larger(x->last - x->first, y->last - y->first);
    return order != 0 ? order : by_id(x, y);
}

static int large_first(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    if (x->phase != y->phase) {
        return x->phase < y->phase ? -1 : 1;
    }
    const int order = larger(x->padded, y->padded);
    return order != 0 ? order : by_id(x, y);
}

/* The crowded moments first: what is alive at the peak then lies without a gap, and the rest has to
 * find its place around it. Three orders among those of one crowd. */
static int crowded_then_start(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    const int order = larger(x->crowd, y->crowd);
    return order != 0 ? order : by_id(x, y);
}

static int crowded_then_end(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    int order = larger(x->crowd, y->crowd);
    order = order != 0 ? order : larger(x->last, y->last);
    return order != 0 ? order : by_id(x, y);
}

static int crowded_then_life(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    int order = larger(x->crowd, y->crowd);
    order = order != 0 ? order : larger(x->last - x->first, y->last - y->first);
    return order != 0 ? order : by_id(x, y);
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
    memmove(&line->stretches[at + n], &line->stretches[at + 1],
            (line->n - at - 1) * sizeof old);
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

/* The longest life of those that fit into a stretch of time; n when none does. */
static size_t longest_inside(const struct packing *packing, size_t placed,
                             const struct stretch *stretch)
{
    size_t best = packing->n;
    uint32_t best_life = 0;
    for (size_t i = placed; i < packing->n; i++) {
        const struct interval *interval = &packing->intervals[i];
        const uint32_t life = interval->last - interval->first;
        if (interval->first >= stretch->first && interval->last <= stretch->last &&
            (life > best_life || (life == best_life && best < packing->n &&
                                  interval->padded > packing->intervals[best].padded))) {
            best = i;
            best_life = life;
        }
    }
    return best;
}

/* Build from the ground: into the lowest place goes what lives there the longest. */
static void build_skyline(struct packing *packing, uint32_t n_events)
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
        const size_t next = longest_inside(packing, placed, &stretch);
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
static void climb(struct packing *packing, size_t goal, uint64_t most_work)
{
    enum { PILE = 8 };
    uint64_t random = 0x9E3779B97F4A7C15u;
    while (packing->high_water > goal && packing->work < most_work && !packing->out_of_heap) {
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

static bool good_enough(const struct plan_section *section)
{
    return (double)section->live_peak_bytes >= PACK_GOAL * (double)section->high_water_bytes;
}

static int low_first(const void *a, const void *b)
{
    const struct interval *x = a;
    const struct interval *y = b;
    return x->offset != y->offset ? (x->offset < y->offset ? -1 : 1) : by_id(x, y);
}

/* When the heap is exhausted the first packing stands. */
static void try_other_orders(struct plan_section *section)
{
    static int (*const orders[])(const void *, const void *) = {
        long_lived_first, large_first, crowded_then_start, crowded_then_end, crowded_then_life};
    struct packing packing;
    if (!packing_init(&packing, section)) {
        return;
    }
    const size_t goal = (size_t)((double)section->live_peak_bytes / PACK_GOAL);
    build_skyline(&packing, section->n_events);
    keep(&packing, section);
    for (size_t i = 0; i < sizeof orders / sizeof orders[0] && !good_enough(section); i++) {
        qsort(packing.intervals, packing.n, sizeof *packing.intervals, orders[i]);
        place(&packing, 0);
        keep(&packing, section);
    }
    if (!good_enough(section)) {
        /* From the best so far, bottom to top. */
        for (size_t i = 0; i < packing.n; i++) {
            packing.intervals[i].offset = section->buffers[packing.intervals[i].id].offset;
        }
        qsort(packing.intervals, packing.n, sizeof *packing.intervals, low_first);
        place(&packing, 0);
        keep(&packing, section);
        climb(&packing, goal, packing.work + CLIMB_WORK);
        keep(&packing, section);
    }
    packing_fini(&packing);
}

enum status pack_section(struct plan_section *section, struct failure *why)
{
    const enum status status = pack_in_order_of_start(section, why);
    if (status == STATUS_OK && section->n_buffers <= REPACK_MAX_BUFFERS &&
        !good_enough(section)) {
        try_other_orders(section);
    }
    return status;
}

bool pack_is_sound(const struct plan_section *section)
{
    if (section->n_buffers == 0) {
        return true;
    }
    struct interval *intervals = heap_calloc(section->n_buffers, sizeof *intervals);
    if (intervals == NULL) {
        return false;
    }
    list_intervals(section, intervals);
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
