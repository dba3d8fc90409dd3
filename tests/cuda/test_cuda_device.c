/* The GPU's memory and copies, on the stand-in for CUDA.
 *
 * links: standin kernels base
 *
 * The pretended GPU has 700 MiB, of which the context takes some, so that running out is cheap. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "kernels/cuda/plugin.h"
#include "proto/base/fault.h"
#include "proto/base/heap.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>

enum { MIB = 1024 * 1024, GRANULE = DEVICE_GRANULE_BYTES };

cuda_plugin_entry ballast_cuda;

static const struct cuda_plugin *cuda;
static struct device device;
static struct cuda_gpu gpu;
static struct failure why;

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

static void *reserve(size_t bytes)
{
    void *base = NULL;
    assert_ok(device.table->reserve(&device, bytes, &base, &why));
    return base;
}

static enum status commit(void *base, size_t offset, size_t bytes)
{
    return device.table->commit(&device, base, offset, bytes, &why);
}

static void decommit(void *base, size_t offset, size_t bytes)
{
    device.table->decommit(&device, base, offset, bytes);
}

static size_t resident(const void *base, size_t bytes)
{
    return device.table->resident(&device, base, bytes);
}

static void put(void *dst, const void *src, size_t bytes)
{
    struct ticket ticket;
    assert_ok(device.table->copy(&device, dst, src, bytes, COPY_FROM_HOST, &ticket, &why));
    assert_ok(device.table->wait(&device, &ticket, &why));
    assert_int_equal(ticket.serial, 0);
}

static void get(void *dst, const void *src, size_t bytes)
{
    struct ticket ticket;
    assert_ok(device.table->copy(&device, dst, src, bytes, COPY_TO_HOST, &ticket, &why));
    assert_ok(device.table->wait(&device, &ticket, &why));
}

/* What element i of pattern `which` is. */
static uint32_t pattern(uint32_t which, size_t i)
{
    return (uint32_t)(i * 2654435761u) ^ (which * 0x01010101u) ^ (uint32_t)(i >> 9);
}

static void put_pattern(void *dst, uint32_t which, size_t bytes)
{
    uint32_t *host = malloc(bytes);
    assert_non_null(host);
    for (size_t i = 0; i < bytes / sizeof *host; i++) {
        host[i] = pattern(which, i);
    }
    put(dst, host, bytes);
    free(host);
}

static void check_pattern(const void *src, uint32_t which, size_t bytes)
{
    uint32_t *host = malloc(bytes);
    assert_non_null(host);
    get(host, src, bytes);
    for (size_t i = 0; i < bytes / sizeof *host; i++) {
        assert_int_equal(host[i], pattern(which, i));
    }
    free(host);
}

static void check_zero(const void *src, size_t bytes)
{
    unsigned char *host = malloc(bytes);
    assert_non_null(host);
    get(host, src, bytes);
    for (size_t i = 0; i < bytes; i++) {
        assert_int_equal(host[i], 0);
    }
    free(host);
}

/* ---- who is there ---- */

