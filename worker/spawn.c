/* Starting the daemon: descriptors, session, and the wait for its first word. */
#include "worker/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "proto/base/units.h"

extern char **environ;

/* The daemon finds its end of the pipe here. */
enum { READY_FD = 3, FIRST_CLOSED_FD = 4 };

static enum status find_executable(const struct spawn_options *options, char out_path[PATH_MAX],
                                   struct failure *why)
{
    char path[PATH_MAX];
    if (options->executable) {
        if (snprintf(path, sizeof path, "%s", options->executable) >= (int)sizeof path)
            return fail(why, STATUS_TOO_LARGE, "the path of ballastd is too long");
    } else {
        ssize_t n = readlink("/proc/self/exe", path, sizeof path - sizeof "ballastd");
        if (n < 0)
            return fail(why, status_from_errno(errno), "cannot read /proc/self/exe: %s",
                        strerror(errno));
        path[n] = '\0';
        char *slash = strrchr(path, '/');
        strcpy(slash ? slash + 1 : path, "ballastd");
    }
    if (access(path, X_OK) != 0)
        return fail(why, STATUS_NOT_FOUND,
                    "cannot start the daemon: %s: %s; ballastd has to lie beside ballast-worker",
                    path, strerror(errno));
    memcpy(out_path, path, sizeof path);
    return STATUS_OK;
}

static int set_actions(posix_spawn_file_actions_t *actions, const char *log_path, int ready_fd)
{
    int error = posix_spawn_file_actions_addopen(actions, 0, "/dev/null", O_RDWR, 0);
    if (!error)
        error = posix_spawn_file_actions_adddup2(actions, 0, 1);
    if (!error)
        error = posix_spawn_file_actions_addopen(actions, 2, log_path,
                                                 O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (!error)
        error = posix_spawn_file_actions_adddup2(actions, ready_fd, READY_FD);
    if (!error)
        error = posix_spawn_file_actions_addclosefrom_np(actions, FIRST_CLOSED_FD);
    return error;
}

static int set_attributes(posix_spawnattr_t *attributes)
{
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    int error = posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK |
                                                         POSIX_SPAWN_SETSIGDEF);
    if (!error)
        error = posix_spawnattr_setsigmask(attributes, &none);
    if (!error)
        error = posix_spawnattr_setsigdefault(attributes, &all);
    return error;
}

static enum status start(const struct spawn_options *options, const char *path, int ready_fd,
                         pid_t *out_pid, struct failure *why)
{
    char log_path[PATH_MAX], ready[16];
    if (snprintf(log_path, sizeof log_path, "%s/daemon.log", options->run_dir) >=
        (int)sizeof log_path)
        return fail(why, STATUS_TOO_LARGE, "the run folder's path is too long: %s",
                    options->run_dir);
    snprintf(ready, sizeof ready, "%d", READY_FD);
    const char *arguments[16] = {"ballastd",           "--run-dir", options->run_dir,
                                 "--run-id",           options->run_id, "--socket",
                                 options->socket_path, "--link-path",   options->link_path,
                                 "--ready-fd",         ready};
    if (options->restarted)
        arguments[11] = "--restarted";
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    int error = posix_spawn_file_actions_init(&actions);
    if (error)
        return fail(why, status_from_errno(error), "cannot start the daemon: %s", strerror(error));
    error = posix_spawnattr_init(&attributes);
    if (!error) {
        error = set_actions(&actions, log_path, ready_fd);
        if (!error)
            error = set_attributes(&attributes);
        if (!error) /* exec leaves the strings alone */
            error = posix_spawn(out_pid, path, &actions, &attributes,
                                (char *const *)(void *)arguments, environ);
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&actions);
    if (error)
        return fail(why, status_from_errno(error), "cannot start %s: %s", path, strerror(error));
    return STATUS_OK;
}

/* Read what the daemon reports until it closes the pipe, ends its line, or time is up. Returns
 * false on a time-out. */
