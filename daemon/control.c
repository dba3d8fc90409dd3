/* Client connections and their open requests. See control.h. */
#include "daemon/control.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "daemon/answer.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/version.h"

enum open_kind { OPEN_WAITING, OPEN_WATCH, OPEN_FOLLOW };

struct open_request {
    uint64_t id;
    enum open_kind kind;
    uint32_t interval_ms;    /* watch */
    int64_t due_ms;          /* watch: the next sample */
    uint64_t after_sequence; /* follow: the last event sent */
};

struct client {
    struct channel channel;
    struct control *control;
    uint64_t id; /* serial * CONTROL_MAX_CLIENTS + slot; never 0 */
    uint32_t uid;
    int32_t pid;
    int64_t opened_ms;
    bool greeted;
    size_t n_open;
    struct open_request open[CONTROL_MAX_OPEN];
};

static int64_t now(const struct control *control)
{
    return (int64_t)uv_now(control->pool->loop);
}

bool control_may_operate(uint32_t uid, uint32_t own_uid)
{
    return uid == own_uid || uid == 0;
}

static struct client *find_client(struct control *control, uint64_t id)
{
    struct client *client = control->clients[id % CONTROL_MAX_CLIENTS];
    return client && client->id == id ? client : NULL;
}

static struct open_request *find_open(struct client *client, uint64_t id)
{
    for (size_t i = 0; i < client->n_open; i++) {
        if (client->open[i].id == id)
            return &client->open[i];
    }
    return NULL;
}

static void remove_open(struct client *client, uint64_t id)
{
    struct open_request *open = find_open(client, id);
    if (open)
        *open = client->open[--client->n_open];
}

/* ---- sending ---- */

static enum status send_reply(struct client *client, uint64_t id,
                              Ballast__Control__V1__Reply *reply)
{
    reply->id = id;
    return channel_send(&client->channel, &reply->base);
}

static enum status send_error(struct client *client, uint64_t id, const struct failure *why)
{
    Ballast__Control__V1__ErrorReply error;
    Ballast__Control__V1__Reply reply;
    command_error(client->control->state, why, &error, &reply);
    enum status status = send_reply(client, id, &reply);
    if (status != STATUS_OK) /* an answer that cannot be given must not look like silence */
        channel_close(&client->channel, "there was no memory to answer it");
    return status;
}

/* An error about the connection itself (id 0), then goodbye. */
static void send_last_words(struct client *client, const struct failure *why)
{
    if (send_error(client, 0, why) == STATUS_OK)
        channel_end(&client->channel, "refused");
}

static enum status send_done(struct client *client, uint64_t id)
{
    Ballast__Control__V1__DoneReply done = BALLAST__CONTROL__V1__DONE_REPLY__INIT;
    Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_DONE;
    reply.done = &done;
    enum status status = send_reply(client, id, &reply);
    if (status != STATUS_OK)
        channel_close(&client->channel, "there was no memory to answer it");
    return status;
}

enum status control_reply(struct control *control, struct run_request to,
                          Ballast__Control__V1__Reply *reply)
{
    struct client *client = find_client(control, to.client);
    if (!client || client->channel.closing)
        return STATUS_LINK_LOST;
    enum status status = send_reply(client, to.id, reply);
    if (status == STATUS_OK && !reply->more)
        remove_open(client, to.id);
    return status;
}

void control_drop(struct control *control, uint64_t id)
{
    struct client *client = find_client(control, id);
    if (client)
        channel_close(&client->channel, "it could not be answered");
}

static enum status port_reply(void *owner, struct run_request to,
                              Ballast__Control__V1__Reply *reply)
{
    return control_reply(owner, to, reply);
}

/* ---- samples and events ---- */

/* One sample, in parts when there are many ranks: the first carries the status. What cannot be
 * sent is counted as dropped. */
static enum status send_sample(struct client *client, uint64_t id, int64_t now_ms)
{
    struct state *state = client->control->state;
    struct answer_status answer;
    answer_status(state, now_ms, true, &answer);
    Ballast__Control__V1__WatchReply body = BALLAST__CONTROL__V1__WATCH_REPLY__INIT;
    body.status = &answer.message;
    body.dropped = client->channel.dropped;
    client->channel.dropped = 0;
    uint64_t lost = body.dropped + 1; /* should this sample be dropped in its turn */
    uint32_t cursor = 0;
    do {
        Ballast__V1__RankState *ranks[ANSWER_RANKS_A_PART];
        body.n_ranks = answer_ranks(state, now_ms, &cursor, ranks);
        body.ranks = ranks;
        Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
        reply.id = id;
        reply.more = true;
        reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_WATCH;
        reply.watch = &body;
        enum status status = channel_send_sample(&client->channel, &reply.base, lost);
        if (status != STATUS_OK)
            return status;
        body.status = NULL;
        body.dropped = 0;
        lost = 0;
    } while (answer_more_ranks(state, cursor));
    return STATUS_OK;
}

