/* Finding, connecting, asking. Main thread; blocks until its deadlines. */
#include "client/session.h"

#include <math.h>
#include <time.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"

enum { RETRY_MS = 100 };

void replies_fini(struct replies *replies)
{
    for (size_t i = 0; i < replies->n; i++)
        ballast_reply_free(replies->items[i]);
    heap_free(replies->items);
    *replies = (struct replies){0};
}

void session_init(struct session *session, const struct target *target)
{
    *session = (struct session){.target = *target};
}

void session_fini(struct session *session)
{
    ballast_client_close(session->client);
    session->client = NULL;
}

/* What a failure of this side or of the connection means for the exit code. */
static enum exit_code code_of_connection(enum status status)
{
    if (status == STATUS_OK)
        return EXIT_CODE_OK;
    if (status == STATUS_VERSION || status == STATUS_PERMISSION)
        return EXIT_CODE_VERSION;
    if (status == STATUS_DEADLINE)
        return EXIT_CODE_TIMEOUT;
    if (status == STATUS_INVALID)
        return EXIT_CODE_USAGE;
    if (status == STATUS_OUT_OF_MEMORY)
        return EXIT_CODE_FAILED;
    return EXIT_CODE_CONNECT;
}

/* What the daemon's own refusal means. */
static enum exit_code code_of_refusal(enum status status)
{
    if (status == STATUS_VERSION || status == STATUS_PERMISSION)
        return EXIT_CODE_VERSION;
    if (status == STATUS_DEADLINE)
        return EXIT_CODE_TIMEOUT;
    return EXIT_CODE_FAILED;
}

enum exit_code session_open(struct session *session, double deadline_s)
{
    session_fini(session);
    char path[DISCOVER_PATH_BYTES];
    enum status status = discover_socket(&session->target, path, &session->why);
    if (status == STATUS_OK)
        status = ballast_client_open(path, deadline_s, &session->client, &session->why);
    return code_of_connection(status);
}

static void sleep_ms(long ms)
{
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    while (nanosleep(&left, &left) != 0)
        continue;
}

enum exit_code session_open_patiently(struct session *session, double until_s, double deadline_s)
{
    for (;;) {
        enum exit_code code = session_open(session, deadline_s);
        bool may_come =
            session->why.status == STATUS_NOT_FOUND || session->why.status == STATUS_LINK_LOST;
        if (code != EXIT_CODE_CONNECT || !may_come)
            return code;
        double left_ms = (until_s - units_monotonic_s()) * 1e3;
        if (left_ms <= 0.0) {
            /* The cause stays in the text: it says what was missing. */
            session->why.status = STATUS_DEADLINE;
            fail_within(&session->why, "gave up waiting");
            return EXIT_CODE_TIMEOUT;
        }
        sleep_ms(left_ms < RETRY_MS ? (long)left_ms + 1 : RETRY_MS);
    }
}

enum exit_code session_send(struct session *session, Ballast__Control__V1__Request *request,
                            double deadline_s)
{
    return code_of_connection(
        ballast_client_send(session->client, request, deadline_s, &session->why));
}

enum exit_code session_next(struct session *session, uint64_t id, double deadline_s,
                            Ballast__Control__V1__Reply **out_reply)
{
    Ballast__Control__V1__Reply *reply = NULL;
    enum status status =
        ballast_client_receive_for(session->client, id, deadline_s, &reply, &session->why);
    if (status != STATUS_OK)
        return code_of_connection(status);
    if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY_ERROR) {
        const Ballast__Control__V1__ErrorReply *error = reply->error;
        status = status_from_name(error->status);
        if (status == STATUS_OK)
            status = STATUS_REFUSED;
        fail(&session->why, status, "%s", *error->text ? error->text : status_text(status));
        ballast_reply_free(reply);
        return code_of_refusal(status);
    }
    *out_reply = reply;
    return EXIT_CODE_OK;
}

static bool replies_push(struct replies *replies, Ballast__Control__V1__Reply *reply)
{
    Ballast__Control__V1__Reply **items =
        heap_realloc(replies->items, (replies->n + 1) * sizeof *items);
    if (!items)
        return false;
    replies->items = items;
    replies->items[replies->n++] = reply;
    return true;
}

enum exit_code session_ask(struct session *session, Ballast__Control__V1__Request *request,
                           double deadline_s, struct replies *out_replies)
{
    enum exit_code code = session_send(session, request, deadline_s);
    if (code != EXIT_CODE_OK)
        return code;
    struct replies replies = {0};
    for (bool more = true; more;) {
        Ballast__Control__V1__Reply *reply = NULL;
        code = session_next(session, request->id, deadline_s, &reply);
        if (code != EXIT_CODE_OK)
            goto undo_replies;
        more = reply->more;
        if (!replies_push(&replies, reply)) {
            ballast_reply_free(reply);
            fail(&session->why, STATUS_OUT_OF_MEMORY, "out of memory while collecting replies");
            code = EXIT_CODE_FAILED;
            goto undo_replies;
        }
    }
    *out_replies = replies;
    return EXIT_CODE_OK;

undo_replies:
    replies_fini(&replies);
    return code;
}
