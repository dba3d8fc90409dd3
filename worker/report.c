/* What a run tells: events, steps, plans and shortages, to the log, the daemon and the files. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "proto/convert.h"
#include "proto/json.h"
#include "proto/json_parse.h"
#include "worker/run.h"
#include "worker/strategy/advise.h"

/* ---- events ---- */

static void send_event(struct run *run, const char *type, const char *who, int rank,
                       enum phase phase, const char *text, const char *details)
{
    char now[UNITS_TEXT_BYTES];
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    event.time = (char *)(uintptr_t)convert_now(now);
    event.type = (char *)(uintptr_t)type;
    event.step = run->step;
    event.rank = rank;
    event.phase = convert_phase_to_wire(phase);
    event.generation = run->generation;
    event.who = (char *)(uintptr_t)(who == NULL ? "" : who);
    event.text = (char *)(uintptr_t)text;
    if (details != NULL) {
        event.details_json = (char *)(uintptr_t)details;
    }
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_EVENT;
    message.event = &event;
    link_send(run->link, &message);
}

void run_event_at(struct run *run, const char *type, const char *who, int rank, enum phase phase,
                  json_t *details, const char *text)
{
    if (run->comm.rank == 0) {
        char *json = details == NULL ? NULL : json_format(details, JSON_LINE_FLAGS);
        log_info("%s: %s", type, text);
        send_event(run, type, who, rank, phase, text, json);
        heap_free(json);
    }
    json_decref(details);
}

/* The phase an event is about; most happen between two phases and are about none. */
static enum phase phase_of_event(const struct run *run, const char *type)
{
    static const struct {
        const char *type;
        enum phase phase;
    } phases[] = {{"start", PHASE_SETUP}, {"switch", PHASE_SWITCH}, {"save", PHASE_SAVE},
                  {"eval", PHASE_EVAL}};
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        if (strcmp(phases[i].type, type) == 0) {
            return phases[i].phase;
        }
    }
    return strcmp(type, "refused") == 0 ? run->phase : N_PHASES;
}

enum { EVENT_TEXT_BYTES = 1024 };

