/* The one symbol that the worker looks up. */
#include "kernels/cuda/plugin.h"
#include "kernels/cuda/cuda_device.h"

/* worker/parallel/comm_nccl.h, which lies above this folder. */
enum status comm_nccl_init(struct comm *comm, struct comm *control, struct device *device,
                           struct failure *why);

static void watch(struct device *device, const struct cuda_watch *what)
{
    cuda_watch_add(cuda_of(device), what);
}

static const struct cuda_plugin plugin = {
    .version = CUDA_PLUGIN_VERSION,
    .host = fault_ask,
    .count = cuda_device_count,
    .open = cuda_device_open,
    .ops_new = cuda_ops_new,
    .watch = watch,
    .external = cuda_external_now,
    .nccl_init = comm_nccl_init,
};

const struct cuda_plugin *ballast_cuda(void)
{
    return &plugin;
}
