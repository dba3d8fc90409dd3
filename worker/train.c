/* The loop: boundary, step, boundary, step, ..., end. */
#include <stdlib.h>
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "worker/run.h"
#include "worker/strategy/advise.h"

/* ---- data ---- */

/* Row `sample` of the global batch of `step`: its place in the run decides what it is. */
static void fill_row(void *user, uint64_t step, uint32_t sample, int32_t *inputs, int32_t *labels)
{
    const struct run *run = user;
    const uint64_t position = step * run->config->global_batch + sample;
    tokens_sample(run->data, sampler_at(&run->sampler, position), inputs, labels);
}

static void fill_eval_row(void *user, uint64_t sample, int32_t *inputs, int32_t *labels)
{
    const struct run *run = user;
    tokens_sample(run->eval_data, sample, inputs, labels);
}

/* ---- one step ---- */

static enum status one_step(struct run *run, struct failure *why)
{
    const double started = units_monotonic_s();
    memset(run->phase_seconds, 0, sizeof run->phase_seconds);
    workspace_clear_peaks(&run->training.workspace);
    run->phase = PHASE_SETUP; /* the label count belongs to no phase of the step */
    run->phase_started = started;
    atomic_store_explicit(&run->telemetry.step, run->step, memory_order_relaxed);
    const struct batch_source source = {fill_row, run};
    enum status status = step_run(&run->training, &source, run->step, &run->result, why);
    if (status != STATUS_OK) {
        return status;
    }
    run_leave_phase(run);
    status = run_check_peaks(run, why);
    if (status != STATUS_OK) {
        return status;
    }
    run->step_seconds = units_monotonic_s() - started;
    run->tokens_per_second = (double)run->result.tokens / run->step_seconds;
    run->unreported = true;
    run_look_at_driver(run);
    run->step++;
    pthread_mutex_lock(&run->shared.lock);
    run->shared.step = run->step;
    pthread_mutex_unlock(&run->shared.lock);
    return STATUS_OK;
}

/* ---- saving and evaluating ---- */

enum status run_save_now(struct run *run, const char *who, char *out_path, size_t path_bytes,
                         struct failure *why)
{
    run_report_state(run, "saving", false);
    const double started = units_monotonic_s();
    const enum status status = run_save(run, out_path, path_bytes, why);
    const double seconds = units_monotonic_s() - started;
    if (status == STATUS_OK) {
        json_t *details =
            json_pack("{s:s, s:f}", "path", out_path, "ms", seconds * 1e3);
        run_event_with(run, "save", who, details, "saved %s in %.0f ms", out_path, seconds * 1e3);
    } else if (status != STATUS_OUT_OF_MEMORY || !run->admit.shortage.any) {
        training_abandon(&run->training);
        run_event(run, "refused", who, "save: %s", why->text);
    }
    run_report_state(run, run->paused ? "paused" : "training", false);
    return status;
}

enum status run_eval_now(struct run *run, const char *who, struct eval_result *out_result,
                         struct failure *why)
{
    run_report_state(run, "evaluating", false);
    const struct eval_source source = {tokens_n_samples(run->eval_data), fill_eval_row, run};
    const uint64_t most =
        run->config->eval_batches * run->options.eval_micro_batch * run->comm.size;
    const enum status status = eval_run(&run->training, &source, most, out_result, why);
    run_leave_phase(run);
    if (status == STATUS_OK) {
        json_t *details = json_pack("{s:f, s:I, s:I}", "loss", out_result->loss, "tokens",
                                    (json_int_t)out_result->labels, "peak_bytes",
                                    (json_int_t)run_measured_peak(run, PHASE_EVAL));
        run_event_with(run, "eval", who, details, "evaluation loss %.4f over %llu tokens",
                       out_result->loss, (unsigned long long)out_result->labels);
    }
    run_report_state(run, run->paused ? "paused" : "training", false);
    return status;
}

static bool due(uint64_t every, uint64_t step)
{
    return every != 0 && step % every == 0;
}

enum status run_after_step(struct run *run, struct failure *why)
{
    run_report_step(run);
    run_report_state(run, run->paused ? "paused" : "training", false);
    enum status status = STATUS_OK;
    if (run->eval_data != NULL && due(run->config->eval_every, run->step)) {
        struct eval_result ignored;
        status = run_eval_now(run, "schedule", &ignored, why);
    }
    if (status == STATUS_OK && due(run->config->save_every, run->step)) {
        char path[CONFIG_PATH_BYTES];
        status = run_save_now(run, "schedule", path, sizeof path, why);
        if (status != STATUS_OK && !run->admit.shortage.any && (int)status < 300) {
            log_warn("the save of step %llu failed and training goes on: %s",
                     (unsigned long long)run->step, why->text);
            status = STATUS_OK;
        }
    }
    return status;
}

/* ---- ends ---- */

/* Open MPI kills this long after TERM unless told otherwise. */
static double grace_seconds(void)
{
    const char *text = getenv("OMPI_MCA_odls_base_sigkill_timeout");
    double seconds = 1.0;
    if (text != NULL && units_parse_double(text, &seconds) != STATUS_OK) {
        seconds = 1.0;
    }
    return seconds;
}

/* A cautious guess: 12 bytes a parameter over all ranks at 200 MB/s. */
static double save_seconds(const struct run *run)
{
    return 12.0 * (double)run->units.n_elems / 200e6;
}

