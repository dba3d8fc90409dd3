/* Owns: flags, --set and reading the file they name. Not: what keys mean. Main thread, at start.
 *
 * A flag that stands for a key and a --set are put into the document before it is read, so that
 * they pass through the same table as the file and are refused in the same words. */
#include "worker/config_args.h"

#include <getopt.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/base/utf8.h"
#include "proto/json_parse.h"
#include "proto/text_file.h"
#include "worker/config_words.h"

enum {
    FLAG_CONFIG = 1,
    FLAG_KEY, /* stands for a key */
    FLAG_SET,
    FLAG_PLAN,
    FLAG_WORLD,
    FLAG_CHECK,
    FLAG_RESUME,
    FLAG_EXPECT_RANKS,
    FLAG_FAULT,
    FLAG_ALLOW_FAULTS,
    FLAG_JSON,
    FLAG_LATER, /* known, not in this version */
    FLAG_HELP,
    FLAG_VERSION,
};

static const struct config_flag flags[] = {
    {"config", FLAG_CONFIG, "FILE", NULL, "configuration: JSON, DeepSpeed's keys and \"ballast\""},
    {"run-dir", FLAG_KEY, "DIR", "ballast.run_dir", "directory of this run's files"},
    {"device", FLAG_KEY, "auto|cpu|cuda", "ballast.device", "where the step runs"},
    {"device-memory", FLAG_KEY, "BYTES", "ballast.device_memory", "capacity of a rank's device"},
    {"model", FLAG_KEY, "NAME", "ballast.model", "preset or folder"},
    {"data", FLAG_KEY, "FILE", "ballast.data", "training data; may be repeated"},
    {"steps", FLAG_KEY, "N", "ballast.steps", "optimizer steps of the run"},
    {"set", FLAG_SET, "KEY=VALUE", NULL,
     "a strategy key, else a key of \"ballast\", else a dotted path into the file; may be "
     "repeated, "
     "beats flags, which beat the file"},
    {"plan", FLAG_PLAN, NULL, NULL, "print the memory account and end; starts no ranks"},
    {"world", FLAG_WORLD, "N", NULL, "number of ranks that --plan and --check-config assume"},
    {"check-config", FLAG_CHECK, NULL, NULL, "print what becomes of every key and end"},
    {"resume", FLAG_RESUME, "latest|N", NULL, "continue from a save of the run directory"},
    {"expect-ranks", FLAG_EXPECT_RANKS, "N", NULL, "refuse to start on another number of ranks"},
    {"fault", FLAG_FAULT, "SPEC", NULL,
     "fail on purpose, such as commit:rank=1,step=3,phase=backward; may be repeated"},
    {"allow-faults", FLAG_ALLOW_FAULTS, NULL, NULL, "allow --fault"},
    {"json", FLAG_JSON, NULL, NULL, "print --plan and --check-config as JSON"},
    {"fit", FLAG_LATER, NULL, NULL, "not in this version: choose a strategy that fits"},
    {"nodes", FLAG_LATER, "FILE", NULL, "not in this version: plan for a described cluster"},
    {"export", FLAG_LATER, "DIR", NULL, "not in this version: write the weights for other tools"},
    {"help", FLAG_HELP, NULL, NULL, "print this"},
    {"version", FLAG_VERSION, NULL, NULL, "print the version"},
};

enum { N_FLAGS = sizeof(flags) / sizeof(flags[0]) };

const struct config_flag *config_flag_at(size_t index)
{
    return index < N_FLAGS ? &flags[index] : NULL;
}

/* ---- flags ---- */

static enum status unknown_flag(const char *text, struct failure *why)
{
    char name[64];
    const char *best = NULL;
    size_t distance = 0;

    while (*text == '-') {
        text++;
    }
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(text, "="), text);
    for (size_t i = 0; i < N_FLAGS; i++) {
        config_nearer(name, flags[i].name, &best, &distance);
    }
    if (best) {
        return fail(why, STATUS_UNKNOWN_KEY, "unknown flag --%s; did you mean --%s?", name, best);
    }
    return fail(why, STATUS_UNKNOWN_KEY, "unknown flag --%s; --help lists all flags", name);
}

