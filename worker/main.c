/* ballast-worker: one rank of a training run, or a plan of one.
 *
 * Reads the configuration, and then plans, checks it, or trains. Planning and checking never
 * initialise MPI. */
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/json.h"
#include "worker/account.h"
#include "worker/run.h"

/* What the launcher says, before MPI is up: rank and number of ranks. */
static uint32_t launcher_number(const char *const *names, uint32_t otherwise)
{
    for (; *names != NULL; names++) {
        const char *text = getenv(*names);
        char *end = NULL;
        const unsigned long value = text == NULL ? 0 : strtoul(text, &end, 10);
        if (text != NULL && end != text && *end == '\0' && value <= UINT32_MAX) {
            return (uint32_t)value;
        }
    }
    return otherwise;
}

static uint32_t launcher_size(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "PMI_SIZE", NULL};
    const uint32_t size = launcher_number(names, 1);
    return size == 0 ? 1 : size;
}

static uint32_t launcher_rank(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", NULL};
    return launcher_number(names, 0);
}

/* --plan: the account of any model on any number of ranks, from the dry device alone. */
static enum status print_plan(const struct config *config, struct failure *why)
{
    struct ops *ops = NULL;
    struct units units = {0};
    struct plan plan = {0};
    struct rehearsal_cost cost = {0};
    struct training_options options;
    launch_options(config, &options);
    enum status status =
        cpu_ops_new(config->dtype, config->threads > 0 ? config->threads : 1, &ops, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = units_init(&units, &config->spec, config->world_size, why);
    if (status != STATUS_OK) {
        goto undo_ops;
    }
    const struct rehearsal rehearsal = {.options = &options,
                                        .units = &units,
                                        .target = ops,
                                        .granule_bytes = DEVICE_GRANULE_BYTES,
                                        .world_size = config->world_size};
    status = rehearse(&rehearsal, &config->strategy, &plan, &cost, why);
    if (status != STATUS_OK) {
        goto undo_units;
    }
    const struct account_view view = {&config->spec, &options, &config->strategy,
                                      &plan,         &cost,    config->device_memory, config->dtype};
    if (config->json) {
        status = account_print_json(&view, stdout, why);
    } else {
        account_print(&view, stdout);
    }
    if (status == STATUS_OK && config->device_memory != 0 &&
        plan.committed_bytes > config->device_memory) {
        status = fail(why, STATUS_DOES_NOT_FIT, "the plan needs %llu bytes, device_memory is %llu",
                      (unsigned long long)plan.committed_bytes,
                      (unsigned long long)config->device_memory);
    }
    plan_fini(&plan);
undo_units:
    units_fini(&units);
undo_ops:
    ops->free(ops);
    return status;
}

static int finish(enum status status, const struct failure *why, uint32_t rank)
{
    if (status == STATUS_OK || status == STATUS_STOPPED) {
        return EXIT_CODE_DONE;
    }
    if (rank == 0) {
        log_error("%s", why->text);
    }
    return status == STATUS_DOES_NOT_FIT ? EXIT_CODE_DOES_NOT_FIT
           : status == STATUS_OUT_OF_MEMORY ? EXIT_CODE_OUT_OF_MEMORY
                                            : EXIT_CODE_CONFIG;
}

static int train(const struct config *config, int argc, char **argv)
{
    struct run *run = heap_calloc(1, sizeof *run);
    struct failure why = {0};
    if (run == NULL) {
        log_error("no host memory to start");
        return EXIT_CODE_OUT_OF_MEMORY;
    }
    enum exit_code code = EXIT_CODE_FAILED;
    const enum status status = run_open(run, config, &argc, &argv, &code, &why);
    if (status == STATUS_OK) {
        code = run_train(run);
        run_close(run);
    } else if (status == STATUS_STOPPED) {
        code = EXIT_CODE_DONE;
        if (launcher_rank() == 0) {
            log_info("nothing left to do: the run finished before");
        }
    }
    heap_free(run);
    return (int)code;
}

int main(int argc, char **argv)
{
    const uint32_t rank = launcher_rank();
    log_init("ballast-worker", launcher_size() > 1 ? (int)rank : -1, LOG_INFO);
    json_use_heap();
    struct config *config = heap_calloc(1, sizeof *config);
    struct failure why = {0};
    if (config == NULL) {
        log_error("no host memory to start");
        return EXIT_CODE_OUT_OF_MEMORY;
    }
    int code = EXIT_CODE_DONE;
    enum status status = config_from_args(argc, argv, launcher_size(), config, &why);
    if (status != STATUS_OK) {
        code = finish(status, &why, rank);
    } else if (config->check_only) {
        status = config_check(argc, argv, launcher_size(), stdout, config->json, &why);
        code = finish(status, &why, rank);
    } else if (config->plan_only) {
        code = finish(print_plan(config, &why), &why, rank);
    } else {
        code = train(config, argc, argv);
    }
    heap_free(config);
    return code;
}
