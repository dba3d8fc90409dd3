/* Parsing the command line with getopt_long, from one table of options. */
#include "client/arguments.h"

#include <assert.h>
#include <getopt.h>
#include <string.h>
#include "client/verbs.h"
#include "proto/base/units.h"
#include "proto/convert.h"

enum option_id {
    OPTION_SOCKET,
    OPTION_RUN_DIR,
    OPTION_JSON,
    OPTION_TIMEOUT,
    OPTION_COLOR,
    OPTION_HELP,
    OPTION_VERSION,
    N_COMMON_OPTIONS,
    OPTION_AT_PEAK = N_COMMON_OPTIONS,
    OPTION_FROM,
    OPTION_COUNT,
    OPTION_AFTER,
    OPTION_FOLLOW,
    OPTION_INTERVAL,
    OPTION_DRY_RUN,
    OPTION_IF_GENERATION,
    OPTION_WAIT,
    OPTION_NO_WAIT,
    OPTION_FOR,
    OPTION_OUTPUT,
    N_OPTIONS
};

struct option_row {
    const char *name;
    char letter;          /* 0: none */
    const char *argument; /* NULL: none */
    const char *help;
};

static const struct option_row option_rows[N_OPTIONS] = {
    [OPTION_SOCKET] = {"socket", 0, "PATH", "the run's control socket"},
    [OPTION_RUN_DIR] = {"run-dir", 0, "DIR",
                        "the run's directory (its control.json names the socket)"},
    [OPTION_JSON] = {"json", 0, NULL, "one JSON object; one a line from verbs that follow"},
    [OPTION_TIMEOUT] = {"timeout", 0, "S", "give up after S seconds, exit code 4"},
    [OPTION_COLOR] = {"color", 0, "WHEN", "auto (on a terminal, unless NO_COLOR), always or never"},
    [OPTION_HELP] = {"help", 'h', NULL, "this text"},
    [OPTION_VERSION] = {"version", 'V', NULL, "version of the program and of its protocol"},
    [OPTION_AT_PEAK] = {"at-peak", 0, "PHASE",
                        "the plan at this phase's peak, with what is alive then"},
    [OPTION_FROM] = {"from", 0, "N", "from step N on; without it the newest"},
    [OPTION_COUNT] = {"count", 'n', "N", "at most N of them"},
    [OPTION_AFTER] = {"after", 0, "N", "only events after sequence number N"},
    [OPTION_FOLLOW] = {"follow", 'f', NULL, "go on with new ones as they come"},
    [OPTION_INTERVAL] = {"interval", 0, "MS", "milliseconds between samples, 50 to 60000 (1000)"},
    [OPTION_DRY_RUN] = {"dry-run", 0, NULL, "say what would happen, change nothing"},
    [OPTION_IF_GENERATION] = {"if-generation", 0, "N",
                              "only if the strategy is still generation N"},
    [OPTION_WAIT] = {"wait", 0, NULL, "return when it is done, not when it is accepted"},
    [OPTION_NO_WAIT] = {"no-wait", 0, NULL, "return when it is accepted, not when it is done"},
    [OPTION_FOR] = {"for", 0, "WHAT", "what to wait for; with resume: steps until the next pause"},
    [OPTION_OUTPUT] = {"output", 'o', "FILE", "write to FILE"},
};

/* Is `word` one of the blank-separated `words`? */
static bool has_word(const char *words, const char *word)
{
    size_t n = strlen(word);
    for (const char *at = words; (at = strstr(at, word)) != NULL; at += n)
        if ((at == words || at[-1] == ' ') && (at[n] == ' ' || at[n] == '\0'))
            return true;
    return false;
}

void arguments_put_options(const struct verb *verb, struct text *out)
{
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct option_row *row = &option_rows[i];
        if (verb ? !has_word(verb->options, row->name) : i >= N_COMMON_OPTIONS)
            continue;
        char letter[] = "    ";
        if (row->letter)
            letter[0] = '-', letter[1] = row->letter, letter[2] = ',';
        size_t start = out->used;
        text_printf(out, "  %s--%s%s%s", letter, row->name, row->argument ? " " : "",
                    row->argument ? row->argument : "");
        size_t used = out->used - start;
        text_spaces(out, used < 26 ? 26 - used : 1);
        text_printf(out, " %s\n", row->help);
    }
}

/* Steps to turn one word into the other by inserting, dropping or changing a letter. */
static unsigned distance(const char *a, const char *b)
{
    enum { MAX_LETTERS = 31 };
    unsigned row[MAX_LETTERS + 1];
    size_t n = strlen(b);
    if (n > MAX_LETTERS || strlen(a) > MAX_LETTERS)
        return MAX_LETTERS;
    for (unsigned i = 0; i <= n; i++)
        row[i] = i;
    for (unsigned i = 1; a[i - 1]; i++) {
        unsigned diagonal = row[0];
        row[0] = i;
        for (size_t k = 1; k <= n; k++) {
            unsigned change = diagonal + (a[i - 1] != b[k - 1]);
            unsigned one_off = (row[k] < row[k - 1] ? row[k] : row[k - 1]) + 1;
            diagonal = row[k];
            row[k] = change < one_off ? change : one_off;
        }
    }
    return row[n];
}

