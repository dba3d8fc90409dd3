/* The link thread: see the header for its states.
 *
 * Owns the connection and everything read from it. Never touches MPI; the two callbacks that
 * may take long (a plan, starting a daemon) only delay telemetry. Signals are blocked here. */
#include "worker/link_session.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"

static const double state_every_s = 0.5; /* whatever happens */
static const double state_gap_s = 0.002; /* between two that follow phase changes */
static const double greeting_s = 5;      /* a daemon that does not answer is left */
static const double first_backoff_s = 0.02;
static const double last_backoff_s = 0.5;
static const double patience_s = 2; /* for a daemon that is still starting */
static const double flush_s = 0.2;  /* what is queued when the link is stopped */

static void back_off(struct link *link, double now)
{
    link->retry_at_s = now + link->backoff_s;
    link->backoff_s = fmin(2 * link->backoff_s, last_backoff_s);
}

/* The connection is gone; a half-written frame will be sent whole on the next one. */
static void lose(struct link *link, const char *reason)
{
    double now = units_monotonic_s();
    if (link->fd >= 0) {
        close(link->fd);
        link->fd = -1;
    }
    frame_reader_fini(&link->reader);
    link_frame_drop(&link->hello);
    if (link->writing_end) {
        link_frame_drop(&link->current); /* it is sent again anyway */
    }
    atomic_store(&link->connected, false);
    link->writing = NULL;
    link->writing_end = false;
    link->written = 0;
    link->blocked = false;
    if (link->state == LINK_DONE) {
        return; /* as it should be */
    }
    if (link->state == LINK_READY) {
        log_warn("link: lost the daemon (%s); training goes on", reason);
        link->lost = true;
        link->away_since_s = now;
        link->backoff_s = first_backoff_s;
        link->retry_at_s = now; /* it may still be there: perhaps only this connection broke */
    } else {
        log_debug("link: %s", reason);
        back_off(link, now);
    }
    link->state = LINK_AWAY;
}

/* Nobody listens. Rank 0 starts another daemon: at once when one was lost, after some patience
 * when the first is still to come, and not more often than five times a minute. */
static void consider_restart(struct link *link, double now)
{
    const struct link_options *options = &link->options;
    bool starting = link->restarted || !link->lost;
    bool patient = starting && now - link->away_since_s < patience_s;
    double *slot = &link->restarts_s[link->n_restarts % LINK_MAX_RESTARTS_A_MINUTE];
    bool too_often = link->n_restarts >= LINK_MAX_RESTARTS_A_MINUTE && now - *slot < 60;
    if (options->rank != 0 || options->restart_daemon == NULL || patient || too_often ||
        atomic_load(&link->stopping)) {
        return;
    }
    *slot = now;
    link->n_restarts++;
    struct failure why = {0};
    enum status status = options->restart_daemon(options->user, &why);
    link->restarted = status == STATUS_OK;
    if (status != STATUS_OK) {
        log_warn("link: no new daemon: %s", why.text);
    }
    now = units_monotonic_s();
    link->away_since_s = now;
    link->backoff_s = first_backoff_s;
    link->retry_at_s = status == STATUS_OK ? now : now + last_backoff_s;
}