void run_event(struct run *run, const char *type, const char *who, const char *format, ...)
{
    char text[EVENT_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    run_event_at(run, type, who, -1, phase_of_event(run, type), NULL, text);
}

void run_event_with(struct run *run, const char *type, const char *who, json_t *details,
                    const char *format, ...)
{
    char text[EVENT_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    run_event_at(run, type, who, -1, phase_of_event(run, type), details, text);
}

/* ---- plans ---- */

/* One heap block holds a summary with everything it points to, so that freeing is one call. */
enum { SUMMARY_LIVE = 12 };

struct summary_block {
    Ballast__V1__PlanSummary summary;
    Ballast__V1__PhasePlan phases[N_PHASES];
    Ballast__V1__PhasePlan *phase_pointers[N_PHASES];
    Ballast__V1__MemoryEntry entries[N_PHASES][N_CATEGORIES];
    Ballast__V1__MemoryEntry *entry_pointers[N_PHASES][N_CATEGORIES];
    Ballast__V1__LiveBuffer live[N_PHASES][SUMMARY_LIVE];
    Ballast__V1__LiveBuffer *live_pointers[N_PHASES][SUMMARY_LIVE];
    Ballast__V1__Setting **settings; /* owned */
    char binding[64];
};

static void fill_phase(struct summary_block *block, const struct plan *plan, enum phase phase)
{
    const struct plan_phase *p = &plan->phases[phase];
    Ballast__V1__PhasePlan *out = &block->phases[phase];
    ballast__v1__phase_plan__init(out);
    out->phase = convert_phase_to_wire(phase);
    out->peak_bytes = p->peak_bytes;
    out->committed_bytes = p->committed_bytes;
    out->at_peak = block->entry_pointers[phase];
    for (int c = 0; c < N_CATEGORIES; c++) {
        if (p->at_peak[c] == 0) {
            continue;
        }
        Ballast__V1__MemoryEntry *entry = &block->entries[phase][c];
        ballast__v1__memory_entry__init(entry);
        entry->tier = convert_tier_to_wire(TIER_DEVICE);
        entry->category = convert_category_to_wire((enum category)c);
        entry->bytes = p->at_peak[c];
        out->at_peak[out->n_at_peak++] = entry;
    }
    struct plan_live lines[OOM_LIVE_LINES];
    const size_t n = plan_live_set(plan, phase, lines, OOM_LIVE_LINES);
    out->live = block->live_pointers[phase];
    for (size_t i = 0; i < n && i < SUMMARY_LIVE; i++) {
        Ballast__V1__LiveBuffer *live = &block->live[phase][i];
        ballast__v1__live_buffer__init(live);
        live->name = (char *)(uintptr_t)lines[i].name;
        live->tier = convert_tier_to_wire(TIER_DEVICE);
        live->category = convert_category_to_wire(lines[i].category);
        live->bytes = lines[i].bytes;
        live->count = lines[i].count;
        out->live[out->n_live++] = live;
    }
}

static void fill_binding(struct summary_block *block, const struct plan *plan)
{
    const struct plan_phase *p = &plan->phases[plan->binding_phase];
    int most = 0;
    for (int c = 1; c < N_CATEGORIES; c++) {
        most = p->at_peak[c] > p->at_peak[most] ? c : most;
    }
    snprintf(block->binding, sizeof block->binding, "%s: %s", phase_name(plan->binding_phase),
             category_name((enum category)most));
}

Ballast__V1__PlanSummary *run_plan_summary(const struct run *run, const struct strategy *strategy,
                                           const struct plan *plan,
                                           const struct rehearsal_cost *cost)
{
    struct summary_block *block = heap_calloc(1, sizeof *block);
    if (block == NULL) {
        return NULL;
    }
    Ballast__V1__PlanSummary *summary = &block->summary;
    ballast__v1__plan_summary__init(summary);
    if (convert_strategy_to_settings(NULL, strategy, &block->settings, &summary->n_strategy) !=
        STATUS_OK) {
        heap_free(block);
        return NULL;
    }
    summary->strategy = block->settings;
    summary->phases = block->phase_pointers;
    for (int phase = 0; phase < N_PHASES; phase++) {
        if (plan->phases[phase].used) {
            fill_phase(block, plan, (enum phase)phase);
            summary->phases[summary->n_phases++] = &block->phases[phase];
        }
    }
    fill_binding(block, plan);
    summary->binding = block->binding;
    summary->limit_bytes = run->device.capacity_bytes;
    summary->packing_efficiency = plan->packing_efficiency;
    summary->flops_per_step = cost->flops;
    summary->comm_bytes_per_step = cost->comm_bytes;
    summary->accumulation = strategy_accumulation(strategy, &run->options.limits);
    summary->fits = run->device.capacity_bytes == 0 ||
                    plan->committed_bytes <= run->device.capacity_bytes;
    summary->n_parameters = spec_n_parameters(run->units.spec);
    return summary;
}

void run_free_plan_summary(Ballast__V1__PlanSummary *summary)
{
    if (summary != NULL) {
        struct summary_block *block = (struct summary_block *)(void *)summary;
        heap_free(block->settings);
        heap_free(block);
    }
}

void run_report_state(struct run *run, const char *doing, bool with_plan)
{
    if (run->comm.rank != 0 || run->link == NULL) {
        return;
    }
    Ballast__Link__V1__RunState state = BALLAST__LINK__V1__RUN_STATE__INIT;
    Ballast__V1__Setting **settings = NULL;
    if (convert_strategy_to_settings(NULL, &run->training.strategy, &settings,
                                     &state.n_strategy) != STATUS_OK) {
        return; /* telemetry is dropped when the heap is exhausted */
    }
    Ballast__V1__PlanSummary *summary =
        with_plan ? run_plan_summary(run, &run->training.strategy, &run->plan, &run->cost) : NULL;
    state.step = run->step;
    state.generation = run->generation;
    state.strategy = settings;
    state.paused = run->paused;
    state.doing = (char *)(uintptr_t)doing;
    state.plan = summary;
    state.has_save = run->has_save;
    state.last_save_step = run->last_save_step;
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RUN;
    message.run = &state;
    link_send(run->link, &message);
    run_free_plan_summary(summary);
    heap_free(settings);
}

/* ---- steps ---- */

static const unsigned step_phases = 1u << PHASE_FORWARD | 1u << PHASE_BACKWARD | 1u << PHASE_STEP;

/* Phases with something to say: those of the step, and others that ran since the last line. */
static unsigned told_phases(const struct run *run)
{
    unsigned phases = step_phases;
    for (int phase = 0; phase < N_PHASES; phase++) {
        if (run->peak_bytes[phase] > 0 && run->plan.phases[phase].used) {
            phases |= 1u << phase;
        }
    }
    return phases;
}

struct step_arrays {
    Ballast__V1__Setting **strategy;
    Ballast__V1__PhaseTime **times;
    Ballast__V1__PhaseBytes **peaks, **planned;
};

static bool fill_step(struct run *run, Ballast__V1__StepRecord *record, struct step_arrays *arrays)
{
    double ms[N_PHASES];
    uint64_t planned[N_PHASES];
    for (int phase = 0; phase < N_PHASES; phase++) {
        ms[phase] = run->phase_seconds[phase] * 1e3;
        planned[phase] = run->plan.phases[phase].peak_bytes;
    }
    const unsigned told = told_phases(run);
    if (convert_strategy_to_settings(NULL, &run->training.strategy, &arrays->strategy,
                                     &record->n_strategy) != STATUS_OK ||
        convert_phase_times(ms, step_phases, &arrays->times, &record->n_phase_ms) != STATUS_OK ||
        convert_phase_bytes(run->peak_bytes, told, &arrays->peaks, &record->n_peak_bytes) !=
            STATUS_OK ||
        convert_phase_bytes(planned, told, &arrays->planned, &record->n_planned_bytes) !=
            STATUS_OK) {
        return false;
    }
    record->strategy = arrays->strategy;
    record->phase_ms = arrays->times;
    record->peak_bytes = arrays->peaks;
    record->planned_bytes = arrays->planned;
    record->step = run->step - 1;
    record->loss = run->result.loss;
    record->grad_norm = run->result.grad_norm;
    record->lr = run->result.lr;
    record->tokens = run->result.tokens;
    record->tokens_per_second = run->tokens_per_second;
    record->step_ms = run->step_seconds * 1e3;
    record->generation = run->generation;
    record->loss_scale = 1.0;
    record->skipped = run->result.skipped;
    return true;
}

static void write_line(struct run *run, const Ballast__V1__StepRecord *record)
{
    json_t *json = json_from_message(&record->base);
    char *text = json == NULL ? NULL : json_format(json, JSON_LINE_FLAGS);
    json_decref(json);
    if (text == NULL || fprintf(run->steps_file, "%s\n", text) < 0 ||
        fflush(run->steps_file) != 0) {
        log_warn("step %llu is missing from steps.jsonl: %s",
                 (unsigned long long)record->step,
                 text == NULL ? "no host memory" : strerror(errno));
    }
    heap_free(text);
}

static void print_progress(const struct run *run)
{
    const uint64_t every = run->config->steps_per_print == 0 ? 1 : run->config->steps_per_print;
    if (run->step % every != 0 && run->step != run->config->steps) {
        return;
    }
    char eta[UNITS_TEXT_BYTES];
    char peak[UNITS_TEXT_BYTES];
    const double per_step =
        (units_monotonic_s() - run->train_started) / (double)(run->step - run->first_step);
    uint64_t most = 0;
    for (int phase = 0; phase < N_PHASES; phase++) {
        most = run->peak_bytes[phase] > most ? run->peak_bytes[phase] : most;
    }
    printf("step %llu/%llu  loss %.4f  norm %.3f  lr %.2e  %.0f tok/s  %.0f ms  peak %s  "
           "ETA %s%s\n",
           (unsigned long long)run->step, (unsigned long long)run->config->steps, run->result.loss,
           run->result.grad_norm, run->result.lr, run->tokens_per_second, run->step_seconds * 1e3,
           units_format_bytes(most, peak),
           units_format_duration(per_step * (double)(run->config->steps - run->step), eta),
           run->result.skipped ? "  SKIPPED" : "");
    fflush(stdout);
}

void run_report_step(struct run *run)
{
    if (run->comm.rank != 0) {
        return;
    }
    print_progress(run);
    char now[UNITS_TEXT_BYTES];
    Ballast__V1__StepRecord record = BALLAST__V1__STEP_RECORD__INIT;
    record.time = (char *)(uintptr_t)convert_now(now);
    struct step_arrays arrays = {0};
    if (fill_step(run, &record, &arrays)) {
        write_line(run, &record);
        Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
        message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_STEP;
        message.step = &record;
        link_send(run->link, &message);
    } else {
        log_warn("step %llu is missing from steps.jsonl: no host memory",
                 (unsigned long long)record.step);
    }
    heap_free(arrays.strategy);
    heap_free(arrays.times);
    heap_free(arrays.peaks);
    heap_free(arrays.planned);
    if (run->result.skipped) {
        run_event(run, "skip", "", "step %llu was skipped: a gradient was not finite",
                  (unsigned long long)record.step);
    }
}

/* ---- steps.jsonl ---- */

/* Keep the lines of steps below `step`: later ones will be done again, a torn one is dropped. */
static enum status cut_steps_file(const char *path, uint64_t step, struct failure *why)
{
    FILE *file = fopen(path, "r+e");
    if (file == NULL) {
        return errno == ENOENT ? STATUS_OK
                               : fail(why, STATUS_IO, "cannot open %s: %s", path, strerror(errno));
    }
    char *line = NULL;
    size_t capacity = 0;
    off_t keep = 0;
    ssize_t n = 0;
    enum status status = STATUS_OK;
    while ((n = getline(&line, &capacity, file)) > 0 && line[n - 1] == '\n') {
        json_error_t error;
        json_t *json = NULL;
        status = json_parse(line, (size_t)n, 0, &json, &error);
        const json_t *number = json_object_get(json, "step");
        const bool kept =
            json_is_integer(number) && (uint64_t)json_integer_value(number) < step;
        json_decref(json);
        if (!kept) {
            break;
        }
        keep += n;
    }
    free(line); /* getline's own allocation */
    if (status == STATUS_OUT_OF_MEMORY) {
        fclose(file); /* a line that could not be read is no reason to drop it */
        return fail(why, status, "no host memory to read %s", path);
    }
    const int cut = ftruncate(fileno(file), keep);
    const int error = errno;
    fclose(file);
    return cut == 0 ? STATUS_OK
                    : fail(why, STATUS_IO, "cannot shorten %s: %s", path, strerror(error));
}

enum status run_open_steps_file(struct run *run, struct failure *why)
{
    char path[CONFIG_PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s/steps.jsonl", run->run_dir);
    const enum status status = cut_steps_file(path, run->step, why);
    if (status != STATUS_OK) {
        return status;
    }
    run->steps_file = fopen(path, "ae");
    return run->steps_file == NULL
               ? fail(why, STATUS_IO, "cannot write %s: %s", path, strerror(errno))
               : STATUS_OK;
}

uint64_t run_steps_in_file(const struct run *run)
{
    char path[CONFIG_PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s/steps.jsonl", run->run_dir);
    FILE *file = fopen(path, "re");
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n = 0;
    uint64_t steps = 0;
    while (file != NULL && (n = getline(&line, &capacity, file)) > 0 && line[n - 1] == '\n') {
        json_error_t error;
        json_t *json = NULL;
        if (json_parse(line, (size_t)n, 0, &json, &error) == STATUS_OK) {
            steps = (uint64_t)json_integer_value(json_object_get(json, "step")) + 1;
        }
        json_decref(json);
    }
    free(line); /* getline's own allocation */
    if (file != NULL) {
        fclose(file);
    }
    return steps;
}
