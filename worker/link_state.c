/* The greeting and the rank's state as frames. Owns nothing. Link thread, but link_encode(),
 * which is pure. */
#include "worker/link_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "proto/frame.h"
#include "proto/version.h"

_Static_assert((int)BALLAST__V1__PHASE__PHASE_SWITCH == PHASE_SWITCH + 1, "phases in one order");
_Static_assert((int)BALLAST__V1__TIER__TIER_NVME == TIER_NVME + 1, "tiers in one order");
_Static_assert((int)BALLAST__V1__CATEGORY__CATEGORY_EXTERNAL == CATEGORY_EXTERNAL + 1,
               "categories in one order");

struct link_place link_place_now(const struct telemetry *telemetry)
{
    return (struct link_place){
        .phase = atomic_load_explicit(&telemetry->phase, memory_order_relaxed),
        .step = atomic_load_explicit(&telemetry->step, memory_order_relaxed),
        .micro_step = atomic_load_explicit(&telemetry->micro_step, memory_order_relaxed),
    };
}

bool link_place_same(struct link_place a, struct link_place b)
{
    return a.phase == b.phase && a.step == b.step && a.micro_step == b.micro_step;
}

static enum link_role role_of(const Ballast__Link__V1__WorkerMessage *message)
{
    switch (message->body_case) {
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RUN:
        return message->run->plan != NULL ? LINK_ROLE_PLAN : LINK_ROLE_STATE;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_OOM:
        return LINK_ROLE_OOM;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_STEP:
        return LINK_ROLE_STEP;
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_HELLO:
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RANK:
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_EVENT:
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RESULT:
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY_END:
    case BALLAST__LINK__V1__WORKER_MESSAGE__BODY__NOT_SET:
    case _BALLAST__LINK__V1__WORKER_MESSAGE__BODY__CASE_IS_INT_SIZE:
    default:
        return LINK_ROLE_NONE;
    }
}

enum status link_encode(const Ballast__Link__V1__WorkerMessage *message,
                        struct link_frame *out_frame)
{
    struct link_frame frame = {0};
    enum status status = frame_encode(&message->base, &frame.bytes, &frame.n);
    if (status != STATUS_OK) {
        return status;
    }
    frame.telemetry = message->body_case == BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RANK ||
                      message->body_case == BALLAST__LINK__V1__WORKER_MESSAGE__BODY_STEP;
    frame.role = role_of(message);
    *out_frame = frame;
    return STATUS_OK;
}

enum status link_encode_hello(const struct link_options *options, const char *host, bool restarted,
                              struct link_frame *out_frame)
{
    char magic[] = PROTOCOL_MAGIC, build[] = BALLAST_VERSION;
    char host_text[LINK_HOST_BYTES];
    snprintf(host_text, sizeof host_text, "%s", host);
    Ballast__V1__Hello greeting = BALLAST__V1__HELLO__INIT;
    greeting.magic = magic;
    if (options->run_id != NULL) {
        greeting.run_id = (char *)(uintptr_t)options->run_id;
    }
    greeting.major = PROTOCOL_MAJOR;
    greeting.minor = PROTOCOL_MINOR;
    greeting.build = build;
    Ballast__Link__V1__WorkerHello hello = BALLAST__LINK__V1__WORKER_HELLO__INIT;
    hello.hello = &greeting;
    hello.rank = options->rank;
    hello.world_size = options->world_size;
    hello.host = host_text;
    hello.pid = (int32_t)getpid();
    if (options->rank == 0 && options->fill_hello != NULL) {
        options->fill_hello(options->user, &hello);
    }
    hello.restarted = hello.restarted || restarted;
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_HELLO;
    message.hello = &hello;
    return link_encode(&message, out_frame);
}

/* The process's resident bytes as the kernel counts them, 0 when it does not say. */
static uint64_t resident_bytes(int statm_fd)
{
    char text[128];
    ssize_t n = statm_fd < 0 ? -1 : pread(statm_fd, text, sizeof text - 1, 0);
    if (n <= 0) {
        return 0;
    }
    text[n] = '\0';
    unsigned long long total, resident;
    if (sscanf(text, "%llu %llu", &total, &resident) != 2) {
        return 0;
    }
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

enum status link_encode_state(const struct link_options *options, const char *host, int statm_fd,
                              struct link_frame *out_frame, struct link_place *out_place)
{
    struct telemetry *telemetry = options->telemetry;
    Ballast__V1__MemoryEntry entries[N_TIERS * N_CATEGORIES];
    Ballast__V1__MemoryEntry *pointers[N_TIERS * N_CATEGORIES];
    size_t n = 0;
    for (int tier = 0; tier < N_TIERS; tier++) {
        for (int category = 0; category < N_CATEGORIES; category++) {
            uint64_t bytes =
                atomic_load_explicit(&telemetry->bytes[tier][category], memory_order_relaxed);
            if (bytes > 0) {
                ballast__v1__memory_entry__init(&entries[n]);
                entries[n].tier = (Ballast__V1__Tier)(tier + 1);
                entries[n].category = (Ballast__V1__Category)(category + 1);
                entries[n].bytes = bytes;
                pointers[n] = &entries[n];
                n++;
            }
        }
    }
    struct link_place place = link_place_now(telemetry);
    char host_text[LINK_HOST_BYTES], collective[128] = "";
    snprintf(host_text, sizeof host_text, "%s", host);
    Ballast__V1__RankState state = BALLAST__V1__RANK_STATE__INIT;
    if (options->comm != NULL) {
        const char *name = atomic_load_explicit(&options->comm->collective, memory_order_relaxed);
        if (name != NULL) {
            snprintf(collective, sizeof collective, "%s", name);
        }
        state.collective_number =
            atomic_load_explicit(&options->comm->n_collectives, memory_order_relaxed);
    }
    state.rank = options->rank;
    state.host = host_text;
    state.pid = (int32_t)getpid();
    state.phase = (Ballast__V1__Phase)(place.phase + 1);
    state.step = place.step;
    state.micro_step = place.micro_step;
    state.layer = atomic_load_explicit(&telemetry->layer, memory_order_relaxed);
    state.collective = collective;
    state.n_memory = n;
    state.memory = pointers;
    state.committed_bytes = atomic_load_explicit(&telemetry->committed_bytes, memory_order_relaxed);
    state.limit_bytes = atomic_load_explicit(&telemetry->limit_bytes, memory_order_relaxed);
    state.driver_bytes = atomic_load_explicit(&telemetry->driver_bytes, memory_order_relaxed);
    state.resident_bytes = resident_bytes(statm_fd);
    state.heartbeat = atomic_load_explicit(&telemetry->heartbeat, memory_order_relaxed);
    Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
    message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_RANK;
    message.rank = &state;
    enum status status = link_encode(&message, out_frame);
    if (status == STATUS_OK) {
        *out_place = place;
    }
    return status;
}
