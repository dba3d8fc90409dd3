/* The stand-in's NCCL between forked processes: scatter and gather as Ballast does them,
 * collectives, blocking and not; ranks that abort, die, share a GPU or disagree.
 *
 * links: standin testing kernels base
 * timeout: 300 */
#include <nccl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h> /* last: it defines fail() as a macro */
#include "tests/cuda/lib/standin.h"
#include "tests/lib/must_abort.h"

#define NC(call) CHECK((call) == ncclSuccess)

enum { MAX_RANKS = 4, LARGE = 60000 /* ints: several times what a ring holds */ };

/* Set before ranks are forked. */
static ncclUniqueId id;
static int n_ranks, rank;
static bool is_blocking;

/* Run `body` on `n` ranks; out[rank] is what it returned. */
static void run_ranks(int (*body)(void), int n, bool blocking, unsigned seed, int out[MAX_RANKS])
{
    pid_t pids[MAX_RANKS];
    assert_int_equal(ncclGetUniqueId(&id), ncclSuccess);
    n_ranks = n;
    is_blocking = blocking;
    for (rank = 0; rank < n; rank++) {
        pids[rank] = start_child(body, seed * 100 + (unsigned)rank);
    }
    for (int r = 0; r < n; r++) {
        out[r] = end_child(pids[r]);
    }
}

static void all_must_pass(int (*body)(void), int n, bool blocking, unsigned seed)
{
    int out[MAX_RANKS];
    run_ranks(body, n, blocking, seed, out);
    for (int r = 0; r < n; r++) {
        if (out[r] != 0) {
            fail_msg("rank %d of %d: %d (seed %u)", r, n, out[r], seed);
        }
    }
}

static ncclResult_t settle(ncclComm_t comm)
{
    ncclResult_t error;
    do {
        NC(ncclCommGetAsyncError(comm, &error));
    } while (error == ncclInProgress);
    return error;
}

static ncclResult_t try_join(ncclComm_t *comm)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = is_blocking;
    const ncclResult_t result = ncclCommInitRankConfig(comm, n_ranks, id, rank, &config);
    return result == ncclInProgress ? settle(*comm) : result;
}

static ncclComm_t join(void)
{
    ncclComm_t comm;
    OK(cudaSetDevice(rank));
    NC(try_join(&comm));
    return comm;
}

/* After a call: a communicator that does not block may not have queued it yet. */
static void queued(ncclComm_t comm, ncclResult_t result)
{
    CHECK(result == ncclSuccess || (!is_blocking && result == ncclInProgress));
    if (result == ncclInProgress) {
        CHECK(settle(comm) == ncclSuccess);
    }
}

static void leave(ncclComm_t comm)
{
    const ncclResult_t result = ncclCommFinalize(comm);
    CHECK(result == ncclSuccess || (!is_blocking && settle(comm) == ncclSuccess));
    NC(ncclCommDestroy(comm));
}

/* ---- what Ballast does ---- */

static int value_of(int from, int to, int i)
{
    return from * 1000003 + to * 10007 + i;
}

/* Every rank's slice of every rank's array, in rank order: sends and receives in one group. */
static void scatter(ncclComm_t comm, cudaStream_t stream, int *base, int *parts, int n)
{
    NC(ncclGroupStart());
    for (int r = 0; r < n_ranks; r++) {
        ncclResult_t result = ncclSend(base + r * n, (size_t)n, ncclInt32, r, comm, stream);
        CHECK(result == ncclSuccess);
        result = ncclRecv(parts + r * n, (size_t)n, ncclInt32, r, comm, stream);
        CHECK(result == ncclSuccess);
    }
    queued(comm, ncclGroupEnd());
}

