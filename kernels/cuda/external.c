/* Bytes of the GPU that are not ours: the driver's context, libraries, NCCL, other processes.
 *
 * Each start is measured by the difference in used memory around it. NVML, the management library,
 * tells what this process holds in all; it is opened at run time, and where it is missing or does
 * not know the process (another PID namespace) the answer is 0: not known. Main thread. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "kernels/cuda/cuda_device.h"

/* As NVML lays them out. */
struct nvml_memory {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

struct nvml_process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

enum {
    NVML_SUCCESS = 0,
    NVML_MEMORY_VERSION = sizeof(struct nvml_memory) | 2 << 24,
    MAX_PROCESSES = 128,
    UUID_TEXT_BYTES = 48
};
static const unsigned long long nvml_not_known = ~0ull;

uint64_t cuda_used_bytes(void)
{
    size_t free_bytes = 0, total_bytes = 0;
    if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return 0;
    }
    return total_bytes - free_bytes;
}

static void write_uuid(const unsigned char uuid[CUDA_UUID_BYTES], char out_text[UUID_TEXT_BYTES])
{
    size_t used = (size_t)snprintf(out_text, UUID_TEXT_BYTES, "GPU");
    for (size_t i = 0; i < CUDA_UUID_BYTES; i++) {
        const bool group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        used += (size_t)snprintf(out_text + used, UUID_TEXT_BYTES - used, "%s%02x",
                                 group ? "-" : "", uuid[i]);
    }
}

static void open_nvml(struct cuda_device *cuda)
{
    struct cuda_nvml *nvml = &cuda->nvml;
    if (nvml->tried) {
        return;
    }
    nvml->tried = true;
    /* It may be in the process already, or in this very library where that is the stand-in. */
    void *from = RTLD_DEFAULT;
    if (dlsym(from, "nvmlInit_v2") == NULL) {
        nvml->library = from = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (from == NULL) {
            return;
        }
    }
    int (*init)(void) = NULL;
    int (*by_uuid)(const char *, void **) = NULL;
    *(void **)(void *)&init = dlsym(from, "nvmlInit_v2");
    *(void **)(void *)&by_uuid = dlsym(from, "nvmlDeviceGetHandleByUUID");
    *(void **)(void *)&nvml->memory = dlsym(from, "nvmlDeviceGetMemoryInfo_v2");
    *(void **)(void *)&nvml->processes = dlsym(from, "nvmlDeviceGetComputeRunningProcesses_v3");
    *(void **)(void *)&nvml->shutdown = dlsym(from, "nvmlShutdown");
    if (init == NULL || by_uuid == NULL || nvml->shutdown == NULL || init() != NVML_SUCCESS) {
        nvml->shutdown = NULL;
        return;
    }
    char text[UUID_TEXT_BYTES];
    write_uuid(cuda->gpu.uuid, text);
    if (by_uuid(text, &nvml->gpu) != NVML_SUCCESS) {
        nvml->gpu = NULL; /* a slice of a GPU has another name */
    }
}

void cuda_nvml_close(struct cuda_device *cuda)
{
    if (cuda->nvml.shutdown != NULL) {
        cuda->nvml.shutdown();
    }
    if (cuda->nvml.library != NULL) {
        dlclose(cuda->nvml.library);
    }
    cuda->nvml = (struct cuda_nvml){0};
}

uint64_t cuda_nvml_used_bytes(struct cuda_device *cuda)
{
    open_nvml(cuda);
    const struct cuda_nvml *nvml = &cuda->nvml;
    struct nvml_memory memory = {.version = NVML_MEMORY_VERSION};
    if (nvml->gpu == NULL || nvml->memory == NULL ||
        nvml->memory(nvml->gpu, &memory) != NVML_SUCCESS) {
        return 0;
    }
    return memory.used;
}

static uint64_t process_bytes(struct cuda_device *cuda)
{
    open_nvml(cuda);
    const struct cuda_nvml *nvml = &cuda->nvml;
    struct nvml_process processes[MAX_PROCESSES];
    memset(processes, 0, sizeof processes);
    unsigned n = MAX_PROCESSES;
    if (nvml->gpu == NULL || nvml->processes == NULL ||
        nvml->processes(nvml->gpu, &n, processes) != NVML_SUCCESS) {
        return 0;
    }
    const unsigned me = (unsigned)getpid();
    for (unsigned i = 0; i < n && i < MAX_PROCESSES; i++) {
        if (processes[i].pid == me && processes[i].used != nvml_not_known) {
            return processes[i].used;
        }
    }
    return 0;
}

void cuda_external_now(struct device *device, struct cuda_external *out_external)
{
    struct cuda_device *cuda = cuda_of(device);
    *out_external = cuda->external;
    out_external->process_bytes = process_bytes(cuda);
}
