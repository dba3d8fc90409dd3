/* Ranges for a profiler. See nvtx.h. */
#include "kernels/cuda/nvtx.h"
#include <stdio.h>

#if defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define HAVE_NVTX 1
#endif
#endif

static void push(const char *what, uint32_t number)
{
#ifdef HAVE_NVTX
    char text[48];
    snprintf(text, sizeof text, "%s %u", what, number);
    nvtxRangePushA(text);
#else
    (void)what, (void)number;
#endif
}

static void pop(bool *open)
{
#ifdef HAVE_NVTX
    if (*open) {
        nvtxRangePop();
    }
#endif
    *open = false;
}

void nvtx_leave(struct nvtx_ranges *ranges)
{
    pop(&ranges->layer_open);
}

void nvtx_close(struct nvtx_ranges *ranges)
{
    pop(&ranges->layer_open);
    pop(&ranges->phase_open);
    pop(&ranges->step_open);
}

void nvtx_enter(struct nvtx_ranges *ranges, const struct body *body)
{
    const struct body *last = &ranges->body;
    pop(&ranges->layer_open);
    if (last->step != body->step) {
        nvtx_close(ranges);
    }
    if (last->section != body->section || last->pass != body->pass) {
        pop(&ranges->phase_open);
    }
    if (!ranges->step_open) {
        push("step", body->step);
    }
    if (!ranges->phase_open) {
        push("phase", body->section * 100 + body->pass);
    }
    push("layer", body->layer);
    *ranges = (struct nvtx_ranges){true, true, true, *body};
}
