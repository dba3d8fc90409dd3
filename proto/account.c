/* The names of tiers, categories and phases, and sums over an account. Pure; any thread. */
#include "proto/account.h"

#include <assert.h>
#include <string.h>

static const char *const tier_names[] = {"device", "host", "pinned", "nvme"};
static const char *const category_names[] = {"params", "grads", "optimizer", "activations",
                                             "temp",   "comm",  "external"};
static const char *const phase_names[] = {"setup", "forward", "backward", "step",
                                          "eval",  "save",    "switch"};

_Static_assert(sizeof tier_names / sizeof *tier_names == N_TIERS, "a name for every tier");
_Static_assert(sizeof category_names / sizeof *category_names == N_CATEGORIES,
               "a name for every category");
_Static_assert(sizeof phase_names / sizeof *phase_names == N_PHASES, "a name for every phase");

static bool find(const char *const *names, unsigned n, const char *name, unsigned *out)
{
    for (unsigned i = 0; i < n; i++) {
        if (strcmp(names[i], name) == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

const char *tier_name(enum tier tier)
{
    assert((unsigned)tier < N_TIERS);
    return tier_names[tier];
}

const char *category_name(enum category category)
{
    assert((unsigned)category < N_CATEGORIES);
    return category_names[category];
}

const char *phase_name(enum phase phase)
{
    assert((unsigned)phase < N_PHASES);
    return phase_names[phase];
}

bool tier_from_name(const char *name, enum tier *out)
{
    unsigned index;
    if (!find(tier_names, N_TIERS, name, &index)) {
        return false;
    }
    *out = (enum tier)index;
    return true;
}

bool category_from_name(const char *name, enum category *out)
{
    unsigned index;
    if (!find(category_names, N_CATEGORIES, name, &index)) {
        return false;
    }
    *out = (enum category)index;
    return true;
}

bool phase_from_name(const char *name, enum phase *out)
{
    unsigned index;
    if (!find(phase_names, N_PHASES, name, &index)) {
        return false;
    }
    *out = (enum phase)index;
    return true;
}

uint64_t account_tier_bytes(const struct account *account, enum tier tier)
{
    assert((unsigned)tier < N_TIERS);
    uint64_t sum = 0;
    for (unsigned category = 0; category < N_CATEGORIES; category++) {
        sum += account->bytes[tier][category];
    }
    return sum;
}

uint64_t account_category_bytes(const struct account *account, enum category category)
{
    assert((unsigned)category < N_CATEGORIES);
    uint64_t sum = 0;
    for (unsigned tier = 0; tier < N_TIERS; tier++) {
        sum += account->bytes[tier][category];
    }
    return sum;
}
