/* Admission votes. See admit.h. */
#include "worker/memory/admit.h"
#include <assert.h>
#include <string.h>
#include "proto/base/fault.h"

/* What one rank says in each of the two rounds. */
struct ballot {
    uint64_t asked_bytes;
    uint64_t held_bytes;
    uint64_t limit_bytes;
    uint64_t headroom_bytes; /* of the node, as this rank sees it */
    uint32_t node;
    uint8_t refused;
    uint8_t on_purpose;
    uint8_t padding[2];
};

static enum status exchange(struct admit *admit, const char *name, const struct ballot *mine,
                            struct ballot *all, struct failure *why)
{
    return admit->exchange(admit->user, name, mine, sizeof *mine, all, why);
}

static void set_shortage(struct admit *admit, enum phase phase, uint32_t rank,
                         const struct ballot *ballot, bool node, uint64_t limit)
{
    admit->shortage = (struct shortage){
        .any = true,
        .rank = rank,
        .phase = phase,
        .asked_bytes = ballot->asked_bytes,
        .held_bytes = ballot->held_bytes,
        .limit_bytes = limit,
        .on_purpose = ballot->on_purpose != 0,
        .node = node,
    };
}

/* First round: does every node have what its ranks ask together? Every rank finds the same
 * answer from the same ballots. */
static bool nodes_can_give(struct admit *admit, enum phase phase, const struct ballot *all)
{
    for (uint32_t rank = 0; rank < admit->size; rank++) {
        uint64_t asked = 0;
        for (uint32_t peer = 0; peer < admit->size; peer++) {
            asked += all[peer].node == all[rank].node ? all[peer].asked_bytes : 0;
        }
        if (all[rank].asked_bytes > 0 && asked > all[rank].headroom_bytes) {
            set_shortage(admit, phase, rank, &all[rank], true, all[rank].headroom_bytes);
            admit->shortage.asked_bytes = asked;
            return false;
        }
    }
    return true;
}

static bool all_could_commit(struct admit *admit, enum phase phase, const struct ballot *all)
{
    for (uint32_t rank = 0; rank < admit->size; rank++) {
        if (all[rank].refused) {
            set_shortage(admit, phase, rank, &all[rank], false, all[rank].limit_bytes);
            return false;
        }
    }
    return true;
}

static enum status refuse(const struct admit *admit, struct failure *why)
{
    const struct shortage *s = &admit->shortage;
    return fail(why, STATUS_OUT_OF_MEMORY,
                "out of memory in %s on rank %u: %llu bytes asked, %llu held, %s %llu%s",
                phase_name(s->phase), s->rank, (unsigned long long)s->asked_bytes,
                (unsigned long long)s->held_bytes, s->node ? "the node has left" : "limit",
                (unsigned long long)s->limit_bytes, s->on_purpose ? " (fault on purpose)" : "");
}

/* Workspace and more, or nothing. */
static enum status commit_all(struct region *region, size_t bytes, const struct admit_more *more,
                              struct failure *why)
{
    const size_t held = region->committed_bytes;
    enum status status = region_resize(region, bytes, why);
    if (status == STATUS_OK && more != NULL) {
        status = more->acquire(more->user, why);
        if (status != STATUS_OK) {
            region_shrink(region, held);
        }
    }
    return status;
}

static enum status admit_both_rounds(struct admit *admit, enum phase phase, size_t bytes,
                                     const struct admit_more *more, struct ballot *all,
                                     struct failure *why)
{
    struct region *region = &admit->workspace->region;
    const size_t held = region->committed_bytes;
    const size_t wanted = device_round(region->device, bytes);
    struct ballot mine = {
        .asked_bytes = (wanted > held ? wanted - held : 0) + (more == NULL ? 0 : more->bytes),
        .held_bytes = atomic_load(&region->device->committed_bytes),
        .limit_bytes = region->device->capacity_bytes,
        .headroom_bytes = admit->host_backed ? admit->node_headroom() : UINT64_MAX,
        .node = admit->node,
    };
    admit->n_votes++;
    enum status status = exchange(admit, "admission", &mine, all, why);
    if (status != STATUS_OK) {
        return status;
    }
    if (!nodes_can_give(admit, phase, all)) {
        return refuse(admit, why);
    }
    struct failure local = {0};
    const enum status committed =
        commit_all(region, wanted > held ? wanted : held, more, &local);
    mine.refused = committed != STATUS_OK;
    mine.on_purpose = mine.refused && strstr(local.text, "on purpose") != NULL;
    status = exchange(admit, "admission vote", &mine, all, why);
    if (status == STATUS_OK && !all_could_commit(admit, phase, all)) {
        status = refuse(admit, why);
    }
    if (status != STATUS_OK) {
        region_shrink(region, held);
        if (more != NULL && committed == STATUS_OK) {
            more->revert(more->user);
        }
    }
    return status;
}

enum status admit_bytes(struct admit *admit, enum phase phase, size_t bytes,
                        const struct admit_more *more, struct failure *why)
{
    /* Not from the heap: a rank without host memory that stayed away would hang the others. */
    struct ballot all[ADMIT_MAX_RANKS];
    assert(admit->size <= ADMIT_MAX_RANKS);
    return admit_both_rounds(admit, phase, bytes, more, all, why);
}

enum status admit_phase(struct admit *admit, enum phase phase, struct failure *why)
{
    /* Asked on every entry, on every rank: the fault counts them. */
    const bool forced = fault_forces_admission((int64_t)admit->step, phase);
    if (admit->admitted[phase] && !forced) {
        return STATUS_OK;
    }
    const enum status status =
        admit_bytes(admit, phase, admit->plan->phases[phase].workspace_bytes, NULL, why);
    admit->admitted[phase] = status == STATUS_OK;
    return status;
}

void admit_follow(struct admit *admit, struct plan *plan)
{
    admit->plan = plan;
    for (int phase = 0; phase < N_PHASES; phase++) {
        admit->admitted[phase] = true;
    }
}
