/* Driver functions by name, as cudaGetDriverEntryPointByVersion finds them. Owns nothing. Any
 * thread. */
#include <string.h>
#include "kernels/cuda/emulate/emulate.h"

typedef void any_function(void);

struct entry {
    const char *name;
    unsigned since; /* CUDA's version that has it in this form */
    any_function *function;
};

static const struct entry entries[] = {
    {"cuMemAddressReserve", 10020, (any_function *)cuMemAddressReserve},
    {"cuMemAddressFree", 10020, (any_function *)cuMemAddressFree},
    {"cuMemCreate", 10020, (any_function *)cuMemCreate},
    {"cuMemRelease", 10020, (any_function *)cuMemRelease},
    {"cuMemMap", 10020, (any_function *)cuMemMap},
    {"cuMemUnmap", 10020, (any_function *)cuMemUnmap},
    {"cuMemSetAccess", 10020, (any_function *)cuMemSetAccess},
    {"cuMemGetAllocationGranularity", 10020, (any_function *)cuMemGetAllocationGranularity},
    {"cuGetErrorString", 6000, (any_function *)cuGetErrorString},
    {"cuGetErrorName", 6000, (any_function *)cuGetErrorName},
    {"cuDeviceGetUuid", 11040, (any_function *)cuDeviceGetUuid},
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function,
                                             unsigned int version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    if (symbol == NULL || function == NULL || flags != cudaEnableDefault) {
        return emulate_error(cudaErrorInvalidValue);
    }
    if (emulate_n_gpus() == 0) {
        return emulate_error(cudaErrorInsufficientDriver);
    }
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    *function = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        if (strcmp(entries[i].name, symbol) != 0) {
            continue;
        }
        if (version < entries[i].since || version > EMULATE_DRIVER_VERSION) {
            found = cudaDriverEntryPointVersionNotSufficent;
        } else {
            found = cudaDriverEntryPointSuccess;
            memcpy(function, &entries[i].function, sizeof *function);
        }
    }
    if (result != NULL) {
        *result = found;
    } else if (found != cudaDriverEntryPointSuccess) {
        return emulate_error(cudaErrorSymbolNotFound);
    }
    return cudaSuccess;
}
