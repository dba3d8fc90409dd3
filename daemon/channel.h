/* One accepted connection: frames in, frames out, bounded.
 *
 * Owns the libuv pipe, the frame reader and the output queue. Does not know what frames mean.
 * What is sent is either sure (replies, events: never dropped; a peer that lets too much of it
 * pile up is cut off) or a sample (telemetry: the oldest unsent ones make room). A peer with
 * much unread output is not read from until it catches up, so it cannot grow the queue by
 * asking. Loop thread. */
#ifndef BALLAST_DAEMON_CHANNEL_H
#define BALLAST_DAEMON_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "proto/frame.h"

enum {
    CHANNEL_SAMPLE_CAP_BYTES = 1024 * 1024,     /* samples never lift the queue above this */
    CHANNEL_CAP_BYTES = 4 * 1024 * 1024,        /* above this the peer is cut off */
    CHANNEL_PAUSE_BYTES = 256 * 1024,           /* above this nothing more is read from it */
    CHANNEL_TOTAL_CAP_BYTES = 32 * 1024 * 1024, /* over all channels of one pool */
    CHANNEL_STALL_MS = 60000,                   /* queued output without any progress */
    CHANNEL_PARTIAL_MS = 30000,                 /* a frame that does not become whole */
    CHANNEL_READ_BYTES = 64 * 1024,
};

/* What all channels of a loop share. */
struct channel_pool {
    uv_loop_t *loop; /* borrowed */
    size_t queued_bytes;
    uint8_t read_buffer[CHANNEL_READ_BYTES];
};

struct channel;
struct channel_item;

struct channel_callbacks {
    /* A whole frame's payload, borrowed for the call. The callee may close the channel. */
    void (*on_frame)(struct channel *channel, const uint8_t *bytes, size_t n);
    /* What came is no frame (TOO_LARGE, MALFORMED) or there was no memory for it. The callee may
     * send a last word; the channel ends when it is out. */
    void (*on_bad_frame)(struct channel *channel, enum status status);
    /* The handle is gone; the callee may free what holds the channel. Called exactly once. */
    void (*on_closed)(struct channel *channel);
};

struct channel {
    uv_pipe_t pipe;
    uv_write_t write;
    struct channel_pool *pool; /* borrowed */
    const struct channel_callbacks *callbacks;
    void *owner;
    struct frame_reader reader;
    struct channel_item *first, *last; /* owned queue */
    size_t queued_bytes;
    uint64_t dropped;     /* samples dropped since the owner last took the count */
    int64_t progress_ms;  /* of output */
    int64_t partial_ms;   /* since when a frame is incomplete; -1: none */
    bool writing;         /* the first item is in libuv's hands */
    bool reading;
    bool ending;          /* close when the queue is empty; nothing more is read or queued */
    bool closing;
    const char *why_closed; /* static text; NULL: the peer closed */
};

/* Take over `fd`. On failure `fd` is closed and on_closed is called later all the same, when the
 * handle was initialised: `*out_will_close` says so; else the struct is free at once. */
enum status channel_open(struct channel *channel, struct channel_pool *pool, int fd,
                         const struct channel_callbacks *callbacks, void *owner,
                         bool *out_will_close) MUST_CHECK;
/* Queue one message that must arrive. A failure (no memory, too large, cut off) leaves the stream
 * whole. */
enum status channel_send(struct channel *channel, const ProtobufCMessage *message) MUST_CHECK;
/* Queue a sample; older samples make room for it. When this one is dropped, now or later,
 * `lost` is added to channel->dropped: itself and those that it reports as lost. */
enum status channel_send_sample(struct channel *channel, const ProtobufCMessage *message,
                                uint64_t lost) MUST_CHECK;
/* Close once everything queued is out. */
void channel_end(struct channel *channel, const char *why);
/* Close now. */
void channel_close(struct channel *channel, const char *why);
/* Deadlines; call about once a second. */
void channel_check(struct channel *channel, int64_t now_ms);

#endif
