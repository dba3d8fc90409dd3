/* The last out-of-memory report on disk. Owns nothing; any thread. */
#include "proto/oom_file.h"

#include <limits.h>
#include <stdio.h>
#include "proto/base/heap.h"
#include "proto/frame.h"
#include "proto/text_file.h"

static enum status find(const char *run_dir, char path[static PATH_MAX], struct failure *why)
{
    if (snprintf(path, PATH_MAX, "%s/oom.pb", run_dir) >= PATH_MAX)
        return fail(why, STATUS_TOO_LARGE, "the run folder's path is too long: '%.200s...'",
                    run_dir);
    return STATUS_OK;
}

enum status oom_file_write(const char *run_dir, const Ballast__V1__OomReport *report,
                           struct failure *why)
{
    char path[PATH_MAX];
    enum status status = find(run_dir, path, why);
    if (status != STATUS_OK)
        return status;
    size_t n = protobuf_c_message_get_packed_size(&report->base);
    uint8_t *bytes = heap_alloc(n + 1); /* a report of nothing but defaults has no bytes */
    if (!bytes)
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory to pack the %zu bytes of %s", n, path);
    protobuf_c_message_pack(&report->base, bytes);
    status = text_file_replace(path, bytes, n, why);
    heap_free(bytes);
    return status;
}

enum status oom_file_read(const char *run_dir, Ballast__V1__OomReport **out_report,
                          struct failure *why)
{
    char path[PATH_MAX], *text = NULL;
    size_t n = 0;
    ProtobufCMessage *message = NULL;
    enum status status = find(run_dir, path, why);
    if (status == STATUS_OK)
        status = text_file_read(path, FRAME_MAX_BYTES, &text, &n, why);
    if (status != STATUS_OK)
        return status;
    status = frame_decode(&ballast__v1__oom_report__descriptor, (const uint8_t *)text, n, &message);
    heap_free(text);
    if (status == STATUS_OUT_OF_MEMORY)
        return fail(why, status, "no memory to read %s", path);
    if (status != STATUS_OK)
        return fail(why, STATUS_CORRUPT, "%s is not an out-of-memory report of this build", path);
    *out_report = (Ballast__V1__OomReport *)message;
    return STATUS_OK;
}
