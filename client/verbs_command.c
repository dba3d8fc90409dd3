/* Verbs that change the run: set, undo, save, eval, pause, resume, stop. Each sends one request
 * and takes an acceptance, then the outcome under the same id. Main thread. */
#include <inttypes.h>
#include <string.h>
#include "client/output.h"
#include "client/render.h"
#include "client/verbs_run.h"
#include "proto/base/units.h"

typedef Ballast__Control__V1__Request request_message;
typedef Ballast__Control__V1__Reply reply_message;
typedef Ballast__Control__V1__CommandReply command_reply;

enum status check_changes(struct arguments *arguments, const char *for_text, struct failure *why)
{
    (void)for_text;
    for (size_t i = 0; i < arguments->n_operands; i++) {
        const char *operand = arguments->operands[i];
        const char *equals = strchr(operand, '=');
        if (!equals || equals == operand || !equals[1])
            return fail(why, STATUS_INVALID,
                        "'%s' is not KEY=VALUE; for example "
                        "checkpointing=block:1",
                        operand);
        if (equals - operand >= ARGUMENTS_KEY_BYTES)
            return fail(why, STATUS_INVALID, "the key of '%s' is longer than any key", operand);
    }
    return STATUS_OK;
}

enum status check_resume(struct arguments *arguments, const char *for_text, struct failure *why)
{
    int64_t value = 0;
    if (for_text && units_parse_int(for_text, 1, INT64_MAX, &value) != STATUS_OK)
        return fail(why, STATUS_INVALID, "--for %s: not a number of steps of at least 1", for_text);
    arguments->for_steps = (uint64_t)value;
    return STATUS_OK;
}

void changes_from_operands(const struct arguments *arguments, struct changes *out_changes)
{
    out_changes->n = arguments->n_operands;
    for (size_t i = 0; i < arguments->n_operands; i++) {
        char *operand = arguments->operands[i];
        char *equals = strchr(operand, '=');
        size_t n = (size_t)(equals - operand);
        memcpy(out_changes->keys[i], operand, n);
        out_changes->keys[i][n] = '\0';
        out_changes->items[i] = (Ballast__V1__Setting)BALLAST__V1__SETTING__INIT;
        out_changes->items[i].key = out_changes->keys[i];
        out_changes->items[i].value = equals + 1;
        out_changes->pointers[i] = &out_changes->items[i];
    }
}

/* Take the reply to a command: the outcome, or with `until_accepted` what comes first. */
static enum exit_code take_outcome(struct call *call, uint64_t id, bool until_accepted,
                                   reply_message **out_reply, bool *out_was_accepted)
{
    *out_was_accepted = false;
    for (;;) {
        reply_message *reply = NULL;
        enum exit_code code = session_next(&call->session, id, call->deadline_s, &reply);
        if (code == EXIT_CODE_TIMEOUT && *out_was_accepted)
            fail_within(
                &call->session.why,
                "accepted, but not done in time (it still will be; see `ballastctl events`)");
        if (code != EXIT_CODE_OK)
            return code;
        bool is_outcome = reply->body_case != BALLAST__CONTROL__V1__REPLY__BODY_COMMAND ||
                          !reply->command->accepted;
        if (is_outcome || until_accepted) {
            *out_reply = reply;
            return EXIT_CODE_OK;
        }
        *out_was_accepted = true;
        ballast_reply_free(reply);
    }
}

/* How a verb puts its outcome into words. */
typedef void say_outcome(const struct call *call, const command_reply *reply, struct text *out);

static enum exit_code print_outcome(struct call *call, const reply_message *reply, say_outcome *say)
{
    struct replies one = {.items = (reply_message *[]){(reply_message *)reply}, .n = 1};
    if (call->arguments->json)
        return output_json(call, output_merge(&one));
    struct text text = {0};
    if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY_PLAN && reply->plan->before &&
        reply->plan->after) {
        render_comparison(reply->plan->before, reply->plan->after, &call->style, &text);
    } else if (reply->body_case != BALLAST__CONTROL__V1__REPLY__BODY_COMMAND) {
        text_put(&text, "done\n");
    } else if (reply->command->accepted) {
        text_put(&text, "accepted\n");
    } else {
        say(call, reply->command, &text);
    }
    return output_text(call, &text);
}

/* Send, wait as far as asked, print. */
static enum exit_code command(struct call *call, request_message *request, bool until_accepted,
                              say_outcome *say)
{
    enum exit_code code = session_send(&call->session, request, call->deadline_s);
    if (code != EXIT_CODE_OK)
        return code;
    reply_message *reply = NULL;
    bool was_accepted;
    code = take_outcome(call, request->id, until_accepted, &reply, &was_accepted);
    if (code == EXIT_CODE_CONNECT && was_accepted && call->session.why.status == STATUS_LINK_LOST &&
        request->body_case == BALLAST__CONTROL__V1__REQUEST__BODY_STOP) {
        /* That the daemon went away is how a stopped run looks. */
        struct text text = {0};
        text_put(&text, call->arguments->json ? "{\"text\":\"the run has ended\"}\n"
                                              : "the run has ended\n");
        return output_text(call, &text);
    }
    if (code != EXIT_CODE_OK)
        return code;
    code = print_outcome(call, reply, say);
    ballast_reply_free(reply);
    return code;
}