void control_tick(struct control *control, int64_t now_ms)
{
    int64_t next_ms = INT64_MAX;
    for (size_t slot = 0; slot < CONTROL_MAX_CLIENTS; slot++) {
        struct client *client = control->clients[slot];
        for (size_t i = 0; client && i < client->n_open && !client->channel.closing; i++) {
            struct open_request *open = &client->open[i];
            if (open->kind != OPEN_WATCH)
                continue;
            if (open->due_ms <= now_ms) {
                open->due_ms += open->interval_ms;
                if (open->due_ms <= now_ms) /* fell behind: no burst to catch up */
                    open->due_ms = now_ms + open->interval_ms;
                (void)send_sample(client, open->id, now_ms); /* the next one says so */
            }
            if (open->due_ms < next_ms)
                next_ms = open->due_ms;
        }
    }
    control->next_due_ms = next_ms;
}

void control_event(struct control *control, const Ballast__V1__Event *event)
{
    for (size_t slot = 0; slot < CONTROL_MAX_CLIENTS; slot++) {
        struct client *client = control->clients[slot];
        for (size_t i = 0; client && i < client->n_open && !client->channel.closing; i++) {
            struct open_request *open = &client->open[i];
            if (open->kind != OPEN_FOLLOW || event->sequence <= open->after_sequence)
                continue;
            Ballast__V1__Event *events[] = {(Ballast__V1__Event *)event};
            Ballast__Control__V1__EventsReply body = BALLAST__CONTROL__V1__EVENTS_REPLY__INIT;
            body.n_events = 1;
            body.events = events;
            Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
            reply.more = true;
            reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_EVENTS;
            reply.events = &body;
            open->after_sequence = event->sequence;
            /* A gap in events would be a lie; better no connection. */
            if (send_reply(client, open->id, &reply) != STATUS_OK)
                channel_close(&client->channel, "an event could not be sent to it");
        }
    }
}

/* ---- requests ---- */

static bool check_greeting(struct client *client, const Ballast__Control__V1__Request *request,
                           struct failure *why)
{
    const struct state *state = client->control->state;
    if (request->body_case != BALLAST__CONTROL__V1__REQUEST__BODY_HELLO) {
        fail(why, STATUS_MALFORMED, "the first message has to be a greeting (hello), not '%s'",
             command_name(request));
        return false;
    }
    const Ballast__V1__Hello *hello = request->hello;
    if (strcmp(hello->magic, PROTOCOL_MAGIC) != 0) {
        fail(why, STATUS_MALFORMED, "hello.magic has to be '%s'", PROTOCOL_MAGIC);
        return false;
    }
    if (hello->major != PROTOCOL_MAJOR) {
        fail(why, STATUS_VERSION, "this daemon (build %s) speaks protocol %d.%d, the client %u.%u",
             BALLAST_VERSION, PROTOCOL_MAJOR, PROTOCOL_MINOR, hello->major, hello->minor);
        return false;
    }
    if (hello->run_id[0] && strcmp(hello->run_id, state->run_id) != 0) {
        fail(why, STATUS_NOT_FOUND, "this is the daemon of run '%s', not of run '%.64s'",
             state->run_id, hello->run_id);
        return false;
    }
    return true;
}

static void greet(struct client *client, const Ballast__Control__V1__Request *request)
{
    struct failure why;
    if (!check_greeting(client, request, &why)) {
        if (send_error(client, request->id, &why) == STATUS_OK)
            channel_end(&client->channel, "its greeting was refused");
        return;
    }
    Ballast__V1__Hello hello;
    answer_hello(client->control->state, &hello);
    Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_HELLO;
    reply.hello = &hello;
    if (send_reply(client, request->id, &reply) != STATUS_OK) {
        channel_close(&client->channel, "there was no memory to greet it");
        return;
    }
    client->greeted = true;
    client->channel.reader.max_bytes = FRAME_MAX_BYTES;
}

/* End an open request of the client's own. */
static enum status cancel(struct client *client, uint64_t id, struct failure *why)
{
    struct open_request *open = find_open(client, id);
    struct run_request request = {.client = client->id, .id = id};
    struct run *run = &client->control->state->run;
    if (!open)
        return fail(why, STATUS_NOT_FOUND, "no request %llu of this connection is open",
                    (unsigned long long)id);
    if (run_is_pending(run, request))
        return fail(why, STATUS_REFUSED,
                    "request %llu is at rank 0 already and cannot be called back",
                    (unsigned long long)id);
    run_cancel_wait(run, request);
    remove_open(client, id);
    return send_done(client, id);
}

