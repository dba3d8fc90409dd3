/* Bytes of GPU memory per process, and what NVML tells about them. Owns the list of processes.
 * Any thread.
 *
 * The list is this process's own, so that tests that run at the same time do not take each
 * other's memory. With BALLAST_STANDIN_HOST=NAME it is shared by all processes of that name (a
 * file in /dev/shm): then processes on one GPU share its memory, and NVML lists all of them.
 * Entries of processes that died are used again; the last one to leave removes the file.
 *
 * NVML's functions have its names and layouts, and are found by name (dlsym), as in the real
 * library, which no toolkit comes with. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>
#include "kernels/cuda/emulate/emulate.h"

enum { MAX_PROCESSES = 256 };

struct process {
    int32_t pid; /* 0: free */
    int32_t gpu;
    uint64_t bytes;
};

struct registry {
    struct process processes[MAX_PROCESSES];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct registry private_registry, *registry;
static int registry_file = -1;
static char registry_name[128];
static struct process *own;

static void take_lock(void)
{
    pthread_mutex_lock(&lock);
    if (registry_file >= 0) {
        while (flock(registry_file, LOCK_EX) != 0 && errno == EINTR) {
        }
    }
}

static void give_lock(void)
{
    if (registry_file >= 0) {
        flock(registry_file, LOCK_UN);
    }
    pthread_mutex_unlock(&lock);
}

static uint64_t capacity(void)
{
    return emulate_setting("BALLAST_STANDIN_MEMORY", 8ull << 30);
}

static void forget_the_dead(void)
{
    for (int i = 0; i < MAX_PROCESSES; i++) {
        struct process *p = &registry->processes[i];
        if (p->pid != 0 && kill(p->pid, 0) != 0 && errno == ESRCH) {
            *p = (struct process){0};
        }
    }
}

/* At exit: the last one removes the file. */
static void leave(void)
{
    if (own == NULL || own->pid != getpid()) {
        return; /* a forked process that used no GPU */
    }
    take_lock();
    *own = (struct process){0};
    own = NULL;
    forget_the_dead();
    bool any = false;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        any = any || registry->processes[i].pid != 0;
    }
    if (!any && registry_file >= 0) {
        shm_unlink(registry_name);
    }
    give_lock();
}

/* The lock is not held; called before any other use. */
static void open_registry(void)
{
    pthread_mutex_lock(&lock);
    const char *host = getenv("BALLAST_STANDIN_HOST");
    if (registry == NULL && (host == NULL || *host == '\0')) {
        registry = &private_registry;
    }
    if (registry == NULL) {
        snprintf(registry_name, sizeof registry_name, "/ballast-standin-%s", host);
        const int file = shm_open(registry_name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || ftruncate(file, (off_t)sizeof *registry) != 0) {
            emulate_misuse("shared memory %s: %s", registry_name, strerror(errno));
        }
        void *found = mmap(NULL, sizeof *registry, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (found == MAP_FAILED) {
            emulate_misuse("shared memory %s: %s", registry_name, strerror(errno));
        }
        registry = found;
        registry_file = file;
    }
    pthread_mutex_unlock(&lock);
}

void emulate_account_open(int gpu)
{
    open_registry();
    take_lock();
    forget_the_dead();
    for (int i = 0; i < MAX_PROCESSES && own == NULL; i++) {
        if (registry->processes[i].pid == 0) {
            own = &registry->processes[i];
            *own = (struct process){.pid = getpid(), .gpu = gpu};
        }
    }
    if (own == NULL) {
        emulate_misuse("more than %d processes use the stand-in's GPUs", MAX_PROCESSES);
    }
    give_lock();
    static bool registered;
    if (!registered) {
        registered = true;
        atexit(leave);
    }
}

static uint64_t used_bytes(int gpu)
{
    uint64_t used = 0;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        const struct process *p = &registry->processes[i];
        used += p->pid != 0 && p->gpu == gpu ? p->bytes : 0;
    }
    return used;
}

