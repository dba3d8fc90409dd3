/* Replicated parameters and their master. See params.h. */
#include "worker/state/params.h"

/* One region, wholly committed; `used` is what its contents need. */
static enum status open_region(struct region *region, const char *name, enum category category,
                               size_t bytes, size_t used, struct device *device,
                               struct ledger *ledger, struct failure *why)
{
    enum status status = region_init(region, name, category, device, ledger, bytes, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = region_resize(region, bytes, why);
    if (status != STATUS_OK) {
        region_fini(region);
        return status;
    }
    region_use(region, used);
    return STATUS_OK;
}

enum status params_init(struct params *params, const struct units *units, enum dtype dtype,
                        struct device *device, struct ledger *ledger, struct failure *why)
{
    *params = (struct params){
        .units = units,
        .dtype = dtype,
        .block_bytes = device_round(device, units->block_elems * sizeof(float)),
    };
    const size_t bytes = units->n_elems * dtype_bytes(dtype);
    enum status status = open_region(&params->region, "params", CATEGORY_PARAMS, bytes, bytes,
                                     device, ledger, why);
    if (status != STATUS_OK || dtype == DTYPE_FP32) {
        return status;
    }
    status = open_region(&params->master, "master", CATEGORY_OPTIMIZER,
                         params->block_bytes * units->world_size, units->n_elems * sizeof(float),
                         device, ledger, why);
    if (status != STATUS_OK) {
        region_fini(&params->region);
    }
    return status;
}

void params_fini(struct params *params)
{
    region_fini(&params->region);
    if (params->dtype != DTYPE_FP32) {
        region_fini(&params->master);
    }
}

/* Elements [first, last) of the unit that lie in the slice. */
static void seed_slice(struct params *params, struct ops *ops, uint64_t seed, uint32_t index,
                       uint32_t slice)
{
    const struct tensor *tensor = &params->units->tensors[index];
    const size_t slice_elems = params->units->units[tensor->unit].slice_elems;
    const size_t start = slice * slice_elems;
    const size_t end = tensor->offset + tensor->rows * tensor->cols;
    const size_t first = tensor->offset > start ? tensor->offset : start;
    const size_t last = end < start + slice_elems ? end : start + slice_elems;
    if (first >= last) {
        return;
    }
    float *values = params_slice(params, tensor->unit, slice) + (first - start);
    if (tensor->init == INIT_NORMAL) {
        ops->random_normal(ops, values, last - first, tensor->init_std, seed, index,
                           first - tensor->offset);
    } else {
        ops->fill(ops, values, last - first, tensor->init == INIT_ONES ? 1.0f : 0.0f);
    }
}

void params_seed(struct params *params, struct ops *ops, uint64_t seed)
{
    for (uint32_t i = 0; i < params->units->n_tensors; i++) {
        for (uint32_t slice = 0; slice < params->units->world_size; slice++) {
            seed_slice(params, ops, seed, i, slice);
        }
    }
    params_refresh(params, ops);
}

void params_gather(struct params *params, uint32_t unit)
{
    (void)params;
    (void)unit;
}

void *params_get(struct params *params, uint32_t unit, size_t offset)
{
    const size_t at = params->units->units[unit].offset + offset;
    return params->region.base + at * dtype_bytes(params->dtype);
}

void params_release(struct params *params, uint32_t unit)
{
    (void)params;
    (void)unit;
}

float *params_slice(struct params *params, uint32_t unit, uint32_t slice)
{
    const struct unit *u = &params->units->units[unit];
    if (params->dtype == DTYPE_FP32) {
        return params_get(params, unit, slice * u->slice_elems);
    }
    float *block = (float *)(void *)(params->master.base + slice * params->block_bytes);
    return block + u->slice_offset;
}

void *params_copy(struct params *params, uint32_t unit, uint32_t slice)
{
    if (params->dtype == DTYPE_FP32) {
        return NULL;
    }
    return params_get(params, unit, slice * params->units->units[unit].slice_elems);
}

void params_refresh(struct params *params, struct ops *ops)
{
    if (params->dtype == DTYPE_FP32) {
        return;
    }
    for (uint32_t unit = 0; unit < params->units->n_units; unit++) {
        for (uint32_t slice = 0; slice < params->units->world_size; slice++) {
            ops->narrow(ops, params_copy(params, unit, slice), params_slice(params, unit, slice),
                        params->units->units[unit].slice_elems);
        }
    }
}
