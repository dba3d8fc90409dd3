/* Admission: several ranks that commit together or not at all. Ranks are threads of this
 * process whose exchange is a barrier.
 * links: worker kernels proto base
 * labels: memory */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "worker/memory/admit.h"
#include <cmocka.h> /* last: it has a macro `fail` */

enum { MAX_RANKS = 4, PAGE = 4096, BALLOT_ROOM = 256 };

/* ---- a world of threads ---- */

struct world {
    uint32_t size;
    pthread_barrier_t barrier;
    unsigned char ballots[MAX_RANKS][BALLOT_ROOM];
    int fail_at; /* the exchange with this number fails on all ranks; -1: none */
};

struct rank {
    struct world *world;
    uint32_t number;
    int n_exchanges;
    struct device device;
    struct telemetry telemetry;
    struct ledger ledger;
    struct workspace workspace;
    struct plan plan;
    struct admit admit;
    struct failure why;
    /* What the thread does, and what came of it. */
    enum phase phase;
    size_t bytes; /* not 0: admit_bytes */
    enum status status;
};

static enum status exchange(void *user, const char *name, const void *mine, size_t bytes, void *all,
                            struct failure *why)
{
    struct rank *rank = user;
    struct world *world = rank->world;
    (void)name;
    assert_true(bytes <= BALLOT_ROOM);
    memcpy(world->ballots[rank->number], mine, bytes);
    pthread_barrier_wait(&world->barrier);
    for (uint32_t r = 0; r < world->size; r++) {
        memcpy((unsigned char *)all + r * bytes, world->ballots[r], bytes);
    }
    pthread_barrier_wait(&world->barrier);
    if (rank->n_exchanges++ == world->fail_at) {
        return (fail)(why, STATUS_RANK_LOST, "somebody is gone");
    }
    return STATUS_OK;
}

/* What the node has left, by rank's thread: tests set it before the threads start. */
static uint64_t headroom_bytes;

static uint64_t headroom(void)
{
    return headroom_bytes;
}

static void open_world(struct world *world, struct rank *ranks, uint32_t size)
{
    *world = (struct world){.size = size, .fail_at = -1};
    headroom_bytes = UINT64_MAX;
    pthread_barrier_init(&world->barrier, NULL, size);
    for (uint32_t r = 0; r < size; r++) {
        struct rank *rank = &ranks[r];
        memset(rank, 0, sizeof *rank);
        rank->world = world;
        rank->number = r;
        assert_int_equal(cpu_device_init(&rank->device, 64 * PAGE, &rank->why), STATUS_OK);
        rank->device.granule_bytes = PAGE;
        ledger_init(&rank->ledger, &rank->telemetry);
        assert_int_equal(workspace_init(&rank->workspace, &rank->device, &rank->ledger, 64 * PAGE,
                                        false, &rank->why),
                         STATUS_OK);
        rank->plan.phases[PHASE_FORWARD].workspace_bytes = 10 * PAGE - 5;
        rank->plan.phases[PHASE_BACKWARD].workspace_bytes = 20 * PAGE;
        rank->plan.phases[PHASE_STEP].workspace_bytes = 4 * PAGE;
        rank->admit = (struct admit){.workspace = &rank->workspace,
                                     .plan = &rank->plan,
                                     .host_backed = true,
                                     .rank = r,
                                     .size = size,
                                     .node = r / 2,
                                     .exchange = exchange,
                                     .user = rank,
                                     .node_headroom = headroom};
    }
}

static void close_world(struct world *world, struct rank *ranks)
{
    for (uint32_t r = 0; r < world->size; r++) {
        workspace_fini(&ranks[r].workspace);
        assert_int_equal(atomic_load(&ranks[r].device.committed_bytes), 0);
        device_fini(&ranks[r].device);
    }
    pthread_barrier_destroy(&world->barrier);
}

static void *rank_main(void *argument)
{
    struct rank *rank = argument;
    rank->status = rank->bytes != 0
                       ? admit_bytes(&rank->admit, rank->phase, rank->bytes, NULL, &rank->why)
                       : admit_phase(&rank->admit, rank->phase, &rank->why);
    return NULL;
}

/* Every rank asks; all have to come to the same end, with the same story. */
static enum status ask(struct world *world, struct rank *ranks, enum phase phase)
{
    pthread_t threads[MAX_RANKS];
    for (uint32_t r = 0; r < world->size; r++) {
        ranks[r].phase = phase;
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &ranks[r]), 0);
    }
    for (uint32_t r = 0; r < world->size; r++) {
        pthread_join(threads[r], NULL);
    }
    for (uint32_t r = 1; r < world->size; r++) {
        assert_int_equal(ranks[r].status, ranks[0].status);
        assert_int_equal(ranks[r].admit.n_votes, ranks[0].admit.n_votes);
        assert_int_equal(ranks[r].admit.admitted[phase], ranks[0].admit.admitted[phase]);
        const struct shortage *a = &ranks[0].admit.shortage;
        const struct shortage *b = &ranks[r].admit.shortage;
        assert_true(a->any == b->any && a->rank == b->rank && a->phase == b->phase &&
                    a->asked_bytes == b->asked_bytes && a->held_bytes == b->held_bytes &&
                    a->limit_bytes == b->limit_bytes && a->node == b->node &&
                    a->on_purpose == b->on_purpose);
        if (ranks[0].status == STATUS_OUT_OF_MEMORY) {
            assert_string_equal(ranks[r].why.text, ranks[0].why.text);
        }
    }
    return ranks[0].status;
}

