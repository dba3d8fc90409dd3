/* Phase changes. Owns nothing. Main thread. */
#include "worker/telemetry.h"

#include <unistd.h>

void telemetry_phase(struct telemetry *telemetry, enum phase phase)
{
    atomic_store_explicit(&telemetry->phase, (int)phase, memory_order_relaxed);
    atomic_fetch_add_explicit(&telemetry->heartbeat, 1, memory_order_relaxed);
    if (telemetry->wake_fd >= 0) {
        /* Full means a wake-up is waiting already. */
        uint64_t one = 1;
        ssize_t written = write(telemetry->wake_fd, &one, sizeof one);
        (void)written;
    }
}
