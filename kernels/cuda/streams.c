/* The four streams, the order between them, copies through pinned buffers, waits of the host.
 *
 * Device memory belongs to compute. A copy's stream first waits for what compute has been given so
 * far, and compute waits for the copy when its ticket is waited for. Host memory may be any: it
 * goes through two pinned buffers in each direction, in pieces. Main thread. */
#include <assert.h>
#include <string.h>
#include <time.h>
#include "kernels/cuda/cuda_device.h"
#include "proto/base/fault.h"
#include "proto/base/units.h"

/* A wait begins by asking again at once, then sleeps between. */
static const double spin_s = 50e-6;
static const long pause_ns = 20000;
static const double look_every_s = 1e-3;
/* Where nobody watches: longer than any sane operation. */
static const double give_up_s = 3600.0;

/* ---- waits ---- */

void cuda_watch_add(struct cuda_device *cuda, const struct cuda_watch *watch)
{
    uint32_t at = 0;
    while (at < cuda->n_watches && cuda->watches[at].user != watch->user) {
        at++;
    }
    if (watch->look == NULL) {
        if (at < cuda->n_watches) {
            cuda->watches[at] = cuda->watches[--cuda->n_watches];
        }
        return;
    }
    assert(at < CUDA_MAX_WATCHES);
    cuda->watches[at] = *watch;
    cuda->n_watches += at == cuda->n_watches;
}

