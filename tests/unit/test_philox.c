/* The random source: the published known answers, and the keys and counters built on it.
 *
 * links: testing base
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "kernels/philox.h"
#include <cmocka.h>

static void check(struct philox got, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t want[4] = {a, b, c, d};
    assert_memory_equal(got.word, want, sizeof want);
}

/* Known answers of Philox4x32-10 as published with the algorithm. */
static void known_answers(void **state)
{
    (void)state;
    check(philox4x32(0, 0, 0, 0, 0, 0), 0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u);
    const uint32_t all = 0xffffffffu;
    check(philox4x32(all, all, all, all, all, all), 0x408f276du, 0x41c83b0eu, 0xa20bc7c6u,
          0x6d5451fdu);
    check(philox4x32(0xa4093822u, 0x299f31d0u, 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u),
          0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u);
}

static void keys_differ_by_step_and_seed(void **state)
{
    (void)state;
    const uint64_t seed = 0x123456789abcdef0u;
    for (uint32_t step = 0; step < 1000; step++) {
        const struct philox_key a = philox_key(seed, step), b = philox_key(seed, step + 1);
        assert_int_equal(a.key0, 0x9abcdef0u);
        assert_int_equal(a.key1, 0x12345678u ^ (step * 0x9E3779B9u + 0x85EBCA6Bu));
        assert_int_not_equal(a.key1, b.key1);
    }
    assert_int_not_equal(philox_key(1, 0).key0, philox_key(2, 0).key0);
    assert_int_not_equal(philox_key(1, 0).key1, philox_key(1u + (1ull << 32), 0).key1);
}

static void streams_do_not_meet(void **state)
{
    (void)state;
    uint32_t seen[4 * 7 * 5];
    size_t n = 0;
    for (uint32_t layer = 0; layer < 4; layer++)
        for (int use = RANDOM_INIT; use <= RANDOM_STOCHASTIC_ROUNDING; use++)
            for (uint32_t head = 0; head < 5; head++) {
                const uint32_t stream = philox_stream(layer, (enum random_use)use, head);
                for (size_t i = 0; i < n; i++)
                    assert_int_not_equal(seen[i], stream);
                seen[n++] = stream;
            }
}

static void thresholds(void **state)
{
    (void)state;
    assert_int_equal(dropout_threshold(0.0f), 0);
    assert_int_equal(dropout_threshold(0.5f), 0x80000000u);
    assert_int_equal(dropout_threshold(0.25f), 0x40000000u);
    assert_int_equal(dropout_threshold(1.0f), UINT32_MAX);
    assert_true(dropout_scale(0.0f) == 1.0f);
    assert_true(dropout_scale(0.5f) == 2.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(keys_differ_by_step_and_seed),
        cmocka_unit_test(streams_do_not_meet),
        cmocka_unit_test(thresholds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
