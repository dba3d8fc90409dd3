/* Status codes and the text that explains a failure.
 *
 * Owns the one list of codes and `struct failure`. A fallible function returns
 * `enum status`; where the reason has to reach a person it also takes a
 * `struct failure *why`, filled once by whoever first knows the cause, with the
 * numbers in it. Callers pass both up unchanged. Any thread. */
#ifndef BALLAST_PROTO_BASE_STATUS_H
#define BALLAST_PROTO_BASE_STATUS_H

#define MUST_CHECK __attribute__((warn_unused_result))

/* X(name, value, text). Ranges say what broke: 1xx the request, 2xx the rank,
 * 3xx the run, 4xx the daemon or a connection to it. */
#define STATUS_LIST(X)                                                                             \
    X(OK, 0, "ok")                                                                                 \
    X(INVALID, 100, "invalid value")                                                               \
    X(OUT_OF_RANGE, 101, "out of range")                                                           \
    X(UNKNOWN_KEY, 102, "unknown key")                                                             \
    X(CONFLICT, 103, "conflict")                                                                   \
    X(NOT_FOUND, 104, "not found")                                                                 \
    X(UNSUPPORTED, 105, "not supported")                                                           \
    X(TOO_LARGE, 106, "too large")                                                                 \
    X(PERMISSION, 107, "permission denied")                                                        \
    X(BUSY, 108, "busy")                                                                           \
    X(VERSION, 109, "version mismatch")                                                            \
    X(DOES_NOT_FIT, 110, "does not fit in memory")                                                 \
    X(REFUSED, 111, "refused")                                                                     \
    X(MALFORMED, 112, "malformed")                                                                 \
    X(OUT_OF_MEMORY, 200, "out of memory")                                                         \
    X(IO, 201, "input/output error")                                                               \
    X(NO_SPACE, 202, "no space left")                                                              \
    X(CORRUPT, 203, "corrupt data")                                                                \
    X(BAD_DATA, 204, "bad training data")                                                          \
    X(FAULT_UNFIRED, 205, "a planned fault never fired")                                           \
    X(RANK_LOST, 300, "a rank was lost")                                                           \
    X(DEADLINE, 301, "deadline passed")                                                            \
    X(NON_FINITE, 302, "non-finite value")                                                         \
    X(VOTED_DOWN, 303, "another rank could not")                                                   \
    X(NO_SAVE, 304, "no good save")                                                                \
    X(STOPPED, 305, "stopped")                                                                     \
    X(LINK_LOST, 400, "connection lost")                                                           \
    X(ADDRESS_IN_USE, 401, "address in use")                                                       \
    X(AGAIN, 402, "try again")

enum status {
#define X(name, value, text) STATUS_##name = value,
    STATUS_LIST(X)
#undef X
};

/* Lower-case English for a code, e.g. "out of range"; never NULL. */
const char *status_text(enum status status);
/* The code's name as clients see it, e.g. "OUT_OF_RANGE"; never NULL. */
const char *status_name(enum status status);
/* The code with this name, STATUS_INVALID if there is none. */
enum status status_from_name(const char *name);
/* The STATUS_ code for an errno value (ENOMEM, ENOSPC, EACCES, ... else STATUS_IO). */
enum status status_from_errno(int error);

enum { FAILURE_TEXT_BYTES = 768 };

/* What went wrong, for a person: what, where, which value, which limit, what to do. */
struct failure {
    enum status status;
    char text[FAILURE_TEXT_BYTES];
};

/* Record a failure (cut at the buffer's size) and return its status. `why` may be NULL. */
enum status fail(struct failure *why, enum status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Put "prefix: " before the text of a failure that is passed up. Returns why->status. */
enum status fail_within(struct failure *why, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
