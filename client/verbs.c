/* The table of verbs, usage and help, and one run of the program. Main thread. */
#include "client/verbs.h"

#include <langinfo.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "client/output.h"
#include "client/run_files.h"
#include "client/verbs_run.h"
#include "proto/base/units.h"
#include "proto/strategy.h"
#include "proto/version.h"

enum { REQUEST_TIMEOUT_S = 30 };

static const struct verb verb_table[] = {
    {.name = "status",
     .operands = "",
     .options = "",
     .run = verb_status,
     .summary = "health, progress, loss, speed, strategy, peak by phase against the limit",
     .details =
         "Planned and measured peaks are bytes in use, the bar is what is committed (whole\n"
         "granules), which is what the limit is compared with. A measured peak that differs\n"
         "from its plan is marked with '!'.\n"},
    {.name = "memory",
     .operands = "",
     .options = "at-peak",
     .run = verb_memory,
     .summary = "bytes by tier and category of every rank, live or at a phase's peak",
     .details = "  ballastctl memory\n  ballastctl memory --at-peak backward\n"},
    {.name = "ranks",
     .operands = "",
     .options = "",
     .run = verb_ranks,
     .summary = "where every rank is: phase, step, layer, collective, memory, silence",
     .details = "A step is shown with its micro-step: 41.2 is micro-step 2 of step 41.\n"},
    {.name = "steps",
     .operands = "",
     .options = "from count",
     .run = verb_steps,
     .summary = "the newest steps (20), or those from a step on",
     .details = "  ballastctl steps --count 5\n  ballastctl steps --from 100 --count 50\n"},
    {.name = "events",
     .operands = "",
     .options = "follow count after",
     .run = verb_events,
     .run_from_files = files_events,
     .summary = "what happened: switches, refusals, out of memory, saves, lost ranks",
     .details = "  ballastctl events --count 5\n  ballastctl events -f --json\n"
                "With --follow it ends with code 0 when the run does.\n"
                "After the run's end --run-dir is needed; then its events.jsonl is read.\n"},
    {.name = "watch",
     .operands = "",
     .options = "interval count",
     .run = verb_watch,
     .summary = "status again and again: a screen on a terminal, else one line a sample",
     .details = "  ballastctl watch --interval 500\n  ballastctl watch --count 10 --json\n"
                "Ends with code 0 when the run does.\n"},
    {.name = "plan",
     .operands = "[KEY=VALUE...]",
     .options = "",
     .run = verb_plan,
     .check = check_changes,
     .max_operands = ARGUMENTS_MAX_CHANGES,
     .summary = "the plan in force; with changes, what they would do to it",
     .details = "  ballastctl plan\n  ballastctl plan checkpointing=block:1 micro_batch=8\n"},
    {.name = "set",
     .operands = "KEY=VALUE...",
     .options = "dry-run if-generation wait",
     .run = verb_set,
     .check = check_changes,
     .min_operands = 1,
     .max_operands = ARGUMENTS_MAX_CHANGES,
     .summary = "change the memory strategy at the next step boundary, on all ranks or none",
     .details =
         "  ballastctl set checkpointing=block:1 --wait\n"
         "  ballastctl set checkpointing=selective micro_batch=2 --dry-run\n"
         "Without --wait it returns when the change is accepted; a later refusal is an event.\n"},
    {.name = "undo",
     .operands = "",
     .options = "if-generation wait",
     .run = verb_undo,
     .summary = "back to the strategy before the last change",
     .details = "  ballastctl undo --wait\n"},
    {.name = "wait",
     .operands = "",
     .options = "for",
     .run = verb_wait,
     .check = check_condition,
     .summary = "return when the run is so far",
     .details =
         "  --for step=N          N steps are completed\n"
         "  --for generation=N    strategy generation N is in force\n"
         "  --for event=TYPE      an event of this type, from now on\n"
         "  --for end             the run has ended\n"
         "  --for paused          the run stands at a step boundary\n"
         "Also waits for the run directory and the socket to appear and survives a restart of\n"
         "the daemon. Without --timeout it waits as long as it takes. Code 1: the run ended\n"
         "first.\n"},
    {.name = "save",
     .operands = "",
     .options = "no-wait wait",
     .run = verb_save,
     .summary = "save at the next step boundary; prints where",
     .details = "Returns when the save is complete on disk.\n"},
    {.name = "eval",
     .operands = "",
     .options = "no-wait wait",
     .run = verb_eval,
     .summary = "evaluate at the next step boundary; prints the loss",
     .details = "Needs eval_data in the run's configuration.\n"},
    {.name = "pause",
     .operands = "",
     .options = "no-wait wait",
     .run = verb_pause,
     .summary = "stop at the next step boundary and stay there",
     .details = "While it is paused, `set` takes effect at once. `resume` goes on.\n"},
    {.name = "resume",
     .operands = "",
     .options = "for no-wait wait",
     .run = verb_resume,
     .check = check_resume,
     .summary = "go on after a pause",
     .details =
         "  ballastctl resume\n  ballastctl resume --for 10    # 10 steps, then pause again\n"},
    {.name = "stop",
     .operands = "",
     .options = "no-wait wait",
     .run = verb_stop,
     .summary = "save and end the run at the next step boundary",
     .details = "The run exits with code 0 and can be resumed.\n"},
    {.name = "oom",
     .operands = "",
     .options = "",
     .run = verb_oom,
     .run_from_files = files_oom,
     .summary = "the last out-of-memory report: what, where, who holds what, remedies",
     .details = "Remedies are ranked; their peaks are planned, not guessed. After the run's end\n"
                "--run-dir is needed; then its oom.pb is read.\n"},
    {.name = "schema",
     .operands = "",
     .options = "output",
     .run = verb_schema,
     .summary = "the protocol as a serialized FileDescriptorSet",
     .details = "  ballastctl schema --output control.desc\n"},
    {.name = "help",
     .operands = "[VERB]",
     .options = "",
     .run = verb_help,
     .max_operands = 1,
     .is_offline = true,
     .summary = "this text, or what one verb does",
     .details = ""},
};

