/* Status codes as text, and the failure that explains one. Owns nothing; any thread. */
#include "proto/base/status.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/utf8.h"

const char *status_text(enum status status)
{
    switch (status) {
#define X(name, value, text)                                                                       \
    case STATUS_##name:                                                                            \
        return text;
        STATUS_LIST(X)
#undef X
    }
    return "unknown status";
}

const char *status_name(enum status status)
{
    switch (status) {
#define X(name, value, text)                                                                       \
    case STATUS_##name:                                                                            \
        return #name;
        STATUS_LIST(X)
#undef X
    }
    return "UNKNOWN";
}

enum status status_from_name(const char *name)
{
#define X(code, value, text)                                                                       \
    if (strcmp(name, #code) == 0) {                                                                \
        return STATUS_##code;                                                                      \
    }
    STATUS_LIST(X)
#undef X
    return STATUS_INVALID;
}

enum status status_from_errno(int error)
{
    switch (error) {
    case 0:
        return STATUS_OK;
    case ENOMEM:
        return STATUS_OUT_OF_MEMORY;
    case ENOSPC:
    case EDQUOT:
        return STATUS_NO_SPACE;
    case EACCES:
    case EPERM:
    case EROFS:
        return STATUS_PERMISSION;
    case ENOENT:
    case ENOTDIR:
        return STATUS_NOT_FOUND;
    case EINVAL:
        return STATUS_INVALID;
    case EBUSY:
        return STATUS_BUSY;
    case EFBIG:
    case ENAMETOOLONG:
        return STATUS_TOO_LARGE;
    case ENOSYS:
    case EOPNOTSUPP:
        return STATUS_UNSUPPORTED;
    case ETIMEDOUT:
        return STATUS_DEADLINE;
    case EPIPE:
    case ECONNRESET:
    case ECONNREFUSED:
        return STATUS_LINK_LOST;
    case EADDRINUSE:
        return STATUS_ADDRESS_IN_USE;
    case EAGAIN:
    case EINTR:
        return STATUS_AGAIN;
    default:
        return STATUS_IO;
    }
}

/* A text that was cut must not end inside a character: it goes into messages that have to be
 * UTF-8. */
static void close_text(struct failure *why, int length)
{
    if (length < 0) {
        why->text[0] = '\0';
    } else if ((size_t)length >= sizeof why->text) {
        why->text[utf8_cut(why->text, sizeof why->text - 1)] = '\0';
    }
}

enum status fail(struct failure *why, enum status status, const char *format, ...)
{
    if (why == NULL) {
        return status;
    }
    /* Through a buffer, since an argument may be the old text. */
    struct failure made = {.status = status};
    va_list list;
    va_start(list, format);
    int length = vsnprintf(made.text, sizeof made.text, format, list);
    va_end(list);
    close_text(&made, length);
    *why = made;
    return status;
}

enum status fail_within(struct failure *why, const char *format, ...)
{
    assert(why != NULL);
    struct failure made = {.status = why->status};
    va_list list;
    va_start(list, format);
    int length = vsnprintf(made.text, sizeof made.text, format, list);
    va_end(list);
    close_text(&made, length);
    size_t used = strlen(made.text);
    size_t room = sizeof made.text - used;
    int more = snprintf(made.text + used, room, ": %s", why->text);
    close_text(&made, more < 0 ? more : (int)used + more);
    *why = made;
    return why->status;
}
