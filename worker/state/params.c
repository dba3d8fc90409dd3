/* Replicated fp32 parameters. See params.h. */
#include "worker/state/params.h"

enum status params_init(struct params *params, const struct units *units, struct device *device,
                        struct ledger *ledger, struct failure *why)
{
    *params = (struct params){.units = units};
    const size_t bytes = units->n_elems * sizeof(float);
    enum status status =
        region_init(&params->region, "params", CATEGORY_PARAMS, device, ledger, bytes, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = region_resize(&params->region, bytes, why);
    if (status != STATUS_OK) {
        region_fini(&params->region);
        return status;
    }
    region_use(&params->region, bytes);
    return STATUS_OK;
}

void params_fini(struct params *params)
{
    region_fini(&params->region);
}

void params_seed(struct params *params, struct ops *ops, uint64_t seed)
{
    const struct units *units = params->units;
    for (uint32_t i = 0; i < units->n_tensors; i++) {
        const struct tensor *tensor = &units->tensors[i];
        const size_t n = tensor->rows * tensor->cols;
        float *values = params_get(params, tensor->unit) + tensor->offset;
        if (tensor->init == INIT_NORMAL) {
            ops->random_normal(ops, values, n, tensor->init_std, seed, i, 0);
        } else {
            ops->fill(ops, values, n, tensor->init == INIT_ONES ? 1.0f : 0.0f);
        }
        params_release(params, tensor->unit);
    }
}

void params_gather(struct params *params, uint32_t unit)
{
    (void)params;
    (void)unit;
}

float *params_get(struct params *params, uint32_t unit)
{
    return (float *)(void *)params->region.base + params->units->units[unit].offset;
}

void params_release(struct params *params, uint32_t unit)
{
    (void)params;
    (void)unit;
}

float *params_slice(struct params *params, uint32_t unit, uint32_t slice)
{
    const struct unit *u = &params->units->units[unit];
    return (float *)(void *)params->region.base + u->offset + slice * u->slice_elems;
}
