/* A rank that only talks. See fake_worker.h. */
#include "tests/lib/fake_worker.h"

#include <stdio.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/convert.h"
#include "proto/version.h"
#include "tests/lib/frame_socket.h"

enum status fake_worker_send(struct fake_worker *worker,
                             const Ballast__Link__V1__WorkerMessage *message)
{
    uint8_t *bytes = NULL;
    size_t n = 0;
    enum status status = frame_encode(&message->base, &bytes, &n);
    if (status != STATUS_OK)
        return status;
    status = frame_socket_write(worker->fd, bytes, n);
    heap_free(bytes);
    return status;
}

enum status fake_worker_receive(struct fake_worker *worker, int timeout_ms,
                                Ballast__Link__V1__DaemonMessage **out_message)
{
    ProtobufCMessage *message = NULL;
    enum status status =
        frame_socket_receive(worker->fd, &worker->reader,
                             &ballast__link__v1__daemon_message__descriptor, timeout_ms, &message);
    if (status == STATUS_OK)
        *out_message = (Ballast__Link__V1__DaemonMessage *)message;
    return status;
}

static enum status send_hello(struct fake_worker *worker, const struct fake_hello *options)
{
    Ballast__V1__Hello hello = BALLAST__V1__HELLO__INIT;
    char magic[] = PROTOCOL_MAGIC, build[] = BALLAST_VERSION, host[] = "testhost";
    char run_dir[] = "/nowhere", model[] = "llama 2 layers", device[] = "cpu";
    hello.magic = magic;
    hello.major = options->major ? options->major : PROTOCOL_MAJOR;
    hello.minor = PROTOCOL_MINOR;
    hello.build = build;
    hello.run_id = (char *)options->run_id;
    Ballast__Link__V1__WorkerHello body = BALLAST__LINK__V1__WORKER_HELLO__INIT;
    body.hello = &hello;
    body.rank = options->rank;
    body.world_size = options->world_size;
    body.host = host;
    body.pid = options->pid ? options->pid : getpid();
    body.run_dir = run_dir;
    body.n_steps = options->n_steps;
    body.step = options->step;
    body.generation = options->generation;
    body.model = model;
    body.device = device;
    body.restarted = options->restarted;
    enum status status = convert_strategy_to_settings(NULL, &worker->strategy, &body.strategy,
                                                      &body.n_strategy);
    if (status == STATUS_OK)
        status = convert_limits_to_settings(&worker->limits, &body.limits, &body.n_limits);
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_HELLO;
    message.hello = &body;
    if (status == STATUS_OK)
        status = fake_worker_send(worker, &message);
    heap_free(body.strategy);
    heap_free(body.limits);
    return status;
}

enum status fake_worker_link(struct fake_worker *worker, const struct fake_hello *hello)
{
    *worker = (struct fake_worker){.fd = -1, .rank = hello->rank, .step = hello->step,
                                   .generation = hello->generation};
    worker->reader.max_bytes = FRAME_MAX_BYTES;
    worker->limits = (struct strategy_limits){.n_layers = 4, .world_size = hello->world_size,
                                              .global_batch = 8 * hello->world_size,
                                              .seq_len = 64, .n_heads = 4, .n_kv_heads = 2};
    strategy_default(&worker->strategy, &worker->limits);
    if (frame_socket_connect(hello->link_path, &worker->fd) != STATUS_OK)
        return STATUS_LINK_LOST;
    Ballast__Link__V1__DaemonMessage *answer = NULL;
    enum status status = send_hello(worker, hello);
    if (status == STATUS_OK)
        status = fake_worker_receive(worker, 5000, &answer);
    if (status == STATUS_OK) {
        if (answer->body_case != BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_READY)
            status = STATUS_MALFORMED;
        else if (answer->ready->error[0])
            status = STATUS_REFUSED;
        if (status == STATUS_REFUSED)
            snprintf(worker->error, sizeof worker->error, "%s", answer->ready->error);
        frame_free(&answer->base);
    }
    if (status != STATUS_OK)
        fake_worker_drop(worker);
    return status;
}

void fake_worker_drop(struct fake_worker *worker)
{
    if (worker->fd >= 0)
        close(worker->fd);
    worker->fd = -1;
    frame_reader_fini(&worker->reader);
    worker->reader.max_bytes = FRAME_MAX_BYTES;
}

/* ---- what a rank tells ---- */

static enum status tell(struct fake_worker *worker,
                        Ballast__Link__V1__WorkerMessage__BodyCase body_case, void *body)
{
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = body_case;
    message.rank = body; /* one pointer for every member of the union */
    return fake_worker_send(worker, &message);
}