const char *arguments_nearest(const char *name, const char *const *names)
{
    const char *nearest = NULL;
    unsigned least = 3; /* further away is no typing mistake */
    for (; *names; names++) {
        unsigned d = distance(name, *names);
        /* What is as long as the word itself shares nothing with it. */
        if (d < least && d < strlen(name)) {
            least = d;
            nearest = *names;
        }
    }
    return nearest;
}

static enum status unknown_verb(const char *name, struct failure *why)
{
    const char *names[64] = {0};
    assert(verbs_n() < sizeof names / sizeof *names);
    for (size_t i = 0; i < verbs_n(); i++)
        names[i] = verbs_at(i)->name;
    const char *nearest = arguments_nearest(name, names);
    return fail(why, STATUS_UNKNOWN_KEY, "unknown verb '%s'%s%s%s; `ballastctl help` lists them",
                name, nearest ? " (did you mean '" : "", nearest ? nearest : "",
                nearest ? "'?)" : "");
}

static enum status unknown_option(const char *given, struct failure *why)
{
    const char *names[N_OPTIONS + 1] = {0};
    for (size_t i = 0; i < N_OPTIONS; i++)
        names[i] = option_rows[i].name;
    char name[64] = "";
    if (given && strncmp(given, "--", 2) == 0)
        strncat(name, given + 2, strcspn(given + 2, "=") < 63 ? strcspn(given + 2, "=") : 63);
    const char *nearest = *name ? arguments_nearest(name, names) : NULL;
    return fail(why, STATUS_UNKNOWN_KEY,
                "unknown option '%s'%s%s%s; `ballastctl help VERB` "
                "lists them",
                given ? given : "", nearest ? " (did you mean '--" : "", nearest ? nearest : "",
                nearest ? "'?)" : "");
}

static enum status parse_number(enum option_id id, const char *text, uint64_t low, uint64_t high,
                                uint64_t *out, struct failure *why)
{
    int64_t value = 0;
    if (units_parse_int(text, (int64_t)low, (int64_t)high, &value) != STATUS_OK)
        return fail(why, STATUS_INVALID, "--%s %s: not a whole number from %llu to %llu",
                    option_rows[id].name, text, (unsigned long long)low, (unsigned long long)high);
    *out = (uint64_t)value;
    return STATUS_OK;
}

static enum status parse_color(const char *text, enum color_when *out, struct failure *why)
{
    static const char *const names[] = {"auto", "always", "never"};
    for (size_t i = 0; i < 3; i++)
        if (strcmp(text, names[i]) == 0) {
            *out = (enum color_when)i;
            return STATUS_OK;
        }
    return fail(why, STATUS_INVALID, "--color %s: not auto, always or never", text);
}

static enum status parse_timeout(const char *text, double *out, struct failure *why)
{
    double value = 0.0;
    if (units_parse_double(text, &value) != STATUS_OK || !(value > 0.0) || value > 1e9)
        return fail(why, STATUS_INVALID, "--timeout %s: not a number of seconds above 0", text);
    *out = value;
    return STATUS_OK;
}

static enum status parse_phase(const char *text, Ballast__V1__Phase *out, struct failure *why)
{
    enum phase phase;
    if (!phase_from_name(text, &phase))
        return fail(why, STATUS_INVALID,
                    "--at-peak %s: not a phase; they are setup, forward, "
                    "backward, step, eval, save, switch",
                    text);
    *out = convert_phase_to_wire(phase);
    return STATUS_OK;
}

static enum status set_option(struct arguments *arguments, enum option_id id, char *value,
                              const char **for_text, struct failure *why)
{
    switch (id) {
    case OPTION_SOCKET:
        arguments->target.socket = value;
        break;
    case OPTION_RUN_DIR:
        arguments->target.run_dir = value;
        break;
    case OPTION_JSON:
        arguments->json = true;
        break;
    case OPTION_TIMEOUT:
        return parse_timeout(value, &arguments->timeout_s, why);
    case OPTION_COLOR:
        return parse_color(value, &arguments->color, why);
    case OPTION_HELP:
        arguments->help = true;
        break;
    case OPTION_VERSION:
        arguments->version = true;
        break;
    case OPTION_AT_PEAK:
        return parse_phase(value, &arguments->at_peak, why);
    case OPTION_FROM:
        return parse_number(id, value, 0, INT64_MAX, &arguments->from, why);
    case OPTION_COUNT:
        return parse_number(id, value, 1, UINT32_MAX, &arguments->count, why);
    case OPTION_AFTER:
        return parse_number(id, value, 0, INT64_MAX, &arguments->after, why);
    case OPTION_FOLLOW:
        arguments->follow = true;
        break;
    case OPTION_INTERVAL:
        return parse_number(id, value, 50, 60000, &arguments->interval_ms, why);
    case OPTION_DRY_RUN:
        arguments->dry_run = true;
        break;
    case OPTION_IF_GENERATION:
        arguments->has_if_generation = true;
        return parse_number(id, value, 0, INT64_MAX, &arguments->if_generation, why);
    case OPTION_WAIT:
        arguments->wait = true;
        break;
    case OPTION_NO_WAIT:
        arguments->no_wait = true;
        break;
    case OPTION_FOR:
        *for_text = value;
        break;
    case OPTION_OUTPUT:
        arguments->output = value;
        break;
    case N_OPTIONS:
        break;
    }
    return STATUS_OK;
}

