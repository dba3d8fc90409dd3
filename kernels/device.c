/* What all devices share. */
#include "kernels/device.h"

void device_fini(struct device *device)
{
    if (device->table != NULL) {
        device->table->free(device);
        device->table = NULL;
    }
}

size_t device_round(const struct device *device, size_t bytes)
{
    const size_t granule = device->granule_bytes;
    return (bytes + granule - 1) / granule * granule;
}
