/* Collectives between four ranks against expected values; the dry comm against the real one.
 * links: worker kernels proto base
 * mpi: 4
 * labels: mpi
 *
 * Runs on any number of ranks. BALLAST_FULL=1 also sends more than 2^32 bytes at once. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/parallel/comm.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>

static struct comm comm;
static struct failure why;

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

static void test_world(void **state)
{
    (void)state;
    assert_true(comm.rank < comm.size);
    /* mpirun put all ranks on this host */
    assert_int_equal(comm.node_size, comm.size);
    assert_int_equal(comm.node_rank, comm.rank);
    assert_int_equal(comm.node, 0);
}

static void test_exchange(void **state)
{
    (void)state;
    static uint8_t mine[COMM_EXCHANGE_MAX_BYTES];
    static uint8_t all[64 * COMM_EXCHANGE_MAX_BYTES];
    assert_true(comm.size <= 64);
    const size_t sizes[] = {1, 3, 8, 1000, COMM_EXCHANGE_MAX_BYTES};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t bytes = sizes[s];
        memset(all, 0xEE, sizeof all);
        for (size_t i = 0; i < bytes; i++) {
            mine[i] = (uint8_t)(comm.rank * 31 + i * 7 + s);
        }
        uint64_t before = atomic_load(&comm.n_collectives);
        assert_ok(comm.table->exchange(&comm, "sizes", mine, bytes, all, &why));
        assert_int_equal(atomic_load(&comm.n_collectives), before + 1);
        assert_null(atomic_load(&comm.collective));
        for (uint32_t rank = 0; rank < comm.size; rank++) {
            for (size_t i = 0; i < bytes; i++) {
                assert_int_equal(all[rank * bytes + i], (uint8_t)(rank * 31 + i * 7 + s));
            }
        }
        assert_int_equal(all[comm.size * bytes], 0xEE);
    }
}

static void test_vote_and_sum(void **state)
{
    (void)state;
    int first_no = 99;
    assert_ok(comm_vote(&comm, "vote", true, &first_no, &why));
    assert_int_equal(first_no, -1);
    assert_ok(comm_vote(&comm, "vote", comm.rank == 0, &first_no, &why));
    assert_int_equal(first_no, comm.size > 1 ? 1 : -1);
    assert_ok(comm_vote(&comm, "vote", comm.rank != comm.size - 1, &first_no, &why));
    assert_int_equal(first_no, (int)comm.size - 1);
    uint64_t sum = 0;
    assert_ok(comm_sum_u64(&comm, "sum", 1000000000000 + comm.rank, &sum, &why));
    assert_int_equal(sum, comm.size * 1000000000000 + comm.size * (comm.size - 1) / 2);
}

static void test_broadcast(void **state)
{
    (void)state;
    const size_t sizes[] = {0, 1, 4097, 300001};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint8_t *bytes = heap_alloc(sizes[s] + 1);
        memset(bytes, comm.rank == 0 ? 0 : 0xCC, sizes[s] + 1);
        bytes[sizes[s]] = 0x77;
        for (size_t i = 0; i < sizes[s] && comm.rank == 0; i++) {
            bytes[i] = (uint8_t)(i % 251);
        }
        assert_ok(comm.table->broadcast(&comm, "file", bytes, sizes[s], &why));
        for (size_t i = 0; i < sizes[s]; i++) {
            assert_int_equal(bytes[i], i % 251);
        }
        assert_int_equal(bytes[sizes[s]], 0x77);
        heap_free(bytes);
    }
}

/* Element i of the part that rank `from` has for rank `to`. */
static float value(uint32_t from, uint32_t to, size_t i)
{
    return (float)(from * 1000000 + to * 100000 + i % 99991);
}

static void check_scatter(size_t stride, size_t offset, size_t n)
{
    float *base = heap_alloc(comm.size * stride * sizeof *base);
    float *parts = heap_alloc((comm.size * n + 1) * sizeof *parts);
    for (uint32_t to = 0; to < comm.size; to++) {
        for (size_t i = 0; i < stride; i++) {
            base[to * stride + i] = value(comm.rank, to, i);
        }
    }
    parts[comm.size * n] = -1;
    uint64_t sent = comm.bytes_sent;
    struct ticket ticket;
    assert_ok(comm.table->scatter_parts(&comm, base, sizeof *base, stride, offset, n, parts,
                                        &ticket, &why));
    comm.table->progress(&comm);
    assert_ok(comm.table->wait(&comm, &ticket, &why));
    assert_int_equal(ticket.serial, 0);
    assert_int_equal(comm.bytes_sent - sent, (comm.size - 1) * n * sizeof *base);
    for (uint32_t from = 0; from < comm.size; from++) {
        for (size_t i = 0; i < n; i++) {
            assert_true(parts[from * n + i] == value(from, comm.rank, offset + i));
        }
    }
    assert_true(parts[comm.size * n] == -1);
    heap_free(parts);
    heap_free(base);
}

