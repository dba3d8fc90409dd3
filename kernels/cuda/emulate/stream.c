/* Streams, events and the executor: one thread that does the queued work of all streams in a
 * random order which respects stream order and events, and nothing else.
 *
 * Work accumulates until the host waits, polls, or has queued nothing for a millisecond, so that
 * the order in which it was queued says little about the order in which it is done. Now and
 * then a stream is starved for a while. An item stays at the head of its queue while it is done;
 * all state here is under emulate_lock, work runs without it.
 *
 * A wait for an event names the record that was the latest when cudaStreamWaitEvent was called,
 * as CUDA has it. A record is queued before any wait for it, so the heads of the queues cannot
 * wait for one another in a circle. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "kernels/cuda/emulate/emulate.h"

enum {
    ACCUMULATE_NS = 1000 * 1000,
    RETRY_NS = 50 * 1000, /* when all that is left waits for other processes */
    MOST_QUEUED = 16384,  /* then the executor begins anyway */
    STARVE_ONE_IN = 16,   /* picks */
    STARVE_PICKS = 64,
    EXECUTOR_STACK = 16 << 20, /* operations of the CPU device keep their blocks on it */
    PURPOSE_ORDER = 1
};

/* The host waits for a stream's work so far, for a record, or for everything. */
struct waiter {
    struct waiter *next;
    const struct CUstream_st *stream;
    uint64_t n_done; /* of the stream */
    const struct emulate_record *record;
    bool is_over;
};

pthread_mutex_t emulate_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queued, settled;
static struct CUstream_st *streams;
static unsigned n_streams;
static struct waiter *waiters;
static size_t n_waiting_items; /* in all queues */
static uint64_t last_queued_ns, n_picks;
static bool poked; /* the host polled since it last queued something */
static struct emulate_random order;
static const char *volatile running;
static pthread_t executor;
static bool has_executor;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- items ---- */

struct emulate_item *emulate_item_new(const struct emulate_work *work)
{
    const size_t align = _Alignof(max_align_t);
    const size_t ranges_at = (work->bytes + align - 1) / align * align;
    const size_t ranges_bytes = work->n_ranges * sizeof *work->ranges;
    struct emulate_item *item = malloc(sizeof *item + ranges_at + ranges_bytes);
    if (item == NULL) {
        emulate_misuse("no host memory for queued work");
    }
    *item = (struct emulate_item){.work = *work};
    if (work->bytes > 0) {
        memcpy(item->closure, work->closure, work->bytes);
    }
    item->ranges = (struct emulate_range *)(void *)(item->closure + ranges_at);
    if (ranges_bytes > 0) {
        memcpy(item->ranges, work->ranges, ranges_bytes);
    }
    item->work.closure = item->closure;
    item->work.ranges = item->ranges;
    return item;
}

void emulate_item_free(struct emulate_item *item)
{
    if (item->work.dispose != NULL) {
        item->work.dispose(item->closure);
    }
    free(item);
}

/* Kernels do not say what memory they use, but their arguments lie in the closure: a word that
 * is an address in the range is taken for one. */
void emulate_item_check_unused(const struct emulate_item *item, const char *call, const void *start,
                               size_t bytes)
{
    const uintptr_t from = (uintptr_t)start;
    for (size_t i = 0; i < item->work.n_ranges; i++) {
        const uintptr_t at = (uintptr_t)item->ranges[i].start;
        if (item->ranges[i].bytes > 0 && at < from + bytes && from < at + item->ranges[i].bytes) {
            emulate_misuse("%s of %p, %zu bytes, which queued work or a graph still uses: %s", call,
                           start, bytes, item->work.name);
        }
    }
    if (item->work.n_ranges > 0) {
        return;
    }
    for (size_t i = 0; i + sizeof(uintptr_t) <= item->work.bytes; i += sizeof(uintptr_t)) {
        uintptr_t word;
        memcpy(&word, item->closure + i, sizeof word);
        if (word >= from && word - from < bytes) {
            emulate_misuse("%s of %p, %zu bytes, which queued work or a graph still uses: %s", call,
                           start, bytes, item->work.name);
        }
    }
}

