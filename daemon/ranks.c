/* Worker links. See ranks.h. */
#include "daemon/ranks.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "daemon/answer.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/convert.h"
#include "proto/version.h"

#define NO_RANK UINT32_MAX

struct link {
    struct channel channel;
    struct ranks *ranks;
    struct link *next, *previous;
    uint32_t rank; /* NO_RANK: not greeted, or replaced by a newer link */
    bool greeted;
    uint32_t uid;
    int32_t pid;
    int64_t opened_ms;
    bool acknowledged; /* its goodbye */
    bool told_odd;     /* a message that does not fit was logged */
};

static int64_t now(const struct ranks *ranks)
{
    return (int64_t)uv_now(ranks->pool->loop);
}

static struct link *find_link(struct ranks *ranks, uint32_t rank)
{
    for (struct link *link = ranks->first; link; link = link->next) {
        if (link->rank == rank && !link->channel.closing)
            return link;
    }
    return NULL;
}

/* A message that a sound worker never sends: said once a link, then only counted out. */
static void odd(struct link *link, const char *what)
{
    if (!link->told_odd)
        log_warn("rank %u (pid %d): %s; ignored", link->rank, link->pid, what);
    link->told_odd = true;
}

/* Leaves the message without its body, which now belongs to somebody else. */
static void forget_body(Ballast__Link__V1__WorkerMessage *message)
{
    message->rank = NULL; /* any member of the union */
    message->body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY__NOT_SET;
}

/* ---- greeting ---- */

static void send_ready(struct link *link, const struct failure *why)
{
    Ballast__V1__Hello hello;
    answer_hello(link->ranks->state, &hello);
    Ballast__Link__V1__LinkReady ready = BALLAST__LINK__V1__LINK_READY__INIT;
    ready.hello = &hello;
    if (why)
        ready.error = (char *)why->text;
    Ballast__Link__V1__DaemonMessage message = BALLAST__LINK__V1__DAEMON_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_READY;
    message.ready = &ready;
    if (channel_send(&link->channel, &message.base) != STATUS_OK)
        channel_close(&link->channel, "there was no memory to greet it");
    else if (why)
        channel_end(&link->channel, why->text[0] ? "its greeting was refused" : NULL);
}

static enum status check_greeting(const struct link *link,
                                  const Ballast__Link__V1__WorkerHello *hello, struct failure *why)
{
    const struct state *state = link->ranks->state;
    if (!hello->hello || strcmp(hello->hello->magic, PROTOCOL_MAGIC) != 0)
        return fail(why, STATUS_MALFORMED, "hello.magic has to be '%s'", PROTOCOL_MAGIC);
    if (hello->hello->major != PROTOCOL_MAJOR)
        return fail(why, STATUS_VERSION,
                    "this daemon (build %s) speaks protocol %d.%d, the worker %u.%u; install "
                    "both from one build", BALLAST_VERSION, PROTOCOL_MAJOR, PROTOCOL_MINOR,
                    hello->hello->major, hello->hello->minor);
    if (strcmp(hello->hello->run_id, state->run_id) != 0)
        return fail(why, STATUS_CONFLICT, "this is the daemon of run '%s', not of run '%.64s'",
                    state->run_id, hello->hello->run_id);
    return STATUS_OK;
}

/* Strategy and limits as rank 0 tells them; what cannot be understood leaves `set` refused. */
static void take_strategy(struct link *link, Ballast__V1__Setting *const *settings, size_t n)
{
    struct run *run = &link->ranks->state->run;
    struct failure why;
    struct strategy strategy = run->strategy;
    if (!run->strategy_known)
        strategy_default(&strategy, &run->limits);
    if (convert_settings_to_strategy(settings, n, &strategy, &why) != STATUS_OK)
        log_error("rank 0's strategy is not understood: %s", why.text);
    else
        run_strategy(run, &strategy);
}

