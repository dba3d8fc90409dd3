/* Texts and details of the daemon's own events. See story.h. */
#include "daemon/story.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/convert.h"
#include "proto/event.h"
#include "proto/json.h"

enum { MAX_NAMED = 64, TEXT_BYTES = 512 };

struct text {
    char bytes[TEXT_BYTES];
    size_t used;
};

__attribute__((format(printf, 2, 3))) static void say(struct text *text, const char *format, ...)
{
    if (text->used >= sizeof text->bytes - 1)
        return;
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(text->bytes + text->used, sizeof text->bytes - text->used, format, arguments);
    va_end(arguments);
    text->used += n > 0 ? (size_t)n : 0;
}

/* Finish an event: what every event has, the text, and details (taken over; NULL: none). */
static Ballast__V1__Event *make(const struct state *state, Ballast__V1__Event *event,
                                const char *type, struct text *text, json_t *details)
{
    char time[UNITS_TEXT_BYTES];
    char *json = details ? json_format(details, JSON_LINE_FLAGS) : NULL;
    json_decref(details);
    event->time = (char *)convert_now(time);
    event->type = (char *)type;
    event->generation = state->run.generation;
    event->text = text->bytes;
    if (json)
        event->details_json = json;
    Ballast__V1__Event *copy = event_copy(event);
    heap_free(json);
    return copy;
}

static json_t *rank_list(const uint32_t *ranks, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; list && i < n; i++)
        json_array_append_new(list, json_integer(ranks[i]));
    return list;
}

static void say_ranks(struct text *text, const uint32_t *ranks, size_t n)
{
    for (size_t i = 0; i < n; i++)
        say(text, "%s%u", i ? ", " : "", ranks[i]);
}

Ballast__V1__Event *story_rank_lost(const struct state *state)
{
    const struct run *run = &state->run;
    const struct run_rank *rank = &run->ranks[run->culprit];
    const Ballast__V1__RankState *heard =
        run->culprit < state->heard.n_ranks ? state->heard.ranks[run->culprit] : NULL;
    uint32_t lost[MAX_NAMED];
    size_t n = run_lost_ranks(run, lost, MAX_NAMED);
    size_t n_named = n < MAX_NAMED ? n : MAX_NAMED;
    struct text text = {.used = 0};
    say(&text, "rank %u (process %d%s%s) was lost in %s of step %llu", run->culprit, rank->pid,
        heard && heard->host[0] ? " on " : "", heard ? heard->host : "", phase_name(rank->phase),
        (unsigned long long)rank->step);
    if (heard && heard->collective[0])
        say(&text, ", inside %s number %llu", heard->collective,
            (unsigned long long)heard->collective_number);
    if (n_named > 1) {
        say(&text, "; within a second also rank%s ", n_named > 2 ? "s" : "");
        say_ranks(&text, lost + 1, n_named - 1);
    }
    json_t *details = json_object();
    if (details) {
        json_object_set_new(details, "pid", json_integer(rank->pid));
        if (heard && heard->host[0])
            json_object_set_new(details, "host", json_text(heard->host));
        if (heard && heard->collective[0]) {
            json_object_set_new(details, "collective", json_text(heard->collective));
            json_object_set_new(details, "collective_number", json_count(heard->collective_number));
        }
        if (n_named > 1)
            json_object_set_new(details, "also_lost", rank_list(lost + 1, n_named - 1));
    }
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    event.rank = (int32_t)run->culprit;
    event.step = rank->step;
    event.phase = convert_phase_to_wire(rank->phase);
    return make(state, &event, "rank_lost", &text, details);
}

Ballast__V1__Event *story_daemon_lost(const struct state *state)
{
    struct text text = {.used = 0};
    say(&text, "the daemon died and another took its place; training went on");
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    event.rank = -1;
    event.step = state->run.step;
    return make(state, &event, "daemon_lost", &text, NULL);
}

Ballast__V1__Event *story_end(const struct state *state)
{
    const struct run *run = &state->run;
    struct text text = {.used = 0};
    json_t *details = json_object();
    if (run->loss_told) {
        uint32_t lost[MAX_NAMED];
        size_t n = run_lost_ranks(run, lost, MAX_NAMED);
        size_t n_named = n < MAX_NAMED ? n : MAX_NAMED;
        say(&text, "ended after %llu steps because rank %u was lost",
            (unsigned long long)run->step, run->culprit);
        if (n_named > 1) {
            say(&text, "; links lost in this order: ");
            say_ranks(&text, lost, n_named);
        }
        if (details) {
            json_object_set_new(details, "culprit", json_integer(run->culprit));
            json_object_set_new(details, "lost_ranks", rank_list(lost, n_named));
        }
    } else if (run->ranks && run->ranks[0].ended) {
        say(&text, "ended after %llu steps, exit code %u%s%s", (unsigned long long)run->step,
            run->ranks[0].exit_code, state->heard.end_text[0] ? ": " : "", state->heard.end_text);
    } else {
        say(&text, "ended after %llu steps: every link closed", (unsigned long long)run->step);
    }
    if (details && run->ranks && run->ranks[0].ended)
        json_object_set_new(details, "exit_code", json_integer(run->ranks[0].exit_code));
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    event.rank = -1;
    event.step = run->step;
    return make(state, &event, "end", &text, details);
}
