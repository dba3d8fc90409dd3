/* A stream that is never behind: a launch runs before it returns. For tests of kernels. */
#include "kernels/cuda/emulate/enqueue.h"

#include <stdlib.h>
#include <string.h>

void emulate_enqueue(cudaStream_t stream, const char *name, void (*run)(void *closure),
                     const void *closure, size_t bytes)
{
    void *copy = malloc(bytes);
    (void)stream;
    (void)name;
    if (copy == NULL) {
        abort();
    }
    memcpy(copy, closure, bytes);
    run(copy);
    free(copy);
}
