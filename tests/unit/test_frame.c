/* Frames: reassembly, caps, encoding, and decoding of hostile bytes within its budget.
 * links: base proto */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/control.pb-c.h"
#include "proto/frame.h"
#include "proto/link.pb-c.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static const ProtobufCMessageDescriptor *const reply_type =
    &ballast__control__v1__reply__descriptor;
static const ProtobufCMessageDescriptor *const request_type =
    &ballast__control__v1__request__descriptor;

/* Decodes from a block of exactly n bytes, so that a sanitizer sees the first one read beyond. */
static enum status decode_exact(const ProtobufCMessageDescriptor *type, const uint8_t *bytes,
                                size_t n, ProtobufCMessage **out_message)
{
    uint8_t *block = malloc(n == 0 ? 1 : n);
    assert_non_null(block);
    memcpy(block, bytes, n);
    enum status status = frame_decode(type, block, n, out_message);
    free(block);
    return status;
}

/* A reply with every kind of field: nested lists, strings, an enum, doubles. */
static void encode_reply(uint8_t **out_bytes, size_t *out_n)
{
    Ballast__V1__Setting settings[2];
    Ballast__V1__Setting *list[2] = {&settings[0], &settings[1]};
    Ballast__V1__PhaseBytes peak = BALLAST__V1__PHASE_BYTES__INIT;
    Ballast__V1__PhaseBytes *peaks[1] = {&peak};
    Ballast__V1__StepRecord step = BALLAST__V1__STEP_RECORD__INIT;
    Ballast__Control__V1__StatusReply status = BALLAST__CONTROL__V1__STATUS_REPLY__INIT;
    Ballast__Control__V1__Reply reply = BALLAST__CONTROL__V1__REPLY__INIT;
    char *reasons[2] = {"slow", "h\xC3\xB6t"};
    for (int i = 0; i < 2; i++) {
        ballast__v1__setting__init(&settings[i]);
        settings[i].key = i == 0 ? "checkpointing" : "micro_batch";
        settings[i].value = i == 0 ? "block:2" : "4";
    }
    peak.phase = BALLAST__V1__PHASE__PHASE_BACKWARD;
    peak.bytes = UINT64_C(123456789012);
    step.loss = 2.5;
    step.n_peak_bytes = 1;
    step.peak_bytes = peaks;
    status.run_id = "r-1";
    status.n_reasons = 2;
    status.reasons = reasons;
    status.n_strategy = 2;
    status.strategy = list;
    status.last_step = &step;
    reply.id = 77;
    reply.body_case = BALLAST__CONTROL__V1__REPLY__BODY_STATUS;
    reply.status = &status;
    assert_int_equal(frame_encode(&reply.base, out_bytes, out_n), STATUS_OK);
}

static void check_reply(const ProtobufCMessage *message)
{
    const Ballast__Control__V1__Reply *reply = (const void *)message;
    assert_int_equal(reply->id, 77);
    assert_int_equal(reply->body_case, BALLAST__CONTROL__V1__REPLY__BODY_STATUS);
    assert_string_equal(reply->status->run_id, "r-1");
    assert_int_equal(reply->status->n_reasons, 2);
    assert_string_equal(reply->status->reasons[1], "h\xC3\xB6t");
    assert_string_equal(reply->status->strategy[0]->value, "block:2");
    assert_true(reply->status->last_step->loss == 2.5);
    assert_int_equal(reply->status->last_step->peak_bytes[0]->bytes, UINT64_C(123456789012));
}

static void round_trip(void **state)
{
    (void)state;
    int64_t live = heap_live();
    uint8_t *bytes;
    size_t n;
    encode_reply(&bytes, &n);
    struct frame_reader reader = {.max_bytes = FRAME_MAX_BYTES};
    assert_int_equal(frame_reader_feed(&reader, bytes, n), STATUS_OK);
    const uint8_t *payload;
    size_t payload_n;
    assert_int_equal(frame_reader_next(&reader, &payload, &payload_n), STATUS_OK);
    ProtobufCMessage *message;
    assert_int_equal(frame_decode(reply_type, payload, payload_n, &message), STATUS_OK);
    check_reply(message);
    assert_int_equal(frame_reader_next(&reader, &payload, &payload_n), STATUS_AGAIN);
    frame_free(message);
    frame_free(NULL);
    frame_reader_fini(&reader);
    heap_free(bytes);
    assert_int_equal(heap_live(), live);
}

