/* Replicated fp32 gradient accumulators. See grads.h. */
#include "worker/state/grads.h"

enum status grads_init(struct grads *grads, const struct units *units, struct device *device,
                       struct ledger *ledger, struct failure *why)
{
    *grads = (struct grads){.units = units};
    const size_t bytes = units->n_elems * sizeof(float);
    enum status status =
        region_init(&grads->region, "grads", CATEGORY_GRADS, device, ledger, bytes, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = region_resize(&grads->region, bytes, why);
    if (status != STATUS_OK) {
        region_fini(&grads->region);
        return status;
    }
    region_use(&grads->region, bytes);
    return STATUS_OK;
}

void grads_fini(struct grads *grads)
{
    region_fini(&grads->region);
}

static float *accumulator(struct grads *grads, uint32_t unit)
{
    return (float *)(void *)grads->region.base + grads->units->units[unit].offset;
}

struct zero_gap {
    struct ops *ops;
    float *data;
};

static void zero_gap(void *user, size_t offset, size_t n)
{
    const struct zero_gap *gap = user;
    gap->ops->zero(gap->ops, gap->data + offset, n * sizeof(float));
}

struct unit_grad grads_begin(struct grads *grads, struct workspace *workspace, struct ops *ops,
                             uint32_t unit, bool first_micro_step)
{
    struct unit_grad grad = {0};
    if (first_micro_step) {
        grad.data = accumulator(grads, unit);
        return grad;
    }
    grad.buffer = workspace_reserve(workspace, "unit_grad", CATEGORY_GRADS,
                                    grads->units->units[unit].n_elems * sizeof(float));
    grad.data = grad.buffer.data;
    units_each_gap(grads->units, unit, zero_gap, &(struct zero_gap){ops, grad.data});
    return grad;
}

void grads_end(struct grads *grads, struct workspace *workspace, struct ops *ops, uint32_t unit,
               struct unit_grad *grad)
{
    if (grad->buffer.data != NULL) {
        ops->add(ops, accumulator(grads, unit), grad->data, grads->units->units[unit].n_elems);
        workspace_release(workspace, &grad->buffer);
    }
    *grad = (struct unit_grad){0};
}

/* One bucket: my slice's parts from all ranks, summed in rank order into my slice. */
static enum status reduce_bucket(struct ops *ops, struct comm *comm, float *base,
                                 size_t slice_elems, size_t offset, size_t n, float *parts,
                                 struct failure *why)
{
    struct ticket ticket;
    enum status status = comm->table->scatter_parts(comm, base, sizeof(float), slice_elems, offset,
                                                    n, parts, &ticket, why);
    if (status == STATUS_OK) {
        status = comm->table->wait(comm, &ticket, why);
    }
    if (status == STATUS_OK) {
        float *mine = base + comm->rank * slice_elems + offset;
        ops->sum_parts(ops, mine, parts, comm->size, n, n);
    }
    return status;
}

static enum status reduce_unit(struct grads *grads, struct ops *ops, struct comm *comm,
                               uint32_t unit, float *parts, size_t bucket_elems,
                               struct failure *why)
{
    const size_t slice_elems = grads->units->units[unit].slice_elems;
    float *base = accumulator(grads, unit);
    for (size_t offset = 0; offset < slice_elems; offset += bucket_elems) {
        const size_t left = slice_elems - offset;
        const size_t n = left < bucket_elems ? left : bucket_elems;
        const enum status status =
            reduce_bucket(ops, comm, base, slice_elems, offset, n, parts, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    struct ticket ticket;
    const enum status status = comm->table->gather_slices(comm, base, sizeof(float), slice_elems, 0,
                                                          slice_elems, &ticket, why);
    return status == STATUS_OK ? comm->table->wait(comm, &ticket, why) : status;
}

enum status grads_reduce(struct grads *grads, struct workspace *workspace, struct ops *ops,
                         struct comm *comm, size_t bucket_bytes, struct failure *why)
{
    if (comm->size == 1) {
        return STATUS_OK;
    }
    size_t largest = 0;
    for (uint32_t unit = 0; unit < grads->units->n_units; unit++) {
        const size_t slice_elems = grads->units->units[unit].slice_elems;
        largest = slice_elems > largest ? slice_elems : largest;
    }
    size_t bucket_elems = bucket_bytes / sizeof(float) / comm->size / UNIT_SLICE_ELEMS *
                          UNIT_SLICE_ELEMS;
    bucket_elems = bucket_elems < UNIT_SLICE_ELEMS ? UNIT_SLICE_ELEMS : bucket_elems;
    bucket_elems = bucket_elems > largest ? largest : bucket_elems;
    struct buffer parts = workspace_reserve(workspace, "reduce_parts", CATEGORY_COMM,
                                            bucket_elems * comm->size * sizeof(float));
    enum status status = STATUS_OK;
    for (uint32_t unit = 0; unit < grads->units->n_units && status == STATUS_OK; unit++) {
        status = reduce_unit(grads, ops, comm, unit, parts.data, bucket_elems, why);
    }
    if (status == STATUS_OK) {
        workspace_release(workspace, &parts);
    }
    return status;
}

float *grads_slice(struct grads *grads, uint32_t unit, uint32_t slice)
{
    return accumulator(grads, unit) + slice * grads->units->units[unit].slice_elems;
}
