/* Where this rank's step runs: the CPU device, or the GPU that the ranks of the node share out.
 *
 * All ranks take the same kind. A rank takes GPU number `node_rank`, modulo the GPUs it sees; ranks
 * that have to share one move data through the host, since NCCL refuses them. */
#include <sched.h>
#include <string.h>
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "worker/parallel/comm_staged.h"
#include "worker/run.h"

/* Left to the driver when device_memory is not given: it grows a little while running. */
enum { CUDA_SPARE_BYTES = 256 * 1024 * 1024 };

static int affinity_cpus(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

static int compute_threads(const struct run *run)
{
    if (run->config->threads > 0) {
        return run->config->threads;
    }
    const int share = affinity_cpus() / (int)run->comm.node_size;
    return share < 1 ? 1 : share;
}

/* The smallest of what the ranks have, so that one plan fits all. */
static enum status least(struct run *run, uint64_t mine, uint64_t *out_bytes, struct failure *why)
{
    uint64_t all[COMM_EXCHANGE_MAX_BYTES / sizeof mine];
    if (run->comm.size > COMM_EXCHANGE_MAX_BYTES / sizeof mine) {
        return fail(why, STATUS_OUT_OF_RANGE, "%u ranks are too many", run->comm.size);
    }
    const enum status status =
        run->comm.table->exchange(&run->comm, "capacity", &mine, sizeof mine, all, why);
    for (uint32_t rank = 0; rank < run->comm.size && status == STATUS_OK; rank++) {
        mine = all[rank] < mine ? all[rank] : mine;
    }
    *out_bytes = mine;
    return status;
}

static uint64_t rounded(uint64_t bytes)
{
    return bytes / DEVICE_GRANULE_BYTES * DEVICE_GRANULE_BYTES;
}

/* ---- the CPU device ---- */

static enum status open_cpu(struct run *run, struct failure *why)
{
    /* Without device_memory the limit is this rank's share of what its node has. */
    uint64_t capacity = run->config->device_memory;
    if (capacity == 0) {
        capacity = rounded(admit_node_headroom() / run->comm.node_size);
    }
    enum status status = least(run, capacity, &capacity, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = cpu_device_init(&run->device, capacity, why);
    if (status == STATUS_OK) {
        status = cpu_ops_new(run->config->dtype, compute_threads(run), &run->ops, why);
    }
    if (status == STATUS_OK && run->comm.rank == 0) {
        status = cpu_ops_new(run->config->dtype, compute_threads(run), &run->planning_ops, why);
    }
    return status;
}

/* ---- a GPU ---- */

/* What each rank knows of its GPU: who shares it, and whether all see one. */
struct gpu_seat {
    int32_t found; /* enum status of looking for GPUs */
    unsigned char uuid[CUDA_UUID_BYTES];
    uint32_t node;
};

static enum status exchange_seats(struct run *run, const struct gpu_seat *mine,
                                  struct gpu_seat *all, struct failure *why)
{
    return run->comm.table->exchange(&run->comm, "devices", mine, sizeof *mine, all, why);
}

enum { MAX_SEATS = COMM_EXCHANGE_MAX_BYTES / sizeof(struct gpu_seat) };

/* Load the library on every rank; all go on with GPUs, or (with `auto`) none does. */
static enum status agree_on_kind(struct run *run, bool *out_cuda, struct failure *why)
{
    *out_cuda = false;
    if (run->config->device == DEVICE_CHOICE_CPU) {
        return STATUS_OK;
    }
    if (run->comm.size > MAX_SEATS) {
        return fail(why, STATUS_OUT_OF_RANGE, "%u ranks are too many", run->comm.size);
    }
    const enum status found = plugin_open(&run->plugin, why);
    const struct gpu_seat mine = {.found = (int32_t)found};
    struct gpu_seat all[MAX_SEATS];
    struct failure exchange_why = {0};
    const enum status status = exchange_seats(run, &mine, all, &exchange_why);
    if (status != STATUS_OK) {
        *why = exchange_why;
        return status;
    }
    for (uint32_t rank = 0; rank < run->comm.size; rank++) {
        if (all[rank].found == STATUS_OK) {
            continue;
        }
        plugin_close(&run->plugin);
        if (run->config->device == DEVICE_CHOICE_AUTO) {
            return STATUS_OK;
        }
        return found != STATUS_OK ? found
                                  : fail(why, STATUS_VOTED_DOWN, "rank %u has no GPU", rank);
    }
    *out_cuda = true;
    return STATUS_OK;
}

static enum status count_sharers(struct run *run, uint32_t *out_n, struct failure *why)
{
    struct gpu_seat mine = {.node = run->comm.node};
    memcpy(mine.uuid, run->gpu.uuid, sizeof mine.uuid);
    struct gpu_seat all[MAX_SEATS];
    const enum status status = exchange_seats(run, &mine, all, why);
    uint32_t n = 0;
    for (uint32_t rank = 0; rank < run->comm.size && status == STATUS_OK; rank++) {
        n += all[rank].node == mine.node && memcmp(all[rank].uuid, mine.uuid, sizeof mine.uuid) == 0;
    }
    *out_n = n;
    return status;
}

/* How a rank's data reach the others: NCCL, or the host where GPUs are shared. */
static enum status open_transport(struct run *run, struct failure *why)
{
    uint32_t sharers = 0;
    uint64_t shared = 0;
    enum status status = count_sharers(run, &sharers, why);
    if (status == STATUS_OK) {
        status = comm_sum_u64(&run->comm, "shared devices", sharers > 1, &shared, why);
    }
    if (status != STATUS_OK || run->comm.size == 1) {
        return status;
    }
    /* The wrapper takes the place of what it wraps, which moves aside. */
    run->control = run->comm;
    if (shared > 0) {
        if (run->comm.rank == 0) {
            log_warn("several ranks share a GPU: data between ranks go through the host");
        }
        status = comm_staged_init(&run->comm, &run->control, &run->device, why);
    } else {
        status = run->plugin.cuda->nccl_init(&run->comm, &run->control, &run->device, why);
    }
    if (status != STATUS_OK) {
        run->comm = run->control;
        run->control = (struct comm){0};
    }
    return status;
}

/* A wait for the GPU: this rank's deadline, and whether the job is being ended. */
static enum status look_while_waiting(void *user, double waited_s, struct failure *why)
{
    const struct run *run = user;
    if (run->comm.abort_flag != NULL && atomic_load(run->comm.abort_flag)) {
        return fail(why, STATUS_STOPPED, "stopped while waiting for the GPU");
    }
    if (waited_s > run->comm.timeout_s) {
        return fail(why, STATUS_DEADLINE,
                    "the GPU has not finished its work within %g s (ballast.step_timeout_s)",
                    run->comm.timeout_s);
    }
    return STATUS_OK;
}

static enum status open_cuda(struct run *run, struct failure *why)
{
    const struct cuda_plugin *cuda = run->plugin.cuda;
    const int index = (int)run->comm.node_rank % run->plugin.n_gpus;
    const struct cuda_watch watch = {look_while_waiting, run};
    enum status status = cuda->open(&run->device, index, 0, &run->gpu, why);
    if (status == STATUS_OK) {
        cuda->watch(&run->device, &watch);
        status = cuda->ops_new(&run->device, run->config->dtype, &run->ops, why);
    }
    if (status == STATUS_OK && run->config->paint) {
        status = fail(why, STATUS_UNSUPPORTED,
                      "ballast.paint looks into the workspace, which only works with --device cpu");
    }
    status = run_agree(run, "GPU", status, why);
    uint32_t sharers = 1;
    if (status == STATUS_OK) {
        status = run_agree(run, "communicators", open_transport(run, why), why);
    }
    if (status == STATUS_OK) {
        status = count_sharers(run, &sharers, why);
    }
    if (status != STATUS_OK) {
        return status;
    }
    status = run_agree(run, "host operations",
                       cpu_ops_new(run->config->dtype, compute_threads(run), &run->host_ops, why),
                       why);
    if (status != STATUS_OK) {
        return status;
    }
    cuda->external(&run->device, &run->external);
    uint64_t capacity = run->config->device_memory;
    if (capacity == 0) {
        const uint64_t free_bytes = run->external.free_bytes / sharers;
        capacity = rounded(free_bytes < CUDA_SPARE_BYTES ? 0 : free_bytes - CUDA_SPARE_BYTES);
    }
    status = least(run, capacity, &capacity, why);
    run->device.capacity_bytes = capacity;
    return status;
}

enum status run_open_device(struct run *run, struct failure *why)
{
    bool cuda = false;
    enum status status = agree_on_kind(run, &cuda, why);
    if (status == STATUS_OK) {
        status = cuda ? open_cuda(run, why) : open_cpu(run, why);
    }
    if (status == STATUS_OK) {
        status = cpu_device_init(&run->host, run->config->host_memory, why);
        run->host.limit = "host_memory";
    }
    if (status == STATUS_OK && run->config->reductions == REDUCTIONS_LIBRARY &&
        run->comm.size > 1 && run->comm.table->reduce_slices == NULL) {
        status = fail(why, STATUS_UNSUPPORTED,
                      "ballast.reductions=library: only NCCL sums here; use --device cuda with a "
                      "GPU a rank, or reductions=ordered");
    }
    if (status == STATUS_OK) {
        status = units_init(&run->units, &run->config->spec, run->comm.size, why);
    }
    status = run_agree(run, "device", status, why);
    if (status != STATUS_OK) {
        return status;
    }
    launch_options(run->config, &run->options);
    run->rehearsal = (struct rehearsal){
        .options = &run->options,
        .units = &run->units,
        .target = run->ops,
        .granule_bytes = run->device.granule_bytes,
        .pinned_bytes = run->device.pinned_bytes,
        .rank = run->comm.rank,
        .world_size = run->comm.size,
    };
    run->planning = run->rehearsal;
    if (run->planning_ops != NULL) {
        run->planning.target = run->planning_ops;
    }
    atomic_store(&run->telemetry.limit_bytes, run->device.capacity_bytes);
    return STATUS_OK;
}

void run_look_at_driver(struct run *run)
{
    if (run->device.kind != DEVICE_CUDA || run->looked_at == run->generation + 1) {
        return;
    }
    run->looked_at = run->generation + 1;
    struct cuda_external now = {0};
    run->plugin.cuda->external(&run->device, &now);
    atomic_store_explicit(&run->telemetry.driver_bytes, now.process_bytes, memory_order_relaxed);
    const struct cuda_external *start = &run->external;
    const uint64_t known = atomic_load(&run->device.committed_bytes) + start->context_bytes +
                           start->library_bytes + start->nccl_bytes;
    if (now.process_bytes > known + known / 50) {
        char counted[UNITS_TEXT_BYTES];
        char ours[UNITS_TEXT_BYTES];
        units_format_bytes(now.process_bytes, counted);
        units_format_bytes(known, ours);
        log_warn("the driver counts %s for this process, known are %s: a library has taken memory "
                 "after setup",
                 counted, ours);
        run_event(run, "external", "", "rank %u: the driver counts %s, known are %s",
                  run->comm.rank, counted, ours);
    }
}

void run_close_device(struct run *run)
{
    if (run->planning_ops != NULL) {
        run->planning_ops->free(run->planning_ops);
    }
    if (run->control.table != NULL) {
        run->comm.table->free(&run->comm);
        run->comm = run->control;
    }
    if (run->ops != NULL) {
        run->ops->free(run->ops);
    }
    if (run->host_ops != NULL) {
        run->host_ops->free(run->host_ops);
    }
    if (run->host.table != NULL) {
        device_fini(&run->host);
    }
    if (run->device.table != NULL) {
        device_fini(&run->device);
    }
    plugin_close(&run->plugin);
}