static void take_rank_0(struct link *link, Ballast__Link__V1__WorkerHello *hello)
{
    struct run *run = &link->ranks->state->run;
    struct strategy_limits limits;
    struct failure why;
    if (convert_limits_from_settings(hello->limits, hello->n_limits, &limits, &why) != STATUS_OK)
        log_error("rank 0's limits are not understood: %s", why.text);
    else
        run_limits(run, &limits);
    if (run->limits_known && hello->n_strategy > 0)
        take_strategy(link, hello->strategy, hello->n_strategy);
    run_state(run, hello->step, hello->generation, hello->paused);
}

/* Takes the hello out of its message when it is kept. */
static void greet(struct link *link, Ballast__Link__V1__WorkerMessage *message)
{
    struct ranks *ranks = link->ranks;
    struct state *state = ranks->state;
    Ballast__Link__V1__WorkerHello *hello = message->hello;
    struct failure why;
    enum status status = check_greeting(link, hello, &why);
    if (status == STATUS_OK)
        status = run_link_up(&state->run, hello->rank, hello->world_size, link->pid, now(ranks),
                             &why);
    if (status != STATUS_OK) {
        log_warn("a worker's link was refused: %s", why.text);
        send_ready(link, &why);
        return;
    }
    struct link *older = find_link(ranks, hello->rank);
    if (older) {
        older->rank = NO_RANK;
        channel_close(&older->channel, "the same process linked again");
    }
    link->greeted = true;
    link->rank = hello->rank;
    ranks->n_strangers--;
    /* From here on a failure is a link that closes; the worker links again. */
    if (heard_set_world(&state->heard, hello->world_size) != STATUS_OK ||
        heard_linked(&state->heard, hello) != STATUS_OK) {
        channel_close(&link->channel, "there was no memory for it");
        return;
    }
    log_info("rank %u of %u is linked (pid %d)", hello->rank, hello->world_size, link->pid);
    if (hello->rank == 0) {
        take_rank_0(link, hello);
        heard_hello(&state->heard, hello);
        forget_body(message);
    }
    send_ready(link, NULL);
}

/* ---- what a linked rank says ---- */

static void take_rank_state(struct link *link, Ballast__Link__V1__WorkerMessage *message)
{
    struct state *state = link->ranks->state;
    Ballast__V1__RankState *rank = message->rank;
    enum phase phase = PHASE_SETUP;
    if (rank->rank != link->rank || rank->n_memory > N_TIERS * N_CATEGORIES ||
        strlen(rank->host) > 255 || strlen(rank->collective) > 64) {
        odd(link, "a rank state is another rank's or too large");
        return;
    }
    if (!convert_phase_from_wire(rank->phase, &phase))
        phase = state->run.ranks[link->rank].phase;
    run_rank_at(&state->run, link->rank, phase, rank->step, rank->heartbeat, now(link->ranks));
    heard_rank(&state->heard, link->rank, rank);
    forget_body(message);
}

static void take_step(struct link *link, Ballast__Link__V1__WorkerMessage *message)
{
    struct state *state = link->ranks->state;
    uint64_t step = message->step->step;
    const Ballast__V1__StepRecord *newest = history_newest_step(&state->history);
    /* After a reconnect rank 0 repeats its last one. */
    if (newest && step <= newest->step)
        return;
    history_add_step(&state->history, message->step);
    forget_body(message);
    run_progress(&state->run, step + 1);
}

static void take_run(struct link *link, Ballast__Link__V1__WorkerMessage *message)
{
    struct state *state = link->ranks->state;
    Ballast__Link__V1__RunState *run = message->run;
    if (run->generation < state->run.generation)
        odd(link, "the generation went back");
    if (run->n_strategy > 0)
        take_strategy(link, run->strategy, run->n_strategy);
    run_state(&state->run, run->step, run->generation, run->paused);
    heard_run(&state->heard, run);
    forget_body(message);
}

