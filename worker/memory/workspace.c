/* The workspace. See workspace.h. */
#include "worker/memory/workspace.h"
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"

/* A quiet-NaN pattern: arithmetic on memory that was never written shows up at once. */
static const uint32_t paint_word = 0xFFA5A5A5u;
static const uint32_t red_zone_word = 0xFFC3C3C3u;

static const char scratch_name[] = "scratch";

size_t workspace_red_zone(bool paint)
{
    return paint ? PLAN_ALIGN_BYTES : 0;
}

enum status workspace_init(struct workspace *workspace, struct device *device,
                           struct ledger *ledger, size_t reserve_bytes, bool paint,
                           struct failure *why)
{
    *workspace = (struct workspace){.ledger = ledger, .paint = paint, .layer = -1};
    return region_init(&workspace->region, "workspace", CATEGORY_TEMP, device, ledger,
                       reserve_bytes, why);
}

void workspace_fini(struct workspace *workspace)
{
    region_fini(&workspace->region);
    heap_free(workspace->live);
    heap_free(workspace->reserved_in);
    *workspace = (struct workspace){0};
}

void workspace_record(struct workspace *workspace, struct plan *plan)
{
    workspace->recording = true;
    workspace->plan = plan;
}

enum status workspace_follow(struct workspace *workspace, struct plan *plan, struct failure *why)
{
    assert(workspace->n_live == 0);
    uint32_t most = 1;
    for (int section = 0; section < N_SECTIONS; section++) {
        if (plan->sections[section].n_buffers > most) {
            most = plan->sections[section].n_buffers;
        }
    }
    if (most > workspace->live_capacity) {
        uint32_t *live = heap_calloc(most, sizeof *live);
        enum phase *reserved_in = heap_calloc(most, sizeof *reserved_in);
        if (live == NULL || reserved_in == NULL) {
            heap_free(live);
            heap_free(reserved_in);
            return fail(why, STATUS_OUT_OF_MEMORY, "workspace: no host memory for %u buffers",
                        most);
        }
        heap_free(workspace->live);
        heap_free(workspace->reserved_in);
        workspace->live = live;
        workspace->reserved_in = reserved_in;
        workspace->live_capacity = most;
    }
    workspace->recording = false;
    workspace->plan = plan;
    return STATUS_OK;
}

/* The run departed from its record: nothing that follows could be trusted. */
__attribute__((noreturn, format(printf, 2, 3))) static void
departed(const struct workspace *workspace, const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    log_error("the plan is not exact: %s, event %u, phase %s: %s",
              section_name(workspace->section), workspace->cursor, phase_name(workspace->phase),
              text);
    abort();
}

/* The next recorded event, which must be of this kind. */
static struct plan_event next_event(struct workspace *workspace, enum plan_event_kind kind,
                                    const char *what)
{
    const struct plan_section *s = &workspace->plan->sections[workspace->section];
    if (workspace->cursor >= s->n_events) {
        departed(workspace, "%s after the last planned event", what);
    }
    const struct plan_event event = s->events[workspace->cursor];
    if (event.kind != kind) {
        departed(workspace, "%s where the plan has event kind %d", what, (int)event.kind);
    }
    workspace->cursor++;
    return event;
}

void workspace_begin(struct workspace *workspace, enum section section)
{
    assert(workspace->n_live == 0);
    workspace->section = section;
    workspace->cursor = 0;
    workspace->layer = -1;
    workspace->next_address = (uintptr_t)1 << 45;
}

/* The highest end among live buffers, 0 when there are none. */
static uint64_t live_top(const struct workspace *workspace)
{
    const struct plan_section *s = &workspace->plan->sections[workspace->section];
    uint64_t top = 0;
    for (size_t i = 0; i < workspace->n_live; i++) {
        const struct plan_buffer *buffer = &s->buffers[workspace->live[i]];
        if (buffer->offset + buffer->padded > top) {
            top = buffer->offset + buffer->padded;
        }
    }
    return top;
}

static void raise_mark(uint64_t *mark, uint64_t value)
{
    if (value > *mark) {
        *mark = value;
    }
}

