/* Frames over a libuv pipe with a bounded output queue. See channel.h. */
#include "daemon/channel.h"

#include <string.h>
#include <unistd.h>
#include "daemon/uv_heap.h"
#include "proto/base/heap.h"

/* Bytes are given to the reader in small pieces, so that a cap raised by the first frame holds
 * for the next one, and a reader never holds much more than one frame. */
enum { FEED_BYTES = 16 * 1024, FEED_BYTES_BEFORE_HELLO = 512 };

struct channel_item {
    struct channel_item *next;
    uint8_t *bytes; /* owned */
    size_t n;
    bool is_sample;
    uint64_t lost; /* added to the channel's count when this is dropped */
};

static void on_written(uv_write_t *request, int code);

static void free_item(struct channel *channel, struct channel_item *item)
{
    channel->queued_bytes -= item->n;
    channel->pool->queued_bytes -= item->n;
    heap_free(item->bytes);
    heap_free(item);
}

static void pop(struct channel *channel)
{
    struct channel_item *item = channel->first;
    channel->first = item->next;
    if (!channel->first)
        channel->last = NULL;
    free_item(channel, item);
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct channel *channel = handle->data;
    while (channel->first)
        pop(channel);
    frame_reader_fini(&channel->reader);
    channel->callbacks->on_closed(channel);
}

void channel_close(struct channel *channel, const char *why)
{
    if (channel->closing)
        return;
    channel->closing = true;
    if (!channel->why_closed)
        channel->why_closed = why;
    uv_close((uv_handle_t *)&channel->pipe, on_handle_closed);
}

static void start_write(struct channel *channel)
{
    if (channel->writing || channel->closing)
        return;
    if (!channel->first) {
        if (channel->ending)
            channel_close(channel, NULL);
        return;
    }
    uv_buf_t buffer = uv_buf_init((char *)channel->first->bytes, (unsigned)channel->first->n);
    channel->writing = true;
    int code = uv_write(&channel->write, (uv_stream_t *)&channel->pipe, &buffer, 1, on_written);
    if (code) {
        channel->writing = false;
        channel_close(channel, "cannot write to it");
    }
}

static void alloc_read(uv_handle_t *handle, size_t suggested, uv_buf_t *out_buffer)
{
    struct channel *channel = handle->data;
    (void)suggested;
    *out_buffer = uv_buf_init((char *)channel->pool->read_buffer, CHANNEL_READ_BYTES);
}

static void bad_frame(struct channel *channel, enum status status)
{
    channel->callbacks->on_bad_frame(channel, status);
    channel_end(channel, "what it sent is not a frame");
}

static void drain(struct channel *channel)
{
    const uint8_t *bytes = NULL;
    size_t n = 0;
    while (!channel->closing && !channel->ending) {
        enum status status = frame_reader_next(&channel->reader, &bytes, &n);
        if (status == STATUS_AGAIN)
            return;
        if (status != STATUS_OK) {
            bad_frame(channel, status);
            return;
        }
        channel->partial_ms = -1;
        channel->callbacks->on_frame(channel, bytes, n);
    }
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer);

static void start_read(struct channel *channel)
{
    if (channel->reading || channel->closing || channel->ending)
        return;
    if (uv_read_start((uv_stream_t *)&channel->pipe, alloc_read, on_read))
        channel_close(channel, "cannot read from it");
    else
        channel->reading = true;
}

static void stop_read(struct channel *channel)
{
    if (channel->reading && !channel->closing)
        uv_read_stop((uv_stream_t *)&channel->pipe);
    channel->reading = false;
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer)
{
    struct channel *channel = stream->data;
    if (n < 0) {
        channel_close(channel, NULL);
        return;
    }
    const uint8_t *bytes = (const uint8_t *)buffer->base;
    size_t left = (size_t)n;
    while (left > 0 && !channel->closing && !channel->ending) {
        size_t limit = channel->reader.max_bytes == 0 ? FEED_BYTES_BEFORE_HELLO : FEED_BYTES;
        size_t piece = left < limit ? left : limit;
        enum status status = frame_reader_feed(&channel->reader, bytes, piece);
        if (status != STATUS_OK) {
            bad_frame(channel, status);
            return;
        }
        bytes += piece;
        left -= piece;
        drain(channel);
    }
    bool partial = channel->reader.used > channel->reader.start;
    if (partial && channel->partial_ms < 0)
        channel->partial_ms = (int64_t)uv_now(channel->pool->loop);
    if (channel->queued_bytes > CHANNEL_PAUSE_BYTES)
        stop_read(channel);
}

static void on_written(uv_write_t *request, int code)
{
    struct channel *channel = request->data;
    channel->writing = false;
    pop(channel);
    if (channel->closing)
        return;
    if (code) {
        channel_close(channel, NULL);
        return;
    }
    channel->progress_ms = (int64_t)uv_now(channel->pool->loop);
    if (channel->queued_bytes <= CHANNEL_PAUSE_BYTES)
        start_read(channel);
    start_write(channel);
}

