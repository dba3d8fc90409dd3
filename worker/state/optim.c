/* AdamW over slices. See optim.h. */
#include "worker/state/optim.h"
#include <math.h>

float *optim_m(struct optim *optim, uint32_t unit, uint32_t slice)
{
    return state_block_slice(optim->state, PART_MOMENT_M, unit, slice);
}

float *optim_v(struct optim *optim, uint32_t unit, uint32_t slice)
{
    return state_block_slice(optim->state, PART_MOMENT_V, unit, slice);
}

/* ---- on the device ---- */

/* Elements [at, at + n) of a slice, of one kind of tensor. */
struct range {
    uint32_t unit, slice;
    size_t at, n;
    const struct adamw *adamw;
};

static void update_on_device(struct optim *optim, struct params *params, struct grads *grads,
                             struct ops *ops, const struct range *r)
{
    char *copy = params_copy(params, r->unit, r->slice);
    ops->adamw(ops, params_slice(params, r->unit, r->slice) + r->at,
               copy == NULL ? NULL : copy + r->at * ops->elem_bytes,
               optim_m(optim, r->unit, r->slice) + r->at, optim_v(optim, r->unit, r->slice) + r->at,
               grads_slice(grads, r->unit, r->slice) + r->at, r->n, r->adamw);
}

static void copy(struct optim *optim, void *dst, const void *src, size_t bytes,
                 enum copy_kind kind, struct ticket *ticket);
static void wait(struct optim *optim, struct ticket *ticket);

/* The same where the step's parameters are on the host: through `room` on the device. */
static void update_and_return(struct optim *optim, struct params *params, struct grads *grads,
                              struct ops *ops, void *room, const struct range *r)
{
    const bool fp32 = optim->state->dtype == DTYPE_FP32;
    const size_t most = optim->state->layout.staging_elems, elem = ops->elem_bytes;
    char *host = (char *)state_params_slice(optim->state, r->unit, r->slice) + r->at * elem;
    for (size_t at = 0; at < r->n; at += most) {
        const size_t n = r->n - at < most ? r->n - at : most;
        struct ticket ticket = {0};
        if (fp32) {
            copy(optim, room, host + at * elem, n * elem, COPY_FROM_HOST, &ticket);
            wait(optim, &ticket);
        }
        float *master = fp32 ? room : params_slice(params, r->unit, r->slice) + r->at + at;
        ops->adamw(ops, master, fp32 ? NULL : room, optim_m(optim, r->unit, r->slice) + r->at + at,
                   optim_v(optim, r->unit, r->slice) + r->at + at,
                   grads_slice(grads, r->unit, r->slice) + r->at + at, n, r->adamw);
        copy(optim, host + at * elem, room, n * elem, COPY_TO_HOST, &ticket);
        wait(optim, &ticket);
    }
}

/* ---- on the host ---- */

enum { SLOTS = STAGING_BUFFERS / 2 };

/* A piece of the range on its way: gradients in, results out. */
struct piece {
    struct ticket grads, params;
    float *in;  /* gradients */
    void *out;  /* fp32: the parameters, in and out; else the copy in the compute type, out */
};

static void note(struct optim *optim, enum status status, const struct failure *why)
{
    if (status != STATUS_OK && optim->error.status == STATUS_OK) {
        optim->error = *why;
    }
}

static void copy(struct optim *optim, void *dst, const void *src, size_t bytes,
                 enum copy_kind kind, struct ticket *ticket)
{
    struct failure why = {0};
    struct device *device = optim->state->device;
    note(optim, device->table->copy(device, dst, src, bytes, kind, ticket, &why), &why);
}

static void wait(struct optim *optim, struct ticket *ticket)
{
    struct failure why = {0};
    struct device *device = optim->state->device;
    note(optim, device->table->wait(device, ticket, &why), &why);
}

/* Where the step's own parameters of the range are: fp32 master or compute copy. */
static char *device_params(struct params *params, const struct range *r, size_t *out_elem)
{
    const struct state *state = params->state;
    *out_elem = dtype_bytes(state->dtype);
    return (char *)state_params_slice(state, r->unit, r->slice) + r->at * *out_elem;
}

static void fetch(struct optim *optim, struct params *params, struct grads *grads,
                  const struct range *r, size_t first, size_t n, struct piece *piece)
{
    copy(optim, piece->in, grads_slice(grads, r->unit, r->slice) + r->at + first,
         n * sizeof(float), COPY_TO_HOST, &piece->grads);
    if (optim->state->dtype == DTYPE_FP32 && !optim->state->layout.params_host) {
        size_t elem;
        const char *from = device_params(params, r, &elem);
        copy(optim, piece->out, from + first * elem, n * elem, COPY_TO_HOST, &piece->params);
    }
}

