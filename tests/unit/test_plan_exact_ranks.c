/* Predicted bytes equal measured bytes on several ranks, which agree on the plan.
 * links: testing worker kernels proto base
 * labels: plan mpi
 * mpi: 2
 * timeout: 300
 *
 * tests/parity/CMakeLists.txt runs it on four ranks too. BALLAST_FULL=1: 100 configurations. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include <cmocka.h> /* last of the foreign ones: it has a macro `fail` */
#include "tests/unit/plan_exact.h"

static struct comm comm;

static void random_configurations(void **state)
{
    (void)state;
    exact_random += comm.size;
    const double worst = exact_sweep(&comm, exact_count(12, 100));
    if (comm.rank == 0) {
        print_message("%u ranks: worst packing efficiency %.4f\n", comm.size, worst);
    }
}

/* Every rank plans for itself; the plans and what is sent have to be the same. */
static void ranks_agree_on_the_plan(void **state)
{
    (void)state;
    struct small_training small;
    exact_open(&small, &comm, 0);
    const uint64_t before = comm.bytes_sent;
    exact_check(&small);
    /* Two steps and an evaluation, which sends nothing but its exchange. */
    assert_int_equal(comm.bytes_sent - before, 2 * small.cost.comm_bytes);
    const uint64_t mine[2] = {small.plan.peak_bytes, small.plan.workspace_bytes};
    uint64_t all[64][2];
    assert_true(comm.size <= 64);
    assert_int_equal(comm.table->exchange(&comm, "plans", mine, sizeof mine, all, &small.why),
                     STATUS_OK);
    for (uint32_t rank = 0; rank < comm.size; rank++) {
        assert_memory_equal(all[rank], mine, sizeof mine);
    }
    small_close(&small);
}

int main(int argc, char **argv)
{
    struct failure why;
    alarm(290);
    if (comm_mpi_init(&comm, 60, &argc, &argv, &why) != STATUS_OK) {
        fprintf(stderr, "%s\n", why.text);
        return 1;
    }
    log_init("test_plan_exact_ranks", (int)comm.rank, LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_configurations),
        cmocka_unit_test(ranks_agree_on_the_plan),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    comm.table->free(&comm);
    comm_mpi_fini(&comm);
    return failed + (heap_live() != 0);
}