enum status channel_open(struct channel *channel, struct channel_pool *pool, int fd,
                         const struct channel_callbacks *callbacks, void *owner,
                         bool *out_will_close)
{
    *channel = (struct channel){.pool = pool, .callbacks = callbacks, .owner = owner,
                                .partial_ms = -1};
    *out_will_close = false;
    int code = uv_pipe_init(pool->loop, &channel->pipe, 0);
    if (code) {
        close(fd);
        return uv_heap_status(code);
    }
    *out_will_close = true;
    channel->pipe.data = channel;
    channel->write.data = channel;
    channel->progress_ms = (int64_t)uv_now(pool->loop);
    code = uv_pipe_open(&channel->pipe, fd);
    if (code) {
        close(fd);
        channel_close(channel, "cannot take it over");
        return uv_heap_status(code);
    }
    start_read(channel);
    return channel->closing ? STATUS_IO : STATUS_OK;
}

/* Drop the oldest samples that libuv does not hold until `n` more bytes fit. */
static bool make_room(struct channel *channel, size_t n)
{
    struct channel_item *before = channel->writing ? channel->first : NULL;
    struct channel_item *item = before ? before->next : channel->first;
    while (item && channel->queued_bytes + n > CHANNEL_SAMPLE_CAP_BYTES) {
        struct channel_item *next = item->next;
        if (item->is_sample) {
            if (before)
                before->next = next;
            else
                channel->first = next;
            if (channel->last == item)
                channel->last = before;
            channel->dropped += item->lost;
            free_item(channel, item);
        } else {
            before = item;
        }
        item = next;
    }
    return channel->queued_bytes + n <= CHANNEL_SAMPLE_CAP_BYTES &&
           channel->pool->queued_bytes + n <= CHANNEL_TOTAL_CAP_BYTES;
}

/* Queue encoded bytes, which it takes over. */
static enum status enqueue(struct channel *channel, uint8_t *bytes, size_t n, bool is_sample,
                           uint64_t lost)
{
    struct channel_item *item = heap_calloc(1, sizeof *item);
    if (!item) {
        heap_free(bytes);
        return STATUS_OUT_OF_MEMORY;
    }
    *item = (struct channel_item){.bytes = bytes, .n = n, .is_sample = is_sample, .lost = lost};
    if (channel->last) {
        channel->last->next = item;
    } else {
        channel->first = item;
        channel->progress_ms = (int64_t)uv_now(channel->pool->loop);
    }
    channel->last = item;
    channel->queued_bytes += n;
    channel->pool->queued_bytes += n;
    start_write(channel);
    return STATUS_OK;
}

enum status channel_send(struct channel *channel, const ProtobufCMessage *message)
{
    if (channel->closing || channel->ending)
        return STATUS_LINK_LOST;
    uint8_t *bytes = NULL;
    size_t n = 0;
    enum status status = frame_encode(message, &bytes, &n);
    if (status != STATUS_OK)
        return status;
    if (channel->queued_bytes + n > CHANNEL_CAP_BYTES ||
        channel->pool->queued_bytes + n > CHANNEL_TOTAL_CAP_BYTES) {
        heap_free(bytes);
        channel_close(channel, "it does not read what it is sent");
        return STATUS_LINK_LOST;
    }
    return enqueue(channel, bytes, n, false, 0);
}

enum status channel_send_sample(struct channel *channel, const ProtobufCMessage *message,
                                uint64_t lost)
{
    if (channel->closing || channel->ending)
        return STATUS_LINK_LOST;
    uint8_t *bytes = NULL;
    size_t n = 0;
    enum status status = frame_encode(message, &bytes, &n);
    if (status == STATUS_OK && !make_room(channel, n)) {
        heap_free(bytes);
        channel->dropped += lost;
        return STATUS_OK;
    }
    if (status == STATUS_OK)
        status = enqueue(channel, bytes, n, true, lost);
    if (status != STATUS_OK)
        channel->dropped += lost;
    return status;
}

void channel_end(struct channel *channel, const char *why)
{
    if (channel->closing || channel->ending)
        return;
    stop_read(channel);
    channel->ending = true;
    channel->why_closed = why;
    start_write(channel);
}

void channel_check(struct channel *channel, int64_t now_ms)
{
    if (channel->closing)
        return;
    if (channel->first && now_ms - channel->progress_ms >= CHANNEL_STALL_MS)
        channel_close(channel, "it has not read anything for 60 s");
    else if (channel->ending && now_ms - channel->progress_ms >= CHANNEL_PARTIAL_MS)
        channel_close(channel, "it does not read its last words");
    else if (channel->partial_ms >= 0 && channel->reading &&
             now_ms - channel->partial_ms >= CHANNEL_PARTIAL_MS)
        channel_close(channel, "a frame stayed incomplete for 30 s");
}
