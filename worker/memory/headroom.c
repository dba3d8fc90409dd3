/* How much memory this node has left for its ranks: MemAvailable and the limits of the control
 * groups this process lives in, version 1 and 2. Reads files; any thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "worker/memory/admit.h"

static bool read_number(const char *path, uint64_t *out_value)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    /* "max" means no limit and does not parse as a number. */
    const bool found = fscanf(file, "%" SCNu64, out_value) == 1;
    fclose(file);
    return found;
}

static uint64_t available_bytes(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    uint64_t kib = UINT64_MAX / 1024;
    if (file == NULL) {
        return UINT64_MAX;
    }
    char line[128];
    while (fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) == 1) {
            break;
        }
    }
    fclose(file);
    return kib * 1024;
}

/* Room under one group's limit; UINT64_MAX when it has none. */
static uint64_t group_room(const char *root, const char *group, const char *limit_name,
                           const char *usage_name)
{
    char path[1200];
    uint64_t limit = 0;
    uint64_t usage = 0;
    snprintf(path, sizeof path, "%s%s/%s", root, group, limit_name);
    if (!read_number(path, &limit)) {
        return UINT64_MAX;
    }
    snprintf(path, sizeof path, "%s%s/%s", root, group, usage_name);
    if (!read_number(path, &usage)) {
        return UINT64_MAX;
    }
    return limit > usage ? limit - usage : 0;
}

/* The least room from this group up to the root of its hierarchy. */
static uint64_t least_room(const char *root, char *group, const char *limit_name,
                           const char *usage_name)
{
    uint64_t least = UINT64_MAX;
    for (;;) {
        const uint64_t room = group_room(root, group, limit_name, usage_name);
        least = room < least ? room : least;
        char *slash = strrchr(group, '/');
        if (slash == NULL) {
            return least;
        }
        *slash = '\0';
    }
}

uint64_t admit_node_headroom(void)
{
    uint64_t least = available_bytes();
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (file == NULL) {
        return least;
    }
    char line[1024];
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (group == NULL) {
            continue;
        }
        *group++ = '\0';
        uint64_t room = UINT64_MAX;
        if (strcmp(controllers + 1, "memory") == 0) {
            room = least_room("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                              "memory.usage_in_bytes");
        } else if (controllers[1] == '\0') {
            room = least_room("/sys/fs/cgroup", group, "memory.max", "memory.current");
        }
        least = room < least ? room : least;
    }
    fclose(file);
    return least;
}
