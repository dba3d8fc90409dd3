/* Data collectives staged through the host against the comm that is wrapped, bit for bit, on the
 * CPU device.
 * links: worker kernels proto base
 * mpi: 4
 * labels: mpi */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "worker/parallel/comm_staged.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>

static struct comm mpi, staged;
static struct device device;
static struct failure why;

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

/* Any byte of what rank `rank` starts with. */
static void fill(uint8_t *bytes, size_t n, uint32_t rank)
{
    for (size_t i = 0; i < n; i++) {
        bytes[i] = (uint8_t)((rank * 193 + i * 31 + i / 251) % 256);
    }
}

static void scatter_by(struct comm *comm, const uint8_t *base, size_t elem, size_t stride,
                       size_t offset, size_t n, uint8_t *parts)
{
    struct ticket ticket;
    assert_ok(
        comm->table->scatter_parts(comm, base, elem, stride, offset, n, parts, &ticket, &why));
    comm->table->progress(comm);
    assert_ok(comm->table->wait(comm, &ticket, &why));
    assert_int_equal(ticket.serial, 0);
}

static void check_scatter(size_t elem, size_t stride, size_t offset, size_t n)
{
    const size_t base_bytes = staged.size * stride * elem;
    const size_t parts_bytes = staged.size * n * elem;
    uint8_t *base = heap_alloc(base_bytes);
    uint8_t *before = heap_alloc(base_bytes);
    uint8_t *parts = heap_alloc(parts_bytes + 1);
    uint8_t *expected = heap_alloc(parts_bytes + 1);
    fill(base, base_bytes, staged.rank);
    memcpy(before, base, base_bytes);
    memset(parts, 0xEE, parts_bytes + 1);
    memset(expected, 0xEE, parts_bytes + 1);
    const uint64_t sent = staged.bytes_sent;
    const uint64_t number = atomic_load(&staged.n_collectives);
    scatter_by(&staged, base, elem, stride, offset, n, parts);
    assert_int_equal(staged.bytes_sent - sent, (staged.size - 1) * n * elem);
    assert_int_equal(atomic_load(&staged.n_collectives), number + 1);
    assert_null(atomic_load(&staged.collective));
    scatter_by(&mpi, base, elem, stride, offset, n, expected);
    assert_memory_equal(parts, expected, parts_bytes + 1);
    assert_memory_equal(base, before, base_bytes);
    heap_free(expected);
    heap_free(parts);
    heap_free(before);
    heap_free(base);
}

static void gather_by(struct comm *comm, uint8_t *base, size_t elem, size_t stride, size_t offset,
                      size_t n)
{
    struct ticket ticket;
    assert_ok(comm->table->gather_slices(comm, base, elem, stride, offset, n, &ticket, &why));
    assert_ok(comm->table->wait(comm, &ticket, &why));
}

static void check_gather(size_t elem, size_t stride, size_t offset, size_t n)
{
    const size_t bytes = staged.size * stride * elem;
    uint8_t *base = heap_alloc(bytes);
    uint8_t *expected = heap_alloc(bytes);
    fill(base, bytes, staged.rank);
    memcpy(expected, base, bytes);
    const uint64_t sent = staged.bytes_sent;
    const uint64_t number = atomic_load(&staged.n_collectives);
    gather_by(&staged, base, elem, stride, offset, n);
    assert_int_equal(staged.bytes_sent - sent, (staged.size - 1) * n * elem);
    assert_int_equal(atomic_load(&staged.n_collectives), number + 1);
    gather_by(&mpi, expected, elem, stride, offset, n);
    assert_memory_equal(base, expected, bytes);
    heap_free(expected);
    heap_free(base);
}

static void test_shapes(void **state)
{
    (void)state;
    check_scatter(4, 1000, 0, 1000);
    check_scatter(4, 1000, 256, 511);
    check_scatter(2, 7, 3, 1);
    check_scatter(4, 10, 10, 0);
    check_gather(4, 1000, 0, 1000);
    check_gather(2, 1000, 13, 300);
    check_gather(4, 10, 10, 0);
}

