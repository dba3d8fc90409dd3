/* Start, loop and end of the daemon. See daemon.h. */
#include "daemon/daemon.h"

#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include "daemon/control.h"
#include "daemon/listener.h"
#include "daemon/ranks.h"
#include "daemon/state.h"
#include "daemon/story.h"
#include "daemon/uv_heap.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/convert.h"
#include "proto/event.h"
#include "proto/frame.h"
#include "proto/json.h"
#include "proto/oom_file.h"
#include "proto/text_file.h"

enum {
    TICK_MS = 100,
    CHECK_MS = 1000,
    MAX_DESCRIPTORS = 4090, /* see uv_heap.h: the table for these fits the reserve */
    OWN_DESCRIPTORS = 32,   /* libuv, logs, journal, sockets, the disk walk, a few links */
};

struct daemon {
    uv_loop_t loop;
    uv_timer_t tick, sample;
    uv_signal_t terminate, interrupt;
    struct channel_pool pool;
    struct state state;
    struct control control;
    struct ranks ranks;
    struct listener clients, workers;
    int64_t checked_ms;
    int64_t sample_due_ms; /* what the sample timer is set to; INT64_MAX: stopped */
    bool exiting;
    bool terminated; /* by a signal */
    bool settling;
    bool oom_unsaved; /* the report heard last is not in oom.pb yet */
};

static int64_t now(const struct daemon *daemon)
{
    return (int64_t)uv_now(&daemon->loop);
}

/* ---- events ---- */

/* Put an event into the journal and tell everybody; takes it over. */
static void record(struct daemon *daemon, Ballast__V1__Event *event)
{
    struct state *state = &daemon->state;
    event->sequence = state->journal.next_sequence++;
    history_add_event(&state->history, event);
    /* A failure is kept for the next tick and shows in the health. */
    if (journal_catch_up(&state->journal, &state->history) != STATUS_OK)
        log_debug("event %llu waits for the disk", (unsigned long long)event->sequence);
    control_event(&daemon->control, event);
    run_event(&state->run, event->type);
}

static void record_own(struct daemon *daemon, Ballast__V1__Event *event, const char *what)
{
    if (!event) {
        log_error("no memory to tell the event '%s'", what);
        return;
    }
    log_info("%s", event->text);
    record(daemon, event);
}

static void on_rank_event(void *owner, Ballast__V1__Event *event)
{
    struct daemon *daemon = owner;
    if (strcmp(event->type, "end") == 0 && !daemon->state.run.end_told) {
        heard_end(&daemon->state.heard, event); /* told when every rank is accounted for */
        return;
    }
    if (!event->time[0]) {
        char text[UNITS_TEXT_BYTES];
        Ballast__V1__Event stamped = *event;
        stamped.time = (char *)convert_now(text);
        Ballast__V1__Event *copy = event_copy(&stamped);
        if (copy) {
            frame_free(&event->base);
            event = copy;
        }
    }
    record(daemon, event);
}

/* A failure is said once and tried again with the next tick, like an event. */
static void save_oom(struct daemon *daemon)
{
    struct failure why;
    enum status status = oom_file_write(daemon->state.run_dir, daemon->state.heard.oom, &why);
    if (status != STATUS_OK && !daemon->oom_unsaved)
        log_error("the out-of-memory report waits for the disk: %s", why.text);
    daemon->oom_unsaved = status != STATUS_OK;
}

static void on_oom(void *owner, Ballast__V1__OomReport *report)
{
    struct daemon *daemon = owner;
    if (heard_oom(&daemon->state.heard, report))
        save_oom(daemon);
}

static void record_end(struct daemon *daemon)
{
    if (daemon->oom_unsaved)
        save_oom(daemon);
    struct state *state = &daemon->state;
    Ballast__V1__Event *own = state->heard.end;
    state->heard.end = NULL;
    if (own && !state->run.loss_told) {
        record_own(daemon, own, "end");
    } else {
        frame_free(own ? &own->base : NULL);
        record_own(daemon, story_end(state), "end");
    }
    enum status status = journal_sync(&state->journal);
    if (status != STATUS_OK)
        log_error("events.jsonl could not be made durable: %s", status_text(status));
}

/* ---- actions ---- */

static void answer_wait(struct daemon *daemon, const struct run_action *action)
{
    struct state *state = &daemon->state;
    Ballast__Control__V1__WaitReply body = BALLAST__CONTROL__V1__WAIT_REPLY__INIT;
    body.step = state->run.step;
    body.generation = state->run.generation;
    if (action->with_event)
        body.event = (Ballast__V1__Event *)history_newest_event(&state->history);
    Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_WAIT;
    reply.wait = &body;
    if (control_reply(&daemon->control, action->request, &reply) != STATUS_OK)
        control_drop(&daemon->control, action->request.client);
}