static enum status look(struct cuda_device *cuda, const char *what, double waited_s,
                        struct failure *why)
{
    for (uint32_t i = 0; i < cuda->n_watches; i++) {
        const struct cuda_watch *watch = &cuda->watches[i];
        const enum status status = watch->look(watch->user, waited_s, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    if (waited_s > give_up_s) {
        return fail(why, STATUS_DEADLINE, "%s: GPU %d did not finish in %.0f s", what,
                    cuda->gpu.index, waited_s);
    }
    return STATUS_OK;
}

bool cuda_not_ready(struct cuda_device *cuda, cudaError_t result)
{
    if (result != cudaErrorNotReady) {
        return false;
    }
    /* The runtime may have put this over an error that nobody has seen yet, not under it. */
    const cudaError_t last = cudaGetLastError();
    if (last != cudaErrorNotReady) {
        cuda_note(cuda, last, "an operation queued before");
    }
    return true;
}

/* One of both is asked. */
static cudaError_t query(cudaStream_t stream, cudaEvent_t event)
{
    return event != NULL ? cudaEventQuery(event) : cudaStreamQuery(stream);
}

/* The run is about to end: taking it down must not wait for the same thing again. */
static enum status lose(struct cuda_device *cuda, enum status status, const struct failure *found,
                        struct failure *why)
{
    if (cuda->lost.status == STATUS_OK) {
        cuda->lost = *found;
    }
    return fail(why, status, "%s", found->text);
}

static enum status wait_for(struct cuda_device *cuda, cudaStream_t stream, cudaEvent_t event,
                            const char *what, struct failure *why)
{
    struct failure found = {0};
    double start_s = 0.0, looked_s = 0.0;
    for (uint64_t asked = 0;; asked++) {
        const cudaError_t result = query(stream, event);
        if (result == cudaSuccess) {
            return STATUS_OK;
        }
        if (!cuda_not_ready(cuda, result)) {
            return lose(cuda, cuda_failed(result, what, &found), &found, why);
        }
        if (cuda->lost.status != STATUS_OK) {
            return fail(why, cuda->lost.status, "%s", cuda->lost.text);
        }
        const double now_s = units_monotonic_s();
        if (asked == 0) {
            start_s = looked_s = now_s;
        }
        if (now_s - looked_s >= look_every_s) {
            const enum status status = look(cuda, what, now_s - start_s, &found);
            if (status != STATUS_OK) {
                return lose(cuda, status, &found, why);
            }
            looked_s = now_s;
        }
        if (now_s - start_s > spin_s) {
            nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
        }
    }
}

enum status cuda_wait_stream(struct cuda_device *cuda, enum stream_name name, const char *what,
                             struct failure *why)
{
    return wait_for(cuda, cuda->streams[name], NULL, what, why);
}

enum status cuda_wait_event(struct cuda_device *cuda, cudaEvent_t event, const char *what,
                            struct failure *why)
{
    return wait_for(cuda, NULL, event, what, why);
}

enum status cuda_drain(struct cuda_device *cuda, struct failure *why)
{
    static const char *const names[N_STREAMS] = {
        [STREAM_COMPUTE] = "waiting for the compute stream",
        [STREAM_COMM] = "waiting for the communication stream",
        [STREAM_COPY_IN] = "waiting for copies to the GPU",
        [STREAM_COPY_OUT] = "waiting for copies from the GPU",
    };
    for (int i = 0; i < N_STREAMS; i++) {
        const enum status status = cuda_wait_stream(cuda, (enum stream_name)i, names[i], why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

cudaError_t cuda_order(struct cuda_device *cuda, cudaStream_t first, cudaStream_t then)
{
    /* A wait is for the record before it, so one event serves every order. */
    const cudaError_t error = cudaEventRecord(cuda->order, first);
    return error != cudaSuccess ? error : cudaStreamWaitEvent(then, cuda->order, 0);
}

/* ---- making them ---- */

static cudaError_t make_slot(struct cuda_slot *slot)
{
    cudaError_t error = cudaEventCreateWithFlags(&slot->event, cudaEventDisableTiming);
    if (error == cudaSuccess) {
        void *host = NULL;
        error = cudaMallocHost(&host, CUDA_SLOT_BYTES);
        slot->host = host;
    }
    return error;
}

enum status cuda_streams_init(struct cuda_device *cuda, struct failure *why)
{
    cudaError_t error = fault_fires(FAULT_PINNED) ? cudaErrorMemoryAllocation : cudaSuccess;
    for (int i = 0; i < N_STREAMS && error == cudaSuccess; i++) {
        /* Lower numbers go first: a transfer starts while products fill the GPU. */
        error = cudaStreamCreateWithPriority(&cuda->streams[i], cudaStreamNonBlocking,
                                             i == STREAM_COMM ? -1 : 0);
    }
    if (error == cudaSuccess) {
        error = cudaEventCreateWithFlags(&cuda->order, cudaEventDisableTiming);
    }
    for (int i = 0; i < CUDA_N_SLOTS && error == cudaSuccess; i++) {
        error = make_slot(&cuda->in[i]);
        if (error == cudaSuccess) {
            error = make_slot(&cuda->out[i]);
        }
    }
    for (int i = 0; i < CUDA_MAX_FLIGHTS && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&cuda->flights[i].event, cudaEventDisableTiming);
    }
    if (error == cudaSuccess) {
        return STATUS_OK;
    }
    cuda_streams_fini(cuda);
    (void)cuda_failed(error, "streams, events and pinned buffers", why);
    return fail_within(why, "GPU %d: %d buffers of %d bytes", cuda->gpu.index, 2 * CUDA_N_SLOTS,
                       CUDA_SLOT_BYTES);
}

static void free_slot(struct cuda_slot *slot)
{
    if (slot->host != NULL) {
        cudaFreeHost(slot->host);
    }
    if (slot->event != NULL) {
        cudaEventDestroy(slot->event);
    }
    *slot = (struct cuda_slot){0};
}

void cuda_streams_fini(struct cuda_device *cuda)
{
    for (int i = 0; i < CUDA_MAX_FLIGHTS; i++) {
        if (cuda->flights[i].event != NULL) {
            cudaEventDestroy(cuda->flights[i].event);
            cuda->flights[i].event = NULL;
        }
    }
    for (int i = 0; i < CUDA_N_SLOTS; i++) {
        free_slot(&cuda->in[i]);
        free_slot(&cuda->out[i]);
    }
    if (cuda->order != NULL) {
        cudaEventDestroy(cuda->order);
        cuda->order = NULL;
    }
    for (int i = 0; i < N_STREAMS; i++) {
        if (cuda->streams[i] != NULL) {
            cudaStreamDestroy(cuda->streams[i]);
            cuda->streams[i] = NULL;
        }
    }
}

/* ---- copies ---- */

static size_t piece_of(size_t left)
{
    return left < CUDA_SLOT_BYTES ? left : CUDA_SLOT_BYTES;
}

/* Into the pinned buffers and off: the source is read when this returns. */
static enum status send_in(struct cuda_device *cuda, const struct cuda_flight *flight,
                           struct failure *why)
{
    cudaStream_t in = cuda->streams[STREAM_COPY_IN];
    cudaError_t error = cuda_order(cuda, cuda->streams[STREAM_COMPUTE], in);
    for (size_t at = 0; at < flight->bytes && error == cudaSuccess;) {
        struct cuda_slot *slot = &cuda->in[cuda->next_in];
        cuda->next_in = (cuda->next_in + 1) % CUDA_N_SLOTS;
        const enum status status =
            cuda_wait_event(cuda, slot->event, "waiting for a copy to the GPU", why);
        if (status != STATUS_OK) {
            return status;
        }
        const size_t piece = piece_of(flight->bytes - at);
        memcpy(slot->host, flight->src + at, piece);
        error = cudaMemcpyAsync(flight->dst + at, slot->host, piece, cudaMemcpyHostToDevice, in);
        if (error == cudaSuccess) {
            error = cudaEventRecord(slot->event, in);
        }
        at += piece;
    }
    if (error == cudaSuccess) {
        error = cudaEventRecord(flight->event, in);
    }
    return error == cudaSuccess ? STATUS_OK : cuda_failed(error, "a copy to the GPU", why);
}

/* Queue pieces while there are pinned buffers for them. The flight owns these. */
static cudaError_t queue_out(struct cuda_device *cuda, struct cuda_flight *flight)
{
    cudaStream_t out = cuda->streams[STREAM_COPY_OUT];
    cudaError_t error = cudaSuccess;
    while (flight->queued < flight->bytes && error == cudaSuccess &&
           flight->queued - flight->done < (size_t)CUDA_N_SLOTS * CUDA_SLOT_BYTES) {
        struct cuda_slot *slot = &cuda->out[flight->queued / CUDA_SLOT_BYTES % CUDA_N_SLOTS];
        const size_t piece = piece_of(flight->bytes - flight->queued);
        if (flight->queued == 0) {
            error = cudaStreamWaitEvent(out, flight->event, 0);
        }
        if (error == cudaSuccess) {
            error = cudaMemcpyAsync(slot->host, flight->src + flight->queued, piece,
                                    cudaMemcpyDeviceToHost, out);
        }
        if (error == cudaSuccess) {
            error = cudaEventRecord(slot->event, out);
        }
        flight->queued += piece;
    }
    return error;
}

/* Everything of it into dst; the host waits. */
static enum status finish_out(struct cuda_device *cuda, struct cuda_flight *flight,
                              struct failure *why)
{
    if (cuda->out_owner != NULL && cuda->out_owner != flight) {
        const enum status status = finish_out(cuda, cuda->out_owner, why); /* one level deep */
        if (status != STATUS_OK) {
            return status;
        }
    }
    while (flight->done < flight->bytes) {
        cuda->out_owner = flight;
        const cudaError_t error = queue_out(cuda, flight);
        if (error != cudaSuccess) {
            return cuda_failed(error, "a copy from the GPU", why);
        }
        struct cuda_slot *slot = &cuda->out[flight->done / CUDA_SLOT_BYTES % CUDA_N_SLOTS];
        const enum status status =
            cuda_wait_event(cuda, slot->event, "waiting for a copy from the GPU", why);
        if (status != STATUS_OK) {
            return status;
        }
        const size_t piece = piece_of(flight->bytes - flight->done);
        memcpy(flight->dst + flight->done, slot->host, piece);
        flight->done += piece;
    }
    cuda->out_owner = NULL;
    return STATUS_OK;
}

/* What the source holds now is what arrives: read from it begins after compute's work of now. */
static enum status send_out(struct cuda_device *cuda, struct cuda_flight *flight,
                            struct failure *why)
{
    cudaError_t error = cudaEventRecord(flight->event, cuda->streams[STREAM_COMPUTE]);
    if (error == cudaSuccess && cuda->out_owner == NULL) {
        cuda->out_owner = flight;
        error = queue_out(cuda, flight);
    }
    return error == cudaSuccess ? STATUS_OK : cuda_failed(error, "a copy from the GPU", why);
}

static struct cuda_flight *flight_of(struct cuda_device *cuda, uint64_t serial)
{
    for (size_t i = 0; i < CUDA_MAX_FLIGHTS; i++) {
        if (cuda->flights[i].serial == serial) {
            return &cuda->flights[i];
        }
    }
    return NULL;
}

enum status cuda_copy(struct device *device, void *dst, const void *src, size_t bytes,
                      enum copy_kind kind, struct ticket *out_ticket, struct failure *why)
{
    struct cuda_device *cuda = cuda_of(device);
    assert(!cuda->in_body); /* a body is captured: no copies in it */
    if (bytes == 0) {
        out_ticket->serial = 0;
        return STATUS_OK;
    }
    if (kind == COPY_WITHIN) {
        const cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice,
                                                  cuda->streams[STREAM_COMPUTE]);
        if (error != cudaSuccess) {
            return cuda_failed(error, "a copy within the GPU", why);
        }
        out_ticket->serial = 0; /* in order as it is */
        return STATUS_OK;
    }
    struct cuda_flight *flight = flight_of(cuda, 0);
    if (flight == NULL) {
        return fail(why, STATUS_BUSY, "%d copies are in flight already; wait for one first",
                    CUDA_MAX_FLIGHTS);
    }
    const cudaEvent_t event = flight->event;
    *flight =
        (struct cuda_flight){.kind = kind, .event = event, .dst = dst, .src = src, .bytes = bytes};
    const enum status status =
        kind == COPY_FROM_HOST ? send_in(cuda, flight, why) : send_out(cuda, flight, why);
    if (status != STATUS_OK) {
        if (cuda->out_owner == flight) {
            cuda->out_owner = NULL;
        }
        return status;
    }
    flight->serial = ++cuda->serial;
    out_ticket->serial = flight->serial;
    return STATUS_OK;
}

enum status cuda_wait(struct device *device, struct ticket *ticket, struct failure *why)
{
    struct cuda_device *cuda = cuda_of(device);
    assert(!cuda->in_body);
    if (ticket->serial == 0) {
        return STATUS_OK;
    }
    struct cuda_flight *flight = flight_of(cuda, ticket->serial);
    assert(flight != NULL); /* a ticket is waited for once */
    enum status status = STATUS_OK;
    if (flight->kind == COPY_TO_HOST) {
        status = finish_out(cuda, flight, why);
    } else {
        const cudaError_t error =
            cudaStreamWaitEvent(cuda->streams[STREAM_COMPUTE], flight->event, 0);
        if (error != cudaSuccess) {
            status = cuda_failed(error, "waiting for a copy to the GPU", why);
        }
    }
    if (status == STATUS_OK) {
        flight->serial = 0;
        ticket->serial = 0;
    }
    return status;
}
