/* Status, watch, ranks, steps, events as text. Pure. */
#include "client/render.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>
#include "client/table.h"
#include "proto/account.h"
#include "proto/base/units.h"
#include "proto/convert.h"
#include "proto/strategy.h"

typedef Ballast__Control__V1__StatusReply status_reply;

enum {
    BAR_CELLS = 20,
    WATCH_COLUMNS = 67, /* of a watch line before its strategy */
};

const char *render_phase(Ballast__V1__Phase wire)
{
    enum phase phase;
    return convert_phase_from_wire(wire, &phase) ? phase_name(phase) : "-";
}

const char *render_category(Ballast__V1__Category wire)
{
    enum category category;
    return convert_category_from_wire(wire, &category) ? category_name(category) : "-";
}

const char *render_tier(Ballast__V1__Tier wire)
{
    enum tier tier;
    return convert_tier_from_wire(wire, &tier) ? tier_name(tier) : "-";
}

uint64_t render_phase_bytes(Ballast__V1__PhaseBytes *const *list, size_t n,
                            Ballast__V1__Phase phase)
{
    for (size_t i = 0; i < n; i++)
        if (list[i]->phase == phase)
            return list[i]->bytes;
    return 0;
}

enum color render_load_color(double fraction)
{
    return fraction > 1.0 ? COLOR_RED : fraction > 0.8 ? COLOR_YELLOW : COLOR_GREEN;
}

void render_load(uint64_t bytes, uint64_t limit_bytes, const struct style *style, struct text *out)
{
    char held[UNITS_TEXT_BYTES], limit[UNITS_TEXT_BYTES];
    text_put(out, units_format_bytes(bytes, held));
    if (limit_bytes == 0)
        return;
    double fraction = (double)bytes / (double)limit_bytes;
    text_printf(out, " of %s  ", units_format_bytes(limit_bytes, limit));
    text_color(out, style, render_load_color(fraction));
    text_bar(out, style, fraction, BAR_CELLS);
    text_printf(out, " %.0f %%", fraction * 100.0);
    text_color_end(out, style, render_load_color(fraction));
}

/* Does a key say something? Its default does not, nor does a dial of a mode that is off. */
static bool setting_speaks(const Ballast__V1__Setting *setting, const struct strategy *defaults,
                           Ballast__V1__Setting *const *all, size_t n_all)
{
    if (strcmp(setting->key, "micro_batch") == 0)
        return true;
    const char *dial_of = NULL;
    if (strcmp(setting->key, "checkpointing.layers") == 0)
        dial_of = "checkpointing";
    if (strcmp(setting->key, "offload.activations.layers") == 0)
        dial_of = "offload.activations";
    /* The default of these two is the number of layers, which a client does not know. */
    for (size_t i = 0; dial_of && i < n_all; i++)
        if (strcmp(all[i]->key, dial_of) == 0)
            return strcmp(all[i]->value, "none") != 0;
    char value[STRATEGY_VALUE_BYTES];
    return !strategy_get(defaults, setting->key, value) || strcmp(value, setting->value) != 0;
}

void render_settings(Ballast__V1__Setting *const *settings, size_t n_settings, struct text *out)
{
    struct strategy_limits limits = {.n_layers = 0,
                                     .world_size = 1,
                                     .global_batch = 1,
                                     .seq_len = 1,
                                     .n_heads = 1,
                                     .n_kv_heads = 1};
    struct strategy defaults;
    strategy_default(&defaults, &limits);
    bool any = false;
    for (size_t i = 0; i < n_settings; i++) {
        if (!setting_speaks(settings[i], &defaults, settings, n_settings))
            continue;
        if (any)
            text_put(out, " ");
        text_put_wire(out, settings[i]->key);
        text_put(out, "=");
        text_put_wire(out, settings[i]->value);
        any = true;
    }
    if (!any)
        text_put(out, "default");
}