static enum status flag_count(const char *flag, const char *text, int64_t low, int64_t high,
                              int64_t *out, struct failure *why)
{
    const enum status status = units_parse_int(text, low, high, out);

    if (status) {
        return fail(why, status, "--%s %.64s: it has to be a whole number from %lld to %lld", flag,
                    text, (long long)low, (long long)high);
    }
    return STATUS_OK;
}

static enum status flag_put(struct config_command *command, const struct config_flag *flag,
                            const char *value, struct failure *why)
{
    if (command->n_puts == COMMAND_MAX_PUTS) {
        return fail(why, STATUS_TOO_LARGE, "--%s %.64s: more than %d settings on the command line",
                    flag->name, value, COMMAND_MAX_PUTS);
    }
    command->puts[command->n_puts++] = (struct config_put){
        .flag = flag->code == FLAG_SET ? NULL : flag->name, .key = flag->key, .value = value};
    return STATUS_OK;
}

static enum status flag_fault(struct config_command *command, const char *spec, struct failure *why)
{
    const size_t room = sizeof(((struct config *)0)->faults[0]);

    if (command->n_faults == CONFIG_MAX_FAULTS) {
        return fail(why, STATUS_TOO_LARGE, "--fault %.64s: at most %d faults are allowed", spec,
                    CONFIG_MAX_FAULTS);
    }
    if (strlen(spec) >= room) {
        return fail(why, STATUS_TOO_LARGE, "--fault %.64s...: at most %zu characters are allowed",
                    spec, room - 1);
    }
    command->faults[command->n_faults++] = spec;
    return STATUS_OK;
}

static enum status flag_resume(struct config_command *command, const char *text,
                               struct failure *why)
{
    int64_t step = 0;

    command->resume = true;
    command->resume_latest = strcmp(text, "latest") == 0;
    if (!command->resume_latest && units_parse_int(text, 0, INT64_MAX, &step)) {
        return fail(why, STATUS_INVALID, "--resume %.64s: it has to be latest or a step", text);
    }
    command->resume_step = (uint64_t)step;
    return STATUS_OK;
}

static enum status take_flag(struct config_command *command, const struct config_flag *flag,
                             const char *value, struct failure *why)
{
    enum status status = STATUS_OK;
    int64_t count = 0;

    switch (flag->code) {
    case FLAG_CONFIG:
        command->file = value;
        break;
    case FLAG_KEY:
    case FLAG_SET:
        status = flag_put(command, flag, value, why);
        break;
    case FLAG_PLAN:
        command->plan = true;
        break;
    case FLAG_WORLD:
        status = flag_count(flag->name, value, 1, COMMAND_MAX_WORLD, &count, why);
        command->world_size = (uint32_t)count;
        break;
    case FLAG_CHECK:
        command->check = true;
        break;
    case FLAG_RESUME:
        status = flag_resume(command, value, why);
        break;
    case FLAG_EXPECT_RANKS:
        status = flag_count(flag->name, value, 1, COMMAND_MAX_WORLD, &count, why);
        command->expect_ranks = (uint32_t)count;
        break;
    case FLAG_FAULT:
        status = flag_fault(command, value, why);
        break;
    case FLAG_ALLOW_FAULTS:
        command->allow_faults = true;
        break;
    case FLAG_JSON:
        command->json = true;
        break;
    case FLAG_HELP:
        command->help = true;
        break;
    case FLAG_VERSION:
        command->version = true;
        break;
    default:
        status = fail(why, STATUS_UNSUPPORTED, "--%s is %s", flag->name, flag->help);
        break;
    }
    return status;
}

/* Rules between flags. `launched` is the number of ranks of the launch. */
static enum status check_command(const struct config_command *command, uint32_t launched,
                                 struct failure *why)
{
    const bool dry = command->plan || command->check;

    if (command->world_size && !dry) {
        return fail(why, STATUS_CONFLICT,
                    "--world %u goes with --plan or --check-config only; a run has the ranks it "
                    "was launched with (%u)",
                    command->world_size, launched);
    }
    if (command->n_faults && !command->allow_faults) {
        return fail(why, STATUS_REFUSED, "--fault %s is refused without --allow-faults",
                    command->faults[0]);
    }
    if (command->expect_ranks && !dry && command->expect_ranks != launched) {
        return fail(why, STATUS_REFUSED,
                    "--expect-ranks %u, but this run has %u: check how the launcher starts ranks",
                    command->expect_ranks, launched);
    }
    return STATUS_OK;
}

