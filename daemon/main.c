/* ballastd's command line.
 *
 *   ballastd --run-dir DIR --run-id ID --socket PATH --link-path PATH [--ready-fd FD]
 *            [--restarted] [--log-level error|warn|info|debug]
 *
 * DIR and the PATHs are absolute; see proto/socket_path.h for how worker and client agree on
 * them. On FD, one line is written when the start is over: "ready", or a status name and the
 * reason; then it is closed. With FD the log goes to DIR/daemon.log, without it to stderr. Started
 * by worker/spawn.c. Exit codes: 0 the run is over, or SIGTERM; 1 it did not
 * start; 2 usage. */
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "daemon/daemon.h"
#include "proto/base/log.h"
#include "proto/base/units.h"

enum { EXIT_USAGE = 2 };

struct arguments {
    struct daemon_options daemon;
    int ready_fd; /* -1: none */
    enum log_level level;
};

static const char usage[] =
    "usage: ballastd --run-dir DIR --run-id ID --socket PATH --link-path PATH\n"
    "                [--ready-fd FD] [--restarted] [--log-level error|warn|info|debug]\n"
    "The daemon of one run. ballast-worker starts it; there is no need to do so by hand.\n";

static bool parse_level(const char *text, enum log_level *out_level)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(names[i], text) == 0) {
            *out_level = (enum log_level)i;
            return true;
        }
    }
    return false;
}

static enum status parse(int count, char **words, struct arguments *out, struct failure *why)
{
    static const struct option options[] = {
        {"run-dir", required_argument, NULL, 'd'},   {"run-id", required_argument, NULL, 'i'},
        {"socket", required_argument, NULL, 's'},    {"link-path", required_argument, NULL, 'l'},
        {"ready-fd", required_argument, NULL, 'f'},  {"restarted", no_argument, NULL, 'r'},
        {"log-level", required_argument, NULL, 'v'}, {NULL, 0, NULL, 0}};
    struct arguments arguments = {.ready_fd = -1, .level = LOG_INFO};
    int64_t number = 0;
    opterr = 0;
    for (int option; (option = getopt_long(count, words, "", options, NULL)) != -1;) {
        switch (option) {
        case 'd':
            arguments.daemon.run_dir = optarg;
            break;
        case 'i':
            arguments.daemon.run_id = optarg;
            break;
        case 's':
            arguments.daemon.socket_path = optarg;
            break;
        case 'l':
            arguments.daemon.link_path = optarg;
            break;
        case 'r':
            arguments.daemon.restarted = true;
            break;
        case 'f':
            if (units_parse_int(optarg, 3, 1024, &number) != STATUS_OK)
                return fail(why, STATUS_INVALID, "--ready-fd %s is not a descriptor in 3..1024",
                            optarg);
            arguments.ready_fd = (int)number;
            break;
        case 'v':
            if (!parse_level(optarg, &arguments.level))
                return fail(why, STATUS_INVALID,
                            "--log-level %s is not one of error warn info debug", optarg);
            break;
        default:
            return fail(why, STATUS_INVALID, "'%s' is not understood", words[optind - 1]);
        }
    }
    if (optind != count)
        return fail(why, STATUS_INVALID, "'%s' is not understood", words[optind]);
    if (!arguments.daemon.run_dir || !arguments.daemon.run_id || !arguments.daemon.socket_path ||
        !arguments.daemon.link_path)
        return fail(why, STATUS_INVALID,
                    "--run-dir, --run-id, --socket and --link-path are needed");
    *out = arguments;
    return STATUS_OK;
}

/* The starter waits for this line; when it is gone it no longer matters. */
static void report(int fd, const char *status, const char *text)
{
    char line[FAILURE_TEXT_BYTES + 64];
    int n = snprintf(line, sizeof line, "%s%s%s\n", status, text[0] ? " " : "", text);
    if (fd >= 0 && n > 0) {
        if (write(fd, line, (size_t)n) < 0)
            log_warn("the starter does not wait for this daemon any more");
        close(fd);
    }
}

/* Errors go to stderr as well as to the log file. Here both would be daemon.log, so stderr is let
 * go; sanitizers keep it for what they have to say. */
static void release_stderr(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0) {
        dup2(null, STDERR_FILENO);
        close(null);
    }
#endif
}

static void on_ready(void *context)
{
    struct arguments *arguments = context;
    report(arguments->ready_fd, "ready", "");
    arguments->ready_fd = -1;
}

int main(int count, char **words)
{
    struct arguments arguments;
    struct failure why;
    log_init("ballastd", -1, LOG_INFO);
    if (parse(count, words, &arguments, &why) != STATUS_OK) {
        fprintf(stderr, "ballastd: %s\n%s", why.text, usage);
        return EXIT_USAGE;
    }
    log_init("ballastd", -1, arguments.level);
    umask(077);
    enum status status = STATUS_OK;
    if (arguments.ready_fd >= 0) {
        char path[PATH_MAX];
        fcntl(arguments.ready_fd, F_SETFD, FD_CLOEXEC);
        snprintf(path, sizeof path, "%s/daemon.log", arguments.daemon.run_dir);
        status = log_to_file(path);
        if (status == STATUS_OK) {
            log_quiet(true);
            release_stderr();
        } else {
            fail(&why, status, "cannot write %s: %s", path, status_text(status));
        }
    }
    arguments.daemon.on_ready = on_ready;
    arguments.daemon.context = &arguments;
    if (status == STATUS_OK)
        status = daemon_run(&arguments.daemon, &why);
    if (status == STATUS_OK || status == STATUS_STOPPED)
        return EXIT_SUCCESS;
    log_error("%s", why.text);
    report(arguments.ready_fd, status_name(status), why.text);
    return EXIT_FAILURE;
}
