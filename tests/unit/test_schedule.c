/* The learning rate at known steps.
 * links: worker kernels proto base */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include "worker/state/schedule.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static void check(const struct schedule *schedule, uint64_t step, double expected)
{
    const double got = schedule_lr(schedule, step);
    if (!(fabs(got - expected) <= 1e-15)) {
        fail_msg("step %llu: %.17g, not %.17g", (unsigned long long)step, got, expected);
    }
}

static void constant(void **state)
{
    (void)state;
    const struct schedule schedule = {.kind = SCHEDULE_KIND_CONSTANT, .lr = 0.25};
    check(&schedule, 0, 0.25);
    check(&schedule, 1u << 30, 0.25);
}

/* Linear from the minimum; update 3 of 4 has the whole rate, and so has update 4. */
static void warm_up(void **state)
{
    (void)state;
    const struct schedule schedule = {
        .kind = SCHEDULE_KIND_CONSTANT, .lr = 1.0, .warmup_min_lr = 0.2, .warmup_steps = 4};
    check(&schedule, 0, 0.4);
    check(&schedule, 1, 0.6);
    check(&schedule, 2, 0.8);
    check(&schedule, 3, 1.0);
    check(&schedule, 4, 1.0);
}

static void cosine(void **state)
{
    (void)state;
    const struct schedule schedule = {.kind = SCHEDULE_KIND_COSINE,
                                      .lr = 1.0,
                                      .warmup_steps = 2,
                                      .total_steps = 13,
                                      .min_ratio = 0.1};
    check(&schedule, 1, 1.0);
    check(&schedule, 2, 1.0);
    check(&schedule, 7, 0.55); /* half-way: 2..12 */
    check(&schedule, 12, 0.1);
    check(&schedule, 400, 0.1); /* and stays */
    check(&schedule, 4, 0.1 + 0.45 * (1.0 + cos(0.2 * acos(-1.0))));
}

static void linear(void **state)
{
    (void)state;
    const struct schedule schedule = {
        .kind = SCHEDULE_KIND_LINEAR, .lr = 2.0, .total_steps = 11, .min_ratio = 0.5};
    check(&schedule, 0, 2.0);
    check(&schedule, 5, 1.5);
    check(&schedule, 10, 1.0);
    check(&schedule, 11, 1.0);
}

/* A warm-up that is the whole run, and a run of one step. */
static void ends(void **state)
{
    (void)state;
    struct schedule schedule = {.kind = SCHEDULE_KIND_COSINE,
                                .lr = 1.0,
                                .warmup_steps = 5,
                                .total_steps = 5,
                                .min_ratio = 0.0};
    check(&schedule, 4, 1.0);
    check(&schedule, 5, 1.0);
    check(&schedule, 6, 0.0);
    schedule.warmup_steps = 0;
    schedule.total_steps = 1;
    check(&schedule, 0, 1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(constant), cmocka_unit_test(warm_up), cmocka_unit_test(cosine),
        cmocka_unit_test(linear),   cmocka_unit_test(ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
