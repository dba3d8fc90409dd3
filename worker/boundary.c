/* The step boundary: the one small exchange that ends every step, and the commands that all
 * ranks carry out there, together or not at all. */
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include "worker/run.h"

static volatile sig_atomic_t save_signal; /* SIGUSR1: save and end */
static volatile sig_atomic_t end_signal;  /* SIGTERM, SIGINT: end, saved if there is time */

void run_note_signal(int signal_number)
{
    if (signal_number == SIGUSR1) {
        save_signal = 1;
    } else {
        end_signal = 1;
    }
}

enum { SAY_SAVE_AND_END = 1, SAY_END = 2 };

/* What every rank says at the end of a step. */
struct ballot {
    uint64_t sequence;
    uint64_t generation;
    uint64_t step;
    uint64_t command_bytes; /* rank 0: a command follows by broadcast */
    uint64_t says;          /* SAY_ bits */
    uint64_t peak_bytes[N_PHASES];
};

/* Ranks that disagree on where they are must not go on. */
static enum status compare(struct run *run, const struct ballot *all, struct failure *why)
{
    for (uint32_t rank = 1; rank < run->comm.size; rank++) {
        if (all[rank].sequence != all[0].sequence || all[rank].generation != all[0].generation ||
            all[rank].step != all[0].step) {
            return fail(why, STATUS_CORRUPT,
                        "ranks disagree: rank 0 is at step %llu, generation %llu, exchange %llu; "
                        "rank %u at %llu, %llu, %llu",
                        (unsigned long long)all[0].step, (unsigned long long)all[0].generation,
                        (unsigned long long)all[0].sequence, rank,
                        (unsigned long long)all[rank].step,
                        (unsigned long long)all[rank].generation,
                        (unsigned long long)all[rank].sequence);
        }
    }
    return STATUS_OK;
}

static void take_peaks(struct run *run, const struct ballot *all)
{
    for (int phase = 0; phase < N_PHASES; phase++) {
        run->peak_bytes[phase] = 0;
        for (uint32_t rank = 0; rank < run->comm.size; rank++) {
            if (all[rank].peak_bytes[phase] > run->peak_bytes[phase]) {
                run->peak_bytes[phase] = all[rank].peak_bytes[phase];
            }
        }
    }
}

static enum status exchange(struct run *run, size_t command_bytes, struct ballot *out_sum,
                            struct failure *why)
{
    struct ballot all[COMM_EXCHANGE_MAX_BYTES / sizeof(struct ballot)];
    struct ballot mine = {
        .sequence = run->sequence++,
        .generation = run->generation,
        .step = run->step,
        .command_bytes = command_bytes,
        .says = (save_signal ? SAY_SAVE_AND_END : 0u) | (end_signal ? SAY_END : 0u),
    };
    for (int phase = 0; phase < N_PHASES; phase++) {
        if (run->training.workspace.high_water[phase] > 0 || phase == PHASE_SETUP) {
            mine.peak_bytes[phase] = run_measured_peak(run, (enum phase)phase);
        }
    }
    struct ballot *ballots = run->comm.size * sizeof mine <= sizeof all
                                 ? all
                                 : heap_alloc(run->comm.size * sizeof mine);
    if (ballots == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory for %u ballots", run->comm.size);
    }
    enum status status =
        run->comm.table->exchange(&run->comm, "boundary", &mine, sizeof mine, ballots, why);
    if (status == STATUS_OK) {
        status = compare(run, ballots, why);
    }
    if (status == STATUS_OK) {
        take_peaks(run, ballots);
        *out_sum = ballots[0];
        for (uint32_t rank = 1; rank < run->comm.size; rank++) {
            out_sum->says |= ballots[rank].says;
        }
    }
    if (ballots != all) {
        heap_free(ballots);
    }
    return status;
}

/* ---- commands ---- */

