/* The launchers of the product: the CUDA kernels. The stand-in has another of this file. */
#include "kernels/cuda/cuda_device.h"

const struct cuda_kernels *cuda_kernels_choose(void)
{
    return &cuda_kernels;
}
