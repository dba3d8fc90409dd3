/* The pretended machine: how many GPUs, which are visible, which one this process uses, and the
 * errors of the runtime. Owns the process's context. Any thread.
 *
 * A process has a context on one GPU only. The current GPU is a property of the thread and
 * starts as 0, as CUDA has it, so a helper thread that forgets cudaSetDevice shows: it would
 * make a context on GPU 0. */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>
#include "kernels/cuda/emulate/emulate.h"

enum { CONTEXT_BYTES = 300 * 1024 * 1024 };

static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;
static int context_gpu = -1; /* in the machine's numbering */
static pid_t context_pid;
static _Thread_local int current; /* in the visible numbering */
static _Thread_local cudaError_t last_error;

void emulate_misuse(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "stand-in: %s\n", text);
    fflush(stderr);
    abort();
}

uint64_t emulate_setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    if (text == NULL || *text == '\0') {
        return otherwise;
    }
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (*end != '\0' || errno != 0 || !isdigit((unsigned char)*text)) {
        emulate_misuse("%s=%s is not a number", name, text);
    }
    return value;
}

/* ---- random numbers ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void emulate_random_init(struct emulate_random *random, uint64_t purpose)
{
    random->state = mix(emulate_setting("BALLAST_STANDIN_SEED", 1) * 0x9e3779b97f4a7c15u + purpose);
}

uint64_t emulate_random_below(struct emulate_random *random, uint64_t limit)
{
    random->state += 0x9e3779b97f4a7c15u;
    return mix(random->state) % limit;
}

/* ---- GPUs ---- */

int emulate_n_gpus(void)
{
    const uint64_t n = emulate_setting("BALLAST_STANDIN_GPUS", 4);
    if (n > EMULATE_MAX_GPUS) {
        emulate_misuse("BALLAST_STANDIN_GPUS=%llu: at most %d", (unsigned long long)n,
                       EMULATE_MAX_GPUS);
    }
    return (int)n;
}

void emulate_uuid(int gpu, unsigned char out_uuid[16])
{
    static const unsigned char common[16] = {0xba, 0x11, 0xa5, 0x70, 0, 0, 0x40, 0, 0x80};
    memcpy(out_uuid, common, sizeof common);
    out_uuid[15] = (unsigned char)gpu;
}

void emulate_uuid_text(int gpu, char *out_text)
{
    unsigned char u[16];
    emulate_uuid(gpu, u);
    snprintf(out_text, EMULATE_UUID_TEXT,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
             u[15]);
}

/* The GPU that one entry of CUDA_VISIBLE_DEVICES names, -1 for none: an index, or the beginning
 * of one GPU's UUID. */
static int gpu_named(const char *entry, size_t length, int n_gpus)
{
    if (length == 0) {
        return -1;
    }
    int found = -1;
    if (isdigit((unsigned char)entry[0])) {
        char *end;
        const unsigned long index = strtoul(entry, &end, 10);
        return end == entry + length && index < (unsigned long)n_gpus ? (int)index : -1;
    }
    for (int gpu = 0; gpu < n_gpus; gpu++) {
        char uuid[EMULATE_UUID_TEXT];
        emulate_uuid_text(gpu, uuid);
        if (length <= strlen(uuid) && strncasecmp(uuid, entry, length) == 0) {
            if (found >= 0) {
                return -1;
            }
            found = gpu;
        }
    }
    return found;
}

/* The machine's numbers of the visible GPUs. As with CUDA, the first entry that names none ends
 * the list. */
static int visible(int gpus[EMULATE_MAX_GPUS])
{
    const int n_gpus = emulate_n_gpus();
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int n = 0;
    if (list == NULL) {
        for (; n < n_gpus; n++) {
            gpus[n] = n;
        }
        return n;
    }
    while (n < n_gpus) {
        list += strspn(list, " ");
        const size_t length = strcspn(list, ", ");
        const int gpu = gpu_named(list, length, n_gpus);
        if (gpu < 0) {
            break;
        }
        for (int i = 0; i < n; i++) {
            if (gpus[i] == gpu) {
                return n;
            }
        }
        gpus[n++] = gpu;
        list += length;
        list += strspn(list, " ");
        if (*list++ != ',') {
            break;
        }
    }
    return n;
}