static void check_committed(const struct world *world, struct rank *ranks, size_t pages)
{
    for (uint32_t r = 0; r < world->size; r++) {
        assert_int_equal(ranks[r].workspace.region.committed_bytes, pages * PAGE);
        assert_int_equal(region_resident(&ranks[r].workspace.region), pages * PAGE);
    }
}

/* ---- the tests ---- */

static void phases_are_admitted_once(void **state)
{
    (void)state;
    struct world world;
    struct rank ranks[MAX_RANKS];
    open_world(&world, ranks, 4);
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    check_committed(&world, ranks, 10);
    assert_int_equal(ask(&world, ranks, PHASE_BACKWARD), STATUS_OK);
    check_committed(&world, ranks, 20);
    /* A smaller phase keeps what is there. */
    assert_int_equal(ask(&world, ranks, PHASE_STEP), STATUS_OK);
    check_committed(&world, ranks, 20);
    assert_int_equal(ranks[0].admit.n_votes, 3);
    /* From now on nobody votes. */
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    assert_int_equal(ask(&world, ranks, PHASE_BACKWARD), STATUS_OK);
    assert_int_equal(ranks[0].admit.n_votes, 3);
    /* Nor after a switch, whose phases are all committed already. */
    admit_follow(&ranks[0].admit, &ranks[0].plan);
    for (int phase = 0; phase < N_PHASES; phase++) {
        assert_true(ranks[0].admit.admitted[phase]);
    }
    close_world(&world, ranks);
}

/* One rank's device is too small: all of them know, all go back, and can ask again. */
static void a_shortage_on_one_rank_is_everybodys(void **state)
{
    (void)state;
    struct world world;
    struct rank ranks[MAX_RANKS];
    open_world(&world, ranks, 4);
    ranks[2].device.capacity_bytes = 15 * PAGE;
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    assert_int_equal(ask(&world, ranks, PHASE_BACKWARD), STATUS_OUT_OF_MEMORY);
    check_committed(&world, ranks, 10);
    const struct shortage *shortage = &ranks[0].admit.shortage;
    assert_true(shortage->any && !shortage->node && !shortage->on_purpose);
    assert_int_equal(shortage->rank, 2);
    assert_int_equal(shortage->phase, PHASE_BACKWARD);
    assert_int_equal(shortage->asked_bytes, 10 * PAGE);
    assert_int_equal(shortage->held_bytes, 10 * PAGE);
    assert_int_equal(shortage->limit_bytes, 15 * PAGE);
    assert_string_equal(ranks[3].why.text,
                        "out of memory in backward on rank 2: 40960 bytes asked, 40960 held, limit "
                        "61440");
    assert_false(ranks[0].admit.admitted[PHASE_BACKWARD]);
    ranks[2].device.capacity_bytes = 20 * PAGE;
    assert_int_equal(ask(&world, ranks, PHASE_BACKWARD), STATUS_OK);
    check_committed(&world, ranks, 20);
    close_world(&world, ranks);
}

/* Two ranks of a node ask together for more than it has, though each alone would get it: refused
 * before anybody takes a page. */
static void a_node_is_asked_for_the_sum(void **state)
{
    (void)state;
    struct world world;
    struct rank ranks[MAX_RANKS];
    open_world(&world, ranks, 4);
    headroom_bytes = 20 * PAGE - 1;
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OUT_OF_MEMORY);
    check_committed(&world, ranks, 0);
    const struct shortage *shortage = &ranks[3].admit.shortage;
    assert_true(shortage->node);
    assert_int_equal(shortage->rank, 0);
    assert_int_equal(shortage->asked_bytes, 20 * PAGE);
    assert_int_equal(shortage->limit_bytes, 20 * PAGE - 1);
    assert_non_null(strstr(ranks[1].why.text, "the node has left 81919"));
    /* Nobody committed in that round: one exchange, not two. */
    assert_int_equal(ranks[0].n_exchanges, 1);
    headroom_bytes = 20 * PAGE;
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    /* A device with memory of its own does not ask the node. */
    headroom_bytes = 0;
    for (uint32_t r = 0; r < 4; r++) {
        ranks[r].admit.host_backed = false;
    }
    assert_int_equal(ask(&world, ranks, PHASE_BACKWARD), STATUS_OK);
    close_world(&world, ranks);
}