/* A connected socket, or -1 with errno. */
static int connect_to(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static void try_connect(struct link *link, double now)
{
    /* First, so that a rank without memory does not knock in vain. */
    if (link_encode_hello(&link->options, link->host, link->restarted, &link->hello) != STATUS_OK) {
        back_off(link, now);
        return;
    }
    int fd = connect_to(link->options.path);
    if (fd < 0) {
        int error = errno;
        link_frame_drop(&link->hello);
        back_off(link, now);
        if (error == ENOENT || error == ECONNREFUSED) {
            consider_restart(link, now);
        } else if (error != EAGAIN) { /* EAGAIN: its backlog is full, it is there */
            log_debug("link: connect: %s", strerrordesc_np(error));
        }
        return;
    }
    link->fd = fd;
    link->reader.max_bytes = FRAME_MAX_BYTES_BEFORE_HELLO;
    link->state = LINK_GREETING;
    link->greeting_until_s = now + greeting_s;
    link->writing = &link->hello;
    link->written = 0;
    link->blocked = false;
    link->end_sent = false;
    link->state_sent_s = 0;
    link_kept_rewind(&link->kept);
}

static void on_ready(struct link *link, const Ballast__Link__V1__LinkReady *ready)
{
    if (ready->error[0] != '\0') {
        if (!link->refusal_told) {
            log_warn("link: the daemon refuses this rank: %s", ready->error);
            link->refusal_told = true;
        }
        link->backoff_s = last_backoff_s;
        lose(link, "refused");
        return;
    }
    link->reader.max_bytes = FRAME_MAX_BYTES;
    link->state = LINK_READY;
    link->lost = false;
    link->restarted = false;
    link->refusal_told = false;
    link->backoff_s = first_backoff_s;
    atomic_store(&link->connected, true);
}

static void send_result(struct link *link, Ballast__Link__V1__CommandResult *result)
{
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RESULT;
    message.result = result;
    link_enqueue(link, &message);
}

static void refuse(struct link *link, uint64_t id, enum status status, const char *text)
{
    char name[32], copy[128];
    snprintf(name, sizeof name, "%s", status_name(status));
    snprintf(copy, sizeof copy, "%s", text);
    Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
    result.id = id;
    result.status = name;
    result.text = copy;
    result.final = true;
    send_result(link, &result);
}

/* Does the planner answer this, without the step boundary? */
static bool only_asks(const Ballast__Link__V1__Command *command)
{
    switch (command->body_case) {
    case BALLAST__LINK__V1__COMMAND__BODY_PLAN:
        return true;
    case BALLAST__LINK__V1__COMMAND__BODY_SET:
        return command->set->dry_run;
    case BALLAST__LINK__V1__COMMAND__BODY_SIMPLE:
        return strcmp(command->simple->verb, "advise") == 0;
    case BALLAST__LINK__V1__COMMAND__BODY_RESUME:
    case BALLAST__LINK__V1__COMMAND__BODY__NOT_SET:
    case _BALLAST__LINK__V1__COMMAND__BODY__CASE_IS_INT_SIZE:
    default:
        return false;
    }
}

/* Takes the command. */
static void on_command(struct link *link, Ballast__Link__V1__Command *command)
{
    const struct link_options *options = &link->options;
    uint64_t id = command->id;
    if (options->rank != 0) {
        refuse(link, id, STATUS_REFUSED, "commands go to rank 0");
    } else if (command->body_case == BALLAST__LINK__V1__COMMAND__BODY__NOT_SET) {
        refuse(link, id, STATUS_UNSUPPORTED, "this worker does not know the command");
    } else if (only_asks(command) && options->answer_plan == NULL) {
        refuse(link, id, STATUS_UNSUPPORTED, "this run has no planner");
    } else if (only_asks(command)) {
        char ok[] = "OK";
        Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
        result.id = id;
        result.status = ok;
        result.final = true;
        options->answer_plan(options->user, command, &result);
        send_result(link, &result);
    } else {
        pthread_mutex_lock(&link->lock);
        bool full = link->n_commands == LINK_MAX_COMMANDS;
        if (!full) {
            size_t at = (link->first_command + link->n_commands) % LINK_MAX_COMMANDS;
            link->commands[at] = command;
            link->n_commands++;
            pthread_cond_broadcast(&link->changed);
        }
        pthread_mutex_unlock(&link->lock);
        if (!full) {
            return;
        }
        refuse(link, id, STATUS_BUSY, "too many commands wait for the step boundary; try later");
    }
    link_free_command(command);
}

/* One message from the daemon; false when the connection is no longer usable. */
static bool on_message(struct link *link, const uint8_t *bytes, size_t n)
{
    ProtobufCMessage *base;
    enum status status =
        frame_decode(&ballast__link__v1__daemon_message__descriptor, bytes, n, &base);
    if (status == STATUS_OUT_OF_MEMORY) {
        /* It may have been a command, and who sent it waits: a broken link tells them at once. */
        lose(link, "there is no memory for its message");
        return false;
    }
    if (status != STATUS_OK) {
        lose(link, "it sent a malformed message");
        return false;
    }
    Ballast__Link__V1__DaemonMessage *message = (Ballast__Link__V1__DaemonMessage *)base;
    Ballast__Link__V1__Command *command = NULL;
    switch (message->body_case) {
    case BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_READY:
        if (link->state == LINK_GREETING) {
            on_ready(link, message->ready);
        }
        break;
    case BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_COMMAND:
        command = message->command;
        message->command = NULL;
        message->body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY__NOT_SET;
        break;
    case BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_END_ACK:
        pthread_mutex_lock(&link->lock);
        link->end_acked = link->end_wanted;
        if (link->end_acked) {
            link->state = LINK_DONE;
        }
        pthread_cond_broadcast(&link->changed);
        pthread_mutex_unlock(&link->lock);
        break;
    case BALLAST__LINK__V1__DAEMON_MESSAGE__BODY__NOT_SET: /* a newer daemon's */
    case _BALLAST__LINK__V1__DAEMON_MESSAGE__BODY__CASE_IS_INT_SIZE:
    default:
        break;
    }
    frame_free(base);
    if (command != NULL) {
        on_command(link, command);
    }
    return link->fd >= 0;
}

static bool take_frames(struct link *link)
{
    for (;;) {
        const uint8_t *bytes;
        size_t n;
        enum status status = frame_reader_next(&link->reader, &bytes, &n);
        if (status == STATUS_AGAIN) {
            return true;
        }
        if (status != STATUS_OK) {
            lose(link, "it sent a malformed frame");
            return false;
        }
        if (!on_message(link, bytes, n)) {
            return false;
        }
    }
}

static void read_all(struct link *link)
{
    uint8_t bytes[16384];
    while (link->fd >= 0) {
        ssize_t n = recv(link->fd, bytes, sizeof bytes, 0);
        if (n > 0) {
            if (frame_reader_feed(&link->reader, bytes, (size_t)n) != STATUS_OK) {
                lose(link, "it sent more than a frame may hold");
            } else if (!take_frames(link)) {
                return;
            }
        } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        } else {
            lose(link, n == 0 ? "it closed the connection" : strerrordesc_np(errno));
        }
    }
}