static cudaError_t visible_or_error(int gpus[EMULATE_MAX_GPUS], int *out_n)
{
    if (emulate_n_gpus() == 0) {
        return cudaErrorInsufficientDriver;
    }
    *out_n = visible(gpus);
    return *out_n == 0 ? cudaErrorNoDevice : cudaSuccess;
}

int emulate_gpu(void)
{
    pthread_mutex_lock(&context_lock);
    const int gpu = context_gpu;
    pthread_mutex_unlock(&context_lock);
    return gpu;
}

cudaError_t emulate_enter(const char *call)
{
    int gpus[EMULATE_MAX_GPUS], n = 0;
    const cudaError_t error = visible_or_error(gpus, &n);
    if (error != cudaSuccess) {
        return emulate_error(error);
    }
    if (current >= n) {
        return emulate_error(cudaErrorInvalidDevice);
    }
    const int gpu = gpus[current];
    bool is_new = false, no_room = false;
    pthread_mutex_lock(&context_lock);
    if (context_gpu < 0) {
        emulate_account_open(gpu);
        no_room = !emulate_account_take(CONTEXT_BYTES);
        if (!no_room) {
            context_gpu = gpu;
            context_pid = getpid();
            is_new = true;
        }
    } else if (context_pid != getpid()) {
        emulate_misuse("%s in a process that was forked after its first use of CUDA", call);
    } else if (context_gpu != gpu) {
        emulate_misuse("%s would make a context on GPU %d, but this process uses GPU %d: call "
                       "cudaSetDevice first on every thread",
                       call, gpu, context_gpu);
    }
    pthread_mutex_unlock(&context_lock);
    if (is_new) {
        emulate_memory_watch();
    }
    return no_room ? emulate_error(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    int gpus[EMULATE_MAX_GPUS], n = 0;
    const cudaError_t error = visible_or_error(gpus, &n);
    if (error == cudaSuccess) {
        *count = n;
    } else if (error == cudaErrorNoDevice) {
        *count = 0;
    }
    return emulate_error(error);
}

cudaError_t cudaSetDevice(int device)
{
    int gpus[EMULATE_MAX_GPUS], n = 0;
    const cudaError_t error = visible_or_error(gpus, &n);
    if (error != cudaSuccess) {
        return emulate_error(error);
    }
    if (device < 0 || device >= n) {
        return emulate_error(cudaErrorInvalidDevice);
    }
    current = device;
    return emulate_enter("cudaSetDevice"); /* since CUDA 12 it makes the context */
}

cudaError_t cudaGetDevice(int *device)
{
    int gpus[EMULATE_MAX_GPUS], n = 0;
    const cudaError_t error = visible_or_error(gpus, &n);
    if (error == cudaSuccess) {
        *device = current;
    }
    return emulate_error(error);
}

/* Compute capability times ten. */
static int capability(void)
{
    return (int)emulate_setting("BALLAST_STANDIN_CAPABILITY", 90);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    int gpus[EMULATE_MAX_GPUS], n = 0;
    const cudaError_t error = visible_or_error(gpus, &n);
    if (error != cudaSuccess) {
        return emulate_error(error);
    }
    if (device < 0 || device >= n) {
        return emulate_error(cudaErrorInvalidDevice);
    }
    size_t free_bytes, total_bytes;
    emulate_account_info(&free_bytes, &total_bytes);
    *prop = (struct cudaDeviceProp){
        .totalGlobalMem = total_bytes,
        .sharedMemPerBlock = 49152,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .memPitch = 2147483647,
        .maxThreadsPerBlock = 1024,
        .major = capability() / 10,
        .minor = capability() % 10,
        .multiProcessorCount = 132,
        .pciBusID = gpus[device] + 1,
        .memoryBusWidth = 5120,
        .l2CacheSize = 52428800,
        .sharedMemPerMultiprocessor = 233472,
        .sharedMemPerBlockOptin = 232448,
    };
    emulate_uuid(gpus[device], (unsigned char *)prop->uuid.bytes);
    snprintf(prop->name, sizeof prop->name, "Stand-in GPU %d", gpus[device]);
    return emulate_error(cudaSuccess);
}

static int attribute(enum cudaDeviceAttr attr, const struct cudaDeviceProp *prop)
{
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock:
        return prop->maxThreadsPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        return (int)prop->sharedMemPerBlock;
    case cudaDevAttrWarpSize:
        return prop->warpSize;
    case cudaDevAttrClockRate:
        return 1980000;
    case cudaDevAttrMultiProcessorCount:
        return prop->multiProcessorCount;
    case cudaDevAttrMemoryClockRate:
        return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
        return prop->memoryBusWidth;
    case cudaDevAttrL2CacheSize:
        return prop->l2CacheSize;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return 2048;
    case cudaDevAttrAsyncEngineCount:
        return 3;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
        return 1;
    case cudaDevAttrPciBusId:
        return prop->pciBusID;
    case cudaDevAttrComputeCapabilityMajor:
        return prop->major;
    case cudaDevAttrComputeCapabilityMinor:
        return prop->minor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return (int)prop->sharedMemPerMultiprocessor;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return (int)prop->sharedMemPerBlockOptin;
    case cudaDevAttrIntegrated:
    case cudaDevAttrComputeMode:
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
        return 0;
    }
    emulate_misuse("cudaDeviceGetAttribute(%d): an attribute the stand-in does not know",
                   (int)attr);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    struct cudaDeviceProp prop;
    const cudaError_t error = cudaGetDeviceProperties(&prop, device);
    if (error == cudaSuccess) {
        *value = attribute(attr, &prop);
    }
    return error;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    const cudaError_t error = emulate_enter("cudaDeviceGetStreamPriorityRange");
    if (error == cudaSuccess) {
        *least = 0;
        *greatest = -5;
    }
    return error;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = emulate_n_gpus() == 0 ? 0 : EMULATE_DRIVER_VERSION;
    return emulate_error(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return emulate_error(cudaSuccess);
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    int gpus[EMULATE_MAX_GPUS], n = 0;
    if (visible_or_error(gpus, &n) != cudaSuccess) {
        return CUDA_ERROR_NO_DEVICE;
    }
    if (device < 0 || device >= n) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    emulate_uuid(gpus[device], (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

/* ---- errors ---- */

cudaError_t emulate_error(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

struct error_text {
    int value;
    const char *name, *text;
};

static const struct error_text error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
};

static const struct error_text *error_text(int value)
{
    for (size_t i = 0; i < sizeof error_texts / sizeof error_texts[0]; i++) {
        if (error_texts[i].value == value) {
            return &error_texts[i];
        }
    }
    static const struct error_text other = {-1, "cudaErrorOther", "an error without a text here"};
    return &other;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error_text((int)error)->name;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error_text((int)error)->text;
}

static const struct error_text driver_texts[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
};

static const struct error_text *driver_text(CUresult error)
{
    for (size_t i = 0; i < sizeof driver_texts / sizeof driver_texts[0]; i++) {
        if (driver_texts[i].value == (int)error) {
            return &driver_texts[i];
        }
    }
    return NULL;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    const struct error_text *found = driver_text(error);
    *text = found == NULL ? NULL : found->text;
    return found == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text)
{
    const struct error_text *found = driver_text(error);
    *text = found == NULL ? NULL : found->name;
    return found == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
