/* A test of what must end the process: run it in a child and look at how it died. Include after
 * cmocka.h. */
#ifndef BALLAST_TESTS_LIB_MUST_ABORT_H
#define BALLAST_TESTS_LIB_MUST_ABORT_H

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h> /* last: it has a macro `fail` */

/* `child` has to die by SIGABRT within 20 s with `expected` on its error output. */
static inline void must_abort(void (*child)(void), const char *expected)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    fflush(stderr);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        alarm(20);
        signal(SIGABRT, SIG_DFL);
        child();
        _exit(0);
    }
    close(ends[1]);
    char text[2048];
    size_t n = 0;
    ssize_t got = 0;
    while (n < sizeof text - 1 && (got = read(ends[0], text + n, sizeof text - 1 - n)) > 0) {
        n += (size_t)got;
    }
    text[n] = '\0';
    close(ends[0]);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT || strstr(text, expected) == NULL) {
        fail_msg("status %#x, expected an abort with '%s', got: %s", (unsigned)status, expected,
                 text);
    }
}

#endif
