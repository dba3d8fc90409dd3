/* Collectives through the host. See comm_staged.h. */
#include "worker/parallel/comm_staged.h"

enum status comm_staged_init(struct comm *comm, struct comm *control, struct device *device,
                             struct failure *why)
{
    (void)comm, (void)control, (void)device;
    return fail(why, STATUS_UNSUPPORTED, "ranks cannot share a GPU yet");
}
