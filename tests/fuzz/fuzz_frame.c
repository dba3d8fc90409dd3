/* Any byte stream through the frame reader and the decoder of each kind of peer.
 * links: base proto
 * cases: 2000000
 *
 * The first byte picks the peer, the cap and how the stream is cut; the rest is the stream. What
 * is taken must encode again, and what was encoded must decode to the same bytes. */
#include <string.h>
#include "proto/base/heap.h"
#include "proto/control.pb-c.h"
#include "proto/frame.h"
#include "proto/link.pb-c.h"
#include "tests/fuzz/fuzz.h"

static const ProtobufCMessageDescriptor *const types[] = {
    &ballast__control__v1__request__descriptor,
    &ballast__control__v1__reply__descriptor,
    &ballast__link__v1__worker_message__descriptor,
    &ballast__link__v1__daemon_message__descriptor,
};

/* Encoded and decoded again, a message keeps its bytes. */
static void check_again(const ProtobufCMessage *message)
{
    uint8_t *first, *second;
    size_t n_first, n_second;
    enum status status = frame_encode(message, &first, &n_first);
    if (status == STATUS_TOO_LARGE) {
        return; /* a negative number takes more bytes than it may come in */
    }
    fuzz_check(status == STATUS_OK);
    size_t prefix = n_first < 0x80 + 1 ? 1 : n_first < 0x4000 + 2 ? 2 : 3;
    ProtobufCMessage *again = NULL;
    status = frame_decode(message->descriptor, first + prefix, n_first - prefix, &again);
    fuzz_check(status == STATUS_OK || status == STATUS_TOO_LARGE);
    if (status == STATUS_OK) {
        fuzz_check(frame_encode(again, &second, &n_second) == STATUS_OK);
        fuzz_check(n_first == n_second && memcmp(first, second, n_first) == 0);
        heap_free(second);
        frame_free(again);
    }
    heap_free(first);
}

static enum status take_frames(struct frame_reader *reader,
                               const ProtobufCMessageDescriptor *descriptor)
{
    const uint8_t *payload;
    size_t n;
    enum status status;
    while ((status = frame_reader_next(reader, &payload, &n)) == STATUS_OK) {
        fuzz_check(n <= FRAME_MAX_BYTES);
        ProtobufCMessage *message = NULL;
        status = frame_decode(descriptor, payload, n, &message);
        fuzz_check(status == STATUS_OK || status == STATUS_MALFORMED || status == STATUS_TOO_LARGE);
        fuzz_check((status == STATUS_OK) == (message != NULL));
        if (message != NULL) {
            check_again(message);
            frame_free(message);
        }
        reader->max_bytes = FRAME_MAX_BYTES;
    }
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    if (n == 0) {
        return 0;
    }
    int64_t live = heap_live();
    unsigned choice = bytes[0];
    size_t piece = (choice >> 3) == 0 ? n : choice >> 3;
    struct frame_reader reader = {.max_bytes = (choice & 4) != 0 ? FRAME_MAX_BYTES : 0};
    enum status status = STATUS_AGAIN;
    for (size_t at = 1; at < n && status == STATUS_AGAIN; at += piece) {
        size_t take = n - at < piece ? n - at : piece;
        status = frame_reader_feed(&reader, bytes + at, take);
        fuzz_check(status == STATUS_OK || status == STATUS_TOO_LARGE);
        fuzz_check(reader.capacity <= 4 * FRAME_MAX_BYTES);
        if (status == STATUS_OK) {
            status = take_frames(&reader, types[choice & 3]);
            fuzz_check(status == STATUS_AGAIN || status == STATUS_TOO_LARGE ||
                       status == STATUS_MALFORMED);
        }
    }
    frame_reader_fini(&reader);
    fuzz_check(heap_live() == live);
    return 0;
}

static size_t put(uint8_t choice, const ProtobufCMessage *message, uint8_t *out, size_t capacity)
{
    uint8_t *frame;
    size_t n;
    if (frame_encode(message, &frame, &n) != STATUS_OK || 1 + 2 * n > capacity) {
        abort();
    }
    out[0] = choice;
    memcpy(out + 1, frame, n);
    memcpy(out + 1 + n, frame, n); /* twice: streams hold more than one */
    heap_free(frame);
    return 1 + 2 * n;
}

size_t fuzz_seed(size_t index, uint8_t *out, size_t capacity)
{
    Ballast__V1__Setting setting = BALLAST__V1__SETTING__INIT, *settings[] = {&setting};
    Ballast__V1__MemoryEntry entry = BALLAST__V1__MEMORY_ENTRY__INIT, *entries[] = {&entry};
    setting.key = "checkpointing";
    setting.value = "block:2";
    entry.tier = BALLAST__V1__TIER__TIER_DEVICE;
    entry.category = BALLAST__V1__CATEGORY__CATEGORY_GRADS;
    entry.bytes = 1 << 20;
    if (index == 0) {
        Ballast__Control__V1__SetRequest set = BALLAST__CONTROL__V1__SET_REQUEST__INIT;
        Ballast__Control__V1__Request request = BALLAST__CONTROL__V1__REQUEST__INIT;
        set.n_changes = 1;
        set.changes = settings;
        set.expected_case = BALLAST__CONTROL__V1__SET_REQUEST__EXPECTED_IF_GENERATION;
        request.id = 300;
        request.body_case = BALLAST__CONTROL__V1__REQUEST__BODY_SET;
        request.set = &set;
        return put(0, &request.base, out, capacity);
    }
    if (index == 1) {
        Ballast__V1__RankState rank = BALLAST__V1__RANK_STATE__INIT, *ranks[] = {&rank};
        Ballast__Control__V1__RanksReply body = BALLAST__CONTROL__V1__RANKS_REPLY__INIT;
        Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
        rank.host = "node";
        rank.phase = BALLAST__V1__PHASE__PHASE_FORWARD;
        rank.layer = -1;
        rank.n_memory = 1;
        rank.memory = entries;
        body.n_ranks = 1;
        body.ranks = ranks;
        reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_RANKS;
        reply.ranks = &body;
        return put(1 | 4 | 7 << 3, &reply.base, out, capacity);
    }
    if (index == 2) {
        Ballast__V1__Hello hello = BALLAST__V1__HELLO__INIT;
        Ballast__Link__V1__WorkerHello body = BALLAST__LINK__V1__WORKER_HELLO__INIT;
        Ballast__Link__V1__WorkerMessage message = BALLAST__LINK__V1__WORKER_MESSAGE__INIT;
        hello.magic = "ballast";
        hello.major = 1;
        body.hello = &hello;
        body.n_strategy = 1;
        body.strategy = settings;
        message.body_case = BALLAST__LINK__V1__WORKER_MESSAGE__BODY_HELLO;
        message.hello = &body;
        return put(2 | 3 << 3, &message.base, out, capacity);
    }
    if (index == 3) {
        Ballast__Link__V1__SimpleCommand simple = BALLAST__LINK__V1__SIMPLE_COMMAND__INIT;
        Ballast__Link__V1__Command command = BALLAST__LINK__V1__COMMAND__INIT;
        Ballast__Link__V1__DaemonMessage message = BALLAST__LINK__V1__DAEMON_MESSAGE__INIT;
        simple.verb = "save";
        command.id = 9;
        command.body_case = BALLAST__LINK__V1__COMMAND__BODY_SIMPLE;
        command.simple = &simple;
        message.body_case = BALLAST__LINK__V1__DAEMON_MESSAGE__BODY_COMMAND;
        message.command = &command;
        return put(3 | 4, &message.base, out, capacity);
    }
    return 0;
}
