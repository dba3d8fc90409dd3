/* Telling a shortage by every route: the log, the daemon (`ballastctl oom`, events.jsonl), and the
 * same words on each. Main thread. */
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "proto/convert.h"
#include "proto/json.h"
#include "worker/run.h"
#include "worker/strategy/advise.h"

/* The message and everything it points to. */
struct oom_message {
    Ballast__V1__OomReport report;
    Ballast__V1__MemoryEntry held[N_CATEGORIES];
    Ballast__V1__MemoryEntry *held_pointers[N_CATEGORIES];
    Ballast__V1__LiveBuffer live[OOM_LIVE_LINES];
    Ballast__V1__LiveBuffer *live_pointers[OOM_LIVE_LINES];
    Ballast__V1__Remedy remedies[OOM_REMEDIES];
    Ballast__V1__Remedy *remedy_pointers[OOM_REMEDIES];
    Ballast__V1__PhaseBytes **planned, **actual;               /* owned */
    Ballast__V1__Setting **changes[OOM_REMEDIES];              /* owned */
    Ballast__V1__PhaseBytes **remedy_peaks[OOM_REMEDIES];      /* owned */
    char time[UNITS_TEXT_BYTES];
    char tensor[96];
};

static void free_message(struct oom_message *message)
{
    heap_free(message->planned);
    heap_free(message->actual);
    for (int i = 0; i < OOM_REMEDIES; i++) {
        heap_free(message->changes[i]);
        heap_free(message->remedy_peaks[i]);
    }
    heap_free(message);
}

/* Phases that have a number. */
static unsigned phases_of(const uint64_t bytes[N_PHASES])
{
    unsigned phases = 0;
    for (int phase = 0; phase < N_PHASES; phase++) {
        phases |= bytes[phase] > 0 ? 1u << phase : 0u;
    }
    return phases;
}

static void fill_lists(struct oom_message *message, const struct oom_report *oom)
{
    Ballast__V1__OomReport *report = &message->report;
    report->held = message->held_pointers;
    for (int c = 0; c < N_CATEGORIES; c++) {
        if (oom->held[c] == 0) {
            continue;
        }
        Ballast__V1__MemoryEntry *entry = &message->held[c];
        ballast__v1__memory_entry__init(entry);
        entry->tier = convert_tier_to_wire(TIER_DEVICE);
        entry->category = convert_category_to_wire((enum category)c);
        entry->bytes = oom->held[c];
        report->held[report->n_held++] = entry;
    }
    report->live = message->live_pointers;
    for (size_t i = 0; i < oom->n_live; i++) {
        Ballast__V1__LiveBuffer *live = &message->live[i];
        ballast__v1__live_buffer__init(live);
        live->name = (char *)(uintptr_t)oom->live[i].name;
        live->tier = convert_tier_to_wire(TIER_DEVICE);
        live->category = convert_category_to_wire(oom->live[i].category);
        live->bytes = oom->live[i].bytes;
        live->count = oom->live[i].count;
        report->live[report->n_live++] = live;
    }
}

static bool fill_remedies(struct oom_message *message, struct oom_report *oom,
                          const struct strategy *current)
{
    Ballast__V1__OomReport *report = &message->report;
    report->remedies = message->remedy_pointers;
    for (size_t i = 0; i < oom->n_remedies; i++) {
        Ballast__V1__Remedy *remedy = &message->remedies[i];
        ballast__v1__remedy__init(remedy);
        remedy->text = oom->remedies[i].text;
        remedy->fits = oom->remedies[i].fits;
        if (convert_strategy_to_settings(current, &oom->remedies[i].strategy, &message->changes[i],
                                         &remedy->n_changes) != STATUS_OK ||
            convert_phase_bytes(oom->remedies[i].peak_bytes, phases_of(oom->remedies[i].peak_bytes),
                                &message->remedy_peaks[i],
                                &remedy->n_peak_bytes) != STATUS_OK) {
            return false;
        }
        remedy->changes = message->changes[i];
        remedy->peak_bytes = message->remedy_peaks[i];
        report->remedies[report->n_remedies++] = remedy;
    }
    return true;
}

