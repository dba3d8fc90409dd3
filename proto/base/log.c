/* The log sink: one of the two globals of the project.
 *
 * Owns the log file and its rotation; not stderr. A line is made on the caller's stack and goes
 * out in one write(), so lines of several threads never mix. Any thread. */
#include "proto/base/log.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "proto/base/units.h"
#include "proto/base/utf8.h"

enum { TEXT_BYTES = 2048, LINE_BYTES = 5120, PROGRAM_BYTES = 32 };
static const off_t rotate_bytes = (off_t)64 * 1024 * 1024;

static struct {
    char program[PROGRAM_BYTES];
    int rank;
    bool terminal;
    _Atomic int level;
    _Atomic bool quiet;
    _Atomic unsigned n_errors;

    pthread_mutex_t file_lock; /* guards what follows */
    int file;                  /* -1: none */
    off_t file_bytes;
    bool file_broken; /* a failed write was already told */
    char path[PATH_MAX];
} sink = {.program = "ballast",
          .rank = -1,
          .level = LOG_INFO,
          .file_lock = PTHREAD_MUTEX_INITIALIZER,
          .file = -1};

static const char *const level_names[] = {"error", "warn", "info", "debug"};

void log_init(const char *program, int rank, enum log_level level)
{
    snprintf(sink.program, sizeof sink.program, "%s", program);
    sink.rank = rank;
    sink.terminal = isatty(STDERR_FILENO) == 1;
    atomic_store(&sink.level, (int)level);
}

/* Opens sink.path; the lock is held. */
static enum status open_file(void)
{
    int file = open(sink.path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) {
        return status_from_errno(errno);
    }
    struct stat stat;
    sink.file_bytes = fstat(file, &stat) == 0 ? stat.st_size : 0;
    sink.file = file;
    sink.file_broken = false;
    return STATUS_OK;
}

enum status log_to_file(const char *path)
{
    if (path != NULL && strlen(path) + sizeof ".1" > sizeof sink.path) {
        return STATUS_TOO_LARGE;
    }
    enum status status = STATUS_OK;
    pthread_mutex_lock(&sink.file_lock);
    if (sink.file >= 0) {
        close(sink.file);
        sink.file = -1;
    }
    if (path != NULL) {
        snprintf(sink.path, sizeof sink.path, "%s", path);
        status = open_file();
    }
    pthread_mutex_unlock(&sink.file_lock);
    return status;
}

void log_quiet(bool quiet)
{
    atomic_store(&sink.quiet, quiet);
}

unsigned log_error_count(void)
{
    return atomic_load(&sink.n_errors);
}

/* Appends `text` with quotes and control characters escaped: a message must not be able to start
 * a line of its own or to steer a terminal. Returns the bytes now used, at most `room`. */
static size_t append_escaped(char *line, size_t used, size_t room, const char *text, bool quotes)
{
    for (const char *at = text; *at != '\0'; at++) {
        unsigned char c = (unsigned char)*at;
        char escaped[8];
        if (c == '\n') {
            strcpy(escaped, "\\n");
        } else if (c == '\t') {
            strcpy(escaped, "\\t");
        } else if (c < 0x20 || c == 0x7F) {
            snprintf(escaped, sizeof escaped, "\\x%02x", c);
        } else if (quotes && (c == '"' || c == '\\')) {
            snprintf(escaped, sizeof escaped, "\\%c", c);
        } else {
            snprintf(escaped, sizeof escaped, "%c", c);
        }
        size_t n = strlen(escaped);
        if (used + n > room) {
            return utf8_cut(line, used);
        }
        memcpy(line + used, escaped, n);
        used += n;
    }
    return used;
}

