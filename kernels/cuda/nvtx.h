/* Ranges for a profiler's time line: step > phase > layer. Nothing where the toolkit has no NVTX;
 * next to nothing where no profiler listens. Main thread. */
#ifndef BALLAST_KERNELS_CUDA_NVTX_H
#define BALLAST_KERNELS_CUDA_NVTX_H

#include <stdbool.h>
#include "kernels/ops.h"

/* Which ranges are open. Zero: none. */
struct nvtx_ranges {
    bool step_open, phase_open, layer_open;
    struct body body;
};

/* A body begins: closes what it is not part of, opens what it is. */
void nvtx_enter(struct nvtx_ranges *ranges, const struct body *body);
/* It ends; its step and phase stay open for the next. */
void nvtx_leave(struct nvtx_ranges *ranges);
/* Close all. */
void nvtx_close(struct nvtx_ranges *ranges);

#endif
