/* The command line of ballast-worker, and the document it makes together with the file. Main
 * thread, at start. */
#ifndef BALLAST_WORKER_CONFIG_ARGS_H
#define BALLAST_WORKER_CONFIG_ARGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include "worker/config.h"
#include "worker/config_json.h"

enum { COMMAND_MAX_PUTS = 128, COMMAND_MAX_WORLD = 1 << 20 };

/* Strings are argv's. */
struct config_command {
    const char *file; /* NULL: none */
    bool plan, check, json, help, version;
    bool resume, resume_latest, allow_faults;
    uint64_t resume_step;
    uint32_t world_size, expect_ranks;
    uint32_t n_faults;
    const char *faults[CONFIG_MAX_FAULTS];
    size_t n_puts; /* flags that stand for a key, and --set, in the order given */
    struct config_put {
        const char *flag; /* "steps"; NULL for --set */
        const char *key;  /* "ballast.steps"; NULL for --set */
        const char *value;
    } puts[COMMAND_MAX_PUTS];
};

struct config_flag {
    const char *name;
    int code;
    const char *value; /* what it takes; NULL: nothing */
    const char *key;   /* the key it stands for; NULL: none */
    const char *help;
};
/* NULL after the last. */
const struct config_flag *config_flag_at(size_t index);

/* UNKNOWN_KEY (with the nearest flag), INVALID, OUT_OF_RANGE, TOO_LARGE, UNSUPPORTED, CONFLICT,
 * REFUSED. With help or version set, nothing else was looked at. */
enum status config_command_parse(int argc, char **argv, uint32_t world_size,
                                 struct config_command *out_command,
                                 struct failure *why) MUST_CHECK;
/* The file (if any) with flags and then --set put over it. */
enum status config_command_doc(const struct config_command *command, struct config_doc *out_doc,
                               struct failure *why) MUST_CHECK;
/* Everything a person can ask for, from the three tables: flags, keys, strategy keys. */
void config_print_help(FILE *out);

#endif
