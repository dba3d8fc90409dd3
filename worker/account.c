/* Printing the memory account. See account.h. */
#include "worker/account.h"
#include <jansson.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include "proto/json.h"

static void print_model(const struct account_view *view, FILE *out)
{
    char count[UNITS_TEXT_BYTES];
    char text[STRATEGY_TEXT_BYTES];
    const struct model_spec *spec = view->spec;
    const struct strategy_limits *limits = &view->options->limits;
    fprintf(out, "model      %s: %u layers, width %u, %u heads (%u key/value), vocabulary %u, "
                 "%s parameters\n",
            spec->name, spec->n_layers, spec->width, spec->n_heads, spec->n_kv_heads, spec->vocab,
            units_format_count((double)spec_n_parameters(spec), count));
    fprintf(out, "batch      %u sequences of %u tokens on %u rank%s: micro-batch %u, "
                 "accumulation %u\n",
            limits->global_batch, limits->seq_len, limits->world_size,
            limits->world_size == 1 ? "" : "s", view->strategy->micro_batch,
            strategy_accumulation(view->strategy, limits));
    fprintf(out, "precision  %s\n",
            view->dtype == DTYPE_FP32 ? "fp32"
                                      : "bf16 weights and activations, fp32 master and gradients");
    struct strategy plain;
    strategy_default(&plain, limits);
    strategy_format(&plain, view->strategy, text);
    fprintf(out, "strategy   %s\n", text[0] == '\0' ? "all defaults" : text);
}

static void print_bytes(FILE *out, uint64_t bytes)
{
    char text[UNITS_TEXT_BYTES];
    fprintf(out, " %11s", bytes == 0 ? "-" : units_format_bytes(bytes, text));
}

static void print_phases(const struct account_view *view, FILE *out)
{
    const struct plan *plan = view->plan;
    fprintf(out, "\n%-10s %11s %11s", "phase", "peak", "committed");
    for (int c = 0; c < N_CATEGORIES; c++) {
        fprintf(out, " %11s", category_name((enum category)c));
    }
    fprintf(out, "\n");
    for (int phase = 0; phase < N_PHASES; phase++) {
        const struct plan_phase *p = &plan->phases[phase];
        if (!p->used) {
            continue;
        }
        fprintf(out, "%-10s", phase_name((enum phase)phase));
        print_bytes(out, p->peak_bytes);
        print_bytes(out, p->committed_bytes);
        for (int c = 0; c < N_CATEGORIES; c++) {
            print_bytes(out, p->at_peak[c]);
        }
        fprintf(out, "\n");
    }
}

/* The category that holds most at the binding phase's peak. */
static enum category binding_category(const struct plan *plan)
{
    int most = 0;
    for (int c = 1; c < N_CATEGORIES; c++) {
        if (plan->phases[plan->binding_phase].at_peak[c] >
            plan->phases[plan->binding_phase].at_peak[most]) {
            most = c;
        }
    }
    return (enum category)most;
}

static void print_summary(const struct account_view *view, FILE *out)
{
    char a[UNITS_TEXT_BYTES];
    char b[UNITS_TEXT_BYTES];
    const struct plan *plan = view->plan;
    fprintf(out, "\nbinding    %s, mostly %s: %s of device memory per rank",
            phase_name(plan->binding_phase), category_name(binding_category(plan)),
            units_format_bytes(plan->committed_bytes, a));
    if (view->limit_bytes != 0) {
        fprintf(out, ", limit %s: %s", units_format_bytes(view->limit_bytes, b),
                plan->committed_bytes <= view->limit_bytes ? "fits" : "DOES NOT FIT");
    }
    fprintf(out, "\nhost       %s per rank\n",
            units_format_bytes(plan_host_bytes(&plan->resident), a));
    fprintf(out, "packing    %.2f %% of the workspace is live at its peak\n",
            100.0 * plan->packing_efficiency);
    fprintf(out, "work       %s FLOP and %s sent per rank and step\n",
            units_format_count(view->cost->flops, a),
            units_format_bytes(view->cost->comm_bytes, b));
    struct plan_live live[8];
    const size_t n = plan_live_set(plan, plan->binding_phase, live, 8);
    fprintf(out, "largest    live in %s:", phase_name(plan->binding_phase));
    for (size_t i = 0; i < n && i < 5; i++) {
        fprintf(out, "%s %s x %u = %s", i == 0 ? "" : ",", live[i].name, live[i].count,
                units_format_bytes(live[i].bytes, a));
    }
    fprintf(out, "\n");
}

