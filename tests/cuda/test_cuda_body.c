/* Bodies on the stand-in: captured the second time, replayed after, and never wrong.
 *
 * links: standin kernels base
 *
 * Every result is compared with the CPU's operations in the same order: to the byte where the
 * launchers are these operations, to 1e-4 where they are the GPU's kernels, run by fibres. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/cuda_device.h"
#include "proto/base/heap.h"
#include "tests/lib/must_abort.h"
/* Last: it has a macro named fail(). */
#include <cmocka.h>

enum { MIB = 1024 * 1024, ROWS = 32, WIDTH = 48, N = ROWS * WIDTH, PLACES = 8 };

static const struct cuda_plugin *plugin;
static struct device device;
static struct failure why;
static struct ops *cpu, *cuda;
static float *mirror;    /* PLACES arrays of N */
static float *on_device; /* the same */
static void *base;
static bool exact; /* the launchers are the CPU's operations */

#define assert_ok(call) assert_int_equal((call), STATUS_OK)

static struct cuda_body_counts counts(void)
{
    return cuda_body_counts(cuda_ops_of(cuda));
}

/* A stretch of a block: three inputs, dropout, a product, a norm; `variant` changes one value. */
static void stretch(struct ops *ops, float *at, const struct body *body, uint32_t variant)
{
    const struct dropout dropout = {.p = 0.5f,
                                    .seed = 3,
                                    .step = body->step,
                                    .first_sample = body->first_sample,
                                    .seq_len = ROWS,
                                    .layer = body->layer,
                                    .use = 1};
    float *x = at, *y = at + N, *z = at + 2 * N, *mean = at + 3 * N, *weight = at + 4 * N;
    ops->fill(ops, weight, WIDTH, 1.0f + (float)variant);
    ops->norm_forward(ops, NORM_LAYER, y, mean, mean + ROWS, x, weight, weight, ROWS, WIDTH, 1e-5f);
    ops->residual_dropout(ops, z, x, y, ROWS, WIDTH, &dropout);
    ops->activation_forward(ops, ACTIVATION_GELU, y, z, ROWS, WIDTH);
    ops->copy(ops, at + 5 * N, z, N * sizeof *z);
    ops->zero(ops, at + 6 * N, N * sizeof *z);
    ops->add(ops, at + 6 * N, y, N);
    ops->add(ops, x, y, N);
}

static void run_body(const struct body *body, uint32_t variant)
{
    ops_body_begin(cuda, body);
    stretch(cuda, on_device, body, variant);
    ops_body_end(cuda);
    stretch(cpu, mirror, body, variant);
}

static void compare(void)
{
    float *got = malloc(PLACES * N * sizeof *got);
    struct ticket ticket;
    assert_non_null(got);
    assert_ok(device.table->copy(&device, got, on_device, PLACES * N * sizeof *got, COPY_TO_HOST,
                                 &ticket, &why));
    assert_ok(device.table->wait(&device, &ticket, &why));
    assert_ok(cuda->check(cuda, &why));
    for (size_t i = 0; i < PLACES * N; i++) {
        const float off = fabsf(got[i] - mirror[i]);
        if (exact ? got[i] != mirror[i] : !(off <= 1e-4f * (1.0f + fabsf(mirror[i])))) {
            fail_msg("place %zu, element %zu: %g, expected %g", i / N, i % N, (double)got[i],
                     (double)mirror[i]);
        }
    }
    free(got);
}

static int fresh(void **state)
{
    (void)state;
    for (size_t i = 0; i < PLACES * N; i++) {
        mirror[i] = (float)(i % 101) / 50.0f - 1.0f;
    }
    struct ticket ticket;
    if (plugin->ops_new(&device, DTYPE_FP32, &cuda, &why) != STATUS_OK ||
        device.table->copy(&device, on_device, mirror, PLACES * N * sizeof *mirror, COPY_FROM_HOST,
                           &ticket, &why) != STATUS_OK ||
        device.table->wait(&device, &ticket, &why) != STATUS_OK) {
        return -1;
    }
    return 0;
}

static int done(void **state)
{
    (void)state;
    cuda->free(cuda);
    return 0;
}

/* ---- the tests ---- */