/* One logfmt line with its newline; returns its length. */
static size_t make_logfmt(char line[static LINE_BYTES], enum log_level level, const char *text)
{
    char time[UNITS_TEXT_BYTES];
    units_format_time(units_unix_ms(), time);
    int n = snprintf(line, LINE_BYTES, "time=%s level=%s program=%s ", time, level_names[level],
                     sink.program);
    if (sink.rank >= 0) {
        n += snprintf(line + n, LINE_BYTES - (size_t)n, "rank=%d ", sink.rank);
    }
    n += snprintf(line + n, LINE_BYTES - (size_t)n, "text=\"");
    size_t used = append_escaped(line, (size_t)n, LINE_BYTES - 2, text, true);
    line[used++] = '"';
    line[used++] = '\n';
    return used;
}

/* One line for a person at a terminal; returns its length. */
static size_t make_terminal(char line[static LINE_BYTES], enum log_level level, const char *text)
{
    time_t now = time(NULL);
    struct tm local;
    localtime_r(&now, &local);
    int n = snprintf(line, LINE_BYTES, "%02d:%02d:%02d %s ", local.tm_hour, local.tm_min,
                     local.tm_sec, level_names[level]);
    n += sink.rank >= 0 ? snprintf(line + n, LINE_BYTES - (size_t)n, "rank %d: ", sink.rank)
                        : snprintf(line + n, LINE_BYTES - (size_t)n, "%s: ", sink.program);
    size_t used = append_escaped(line, (size_t)n, LINE_BYTES - 1, text, false);
    line[used++] = '\n';
    return used;
}

/* One write in the usual case; the rest of a short one follows. */
static bool write_line(int file, const char *line, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(file, line, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        line += n;
        bytes -= (size_t)n;
    }
    return true;
}

/* Move the file aside and start a new one; the lock is held. */
static void rotate(void)
{
    char aside[PATH_MAX + 2];
    snprintf(aside, sizeof aside, "%s.1", sink.path);
    if (rename(sink.path, aside) != 0) {
        sink.file_bytes = 0; /* the same file for another 64 MiB */
        return;
    }
    close(sink.file);
    sink.file = -1;
    if (open_file() != STATUS_OK) {
        static const char told[] = "level=error text=\"the log file cannot be opened again\"\n";
        (void)write_line(STDERR_FILENO, told, sizeof told - 1);
    }
}

static void write_file(const char *line, size_t bytes)
{
    pthread_mutex_lock(&sink.file_lock);
    if (sink.file >= 0 && sink.file_bytes > 0 && sink.file_bytes + (off_t)bytes > rotate_bytes) {
        rotate();
    }
    if (sink.file >= 0) {
        if (write_line(sink.file, line, bytes)) {
            sink.file_bytes += (off_t)bytes;
        } else if (!sink.file_broken) {
            static const char told[] = "level=error text=\"the log file cannot be written\"\n";
            (void)write_line(STDERR_FILENO, told, sizeof told - 1);
            sink.file_broken = true;
        }
    }
    pthread_mutex_unlock(&sink.file_lock);
}

void log_at(enum log_level level, const char *format, ...)
{
    if (level == LOG_ERROR) {
        atomic_fetch_add(&sink.n_errors, 1);
    } else if ((int)level > atomic_load_explicit(&sink.level, memory_order_relaxed)) {
        return;
    }
    int error = errno; /* a log call must be harmless between a failing call and its report */
    char text[TEXT_BYTES], line[LINE_BYTES];
    va_list list;
    va_start(list, format);
    int length = vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (length < 0) {
        text[0] = '\0';
    } else if ((size_t)length >= sizeof text) {
        text[utf8_cut(text, sizeof text - 1)] = '\0';
    }
    size_t bytes;
    if (level == LOG_ERROR || !atomic_load_explicit(&sink.quiet, memory_order_relaxed)) {
        bytes = sink.terminal ? make_terminal(line, level, text) : make_logfmt(line, level, text);
        (void)write_line(STDERR_FILENO, line, bytes);
    }
    bytes = make_logfmt(line, level, text);
    write_file(line, bytes);
    errno = error;
}
