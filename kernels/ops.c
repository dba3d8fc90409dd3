/* What all tables share: the compute types. Pure; any thread. */
#include "kernels/ops.h"

#include <assert.h>

size_t dtype_bytes(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_FP32:
        return 4;
    case DTYPE_BF16:
        return 2;
    }
    assert(false);
    return 0;
}

const char *dtype_name(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? "bf16" : "fp32";
}
