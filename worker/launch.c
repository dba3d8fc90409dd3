/* Bringing a run up, part by part, and down again in reverse.
 *
 *   ranks -> faults -> run directory -> data -> kernels -> layout -> the save to resume from
 *         -> plan (does it fit?) -> daemon and link -> state -> start values or a save
 *
 * Whatever one rank cannot do, all learn by a vote before any goes on. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "proto/convert.h"
#include "proto/socket_path.h"
#include "worker/account.h"
#include "worker/run.h"
#include "worker/strategy/advise.h"

enum { SAVE_STAGING_BYTES = 4 * 1024 * 1024 };

static enum exit_code code_of(enum status status)
{
    switch ((int)status) {
    case STATUS_BAD_DATA: /* files that the configuration names */
        return EXIT_CODE_CONFIG;
    case STATUS_DOES_NOT_FIT:
        return EXIT_CODE_DOES_NOT_FIT;
    case STATUS_OUT_OF_MEMORY:
        return EXIT_CODE_OUT_OF_MEMORY;
    case STATUS_NO_SAVE:
        return EXIT_CODE_NO_SAVE;
    case STATUS_RANK_LOST:
    case STATUS_DEADLINE:
        return EXIT_CODE_RANK_LOST;
    default:
        return (int)status < 200 ? EXIT_CODE_CONFIG : EXIT_CODE_FAILED;
    }
}

enum status run_agree(struct run *run, const char *what, enum status local, struct failure *why)
{
    struct failure vote_why = {0};
    int32_t all[COMM_MAX_RANKS];
    const int32_t mine = (int32_t)local;
    const enum status status =
        run->comm.table->exchange(&run->comm, what, &mine, sizeof mine, all, &vote_why);
    if (status != STATUS_OK) {
        if (local == STATUS_OK) {
            *why = vote_why;
        }
        return local == STATUS_OK ? status : local;
    }
    for (uint32_t rank = 0; rank < run->comm.size; rank++) {
        if (all[rank] != STATUS_OK) {
            run->exit_code = code_of((enum status)all[rank]);
            return local != STATUS_OK ? local
                                      : fail(why, STATUS_VOTED_DOWN,
                                             "%s: rank %u failed, see its message", what, rank);
        }
    }
    return STATUS_OK;
}

/* ---- ranks ---- */

static enum status open_ranks(struct run *run, int *argc, char ***argv, struct failure *why)
{
    const struct config *config = run->config;
    enum status status = comm_mpi_init(&run->comm, config->step_timeout_s, argc, argv, why);
    if (status != STATUS_OK) {
        return status;
    }
    log_init("ballast-worker", (int)run->comm.rank, LOG_INFO);
    if (run->comm.rank == 0) {
        config_log_notes(config);
    }
    if (config->expect_ranks != 0 && run->comm.size != config->expect_ranks) {
        status = fail(why, STATUS_CONFLICT, "%u ranks came up, --expect-ranks says %u",
                      run->comm.size, config->expect_ranks);
    } else if (run->comm.size != config->world_size) {
        status = fail(why, STATUS_CONFLICT,
                      "%u ranks came up, the launcher's environment says %u", run->comm.size,
                      config->world_size);
    }
    for (uint32_t i = 0; i < config->n_faults && status == STATUS_OK; i++) {
        status = fault_arm(config->faults[i], why);
    }
    if (status == STATUS_OK && fault_highest_rank() >= (int)run->comm.size) {
        status = fail(why, STATUS_OUT_OF_RANGE, "--fault: rank=%d is not one of this run's %u",
                      fault_highest_rank(), run->comm.size);
    }
    fault_here((int)run->comm.rank, 0, PHASE_SETUP);
    return run_agree(run, "ranks", status, why);
}

/* ---- run directory ---- */

static enum status make_directory(const char *path, struct failure *why)
{
    char partial[CONFIG_PATH_BYTES];
    snprintf(partial, sizeof partial, "%s", path);
    for (char *slash = partial + 1;; slash++) {
        slash = strchr(slash, '/');
        if (slash != NULL) {
            *slash = '\0';
        }
        if (mkdir(partial, 0700) != 0 && errno != EEXIST) {
            return fail(why, STATUS_IO, "cannot create %s: %s", partial, strerror(errno));
        }
        if (slash == NULL) {
            return STATUS_OK;
        }
        *slash = '/';
    }
}

