/* The newest message of each kind. See heard.h. */
#include "daemon/heard.h"

#include <assert.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/frame.h"

/* Every message struct starts with its base; NULL is fine. */
static void discard(void *message)
{
    frame_free(message);
}

void heard_fini(struct heard *heard)
{
    discard(heard->hello);
    discard(heard->run);
    discard(heard->plan);
    discard(heard->oom);
    discard(heard->end);
    for (uint32_t i = 0; i < heard->n_ranks; i++)
        discard(heard->ranks[i]);
    heap_free(heard->ranks);
    *heard = (struct heard){0};
}

enum status heard_set_world(struct heard *heard, uint32_t world_size)
{
    if (heard->ranks) {
        assert(heard->n_ranks == world_size);
        return STATUS_OK;
    }
    heard->ranks = heap_calloc(world_size, sizeof *heard->ranks);
    if (!heard->ranks)
        return STATUS_OUT_OF_MEMORY;
    heard->n_ranks = world_size;
    return STATUS_OK;
}

enum status heard_linked(struct heard *heard, const Ballast__Link__V1__WorkerHello *hello)
{
    assert(hello->rank < heard->n_ranks);
    Ballast__V1__RankState state = BALLAST__V1__RANK_STATE__INIT;
    state.rank = hello->rank;
    state.host = hello->host;
    state.pid = hello->pid;
    state.layer = -1;
    state.step = hello->step;
    state.phase = BALLAST__V1__PHASE__PHASE_SETUP;
    ProtobufCMessage *copy = NULL;
    enum status status = frame_copy(&state.base, &copy);
    if (status == STATUS_OK)
        heard_rank(heard, hello->rank, (Ballast__V1__RankState *)copy);
    return status;
}

void heard_hello(struct heard *heard, Ballast__Link__V1__WorkerHello *hello)
{
    discard(heard->hello);
    heard->hello = hello;
}

void heard_run(struct heard *heard, Ballast__Link__V1__RunState *run)
{
    /* The plan comes only when it changes, so it outlives the state it came in. */
    if (run->plan) {
        discard(heard->plan);
        heard->plan = run->plan;
        run->plan = NULL;
    }
    discard(heard->run);
    heard->run = run;
}

void heard_rank(struct heard *heard, uint32_t rank, Ballast__V1__RankState *state)
{
    assert(rank < heard->n_ranks);
    discard(heard->ranks[rank]);
    heard->ranks[rank] = state;
}

bool heard_oom(struct heard *heard, Ballast__V1__OomReport *report)
{
    /* After a reconnect every rank repeats its own last one. Times are of one form, so that their
     * order is that of their texts. */
    bool is_older = heard->oom && strcmp(report->time, heard->oom->time) < 0;
    discard(is_older ? report : heard->oom);
    if (is_older)
        return false;
    heard->oom = report;
    heard->oom_is_past = false;
    return true;
}

void heard_past_oom(struct heard *heard, Ballast__V1__OomReport *report)
{
    discard(heard->oom);
    heard->oom = report;
    heard->oom_is_past = true;
}

void heard_end(struct heard *heard, Ballast__V1__Event *end)
{
    discard(heard->end);
    heard->end = end;
}