static void take_event(struct link *link, Ballast__Link__V1__WorkerMessage *message)
{
    Ballast__V1__Event *event = message->event;
    size_t length = strlen(event->type);
    if (length == 0 || length >= RUN_EVENT_TYPE_BYTES) {
        odd(link, "an event has no type or one that is too long");
        return;
    }
    forget_body(message);
    link->ranks->port.event(link->ranks->port.owner, event);
}

static void take_oom(struct link *link, Ballast__Link__V1__WorkerMessage *message)
{
    Ballast__V1__OomReport *report = message->oom;
    forget_body(message);
    link->ranks->port.oom(link->ranks->port.owner, report);
}

static void take_end(struct link *link, const Ballast__Link__V1__WorkerEnd *end)
{
    struct state *state = link->ranks->state;
    log_info("rank %u ends with exit code %u%s%s", link->rank, end->exit_code,
             end->text[0] ? ": " : "", end->text);
    if (link->rank == 0)
        snprintf(state->heard.end_text, sizeof state->heard.end_text, "%s", end->text);
    run_rank_ended(&state->run, link->rank, end->exit_code, now(link->ranks));
}

static bool only_rank_0(const Ballast__Link__V1__WorkerMessage *message)
{
    return message->body_case == BALLAST__LINK__V1__WORKER_MESSAGE__BODY_STEP ||
           message->body_case == BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RESULT ||
           message->body_case == BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RUN;
}

static void take_message(struct link *link, Ballast__Link__V1__WorkerMessage *message)
{
    struct ranks *ranks = link->ranks;
    run_heard(&ranks->state->run, link->rank, now(ranks));
    if (only_rank_0(message) && link->rank != 0) {
        odd(link, "it sent what only rank 0 may send");
        return;
    }
    switch (message->body_case) {
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RANK:
        take_rank_state(link, message);
        break;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_STEP:
        take_step(link, message);
        break;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_EVENT:
        take_event(link, message);
        break;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RESULT:
        /* An error is always the last word. */
        if (strcmp(message->result->status, status_name(STATUS_OK)) != 0)
            message->result->final = true;
        ranks->port.result(ranks->port.owner, message->result);
        break;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_OOM:
        take_oom(link, message);
        break;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RUN:
        take_run(link, message);
        break;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_END:
        take_end(link, message->end);
        break;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_HELLO:
        odd(link, "it greeted twice");
        break;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY__NOT_SET: /* of a newer worker */
    case _BALLAST__LINK__V1__WORKER_MESSAGE__BODY__CASE_IS_INT_SIZE:
    default:
        break;
    }
}

static void on_frame(struct channel *channel, const uint8_t *bytes, size_t n)
{
    struct link *link = channel->owner;
    struct ranks *ranks = link->ranks;
    ProtobufCMessage *decoded = NULL;
    enum status status =
        frame_decode(&ballast__link__v1__worker_message__descriptor, bytes, n, &decoded);
    if (status != STATUS_OK) {
        log_error("rank %u (pid %d): a message of %zu bytes was lost: %s", link->rank, link->pid,
                  n, status_text(status));
        if (!link->greeted)
            channel_close(channel, "its greeting is malformed");
        return;
    }
    Ballast__Link__V1__WorkerMessage *message = (Ballast__Link__V1__WorkerMessage *)decoded;
    if (!link->greeted) {
        if (message->body_case == BALLAST__LINK__V1__WORKER_MESSAGE__BODY_HELLO)
            greet(link, message);
        else
            channel_close(channel, "it did not greet");
    } else if (link->rank != NO_RANK) {
        if (n > RANKS_MAX_RECORD_BYTES)
            odd(link, "a message is too large to pass on");
        else
            take_message(link, message);
    }
    frame_free(decoded);
    ranks->port.settle(ranks->port.owner);
}

static void on_bad_frame(struct channel *channel, enum status status)
{
    struct link *link = channel->owner;
    log_error("rank %u (pid %d): what it sends is no frame: %s", link->rank, link->pid,
              status_text(status));
}

/* ---- connections ---- */

