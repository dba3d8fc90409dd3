/* The ledger: every byte this rank holds, by tier and category, live.
 *
 * Owns the counts, not the memory. The counts live in the telemetry block as atomics, so the link
 * thread reads them without stopping the step; only the main thread writes them.
 * Equation: for the device tier, the sum over categories equals the bytes in use of all
 * regions but the workspace, plus the bytes of all live workspace buffers, plus external;
 * ledger_check() proves it. */
#ifndef BALLAST_WORKER_MEMORY_LEDGER_H
#define BALLAST_WORKER_MEMORY_LEDGER_H

#include <stdint.h>
#include "proto/account.h"
#include "proto/base/status.h"
#include "worker/telemetry.h"

struct ledger {
    struct telemetry *telemetry; /* borrowed; where the counts are */
    uint64_t region_bytes[N_CATEGORIES];    /* device, in use by regions */
    uint64_t workspace_bytes[N_CATEGORIES]; /* device, live in the workspace */
    uint64_t external_bytes;                /* device, taken by libraries */
};

void ledger_init(struct ledger *ledger, struct telemetry *telemetry);
void ledger_region(struct ledger *ledger, enum category category, uint64_t old_bytes,
                   uint64_t new_bytes);
void ledger_workspace_add(struct ledger *ledger, enum category category, uint64_t bytes);
void ledger_workspace_sub(struct ledger *ledger, enum category category, uint64_t bytes);
/* Bytes outside the device: host and pinned buffers, files. */
void ledger_add(struct ledger *ledger, enum tier tier, enum category category, uint64_t bytes);
void ledger_sub(struct ledger *ledger, enum tier tier, enum category category, uint64_t bytes);

/* What driver and libraries have taken on the device: shown, but in no plan or peak, since
 * it is not ours to foresee. The device's limit is what remains. */
void ledger_external(struct ledger *ledger, uint64_t bytes);

/* Bytes in use by regions on the device, the workspace left out. */
uint64_t ledger_resident_bytes(const struct ledger *ledger);
void ledger_read(const struct ledger *ledger, struct account *out_account);
/* Do the sums close? The failure names the category and both numbers. */
enum status ledger_check(const struct ledger *ledger, struct failure *why) MUST_CHECK;

#endif