static void release_record(struct emulate_record *record)
{
    if (record != NULL && --record->references == 0) {
        free(record);
    }
}

/* ---- the host waits ---- */

static bool is_over(const struct waiter *waiter)
{
    if (waiter->record != NULL) {
        return waiter->record->done;
    }
    if (waiter->stream != NULL) {
        return waiter->stream->n_done >= waiter->n_done;
    }
    return n_waiting_items == 0;
}

static void settle_waiters(void)
{
    bool any = false;
    struct waiter **link = &waiters;
    while (*link != NULL) {
        struct waiter *waiter = *link;
        if (is_over(waiter)) {
            waiter->is_over = true;
            *link = waiter->next;
            any = true;
        } else {
            link = &waiter->next;
        }
    }
    if (any) {
        pthread_cond_broadcast(&settled);
    }
}

static void host_wait(struct waiter *waiter)
{
    if (is_over(waiter)) {
        return;
    }
    if (emulate_is_executor()) {
        emulate_misuse("work on a stream waits for a stream");
    }
    waiter->next = waiters;
    waiters = waiter;
    pthread_cond_signal(&queued);
    while (!waiter->is_over) {
        pthread_cond_wait(&settled, &emulate_lock);
    }
}

void emulate_drain(void)
{
    pthread_mutex_lock(&emulate_lock);
    host_wait(&(struct waiter){0});
    pthread_mutex_unlock(&emulate_lock);
}

/* ---- the executor ---- */

const char *emulate_running(void)
{
    return running;
}

void emulate_set_running(const char *name)
{
    running = name;
}

void emulate_poke(void)
{
    pthread_mutex_lock(&emulate_lock);
    poked = poked || n_waiting_items > 0;
    pthread_cond_signal(&queued);
    pthread_mutex_unlock(&emulate_lock);
}

bool emulate_is_executor(void)
{
    return has_executor && pthread_equal(executor, pthread_self());
}

static bool is_ready(const struct CUstream_st *stream)
{
    const struct emulate_item *head = stream->head;
    return head != NULL && !stream->idle && !(head->is_wait && !head->record->done);
}

static bool is_starved(const struct CUstream_st *stream)
{
    return stream->starved_until > n_picks;
}

/* A stream whose head can go on, at random; NULL: none. */
static struct CUstream_st *pick(void)
{
    size_t n_ready = 0, n_fed = 0;
    for (struct CUstream_st *s = streams; s != NULL; s = s->next) {
        n_ready += is_ready(s);
        n_fed += is_ready(s) && !is_starved(s);
    }
    if (n_ready == 0) {
        return NULL;
    }
    n_picks++;
    const bool only_fed = n_fed > 0;
    size_t skip = emulate_random_below(&order, only_fed ? n_fed : n_ready);
    struct CUstream_st *chosen = NULL;
    for (struct CUstream_st *s = streams; s != NULL && chosen == NULL; s = s->next) {
        if (is_ready(s) && !(only_fed && is_starved(s)) && skip-- == 0) {
            chosen = s;
        }
    }
    if (emulate_random_below(&order, STARVE_ONE_IN) == 0) {
        chosen->starved_until = n_picks + emulate_random_below(&order, STARVE_PICKS);
    }
    return chosen;
}

static void finish_head(struct CUstream_st *stream)
{
    struct emulate_item *item = stream->head;
    stream->head = item->next;
    if (stream->head == NULL) {
        stream->tail = NULL;
    }
    stream->n_done++;
    n_waiting_items--;
    if (item->record != NULL && !item->is_wait) {
        item->record->done = true;
        item->record->time_ns = now_ns();
    }
    release_record(item->record);
    for (struct CUstream_st *s = streams; s != NULL; s = s->next) {
        s->idle = false; /* what one item did may be what another process waits for */
    }
    settle_waiters();
    free(item);
}