static void answer_failed(struct daemon *daemon, const struct run_action *action)
{
    struct failure why;
    fail(&why, action->status, "%s", action->text);
    Ballast__Control__V1__ErrorReply error;
    Ballast__Control__V1__Reply reply;
    command_error(&daemon->state, &why, &error, &reply);
    if (control_reply(&daemon->control, action->request, &reply) != STATUS_OK)
        control_drop(&daemon->control, action->request.client);
}

static void close_all(struct daemon *daemon)
{
    if (daemon->exiting)
        return;
    daemon->exiting = true;
    listener_close(&daemon->clients);
    listener_close(&daemon->workers);
    control_close(&daemon->control);
    ranks_close(&daemon->ranks);
    disk_stop(&daemon->state.disk);
    uv_close((uv_handle_t *)&daemon->tick, NULL);
    uv_close((uv_handle_t *)&daemon->sample, NULL);
    uv_close((uv_handle_t *)&daemon->terminate, NULL);
    uv_close((uv_handle_t *)&daemon->interrupt, NULL);
}

static void perform(struct daemon *daemon, const struct run_action *action)
{
    switch (action->kind) {
    case RUN_ACTION_WOKEN:
        answer_wait(daemon, action);
        break;
    case RUN_ACTION_FAILED:
        answer_failed(daemon, action);
        break;
    case RUN_ACTION_DAEMON_LOST:
        record_own(daemon, story_daemon_lost(&daemon->state), "daemon_lost");
        break;
    case RUN_ACTION_RANK_LOST:
        record_own(daemon, story_rank_lost(&daemon->state), "rank_lost");
        break;
    case RUN_ACTION_END:
        record_end(daemon);
        break;
    case RUN_ACTION_ACK_END:
        ranks_acknowledge_end(&daemon->ranks);
        break;
    case RUN_ACTION_CLOSE:
        listener_close(&daemon->clients);
        listener_close(&daemon->workers);
        control_end(&daemon->control);
        break;
    case RUN_ACTION_EXIT:
        close_all(daemon);
        break;
    }
}

static void on_sample(uv_timer_t *timer);

/* Set the sample timer to the next sample that is due. */
static void arm_sample(struct daemon *daemon)
{
    int64_t due_ms = daemon->control.next_due_ms;
    if (daemon->exiting || due_ms == daemon->sample_due_ms)
        return;
    daemon->sample_due_ms = due_ms;
    if (due_ms == INT64_MAX) {
        uv_timer_stop(&daemon->sample);
        return;
    }
    int64_t left_ms = due_ms - now(daemon);
    uv_timer_start(&daemon->sample, on_sample, left_ms > 0 ? (uint64_t)left_ms : 0, 0);
}

/* Carry out everything that run.c has decided; called after whatever told it something. */
static void settle(void *owner)
{
    struct daemon *daemon = owner;
    struct run_action action;
    if (daemon->settling)
        return;
    daemon->settling = true;
    while (run_next_action(&daemon->state.run, &action))
        perform(daemon, &action);
    daemon->settling = false;
    arm_sample(daemon);
}

static enum status on_send(void *owner, const Ballast__Link__V1__Command *command)
{
    struct daemon *daemon = owner;
    return ranks_send(&daemon->ranks, command);
}

static enum status send_to_rank_0(void *owner, const Ballast__Link__V1__Command *command)
{
    struct control *control = owner;
    return on_send(control->owner, command);
}

static void on_result(void *owner, const Ballast__Link__V1__CommandResult *result)
{
    struct daemon *daemon = owner;
    struct run_pending pending;
    if (run_result(&daemon->state.run, result->id, result->final, &pending))
        command_finish(&daemon->state, &daemon->control.port, &pending, result);
    else
        log_debug("rank 0 answered command %llu, which nobody waits for",
                  (unsigned long long)result->id);
}

/* ---- loop callbacks ---- */

static void on_sample(uv_timer_t *timer)
{
    struct daemon *daemon = timer->data;
    daemon->sample_due_ms = INT64_MAX;
    control_tick(&daemon->control, now(daemon));
    settle(daemon);
}

static void on_tick(uv_timer_t *timer)
{
    struct daemon *daemon = timer->data;
    struct state *state = &daemon->state;
    int64_t now_ms = now(daemon);
    run_tick(&state->run, now_ms);
    if (now_ms - daemon->checked_ms >= CHECK_MS) {
        daemon->checked_ms = now_ms;
        control_check(&daemon->control, now_ms);
        ranks_check(&daemon->ranks, now_ms);
        disk_refresh(&state->disk, &daemon->loop, now_ms);
        /* Logged when it began to fail; it shows in the health. */
        if (state->journal.broken &&
            journal_catch_up(&state->journal, &state->history) != STATUS_OK)
            log_debug("events.jsonl still cannot be written");
        if (daemon->oom_unsaved)
            save_oom(daemon);
    }
    settle(daemon);
}