static void reassembles_whatever_the_cuts(void **state)
{
    (void)state;
    uint8_t *bytes;
    size_t n;
    encode_reply(&bytes, &n);
    uint8_t stream[4096];
    size_t total = 0;
    for (int i = 0; i < 3; i++) {
        memcpy(stream + total, bytes, n);
        total += n;
        stream[total++] = 0; /* an empty frame is a frame */
    }
    for (size_t piece = 1; piece <= total; piece += piece < 8 ? 1 : 37) {
        struct frame_reader reader = {.max_bytes = FRAME_MAX_BYTES};
        size_t n_frames = 0;
        for (size_t at = 0; at < total; at += piece) {
            size_t take = total - at < piece ? total - at : piece;
            assert_int_equal(frame_reader_feed(&reader, stream + at, take), STATUS_OK);
            const uint8_t *payload;
            size_t payload_n;
            enum status status;
            while ((status = frame_reader_next(&reader, &payload, &payload_n)) == STATUS_OK) {
                size_t prefix = bytes[0] < 0x80 ? 1 : 2;
                assert_int_equal(payload_n, n_frames % 2 == 0 ? n - prefix : 0);
                assert_memory_equal(payload, bytes + prefix, payload_n);
                n_frames++;
            }
            assert_int_equal(status, STATUS_AGAIN);
        }
        assert_int_equal(n_frames, 6);
        frame_reader_fini(&reader);
    }
    heap_free(bytes);
}

static enum status feed_prefix(size_t max_bytes, const uint8_t *bytes, size_t n)
{
    struct frame_reader reader = {.max_bytes = max_bytes};
    const uint8_t *payload;
    size_t payload_n;
    enum status status = frame_reader_feed(&reader, bytes, n);
    if (status == STATUS_OK) {
        status = frame_reader_next(&reader, &payload, &payload_n);
    }
    frame_reader_fini(&reader);
    return status;
}

static void caps_and_prefixes(void **state)
{
    (void)state;
    static const uint8_t len_1024[] = {0x80, 0x08}, len_1025[] = {0x81, 0x08};
    static const uint8_t len_64k[] = {0x80, 0x80, 0x04}, len_64k_1[] = {0x81, 0x80, 0x04};
    static const uint8_t padded[] = {0x81, 0x00, 0x42},
                         long_varint[] = {0x80, 0x80, 0x80, 0x80, 0x80};
    static const uint8_t huge[] = {0xFF, 0xFF, 0xFF, 0xFF, 0x0F};
    assert_int_equal(feed_prefix(0, len_1024, 2), STATUS_AGAIN);
    assert_int_equal(feed_prefix(0, len_1025, 2), STATUS_TOO_LARGE);
    assert_int_equal(feed_prefix(FRAME_MAX_BYTES, len_1025, 2), STATUS_AGAIN);
    assert_int_equal(feed_prefix(FRAME_MAX_BYTES, len_64k, 3), STATUS_AGAIN);
    assert_int_equal(feed_prefix(FRAME_MAX_BYTES, len_64k_1, 3), STATUS_TOO_LARGE);
    assert_int_equal(feed_prefix(FRAME_MAX_BYTES, huge, 5), STATUS_TOO_LARGE);
    assert_int_equal(feed_prefix(FRAME_MAX_BYTES, long_varint, 5), STATUS_MALFORMED);
    assert_int_equal(feed_prefix(FRAME_MAX_BYTES, long_varint, 4), STATUS_AGAIN);
    assert_int_equal(feed_prefix(FRAME_MAX_BYTES, padded, 3), STATUS_OK);
}

static void cap_before_hello_then_after(void **state)
{
    (void)state;
    /* A hello and a large request in one read: the large one counts by the cap of its turn. */
    uint8_t stream[2 + 8 + 3 + 5000] = {8, 1, 2, 3, 4, 5, 6, 7, 8, 0x88, 0x27};
    struct frame_reader reader = {0};
    const uint8_t *payload;
    size_t n;
    assert_int_equal(frame_reader_feed(&reader, stream, sizeof stream), STATUS_OK);
    assert_int_equal(frame_reader_next(&reader, &payload, &n), STATUS_OK);
    assert_int_equal(n, 8);
    assert_int_equal(frame_reader_next(&reader, &payload, &n), STATUS_TOO_LARGE);
    reader.max_bytes = FRAME_MAX_BYTES;
    assert_int_equal(frame_reader_next(&reader, &payload, &n), STATUS_OK);
    assert_int_equal(n, 5000);
    frame_reader_fini(&reader);
}

