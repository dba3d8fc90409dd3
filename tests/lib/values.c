/* See values.h. */
#include "tests/lib/values.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* splitmix64 (Steele, Lea and Flood, 2014). */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void *allocate(size_t n, size_t bytes)
{
    void *memory = calloc(n ? n : 1, bytes);
    assert(memory);
    return memory;
}

float *values_random(size_t n, float scale, uint64_t seed)
{
    float *values = allocate(n, sizeof *values);
    uint64_t state = seed;
    for (size_t i = 0; i < n; i++)
        values[i] = scale * ((float)(next(&state) >> 40) * 0x1p-23f - 1.0f);
    return values;
}

float *values_zero(size_t n)
{
    return allocate(n, sizeof(float));
}

float *values_copy(const float *values, size_t n)
{
    float *copy = allocate(n, sizeof *copy);
    memcpy(copy, values, n * sizeof *copy);
    return copy;
}

double *values_widen(const float *values, size_t n)
{
    double *wide = allocate(n, sizeof *wide);
    for (size_t i = 0; i < n; i++)
        wide[i] = (double)values[i];
    return wide;
}

double *values_zero_double(size_t n)
{
    return allocate(n, sizeof(double));
}

int32_t *values_integers(size_t n, int32_t limit, uint64_t seed)
{
    int32_t *values = allocate(n, sizeof *values);
    uint64_t state = seed;
    for (size_t i = 0; i < n; i++)
        values[i] = (int32_t)(next(&state) % (uint64_t)limit);
    return values;
}

double values_distance(const float *got, const double *want, size_t n)
{
    double worst = 0.0, most = 0.0;
    for (size_t i = 0; i < n; i++) {
        const double distance = fabs((double)got[i] - want[i]);
        if (!(distance <= 1e30))
            return 1e30;
        worst = distance > worst ? distance : worst;
        most = fabs(want[i]) > most ? fabs(want[i]) : most;
    }
    return most > 0.0 ? worst / most : worst;
}

bool values_equal(const float *a, const float *b, size_t n)
{
    if (memcmp(a, b, n * sizeof *a) == 0)
        return true;
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0) {
            printf("element %zu of %zu: %.9g and %.9g\n", i, n, (double)a[i], (double)b[i]);
            break;
        }
    return false;
}