static void update_piece(struct optim *optim, struct params *params, const struct range *r,
                         size_t first, size_t n, struct piece *piece)
{
    struct ops *ops = optim->state->host.ops;
    const bool fp32 = optim->state->dtype == DTYPE_FP32;
    size_t elem;
    char *to = device_params(params, r, &elem) + first * elem;
    wait(optim, &piece->grads);
    wait(optim, &piece->params);
    if (optim->state->layout.params_host) {
        piece->out = to; /* no way to go */
    }
    float *master = fp32 ? piece->out : params_slice(params, r->unit, r->slice) + r->at + first;
    ops->adamw(ops, master, fp32 ? NULL : piece->out,
               optim_m(optim, r->unit, r->slice) + r->at + first,
               optim_v(optim, r->unit, r->slice) + r->at + first, piece->in, n, r->adamw);
    if (piece->out != to) {
        struct ticket ticket = {0};
        copy(optim, to, piece->out, n * elem, COPY_FROM_HOST, &ticket);
        wait(optim, &ticket);
    }
}

static void update_on_host(struct optim *optim, struct params *params, struct grads *grads,
                           const struct range *r)
{
    const size_t most = optim->state->layout.staging_elems;
    struct piece pieces[SLOTS] = {0};
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        pieces[slot].in = state_staging(optim->state, 2 * slot);
        pieces[slot].out = state_staging(optim->state, 2 * slot + 1);
    }
    size_t first = 0, n = r->n < most ? r->n : most;
    fetch(optim, params, grads, r, first, n, &pieces[0]);
    for (uint32_t i = 0; n > 0; i++) {
        const size_t next = first + n;
        const size_t next_n = r->n - next < most ? r->n - next : most;
        if (next_n > 0) {
            fetch(optim, params, grads, r, next, next_n, &pieces[(i + 1) % SLOTS]);
        }
        update_piece(optim, params, r, first, n, &pieces[i % SLOTS]);
        first = next;
        n = next_n;
    }
}

enum status optim_check(struct optim *optim, struct failure *why)
{
    const struct failure error = optim->error;
    optim->error = (struct failure){0};
    return error.status == STATUS_OK ? STATUS_OK : fail(why, error.status, "%s", error.text);
}

/* ---- both ---- */

static void update_unit(struct optim *optim, struct params *params, struct grads *grads,
                        struct ops *ops, void *room, uint32_t unit, uint32_t slice,
                        struct adamw *adamw, double weight_decay)
{
    const struct unit *u = &optim->state->units->units[unit];
    const size_t start = (size_t)slice * u->slice_elems;
    const size_t end = start + u->slice_elems;
    for (uint32_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
        const struct tensor *tensor = &optim->state->units->tensors[i];
        const size_t tensor_end = tensor->offset + tensor->rows * tensor->cols;
        const size_t first = tensor->offset > start ? tensor->offset : start;
        const size_t last = tensor_end < end ? tensor_end : end;
        if (first < last) {
            adamw->weight_decay = tensor->decay ? (float)weight_decay : 0.0f;
            const struct range range = {unit, slice, first - start, last - first, adamw};
            if (state_on_host(optim->state, unit)) {
                update_on_host(optim, params, grads, &range);
            } else if (optim->state->layout.params_host) {
                update_and_return(optim, params, grads, ops, room, &range);
            } else {
                update_on_device(optim, params, grads, ops, &range);
            }
        }
    }
}

void optim_update(struct optim *optim, struct params *params, struct grads *grads, struct ops *ops,
                  uint32_t slice, const struct optim_step *step)
{
    struct adamw adamw = {
        .lr = (float)step->lr,
        .beta1 = (float)step->beta1,
        .beta2 = (float)step->beta2,
        .eps = (float)step->eps,
        .grad_scale = (float)step->grad_scale,
        .bias_correction1 = 1.0 - pow(step->beta1, (double)step->t),
        .bias_correction2 = 1.0 - pow(step->beta2, (double)step->t),
    };
    struct buffer room = {0};
    const struct layout *layout = &optim->state->layout;
    if (layout->params_host && layout->first_host > 0) {
        room = workspace_reserve(optim->workspace, "update_params", CATEGORY_PARAMS,
                                 layout->staging_elems * ops->elem_bytes);
    }
    for (uint32_t unit = 0; unit < optim->state->units->n_units; unit++) {
        update_unit(optim, params, grads, ops, room.data, unit, slice, &adamw,
                    step->weight_decay);
    }
    workspace_release(optim->workspace, &room);
}