static void on_signal(uv_signal_t *signal, int number)
{
    struct daemon *daemon = signal->data;
    log_info("ended by signal %d; rank 0 starts another daemon while the run goes on", number);
    daemon->terminated = true;
    close_all(daemon);
}

static void on_client(struct listener *listener, int fd, const struct ucred *peer)
{
    struct daemon *daemon = listener->owner;
    control_accept(&daemon->control, fd, peer);
}

static void on_client_refused(struct listener *listener, int fd)
{
    struct daemon *daemon = listener->owner;
    control_refuse(&daemon->control, fd);
}

static void on_worker(struct listener *listener, int fd, const struct ucred *peer)
{
    struct daemon *daemon = listener->owner;
    ranks_accept(&daemon->ranks, fd, peer);
}

static void on_worker_refused(struct listener *listener, int fd)
{
    (void)listener, (void)fd;
    log_error("no descriptor is left for a worker's link; it will try again");
}

/* ---- start and end ---- */

/* control.json tells clients that know the run folder where the socket is. */
static enum status write_control_json(const struct daemon_options *options, struct failure *why)
{
    char path[PATH_MAX], host[256] = "";
    if (gethostname(host, sizeof host - 1) != 0)
        host[0] = '\0';
    snprintf(path, sizeof path, "%s/control.json", options->run_dir);
    json_t *object = json_object();
    bool ok = object && json_object_set_new(object, "pid", json_integer(getpid())) == 0 &&
              json_object_set_new(object, "host", json_text(host)) == 0 &&
              json_object_set_new(object, "socket", json_text(options->socket_path)) == 0 &&
              json_object_set_new(object, "run_id", json_text(options->run_id)) == 0;
    char *text = ok ? json_format(object, JSON_INDENT(2)) : NULL;
    json_decref(object);
    if (!text)
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory to write %s", path);
    enum status status = text_file_replace(path, text, strlen(text), why);
    heap_free(text);
    return status;
}

/* As many descriptors as are allowed, up to what we can use. Returns the limit. */
static int raise_descriptors(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 64;
    rlim_t wanted = limit.rlim_max < MAX_DESCRIPTORS ? limit.rlim_max : MAX_DESCRIPTORS;
    struct rlimit raised = {.rlim_cur = wanted, .rlim_max = limit.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0)
        limit.rlim_cur = wanted;
    return limit.rlim_cur > MAX_DESCRIPTORS ? MAX_DESCRIPTORS : (int)limit.rlim_cur;
}

static uint32_t clients_within(int n_descriptors)
{
    int n = n_descriptors - OWN_DESCRIPTORS;
    return n > 4 ? (uint32_t)n : 4;
}

/* What the daemon before this one was told, or what happened before the run was resumed. */
static void read_oom(struct state *state, bool restarted)
{
    Ballast__V1__OomReport *report = NULL;
    struct failure why;
    enum status status = oom_file_read(state->run_dir, &report, &why);
    if (status == STATUS_OK && restarted)
        (void)heard_oom(&state->heard, report);
    else if (status == STATUS_OK)
        heard_past_oom(&state->heard, report);
    else if (status != STATUS_NOT_FOUND)
        log_warn("the last out-of-memory report is lost: %s", why.text);
}

static enum status init_state(struct daemon *daemon, const struct daemon_options *options,
                              struct failure *why)
{
    struct state *state = &daemon->state;
    state->journal.fd = -1;
    if (strlen(options->run_dir) >= sizeof state->run_dir || options->run_dir[0] != '/')
        return fail(why, STATUS_INVALID, "the run folder has to be an absolute path: '%.200s'",
                    options->run_dir);
    enum status status = socket_path_check_run_id(options->run_id, why);
    if (status != STATUS_OK)
        return status;
    snprintf(state->run_id, sizeof state->run_id, "%s", options->run_id);
    snprintf(state->run_dir, sizeof state->run_dir, "%s", options->run_dir);
    state->started_unix_ms = units_unix_ms();
    units_format_time(state->started_unix_ms, state->started);
    disk_init(&state->disk, options->run_dir);
    /* Larger than any id of an earlier daemon of this run: one command a microsecond. */
    struct run_options run = {.now_ms = now(daemon),
                              .first_command_id = (uint64_t)state->started_unix_ms * 1000,
                              .restarted = options->restarted};
    run_init(&state->run, &run);
    status = history_init(&state->history, why);
    if (status == STATUS_OK)
        status = journal_open(&state->journal, options->run_dir, &state->history, why);
    if (status == STATUS_OK)
        read_oom(state, options->restarted);
    if (status != STATUS_OK || !options->restarted || !state->journal.started[0])
        return status;
    /* The run is older than this daemon. */
    struct tm broken_down = {0};
    snprintf(state->started, sizeof state->started, "%s", state->journal.started);
    if (strptime(state->started, "%Y-%m-%dT%H:%M:%S", &broken_down))
        state->started_unix_ms = (int64_t)timegm(&broken_down) * 1000;
    return STATUS_OK;
}

