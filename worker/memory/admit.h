/* Admission: before a phase first runs under a plan, every rank commits what it needs and
 * the ranks vote, so a shortage on one rank is known to all before any of them enters a
 * collective of that phase. After a "no" everyone returns to the old level.
 *
 * On host-backed devices the ranks of a node first add up what they ask and compare the sum with
 * what the node has, so they never race one another into the kernel's OOM killer.
 *
 * Does not know how ranks talk: the exchange is passed in. Main thread, collective. */
#ifndef BALLAST_WORKER_MEMORY_ADMIT_H
#define BALLAST_WORKER_MEMORY_ADMIT_H

#include <stdbool.h>
#include <stdint.h>
#include "worker/memory/plan.h"
#include "worker/memory/workspace.h"

enum { ADMIT_MAX_RANKS = 4096 };

/* What was asked where, when it was refused. The same on every rank. */
struct shortage {
    bool any;
    uint32_t rank;         /* lowest rank that was short */
    enum phase phase;
    uint64_t asked_bytes;
    uint64_t held_bytes;   /* committed on that rank */
    uint64_t limit_bytes;  /* that refused: device_memory, or what the node had left */
    bool on_purpose;       /* a fault point fired */
    bool node;             /* the node's memory, not the rank's own limit */
};

struct admit {
    struct workspace *workspace; /* borrowed */
    struct plan *plan;           /* borrowed: the plan in force */
    bool host_backed;            /* the device's memory is this node's memory */
    uint32_t rank, size, node;
    bool admitted[N_PHASES];
    uint64_t step;               /* of the faults' context */
    /* All ranks' `bytes` in rank order, as comm's exchange. */
    enum status (*exchange)(void *user, const char *name, const void *mine, size_t bytes, void *all,
                            struct failure *why);
    void *user;
    /* This node's free memory; a function so that tests can set it. */
    uint64_t (*node_headroom)(void);
    uint64_t n_votes;            /* taken so far, for tests */
    struct shortage shortage;    /* of the last refusal */
};

/* OK, or OUT_OF_MEMORY with admit->shortage filled alike on every rank; another status when
 * the exchange itself failed. */
enum status admit_phase(struct admit *admit, enum phase phase, struct failure *why) MUST_CHECK;
/* What is committed together with the workspace: a switch's new state. */
struct admit_more {
    uint64_t bytes;
    enum status (*acquire)(void *user, struct failure *why);
    void (*revert)(void *user);
    void *user;
};
/* Commit `bytes` of workspace, and `more` (may be NULL), on all ranks or on none, outside a phase
 * of the plan: a switch's prepare. */
enum status admit_bytes(struct admit *admit, enum phase phase, size_t bytes,
                        const struct admit_more *more, struct failure *why) MUST_CHECK;
/* A new plan is in force and fully committed. */
void admit_follow(struct admit *admit, struct plan *plan);
/* Bytes that this node could still give: the smaller of MemAvailable and the room under every
 * cgroup limit above this process. */
uint64_t admit_node_headroom(void);

#endif