static void apply_result(struct client *client, uint64_t id, const struct command_result *result,
                         int64_t now_ms)
{
    struct open_request *open = find_open(client, id);
    struct failure why;
    enum status status = STATUS_OK;
    switch (result->outcome) {
    case COMMAND_ANSWERED:
        break; /* removed with its last reply */
    case COMMAND_OPEN:
        break;
    case COMMAND_WATCH:
        open->kind = OPEN_WATCH;
        open->interval_ms = result->interval_ms;
        open->due_ms = now_ms + result->interval_ms;
        if (open->due_ms < client->control->next_due_ms)
            client->control->next_due_ms = open->due_ms;
        /* Later samples may be dropped; the first is the answer. */
        status = send_sample(client, id, now_ms);
        if (status != STATUS_OK) {
            remove_open(client, id);
            fail(&why, status, "the first sample could not be sent: %s", status_text(status));
            (void)send_error(client, id, &why);
        }
        break;
    case COMMAND_FOLLOW:
        open->kind = OPEN_FOLLOW;
        open->after_sequence = result->after_sequence;
        break;
    case COMMAND_CANCEL:
        remove_open(client, id);
        if (result->cancel_id == id || cancel(client, result->cancel_id, &why) != STATUS_OK) {
            if (result->cancel_id == id)
                fail(&why, STATUS_INVALID, "a cancel cannot cancel itself");
            (void)send_error(client, id, &why);
        } else {
            (void)send_done(client, id);
        }
        break;
    }
}

static void handle_request(struct client *client, const Ballast__Control__V1__Request *request)
{
    struct control *control = client->control;
    struct failure why;
    enum status status = STATUS_OK;
    if (request->id == 0)
        status = fail(&why, STATUS_INVALID, "a request's id has to be above 0");
    else if (find_open(client, request->id))
        status = fail(&why, STATUS_INVALID, "request id %llu is still in use by an open request",
                      (unsigned long long)request->id);
    else if (client->n_open == CONTROL_MAX_OPEN)
        status = fail(&why, STATUS_BUSY, "%d requests of this connection are open already",
                      CONTROL_MAX_OPEN);
    if (status != STATUS_OK) {
        (void)send_error(client, request->id, &why);
        return;
    }
    client->open[client->n_open++] = (struct open_request){.id = request->id};
    struct command_caller caller = {.request = {.client = client->id, .id = request->id},
                                    .uid = client->uid,
                                    .pid = client->pid};
    struct command_result result;
    int64_t now_ms = now(control);
    status = command_handle(control->state, &control->port, &caller, request, now_ms, &result,
                            &why);
    if (status != STATUS_OK) {
        remove_open(client, request->id);
        (void)send_error(client, request->id, &why);
    } else {
        apply_result(client, request->id, &result, now_ms);
    }
}

static void on_frame(struct channel *channel, const uint8_t *bytes, size_t n)
{
    struct client *client = channel->owner;
    struct control *control = client->control;
    ProtobufCMessage *message = NULL;
    enum status status =
        frame_decode(&ballast__control__v1__request__descriptor, bytes, n, &message);
    if (status != STATUS_OK) {
        struct failure why;
        fail(&why, status, "a frame of %zu bytes is not a request: %s", n, status_text(status));
        send_last_words(client, &why);
        return;
    }
    const Ballast__Control__V1__Request *request = (const Ballast__Control__V1__Request *)message;
    if (client->greeted)
        handle_request(client, request);
    else
        greet(client, request);
    frame_free(message);
    control->settle(control->owner);
}

static void on_bad_frame(struct channel *channel, enum status status)
{
    struct client *client = channel->owner;
    struct failure why;
    fail(&why, status, status == STATUS_TOO_LARGE
                           ? "a frame is larger than %d bytes, the limit %s the greeting"
                           : "what came is not a frame of at most %d bytes (%s the greeting)",
         client->greeted ? FRAME_MAX_BYTES : FRAME_MAX_BYTES_BEFORE_HELLO,
         client->greeted ? "after" : "before");
    (void)send_error(client, 0, &why);
}

/* ---- connections ---- */

static void on_closed(struct channel *channel)
{
    struct client *client = channel->owner;
    struct control *control = client->control;
    if (channel->why_closed)
        log_info("client pid %d was dropped: %s", client->pid, channel->why_closed);
    run_forget_client(&control->state->run, client->id);
    control->clients[client->id % CONTROL_MAX_CLIENTS] = NULL;
    control->n_clients--;
    heap_free(client);
}

