/* Conversions between C nouns and messages. Owns nothing; any thread. */
#include "proto/convert.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"

_Static_assert((int)BALLAST__V1__PHASE__PHASE_SETUP == PHASE_SETUP + 1 &&
                   (int)BALLAST__V1__PHASE__PHASE_SWITCH == PHASE_SWITCH + 1 &&
                   N_PHASES == PHASE_SWITCH + 1,
               "the wire's phases are ours plus one");
_Static_assert((int)BALLAST__V1__TIER__TIER_DEVICE == TIER_DEVICE + 1 &&
                   (int)BALLAST__V1__TIER__TIER_NVME == TIER_NVME + 1 && N_TIERS == TIER_NVME + 1,
               "the wire's tiers are ours plus one");
_Static_assert((int)BALLAST__V1__CATEGORY__CATEGORY_PARAMS == CATEGORY_PARAMS + 1 &&
                   (int)BALLAST__V1__CATEGORY__CATEGORY_EXTERNAL == CATEGORY_EXTERNAL + 1 &&
                   N_CATEGORIES == CATEGORY_EXTERNAL + 1,
               "the wire's categories are ours plus one");

static int to_wire(unsigned value, unsigned n)
{
    return value < n ? (int)value + 1 : 0;
}

static bool from_wire(int wire, unsigned n, unsigned *out)
{
    if (wire < 1 || wire > (int)n) {
        return false;
    }
    *out = (unsigned)wire - 1;
    return true;
}

Ballast__V1__Phase convert_phase_to_wire(enum phase phase)
{
    return (Ballast__V1__Phase)to_wire(phase, N_PHASES);
}

Ballast__V1__Tier convert_tier_to_wire(enum tier tier)
{
    return (Ballast__V1__Tier)to_wire(tier, N_TIERS);
}

Ballast__V1__Category convert_category_to_wire(enum category category)
{
    return (Ballast__V1__Category)to_wire(category, N_CATEGORIES);
}

bool convert_phase_from_wire(Ballast__V1__Phase wire, enum phase *out)
{
    unsigned value;
    bool known = from_wire((int)wire, N_PHASES, &value);
    if (known) {
        *out = (enum phase)value;
    }
    return known;
}

bool convert_tier_from_wire(Ballast__V1__Tier wire, enum tier *out)
{
    unsigned value;
    bool known = from_wire((int)wire, N_TIERS, &value);
    if (known) {
        *out = (enum tier)value;
    }
    return known;
}

bool convert_category_from_wire(Ballast__V1__Category wire, enum category *out)
{
    unsigned value;
    bool known = from_wire((int)wire, N_CATEGORIES, &value);
    if (known) {
        *out = (enum category)value;
    }
    return known;
}

/* One setting with room for its value; its key is text that outlives it (a table's). */
struct setting_slot {
    Ballast__V1__Setting setting;
    char value[STRATEGY_VALUE_BYTES];
};

/* A block of n pointers to n slots of `bytes` each; NULL when out of memory. An empty one is a
 * block too, so that every array is freed alike. */
static void *new_list(size_t n, size_t bytes)
{
    char *block = heap_calloc(1, n * (sizeof(void *) + bytes) + 1);
    for (size_t i = 0; block != NULL && i < n; i++) {
        ((void **)(void *)block)[i] = block + n * sizeof(void *) + i * bytes;
    }
    return block;
}

static void init_setting(Ballast__V1__Setting *setting, const char *key, const char *value)
{
    struct setting_slot *slot = (void *)setting;
    ballast__v1__setting__init(setting);
    snprintf(slot->value, sizeof slot->value, "%s", value);
    setting->key = (char *)(uintptr_t)key; /* protobuf-c has no const strings */
    setting->value = slot->value;
}

