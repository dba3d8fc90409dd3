/* Printing answers and failures. Main thread. */
#include "client/output.h"

#include <errno.h>
#include <string.h>
#include "client/render.h"
#include "proto/base/heap.h"
#include "proto/json.h"
#include "proto/json_parse.h"

static enum exit_code write_all(struct call *call, const char *bytes, size_t n)
{
    if (fwrite(bytes, 1, n, call->out) == n && fflush(call->out) == 0)
        return EXIT_CODE_OK;
    fail(&call->session.why, status_from_errno(errno), "cannot write the answer: %s",
         strerror(errno));
    return EXIT_CODE_FAILED;
}

static enum exit_code no_memory(struct call *call)
{
    fail(&call->session.why, STATUS_OUT_OF_MEMORY, "out of memory while printing the answer");
    return EXIT_CODE_FAILED;
}

enum exit_code output_text(struct call *call, struct text *text)
{
    enum exit_code code =
        text->failed ? no_memory(call) : write_all(call, text_get(text), text->used);
    text_fini(text);
    return code;
}

static int append_json(const char *bytes, size_t n, void *data)
{
    text_append(data, bytes, n);
    return 0;
}

enum exit_code output_json(struct call *call, json_t *value)
{
    struct text line = {0};
    if (!value || json_dump_callback(value, append_json, &line, JSON_LINE_FLAGS) != 0)
        line.failed = true;
    json_decref(value);
    text_put(&line, "\n");
    return output_text(call, &line);
}

enum exit_code output_failure(struct call *call, enum exit_code code)
{
    const struct failure *why = &call->session.why;
    struct text line = {0};
    text_put(&line, "ballastctl: ");
    text_put_wire(&line, why->text);
    text_put(&line, "\n");
    /* Without memory the plain words have to do; this program's own texts are clean. */
    fputs(line.failed ? "ballastctl: out of memory\n" : text_get(&line), call->err);
    fflush(call->err);
    text_fini(&line);
    if (call->arguments && call->arguments->json) {
        json_t *error = json_pack("{s:{s:s,s:o}}", "error", "status", status_name(why->status),
                                  "text", json_text(why->text));
        struct failure kept = *why;
        (void)output_json(call, error);
        call->session.why = kept;
    }
    return code;
}

static const ProtobufCMessage *reply_body(const Ballast__Control__V1__Reply *reply)
{
    /* Every member of the body is a pointer to a message at the same place of the union. */
    return (const ProtobufCMessage *)reply->error;
}

static bool merge_into(json_t *whole, json_t *part)
{
    const char *key;
    json_t *value;
    json_object_foreach(part, key, value)
    {
        json_t *old = json_object_get(whole, key);
        int bad;
        if (json_is_array(old) && json_is_array(value))
            bad = json_array_extend(old, value);
        else if (json_is_object(old) && json_is_object(value))
            bad = json_object_update(old, value);
        else
            bad = json_object_set(whole, key, value);
        if (bad)
            return false;
    }
    return true;
}

json_t *output_event(const Ballast__V1__Event *event)
{
    json_t *object = json_from_message(&event->base);
    if (!object)
        return NULL;
    json_object_del(object, "details_json");
    if (*event->details_json) {
        json_t *details = NULL;
        json_error_t error;
        enum status parsed =
            json_parse(event->details_json, strlen(event->details_json), 0, &details, &error);
        if (parsed == STATUS_OUT_OF_MEMORY ||
            (json_is_object(details) && !json_add_missing(object, details))) {
            json_decref(object);
            object = NULL;
        }
        json_decref(details);
    }
    return object;
}

static json_t *events_to_json(Ballast__V1__Event *const *events, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; list && i < n; i++) {
        if (json_array_append_new(list, output_event(events[i])) != 0) {
            json_decref(list);
            list = NULL;
        }
    }
    return list ? json_pack("{s:o}", "events", list) : NULL;
}

enum exit_code output_events(struct call *call, Ballast__V1__Event *const *events, size_t n)
{
    if (call->arguments->json)
        return output_json(call, events_to_json(events, n));
    struct text text = {0};
    render_events(events, n, &call->style, &text);
    return output_text(call, &text);
}

enum exit_code output_event_line(struct call *call, const Ballast__V1__Event *event)
{
    if (call->arguments->json)
        return output_json(call, output_event(event));
    struct text text = {0};
    render_event_line(event, &call->style, &text);
    return output_text(call, &text);
}

enum exit_code output_oom(struct call *call, Ballast__V1__OomReport *report)
{
    Ballast__Control__V1__OomReply reply = BALLAST__CONTROL__V1__OOM_REPLY__INIT;
    reply.report = report;
    if (call->arguments->json)
        return output_json(call, json_from_message(&reply.base));
    struct text text = {0};
    if (report)
        render_oom(report, &call->style, &text);
    else
        text_put(&text, "no out-of-memory event in this run\n");
    return output_text(call, &text);
}

json_t *output_merge(const struct replies *replies)
{
    json_t *whole = json_object();
    for (size_t i = 0; whole && i < replies->n; i++) {
        json_t *part = json_from_message(reply_body(replies->items[i]));
        if (!part || !merge_into(whole, part)) {
            json_decref(whole);
            whole = NULL;
        }
        json_decref(part);
    }
    return whole;
}

bool output_gather(const struct replies *replies, const char *field, void ***out_items,
                   size_t *out_n)
{
    void **items = NULL;
    size_t n = 0;
    for (size_t i = 0; i < replies->n; i++) {
        const ProtobufCMessage *body = reply_body(replies->items[i]);
        const ProtobufCFieldDescriptor *row =
            protobuf_c_message_descriptor_get_field_by_name(body->descriptor, field);
        if (!row || row->label != PROTOBUF_C_LABEL_REPEATED)
            continue;
        const char *base = (const char *)body;
        size_t n_more;
        void **more;
        memcpy(&n_more, base + row->quantifier_offset, sizeof n_more);
        memcpy(&more, base + row->offset, sizeof more);
        if (n_more == 0)
            continue;
        void **grown = heap_realloc(items, (n + n_more) * sizeof *items);
        if (!grown) {
            heap_free(items);
            return false;
        }
        items = grown;
        memcpy(items + n, more, n_more * sizeof *items);
        n += n_more;
    }
    *out_items = items;
    *out_n = n;
    return true;
}
