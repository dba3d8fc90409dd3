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

/* The part of a slice that one kind of tensor covers: elements [first, last) of the unit. */
static void update_range(struct optim *optim, struct params *params, struct grads *grads,
                         struct ops *ops, uint32_t unit, uint32_t slice, size_t first, size_t last,
                         const struct adamw *adamw)
{
    const size_t start = (size_t)slice * optim->state->units->units[unit].slice_elems;
    const size_t at = first - start;
    char *copy = params_copy(params, unit, slice);
    ops->adamw(ops, params_slice(params, unit, slice) + at,
               copy == NULL ? NULL : copy + at * ops->elem_bytes, optim_m(optim, unit, slice) + at,
               optim_v(optim, unit, slice) + at, grads_slice(grads, unit, slice) + at, last - first,
               adamw);
}

static void update_unit(struct optim *optim, struct params *params, struct grads *grads,
                        struct ops *ops, uint32_t unit, uint32_t slice, struct adamw *adamw,
                        double weight_decay)
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
            update_range(optim, params, grads, ops, unit, slice, first, last, adamw);
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
    for (uint32_t unit = 0; unit < optim->state->units->n_units; unit++) {
        update_unit(optim, params, grads, ops, unit, slice, &adamw, step->weight_decay);
    }
}
