/* Recording and the phases of a plan. Packing is in pack.c. */
#include "worker/memory/plan.h"
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "worker/memory/pack.h"

const char *section_name(enum section section)
{
    static const char *const names[N_SECTIONS] = {"first micro-step", "later micro-step", "update",
                                                  "eval", "save"};
    return names[section];
}

uint64_t plan_host_bytes(const struct plan_resident *resident)
{
    uint64_t bytes = 0;
    for (int category = 0; category < N_CATEGORIES; category++) {
        bytes += resident->host_bytes[category];
    }
    return bytes;
}

void plan_init(struct plan *plan, size_t granule_bytes, size_t red_zone_bytes)
{
    *plan = (struct plan){.granule_bytes = granule_bytes, .red_zone_bytes = red_zone_bytes};
}

void plan_fini(struct plan *plan)
{
    for (int i = 0; i < N_SECTIONS; i++) {
        heap_free(plan->sections[i].buffers);
        heap_free(plan->sections[i].events);
    }
    *plan = (struct plan){0};
}

/* Room for one more element; doubles. */
static bool grow(void **array, uint32_t n, uint32_t *capacity, size_t element_bytes)
{
    if (n < *capacity) {
        return true;
    }
    const uint32_t wanted = *capacity == 0 ? 256 : *capacity * 2;
    void *larger = heap_realloc(*array, wanted * element_bytes);
    if (larger == NULL) {
        return false;
    }
    *array = larger;
    *capacity = wanted;
    return true;
}

bool plan_record_event(struct plan *plan, enum section section, struct plan_event event)
{
    struct plan_section *s = &plan->sections[section];
    void *events = s->events;
    if (!grow(&events, s->n_events, &s->events_capacity, sizeof *s->events)) {
        return false;
    }
    s->events = events;
    s->events[s->n_events++] = event;
    return true;
}

bool plan_record_reserve(struct plan *plan, enum section section, const struct plan_buffer *buffer,
                         uint32_t *out_id)
{
    struct plan_section *s = &plan->sections[section];
    void *buffers = s->buffers;
    if (!grow(&buffers, s->n_buffers, &s->buffers_capacity, sizeof *s->buffers)) {
        return false;
    }
    s->buffers = buffers;
    if (!plan_record_event(plan, section, (struct plan_event){PLAN_RESERVE, s->n_buffers})) {
        return false;
    }
    s->buffers[s->n_buffers] = *buffer;
    *out_id = s->n_buffers++;
    return true;
}

static uint64_t round_up(uint64_t bytes, uint64_t granule)
{
    return (bytes + granule - 1) / granule * granule;
}

/* Follow one section's events and raise the phases' high-water marks. */
static enum status scan_section(struct plan *plan, enum section section, struct failure *why)
{
    const struct plan_section *s = &plan->sections[section];
    struct pack_live live = {0};
    uint64_t live_bytes = 0;
    enum phase phase = PHASE_SETUP;
    enum status status = STATUS_OK;
    for (uint32_t at = 0; at < s->n_events && status == STATUS_OK; at++) {
        const struct plan_event event = s->events[at];
        if (event.kind == PLAN_PHASE) {
            phase = (enum phase)event.id;
            plan->phases[phase].used = true;
        } else if (event.kind == PLAN_RESERVE) {
            const struct plan_buffer *buffer = &s->buffers[event.id];
            status = pack_live_add(&live, buffer->offset, buffer->padded) ? STATUS_OK
                                                                         : STATUS_OUT_OF_MEMORY;
            live_bytes += buffer->padded;
        } else {
            pack_live_remove(&live, s->buffers[event.id].offset);
            live_bytes -= s->buffers[event.id].padded;
        }
        struct plan_phase *p = &plan->phases[phase];
        const size_t top = pack_live_top(&live);
        if (top > p->workspace_bytes || (top == p->workspace_bytes && live_bytes > p->live_bytes)) {
            p->workspace_bytes = top;
            p->live_bytes = live_bytes;
            p->section = section;
            p->event = at;
        }
    }
    pack_live_fini(&live);
    if (status != STATUS_OK) {
        return fail(why, status, "planning: out of host memory");
    }
    return STATUS_OK;
}

/* Call `visit` for every buffer alive right after `event` of a section. */
static void each_live(const struct plan_section *s, uint32_t event,
                      void (*visit)(void *user, const struct plan_buffer *buffer), void *user)
{
    if (s->n_events == 0) {
        return;
    }
    /* A buffer is alive when it was reserved and not released up to `event`; releases after it
     * are many, so mark the released ones first. */
    for (uint32_t at = 0; at <= event; at++) {
        if (s->events[at].kind != PLAN_RESERVE) {
            continue;
        }
        const uint32_t id = s->events[at].id;
        bool released = false;
        for (uint32_t later = at + 1; later <= event && !released; later++) {
            released = s->events[later].kind == PLAN_RELEASE && s->events[later].id == id;
        }
        if (!released) {
            visit(user, &s->buffers[id]);
        }
    }
}

struct category_sums {
    uint64_t bytes[N_CATEGORIES];
    uint64_t total;
};