enum status convert_strategy_to_settings(const struct strategy *base,
                                         const struct strategy *strategy,
                                         Ballast__V1__Setting ***out_settings, size_t *out_n)
{
    Ballast__V1__Setting **settings = new_list(strategy_n_keys(), sizeof(struct setting_slot));
    if (settings == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    size_t n = 0;
    for (size_t i = 0; i < strategy_n_keys(); i++) {
        const char *key = strategy_key(i)->name;
        char old[STRATEGY_VALUE_BYTES] = "", new[STRATEGY_VALUE_BYTES];
        bool known =
            strategy_get(strategy, key, new) && (base == NULL || strategy_get(base, key, old));
        assert(known);
        if (known && strcmp(old, new) != 0) {
            init_setting(settings[n++], key, new);
        }
    }
    *out_settings = settings;
    *out_n = n;
    return STATUS_OK;
}

enum status convert_settings_to_strategy(Ballast__V1__Setting *const *settings, size_t n,
                                         struct strategy *strategy, struct failure *why)
{
    struct strategy made = *strategy;
    for (size_t i = 0; i < n; i++) {
        enum status status = strategy_set(&made, settings[i]->key, settings[i]->value, why);
        if (status != STATUS_OK) {
            return status;
        }
        /* Known keys are few, so this stays short however long the list is. */
        for (size_t j = 0; j < i; j++) {
            if (strcmp(settings[j]->key, settings[i]->key) == 0) {
                return fail(why, STATUS_CONFLICT, "%s is given twice: %.64s and %.64s",
                            settings[i]->key, settings[j]->value, settings[i]->value);
            }
        }
    }
    *strategy = made;
    return STATUS_OK;
}

static const struct {
    const char *name;
    size_t offset;
} limit_fields[] = {
    {"n_layers", offsetof(struct strategy_limits, n_layers)},
    {"world_size", offsetof(struct strategy_limits, world_size)},
    {"global_batch", offsetof(struct strategy_limits, global_batch)},
    {"seq_len", offsetof(struct strategy_limits, seq_len)},
    {"n_heads", offsetof(struct strategy_limits, n_heads)},
    {"n_kv_heads", offsetof(struct strategy_limits, n_kv_heads)},
};
enum { N_LIMITS = sizeof limit_fields / sizeof limit_fields[0] };
_Static_assert(sizeof(struct strategy_limits) == N_LIMITS * sizeof(uint32_t), "every field");

enum status convert_limits_to_settings(const struct strategy_limits *limits,
                                       Ballast__V1__Setting ***out_settings, size_t *out_n)
{
    Ballast__V1__Setting **settings = new_list(N_LIMITS, sizeof(struct setting_slot));
    if (settings == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < N_LIMITS; i++) {
        uint32_t number;
        char value[STRATEGY_VALUE_BYTES];
        memcpy(&number, (const char *)limits + limit_fields[i].offset, sizeof number);
        snprintf(value, sizeof value, "%u", number);
        init_setting(settings[i], limit_fields[i].name, value);
    }
    *out_settings = settings;
    *out_n = N_LIMITS;
    return STATUS_OK;
}

enum status convert_limits_from_settings(Ballast__V1__Setting *const *settings, size_t n,
                                         struct strategy_limits *out_limits, struct failure *why)
{
    struct strategy_limits limits = {0};
    unsigned seen = 0;
    for (size_t i = 0; i < n; i++) {
        for (unsigned field = 0; field < N_LIMITS; field++) {
            if (strcmp(settings[i]->key, limit_fields[field].name) != 0) {
                continue;
            }
            int64_t value;
            if (units_parse_int(settings[i]->value, 0, UINT32_MAX, &value) != STATUS_OK) {
                return fail(why, STATUS_INVALID,
                            "limit %s=%.64s: must be a whole number from 0 to 4294967295",
                            settings[i]->key, settings[i]->value);
            }
            uint32_t number = (uint32_t)value;
            memcpy((char *)&limits + limit_fields[field].offset, &number, sizeof number);
            seen |= 1U << field;
        }
    }
    for (unsigned field = 0; field < N_LIMITS; field++) {
        if ((seen & 1U << field) == 0) {
            return fail(why, STATUS_INVALID, "limit %s is missing", limit_fields[field].name);
        }
    }
    *out_limits = limits;
    return STATUS_OK;
}

enum status convert_account_to_entries(const struct account *account,
                                       Ballast__V1__MemoryEntry ***out_entries, size_t *out_n)
{
    Ballast__V1__MemoryEntry **entries =
        new_list((size_t)N_TIERS * N_CATEGORIES, sizeof(Ballast__V1__MemoryEntry));
    if (entries == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    size_t n = 0;
    for (unsigned tier = 0; tier < N_TIERS; tier++) {
        for (unsigned category = 0; category < N_CATEGORIES; category++) {
            if (account->bytes[tier][category] == 0) {
                continue;
            }
            Ballast__V1__MemoryEntry *entry = entries[n++];
            ballast__v1__memory_entry__init(entry);
            entry->tier = convert_tier_to_wire((enum tier)tier);
            entry->category = convert_category_to_wire((enum category)category);
            entry->bytes = account->bytes[tier][category];
        }
    }
    *out_entries = entries;
    *out_n = n;
    return STATUS_OK;
}

void convert_entries_to_account(Ballast__V1__MemoryEntry *const *entries, size_t n,
                                struct account *out_account)
{
    struct account account = {0};
    for (size_t i = 0; i < n; i++) {
        enum tier tier;
        enum category category;
        if (convert_tier_from_wire(entries[i]->tier, &tier) &&
            convert_category_from_wire(entries[i]->category, &category)) {
            account.bytes[tier][category] += entries[i]->bytes;
        }
    }
    *out_account = account;
}

enum status convert_phase_bytes(const uint64_t bytes[N_PHASES], unsigned phases,
                                Ballast__V1__PhaseBytes ***out_entries, size_t *out_n)
{
    Ballast__V1__PhaseBytes **entries = new_list(N_PHASES, sizeof(Ballast__V1__PhaseBytes));
    if (entries == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    size_t n = 0;
    for (unsigned phase = 0; phase < N_PHASES; phase++) {
        if ((phases & 1U << phase) != 0) {
            ballast__v1__phase_bytes__init(entries[n]);
            entries[n]->phase = convert_phase_to_wire((enum phase)phase);
            entries[n++]->bytes = bytes[phase];
        }
    }
    *out_entries = entries;
    *out_n = n;
    return STATUS_OK;
}

enum status convert_phase_times(const double ms[N_PHASES], unsigned phases,
                                Ballast__V1__PhaseTime ***out_entries, size_t *out_n)
{
    Ballast__V1__PhaseTime **entries = new_list(N_PHASES, sizeof(Ballast__V1__PhaseTime));
    if (entries == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    size_t n = 0;
    for (unsigned phase = 0; phase < N_PHASES; phase++) {
        if ((phases & 1U << phase) != 0) {
            ballast__v1__phase_time__init(entries[n]);
            entries[n]->phase = convert_phase_to_wire((enum phase)phase);
            entries[n++]->ms = ms[phase];
        }
    }
    *out_entries = entries;
    *out_n = n;
    return STATUS_OK;
}

const char *convert_now(char text[static UNITS_TEXT_BYTES])
{
    return units_format_time(units_unix_ms(), text);
}
