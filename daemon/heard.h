/* What the workers last said, as the messages they said it in.
 *
 * Owns those messages; run.c owns what follows from them. Loop thread. */
#ifndef BALLAST_DAEMON_HEARD_H
#define BALLAST_DAEMON_HEARD_H

#include <stdbool.h>
#include <stdint.h>
#include "proto/base/status.h"
#include "proto/link.pb-c.h"

struct heard {
    Ballast__Link__V1__WorkerHello *hello; /* rank 0's; NULL: not yet */
    Ballast__Link__V1__RunState *run;      /* rank 0's newest; NULL: not yet */
    Ballast__V1__PlanSummary *plan;        /* of the strategy in force; NULL: not yet */
    Ballast__V1__OomReport *oom;           /* the newest; NULL: none */
    bool oom_is_past;                      /* of before the run was resumed: no reason for worry */
    Ballast__V1__RankState **ranks;        /* by rank; NULL where nothing was heard */
    uint32_t n_ranks;
    char end_text[256];                    /* of rank 0's goodbye */
    Ballast__V1__Event *end;               /* the run's own `end`, kept until all have ended */
};

void heard_fini(struct heard *heard);

/* Room for `world_size` ranks; the size never changes after the first call. */
enum status heard_set_world(struct heard *heard, uint32_t world_size) MUST_CHECK;
/* A rank that has just linked: its host and process, until it says more. */
enum status heard_linked(struct heard *heard,
                         const Ballast__Link__V1__WorkerHello *hello) MUST_CHECK;

/* Each takes over its message. */
void heard_hello(struct heard *heard, Ballast__Link__V1__WorkerHello *hello);
void heard_run(struct heard *heard, Ballast__Link__V1__RunState *run);
void heard_rank(struct heard *heard, uint32_t rank, Ballast__V1__RankState *state);
/* False: there is a newer one already. */
bool heard_oom(struct heard *heard, Ballast__V1__OomReport *report);
/* A report of before the run was resumed. */
void heard_past_oom(struct heard *heard, Ballast__V1__OomReport *report);
void heard_end(struct heard *heard, Ballast__V1__Event *end);

#endif