/* All options into `arguments`; which were given into `seen`. Leaves optind at the operands. */
static enum status parse_options(int argc, char **argv, struct arguments *arguments,
                                 bool seen[N_OPTIONS], const char **for_text, struct failure *why)
{
    enum { FIRST_ID = 256 };
    struct option table[N_OPTIONS + 1] = {0};
    char letters[2 * N_OPTIONS + 2] = ":";
    size_t n_letters = 1;
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option_row *row = &option_rows[i];
        table[i] = (struct option){row->name, row->argument ? required_argument : no_argument, NULL,
                                   FIRST_ID + i};
        if (row->letter)
            letters[n_letters++] = row->letter;
        if (row->letter && row->argument)
            letters[n_letters++] = ':';
    }
    optind = 0; /* glibc: start afresh */
    opterr = 0;
    for (;;) {
        int code = getopt_long(argc, argv, letters, table, NULL);
        if (code == -1)
            return STATUS_OK;
        if (code == ':')
            return fail(why, STATUS_INVALID, "%s needs a value", argv[optind - 1]);
        if (code == '?') {
            /* A long option is wholly behind optind; a letter may be inside its word. */
            char letter[] = {'-', (char)optopt, '\0'};
            bool is_letter = optopt > 0 && optopt < FIRST_ID;
            if (optopt >= FIRST_ID)
                return fail(why, STATUS_INVALID, "--%s takes no value",
                            option_rows[optopt - FIRST_ID].name);
            return unknown_option(is_letter ? letter : argv[optind - 1], why);
        }
        for (int i = 0; code < FIRST_ID && i < N_OPTIONS; i++)
            if (option_rows[i].letter == code)
                code = FIRST_ID + i;
        seen[code - FIRST_ID] = true;
        enum status status =
            set_option(arguments, (enum option_id)(code - FIRST_ID), optarg, for_text, why);
        if (status != STATUS_OK)
            return status;
    }
}

/* Options and operands against what the verb takes. */
static enum status check_verb(const struct arguments *arguments, const bool seen[N_OPTIONS],
                              struct failure *why)
{
    const struct verb *verb = arguments->verb;
    for (size_t i = N_COMMON_OPTIONS; i < N_OPTIONS; i++)
        if (seen[i] && !has_word(verb->options, option_rows[i].name))
            return fail(why, STATUS_INVALID,
                        "--%s is not an option of %s; see `ballastctl help "
                        "%s`",
                        option_rows[i].name, verb->name, verb->name);
    if (arguments->n_operands < verb->min_operands)
        return fail(why, STATUS_INVALID, "%s needs %s; see `ballastctl help %s`", verb->name,
                    verb->operands, verb->name);
    if (arguments->n_operands > verb->max_operands)
        return fail(why, STATUS_INVALID, "%s does not take '%s'; see `ballastctl help %s`",
                    verb->name, arguments->operands[verb->max_operands], verb->name);
    if (arguments->target.socket && arguments->target.run_dir)
        return fail(why, STATUS_INVALID, "--socket and --run-dir both name a run; give one");
    if (arguments->wait && arguments->no_wait)
        return fail(why, STATUS_INVALID, "--wait and --no-wait contradict each other");
    return STATUS_OK;
}

enum status arguments_parse(int argc, char **argv, struct arguments *out_arguments,
                            struct failure *why)
{
    struct arguments arguments = {0};
    arguments.condition =
        (Ballast__Control__V1__WaitRequest)BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    bool seen[N_OPTIONS] = {0};
    const char *for_text = NULL;
    enum status status = parse_options(argc, argv, &arguments, seen, &for_text, why);
    if (status != STATUS_OK)
        return status;
    if (optind >= argc) {
        if (!arguments.help && !arguments.version)
            return fail(why, STATUS_INVALID, "no verb; `ballastctl help` lists them");
        *out_arguments = arguments;
        return STATUS_OK;
    }
    arguments.verb = verbs_find(argv[optind]);
    if (!arguments.verb)
        return unknown_verb(argv[optind], why);
    arguments.operands = argv + optind + 1;
    arguments.n_operands = (size_t)(argc - optind - 1);
    if (!arguments.help && !arguments.version) {
        status = check_verb(&arguments, seen, why);
        if (status == STATUS_OK && arguments.verb->check)
            status = arguments.verb->check(&arguments, for_text, why);
    }
    if (status == STATUS_OK)
        *out_arguments = arguments;
    return status;
}