static void fini_state(struct state *state)
{
    journal_close(&state->journal);
    history_fini(&state->history);
    heard_fini(&state->heard);
    run_fini(&state->run);
}

static enum status init_loop(struct daemon *daemon, int n_descriptors, struct failure *why)
{
    int code = uv_loop_init(&daemon->loop);
    if (code)
        return fail(why, uv_heap_status(code), "cannot start the event loop: %s",
                    uv_strerror(code));
    enum status status = uv_heap_reserve_descriptors(&daemon->loop, n_descriptors, why);
    if (status != STATUS_OK) {
        uv_loop_close(&daemon->loop);
        return status;
    }
    uv_update_time(&daemon->loop);
    return STATUS_OK;
}

static void init_handles(struct daemon *daemon)
{
    uv_timer_init(&daemon->loop, &daemon->tick);
    uv_timer_init(&daemon->loop, &daemon->sample);
    uv_signal_init(&daemon->loop, &daemon->terminate);
    uv_signal_init(&daemon->loop, &daemon->interrupt);
    daemon->tick.data = daemon->sample.data = daemon;
    daemon->terminate.data = daemon->interrupt.data = daemon;
    daemon->sample_due_ms = INT64_MAX;
}

static enum status start(struct daemon *daemon, const struct daemon_options *options,
                         struct failure *why)
{
    int code = uv_signal_start(&daemon->terminate, on_signal, SIGTERM);
    if (!code)
        code = uv_signal_start(&daemon->interrupt, on_signal, SIGINT);
    if (!code)
        code = uv_timer_start(&daemon->tick, on_tick, TICK_MS, TICK_MS);
    if (code)
        return fail(why, uv_heap_status(code), "cannot start the event loop: %s",
                    uv_strerror(code));
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    enum status status = listener_open(&daemon->workers, &daemon->loop, options->link_path,
                                       on_worker, on_worker_refused, daemon, why);
    if (status == STATUS_OK)
        status = listener_open(&daemon->clients, &daemon->loop, options->socket_path, on_client,
                               on_client_refused, daemon, why);
    if (status == STATUS_OK)
        status = write_control_json(options, why);
    return status;
}

/* Start, serve, and close everything that was opened, in every case. */
static enum status serve(struct daemon *daemon, const struct daemon_options *options,
                         int n_descriptors, struct failure *why)
{
    const struct ranks_port port = {
        .owner = daemon, .event = on_rank_event, .oom = on_oom, .result = on_result,
        .settle = settle};
    daemon->pool.loop = &daemon->loop;
    control_init(&daemon->control, &daemon->state, &daemon->pool, clients_within(n_descriptors),
                 send_to_rank_0, settle, daemon);
    ranks_init(&daemon->ranks, &daemon->state, &daemon->pool, &port);
    init_handles(daemon);
    enum status status = init_state(daemon, options, why);
    if (status == STATUS_OK)
        status = start(daemon, options, why);
    if (status == STATUS_OK) {
        log_info("run %s: ready, pid %d, control socket %s", options->run_id, (int)getpid(),
                 options->socket_path);
        if (options->on_ready)
            options->on_ready(options->context);
    } else {
        close_all(daemon);
    }
    uv_run(&daemon->loop, UV_RUN_DEFAULT);
    if (status == STATUS_OK && journal_sync(&daemon->state.journal) != STATUS_OK)
        log_error("events.jsonl could not be made durable");
    fini_state(&daemon->state);
    if (status == STATUS_OK && daemon->terminated)
        return fail(why, STATUS_STOPPED, "ended by a signal");
    return status;
}

enum status daemon_run(const struct daemon_options *options, struct failure *why)
{
    enum status status = uv_heap_install(why);
    if (status != STATUS_OK)
        return status;
    json_use_heap();
    int n_descriptors = raise_descriptors();
    struct daemon *daemon = heap_calloc(1, sizeof *daemon);
    if (!daemon) {
        uv_heap_uninstall();
        return fail(why, STATUS_OUT_OF_MEMORY, "out of memory for the daemon's %zu bytes",
                    sizeof *daemon);
    }
    status = init_loop(daemon, n_descriptors, why);
    if (status == STATUS_OK) {
        status = serve(daemon, options, n_descriptors, why);
        if (uv_loop_close(&daemon->loop) != 0)
            log_error("the event loop was not empty at the end");
    }
    heap_free(daemon);
    uv_heap_uninstall();
    return status;
}