static void send_result(struct run *run, Ballast__Link__V1__CommandResult *result)
{
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RESULT;
    message.result = result;
    link_send(run->link, &message);
}

/* Say how a command ended; only rank 0 has a link that hears of commands. */
static void answer(struct run *run, const Ballast__Link__V1__Command *command,
                   Ballast__Link__V1__CommandResult *result, enum status status, char *text)
{
    if (run->comm.rank != 0) {
        return;
    }
    result->id = command->id;
    result->status = (char *)(uintptr_t)status_name(status);
    result->text = text;
    result->generation = run->generation;
    result->final = true;
    send_result(run, result);
}

static enum status wanted_strategy(const struct run *run, const Ballast__Link__V1__SetCommand *set,
                                   struct strategy *out_wanted, struct failure *why)
{
    if (set->if_generation_plus_one != 0 && set->if_generation_plus_one - 1 != run->generation) {
        return fail(why, STATUS_CONFLICT, "generation is %llu, not %llu: look again and retry",
                    (unsigned long long)run->generation,
                    (unsigned long long)set->if_generation_plus_one - 1);
    }
    if (set->undo) {
        if (!run->can_undo) {
            return fail(why, STATUS_REFUSED, "nothing to undo: no switch was made in this run");
        }
        *out_wanted = run->previous;
        return STATUS_OK;
    }
    *out_wanted = run->training.strategy;
    return convert_settings_to_strategy(set->changes, set->n_changes, out_wanted, why);
}

/* A refusal is an answer; only a broken exchange is a failure of the boundary itself. */
static bool is_refusal(enum status status)
{
    return (int)status < 300 || status == STATUS_VOTED_DOWN;
}

static enum status carry_out_set(struct run *run, const Ballast__Link__V1__Command *command,
                                 struct failure *why)
{
    Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
    Ballast__V1__PlanSummary *before = NULL;
    Ballast__V1__PlanSummary *after = NULL;
    struct strategy wanted;
    struct failure refusal = {0};
    enum status status = wanted_strategy(run, command->set, &wanted, &refusal);
    if (status == STATUS_OK && run->comm.rank == 0) {
        before = run_plan_summary(run, &run->training.strategy, &run->plan, &run->cost);
    }
    if (status == STATUS_OK && strategy_equal(&wanted, &run->training.strategy)) {
        result.step = run->step;
        result.before = result.after = before;
        answer(run, command, &result, STATUS_OK, (char *)(uintptr_t)"nothing to change");
    } else {
        if (status == STATUS_OK) {
            status = run_switch(run, &wanted, command->who, &result, &refusal);
        }
        if (status == STATUS_OK && run->comm.rank == 0) {
            after = run_plan_summary(run, &run->training.strategy, &run->plan, &run->cost);
        } else if (status != STATUS_OK && is_refusal(status)) {
            run_event(run, "refused", command->who, "%s", refusal.text);
        }
        result.before = before;
        result.after = after;
        answer(run, command, &result, status, refusal.text);
        run_report_state(run, run->paused ? "paused" : "training", true);
    }
    run_free_plan_summary(before);
    run_free_plan_summary(after);
    if (status != STATUS_OK && !is_refusal(status)) {
        *why = refusal;
        return status;
    }
    return STATUS_OK;
}

static void set_paused(struct run *run, bool paused, const char *who)
{
    if (run->paused == paused) {
        return;
    }
    run->paused = paused;
    pthread_mutex_lock(&run->shared.lock);
    run->shared.paused = paused;
    pthread_mutex_unlock(&run->shared.lock);
    run_event(run, paused ? "pause" : "resume", who, "%s at step %llu",
              paused ? "paused" : "resumed", (unsigned long long)run->step);
    run_report_state(run, paused ? "paused" : "training", false);
}