enum status config_command_parse(int argc, char **argv, uint32_t world_size,
                                 struct config_command *out_command, struct failure *why)
{
    struct config_command command = {.file = NULL};
    struct option options[N_FLAGS + 1] = {{0}};
    const uint32_t launched = world_size ? world_size : 1;
    enum status status;

    for (int i = 0; i < N_FLAGS; i++) {
        options[i] = (struct option){.name = flags[i].name,
                                     .has_arg = flags[i].value ? required_argument : no_argument,
                                     .val = i + 256};
    }
    optind = 0; /* glibc: start anew, whoever parsed before */
    opterr = 0;
    for (;;) {
        const int before = optind ? optind : 1;
        const int code = getopt_long(argc, argv, "+:h", options, NULL);
        if (code < 0) {
            break;
        }
        if (code == ':') {
            return fail(why, STATUS_INVALID, "%.64s needs a value; --help shows which",
                        argv[optind - 1]);
        }
        if (code == '?' && optopt >= 256) {
            return fail(why, STATUS_INVALID, "--%s takes no value", flags[optopt - 256].name);
        }
        if (code == '?') {
            return unknown_flag(argv[before], why);
        }
        if (code == 'h') {
            command.help = true;
            continue;
        }
        status = take_flag(&command, &flags[code - 256], optarg, why);
        if (status) {
            return status;
        }
    }
    if (command.help || command.version) {
        *out_command = command;
        return STATUS_OK;
    }
    if (optind < argc) {
        return fail(why, STATUS_INVALID,
                    "unexpected argument %.64s; the configuration is named by --config",
                    argv[optind]);
    }
    status = check_command(&command, launched, why);
    if (status) {
        return status;
    }
    command.world_size = command.world_size ? command.world_size : launched;
    *out_command = command;
    return STATUS_OK;
}

/* ---- flags and --set into the document ---- */

/* A value from the command line: JSON where it is some, otherwise a text. NULL: no memory. */
static json_t *command_value(const struct config_row *row, const char *text)
{
    const bool plain = !row || row->type == TYPE_TEXT || row->type == TYPE_CHOICE ||
                       (row->type == TYPE_PATHS && text[0] != '[');
    json_t *value = NULL;
    json_error_t error;

    if (!plain && json_parse(text, strlen(text), JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &value,
                             &error) == STATUS_OUT_OF_MEMORY) {
        return NULL;
    }
    return value ? value : json_string(text);
}

/* Put at a dotted path, all of whose parts are names of nested objects. */
static enum status put_path(struct config_doc *doc, const char *path, const char *text,
                            enum config_origin origin, const char *said, struct failure *why)
{
    char parts[CONFIG_KEY_BYTES];
    const char *keys[8];
    size_t n = 0;

    snprintf(parts, sizeof(parts), "%s", path); /* a row's path: it fits */
    for (char *at = parts; at && n < sizeof(keys) / sizeof(keys[0]);) {
        keys[n++] = at;
        at = strchr(at, '.');
        if (at) {
            *at++ = '\0';
        }
    }
    return config_doc_put(doc, keys, n, command_value(config_row(path), text), origin, said, why);
}

static enum status unknown_set(const char *key, const char *said, struct failure *why)
{
    const char *best = NULL;
    size_t distance = 0;

    for (size_t i = 0; i < strategy_n_keys(); i++) {
        config_nearer(key, strategy_key(i)->name, &best, &distance);
    }
    for (size_t i = 0; i < config_n_rows(); i++) {
        const char *path = config_row_at(i)->path;
        config_nearer(key, path, &best, &distance);
        if (strncmp(path, "ballast.", 8) == 0) {
            config_nearer(key, path + 8, &best, &distance);
        }
    }
    return fail(
        why, STATUS_UNKNOWN_KEY,
        "%.160s: no strategy key, no key of \"ballast\" and no path into the file is called "
        "%.64s; %s%s%s",
        said, key, best ? "did you mean " : "--help lists all keys", best ? best : "",
        best ? "?" : "");
}

static enum status put_set(struct config_doc *doc, const char *setting, struct failure *why)
{
    char said[256], key[CONFIG_KEY_BYTES], path[CONFIG_KEY_BYTES + 8];
    const char *equals = strchr(setting, '=');
    const char *name = key;

