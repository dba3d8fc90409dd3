/* What the daemon believes about the run, and what it decides.
 *
 * Pure: facts and the time go in, actions come out; no libuv, no clock, no messages. Its own
 * memory is bounded (fixed tables; one array of ranks). Owns: which ranks are linked, ended or
 * lost, step and generation, strategy and limits, commands under way at rank 0, clients that
 * wait for something, and the daemon's life. Loop thread only.
 *
 *                 first link              every rank ended
 *   AWAITING ───────────────► RUNNING ─────────────────────► ENDED
 *      │                       │  ▲ │                          │
 *      │ no link in 10 s       │  │ │ a loss is told           │ last link closes
 *      │                story  │  │ ▼                          │
 *      │                 open  │  │ BROKEN ── all accounted ──►│
 *      ▼                       │  │   │                        ▼
 *     OVER ◄── 0.5 s ────────────── CLOSING ◄── last link closes
 *
 *   AWAITING -> RUNNING   [run_link_up]         RUNNING -> BROKEN  [tell_loss]
 *   AWAITING -> OVER      [run_tick]            RUNNING, BROKEN -> ENDED  [tell_end]
 *   RUNNING, BROKEN, ENDED -> CLOSING [begin_closing]     CLOSING -> OVER [run_tick]
 *
 * A link that closes without the rank's own goodbye opens a story: for one second others may
 * follow, or the rank may link again (then nothing happened). When it is told, the rank whose
 * link closed first is the culprit, named once; later losses are its consequences. */
#ifndef BALLAST_DAEMON_RUN_H
#define BALLAST_DAEMON_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/account.h"
#include "proto/base/status.h"
#include "proto/strategy.h"

enum {
    RUN_MAX_RANKS = 4096,
    RUN_MAX_PENDING = 64,  /* commands at rank 0 */
    RUN_MAX_WAITS = 1024,
    RUN_MAX_ACTIONS = RUN_MAX_PENDING + RUN_MAX_WAITS + 16,
    RUN_EVENT_TYPE_BYTES = 24,
    RUN_FIRST_LINK_MS = 10000,
    RUN_STORY_MS = 1000,
    RUN_LINGER_MS = 500, /* for clients to read the end */
};

enum run_stage { RUN_AWAITING, RUN_RUNNING, RUN_BROKEN, RUN_ENDED, RUN_CLOSING, RUN_OVER };

struct run_rank {
    bool linked;
    bool seen;  /* has ever been linked */
    bool ended; /* said goodbye */
    bool lost;  /* its link closed without a goodbye, and that was told */
    int32_t pid;
    uint32_t exit_code;
    enum phase phase;
    uint64_t step;
    uint64_t heartbeat;
    int64_t heard_ms;  /* last message */
    int64_t moved_ms;  /* last change of the heartbeat */
    int64_t closed_ms; /* when the link closed; meaningful while !linked && seen */
    uint64_t closed_order; /* links close in this order, also within one millisecond */
};

enum run_wait_kind {
    RUN_WAIT_STEP,
    RUN_WAIT_GENERATION,
    RUN_WAIT_EVENT,
    RUN_WAIT_END,
    RUN_WAIT_PAUSED
};

/* A request of a client, as the one who answers it knows it. */
struct run_request {
    uint64_t client;
    uint64_t id;
};

struct run_wait {
    struct run_request request;
    enum run_wait_kind kind;
    uint64_t value; /* step, generation, or wanted pause state */
    char event[RUN_EVENT_TYPE_BYTES];
};

struct run_pending {
    struct run_request request; /* client 0: it went away, nobody is told */
    uint64_t command_id;
    int kind; /* the caller's */
};

enum run_action_kind {
    RUN_ACTION_WOKEN,       /* request: its wait is over; with_event: by the newest event */
    RUN_ACTION_FAILED,      /* request: answer with status and text */
    RUN_ACTION_DAEMON_LOST, /* journal that this daemon replaces one that died */
    RUN_ACTION_RANK_LOST,   /* journal the loss of run->culprit */
    RUN_ACTION_END,         /* journal the end, then make it durable */
    RUN_ACTION_ACK_END,     /* acknowledge to every rank that ended and was not acknowledged */
    RUN_ACTION_CLOSE,       /* accept nobody any more; let clients read what is queued */
    RUN_ACTION_EXIT,
};