enum status fake_worker_tell_rank(struct fake_worker *worker, enum phase phase, uint64_t step)
{
    Ballast__V1__RankState state = BALLAST__V1__RANK_STATE__INIT;
    Ballast__V1__MemoryEntry entry = BALLAST__V1__MEMORY_ENTRY__INIT;
    Ballast__V1__MemoryEntry *entries[] = {&entry};
    char host[] = "testhost", collective[] = "all-reduce";
    entry.tier = BALLAST__V1__TIER__TIER_DEVICE;
    entry.category = BALLAST__V1__CATEGORY__CATEGORY_PARAMS;
    entry.bytes = 4096 * (worker->rank + 1);
    state.rank = worker->rank;
    state.host = host;
    state.pid = getpid();
    state.phase = convert_phase_to_wire(phase);
    state.step = step;
    state.layer = -1;
    state.collective = collective;
    state.collective_number = 7;
    state.n_memory = 1;
    state.memory = entries;
    state.heartbeat = step * 10 + 1;
    return tell(worker, BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RANK, &state);
}

enum status fake_worker_tell_step(struct fake_worker *worker, uint64_t step, double loss)
{
    Ballast__V1__StepRecord record = BALLAST__V1__STEP_RECORD__INIT;
    Ballast__V1__PhaseBytes peak = BALLAST__V1__PHASE_BYTES__INIT;
    Ballast__V1__PhaseBytes *peaks[] = {&peak};
    char time[UNITS_TEXT_BYTES];
    peak.phase = BALLAST__V1__PHASE__PHASE_FORWARD;
    peak.bytes = 1000 + step;
    record.time = (char *)convert_now(time);
    record.step = step;
    record.loss = loss;
    record.grad_norm = 1.0;
    record.tokens = 512;
    record.n_peak_bytes = 1;
    record.peak_bytes = peaks;
    record.generation = worker->generation;
    worker->step = step + 1;
    return tell(worker, BALLAST__LINK__V1__WORKER_MESSAGE__BODY_STEP, &record);
}

enum status fake_worker_tell_run(struct fake_worker *worker, bool paused, const char *doing,
                                 bool with_plan)
{
    Ballast__Link__V1__RunState state = BALLAST__LINK__V1__RUN_STATE__INIT;
    Ballast__V1__PlanSummary plan = BALLAST__V1__PLAN_SUMMARY__INIT;
    Ballast__V1__PhasePlan phase = BALLAST__V1__PHASE_PLAN__INIT;
    Ballast__V1__PhasePlan *phases[] = {&phase};
    Ballast__V1__LiveBuffer live = BALLAST__V1__LIVE_BUFFER__INIT;
    Ballast__V1__LiveBuffer *lives[] = {&live};
    char name[] = "logits";
    state.step = worker->step;
    state.generation = worker->generation;
    state.paused = paused;
    state.doing = (char *)doing;
    if (with_plan) {
        live.name = name;
        live.bytes = 99;
        phase.phase = BALLAST__V1__PHASE__PHASE_FORWARD;
        phase.peak_bytes = 123456;
        phase.n_live = 1;
        phase.live = lives;
        plan.n_phases = 1;
        plan.phases = phases;
        plan.limit_bytes = 1 << 20;
        plan.fits = true;
        state.plan = &plan;
    }
    enum status status = convert_strategy_to_settings(NULL, &worker->strategy, &state.strategy,
                                                      &state.n_strategy);
    if (status == STATUS_OK)
        status = tell(worker, BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RUN, &state);
    heap_free(state.strategy);
    return status;
}

enum status fake_worker_tell_event(struct fake_worker *worker, const char *type, const char *text,
                                   const char *details_json)
{
    Ballast__V1__Event event = BALLAST__V1__EVENT__INIT;
    event.type = (char *)type;
    event.step = worker->step;
    event.rank = -1;
    event.generation = worker->generation;
    event.text = (char *)text;
    event.details_json = (char *)details_json;
    return tell(worker, BALLAST__LINK__V1__WORKER_MESSAGE__BODY_EVENT, &event);
}

enum status fake_worker_tell_oom(struct fake_worker *worker, enum phase phase)
{
    Ballast__V1__OomReport report = BALLAST__V1__OOM_REPORT__INIT;
    char tensor[] = "attention", cause[] = "capacity";
    report.step = worker->step;
    report.rank = (int32_t)worker->rank;
    report.phase = convert_phase_to_wire(phase);
    report.tensor = tensor;
    report.cause = cause;
    report.asked_bytes = 1 << 22;
    if (worker->oom_time)
        report.time = (char *)worker->oom_time;
    return tell(worker, BALLAST__LINK__V1__WORKER_MESSAGE__BODY_OOM, &report);
}

enum status fake_worker_tell_end(struct fake_worker *worker, uint32_t exit_code)
{
    Ballast__Link__V1__WorkerEnd end = BALLAST__LINK__V1__WORKER_END__INIT;
    char text[] = "all steps done";
    end.exit_code = exit_code;
    end.text = text;
    return tell(worker, BALLAST__LINK__V1__WORKER_MESSAGE__BODY_END, &end);
}

enum status fake_worker_tell_result(struct fake_worker *worker, uint64_t command_id,
                                    enum status outcome, const char *text, bool final)
{
    Ballast__Link__V1__CommandResult result = BALLAST__LINK__V1__COMMAND_RESULT__INIT;
    result.id = command_id;
    result.status = (char *)status_name(outcome);
    result.text = (char *)text;
    result.step = worker->step;
    result.generation = worker->generation;
    result.final = final;
    return tell(worker, BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RESULT, &result);
}
