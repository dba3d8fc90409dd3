/* Which attention runs: cuDNN's, where it is installed, agrees with ours and has room, else ours.
 *
 * The choice is made once, at the start, and is part of the fingerprint: a run never changes from
 * one to the other. BALLAST_CUDNN=off switches it off. Main thread. */
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/cuda_device.h"

/* What cuDNN may use. Its forward wants next to nothing, its deterministic backward the size of all
 * scores: short sequences only. */
static const size_t room_bytes = (size_t)64 * 1024 * 1024;

void cuda_attention_choose(struct cuda_device *cuda, const struct cuda_kernels *ours)
{
    const char *wish = getenv("BALLAST_CUDNN");
    if (cuda->cudnn_tried || (wish != NULL && strcmp(wish, "off") == 0)) {
        return;
    }
    cuda->cudnn_tried = true;
    struct failure why = {0};
    if (attention_cudnn_new(&cuda->cudnn, &why) != STATUS_OK) {
        cuda->cudnn = NULL; /* ours serve everything */
        return;
    }
    if (attention_cudnn_agrees(cuda->cudnn, cuda->streams[STREAM_COMPUTE], ours,
                               &cuda->cudnn_backward, &why) != STATUS_OK ||
        cudaMalloc(&cuda->cudnn_scratch, room_bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        cuda_attention_forget(cuda);
    }
}

void cuda_attention_forget(struct cuda_device *cuda)
{
    attention_cudnn_free(cuda->cudnn);
    cuda->cudnn = NULL;
    if (cuda->cudnn_scratch != NULL) {
        cudaFree(cuda->cudnn_scratch);
        cuda->cudnn_scratch = NULL;
    }
}

size_t cuda_attention_version(const struct cuda_device *cuda)
{
    return cuda->cudnn == NULL ? 0 : attention_cudnn_version(cuda->cudnn);
}

static bool is_cudnns(struct cuda_device *cuda, const struct attention *attention,
                      enum dtype dtype, bool backward)
{
    return cuda->cudnn != NULL && (!backward || cuda->cudnn_backward) &&
           attention_cudnn_serves(cuda->cudnn, attention, dtype) &&
           attention_cudnn_scratch(cuda->cudnn, attention, backward, NULL) <= room_bytes;
}

static void note(struct cuda_ops *self, enum status status, const struct failure *why)
{
    if (status != STATUS_OK) {
        cuda_ops_note(self, status, "%s", why->text);
    }
}

void cuda_attention_forward(struct cuda_ops *self, const void *arguments)
{
    const struct cuda_attention_forward *args = arguments;
    struct cuda_device *cuda = self->cuda;
    cudaStream_t stream = cuda->streams[STREAM_COMPUTE];
    if (!is_cudnns(cuda, &args->attention, args->dtype, false)) {
        self->kernels->attention_forward(stream, args);
        return;
    }
    struct failure why = {0};
    note(self, attention_cudnn_forward(cuda->cudnn, stream, args, cuda->cudnn_scratch, &why), &why);
}

void cuda_attention_backward(struct cuda_ops *self, const void *arguments)
{
    const struct cuda_attention_backward *args = arguments;
    struct cuda_device *cuda = self->cuda;
    cudaStream_t stream = cuda->streams[STREAM_COMPUTE];
    if (!is_cudnns(cuda, &args->attention, args->dtype, true)) {
        self->kernels->attention_backward(stream, args);
        return;
    }
    struct failure why = {0};
    note(self, attention_cudnn_backward(cuda->cudnn, stream, args, cuda->cudnn_scratch, &why),
         &why);
}
