/* The launchers that stand for the GPU's kernels: queued on streams, with arguments copied by the
 * call and what varies read when they run; the values are the CPU device's, bit for bit.
 *
 * links: standin testing kernels base */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/cuda/emulate/launch_cpu.h"
#include "kernels/ops.h"
#include "tests/lib/values.h"
#include <cmocka.h> /* last: it defines fail() as a macro */
#include "tests/cuda/lib/standin.h"
#include "tests/lib/must_abort.h"

enum { ROWS = 6, WIDTH = 40, N = ROWS * WIDTH };

static struct ops *new_ops(enum dtype dtype)
{
    struct ops *ops;
    struct failure why = {0};
    CHECK(cpu_ops_new(dtype, 1, &ops, &why) == STATUS_OK);
    return ops;
}

static void *on_device(const void *values, size_t bytes, cudaStream_t stream)
{
    void *device = new_device(bytes);
    put_device(device, values, bytes, stream);
    return device;
}

/* Dropout takes step and first sample from device memory, as it is when the launch runs. */
static int dropout(void)
{
    struct ops *ops = new_ops(DTYPE_FP32);
    cudaStream_t stream = new_stream();
    float *in = values_random(N, 1.0f, 1), *expected = values_zero(N), *got = values_zero(N);
    float *device = on_device(in, N * sizeof *in, stream);
    struct cuda_varying *varying = new_device(sizeof *varying);
    struct cuda_residual_dropout args = {
        .out = device,
        .branch = device,
        .rows = ROWS,
        .width = WIDTH,
        .dropout = {.p = 0.5f, .seed = 3, .step = 99, .first_sample = 99, .seq_len = ROWS},
        .varying = varying};
    const struct cuda_set_varying set = {varying, {.step = 5, .first_sample = 2}};
    cuda_kernels_cpu.set_varying(stream, &set);
    cuda_kernels_cpu.residual_dropout(stream, &args);
    struct dropout own = args.dropout;
    args.rows = 0; /* copied by the call */
    get_device(got, device, N * sizeof *got, stream);
    ops->residual_dropout(ops, expected, NULL, in, ROWS, WIDTH, &own);
    CHECK(memcmp(got, expected, N * sizeof *got) != 0); /* not those of the argument */
    own.step = 5;
    own.first_sample = 2;
    ops->residual_dropout(ops, expected, NULL, in, ROWS, WIDTH, &own);
    CHECK(values_equal(got, expected, N));
    ops->free(ops);
    free(in);
    free(expected);
    free(got);
    return 0;
}

static int values_of(enum dtype dtype)
{
    struct ops *ops = new_ops(dtype);
    cudaStream_t stream = new_stream();
    float *a = values_random(N, 1.0f, 1), *b = values_random(N, 1.0f, 2);
    float *weight = values_random(WIDTH, 1.0f, 3);
    float *expected = values_zero(N), *got = values_zero(N), *mean = values_zero(ROWS);
    float *rstd = values_zero(ROWS);
    unsigned char *narrow = malloc(N * 4), *narrow_weight = malloc(N * 4);
    ops->narrow(ops, narrow, a, N);
    ops->narrow(ops, narrow_weight, weight, WIDTH);
    ops->norm_forward(ops, NORM_RMS, expected, NULL, rstd, narrow, narrow_weight, NULL, ROWS, WIDTH,
                      1e-5f);
    float *device_a = on_device(a, N * sizeof *a, stream);
    float *device_b = on_device(b, N * sizeof *b, stream);
    float *device_weight = on_device(weight, WIDTH * sizeof *weight, stream);
    void *x = new_device(N * 4), *w = new_device(N * 4), *out = new_device(N * 4);
    float *device_rstd = new_device(ROWS * sizeof(float));
    cuda_kernels_cpu.narrow(stream, &(struct cuda_narrow){dtype, x, device_a, N});
    cuda_kernels_cpu.narrow(stream, &(struct cuda_narrow){dtype, w, device_weight, WIDTH});
    cuda_kernels_cpu.norm_forward(stream, &(struct cuda_norm_forward){.dtype = dtype,
                                                                      .kind = NORM_RMS,
                                                                      .out = out,
                                                                      .rstd = device_rstd,
                                                                      .x = x,
                                                                      .weight = w,
                                                                      .rows = ROWS,
                                                                      .width = WIDTH,
                                                                      .eps = 1e-5f});
    get_device(got, out, N * ops->elem_bytes, stream);
    CHECK(memcmp(got, expected, N * ops->elem_bytes) == 0);
    get_device(mean, device_rstd, ROWS * sizeof(float), stream);
    CHECK(values_equal(mean, rstd, ROWS));
    /* c = a b^T, plainly. */
    const struct matmul product = {
        .form = MATMUL_NT, .m = ROWS, .n = ROWS, .k = WIDTH, .c_fp32 = true};
    struct cuda_plain_matmul plain = {dtype, product};
    plain.call.a = x;
    plain.call.b = x;
    plain.call.c = device_b;
    cuda_kernels_cpu.plain_matmul(stream, &plain);
    get_device(got, device_b, ROWS * ROWS * sizeof *got, stream);
    struct matmul call = product;
    call.a = narrow;
    call.b = narrow;
    call.c = expected;
    call.scratch = malloc(ops->matmul_scratch(ops, &call) + 1);
    ops->matmul(ops, &call);
    CHECK(values_equal(got, expected, ROWS * ROWS));
    free(call.scratch);
    ops->free(ops);
    free(a);
    free(b);
    free(weight);
    free(expected);
    free(got);
    free(mean);
    free(rstd);
    free(narrow);
    free(narrow_weight);
    return 0;
}