static void say_change(const struct call *call, const command_reply *reply, struct text *out)
{
    if (call->arguments->dry_run && reply->before && reply->after)
        render_comparison(reply->before, reply->after, &call->style, out);
    else if (call->arguments->dry_run)
        text_put_wire(out, reply->text), text_put(out, "\n");
    else
        render_change(reply, out);
}

enum exit_code verb_set(struct call *call)
{
    const struct arguments *arguments = call->arguments;
    struct changes changes;
    changes_from_operands(arguments, &changes);
    Ballast__Control__V1__SetRequest body = BALLAST__CONTROL__V1__SET_REQUEST__INIT;
    body.changes = changes.pointers;
    body.n_changes = changes.n;
    body.dry_run = arguments->dry_run;
    if (arguments->has_if_generation) {
        body.expected_case = BALLAST__CONTROL__V1__SET_REQUEST__EXPECTED_IF_GENERATION;
        body.if_generation = arguments->if_generation;
    }
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_SET;
    request.set = &body;
    /* A dry run has no use for its acceptance. */
    return command(call, &request, !arguments->wait && !arguments->dry_run, say_change);
}

enum exit_code verb_undo(struct call *call)
{
    const struct arguments *arguments = call->arguments;
    Ballast__Control__V1__UndoRequest body = BALLAST__CONTROL__V1__UNDO_REQUEST__INIT;
    if (arguments->has_if_generation) {
        body.expected_case = BALLAST__CONTROL__V1__UNDO_REQUEST__EXPECTED_IF_GENERATION;
        body.if_generation = arguments->if_generation;
    }
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_UNDO;
    request.undo = &body;
    return command(call, &request, !arguments->wait, say_change);
}

static void put_took(const command_reply *reply, struct text *out)
{
    char took[UNITS_TEXT_BYTES];
    if (reply->took_ms > 0.0)
        text_printf(out, " in %s", units_format_duration(reply->took_ms / 1e3, took));
    text_put(out, "\n");
}

static void say_saved(const struct call *call, const command_reply *reply, struct text *out)
{
    (void)call;
    text_printf(out, "saved step %" PRIu64, reply->step);
    if (*reply->path) {
        text_put(out, " to ");
        text_put_wire(out, reply->path);
    }
    put_took(reply, out);
}

enum exit_code verb_save(struct call *call)
{
    Ballast__Control__V1__SaveRequest body = BALLAST__CONTROL__V1__SAVE_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_SAVE;
    request.save = &body;
    return command(call, &request, call->arguments->no_wait, say_saved);
}

static void say_loss(const struct call *call, const command_reply *reply, struct text *out)
{
    (void)call;
    text_printf(out, "evaluation loss %.6f over %" PRIu64 " tokens, after %" PRIu64 " steps",
                reply->loss, reply->tokens, reply->step);
    put_took(reply, out);
}

enum exit_code verb_eval(struct call *call)
{
    Ballast__Control__V1__EvalRequest body = BALLAST__CONTROL__V1__EVAL_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_EVAL;
    request.eval = &body;
    return command(call, &request, call->arguments->no_wait, say_loss);
}

static void say_paused(const struct call *call, const command_reply *reply, struct text *out)
{
    (void)call;
    text_printf(out, "paused after %" PRIu64 " steps\n", reply->step);
}

enum exit_code verb_pause(struct call *call)
{
    Ballast__Control__V1__PauseRequest body = BALLAST__CONTROL__V1__PAUSE_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_PAUSE;
    request.pause = &body;
    return command(call, &request, call->arguments->no_wait, say_paused);
}

static void say_resumed(const struct call *call, const command_reply *reply, struct text *out)
{
    text_printf(out, "resumed after %" PRIu64 " steps", reply->step);
    if (call->arguments->for_steps)
        text_printf(out, ", for %" PRIu64 " more", call->arguments->for_steps);
    text_put(out, "\n");
}

enum exit_code verb_resume(struct call *call)
{
    Ballast__Control__V1__ResumeRequest body = BALLAST__CONTROL__V1__RESUME_REQUEST__INIT;
    body.for_steps = call->arguments->for_steps;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_RESUME;
    request.resume = &body;
    return command(call, &request, call->arguments->no_wait, say_resumed);
}

static void say_stopped(const struct call *call, const command_reply *reply, struct text *out)
{
    (void)call;
    text_printf(out, "stopping after %" PRIu64 " steps", reply->step);
    if (*reply->text) {
        text_put(out, ": ");
        text_put_wire(out, reply->text);
    }
    text_put(out, "\n");
}

enum exit_code verb_stop(struct call *call)
{
    Ballast__Control__V1__StopRequest body = BALLAST__CONTROL__V1__STOP_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_STOP;
    request.stop = &body;
    return command(call, &request, call->arguments->no_wait, say_stopped);
}