static void reader_memory_is_bounded(void **state)
{
    (void)state;
    /* Whole frames that nobody takes. */
    static uint8_t block[32768];
    struct frame_reader reader = {.max_bytes = FRAME_MAX_BYTES};
    enum status status = STATUS_OK;
    size_t fed = 0;
    while (status == STATUS_OK && fed < 10 * sizeof block) {
        status = frame_reader_feed(&reader, block, sizeof block);
        fed += sizeof block;
    }
    assert_int_equal(status, STATUS_TOO_LARGE);
    assert_true(reader.capacity <= 4 * FRAME_MAX_BYTES);
    frame_reader_fini(&reader);
    /* No memory: the reader is as it was. */
    struct frame_reader poor = {0};
    heap_fail(1, false);
    assert_int_equal(frame_reader_feed(&poor, block, 10), STATUS_OUT_OF_MEMORY);
    heap_fail(0, false);
    assert_int_equal(frame_reader_feed(&poor, block, 10), STATUS_OK);
    assert_int_equal(poor.used, 10);
    frame_reader_fini(&poor);
}

static void truncated_at_every_byte(void **state)
{
    (void)state;
    int64_t live = heap_live();
    uint8_t *bytes;
    size_t n;
    encode_reply(&bytes, &n);
    size_t prefix = bytes[0] < 0x80 ? 1 : 2;
    size_t n_refused = 0;
    for (size_t cut = 0; cut < n - prefix; cut++) {
        ProtobufCMessage *message = NULL;
        enum status status = decode_exact(reply_type, bytes + prefix, cut, &message);
        assert_true(status == STATUS_OK || status == STATUS_MALFORMED);
        assert_int_equal(status == STATUS_OK, message != NULL);
        n_refused += status == STATUS_MALFORMED;
        frame_free(message);
    }
    /* A cut is only clean between the fields of the outermost message: before the first field,
     * after the id. */
    assert_int_equal(n_refused, n - prefix - 2);
    heap_free(bytes);
    assert_int_equal(heap_live(), live);
}

static enum status decode_text(const char *text, size_t n)
{
    /* Request.wait.event = text */
    uint8_t bytes[64] = {0x6A, (uint8_t)(n + 2), 0x1A, (uint8_t)n};
    memcpy(bytes + 4, text, n);
    ProtobufCMessage *message = NULL;
    enum status status = decode_exact(request_type, bytes, n + 4, &message);
    if (status == STATUS_OK) {
        const Ballast__Control__V1__Request *request = (const void *)message;
        assert_string_equal(request->wait->event, text);
    }
    frame_free(message);
    return status;
}

static void strings_and_enums_are_checked(void **state)
{
    (void)state;
    assert_int_equal(decode_text("switch", 6), STATUS_OK);
    assert_int_equal(decode_text("", 0), STATUS_OK);
    assert_int_equal(decode_text("\xE2\x82\xAC", 3), STATUS_OK);
    assert_int_equal(decode_text("\xE2\x82", 2), STATUS_MALFORMED);
    assert_int_equal(decode_text("\xFF", 1), STATUS_MALFORMED);
    assert_int_equal(decode_text("end\0x", 5), STATUS_MALFORMED);
    ProtobufCMessage *message = NULL;
    /* Request.memory.phase */
    static const uint8_t known[] = {0x22, 2, 0x08, 2}, unknown[] = {0x22, 2, 0x08, 99};
    static const uint8_t wide[] = {0x22, 6, 0x08, 0x82, 0x80, 0x80, 0x80, 0x10};
    assert_int_equal(frame_decode(request_type, known, sizeof known, &message), STATUS_OK);
    const Ballast__Control__V1__Request *request = (const void *)message;
    assert_int_equal(request->memory->phase, BALLAST__V1__PHASE__PHASE_FORWARD);
    frame_free(message);
    assert_int_equal(frame_decode(request_type, unknown, sizeof unknown, &message),
                     STATUS_MALFORMED);
    /* 2^32 + 2 is not "forward" either. */
    assert_int_equal(frame_decode(request_type, wide, sizeof wide, &message), STATUS_MALFORMED);
}

