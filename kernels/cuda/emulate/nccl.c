/* NCCL between processes of one machine: ranks exchange bytes through rings in shared memory, one
 * per ordered pair. Owns communicators. Any thread; one thread per communicator at a time.
 *
 * Everything is sends and receives; collectives are made of them. What a group (or a single call)
 * asks of a communicator is one operation, one item of its stream. An operation moves a chunk of
 * every transfer at a time, and other streams may run in between, so what overwrites a buffer
 * too early is seen half-way. Operations of a communicator run one after the other in the
 * order in which they were issued, whatever their streams.
 *
 * Non-blocking communicators may put their operations into the stream only after the call
 * returned ncclInProgress, when ncclCommGetAsyncError is polled, as the library's own threads
 * would.
 *
 * A peer that died, left or aborted before its part was there is ncclRemoteError; the operation
 * then stays in the stream until ncclCommAbort. */
#include "kernels/cuda/emulate/nccl_comm.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>
#include "kernels/cuda/emulate/nccl_reduce.h"

enum { PURPOSE_LATE = 4 };

static _Thread_local int group_depth;
static _Thread_local struct operation *group;
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER; /* n_issued and `late` as well */

static void *grown(void *array, size_t n, size_t bytes)
{
    void *more = realloc(array, (n + 1) * bytes);
    if (more == NULL) {
        emulate_misuse("no host memory for an NCCL operation");
    }
    return more;
}

/* ---- joining and leaving ---- */

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "unhandled system error",
        "internal error",   "invalid argument",     "invalid usage",
        "a remote process", "operation in progress"};
    return (unsigned)result < sizeof texts / sizeof texts[0] ? texts[result] : "unknown result";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    return comm == NULL ? "" : ncclGetErrorString((ncclResult_t)comm->error);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) {
        return ncclSystemError;
    }
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/ballast-nccl-%d-%016llx", (int)getpid(),
             (unsigned long long)number);
    return ncclSuccess;
}

static ncclResult_t map_world(struct ncclComm *comm)
{
    const size_t n = (size_t)comm->n_ranks;
    comm->world_bytes = sizeof(struct world) + n * n * sizeof(struct ring);
    const int file = shm_open(comm->name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)comm->world_bytes) != 0) {
        return ncclSystemError;
    }
    void *found = mmap(NULL, comm->world_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) {
        return ncclSystemError;
    }
    comm->world = found;
    return ncclSuccess;
}

static void arrive(struct ncclComm *comm)
{
    uint32_t none = 0;
    const uint32_t n = (uint32_t)comm->n_ranks;
    if (!atomic_compare_exchange_strong(&comm->world->n_ranks, &none, n) && none != n) {
        emulate_misuse("NCCL: rank %d joins a communicator of %d ranks, another rank said %u",
                       comm->rank, comm->n_ranks, none);
    }
    struct member *member = &comm->world->members[comm->rank];
    if (member->state != MEMBER_NONE) {
        emulate_misuse("NCCL: rank %d joins twice", comm->rank);
    }
    member->pid = getpid();
    member->gpu = emulate_gpu();
    member->state = MEMBER_HERE;
    if (++comm->world->n_arrived == n) {
        shm_unlink(comm->name);
    }
}

/* One look at whether all have arrived. */
static ncclResult_t try_join(struct ncclComm *comm)
{
    const bool all_here = comm->world->n_arrived == (uint32_t)comm->n_ranks;
    for (int rank = 0; rank < comm->n_ranks; rank++) {
        nccl_watch_peer(comm, rank);
    }
    if (!all_here) {
        nccl_look_at_peers(comm);
        if (comm->world->n_arrived == (uint32_t)comm->n_ranks) {
            /* The last one has come, and thought of it: what, the next look says. */
            comm->error = ncclSuccess;
        }
        return comm->error != ncclSuccess ? (ncclResult_t)comm->error : ncclInProgress;
    }
    for (int i = 0; i < comm->n_ranks; i++) {
        for (int j = 0; j < i; j++) {
            if (comm->world->members[i].gpu == comm->world->members[j].gpu) {
                comm->error = ncclInvalidUsage; /* two ranks on one GPU */
                return ncclInvalidUsage;
            }
        }
    }
    comm->state = COMM_READY;
    return ncclSuccess;
}

