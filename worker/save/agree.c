/* Agreement of all ranks on the outcome of a part of a save. Owns nothing. */
#include "worker/save/agree.h"

#include <string.h>

enum { OUTCOME_BYTES = sizeof(enum status) + FAILURE_TEXT_BYTES };
static const double default_timeout_s = 600;

/* The failing rank's outcome, brought over in portions that fit a buffer of fixed size. */
static enum status fetch_outcome(struct comm *comm, const char *name, uint32_t from,
                                 uint8_t outcome[static OUTCOME_BYTES], struct failure *why)
{
    uint8_t all[COMM_MAX_RANKS];
    size_t portion = sizeof all / comm->size;
    portion = portion < OUTCOME_BYTES ? portion : OUTCOME_BYTES;
    for (size_t at = 0; at < OUTCOME_BYTES; at += portion) {
        size_t n = OUTCOME_BYTES - at < portion ? OUTCOME_BYTES - at : portion;
        enum status status = comm->table->exchange(comm, name, outcome + at, n, all, why);
        if (status != STATUS_OK) {
            return status;
        }
        memcpy(outcome + at, all + from * n, n);
    }
    return STATUS_OK;
}

enum status save_agree(const struct save_io *io, const char *name, enum status mine,
                       struct failure *why)
{
    struct comm *comm = io->comm;
    int first_no;
    struct failure broken = {0};
    enum status status = comm_vote(comm, name, mine == STATUS_OK, &first_no, &broken);
    uint8_t outcome[OUTCOME_BYTES] = {0};
    if (status == STATUS_OK && first_no < 0) {
        return STATUS_OK;
    }
    if (status == STATUS_OK) {
        memcpy(outcome, &mine, sizeof mine);
        if (mine != STATUS_OK && why != NULL) {
            memcpy(outcome + sizeof mine, why->text, sizeof why->text);
        }
        status = fetch_outcome(comm, name, (uint32_t)first_no, outcome, &broken);
    }
    if (status != STATUS_OK) {
        return fail(why, status, "%s", broken.text);
    }
    enum status verdict;
    char text[FAILURE_TEXT_BYTES];
    memcpy(&verdict, outcome, sizeof verdict);
    memcpy(text, outcome + sizeof verdict, sizeof text);
    text[sizeof text - 1] = '\0';
    return fail(why, verdict, "rank %d: %s", first_no, text);
}

double save_begin_waits(const struct save_io *io)
{
    double former_s = io->comm->timeout_s;
    double wanted_s = io->timeout_s > 0 ? io->timeout_s : default_timeout_s;
    io->comm->timeout_s = wanted_s > former_s ? wanted_s : former_s;
    return former_s;
}

void save_end_waits(const struct save_io *io, double former_s)
{
    io->comm->timeout_s = former_s;
}