static void test_replay(void **state)
{
    (void)state;
    struct body body = {.section = 1, .layer = 2, .pass = 3};
    for (uint32_t step = 0; step < 6; step++) {
        body.step = step;
        body.first_sample = 4 * step;
        run_body(&body, 0);
        compare();
        assert_int_equal(counts().eager, 1);
        assert_int_equal(counts().captured, step > 0);
        assert_int_equal(counts().replayed, step);
        assert_int_equal(counts().alive, step > 0);
    }
}

/* Without a look at the results between: order alone keeps them right. */
static void test_many(void **state)
{
    (void)state;
    for (uint32_t step = 0; step < 12; step++) {
        for (uint32_t layer = 0; layer < 5; layer++) {
            const struct body body = {.section = step % 2,
                                      .layer = layer,
                                      .pass = 0,
                                      .step = step / 2,
                                      .first_sample = step};
            run_body(&body, layer);
            stretch(cuda, on_device, &(struct body){.step = step, .layer = 9}, 0);
            stretch(cpu, mirror, &(struct body){.step = step, .layer = 9}, 0);
        }
    }
    compare();
    assert_int_equal(counts().eager, 10);
    assert_int_equal(counts().captured, 10);
    assert_int_equal(counts().replayed, 50);
}

/* Keys that differ in one part are different bodies. */
static void test_keys(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 8; i++) {
            const struct body body = {.section = i & 1, .layer = i >> 1 & 1, .pass = i >> 2};
            run_body(&body, i);
        }
    }
    compare();
    assert_int_equal(counts().eager, 8);
    assert_int_equal(counts().captured, 8);
    assert_int_equal(counts().replayed, 16);
}

/* The caller breaks the promise: other values, more operations, fewer. */
static void test_another_body_under_the_key(void **state)
{
    (void)state;
    const struct body body = {.layer = 1};
    const uint32_t variants[] = {0, 0, 0, 1, 0, 0, 1, 1, 1};
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        run_body(&body, variants[i]);
        compare();
    }
    /* 0 e, 0 c, 0 r, 1 e, 0 e, 0 c, 1 e, 1 c, 1 r */
    assert_int_equal(counts().eager, 4);
    assert_int_equal(counts().captured, 3);
    assert_int_equal(counts().replayed, 5);
    assert_int_equal(counts().alive, 1);
    for (int n = 0; n < 3; n++) {
        ops_body_begin(cuda, &body);
        for (int i = 0; i <= n; i++) {
            cuda->add(cuda, on_device, on_device + N, N);
            cpu->add(cpu, mirror, mirror + N, N);
        }
        ops_body_end(cuda);
        compare();
    }
    assert_int_equal(counts().eager, 7);
    assert_int_equal(counts().alive, 0);
}

static void test_empty(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        ops_body_begin(cuda, &(struct body){0});
        ops_body_end(cuda);
    }
    assert_int_equal(counts().eager, 0);
    assert_int_equal(counts().captured, 0);
    assert_ok(cuda->check(cuda, &why));
}

/* Longer than a list holds: it is carried out all the same. */
static void test_overflow(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) {
        ops_body_begin(cuda, &(struct body){.layer = 3});
        for (int i = 0; i < 1500; i++) {
            cuda->add(cuda, on_device + (size_t)(i % 3) * N, on_device + 3 * N, WIDTH);
            cpu->add(cpu, mirror + (size_t)(i % 3) * N, mirror + 3 * N, WIDTH);
        }
        ops_body_end(cuda);
    }
    compare();
    assert_int_equal(counts().captured, 0);
    run_body(&(struct body){.layer = 3}, 0);
    compare();
}

static void test_forget(void **state)
{
    (void)state;
    const struct body body = {.layer = 4};
    for (int round = 0; round < 3; round++) {
        run_body(&body, 0);
        run_body(&body, 0);
        run_body(&body, 0);
        assert_int_equal(counts().alive, 1);
        if (round == 0) {
            ops_body_forget(cuda);
        } else {
            /* Giving memory back forgets by itself. */
            void *other = NULL;
            assert_ok(device.table->reserve(&device, 4 * MIB, &other, &why));
            assert_ok(device.table->commit(&device, other, 0, 4 * MIB, &why));
            assert_int_equal(counts().alive, 1);
            device.table->decommit(&device, other, 0, 4 * MIB);
            device.table->unreserve(&device, other, 4 * MIB);
        }
        assert_int_equal(counts().alive, 0);
        compare();
    }
    assert_int_equal(counts().eager, 3);
}