static ncclResult_t open_comm(struct ncclComm *made)
{
    made->watches = malloc((size_t)made->n_ranks * sizeof *made->watches);
    if (made->watches == NULL) {
        return ncclSystemError;
    }
    for (int i = 0; i < made->n_ranks; i++) {
        made->watches[i] = -1;
    }
    if (!emulate_account_take(COMM_BYTES)) {
        return ncclUnhandledCudaError;
    }
    const ncclResult_t result = map_world(made);
    if (result != ncclSuccess) {
        emulate_account_give(COMM_BYTES);
        return result;
    }
    for (const char *c = made->name; *c != '\0'; c++) {
        made->first_rank = made->first_rank * 31 + (unsigned char)*c;
    }
    made->first_rank %= (unsigned)made->n_ranks;
    arrive(made);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    if (emulate_enter("ncclCommInitRankConfig") != cudaSuccess) {
        return ncclUnhandledCudaError;
    }
    emulate_not_capturing("ncclCommInitRankConfig");
    if (n_ranks < 1 || n_ranks > NCCL_MAX_RANKS || rank < 0 || rank >= n_ranks ||
        memchr(id.internal, 0, sizeof id.internal) == NULL || id.internal[0] != '/' ||
        (config != NULL && (config->size != sizeof *config || config->magic != 0xcafebeef))) {
        return ncclInvalidArgument;
    }
    struct ncclComm *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return ncclSystemError;
    }
    made->rank = rank;
    made->n_ranks = n_ranks;
    made->references = 1;
    made->is_blocking = config == NULL || config->blocking != 0;
    memcpy(made->name, id.internal, sizeof made->name);
    ncclResult_t result = open_comm(made);
    if (result != ncclSuccess) {
        free(made->watches);
        free(made);
        return result;
    }
    result = made->is_blocking ? try_join(made) : ncclInProgress;
    while (made->is_blocking && result == ncclInProgress) {
        usleep(200);
        result = try_join(made);
    }
    *comm = made;
    if (result != ncclSuccess && result != ncclInProgress) {
        *comm = NULL;
        ncclCommAbort(made);
    }
    return result;
}

/* Operations issued and not done. */
static bool is_busy(struct ncclComm *comm)
{
    pthread_mutex_lock(&late_lock);
    const bool busy = comm->late != NULL || comm->n_done < comm->n_issued;
    pthread_mutex_unlock(&late_lock);
    return busy;
}

static void issue_late(struct ncclComm *comm)
{
    static struct emulate_random random;
    static bool is_ready;
    pthread_mutex_lock(&late_lock);
    if (!is_ready) {
        is_ready = true;
        emulate_random_init(&random, PURPOSE_LATE);
    }
    if (comm->late != NULL && emulate_random_below(&random, 2) == 0) {
        struct operation *op = comm->late;
        comm->late = NULL;
        nccl_issue(op);
    }
    pthread_mutex_unlock(&late_lock);
}