/* What needs no new page needs nothing from a node that has none. */
static void nothing_new_is_always_admitted(void **state)
{
    (void)state;
    struct world world;
    struct rank ranks[MAX_RANKS];
    open_world(&world, ranks, 2);
    assert_int_equal(ask(&world, ranks, PHASE_BACKWARD), STATUS_OK);
    headroom_bytes = 0;
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    check_committed(&world, ranks, 20);
    close_world(&world, ranks);
}

static void a_fault_is_told_as_one(void **state)
{
    (void)state;
    struct world world;
    struct rank ranks[MAX_RANKS];
    struct failure why;
    open_world(&world, ranks, 1);
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    assert_int_equal(fault_arm("commit:rank=0,step=3,phase=forward", &why), STATUS_OK);
    fault_here(0, 2, PHASE_FORWARD);
    ranks[0].admit.step = 2;
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    assert_int_equal(ranks[0].admit.n_votes, 1);
    /* Admitted already and 0 bytes to commit: it fires all the same. */
    fault_here(0, 3, PHASE_FORWARD);
    ranks[0].admit.step = 3;
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OUT_OF_MEMORY);
    assert_int_equal(ranks[0].admit.n_votes, 2);
    assert_true(ranks[0].admit.shortage.on_purpose);
    assert_int_equal(ranks[0].admit.shortage.asked_bytes, 0);
    assert_non_null(strstr(ranks[0].why.text, "(fault on purpose)"));
    check_committed(&world, ranks, 10);
    /* Once. */
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    fault_disarm_all();
    close_world(&world, ranks);
}

/* A fault of one rank makes all ranks vote, though only that one fails. */
static void a_fault_forces_everybody_to_vote(void **state)
{
    (void)state;
    struct world world;
    struct rank ranks[MAX_RANKS];
    struct failure why;
    open_world(&world, ranks, 1);
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    /* This process is rank 0; the fault is rank 1's. */
    assert_int_equal(fault_arm("commit:rank=1,step=5,phase=forward", &why), STATUS_OK);
    fault_here(0, 5, PHASE_FORWARD);
    ranks[0].admit.step = 5;
    assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_OK);
    assert_int_equal(ranks[0].admit.n_votes, 2);
    fault_disarm_all();
    close_world(&world, ranks);
}

/* The exchange itself fails, in either round: passed up, and what was committed is given back. */
static void a_lost_rank_is_no_shortage(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        struct world world;
        struct rank ranks[MAX_RANKS];
        open_world(&world, ranks, 2);
        world.fail_at = round;
        assert_int_equal(ask(&world, ranks, PHASE_FORWARD), STATUS_RANK_LOST);
        assert_false(ranks[0].admit.shortage.any);
        check_committed(&world, ranks, 0);
        close_world(&world, ranks);
    }
}

/* A switch's prepare: bytes outside the plan in force. */
static void bytes_are_admitted_outside_the_plan(void **state)
{
    (void)state;
    struct world world;
    struct rank ranks[MAX_RANKS];
    open_world(&world, ranks, 3);
    for (uint32_t r = 0; r < 3; r++) {
        ranks[r].bytes = 30 * PAGE + 1;
    }
    assert_int_equal(ask(&world, ranks, PHASE_SWITCH), STATUS_OK);
    check_committed(&world, ranks, 31);
    ranks[1].device.capacity_bytes = 32 * PAGE;
    for (uint32_t r = 0; r < 3; r++) {
        ranks[r].bytes = 40 * PAGE;
    }
    assert_int_equal(ask(&world, ranks, PHASE_SWITCH), STATUS_OUT_OF_MEMORY);
    assert_int_equal(ranks[0].admit.shortage.rank, 1);
    assert_int_equal(ranks[0].admit.shortage.phase, PHASE_SWITCH);
    check_committed(&world, ranks, 31);
    close_world(&world, ranks);
}

/* A rank without host memory must not stay away from the vote. */
static void nothing_comes_from_the_heap(void **state)
{
    (void)state;
    struct world world;
    struct rank ranks[MAX_RANKS];
    open_world(&world, ranks, 1);
    heap_fail(1, true);
    assert_int_equal(admit_phase(&ranks[0].admit, PHASE_FORWARD, &ranks[0].why), STATUS_OK);
    heap_fail(0, false);
    close_world(&world, ranks);
}

/* This machine's own answer: something, and not more than it has. */
static void the_node_has_headroom(void **state)
{
    (void)state;
    const uint64_t bytes = admit_node_headroom();
    assert_true(bytes > 0 && bytes < (uint64_t)1 << 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(phases_are_admitted_once),
        cmocka_unit_test(a_shortage_on_one_rank_is_everybodys),
        cmocka_unit_test(a_node_is_asked_for_the_sum),
        cmocka_unit_test(nothing_new_is_always_admitted),
        cmocka_unit_test(a_fault_is_told_as_one),
        cmocka_unit_test(a_fault_forces_everybody_to_vote),
        cmocka_unit_test(a_lost_rank_is_no_shortage),
        cmocka_unit_test(bytes_are_admitted_outside_the_plan),
        cmocka_unit_test(nothing_comes_from_the_heap),
        cmocka_unit_test(the_node_has_headroom),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
