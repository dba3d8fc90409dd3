/* The order of samples: every one once per epoch, a new order each epoch, no state.
 * links: base worker */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/sampler.h"
#include <cmocka.h> /* last: it has a macro `fail` */

enum { MOST = 65536, EPOCHS = 3 };

static unsigned char seen[MOST];

static void check_epochs(uint64_t n, uint64_t seed)
{
    const struct sampler sampler = {.seed = seed, .n_samples = n, .shuffle = true};

    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        memset(seen, 0, sizeof(seen));
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t sample = sampler_at(&sampler, epoch * n + i);
            assert_true(sample < n);
            assert_int_equal(seen[sample], 0);
            seen[sample] = 1;
        }
    }
}

static void each_sample_once_an_epoch(void **state)
{
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 7, 16, 17, 1000, 65536, 65535};
    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        check_epochs(sizes[i], 42);
        check_epochs(sizes[i], UINT64_C(0xFEDCBA9876543210));
    }
}

static void unshuffled_is_in_order(void **state)
{
    const struct sampler sampler = {.seed = 9, .n_samples = 7, .shuffle = false};
    (void)state;
    for (uint64_t i = 0; i < 21; i++) {
        assert_int_equal(sampler_at(&sampler, i), i % 7);
    }
}

/* How many positions of two epochs or seeds hold the same sample. */
static unsigned same(const struct sampler *a, uint64_t first_a, const struct sampler *b,
                     uint64_t first_b)
{
    unsigned n = 0;
    for (uint64_t i = 0; i < a->n_samples; i++) {
        n += sampler_at(a, first_a + i) == sampler_at(b, first_b + i);
    }
    return n;
}

static void epochs_and_seeds_differ(void **state)
{
    const struct sampler a = {.seed = 1, .n_samples = 1000, .shuffle = true};
    const struct sampler b = {.seed = 2, .n_samples = 1000, .shuffle = true};
    const struct sampler c = {.seed = UINT64_C(1) << 32 | 1, .n_samples = 1000, .shuffle = true};
    const struct sampler in_order = {.n_samples = 1000, .shuffle = false};
    (void)state;
    /* Two random permutations of any size agree in one place on average; 10 is far beyond. */
    assert_in_range(same(&a, 0, &a, 1000), 0, 10);
    assert_in_range(same(&a, 1000, &a, 2000), 0, 10);
    assert_in_range(same(&a, 0, &b, 0), 0, 10);
    assert_in_range(same(&a, 0, &c, 0), 0, 10);
    assert_in_range(same(&a, 0, &in_order, 0), 0, 10);
    assert_int_equal(same(&a, 0, &a, 0), 1000);
}

/* Where sample 0 lands is even over the seeds: each of 8 places 500 of 4000 times, give or
 * take five standard deviations (21 each). */
static void places_are_even(void **state)
{
    unsigned hits[8] = {0};
    (void)state;
    for (uint64_t seed = 0; seed < 4000; seed++) {
        const struct sampler sampler = {.seed = seed, .n_samples = 8, .shuffle = true};
        hits[sampler_at(&sampler, 0)]++;
    }
    for (unsigned i = 0; i < 8; i++) {
        assert_in_range(hits[i], 395, 605);
    }
}

/* The order is part of the contract: a resumed run of another build has to see it unchanged. */
static void order_is_pinned(void **state)
{
    const struct sampler sampler = {.seed = 7, .n_samples = 10, .shuffle = true};
    static const uint64_t pinned[] = {6, 8, 1, 2, 0, 3, 7, 9, 5, 4};
    (void)state;
    for (uint64_t i = 0; i < 10; i++) {
        assert_int_equal(sampler_at(&sampler, i), pinned[i]);
    }
}

static void huge_counts_stay_inside(void **state)
{
    const uint64_t n = (UINT64_C(1) << 62) + 3;
    const struct sampler sampler = {.seed = 5, .n_samples = n, .shuffle = true};
    (void)state;
    for (uint64_t i = 0; i < 100; i++) {
        assert_true(sampler_at(&sampler, i) < n);
        assert_true(sampler_at(&sampler, n + i) < n);
    }
}

/* Bug case 20: nothing but the position decides, so a run that stops at any step and goes on
 * sees what the unbroken one sees: same list, each index once per epoch. */
static void resuming_changes_nothing(void **state)
{
    enum { N = 40, POSITIONS = 100 }; /* 2.5 epochs */
    static const uint64_t stops[] = {0, 7, 20, 33, 40, 80, POSITIONS};
    const struct sampler whole = {.seed = 3, .n_samples = N, .shuffle = true};
    uint64_t unbroken[POSITIONS], pieced[POSITIONS];
    (void)state;
    for (uint64_t i = 0; i < POSITIONS; i++) {
        unbroken[i] = sampler_at(&whole, i);
    }
    for (size_t s = 0; s + 1 < sizeof(stops) / sizeof(stops[0]); s++) {
        const struct sampler fresh = {.seed = 3, .n_samples = N, .shuffle = true};
        for (uint64_t i = stops[s]; i < stops[s + 1]; i++) {
            pieced[i] = sampler_at(&fresh, i);
        }
    }
    assert_memory_equal(unbroken, pieced, sizeof(unbroken));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_sample_once_an_epoch), cmocka_unit_test(unshuffled_is_in_order),
        cmocka_unit_test(epochs_and_seeds_differ),   cmocka_unit_test(places_are_even),
        cmocka_unit_test(order_is_pinned),           cmocka_unit_test(huge_counts_stay_inside),
        cmocka_unit_test(resuming_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
