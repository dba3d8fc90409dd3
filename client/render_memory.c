/* The memory account, live or at a peak, and the out-of-memory report as text. Pure. */
#include "client/render.h"

#include <inttypes.h>
#include "client/table.h"
#include "proto/account.h"
#include "proto/base/units.h"
#include "proto/convert.h"

enum { LIVE_BAR_CELLS = 12, MAX_LIVE_ROWS = 32 };

void render_entries(Ballast__V1__MemoryEntry *const *entries, size_t n_entries, size_t indent,
                    const struct style *style, struct text *out)
{
    static const char *const headings[] = {"tier",         ">params", ">grads", ">optimizer",
                                           ">activations", ">temp",   ">comm",  ">external",
                                           ">total",       NULL};
    _Static_assert(N_CATEGORIES == 7, "the headings name every category");
    struct account account;
    convert_entries_to_account(entries, n_entries, &account);
    struct table table;
    table_init(&table, headings);
    for (size_t tier = 0; tier < N_TIERS; tier++) {
        uint64_t total = account_tier_bytes(&account, (enum tier)tier);
        if (total == 0 && tier != TIER_DEVICE)
            continue;
        table_cell(&table, "%s", tier_name((enum tier)tier));
        for (size_t category = 0; category < N_CATEGORIES; category++)
            table_cell_bytes(&table, account.bytes[tier][category]);
        table_cell_bytes(&table, total);
    }
    table_print(&table, style, indent, out);
    table_fini(&table);
}

void render_live(Ballast__V1__LiveBuffer *const *live, size_t n_live, size_t indent,
                 const struct style *style, struct text *out)
{
    static const char *const headings[] = {">bytes", "share",  "tier", "category",
                                           ">count", "buffer", NULL};
    uint64_t total = 0;
    for (size_t i = 0; i < n_live; i++)
        total += live[i]->bytes;
    struct table table;
    struct text bar = {0};
    table_init(&table, headings);
    for (size_t i = 0; i < n_live && i < MAX_LIVE_ROWS; i++) {
        text_clear(&bar);
        text_bar(&bar, style, total ? (double)live[i]->bytes / (double)total : 0.0, LIVE_BAR_CELLS);
        out->failed |= bar.failed;
        table_cell_bytes(&table, live[i]->bytes);
        table_cell(&table, "%s", text_get(&bar));
        table_cell(&table, "%s", render_tier(live[i]->tier));
        table_cell(&table, "%s", render_category(live[i]->category));
        table_cell(&table, "%" PRIu32, live[i]->count > 0 ? live[i]->count : 1);
        table_cell(&table, "%s", live[i]->name);
    }
    table_print(&table, style, indent, out);
    table_fini(&table);
    text_fini(&bar);
}

static void put_rank(const Ballast__V1__RankState *rank, const struct style *style,
                     struct text *out)
{
    char resident[UNITS_TEXT_BYTES];
    text_color(out, style, COLOR_BOLD);
    text_printf(out, "rank %" PRIu32, rank->rank);
    text_color_end(out, style, COLOR_BOLD);
    if (*rank->host) {
        text_put(out, " on ");
        text_put_wire(out, rank->host);
    }
    text_printf(out, ", %s of step %" PRIu64 ": committed ", render_phase(rank->phase), rank->step);
    render_load(rank->committed_bytes, rank->limit_bytes, style, out);
    text_put(out, "\n");
    if (!rank->linked)
        text_colored(out, style, COLOR_RED, "  not linked; these are its last known values\n");
    render_entries(rank->memory, rank->n_memory, 2, style, out);
    if (rank->resident_bytes)
        text_printf(out, "  resident in the process: %s\n",
                    units_format_bytes(rank->resident_bytes, resident));
    if (rank->driver_bytes)
        text_printf(out, "  on the GPU, as its driver counts: %s\n",
                    units_format_bytes(rank->driver_bytes, resident));
}

static void put_measured(const Ballast__Control__V1__MemoryReply *memory, const struct style *style,
                         struct text *out)
{
    static const char *const headings[] = {"phase", ">peak", "of limit", NULL};
    if (memory->n_peak_bytes == 0)
        return;
    struct table table;
    struct text load = {0};
    table_init(&table, headings);
    for (size_t i = 0; i < memory->n_peak_bytes; i++) {
        const Ballast__V1__PhaseBytes *peak = memory->peak_bytes[i];
        double fraction =
            memory->limit_bytes ? (double)peak->bytes / (double)memory->limit_bytes : 0.0;
        table_cell(&table, "%s", render_phase(peak->phase));
        table_cell_bytes(&table, peak->bytes);
        text_clear(&load);
        text_bar(&load, style, fraction, 20);
        out->failed |= load.failed;
        table_cell_colored(&table, render_load_color(fraction), "%s %.0f %%", text_get(&load),
                           fraction * 100.0);
    }
    text_put(out, "peaks of the last step, highest rank\n");
    table_print(&table, style, 2, out);
    table_fini(&table);
    text_fini(&load);
}