static void advance(struct CUstream_st *stream)
{
    struct emulate_item *item = stream->head;
    if (item->record != NULL) {
        finish_head(stream);
        return;
    }
    enum emulate_step step = EMULATE_DONE;
    pthread_mutex_unlock(&emulate_lock);
    running = item->work.name;
    if (item->work.run != NULL) {
        item->work.run(item->closure);
    } else {
        step = item->work.step(item->closure);
    }
    running = NULL;
    if (step == EMULATE_DONE && item->work.dispose != NULL) {
        item->work.dispose(item->closure); /* before anyone who waits may go on */
    }
    pthread_mutex_lock(&emulate_lock);
    stream->idle = step == EMULATE_WAIT;
    if (step == EMULATE_DONE) {
        finish_head(stream);
    }
}

static void sleep_until(uint64_t time_ns)
{
    const struct timespec until = {.tv_sec = (time_t)(time_ns / 1000000000u),
                                   .tv_nsec = (long)(time_ns % 1000000000u)};
    pthread_cond_timedwait(&queued, &emulate_lock, &until);
}

/* Is it time to work? Otherwise sleeps until that may have changed. */
static bool may_run(void)
{
    if (n_waiting_items == 0) {
        emulate_memory_close();
        pthread_cond_wait(&queued, &emulate_lock);
        return false;
    }
    const uint64_t begin = last_queued_ns + ACCUMULATE_NS;
    if (waiters == NULL && !poked && n_waiting_items < MOST_QUEUED && now_ns() < begin) {
        emulate_memory_close();
        sleep_until(begin);
        return false;
    }
    return true;
}

static void *execute(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&emulate_lock);
    for (;;) {
        if (!may_run()) {
            continue;
        }
        emulate_memory_open();
        struct CUstream_st *stream = pick();
        if (stream != NULL) {
            advance(stream);
            continue;
        }
        sleep_until(now_ns() + RETRY_NS);
        for (struct CUstream_st *s = streams; s != NULL; s = s->next) {
            s->idle = false;
        }
    }
    return NULL;
}

static void start_executor(void)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&queued, &clock);
    pthread_cond_init(&settled, &clock);
    pthread_condattr_destroy(&clock);
    emulate_random_init(&order, PURPOSE_ORDER);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, EXECUTOR_STACK);
    if (pthread_create(&executor, &attributes, execute, NULL) != 0) {
        emulate_misuse("no thread for the executor");
    }
    pthread_attr_destroy(&attributes);
    has_executor = true;
}

/* ---- queueing; emulate_lock is held ---- */

void emulate_check_stream(const char *call, cudaStream_t stream)
{
    /* 0, 1 and 2 are CUDA's names for its default streams. */
    if ((uintptr_t)stream <= 2) {
        emulate_misuse("%s on the default stream, which waits for all others", call);
    }
    pthread_mutex_lock(&emulate_lock);
    const struct CUstream_st *s = streams;
    while (s != NULL && s != stream) {
        s = s->next;
    }
    pthread_mutex_unlock(&emulate_lock);
    if (s == NULL) {
        emulate_misuse("%s on a stream that does not exist (any more)", call);
    }
}

static void append(cudaStream_t stream, struct emulate_item *item)
{
    if (stream->tail == NULL) {
        stream->head = item;
    } else {
        stream->tail->next = item;
    }
    stream->tail = item;
    stream->n_queued++;
    n_waiting_items++;
    last_queued_ns = now_ns();
    poked = false;
    pthread_cond_signal(&queued);
}

void emulate_submit(cudaStream_t stream, const struct emulate_work *work)
{
    emulate_check_stream(work->name, stream);
    pthread_mutex_lock(&emulate_lock);
    if (stream->capture != NULL) {
        emulate_capture_work(stream, work);
    } else {
        append(stream, emulate_item_new(work));
    }
    pthread_mutex_unlock(&emulate_lock);
}

void emulate_enqueue(cudaStream_t stream, const char *name, void (*run)(void *closure),
                     const void *closure, size_t bytes)
{
    if (emulate_enter(name) != cudaSuccess) {
        return;
    }
    emulate_submit(stream, &(struct emulate_work){
                               .name = name, .run = run, .closure = closure, .bytes = bytes});
}

void emulate_check_unused(const char *call, const void *start, size_t bytes)
{
    for (const struct CUstream_st *s = streams; s != NULL; s = s->next) {
        for (const struct emulate_item *item = s->head; item != NULL; item = item->next) {
            emulate_item_check_unused(item, call, start, bytes);
        }
    }
}

