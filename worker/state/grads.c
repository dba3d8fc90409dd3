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

/* ---- the reduction ---- */

/* A bucket is part of my slice of one unit. Two are on their way at a time: while the parts of one
 * travel, those of the one before are added up. A unit's sums travel back while the next
 * unit's parts come in. */
enum { BUCKETS = 2 };

struct bucket {
    struct ticket ticket;
    uint32_t unit;
    size_t offset, n; /* elements of the slice; n = 0: nothing on its way */
    float *parts;     /* (size, n) */
};

struct reduction {
    struct grads *grads;
    struct ops *ops;
    struct comm *comm;
    struct bucket buckets[BUCKETS];
    uint64_t n_started;
    struct ticket gathering; /* the last finished unit's sums */
};

/* The unit's sums are complete: to all ranks. */
static enum status start_gather(struct reduction *r, uint32_t unit, struct failure *why)
{
    const size_t slice_elems = r->grads->units->units[unit].slice_elems;
    enum status status = r->comm->table->wait(r->comm, &r->gathering, why);
    if (status == STATUS_OK) {
        status = r->comm->table->gather_slices(r->comm, accumulator(r->grads, unit),
                                               sizeof(float), slice_elems, 0, slice_elems,
                                               &r->gathering, why);
    }
    return status;
}

/* The ranks' parts of a bucket have come: add them in rank order into my slice. */
static enum status finish_bucket(struct reduction *r, struct bucket *bucket, struct failure *why)
{
    if (bucket->n == 0) {
        return STATUS_OK;
    }
    enum status status = r->comm->table->wait(r->comm, &bucket->ticket, why);
    if (status != STATUS_OK) {
        return status;
    }
    const size_t slice_elems = r->grads->units->units[bucket->unit].slice_elems;
    float *mine = accumulator(r->grads, bucket->unit) + r->comm->rank * slice_elems;
    r->ops->sum_parts(r->ops, mine + bucket->offset, bucket->parts, r->comm->size, bucket->n,
                      bucket->n);
    if (bucket->offset + bucket->n == slice_elems) {
        status = start_gather(r, bucket->unit, why);
    }
    bucket->n = 0;
    return status;
}

static enum status start_bucket(struct reduction *r, uint32_t unit, size_t offset, size_t n,
                                struct failure *why)
{
    struct bucket *bucket = &r->buckets[r->n_started++ % BUCKETS];
    struct bucket *before = &r->buckets[r->n_started % BUCKETS];
    bucket->unit = unit;
    bucket->offset = offset;
    bucket->n = n;
    const enum status status = r->comm->table->scatter_parts(
        r->comm, accumulator(r->grads, unit), sizeof(float),
        r->grads->units->units[unit].slice_elems, offset, n, bucket->parts, &bucket->ticket, why);
    return status == STATUS_OK ? finish_bucket(r, before, why) : status;
}

static enum status reduce_units(struct reduction *r, size_t bucket_elems, struct failure *why)
{
    const struct units *units = r->grads->units;
    enum status status = STATUS_OK;
    for (uint32_t unit = 0; unit < units->n_units; unit++) {
        const size_t slice_elems = units->units[unit].slice_elems;
        for (size_t offset = 0; offset < slice_elems && status == STATUS_OK;
             offset += bucket_elems) {
            const size_t left = slice_elems - offset;
            status = start_bucket(r, unit, offset, left < bucket_elems ? left : bucket_elems, why);
        }
    }
    if (status == STATUS_OK) {
        status = finish_bucket(r, &r->buckets[(r->n_started + 1) % BUCKETS], why);
    }
    return status == STATUS_OK ? r->comm->table->wait(r->comm, &r->gathering, why) : status;
}

/* Elements of a bucket: of all ranks' parts together, `bytes` shared by the buckets. The largest
 * slice is worth two buckets at least, so that none of them is larger than what travels. */
static size_t choose_bucket(const struct units *units, uint32_t size, size_t bytes)
{
    size_t largest = 0;
    for (uint32_t unit = 0; unit < units->n_units; unit++) {
        const size_t slice_elems = units->units[unit].slice_elems;
        largest = slice_elems > largest ? slice_elems : largest;
    }
    const size_t allowed = bytes / sizeof(float) / size;
    const size_t elems = (allowed < largest ? allowed : largest) / BUCKETS / UNIT_SLICE_ELEMS;
    return elems == 0 ? UNIT_SLICE_ELEMS : elems * UNIT_SLICE_ELEMS;
}

enum status grads_reduce(struct grads *grads, struct workspace *workspace, struct ops *ops,
                         struct comm *comm, size_t bucket_bytes, struct failure *why)
{
    if (comm->size == 1) {
        return STATUS_OK;
    }
    const size_t elems = choose_bucket(grads->units, comm->size, bucket_bytes);
    struct reduction reduction = {.grads = grads, .ops = ops, .comm = comm};
    struct buffer parts[BUCKETS];
    for (int i = 0; i < BUCKETS; i++) {
        parts[i] = workspace_reserve(workspace, "reduce_parts", CATEGORY_COMM,
                                     elems * comm->size * sizeof(float));
        reduction.buckets[i].parts = parts[i].data;
    }
    const enum status status = reduce_units(&reduction, elems, why);
    for (int i = 0; i < BUCKETS && status == STATUS_OK; i++) {
        workspace_release(workspace, &parts[i]);
    }
    return status;
}

float *grads_slice(struct grads *grads, uint32_t unit, uint32_t slice)
{
    return accumulator(grads, unit) + slice * grads->units->units[unit].slice_elems;
}
