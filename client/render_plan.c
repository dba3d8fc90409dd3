/* Plans: one, two side by side, and the one line that says what a change did. Pure. */
#include "client/render.h"

#include <inttypes.h>
#include <string.h>
#include "client/table.h"
#include "proto/account.h"
#include "proto/base/units.h"

enum { BAR_CELLS = 20 };

typedef Ballast__V1__PlanSummary plan_summary;

static const Ballast__V1__PhasePlan *find_phase(const plan_summary *plan, Ballast__V1__Phase phase)
{
    for (size_t i = 0; plan && i < plan->n_phases; i++)
        if (plan->phases[i]->phase == phase)
            return plan->phases[i];
    return NULL;
}

static const char *find_value(const plan_summary *plan, const char *key)
{
    for (size_t i = 0; i < plan->n_strategy; i++)
        if (strcmp(plan->strategy[i]->key, key) == 0)
            return plan->strategy[i]->value;
    return "-";
}

static uint64_t entry_bytes(const Ballast__V1__PhasePlan *phase, Ballast__V1__Tier tier,
                            Ballast__V1__Category category)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < phase->n_at_peak; i++)
        if (phase->at_peak[i]->tier == tier &&
            (category == BALLAST__V1__CATEGORY__CATEGORY_UNSPECIFIED ||
             phase->at_peak[i]->category == category))
            bytes += phase->at_peak[i]->bytes;
    return bytes;
}

/* The most a tier holds in any phase. */
static uint64_t tier_peak(const plan_summary *plan, Ballast__V1__Tier tier)
{
    uint64_t peak = 0;
    for (size_t i = 0; i < plan->n_phases; i++) {
        uint64_t bytes =
            entry_bytes(plan->phases[i], tier, BALLAST__V1__CATEGORY__CATEGORY_UNSPECIFIED);
        if (bytes > peak)
            peak = bytes;
    }
    return peak;
}

static void put_verdict(const plan_summary *plan, const struct style *style, struct text *out)
{
    char limit[UNITS_TEXT_BYTES];
    if (plan->fits)
        text_colored(out, style, COLOR_GREEN, "fits");
    else
        text_colored(out, style, COLOR_RED, "does not fit");
    if (plan->limit_bytes)
        text_printf(out, " in %s", units_format_bytes(plan->limit_bytes, limit));
    if (*plan->binding) {
        text_put(out, "; what binds is ");
        text_put_wire(out, plan->binding);
    }
    text_put(out, "\n");
}

static void put_work(const plan_summary *plan, struct text *out)
{
    char number[UNITS_TEXT_BYTES];
    text_printf(out, "%s parameters", units_format_count((double)plan->n_parameters, number));
    text_printf(out, ", %" PRIu32 " micro-step%s a step", plan->accumulation,
                plan->accumulation == 1 ? "" : "s");
    text_printf(out, ", %sFLOP a step", units_format_count(plan->flops_per_step, number));
    text_printf(out, ", %s exchanged", units_format_bytes(plan->comm_bytes_per_step, number));
    text_put(out, "\n");
    if (plan->step_ms > 0.0)
        text_printf(out, "estimated step time %s\n",
                    units_format_duration(plan->step_ms / 1e3, number));
    if (plan->packing_efficiency > 0.0)
        text_printf(out, "packing efficiency of the workspace %.2f %%\n",
                    plan->packing_efficiency * 100.0);
}

void render_plan(const Ballast__V1__PlanSummary *plan, const struct style *style, struct text *out)
{
    static const char *const headings[] = {"phase",        ">params", ">grads", ">optimizer",
                                           ">activations", ">temp",   ">comm",  ">external",
                                           ">peak",        ">used",   NULL};
    text_put(out, "strategy ");
    render_settings(plan->strategy, plan->n_strategy, out);
    text_put(out, "\n");
    struct table table;
    table_init(&table, headings);
    for (size_t i = 0; i < plan->n_phases; i++) {
        const Ballast__V1__PhasePlan *phase = plan->phases[i];
        table_cell(&table, "%s", render_phase(phase->phase));
        for (int category = 1; category <= N_CATEGORIES; category++)
            table_cell_bytes(&table, entry_bytes(phase, BALLAST__V1__TIER__TIER_DEVICE,
                                                 (Ballast__V1__Category)category));
        table_cell_bytes(&table, phase->peak_bytes);
        double fraction =
            plan->limit_bytes ? (double)phase->committed_bytes / (double)plan->limit_bytes : 0.0;
        table_cell_colored(&table, render_load_color(fraction), "%.0f %%", fraction * 100.0);
    }
    table_print(&table, style, 0, out);
    table_fini(&table);
    for (int tier = BALLAST__V1__TIER__TIER_HOST; tier <= BALLAST__V1__TIER__TIER_NVME; tier++) {
        uint64_t bytes = tier_peak(plan, (Ballast__V1__Tier)tier);
        char text[UNITS_TEXT_BYTES];
        if (bytes)
            text_printf(out, "%s memory: up to %s\n", render_tier((Ballast__V1__Tier)tier),
                        units_format_bytes(bytes, text));
    }
    put_verdict(plan, style, out);
    put_work(plan, out);
}