static void check_gather(size_t stride, size_t offset, size_t n)
{
    size_t total = comm.size * stride;
    uint16_t *base = heap_alloc(total * sizeof *base);
    for (size_t i = 0; i < total; i++) {
        base[i] = (uint16_t)(comm.rank * 7919 + i);
    }
    struct ticket ticket;
    assert_ok(
        comm.table->gather_slices(&comm, base, sizeof *base, stride, offset, n, &ticket, &why));
    assert_ok(comm.table->wait(&comm, &ticket, &why));
    for (size_t i = 0; i < total; i++) {
        size_t owner = i / stride, at = i % stride;
        bool moved = at >= offset && at < offset + n;
        assert_int_equal(base[i], (uint16_t)((moved ? owner : comm.rank) * 7919 + i));
    }
    heap_free(base);
}

static void test_data(void **state)
{
    (void)state;
    check_scatter(1, 0, 1);
    check_scatter(257, 3, 251);
    check_scatter(70001, 1, 69999);
    check_scatter(16, 16, 0);
    check_gather(1, 0, 1);
    check_gather(257, 3, 251);
    check_gather(70001, 1, 69999);
    check_gather(16, 5, 0);
}

static void test_pieces(void **state)
{
    (void)state;
    /* As if a message could hold no more than this: the splitting of large counts. */
    const size_t pieces[] = {1, 7, 4096};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        comm.piece_bytes = pieces[i];
        check_scatter(67, 5, 61);
        check_gather(67, 5, 61);
        check_scatter(4099, 0, 4099);
        uint8_t bytes[1001];
        memset(bytes, comm.rank == 0 ? 0x5A : 0, sizeof bytes);
        assert_ok(comm.table->broadcast(&comm, "pieces", bytes, sizeof bytes, &why));
        assert_int_equal(bytes[0], 0x5A);
        assert_int_equal(bytes[1000], 0x5A);
    }
    comm.piece_bytes = COMM_PIECE_BYTES;
}

/* Many in flight at once, waited for out of order, votes in between. */
static void test_flights(void **state)
{
    (void)state;
    enum { N = 64, ELEMENTS = 1999 };
    int32_t *base = heap_alloc(comm.size * ELEMENTS * sizeof *base);
    int32_t *parts = heap_alloc(N * comm.size * ELEMENTS * sizeof *parts);
    for (size_t i = 0; i < comm.size * ELEMENTS; i++) {
        base[i] = (int32_t)(comm.rank * 1000003 + i);
    }
    struct ticket tickets[N];
    comm.piece_bytes = 1024;
    for (size_t t = 0; t < N; t++) {
        assert_ok(comm.table->scatter_parts(&comm, base, sizeof *base, ELEMENTS, t, ELEMENTS - t,
                                            parts + t * comm.size * ELEMENTS, &tickets[t], &why));
    }
    if (comm.size > 1) {
        struct ticket one_more;
        assert_int_equal(
            comm.table->scatter_parts(&comm, base, 4, ELEMENTS, 0, 1, parts, &one_more, &why),
            STATUS_BUSY);
    }
    for (size_t t = 0; t < N; t++) {
        size_t which = (t * 37 + 11) % N;
        int first_no = 0;
        if (t % 16 == 0) {
            assert_ok(comm_vote(&comm, "between", true, &first_no, &why));
            assert_int_equal(first_no, -1);
        }
        assert_ok(comm.table->wait(&comm, &tickets[which], &why));
        const int32_t *got = parts + which * comm.size * ELEMENTS;
        size_t n = ELEMENTS - which;
        for (uint32_t from = 0; from < comm.size; from++) {
            for (size_t i = 0; i < n; i++) {
                assert_int_equal(got[from * n + i],
                                 from * 1000003 + comm.rank * ELEMENTS + which + i);
            }
        }
    }
    comm.piece_bytes = COMM_PIECE_BYTES;
    heap_free(parts);
    heap_free(base);
}

