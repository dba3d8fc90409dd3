/* The stand-in's memory: reserved, mapped, poisoned, limited and accounted for; copies; which GPUs
 * are visible; and the misuse of all that.
 *
 * links: standin testing kernels base */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h> /* last: it defines fail() as a macro */
#include "tests/cuda/lib/standin.h"
#include "tests/lib/must_abort.h"

static const size_t MIB = 1024 * 1024;

/* ---- virtual memory ---- */

static struct {
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*granularity)(size_t *, const CUmemAllocationProp *,
                            CUmemAllocationGranularity_flags);
} driver;

static const CUmemAllocationProp on_gpu_0 = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                             .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};

static void find(const char *name, void *out)
{
    enum cudaDriverEntryPointQueryResult result;
    void *function = NULL;
    OK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
    CHECK(result == cudaDriverEntryPointSuccess && function != NULL);
    memcpy(out, &function, sizeof function);
}

static cudaStream_t open_driver(void)
{
    OK(cudaSetDevice(0));
    find("cuMemAddressReserve", &driver.reserve);
    find("cuMemAddressFree", &driver.unreserve);
    find("cuMemCreate", &driver.create);
    find("cuMemRelease", &driver.release);
    find("cuMemMap", &driver.map);
    find("cuMemUnmap", &driver.unmap);
    find("cuMemSetAccess", &driver.set_access);
    find("cuMemGetAllocationGranularity", &driver.granularity);
    return new_stream();
}

static CUdeviceptr reserve(size_t bytes)
{
    CUdeviceptr base = 0;
    CHECK(driver.reserve(&base, bytes, 0, 0, 0) == CUDA_SUCCESS);
    return base;
}