static enum color health_color(const char *health)
{
    return strcmp(health, "OK") == 0     ? COLOR_GREEN
           : strcmp(health, "WARN") == 0 ? COLOR_YELLOW
                                         : COLOR_RED;
}

/* The first line: health, what the run is doing, which run. Reasons follow below the rows. */
static void put_health(const status_reply *status, const struct style *style, struct text *out)
{
    text_color(out, style, health_color(status->health));
    text_put_wire(out, *status->health ? status->health : "UNKNOWN");
    text_color_end(out, style, health_color(status->health));
    text_put(out, "  ");
    text_put_wire(out, status->paused ? "paused" : *status->doing ? status->doing : "-");
    text_put(out, "  run ");
    text_color(out, style, COLOR_BOLD);
    text_put_wire(out, *status->run_id ? status->run_id : "-");
    text_color_end(out, style, COLOR_BOLD);
    text_put(out, "\n");
}

/* A row of the screen: a label and the text in `line`, which is used up. */
static void add_row(struct table *rows, const char *label, enum color color, struct text *line)
{
    table_cell_colored(rows, COLOR_DIM, "%s", label);
    table_cell_colored(rows, color, "%s", text_get(line));
    rows->cells.failed |= line->failed;
    text_clear(line);
}

static void add_progress(const status_reply *status, const struct style *style, struct text *line)
{
    char left[UNITS_TEXT_BYTES], up[UNITS_TEXT_BYTES];
    double fraction = status->n_steps ? (double)status->step / (double)status->n_steps : 0.0;
    text_printf(line, "%" PRIu64, status->step);
    if (status->n_steps) {
        text_printf(line, " of %" PRIu64 " steps  ", status->n_steps);
        text_bar(line, style, fraction, BAR_CELLS);
        text_printf(line, " %.1f %%", fraction * 100.0);
    } else {
        text_put(line, " steps");
    }
    double step_ms = status->last_step ? status->last_step->step_ms : 0.0;
    if (status->n_steps > status->step && isfinite(step_ms) && step_ms > 0.0)
        text_printf(
            line, ", %s left",
            units_format_duration((double)(status->n_steps - status->step) * step_ms / 1e3, left));
    if (status->uptime_ms)
        text_printf(line, ", up %s", units_format_duration((double)status->uptime_ms / 1e3, up));
}

static void add_last_step(const Ballast__V1__StepRecord *step, struct text *line)
{
    char rate[UNITS_TEXT_BYTES], took[UNITS_TEXT_BYTES];
    if (!step) {
        text_put(line, "no step completed yet");
        return;
    }
    text_printf(line, "loss %.4f, grad norm %.3g, lr %.3g, ", step->loss, step->grad_norm,
                step->lr);
    text_printf(line, "%s tokens/s, %s a step", units_format_count(step->tokens_per_second, rate),
                units_format_duration(step->step_ms / 1e3, took));
    if (step->skipped)
        text_put(line, " (skipped: a gradient was not finite)");
}

static void add_disk(const status_reply *status, struct text *line)
{
    char used[UNITS_TEXT_BYTES], space[UNITS_TEXT_BYTES];
    /* A run's folder is never empty: the daemon has not measured it yet. */
    if (status->disk_used_bytes == 0 && status->disk_free_bytes == 0)
        text_put(line, "not measured yet");
    else
        text_printf(line, "%s used, %s free", units_format_bytes(status->disk_used_bytes, used),
                    units_format_bytes(status->disk_free_bytes, space));
    if (status->has_save)
        text_printf(line, "; last save at step %" PRIu64, status->last_save_step);
    else
        text_put(line, "; no save yet");
}

