/* Copies and fills: work for a stream, whose operands are checked when it is queued. Owns
 * nothing. Any thread. */
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/emulate/emulate.h"

struct copy {
    void *dst;
    const void *src; /* NULL: the bytes follow */
    size_t bytes;
    unsigned char staged[];
};

static void run_copy(void *closure)
{
    const struct copy *copy = closure;
    memcpy(copy->dst, copy->src != NULL ? copy->src : copy->staged, copy->bytes);
}

static void check_kind(enum cudaMemcpyKind kind, enum emulate_side dst, enum emulate_side src)
{
    const bool to_device = dst == EMULATE_DEVICE, from_device = src == EMULATE_DEVICE;
    const enum cudaMemcpyKind found = to_device && from_device ? cudaMemcpyDeviceToDevice
                                      : to_device              ? cudaMemcpyHostToDevice
                                      : from_device            ? cudaMemcpyDeviceToHost
                                                               : cudaMemcpyHostToHost;
    if (kind != cudaMemcpyDefault && kind != found) {
        emulate_misuse("cudaMemcpyAsync of kind %d, but the operands are of kind %d", (int)kind,
                       (int)found);
    }
}

/* As CUDA has it: from memory that is not pinned the bytes are taken before the call returns; into
 * such memory the call returns when they are there. */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    const cudaError_t error = emulate_enter("cudaMemcpyAsync");
    if (error != cudaSuccess || bytes == 0) {
        return error;
    }
    const enum emulate_side to = emulate_side_of("destination of cudaMemcpyAsync", dst, bytes);
    const enum emulate_side from = emulate_side_of("source of cudaMemcpyAsync", src, bytes);
    check_kind(kind, to, from);
    enum cudaStreamCaptureStatus capturing;
    if ((to == EMULATE_PAGEABLE || from == EMULATE_PAGEABLE) &&
        cudaStreamIsCapturing(stream, &capturing) == cudaSuccess &&
        capturing != cudaStreamCaptureStatusNone) {
        emulate_misuse("cudaMemcpyAsync of memory that is not pinned while the stream is captured");
    }
    const bool staged = from == EMULATE_PAGEABLE;
    struct copy *copy = malloc(sizeof *copy + (staged ? bytes : 0));
    if (copy == NULL) {
        return emulate_error(cudaErrorMemoryAllocation);
    }
    *copy = (struct copy){.dst = dst, .src = staged ? NULL : src, .bytes = bytes};
    if (staged) {
        memcpy(copy->staged, src, bytes);
    }
    const struct emulate_range ranges[] = {{dst, bytes}, {src, staged ? 0 : bytes}};
    emulate_submit(stream, &(struct emulate_work){.name = "cudaMemcpyAsync",
                                                  .run = run_copy,
                                                  .closure = copy,
                                                  .bytes = sizeof *copy + (staged ? bytes : 0),
                                                  .ranges = ranges,
                                                  .n_ranges = 2});
    free(copy);
    return to == EMULATE_PAGEABLE ? cudaStreamSynchronize(stream) : cudaSuccess;
}

struct fill {
    void *dst;
    int value;
    size_t bytes;
};

static void run_fill(void *closure)
{
    const struct fill *fill = closure;
    memset(fill->dst, fill->value, fill->bytes);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    const cudaError_t error = emulate_enter("cudaMemsetAsync");
    if (error != cudaSuccess || bytes == 0) {
        return error;
    }
    emulate_check_device("destination of cudaMemsetAsync", dst, bytes);
    const struct fill fill = {dst, value, bytes};
    const struct emulate_range range = {dst, bytes};
    emulate_submit(stream, &(struct emulate_work){.name = "cudaMemsetAsync",
                                                  .run = run_fill,
                                                  .closure = &fill,
                                                  .bytes = sizeof fill,
                                                  .ranges = &range,
                                                  .n_ranges = 1});
    return cudaSuccess;
}
