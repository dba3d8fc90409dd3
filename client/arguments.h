/* The command line of ballastctl: options before or after the verb, checked against the table
 * of verbs. Pure but for getopt's own state; main thread. */
#ifndef BALLAST_CLIENT_ARGUMENTS_H
#define BALLAST_CLIENT_ARGUMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "client/discover.h"
#include "client/text.h"
#include "proto/base/status.h"
#include "proto/control.pb-c.h"

struct verb;

enum color_when { COLOR_WHEN_AUTO, COLOR_WHEN_ALWAYS, COLOR_WHEN_NEVER };

enum { ARGUMENTS_MAX_CHANGES = 32, ARGUMENTS_KEY_BYTES = 64 };

/* Everything a verb may be told. Strings are borrowed from argv. */
struct arguments {
    const struct verb *verb; /* NULL with only --help or --version */
    struct target target;
    bool json, help, version;
    enum color_when color;
    double timeout_s; /* 0: not given */

    Ballast__V1__Phase at_peak; /* UNSPECIFIED: live */
    uint64_t from, after;
    uint64_t count; /* 0: not given */
    uint64_t interval_ms;
    bool follow, dry_run, wait, no_wait;
    bool has_if_generation;
    uint64_t if_generation;
    const char *output;
    Ballast__Control__V1__WaitRequest condition; /* of `wait --for` */
    uint64_t for_steps;                          /* of `resume --for` */

    char *const *operands;
    size_t n_operands;
};

/* Parse argv (which getopt reorders; the strings stay). INVALID or UNKNOWN_KEY with a text
 * that names the argument, what is allowed and the nearest verb or option. */
enum status arguments_parse(int argc, char **argv, struct arguments *out_arguments,
                            struct failure *why) MUST_CHECK;

/* One line an option that `verb` takes (all verbs' common ones when NULL). */
void arguments_put_options(const struct verb *verb, struct text *out);

/* The name in a NULL-terminated list nearest to `name`, NULL if none is near. */
const char *arguments_nearest(const char *name, const char *const *names);

#endif
