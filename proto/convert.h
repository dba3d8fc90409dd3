/* Between the nouns of C and those of the wire. Pure but for the clock; any thread.
 *
 * Every array made here is one block of the heap: the pointers, what they point to and its
 * text. Put it into a message that is packed and not unpacked-freed, then heap_free() the array. */
#ifndef BALLAST_PROTO_CONVERT_H
#define BALLAST_PROTO_CONVERT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/account.h"
#include "proto/base/status.h"
#include "proto/base/units.h"
#include "proto/run.pb-c.h"
#include "proto/strategy.h"

/* The wire's enums are ours plus one: 0 is "unspecified" there. N_PHASES, N_TIERS and
 * N_CATEGORIES stand for it here. */
Ballast__V1__Phase convert_phase_to_wire(enum phase phase);
Ballast__V1__Tier convert_tier_to_wire(enum tier tier);
Ballast__V1__Category convert_category_to_wire(enum category category);
/* False for the unspecified value and unknown ones; then *out is unchanged. */
bool convert_phase_from_wire(Ballast__V1__Phase wire, enum phase *out);
bool convert_tier_from_wire(Ballast__V1__Tier wire, enum tier *out);
bool convert_category_from_wire(Ballast__V1__Category wire, enum category *out);

/* The keys of `strategy` that differ from `base`, all when `base` is NULL. OUT_OF_MEMORY. */
enum status convert_strategy_to_settings(const struct strategy *base,
                                         const struct strategy *strategy,
                                         Ballast__V1__Setting ***out_settings,
                                         size_t *out_n) MUST_CHECK;
/* Set each in turn; a key given twice is refused. On failure `strategy` is unchanged and the
 * text names key, value and what is allowed. */
enum status convert_settings_to_strategy(Ballast__V1__Setting *const *settings, size_t n,
                                         struct strategy *strategy, struct failure *why) MUST_CHECK;

/* The run's facts by field name ("n_layers"). OUT_OF_MEMORY. */
enum status convert_limits_to_settings(const struct strategy_limits *limits,
                                       Ballast__V1__Setting ***out_settings,
                                       size_t *out_n) MUST_CHECK;
/* Unknown names are passed over (a newer worker's), a missing one or a bad number is refused. */
enum status convert_limits_from_settings(Ballast__V1__Setting *const *settings, size_t n,
                                         struct strategy_limits *out_limits,
                                         struct failure *why) MUST_CHECK;

/* The entries of an account that are not 0, by tier, then category. OUT_OF_MEMORY. */
enum status convert_account_to_entries(const struct account *account,
                                       Ballast__V1__MemoryEntry ***out_entries,
                                       size_t *out_n) MUST_CHECK;
/* Adds entries up; those with an unspecified tier or category are passed over. */
void convert_entries_to_account(Ballast__V1__MemoryEntry *const *entries, size_t n,
                                struct account *out_account);

/* One entry for each phase whose bit `1 << phase` is in `phases`. OUT_OF_MEMORY. */
enum status convert_phase_bytes(const uint64_t bytes[N_PHASES], unsigned phases,
                                Ballast__V1__PhaseBytes ***out_entries, size_t *out_n) MUST_CHECK;
enum status convert_phase_times(const double ms[N_PHASES], unsigned phases,
                                Ballast__V1__PhaseTime ***out_entries, size_t *out_n) MUST_CHECK;

/* The wall clock as RFC 3339 UTC with milliseconds. Returns `text`. */
const char *convert_now(char text[static UNITS_TEXT_BYTES]);

#endif