static int values_fp32(void)
{
    return values_of(DTYPE_FP32);
}

static int values_bf16(void)
{
    return values_of(DTYPE_BF16);
}

/* Sums: in fp64, and what a GPU needs for partial sums is not left as it was. */
static int sums(void)
{
    struct ops *ops = new_ops(DTYPE_FP32);
    cudaStream_t stream = new_stream();
    float *values = values_random(N, 1.0f, 4);
    const float *device = on_device(values, N * sizeof *values, stream);
    double *out = new_device(2 * sizeof *out), got[2], expected[2];
    double *partials = new_device(CUDA_SUM_PARTIALS * sizeof *partials);
    cuda_kernels_cpu.sum(stream, &(struct cuda_sum){&out[0], device, N});
    cuda_kernels_cpu.sum_squares(stream, &(struct cuda_sum_squares){&out[1], partials, device, N});
    get_device(got, out, sizeof got, stream);
    ops->sum(ops, &expected[0], values, N);
    ops->sum_squares(ops, &expected[1], values, N);
    CHECK(memcmp(got, expected, sizeof got) == 0);
    ops->free(ops);
    free(values);
    return 0;
}

static void launches_do_what_the_cpu_does(void **state)
{
    (void)state;
    assert_int_equal(in_child(dropout, 1), 0);
    assert_int_equal(in_child(values_fp32, 1), 0);
    assert_int_equal(in_child(sums, 1), 0);
}

static void in_bf16_as_well(void **state)
{
    (void)state;
    struct ops *ops;
    struct failure why = {0};
    if (cpu_ops_new(DTYPE_BF16, 1, &ops, &why) != STATUS_OK) {
        assert_int_equal(why.status, STATUS_UNSUPPORTED);
        return;
    }
    ops->free(ops);
    assert_int_equal(in_child(values_bf16, 1), 0);
}

static void every_kernel_has_a_launcher(void **state)
{
    (void)state;
#define HAS(name) assert_non_null(cuda_kernels_cpu.name);
    CUDA_KERNELS(HAS)
#undef HAS
}

static void dropout_without_varying(void)
{
    cudaStream_t stream = new_stream();
    float *cell = new_device(sizeof *cell);
    cuda_kernels_cpu.dropout_backward(
        stream, &(struct cuda_dropout_backward){.dbranch = cell,
                                                .dout = cell,
                                                .rows = 1,
                                                .width = 1,
                                                .dropout = {.p = 0.5f, .seq_len = 1}});
    cudaStreamSynchronize(stream);
}

static void misuse_aborts(void **state)
{
    (void)state;
    must_abort(dropout_without_varying, "dropout without `varying`");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(launches_do_what_the_cpu_does),
        cmocka_unit_test(in_bf16_as_well),
        cmocka_unit_test(every_kernel_has_a_launcher),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