void account_print(const struct account_view *view, FILE *out)
{
    print_model(view, out);
    print_phases(view, out);
    print_summary(view, out);
    fflush(out);
}

/* ---- JSON ---- */

static json_t *phase_json(const struct plan_phase *p)
{
    json_t *categories = json_object();
    for (int c = 0; c < N_CATEGORIES && categories != NULL; c++) {
        if (json_object_set_new(categories, category_name((enum category)c),
                                json_count(p->at_peak[c])) != 0) {
            json_decref(categories);
            categories = NULL;
        }
    }
    return json_pack("{s:I, s:I, s:I, s:o*}", "peak_bytes", (json_int_t)p->peak_bytes,
                     "committed_bytes", (json_int_t)p->committed_bytes, "workspace_bytes",
                     (json_int_t)p->workspace_bytes, "at_peak", categories);
}

static json_t *strategy_json(const struct strategy *strategy)
{
    json_t *object = json_object();
    char value[STRATEGY_VALUE_BYTES];
    for (size_t i = 0; i < strategy_n_keys() && object != NULL; i++) {
        const char *key = strategy_key(i)->name;
        if (!strategy_get(strategy, key, value) ||
            json_object_set_new(object, key, json_string(value)) != 0) {
            json_decref(object);
            object = NULL;
        }
    }
    return object;
}

static json_t *account_json(const struct account_view *view)
{
    const struct plan *plan = view->plan;
    json_t *phases = json_object();
    for (int phase = 0; phase < N_PHASES && phases != NULL; phase++) {
        if (plan->phases[phase].used &&
            json_object_set_new(phases, phase_name((enum phase)phase),
                                phase_json(&plan->phases[phase])) != 0) {
            json_decref(phases);
            phases = NULL;
        }
    }
    const bool fits = view->limit_bytes == 0 || plan->committed_bytes <= view->limit_bytes;
    return json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:o*, s:o*, s:s, s:I, s:I, s:I, s:b, s:f, s:f, s:I, s:I}",
        "model", view->spec->name, "precision", dtype_name(view->dtype), "parameters", (json_int_t)spec_n_parameters(view->spec),
        "world_size", (json_int_t)view->options->limits.world_size, "seq_len",
        (json_int_t)view->options->limits.seq_len, "global_batch",
        (json_int_t)view->options->limits.global_batch, "accumulation",
        (json_int_t)strategy_accumulation(view->strategy, &view->options->limits), "strategy",
        strategy_json(view->strategy), "phases", phases, "binding_phase",
        phase_name(plan->binding_phase), "peak_bytes", (json_int_t)plan->peak_bytes,
        "committed_bytes", (json_int_t)plan->committed_bytes, "limit_bytes",
        (json_int_t)view->limit_bytes, "fits", (int)fits, "packing_efficiency",
        plan->packing_efficiency, "flops_per_step", view->cost->flops, "comm_bytes_per_step",
        (json_int_t)view->cost->comm_bytes, "host_bytes",
        (json_int_t)plan_host_bytes(&plan->resident));
}

enum status account_print_json(const struct account_view *view, FILE *out, struct failure *why)
{
    json_t *json = account_json(view);
    char *text = json == NULL ? NULL : json_format(json, JSON_LINE_FLAGS);
    json_decref(json);
    if (text == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory to print the plan");
    }
    fprintf(out, "%s\n", text);
    fflush(out);
    heap_free(text);
    return STATUS_OK;
}
