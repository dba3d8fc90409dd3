/* What nccl.c (communicators, groups, calls) and nccl_move.c (the executor's side) share. */
#ifndef BALLAST_KERNELS_CUDA_EMULATE_NCCL_COMM_H
#define BALLAST_KERNELS_CUDA_EMULATE_NCCL_COMM_H

#include <nccl.h>
#include <stdatomic.h>
#include "kernels/cuda/emulate/emulate.h"

enum {
    NCCL_MAX_RANKS = 64,
    RING_BYTES = 64 * 1024,
    COMM_BYTES = 64 << 20 /* of GPU memory, per communicator */
};

/* ---- what ranks share ---- */

enum member_state { MEMBER_NONE, MEMBER_HERE, MEMBER_LEFT, MEMBER_ABORTED };

struct member {
    _Atomic int32_t state;
    int32_t pid, gpu; /* written before `state` */
};

/* Bytes from one rank to another; one writer, one reader. Counters only grow. */
struct ring {
    _Alignas(64) _Atomic uint64_t n_written;
    _Alignas(64) _Atomic uint64_t n_read;
    _Alignas(64) unsigned char bytes[RING_BYTES];
};

/* A fresh file is zeros, which is its first state. */
struct world {
    _Atomic uint32_t n_ranks, n_arrived;
    struct member members[NCCL_MAX_RANKS];
    struct ring rings[]; /* [from * n_ranks + to] */
};

/* ---- what one rank has ---- */

enum comm_state { COMM_JOINING, COMM_READY, COMM_FINALIZING, COMM_FINALIZED };

struct ncclComm {
    struct world *world;
    size_t world_bytes;
    char name[NCCL_UNIQUE_ID_BYTES];
    int rank, n_ranks;
    int *watches; /* per rank: descriptor of its process, -1: none */
    bool is_blocking;
    enum comm_state state;
    unsigned first_rank;    /* where sums begin, the same on all ranks */
    struct operation *late; /* not in its stream yet */
    uint64_t n_issued;
    _Atomic uint64_t n_done;
    _Atomic int error; /* ncclResult_t */
    _Atomic bool is_aborted;
    _Atomic int references; /* the user's, and one per operation */
};

/* Precedes the bytes of a transfer, so that ranks that disagree are told apart from slow ones. */
struct header {
    uint64_t bytes, kind;
};

enum kind { KIND_POINT = 1, KIND_ALL_GATHER, KIND_ALL_REDUCE, KIND_REDUCE_SCATTER };

struct transfer {
    bool is_send, has_header;
    int peer;
    enum kind kind;
    unsigned char *start;
    size_t bytes, n_moved;
};

/* Parts of all ranks, to be added up. */
struct reduction {
    unsigned char *parts; /* owned, [rank][n] */
    void *out;
    size_t n;
    ncclDataType_t type;
    ncclRedOp_t op;
};

struct operation {
    struct ncclComm *comm;
    cudaStream_t stream;
    uint64_t serial;
    struct transfer *transfers;
    struct reduction *reductions;
    struct emulate_range *ranges;
    size_t n_transfers, n_reductions, n_ranges, n_idle;
    struct operation *next; /* in a group: of another communicator */
};

/* ---- nccl_move.c ---- */

/* Put the operation into its stream. It is freed when it is done. */
void nccl_issue(struct operation *op);
void nccl_free_operation(struct operation *op);
/* Drop one reference. */
void nccl_release(struct ncclComm *comm);
/* Follow the process of a rank that has arrived. */
void nccl_watch_peer(struct ncclComm *comm, int rank);
/* Set comm->error when a peer died or aborted. */
void nccl_look_at_peers(struct ncclComm *comm);

#endif