static bool read_report(int fd, char *text, size_t text_bytes)
{
    double deadline_s = units_monotonic_s() + SPAWN_READY_MS / 1000.0;
    size_t used = 0;
    text[0] = '\0';
    while (used + 1 < text_bytes && !strchr(text, '\n')) {
        double left_s = deadline_s - units_monotonic_s();
        if (left_s <= 0)
            return false;
        struct pollfd entry = {.fd = fd, .events = POLLIN};
        int n = poll(&entry, 1, (int)(left_s * 1000.0) + 1);
        if (n < 0 && errno != EINTR)
            return false;
        if (n <= 0)
            continue;
        ssize_t got = read(fd, text + used, text_bytes - used - 1);
        if (got < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (got <= 0)
            break;
        used += (size_t)got;
        text[used] = '\0';
    }
    return true;
}

static void end_child(pid_t pid, int *out_exit)
{
    kill(pid, SIGKILL);
    int code = 0;
    while (waitpid(pid, &code, 0) < 0 && errno == EINTR)
        ;
    *out_exit = WIFEXITED(code)     ? WEXITSTATUS(code)
                : WIFSIGNALED(code) ? 128 + WTERMSIG(code)
                                    : 128;
}

/* The report is "ready", or a status name and a text. */
static enum status read_outcome(pid_t pid, int fd, struct failure *why)
{
    char report[FAILURE_TEXT_BYTES];
    bool in_time = read_report(fd, report, sizeof report);
    char *newline = strchr(report, '\n');
    if (newline)
        *newline = '\0';
    if (in_time && strcmp(report, "ready") == 0)
        return STATUS_OK;
    int code = 0;
    end_child(pid, &code);
    if (!in_time)
        return fail(why, STATUS_DEADLINE, "ballastd (pid %d) was not ready within %d ms", (int)pid,
                    SPAWN_READY_MS);
    char *space = strchr(report, ' ');
    if (!space)
        return fail(why, STATUS_LINK_LOST,
                    "ballastd (pid %d) ended before it was ready, exit code %d; see daemon.log in "
                    "the run folder", (int)pid, code);
    *space = '\0';
    return fail(why, status_from_name(report), "ballastd: %s", space + 1);
}

enum status spawn_daemon(const struct spawn_options *options, pid_t *out_pid, struct failure *why)
{
    char path[PATH_MAX];
    enum status status = find_executable(options, path, why);
    if (status != STATUS_OK)
        return status;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return fail(why, status_from_errno(errno), "cannot make a pipe: %s", strerror(errno));
    /* A descriptor numbered READY_FD would keep its close-on-exec flag in the child's dup2. */
    if (ends[1] <= READY_FD) {
        int moved = fcntl(ends[1], F_DUPFD_CLOEXEC, FIRST_CLOSED_FD);
        if (moved < 0) {
            status = fail(why, status_from_errno(errno), "cannot move a descriptor: %s",
                          strerror(errno));
            goto undo_pipe;
        }
        close(ends[1]);
        ends[1] = moved;
    }
    pid_t pid = 0;
    status = start(options, path, ends[1], &pid, why);
    if (status != STATUS_OK)
        goto undo_pipe;
    close(ends[1]);
    ends[1] = -1;
    status = read_outcome(pid, ends[0], why);
    if (status == STATUS_OK)
        *out_pid = pid;
undo_pipe:
    if (ends[1] >= 0)
        close(ends[1]);
    close(ends[0]);
    return status;
}

bool spawn_reap(pid_t pid, int *out_exit)
{
    int code = 0;
    pid_t got = waitpid(pid, &code, WNOHANG);
    if (got == 0)
        return false;
    if (out_exit)
        *out_exit = got < 0 ? -1
                            : (WIFEXITED(code) ? WEXITSTATUS(code)
                                               : 128 + (WIFSIGNALED(code) ? WTERMSIG(code) : 0));
    return true;
}
