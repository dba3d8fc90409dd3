/* Faults on purpose: the spec's grammar, when one fires, admissions, the unfired.
 * links: base */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "proto/base/units.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static int disarm(void **state)
{
    (void)state;
    fault_disarm_all();
    fault_here(0, 0, PHASE_SETUP);
    return 0;
}

static void arm(const char *spec)
{
    struct failure why = {0};
    if (fault_arm(spec, &why) != STATUS_OK) {
        fail_msg("%s", why.text);
    }
}

static void fires_once_where_it_was_told(void **state)
{
    (void)state;
    assert_false(fault_fires(FAULT_COMMIT));
    arm("commit:rank=1,step=3,phase=backward");
    fault_here(0, 3, PHASE_BACKWARD);
    assert_false(fault_fires(FAULT_COMMIT));
    fault_here(1, 2, PHASE_BACKWARD);
    assert_false(fault_fires(FAULT_COMMIT));
    fault_here(1, 3, PHASE_FORWARD);
    assert_false(fault_fires(FAULT_COMMIT));
    fault_here(1, 3, PHASE_BACKWARD);
    assert_false(fault_fires(FAULT_HOST));
    assert_true(fault_fires(FAULT_COMMIT));
    assert_false(fault_fires(FAULT_COMMIT));
}

static void a_bare_point_fires_anywhere(void **state)
{
    (void)state;
    arm("io");
    fault_here(7, 123, PHASE_SAVE);
    assert_true(fault_fires(FAULT_IO));
    assert_false(fault_fires(FAULT_IO));
    for (unsigned point = 0; point < N_FAULT_POINTS; point++) {
        fault_disarm_all();
        arm(fault_point_name((enum fault_point)point));
        for (unsigned other = 0; other < N_FAULT_POINTS; other++) {
            assert_int_equal(fault_fires((enum fault_point)other), other == point);
        }
    }
}

static void nth_and_repeat(void **state)
{
    (void)state;
    arm("link:nth=3,repeat=2");
    static const bool expected[] = {false, false, true, true, false, false};
    for (size_t i = 0; i < sizeof expected; i++) {
        assert_int_equal(fault_fires(FAULT_LINK), expected[i]);
    }
    fault_disarm_all();
    arm("link:repeat=0");
    for (int i = 0; i < 100; i++) {
        assert_true(fault_fires(FAULT_LINK));
    }
}

static void a_window_outlives_its_step(void **state)
{
    (void)state;
    arm("link:step=5,for=0.05");
    assert_false(fault_fires(FAULT_LINK));
    fault_here(0, 5, PHASE_STEP);
    double start = units_monotonic_s();
    assert_true(fault_fires(FAULT_LINK));
    fault_here(0, 6, PHASE_FORWARD);
    unsigned n = 0;
    while (fault_fires(FAULT_LINK)) {
        n++;
        assert_true(units_monotonic_s() - start < 10);
    }
    assert_true(n > 0);
    assert_true(units_monotonic_s() - start >= 0.05);
    fault_here(0, 5, PHASE_STEP);
    assert_false(fault_fires(FAULT_LINK)); /* closed for good */
    fault_disarm_all();
    arm("link:for=60,repeat=2");
    assert_true(fault_fires(FAULT_LINK));
    assert_true(fault_fires(FAULT_LINK));
    assert_false(fault_fires(FAULT_LINK));
}

static void admission_is_forced_alike_on_every_rank(void **state)
{
    (void)state;
    /* The same answers on the rank where it fires and on one where it does not. */
    for (int rank = 0; rank < 2; rank++) {
        fault_disarm_all();
        arm("host:step=1");
        arm("commit:rank=1,step=3,phase=backward");
        assert_false(fault_forces_admission(1, PHASE_FORWARD));
        assert_false(fault_forces_admission(3, PHASE_FORWARD));
        assert_true(fault_forces_admission(3, PHASE_BACKWARD));
        fault_here(rank, 3, PHASE_BACKWARD);
        assert_int_equal(fault_fires(FAULT_COMMIT), rank == 1);
        /* The step is replayed: the shot is gone. */
        assert_false(fault_forces_admission(3, PHASE_BACKWARD));
        assert_false(fault_fires(FAULT_COMMIT));
    }
    fault_disarm_all();
    arm("commit:nth=2,repeat=2");
    assert_true(fault_forces_admission(0, PHASE_FORWARD));
    assert_true(fault_forces_admission(0, PHASE_BACKWARD));
    assert_true(fault_forces_admission(0, PHASE_STEP));
    assert_false(fault_forces_admission(1, PHASE_FORWARD));
    fault_disarm_all();
    arm("commit:repeat=0,phase=eval");
    for (int64_t step = 0; step < 50; step++) {
        assert_true(fault_forces_admission(step, PHASE_EVAL));
        assert_false(fault_forces_admission(step, PHASE_STEP));
    }
}