/* Without host memory nothing is kept, and nothing is wrong. */
static void test_out_of_memory(void **state)
{
    (void)state;
    const struct body body = {.layer = 5};
    heap_fail(1, true);
    run_body(&body, 0);
    run_body(&body, 0);
    heap_fail(0, false);
    compare();
    assert_int_equal(counts().eager, 2);
    run_body(&body, 0);
    run_body(&body, 0);
    compare();
    assert_int_equal(counts().captured, 1);
}

static int open_device(void **state)
{
    (void)state;
    struct cuda_gpu gpu;
    plugin = ballast_cuda();
    mirror = malloc(PLACES * N * sizeof *mirror);
    if (mirror == NULL || cpu_ops_new(DTYPE_FP32, 1, &cpu, &why) != STATUS_OK ||
        plugin->open(&device, 0, 0, &gpu, &why) != STATUS_OK ||
        device.table->reserve(&device, 4 * MIB, &base, &why) != STATUS_OK ||
        device.table->commit(&device, base, 0, 2 * MIB, &why) != STATUS_OK) {
        fprintf(stderr, "%s\n", why.text);
        return -1;
    }
    on_device = base;
    return 0;
}

static int close_device(void **state)
{
    (void)state;
    device_fini(&device);
    cpu->free(cpu);
    free(mirror);
    return 0;
}

/* ---- what a body may not have in it ---- */

/* A process cannot use CUDA after a fork, so every child opens the device itself. */
static void begin(uint32_t step)
{
    if (open_device(NULL) != 0 || fresh(NULL) != 0) {
        _exit(1);
    }
    ops_body_begin(cuda, &(struct body){.step = step});
}

static void copy_in_body(void)
{
    struct ticket ticket;
    float value = 0.0f;
    begin(0);
    (void)!device.table->copy(&device, on_device, &value, sizeof value, COPY_FROM_HOST, &ticket,
                              &why);
}

static void check_in_body(void)
{
    begin(0);
    cuda->fill(cuda, on_device, 1, 0.0f);
    (void)!cuda->check(cuda, &why);
}

static void begin_in_body(void)
{
    begin(0);
    ops_body_begin(cuda, &(struct body){0});
}

static void commit_in_body(void)
{
    begin(0);
    (void)!device.table->commit(&device, base, 0, 2 * MIB, &why);
}

static void other_step_in_body(void)
{
    begin(3);
    stretch(cuda, on_device, &(struct body){.step = 4}, 0);
}

static void test_misuse(void **state)
{
    (void)state;
    must_abort(copy_in_body, "in_body");
    must_abort(check_in_body, "in_body");
    must_abort(begin_in_body, "active");
    must_abort(commit_in_body, "in_body");
    must_abort(other_step_in_body, "step");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_replay, fresh, done),
        cmocka_unit_test_setup_teardown(test_many, fresh, done),
        cmocka_unit_test_setup_teardown(test_keys, fresh, done),
        cmocka_unit_test_setup_teardown(test_another_body_under_the_key, fresh, done),
        cmocka_unit_test_setup_teardown(test_empty, fresh, done),
        cmocka_unit_test_setup_teardown(test_overflow, fresh, done),
        cmocka_unit_test_setup_teardown(test_forget, fresh, done),
        cmocka_unit_test_setup_teardown(test_out_of_memory, fresh, done),
    };
    const struct CMUnitTest children[] = {cmocka_unit_test(test_misuse)};
    int failed = 0;
    setenv("BALLAST_STANDIN_KERNELS", "cpu", 1);
    exact = true;
    failed += cmocka_run_group_tests(children, NULL, NULL);
    failed += cmocka_run_group_tests(tests, open_device, close_device);
    setenv("BALLAST_STANDIN_KERNELS", "fibres", 1);
    exact = false;
    failed += cmocka_run_group_tests(tests, open_device, close_device);
    return failed;
}