/* NULL when the heap is exhausted. */
static struct oom_message *make_message(struct oom_report *oom, const struct strategy *current)
{
    struct oom_message *message = heap_calloc(1, sizeof *message);
    if (message == NULL) {
        return NULL;
    }
    Ballast__V1__OomReport *report = &message->report;
    ballast__v1__oom_report__init(report);
    report->step = oom->step;
    report->rank = (int32_t)oom->rank;
    report->micro_step = oom->micro_step;
    report->phase = convert_phase_to_wire(oom->phase);
    if (oom->layer >= 0) {
        snprintf(message->tensor, sizeof message->tensor, "%s, layer %d", oom->tensor, oom->layer);
    } else {
        snprintf(message->tensor, sizeof message->tensor, "%s", oom->tensor);
    }
    report->tensor = message->tensor;
    report->category = convert_category_to_wire(oom->category);
    report->tier = convert_tier_to_wire(oom->tier);
    report->asked_bytes = oom->asked_bytes;
    report->limit_bytes = oom->limit_bytes;
    report->held_bytes = oom->held_bytes;
    report->cause = oom->cause;
    report->outcome = oom->outcome;
    report->time = (char *)(uintptr_t)convert_now(message->time);
    fill_lists(message, oom);
    if (!fill_remedies(message, oom, current) ||
        convert_phase_bytes(oom->planned, phases_of(oom->planned), &message->planned,
                            &report->n_planned_bytes) != STATUS_OK ||
        convert_phase_bytes(oom->actual, phases_of(oom->actual), &message->actual,
                            &report->n_actual_bytes) != STATUS_OK) {
        free_message(message);
        return NULL;
    }
    report->planned_bytes = message->planned;
    report->actual_bytes = message->actual;
    return message;
}

static void send_report(struct run *run)
{
    struct oom_message *message = make_message(&run->oom, &run->training.strategy);
    if (message == NULL) {
        log_warn("the out-of-memory report was not sent: no host memory");
        return;
    }
    Ballast__Link__V1__WorkerMessage worker = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    worker.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_OOM;
    worker.oom = &message->report;
    link_send(run->link, &worker);
    free_message(message);
}

static void fill_report(struct run *run, const char *outcome)
{
    uint64_t held[N_CATEGORIES];
    uint64_t actual[N_PHASES] = {0};
    for (int c = 0; c < N_CATEGORIES; c++) {
        held[c] = run->training.ledger.region_bytes[c] + run->training.ledger.workspace_bytes[c];
    }
    for (int phase = 0; phase < N_PHASES; phase++) {
        if (run->training.workspace.high_water[phase] > 0) {
            actual[phase] = run_measured_peak(run, (enum phase)phase);
        }
    }
    oom_fill(&run->oom, &run->admit.shortage, &run->plan,
             run->training.workspace.region.committed_bytes, run->step,
             atomic_load(&run->telemetry.micro_step), held, actual);
    const struct predictor predictor = run_predictor(run);
    run->oom.n_remedies =
        advise_remedies(&predictor, &run->training.strategy, &run->options.limits,
                        run->admit.shortage.on_purpose ? run->plan.committed_bytes - 1
                                                       : run->device.capacity_bytes,
                        run->oom.remedies);
    snprintf(run->oom.outcome, sizeof run->oom.outcome, "%s", outcome);
}

void run_report_oom(struct run *run, const char *outcome)
{
    const struct shortage *shortage = &run->admit.shortage;
    char text[768];
    char asked[UNITS_TEXT_BYTES];
    char limit[UNITS_TEXT_BYTES];
    /* Every rank works it out, so that rank 0's event and the short rank's report agree. */
    fill_report(run, outcome);
    snprintf(text, sizeof text, "%s on rank %u, %s (%s): %s asked, limit %s, %s; %s",
             phase_name(shortage->phase), shortage->rank, run->oom.tensor,
             category_name(run->oom.category),
             units_format_bytes(shortage->asked_bytes, asked),
             shortage->limit_bytes == 0 ? "none" : units_format_bytes(shortage->limit_bytes, limit),
             run->oom.cause, outcome);
    json_t *details = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:s}", "tensor", run->oom.tensor, "category",
        category_name(run->oom.category), "asked_bytes", (json_int_t)shortage->asked_bytes,
        "held_bytes", (json_int_t)shortage->held_bytes, "limit_bytes",
        (json_int_t)shortage->limit_bytes, "cause", run->oom.cause);
    run_event_at(run, "oom", "", (int)shortage->rank, shortage->phase, details, text);
    if (run->comm.rank == shortage->rank) {
        oom_print(&run->oom, stderr);
        send_report(run);
    }
}
