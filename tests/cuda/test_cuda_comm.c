/* Data collectives between GPUs, by NCCL and staged through the host, on the stand-in, against
 * MPI's on host memory, bit for bit.
 *
 * links: standin worker kernels base
 * mpi: 3
 * labels: mpi */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "kernels/cuda/cuda_device.h"
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/parallel/comm_staged.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>

enum { MIB = 1024 * 1024, REGION_BYTES = 12 * MIB };

static const struct cuda_plugin *plugin;
static struct comm mpi, nccl, staged;
static struct device device;
static struct cuda_gpu gpu;
static struct ops *ops;
static unsigned char *region;
static struct failure why;

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

static void put(void *dst, const void *src, size_t bytes)
{
    struct ticket ticket;
    assert_ok(device.table->copy(&device, dst, src, bytes, COPY_FROM_HOST, &ticket, &why));
    assert_ok(device.table->wait(&device, &ticket, &why));
}

static void get(void *dst, const void *src, size_t bytes)
{
    struct ticket ticket;
    assert_ok(device.table->copy(&device, dst, src, bytes, COPY_TO_HOST, &ticket, &why));
    assert_ok(device.table->wait(&device, &ticket, &why));
}

static void fill(unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bytes[i] = (unsigned char)(mpi.rank * 193 + i * 31 + i / 251);
    }
}

/* ---- both kinds against MPI ---- */

static void check_scatter(struct comm *comm, size_t elem, size_t stride, size_t offset, size_t n)
{
    const size_t base_bytes = comm->size * stride * elem;
    const size_t parts_bytes = comm->size * n * elem;
    unsigned char *base = heap_alloc(base_bytes);
    unsigned char *expected = heap_alloc(parts_bytes + 1);
    unsigned char *got = heap_alloc(parts_bytes + 1);
    unsigned char *parts = region + base_bytes;
    struct ticket ticket;
    assert_true(base_bytes + parts_bytes + 1 <= REGION_BYTES);
    fill(base, base_bytes);
    memset(expected, 0xEE, parts_bytes + 1);
    put(region, base, base_bytes);
    put(parts, expected, parts_bytes + 1);
    const uint64_t sent = comm->bytes_sent;
    const uint64_t number = atomic_load(&comm->n_collectives);
    assert_ok(
        comm->table->scatter_parts(comm, region, elem, stride, offset, n, parts, &ticket, &why));
    comm->table->progress(comm);
    assert_ok(comm->table->wait(comm, &ticket, &why));
    assert_int_equal(ticket.serial, 0);
    assert_int_equal(comm->bytes_sent - sent, (comm->size - 1) * n * elem);
    assert_int_equal(atomic_load(&comm->n_collectives), number + 1);
    get(got, parts, parts_bytes + 1);
    assert_ok(
        mpi.table->scatter_parts(&mpi, base, elem, stride, offset, n, expected, &ticket, &why));
    assert_ok(mpi.table->wait(&mpi, &ticket, &why));
    assert_memory_equal(got, expected, parts_bytes + 1);
    heap_free(got);
    heap_free(expected);
    heap_free(base);
}

static void check_gather(struct comm *comm, size_t elem, size_t stride, size_t offset, size_t n)
{
    const size_t bytes = comm->size * stride * elem;
    unsigned char *expected = heap_alloc(bytes);
    unsigned char *got = heap_alloc(bytes);
    struct ticket ticket;
    assert_true(bytes <= REGION_BYTES);
    fill(expected, bytes);
    put(region, expected, bytes);
    const uint64_t sent = comm->bytes_sent;
    const uint64_t number = atomic_load(&comm->n_collectives);
    assert_ok(comm->table->gather_slices(comm, region, elem, stride, offset, n, &ticket, &why));
    assert_ok(comm->table->wait(comm, &ticket, &why));
    assert_int_equal(comm->bytes_sent - sent, (comm->size - 1) * n * elem);
    assert_int_equal(atomic_load(&comm->n_collectives), number + 1);
    get(got, region, bytes);
    assert_ok(mpi.table->gather_slices(&mpi, expected, elem, stride, offset, n, &ticket, &why));
    assert_ok(mpi.table->wait(&mpi, &ticket, &why));
    assert_memory_equal(got, expected, bytes);
    heap_free(got);
    heap_free(expected);
}

static void check_shapes(struct comm *comm)
{
    check_scatter(comm, 4, 1000, 0, 1000);
    check_scatter(comm, 4, 1000, 256, 511);
    check_scatter(comm, 2, 7, 3, 1);
    check_scatter(comm, 4, 10, 10, 0);
    check_scatter(comm, 4, 450000, 3, 400001);
    check_gather(comm, 4, 1000, 0, 1000);
    check_gather(comm, 2, 1000, 13, 300);
    check_gather(comm, 4, 10, 10, 0);
    check_gather(comm, 4, 450000, 3, 400001);
    comm->piece_bytes = 1000;
    check_scatter(comm, 4, 2000, 7, 1777);
    check_gather(comm, 4, 2000, 7, 1777);
    comm->piece_bytes = COMM_PIECE_BYTES;
}

