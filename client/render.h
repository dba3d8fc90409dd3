/* What the daemon says, as text for a person.
 *
 * Pure: messages in, text out; no sockets, clock, files or environment. Every string of a
 * message is escaped. Plain style: no control characters but newlines, at most
 * style->width columns wherever words allow it. Missing sub-messages are shown as "-". */
#ifndef BALLAST_CLIENT_RENDER_H
#define BALLAST_CLIENT_RENDER_H

#include "client/text.h"
#include "proto/control.pb-c.h"

/* One screen: health, progress, speed, strategy, peaks by phase against the limit, disk. */
void render_status(const Ballast__Control__V1__StatusReply *status, const struct style *style,
                   struct text *out);
/* One line a sample; `with_heading` puts the column names above it. */
void render_watch_line(const Ballast__Control__V1__WatchReply *watch, bool with_heading,
                       const struct style *style, struct text *out);
/* The status screen with the ranks below it. */
void render_watch_screen(const Ballast__Control__V1__WatchReply *watch, const struct style *style,
                         struct text *out);
void render_ranks(Ballast__V1__RankState *const *ranks, size_t n_ranks, const struct style *style,
                  struct text *out);
void render_steps(Ballast__V1__StepRecord *const *steps, size_t n_steps, const struct style *style,
                  struct text *out);
/* A table of events; following, one line each without heading. */
void render_events(Ballast__V1__Event *const *events, size_t n_events, const struct style *style,
                   struct text *out);
void render_event_line(const Ballast__V1__Event *event, const struct style *style,
                       struct text *out);

/* render_memory.c */
void render_memory(const Ballast__Control__V1__MemoryReply *memory, const struct style *style,
                   struct text *out);
/* The report of an out-of-memory event: what, where, who holds what, remedies. */
void render_oom(const Ballast__V1__OomReport *report, const struct style *style, struct text *out);

/* render_plan.c */
/* Peaks of one plan by phase and category. */
void render_plan(const Ballast__V1__PlanSummary *plan, const struct style *style, struct text *out);
/* Before and after a change, phase by phase against the limit. */
void render_comparison(const Ballast__V1__PlanSummary *before,
                       const Ballast__V1__PlanSummary *after, const struct style *style,
                       struct text *out);
/* "generation 3 from step 41: checkpointing none -> block:1; forward 1.23 GiB -> ..." */
void render_change(const Ballast__Control__V1__CommandReply *reply, struct text *out);

/* Shared by the above. */
const char *render_phase(Ballast__V1__Phase phase);
const char *render_category(Ballast__V1__Category category);
const char *render_tier(Ballast__V1__Tier tier);
/* "a=1 b=2", without the keys that hold their default; "default" when none is left. */
void render_settings(Ballast__V1__Setting *const *settings, size_t n_settings, struct text *out);
/* Bytes of `phase` in a list; 0 when it is not there. */
uint64_t render_phase_bytes(Ballast__V1__PhaseBytes *const *list, size_t n,
                            Ballast__V1__Phase phase);
/* Green below 80 %, yellow to 100 %, red above. */
enum color render_load_color(double fraction);
/* tier x category, with totals. */
void render_entries(Ballast__V1__MemoryEntry *const *entries, size_t n_entries, size_t indent,
                    const struct style *style, struct text *out);
void render_live(Ballast__V1__LiveBuffer *const *live, size_t n_live, size_t indent,
                 const struct style *style, struct text *out);
/* "1.20 GiB of 2.00 GiB  [######....]  60 %"; without a limit only the bytes. */
void render_load(uint64_t bytes, uint64_t limit_bytes, const struct style *style, struct text *out);

#endif