static void map(CUdeviceptr at, size_t bytes)
{
    CUmemGenericAllocationHandle handle;
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                    CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CHECK(driver.create(&handle, bytes, &on_gpu_0, 0) == CUDA_SUCCESS);
    CHECK(driver.map(at, bytes, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(driver.release(handle) == CUDA_SUCCESS);
    CHECK(driver.set_access(at, bytes, &access, 1) == CUDA_SUCCESS);
}

static void *pointer(CUdeviceptr at)
{
    return (void *)(uintptr_t)at;
}

static size_t free_bytes(void)
{
    size_t free, total;
    OK(cudaMemGetInfo(&free, &total));
    CHECK(total == 8192 * MIB);
    return free;
}

static bool all_are(const unsigned char *bytes, size_t n, unsigned char value)
{
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

static int mapping(void)
{
    cudaStream_t stream = open_driver();
    size_t granule;
    CHECK(driver.granularity(&granule, &on_gpu_0, CU_MEM_ALLOC_GRANULARITY_MINIMUM) ==
              CUDA_SUCCESS &&
          granule == 2 * MIB);
    const CUdeviceptr base = reserve(16 * MIB);
    CHECK(base % granule == 0);
    const size_t before = free_bytes();
    map(base, 4 * MIB);
    map(base + 4 * MIB, 2 * MIB);
    CHECK(free_bytes() == before - 6 * MIB);
    unsigned char *host = malloc(6 * MIB);
    get_device(host, pointer(base), 6 * MIB, stream);
    CHECK(all_are(host, 6 * MIB, 0xff)); /* fresh memory is NaN */
    OK(cudaMemsetAsync(pointer(base), 7, 6 * MIB, stream));
    get_device(host, pointer(base + MIB), 5 * MIB, stream);
    CHECK(all_are(host, 5 * MIB, 7));
    CHECK(driver.unmap(base, 6 * MIB) == CUDA_SUCCESS);
    CHECK(free_bytes() == before);
    map(base, 2 * MIB); /* and it is NaN again */
    get_device(host, pointer(base), 2 * MIB, stream);
    CHECK(all_are(host, 2 * MIB, 0xff));
    CHECK(driver.unmap(base, 2 * MIB) == CUDA_SUCCESS);
    CHECK(driver.unreserve(base, 16 * MIB) == CUDA_SUCCESS);
    free(host);
    return 0;
}

static void memory_is_mapped_and_poisoned(void **state)
{
    (void)state;
    assert_int_equal(in_child(mapping, 1), 0);
}

/* ---- limits and accounts ---- */

static int limits(void)
{
    open_driver();
    const size_t before = free_bytes();
    CHECK(before == (8192 - 300) * MIB); /* the context */
    CUmemGenericAllocationHandle handle, other;
    CHECK(driver.create(&handle, 7000 * MIB, &on_gpu_0, 0) == CUDA_SUCCESS);
    CHECK(driver.create(&other, 1000 * MIB, &on_gpu_0, 0) == CUDA_ERROR_OUT_OF_MEMORY);
    void *block;
    CHECK(cudaMalloc(&block, 1000 * MIB) == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(driver.create(&other, 892 * MIB, &on_gpu_0, 0) == CUDA_SUCCESS);
    CHECK(free_bytes() == 0);
    CHECK(driver.release(handle) == CUDA_SUCCESS && driver.release(other) == CUDA_SUCCESS);
    CHECK(free_bytes() == before);
    CHECK(driver.create(&other, MIB, &on_gpu_0, 0) == CUDA_ERROR_INVALID_VALUE);
    return 0;
}

static void memory_is_limited(void **state)
{
    (void)state;
    assert_int_equal(in_child(limits, 1), 0);
}

struct process_info {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

/* NVML's, which no header of ours declares: the product finds them by name. */
int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out_device);
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *n, struct process_info *found);

/* Bytes of this process, or of all others, on the GPU. */
static unsigned long long nvml_bytes(int gpu, bool others, unsigned *out_n)
{
    CHECK(nvmlInit_v2() == 0);
    struct cudaDeviceProp prop;
    OK(cudaGetDeviceProperties(&prop, gpu));
    const unsigned char *u = (const unsigned char *)prop.uuid.bytes;
    char text[64];
    int length = snprintf(text, sizeof text, "GPU-");
    for (int i = 0; i < 16; i++) {
        const bool dash = i == 4 || i == 6 || i == 8 || i == 10;
        length +=
            snprintf(text + length, sizeof text - (size_t)length, "%s%02x", dash ? "-" : "", u[i]);
    }
    void *device;
    CHECK(nvmlDeviceGetHandleByUUID(text, &device) == 0);
    struct process_info found[8];
    unsigned n = 8;
    CHECK(nvmlDeviceGetComputeRunningProcesses_v3(device, &n, found) == 0);
    unsigned long long bytes = 0;
    for (unsigned i = 0; i < n; i++) {
        bytes += (found[i].pid == (unsigned)getpid()) != others ? found[i].used_bytes : 0;
    }
    *out_n = n;
    CHECK(nvmlShutdown() == 0);
    return bytes;
}

static int accounts(void)
{
    unsigned n;
    OK(cudaSetDevice(1));
    CHECK(nvml_bytes(1, false, &n) == 300 * MIB && n == 1);
    void *block = new_device(10 * MIB);
    CHECK(nvml_bytes(1, false, &n) == 310 * MIB);
    CHECK(nvml_bytes(0, false, &n) == 0 && n == 0);
    OK(cudaFree(block));
    CHECK(nvml_bytes(1, false, &n) == 300 * MIB);
    return 0;
}

/* A second process on the same GPU, of the same host: both are listed, both count. */
static int shared_accounts(void)
{
    int ready[2], done[2];
    char byte = 0;
    CHECK(pipe(ready) == 0 && pipe(done) == 0);
    const pid_t pid = fork();
    if (pid == 0) {
        new_device(100 * MIB);
        CHECK(write(ready[1], &byte, 1) == 1);
        CHECK(read(done[0], &byte, 1) == 1);
        exit(0);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    unsigned n;
    OK(cudaSetDevice(0));
    CHECK(free_bytes() == (8192 - 2 * 300 - 100) * MIB);
    CHECK(nvml_bytes(0, true, &n) == 400 * MIB && n == 2);
    CHECK(write(done[1], &byte, 1) == 1);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(nvml_bytes(0, true, &n) == 0 && n == 1);
    return 0;
}

static void processes_are_accounted_for(void **state)
{
    (void)state;
    char name[32], file[64];
    assert_int_equal(in_child(accounts, 1), 0);
    snprintf(name, sizeof name, "test-%d", (int)getpid());
    snprintf(file, sizeof file, "/dev/shm/ballast-standin-%s", name);
    setenv("BALLAST_STANDIN_HOST", name, 1);
    assert_int_equal(in_child(shared_accounts, 1), 0);
    unsetenv("BALLAST_STANDIN_HOST");
    assert_int_not_equal(access(file, F_OK), 0);
}

/* ---- GPUs ---- */

static int n_visible(const char *list, int expected_first)
{
    if (list != NULL) {
        setenv("CUDA_VISIBLE_DEVICES", list, 1);
    } else {
        unsetenv("CUDA_VISIBLE_DEVICES");
    }
    int n = -1;
    const cudaError_t error = cudaGetDeviceCount(&n);
    if (error == cudaErrorNoDevice) {
        return 0;
    }
    struct cudaDeviceProp prop;
    OK(error);
    OK(cudaGetDeviceProperties(&prop, 0));
    CHECK(prop.uuid.bytes[15] == expected_first);
    return n;
}

static int visible(void)
{
    CHECK(n_visible(NULL, 0) == 4);
    CHECK(n_visible("2", 2) == 1);
    CHECK(n_visible("3,1", 3) == 2);
    CHECK(n_visible("1,9,2", 1) == 1); /* what comes after one that is none is not seen */
    CHECK(n_visible("GPU-ba11a570-0000-4000-8000-000000000002,0", 2) == 2);
    CHECK(n_visible("", 0) == 0);
    CHECK(n_visible("-1", 0) == 0);
    CHECK(n_visible("3,1", 3) == 2);
    CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice);
    OK(cudaSetDevice(1));
    setenv("BALLAST_STANDIN_GPUS", "0", 1);
    int n = 77, version = 1;
    CHECK(cudaGetDeviceCount(&n) == cudaErrorInsufficientDriver && n == 77);
    CHECK(cudaDriverGetVersion(&version) == cudaSuccess && version == 0);
    CHECK(cudaFree(NULL) == cudaErrorInsufficientDriver);
    return 0;
}

static void the_visible_gpus_are_those_asked_for(void **state)
{
    (void)state;
    assert_int_equal(in_child(visible, 1), 0);
}

/* ---- copies ---- */

static void sleep_long(void *closure)
{
    (void)closure;
    usleep(300 * 1000);
}

static int copies(void)
{
    enum { N = 100000 };
    cudaStream_t stream = new_stream();
    void *found;
    OK(cudaMallocHost(&found, N));
    unsigned char *pinned = found, *device = new_device(N), *pageable = malloc(N);
    /* Pinned: the bytes are taken when the copy is done. */
    memset(pinned, 1, N);
    emulate_enqueue(stream, "slow", sleep_long, NULL, 0);
    OK(cudaMemcpyAsync(device, pinned, N, cudaMemcpyHostToDevice, stream));
    memset(pinned, 2, N);
    OK(cudaStreamSynchronize(stream));
    get_device(pageable, device, N, stream);
    CHECK(all_are(pageable, N, 2));
    /* Not pinned: they are taken at once. */
    memset(pageable, 3, N);
    OK(cudaMemcpyAsync(device, pageable, N, cudaMemcpyHostToDevice, stream));
    memset(pageable, 4, N);
    OK(cudaMemcpyAsync(pinned, device, N, cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
    CHECK(all_are(pinned, N, 3));
    OK(cudaMemcpyAsync(device, device + N / 2, N / 2, cudaMemcpyDeviceToDevice, stream));
    OK(cudaStreamSynchronize(stream));
    OK(cudaFreeHost(pinned));
    OK(cudaFree(device));
    OK(cudaStreamDestroy(stream));
    free(pageable);
    return 0;
}

static void copies_take_bytes_when_cuda_does(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 5; seed++) {
        assert_int_equal(in_child(copies, seed), 0);
    }
}

/* ---- misuse ---- */

static void copy_unmapped(void)
{
    cudaStream_t stream = open_driver();
    char byte = 0;
    const CUdeviceptr base = reserve(4 * MIB);
    map(base, 2 * MIB);
    cudaMemcpyAsync(pointer(base + 2 * MIB - 1), &byte, 1, cudaMemcpyHostToDevice, stream);
    cudaMemsetAsync(pointer(base + 2 * MIB - 1), 0, 2, stream);
}

static void use_without_access(void)
{
    cudaStream_t stream = open_driver();
    CUmemGenericAllocationHandle handle;
    const CUdeviceptr base = reserve(2 * MIB);
    driver.create(&handle, 2 * MIB, &on_gpu_0, 0);
    driver.map(base, 2 * MIB, 0, handle, 0);
    cudaMemsetAsync(pointer(base), 0, 1, stream);
}

static void unmap_used(void)
{
    cudaStream_t stream = open_driver();
    const CUdeviceptr base = reserve(4 * MIB);
    map(base, 2 * MIB);
    map(base + 2 * MIB, 2 * MIB);
    emulate_enqueue(stream, "slow", sleep_long, NULL, 0);
    cudaMemsetAsync(pointer(base), 0, 4 * MIB, stream); /* reaches into the second granule */
    driver.unmap(base + 2 * MIB, 2 * MIB);
}

static void unmap_used_by_kernel(void)
{
    cudaStream_t stream = open_driver();
    const CUdeviceptr base = reserve(2 * MIB);
    map(base, 2 * MIB);
    emulate_enqueue(stream, "slow", sleep_long, NULL, 0);
    launch_step(stream, pointer(base), pointer(base + 64), 0);
    driver.unmap(base, 2 * MIB);
}

static void unmap_part(void)
{
    open_driver();
    const CUdeviceptr base = reserve(4 * MIB);
    map(base, 4 * MIB);
    driver.unmap(base, 2 * MIB);
}

static void kernel_on_unmapped(void)
{
    cudaStream_t stream = open_driver();
    const CUdeviceptr base = reserve(4 * MIB);
    map(base, 2 * MIB);
    launch_step(stream, pointer(base), pointer(base + 2 * MIB), 0);
    cudaStreamSynchronize(stream);
}

static void kernel_past_block(void)
{
    cudaStream_t stream = new_stream();
    int *block = new_device(1000 * sizeof *block);
    launch_step(stream, block, block + 1024, 0); /* 96 bytes and more behind its end */
    cudaStreamSynchronize(stream);
}

static void kernel_on_freed(void)
{
    cudaStream_t stream = new_stream();
    int *block = new_device(sizeof *block);
    cudaFree(block);
    launch_step(stream, block, block, 0);
    cudaStreamSynchronize(stream);
}

static void host_reads_device(void)
{
    cudaStream_t stream = new_stream();
    volatile int *block = new_device(sizeof *block);
    launch_step(stream, (const int *)block, (int *)(uintptr_t)block, 0);
    cudaStreamSynchronize(stream);
    usleep(20 * 1000); /* until the executor has nothing to do */
    *block = 1;
}

static void free_pinned_in_use(void)
{
    cudaStream_t stream = new_stream();
    void *pinned, *device = new_device(64);
    cudaMallocHost(&pinned, 64);
    emulate_enqueue(stream, "slow", sleep_long, NULL, 0);
    cudaMemcpyAsync(device, pinned, 64, cudaMemcpyHostToDevice, stream);
    cudaFreeHost(pinned);
}

static void wrong_kind(void)
{
    char byte = 0;
    cudaMemcpyAsync(new_device(1), &byte, 1, cudaMemcpyDeviceToHost, new_stream());
}

static void misuse_aborts(void **state)
{
    (void)state;
    must_abort(copy_unmapped, "is not mapped");
    must_abort(use_without_access, "cuMemSetAccess");
    must_abort(unmap_used, "cudaMemsetAsync");
    must_abort(unmap_used_by_kernel, "still uses: step");
    must_abort(unmap_part, "cuMemUnmap of a part");
    must_abort(kernel_on_unmapped, "step touched");
    must_abort(kernel_past_block, "step touched");
    must_abort(kernel_on_freed, "step touched");
    must_abort(host_reads_device, "the host touched device memory");
    must_abort(free_pinned_in_use, "cudaFreeHost");
    must_abort(wrong_kind, "of kind 2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_mapped_and_poisoned),
        cmocka_unit_test(memory_is_limited),
        cmocka_unit_test(processes_are_accounted_for),
        cmocka_unit_test(the_visible_gpus_are_those_asked_for),
        cmocka_unit_test(copies_take_bytes_when_cuda_does),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