static void test_dry_counts_the_same(void **state)
{
    (void)state;
    struct comm dry;
    comm_dry_init(&dry, comm.rank, comm.size);
    struct comm *both[] = {&comm, &dry};
    uint64_t sent[2], started[2];
    for (size_t c = 0; c < 2; c++) {
        uint64_t bytes = both[c]->bytes_sent, n = atomic_load(&both[c]->n_collectives);
        float *base = heap_calloc(comm.size * 100, sizeof *base);
        float *parts = heap_calloc(comm.size * 100, sizeof *parts);
        uint32_t mine = 7 + comm.rank, all[64];
        struct ticket a, b;
        int first_no;
        assert_ok(both[c]->table->scatter_parts(both[c], base, 4, 100, 3, 95, parts, &a, &why));
        assert_ok(both[c]->table->gather_slices(both[c], base, 2, 100, 0, 51, &b, &why));
        assert_ok(both[c]->table->wait(both[c], &a, &why));
        assert_ok(both[c]->table->wait(both[c], &b, &why));
        assert_ok(both[c]->table->exchange(both[c], "x", &mine, sizeof mine, all, &why));
        assert_int_equal(all[comm.rank], mine);
        assert_ok(both[c]->table->broadcast(both[c], "b", base, 100, &why));
        assert_ok(comm_vote(both[c], "v", true, &first_no, &why));
        sent[c] = both[c]->bytes_sent - bytes;
        started[c] = atomic_load(&both[c]->n_collectives) - n;
        heap_free(parts);
        heap_free(base);
    }
    assert_int_equal(sent[0], (comm.size - 1) * (95 * 4 + 51 * 2));
    assert_int_equal(sent[1], sent[0]);
    assert_int_equal(started[1], started[0]);
    assert_int_equal(started[0], 5);
    /* An exchange is copied into every place; no pointer of a data collective is followed. */
    uint32_t mine = 5, all[64];
    assert_ok(dry.table->exchange(&dry, "x", &mine, sizeof mine, all, &why));
    assert_int_equal(all[comm.size - 1], 5);
    struct ticket ticket;
    assert_ok(dry.table->scatter_parts(&dry, NULL, 4, 1 << 30, 0, 1 << 30, NULL, &ticket, &why));
    assert_int_equal(dry.bytes_sent - sent[1], (comm.size - 1) * 4ull << 30);
    dry.table->free(&dry);
}

/* More elements than an int, and than 32 bits, hold. The memory behind the addresses is one
 * small file mapped again and again, but for the last page, which is what must arrive. */
static void check_large(size_t n)
{
    enum { WINDOW = 64 << 20 };
    size_t bytes = (n + WINDOW - 1) / WINDOW * WINDOW;
    int file = memfd_create("large", 0);
    assert_int_equal(ftruncate(file, WINDOW), 0);
    uint8_t *base =
        mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(base != MAP_FAILED);
    for (size_t at = 0; at < bytes; at += WINDOW) {
        bool last = at + WINDOW >= n;
        assert_true(mmap(base + at, WINDOW, PROT_READ | PROT_WRITE,
                         MAP_FIXED | (last ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED),
                         last ? -1 : file, 0) != MAP_FAILED);
    }
    memset(base + n - 4, comm.rank == 0 ? 0x42 : 0, 4);
    comm.timeout_s = 120;
    assert_ok(comm.table->broadcast(&comm, "large", base, n, &why));
    for (size_t i = n - 4; i < n; i++) {
        assert_int_equal(base[i], 0x42);
    }
    munmap(base, bytes);
    close(file);
}

static void test_large_counts(void **state)
{
    (void)state;
    check_large((1ull << 31) + 4);
    check_large((1ull << 32) + 4);
}

static void test_fault(void **state)
{
    (void)state;
    /* Armed for a rank that does not exist: nothing happens. */
    fault_here((int)comm.rank, 0, PHASE_SETUP);
    assert_ok(fault_arm("collective:rank=77", &why));
    uint64_t sum;
    assert_ok(comm_sum_u64(&comm, "armed", 1, &sum, &why));
    assert_int_equal(sum, comm.size);
    fault_disarm_all();
}

