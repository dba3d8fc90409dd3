/* `wait`: until the run is so far, through the run's start, restarts of its daemon and its end.
 *
 * The daemon is asked; where it is gone for good the journal (events.jsonl of the run's
 * directory) tells whether the run has ended. Main thread.
 *
 *   SEEK ── connected ──► ASK ── answer ──► done
 *    ▲ │                   │
 *    │ └ journal: ended    └ connection lost ──► SEEK
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "client/output.h"
#include "client/render.h"
#include "client/run_files.h"
#include "client/verbs_run.h"
#include "proto/base/heap.h"
#include "proto/base/units.h"

enum {
    GREETING_S = 10,
    SEEK_SLICE_S = 2,    /* between looks at the journal */
    OLD_END_GRACE_S = 5, /* a journal that ends before we began: the run may be resumed now */
    LOST_GRACE_S = 30,   /* the daemon comes back within seconds or not at all */
};

typedef Ballast__Control__V1__Request request_message;
typedef Ballast__Control__V1__Reply reply_message;
typedef Ballast__Control__V1__WaitRequest wait_request;

struct waiting {
    struct call *call;
    double deadline_s;
    double began_s, lost_s;
    char began[UNITS_TEXT_BYTES]; /* wall clock, as in the journal */
    char *run_dir;                /* owned; NULL while unknown */
    bool was_connected;
    uint64_t newest_event; /* sequence; events up to here were before our time */
};

enum status check_condition(struct arguments *arguments, const char *for_text, struct failure *why)
{
    static const char usage[] = "step=N, generation=N, event=TYPE, end or paused";
    wait_request *condition = &arguments->condition;
    int64_t value = 0;
    if (!for_text)
        return fail(why, STATUS_INVALID, "wait needs --for %s", usage);
    if (strcmp(for_text, "end") == 0) {
        condition->condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_END;
        condition->end = true;
    } else if (strcmp(for_text, "paused") == 0) {
        condition->condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_PAUSED;
        condition->paused = true;
    } else if (strncmp(for_text, "event=", 6) == 0 && for_text[6]) {
        condition->condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_EVENT;
        condition->event = (char *)for_text + 6;
    } else if (strncmp(for_text, "step=", 5) == 0 &&
               units_parse_int(for_text + 5, 0, INT64_MAX, &value) == STATUS_OK) {
        condition->condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_STEP;
        condition->step = (uint64_t)value;
    } else if (strncmp(for_text, "generation=", 11) == 0 &&
               units_parse_int(for_text + 11, 0, INT64_MAX, &value) == STATUS_OK) {
        condition->condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_GENERATION;
        condition->generation = (uint64_t)value;
    } else {
        return fail(why, STATUS_INVALID, "--for %s: not %s", for_text, usage);
    }
    return STATUS_OK;
}

static uint64_t event_number(const json_t *event, const char *key)
{
    json_int_t value = json_integer_value(json_object_get(event, key));
    return value > 0 ? (uint64_t)value : 0;
}

/* Is what we wait for true of a run whose last event is this end? */
static bool end_satisfies(const wait_request *condition, const json_t *event)
{
    switch (condition->condition_case) {
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_END:
        return true;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_STEP:
        return event_number(event, "step") >= condition->step;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_GENERATION:
        return event_number(event, "generation") >= condition->generation;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_EVENT:
        return strcmp(condition->event, "end") == 0;
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_PAUSED:
    case BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION__NOT_SET:
    case _BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION__CASE_IS_INT_SIZE:
        break;
    }
    return false;
}

static enum exit_code print_end(struct call *call, json_t *event)
{
    uint64_t step = event_number(event, "step"), generation = event_number(event, "generation");
    if (call->arguments->json)
        return output_json(call, json_pack("{s:I,s:I,s:O}", "step", (json_int_t)step, "generation",
                                           (json_int_t)generation, "event", event));
    struct text text = {0};
    text_printf(&text, "the run has ended after %" PRIu64 " steps, generation %" PRIu64 "\n", step,
                generation);
    return output_text(call, &text);
}