static ncclResult_t try_finalize(struct ncclComm *comm)
{
    emulate_poke();
    if (is_busy(comm)) {
        return ncclInProgress;
    }
    comm->state = COMM_FINALIZED;
    comm->world->members[comm->rank].state = MEMBER_LEFT;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    if (comm == NULL || error == NULL) {
        return ncclInvalidArgument;
    }
    *error = ncclSuccess;
    if (comm->state == COMM_JOINING) {
        *error = try_join(comm);
    }
    if (comm->state == COMM_READY || comm->state == COMM_FINALIZING) {
        nccl_look_at_peers(comm);
        issue_late(comm);
        pthread_mutex_lock(&late_lock);
        *error = comm->late != NULL ? ncclInProgress : ncclSuccess;
        pthread_mutex_unlock(&late_lock);
    }
    if (comm->state == COMM_FINALIZING) {
        *error = try_finalize(comm);
    }
    if (comm->error != ncclSuccess) {
        *error = (ncclResult_t)comm->error;
    }
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    if (comm == NULL || comm->state != COMM_READY) {
        return ncclInvalidUsage;
    }
    comm->state = COMM_FINALIZING;
    if (!comm->is_blocking) {
        return ncclInProgress;
    }
    ncclResult_t result = try_finalize(comm);
    while (result == ncclInProgress && comm->error == ncclSuccess) {
        usleep(200);
        result = try_finalize(comm);
    }
    return comm->error != ncclSuccess ? (ncclResult_t)comm->error : result;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (comm == NULL) {
        return ncclSuccess;
    }
    if (is_busy(comm)) {
        emulate_misuse("ncclCommDestroy with operations that are not done: wait for them, or "
                       "ncclCommAbort");
    }
    if (comm->state == COMM_JOINING) {
        emulate_misuse("ncclCommDestroy before the communicator is there: ncclCommAbort");
    }
    comm->world->members[comm->rank].state = MEMBER_LEFT;
    nccl_release(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (comm == NULL) {
        return ncclSuccess;
    }
    comm->is_aborted = true;
    comm->world->members[comm->rank].state = MEMBER_ABORTED;
    if (comm->world->n_arrived < (uint32_t)comm->n_ranks) {
        shm_unlink(comm->name);
    }
    pthread_mutex_lock(&late_lock);
    struct operation *late = comm->late;
    comm->late = NULL;
    pthread_mutex_unlock(&late_lock);
    if (late != NULL) {
        nccl_free_operation(late);
    }
    emulate_poke();
    nccl_release(comm);
    return ncclSuccess;
}

/* ---- groups and calls ---- */

ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

/* Put an operation into its stream, or keep it for later. */
static ncclResult_t begin(struct operation *op)
{
    struct ncclComm *comm = op->comm;
    pthread_mutex_lock(&late_lock);
    if (comm->late != NULL) {
        emulate_misuse("NCCL: an operation on a communicator whose last one is still "
                       "ncclInProgress; poll ncclCommGetAsyncError first");
    }
    if (comm->is_blocking) {
        nccl_issue(op);
    } else {
        comm->late = op;
    }
    pthread_mutex_unlock(&late_lock);
    if (comm->is_blocking) {
        return ncclSuccess;
    }
    issue_late(comm);
    pthread_mutex_lock(&late_lock);
    const bool is_late = comm->late != NULL;
    pthread_mutex_unlock(&late_lock);
    return is_late ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (group_depth == 0) {
        return ncclInvalidUsage;
    }
    if (--group_depth > 0) {
        return ncclSuccess;
    }
    ncclResult_t result = ncclSuccess;
    while (group != NULL) {
        struct operation *op = group;
        group = op->next;
        const ncclResult_t one = begin(op);
        result = result == ncclSuccess ? one : result;
    }
    return result;
}

/* The operation of the group that a call on `comm` belongs to; NULL: an error. */
static struct operation *operation_of(struct ncclComm *comm, cudaStream_t stream,
                                      ncclResult_t *out_result)
{
    *out_result = ncclInvalidArgument;
    if (emulate_enter("an NCCL call") != cudaSuccess) {
        *out_result = ncclUnhandledCudaError;
        return NULL;
    }
    if (comm == NULL) {
        return NULL;
    }
    emulate_check_stream("an NCCL call", stream);
    if (comm->state != COMM_READY) {
        emulate_misuse("NCCL: an operation on a communicator that is not ready, or finalized");
    }
    if (comm->error != ncclSuccess) {
        *out_result = (ncclResult_t)comm->error;
        return NULL;
    }
    for (struct operation *op = group; op != NULL; op = op->next) {
        if (op->comm == comm) {
            if (op->stream != stream) {
                emulate_misuse("NCCL: a group with two streams on one communicator");
            }
            return op;
        }
    }
    struct operation *op = calloc(1, sizeof *op);
    if (op == NULL) {
        *out_result = ncclSystemError;
        return NULL;
    }
    *op = (struct operation){.comm = comm, .stream = stream};
    comm->references++;
    struct operation **last = &group;
    while (*last != NULL) {
        last = &(*last)->next;
    }
    *last = op;
    return op;
}

static void add_range(struct operation *op, const char *what, const void *start, size_t bytes)
{
    emulate_check_device(what, start, bytes);
    op->ranges = grown(op->ranges, op->n_ranges, sizeof *op->ranges);
    op->ranges[op->n_ranges++] = (struct emulate_range){start, bytes};
}

static void add_transfer(struct operation *op, enum kind kind, bool is_send, int peer,
                         const void *start, size_t bytes)
{
    op->transfers = grown(op->transfers, op->n_transfers, sizeof *op->transfers);
    op->transfers[op->n_transfers++] = (struct transfer){.is_send = is_send,
                                                         .peer = peer,
                                                         .kind = kind,
                                                         .start = (void *)(uintptr_t)start,
                                                         .bytes = bytes};
}

static unsigned char *add_reduction(struct operation *op, void *out, size_t n, ncclDataType_t type,
                                    ncclRedOp_t how)
{
    const size_t bytes = n * emulate_nccl_bytes(type);
    unsigned char *parts = malloc((size_t)op->comm->n_ranks * bytes + 1);
    if (parts == NULL) {
        emulate_misuse("no host memory for a reduction of %zu elements", n);
    }
    op->reductions = grown(op->reductions, op->n_reductions, sizeof *op->reductions);
    op->reductions[op->n_reductions++] = (struct reduction){parts, out, n, type, how};
    return parts;
}

static ncclResult_t point(bool is_send, const void *start, size_t n, ncclDataType_t type, int peer,
                          ncclComm_t comm, cudaStream_t stream)
{
    ncclResult_t result;
    if (comm == NULL || peer < 0 || peer >= comm->n_ranks || emulate_nccl_bytes(type) == 0) {
        return ncclInvalidArgument;
    }
    ncclGroupStart();
    struct operation *op = operation_of(comm, stream, &result);
    if (op != NULL) {
        const size_t bytes = n * emulate_nccl_bytes(type);
        add_range(op, is_send ? "ncclSend: buffer" : "ncclRecv: buffer", start, bytes);
        add_transfer(op, KIND_POINT, is_send, peer, start, bytes);
        result = ncclSuccess;
    }
    const ncclResult_t ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

ncclResult_t ncclSend(const void *send, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return point(true, send, n, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void *recv, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return point(false, recv, n, type, peer, comm, stream);
}

/* The three collectives: a part goes to every rank, a part comes from every rank. The parts to send
 * are `send_step` bytes apart (0: the same for all). */
static ncclResult_t collective(enum kind kind, const void *send, size_t send_step, void *recv,
                               size_t n, ncclDataType_t type, const ncclRedOp_t *how,
                               ncclComm_t comm, cudaStream_t stream)
{
    ncclResult_t result;
    const size_t bytes = n * emulate_nccl_bytes(type);
    if (comm == NULL || emulate_nccl_bytes(type) == 0 ||
        (how != NULL && !emulate_nccl_can_reduce(type, *how))) {
        return ncclInvalidArgument;
    }
    ncclGroupStart();
    struct operation *op = operation_of(comm, stream, &result);
    if (op != NULL) {
        const size_t n_ranks = (size_t)comm->n_ranks;
        add_range(op, "NCCL collective: send buffer", send, bytes + send_step * (n_ranks - 1));
        add_range(op, "NCCL collective: receive buffer", recv,
                  how == NULL ? bytes * n_ranks : bytes);
        unsigned char *parts = how == NULL ? recv : add_reduction(op, recv, n, type, *how);
        for (size_t rank = 0; rank < n_ranks; rank++) {
            const unsigned char *from = (const unsigned char *)send + rank * send_step;
            unsigned char *to = parts + rank * bytes;
            if (from == to && (int)rank == comm->rank) {
                continue; /* in place */
            }
            add_transfer(op, kind, true, (int)rank, from, bytes);
            add_transfer(op, kind, false, (int)rank, to, bytes);
        }
        result = ncclSuccess;
    }
    const ncclResult_t ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t n_send, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    return collective(KIND_ALL_GATHER, send, 0, recv, n_send, type, NULL, comm, stream);
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t n, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return collective(KIND_ALL_REDUCE, send, 0, recv, n, type, &op, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t n_recv, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return collective(KIND_REDUCE_SCATTER, send, n_recv * emulate_nccl_bytes(type), recv, n_recv,
                      type, &op, comm, stream);
}
