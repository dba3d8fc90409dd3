/* The nouns of the memory account: tiers, categories, phases, and sums over them.
 *
 * Pure values; any thread. Names are lower-case and are the ones users read and type. */
#ifndef BALLAST_PROTO_ACCOUNT_H
#define BALLAST_PROTO_ACCOUNT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum tier { TIER_DEVICE, TIER_HOST, TIER_PINNED, TIER_NVME, N_TIERS };

enum category {
    CATEGORY_PARAMS,
    CATEGORY_GRADS,
    CATEGORY_OPTIMIZER,
    CATEGORY_ACTIVATIONS,
    CATEGORY_TEMP,
    CATEGORY_COMM,
    CATEGORY_EXTERNAL,
    N_CATEGORIES
};

enum phase {
    PHASE_SETUP,
    PHASE_FORWARD,
    PHASE_BACKWARD,
    PHASE_STEP,
    PHASE_EVAL,
    PHASE_SAVE,
    PHASE_SWITCH,
    N_PHASES
};

const char *tier_name(enum tier tier);
const char *category_name(enum category category);
const char *phase_name(enum phase phase);
/* False when the name is unknown; then *out is unchanged. */
bool tier_from_name(const char *name, enum tier *out);
bool category_from_name(const char *name, enum category *out);
bool phase_from_name(const char *name, enum phase *out);

/* Bytes by tier and category at one moment. */
struct account {
    uint64_t bytes[N_TIERS][N_CATEGORIES];
};

uint64_t account_tier_bytes(const struct account *account, enum tier tier);
uint64_t account_category_bytes(const struct account *account, enum category category);

#endif
