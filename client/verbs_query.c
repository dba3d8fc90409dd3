/* Verbs that ask once: status, memory, ranks, steps, plan, oom, schema. Main thread. */
#include <errno.h>
#include <string.h>
#include <unistd.h>
#include "client/output.h"
#include "client/render.h"
#include "client/verbs_run.h"
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/frame.h"
#include "proto/oom_file.h"

enum { DEFAULT_STEPS = 20 };

typedef Ballast__Control__V1__Request request_message;
typedef Ballast__Control__V1__Reply reply_message;

/* A question that rank 0 answers may be accepted first; only the answer is of interest. */
static void drop_acceptances(struct replies *replies)
{
    size_t n = 0;
    for (size_t i = 0; i < replies->n; i++) {
        reply_message *reply = replies->items[i];
        if (reply->body_case == BALLAST__CONTROL__V1__REPLY__BODY_COMMAND &&
            reply->command->accepted)
            ballast_reply_free(reply);
        else
            replies->items[n++] = reply;
    }
    replies->n = n;
}

/* Ask; every reply must have the body that the verb expects, and there is at least one. */
static enum exit_code ask(struct call *call, request_message *request,
                          Ballast__Control__V1__Reply__BodyCase expected,
                          struct replies *out_replies)
{
    struct replies replies;
    enum exit_code code = session_ask(&call->session, request, call->deadline_s, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    drop_acceptances(&replies);
    bool is_right = replies.n > 0;
    for (size_t i = 0; i < replies.n; i++)
        is_right = is_right && replies.items[i]->body_case == expected;
    if (!is_right) {
        replies_fini(&replies);
        fail(&call->session.why, STATUS_MALFORMED,
             "the daemon answered with something else than was asked for");
        return EXIT_CODE_CONNECT;
    }
    *out_replies = replies;
    return EXIT_CODE_OK;
}

static enum exit_code no_memory(struct call *call)
{
    fail(&call->session.why, STATUS_OUT_OF_MEMORY, "out of memory while collecting the answer");
    return EXIT_CODE_FAILED;
}

enum exit_code verb_status(struct call *call)
{
    Ballast__Control__V1__StatusRequest body = BALLAST__CONTROL__V1__STATUS_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_STATUS;
    request.status = &body;
    struct replies replies;
    enum exit_code code = ask(call, &request, BALLAST__CONTROL__V1__REPLY__BODY_STATUS, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    if (call->arguments->json) {
        code = output_json(call, output_merge(&replies));
    } else {
        struct text text = {0};
        render_status(replies.items[0]->status, &call->style, &text);
        code = output_text(call, &text);
    }
    replies_fini(&replies);
    return code;
}

enum exit_code verb_memory(struct call *call)
{
    Ballast__Control__V1__MemoryRequest body = BALLAST__CONTROL__V1__MEMORY_REQUEST__INIT;
    if (call->arguments->at_peak != BALLAST__V1__PHASE__PHASE_UNSPECIFIED) {
        body.at_peak_case = BALLAST__CONTROL__V1__MEMORY_REQUEST__AT_PEAK_PHASE;
        body.phase = call->arguments->at_peak;
    }
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_MEMORY;
    request.memory = &body;
    struct replies replies;
    enum exit_code code = ask(call, &request, BALLAST__CONTROL__V1__REPLY__BODY_MEMORY, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    void **ranks = NULL;
    size_t n_ranks = 0;
    if (call->arguments->json) {
        code = output_json(call, output_merge(&replies));
    } else if (!output_gather(&replies, "ranks", &ranks, &n_ranks)) {
        code = no_memory(call);
    } else {
        /* The ranks of all parts, the rest from the last. */
        Ballast__Control__V1__MemoryReply whole = *replies.items[replies.n - 1]->memory;
        whole.ranks = (Ballast__V1__RankState **)ranks;
        whole.n_ranks = n_ranks;
        struct text text = {0};
        render_memory(&whole, &call->style, &text);
        code = output_text(call, &text);
    }
    heap_free(ranks);
    replies_fini(&replies);
    return code;
}

/* An answer that is one list: joined as JSON, or gathered and rendered. */
static enum exit_code ask_list(struct call *call, request_message *request,
                               Ballast__Control__V1__Reply__BodyCase expected, const char *field,
                               void (*render)(void **items, size_t n, const struct style *style,
                                              struct text *out))
{
    struct replies replies;
    enum exit_code code = ask(call, request, expected, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    void **items = NULL;
    size_t n = 0;
    if (call->arguments->json) {
        code = output_json(call, output_merge(&replies));
    } else if (!output_gather(&replies, field, &items, &n)) {
        code = no_memory(call);
    } else {
        struct text text = {0};
        render(items, n, &call->style, &text);
        code = output_text(call, &text);
    }
    heap_free(items);
    replies_fini(&replies);
    return code;
}

static void put_ranks(void **items, size_t n, const struct style *style, struct text *out)
{
    render_ranks((Ballast__V1__RankState *const *)items, n, style, out);
}

enum exit_code verb_ranks(struct call *call)
{
    Ballast__Control__V1__RanksRequest body = BALLAST__CONTROL__V1__RANKS_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_RANKS;
    request.ranks = &body;
    return ask_list(call, &request, BALLAST__CONTROL__V1__REPLY__BODY_RANKS, "ranks", put_ranks);
}

static void put_steps(void **items, size_t n, const struct style *style, struct text *out)
{
    render_steps((Ballast__V1__StepRecord *const *)items, n, style, out);
}

enum exit_code verb_steps(struct call *call)
{
    Ballast__Control__V1__StepsRequest body = BALLAST__CONTROL__V1__STEPS_REQUEST__INIT;
    body.from = call->arguments->from;
    body.count = call->arguments->count ? (uint32_t)call->arguments->count : DEFAULT_STEPS;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_STEPS;
    request.steps = &body;
    return ask_list(call, &request, BALLAST__CONTROL__V1__REPLY__BODY_STEPS, "steps", put_steps);
}

enum exit_code verb_plan(struct call *call)
{
    struct changes changes;
    changes_from_operands(call->arguments, &changes);
    Ballast__Control__V1__PlanRequest body = BALLAST__CONTROL__V1__PLAN_REQUEST__INIT;
    body.changes = changes.pointers;
    body.n_changes = changes.n;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_PLAN;
    request.plan = &body;
    struct replies replies;
    enum exit_code code = ask(call, &request, BALLAST__CONTROL__V1__REPLY__BODY_PLAN, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    const Ballast__Control__V1__PlanReply *plan = replies.items[replies.n - 1]->plan;
    struct text text = {0};
    if (call->arguments->json) {
        code = output_json(call, output_merge(&replies));
    } else if (!plan->before && !plan->after) {
        fail(&call->session.why, STATUS_NOT_FOUND, "there is no plan yet; the run is setting up");
        code = EXIT_CODE_FAILED;
    } else {
        if (changes.n > 0 && plan->before && plan->after)
            render_comparison(plan->before, plan->after, &call->style, &text);
        else
            render_plan(plan->after ? plan->after : plan->before, &call->style, &text);
        code = output_text(call, &text);
    }
    replies_fini(&replies);
    return code;
}

enum exit_code verb_oom(struct call *call)
{
    Ballast__Control__V1__OomRequest body = BALLAST__CONTROL__V1__OOM_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_OOM;
    request.oom = &body;
    struct replies replies;
    enum exit_code code = ask(call, &request, BALLAST__CONTROL__V1__REPLY__BODY_OOM, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    code = output_oom(call, replies.items[0]->oom->report);
    replies_fini(&replies);
    return code;
}

enum exit_code files_oom(struct call *call)
{
    Ballast__V1__OomReport *report = NULL;
    enum status status =
        oom_file_read(call->arguments->target.run_dir, &report, &call->session.why);
    if (status == STATUS_NOT_FOUND) /* in the words of the daemon */
        fail(&call->session.why, status, "nothing ran out of memory in this run");
    if (status != STATUS_OK)
        return EXIT_CODE_FAILED;
    enum exit_code code = output_oom(call, report);
    frame_free(&report->base);
    return code;
}

/* The descriptor set may come in parts; they are one string of bytes. */
static enum exit_code write_schema(struct call *call, const struct replies *replies, FILE *file)
{
    bool good = true;
    for (size_t i = 0; i < replies->n; i++) {
        const ProtobufCBinaryData *part = &replies->items[i]->schema->file_descriptor_set;
        good = good && fwrite(part->data, 1, part->len, file) == part->len;
    }
    if (good && fflush(file) == 0)
        return EXIT_CODE_OK;
    fail(&call->session.why, status_from_errno(errno), "cannot write the schema: %s",
         strerror(errno));
    return EXIT_CODE_FAILED;
}

static enum exit_code put_schema(struct call *call, const struct replies *replies)
{
    const char *path = call->arguments->output;
    if (!path && call->arguments->json) {
        if (replies->n == 1)
            return output_json(call, output_merge(replies));
        fail(&call->session.why, STATUS_TOO_LARGE,
             "the schema came in %zu parts; write it to a file with --output", replies->n);
        return EXIT_CODE_FAILED;
    }
    if (!path && call->is_screen) {
        fail(&call->session.why, STATUS_INVALID,
             "the schema is binary; write it to a file with --output FILE");
        return EXIT_CODE_USAGE;
    }
    if (!path)
        return write_schema(call, replies, call->out);
    FILE *file = fopen(path, "wbe");
    if (!file) {
        fail(&call->session.why, status_from_errno(errno), "cannot write %s: %s", path,
             strerror(errno));
        return EXIT_CODE_FAILED;
    }
    enum exit_code code = write_schema(call, replies, file);
    if (fclose(file) != 0 && code == EXIT_CODE_OK) {
        fail(&call->session.why, status_from_errno(errno), "cannot write %s: %s", path,
             strerror(errno));
        code = EXIT_CODE_FAILED;
    }
    return code;
}

enum exit_code verb_schema(struct call *call)
{
    Ballast__Control__V1__SchemaRequest body = BALLAST__CONTROL__V1__SCHEMA_REQUEST__INIT;
    request_message request = BALLAST__CONTROL__V1__REQUEST__INIT;
    request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_SCHEMA;
    request.schema = &body;
    struct replies replies;
    enum exit_code code = ask(call, &request, BALLAST__CONTROL__V1__REPLY__BODY_SCHEMA, &replies);
    if (code != EXIT_CODE_OK)
        return code;
    code = put_schema(call, &replies);
    replies_fini(&replies);
    return code;
}