static void queue_record(cudaStream_t stream, struct emulate_record *record, bool is_wait)
{
    const struct emulate_work work = {.name = is_wait ? "cudaStreamWaitEvent" : "cudaEventRecord"};
    struct emulate_item *item = emulate_item_new(&work);
    item->record = record;
    item->is_wait = is_wait;
    record->references++;
    append(stream, item);
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
    (void)priority; /* a hint about order, and the order is random */
    const cudaError_t error = emulate_enter("cudaStreamCreate");
    if (error != cudaSuccess) {
        return error;
    }
    if (flags != cudaStreamNonBlocking && flags != cudaStreamDefault) {
        return emulate_error(cudaErrorInvalidValue);
    }
    struct CUstream_st *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return emulate_error(cudaErrorMemoryAllocation);
    }
    made->gpu = emulate_gpu();
    pthread_mutex_lock(&emulate_lock);
    if (!has_executor) {
        start_executor();
    }
    made->number = ++n_streams;
    made->next = streams;
    streams = made;
    pthread_mutex_unlock(&emulate_lock);
    *stream = made;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    const cudaError_t error = emulate_enter("cudaStreamDestroy");
    if (error != cudaSuccess) {
        return error;
    }
    emulate_check_stream("cudaStreamDestroy", stream);
    pthread_mutex_lock(&emulate_lock);
    if (stream->head != NULL) {
        emulate_misuse("cudaStreamDestroy with work queued on the stream: %s",
                       stream->head->work.name);
    }
    if (stream->capture != NULL) {
        emulate_misuse("cudaStreamDestroy while the stream is captured");
    }
    struct CUstream_st **link = &streams;
    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
    pthread_mutex_unlock(&emulate_lock);
    free(stream);
    return cudaSuccess;
}

