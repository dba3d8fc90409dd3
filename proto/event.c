/* Events to lines and back. Owns nothing; one thread at a time, because of jansson. */
#include "proto/event.h"

#include <stdbool.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include "proto/json.h"
#include "proto/json_parse.h"

Ballast__V1__Event *event_copy(const Ballast__V1__Event *event)
{
    ProtobufCMessage *copy = NULL;
    return frame_copy(&event->base, &copy) == STATUS_OK ? (Ballast__V1__Event *)copy : NULL;
}

/* ---- to a line ---- */

/* Set a key, taking over `value`; false when either is missing. */
static bool set(json_t *object, const char *key, json_t *value)
{
    return value && json_object_set_new(object, key, value) == 0;
}

static bool add_details(json_t *line, const Ballast__V1__Event *event)
{
    json_t *details = NULL;
    json_error_t error;
    enum status status = json_parse(event->details_json, strlen(event->details_json),
                                    JSON_REJECT_DUPLICATES, &details, &error);
    if (status == STATUS_OUT_OF_MEMORY)
        return false;
    bool ok = true;
    if (json_is_object(details))
        /* What every line has is not for the details to change. */
        ok = json_add_missing(line, details);
    else
        log_warn("event '%s' of step %llu: its details are no JSON object and were left out",
                 event->type, (unsigned long long)event->step);
    json_decref(details);
    return ok;
}

static bool fill(json_t *line, const Ballast__V1__Event *event)
{
    enum phase phase = N_PHASES;
    bool has_phase = convert_phase_from_wire(event->phase, &phase);
    bool ok = set(line, "time", json_text(event->time)) &&
              set(line, "type", json_text(event->type)) &&
              set(line, "step", json_count(event->step));
    if (ok && event->rank >= 0)
        ok = set(line, "rank", json_integer(event->rank));
    if (ok && has_phase)
        ok = set(line, "phase", json_string(phase_name(phase)));
    if (ok)
        ok = set(line, "generation", json_count(event->generation));
    if (ok && event->who[0])
        ok = set(line, "who", json_text(event->who));
    if (ok && event->text[0])
        ok = set(line, "text", json_text(event->text));
    if (ok && event->details_json[0])
        ok = add_details(line, event);
    return ok;
}

char *event_format(const Ballast__V1__Event *event)
{
    json_t *line = json_object();
    char *text = line && fill(line, event) ? json_format(line, JSON_LINE_FLAGS) : NULL;
    json_decref(line);
    return text;
}

/* ---- from a line ---- */

static const char *take_string(json_t *line, const char *key)
{
    const char *text = json_string_value(json_object_get(line, key));
    return text ? text : "";
}

static uint64_t take_number(json_t *line, const char *key)
{
    json_int_t value = json_integer_value(json_object_get(line, key));
    return value > 0 ? (uint64_t)value : 0;
}

static bool is_common(const char *key)
{
    static const char *const common[] = {"time",  "type",       "step", "rank",
                                         "phase", "generation", "who",  "text"};
    for (size_t i = 0; i < sizeof common / sizeof *common; i++)
        if (strcmp(common[i], key) == 0)
            return true;
    return false;
}

/* Everything a line has beyond the common keys, as JSON text; "" for nothing, NULL: no memory. */
static char *take_details(json_t *line)
{
    json_t *rest = json_object(), *value;
    const char *key;
    bool ok = rest != NULL;
    json_object_foreach(line, key, value)
    {
        if (ok && !is_common(key))
            ok = json_object_set(rest, key, value) == 0;
    }
    char *text = NULL;
    if (ok)
        text = json_object_size(rest) > 0 ? json_format(rest, JSON_LINE_FLAGS) : heap_strdup("");
    json_decref(rest);
    return text;
}

/* `details` is what take_details() gave. */
static enum status make(json_t *line, char *details, uint64_t sequence, ProtobufCMessage **out_copy)
{
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    enum phase phase = PHASE_SETUP;
    json_t *rank = json_object_get(line, "rank");
    event.time = (char *)take_string(line, "time");
    event.type = (char *)take_string(line, "type");
    event.step = take_number(line, "step");
    event.rank = json_is_integer(rank) ? (int32_t)json_integer_value(rank) : -1;
    if (phase_from_name(take_string(line, "phase"), &phase))
        event.phase = convert_phase_to_wire(phase);
    event.generation = take_number(line, "generation");
    event.who = (char *)take_string(line, "who");
    event.text = (char *)take_string(line, "text");
    event.details_json = details;
    event.sequence = sequence;
    return frame_copy(&event.base, out_copy);
}

enum status event_parse(const char *text, size_t n, uint64_t sequence,
                        Ballast__V1__Event **out_event)
{
    json_t *line = NULL;
    json_error_t error;
    enum status status = json_parse(text, n, JSON_REJECT_DUPLICATES, &line, &error);
    if (status != STATUS_OK)
        return status;
    bool has_type = take_string(line, "type")[0] != '\0';
    char *details = has_type ? take_details(line) : NULL;
    ProtobufCMessage *copy = NULL;
    if (!has_type)
        status = STATUS_MALFORMED;
    else if (!details)
        status = STATUS_OUT_OF_MEMORY;
    else
        status = make(line, details, sequence, &copy);
    if (status == STATUS_OK)
        *out_event = (Ballast__V1__Event *)copy;
    else if (status != STATUS_OUT_OF_MEMORY)
        status = STATUS_MALFORMED; /* too large for a frame, say: the daemon never wrote it */
    heap_free(details);
    json_decref(line);
    return status;
}