static void the_unfired_is_named(void **state)
{
    (void)state;
    char spec[200] = "";
    assert_false(fault_unfired(0, spec, sizeof spec));
    arm("io:step=1");
    arm("link:rank=2,step=9");
    fault_here(0, 1, PHASE_STEP);
    assert_true(fault_unfired(0, spec, sizeof spec));
    assert_string_equal(spec, "io:step=1");
    assert_true(fault_fires(FAULT_IO));
    assert_false(fault_unfired(0, spec, sizeof spec));
    assert_true(fault_unfired(2, spec, sizeof spec));
    assert_string_equal(spec, "link:rank=2,step=9");
    char small[5];
    assert_true(fault_unfired(2, small, sizeof small));
    assert_string_equal(small, "link");
}

static void the_highest_rank_is_known(void **state)
{
    (void)state;
    assert_int_equal(fault_highest_rank(), -1);
    arm("io:step=1");
    assert_int_equal(fault_highest_rank(), -1);
    arm("link:rank=5");
    arm("commit:rank=2");
    assert_int_equal(fault_highest_rank(), 5);
}

static void bad_specs_name_the_part(void **state)
{
    (void)state;
    static const struct {
        const char *spec, *text;
    } cases[] = {
        {"", "unknown point ''"},
        {"comit",
         "unknown point 'comit': must be one of commit host pinned collective io link alloc"},
        {"commit:", "'': must be key=value"},
        {"commit:rank", "'rank': must be key=value"},
        {"commit:rank=1,", "'': must be key=value"},
        {"commit:rnk=1", "unknown key 'rnk': must be one of rank step phase nth repeat for"},
        {"commit:rank=-1", "rank=-1: must be a whole number from 0 to 1048576"},
        {"commit:rank=1x", "rank=1x:"},
        {"commit:rank=", "rank=:"},
        {"commit:step=-2", "step=-2: must be a whole number from 0"},
        {"commit:step=1.5", "step=1.5:"},
        {"commit:phase=Forward", "phase=Forward: must be one of setup forward backward step eval"},
        {"commit:nth=0", "nth=0: must be a whole number from 1"},
        {"commit:repeat=x", "repeat=x: must be a whole number from 0"},
        {"commit:for=0", "for=0: must be seconds, above 0 and at most 86400"},
        {"commit:for=nan", "for=nan:"},
        {"commit:for=100000", "for=100000:"},
        {"commit:rank=1,rank=2", "key 'rank' is given twice"},
        {"commit:rank=1,,step=2", "'': must be key=value"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct failure why = {0};
        assert_int_not_equal(fault_arm(cases[i].spec, &why), STATUS_OK);
        assert_int_not_equal(why.status, STATUS_OK);
        if (strstr(why.text, cases[i].text) == NULL) {
            fail_msg("'%s': '%s' is not in '%s'", cases[i].spec, cases[i].text, why.text);
        }
    }
    char spec[200];
    assert_false(fault_unfired(0, spec, sizeof spec)); /* nothing was armed */
}

static void the_table_is_bounded(void **state)
{
    (void)state;
    struct failure why;
    char spec[400];
    memset(spec, 'a', sizeof spec - 1);
    spec[sizeof spec - 1] = '\0';
    assert_int_equal(fault_arm(spec, &why), STATUS_TOO_LARGE);
    assert_non_null(strstr(why.text, "399 characters: at most 159"));
    uint64_t calls = heap_calls();
    for (int i = 0; i < 16; i++) {
        arm("io:step=99");
    }
    assert_int_equal(fault_arm("io", &why), STATUS_TOO_LARGE);
    assert_non_null(strstr(why.text, "at most 16"));
    assert_int_equal(heap_calls(), calls);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(fires_once_where_it_was_told, disarm),
        cmocka_unit_test_setup(a_bare_point_fires_anywhere, disarm),
        cmocka_unit_test_setup(nth_and_repeat, disarm),
        cmocka_unit_test_setup(a_window_outlives_its_step, disarm),
        cmocka_unit_test_setup(admission_is_forced_alike_on_every_rank, disarm),
        cmocka_unit_test_setup(the_unfired_is_named, disarm),
        cmocka_unit_test_setup(the_highest_rank_is_known, disarm),
        cmocka_unit_test_setup(bad_specs_name_the_part, disarm),
        cmocka_unit_test_setup(the_table_is_bounded, disarm),
    };
    return cmocka_run_group_tests(tests, NULL, disarm);
}
