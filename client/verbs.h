/* The verbs of ballastctl: one table, from which usage, help and dispatch come.
 *
 * verbs_main() is the whole program but for process set-up: it parses, connects, prints to
 * the given streams and returns the exit code, so tests run it in their own process. */
#ifndef BALLAST_CLIENT_VERBS_H
#define BALLAST_CLIENT_VERBS_H

#include <stdio.h>
#include "client/arguments.h"
#include "client/session.h"

/* One run of one verb. */
struct call {
    const struct arguments *arguments;
    struct style style;
    bool is_screen; /* `out` is a terminal that can be redrawn */
    FILE *out, *err;
    double deadline_s; /* for requests and replies */
    struct session session;
};

struct verb {
    const char *name;
    const char *operands; /* as shown in usage: "KEY=VALUE..."; "" for none */
    const char *options;  /* long names, separated by blanks */
    const char *summary;  /* one line for `help` */
    const char *details;  /* lines for `help VERB` */
    size_t min_operands, max_operands;
    /* Check and convert what only this verb understands; may be NULL. */
    enum status (*check)(struct arguments *arguments, const char *for_text, struct failure *why);
    enum exit_code (*run)(struct call *call);
    /* The same from the run's files, when nobody answers and its folder is known; may be NULL. */
    enum exit_code (*run_from_files)(struct call *call);
    bool is_offline; /* needs no run */
};

size_t verbs_n(void);
const struct verb *verbs_at(size_t index);
const struct verb *verbs_find(const char *name); /* NULL if there is none */

int verbs_main(int argc, char **argv, FILE *out, FILE *err);

#endif
