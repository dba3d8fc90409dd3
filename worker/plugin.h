/* The CUDA device's library, loaded at run time: the same installation runs with a driver and
 * without. Main thread, at start and end. */
#ifndef BALLAST_WORKER_PLUGIN_H
#define BALLAST_WORKER_PLUGIN_H

#include "kernels/cuda/plugin.h"

struct plugin {
    void *library;                  /* owned; NULL: not loaded */
    const struct cuda_plugin *cuda; /* borrowed from it */
    int n_gpus;                     /* that this process may see */
};

/* Load libballast-cuda.so (beside the program, in ../lib, or where BALLAST_CUDA_LIBRARY says)
 * and count the GPUs. Makes no context on any. UNSUPPORTED says which of library, driver and GPU is
 * missing. */
enum status plugin_open(struct plugin *plugin, struct failure *why) MUST_CHECK;
void plugin_close(struct plugin *plugin);

#endif
