/* Norm and clipping. See clip.h. */
#include "worker/state/clip.h"
#include <math.h>
#include "proto/base/heap.h"

double clip_factor(double norm, double limit)
{
    return limit > 0.0 && norm > limit ? limit / norm : 1.0;
}

enum status clip_norm(struct grads *grads, struct workspace *workspace, struct ops *ops,
                      struct device *device, double *out_norm, struct failure *why)
{
    const struct units *units = grads->units;
    const size_t n = (size_t)units->n_units * units->world_size;
    struct buffer squares =
        workspace_reserve(workspace, "norm_squares", CATEGORY_TEMP, n * sizeof(double));
    double *partial = squares.data;
    for (uint32_t unit = 0; unit < units->n_units; unit++) {
        for (uint32_t slice = 0; slice < units->world_size; slice++) {
            ops->sum_squares(ops, &partial[unit * units->world_size + slice],
                             grads_slice(grads, unit, slice), units->units[unit].slice_elems);
        }
    }
    double sum = 0.0;
    enum status status = STATUS_OK;
    /* Copied to the host a few at a time, so no host buffer grows with the model. */
    enum { CHUNK = 64 };
    double host[CHUNK] = {0};
    for (size_t at = 0; at < n && status == STATUS_OK; at += CHUNK) {
        const size_t count = n - at < CHUNK ? n - at : CHUNK;
        struct ticket ticket;
        status = device->table->copy(device, host, &partial[at], count * sizeof(double),
                                     COPY_TO_HOST, &ticket, why);
        if (status == STATUS_OK) {
            status = device->table->wait(device, &ticket, why);
        }
        for (size_t i = 0; i < count; i++) {
            sum += host[i];
        }
    }
    if (status == STATUS_OK) {
        workspace_release(workspace, &squares);
        *out_norm = sqrt(sum);
    }
    return status;
}