static enum status carry_out_save(struct run *run, const Ballast__Link__V1__Command *command,
                                  struct failure *why)
{
    char path[CONFIG_PATH_BYTES] = "";
    Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
    const double started = units_monotonic_s();
    const enum status status = run_save_now(run, command->who, path, sizeof path, why);
    result.took_ms = (units_monotonic_s() - started) * 1e3;
    result.step = run->step;
    result.path = path;
    answer(run, command, &result, status, status == STATUS_OK ? result.text : why->text);
    /* A save that failed on its files is the operator's to look at; training goes on. */
    return run->admit.shortage.any || (int)status >= 300 ? status : STATUS_OK;
}

static enum status carry_out_eval(struct run *run, const Ballast__Link__V1__Command *command,
                                  struct failure *why)
{
    Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
    struct eval_result evaluated = {0};
    struct failure refusal = {0};
    if (run->eval_data == NULL) {
        (void)fail(&refusal, STATUS_REFUSED, "no eval_data in the configuration");
        answer(run, command, &result, STATUS_REFUSED, refusal.text);
        return STATUS_OK;
    }
    const double started = units_monotonic_s();
    const enum status status = run_eval_now(run, command->who, &evaluated, why);
    result.took_ms = (units_monotonic_s() - started) * 1e3;
    result.step = run->step;
    result.loss = evaluated.loss;
    result.tokens = evaluated.labels;
    answer(run, command, &result, status, status == STATUS_OK ? result.text : why->text);
    return status;
}

static enum status carry_out_simple(struct run *run, const Ballast__Link__V1__Command *command,
                                    struct failure *why)
{
    const char *verb = command->simple->verb;
    Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
    result.step = run->step;
    if (strcmp(verb, "save") == 0) {
        return carry_out_save(run, command, why);
    }
    if (strcmp(verb, "eval") == 0) {
        return carry_out_eval(run, command, why);
    }
    if (strcmp(verb, "pause") == 0) {
        set_paused(run, true, command->who);
        answer(run, command, &result, STATUS_OK, result.text);
    } else if (strcmp(verb, "stop") == 0) {
        run->stopping = true;
        answer(run, command, &result, STATUS_OK, result.text);
    } else {
        struct failure refusal = {0};
        (void)fail(&refusal, STATUS_UNSUPPORTED, "this version has no command '%s'", verb);
        answer(run, command, &result, STATUS_UNSUPPORTED, refusal.text);
    }
    return STATUS_OK;
}

static enum status carry_out(struct run *run, const Ballast__Link__V1__Command *command,
                             struct failure *why)
{
    switch (command->body_case) {
    case BALLAST__LINK__V1__COMMAND__BODY_SET:
        return carry_out_set(run, command, why);
    case BALLAST__LINK__V1__COMMAND__BODY_SIMPLE:
        return carry_out_simple(run, command, why);
    case BALLAST__LINK__V1__COMMAND__BODY_RESUME: {
        Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
        const uint64_t steps = command->resume->for_steps;
        run->resume_until = steps == 0 ? 0 : run->step + steps;
        set_paused(run, false, command->who);
        result.step = run->step;
        answer(run, command, &result, STATUS_OK, result.text);
        return STATUS_OK;
    }
    case BALLAST__LINK__V1__COMMAND__BODY_PLAN:     /* answered on the link thread */
    case BALLAST__LINK__V1__COMMAND__BODY__NOT_SET:
    case _BALLAST__LINK__V1__COMMAND__BODY__CASE_IS_INT_SIZE:
        break;
    }
    return STATUS_OK;
}