static bool state_due(const struct link *link, double now, double *out_at)
{
    bool moved = !link_place_same(link_place_now(link->options.telemetry), link->place_sent);
    *out_at = link->state_sent_s + (moved ? state_gap_s : state_every_s);
    return link->state_sent_s == 0 || now >= *out_at;
}

/* The next thing to write into `current`: the newest state when it is due, else what waits, at
 * last the end. */
static bool choose_next(struct link *link, double now)
{
    double at;
    if (!link->end_sent && state_due(link, now, &at)) {
        link->state_sent_s = now;
        if (link_encode_state(&link->options, link->host, link->statm_fd, &link->current,
                              &link->place_sent) == STATUS_OK) {
            return true;
        }
    }
    pthread_mutex_lock(&link->lock);
    link->current = link_queue_pop(&link->out);
    if (link->current.bytes == NULL && link->end_wanted && !link->end_acked && !link->end_sent) {
        uint8_t *copy = heap_alloc(link->end.n);
        if (copy != NULL) {
            memcpy(copy, link->end.bytes, link->end.n);
            link->current = (struct link_frame){.bytes = copy, .n = link->end.n};
            link->end_sent = true;
            link->writing_end = true;
        }
    }
    pthread_mutex_unlock(&link->lock);
    return link->current.bytes != NULL;
}

/* The frame is written as a whole. */
static void end_writing(struct link *link)
{
    if (link->writing == &link->hello) {
        link_frame_drop(&link->hello);
    } else if (link->writing == &link->current) {
        link_kept_take(&link->kept, link->current);
        link->current = (struct link_frame){0};
    } else {
        link_kept_advance(&link->kept);
    }
    link->writing = NULL;
    link->writing_end = false;
}

