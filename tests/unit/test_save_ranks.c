/* Saves by four ranks: round trip, other layouts, failures of one rank that all ranks know.
 * links: worker kernels proto base
 * mpi: 4
 * labels: mpi
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/save/save.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>
#include "tests/unit/save_fixture.h"

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

static struct fixture_model model, expected;

/* Every rank goes on from the same place, in an empty run. */
static int set_up(void **state)
{
    (void)state;
    int first_no;
    bool good = comm_vote(&fixture_comm, "set up", true, &first_no, NULL) == STATUS_OK;
    if (fixture_comm.rank == 0) {
        fixture_empty();
    }
    good = good && comm_vote(&fixture_comm, "emptied", true, &first_no, NULL) == STATUS_OK;
    fault_disarm_all();
    return good ? 0 : -1;
}

/* Read the newest save with this rank's part under another split of the elements. */
static void check_read(uint64_t expected_step, uint32_t seed, uint32_t part, uint32_t parts)
{
    struct save_piece pieces[FIXTURE_TENSORS * N_SAVE_STATES];
    struct save_io io = fixture_io();
    json_t *manifest = NULL, *meta = fixture_meta(expected_step);
    uint64_t step = 0;
    assert_ok(save_find(&io, true, 0, &manifest, &step, &fixture_why));
    assert_int_equal(step, expected_step);
    assert_true(json_equal(json_object_get(manifest, "meta"), meta));
    memset(&model, 0, sizeof model);
    fixture_fill(&expected, seed);
    size_t n = fixture_pieces(&model, part, parts, pieces);
    assert_ok(save_read(&io, manifest, pieces, n, &fixture_why));
    for (size_t i = 0; i < n; i++) {
        const uint8_t *got = (const uint8_t *)pieces[i].data;
        size_t at = (size_t)(got - (const uint8_t *)&model);
        assert_memory_equal(got, (const uint8_t *)&expected + at, pieces[i].n * sizeof(float));
    }
    json_decref(meta);
    json_decref(manifest);
}

static void test_round_trip(void **state)
{
    (void)state;
    uint32_t rank = fixture_comm.rank, size = fixture_comm.size;
    assert_ok(fixture_write(5, 1, 0));
    check_read(5, 1, rank, size);              /* the same layout */
    check_read(5, 1, (rank + 1) % size, size); /* turned round */
    check_read(5, 1, rank % 3, 3);             /* as three ranks, and as seven, would */
    check_read(5, 1, 0, 1);                    /* all of it on every rank */
    check_read(5, 1, rank == 0 ? 0 : rank + 2, 7);
    assert_ok(fixture_write(5, 2, 0)); /* replaced */
    check_read(5, 2, rank, size);
}

/* A save by fewer ranks than read it. */
static void test_written_by_one(void **state)
{
    (void)state;
    if (fixture_comm.rank == 0) {
        struct comm world = fixture_comm;
        comm_dry_init(&fixture_comm, 0, 1);
        assert_ok(fixture_write(6, 3, 0));
        fixture_comm = world;
    }
    int first_no;
    assert_ok(comm_vote(&fixture_comm, "written", true, &first_no, &fixture_why));
    check_read(6, 3, fixture_comm.rank, fixture_comm.size);
}

/* One rank's disk fails at its n-th call: all ranks hear the same, and step 1 stays good. */
static void test_one_rank_fails(void **state)
{
    (void)state;
    uint32_t victim = fixture_comm.size - 1;
    for (int n = 1; n <= 8; n++) {
        char spec[64], expected_text[32];
        assert_ok(fixture_write(1, 11, 0));
        fault_here((int)fixture_comm.rank, 2, PHASE_SAVE);
        snprintf(spec, sizeof spec, "io:rank=%u,nth=%d", victim, n);
        assert_ok(fault_arm(spec, &fixture_why));
        enum status status = fixture_write(2, 12, 0);
        /* header and data in several writes, then sync, then the table: create, write, sync */
        assert_int_equal(status, STATUS_IO);
        snprintf(expected_text, sizeof expected_text, "rank %u: cannot", victim);
        assert_non_null(strstr(fixture_why.text, expected_text));
        assert_non_null(strstr(fixture_why.text, "EIO"));
        snprintf(expected_text, sizeof expected_text, "rank-%u.", victim);
        assert_non_null(strstr(fixture_why.text, expected_text));
        char unfired[160];
        assert_true(fixture_comm.rank != victim ||
                    !fault_unfired((int)victim, unfired, sizeof unfired));
        fault_disarm_all();
        int first_no;
        assert_ok(comm_vote(&fixture_comm, "failed", true, &first_no, &fixture_why));
        assert_false(fixture_exists("step-2"));
        assert_false(fixture_exists("step-2.tmp"));
        check_read(1, 11, fixture_comm.rank, fixture_comm.size);
    }
}

/* One rank has no memory for its part: the same. */
static void test_one_rank_without_memory(void **state)
{
    (void)state;
    uint32_t victim = 1 % fixture_comm.size;
    assert_ok(fixture_write(1, 11, 0));
    for (uint64_t n = 10; n < 200; n += 31) {
        heap_fail(fixture_comm.rank == victim ? n : 0, true);
        enum status status = fixture_write(2, 12, 0);
        heap_fail(0, false);
        assert_int_equal(status, STATUS_OUT_OF_MEMORY);
        assert_non_null(strstr(fixture_why.text, "rank 1: "));
        check_read(1, 11, fixture_comm.rank, fixture_comm.size);
    }
}