size_t verbs_n(void)
{
    return sizeof verb_table / sizeof *verb_table;
}

const struct verb *verbs_at(size_t index)
{
    return &verb_table[index];
}

const struct verb *verbs_find(const char *name)
{
    for (size_t i = 0; i < verbs_n(); i++)
        if (strcmp(verb_table[i].name, name) == 0)
            return &verb_table[i];
    return NULL;
}

static void put_usage(struct text *out)
{
    text_put(out, "usage: ballastctl VERB [ARGUMENTS] [OPTIONS]\n\n");
    for (size_t i = 0; i < verbs_n(); i++)
        text_printf(out, "  %-8s %s\n", verb_table[i].name, verb_table[i].summary);
    text_put(out, "\noptions of every verb, before or after it\n");
    arguments_put_options(NULL, out);
    text_put(out,
             "\nWithout --socket and --run-dir: $BALLAST_SOCKET, else the only run of this user.\n"
             "Exit codes: 0 ok, 1 refused or failed, 2 usage, 3 cannot connect, 4 timeout,\n"
             "5 version or permission.\n");
}

static void put_strategy_keys(struct text *out)
{
    text_put(out, "\nkeys\n");
    for (size_t i = 0; i < strategy_n_keys(); i++) {
        const struct strategy_key *key = strategy_key(i);
        text_printf(out, "  %s=%s\n      %s\n", key->name, key->values, key->help);
    }
}

static void put_verb_help(const struct verb *verb, struct text *out)
{
    text_printf(out, "usage: ballastctl %s%s%s%s\n\n%s\n", verb->name, *verb->operands ? " " : "",
                verb->operands, *verb->options ? " [OPTIONS]" : "", verb->summary);
    if (*verb->details)
        text_printf(out, "\n%s", verb->details);
    if (*verb->options) {
        text_put(out, "\noptions\n");
        arguments_put_options(verb, out);
    }
    if (verb->check == check_changes)
        put_strategy_keys(out);
    text_put(out, "\nOptions of every verb: `ballastctl help`.\n");
}

enum exit_code verb_help(struct call *call)
{
    const struct arguments *arguments = call->arguments;
    struct text text = {0};
    if (arguments->n_operands == 0) {
        put_usage(&text);
        return output_text(call, &text);
    }
    const struct verb *verb = verbs_find(arguments->operands[0]);
    if (!verb) {
        fail(&call->session.why, STATUS_UNKNOWN_KEY,
             "unknown verb '%s'; `ballastctl help` lists them", arguments->operands[0]);
        return EXIT_CODE_USAGE;
    }
    put_verb_help(verb, &text);
    return output_text(call, &text);
}

