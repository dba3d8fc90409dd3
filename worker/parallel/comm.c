/* What every kind of comm shares: votes and sums on top of its exchange.
 *
 * Owns nothing and allocates nothing, so a rank that is out of memory can still say so. Main
 * thread only. */
#include "worker/parallel/comm.h"

#include <assert.h>

enum status comm_vote(struct comm *comm, const char *name, bool yes, int *out_first_no,
                      struct failure *why)
{
    uint8_t all[COMM_MAX_RANKS];
    uint8_t mine = yes ? 1 : 0;
    assert(comm->size <= COMM_MAX_RANKS);
    enum status status = comm->table->exchange(comm, name, &mine, sizeof mine, all, why);
    if (status != STATUS_OK) {
        return status;
    }
    int first_no = -1;
    for (uint32_t rank = 0; rank < comm->size && first_no < 0; rank++) {
        if (all[rank] == 0) {
            first_no = (int)rank;
        }
    }
    *out_first_no = first_no;
    return STATUS_OK;
}

enum status comm_sum_u64(struct comm *comm, const char *name, uint64_t mine, uint64_t *out_sum,
                         struct failure *why)
{
    uint64_t all[COMM_MAX_RANKS];
    assert(comm->size <= COMM_MAX_RANKS);
    enum status status = comm->table->exchange(comm, name, &mine, sizeof mine, all, why);
    if (status != STATUS_OK) {
        return status;
    }
    uint64_t sum = 0;
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        sum += all[rank];
    }
    *out_sum = sum;
    return STATUS_OK;
}
