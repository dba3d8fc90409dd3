/* A client's request, decoded and put to use, with an allocation failing somewhere.
 * links: base proto
 * cases: 2000000
 *
 * The first byte is the allocation that fails (0: none; above 127 all later ones too); the rest
 * is a Request's payload. Changes go into a strategy, all of it into JSON. Nothing may leak, and
 * a strategy that is refused must stay as it was. */
#include <string.h>
#include "proto/base/heap.h"
#include "proto/control.pb-c.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include "proto/json.h"
#include "tests/fuzz/fuzz.h"

static const struct strategy_limits limits = {12, 4, 32, 1024, 12, 4};

static void try_changes(Ballast__V1__Setting *const *changes, size_t n)
{
    struct strategy base, strategy, back;
    struct failure why = {0};
    strategy_default(&base, &limits);
    strategy = base;
    enum status status = convert_settings_to_strategy(changes, n, &strategy, &why);
    if (status != STATUS_OK) {
        fuzz_check(why.status == status && why.text[0] != '\0');
        fuzz_check(memcmp(&base, &strategy, sizeof base) == 0);
        return;
    }
    why.status = STATUS_OK;
    status = strategy_check(&strategy, &limits, &why);
    fuzz_check(status == why.status);
    fuzz_check(status != STATUS_OK || strategy_accumulation(&strategy, &limits) > 0);
    Ballast__V1__Setting **settings;
    size_t n_settings;
    if (convert_strategy_to_settings(NULL, &strategy, &settings, &n_settings) == STATUS_OK) {
        back = base;
        fuzz_check(convert_settings_to_strategy(settings, n_settings, &back, &why) == STATUS_OK);
        fuzz_check(strategy_equal(&back, &strategy));
        heap_free(settings);
    }
}

static void use(const ProtobufCMessage *message)
{
    const Ballast__Control__V1__Request *request = (const void *)message;
    if (request->body_case == BALLAST__CONTROL__V1__REQUEST__BODY_SET) {
        try_changes(request->set->changes, request->set->n_changes);
    } else if (request->body_case == BALLAST__CONTROL__V1__REQUEST__BODY_PLAN) {
        try_changes(request->plan->changes, request->plan->n_changes);
    }
    json_t *object = json_from_message(message);
    fuzz_check(object != NULL || heap_failures() > 0);
    char *text = object == NULL ? NULL : json_format(object, JSON_LINE_FLAGS);
    fuzz_check(text != NULL || heap_failures() > 0);
    heap_free(text);
    json_decref(object);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    if (n == 0) {
        return 0;
    }
    json_use_heap();
    int64_t live = heap_live();
    heap_fail(bytes[0] & 0x7F, bytes[0] > 0x7F);
    ProtobufCMessage *message = NULL;
    enum status status =
        frame_decode(&ballast__control__v1__request__descriptor, bytes + 1, n - 1, &message);
    fuzz_check((status == STATUS_OK) == (message != NULL));
    fuzz_check(status != STATUS_OUT_OF_MEMORY || heap_failures() > 0);
    if (status == STATUS_OK) {
        use(message);
        frame_free(message);
    }
    heap_fail(0, false);
    fuzz_check(heap_live() == live);
    return 0;
}

static size_t put(const Ballast__Control__V1__Request *request, uint8_t *out, size_t capacity)
{
    size_t n = protobuf_c_message_get_packed_size(&request->base);
    if (n + 1 > capacity) {
        abort();
    }
    out[0] = 0;
    return 1 + protobuf_c_message_pack(&request->base, out + 1);
}

size_t fuzz_seed(size_t index, uint8_t *out, size_t capacity)
{
    static char *const keys[] = {"checkpointing", "micro_batch", "offload.optimizer.fraction",
                                 "zero.stage"};
    static char *const values[] = {"block:2", "4", "0.5", "1"};
    enum { N_CHANGES = 4 };
    Ballast__V1__Setting settings[N_CHANGES], *changes[N_CHANGES];
    for (size_t i = 0; i < N_CHANGES; i++) {
        ballast__v1__setting__init(&settings[i]);
        settings[i].key = keys[i];
        settings[i].value = values[i];
        changes[i] = &settings[i];
    }
    Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
    Ballast__Control__V1__SetRequest set = BALLAST__CONTROL__V1__SET_REQUEST__INIT;
    Ballast__Control__V1__PlanRequest plan = BALLAST__CONTROL__V1__PLAN_REQUEST__INIT;
    Ballast__Control__V1__WaitRequest wait = BALLAST__CONTROL__V1__WAIT_REQUEST__INIT;
    Ballast__Control__V1__MemoryRequest memory = BALLAST__CONTROL__V1__MEMORY_REQUEST__INIT;
    request.id = index + 1;
    switch (index) {
    case 0:
        set.n_changes = N_CHANGES;
        set.changes = changes;
        set.dry_run = 1;
        request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_SET;
        request.set = &set;
        return put(&request, out, capacity);
    case 1:
        plan.n_changes = 2;
        plan.changes = changes;
        request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_PLAN;
        request.plan = &plan;
        return put(&request, out, capacity);
    case 2:
        wait.condition_case = BALLAST__CONTROL__V1__WAIT_REQUEST__CONDITION_EVENT;
        wait.event = "switch";
        request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_WAIT;
        request.wait = &wait;
        return put(&request, out, capacity);
    case 3:
        memory.at_peak_case = BALLAST__CONTROL__V1__MEMORY_REQUEST__AT_PEAK_PHASE;
        memory.phase = BALLAST__V1__PHASE__PHASE_FORWARD;
        request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_MEMORY;
        request.memory = &memory;
        return put(&request, out, capacity);
    default:
        return 0;
    }
}