static void add_to_category(void *user, const struct plan_buffer *buffer)
{
    struct category_sums *sums = user;
    sums->bytes[buffer->category] += buffer->padded;
    sums->total += buffer->padded;
}

/* Categories at a phase's peak by one pass over the events, without the live list: running
 * sums are enough. */
static void sum_categories(const struct plan_section *s, uint32_t event,
                           struct category_sums *sums)
{
    for (uint32_t at = 0; at <= event && at < s->n_events; at++) {
        const struct plan_event e = s->events[at];
        if (e.kind == PLAN_RESERVE) {
            add_to_category(sums, &s->buffers[e.id]);
        } else if (e.kind == PLAN_RELEASE) {
            sums->bytes[s->buffers[e.id].category] -= s->buffers[e.id].padded;
            sums->total -= s->buffers[e.id].padded;
        }
    }
}

static void finish_phase(struct plan *plan, struct plan_phase *p)
{
    uint64_t resident = 0;
    for (int c = 0; c < N_CATEGORIES; c++) {
        p->at_peak[c] = plan->resident.bytes[c];
        resident += plan->resident.bytes[c];
    }
    p->peak_bytes = resident + p->workspace_bytes;
    p->committed_bytes =
        plan->resident.committed_bytes + round_up(p->workspace_bytes, plan->granule_bytes);
    if (p->workspace_bytes == 0) {
        return;
    }
    struct category_sums sums = {0};
    sum_categories(&plan->sections[p->section], p->event, &sums);
    for (int c = 0; c < N_CATEGORIES; c++) {
        p->at_peak[c] += sums.bytes[c];
    }
    /* What packing could not fill belongs to nobody; temporaries carry it. */
    p->at_peak[CATEGORY_TEMP] += p->workspace_bytes - sums.total;
}

enum status plan_finish(struct plan *plan, const struct plan_resident *resident,
                        struct failure *why)
{
    plan->resident = *resident;
    size_t live_peak = 0;
    for (int section = 0; section < N_SECTIONS; section++) {
        enum status status = pack_section(&plan->sections[section], why);
        if (status == STATUS_OK) {
            status = scan_section(plan, (enum section)section, why);
        }
        if (status != STATUS_OK) {
            return status;
        }
        if (plan->sections[section].live_peak_bytes > live_peak) {
            live_peak = plan->sections[section].live_peak_bytes;
        }
    }
    plan->phases[PHASE_SETUP].used = true;
    plan->workspace_bytes = 0;
    for (int phase = 0; phase < N_PHASES; phase++) {
        struct plan_phase *p = &plan->phases[phase];
        finish_phase(plan, p);
        if (p->used && p->workspace_bytes > plan->workspace_bytes) {
            plan->workspace_bytes = p->workspace_bytes;
        }
        if (p->used && p->committed_bytes > plan->committed_bytes) {
            plan->committed_bytes = p->committed_bytes;
        }
        if (p->used && p->peak_bytes > plan->peak_bytes) {
            plan->peak_bytes = p->peak_bytes;
            plan->binding_phase = (enum phase)phase;
        }
    }
    plan->packing_efficiency =
        plan->workspace_bytes == 0 ? 1.0 : (double)live_peak / (double)plan->workspace_bytes;
    return STATUS_OK;
}

struct live_lines {
    struct plan_live *lines;
    size_t n, capacity;
};

static void add_line(void *user, const struct plan_buffer *buffer)
{
    struct live_lines *out = user;
    for (size_t i = 0; i < out->n; i++) {
        if (out->lines[i].name == buffer->name && out->lines[i].category == buffer->category) {
            out->lines[i].bytes += buffer->padded;
            out->lines[i].count++;
            return;
        }
    }
    if (out->n < out->capacity) {
        out->lines[out->n++] = (struct plan_live){buffer->name, buffer->layer, buffer->category,
                                                  buffer->padded, 1};
    }
}

static int larger_first(const void *a, const void *b)
{
    const struct plan_live *x = a;
    const struct plan_live *y = b;
    if (x->bytes != y->bytes) {
        return x->bytes < y->bytes ? 1 : -1;
    }
    return strcmp(x->name, y->name);
}

size_t plan_live_set(const struct plan *plan, enum phase phase, struct plan_live *lines,
                     size_t capacity)
{
    /* More names than the step has, so that the largest are among them whatever the order. */
    enum { MAX_NAMES = 64 };
    struct plan_live all[MAX_NAMES];
    const struct plan_phase *p = &plan->phases[phase];
    struct live_lines out = {all, 0, MAX_NAMES};
    if (p->workspace_bytes > 0) {
        each_live(&plan->sections[p->section], p->event, add_line, &out);
    }
    qsort(all, out.n, sizeof *all, larger_first);
    const size_t n = out.n < capacity ? out.n : capacity;
    memcpy(lines, all, n * sizeof *all);
    return n;
}

bool plan_layout_is_sound(const struct plan *plan)
{
    for (int section = 0; section < N_SECTIONS; section++) {
        if (!pack_is_sound(&plan->sections[section])) {
            return false;
        }
    }
    return true;
}