static void put_phase_plan(const Ballast__Control__V1__MemoryReply *memory,
                           const struct style *style, struct text *out)
{
    const Ballast__V1__PhasePlan *plan = memory->at_peak;
    char bytes[UNITS_TEXT_BYTES];
    text_color(out, style, COLOR_BOLD);
    text_printf(out, "%s peak", render_phase(plan->phase));
    text_color_end(out, style, COLOR_BOLD);
    text_printf(out, ": %s in use, committed ", units_format_bytes(plan->peak_bytes, bytes));
    render_load(plan->committed_bytes, memory->limit_bytes, style, out);
    text_put(out, "\n");
    render_entries(plan->at_peak, plan->n_at_peak, 2, style, out);
    if (plan->n_live == 0)
        return;
    text_put(out, "\nalive at the peak, largest first\n");
    render_live(plan->live, plan->n_live, 2, style, out);
}

void render_memory(const Ballast__Control__V1__MemoryReply *memory, const struct style *style,
                   struct text *out)
{
    if (memory->at_peak) {
        put_phase_plan(memory, style, out);
        return;
    }
    if (memory->n_ranks == 0)
        text_put(out, "no rank has reported yet\n");
    for (size_t i = 0; i < memory->n_ranks; i++) {
        put_rank(memory->ranks[i], style, out);
        text_put(out, "\n");
    }
    put_measured(memory, style, out);
}

/* Plan against actual, phase by phase. */
static void put_plan_against_actual(const Ballast__V1__OomReport *report, const struct style *style,
                                    struct text *out)
{
    static const char *const headings[] = {"phase", ">planned", ">actual", NULL};
    if (report->n_planned_bytes == 0)
        return;
    struct table table;
    table_init(&table, headings);
    for (size_t i = 0; i < report->n_planned_bytes; i++) {
        Ballast__V1__Phase phase = report->planned_bytes[i]->phase;
        table_cell(&table, "%s", render_phase(phase));
        table_cell_bytes(&table, report->planned_bytes[i]->bytes);
        table_cell_bytes(&table,
                         render_phase_bytes(report->actual_bytes, report->n_actual_bytes, phase));
    }
    text_put(out, "\nplan against actual\n");
    table_print(&table, style, 2, out);
    table_fini(&table);
}

static void put_remedies(const Ballast__V1__OomReport *report, const struct style *style,
                         struct text *out)
{
    static const char *const headings[] = {">",         "change", "fits",         ">forward",
                                           ">backward", ">step",  "what it does", NULL};
    text_put(out, "\nremedies, best first\n");
    if (report->n_remedies == 0) {
        text_put(out, "  none known: give the run more memory or a smaller model or sequence\n");
        return;
    }
    struct table table;
    struct text changes = {0};
    table_init(&table, headings);
    for (size_t i = 0; i < report->n_remedies; i++) {
        const Ballast__V1__Remedy *remedy = report->remedies[i];
        text_clear(&changes);
        for (size_t k = 0; k < remedy->n_changes; k++)
            text_printf(&changes, "%s%s=%s", k ? " " : "", remedy->changes[k]->key,
                        remedy->changes[k]->value);
        out->failed |= changes.failed;
        table_cell(&table, "%zu", i + 1);
        table_cell(&table, "%s", text_get(&changes));
        table_cell_colored(&table, remedy->fits ? COLOR_GREEN : COLOR_RED, "%s",
                           remedy->fits ? "yes" : "no");
        for (int phase = BALLAST__V1__PHASE__PHASE_FORWARD; phase <= BALLAST__V1__PHASE__PHASE_STEP;
             phase++)
            table_cell_bytes(&table, render_phase_bytes(remedy->peak_bytes, remedy->n_peak_bytes,
                                                        (Ballast__V1__Phase)phase));
        table_cell(&table, "%s", remedy->text);
    }
    table_print(&table, style, 2, out);
    table_fini(&table);
    text_fini(&changes);
}

void render_oom(const Ballast__V1__OomReport *report, const struct style *style, struct text *out)
{
    char asked[UNITS_TEXT_BYTES];
    text_color(out, style, COLOR_RED);
    text_put(out, "out of memory");
    text_color_end(out, style, COLOR_RED);
    text_printf(out, " in %s of step %" PRIu64 ", micro-step %" PRIu32 ", rank %" PRId32,
                render_phase(report->phase), report->step, report->micro_step, report->rank);
    if (*report->time) {
        text_put(out, ", ");
        text_put_wire(out, report->time);
    }
    text_printf(out, "\n  asked     %s for ", units_format_bytes(report->asked_bytes, asked));
    text_put_wire(out, *report->tensor ? report->tensor : "-");
    text_printf(out, " (%s, %s)\n  held      ", render_category(report->category),
                render_tier(report->tier));
    render_load(report->held_bytes, report->limit_bytes, style, out);
    text_put(out, "\n  cause     ");
    text_put_wire(out, *report->cause ? report->cause : "-");
    if (*report->outcome) {
        text_put(out, "\n  outcome   ");
        text_put_wire(out, report->outcome);
    }
    text_put(out, "\n\nwho held what\n");
    render_entries(report->held, report->n_held, 2, style, out);
    if (report->n_live) {
        text_put(out, "\nalive then, largest first\n");
        render_live(report->live, report->n_live, 2, style, out);
    }
    put_plan_against_actual(report, style, out);
    put_remedies(report, style, out);
}
