/* Arrays of bf16 for tests of kernels, beside values.h. Any thread.
 *
 * Rounds by comparing distances in double, not with the trick on bits that the kernels use, so
 * that a test does not check the rounding with itself. */
#ifndef BALLAST_TESTS_LIB_BF16_VALUES_H
#define BALLAST_TESTS_LIB_BF16_VALUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

float bf16_widen(uint16_t value);
/* To nearest, ties to even; not-a-number becomes a quiet one of the same sign. */
uint16_t bf16_round(float value);

/* n elements, rounded; freed by free(). Never NULL. */
uint16_t *bf16_from(const float *values, size_t n);
/* Rounds every value to one that bf16 has. */
void bf16_snap(float *values, size_t n);
/* got[i] is want[i] rounded once, bit for bit (or both not a number); prints the first
 * difference otherwise. */
bool bf16_equal(const uint16_t *got, const float *want, size_t n);

#endif