static void exchange(ncclComm_t comm, int n)
{
    cudaStream_t compute = new_stream(), stream = new_stream();
    const size_t bytes = (size_t)(n_ranks * n) * sizeof(int);
    int *base = new_device(bytes), *parts = new_device(bytes), *got = malloc(bytes);
    for (int r = 0; r < n_ranks; r++) {
        for (int i = 0; i < n; i++) {
            got[r * n + i] = value_of(rank, r, i);
        }
    }
    /* Poisoned until the compute stream has run, overwritten when the exchange is through. */
    OK(cudaMemcpyAsync(base, got, bytes, cudaMemcpyHostToDevice, compute));
    order_after(compute, stream);
    scatter(comm, stream, base, parts, n);
    order_after(stream, compute);
    OK(cudaMemsetAsync(base, 0x55, bytes, compute));
    get_device(got, parts, bytes, compute);
    for (int r = 0; r < n_ranks; r++) {
        for (int i = 0; i < n; i++) {
            CHECK(got[r * n + i] == value_of(r, rank, i));
        }
    }
    OK(cudaDeviceSynchronize());
    /* And gather in place. */
    for (int i = 0; i < n; i++) {
        got[i] = value_of(rank, 77, i);
    }
    put_device(base + rank * n, got, (size_t)n * sizeof(int), stream);
    queued(comm, ncclAllGather(base + rank * n, base, (size_t)n, ncclInt32, comm, stream));
    get_device(got, base, bytes, stream);
    for (int r = 0; r < n_ranks; r++) {
        for (int i = 0; i < n; i++) {
            CHECK(got[r * n + i] == value_of(r, 77, i));
        }
    }
    OK(cudaFree(base));
    OK(cudaFree(parts));
    OK(cudaStreamDestroy(compute));
    OK(cudaStreamDestroy(stream));
    free(got);
}

static int exchanges(void)
{
    size_t before, after, total;
    OK(cudaSetDevice(rank));
    OK(cudaMemGetInfo(&before, &total));
    ncclComm_t comm = join();
    exchange(comm, 5);
    exchange(comm, LARGE / n_ranks);
    exchange(comm, 1);
    OK(cudaMemGetInfo(&after, &total));
    CHECK(after < before);
    leave(comm);
    OK(cudaMemGetInfo(&after, &total));
    CHECK(after == before);
    return 0;
}

static void ranks_exchange(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 6; seed++) {
        all_must_pass(exchanges, 1, seed % 2, seed);
        all_must_pass(exchanges, 2, seed % 2, seed);
        all_must_pass(exchanges, 4, seed % 2, seed);
    }
}

/* The exchange without the wait for compute: a race that is seen. */
static int unordered_exchange(void)
{
    ncclComm_t comm = join();
    cudaStream_t compute = new_stream(), stream = new_stream();
    int *base = new_device((size_t)n_ranks * sizeof *base), got[MAX_RANKS] = {0};
    int *parts = new_device((size_t)n_ranks * sizeof *parts);
    for (int i = 0; i < 8; i++) {
        OK(cudaMemsetAsync(base, i, (size_t)n_ranks * sizeof *base, compute));
    }
    scatter(comm, stream, base, parts, 1);
    OK(cudaDeviceSynchronize());
    get_device(got, parts, (size_t)n_ranks * sizeof *parts, stream);
    leave(comm);
    return got[0] == 0x07070707 && got[1] == 0x07070707 ? 0 : 2;
}

static void a_missing_wait_is_seen(void **state)
{
    (void)state;
    int out[MAX_RANKS], n_seen = 0;
    for (unsigned seed = 1; seed <= 6; seed++) {
        run_ranks(unordered_exchange, 2, true, seed, out);
        n_seen += out[0] == 2 || out[1] == 2;
        assert_in_range(out[0], 0, 2);
    }
    assert_true(n_seen >= 3);
}

static int reductions(void)
{
    ncclComm_t comm = join();
    cudaStream_t stream = new_stream();
    float values[8], sums[8];
    int64_t whole[2] = {rank, -rank}, most[2];
    for (int i = 0; i < 8; i++) {
        values[i] = (float)(rank + 1) * (float)i;
    }
    float *device = new_device(sizeof values), *out = new_device(sizeof values);
    put_device(device, values, sizeof values, stream);
    queued(comm, ncclAllReduce(device, out, 8, ncclFloat32, ncclSum, comm, stream));
    get_device(sums, out, sizeof sums, stream);
    const int triangle = n_ranks * (n_ranks + 1) / 2;
    for (int i = 0; i < 8; i++) {
        CHECK(sums[i] == (float)(triangle * i));
    }
    const size_t part = 8 / (size_t)n_ranks;
    queued(comm, ncclReduceScatter(device, out, part, ncclFloat32, ncclAvg, comm, stream));
    get_device(sums, out, sizeof sums, stream);
    for (size_t i = 0; i < part; i++) {
        CHECK(sums[i] == (float)triangle * (float)((size_t)rank * part + i) / (float)n_ranks);
    }
    int64_t *device_whole = new_device(sizeof whole);
    put_device(device_whole, whole, sizeof whole, stream);
    queued(comm, ncclAllReduce(device_whole, device_whole, 2, ncclInt64, ncclMax, comm, stream));
    get_device(most, device_whole, sizeof most, stream);
    CHECK(most[0] == n_ranks - 1 && most[1] == 0);
    leave(comm);
    return 0;
}