/* "checkpointing none -> block:1, micro_batch 4 -> 2" */
static void put_strategy_change(const plan_summary *before, const plan_summary *after,
                                struct text *out)
{
    bool any = false;
    for (size_t i = 0; i < after->n_strategy; i++) {
        const Ballast__V1__Setting *setting = after->strategy[i];
        const char *old = find_value(before, setting->key);
        if (strcmp(old, setting->value) == 0)
            continue;
        text_put(out, any ? ", " : "");
        text_put_wire(out, setting->key);
        text_put(out, " ");
        text_put_wire(out, old);
        text_put(out, " -> ");
        text_put_wire(out, setting->value);
        any = true;
    }
    if (!any)
        text_put(out, "strategy unchanged");
}

static void cell_difference(struct table *table, uint64_t before, uint64_t after)
{
    char text[UNITS_TEXT_BYTES];
    if (after == before)
        table_cell(table, "-");
    else if (after > before)
        table_cell_colored(table, COLOR_YELLOW, "+%s", units_format_bytes(after - before, text));
    else
        table_cell_colored(table, COLOR_GREEN, "-%s", units_format_bytes(before - after, text));
}

static void put_comparison_table(const plan_summary *before, const plan_summary *after,
                                 const struct style *style, struct text *out)
{
    static const char *const headings[] = {
        "phase", ">before", ">after", ">change", ">limit", "committed of limit, after", NULL};
    struct table table;
    struct text bar = {0};
    table_init(&table, headings);
    for (size_t i = 0; i < after->n_phases; i++) {
        const Ballast__V1__PhasePlan *phase = after->phases[i];
        const Ballast__V1__PhasePlan *old = find_phase(before, phase->phase);
        double fraction =
            after->limit_bytes ? (double)phase->committed_bytes / (double)after->limit_bytes : 0.0;
        table_cell(&table, "%s", render_phase(phase->phase));
        table_cell_bytes(&table, old ? old->peak_bytes : 0);
        table_cell_bytes(&table, phase->peak_bytes);
        cell_difference(&table, old ? old->peak_bytes : 0, phase->peak_bytes);
        table_cell_bytes(&table, after->limit_bytes);
        text_clear(&bar);
        text_bar(&bar, style, fraction, BAR_CELLS);
        out->failed |= bar.failed;
        table_cell_colored(&table, render_load_color(fraction), "%s %.0f %%", text_get(&bar),
                           fraction * 100.0);
    }
    table_print(&table, style, 0, out);
    table_fini(&table);
    text_fini(&bar);
}

void render_comparison(const Ballast__V1__PlanSummary *before,
                       const Ballast__V1__PlanSummary *after, const struct style *style,
                       struct text *out)
{
    char old[UNITS_TEXT_BYTES], new[UNITS_TEXT_BYTES];
    put_strategy_change(before, after, out);
    text_put(out, "\n");
    put_comparison_table(before, after, style, out);
    for (int tier = BALLAST__V1__TIER__TIER_HOST; tier <= BALLAST__V1__TIER__TIER_NVME; tier++) {
        uint64_t was = tier_peak(before, (Ballast__V1__Tier)tier);
        uint64_t is = tier_peak(after, (Ballast__V1__Tier)tier);
        if (was || is)
            text_printf(out, "%s memory: up to %s -> %s\n", render_tier((Ballast__V1__Tier)tier),
                        units_format_bytes(was, old), units_format_bytes(is, new));
    }
    put_verdict(after, style, out);
    if (before->accumulation != after->accumulation)
        text_printf(out, "micro-steps a step %" PRIu32 " -> %" PRIu32 "\n", before->accumulation,
                    after->accumulation);
    if (after->step_ms > 0.0)
        text_printf(out, "estimated step time %s -> %s\n",
                    before->step_ms > 0.0 ? units_format_duration(before->step_ms / 1e3, old) : "-",
                    units_format_duration(after->step_ms / 1e3, new));
    if (before->flops_per_step > 0.0)
        text_printf(out, "floating-point operations a step %+.1f %%\n",
                    (after->flops_per_step / before->flops_per_step - 1.0) * 100.0);
}

/* "forward 1.23 GiB -> 820 MiB, backward ..." */
static void put_peak_change(const plan_summary *before, const plan_summary *after, struct text *out)
{
    bool any = false;
    for (size_t i = 0; i < after->n_phases; i++) {
        const Ballast__V1__PhasePlan *phase = after->phases[i];
        const Ballast__V1__PhasePlan *old = find_phase(before, phase->phase);
        char was[UNITS_TEXT_BYTES], is[UNITS_TEXT_BYTES];
        if (!old || old->peak_bytes == phase->peak_bytes)
            continue;
        text_printf(out, "%s%s %s -> %s", any ? ", " : "", render_phase(phase->phase),
                    units_format_bytes(old->peak_bytes, was),
                    units_format_bytes(phase->peak_bytes, is));
        any = true;
    }
    if (!any)
        text_put(out, "peaks unchanged");
}

void render_change(const Ballast__Control__V1__CommandReply *reply, struct text *out)
{
    char released[UNITS_TEXT_BYTES], took[UNITS_TEXT_BYTES];
    text_printf(out, "generation %" PRIu64 " from step %" PRIu64, reply->generation, reply->step);
    if (reply->before && reply->after) {
        text_put(out, ": ");
        put_strategy_change(reply->before, reply->after, out);
        text_put(out, "; ");
        put_peak_change(reply->before, reply->after, out);
    } else if (*reply->text) {
        text_put(out, ": ");
        text_put_wire(out, reply->text);
    }
    if (reply->released_bytes || reply->took_ms > 0.0)
        text_printf(out, "; released %s in %s", units_format_bytes(reply->released_bytes, released),
                    units_format_duration(reply->took_ms / 1e3, took));
    text_put(out, "\n");
}
