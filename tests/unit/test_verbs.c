/* The command line of ballastctl: options before and after the verb, what each verb takes, what
 * is refused and how, help and version. No run is needed.
 * links: base messages proto client */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include "client/verbs.h"
#include "proto/json.h"
/* Last: its fail() is a macro. */
#include <cmocka.h>

enum { MAX_WORDS = 48 };

/* One command line, cut at blanks as a shell does; the words live as long as the struct. */
struct line {
    char text[512];
    char *argv[MAX_WORDS];
    int argc;
};

static void split(struct line *line, const char *command)
{
    line->argc = 0;
    snprintf(line->text, sizeof line->text, "ballastctl %s", command);
    for (char *word = strtok(line->text, " "); word; word = strtok(NULL, " "))
        line->argv[line->argc++] = word;
    line->argv[line->argc] = NULL;
}

static enum status parse(struct line *line, const char *command, struct arguments *out,
                         struct failure *why)
{
    split(line, command);
    return arguments_parse(line->argc, line->argv, out, why);
}

static void good_lines(void **state)
{
    (void)state;
    struct line line;
    struct arguments a;
    struct failure why;
    assert_int_equal(parse(&line, "status", &a, &why), STATUS_OK);
    assert_string_equal(a.verb->name, "status");
    assert_false(a.json);
    assert_true(a.timeout_s == 0.0);

    /* Options before, after and around the verb say the same. */
    static const char *const orders[] = {"--json --timeout 2.5 steps --count 7 --from=3",
                                         "steps --count 7 --from=3 --json --timeout 2.5",
                                         "--json steps -n 7 --timeout=2.5 --from 3"};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(parse(&line, orders[i], &a, &why), STATUS_OK);
        assert_string_equal(a.verb->name, "steps");
        assert_true(a.json && a.timeout_s == 2.5 && a.count == 7 && a.from == 3);
    }

    assert_int_equal(parse(&line,
                           "set checkpointing=block:1 --wait micro_batch=2 "
                           "--if-generation 0 --socket /x",
                           &a, &why),
                     STATUS_OK);
    assert_true(a.wait && a.has_if_generation && a.if_generation == 0 && !a.dry_run);
    assert_int_equal(a.n_operands, 2);
    assert_string_equal(a.operands[0], "checkpointing=block:1");
    assert_string_equal(a.operands[1], "micro_batch=2");
    assert_string_equal(a.target.socket, "/x");

    assert_int_equal(parse(&line, "memory --at-peak backward", &a, &why), STATUS_OK);
    assert_int_equal(a.at_peak, BALLAST__V1__PHASE__PHASE_BACKWARD);
    assert_int_equal(parse(&line, "events -f --after 12 --color never", &a, &why), STATUS_OK);
    assert_true(a.follow && a.after == 12 && a.color == COLOR_WHEN_NEVER);
    assert_int_equal(parse(&line, "watch --interval 50 --count 2", &a, &why), STATUS_OK);
    assert_true(a.interval_ms == 50 && a.count == 2);
    assert_int_equal(parse(&line, "resume --for 10", &a, &why), STATUS_OK);
    assert_int_equal(a.for_steps, 10);
    assert_int_equal(parse(&line, "resume", &a, &why), STATUS_OK);
    assert_int_equal(a.for_steps, 0);
    assert_int_equal(parse(&line, "plan", &a, &why), STATUS_OK);
}

static void wait_conditions(void **state)
{
    (void)state;
    struct line line;
    struct arguments a;
    struct failure why;
    assert_int_equal(parse(&line, "wait --for step=100", &a, &why), STATUS_OK);
    assert_int_equal(a.condition.condition_case,
                     BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_STEP);
    assert_int_equal(a.condition.step, 100);
    assert_int_equal(parse(&line, "--for generation=0 wait", &a, &why), STATUS_OK);
    assert_int_equal(a.condition.condition_case,
                     BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_GENERATION);
    assert_int_equal(parse(&line, "wait --for event=oom", &a, &why), STATUS_OK);
    assert_string_equal(a.condition.event, "oom");
    assert_int_equal(parse(&line, "wait --for end", &a, &why), STATUS_OK);
    assert_true(a.condition.end);
    assert_int_equal(parse(&line, "wait --for paused", &a, &why), STATUS_OK);
    assert_int_equal(a.condition.condition_case,
                     BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_PAUSED);
}