static void put_rows(const status_reply *status, const struct style *style, struct text *out)
{
    static const char *const headings[] = {"", "", NULL};
    struct table rows;
    struct text line = {0};
    table_init(&rows, headings);
    for (size_t i = 0; i < status->n_reasons; i++) {
        text_put(&line, status->reasons[i]);
        add_row(&rows, "!", health_color(status->health), &line);
    }
    text_put(&line, *status->run_dir ? status->run_dir : "-");
    add_row(&rows, "directory", COLOR_NONE, &line);
    text_put(&line, *status->model ? status->model : "-");
    add_row(&rows, "model", COLOR_NONE, &line);
    text_printf(&line, "%s, %" PRIu32 " of %" PRIu32 " ranks linked",
                *status->device ? status->device : "-", status->linked_ranks, status->world_size);
    add_row(&rows, "device", status->linked_ranks < status->world_size ? COLOR_RED : COLOR_NONE,
            &line);
    add_progress(status, style, &line);
    add_row(&rows, "progress", COLOR_NONE, &line);
    add_last_step(status->last_step, &line);
    add_row(&rows, "training",
            status->last_step && status->last_step->skipped ? COLOR_YELLOW : COLOR_NONE, &line);
    render_settings(status->strategy, status->n_strategy, &line);
    text_printf(&line, " (generation %" PRIu64 ")", status->generation);
    add_row(&rows, "strategy", COLOR_NONE, &line);
    add_disk(status, &line);
    add_row(&rows, "disk", COLOR_NONE, &line);
    table_print(&rows, style, 2, out);
    table_fini(&rows);
    text_fini(&line);
}

static void put_peaks(const status_reply *status, const struct style *style, struct text *out)
{
    static const char *const headings[] = {"phase",  ">planned",           ">measured",
                                           ">limit", "committed of limit", NULL};
    const Ballast__V1__PlanSummary *plan = status->plan;
    const Ballast__V1__StepRecord *step = status->last_step;
    if (!plan || plan->n_phases == 0)
        return;
    struct table table;
    struct text bar = {0};
    table_init(&table, headings);
    for (size_t i = 0; i < plan->n_phases; i++) {
        const Ballast__V1__PhasePlan *phase = plan->phases[i];
        uint64_t measured =
            step ? render_phase_bytes(step->peak_bytes, step->n_peak_bytes, phase->phase) : 0;
        double fraction =
            plan->limit_bytes ? (double)phase->committed_bytes / (double)plan->limit_bytes : 0.0;
        /* The step's own record of the plan: the summary may already be of the next one. */
        uint64_t planned =
            step ? render_phase_bytes(step->planned_bytes, step->n_planned_bytes, phase->phase) : 0;
        bool differs = measured && planned && measured != planned;
        char text[UNITS_TEXT_BYTES];
        table_cell(&table, "%s", render_phase(phase->phase));
        table_cell_bytes(&table, phase->peak_bytes);
        table_cell_colored(&table, differs ? COLOR_RED : COLOR_NONE, "%s%s", differs ? "! " : "",
                           measured ? units_format_bytes(measured, text) : "-");
        table_cell_bytes(&table, plan->limit_bytes);
        text_clear(&bar);
        text_bar(&bar, style, fraction, BAR_CELLS);
        out->failed |= bar.failed;
        table_cell_colored(&table, render_load_color(fraction), "%s %.0f %%", text_get(&bar),
                           fraction * 100.0);
    }
    table_print(&table, style, 2, out);
    table_fini(&table);
    text_fini(&bar);
}

void render_status(const Ballast__Control__V1__StatusReply *status, const struct style *style,
                   struct text *out)
{
    put_health(status, style, out);
    put_rows(status, style, out);
    if (status->plan && status->plan->n_phases)
        text_put(out, "\n");
    put_peaks(status, style, out);
}

/* The largest measured peak of a step. */
static uint64_t highest_peak(const Ballast__V1__StepRecord *step)
{
    uint64_t peak = 0;
    for (size_t i = 0; step && i < step->n_peak_bytes; i++)
        if (step->peak_bytes[i]->bytes > peak)
            peak = step->peak_bytes[i]->bytes;
    return peak;
}

