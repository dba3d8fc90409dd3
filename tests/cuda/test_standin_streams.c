/* The stand-in's streams: order kept within one, events respected, everything else in any order;
 * and the misuse of streams, contexts and processes.
 *
 * links: standin testing kernels base
 * timeout: 300 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h> /* last: it defines fail() as a macro */
#include "tests/cuda/lib/standin.h"
#include "tests/lib/must_abort.h"

/* ThreadSanitizer sleeps for a second at the end of every process. */
#ifdef __SANITIZE_THREAD__
enum { N_SEEDS = 20 };
#else
enum { N_SEEDS = 200 };
#endif
enum { N_STREAMS = 4, N_STEPS = 30 };

/* ---- order within a stream ---- */

static struct {
    int stream, index;
} journal[N_STREAMS * N_STEPS];
static size_t n_entries;

struct entry {
    int stream, index;
};

static void write_entry(void *closure)
{
    const struct entry *entry = closure;
    journal[n_entries].stream = entry->stream;
    journal[n_entries++].index = entry->index;
}

/* Returns how often the stream changed from one entry to the next. */
static int order_within(void)
{
    cudaStream_t streams[N_STREAMS];
    for (int s = 0; s < N_STREAMS; s++) {
        streams[s] = new_stream();
    }
    for (int i = 0; i < N_STREAMS * N_STEPS; i++) {
        const struct entry entry = {i % N_STREAMS, i / N_STREAMS};
        emulate_enqueue(streams[entry.stream], "entry", write_entry, &entry, sizeof entry);
    }
    OK(cudaDeviceSynchronize());
    int next[N_STREAMS] = {0}, n_changes = 0;
    CHECK(n_entries == N_STREAMS * N_STEPS);
    for (size_t i = 0; i < n_entries; i++) {
        CHECK(journal[i].index == next[journal[i].stream]++);
        n_changes += i > 0 && journal[i].stream != journal[i - 1].stream;
    }
    for (int s = 0; s < N_STREAMS; s++) {
        OK(cudaStreamDestroy(streams[s]));
    }
    /* Strict turns would change every time, one stream after the other three times. */
    return n_changes > 20 && n_changes < N_STREAMS * N_STEPS - 1 ? 0 : 1;
}

static void a_stream_keeps_its_order(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 20; seed++) {
        assert_int_equal(in_child(order_within, seed), 0);
    }
}

/* ---- events ---- */

static unsigned drawn; /* a fixed sequence, the same for all seeds of the stand-in */

static unsigned draw(unsigned limit)
{
    drawn = drawn * 1664525u + 1013904223u;
    return (drawn >> 16) % limit;
}

/* Steps over a few cells on random streams, each ordered after the last that touched its
 * cells. Returns 0 when the values are those of the program's order. */
static int chains(bool with_events)
{
    enum { N_CELLS = 6, N = 60 };
    cudaStream_t streams[N_STREAMS], last[N_CELLS];
    int *cells = new_device(N_CELLS * sizeof *cells), expected[N_CELLS], got[N_CELLS];
    for (int s = 0; s < N_STREAMS; s++) {
        streams[s] = new_stream();
    }
    for (int c = 0; c < N_CELLS; c++) {
        expected[c] = c;
        last[c] = streams[0];
    }
    put_device(cells, expected, sizeof expected, streams[0]);
    drawn = 7;
    for (int i = 0; i < N; i++) {
        const unsigned in = draw(N_CELLS), out = draw(N_CELLS);
        cudaStream_t stream = streams[draw(N_STREAMS)];
        for (int c = 0; with_events && c < N_CELLS; c++) {
            /* A reader of `out` has to be done as well: all cells hang on their last user. */
            if (last[c] != stream) {
                order_after(last[c], stream);
            }
        }
        launch_step(stream, &cells[in], &cells[out], i);
        expected[out] = (int)(2u * (unsigned)expected[in] + (unsigned)i);
        last[in] = last[out] = stream;
    }
    OK(cudaDeviceSynchronize());
    get_device(got, cells, sizeof got, streams[0]);
    OK(cudaFree(cells));
    return memcmp(got, expected, sizeof got) == 0 ? 0 : 2;
}

static int chains_with_events(void)
{
    return chains(true);
}

static int chains_without(void)
{
    return chains(false);
}

static void events_are_respected(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= N_SEEDS; seed++) {
        assert_int_equal(in_child(chains_with_events, seed), 0);
    }
}

static void without_events_the_order_is_another(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 5; seed++) {
        assert_int_equal(in_child(chains_without, seed), 2);
    }
}

/* One producer, one consumer. 0: it saw the new value, 2: the old one. */
static int pair(bool with_event)
{
    cudaStream_t first = new_stream(), second = new_stream();
    int *cells = new_device(2 * sizeof *cells), got[2] = {5, 0};
    put_device(cells, got, sizeof got, first);
    launch_step(first, &cells[0], &cells[0], 1);
    if (with_event) {
        order_after(first, second);
    }
    launch_step(second, &cells[0], &cells[1], 0);
    OK(cudaDeviceSynchronize());
    get_device(got, cells, sizeof got, first);
    CHECK(got[0] == 11 && (got[1] == 22 || got[1] == 10));
    return got[1] == 22 ? 0 : 2;
}

static int pair_with_event(void)
{
    return pair(true);
}

static int pair_without(void)
{
    return pair(false);
}

static void both_orders_are_seen(void **state)
{
    (void)state;
    int seen[3] = {0};
    for (unsigned seed = 1; seed <= 40; seed++) {
        const int order = in_child(pair_without, seed);
        assert_in_range(order, 0, 2);
        seen[order]++;
        assert_int_equal(in_child(pair_with_event, seed), 0);
    }
    assert_true(seen[0] >= 5 && seen[2] >= 5);
}