/* Every refusal names what is wrong; `hint` must be part of the text. */
static void bad_lines(void **state)
{
    (void)state;
    static const struct {
        const char *line, *hint;
    } cases[] = {
        {"", "no verb"},
        {"--json", "no verb"},
        {"statsu", "did you mean 'status'"},
        {"resmue", "did you mean 'resume'"},
        {"xyzzy", "unknown verb 'xyzzy';"},
        {"status --jsno", "did you mean '--json'"},
        {"status -x", "unknown option '-x'"},
        {"status -xh", "unknown option '-x'"},
        {"status --dry-run", "--dry-run is not an option of status"},
        {"watch --follow", "--follow is not an option of watch"},
        {"status extra", "status does not take 'extra'"},
        {"set", "set needs KEY=VALUE..."},
        {"set foo", "'foo' is not KEY=VALUE"},
        {"set =1", "'=1' is not KEY=VALUE"},
        {"set zero.stage=", "'zero.stage=' is not KEY=VALUE"},
        {"plan micro_batch", "'micro_batch' is not KEY=VALUE"},
        {"set a=1 --wait=2", "--wait takes no value"},
        {"steps --count", "--count needs a value"},
        {"steps --count 0", "--count 0: not a whole number from 1"},
        {"steps --count 4294967296", "not a whole number"},
        {"steps --count -1", "not a whole number"},
        {"steps --from 1x", "--from 1x"},
        {"watch --interval 49", "50 to 60000"},
        {"watch --interval 60001", "50 to 60000"},
        {"status --timeout 0", "--timeout 0"},
        {"status --timeout -1", "--timeout -1"},
        {"status --timeout nan", "--timeout nan"},
        {"status --timeout 1e400", "--timeout 1e400"},
        {"status --color blue", "auto, always or never"},
        {"memory --at-peak backwards", "forward, backward"},
        {"wait", "wait needs --for"},
        {"wait --for step", "--for step: not"},
        {"wait --for step=-1", "--for step=-1"},
        {"wait --for step=1.5", "--for step=1.5"},
        {"wait --for event=", "--for event=: not"},
        {"wait --for ends", "--for ends: not"},
        {"resume --for 0", "--for 0"},
        {"resume --for step=3", "--for step=3"},
        {"status --socket /a --run-dir /b", "give one"},
        {"save --wait --no-wait", "contradict"},
        {"help a b", "help does not take 'b'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct line line;
        struct arguments a = {.count = 77};
        struct failure why = {0};
        enum status status = parse(&line, cases[i].line, &a, &why);
        if (status == STATUS_OK || !strstr(why.text, cases[i].hint))
            fail_msg("'%s' gave %s: '%s', not '%s'", cases[i].line, status_name(status), why.text,
                     cases[i].hint);
        assert_int_equal(a.count, 77); /* outputs are written only on success */
    }
}

static void a_key_longer_than_any_key_is_refused(void **state)
{
    (void)state;
    char key[ARGUMENTS_KEY_BYTES + 8];
    memset(key, 'k', sizeof key);
    strcpy(key + ARGUMENTS_KEY_BYTES, "=1");
    struct arguments a;
    struct failure why;
    char *argv[] = {(char *)"ballastctl", (char *)"set", key, NULL};
    assert_int_equal(arguments_parse(3, argv, &a, &why), STATUS_INVALID);
    /* One letter less is for the daemon to judge. */
    memmove(key, key + 1, sizeof key - 1);
    char *again[] = {(char *)"ballastctl", (char *)"set", key, NULL};
    assert_int_equal(arguments_parse(3, again, &a, &why), STATUS_OK);
}

/* Run the whole program; the exit code. Outputs are the caller's to free(). */
static int run(const char *command, char **out, char **err)
{
    struct line line;
    size_t n_out, n_err;
    split(&line, command);
    FILE *out_file = open_memstream(out, &n_out), *err_file = open_memstream(err, &n_err);
    int code = verbs_main(line.argc, line.argv, out_file, err_file);
    fclose(out_file);
    fclose(err_file);
    return code;
}

static void check_run(const char *command, int code, const char *in_out, const char *in_err)
{
    char *out, *err;
    int got = run(command, &out, &err);
    if (got != code || !strstr(out, in_out) || !strstr(err, in_err) || (!*in_err && *err))
        fail_msg("'%s' exited with %d\nout: %s\nerr: %s", command, got, out, err);
    free(out);
    free(err);
}

static void help_and_version(void **state)
{
    (void)state;
    check_run("--version", 0, "ballastctl " BALLAST_VERSION " (protocol 1.0)\n", "");
    check_run("status -V --json", 0, "\"protocol_major\":1", "");
    check_run("help", 0, "usage: ballastctl VERB", "");
    check_run("--help", 0, "Exit codes: 0 ok, 1 refused or failed", "");
    check_run("help set", 0, "checkpointing=none|selective|split|block:K", "");
    check_run("set --help", 0, "--if-generation N", "");
    check_run("help nothing", 2, "", "unknown verb 'nothing'");
    check_run("", 2, "", "no verb");
    check_run("stauts", 2, "", "did you mean 'status'");
    /* Every verb has its help, and every word of its options is an option. */
    char *usage, *err;
    assert_int_equal(run("help", &usage, &err), 0);
    free(err);
    for (size_t i = 0; i < verbs_n(); i++) {
        const struct verb *verb = verbs_at(i);
        char command[64], *out;
        snprintf(command, sizeof command, "help %s", verb->name);
        assert_int_equal(run(command, &out, &err), 0);
        assert_non_null(strstr(out, verb->summary));
        assert_non_null(strstr(usage, verb->summary));
        char options[128], option[64];
        snprintf(options, sizeof options, "%s", verb->options);
        for (char *word = strtok(options, " "); word; word = strtok(NULL, " ")) {
            snprintf(option, sizeof option, "--%s", word);
            assert_non_null(strstr(out, option));
        }
        free(out);
        free(err);
    }
    free(usage);
}

/* Where no run is, every way of naming one ends with 3 (or 4 when told to wait). */
static void no_run(void **state)
{
    (void)state;
    char folder[] = "/tmp/ballast-test-XXXXXX", command[128], file[64];
    assert_non_null(mkdtemp(folder));
    setenv("XDG_RUNTIME_DIR", folder, 1);
    unsetenv("BALLAST_SOCKET");
    snprintf(command, sizeof command, "status --socket %s/none", folder);
    check_run(command, 3, "", "no socket at");
    snprintf(command, sizeof command, "status --json --run-dir %s", folder);
    check_run(command, 3, "{\"error\":{\"status\":\"NOT_FOUND\"", "control.json");
    snprintf(command, sizeof command, "wait --for end --timeout 0.3 --run-dir %s", folder);
    check_run(command, 4, "", "gave up waiting");

    /* control.json: empty while it is written, not JSON, without a socket. */
    static const struct {
        const char *content, *hint;
    } files[] = {
        {"", "the run is starting"},
        {"{", "does not name a socket"},
        {"[]", "does not name a socket"},
        {"{\"socket\":\"\"}", "the socket path is empty"},
        {"{\"socket\":\"/nonexistent/x.sock\"}", "no socket at /nonexistent/x.sock"},
    };
    snprintf(file, sizeof file, "%s/control.json", folder);
    snprintf(command, sizeof command, "status --run-dir %s", folder);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        FILE *control = fopen(file, "w");
        fputs(files[i].content, control);
        fclose(control);
        check_run(command, 3, "", files[i].hint);
    }
    setenv("BALLAST_SOCKET", "/nonexistent/from-environment", 1);
    check_run("status", 3, "", "no socket at /nonexistent/from-environment");
    /* The command line beats the environment. */
    check_run(command, 3, "", "/nonexistent/x.sock");
    unsetenv("BALLAST_SOCKET");

    char longer[200];
    memset(longer, 'x', sizeof longer);
    memcpy(longer, "ranks --socket /", 16);
    longer[sizeof longer - 1] = '\0';
    check_run(longer, 3, "", "bytes long, the system's limit is 107");
    unlink(file);
    rmdir(folder);
}