static const struct channel_callbacks callbacks = {on_frame, on_bad_frame, on_closed};

void control_init(struct control *control, struct state *state, struct channel_pool *pool,
                  uint32_t max_clients,
                  enum status (*send)(void *owner, const Ballast__Link__V1__Command *command),
                  void (*settle)(void *owner), void *owner)
{
    memset(control, 0, sizeof *control);
    control->state = state;
    control->pool = pool;
    control->max_clients = max_clients < CONTROL_MAX_CLIENTS ? max_clients : CONTROL_MAX_CLIENTS;
    control->port = (struct command_port){.owner = control, .reply = port_reply, .send = send};
    control->settle = settle;
    control->next_due_ms = INT64_MAX;
    control->owner = owner;
}

/* A typed error on a connection that never becomes a client; as much as the socket takes. */
static void refuse(struct control *control, int fd, const struct failure *why)
{
    Ballast__Control__V1__ErrorReply error;
    Ballast__Control__V1__Reply reply;
    command_error(control->state, why, &error, &reply);
    uint8_t *bytes = NULL;
    size_t n = 0;
    if (frame_encode(&reply.base, &bytes, &n) != STATUS_OK)
        return;
    if (send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        log_debug("a refusal did not reach its client");
    heap_free(bytes);
}

void control_refuse(struct control *control, int fd)
{
    struct failure why;
    fail(&why, STATUS_BUSY, "the daemon has no descriptors left, with %u clients connected; try "
         "again when some are gone", control->n_clients);
    refuse(control, fd, &why);
}

static bool admit(struct control *control, const struct ucred *peer, struct failure *why)
{
    if (!control_may_operate(peer->uid, geteuid())) {
        fail(why, STATUS_PERMISSION, "uid %u may not operate this run, which belongs to uid %u",
             (unsigned)peer->uid, (unsigned)geteuid());
        return false;
    }
    if (control->closing) {
        fail(why, STATUS_STOPPED, "the run has ended");
        return false;
    }
    if (control->n_clients >= control->max_clients) {
        fail(why, STATUS_BUSY, "%u clients are connected, the most this daemon serves",
             control->n_clients);
        return false;
    }
    return true;
}

void control_accept(struct control *control, int fd, const struct ucred *peer)
{
    struct failure why;
    if (!admit(control, peer, &why)) {
        refuse(control, fd, &why);
        close(fd);
        return;
    }
    size_t slot = 0;
    while (control->clients[slot])
        slot++;
    struct client *client = heap_calloc(1, sizeof *client);
    if (!client) {
        fail(&why, STATUS_OUT_OF_MEMORY, "the daemon has no memory for another client");
        refuse(control, fd, &why);
        close(fd);
        return;
    }
    client->control = control;
    client->id = (++control->n_served) * CONTROL_MAX_CLIENTS + slot;
    client->uid = peer->uid;
    client->pid = peer->pid;
    client->opened_ms = now(control);
    bool will_close = false;
    enum status status =
        channel_open(&client->channel, control->pool, fd, &callbacks, client, &will_close);
    if (status != STATUS_OK && !will_close) {
        heap_free(client);
        return;
    }
    control->clients[slot] = client;
    control->n_clients++;
}

void control_check(struct control *control, int64_t now_ms)
{
    for (size_t slot = 0; slot < CONTROL_MAX_CLIENTS; slot++) {
        struct client *client = control->clients[slot];
        if (!client || client->channel.closing)
            continue;
        channel_check(&client->channel, now_ms);
        if (client->greeted || client->channel.closing || client->channel.ending ||
            now_ms - client->opened_ms < CONTROL_HELLO_MS)
            continue;
        struct failure why;
        fail(&why, STATUS_DEADLINE, "no greeting came within %d s", CONTROL_HELLO_MS / 1000);
        send_last_words(client, &why);
    }
}

void control_end(struct control *control)
{
    control->closing = true;
    for (size_t slot = 0; slot < CONTROL_MAX_CLIENTS; slot++) {
        struct client *client = control->clients[slot];
        if (!client || client->channel.closing)
            continue;
        while (client->n_open > 0 && !client->channel.closing) {
            struct open_request open = client->open[client->n_open - 1];
            client->n_open--;
            if (open.kind != OPEN_WAITING)
                (void)send_done(client, open.id);
        }
    }
}

void control_close(struct control *control)
{
    control->closing = true;
    for (size_t slot = 0; slot < CONTROL_MAX_CLIENTS; slot++) {
        if (control->clients[slot])
            channel_close(&control->clients[slot]->channel, NULL);
    }
}