/* Every rank gets the command as rank 0 heard it. */
static enum status share_command(struct run *run, Ballast__Link__V1__Command *heard, size_t n_bytes,
                                 Ballast__Link__V1__Command **out_command, struct failure *why)
{
    uint8_t *bytes = heap_alloc(n_bytes);
    /* All ranks or none: a broadcast that one rank cannot take part in would hang the rest. */
    int first_no = -1;
    enum status status = comm_vote(&run->comm, "command", bytes != NULL, &first_no, why);
    if (status == STATUS_OK && first_no >= 0) {
        status = fail(why, STATUS_OUT_OF_MEMORY, "rank %d has no host memory for a command",
                      first_no);
    }
    if (status == STATUS_OK && heard != NULL) {
        ballast__link__v1__command__pack(heard, bytes);
    }
    if (status == STATUS_OK) {
        status = run->comm.table->broadcast(&run->comm, "command", bytes, n_bytes, why);
    }
    ProtobufCMessage *message = NULL;
    if (status == STATUS_OK) {
        const enum status decoded =
            frame_decode(&ballast__link__v1__command__descriptor, bytes, n_bytes, &message);
        status = comm_vote(&run->comm, "command decoded", decoded == STATUS_OK, &first_no, why);
        if (status == STATUS_OK && first_no >= 0) {
            status = fail(why, STATUS_OUT_OF_MEMORY, "rank %d cannot decode a command", first_no);
        }
    }
    heap_free(bytes);
    if (status != STATUS_OK) {
        if (message != NULL) {
            frame_free(message);
        }
        return status;
    }
    *out_command = (Ballast__Link__V1__Command *)message;
    return STATUS_OK;
}

/* A paused run waits here, in short naps on rank 0; the others wait in the exchange. */
enum { PAUSE_NAP_MS = 100 };

static void pause_where_due(struct run *run)
{
    for (uint32_t i = 0; i < run->config->n_pause_at; i++) {
        if (run->config->pause_at[i] == run->step) {
            set_paused(run, true, "pause_at");
        }
    }
    if (run->resume_until != 0 && run->step >= run->resume_until) {
        run->resume_until = 0;
        set_paused(run, true, "resume --for");
    }
}

static enum status one_round(struct run *run, bool is_first, bool *out_more, struct failure *why)
{
    Ballast__Link__V1__Command *heard = NULL;
    if (run->comm.rank == 0) {
        heard = run->paused && !save_signal && !end_signal ? link_wait(run->link, PAUSE_NAP_MS)
                                                           : link_take(run->link);
    }
    const size_t n_bytes = heard == NULL ? 0 : ballast__link__v1__command__get_packed_size(heard);
    struct ballot sum = {0};
    enum status status = exchange(run, n_bytes, &sum, why);
    if (status == STATUS_OK && run->unreported) {
        run->unreported = false;
        status = run_after_step(run, why);
    }
    /* Not before the step has its line and its save: who waits for a pause finds both. */
    if (status == STATUS_OK && is_first) {
        pause_where_due(run);
    }
    Ballast__Link__V1__Command *command = NULL;
    if (status == STATUS_OK && sum.command_bytes > 0) {
        struct failure refusal = {0};
        status = share_command(run, heard, sum.command_bytes, &command, &refusal);
        if (status == STATUS_OUT_OF_MEMORY) {
            Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
            if (heard != NULL) {
                answer(run, heard, &result, status, refusal.text);
            }
            status = STATUS_OK; /* dropped on every rank, and said so */
        } else if (status != STATUS_OK) {
            *why = refusal;
        }
    }
    if (status == STATUS_OK && command != NULL) {
        status = carry_out(run, command, why);
    }
    if (command != NULL) {
        frame_free(&command->base);
    }
    if (heard != NULL) {
        link_free_command(heard);
    }
    if (status == STATUS_OK && sum.says != 0) {
        status = run_end_on_signal(run, (sum.says & SAY_SAVE_AND_END) != 0, why);
    }
    *out_more = sum.command_bytes > 0 || run->paused;
    return status;
}

/* Commands that keep coming must not keep the run from training. */
enum { MAX_ROUNDS = 64 };

enum status run_boundary(struct run *run, struct failure *why)
{
    bool more = true;
    for (int round = 0; more && !run->stopping && (round < MAX_ROUNDS || run->paused); round++) {
        const enum status status = one_round(run, round == 0, &more, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}
