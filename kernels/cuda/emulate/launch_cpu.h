/* The table of launchers whose kernels are the CPU device's operations, queued on the stand-in's
 * streams. Same contract as `cuda_kernels` in kernels/cuda/kernels.h. */
#ifndef BALLAST_KERNELS_CUDA_EMULATE_LAUNCH_CPU_H
#define BALLAST_KERNELS_CUDA_EMULATE_LAUNCH_CPU_H

#include "kernels/cuda/kernels.h"

extern const struct cuda_kernels cuda_kernels_cpu;

#endif
