/* Regions: growing, shrinking, giving memory back, saying why not.
 * links: worker kernels proto base
 * labels: memory */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include "worker/memory/region.h"
#include <cmocka.h> /* last: it has a macro `fail` */

enum { GRANULE = DEVICE_GRANULE_BYTES };

struct fixture {
    struct device device;
    struct telemetry telemetry;
    struct ledger ledger;
    struct region region;
    struct failure why;
};

static void open_fixture(struct fixture *f, uint64_t capacity_bytes, size_t reserve_bytes)
{
    memset(f, 0, sizeof *f);
    assert_int_equal(cpu_device_init(&f->device, capacity_bytes, &f->why), STATUS_OK);
    ledger_init(&f->ledger, &f->telemetry);
    assert_int_equal(region_init(&f->region, "grads", CATEGORY_GRADS, &f->device, &f->ledger,
                                 reserve_bytes, &f->why),
                     STATUS_OK);
}

static void close_fixture(struct fixture *f)
{
    region_fini(&f->region);
    assert_int_equal(atomic_load(&f->device.committed_bytes), 0);
    assert_int_equal(ledger_resident_bytes(&f->ledger), 0);
    region_fini(&f->region); /* twice is fine */
    device_fini(&f->device);
}

static void check_held(struct fixture *f, size_t bytes)
{
    assert_int_equal(f->region.committed_bytes, bytes);
    assert_int_equal(atomic_load(&f->device.committed_bytes), bytes);
    /* As the system sees it. */
    assert_int_equal(region_resident(&f->region), bytes);
}

static void grows_and_shrinks_by_granules(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 0, 8 * GRANULE);
    assert_int_equal(f.region.reserved_bytes, 8 * GRANULE);
    check_held(&f, 0);
    assert_int_equal(region_resize(&f.region, 1, &f.why), STATUS_OK);
    check_held(&f, GRANULE);
    memset(f.region.base, 0x5A, GRANULE);
    assert_int_equal(region_resize(&f.region, 2 * GRANULE + 1, &f.why), STATUS_OK);
    check_held(&f, 3 * GRANULE);
    /* Growing keeps the contents and brings zeros. */
    assert_int_equal(f.region.base[GRANULE - 1], 0x5A);
    assert_int_equal(f.region.base[GRANULE], 0);
    memset(f.region.base + GRANULE, 0x6B, GRANULE);
    assert_int_equal(region_resize(&f.region, GRANULE, &f.why), STATUS_OK);
    check_held(&f, GRANULE);
    assert_int_equal(f.region.base[0], 0x5A);
    /* What was given back is really gone. */
    assert_int_equal(region_resize(&f.region, 2 * GRANULE, &f.why), STATUS_OK);
    assert_int_equal(f.region.base[GRANULE], 0);
    region_shrink(&f.region, 5 * GRANULE); /* never grows */
    check_held(&f, 2 * GRANULE);
    region_shrink(&f.region, 0);
    check_held(&f, 0);
    close_fixture(&f);
}

static void used_bytes_are_in_the_ledger(void **state)
{
    (void)state;
    struct fixture f;
    struct account account;
    open_fixture(&f, 0, GRANULE);
    assert_int_equal(region_resize(&f.region, GRANULE, &f.why), STATUS_OK);
    region_use(&f.region, 1000);
    region_use(&f.region, 700);
    ledger_read(&f.ledger, &account);
    assert_int_equal(account.bytes[TIER_DEVICE][CATEGORY_GRADS], 700);
    assert_int_equal(ledger_resident_bytes(&f.ledger), 700);
    close_fixture(&f);
}

/* Over the device's capacity: a failure with region, asked, held and limit; nothing has changed. */
static void over_capacity_is_refused(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 3 * GRANULE, 8 * GRANULE);
    assert_int_equal(region_resize(&f.region, 2 * GRANULE, &f.why), STATUS_OK);
    assert_int_equal(region_resize(&f.region, 4 * GRANULE, &f.why), STATUS_OUT_OF_MEMORY);
    assert_string_equal(f.why.text, "region grads: device memory: 4194304 bytes asked, 4194304 "
                                    "held, limit 6291456 (device_memory)");
    check_held(&f, 2 * GRANULE);
    assert_int_equal(region_resize(&f.region, 3 * GRANULE, &f.why), STATUS_OK);
    check_held(&f, 3 * GRANULE);
    close_fixture(&f);
}