static void refuse_captured(const char *call, cudaStream_t stream)
{
    if (stream->capture != NULL) {
        emulate_misuse("%s while the stream is captured", call);
    }
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    const cudaError_t error = emulate_enter("cudaStreamQuery");
    if (error != cudaSuccess) {
        return error;
    }
    emulate_check_stream("cudaStreamQuery", stream);
    pthread_mutex_lock(&emulate_lock);
    refuse_captured("cudaStreamQuery", stream);
    const bool is_empty = stream->head == NULL;
    poked = poked || !is_empty;
    pthread_cond_signal(&queued);
    pthread_mutex_unlock(&emulate_lock);
    return is_empty ? cudaSuccess : emulate_error(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    const cudaError_t error = emulate_enter("cudaStreamSynchronize");
    if (error != cudaSuccess) {
        return error;
    }
    emulate_check_stream("cudaStreamSynchronize", stream);
    pthread_mutex_lock(&emulate_lock);
    refuse_captured("cudaStreamSynchronize", stream);
    host_wait(&(struct waiter){.stream = stream, .n_done = stream->n_queued});
    pthread_mutex_unlock(&emulate_lock);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    const cudaError_t error = emulate_enter("cudaDeviceSynchronize");
    if (error != cudaSuccess) {
        return error;
    }
    emulate_not_capturing("cudaDeviceSynchronize");
    emulate_drain();
    return cudaSuccess;
}

/* For the test of tests: is this the wait that BALLAST_STANDIN_DROP_WAIT says to forget? */
static bool is_dropped(void)
{
    static uint64_t n_waits;
    n_waits++;
    return n_waits == emulate_setting("BALLAST_STANDIN_DROP_WAIT", 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    const cudaError_t error = emulate_enter("cudaStreamWaitEvent");
    if (error != cudaSuccess) {
        return error;
    }
    if (event == NULL || flags != 0) {
        return emulate_error(event == NULL ? cudaErrorInvalidResourceHandle
                                           : cudaErrorInvalidValue);
    }
    emulate_check_stream("cudaStreamWaitEvent", stream);
    pthread_mutex_lock(&emulate_lock);
    if (is_dropped()) {
        /* nothing */
    } else if (event->capture != 0 || stream->capture != NULL) {
        emulate_capture_wait(stream, event);
    } else if (event->latest != NULL) {
        queue_record(stream, event->latest, true);
    }
    pthread_mutex_unlock(&emulate_lock);
    return cudaSuccess;
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    const cudaError_t error = emulate_enter("cudaEventCreate");
    if (error != cudaSuccess) {
        return error;
    }
    struct CUevent_st *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return emulate_error(cudaErrorMemoryAllocation);
    }
    made->flags = flags;
    *event = made;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const cudaError_t error = emulate_enter("cudaEventDestroy");
    if (error != cudaSuccess) {
        return error;
    }
    if (event == NULL) {
        return emulate_error(cudaErrorInvalidResourceHandle);
    }
    pthread_mutex_lock(&emulate_lock);
    release_record(event->latest);
    emulate_nodes_clear(&event->captured);
    pthread_mutex_unlock(&emulate_lock);
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    const cudaError_t error = emulate_enter("cudaEventRecord");
    if (error != cudaSuccess) {
        return error;
    }
    if (event == NULL) {
        return emulate_error(cudaErrorInvalidResourceHandle);
    }
    emulate_check_stream("cudaEventRecord", stream);
    struct emulate_record *record = calloc(1, sizeof *record);
    if (record == NULL) {
        return emulate_error(cudaErrorMemoryAllocation);
    }
    pthread_mutex_lock(&emulate_lock);
    emulate_nodes_clear(&event->captured);
    event->capture = 0;
    if (stream->capture != NULL) {
        emulate_capture_record(stream, event);
        free(record);
    } else {
        release_record(event->latest);
        event->latest = record;
        record->references = 1;
        queue_record(stream, record, false);
    }
    pthread_mutex_unlock(&emulate_lock);
    return cudaSuccess;
}

static cudaError_t enter_event(const char *call, cudaEvent_t event)
{
    const cudaError_t error = emulate_enter(call);
    if (error != cudaSuccess) {
        return error;
    }
    if (event == NULL) {
        return emulate_error(cudaErrorInvalidResourceHandle);
    }
    emulate_not_capturing(call);
    return cudaSuccess;
}

static void refuse_captured_event(const char *call, cudaEvent_t event)
{
    if (event->capture != 0) {
        emulate_misuse("%s of an event that was recorded in a capture", call);
    }
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    const cudaError_t error = enter_event("cudaEventQuery", event);
    if (error != cudaSuccess) {
        return error;
    }
    pthread_mutex_lock(&emulate_lock);
    refuse_captured_event("cudaEventQuery", event);
    const bool is_done = event->latest == NULL || event->latest->done;
    if (!is_done) {
        poked = true;
        pthread_cond_signal(&queued);
    }
    pthread_mutex_unlock(&emulate_lock);
    return is_done ? cudaSuccess : emulate_error(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    const cudaError_t error = enter_event("cudaEventSynchronize", event);
    if (error != cudaSuccess) {
        return error;
    }
    pthread_mutex_lock(&emulate_lock);
    refuse_captured_event("cudaEventSynchronize", event);
    struct emulate_record *record = event->latest;
    if (record != NULL) {
        record->references++;
        host_wait(&(struct waiter){.record = record});
        release_record(record);
    }
    pthread_mutex_unlock(&emulate_lock);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    cudaError_t error = enter_event("cudaEventElapsedTime", start);
    error = error == cudaSuccess ? enter_event("cudaEventElapsedTime", end) : error;
    if (error != cudaSuccess) {
        return error;
    }
    pthread_mutex_lock(&emulate_lock);
    if (((start->flags | end->flags) & cudaEventDisableTiming) != 0 || start->latest == NULL ||
        end->latest == NULL) {
        error = cudaErrorInvalidResourceHandle;
    } else if (!start->latest->done || !end->latest->done) {
        error = cudaErrorNotReady;
    } else {
        *ms = (float)((double)(int64_t)(end->latest->time_ns - start->latest->time_ns) * 1e-6);
    }
    pthread_mutex_unlock(&emulate_lock);
    return emulate_error(error);
}