static void in_child(void (*test)(void))
{
    const pid_t child = fork();
    if (child == 0) {
        test();
        _exit(0);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void count_without_driver(void)
{
    struct failure text = {0};
    int n = 77;
    setenv("BALLAST_STANDIN_GPUS", "0", 1);
    if (cuda->count(&n, &text) != STATUS_UNSUPPORTED || n != 77 ||
        strstr(text.text, "--device cpu") == NULL || strstr(text.text, "driver") == NULL) {
        fprintf(stderr, "%d: %s\n", n, text.text);
        _exit(1);
    }
}

static void count_without_gpu(void)
{
    struct failure text = {0};
    int n = 77;
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    if (cuda->count(&n, &text) != STATUS_UNSUPPORTED || n != 77 ||
        strstr(text.text, "CUDA_VISIBLE_DEVICES") == NULL) {
        fprintf(stderr, "%d: %s\n", n, text.text);
        _exit(1);
    }
}

static void test_nothing_there(void **state)
{
    (void)state;
    in_child(count_without_driver);
    in_child(count_without_gpu);
}

static void test_open(void **state)
{
    (void)state;
    int n = 0;
    struct device none;
    assert_int_equal(cuda->version, CUDA_PLUGIN_VERSION);
    assert_ok(cuda->count(&n, &why));
    assert_int_equal(n, 4);
    assert_int_equal(cuda->open(&none, n, 0, &gpu, &why), STATUS_OUT_OF_RANGE);
    assert_int_equal(cuda->open(&none, -1, 0, &gpu, &why), STATUS_OUT_OF_RANGE);
    for (uint64_t nth = 1; nth <= 1; nth++) {
        heap_fail(nth, false);
        assert_int_equal(cuda->open(&none, 1, 0, &gpu, &why), STATUS_OUT_OF_MEMORY);
        heap_fail(0, false);
    }
    assert_ok(fault_arm("pinned:nth=1", &why));
    assert_int_equal(cuda->open(&none, 1, 0, &gpu, &why), STATUS_OUT_OF_MEMORY);
    assert_non_null(strstr(why.text, "pinned"));
    fault_disarm_all();
    assert_ok(cuda->open(&device, 1, 0, &gpu, &why));
    assert_int_equal(gpu.index, 1);
    assert_int_equal(gpu.major, 9);
    assert_int_equal(gpu.total_bytes, 700 * MIB);
    assert_int_equal(device.kind, DEVICE_CUDA);
    assert_int_equal(device.granule_bytes, GRANULE);
    assert_int_equal(device.capacity_bytes, gpu.free_bytes / GRANULE * GRANULE);
    assert_int_equal(device.pinned_bytes, 4 * 4 * MIB);
    struct cuda_external external;
    cuda->external(&device, &external);
    assert_int_equal(external.context_bytes, gpu.total_bytes - gpu.free_bytes);
    assert_int_equal(external.library_bytes, 0);
    assert_int_equal(external.nccl_bytes, 0);
}

/* ---- memory ---- */

static void test_commit(void **state)
{
    (void)state;
    char *base = reserve(100 * MIB + 1);
    assert_int_equal(resident(base, 100 * MIB), 0);
    assert_ok(commit(base, 0, 3 * GRANULE));
    assert_ok(commit(base, 3 * GRANULE, GRANULE));
    assert_int_equal(atomic_load(&device.committed_bytes), 4 * GRANULE);
    assert_int_equal(resident(base, 100 * MIB), 4 * GRANULE);
    assert_int_equal(resident(base + 2 * GRANULE, 100 * MIB - 2 * GRANULE), 2 * GRANULE);
    check_zero(base, 4 * GRANULE);
    put_pattern(base, 1, 4 * GRANULE);
    decommit(base, 2 * GRANULE, 2 * GRANULE);
    assert_int_equal(resident(base, 100 * MIB), 2 * GRANULE);
    assert_int_equal(atomic_load(&device.committed_bytes), 2 * GRANULE);
    assert_ok(commit(base, 2 * GRANULE, GRANULE));
    check_zero(base + 2 * GRANULE, GRANULE);
    check_pattern(base, 1, 2 * GRANULE);
    decommit(base, 0, 3 * GRANULE);
    device.table->unreserve(&device, base, 100 * MIB + 1);
    assert_int_equal(atomic_load(&device.committed_bytes), 0);
}

static void test_capacity(void **state)
{
    (void)state;
    char *base = reserve(64 * MIB);
    const uint64_t capacity = device.capacity_bytes;
    device.capacity_bytes = 10 * MIB;
    assert_ok(commit(base, 0, 6 * MIB));
    assert_int_equal(commit(base, 6 * MIB, 6 * MIB), STATUS_OUT_OF_MEMORY);
    assert_non_null(strstr(why.text, "6291456 bytes asked, 6291456 held, limit 10485760"));
    assert_int_equal(resident(base, 64 * MIB), 6 * MIB);
    assert_int_equal(atomic_load(&device.committed_bytes), 6 * MIB);
    decommit(base, 0, 6 * MIB);
    device.capacity_bytes = capacity;
    device.table->unreserve(&device, base, 64 * MIB);
}

/* More than the GPU has: a failed commit leaves nothing behind. */
static void test_shortage(void **state)
{
    (void)state;
    char *base = reserve(4096ull * MIB);
    const uint64_t capacity = device.capacity_bytes;
    device.capacity_bytes = 4096ull * MIB;
    assert_ok(commit(base, 0, 40 * MIB));
    assert_int_equal(commit(base, 40 * MIB, capacity), STATUS_OUT_OF_MEMORY);
    assert_non_null(strstr(why.text, "GPU 1 has no"));
    assert_non_null(strstr(why.text, "41943040 held"));
    assert_int_equal(resident(base, 4096ull * MIB), 40 * MIB);
    assert_int_equal(atomic_load(&device.committed_bytes), 40 * MIB);
    /* Down to the last granule. */
    assert_ok(commit(base, 40 * MIB, capacity - 40 * MIB));
    assert_int_equal(resident(base, 4096ull * MIB), capacity);
    assert_int_equal(commit(base, capacity, GRANULE), STATUS_OUT_OF_MEMORY);
    decommit(base, 0, capacity);
    assert_int_equal(resident(base, 4096ull * MIB), 0);
    device.capacity_bytes = capacity;
    device.table->unreserve(&device, base, 4096ull * MIB);
}

/* Runs of 32 MiB are one handle; a cut through one keeps what lies on either side. */
static void test_cut(void **state)
{
    (void)state;
    char *base = reserve(96 * MIB);
    assert_ok(commit(base, 0, 96 * MIB));
    check_zero(base, 96 * MIB);
    put_pattern(base, 2, 96 * MIB);
    decommit(base, 38 * MIB, 58 * MIB);
    assert_int_equal(resident(base, 96 * MIB), 38 * MIB);
    check_pattern(base, 2, 38 * MIB);
    assert_ok(commit(base, 38 * MIB, 58 * MIB));
    check_pattern(base, 2, 38 * MIB);
    check_zero(base + 38 * MIB, 58 * MIB);
    /* A hole in the first handle, and its front. */
    decommit(base, 4 * MIB, 4 * MIB);
    assert_int_equal(resident(base, 96 * MIB), 92 * MIB);
    check_pattern(base, 2, 4 * MIB);
    decommit(base, 0, 4 * MIB);
    assert_int_equal(resident(base, 96 * MIB), 88 * MIB);
    decommit(base, 8 * MIB, 88 * MIB);
    assert_int_equal(resident(base, 96 * MIB), 0);
    assert_int_equal(atomic_load(&device.committed_bytes), 0);
    device.table->unreserve(&device, base, 96 * MIB);
}

/* With no memory left a handle cannot be cut: it stays whole, which is to be seen, and serves the
 * next commit. */
static void test_cut_without_memory(void **state)
{
    (void)state;
    char *base = reserve(32 * MIB);
    char *rest = reserve(1024ull * MIB);
    const size_t rest_bytes = device.capacity_bytes - 32 * MIB;
    assert_ok(commit(base, 0, 32 * MIB));
    put_pattern(base, 3, 32 * MIB);
    assert_ok(commit(rest, 0, rest_bytes));
    decommit(base, 10 * MIB, 22 * MIB);
    assert_int_equal(atomic_load(&device.committed_bytes), device.capacity_bytes - 22 * MIB);
    assert_int_equal(resident(base, 32 * MIB), 32 * MIB);
    check_pattern(base, 3, 10 * MIB);
    assert_ok(commit(base, 10 * MIB, 12 * MIB));
    check_pattern(base, 3, 10 * MIB);
    check_zero(base + 10 * MIB, 12 * MIB);
    decommit(rest, 0, rest_bytes);
    decommit(base, 10 * MIB, 12 * MIB); /* now there is memory for pieces */
    assert_int_equal(resident(base, 32 * MIB), 10 * MIB);
    check_pattern(base, 3, 10 * MIB);
    decommit(base, 0, 10 * MIB);
    device.table->unreserve(&device, rest, 1024ull * MIB);
    device.table->unreserve(&device, base, 32 * MIB);
}

static void test_out_of_host_memory(void **state)
{
    (void)state;
    const int64_t live = heap_live();
    uint64_t nth = 1;
    for (; nth < 20; nth++) {
        void *base = NULL;
        heap_fail(nth, false);
        const enum status status = device.table->reserve(&device, 64 * MIB, &base, &why);
        const bool failed = heap_failures() > 0;
        heap_fail(0, false);
        if (!failed) {
            assert_ok(status);
            device.table->unreserve(&device, base, 64 * MIB);
            break;
        }
        assert_int_equal(status, STATUS_OUT_OF_MEMORY);
        assert_null(base);
        assert_int_equal(heap_live(), live);
    }
    assert_true(nth > 2 && nth < 20);
    assert_int_equal(heap_live(), live);
}

/* ---- copies ---- */

static char *committed(size_t bytes)
{
    char *base = reserve(bytes);
    assert_ok(commit(base, 0, device_round(&device, bytes)));
    return base;
}

static void give_back(char *base, size_t bytes)
{
    decommit(base, 0, device_round(&device, bytes));
    device.table->unreserve(&device, base, bytes);
}

/* The source may change at once, whatever the size; odd addresses too. */
static void test_source_is_read(void **state)
{
    (void)state;
    const size_t sizes[] = {1, 7, 4096, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 19 * MIB + 3};
    char *base = committed(64 * MIB);
    unsigned char *host = malloc(20 * MIB);
    unsigned char *back = malloc(20 * MIB);
    assert_true(host != NULL && back != NULL);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (size_t i = 0; i < sizes[s]; i++) {
            host[i] = (unsigned char)(i * 7 + i / 255 + s);
        }
        struct ticket ticket;
        assert_ok(
            device.table->copy(&device, base + 3, host, sizes[s], COPY_FROM_HOST, &ticket, &why));
        memset(host, 0xEE, sizes[s]);
        assert_ok(device.table->wait(&device, &ticket, &why));
        get(back, base + 3, sizes[s]);
        for (size_t i = 0; i < sizes[s]; i++) {
            assert_int_equal(back[i], (unsigned char)(i * 7 + i / 255 + s));
        }
    }
    struct ticket nothing = {99};
    assert_ok(device.table->copy(&device, base, host, 0, COPY_FROM_HOST, &nothing, &why));
    assert_int_equal(nothing.serial, 0);
    free(back);
    free(host);
    give_back(base, 64 * MIB);
}

/* Several in flight, waited for in another order, in both directions. */
static void test_flights(void **state)
{
    (void)state;
    enum { N = 6 };
    const size_t bytes = 5 * MIB;
    char *base = committed(N * bytes);
    struct ticket in[N], out[N];
    uint32_t *host = malloc(bytes);
    uint32_t *back = malloc(N * bytes);
    assert_true(host != NULL && back != NULL);
    for (uint32_t f = 0; f < N; f++) {
        for (size_t i = 0; i < bytes / sizeof *host; i++) {
            host[i] = pattern(f, i);
        }
        assert_ok(device.table->copy(&device, base + f * bytes, host, bytes, COPY_FROM_HOST, &in[f],
                                     &why));
        assert_true(in[f].serial != 0);
    }
    for (uint32_t f = 0; f < N; f++) {
        assert_ok(device.table->wait(&device, &in[(f + 2) % N], &why));
    }
    for (uint32_t f = 0; f < N; f++) {
        assert_ok(device.table->copy(&device, (char *)back + f * bytes, base + f * bytes, bytes,
                                     COPY_TO_HOST, &out[f], &why));
    }
    for (uint32_t f = 0; f < N; f++) {
        assert_ok(device.table->wait(&device, &out[(5 * f + 4) % N], &why));
    }
    for (uint32_t f = 0; f < N; f++) {
        for (size_t i = 0; i < bytes / sizeof *host; i++) {
            assert_int_equal(back[f * (bytes / sizeof *host) + i], pattern(f, i));
        }
    }
    free(back);
    free(host);
    give_back(base, N * bytes);
}

/* Each copy sees what the operations and copies before it left. */
static void test_order(void **state)
{
    (void)state;
    struct ops *ops = NULL;
    assert_ok(cuda->ops_new(&device, DTYPE_FP32, &ops, &why));
    enum { N = 100000 };
    char *base = committed(3 * N * sizeof(float));
    float *a = (float *)(void *)base, *b = a + N, *c = b + N;
    float *host = malloc(N * sizeof *host);
    assert_non_null(host);
    for (uint32_t round = 0; round < 20; round++) {
        struct ticket ticket;
        ops->fill(ops, a, N, (float)round);
        assert_ok(device.table->copy(&device, b, a, N * sizeof *a, COPY_WITHIN, &ticket, &why));
        assert_ok(device.table->wait(&device, &ticket, &why));
        ops->fill(ops, a, N, -1.0f);
        for (size_t i = 0; i < N; i++) {
            host[i] = 1000.0f;
        }
        /* a is being written to until here, and c = b + a follows */
        assert_ok(
            device.table->copy(&device, a, host, N * sizeof *a, COPY_FROM_HOST, &ticket, &why));
        assert_ok(device.table->wait(&device, &ticket, &why));
        ops->copy(ops, c, b, N * sizeof *b);
        ops->add(ops, c, a, N);
        get(host, c, N * sizeof *c);
        for (size_t i = 0; i < N; i++) {
            assert_true(host[i] == (float)round + 1000.0f);
        }
    }
    assert_ok(ops->check(ops, &why));
    free(host);
    give_back(base, 3 * N * sizeof(float));
    ops->free(ops);
}

static void test_busy(void **state)
{
    (void)state;
    enum { MOST = 64 };
    char *base = committed(MIB);
    struct ticket tickets[MOST], more;
    char host[8] = "1234567";
    for (size_t i = 0; i < MOST; i++) {
        assert_ok(
            device.table->copy(&device, base + 8 * i, host, 8, COPY_FROM_HOST, &tickets[i], &why));
    }
    assert_int_equal(device.table->copy(&device, base, host, 8, COPY_FROM_HOST, &more, &why),
                     STATUS_BUSY);
    for (size_t i = 0; i < MOST; i++) {
        assert_ok(device.table->wait(&device, &tickets[i], &why));
    }
    put(base, host, 8);
    give_back(base, MIB);
}

/* ---- waiting ---- */

struct watcher {
    uint32_t looks, fails_at;
};

static enum status look(void *user, double waited_s, struct failure *out)
{
    struct watcher *watcher = user;
    watcher->looks++;
    if (watcher->looks == watcher->fails_at) {
        return (fail)(out, STATUS_DEADLINE, "waited %.3f s", waited_s);
    }
    return STATUS_OK;
}

/* Last but one: after a failed wait the device is of no more use, and says so at once. */
static void test_watch(void **state)
{
    (void)state;
    struct ops *ops = NULL;
    struct watcher watcher = {0}, removed = {.fails_at = 1};
    cuda->watch(&device, &(struct cuda_watch){look, &removed});
    cuda->watch(&device, &(struct cuda_watch){.user = &removed});
    cuda->watch(&device, &(struct cuda_watch){look, &watcher});
    assert_ok(cuda->ops_new(&device, DTYPE_FP32, &ops, &why));
    const size_t n = 16 * MIB;
    char *base = committed(n * sizeof(float));
    float *values = (float *)(void *)base;
    for (int i = 0; i < 4; i++) {
        ops->random_normal(ops, values, n, 1.0f, 7, 1, 0);
    }
    assert_ok(ops->check(ops, &why));
    assert_true(watcher.looks > 0);
    watcher.fails_at = watcher.looks + 2;
    for (int i = 0; i < 4; i++) {
        ops->random_normal(ops, values, n, 1.0f, 7, 1, 0);
    }
    assert_int_equal(ops->check(ops, &why), STATUS_DEADLINE);
    assert_non_null(strstr(why.text, "waited"));
    const uint32_t looks = watcher.looks;
    ops->fill(ops, values, n, 0.0f);
    struct ticket ticket;
    float first = 0.0f;
    assert_ok(
        device.table->copy(&device, &first, values, sizeof first, COPY_TO_HOST, &ticket, &why));
    const enum status status = device.table->wait(&device, &ticket, &why);
    assert_true(status == STATUS_DEADLINE || status == STATUS_OK);
    assert_int_equal(watcher.looks, looks);
    assert_int_equal(removed.looks, 0);
    while (ops->check(ops, &why) != STATUS_OK) { /* so that nothing runs when it is taken down */
        ops->fill(ops, values, 1, 0.0f);
    }
    give_back(base, n * sizeof(float));
    ops->free(ops);
}

static void test_close(void **state)
{
    (void)state;
    device_fini(&device);
    const int64_t live = heap_live(); /* what the stand-in's launchers keep */
    /* It can be opened again, and what was left committed comes back. */
    assert_ok(cuda->open(&device, 1, 64 * MIB, &gpu, &why));
    assert_int_equal(device.capacity_bytes, 64 * MIB);
    const uint64_t free_bytes = gpu.free_bytes;
    (void)committed(10 * MIB);
    device_fini(&device);
    assert_ok(cuda->open(&device, 1, 0, &gpu, &why));
    assert_int_equal(gpu.free_bytes, free_bytes);
    device_fini(&device);
    assert_int_equal(heap_live(), live);
}

int main(void)
{
    setenv("BALLAST_STANDIN_MEMORY", "734003200", 1);
    cuda = ballast_cuda();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_there),
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_commit),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_shortage),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_cut_without_memory),
        cmocka_unit_test(test_out_of_host_memory),
        cmocka_unit_test(test_source_is_read),
        cmocka_unit_test(test_flights),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_watch),
        cmocka_unit_test(test_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
