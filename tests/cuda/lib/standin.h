/* What the stand-in's own tests share. Every scenario runs in a process of its own, since a
 * process has one context, one seed and one executor. Include after cmocka.h. */
#ifndef BALLAST_TESTS_CUDA_LIB_STANDIN_H
#define BALLAST_TESTS_CUDA_LIB_STANDIN_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "kernels/cuda/emulate/enqueue.h"
#include <cmocka.h> /* last: it has a macro `fail` */

/* In a child, where cmocka's assertions have nowhere to jump to. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s (seed %s)\n", __FILE__, __LINE__, #condition,               \
                    getenv("BALLAST_STANDIN_SEED"));                                               \
            fflush(stderr);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)
#define OK(call) CHECK((call) == cudaSuccess)

static inline void set_number(const char *name, unsigned value)
{
    char text[16];
    snprintf(text, sizeof text, "%u", value);
    setenv(name, text, 1);
}

/* Start `body` in a child; its exit status is what it returns. */
static inline pid_t start_child(int (*body)(void), unsigned seed)
{
    fflush(stdout);
    fflush(stderr);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(60);
        set_number("BALLAST_STANDIN_SEED", seed);
        exit(body());
    }
    return pid;
}

/* The exit status; -1 when it died by a signal. */
static inline int end_child(pid_t pid)
{
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static inline int in_child(int (*body)(void), unsigned seed)
{
    return end_child(start_child(body, seed));
}

static inline cudaStream_t new_stream(void)
{
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static inline cudaEvent_t new_event(void)
{
    cudaEvent_t event;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

static inline void *new_device(size_t bytes)
{
    void *memory;
    OK(cudaMalloc(&memory, bytes));
    return memory;
}

/* What is queued on `then` from now on comes after what is queued on `first` now. */
static inline void order_after(cudaStream_t first, cudaStream_t then)
{
    cudaEvent_t event = new_event();
    OK(cudaEventRecord(event, first));
    OK(cudaStreamWaitEvent(then, event, 0));
    OK(cudaEventDestroy(event));
}

/* From host memory that is not pinned, and back, waiting. */
static inline void put_device(void *dst, const void *src, size_t bytes, cudaStream_t stream)
{
    OK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, stream));
    OK(cudaStreamSynchronize(stream));
}

static inline void get_device(void *dst, const void *src, size_t bytes, cudaStream_t stream)
{
    OK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, stream));
}

/* A kernel: *out = 2 *in + value, on one int in device memory. */
struct step {
    const int *in;
    int *out, value;
};

static inline void run_step(void *closure)
{
    const struct step *step = closure;
    *step->out = (int)(2u * (unsigned)*step->in + (unsigned)step->value);
}

static inline void launch_step(cudaStream_t stream, const int *in, int *out, int value)
{
    const struct step step = {in, out, value};
    emulate_enqueue(stream, "step", run_step, &step, sizeof step);
}

#endif