void workspace_phase(struct workspace *workspace, enum phase phase)
{
    workspace->phase = phase;
    if (workspace->recording) {
        workspace->out_of_heap |= !plan_record_event(workspace->plan, workspace->section,
                                                     (struct plan_event){PLAN_PHASE, phase});
        return;
    }
    const struct plan_event event = next_event(workspace, PLAN_PHASE, phase_name(phase));
    if (event.id != (uint32_t)phase) {
        departed(workspace, "phase %s where the plan has %s", phase_name(phase),
                 phase_name((enum phase)event.id));
    }
    raise_mark(&workspace->high_water[phase], live_top(workspace));
}

enum status workspace_end(struct workspace *workspace, struct failure *why)
{
    if (workspace->recording) {
        const bool failed = workspace->out_of_heap;
        workspace->out_of_heap = false;
        if (failed) {
            return fail(why, STATUS_OUT_OF_MEMORY, "planning: out of host memory");
        }
        return STATUS_OK;
    }
    const struct plan_section *s = &workspace->plan->sections[workspace->section];
    if (workspace->n_live != 0 || workspace->cursor != s->n_events) {
        departed(workspace, "ended with %zu live buffers after %u of %u events",
                 workspace->n_live, workspace->cursor, s->n_events);
    }
    return STATUS_OK;
}

void workspace_abandon(struct workspace *workspace)
{
    const struct plan_section *s = &workspace->plan->sections[workspace->section];
    for (size_t i = 0; i < workspace->n_live; i++) {
        const struct plan_buffer *buffer = &s->buffers[workspace->live[i]];
        ledger_workspace_sub(workspace->ledger, buffer->category, buffer->padded);
    }
    workspace->n_live = 0;
}

static void fill_words(void *start, size_t bytes, uint32_t word)
{
    uint32_t *words = start;
    for (size_t i = 0; i < bytes / sizeof word; i++) {
        words[i] = word;
    }
}

/* Where the contents end: the red zone starts there, at the next whole word. */
static size_t contents_bytes(const struct plan_buffer *buffer)
{
    return (buffer->bytes + sizeof red_zone_word - 1) / sizeof red_zone_word *
           sizeof red_zone_word;
}

static void paint_buffer(const struct workspace *workspace, const struct plan_buffer *buffer)
{
    char *start = workspace->region.base + buffer->offset;
    const size_t contents = contents_bytes(buffer);
    fill_words(start, contents, paint_word);
    fill_words(start + contents, buffer->padded - contents, red_zone_word);
}

/* Check the red zone and find how far the buffer was really written. */
static void check_paint(struct workspace *workspace, const struct plan_buffer *buffer,
                        enum phase reserved_in)
{
    const char *start = workspace->region.base + buffer->offset;
    const size_t contents = contents_bytes(buffer);
    const uint32_t *red = (const uint32_t *)(const void *)(start + contents);
    for (size_t i = 0; i < (buffer->padded - contents) / sizeof *red; i++) {
        if (red[i] != red_zone_word) {
            departed(workspace, "%s (%zu bytes) was written past its end", buffer->name,
                     buffer->bytes);
        }
    }
    const uint32_t *words = (const uint32_t *)(const void *)start;
    size_t n = contents / sizeof *words;
    while (n > 0 && buffer->name != scratch_name && words[n - 1] == paint_word) {
        n--;
    }
    const size_t touched = (n * sizeof *words + PLAN_ALIGN_BYTES - 1) / PLAN_ALIGN_BYTES *
                           PLAN_ALIGN_BYTES;
    for (int phase = (int)reserved_in; phase <= (int)workspace->phase; phase++) {
        raise_mark(&workspace->touched[phase],
                   buffer->offset + touched + workspace->plan->red_zone_bytes);
    }
    fill_words(workspace->region.base + buffer->offset, buffer->padded, paint_word);
}