static void on_closed(struct channel *channel)
{
    struct link *link = channel->owner;
    struct ranks *ranks = link->ranks;
    if (channel->why_closed)
        log_info("a link of pid %d was closed: %s", link->pid, channel->why_closed);
    if (link->previous)
        link->previous->next = link->next;
    else
        ranks->first = link->next;
    if (link->next)
        link->next->previous = link->previous;
    if (!link->greeted)
        ranks->n_strangers--;
    if (link->rank != NO_RANK && !ranks->closing)
        run_link_closed(&ranks->state->run, link->rank, now(ranks));
    heap_free(link);
    if (!ranks->closing)
        ranks->port.settle(ranks->port.owner);
}

static const struct channel_callbacks callbacks = {on_frame, on_bad_frame, on_closed};

void ranks_init(struct ranks *ranks, struct state *state, struct channel_pool *pool,
                const struct ranks_port *port)
{
    *ranks = (struct ranks){.state = state, .pool = pool, .port = *port};
}

void ranks_accept(struct ranks *ranks, int fd, const struct ucred *peer)
{
    if (peer->uid != geteuid() || ranks->n_strangers >= RANKS_MAX_STRANGERS || ranks->closing) {
        log_warn("a link of uid %u, pid %d was refused", (unsigned)peer->uid, (int)peer->pid);
        close(fd);
        return;
    }
    struct link *link = heap_calloc(1, sizeof *link);
    if (!link) {
        log_error("no memory for the link of pid %d", (int)peer->pid);
        close(fd);
        return;
    }
    link->ranks = ranks;
    link->rank = NO_RANK;
    link->uid = peer->uid;
    link->pid = peer->pid;
    link->opened_ms = now(ranks);
    bool will_close = false;
    enum status status =
        channel_open(&link->channel, ranks->pool, fd, &callbacks, link, &will_close);
    if (status != STATUS_OK && !will_close) {
        heap_free(link);
        return;
    }
    /* A greeting with strategy and limits is larger than a client's; the uid was checked. */
    link->channel.reader.max_bytes = FRAME_MAX_BYTES;
    link->next = ranks->first;
    if (ranks->first)
        ranks->first->previous = link;
    ranks->first = link;
    ranks->n_strangers++;
}

enum status ranks_send(struct ranks *ranks, const Ballast__Link__V1__Command *command)
{
    struct link *link = find_link(ranks, 0);
    if (!link)
        return STATUS_LINK_LOST;
    Ballast__Link__V1__DaemonMessage message = BALLAST__LINK__V1__DAEMON_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_COMMAND;
    message.command = (Ballast__Link__V1__Command *)command;
    return channel_send(&link->channel, &message.base);
}

void ranks_acknowledge_end(struct ranks *ranks)
{
    for (struct link *link = ranks->first; link; link = link->next) {
        if (link->rank == NO_RANK || link->acknowledged ||
            !ranks->state->run.ranks[link->rank].ended)
            continue;
        Ballast__Link__V1__EndAck ack = BALLAST__LINK__V1__END_ACK__INIT;
        ack.rank = link->rank;
        Ballast__Link__V1__DaemonMessage message = BALLAST__LINK__V1__DAEMON_MESSAGE__INIT;
        message.body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_END_ACK;
        message.end_ack = &ack;
        /* A worker waits 2 s for it at most, so a failure delays its end and no more. */
        link->acknowledged = channel_send(&link->channel, &message.base) == STATUS_OK;
    }
}

void ranks_check(struct ranks *ranks, int64_t now_ms)
{
    for (struct link *link = ranks->first; link; link = link->next) {
        if (!link->greeted && now_ms - link->opened_ms >= RANKS_HELLO_MS)
            channel_close(&link->channel, "it did not greet within 10 s");
    }
}

void ranks_close(struct ranks *ranks)
{
    ranks->closing = true;
    for (struct link *link = ranks->first; link; link = link->next)
        channel_close(&link->channel, NULL);
}