static void a_dropped_wait_is_seen(void **state)
{
    (void)state;
    int n_seen = 0;
    set_number("BALLAST_STANDIN_DROP_WAIT", 1);
    for (unsigned seed = 1; seed <= 20; seed++) {
        n_seen += in_child(pair_with_event, seed) == 2;
    }
    set_number("BALLAST_STANDIN_DROP_WAIT", 2); /* there is only one */
    for (unsigned seed = 1; seed <= 20; seed++) {
        assert_int_equal(in_child(pair_with_event, seed), 0);
    }
    unsetenv("BALLAST_STANDIN_DROP_WAIT");
    assert_true(n_seen >= 3);
}

/* A wait is for the record that was the latest when it was queued: the second record of the event
 * comes after the waiting stream's work, and would wait for itself otherwise. */
static int latest_record(void)
{
    cudaStream_t first = new_stream(), second = new_stream();
    cudaEvent_t event = new_event();
    int *cell = new_device(sizeof *cell), got = 1;
    put_device(cell, &got, sizeof got, first);
    OK(cudaStreamWaitEvent(second, event, 0)); /* never recorded: no wait */
    launch_step(first, cell, cell, 1);
    OK(cudaEventRecord(event, first));
    OK(cudaStreamWaitEvent(second, event, 0));
    launch_step(second, cell, cell, 1);
    order_after(second, first);
    launch_step(first, cell, cell, 1);
    OK(cudaEventRecord(event, first));
    OK(cudaEventSynchronize(event));
    OK(cudaEventQuery(event));
    OK(cudaDeviceSynchronize());
    get_device(&got, cell, sizeof got, first);
    CHECK(got == 15);
    OK(cudaEventDestroy(event));
    return 0;
}

static void a_wait_names_the_latest_record(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 20; seed++) {
        assert_int_equal(in_child(latest_record, seed), 0);
    }
}

/* ---- polling, and no polling ---- */

static int polling(void)
{
    cudaStream_t stream = new_stream();
    cudaEvent_t event = new_event();
    OK(cudaEventQuery(event)); /* never recorded */
    int *cell = new_device(sizeof *cell), got = 3;
    put_device(cell, &got, sizeof got, stream);
    launch_step(stream, cell, cell, 0);
    OK(cudaEventRecord(event, stream));
    cudaError_t error;
    while ((error = cudaEventQuery(event)) == cudaErrorNotReady) {
        CHECK(cudaGetLastError() == cudaErrorNotReady);
    }
    CHECK(error == cudaSuccess && cudaGetLastError() == cudaSuccess);
    OK(cudaStreamQuery(stream));
    OK(cudaEventDestroy(event));
    return 0;
}

static _Atomic int was_run;

static void set_flag(void *closure)
{
    (void)closure;
    was_run = 1;
}

static int alone(void)
{
    cudaStream_t stream = new_stream();
    emulate_enqueue(stream, "flag", set_flag, NULL, 0);
    while (!was_run) {
        usleep(100); /* the alarm ends it */
    }
    return 0;
}

static void work_is_done_with_and_without_polling(void **state)
{
    (void)state;
    assert_int_equal(in_child(polling, 1), 0);
    assert_int_equal(in_child(alone, 1), 0);
}

/* ---- misuse ---- */

static void sleep_a_little(void *closure)
{
    (void)closure;
    usleep(200 * 1000);
}

static void use_default_stream(void)
{
    cudaFree(NULL);
    emulate_enqueue(NULL, "kernel", set_flag, NULL, 0);
}

static void destroy_busy_stream(void)
{
    cudaStream_t stream = new_stream();
    emulate_enqueue(stream, "slow", sleep_a_little, NULL, 0);
    cudaStreamDestroy(stream);
}

static void use_destroyed_stream(void)
{
    cudaStream_t stream = new_stream();
    cudaStreamDestroy(stream);
    cudaStreamQuery(stream);
}

static void touch_second_gpu(void)
{
    cudaSetDevice(1);
    cudaSetDevice(0);
}

static void *poll_stream(void *stream)
{
    cudaStreamQuery(stream); /* on a thread whose GPU is 0 */
    return NULL;
}

static void helper_without_device(void)
{
    cudaSetDevice(1);
    pthread_t thread;
    pthread_create(&thread, NULL, poll_stream, new_stream());
    pthread_join(thread, NULL);
}

static void use_after_fork(void)
{
    cudaStream_t stream = new_stream();
    const pid_t pid = fork();
    if (pid == 0) {
        cudaStreamQuery(stream);
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    if (WIFSIGNALED(status)) {
        abort();
    }
}

static void misuse_aborts(void **state)
{
    (void)state;
    must_abort(use_default_stream, "default stream");
    must_abort(destroy_busy_stream, "cudaStreamDestroy with work queued");
    must_abort(use_destroyed_stream, "does not exist");
    must_abort(touch_second_gpu, "would make a context on GPU 0");
    must_abort(helper_without_device, "would make a context on GPU 0");
    must_abort(use_after_fork, "forked after its first use");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_keeps_its_order),
        cmocka_unit_test(events_are_respected),
        cmocka_unit_test(without_events_the_order_is_another),
        cmocka_unit_test(both_orders_are_seen),
        cmocka_unit_test(a_dropped_wait_is_seen),
        cmocka_unit_test(a_wait_names_the_latest_record),
        cmocka_unit_test(work_is_done_with_and_without_polling),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
