/* The dry run of a step. See rehearsal.h. */
#include "worker/rehearsal.h"
#include "worker/eval.h"
#include "worker/step.h"

static enum status rehearse_save(struct training *training, struct failure *why)
{
    workspace_begin(&training->workspace, SECTION_SAVE);
    const enum status status = training_enter(training, PHASE_SAVE, why);
    return status == STATUS_OK ? workspace_end(&training->workspace, why) : status;
}

static enum status run_section(struct training *training, enum section section,
                               struct failure *why)
{
    switch (section) {
    case SECTION_EVAL:
        return eval_rehearse(training, why);
    case SECTION_SAVE:
        return rehearse_save(training, why);
    case SECTION_FIRST:
    case SECTION_LATER:
    case SECTION_UPDATE:
    case N_SECTIONS:
        break;
    }
    return step_rehearse(training, section, why);
}

/* How often a section runs in one optimizer step; evaluation and saving are not part of it. */
static uint32_t repeats(const struct training *training, enum section section)
{
    if (section == SECTION_LATER) {
        return training_accumulation(training) - 1;
    }
    return section == SECTION_FIRST || section == SECTION_UPDATE ? 1 : 0;
}

/* The dry half of the assembly. */
struct dry_run {
    struct device device, host;
    struct dry_ops ops;
    struct comm comm;
    struct telemetry telemetry;
    struct training training;
};

static enum status record_sections(struct dry_run *dry, struct plan *plan,
                                   struct rehearsal_cost *cost, struct failure *why)
{
    workspace_record(&dry->training.workspace, plan);
    for (int section = 0; section < N_SECTIONS; section++) {
        dry->ops.flops = 0.0;
        const uint64_t sent = dry->comm.bytes_sent;
        const enum status status = run_section(&dry->training, (enum section)section, why);
        if (status != STATUS_OK) {
            return status;
        }
        const uint32_t n = repeats(&dry->training, (enum section)section);
        plan->sections[section].repeat = n;
        cost->flops += n * dry->ops.flops;
        cost->comm_bytes += n * (dry->comm.bytes_sent - sent);
    }
    return STATUS_OK;
}

enum status rehearse(const struct rehearsal *rehearsal, const struct strategy *strategy,
                     struct plan *out_plan, struct rehearsal_cost *out_cost, struct failure *why)
{
    struct dry_run dry = {.telemetry = {.wake_fd = -1}};
    struct rehearsal_cost cost = {0};
    dry_device_init(&dry.device, 0, rehearsal->granule_bytes);
    dry_device_init(&dry.host, 0, rehearsal->granule_bytes);
    dry.device.pinned_bytes = rehearsal->pinned_bytes;
    dry_ops_init(&dry.ops, rehearsal->target);
    comm_dry_init(&dry.comm, rehearsal->rank, rehearsal->world_size);
    plan_init(out_plan, rehearsal->granule_bytes,
              workspace_red_zone(rehearsal->options->paint));
    const struct state_host host = {&dry.host, &dry.ops.base, &dry.comm};
    enum status status =
        training_init(&dry.training, rehearsal->options, strategy, rehearsal->units, &dry.device,
                      &dry.ops.base, &dry.comm, &host, &dry.telemetry, why);
    if (status != STATUS_OK) {
        goto undo_plan;
    }
    status = record_sections(&dry, out_plan, &cost, why);
    if (status == STATUS_OK) {
        struct plan_resident resident;
        training_resident(&dry.training, &resident);
        status = plan_finish(out_plan, &resident, why);
    }
    training_fini(&dry.training);
    if (status != STATUS_OK) {
        goto undo_plan;
    }
    if (out_cost != NULL) {
        *out_cost = cost;
    }
    return STATUS_OK;
undo_plan:
    plan_fini(out_plan);
    return status;
}
