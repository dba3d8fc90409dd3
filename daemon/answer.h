/* Answers made from what the daemon knows.
 *
 * Messages are filled with pointers borrowed from the state and are good until it changes; pack
 * them at once. Allocates nothing. Loop thread. */
#ifndef BALLAST_DAEMON_ANSWER_H
#define BALLAST_DAEMON_ANSWER_H

#include <stdbool.h>
#include "daemon/health.h"
#include "daemon/state.h"
#include "proto/control.pb-c.h"

enum { ANSWER_RANKS_A_PART = 64 };

/* A status reply and what it points into. */
struct answer_status {
    Ballast__Control__V1__StatusReply message;
    struct health health;
    char *reasons[HEALTH_MAX_REASONS];
    Ballast__V1__PlanSummary plan;
    Ballast__V1__PhasePlan phases[N_PHASES];
    Ballast__V1__PhasePlan *phase_list[N_PHASES];
};

/* `brief` leaves out what lies at each peak of the plan, for samples sent many times a second. */
void answer_status(const struct state *state, int64_t now_ms, bool brief,
                   struct answer_status *out_answer);

/* The next states of ranks that were ever heard, from rank *cursor on, their age and link filled
 * in; returns how many (0: no more) and moves the cursor. */
size_t answer_ranks(const struct state *state, int64_t now_ms, uint32_t *cursor,
                    Ballast__V1__RankState *out_ranks[static ANSWER_RANKS_A_PART]);
/* Does answer_ranks() have more from this cursor on? */
bool answer_more_ranks(const struct state *state, uint32_t cursor);

/* The greeting of this daemon; `hello` points into the state and static text. */
void answer_hello(const struct state *state, Ballast__V1__Hello *out_hello);

#endif