    snprintf(said, sizeof(said), "--set %.240s", setting);
    if (!equals || equals == setting) {
        return fail(why, STATUS_INVALID, "%.160s: it has to be KEY=VALUE", said);
    }
    if ((size_t)(equals - setting) >= sizeof(key)) {
        return fail(why, STATUS_UNKNOWN_KEY, "%.160s...: no key has a name this long", said);
    }
    memcpy(key, setting, (size_t)(equals - setting));
    key[equals - setting] = '\0';
    /* Full paths are understood as well: ballast.steps, ballast.strategy.zero.stage. */
    if (strncmp(name, "ballast.", 8) == 0) {
        name += 8;
    }
    if (strncmp(name, "strategy.", 9) == 0) {
        name += 9;
    }
    if (strategy_has_key(name)) {
        const char *keys[] = {"ballast", "strategy", name};
        return config_doc_put(doc, keys, 3, json_string(equals + 1), ORIGIN_SET, said, why);
    }
    snprintf(path, sizeof(path), "ballast.%s", name);
    if (!config_row(path)) {
        snprintf(path, sizeof(path), "%s", key);
    }
    if (!config_row(path)) {
        return unknown_set(key, said, why);
    }
    return put_path(doc, path, equals + 1, ORIGIN_SET, said, why);
}

/* All --data flags together are one list. */
static enum status put_data(struct config_doc *doc, const struct config_command *command,
                            struct failure *why)
{
    const char *keys[] = {"ballast", "data"};
    json_t *list = json_array();
    const char *first = NULL;
    char said[256];

    for (size_t i = 0; i < command->n_puts; i++) {
        const struct config_put *put = &command->puts[i];
        if (!put->flag || strcmp(put->flag, "data") != 0) {
            continue;
        }
        first = first ? first : put->value;
        if (json_array_append_new(list, json_string(put->value))) {
            json_decref(list);
            return fail(why, STATUS_OUT_OF_MEMORY, "--data: out of host memory");
        }
    }
    if (!first) {
        json_decref(list);
        return STATUS_OK;
    }
    snprintf(said, sizeof(said), "--data %.240s", first);
    return config_doc_put(doc, keys, 2, list, ORIGIN_FLAG, said, why);
}

static enum status put_all(const struct config_command *command, struct config_doc *doc,
                           struct failure *why)
{
    enum status status = put_data(doc, command, why);

    for (size_t i = 0; !status && i < command->n_puts; i++) {
        const struct config_put *put = &command->puts[i];
        char said[256];
        if (!put->flag || strcmp(put->flag, "data") == 0) {
            continue;
        }
        snprintf(said, sizeof(said), "--%s %.200s", put->flag, put->value);
        status = put_path(doc, put->key, put->value, ORIGIN_FLAG, said, why);
    }
    for (size_t i = 0; !status && i < command->n_puts; i++) {
        if (!command->puts[i].flag) {
            status = put_set(doc, command->puts[i].value, why);
        }
    }
    return status;
}

static enum status check_encoding(const struct config_command *command, struct failure *why)
{
    for (size_t i = 0; i < command->n_puts; i++) {
        const char *value = command->puts[i].value;
        if (!utf8_valid(value, strlen(value))) {
            return fail(why, STATUS_INVALID, "--%s: its value is not UTF-8 text",
                        command->puts[i].flag ? command->puts[i].flag : "set");
        }
    }
    return STATUS_OK;
}

enum status config_command_doc(const struct config_command *command, struct config_doc *out_doc,
                               struct failure *why)
{
    struct config_doc doc;
    char *text = NULL;
    size_t n_bytes = 0;
    enum status status = check_encoding(command, why);

    if (!status && command->file) {
        if (strlen(command->file) >= CONFIG_PATH_BYTES) {
            return fail(why, STATUS_TOO_LARGE,
                        "--config: the path has %zu bytes; at most %d are allowed",
                        strlen(command->file), CONFIG_PATH_BYTES - 1);
        }
        status = text_file_read(command->file, CONFIG_MAX_BYTES, &text, &n_bytes, why);
        if (status) {
            return fail_within(why, "--config");
        }
    }
    if (status) {
        return status;
    }
    status = config_doc_parse(text, n_bytes, command->file ? command->file : "", &doc, why);
    heap_free(text);
    if (status) {
        return status;
    }
    status = put_all(command, &doc, why);
    if (status) {
        config_doc_fini(&doc);
        return status;
    }
    *out_doc = doc;
    return STATUS_OK;
}