static void other_shapes(void **state)
{
    (void)state;
    static const struct {
        uint8_t bytes[12];
        size_t n;
        enum status status;
    } cases[] = {
        {{0}, 0, STATUS_OK},
        {{0x08, 5}, 2, STATUS_OK},
        {{0xF8, 0x7F, 5}, 3, STATUS_OK},             /* unknown field 2047 */
        {{0xFA, 0x7F, 2, 0xFF, 0x00}, 5, STATUS_OK}, /* unknown bytes need not be text */
        {{0x0B, 0x0C}, 2, STATUS_MALFORMED},         /* a group */
        {{0x0E, 1}, 2, STATUS_MALFORMED},            /* wire type 6 */
        {{0x00, 1}, 2, STATUS_MALFORMED},            /* field 0 */
        {{0x09, 1, 2, 3}, 4, STATUS_MALFORMED},      /* fixed64 cut short */
        {{0x0D, 1, 2, 3, 4}, 5, STATUS_MALFORMED},   /* an id of the wrong wire type */
        {{0x08}, 1, STATUS_MALFORMED},
        {{0x1A, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F}, 6, STATUS_MALFORMED}, /* 4 GiB inside */
        {{0x6A, 3, 0x1A, 3, 'a'}, 5, STATUS_MALFORMED}, /* a text longer than its message */
        {{0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F}, 11, STATUS_MALFORMED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ProtobufCMessage *message = NULL;
        enum status status = decode_exact(request_type, cases[i].bytes, cases[i].n, &message);
        if (status != cases[i].status) {
            fail_msg("case %zu is %s", i, status_name(status));
        }
        frame_free(message);
    }
    static uint8_t large[FRAME_MAX_BYTES + 1];
    ProtobufCMessage *message;
    assert_int_equal(frame_decode(request_type, large, sizeof large, &message), STATUS_TOO_LARGE);
}

static void random_bytes(void **state)
{
    (void)state;
    int64_t live = heap_live();
    uint8_t *good;
    size_t n_good;
    encode_reply(&good, &n_good);
    size_t prefix = good[0] < 0x80 ? 1 : 2, n_ok = 0, n_bad = 0;
    uint64_t seed = 1;
    for (int i = 0; i < 20000; i++) {
        uint8_t bytes[512];
        size_t n = n_good - prefix;
        memcpy(bytes, good + prefix, n);
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        if (i % 4 == 0) { /* noise */
            n = (seed >> 33) % 64;
            for (size_t j = 0; j < n; j++) {
                seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                bytes[j] = (uint8_t)(seed >> 40);
            }
        } else { /* a few bytes of a good one */
            for (int j = 0; j < i % 4; j++) {
                seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                bytes[(seed >> 33) % n] = (uint8_t)(seed >> 24);
            }
        }
        ProtobufCMessage *message = NULL;
        enum status status = frame_decode(reply_type, bytes, n, &message);
        assert_true(status == STATUS_OK || status == STATUS_MALFORMED);
        if (status == STATUS_OK) {
            /* What was taken can be sent again. */
            uint8_t *again;
            size_t n_again;
            assert_int_equal(frame_encode(message, &again, &n_again), STATUS_OK);
            heap_free(again);
            n_ok++;
        } else {
            n_bad++;
        }
        frame_free(message);
    }
    assert_true(n_ok > 1000 && n_bad > 1000);
    heap_free(good);
    assert_int_equal(heap_live(), live);
}

static void amplification_stays_in_the_budget(void **state)
{
    (void)state;
    static uint8_t bytes[FRAME_MAX_BYTES];
    int64_t live = heap_live();
    /* Reply.steps = {steps = {}, steps = {}, ...}: two bytes become one record of 150. */
    size_t n = 0, inside = FRAME_MAX_BYTES - 4;
    bytes[n++] = 0x42;
    bytes[n++] = (uint8_t)(inside | 0x80);
    bytes[n++] = (uint8_t)(inside >> 7 | 0x80);
    bytes[n++] = (uint8_t)(inside >> 14);
    for (; n + 1 < sizeof bytes; n += 2) {
        bytes[n] = 0x0A;
        bytes[n + 1] = 0;
    }
    ProtobufCMessage *message = NULL;
    assert_int_equal(frame_decode(reply_type, bytes, n, &message), STATUS_TOO_LARGE);
    assert_null(message);
    assert_int_equal(heap_live(), live);
    /* A hundred are fine. */
    static const uint8_t head[] = {0x42, 0xC8, 0x01};
    memmove(bytes, head, sizeof head);
    for (n = 3; n < 203; n += 2) {
        bytes[n] = 0x0A;
        bytes[n + 1] = 0;
    }
    assert_int_equal(frame_decode(reply_type, bytes, n, &message), STATUS_OK);
    assert_int_equal(((Ballast__Control__V1__Reply *)(void *)message)->steps->n_steps, 100);
    frame_free(message);
    /* Unknown fields cost memory too. */
    for (n = 0; n + 2 < sizeof bytes; n += 3) {
        bytes[n] = 0xF8;
        bytes[n + 1] = 0x7F;
        bytes[n + 2] = 1;
    }
    assert_int_equal(frame_decode(reply_type, bytes, n, &message), STATUS_TOO_LARGE);
    assert_int_equal(heap_live(), live);
}

static void sweep_decode(const uint8_t *payload, size_t n, bool for_ever)
{
    int64_t live = heap_live();
    for (uint64_t nth = 1;; nth++) {
        assert_true(nth < 1000);
        ProtobufCMessage *message = NULL;
        heap_fail(nth, for_ever);
        enum status status = frame_decode(reply_type, payload, n, &message);
        uint64_t failures = heap_failures();
        heap_fail(0, false);
        if (failures == 0) {
            assert_int_equal(status, STATUS_OK);
            frame_free(message);
            assert_int_equal(heap_live(), live);
            assert_true(nth > 10);
            return;
        }
        assert_int_equal(status, STATUS_OUT_OF_MEMORY);
        assert_null(message);
        assert_int_equal(heap_live(), live);
    }
}

static void every_allocation_of_decode_fails(void **state)
{
    (void)state;
    uint8_t *bytes;
    size_t n;
    encode_reply(&bytes, &n);
    size_t prefix = bytes[0] < 0x80 ? 1 : 2;
    /* With an unknown field and a oneof that is set twice, which frees the first. */
    uint8_t more[1024];
    size_t n_more = 0;
    static const uint8_t extra[] = {0xFA, 0x7F, 2, 'a', 'b', 0x1A, 4, 0x0A, 2, 'I', 'O'};
    memcpy(more, extra, sizeof extra);
    n_more = sizeof extra;
    memcpy(more + n_more, bytes + prefix, n - prefix);
    n_more += n - prefix;
    for (int i = 0; i < 20; i++) { /* beyond protobuf-c's slab on the stack */
        more[n_more++] = 0x08;
        more[n_more++] = 1;
    }
    sweep_decode(bytes + prefix, n - prefix, false);
    sweep_decode(bytes + prefix, n - prefix, true);
    sweep_decode(more, n_more, false);
    sweep_decode(more, n_more, true);
    heap_free(bytes);
}

static void encode_refuses(void **state)
{
    (void)state;
    int64_t live = heap_live();
    static char text[FRAME_MAX_BYTES + 1];
    Ballast__Control__V1__ErrorReply error = BALLAST__CONTROL__V1__ERROR_REPLY__INIT;
    uint8_t *bytes = NULL;
    size_t n = 0;
    memset(text, 'x', sizeof text - 1);
    error.text = text;
    assert_int_equal(frame_encode(&error.base, &bytes, &n), STATUS_TOO_LARGE);
    text[FRAME_MAX_BYTES - 4] = '\0'; /* tag and three bytes of length: exactly at the cap */
    assert_int_equal(frame_encode(&error.base, &bytes, &n), STATUS_OK);
    assert_int_equal(n, FRAME_PREFIX_BYTES + FRAME_MAX_BYTES);
    assert_int_equal(feed_prefix(FRAME_MAX_BYTES, bytes, n), STATUS_OK);
    heap_free(bytes);
    bytes = NULL;
    error.text = "not \xFF text";
    assert_int_equal(frame_encode(&error.base, &bytes, &n), STATUS_MALFORMED);
    error.text = "text";
    heap_fail(1, false);
    assert_int_equal(frame_encode(&error.base, &bytes, &n), STATUS_OUT_OF_MEMORY);
    heap_fail(0, false);
    assert_null(bytes);
    assert_int_equal(heap_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(reassembles_whatever_the_cuts),
        cmocka_unit_test(caps_and_prefixes),
        cmocka_unit_test(cap_before_hello_then_after),
        cmocka_unit_test(reader_memory_is_bounded),
        cmocka_unit_test(truncated_at_every_byte),
        cmocka_unit_test(strings_and_enums_are_checked),
        cmocka_unit_test(other_shapes),
        cmocka_unit_test(random_bytes),
        cmocka_unit_test(amplification_stays_in_the_budget),
        cmocka_unit_test(every_allocation_of_decode_fails),
        cmocka_unit_test(encode_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