/* Parts larger than the staging buffer has room for, and a length that no piece divides. */
static void test_pieces(void **state)
{
    (void)state;
    const size_t n = COMM_STAGED_BYTES / 2 / staged.size / sizeof(float);
    check_scatter(sizeof(float), 3 * n, n / 2, 2 * n + 77);
    check_gather(sizeof(float), 3 * n, 5, 2 * n + 1);
    /* The comm's own limit is smaller. */
    staged.piece_bytes = 1000;
    check_scatter(sizeof(float), 5000, 7, 1777);
    check_gather(sizeof(float), 5000, 7, 1777);
    staged.piece_bytes = COMM_PIECE_BYTES;
}

static void test_control(void **state)
{
    (void)state;
    uint32_t all[64] = {0};
    const uint32_t mine = 100 + staged.rank;
    assert_true(staged.size <= 64);
    const uint64_t number = atomic_load(&staged.n_collectives);
    assert_ok(staged.table->exchange(&staged, "numbers", &mine, sizeof mine, all, &why));
    assert_int_equal(atomic_load(&staged.n_collectives), number + 1);
    for (uint32_t rank = 0; rank < staged.size; rank++) {
        assert_int_equal(all[rank], 100 + rank);
    }
    char text[16] = "";
    if (staged.rank == 0) {
        snprintf(text, sizeof text, "from rank 0");
    }
    assert_ok(staged.table->broadcast(&staged, "text", text, sizeof text, &why));
    assert_string_equal(text, "from rank 0");
    int first_no = -2;
    assert_ok(comm_vote(&staged, "vote", true, &first_no, &why));
    assert_int_equal(first_no, -1);
    assert_int_equal(staged.node_size, mpi.node_size);
    assert_int_equal(staged.node_rank, mpi.node_rank);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    for (uint64_t nth = 1; nth <= 2; nth++) {
        struct comm none;
        const int64_t live = heap_live();
        heap_fail(nth, false);
        assert_int_equal(comm_staged_init(&none, &mpi, &device, &why), STATUS_OUT_OF_MEMORY);
        heap_fail(0, false);
        assert_int_equal(heap_live(), live);
    }
}

/* It breaks the comm. The deadline set in the wrapper is the one that counts. */
static void test_fault_and_deadline(void **state)
{
    (void)state;
    assert_ok(fault_arm("collective:rank=1,nth=1", &why));
    staged.timeout_s = 0.3;
    float base[256] = {0}, parts[256];
    struct ticket ticket;
    fault_here((int)staged.rank, 1, PHASE_STEP);
    const double start_s = units_monotonic_s();
    assert_int_equal(staged.table->scatter_parts(&staged, base, sizeof *base, 256 / staged.size, 0,
                                                 256 / staged.size, parts, &ticket, &why),
                     STATUS_DEADLINE);
    assert_true(units_monotonic_s() - start_s < 10.0); /* control's own limit is 30 s */
    assert_non_null(strstr(why.text, "collective 'scatter_parts'"));
    assert_null(atomic_load(&staged.collective));
    assert_int_equal(
        staged.table->gather_slices(&staged, base, sizeof *base, 64, 0, 64, &ticket, &why),
        STATUS_RANK_LOST);
    fault_disarm_all();
}

/* A broken comm cannot be ended in order: leave whole ones behind. */
static int new_comms(void **state)
{
    (void)state;
    staged.table->free(&staged);
    mpi.table->free(&mpi);
    return comm_mpi_init(&mpi, 30, NULL, NULL, &why) == STATUS_OK &&
                   comm_staged_init(&staged, &mpi, &device, &why) == STATUS_OK
               ? 0
               : -1;
}

int main(int argc, char **argv)
{
    alarm(100);
    struct failure start = {0};
    if (comm_mpi_init(&mpi, 30, &argc, &argv, &start) != STATUS_OK) {
        fprintf(stderr, "%s\n", start.text);
        return 1;
    }
    log_init("test", (int)mpi.rank, LOG_INFO);
    if (cpu_device_init(&device, 0, &start) != STATUS_OK ||
        comm_staged_init(&staged, &mpi, &device, &start) != STATUS_OK) {
        fprintf(stderr, "%s\n", start.text);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_control),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test_teardown(test_fault_and_deadline, new_comms),
        cmocka_unit_test(test_shapes),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    staged.table->free(&staged);
    mpi.table->free(&mpi);
    comm_mpi_fini(&mpi);
    return failed;
}