static void ranks_reduce(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 3; seed++) {
        all_must_pass(reductions, 1, true, seed);
        all_must_pass(reductions, 2, seed % 2, seed);
        all_must_pass(reductions, 4, true, seed);
    }
}

/* Two communicators, used on two streams in different orders by the two ranks. */
static int two_communicators(void)
{
    static const char names[2][8] = {"a", "b"};
    ncclComm_t comms[2];
    cudaStream_t streams[2] = {new_stream(), new_stream()};
    for (int i = 0; i < 2; i++) {
        ncclUniqueId both = id;
        strcat(both.internal, names[i]);
        const ncclUniqueId kept = id;
        id = both;
        NC(try_join(&comms[i]));
        id = kept;
    }
    int *cells = new_device(4 * sizeof *cells), got[4] = {rank, rank + 10, -1, -1};
    put_device(cells, got, sizeof got, streams[0]);
    for (int i = 0; i < 2; i++) {
        const int which = rank == 0 ? i : 1 - i;
        NC(ncclGroupStart());
        NC(ncclSend(&cells[which], 1, ncclInt32, 1 - rank, comms[which], streams[which]));
        NC(ncclRecv(&cells[2 + which], 1, ncclInt32, 1 - rank, comms[which], streams[which]));
        queued(comms[which], ncclGroupEnd());
    }
    OK(cudaDeviceSynchronize());
    get_device(got, cells, sizeof got, streams[0]);
    CHECK(got[2] == 1 - rank && got[3] == 11 - rank);
    leave(comms[0]);
    leave(comms[1]);
    return 0;
}

/* Several messages to one peer: in one group they keep their order, and so do operations that a
 * communicator is given on two streams that nothing else orders. */
static int messages_in_order(void)
{
    enum { N = 40000 };
    const size_t bytes = 4 * (size_t)N * sizeof(int);
    ncclComm_t comm = join();
    cudaStream_t streams[2] = {new_stream(), new_stream()};
    int *send = new_device(bytes), *recv = new_device(bytes), *got = malloc(bytes);
    for (int i = 0; i < 4 * N; i++) {
        got[i] = value_of(rank, 5, i);
    }
    put_device(send, got, bytes, streams[0]);
    for (int pair = 0; pair < 2; pair++) {
        NC(ncclGroupStart());
        for (int part = 2 * pair; part < 2 * pair + 2; part++) {
            NC(ncclSend(send + part * N, N, ncclInt32, 1 - rank, comm, streams[pair]));
        }
        for (int part = 2 * pair; part < 2 * pair + 2; part++) {
            NC(ncclRecv(recv + part * N, N, ncclInt32, 1 - rank, comm, streams[pair]));
        }
        queued(comm, ncclGroupEnd());
    }
    OK(cudaDeviceSynchronize());
    get_device(got, recv, bytes, streams[0]);
    for (int i = 0; i < 4 * N; i++) {
        CHECK(got[i] == value_of(1 - rank, 5, i));
    }
    free(got);
    leave(comm);
    return 0;
}

static void messages_keep_their_order(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 10; seed++) {
        all_must_pass(messages_in_order, 2, seed % 2, seed);
    }
}

static int two_communicators_on_own_gpu(void)
{
    OK(cudaSetDevice(rank));
    return two_communicators();
}

static void communicators_do_not_wait_for_one_another(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 5; seed++) {
        all_must_pass(two_communicators_on_own_gpu, 2, seed % 2, seed);
    }
}

/* ---- what goes wrong ---- */

static void start_receiving(ncclComm_t comm, cudaStream_t stream)
{
    int *cells = new_device(LARGE * sizeof *cells);
    queued(comm, ncclRecv(cells, LARGE, ncclInt32, 1 - rank, comm, stream));
}

/* Both ranks receive, nobody sends. */
static int aborting(void)
{
    ncclComm_t comm = join();
    cudaStream_t stream = new_stream();
    start_receiving(comm, stream);
    usleep(20 * 1000);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    ncclResult_t error;
    NC(ncclCommGetAsyncError(comm, &error));
    CHECK(error == ncclSuccess || error == ncclRemoteError); /* the other was quicker */
    NC(ncclCommAbort(comm));
    OK(cudaStreamSynchronize(stream));
    return 0;
}