static void over_the_reservation_is_refused(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 0, 2 * GRANULE);
    assert_int_equal(region_resize(&f.region, 2 * GRANULE + 1, &f.why), STATUS_OUT_OF_MEMORY);
    assert_non_null(strstr(f.why.text, "region grads: 6291456 bytes asked, 4194304 reserved"));
    check_held(&f, 0);
    close_fixture(&f);
}

/* Two regions of one device share its capacity. */
static void regions_share_the_capacity(void **state)
{
    (void)state;
    struct fixture f;
    struct region other;
    open_fixture(&f, 3 * GRANULE, 3 * GRANULE);
    assert_int_equal(
        region_init(&other, "params", CATEGORY_PARAMS, &f.device, &f.ledger, 3 * GRANULE, &f.why),
        STATUS_OK);
    assert_int_equal(region_resize(&f.region, 2 * GRANULE, &f.why), STATUS_OK);
    assert_int_equal(region_resize(&other, 2 * GRANULE, &f.why), STATUS_OUT_OF_MEMORY);
    region_shrink(&f.region, GRANULE);
    assert_int_equal(region_resize(&other, 2 * GRANULE, &f.why), STATUS_OK);
    assert_int_equal(atomic_load(&f.device.committed_bytes), 3 * GRANULE);
    region_fini(&other);
    close_fixture(&f);
}

static void the_fault_point_fires_once(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 0, 4 * GRANULE);
    assert_int_equal(region_resize(&f.region, GRANULE, &f.why), STATUS_OK);
    fault_here(0, 3, PHASE_BACKWARD);
    assert_int_equal(fault_arm("commit:rank=0,step=3,phase=backward", &f.why), STATUS_OK);
    assert_int_equal(region_resize(&f.region, 2 * GRANULE, &f.why), STATUS_OUT_OF_MEMORY);
    assert_non_null(strstr(f.why.text, "fault on purpose"));
    check_held(&f, GRANULE);
    assert_int_equal(region_resize(&f.region, 2 * GRANULE, &f.why), STATUS_OK);
    check_held(&f, 2 * GRANULE);
    /* Also for 0 bytes more. */
    fault_disarm_all();
    assert_int_equal(fault_arm("commit:rank=0,step=3,phase=backward", &f.why), STATUS_OK);
    assert_int_equal(region_resize(&f.region, 2 * GRANULE, &f.why), STATUS_OUT_OF_MEMORY);
    check_held(&f, 2 * GRANULE);
    fault_disarm_all();
    close_fixture(&f);
}

/* On the dry device all of it is counting. */
static void dry_regions_count(void **state)
{
    (void)state;
    struct fixture f;
    memset(&f, 0, sizeof f);
    dry_device_init(&f.device, 10000, 4096);
    ledger_init(&f.ledger, &f.telemetry);
    assert_int_equal(region_init(&f.region, "params", CATEGORY_PARAMS, &f.device, &f.ledger,
                                 (size_t)1 << 50, &f.why),
                     STATUS_OK);
    assert_int_equal(region_resize(&f.region, 5000, &f.why), STATUS_OK);
    assert_int_equal(f.region.committed_bytes, 8192);
    assert_int_equal(region_resize(&f.region, 12000, &f.why), STATUS_OUT_OF_MEMORY);
    assert_int_equal(atomic_load(&f.device.committed_bytes), 8192);
    assert_int_equal(region_resident(&f.region), 0);
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grows_and_shrinks_by_granules),
        cmocka_unit_test(used_bytes_are_in_the_ledger),
        cmocka_unit_test(over_capacity_is_refused),
        cmocka_unit_test(over_the_reservation_is_refused),
        cmocka_unit_test(regions_share_the_capacity),
        cmocka_unit_test(the_fault_point_fires_once),
        cmocka_unit_test(dry_regions_count),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