static void check_control(struct comm *comm)
{
    uint32_t all[64] = {0};
    const uint32_t mine = 100 + comm->rank;
    assert_int_equal(comm->node_size, mpi.node_size);
    assert_int_equal(comm->node_rank, mpi.node_rank);
    assert_ok(comm->table->exchange(comm, "numbers", &mine, sizeof mine, all, &why));
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        assert_int_equal(all[rank], 100 + rank);
    }
    char text[16] = "";
    snprintf(text, sizeof text, "%s", comm->rank == 0 ? "from rank 0" : "");
    assert_ok(comm->table->broadcast(comm, "text", text, sizeof text, &why));
    assert_string_equal(text, "from rank 0");
    assert_null(atomic_load(&comm->collective));
}

static void test_nccl(void **state)
{
    (void)state;
    check_control(&nccl);
    check_shapes(&nccl);
    struct cuda_external external;
    plugin->external(&device, &external);
    assert_true(external.nccl_bytes > 0);
}

static void test_staged(void **state)
{
    (void)state;
    assert_ok(comm_staged_init(&staged, &mpi, &device, &why));
    check_control(&staged);
    check_shapes(&staged);
    staged.table->free(&staged);
}

/* ---- order ---- */

/* What compute writes before a collective is what is sent; what it does after the wait sees what
 * came; and buffers may be written again at once. Rank sums are checked, nothing is waited for by
 * the host between. */
static void test_order(void **state)
{
    (void)state;
    enum { SLICE = 30000, ROUNDS = 12 };
    const size_t n = nccl.size * (size_t)SLICE;
    float *base = (float *)(void *)region;
    float *parts = base + n, *sums = parts + n;
    float *got = heap_alloc(n * sizeof *got);
    float total = 0.0f;
    ops->fill(ops, sums, n, 0.0f);
    for (int round = 0; round < ROUNDS; round++) {
        struct ticket ticket;
        ops->fill(ops, base, n, (float)(mpi.rank + 1 + (uint32_t)round));
        assert_ok(nccl.table->scatter_parts(&nccl, base, sizeof *base, SLICE, 0, SLICE, parts,
                                            &ticket, &why));
        assert_ok(nccl.table->wait(&nccl, &ticket, &why));
        ops->sum_parts(ops, base + mpi.rank * SLICE, parts, nccl.size, SLICE, SLICE);
        ops->fill(ops, parts, n, -1000.0f);
        assert_ok(
            nccl.table->gather_slices(&nccl, base, sizeof *base, SLICE, 0, SLICE, &ticket, &why));
        assert_ok(nccl.table->wait(&nccl, &ticket, &why));
        ops->add(ops, sums, base, n);
        for (uint32_t rank = 0; rank < nccl.size; rank++) {
            total += (float)(rank + 1 + (uint32_t)round);
        }
    }
    get(got, sums, n * sizeof *got);
    for (size_t i = 0; i < n; i++) {
        assert_true(got[i] == total);
    }
    assert_ok(ops->check(ops, &why));
    heap_free(got);
}

/* Several at once, waited for in another order; the 65th is refused. */
static void test_flights(void **state)
{
    (void)state;
    enum { MOST = 64, SLICE = 100 };
    const size_t n = nccl.size * (size_t)SLICE;
    struct ticket tickets[MOST], more;
    float *got = heap_alloc(n * sizeof *got);
    for (size_t f = 0; f < MOST; f++) {
        float *base = (float *)(void *)region + f * n;
        ops->fill(ops, base, n, (float)(mpi.rank * 1000 + f));
        assert_ok(nccl.table->gather_slices(&nccl, base, sizeof *base, SLICE, 0, SLICE, &tickets[f],
                                            &why));
    }
    assert_int_equal(nccl.table->gather_slices(&nccl, region, 4, SLICE, 0, SLICE, &more, &why),
                     STATUS_BUSY);
    for (size_t f = 0; f < MOST; f++) {
        assert_ok(nccl.table->wait(&nccl, &tickets[(f * 5 + 3) % MOST], &why));
    }
    for (size_t f = 0; f < MOST; f++) {
        get(got, (float *)(void *)region + f * n, n * sizeof *got);
        for (size_t i = 0; i < n; i++) {
            assert_true(got[i] == (float)(i / SLICE * 1000 + f));
        }
    }
    heap_free(got);
}

/* ---- what goes wrong ---- */