struct run_action {
    enum run_action_kind kind;
    struct run_request request;
    bool with_event;
    enum status status;
    const char *text; /* static */
};

struct run_options {
    int64_t now_ms;             /* any monotonic clock, the same in every call */
    uint64_t first_command_id;  /* larger than any that an earlier daemon of this run gave */
    bool restarted;
};

struct run {
    enum run_stage stage;
    bool restarted;          /* still to be journalled */
    bool was_restarted;
    int64_t started_ms;
    int64_t close_at_ms;     /* CLOSING: when it is over */
    uint32_t world_size;     /* 0: not known yet */
    struct run_rank *ranks;  /* owned, world_size of them */
    uint32_t n_linked;
    uint64_t n_closed; /* links that closed so far */
    bool story_open;
    int64_t story_since_ms;
    bool loss_told;
    uint32_t culprit;        /* meaningful once loss_told */
    bool end_told;
    uint64_t step;           /* completed */
    uint64_t generation;
    bool paused;
    bool strategy_known;
    struct strategy strategy;
    bool limits_known;
    struct strategy_limits limits;
    uint64_t next_command_id;
    size_t n_pending;
    struct run_pending pending[RUN_MAX_PENDING];
    size_t n_waits;
    struct run_wait waits[RUN_MAX_WAITS];
    size_t first_action, n_actions;
    struct run_action actions[RUN_MAX_ACTIONS];
};

void run_init(struct run *run, const struct run_options *options);
void run_fini(struct run *run);

/* The next thing to do, in order; false when there is none. After every call below the caller
 * takes all of them. */
bool run_next_action(struct run *run, struct run_action *out_action);

/* A rank has linked. INVALID or CONFLICT when rank or world size do not fit the run or the rank
 * is linked already by another process; the same process replaces its own link. */
enum status run_link_up(struct run *run, uint32_t rank, uint32_t world_size, int32_t pid,
                        int64_t now_ms, struct failure *why) MUST_CHECK;
void run_link_closed(struct run *run, uint32_t rank, int64_t now_ms);
/* Anything came from this rank. */
void run_heard(struct run *run, uint32_t rank, int64_t now_ms);
/* Where this rank is. */
void run_rank_at(struct run *run, uint32_t rank, enum phase phase, uint64_t step,
                 uint64_t heartbeat, int64_t now_ms);
/* The rank's goodbye. */
void run_rank_ended(struct run *run, uint32_t rank, uint32_t exit_code, int64_t now_ms);

/* From rank 0. Step and generation never go back; a smaller one is ignored. */
void run_progress(struct run *run, uint64_t completed_steps);
void run_state(struct run *run, uint64_t completed_steps, uint64_t generation, bool paused);
void run_strategy(struct run *run, const struct strategy *strategy);
void run_limits(struct run *run, const struct strategy_limits *limits);

/* An event has been put in the journal. `end` ends every wait. */
void run_event(struct run *run, const char *type);

/* A command of a client for rank 0: STOPPED, LINK_LOST or BUSY when it cannot be taken. */
enum status run_command(struct run *run, struct run_request request, int kind,
                        uint64_t *out_command_id, struct failure *why) MUST_CHECK;
/* The command could not be sent after all; the caller answers it. */
void run_take_back(struct run *run, uint64_t command_id);
/* Rank 0 answers. False when the command is not known (any more). A final answer ends it. */
bool run_result(struct run *run, uint64_t command_id, bool final, struct run_pending *out_pending);

/* Wait for a condition; it may be answered at once. */
enum status run_wait(struct run *run, const struct run_wait *wait, struct failure *why) MUST_CHECK;
/* Drop a wait; false if there is none under this request. */
bool run_cancel_wait(struct run *run, struct run_request request);
/* Is this request a command under way at rank 0? */
bool run_is_pending(const struct run *run, struct run_request request);
/* A client went away: its waits are dropped, its commands go on unanswered. */
void run_forget_client(struct run *run, uint64_t client);

/* Time passes; call at least every 100 ms. */
void run_tick(struct run *run, int64_t now_ms);

/* Ranks whose loss was told, first to close first. Returns how many there are; writes at most
 * `max`. */
size_t run_lost_ranks(const struct run *run, uint32_t *out_ranks, size_t max);

#endif
