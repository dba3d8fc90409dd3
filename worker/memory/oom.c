/* The out-of-memory report. See oom.h. */
#include "worker/memory/oom.h"
#include <stdio.h>
#include <string.h>
#include "proto/base/units.h"

/* The first buffer of the phase that ends above what is committed: the one that had no room. With
 * room for all (a fault on purpose), the largest at the peak. */
static void name_tensor(struct oom_report *report, const struct plan *plan, size_t committed)
{
    report->tensor = "workspace";
    report->layer = -1;
    report->category = CATEGORY_TEMP;
    for (int section = 0; section < N_SECTIONS; section++) {
        const struct plan_section *s = &plan->sections[section];
        for (uint32_t i = 0; i < s->n_buffers; i++) {
            const struct plan_buffer *buffer = &s->buffers[i];
            if (buffer->phase == report->phase && buffer->offset + buffer->padded > committed) {
                report->tensor = buffer->name;
                report->layer = buffer->layer;
                report->category = buffer->category;
                return;
            }
        }
    }
    if (report->n_live > 0) {
        report->tensor = report->live[0].name;
        report->layer = report->live[0].layer;
        report->category = report->live[0].category;
    }
}

void oom_fill(struct oom_report *report, const struct shortage *shortage, const struct plan *plan,
              size_t workspace_committed, uint64_t step, uint32_t micro_step,
              const uint64_t held[N_CATEGORIES], const uint64_t actual[N_PHASES])
{
    *report = (struct oom_report){
        .step = step,
        .rank = shortage->rank,
        .micro_step = micro_step,
        .phase = shortage->phase,
        .tier = shortage->node ? TIER_HOST : TIER_DEVICE,
        .asked_bytes = shortage->asked_bytes,
        .limit_bytes = shortage->limit_bytes,
        .held_bytes = shortage->held_bytes,
    };
    memcpy(report->held, held, sizeof report->held);
    memcpy(report->actual, actual, sizeof report->actual);
    for (int phase = 0; phase < N_PHASES; phase++) {
        report->planned[phase] = plan->phases[phase].used ? plan->phases[phase].peak_bytes : 0;
    }
    report->n_live = plan_live_set(plan, shortage->phase, report->live, OOM_LIVE_LINES);
    name_tensor(report, plan, workspace_committed);
    const char *cause = shortage->on_purpose ? "fault on purpose"
                        : shortage->node     ? "the node has no more memory"
                                             : "over the device's capacity";
    snprintf(report->cause, sizeof report->cause, "%s", cause);
}

static const char *bytes_text(uint64_t bytes, char text[static UNITS_TEXT_BYTES])
{
    return units_format_bytes(bytes, text);
}

static void print_held(const struct oom_report *report, FILE *out)
{
    char text[UNITS_TEXT_BYTES];
    fprintf(out, "  held:");
    for (int c = 0; c < N_CATEGORIES; c++) {
        if (report->held[c] > 0) {
            fprintf(out, "  %s %s", category_name((enum category)c),
                    bytes_text(report->held[c], text));
        }
    }
    fprintf(out, "\n");
}

static void print_live(const struct oom_report *report, FILE *out)
{
    char text[UNITS_TEXT_BYTES];
    fprintf(out, "  live at the planned peak of %s, largest first:\n", phase_name(report->phase));
    for (size_t i = 0; i < report->n_live && i < 10; i++) {
        const struct plan_live *line = &report->live[i];
        fprintf(out, "    %10s  %-12s %s x %u\n", bytes_text(line->bytes, text),
                category_name(line->category), line->name, line->count);
    }
}

static void print_all(const struct oom_report *report, FILE *out)
{
    char asked[UNITS_TEXT_BYTES];
    char held[UNITS_TEXT_BYTES];
    char limit[UNITS_TEXT_BYTES];
    char planned[UNITS_TEXT_BYTES];
    fprintf(out, "out of memory: %s phase, step %llu, micro-step %u, rank %u (%s)\n",
            phase_name(report->phase), (unsigned long long)report->step, report->micro_step,
            report->rank, report->cause);
    fprintf(out, "  %s (%s%s", report->tensor, category_name(report->category),
            report->layer >= 0 ? ", layer " : "");
    if (report->layer >= 0) {
        fprintf(out, "%d", report->layer);
    }
    fprintf(out, "): %s asked, %s held, limit %s; the plan's peak is %s\n",
            bytes_text(report->asked_bytes, asked), bytes_text(report->held_bytes, held),
            report->limit_bytes == 0 ? "none" : bytes_text(report->limit_bytes, limit),
            bytes_text(report->planned[report->phase], planned));
    print_held(report, out);
    print_live(report, out);
    for (size_t i = 0; i < report->n_remedies; i++) {
        const struct oom_remedy *remedy = &report->remedies[i];
        fprintf(out, "  %zu. %s\n", i + 1, remedy->text);
    }
    if (report->outcome[0] != '\0') {
        fprintf(out, "  %s\n", report->outcome);
    }
}

void oom_print(const struct oom_report *report, FILE *out)
{
    /* In one piece, or the lines of other ranks would come between. */
    char text[16384] = "";
    FILE *memory = fmemopen(text, sizeof text, "w");
    if (memory == NULL) {
        print_all(report, out);
        return;
    }
    print_all(report, memory);
    fclose(memory);
    fputs(text, out);
}
