/* Names of tiers, categories and phases; sums of an account.
 * links: base */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/account.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static void names_round_trip(void **state)
{
    (void)state;
    for (unsigned i = 0; i < N_TIERS; i++) {
        enum tier tier = N_TIERS;
        assert_true(tier_from_name(tier_name((enum tier)i), &tier));
        assert_int_equal(tier, i);
    }
    for (unsigned i = 0; i < N_CATEGORIES; i++) {
        enum category category = N_CATEGORIES;
        assert_true(category_from_name(category_name((enum category)i), &category));
        assert_int_equal(category, i);
    }
    for (unsigned i = 0; i < N_PHASES; i++) {
        enum phase phase = N_PHASES;
        assert_true(phase_from_name(phase_name((enum phase)i), &phase));
        assert_int_equal(phase, i);
    }
    assert_string_equal(tier_name(TIER_NVME), "nvme");
    assert_string_equal(category_name(CATEGORY_ACTIVATIONS), "activations");
    assert_string_equal(phase_name(PHASE_SWITCH), "switch");
    enum phase phase = PHASE_EVAL;
    assert_false(phase_from_name("Forward", &phase));
    assert_false(phase_from_name("", &phase));
    assert_int_equal(phase, PHASE_EVAL);
    enum tier tier = TIER_HOST;
    assert_false(tier_from_name("gpu", &tier));
    assert_int_equal(tier, TIER_HOST);
    enum category category = CATEGORY_COMM;
    assert_false(category_from_name("param", &category));
    assert_int_equal(category, CATEGORY_COMM);
}

static void sums(void **state)
{
    (void)state;
    struct account account;
    for (unsigned tier = 0; tier < N_TIERS; tier++) {
        for (unsigned category = 0; category < N_CATEGORIES; category++) {
            account.bytes[tier][category] = (UINT64_C(1) << 40) * (tier + 1) + category;
        }
    }
    for (unsigned tier = 0; tier < N_TIERS; tier++) {
        assert_int_equal(account_tier_bytes(&account, (enum tier)tier),
                         (UINT64_C(7) << 40) * (tier + 1) + 21);
    }
    for (unsigned category = 0; category < N_CATEGORIES; category++) {
        assert_int_equal(account_category_bytes(&account, (enum category)category),
                         (UINT64_C(10) << 40) + 4 * category);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_round_trip),
        cmocka_unit_test(sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