/* Nobody answers. Does the journal say that the run is over? True: `out_code` is the verdict. */
static bool judge_by_journal(struct waiting *waiting, enum exit_code *out_code)
{
    struct call *call = waiting->call;
    const wait_request *condition = &call->arguments->condition;
    double now_s = units_monotonic_s();
    json_t *event = waiting->run_dir ? run_files_last_event(waiting->run_dir) : NULL;
    const char *type = json_string_value(json_object_get(event, "type"));
    const char *time = json_string_value(json_object_get(event, "time"));
    bool judged = false;
    if (type && strcmp(type, "end") == 0) {
        bool is_ours = waiting->was_connected || (time && strcmp(time, waiting->began) >= 0);
        bool is_stable = is_ours || now_s - waiting->began_s > OLD_END_GRACE_S;
        bool satisfied = end_satisfies(condition, event);
        if (satisfied && is_stable) {
            *out_code = print_end(call, event);
            judged = true;
        } else if (is_ours && !satisfied) {
            fail(&call->session.why, STATUS_STOPPED,
                 "the run has ended after %" PRIu64 " steps; this will not happen",
                 event_number(event, "step"));
            *out_code = EXIT_CODE_FAILED;
            judged = true;
        }
    } else if (waiting->was_connected && now_s - waiting->lost_s > LOST_GRACE_S) {
        fail_within(&call->session.why, "the run's daemon has been gone for %d s", LOST_GRACE_S);
        *out_code = EXIT_CODE_CONNECT;
        judged = true;
    }
    json_decref(event);
    return judged;
}

/* Connect, however long the run takes to appear. False: *out_code is the end of it. */
static bool seek(struct waiting *waiting, enum exit_code *out_code)
{
    struct session *session = &waiting->call->session;
    for (;;) {
        double now_s = units_monotonic_s();
        /* The first look at the journal comes soon: the run may be over already. */
        double slice_s = now_s + (now_s - waiting->began_s < 1.0 ? 0.3 : SEEK_SLICE_S);
        double until_s = slice_s < waiting->deadline_s ? slice_s : waiting->deadline_s;
        /* A daemon on a busy host may take its time to greet. */
        double greeting_s =
            now_s + GREETING_S < waiting->deadline_s ? now_s + GREETING_S : waiting->deadline_s;
        enum exit_code code = session_open_patiently(session, until_s, greeting_s);
        if (code == EXIT_CODE_OK)
            return true;
        if (code != EXIT_CODE_TIMEOUT) {
            *out_code = code;
            return false;
        }
        if (judge_by_journal(waiting, out_code))
            return false;
        if (units_monotonic_s() >= waiting->deadline_s) {
            *out_code = EXIT_CODE_TIMEOUT;
            return false;
        }
    }
}