enum status run_end_on_signal(struct run *run, bool save, struct failure *why)
{
    run->stopping = true;
    run->exit_code = EXIT_CODE_FAILED;
    /* Only rank 0's view of the grace may decide, so that all ranks do the same. */
    uint64_t choice = save || save_seconds(run) < grace_seconds() ? 1 : 0;
    enum status status = run->comm.table->broadcast(&run->comm, "save on signal", &choice,
                                                    sizeof choice, why);
    if (status == STATUS_OK && choice != 0) {
        char path[CONFIG_PATH_BYTES];
        status = run_save_now(run, "signal", path, sizeof path, why);
        run->exit_code = status == STATUS_OK ? EXIT_CODE_SAVED_ON_SIGNAL : EXIT_CODE_NO_SAVE;
    }
    return status;
}

/* A shortage was voted on: report it and end as the policy says. All ranks are here. */
static void end_out_of_memory(struct run *run)
{
    run->exit_code = EXIT_CODE_OUT_OF_MEMORY;
    char path[CONFIG_PATH_BYTES] = "";
    char outcome[OOM_TEXT_BYTES];
    const bool save = run->config->oom_policy == OOM_REPORT;
    snprintf(outcome, sizeof outcome,
             save ? "oom.policy=report: saving step %llu and ending"
                  : "oom.policy=abort: ending at step %llu without a save",
             (unsigned long long)run->step);
    run_report_oom(run, outcome); /* while what is alive is still there to be told */
    training_abandon(&run->training);
    if (!save) {
        return;
    }
    if (run->has_save && run->last_save_step == run->step) {
        return;
    }
    struct failure why = {0};
    run->admit.shortage.any = false;
    enum status status = run_save_now(run, "oom", path, sizeof path, &why);
    if (status != STATUS_OK) {
        training_abandon(&run->training);
        log_error("the state could not be saved: %s", why.text);
    }
}

/* Something that not all ranks may know of: tell the story, then end the whole job. */
__attribute__((noreturn)) static void end_broken(struct run *run, enum status status,
                                                 const struct failure *why)
{
    const enum exit_code code = status == STATUS_RANK_LOST || status == STATUS_DEADLINE
                                    ? EXIT_CODE_RANK_LOST
                                : status == STATUS_OUT_OF_MEMORY ? EXIT_CODE_OUT_OF_MEMORY
                                                                 : EXIT_CODE_FAILED;
    log_error("step %llu: %s", (unsigned long long)run->step, why->text);
    run_event_with(run, "end", "", json_pack("{s:i}", "exit_code", (int)code), "%s", why->text);
    link_end(run->link, (uint32_t)code, why->text);
    run->comm.table->abort(&run->comm, (int)code);
    abort();
}

/* Every rank takes the same turn here: shortages are voted on, the rest ends the job. */
static void take_failure(struct run *run, enum status status, const struct failure *why)
{
    if (status == STATUS_OUT_OF_MEMORY && run->admit.shortage.any) {
        end_out_of_memory(run);
        run->stopping = true;
        return;
    }
    end_broken(run, status, why);
}

static void final_save(struct run *run)
{
    /* A run that was stopped has to be able to go on, whether or not it saves as it goes. */
    const bool wanted = run->exit_code == EXIT_CODE_DONE &&
                        (run->config->save_every != 0 || run->step < run->config->steps);
    if (!wanted || (run->has_save && run->last_save_step == run->step)) {
        return;
    }
    char path[CONFIG_PATH_BYTES];
    struct failure why = {0};
    const enum status status = run_save_now(run, "end", path, sizeof path, &why);
    if (status != STATUS_OK) {
        training_abandon(&run->training);
        log_error("the final save failed: %s", why.text);
        run->exit_code = EXIT_CODE_NO_SAVE;
    }
}

/* A fault that was armed and never fired means that the run did not test what it was meant to. */
static void check_faults(struct run *run)
{
    char spec[128];
    struct failure why = {0};
    const bool unfired = fault_unfired((int)run->comm.rank, spec, sizeof spec);
    if (unfired) {
        log_error("the fault '%s' never fired", spec);
    }
    int first_no = -1;
    if (comm_vote(&run->comm, "faults", !unfired, &first_no, &why) == STATUS_OK && first_no >= 0 &&
        run->exit_code == EXIT_CODE_DONE) {
        run->exit_code = EXIT_CODE_FAILED;
    }
}

static void tell_end(struct run *run)
{
    const double seconds = units_monotonic_s() - run->train_started;
    char duration[UNITS_TEXT_BYTES];
    char checksum[20] = "";
    uint64_t hash = 0;
    struct failure why = {0};
    if (run_weights_checksum(run, &hash, &why) == STATUS_OK) {
        snprintf(checksum, sizeof checksum, "%016llx", (unsigned long long)hash);
    } else {
        log_error("no checksum of the weights: %s", why.text);
    }
    json_t *details = json_pack("{s:s, s:i, s:I}", "weights_xxh3", checksum, "exit_code",
                                (int)run->exit_code, "steps", (json_int_t)run->step);
    run_report_state(run, "ending", false);
    run_event_with(run, "end", "", details, "%s after %llu steps in %s",
                   run->exit_code == EXIT_CODE_DONE
                       ? (run->step < run->config->steps ? "stopped" : "done")
                       : "ended",
                   (unsigned long long)run->step, units_format_duration(seconds, duration));
}

enum exit_code run_train(struct run *run)
{
    run->train_started = units_monotonic_s();
    run->first_step = run->step;
    while (!run->stopping) {
        struct failure why = {0};
        enum status status = run_boundary(run, &why);
        if (status == STATUS_OK && (run->stopping || run->step >= run->config->steps)) {
            break;
        }
        if (status == STATUS_OK) {
            status = one_step(run, &why);
        }
        if (status != STATUS_OK) {
            take_failure(run, status, &why);
        }
    }
    final_save(run);
    check_faults(run);
    tell_end(run);
    link_end(run->link, (uint32_t)run->exit_code, "");
    return run->exit_code;
}
