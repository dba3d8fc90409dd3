/* Gradient accumulators and their sums over ranks. See grads.h. */
#include "worker/state/grads.h"

/* A bucket is part of my slice of one unit. Two are on their way at a time: while the parts of one
 * travel, those of the one before are added up. */
enum { BUCKETS = 2 };

/* ---- a micro-step's gradients ---- */

/* Written straight into the accumulator, or beside it and then added or summed up. */
static bool is_direct(const struct grads *grads, bool first_micro_step)
{
    const bool alone = grads->comm->size == 1;
    return first_micro_step && (alone || !grads->state->layout.reduce_each);
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

struct unit_grad grads_begin(struct grads *grads, uint32_t unit, bool first_micro_step)
{
    struct unit_grad grad = {.first = first_micro_step};
    if (is_direct(grads, first_micro_step)) {
        grad.data = grads_slice(grads, unit, 0);
        return grad;
    }
    const struct units *units = grads->state->units;
    grad.buffer = workspace_reserve(grads->workspace, "unit_grad", CATEGORY_GRADS,
                                    units->units[unit].n_elems * sizeof(float));
    grad.data = grad.buffer.data;
    units_each_gap(units, unit, zero_gap, &(struct zero_gap){grads->ops, grad.data});
    return grad;
}

float *grads_slice(struct grads *grads, uint32_t unit, uint32_t slice)
{
    return state_grads_slice(grads->state, unit, slice);
}

/* ---- sums over ranks ---- */

struct bucket {
    struct ticket ticket;
    uint32_t unit;
    size_t offset, n; /* elements of the slice; n = 0: nothing on its way */
    float *parts;     /* (size, n) */
};

struct reduction {
    struct grads *grads;
    struct bucket buckets[BUCKETS];
    uint64_t n_started;
    float *reduced;          /* room for a bucket's sum that is added afterwards; NULL: assigned */
    bool gather;             /* a finished unit's sums to all ranks */
    struct ticket gathering; /* the last finished unit's */
};

/* The unit's sums are complete: to all ranks, while the next unit's parts come in. */
static enum status start_gather(struct reduction *r, uint32_t unit, struct failure *why)
{
    struct comm *comm = r->grads->comm;
    const size_t n = r->grads->state->units->units[unit].slice_elems;
    const enum status status = comm->table->wait(comm, &r->gathering, why);
    return status == STATUS_OK
               ? comm->table->gather_slices(comm, state_grads(r->grads->state, unit),
                                            sizeof(float), n, 0, n, &r->gathering, why)
               : status;
}

/* The ranks' parts of a bucket have come: add them in rank order into my slice. */
static enum status finish_bucket(struct reduction *r, struct bucket *bucket, struct failure *why)
{
    struct grads *grads = r->grads;
    struct comm *comm = grads->comm;
    if (bucket->n == 0) {
        return STATUS_OK;
    }
    const enum status status = comm->table->wait(comm, &bucket->ticket, why);
    if (status != STATUS_OK) {
        return status;
    }
    float *mine = grads_slice(grads, bucket->unit, comm->rank) + bucket->offset;
    float *sum = r->reduced == NULL ? mine : r->reduced;
    const size_t n = bucket->n;
    bucket->n = 0;
    grads->ops->sum_parts(grads->ops, sum, bucket->parts, comm->size, n, n);
    if (sum != mine) {
        grads->ops->add(grads->ops, mine, sum, n);
    }
    const bool last =
        bucket->offset + n == grads->state->units->units[bucket->unit].slice_elems;
    return last && r->gather ? start_gather(r, bucket->unit, why) : STATUS_OK;
}

/* All buckets of a unit whose whole gradient lies at `base`; the last stays on its way. */
static enum status start_unit(struct reduction *r, uint32_t unit, const float *base,
                              size_t bucket_elems, struct failure *why)
{
    struct comm *comm = r->grads->comm;
    const size_t slice_elems = r->grads->state->units->units[unit].slice_elems;
    enum status status = STATUS_OK;
    for (size_t offset = 0; offset < slice_elems && status == STATUS_OK; offset += bucket_elems) {
        const size_t left = slice_elems - offset;
        struct bucket *bucket = &r->buckets[r->n_started++ % BUCKETS];
        bucket->unit = unit;
        bucket->offset = offset;
        bucket->n = left < bucket_elems ? left : bucket_elems;
        status = comm->table->scatter_parts(comm, base, sizeof(float), slice_elems, offset,
                                            bucket->n, bucket->parts, &bucket->ticket, why);
        if (status == STATUS_OK) {
            status = finish_bucket(r, &r->buckets[r->n_started % BUCKETS], why);
        }
    }
    return status;
}

static enum status finish_all(struct reduction *r, struct failure *why)
{
    struct comm *comm = r->grads->comm;
    const enum status status =
        finish_bucket(r, &r->buckets[(r->n_started + 1) % BUCKETS], why);
    return status == STATUS_OK ? comm->table->wait(comm, &r->gathering, why) : status;
}

/* Elements of a bucket of slices of this size: all ranks' parts together, `bytes` shared by the
 * buckets. A slice is worth two buckets at least, so that none is larger than what travels. */
static size_t bucket_of(const struct grads *grads, size_t slice_elems)
{
    const size_t allowed = grads->bucket_bytes / sizeof(float) / grads->comm->size;
    const size_t elems =
        (allowed < slice_elems ? allowed : slice_elems) / BUCKETS / UNIT_SLICE_ELEMS;
    return elems == 0 ? UNIT_SLICE_ELEMS : elems * UNIT_SLICE_ELEMS;
}

static struct buffer reserve_parts(struct grads *grads, size_t elems)
{
    return workspace_reserve(grads->workspace, "reduce_parts", CATEGORY_COMM,
                             elems * grads->comm->size * sizeof(float));
}

/* ---- by the library ---- */

/* The sum of the unit at `base` over ranks, into my slice of the accumulator; `base` is used up
 * where the sum is added. */
static enum status reduce_by_library(struct grads *grads, uint32_t unit, float *base, bool add,
                                     struct failure *why)
{
    struct comm *comm = grads->comm;
    const size_t n = grads->state->units->units[unit].slice_elems;
    float *mine = grads_slice(grads, unit, comm->rank);
    float *sum = add ? base + comm->rank * n : mine;
    struct ticket ticket = {0};
    enum status status = comm->table->reduce_slices(comm, base, n, sum, &ticket, why);
    if (status == STATUS_OK) {
        status = comm->table->wait(comm, &ticket, why);
    }
    if (status == STATUS_OK && add) {
        grads->ops->add(grads->ops, mine, sum, n);
    }
    return status;
}

static enum status reduce_all_by_library(struct grads *grads, struct failure *why)
{
    struct reduction reduction = {.grads = grads};
    enum status status = STATUS_OK;
    for (uint32_t unit = 0; unit < grads->state->units->n_units && status == STATUS_OK; unit++) {
        status = reduce_by_library(grads, unit, state_grads(grads->state, unit), false, why);
        if (status == STATUS_OK && grads->state->layout.states_whole) {
            status = start_gather(&reduction, unit, why);
        }
    }
    return status == STATUS_OK ? finish_all(&reduction, why) : status;
}

/* ---- of one unit, when it is complete ---- */

static enum status reduce_unit(struct grads *grads, uint32_t unit, const struct unit_grad *grad,
                               struct failure *why)
{
    if (grads->by_library) {
        return reduce_by_library(grads, unit, grad->data, !grad->first, why);
    }
    const size_t slice_elems = grads->state->units->units[unit].slice_elems;
    const size_t elems = bucket_of(grads, slice_elems);
    struct reduction reduction = {.grads = grads};
    struct buffer parts[BUCKETS] = {0};
    const int n_parts = slice_elems > elems ? BUCKETS : 1;
    for (int i = 0; i < n_parts; i++) {
        parts[i] = reserve_parts(grads, elems);
        reduction.buckets[i].parts = parts[i].data;
    }
    struct buffer reduced = {0};
    if (!grad->first) {
        reduced = workspace_reserve(grads->workspace, "reduced", CATEGORY_COMM,
                                    elems * sizeof(float));
        reduction.reduced = reduced.data;
    }
    enum status status = start_unit(&reduction, unit, grad->data, elems, why);
    if (status == STATUS_OK) {
        status = finish_all(&reduction, why);
    }
    workspace_release(grads->workspace, &reduced);
    for (int i = 0; i < n_parts; i++) {
        workspace_release(grads->workspace, &parts[i]);
    }
    return status;
}

void grads_end(struct grads *grads, uint32_t unit, struct unit_grad *grad)
{
    if (grad->buffer.data != NULL) {
        struct failure why = {0};
        if (grads->state->layout.reduce_each && grads->comm->size > 1) {
            const enum status status = reduce_unit(grads, unit, grad, &why);
            if (status != STATUS_OK && grads->error.status == STATUS_OK) {
                grads->error = why;
            }
        } else {
            grads->ops->add(grads->ops, grads_slice(grads, unit, 0), grad->data,
                            grads->state->units->units[unit].n_elems);
        }
        workspace_release(grads->workspace, &grad->buffer);
    }
    *grad = (struct unit_grad){0};
}

enum status grads_check(struct grads *grads, struct failure *why)
{
    if (grads->error.status == STATUS_OK) {
        return STATUS_OK;
    }
    const enum status status = grads->error.status;
    *why = grads->error;
    grads->error = (struct failure){0};
    return status;
}

/* ---- of all, before the update ---- */

static enum status reduce_all(struct grads *grads, struct failure *why)
{
    const struct units *units = grads->state->units;
    size_t largest = 0;
    for (uint32_t unit = 0; unit < units->n_units; unit++) {
        largest = units->units[unit].slice_elems > largest ? units->units[unit].slice_elems
                                                           : largest;
    }
    const size_t elems = bucket_of(grads, largest);
    struct reduction reduction = {.grads = grads, .gather = grads->state->layout.states_whole};
    struct buffer parts[BUCKETS];
    for (int i = 0; i < BUCKETS; i++) {
        parts[i] = reserve_parts(grads, elems);
        reduction.buckets[i].parts = parts[i].data;
    }
    enum status status = STATUS_OK;
    for (uint32_t unit = 0; unit < units->n_units && status == STATUS_OK; unit++) {
        status = start_unit(&reduction, unit, state_grads(grads->state, unit), elems, why);
    }
    if (status == STATUS_OK) {
        status = finish_all(&reduction, why);
    }
    for (int i = 0; i < BUCKETS && status == STATUS_OK; i++) {
        workspace_release(grads->workspace, &parts[i]);
    }
    return status;
}

enum status grads_reduce(struct grads *grads, struct failure *why)
{
    const struct layout *layout = &grads->state->layout;
    if (grads->comm->size == 1) {
        return STATUS_OK;
    }
    if (!layout->reduce_each) {
        return grads->by_library ? reduce_all_by_library(grads, why) : reduce_all(grads, why);
    }
    struct reduction reduction = {.grads = grads};
    enum status status = STATUS_OK;
    for (uint32_t unit = 0;
         unit < grads->state->units->n_units && layout->states_whole && status == STATUS_OK;
         unit++) {
        status = start_gather(&reduction, unit, why);
    }
    return status == STATUS_OK ? finish_all(&reduction, why) : status;
}
