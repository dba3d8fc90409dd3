/* The launchers of the kernels themselves, as the table that kernels/cuda/ops.c calls. */
#include "kernels/cuda/kernels.h"

#define LAUNCHER(name) .name = cuda_launch_##name,
const struct cuda_kernels cuda_kernels = {CUDA_KERNELS(LAUNCHER)};