/* --help and --version, with or without a verb. */
static enum exit_code print_about(struct call *call)
{
    const struct arguments *arguments = call->arguments;
    struct text text = {0};
    if (arguments->version && arguments->json)
        return output_json(call,
                           json_pack("{s:s,s:i,s:i}", "version", BALLAST_VERSION, "protocol_major",
                                     PROTOCOL_MAJOR, "protocol_minor", PROTOCOL_MINOR));
    if (arguments->version)
        text_printf(&text, "ballastctl %s (protocol %d.%d)\n", BALLAST_VERSION, PROTOCOL_MAJOR,
                    PROTOCOL_MINOR);
    else if (arguments->verb)
        put_verb_help(arguments->verb, &text);
    else
        put_usage(&text);
    return output_text(call, &text);
}

static void choose_style(struct call *call)
{
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    int fd = fileno(call->out);
    bool is_terminal = fd >= 0 && isatty(fd) && term && strcmp(term, "dumb") != 0;
    call->is_screen = is_terminal;
    call->style.width = STYLE_PLAIN_WIDTH;
    struct winsize size;
    if (is_terminal && ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col >= 40)
        call->style.width = size.ws_col;
    call->style.unicode = is_terminal && strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
    call->style.color =
        call->arguments->color == COLOR_WHEN_ALWAYS ||
        (call->arguments->color == COLOR_WHEN_AUTO && is_terminal && !(no_color && *no_color));
}

/* Nobody answers (session.why says how); the verb may still know from the run's files. That there
 * is a run at all, events.jsonl shows. */
static enum exit_code run_from_files(struct call *call)
{
    const char *run_dir = call->arguments->target.run_dir;
    struct run_events newest;
    struct failure why;
    enum status status = run_files_events(run_dir, 0, 1, &newest, &why);
    if (status == STATUS_NOT_FOUND)
        return EXIT_CODE_CONNECT;
    if (status != STATUS_OK) {
        call->session.why = why;
        return EXIT_CODE_FAILED;
    }
    struct text note = {0};
    text_put(&note, "ballastctl: ");
    if (newest.n == 1 && strcmp(newest.items[0]->type, "end") == 0)
        text_put(&note, "the run has ended");
    else
        text_put_wire(&note, call->session.why.text);
    text_put(&note, "; read from ");
    text_put_wire(&note, run_dir);
    fprintf(call->err, "%s\n", text_get(&note));
    fflush(call->err);
    text_fini(&note);
    run_events_fini(&newest);
    return call->arguments->verb->run_from_files(call);
}

static enum exit_code run_verb(struct call *call)
{
    const struct arguments *arguments = call->arguments;
    if (arguments->help || arguments->version)
        return print_about(call);
    const struct verb *verb = arguments->verb;
    enum exit_code code = EXIT_CODE_OK;
    if (!verb->is_offline && verb->run != verb_wait)
        code = session_open(&call->session, call->deadline_s);
    bool is_open = code == EXIT_CODE_OK;
    if (is_open)
        code = verb->run(call);
    /* What was followed and printed must not come a second time. */
    bool is_new = !(is_open && arguments->follow);
    if (code == EXIT_CODE_CONNECT && is_new && verb->run_from_files && arguments->target.run_dir)
        code = run_from_files(call);
    return code;
}

int verbs_main(int argc, char **argv, FILE *out, FILE *err)
{
    struct arguments arguments;
    struct call call = {.out = out, .err = err};
    enum status status = arguments_parse(argc, argv, &arguments, &call.session.why);
    if (status != STATUS_OK)
        return (int)output_failure(&call, EXIT_CODE_USAGE);
    call.arguments = &arguments;
    session_init(&call.session, &arguments.target);
    call.deadline_s =
        units_monotonic_s() + (arguments.timeout_s > 0.0 ? arguments.timeout_s : REQUEST_TIMEOUT_S);
    choose_style(&call);
    enum exit_code code = run_verb(&call);
    if (code != EXIT_CODE_OK)
        output_failure(&call, code);
    session_fini(&call.session);
    return (int)code;
}
