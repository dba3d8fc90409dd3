/* The ledger's arithmetic. Main thread writes, any thread reads through telemetry. */
#include "worker/memory/ledger.h"
#include <assert.h>

static _Atomic uint64_t *cell(const struct ledger *ledger, enum tier tier, enum category category)
{
    return &ledger->telemetry->bytes[tier][category];
}

/* One writer, so a relaxed store of the new value is enough. */
static void publish(const struct ledger *ledger, enum category category)
{
    uint64_t bytes = ledger->region_bytes[category] + ledger->workspace_bytes[category];
    if (category == CATEGORY_EXTERNAL) {
        bytes += ledger->external_bytes;
    }
    atomic_store_explicit(cell(ledger, TIER_DEVICE, category), bytes, memory_order_relaxed);
}

void ledger_init(struct ledger *ledger, struct telemetry *telemetry)
{
    *ledger = (struct ledger){.telemetry = telemetry};
}

void ledger_region(struct ledger *ledger, enum category category, uint64_t old_bytes,
                   uint64_t new_bytes)
{
    assert(ledger->region_bytes[category] >= old_bytes);
    ledger->region_bytes[category] += new_bytes - old_bytes;
    publish(ledger, category);
}

void ledger_workspace_add(struct ledger *ledger, enum category category, uint64_t bytes)
{
    ledger->workspace_bytes[category] += bytes;
    publish(ledger, category);
}

void ledger_workspace_sub(struct ledger *ledger, enum category category, uint64_t bytes)
{
    assert(ledger->workspace_bytes[category] >= bytes);
    ledger->workspace_bytes[category] -= bytes;
    publish(ledger, category);
}

void ledger_add(struct ledger *ledger, enum tier tier, enum category category, uint64_t bytes)
{
    assert(tier != TIER_DEVICE);
    atomic_fetch_add_explicit(cell(ledger, tier, category), bytes, memory_order_relaxed);
}

void ledger_sub(struct ledger *ledger, enum tier tier, enum category category, uint64_t bytes)
{
    assert(tier != TIER_DEVICE);
    const uint64_t before =
        atomic_fetch_sub_explicit(cell(ledger, tier, category), bytes, memory_order_relaxed);
    assert(before >= bytes);
    (void)before;
}

void ledger_external(struct ledger *ledger, uint64_t bytes)
{
    ledger->external_bytes = bytes;
    publish(ledger, CATEGORY_EXTERNAL);
}

uint64_t ledger_resident_bytes(const struct ledger *ledger)
{
    uint64_t bytes = 0;
    for (int category = 0; category < N_CATEGORIES; category++) {
        bytes += ledger->region_bytes[category];
    }
    return bytes;
}

void ledger_read(const struct ledger *ledger, struct account *out_account)
{
    for (int tier = 0; tier < N_TIERS; tier++) {
        for (int category = 0; category < N_CATEGORIES; category++) {
            out_account->bytes[tier][category] = atomic_load_explicit(
                cell(ledger, (enum tier)tier, (enum category)category), memory_order_relaxed);
        }
    }
}

enum status ledger_check(const struct ledger *ledger, struct failure *why)
{
    struct account account;
    ledger_read(ledger, &account);
    for (int category = 0; category < N_CATEGORIES; category++) {
        uint64_t expected = ledger->region_bytes[category] + ledger->workspace_bytes[category];
        if (category == CATEGORY_EXTERNAL) {
            expected += ledger->external_bytes;
        }
        if (account.bytes[TIER_DEVICE][category] != expected) {
            return fail(why, STATUS_CORRUPT,
                        "ledger: %s shows %llu bytes, regions and workspace hold %llu",
                        category_name((enum category)category),
                        (unsigned long long)account.bytes[TIER_DEVICE][category],
                        (unsigned long long)expected);
        }
    }
    return STATUS_OK;
}