static void an_abort_ends_what_is_queued(void **state)
{
    (void)state;
    all_must_pass(aborting, 2, true, 1);
    all_must_pass(aborting, 2, false, 1);
}

static int dying(void)
{
    ncclComm_t comm = join();
    cudaStream_t stream = new_stream();
    if (rank == 1) {
        usleep(20 * 1000);
        raise(SIGKILL);
    }
    start_receiving(comm, stream);
    ncclResult_t error;
    do {
        usleep(1000);
        NC(ncclCommGetAsyncError(comm, &error));
    } while (error == ncclSuccess || error == ncclInProgress);
    CHECK(error == ncclRemoteError);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    NC(ncclCommAbort(comm));
    OK(cudaStreamSynchronize(stream));
    return 0;
}

/* A rank that leaves in peace without sending what another one needs. */
static int leaving(void)
{
    ncclComm_t comm = join();
    if (rank == 1) {
        leave(comm);
        return 0;
    }
    cudaStream_t stream = new_stream();
    start_receiving(comm, stream);
    while (settle(comm) == ncclSuccess) {
        usleep(1000);
        CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    }
    NC(ncclCommAbort(comm));
    OK(cudaStreamSynchronize(stream));
    return 0;
}

static void a_lost_peer_is_a_remote_error(void **state)
{
    (void)state;
    int out[MAX_RANKS];
    for (unsigned seed = 1; seed <= 3; seed++) {
        run_ranks(dying, 2, seed % 2, seed, out);
        assert_int_equal(out[0], 0);
        assert_int_equal(out[1], -1);
        all_must_pass(leaving, 2, seed % 2, seed);
    }
}

static int sharing_a_gpu(void)
{
    ncclComm_t comm = NULL;
    OK(cudaSetDevice(0));
    CHECK(try_join(&comm) == ncclInvalidUsage);
    NC(ncclCommAbort(comm));
    return 0;
}

static void ranks_on_one_gpu_are_refused(void **state)
{
    (void)state;
    all_must_pass(sharing_a_gpu, 2, true, 1);
    all_must_pass(sharing_a_gpu, 2, false, 1);
}

/* The sender's and the receiver's sizes differ: one of them says so. */
static int disagreeing(void)
{
    ncclComm_t comm = join();
    cudaStream_t stream = new_stream();
    int *cells = new_device(8 * sizeof *cells);
    if (rank == 0) {
        queued(comm, ncclSend(cells, 8, ncclInt32, 1, comm, stream));
    } else {
        queued(comm, ncclRecv(cells, 7, ncclInt32, 0, comm, stream));
    }
    OK(cudaStreamSynchronize(stream));
    NC(ncclCommAbort(comm));
    return 0;
}

static void alone(void)
{
    n_ranks = 1;
    rank = 0;
    is_blocking = true;
    ncclGetUniqueId(&id);
}

static void receive_into_host(void)
{
    alone();
    int cell;
    ncclRecv(&cell, 1, ncclInt32, 0, join(), new_stream());
}

static void capture(void)
{
    alone();
    cudaStream_t stream = new_stream();
    ncclComm_t comm = join();
    int *cell = new_device(sizeof *cell);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    ncclAllGather(cell, cell, 1, ncclInt32, comm, stream);
}

static void destroy_busy(void)
{
    alone();
    ncclComm_t comm = join();
    int *cell = new_device(sizeof *cell);
    ncclRecv(cell, 1, ncclInt32, 0, comm, new_stream());
    ncclCommDestroy(comm);
}

static void misuse_aborts(void **state)
{
    (void)state;
    int out[MAX_RANKS];
    run_ranks(disagreeing, 2, true, 1, out);
    assert_int_equal(out[1], -1);
    must_abort(receive_into_host, "ncclRecv");
    must_abort(capture, "while the stream is captured");
    must_abort(destroy_busy, "ncclCommDestroy with operations");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_exchange),
        cmocka_unit_test(a_missing_wait_is_seen),
        cmocka_unit_test(ranks_reduce),
        cmocka_unit_test(messages_keep_their_order),
        cmocka_unit_test(communicators_do_not_wait_for_one_another),
        cmocka_unit_test(an_abort_ends_what_is_queued),
        cmocka_unit_test(a_lost_peer_is_a_remote_error),
        cmocka_unit_test(ranks_on_one_gpu_are_refused),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
