/* Verbs whose answers go on: events (also --follow) and watch. Main thread. */
#include <math.h>
#include <string.h>
#include "client/output.h"
#include "client/render.h"
#include "client/run_files.h"
#include "client/verbs_run.h"
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/json.h"

enum { DEFAULT_EVENTS = 50, FOLLOWED_BACKLOG = 10, DEFAULT_INTERVAL_MS = 1000, SILENCE_S = 30 };

typedef Ballast__Control__V1__Request request_message;
typedef Ballast__Control__V1__Reply reply_message;

/* Without --timeout, a stream may be silent for ever or for `silence_s`. */
static double stream_deadline(const struct call *call, double silence_s)
{
    return call->arguments->timeout_s > 0.0 ? call->deadline_s : units_monotonic_s() + silence_s;
}

static enum exit_code unexpected(struct call *call)
{
    fail(&call->session.why, STATUS_MALFORMED,
         "the daemon answered with something else than was asked for");
    return EXIT_CODE_CONNECT;
}

static enum exit_code follow_events(struct call *call, request_message *request)
{
    bool ended = false;
    enum exit_code code = session_send(&call->session, request, call->deadline_s);
    while (code == EXIT_CODE_OK) {
        reply_message *reply = NULL;
        code = session_next(&call->session, request->id, stream_deadline(call, INFINITY), &reply);
        if (code == EXIT_CODE_CONNECT && ended)
            return EXIT_CODE_OK;
        if (code != EXIT_CODE_OK)
            return code;
        bool more = reply->more;
        if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY_EVENTS) {
            const Ballast__Control__V1__EventsReply *events = reply->events;
            for (size_t i = 0; i < events->n_events && code == EXIT_CODE_OK; i++) {
                /* A run that is resumed later starts anew behind an old end. */
                ended = strcmp(events->events[i]->type, "end") == 0;
                code = output_event_line(call, events->events[i]);
            }
        } else if (reply->body_case != BALLAST__CONTROL__V1__REPLY__BODY_DONE) {
            code = unexpected(call);
        }
        ballast_reply_free(reply);
        if (!more)
            return code;
    }
    return code;
}

static enum exit_code print_events(struct call *call, const struct replies *replies)
{
    void **events = NULL;
    size_t n = 0;
    if (!output_gather(replies, "events", &events, &n)) {
        fail(&call->session.why, STATUS_OUT_OF_MEMORY, "out of memory while collecting events");
        return EXIT_CODE_FAILED;
    }
    enum exit_code code = output_events(call, (Ballast__V1__Event *const *)events, n);
    heap_free(events);
    return code;
}

static uint32_t events_count(const struct arguments *arguments)
{
    if (arguments->count)
        return (uint32_t)arguments->count;
    return arguments->follow ? FOLLOWED_BACKLOG : DEFAULT_EVENTS;
}

enum exit_code verb_events(struct call *call)
{
    const struct arguments *arguments = call->arguments;
    Ballast__Control__V1__EventsRequest body = BALLAST__CONTROL__V1__EVENTS_REQUEST__INIT;
    body.after_sequence = arguments->after;
    body.count = events_count(arguments);
    body.follow = arguments->follow;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_EVENTS;
    request.events = &body;
    if (arguments->follow)
        return follow_events(call, &request);
    struct replies replies;
    enum exit_code code = session_ask(&call->session, &request, call->deadline_s, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    code = print_events(call, &replies);
    replies_fini(&replies);
    return code;
}

enum exit_code files_events(struct call *call)
{
    const struct arguments *arguments = call->arguments;
    struct run_events events;
    enum status status = run_files_events(arguments->target.run_dir, arguments->after,
                                          events_count(arguments), &events, &call->session.why);
    if (status != STATUS_OK)
        return EXIT_CODE_FAILED;
    enum exit_code code = EXIT_CODE_OK;
    if (!arguments->follow)
        code = output_events(call, events.items, events.n);
    for (size_t i = 0; arguments->follow && i < events.n && code == EXIT_CODE_OK; i++)
        code = output_event_line(call, events.items[i]);
    run_events_fini(&events);
    return code;
}

/* On a screen: home, every line cleared behind its end, the rest of the screen cleared. */
static enum exit_code redraw(struct call *call, struct text *content, bool is_first)
{
    struct text frame = {.failed = content->failed};
    text_put(&frame, is_first ? "\033[2J\033[H" : "\033[H");
    for (const char *line = text_get(content); *line;) {
        size_t n = strcspn(line, "\n");
        text_append(&frame, line, n);
        text_put(&frame, "\033[K\n");
        line += n + (line[n] == '\n');
    }
    text_put(&frame, "\033[J");
    text_fini(content);
    return output_text(call, &frame);
}

static enum exit_code print_sample(struct call *call, const Ballast__Control__V1__WatchReply *watch,
                                   bool is_first)
{
    if (call->arguments->json)
        return output_json(call, json_from_message(&watch->base));
    struct text text = {0};
    if (call->is_screen) {
        render_watch_screen(watch, &call->style, &text);
        return redraw(call, &text, is_first);
    }
    render_watch_line(watch, is_first, &call->style, &text);
    return output_text(call, &text);
}

/* May a connection that closes now be the run's end? */
static bool looks_ended(const Ballast__Control__V1__WatchReply *watch)
{
    const Ballast__Control__V1__StatusReply *status = watch->status;
    return status && (strncmp(status->doing, "end", 3) == 0 ||
                      (status->n_steps > 0 && status->step >= status->n_steps));
}

/* A sample of many ranks comes in parts; the first carries the status, and it is the one that
 * counts. The others add ranks, for JSON only: no screen holds so many. */
static enum exit_code take_sample(struct call *call, const Ballast__Control__V1__WatchReply *watch,
                                  uint64_t *n_samples, bool *ended)
{
    if (!watch->status)
        return call->arguments->json ? print_sample(call, watch, false) : EXIT_CODE_OK;
    *ended = looks_ended(watch);
    return print_sample(call, watch, (*n_samples)++ == 0);
}

enum exit_code verb_watch(struct call *call)
{
    const struct arguments *arguments = call->arguments;
    Ballast__Control__V1__WatchRequest body = BALLAST__CONTROL__V1__WATCH_REQUEST__INIT;
    body.interval_ms =
        arguments->interval_ms ? (uint32_t)arguments->interval_ms : DEFAULT_INTERVAL_MS;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_WATCH;
    request.watch = &body;
    double silence_s = SILENCE_S + (double)body.interval_ms / 1e3;
    bool ended = false;
    enum exit_code code = session_send(&call->session, &request, call->deadline_s);
    uint64_t n = 0;
    while (code == EXIT_CODE_OK && (!arguments->count || n < arguments->count)) {
        reply_message *reply = NULL;
        code = session_next(&call->session, request.id, stream_deadline(call, silence_s), &reply);
        if (code == EXIT_CODE_CONNECT && ended)
            return EXIT_CODE_OK;
        if (code != EXIT_CODE_OK)
            return code;
        bool more = reply->more;
        if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY_WATCH) {
            code = take_sample(call, reply->watch, &n, &ended);
        } else if (reply->body_case != BALLAST__CONTROL__V1__REPLY__BODY_DONE) {
            code = unexpected(call);
        }
        ballast_reply_free(reply);
        if (!more)
            break;
    }
    return code;
}