/* Learn once where the run's directory is, for the time when the daemon is gone. */
static enum exit_code learn_run_dir(struct waiting *waiting, double deadline_s)
{
    Ballast__Control__V1__StatusRequest body = BALLAST__CONTROL__V1__STATUS_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_STATUS;
    request.status = &body;
    struct replies replies;
    if (waiting->run_dir)
        return EXIT_CODE_OK;
    enum exit_code code = session_ask(&waiting->call->session, &request, deadline_s, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    if (replies.items[0]->body_case == BALLAST__CONTROL__V1__REPLY__BODY_STATUS &&
        *replies.items[0]->status->run_dir)
        waiting->run_dir = heap_strdup(replies.items[0]->status->run_dir);
    replies_fini(&replies);
    return EXIT_CODE_OK;
}

static enum exit_code print_answer(struct call *call, const Ballast__Control__V1__WaitReply *wait)
{
    if (call->arguments->json) {
        json_t *object = json_pack("{s:I,s:I}", "step", (json_int_t)wait->step, "generation",
                                   (json_int_t)wait->generation);
        if (object && wait->event &&
            json_object_set_new(object, "event", output_event(wait->event)) != 0) {
            json_decref(object);
            object = NULL;
        }
        return output_json(call, object);
    }
    struct text text = {0};
    if (wait->event)
        render_event_line(wait->event, &call->style, &text);
    else
        text_printf(&text, "%" PRIu64 " steps completed, generation %" PRIu64 "\n", wait->step,
                    wait->generation);
    return output_text(call, &text);
}

/* Events that came while the daemon was away, or the number of the newest when we begin. True:
 * one of them is what we wait for; *out_code is the end of it. */
static enum exit_code catch_up(struct waiting *waiting, double deadline_s, bool *out_found)
{
    struct call *call = waiting->call;
    const wait_request *condition = &call->arguments->condition;
    *out_found = false;
    if (condition->condition_case != BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_EVENT)
        return EXIT_CODE_OK;
    Ballast__Control__V1__EventsRequest body = BALLAST__CONTROL__V1__EVENTS_REQUEST__INIT;
    bool is_first = !waiting->was_connected;
    body.after_sequence = waiting->newest_event;
    body.count = is_first ? 1 : 1000;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_EVENTS;
    request.events = &body;
    struct replies replies;
    enum exit_code code = session_ask(&call->session, &request, deadline_s, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    void **events = NULL;
    size_t n = 0;
    if (!output_gather(&replies, "events", &events, &n)) {
        fail(&call->session.why, STATUS_OUT_OF_MEMORY, "out of memory while collecting events");
        code = EXIT_CODE_FAILED;
    }
    for (size_t i = 0; i < n && !*out_found; i++) {
        Ballast__V1__Event *event = events[i];
        if (event->sequence > waiting->newest_event)
            waiting->newest_event = event->sequence;
        if (is_first || strcmp(event->type, condition->event) != 0)
            continue;
        Ballast__Control__V1__WaitReply answer = BALLAST__CONTROL__V1__WAIT_REPLY__INIT;
        answer.step = event->step;
        answer.generation = event->generation;
        answer.event = event;
        code = print_answer(call, &answer);
        *out_found = true;
    }
    heap_free(events);
    replies_fini(&replies);
    return code;
}

static enum exit_code ask(struct waiting *waiting, bool *out_done)
{
    struct call *call = waiting->call;
    wait_request body = call->arguments->condition;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_WAIT;
    request.wait = &body;
    *out_done = false;
    /* Small questions first; what the run takes its time for is only the wait itself. */
    double soon_s = units_monotonic_s() + 30.0;
    if (soon_s > waiting->deadline_s)
        soon_s = waiting->deadline_s;
    enum exit_code code = learn_run_dir(waiting, soon_s);
    if (code == EXIT_CODE_OK)
        code = catch_up(waiting, soon_s, out_done);
    waiting->was_connected = true;
    if (code != EXIT_CODE_OK || *out_done)
        return code;
    code = session_send(&call->session, &request, soon_s);
    reply_message *reply = NULL;
    if (code == EXIT_CODE_OK)
        code = session_next(&call->session, request.id, waiting->deadline_s, &reply);
    if (code != EXIT_CODE_OK)
        return code;
    *out_done = true;
    if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY_WAIT) {
        code = print_answer(call, reply->wait);
    } else {
        fail(&call->session.why, STATUS_MALFORMED,
             "the daemon answered with something else than was asked for");
        code = EXIT_CODE_CONNECT;
    }
    ballast_reply_free(reply);
    return code;
}

enum exit_code verb_wait(struct call *call)
{
    struct waiting waiting = {.call = call, .began_s = units_monotonic_s()};
    waiting.deadline_s = call->arguments->timeout_s > 0.0 ? call->deadline_s : INFINITY;
    units_format_time(units_unix_ms(), waiting.began);
    if (call->arguments->target.run_dir) {
        waiting.run_dir = heap_strdup(call->arguments->target.run_dir);
        if (!waiting.run_dir) {
            fail(&call->session.why, STATUS_OUT_OF_MEMORY, "out of memory");
            return EXIT_CODE_FAILED;
        }
    }
    enum exit_code code = EXIT_CODE_OK;
    while (seek(&waiting, &code)) {
        bool done;
        code = ask(&waiting, &done);
        /* A lost connection is a daemon that is restarted, or the end of the run. */
        if (done || code != EXIT_CODE_CONNECT || call->session.why.status != STATUS_LINK_LOST)
            break;
        waiting.lost_s = units_monotonic_s();
    }
    heap_free(waiting.run_dir);
    return code;
}