static bool file_exists(const char *directory, const char *name)
{
    char path[CONFIG_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return access(path, F_OK) == 0;
}

/* A fresh start in a used directory would mix two runs' files. */
static enum status check_directory(const struct run *run, struct failure *why)
{
    const bool used =
        file_exists(run->run_dir, "steps.jsonl") || file_exists(run->run_dir, "events.jsonl");
    if (!run->config->resume && used) {
        return fail(why, STATUS_CONFLICT,
                    "%s belongs to an earlier run: add --resume latest to go on with it, or choose "
                    "another --run-dir",
                    run->run_dir);
    }
    return STATUS_OK;
}

static enum status open_directory(struct run *run, struct failure *why)
{
    umask(077);
    enum status status = STATUS_OK;
    if (run->comm.rank == 0) {
        status = make_directory(run->config->run_dir, why);
        if (status == STATUS_OK && realpath(run->config->run_dir, run->run_dir) == NULL) {
            status = fail(why, STATUS_IO, "cannot resolve %s: %s", run->config->run_dir,
                          strerror(errno));
        }
        if (status == STATUS_OK) {
            status = check_directory(run, why);
        }
        const char *base = strrchr(run->run_dir, '/');
        snprintf(run->run_id, sizeof run->run_id, "%.24s-%d", base == NULL ? "run" : base + 1,
                 (int)getpid());
        for (char *c = run->run_id; *c != '\0'; c++) {
            const bool plain = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') ||
                               (*c >= '0' && *c <= '9') || *c == '-' || *c == '_';
            *c = plain ? *c : '_';
        }
    }
    status = run_agree(run, "run directory", status, why);
    if (status == STATUS_OK) {
        status = run->comm.table->broadcast(&run->comm, "run directory", run->run_dir,
                                            sizeof run->run_dir, why);
    }
    if (status == STATUS_OK) {
        status = run->comm.table->broadcast(&run->comm, "run id", run->run_id, sizeof run->run_id,
                                            why);
    }
    return status;
}

/* ---- data ---- */

static enum status open_files(const struct config_paths *paths, const struct config *config,
                              struct tokens **out_tokens, struct failure *why)
{
    const char *list[CONFIG_MAX_FILES];
    for (uint32_t i = 0; i < paths->n; i++) {
        list[i] = paths->path[i];
    }
    return tokens_open(list, paths->n, config->data_format, config->spec.vocab, config->seq_len,
                       out_tokens, why);
}

static enum status open_data(struct run *run, struct failure *why)
{
    const struct config *config = run->config;
    enum status status = open_files(&config->data, config, &run->data, why);
    if (status == STATUS_OK && config->eval_data.n > 0) {
        status = open_files(&config->eval_data, config, &run->eval_data, why);
    }
    if (status == STATUS_OK) {
        run->sampler = (struct sampler){config->seed, tokens_n_samples(run->data), config->shuffle};
    }
    return run_agree(run, "data", status, why);
}

/* ---- options ---- */

static struct schedule schedule_of(const struct config *config)
{
    static const enum schedule_kind kinds[] = {
        [SCHEDULE_CONSTANT] = SCHEDULE_KIND_CONSTANT,
        [SCHEDULE_COSINE] = SCHEDULE_KIND_COSINE,
        [SCHEDULE_LINEAR] = SCHEDULE_KIND_LINEAR,
    };
    return (struct schedule){
        .kind = kinds[config->schedule],
        .lr = config->lr,
        .warmup_min_lr = config->warmup_min_lr,
        .warmup_steps = config->warmup_steps,
        .total_steps = config->total_steps,
        .min_ratio = config->lr_min_ratio,
    };
}

void launch_options(const struct config *config, struct training_options *out_options)
{
    *out_options = (struct training_options){
        .seed = config->seed,
        .beta1 = config->beta1,
        .beta2 = config->beta2,
        .eps = config->eps,
        .weight_decay = config->weight_decay,
        .gradient_clipping = config->gradient_clipping,
        .schedule = schedule_of(config),
        .reduce_bucket_bytes = (size_t)config->reduce_bucket,
        .reduce_by_library = config->reductions == REDUCTIONS_LIBRARY,
        .eval_micro_batch = config->eval_micro_batch,
        .save_staging_bytes = SAVE_STAGING_BYTES,
        .paint = config->paint,
    };
    config_limits(config, &out_options->limits);
}

/* ---- saves ---- */

static enum status open_saves(struct run *run, struct failure *why)
{
    enum status status = STATUS_OK;
    run->save_staging = heap_alloc(run->options.save_staging_bytes);
    if (run->save_staging == NULL) {
        status = fail(why, STATUS_OUT_OF_MEMORY, "no host memory for %zu bytes of staging",
                      run->options.save_staging_bytes);
    }
    status = run_agree(run, "staging", status, why);
    return status == STATUS_OK && run->config->resume ? run_find_save(run, why) : status;
}

/* ---- the plan ---- */

static void describe_model(struct run *run)
{
    char count[UNITS_TEXT_BYTES];
    const struct model_spec *spec = run->units.spec;
    snprintf(run->model_text, sizeof run->model_text, "%s: %u layers, %s parameters", spec->name,
             spec->n_layers, units_format_count((double)spec_n_parameters(spec), count));
}

/* The plan does not fit: the same report as for a shortage that happens while running. */
static void refuse_plan(struct run *run)
{
    if (run->comm.rank != 0) {
        return;
    }
    const struct plan *plan = &run->plan;
    const enum phase phase = plan->binding_phase;
    const uint64_t state = plan->resident.committed_bytes;
    const uint64_t limit = run->device.capacity_bytes;
    const struct shortage shortage = {
        .any = true,
        .phase = state > limit ? PHASE_SETUP : phase,
        .asked_bytes = state > limit ? state : plan->phases[phase].committed_bytes - state,
        .held_bytes = state > limit ? 0 : state,
        .limit_bytes = limit,
    };
    const uint64_t nothing[N_PHASES] = {0};
    oom_fill(&run->oom, &shortage, plan, state > limit ? 0 : limit - state, run->step, 0,
             plan->resident.bytes, nothing);
    if (state > limit) {
        run->oom.tensor = "parameters, gradients and optimizer states";
        run->oom.category = CATEGORY_OPTIMIZER;
    }
    snprintf(run->oom.cause, sizeof run->oom.cause, "planned, before the first step");
    const struct predictor predictor = run_predictor(run);
    run->oom.n_remedies = advise_remedies(&predictor, &run->start_strategy, &run->options.limits,
                                          limit, run->oom.remedies);
    oom_print(&run->oom, stderr);
}

static enum status make_plan(struct run *run, struct failure *why)
{
    enum status status =
        rehearse(&run->rehearsal, &run->start_strategy, &run->plan, &run->cost, why);
    status = run_agree(run, "plan", status, why);
    if (status != STATUS_OK) {
        return status;
    }
    describe_model(run);
    if (run->comm.rank == 0) {
        account_print(&(struct account_view){&run->config->spec, &run->options,
                                             &run->start_strategy, &run->plan, &run->cost,
                                             run->device.capacity_bytes, run->ops->dtype},
                      stdout);
    }
    if (run->plan.committed_bytes > run->device.capacity_bytes) {
        char needs[UNITS_TEXT_BYTES];
        char limit[UNITS_TEXT_BYTES];
        refuse_plan(run);
        return fail(why, STATUS_DOES_NOT_FIT,
                    "the plan needs %s (%llu bytes) in %s, the limit is %s (%llu bytes): take one "
                    "of the remedies, or raise device_memory",
                    units_format_bytes(run->plan.committed_bytes, needs),
                    (unsigned long long)run->plan.committed_bytes,
                    phase_name(run->plan.binding_phase),
                    units_format_bytes(run->device.capacity_bytes, limit),
                    (unsigned long long)run->device.capacity_bytes);
    }
    return STATUS_OK;
}

/* ---- daemon and link ---- */

static enum status start_daemon(struct run *run, bool restarted, struct failure *why)
{
    const struct spawn_options options = {
        .run_dir = run->run_dir,
        .run_id = run->run_id,
        .socket_path = run->socket_path,
        .link_path = run->link_path,
        .restarted = restarted,
    };
    return spawn_daemon(&options, &run->daemon_pid, why);
}

/* Link thread: the daemon is gone. */
static enum status restart_daemon(void *user, struct failure *why)
{
    struct run *run = user;
    int exit_code = 0;
    if (run->daemon_pid > 0 && spawn_reap(run->daemon_pid, &exit_code)) {
        log_warn("the daemon ended with code %d: starting another", exit_code);
    }
    return start_daemon(run, true, why);
}

/* Link thread. The arrays stay until the next call. */
static void fill_hello(void *user, Ballast__Link__V1__WorkerHello *hello)
{
    static Ballast__V1__Setting **strategy;
    static Ballast__V1__Setting **limits;
    struct run *run = user;
    heap_free(strategy);
    heap_free(limits);
    strategy = limits = NULL;
    pthread_mutex_lock(&run->shared.lock);
    const struct strategy current = run->shared.strategy;
    hello->generation = run->shared.generation;
    hello->step = run->shared.step;
    hello->paused = run->shared.paused;
    pthread_mutex_unlock(&run->shared.lock);
    hello->run_dir = run->run_dir;
    hello->n_steps = run->config->steps;
    hello->model = run->model_text;
    hello->device = (char *)(uintptr_t)(run->device.kind == DEVICE_CUDA ? run->gpu.name : "cpu");
    hello->tokens_per_step =
        (uint64_t)run->config->global_batch * run->config->seq_len;
    if (convert_strategy_to_settings(NULL, &current, &strategy, &hello->n_strategy) == STATUS_OK) {
        hello->strategy = strategy;
    }
    if (convert_limits_to_settings(&run->options.limits, &limits, &hello->n_limits) == STATUS_OK) {
        hello->limits = limits;
    }
}

static enum status open_link(struct run *run, struct failure *why)
{
    if (!run->config->daemon) {
        return STATUS_OK;
    }
    enum status status = STATUS_OK;
    if (run->comm.rank == 0) {
        char control[SOCKET_PATH_BYTES];
        char link[SOCKET_PATH_BYTES];
        status = socket_path_for_run(run->run_id, control, link, why);
        if (status == STATUS_OK) {
            snprintf(run->socket_path, sizeof run->socket_path, "%s", control);
            snprintf(run->link_path, sizeof run->link_path, "%s", link);
            status = start_daemon(run, false, why);
        }
    }
    status = run_agree(run, "daemon", status, why);
    if (status == STATUS_OK) {
        status = run->comm.table->broadcast(&run->comm, "link path", run->link_path,
                                            sizeof run->link_path, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    const struct link_options options = {
        .path = run->link_path,
        .run_id = run->run_id,
        .rank = run->comm.rank,
        .world_size = run->comm.size,
        .telemetry = &run->telemetry,
        .comm = &run->comm,
        .fill_hello = fill_hello,
        .answer_plan = run_answer_plan,
        .restart_daemon = restart_daemon,
        .user = run,
    };
    status = link_start(&options, &run->link, why);
    return run_agree(run, "link", status, why);
}

/* ---- state ---- */

static enum status exchange(void *user, const char *name, const void *mine, size_t bytes, void *all,
                            struct failure *why)
{
    struct comm *comm = user;
    return comm->table->exchange(comm, name, mine, bytes, all, why);
}

/* The state's own commits come before there is a workspace to admit with: look at the node
 * first, so that ranks do not race one another. */
static enum status check_node(struct run *run, struct failure *why)
{
    const uint64_t headroom = admit_node_headroom();
    const uint64_t on_device = run->device.kind == DEVICE_CPU ? run->plan.resident.committed_bytes
                                                              : 0;
    const uint64_t together =
        (on_device + plan_host_bytes(&run->plan.resident)) * run->comm.node_size;
    if (together > headroom) {
        return fail(why, STATUS_OUT_OF_MEMORY,
                    "the state of %u ranks needs %llu bytes, this node has %llu left",
                    run->comm.node_size, (unsigned long long)together,
                    (unsigned long long)headroom);
    }
    return STATUS_OK;
}

/* Resident bytes of this process, 0 when the system does not say. */
static uint64_t process_resident_bytes(void)
{
    unsigned long long total = 0;
    unsigned long long resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file == NULL) {
        return 0;
    }
    if (fscanf(file, "%llu %llu", &total, &resident) != 2) {
        resident = 0;
    }
    fclose(file);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static enum status open_state(struct run *run, struct failure *why)
{
    enum status status = run_agree(run, "node memory", check_node(run, why), why);
    if (status != STATUS_OK) {
        return status;
    }
    /* Nothing of the state is there yet: what is resident now, the program and its libraries
     * took. */
    const uint64_t external_bytes = process_resident_bytes();
    const struct state_host host = {
        .device = &run->host,
        .ops = run->host_ops != NULL ? run->host_ops : run->ops,
        .comm = run->control.table != NULL ? &run->control : &run->comm,
    };
    status = training_init(&run->training, &run->options, &run->start_strategy, &run->units,
                           &run->device, run->ops, &run->comm, &host, &run->telemetry, why);
    const bool have_training = status == STATUS_OK;
    if (status == STATUS_OK) {
        status = workspace_follow(&run->training.workspace, &run->plan, why);
    }
    status = run_agree(run, "state", status, why);
    if (status != STATUS_OK) {
        if (have_training) {
            training_fini(&run->training);
        }
        return status;
    }
    ledger_add(&run->training.ledger, TIER_HOST, CATEGORY_TEMP, run->options.save_staging_bytes);
    ledger_add(&run->training.ledger, TIER_HOST, CATEGORY_EXTERNAL, external_bytes);
    ledger_external(&run->training.ledger, run->external.context_bytes +
                                               run->external.library_bytes +
                                               run->external.nccl_bytes);
    run->training.plan = &run->plan;
    run->training.enter_phase = run_enter_phase;
    run->training.user = run;
    run->admit = (struct admit){
        .workspace = &run->training.workspace,
        .plan = &run->plan,
        .host_backed = run->device.kind == DEVICE_CPU,
        .rank = run->comm.rank,
        .size = run->comm.size,
        .node = run->comm.node,
        .exchange = exchange,
        .user = &run->comm,
        .node_headroom = admit_node_headroom,
    };
    return STATUS_OK;
}

static enum status start_values(struct run *run, struct failure *why)
{
    if (run->config->resume) {
        return run_load_save(run, why);
    }
    const enum status status = params_seed(&run->training.params, run->config->seed, why);
    return status == STATUS_OK ? run->ops->check(run->ops, why) : status;
}

static void install_signals(void)
{
    struct sigaction action = {.sa_handler = run_note_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void announce(struct run *run)
{
    pthread_mutex_lock(&run->shared.lock);
    run->shared.strategy = run->training.strategy;
    run->shared.generation = run->generation;
    run->shared.step = run->step;
    pthread_mutex_unlock(&run->shared.lock);
    struct strategy plain;
    char strategy[STRATEGY_TEXT_BYTES];
    strategy_default(&plain, &run->options.limits);
    strategy_format(&plain, &run->training.strategy, strategy);
    run_event(run, "start", "", "%s at step %llu on %u rank%s: %s",
              run->config->resume ? "resumed" : "started", (unsigned long long)run->step,
              run->comm.size, run->comm.size == 1 ? "" : "s",
              strategy[0] == '\0' ? "default strategy" : strategy);
    run_report_state(run, "training", true);
}

enum status run_open(struct run *run, const struct config *config, int *argc, char ***argv,
                     enum exit_code *out_code, struct failure *why)
{
    *run = (struct run){.config = config, .telemetry = {.wake_fd = -1}};
    atomic_store(&run->telemetry.layer, -1);
    pthread_mutex_init(&run->shared.lock, NULL);
    run->shared.strategy = run->start_strategy = config->strategy;
    enum status status = open_ranks(run, argc, argv, why);
    if (status == STATUS_OK) {
        status = open_directory(run, why);
    }
    if (status == STATUS_OK) {
        status = open_data(run, why);
    }
    if (status == STATUS_OK) {
        status = run_open_device(run, why);
    }
    if (status == STATUS_OK) {
        status = open_saves(run, why);
    }
    if (status == STATUS_OK) {
        status = make_plan(run, why);
    }
    if (status == STATUS_OK) {
        status = open_link(run, why);
    }
    if (status == STATUS_OK) {
        status = open_state(run, why);
    }
    if (status == STATUS_OK) {
        status = run_agree(run, "start values", start_values(run, why), why);
    }
    if (status == STATUS_OK) {
        status = run_agree(run, "steps file",
                       run->comm.rank == 0 ? run_open_steps_file(run, why) : STATUS_OK, why);
    }
    if (status == STATUS_OK) {
        install_signals();
        announce(run);
        return STATUS_OK;
    }
    *out_code = run->exit_code != EXIT_CODE_DONE ? run->exit_code : code_of(status);
    /* What all ranks know, one rank says; and before any rank can end, since the launcher kills the
     * others when it sees a failure. */
    if (status != STATUS_STOPPED &&
        (run->comm.rank == 0 ||
         (status != STATUS_VOTED_DOWN && status != STATUS_DOES_NOT_FIT))) {
        log_error("%s", why->text);
    }
    if (run->link != NULL) {
        run_event_with(run, "end", "", json_pack("{s:i}", "exit_code", (int)*out_code), "%s",
                       why->text);
        link_end(run->link, (uint32_t)*out_code, why->text);
    }
    run_close(run);
    return status;
}

void run_close(struct run *run)
{
    const bool never_linked = !link_connected(run->link);
    link_stop(run->link);
    if (never_linked && run->daemon_pid > 0) {
        kill(run->daemon_pid, SIGTERM); /* it would wait for a first link for a while */
    }
    if (run->steps_file != NULL) {
        fclose(run->steps_file);
    }
    if (run->training.ops != NULL) {
        training_fini(&run->training);
    }
    json_decref(run->manifest);
    heap_free(run->save_staging);
    plan_fini(&run->plan);
    units_fini(&run->units);
    run_close_device(run);
    tokens_close(run->data);
    tokens_close(run->eval_data);
    if (run->comm.table != NULL) {
        run->comm.table->free(&run->comm);
        comm_mpi_fini(&run->comm);
    }
    pthread_mutex_destroy(&run->shared.lock);
}