static void *raise_flag(void *flag)
{
    usleep(50000); /* there is no event to wait for: the main thread is inside the wait */
    atomic_store((_Atomic bool *)flag, true);
    return NULL;
}

/* The last tests break their comm for good, so each gets a new one. */
static int new_comm(void **state)
{
    (void)state;
    comm.table->free(&comm);
    return comm_mpi_init(&comm, 20, NULL, NULL, &why) == STATUS_OK ? 0 : -1;
}

static void test_late_rank(void **state)
{
    (void)state;
    if (comm.size == 1) {
        return; /* there is nobody to wait for */
    }
    uint32_t late = comm.size - 1;
    comm.timeout_s = 0.2;
    uint32_t mine = 1, all[64] = {0};
    if (comm.rank == late) {
        /* Stays away on purpose; its own call fails at once and says so. */
        assert_ok(fault_arm("collective", &why));
        assert_int_equal(comm.table->exchange(&comm, "end of step", &mine, 4, all, &why),
                         STATUS_DEADLINE);
        assert_non_null(strstr(why.text, "'end of step'"));
        assert_non_null(strstr(why.text, "on purpose"));
        fault_disarm_all();
    } else {
        assert_int_equal(comm.table->exchange(&comm, "end of step", &mine, 4, all, &why),
                         STATUS_DEADLINE);
        char expected[64];
        snprintf(expected, sizeof expected, "for rank %u of %u", late, comm.size);
        assert_non_null(strstr(why.text, "'end of step' number"));
        assert_non_null(strstr(why.text, expected));
        assert_non_null(strstr(why.text, "limit 0.2 s"));
    }
    assert_int_equal(all[0], 0);
    assert_null(atomic_load(&comm.collective));
    /* From here on everything is refused at once, naming what broke. */
    struct ticket ticket = {0};
    assert_int_equal(comm.table->exchange(&comm, "later", &mine, 4, all, &why), STATUS_RANK_LOST);
    assert_non_null(strstr(why.text, "'end of step'"));
    assert_int_equal(comm.table->scatter_parts(&comm, all, 4, 1, 0, 1, all, &ticket, &why),
                     STATUS_RANK_LOST);
}

static void test_abort_flag(void **state)
{
    (void)state;
    if (comm.size == 1) {
        return; /* there is nobody to wait for */
    }
    _Atomic bool flag = false;
    comm.abort_flag = &flag;
    comm.timeout_s = 30;
    static float base[64 * 8], parts[64 * 8];
    struct ticket ticket;
    if (comm.rank == 0) {
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, raise_flag, &flag), 0);
        assert_ok(comm.table->scatter_parts(&comm, base, 4, 8, 0, 8, parts, &ticket, &why));
        assert_int_equal(comm.table->wait(&comm, &ticket, &why), STATUS_STOPPED);
        assert_non_null(strstr(why.text, "'scatter_parts'"));
        pthread_join(thread, NULL);
    }
    comm.abort_flag = NULL;
}

int main(int argc, char **argv)
{
    alarm(55);
    enum status status = comm_mpi_init(&comm, 20, &argc, &argv, &why);
    if (status != STATUS_OK) {
        fprintf(stderr, "%s\n", why.text);
        return 1;
    }
    log_init("test_comm", (int)comm.rank, LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_world),
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_vote_and_sum),
        cmocka_unit_test(test_broadcast),
        cmocka_unit_test(test_data),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_flights),
        cmocka_unit_test(test_dry_counts_the_same),
        cmocka_unit_test(test_fault),
        cmocka_unit_test_teardown(test_late_rank, new_comm),
        cmocka_unit_test_teardown(test_abort_flag, new_comm),
        cmocka_unit_test(test_vote_and_sum),
    };
    const struct CMUnitTest full[] = {cmocka_unit_test(test_large_counts)};
    int failed = 0;
    if (getenv("BALLAST_FULL") != NULL) {
        alarm(300);
        failed += cmocka_run_group_tests(full, NULL, NULL);
    }
    failed += cmocka_run_group_tests(tests, NULL, NULL);
    comm.table->free(&comm);
    comm_mpi_fini(&comm);
    if (heap_live() != 0 && comm.size == 1) { /* a broken comm keeps its buffers */
        fprintf(stderr, "%lld blocks were not freed\n", (long long)heap_live());
        failed++;
    }
    return failed;
}
