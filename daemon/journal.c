/* events.jsonl: opening, repair, appending. See journal.h. */
#include "daemon/journal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/event.h"
#include "proto/frame.h"

enum { LOADED_LINES = 1024, SCAN_BYTES = 64 * 1024, MAX_LINE_BYTES = 256 * 1024 };

/* ---- opening ---- */

/* Where the newest lines of the file start. */
struct line_index {
    off_t starts[LOADED_LINES + 1]; /* ring by line number */
    uint64_t n_lines;               /* complete ones */
    off_t tail;                     /* first byte after the last newline */
};

static enum status index_lines(int fd, char *buffer, struct line_index *index, struct failure *why)
{
    *index = (struct line_index){0};
    for (off_t at = 0;;) {
        ssize_t n = pread(fd, buffer, SCAN_BYTES, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail(why, status_from_errno(errno), "cannot read events.jsonl: %s",
                        strerror(errno));
        if (n == 0)
            return STATUS_OK;
        for (ssize_t i = 0; i < n; i++) {
            if (buffer[i] != '\n')
                continue;
            index->tail = at + i + 1;
            index->n_lines++;
            index->starts[index->n_lines % (LOADED_LINES + 1)] = index->tail;
        }
        at += n;
    }
}

static enum status read_range(int fd, off_t from, size_t n, char *out_bytes)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(fd, out_bytes + done, n - done, from + (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return STATUS_IO;
        done += (size_t)got;
    }
    return STATUS_OK;
}

/* The event on the line [from, to), or NULL. */
static Ballast__V1__Event *read_line(int fd, off_t from, off_t to, uint64_t sequence)
{
    if (to - from > MAX_LINE_BYTES || to <= from)
        return NULL;
    size_t n = (size_t)(to - from);
    char *text = heap_alloc(n);
    if (!text)
        return NULL;
    Ballast__V1__Event *event = NULL;
    if (read_range(fd, from, n, text) != STATUS_OK ||
        event_parse(text, n, sequence, &event) != STATUS_OK)
        event = NULL;
    heap_free(text);
    return event;
}

static enum status write_whole(struct journal *journal, const char *bytes, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t wrote = write(journal->fd, bytes + done, n - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0) {
            enum status status = status_from_errno(errno);
            /* Half a line is worse than none. */
            if (done > 0 && ftruncate(journal->fd, journal->size) != 0)
                log_error("events.jsonl: half a line could not be removed: %s", strerror(errno));
            return status;
        }
        done += (size_t)wrote;
    }
    journal->size += (off_t)n;
    return STATUS_OK;
}

/* What follows the last newline was being written when the last daemon died: finish it if it is
 * a whole event, else cut it off. */
static enum status repair_tail(struct journal *journal, struct line_index *index,
                               struct failure *why)
{
    if (index->tail == journal->size)
        return STATUS_OK;
    Ballast__V1__Event *event = read_line(journal->fd, index->tail, journal->size, 1);
    enum status status = STATUS_OK;
    if (event) {
        frame_free(&event->base);
        status = write_whole(journal, "\n", 1);
        index->tail = journal->size;
        index->n_lines++;
        index->starts[index->n_lines % (LOADED_LINES + 1)] = index->tail;
    } else {
        log_warn("events.jsonl: the last line is torn; its %lld bytes were cut off",
                 (long long)(journal->size - index->tail));
        if (ftruncate(journal->fd, index->tail) != 0)
            status = status_from_errno(errno);
        journal->size = index->tail;
    }
    if (status != STATUS_OK)
        return fail(why, status, "cannot repair the end of events.jsonl: %s", status_text(status));
    return STATUS_OK;
}

static void load_newest(struct journal *journal, const struct line_index *index,
                        struct history *history)
{
    uint64_t first = index->n_lines > LOADED_LINES ? index->n_lines - LOADED_LINES : 0;
    for (uint64_t line = first; line < index->n_lines; line++) {
        off_t from = index->starts[line % (LOADED_LINES + 1)];
        off_t to = index->starts[(line + 1) % (LOADED_LINES + 1)];
        Ballast__V1__Event *event = read_line(journal->fd, from, to - 1, line + 1);
        if (!event) {
            log_warn("events.jsonl: line %llu is not an event", (unsigned long long)(line + 1));
            continue;
        }
        if (strcmp(event->type, "start") == 0)
            snprintf(journal->started, sizeof journal->started, "%s", event->time);
        history_add_event(history, event);
    }
}

static enum status open_file(struct journal *journal, const char *run_dir, struct failure *why)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/events.jsonl", run_dir) >= (int)sizeof path)
        return fail(why, STATUS_TOO_LARGE, "the run folder's path is too long");
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return fail(why, status_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return fail(why, STATUS_IO, "%s is not a file", path);
    }
    *journal = (struct journal){.fd = fd, .size = info.st_size};
    return STATUS_OK;
}

enum status journal_open(struct journal *journal, const char *run_dir, struct history *history,
                         struct failure *why)
{
    *journal = (struct journal){.fd = -1};
    enum status status = open_file(journal, run_dir, why);
    if (status != STATUS_OK)
        return status;
    struct line_index *index = heap_alloc(sizeof *index);
    char *buffer = heap_alloc(SCAN_BYTES);
    if (!index || !buffer)
        status = fail(why, STATUS_OUT_OF_MEMORY, "out of memory while reading events.jsonl");
    if (status == STATUS_OK)
        status = index_lines(journal->fd, buffer, index, why);
    if (status == STATUS_OK)
        status = repair_tail(journal, index, why);
    if (status == STATUS_OK) {
        load_newest(journal, index, history);
        journal->written_sequence = index->n_lines;
        journal->next_sequence = index->n_lines + 1;
    }
    heap_free(index);
    heap_free(buffer);
    if (status != STATUS_OK)
        journal_close(journal);
    return status;
}

void journal_close(struct journal *journal)
{
    if (journal->fd >= 0)
        close(journal->fd);
    journal->fd = -1;
}

/* ---- appending ---- */

static enum status append(struct journal *journal, const Ballast__V1__Event *event)
{
    char *text = event_format(event);
    if (!text)
        return STATUS_OUT_OF_MEMORY;
    size_t n = strlen(text);
    char *line = heap_realloc(text, n + 2);
    if (!line) {
        heap_free(text);
        return STATUS_OUT_OF_MEMORY;
    }
    line[n] = '\n';
    enum status status = write_whole(journal, line, n + 1);
    heap_free(line);
    return status;
}

enum status journal_catch_up(struct journal *journal, const struct history *history)
{
    assert(journal->fd >= 0);
    for (size_t i = history_find_event(history, journal->written_sequence);; i++) {
        const Ballast__V1__Event *event = history_event(history, i);
        if (!event)
            break;
        enum status status = append(journal, event);
        if (status != STATUS_OK) {
            if (!journal->broken)
                log_error("event %llu (%s) cannot be written to events.jsonl yet: %s",
                          (unsigned long long)event->sequence, event->type, status_text(status));
            journal->broken = true;
            return status;
        }
        journal->written_sequence = event->sequence;
    }
    if (journal->broken)
        log_info("events.jsonl is complete again");
    journal->broken = false;
    return STATUS_OK;
}

enum status journal_sync(struct journal *journal)
{
    return fsync(journal->fd) == 0 ? STATUS_OK : status_from_errno(errno);
}