/* Damage anywhere is found by whichever rank looks there, and known to all. */
static void test_damage(void **state)
{
    (void)state;
    for (uint32_t shard = 0; shard < fixture_comm.size; shard++) {
        for (unsigned place = 0; place < 4; place++) {
            assert_ok(fixture_write(1, 11, 0));
            assert_ok(fixture_write(2, 12, 0));
            char path[2 * FIXTURE_PATH_BYTES], name[32];
            snprintf(name, sizeof name, "rank-%u.bin", shard);
            snprintf(path, sizeof path, "%s/save/step-2/%s", fixture_run, name);
            if (fixture_comm.rank == 0) {
                int fd = open(path, O_RDWR);
                off_t bytes = lseek(fd, 0, SEEK_END);
                off_t at = place == 0 ? 9 : place == 1 ? 70 : place == 2 ? bytes / 2 : bytes - 1;
                uint8_t value;
                assert_int_equal(pread(fd, &value, 1, at), 1);
                value ^= 0x10;
                assert_int_equal(pwrite(fd, &value, 1, at), 1);
                close(fd);
            }
            int first_no;
            assert_ok(comm_vote(&fixture_comm, "damaged", true, &first_no, &fixture_why));
            struct save_io io = fixture_io();
            json_t *manifest;
            uint64_t step;
            assert_int_equal(save_find(&io, false, 2, &manifest, &step, &fixture_why),
                             STATUS_NO_SAVE);
            assert_non_null(strstr(fixture_why.text, name));
            check_read(1, 11, fixture_comm.rank, fixture_comm.size);
        }
    }
}

/* A tensor that one rank wants and nobody wrote; one that nobody wants; a hole. */
static void test_mismatch(void **state)
{
    (void)state;
    struct save_piece pieces[FIXTURE_TENSORS * N_SAVE_STATES + 1];
    struct save_io io = fixture_io();
    json_t *manifest;
    uint64_t step;
    bool last = fixture_comm.rank == fixture_comm.size - 1;
    assert_ok(fixture_write(1, 11, 0));
    assert_ok(save_find(&io, true, 0, &manifest, &step, &fixture_why));
    size_t n = fixture_pieces(&model, fixture_comm.rank, fixture_comm.size, pieces);
    pieces[n] = (struct save_piece){"extra.bias", SAVE_PARAM, 0, 1, 1, model.data[0]};
    assert_int_equal(save_read(&io, manifest, pieces, last ? n + 1 : n, &fixture_why),
                     STATUS_CORRUPT);
    assert_non_null(strstr(fixture_why.text, "no tensor extra.bias"));
    /* h.0.ln.bias has 3 elements: only three of four ranks have any, and that is enough */
    assert_ok(save_read(&io, manifest, pieces, n, &fixture_why));
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(pieces[i].tensor, "wte.weight") != 0 || (last && pieces[i].state != 0)) {
            pieces[kept++] = pieces[i];
        }
    }
    assert_ok(save_read(&io, manifest, pieces, kept, &fixture_why)); /* one rank asks for it */
    assert_int_equal(save_read(&io, manifest, pieces, last ? 0 : kept, &fixture_why),
                     STATUS_CORRUPT);
    assert_non_null(strstr(fixture_why.text, "has tensor wte.weight"));
    json_decref(manifest);
    /* a hole: the last rank leaves out its first piece */
    n = fixture_pieces(&model, fixture_comm.rank, fixture_comm.size, pieces);
    char path[FIXTURE_PATH_BYTES];
    json_t *meta = json_object();
    assert_int_equal(save_write(&io, 2, last ? pieces + 1 : pieces, last ? n - 1 : n, meta, 0, path,
                                sizeof path, &fixture_why),
                     STATUS_INVALID);
    assert_non_null(strstr(fixture_why.text, "element 3750 of 5000 of tensor wte.weight, param"));
    json_decref(meta);
}

static int share_run_folder(void)
{
    if (fixture_comm.rank == 0) {
        fixture_make_run();
    } else {
        json_set_alloc_funcs(heap_alloc, heap_free);
    }
    return fixture_comm.table->broadcast(&fixture_comm, "run folder", fixture_run,
                                         sizeof fixture_run, &fixture_why) == STATUS_OK
               ? 0
               : -1;
}

int main(int argc, char **argv)
{
    alarm(55);
    if (comm_mpi_init(&fixture_comm, 20, &argc, &argv, &fixture_why) != STATUS_OK) {
        fprintf(stderr, "%s\n", fixture_why.text);
        return 1;
    }
    log_init("test_save_ranks", (int)fixture_comm.rank, LOG_ERROR);
    int failed = share_run_folder() != 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_round_trip, set_up),
        cmocka_unit_test_setup(test_written_by_one, set_up),
        cmocka_unit_test_setup(test_one_rank_fails, set_up),
        cmocka_unit_test_setup(test_one_rank_without_memory, set_up),
        cmocka_unit_test_setup(test_damage, set_up),
        cmocka_unit_test_setup(test_mismatch, set_up),
    };
    failed += cmocka_run_group_tests(tests, NULL, NULL);
    int first_no;
    failed += comm_vote(&fixture_comm, "end", true, &first_no, NULL) != STATUS_OK;
    if (fixture_comm.rank == 0) {
        fixture_remove_run();
    }
    fixture_comm.table->free(&fixture_comm);
    comm_mpi_fini(&fixture_comm);
    if (heap_live() != 0) {
        fprintf(stderr, "%lld blocks were not freed\n", (long long)heap_live());
        failed++;
    }
    return failed;
}
