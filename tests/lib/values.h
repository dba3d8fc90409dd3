/* Arrays of numbers for tests of kernels: made, compared, freed. Any thread.
 *
 * Numbers come from a fixed generator of this file alone, so that a test does not check the
 * project's random source with itself. */
#ifndef BALLAST_TESTS_LIB_VALUES_H
#define BALLAST_TESTS_LIB_VALUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* n floats, uniform in [-scale, scale], of a seed; freed by free(). Never NULL. */
float *values_random(size_t n, float scale, uint64_t seed);
/* n floats that are 0. */
float *values_zero(size_t n);
float *values_copy(const float *values, size_t n);
/* The same numbers as doubles. */
double *values_widen(const float *values, size_t n);
double *values_zero_double(size_t n);
/* Uniform integers in [0, limit). */
int32_t *values_integers(size_t n, int32_t limit, uint64_t seed);

/* The greatest |got - want|, over the greatest |want|. Not-a-number counts as 1e30. */
double values_distance(const float *got, const double *want, size_t n);
/* The same memory, bit for bit; prints the first difference otherwise. */
bool values_equal(const float *a, const float *b, size_t n);

#endif