static int listen_at(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(fd, 4), 0);
    return fd;
}

/* The only run is found; of several, all are named and none is taken. */
static void the_only_run_is_found(void **state)
{
    (void)state;
    char folder[] = "/tmp/ballast-test-XXXXXX", sockets[64], first[96], second[96];
    assert_non_null(mkdtemp(folder));
    setenv("XDG_RUNTIME_DIR", folder, 1);
    unsetenv("BALLAST_SOCKET");
    snprintf(sockets, sizeof sockets, "%s/ballast", folder);
    assert_int_equal(mkdir(sockets, 0700), 0);
    snprintf(first, sizeof first, "%s/first.sock", sockets);
    snprintf(second, sizeof second, "%s/second.sock", sockets);
    check_run("status", 3, "", "no run of this user is up");
    int first_fd = listen_at(first), second_fd = listen_at(second);
    check_run("status", 3, "", "2 runs are up; choose one");
    check_run("status", 3, "", "first.sock");
    check_run("status", 3, "", "second.sock");
    /* A socket that its run left behind does not count; the other is spoken to. */
    close(second_fd);
    check_run("status --timeout 0.1", 4, "", "first.sock");
    close(first_fd);
    check_run("status", 3, "", "no run of this user is up");
    unlink(first);
    unlink(second);
    rmdir(sockets);
    rmdir(folder);
}

int main(void)
{
    json_use_heap();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_lines),
        cmocka_unit_test(wait_conditions),
        cmocka_unit_test(bad_lines),
        cmocka_unit_test(a_key_longer_than_any_key_is_refused),
        cmocka_unit_test(help_and_version),
        cmocka_unit_test(no_run),
        cmocka_unit_test(the_only_run_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
