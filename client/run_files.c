/* Events from a run's folder. Owns nothing; main thread. */
#include "client/run_files.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/event.h"
#include "proto/frame.h"
#include "proto/json_parse.h"
#include "proto/text_file.h"

enum {
    TAIL_BYTES = 64 * 1024,
    MAX_FILE_BYTES = 1 << 30,
    MAX_LINE_BYTES = 256 * 1024, /* the daemon's own limit */
};

static bool find(const char *run_dir, char path[static PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/events.jsonl", run_dir) < PATH_MAX;
}

json_t *run_files_last_event(const char *run_dir)
{
    char path[PATH_MAX];
    if (!find(run_dir, path))
        return NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return NULL;
    off_t size = lseek(fd, 0, SEEK_END);
    off_t from = size > TAIL_BYTES ? size - TAIL_BYTES : 0;
    char *tail = heap_alloc(TAIL_BYTES + 1);
    ssize_t used = tail && size > 0 ? pread(fd, tail, TAIL_BYTES, from) : 0;
    close(fd);
    json_t *event = NULL;
    char *end = used > 0 ? memrchr(tail, '\n', (size_t)used) : NULL;
    if (end) {
        char *before = memrchr(tail, '\n', (size_t)(end - tail));
        char *line = before ? before + 1 : tail;
        json_error_t error;
        if ((before || from == 0) &&
            json_parse(line, (size_t)(end - line), 0, &event, &error) != STATUS_OK)
            event = NULL;
    }
    heap_free(tail);
    return event;
}

void run_events_fini(struct run_events *events)
{
    for (size_t i = 0; i < events->n; i++)
        frame_free(&events->items[i]->base);
    heap_free(events->items);
    *events = (struct run_events){0};
}

/* The line that starts at `from`: its length without the newline. A last one may be torn. */
static size_t line_length(const char *text, size_t n, size_t from)
{
    const char *end = memchr(text + from, '\n', n - from);
    return end ? (size_t)(end - text) - from : n - from;
}

static uint64_t count_lines(const char *text, size_t n)
{
    uint64_t lines = 0;
    for (size_t at = 0; at < n; at += line_length(text, n, at) + 1)
        lines++;
    return lines;
}

/* The lines `first` (counted from 1) to `last`; `events` has room for them. OUT_OF_MEMORY. */
static enum status parse_lines(const char *text, size_t n, uint64_t first, uint64_t last,
                               struct run_events *events)
{
    uint64_t sequence = 0;
    for (size_t at = 0; at < n && sequence < last;) {
        size_t length = line_length(text, n, at);
        sequence++;
        if (sequence >= first && length <= MAX_LINE_BYTES) {
            Ballast__V1__Event **slot = &events->items[events->n];
            enum status status = event_parse(text + at, length, sequence, slot);
            if (status == STATUS_OUT_OF_MEMORY)
                return status;
            events->n += status == STATUS_OK ? 1 : 0;
        }
        at += length + 1;
    }
    return STATUS_OK;
}

enum status run_files_events(const char *run_dir, uint64_t after, size_t count,
                             struct run_events *out_events, struct failure *why)
{
    char path[PATH_MAX], *text = NULL;
    size_t n = 0;
    if (!find(run_dir, path))
        return fail(why, STATUS_TOO_LARGE, "the run directory's path is too long");
    enum status status = text_file_read(path, MAX_FILE_BYTES, &text, &n, why);
    if (status != STATUS_OK)
        return status;
    uint64_t n_lines = count_lines(text, n);
    uint64_t first = after ? after + 1 : n_lines > count ? n_lines - count + 1 : 1;
    uint64_t n_wanted = first > n_lines ? 0 : n_lines - first + 1;
    n_wanted = n_wanted < count ? n_wanted : count;
    struct run_events events = {.items = heap_calloc(n_wanted + 1, sizeof *events.items)};
    status = events.items ? parse_lines(text, n, first, first + n_wanted - 1, &events)
                          : STATUS_OUT_OF_MEMORY;
    heap_free(text);
    if (status != STATUS_OK) {
        run_events_fini(&events);
        return fail(why, status, "out of memory while reading %s", path);
    }
    *out_events = events;
    return STATUS_OK;
}
