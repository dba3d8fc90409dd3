/* The stand-in's captures and graphs: arguments by value, edges from stream order and events, any
 * order that respects them; and the misuse of captures.
 *
 * links: standin testing kernels base
 * timeout: 300 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h> /* last: it defines fail() as a macro */
#include "tests/cuda/lib/standin.h"
#include "tests/lib/must_abort.h"

static cudaGraphExec_t instantiate(cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

static void begin(cudaStream_t stream)
{
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

/* Nothing runs while it is captured; arguments are those of the capture, memory is read when it
 * is replayed. */
static int by_value(void)
{
    cudaStream_t stream = new_stream();
    int *cells = new_device(2 * sizeof *cells), got[2] = {1, 0};
    put_device(cells, got, sizeof got, stream);
    begin(stream);
    enum cudaStreamCaptureStatus status;
    OK(cudaStreamIsCapturing(stream, &status));
    CHECK(status == cudaStreamCaptureStatusActive);
    struct step step = {&cells[0], &cells[1], 5};
    emulate_enqueue(stream, "step", run_step, &step, sizeof step);
    step = (struct step){NULL, NULL, 99};
    OK(cudaMemcpyAsync(&cells[0], &cells[1], sizeof *cells, cudaMemcpyDeviceToDevice, stream));
    cudaGraphExec_t exec = instantiate(stream);
    OK(cudaStreamIsCapturing(stream, &status));
    CHECK(status == cudaStreamCaptureStatusNone);
    get_device(got, cells, sizeof got, stream);
    CHECK(got[0] == 1 && got[1] == 0);
    for (int i = 0; i < 3; i++) {
        OK(cudaGraphLaunch(exec, stream));
    }
    get_device(got, cells, sizeof got, stream);
    CHECK(got[0] == 43 && got[1] == 43); /* 1 -> 7 -> 19 -> 43 */
    OK(cudaGraphExecDestroy(exec));
    OK(cudaFree(cells));
    OK(cudaStreamDestroy(stream));
    return 0;
}

static void arguments_are_kept_by_value(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 5; seed++) {
        assert_int_equal(in_child(by_value, seed), 0);
    }
}

/* A fork and a join: two branches of ten steps each between a first step and a last one. */
static cudaGraphExec_t capture_branches(cudaStream_t stream, cudaStream_t side, int *cells)
{
    begin(stream);
    launch_step(stream, &cells[0], &cells[0], 1);
    order_after(stream, side);
    for (int i = 0; i < 10; i++) {
        launch_step(stream, i == 0 ? &cells[0] : &cells[1], &cells[1], i);
        launch_step(side, i == 0 ? &cells[0] : &cells[2], &cells[2], 3 * i);
    }
    order_after(side, stream);
    launch_step(stream, &cells[1], &cells[3], 0);
    launch_step(stream, &cells[2], &cells[0], 0);
    return instantiate(stream);
}

static int branches(void)
{
    cudaStream_t stream = new_stream(), side = new_stream();
    int got[4] = {1, 0, 0, 0}, expected[4] = {1, 0, 0, 0};
    int *cells = new_device(sizeof got);
    put_device(cells, got, sizeof got, stream);
    cudaGraphExec_t exec = capture_branches(stream, side, cells);
    for (int round = 0; round < 3; round++) {
        OK(cudaGraphLaunch(exec, stream));
        unsigned first = 2u * (unsigned)expected[0] + 1, a = first, b = first;
        for (unsigned i = 0; i < 10; i++) {
            a = 2 * a + i;
            b = 2 * b + 3 * i;
        }
        expected[0] = (int)(2 * b);
        expected[1] = (int)a;
        expected[2] = (int)b;
        expected[3] = (int)(2 * a);
    }
    get_device(got, cells, sizeof got, stream);
    CHECK(memcmp(got, expected, sizeof got) == 0);
    /* The other stream is free again. */
    launch_step(side, cells, cells, 0);
    OK(cudaStreamSynchronize(side));
    OK(cudaGraphExecDestroy(exec));
    return 0;
}

static void edges_are_respected(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 60; seed++) {
        assert_int_equal(in_child(branches, seed), 0);
    }
}

