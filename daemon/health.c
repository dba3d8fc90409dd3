/* Reasons for worry. Pure; see health.h. */
#include "daemon/health.h"

#include <stdarg.h>
#include <stdio.h>
#include "proto/base/units.h"

const char *health_name(enum health_level level)
{
    static const char *const names[] = {"OK", "WARN", "ERROR"};
    return names[level];
}

/* A save of a small model still fits the first; below the second even the journal is in danger. */
static const uint64_t disk_warn_bytes = (uint64_t)1 << 30;
static const uint64_t disk_error_bytes = (uint64_t)100 << 20;

__attribute__((format(printf, 3, 4))) static void add(struct health *health,
                                                      enum health_level level,
                                                      const char *format, ...)
{
    if (level > health->level)
        health->level = level;
    if (health->n_reasons == HEALTH_MAX_REASONS)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(health->reasons[health->n_reasons++], HEALTH_REASON_BYTES, format, arguments);
    va_end(arguments);
}

static void judge_ranks(const struct run *run, const struct health_facts *facts,
                        struct health *health)
{
    for (uint32_t i = 0; i < run->world_size; i++) {
        const struct run_rank *rank = &run->ranks[i];
        int64_t quiet_ms = facts->now_ms - rank->heard_ms;
        int64_t still_ms = facts->now_ms - rank->moved_ms;
        if (!rank->seen) {
            if (facts->now_ms - run->started_ms >= HEALTH_ABSENT_MS)
                add(health, HEALTH_WARN, "rank %u has never linked to the daemon", i);
        } else if (rank->ended || rank->lost) {
            continue; /* told below, or as it should be */
        } else if (!rank->linked) {
            add(health, HEALTH_WARN, "rank %u is not linked: its link closed %.1f s ago", i,
                (double)(facts->now_ms - rank->closed_ms) / 1000.0);
        } else if (quiet_ms >= HEALTH_QUIET_MS) {
            add(health, HEALTH_WARN,
                "rank %u has said nothing for %.0f s; it was in %s of step %llu", i,
                (double)quiet_ms / 1000.0, phase_name(rank->phase), (unsigned long long)rank->step);
        } else if (still_ms >= HEALTH_STUCK_MS && !run->paused) {
            add(health, HEALTH_WARN, "rank %u has not moved for %.0f s in %s of step %llu", i,
                (double)still_ms / 1000.0, phase_name(rank->phase), (unsigned long long)rank->step);
        }
    }
}

void health_judge(const struct run *run, const struct health_facts *facts,
                  struct health *out_health)
{
    struct health *health = out_health;
    char text[UNITS_TEXT_BYTES];
    health->level = HEALTH_OK;
    health->n_reasons = 0;
    if (run->loss_told) {
        const struct run_rank *rank = &run->ranks[run->culprit];
        add(health, HEALTH_ERROR, "rank %u was lost in %s of step %llu", run->culprit,
            phase_name(rank->phase), (unsigned long long)rank->step);
    }
    if (facts->oom_reported)
        add(health, HEALTH_ERROR, "rank %d ran out of memory in %s of step %llu; see `oom`",
            facts->oom_rank, facts->oom_phase ? facts->oom_phase : "an unknown phase",
            (unsigned long long)facts->oom_step);
    if (facts->journal_broken)
        add(health, HEALTH_ERROR, "events.jsonl cannot be written");
    if (facts->disk_known && facts->disk_free_bytes < disk_warn_bytes)
        add(health, facts->disk_free_bytes < disk_error_bytes ? HEALTH_ERROR : HEALTH_WARN,
            "only %s of disk are free for the run folder",
            units_format_bytes(facts->disk_free_bytes, text));
    if (run->stage == RUN_AWAITING)
        add(health, HEALTH_WARN, "no worker has linked yet");
    if (facts->loss_not_finite)
        add(health, HEALTH_WARN, "the loss of the last step is not finite");
    if (facts->step_skipped)
        add(health, HEALTH_WARN, "the last step was skipped on all ranks (non-finite gradients)");
    judge_ranks(run, facts, health);
}
