/* The launchers of the stand-in: the CPU device's operations, or the GPU's kernels run by fibres,
 * as BALLAST_STANDIN_KERNELS says ("cpu", the default, or "fibres"). The second is the whole
 * code of the product and slow, the first is quick. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/emulate/launch_cpu.h"

const struct cuda_kernels *cuda_kernels_choose(void)
{
    const char *which = getenv("BALLAST_STANDIN_KERNELS");
    if (which == NULL || strcmp(which, "cpu") == 0) {
        return &cuda_kernels_cpu;
    }
    assert(strcmp(which, "fibres") == 0);
    return &cuda_kernels;
}
