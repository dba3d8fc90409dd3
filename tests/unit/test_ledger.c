/* The ledger's equation, and that a sum that does not close is seen.
 * links: worker kernels proto base
 * labels: memory */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "worker/memory/ledger.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static struct telemetry telemetry;
static struct ledger ledger;
static struct failure why;

static int fresh(void **state)
{
    (void)state;
    memset(&telemetry, 0, sizeof telemetry);
    ledger_init(&ledger, &telemetry);
    return 0;
}

static void sums_close(void **state)
{
    (void)state;
    struct account account;
    ledger_region(&ledger, CATEGORY_PARAMS, 0, 1000);
    ledger_region(&ledger, CATEGORY_OPTIMIZER, 0, 2000);
    ledger_region(&ledger, CATEGORY_OPTIMIZER, 2000, 500); /* shrinks */
    ledger_region(&ledger, CATEGORY_OPTIMIZER, 0, 70);     /* a second region */
    ledger_workspace_add(&ledger, CATEGORY_ACTIVATIONS, 300);
    ledger_workspace_add(&ledger, CATEGORY_PARAMS, 20);
    ledger_workspace_add(&ledger, CATEGORY_ACTIVATIONS, 5);
    ledger_workspace_sub(&ledger, CATEGORY_ACTIVATIONS, 300);
    ledger_external(&ledger, 11); /* shown, but not ours to plan */
    ledger_region(&ledger, CATEGORY_EXTERNAL, 0, 3);
    assert_int_equal(ledger_resident_bytes(&ledger), 1000 + 570 + 3);
    ledger_read(&ledger, &account);
    assert_int_equal(account.bytes[TIER_DEVICE][CATEGORY_PARAMS], 1020);
    assert_int_equal(account.bytes[TIER_DEVICE][CATEGORY_OPTIMIZER], 570);
    assert_int_equal(account.bytes[TIER_DEVICE][CATEGORY_ACTIVATIONS], 5);
    assert_int_equal(account.bytes[TIER_DEVICE][CATEGORY_EXTERNAL], 14);
    assert_int_equal(ledger_check(&ledger, &why), STATUS_OK);
}

/* What the link thread reads is what is proved: a byte that nobody holds is named. */
static void a_byte_too_many_is_named(void **state)
{
    (void)state;
    for (int category = 0; category < N_CATEGORIES; category++) {
        fresh(NULL);
        ledger_region(&ledger, CATEGORY_GRADS, 0, 100);
        assert_int_equal(ledger_check(&ledger, &why), STATUS_OK);
        atomic_fetch_add(&telemetry.bytes[TIER_DEVICE][category], 1);
        assert_int_equal(ledger_check(&ledger, &why), STATUS_CORRUPT);
        assert_non_null(strstr(why.text, category_name((enum category)category)));
    }
}

static void other_tiers_are_apart(void **state)
{
    (void)state;
    struct account account;
    ledger_add(&ledger, TIER_HOST, CATEGORY_TEMP, 4096);
    ledger_add(&ledger, TIER_PINNED, CATEGORY_TEMP, 10);
    ledger_add(&ledger, TIER_NVME, CATEGORY_OPTIMIZER, 7);
    ledger_sub(&ledger, TIER_HOST, CATEGORY_TEMP, 96);
    ledger_read(&ledger, &account);
    assert_int_equal(account_tier_bytes(&account, TIER_HOST), 4000);
    assert_int_equal(account_tier_bytes(&account, TIER_PINNED), 10);
    assert_int_equal(account_tier_bytes(&account, TIER_NVME), 7);
    assert_int_equal(account_tier_bytes(&account, TIER_DEVICE), 0);
    assert_int_equal(account_category_bytes(&account, CATEGORY_TEMP), 4010);
    assert_int_equal(ledger_resident_bytes(&ledger), 0);
    assert_int_equal(ledger_check(&ledger, &why), STATUS_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(sums_close, fresh),
        cmocka_unit_test_setup(a_byte_too_many_is_named, fresh),
        cmocka_unit_test_setup(other_tiers_are_apart, fresh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