/* 0 or 2, as the unordered nodes were done in one order or the other. */
static int unordered(void)
{
    cudaStream_t stream = new_stream(), side = new_stream();
    int got[2] = {1, 0};
    int *cells = new_device(sizeof got);
    put_device(cells, got, sizeof got, stream);
    begin(stream);
    order_after(stream, side);
    launch_step(stream, &cells[0], &cells[0], 1);
    launch_step(side, &cells[0], &cells[1], 0);
    order_after(side, stream);
    launch_step(stream, &cells[1], &cells[1], 0);
    cudaGraphExec_t exec = instantiate(stream);
    OK(cudaGraphLaunch(exec, stream));
    get_device(got, cells, sizeof got, stream);
    OK(cudaGraphExecDestroy(exec));
    CHECK(got[1] == 12 || got[1] == 4);
    return got[1] == 12 ? 0 : 2;
}

static void without_edges_both_orders_are_seen(void **state)
{
    (void)state;
    int seen[3] = {0};
    for (unsigned seed = 1; seed <= 40; seed++) {
        const int order = in_child(unordered, seed);
        assert_in_range(order, 0, 2);
        seen[order]++;
    }
    assert_true(seen[0] >= 5 && seen[2] >= 5);
}

/* ---- misuse ---- */

static void synchronize_captured(void)
{
    cudaStream_t stream = new_stream();
    begin(stream);
    cudaStreamSynchronize(stream);
}

static void allocate_while_capturing(void)
{
    begin(new_stream());
    new_device(64);
}

static void query_event_while_capturing(void)
{
    cudaEvent_t event = new_event();
    begin(new_stream());
    cudaEventQuery(event);
}

static void end_unjoined(void)
{
    cudaStream_t stream = new_stream(), side = new_stream();
    int *cell = new_device(sizeof *cell);
    cudaGraph_t graph;
    begin(stream);
    launch_step(stream, cell, cell, 0);
    order_after(stream, side);
    launch_step(side, cell, cell, 0);
    cudaStreamEndCapture(stream, &graph);
}

static void wait_for_outside(void)
{
    cudaStream_t stream = new_stream(), side = new_stream();
    cudaEvent_t event = new_event();
    cudaEventRecord(event, side);
    begin(stream);
    cudaStreamWaitEvent(stream, event, 0);
}

static void wait_for_ended(void)
{
    cudaStream_t stream = new_stream();
    cudaEvent_t event = new_event();
    int *cell = new_device(sizeof *cell);
    begin(stream);
    launch_step(stream, cell, cell, 0);
    cudaEventRecord(event, stream);
    instantiate(stream);
    cudaStreamWaitEvent(stream, event, 0);
}

static void copy_pageable(void)
{
    cudaStream_t stream = new_stream();
    char *byte = new_device(1), host = 0;
    begin(stream);
    cudaMemcpyAsync(byte, &host, 1, cudaMemcpyHostToDevice, stream);
}

static void free_captured_memory(void)
{
    cudaStream_t stream = new_stream();
    int *cell = new_device(sizeof *cell);
    begin(stream);
    launch_step(stream, cell, cell, 0);
    instantiate(stream);
    cudaFree(cell);
}

static void sleep_a_little(void *closure)
{
    (void)closure;
    usleep(200 * 1000);
}

static void destroy_launched(void)
{
    cudaStream_t stream = new_stream();
    begin(stream);
    emulate_enqueue(stream, "slow", sleep_a_little, NULL, 0);
    cudaGraphExec_t exec = instantiate(stream);
    cudaGraphLaunch(exec, stream);
    cudaGraphExecDestroy(exec);
}

static void misuse_aborts(void **state)
{
    (void)state;
    must_abort(synchronize_captured, "cudaStreamSynchronize while the stream is captured");
    must_abort(allocate_while_capturing, "cudaMalloc while a stream is captured");
    must_abort(query_event_while_capturing, "cudaEventQuery while a stream is captured");
    must_abort(end_unjoined, "was not joined");
    must_abort(wait_for_outside, "recorded outside");
    must_abort(wait_for_ended, "capture that has ended");
    must_abort(copy_pageable, "not pinned");
    must_abort(free_captured_memory, "cudaFree");
    must_abort(destroy_launched, "launched and is not done");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arguments_are_kept_by_value),
        cmocka_unit_test(edges_are_respected),
        cmocka_unit_test(without_edges_both_orders_are_seen),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