/* Two ranks with one GPU, and a rank without memory: all come to an answer. */
static void test_refusals(void **state)
{
    (void)state;
    struct comm none;
    struct cuda_device *cuda = cuda_of(&device);
    unsigned char uuid[CUDA_UUID_BYTES];
    const int64_t live = heap_live();
    memcpy(uuid, cuda->gpu.uuid, sizeof uuid);
    if (mpi.rank < 2) {
        memset(cuda->gpu.uuid, 7, sizeof uuid);
    }
    assert_int_equal(plugin->nccl_init(&none, &mpi, &device, &why), STATUS_UNSUPPORTED);
    assert_non_null(strstr(why.text, "ranks 0 and 1 have the same GPU"));
    memcpy(cuda->gpu.uuid, uuid, sizeof uuid);
    if (mpi.rank == 1) {
        heap_fail(1, false);
    }
    assert_int_equal(plugin->nccl_init(&none, &mpi, &device, &why),
                     mpi.rank == 1 ? STATUS_OUT_OF_MEMORY : STATUS_VOTED_DOWN);
    heap_fail(0, false);
    assert_int_equal(heap_live(), live);
}

/* The device says no more after a failed wait; here it goes on, once its streams are empty. */
static int forget_failure(void **state)
{
    (void)state;
    nccl.table->free(&nccl);
    cuda_of(&device)->lost = (struct failure){0};
    if (cuda_drain(cuda_of(&device), &why) != STATUS_OK) {
        fprintf(stderr, "%s\n", why.text);
        return -1;
    }
    (void)!ops->check(ops, &why);
    int first_no = 0;
    return comm_vote(&mpi, "go on", true, &first_no, &why) == STATUS_OK &&
                   plugin->nccl_init(&nccl, &mpi, &device, &why) == STATUS_OK
               ? 0
               : -1;
}

/* Rank 1 does not come. The others queue their part, and the host learns of it where it waits. */
static void test_absent_rank(void **state)
{
    (void)state;
    float *base = (float *)(void *)region;
    struct ticket ticket;
    nccl.timeout_s = 0.4;
    fault_here((int)nccl.rank, 1, PHASE_STEP);
    assert_ok(fault_arm("collective:rank=1,nth=1", &why));
    enum status status =
        nccl.table->scatter_parts(&nccl, base, 4, 100, 0, 100, base + 1000, &ticket, &why);
    if (nccl.rank == 1) {
        assert_int_equal(status, STATUS_DEADLINE);
        assert_non_null(strstr(why.text, "on purpose"));
    } else {
        if (status == STATUS_OK) {
            status = nccl.table->wait(&nccl, &ticket, &why);
        }
        if (status == STATUS_OK) {
            ops->add(ops, base, base + 1000, 100);
            status = ops->check(ops, &why);
        }
        /* It left, or it is late: whichever is seen first. */
        assert_true(status == STATUS_DEADLINE || status == STATUS_RANK_LOST);
        assert_non_null(strstr(why.text, "collective 'scatter_parts'"));
    }
    assert_int_equal(nccl.table->gather_slices(&nccl, base, 4, 10, 0, 10, &ticket, &why),
                     STATUS_RANK_LOST);
    assert_non_null(strstr(why.text, "refused"));
    fault_disarm_all();
}

static void test_abort_flag(void **state)
{
    (void)state;
    static _Atomic bool flag;
    float *base = (float *)(void *)region;
    struct ticket ticket;
    int first_no = 0;
    nccl.abort_flag = &flag;
    if (nccl.rank == 0) {
        enum status status = nccl.table->gather_slices(&nccl, base, 4, 10, 0, 10, &ticket, &why);
        assert_ok(status);
        assert_ok(nccl.table->wait(&nccl, &ticket, &why));
        ops->fill(ops, base, 10, 1.0f);
        atomic_store(&flag, true);
        assert_int_equal(ops->check(ops, &why), STATUS_STOPPED);
        assert_non_null(strstr(why.text, "collective 'gather_slices'"));
    }
    assert_ok(comm_vote(&mpi, "stopped", true, &first_no, &why));
    nccl.abort_flag = NULL;
}

static int open_all(void)
{
    void *base = NULL;
    plugin = ballast_cuda();
    if (plugin->open(&device, (int)mpi.rank, 0, &gpu, &why) != STATUS_OK ||
        plugin->ops_new(&device, DTYPE_FP32, &ops, &why) != STATUS_OK ||
        device.table->reserve(&device, REGION_BYTES, &base, &why) != STATUS_OK ||
        device.table->commit(&device, base, 0, REGION_BYTES, &why) != STATUS_OK ||
        plugin->nccl_init(&nccl, &mpi, &device, &why) != STATUS_OK) {
        fprintf(stderr, "rank %u: %s\n", mpi.rank, why.text);
        return -1;
    }
    region = base;
    return 0;
}

int main(int argc, char **argv)
{
    alarm(170);
    if (comm_mpi_init(&mpi, 30, &argc, &argv, &why) != STATUS_OK || open_all() != 0) {
        fprintf(stderr, "%s\n", why.text);
        return 1;
    }
    log_init("test", (int)mpi.rank, LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nccl),
        cmocka_unit_test(test_staged),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_flights),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test_teardown(test_absent_rank, forget_failure),
        cmocka_unit_test_teardown(test_abort_flag, forget_failure),
        cmocka_unit_test(test_order),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    nccl.table->free(&nccl);
    ops->free(ops);
    device_fini(&device);
    mpi.table->free(&mpi);
    comm_mpi_fini(&mpi);
    return failed;
}