void render_watch_line(const Ballast__Control__V1__WatchReply *watch, bool with_heading,
                       const struct style *style, struct text *out)
{
    const status_reply *status = watch->status;
    if (!status)
        return;
    if (with_heading) {
        text_color(out, style, COLOR_DIM);
        text_printf(out, "%7s  %-9s %8s %9s %8s %9s %8s  %s", "step", "doing", "loss", "grad norm",
                    "tokens/s", "step time", "peak", "strategy");
        text_color_end(out, style, COLOR_DIM);
        text_put(out, "\n");
    }
    const Ballast__V1__StepRecord *step = status->last_step;
    struct text doing = {0};
    text_put_wire(&doing, status->paused ? "paused" : *status->doing ? status->doing : "-");
    text_printf(out, "%7" PRIu64 "  %-9s ", status->step, text_get(&doing));
    out->failed |= doing.failed;
    text_fini(&doing);
    if (step) {
        char rate[UNITS_TEXT_BYTES], took[UNITS_TEXT_BYTES], peak[UNITS_TEXT_BYTES];
        text_printf(out, "%8.4f %9.3g %8s %9s %8s  ", step->loss, step->grad_norm,
                    units_format_count(step->tokens_per_second, rate),
                    units_format_duration(step->step_ms / 1e3, took),
                    units_format_bytes(highest_peak(step), peak));
    } else {
        text_printf(out, "%8s %9s %8s %9s %8s  ", "-", "-", "-", "-", "-");
    }
    struct text rest = {0};
    if (strcmp(status->health, "OK") != 0)
        text_printf(&rest, "%s ", status->health);
    if (watch->dropped)
        text_printf(&rest, "(%" PRIu64 " samples lost) ", watch->dropped);
    render_settings(status->strategy, status->n_strategy, &rest);
    text_color(out, style,
               strcmp(status->health, "OK") == 0 ? COLOR_NONE : health_color(status->health));
    text_put_cut(out, &rest, style->width > WATCH_COLUMNS ? style->width - WATCH_COLUMNS : 0);
    text_color_end(out, style,
                   strcmp(status->health, "OK") == 0 ? COLOR_NONE : health_color(status->health));
    text_put(out, "\n");
    text_fini(&rest);
}

void render_watch_screen(const Ballast__Control__V1__WatchReply *watch, const struct style *style,
                         struct text *out)
{
    if (watch->status)
        render_status(watch->status, style, out);
    text_put(out, "\n");
    render_ranks(watch->ranks, watch->n_ranks, style, out);
}

static uint64_t device_bytes(const Ballast__V1__RankState *rank)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < rank->n_memory; i++)
        if (rank->memory[i]->tier == BALLAST__V1__TIER__TIER_DEVICE)
            bytes += rank->memory[i]->bytes;
    return bytes;
}

void render_ranks(Ballast__V1__RankState *const *ranks, size_t n_ranks, const struct style *style,
                  struct text *out)
{
    static const char *const headings[] = {"rank",       "host",   ">pid",       "phase",
                                           ">step",      ">layer", "collective", ">in use",
                                           ">committed", ">limit", ">age",       NULL};
    struct table table;
    table_init(&table, headings);
    for (size_t i = 0; i < n_ranks; i++) {
        const Ballast__V1__RankState *rank = ranks[i];
        char age[UNITS_TEXT_BYTES];
        table_cell_colored(&table, rank->linked ? COLOR_NONE : COLOR_RED, "%" PRIu32 "%s",
                           rank->rank, rank->linked ? "" : " lost");
        table_cell(&table, "%s", *rank->host ? rank->host : "-");
        table_cell(&table, "%" PRId32, rank->pid);
        table_cell(&table, "%s", render_phase(rank->phase));
        table_cell(&table, "%" PRIu64 ".%" PRIu32, rank->step, rank->micro_step);
        if (rank->layer < 0)
            table_cell(&table, "-");
        else
            table_cell(&table, "%" PRId32, rank->layer);
        if (*rank->collective)
            table_cell(&table, "%s #%" PRIu64, rank->collective, rank->collective_number);
        else
            table_cell(&table, "-");
        table_cell_bytes(&table, device_bytes(rank));
        table_cell_bytes(&table, rank->committed_bytes);
        table_cell_bytes(&table, rank->limit_bytes);
        table_cell_colored(&table, rank->age_ms > 5000 ? COLOR_RED : COLOR_NONE, "%s",
                           units_format_duration((double)rank->age_ms / 1e3, age));
    }
    table_print(&table, style, 0, out);
    table_fini(&table);
}

