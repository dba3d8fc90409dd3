/* The bounded queue of frames: an array in order, since it is short. Owns the frames in it. */
#include "worker/link_queue.h"

#include <string.h>
#include "proto/base/heap.h"

void link_frame_drop(struct link_frame *frame)
{
    heap_free(frame->bytes);
    *frame = (struct link_frame){0};
}

static void remove_at(struct link_queue *queue, size_t at)
{
    queue->n--;
    memmove(&queue->frames[at], &queue->frames[at + 1], (queue->n - at) * sizeof *queue->frames);
}

static bool drop_oldest_telemetry(struct link_queue *queue)
{
    for (size_t i = 0; i < queue->n; i++) {
        if (queue->frames[i].telemetry) {
            heap_free(queue->frames[i].bytes);
            remove_at(queue, i);
            queue->n_dropped++;
            return true;
        }
    }
    return false;
}

/* Room for one more; false when memory or the bound says no. */
static bool make_room(struct link_queue *queue)
{
    if (queue->n < queue->capacity) {
        return true;
    }
    if (queue->n == LINK_QUEUE_MAX_FRAMES) {
        return false;
    }
    size_t capacity = queue->capacity == 0 ? 16 : 2 * queue->capacity;
    struct link_frame *frames = heap_realloc(queue->frames, capacity * sizeof *frames);
    if (frames == NULL) {
        return false;
    }
    queue->frames = frames;
    queue->capacity = capacity;
    return true;
}

void link_queue_push(struct link_queue *queue, struct link_frame frame)
{
    bool full = queue->n >= LINK_QUEUE_FRAMES;
    bool fits = !full || drop_oldest_telemetry(queue) || !frame.telemetry;
    /* Short of memory, an old state is worth less than anything new. */
    if (fits && (make_room(queue) || drop_oldest_telemetry(queue))) {
        queue->frames[queue->n++] = frame;
        return;
    }
    heap_free(frame.bytes);
    if (frame.telemetry) {
        queue->n_dropped++;
    } else {
        queue->n_dropped_important++;
    }
}

struct link_frame link_queue_pop(struct link_queue *queue)
{
    if (queue->n == 0) {
        return (struct link_frame){0};
    }
    struct link_frame first = queue->frames[0];
    remove_at(queue, 0);
    return first;
}

void link_queue_fini(struct link_queue *queue)
{
    for (size_t i = 0; i < queue->n; i++) {
        heap_free(queue->frames[i].bytes);
    }
    heap_free(queue->frames);
    *queue = (struct link_queue){0};
}
