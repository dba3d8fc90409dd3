/* The link's face to the main thread: start, send, take, end, stop.
 *
 * Owns struct link, its queues and its thread. Every call here is the main thread's; what the
 * link thread does is in link_session.c. */
#include "worker/link.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "worker/link_session.h"

enum { END_WAIT_MS = 2000 };

/* Signals are the main thread's: the thread starts with all of them blocked. */
static int start_thread(struct link *link)
{
    sigset_t all, former;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    int error = pthread_create(&link->thread, NULL, link_session_run, link);
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    return error;
}

static int init_lock(struct link *link)
{
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (error != 0) {
        return error;
    }
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    error = pthread_cond_init(&link->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (error != 0) {
        return error;
    }
    error = pthread_mutex_init(&link->lock, NULL);
    if (error != 0) {
        pthread_cond_destroy(&link->changed);
    }
    return error;
}

enum status link_start(const struct link_options *options, struct link **out_link,
                       struct failure *why)
{
    size_t longest = sizeof((struct sockaddr_un *)0)->sun_path - 1;
    if (strlen(options->path) > longest) {
        return fail(why, STATUS_TOO_LARGE,
                    "link socket %s: the path has %zu bytes, at most %zu fit", options->path,
                    strlen(options->path), longest);
    }
    struct link *link = heap_calloc(1, sizeof *link);
    if (link == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the link to the daemon");
    }
    enum status status;
    link->options = *options;
    link->fd = -1;
    link->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (link->wake_fd < 0) {
        status = fail(why, status_from_errno(errno), "link: eventfd: %s", strerrordesc_np(errno));
        goto undo_link;
    }
    if (gethostname(link->host, sizeof link->host - 1) != 0) {
        link->host[0] = '\0';
    }
    link->statm_fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    int error = init_lock(link);
    if (error != 0) {
        status = fail(why, status_from_errno(error), "link: lock: %s", strerrordesc_np(error));
        goto undo_files;
    }
    options->telemetry->wake_fd = link->wake_fd;
    error = start_thread(link);
    if (error != 0) {
        status = fail(why, status_from_errno(error), "link: no thread: %s", strerrordesc_np(error));
        goto undo_lock;
    }
    *out_link = link;
    return STATUS_OK;

undo_lock:
    options->telemetry->wake_fd = -1;
    pthread_mutex_destroy(&link->lock);
    pthread_cond_destroy(&link->changed);
undo_files:
    if (link->statm_fd >= 0) {
        close(link->statm_fd);
    }
    close(link->wake_fd);
undo_link:
    heap_free(link);
    return status;
}

void link_wake(struct link *link)
{
    /* Full means a wake-up is waiting already. */
    uint64_t one = 1;
    ssize_t written = write(link->wake_fd, &one, sizeof one);
    (void)written;
}

void link_enqueue(struct link *link, const Ballast__Link__V1__WorkerMessage *message)
{
    struct link_frame frame;
    enum status status = link_encode(message, &frame);
    if (status != STATUS_OK) {
        log_warn("link: a message was dropped: %s", status_text(status));
        if (message->body_case == BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RESULT) {
            atomic_store(&link->answer_dropped, true);
        }
        return;
    }
    pthread_mutex_lock(&link->lock);
    uint64_t before = link->out.n_dropped_important;
    link_queue_push(&link->out, frame);
    bool dropped = link->out.n_dropped_important > before;
    pthread_mutex_unlock(&link->lock);
    if (dropped) {
        log_warn("link: an event was dropped: %d wait for a daemon already", LINK_QUEUE_MAX_FRAMES);
    }
}

void link_send(struct link *link, const Ballast__Link__V1__WorkerMessage *message)
{
    if (link != NULL) {
        link_enqueue(link, message);
        link_wake(link);
    }
}

/* With the lock held. */
static Ballast__Link__V1__Command *take_locked(struct link *link)
{
    if (link->n_commands == 0) {
        return NULL;
    }
    Ballast__Link__V1__Command *command = link->commands[link->first_command];
    link->first_command = (link->first_command + 1) % LINK_MAX_COMMANDS;
    link->n_commands--;
    return command;
}

Ballast__Link__V1__Command *link_take(struct link *link)
{
    return link_wait(link, 0);
}

static struct timespec deadline_in(int timeout_ms)
{
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    return deadline;
}

Ballast__Link__V1__Command *link_wait(struct link *link, int timeout_ms)
{
    if (link == NULL) {
        return NULL;
    }
    struct timespec deadline = deadline_in(timeout_ms);
    pthread_mutex_lock(&link->lock);
    Ballast__Link__V1__Command *command = take_locked(link);
    while (command == NULL && timeout_ms > 0 &&
           pthread_cond_timedwait(&link->changed, &link->lock, &deadline) == 0) {
        command = take_locked(link);
    }
    pthread_mutex_unlock(&link->lock);
    return command;
}

void link_free_command(Ballast__Link__V1__Command *command)
{
    if (command != NULL) {
        frame_free(&command->base);
    }
}

bool link_connected(const struct link *link)
{
    return link != NULL && atomic_load(&link->connected);
}

void link_end(struct link *link, uint32_t exit_code, const char *text)
{
    if (link == NULL) {
        return;
    }
    char copy[FAILURE_TEXT_BYTES];
    size_t n = strnlen(text, sizeof copy - 1);
    memcpy(copy, text, n);
    copy[n] = '\0';
    Ballast__Link__V1__WorkerEnd end = BALLAST__LINK__V1__WORKER_END__INIT;
    end.exit_code = exit_code;
    end.text = copy;
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_END;
    message.end = &end;
    struct link_frame frame;
    enum status status = link_encode(&message, &frame);
    if (status != STATUS_OK) {
        log_warn("link: the daemon is not told the end: %s", status_text(status));
        return;
    }
    struct timespec deadline = deadline_in(END_WAIT_MS);
    pthread_mutex_lock(&link->lock);
    if (link->end_wanted) { /* said already */
        heap_free(frame.bytes);
    } else {
        link->end = frame;
        link->end_wanted = true;
    }
    link_wake(link);
    int error = 0;
    while (!link->end_acked && error == 0) {
        error = pthread_cond_timedwait(&link->changed, &link->lock, &deadline);
    }
    bool acked = link->end_acked;
    pthread_mutex_unlock(&link->lock);
    if (!acked) {
        log_warn("link: the daemon did not acknowledge the end within %d s", END_WAIT_MS / 1000);
    }
}

void link_stop(struct link *link)
{
    if (link == NULL) {
        return;
    }
    atomic_store(&link->stopping, true);
    link_wake(link);
    pthread_join(link->thread, NULL);
    link->options.telemetry->wake_fd = -1;
    for (Ballast__Link__V1__Command *command; (command = take_locked(link)) != NULL;) {
        link_free_command(command);
    }
    link_queue_fini(&link->out);
    heap_free(link->end.bytes);
    pthread_mutex_destroy(&link->lock);
    pthread_cond_destroy(&link->changed);
    if (link->statm_fd >= 0) {
        close(link->statm_fd);
    }
    close(link->wake_fd);
    heap_free(link);
}