void render_steps(Ballast__V1__StepRecord *const *steps, size_t n_steps, const struct style *style,
                  struct text *out)
{
    static const char *const headings[] = {">step", ">loss", ">grad norm",  ">lr",      ">tokens/s",
                                           ">time", ">peak", ">generation", "strategy", NULL};
    struct table table;
    struct text settings = {0};
    table_init(&table, headings);
    for (size_t i = 0; i < n_steps; i++) {
        const Ballast__V1__StepRecord *step = steps[i];
        char rate[UNITS_TEXT_BYTES], took[UNITS_TEXT_BYTES];
        table_cell(&table, "%" PRIu64, step->step);
        table_cell(&table, "%.4f", step->loss);
        table_cell(&table, "%.3g", step->grad_norm);
        table_cell(&table, "%.3g", step->lr);
        table_cell(&table, "%s", units_format_count(step->tokens_per_second, rate));
        table_cell(&table, "%s", units_format_duration(step->step_ms / 1e3, took));
        table_cell_bytes(&table, highest_peak(step));
        table_cell(&table, "%" PRIu64, step->generation);
        text_clear(&settings);
        render_settings(step->strategy, step->n_strategy, &settings);
        out->failed |= settings.failed;
        table_cell(&table, "%s%s", text_get(&settings), step->skipped ? " (skipped)" : "");
    }
    table_print(&table, style, 0, out);
    table_fini(&table);
    text_fini(&settings);
}

static enum color event_color(const char *type)
{
    static const char *const bad[] = {"oom", "rank_lost", "daemon_lost", NULL};
    static const char *const odd[] = {"refused", "skip", NULL};
    for (size_t i = 0; bad[i]; i++)
        if (strcmp(type, bad[i]) == 0)
            return COLOR_RED;
    for (size_t i = 0; odd[i]; i++)
        if (strcmp(type, odd[i]) == 0)
            return COLOR_YELLOW;
    return COLOR_NONE;
}

void render_events(Ballast__V1__Event *const *events, size_t n_events, const struct style *style,
                   struct text *out)
{
    static const char *const headings[] = {"time", "type", ">step", "rank", "who", "text", NULL};
    struct table table;
    table_init(&table, headings);
    for (size_t i = 0; i < n_events; i++) {
        const Ballast__V1__Event *event = events[i];
        table_cell(&table, "%s", event->time);
        table_cell_colored(&table, event_color(event->type), "%s", event->type);
        table_cell(&table, "%" PRIu64, event->step);
        if (event->rank < 0)
            table_cell(&table, "-");
        else
            table_cell(&table, "%" PRId32, event->rank);
        table_cell(&table, "%s", *event->who ? event->who : "-");
        table_cell(&table, "%s", event->text);
    }
    table_print(&table, style, 0, out);
    table_fini(&table);
}

void render_event_line(const Ballast__V1__Event *event, const struct style *style, struct text *out)
{
    text_put_wire(out, event->time);
    text_put(out, "  ");
    text_color(out, style, event_color(event->type));
    text_put_wire(out, event->type);
    text_color_end(out, style, event_color(event->type));
    text_printf(out, "  step %" PRIu64 "  ", event->step);
    if (event->rank >= 0)
        text_printf(out, "rank %" PRId32 "  ", event->rank);
    text_put_wire(out, event->text);
    text_put(out, "\n");
}
