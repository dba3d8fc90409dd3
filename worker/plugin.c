/* Finding and loading libballast-cuda.so. See plugin.h. */
#include "worker/plugin.h"
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char library_name[] = "libballast-cuda.so";

/* The first of the two places where an installation has it. */
static void find_library(char *path, size_t room)
{
    char program[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    program[n < 0 ? 0 : n] = '\0';
    char *slash = strrchr(program, '/');
    if (slash != NULL) {
        *slash = '\0';
    }
    static const char *const folders[] = {"", "/../lib", NULL};
    for (const char *const *folder = folders; *folder != NULL; folder++) {
        snprintf(path, room, "%s%s/%s", program, *folder, library_name);
        if (access(path, R_OK) == 0) {
            return;
        }
    }
    snprintf(path, room, "%s", library_name); /* the loader's own search */
}

static enum status load(struct plugin *plugin, const char *path, struct failure *why)
{
    /* Never unmapped: CUDA keeps threads and exit handlers of its own. */
    plugin->library = dlopen(path, RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
    if (plugin->library == NULL) {
        return fail(why, STATUS_UNSUPPORTED,
                    "the CUDA device cannot be loaded (%s): build with nvcc, or use --device cpu",
                    dlerror());
    }
    cuda_plugin_entry *entry = NULL;
    *(void **)&entry = dlsym(plugin->library, "ballast_cuda");
    plugin->cuda = entry == NULL ? NULL : entry();
    if (plugin->cuda == NULL || plugin->cuda->version != CUDA_PLUGIN_VERSION) {
        return fail(why, STATUS_UNSUPPORTED,
                    "%s is of another version of Ballast: install both from one build", path);
    }
    plugin->cuda->host(fault_fires);
    return plugin->cuda->count(&plugin->n_gpus, why);
}

enum status plugin_open(struct plugin *plugin, struct failure *why)
{
    *plugin = (struct plugin){0};
    char found[PATH_MAX + sizeof library_name + 16];
    const char *path = getenv("BALLAST_CUDA_LIBRARY");
    if (path == NULL || path[0] == '\0') {
        find_library(found, sizeof found);
        path = found;
    }
    const enum status status = load(plugin, path, why);
    if (status != STATUS_OK) {
        plugin_close(plugin);
    }
    return status;
}

void plugin_close(struct plugin *plugin)
{
    if (plugin->library != NULL) {
        dlclose(plugin->library);
    }
    *plugin = (struct plugin){0};
}