bool emulate_account_take(size_t bytes)
{
    take_lock();
    bool fits = bytes <= capacity() - used_bytes(own->gpu);
    if (!fits) {
        forget_the_dead();
        fits = bytes <= capacity() - used_bytes(own->gpu);
    }
    own->bytes += fits ? bytes : 0;
    give_lock();
    return fits;
}

void emulate_account_give(size_t bytes)
{
    take_lock();
    own->bytes -= bytes;
    give_lock();
}

void emulate_account_info(size_t *out_free, size_t *out_total)
{
    open_registry();
    take_lock();
    forget_the_dead();
    *out_total = (size_t)capacity();
    *out_free = (size_t)(capacity() - (own == NULL ? 0 : used_bytes(own->gpu)));
    give_lock();
}

/* ---- NVML ---- */

#define NVML_EXPORT __attribute__((visibility("default")))

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9
};

struct nvml_process_info { /* nvmlProcessInfo_v2_t */
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

struct nvml_memory { /* nvmlMemory_v2_t */
    unsigned version;
    unsigned long long total, reserved, free, used;
};

struct nvml_device {
    int gpu;
};

NVML_EXPORT int nvmlInit_v2(void);
NVML_EXPORT int nvmlShutdown(void);
NVML_EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, struct nvml_device **out_device);
NVML_EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(struct nvml_device *device,
                                                        unsigned *n_processes,
                                                        struct nvml_process_info *processes);
NVML_EXPORT int nvmlDeviceGetMemoryInfo_v2(struct nvml_device *device, struct nvml_memory *memory);
NVML_EXPORT const char *nvmlErrorString(int error);

static struct nvml_device devices[EMULATE_MAX_GPUS];
static _Atomic int n_inits;

int nvmlInit_v2(void)
{
    if (emulate_n_gpus() == 0) {
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    open_registry();
    n_inits++;
    return NVML_SUCCESS;
}

int nvmlShutdown(void)
{
    if (n_inits == 0) {
        return NVML_ERROR_UNINITIALIZED;
    }
    n_inits--;
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct nvml_device **out_device)
{
    if (n_inits == 0) {
        return NVML_ERROR_UNINITIALIZED;
    }
    if (uuid == NULL || out_device == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (int gpu = 0; gpu < emulate_n_gpus(); gpu++) {
        char text[EMULATE_UUID_TEXT];
        emulate_uuid_text(gpu, text);
        if (strcmp(text, uuid) == 0) {
            devices[gpu].gpu = gpu;
            *out_device = &devices[gpu];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct nvml_device *device, unsigned *n_processes,
                                            struct nvml_process_info *processes)
{
    if (n_inits == 0) {
        return NVML_ERROR_UNINITIALIZED;
    }
    take_lock();
    forget_the_dead();
    unsigned n = 0;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        const struct process *p = &registry->processes[i];
        if (p->pid == 0 || p->gpu != device->gpu) {
            continue;
        }
        if (n < *n_processes) {
            processes[n] = (struct nvml_process_info){.pid = (unsigned)p->pid,
                                                      .used_bytes = p->bytes,
                                                      .gpu_instance = ~0u,
                                                      .compute_instance = ~0u};
        }
        n++;
    }
    give_lock();
    const bool is_short = n > *n_processes;
    *n_processes = n;
    return is_short ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct nvml_device *device, struct nvml_memory *memory)
{
    if (n_inits == 0) {
        return NVML_ERROR_UNINITIALIZED;
    }
    if (memory->version != ((unsigned)sizeof *memory | 2u << 24)) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    take_lock();
    forget_the_dead();
    const uint64_t used = used_bytes(device->gpu);
    memory->total = capacity();
    memory->reserved = 0;
    memory->used = used;
    memory->free = capacity() - used;
    give_lock();
    return NVML_SUCCESS;
}

const char *nvmlErrorString(int error)
{
    return error == NVML_SUCCESS ? "Success" : "an error of the stand-in's NVML";
}