static void write_all(struct link *link)
{
    while (link->fd >= 0) {
        if (link->writing == NULL) {
            if (link->state != LINK_READY) {
                return;
            }
            link->writing = link_kept_next(&link->kept);
            if (link->writing == NULL) {
                if (link->current.bytes == NULL && !choose_next(link, units_monotonic_s())) {
                    return;
                }
                link->writing = &link->current;
            }
            link->written = 0;
        }
        if (link->written == 0 && fault_fires(FAULT_LINK)) {
            lose(link, "fault on purpose at a send");
            return;
        }
        ssize_t n = send(link->fd, link->writing->bytes + link->written,
                         link->writing->n - link->written, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            link->blocked = true;
            return;
        }
        if (n < 0) {
            lose(link, strerrordesc_np(errno));
            return;
        }
        link->blocked = false;
        link->written += (size_t)n;
        if (link->written == link->writing->n) {
            end_writing(link);
        }
    }
}

/* Seconds until something has to be done without being woken. */
static double next_moment(const struct link *link, double now)
{
    double at = now + state_every_s;
    switch (link->state) {
    case LINK_AWAY:
        at = link->retry_at_s;
        break;
    case LINK_GREETING:
        at = link->greeting_until_s;
        break;
    case LINK_READY:
        if (!link->blocked && !link->end_sent) {
            state_due(link, now, &at);
        }
        break;
    case LINK_DONE:
    default:
        break;
    }
    return fmin(fmax(at - now, 0), state_every_s);
}

static void wait_for_something(struct link *link)
{
    struct pollfd polled[2] = {
        {.fd = link->wake_fd, .events = POLLIN},
        {.fd = link->fd, .events = (short)(POLLIN | (link->blocked ? POLLOUT : 0))},
    };
    double wait_s = next_moment(link, units_monotonic_s());
    struct timespec timeout = {.tv_sec = (time_t)wait_s,
                               .tv_nsec = (long)((wait_s - floor(wait_s)) * 1e9)};
    if (ppoll(polled, link->fd >= 0 ? 2 : 1, &timeout, NULL) <= 0) {
        return;
    }
    if (polled[0].revents != 0) {
        uint64_t count;
        ssize_t n = read(link->wake_fd, &count, sizeof count);
        (void)n;
    }
    if (link->fd >= 0 && (polled[1].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
        read_all(link);
    }
}

/* Stopped without an acknowledged end: what is queued gets a short chance. */
static void flush(struct link *link)
{
    double until_s = units_monotonic_s() + flush_s;
    while (link->state == LINK_READY) {
        write_all(link);
        if (!link->blocked || units_monotonic_s() >= until_s) {
            return;
        }
        struct pollfd polled = {.fd = link->fd, .events = POLLOUT};
        poll(&polled, 1, 10);
    }
}

void *link_session_run(void *argument)
{
    struct link *link = argument;
    link->backoff_s = first_backoff_s;
    link->away_since_s = units_monotonic_s();
    while (!atomic_load(&link->stopping)) {
        double now = units_monotonic_s();
        if (atomic_exchange(&link->answer_dropped, false) && link->state == LINK_READY) {
            lose(link, "there was no memory for an answer"); /* so that nobody waits for it */
        }
        if (link->state == LINK_AWAY && now >= link->retry_at_s) {
            try_connect(link, now);
        }
        if (link->state == LINK_GREETING && now >= link->greeting_until_s) {
            lose(link, "it does not answer the greeting");
        }
        write_all(link);
        wait_for_something(link);
    }
    flush(link);
    if (link->fd >= 0) {
        close(link->fd);
    }
    frame_reader_fini(&link->reader);
    link_frame_drop(&link->hello);
    link_frame_drop(&link->current);
    link_kept_fini(&link->kept);
    return NULL;
}
