/* Norm and clipping. See clip.h. */
#include "worker/state/clip.h"
#include <math.h>

double clip_factor(double norm, double limit)
{
    return limit > 0.0 && norm > limit ? limit / norm : 1.0;
}

/* Squares of a few units' slices on their way from the device to the sum. */
enum { CHUNK = 64 };

/* partial[first .. first + n) to the host. */
static enum status read_squares(struct device *device, const double *partial, size_t n,
                                double *host, struct failure *why)
{
    struct ticket ticket;
    const enum status status = device->table->copy(device, host, partial, n * sizeof(double),
                                                   COPY_TO_HOST, &ticket, why);
    return status == STATUS_OK ? device->table->wait(device, &ticket, why) : status;
}

/* Every rank has the squares of all slices. partial: (units, slices). */
static enum status sum_all(struct grads *grads, struct device *device, const double *partial,
                           double *out_sum, struct failure *why)
{
    const size_t n = (size_t)grads->state->units->n_units * grads->state->units->world_size;
    double host[CHUNK] = {0};
    double sum = 0.0;
    for (size_t at = 0; at < n; at += CHUNK) {
        const size_t count = n - at < CHUNK ? n - at : CHUNK;
        const enum status status = read_squares(device, partial + at, count, host, why);
        if (status != STATUS_OK) {
            return status;
        }
        for (size_t i = 0; i < count; i++) {
            sum += host[i];
        }
    }
    *out_sum = sum;
    return STATUS_OK;
}

/* Every rank has the squares of its own slices: added in the same order. partial: (units). */
static enum status sum_own(struct grads *grads, struct device *device, const double *partial,
                           double *out_sum, struct failure *why)
{
    struct comm *comm = grads->comm;
    const size_t n = grads->state->units->n_units;
    double host[CHUNK] = {0};
    double all[COMM_MAX_RANKS]; /* (rank, unit) of a chunk */
    const size_t fitting = COMM_MAX_RANKS / comm->size;
    const size_t chunk = fitting < CHUNK ? fitting : CHUNK;
    double sum = 0.0;
    for (size_t at = 0; at < n; at += chunk) {
        const size_t count = n - at < chunk ? n - at : chunk;
        enum status status = read_squares(device, partial + at, count, host, why);
        if (status == STATUS_OK) {
            status = comm->table->exchange(comm, "norm", host, count * sizeof *host, all, why);
        }
        if (status != STATUS_OK) {
            return status;
        }
        for (size_t i = 0; i < count; i++) {
            for (uint32_t rank = 0; rank < comm->size; rank++) {
                sum += all[rank * count + i];
            }
        }
    }
    *out_sum = sum;
    return STATUS_OK;
}

enum status clip_norm(struct grads *grads, struct device *device, double *out_norm,
                      struct failure *why)
{
    const struct units *units = grads->state->units;
    const bool whole = grads->state->layout.states_whole;
    const uint32_t first = whole ? 0 : grads->state->rank;
    const uint32_t n_slices = whole ? units->world_size : 1;
    struct buffer squares =
        workspace_reserve(grads->workspace, "norm_squares", CATEGORY_TEMP,
                          (size_t)units->n_units * n_slices * sizeof(double));
    double *partial = squares.data;
    for (uint32_t unit = 0; unit < units->n_units; unit++) {
        for (uint32_t i = 0; i < n_slices; i++) {
            grads->ops->sum_squares(grads->ops, &partial[unit * n_slices + i],
                                    grads_slice(grads, unit, first + i),
                                    units->units[unit].slice_elems);
        }
    }
    double sum = 0.0;
    const enum status status = whole ? sum_all(grads, device, partial, &sum, why)
                                     : sum_own(grads, device, partial, &sum, why);
    if (status == STATUS_OK) {
        workspace_release(grads->workspace, &squares);
        *out_norm = sqrt(sum);
    }
    return status;
}