static struct buffer record_reserve(struct workspace *workspace, const char *name,
                                    enum category category, size_t bytes)
{
    const size_t red_zone = workspace->plan->red_zone_bytes;
    const struct plan_buffer wanted = {
        .name = name,
        .layer = workspace->layer,
        .category = category,
        .phase = workspace->phase,
        .bytes = bytes,
        .padded = (bytes + red_zone + PLAN_ALIGN_BYTES - 1) / PLAN_ALIGN_BYTES * PLAN_ALIGN_BYTES,
    };
    struct buffer buffer = {.data = (void *)workspace->next_address};
    workspace->next_address += wanted.padded;
    workspace->out_of_heap |=
        !plan_record_reserve(workspace->plan, workspace->section, &wanted, &buffer.id);
    return buffer;
}

struct buffer workspace_reserve(struct workspace *workspace, const char *name,
                                enum category category, size_t bytes)
{
    assert(bytes > 0);
    if (workspace->recording) {
        return record_reserve(workspace, name, category, bytes);
    }
    if (workspace->missize != NULL && strcmp(workspace->missize, name) == 0) {
        bytes += PLAN_ALIGN_BYTES;
    }
    const struct plan_event event = next_event(workspace, PLAN_RESERVE, name);
    const struct plan_buffer *planned =
        &workspace->plan->sections[workspace->section].buffers[event.id];
    if (planned->name != name && strcmp(planned->name, name) != 0) {
        departed(workspace, "reserve of %s where the plan has %s", name, planned->name);
    }
    if (planned->bytes != bytes || planned->category != category) {
        departed(workspace, "%s asks %zu bytes (%s), the plan has %zu (%s)", name, bytes,
                 category_name(category), planned->bytes, category_name(planned->category));
    }
    const uint64_t end = planned->offset + planned->padded;
    if (end > workspace->region.committed_bytes) {
        departed(workspace, "%s ends at %llu, committed are %zu bytes", name,
                 (unsigned long long)end, workspace->region.committed_bytes);
    }
    workspace->reserved_in[workspace->n_live] = workspace->phase;
    workspace->live[workspace->n_live++] = event.id;
    ledger_workspace_add(workspace->ledger, category, planned->padded);
    raise_mark(&workspace->high_water[workspace->phase], end);
    if (workspace->paint) {
        paint_buffer(workspace, planned);
    }
    return (struct buffer){workspace->region.base + planned->offset, event.id};
}

struct buffer workspace_reserve_scratch(struct workspace *workspace, size_t bytes)
{
    return workspace_reserve(workspace, scratch_name, CATEGORY_TEMP, bytes);
}

void workspace_release(struct workspace *workspace, struct buffer *buffer)
{
    if (buffer->data == NULL) {
        return;
    }
    buffer->data = NULL;
    if (workspace->recording) {
        workspace->out_of_heap |= !plan_record_event(workspace->plan, workspace->section,
                                                     (struct plan_event){PLAN_RELEASE, buffer->id});
        return;
    }
    const struct plan_event event = next_event(workspace, PLAN_RELEASE, "release");
    const struct plan_buffer *planned =
        &workspace->plan->sections[workspace->section].buffers[buffer->id];
    if (event.id != buffer->id) {
        departed(workspace, "release of %s where the plan releases buffer %u", planned->name,
                 event.id);
    }
    /* Live buffers are few and the newest usually goes first: search from the end. */
    size_t at = workspace->n_live;
    while (at > 0 && workspace->live[at - 1] != buffer->id) {
        at--;
    }
    assert(at > 0);
    if (workspace->paint) {
        check_paint(workspace, planned, workspace->reserved_in[at - 1]);
    }
    workspace->n_live--;
    workspace->live[at - 1] = workspace->live[workspace->n_live];
    workspace->reserved_in[at - 1] = workspace->reserved_in[workspace->n_live];
    ledger_workspace_sub(workspace->ledger, planned->category, planned->padded);
}

void workspace_clear_peaks(struct workspace *workspace)
{
    for (int phase = 0; phase < N_PHASES; phase++) {
        workspace->high_water[phase] = 0;
        workspace->touched[phase] = 0;
    }
}
