/* The step on several ranks equals the step on one, however the batch is cut.
 * links: testing worker kernels proto base
 * labels: step mpi
 * mpi: 2
 *
 * tests/parity/CMakeLists.txt runs it on four ranks too. Every rank computes the one-rank run for
 * itself and compares. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "worker/state/clip.h"
#include <cmocka.h> /* last of the foreign ones: it has a macro `fail` */
#include "tests/unit/step_batches.h"

static struct comm comm;

/* (ranks, micro-batch, accumulation) = (2,1,2) (2,2,1) on two, (4,1,1) on four; against (1,4,1). */
static void check_ranks_against_one(void)
{
    struct uneven_run alone;
    run_uneven(&alone, UNEVEN_ROWS, NULL);
    uint32_t n = 0;
    for (uint32_t micro_batch = 1; micro_batch * comm.size <= UNEVEN_ROWS; micro_batch++) {
        if (UNEVEN_ROWS % (micro_batch * comm.size) != 0) {
            continue;
        }
        struct uneven_run run;
        run_uneven(&run, micro_batch, &comm);
        check_same_run(&run, &alone);
        free_run(&run);
        n++;
    }
    assert_int_equal(n, comm.size == 1 ? 3 : comm.size == 2 ? 2 : 1);
    free_run(&alone);
}

static void ranks_equal_one_rank(void **state)
{
    (void)state;
    check_ranks_against_one();
}

/* Masks are keyed by the sample's place in the global batch, so ranks do not change them. */
static void with_dropout_too(void **state)
{
    (void)state;
    uneven_dropout = 0.1f;
    check_ranks_against_one();
    uneven_dropout = 0.0f;
}

/* Run the update's reduction and norm alone, on gradients that the test wrote. */
static double reduced_norm(struct small_training *small)
{
    struct workspace *workspace = &small->training.workspace;
    double norm = -1.0;
    workspace_begin(workspace, SECTION_UPDATE);
    workspace_phase(workspace, PHASE_STEP);
    assert_int_equal(grads_reduce(&small->training.grads, &small->why), STATUS_OK);
    assert_int_equal(clip_norm(&small->training.grads, &small->device, &norm, &small->why),
                     STATUS_OK);
    assert_int_equal(workspace_end(workspace, &small->why), STATUS_OK);
    return norm;
}

/* Gradients whose sum over ranks has norm 0.8 are not clipped at 1: reduced once, counted once. */
static void the_norm_is_of_the_sum(void **state)
{
    (void)state;
    struct small_training small;
    struct uneven_batch batch;
    open_uneven(&small, &batch, 1, &comm);
    float *grads = grads_slice(&small.training.grads, 0, 0);
    memset(grads, 0, small.units.n_elems * sizeof *grads);
    size_t n;
    float *one = small_grad(&small, "model.norm.weight", &n);
    one[n - 1] = 0.8f / (float)comm.size;
    const double norm = reduced_norm(&small);
    assert_true(fabs(norm - 0.8) < 1e-6);
    assert_true(clip_factor(norm, 1.0) == 1.0);
    /* Every rank has the same sums. */
    assert_true(fabsf(one[n - 1] - 0.8f) < 1e-6f);
    small_close(&small);
}

/* Sums over ranks are in rank order, whatever the bucket: the same bits. */
static void the_bucket_changes_no_bit(void **state)
{
    (void)state;
    float *first = NULL;
    size_t first_n = 0;
    for (size_t bucket = 1024; bucket <= 1 << 22; bucket *= 16) {
        struct small_training small;
        struct uneven_batch batch;
        fill_uneven(&batch);
        small_init(&small, "t0");
        small.comm = &comm;
        small.options.limits.global_batch = UNEVEN_ROWS;
        small.options.reduce_bucket_bytes = bucket;
        small.strategy.micro_batch = 1;
        small_open(&small);
        const struct batch_source source = small_rows_source(&batch.rows);
        small_step(&small, &source, 0);
        size_t n;
        float *weights = copy_tensors(&small, &n, small_param);
        small_check_peak(&small, PHASE_STEP);
        small_close(&small);
        if (first == NULL) {
            first = weights;
            first_n = n;
            continue;
        }
        assert_int_equal(n, first_n);
        assert_true(values_equal(weights, first, n));
        free(weights);
    }
    free(first);
}

/* One rank's infinite gradient skips the step on all. */
static void (*true_embed_backward)(struct ops *ops, float *dwte, float *dwpe, const void *dout,
                                   const int32_t *tokens, const int32_t *positions, size_t rows,
                                   size_t width);

static void overflowing(struct ops *ops, float *dwte, float *dwpe, const void *dout,
                        const int32_t *tokens, const int32_t *positions, size_t rows, size_t width)
{
    true_embed_backward(ops, dwte, dwpe, dout, tokens, positions, rows, width);
    dwte[3] = INFINITY;
}

static void all_ranks_skip_or_none(void **state)
{
    (void)state;
    struct small_training small;
    struct uneven_batch batch;
    open_uneven(&small, &batch, 1, &comm);
    if (comm.rank == comm.size - 1) {
        true_embed_backward = small.ops->embed_backward;
        small.ops->embed_backward = overflowing;
    }
    size_t n;
    float *before = copy_tensors(&small, &n, small_param);
    const struct batch_source source = small_rows_source(&batch.rows);
    const struct step_result result = small_step(&small, &source, 0);
    float *after = copy_tensors(&small, &n, small_param);
    assert_true(result.skipped);
    assert_true(values_equal(after, before, n));
    free(before);
    free(after);
    small_close(&small);
}

int main(int argc, char **argv)
{
    struct failure why;
    alarm(55);
    if (comm_mpi_init(&comm, 20, &argc, &argv, &why) != STATUS_OK) {
        fprintf(stderr, "%s\n", why.text);
        return 1;
    }
    log_init("test_step_ranks", (int)comm.rank, LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_equal_one_rank),   cmocka_unit_test(with_dropout_too),
        cmocka_unit_test(the_norm_is_of_the_sum), cmocka_unit_test(the_bucket_changes_no_bit),
        cmocka_unit_test(all_ranks_skip_or_none),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    comm.table->free(&comm);
    comm_mpi_fini(&comm);
    return failed + (heap_live() != 0);
}
