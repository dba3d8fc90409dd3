/* What a fuzzer offers and may use. One thread. */
#ifndef BALLAST_TESTS_FUZZ_FUZZ_H
#define BALLAST_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { FUZZ_MAX_BYTES = 128 * 1024 };

/* libFuzzer's entry; returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

/* The index-th seed, a well-formed input to start mutations from, written to `out`.
 * Returns its length; 0 after the last. Optional: without it only noise is tried. */
size_t fuzz_seed(size_t index, uint8_t *out, size_t capacity) __attribute__((weak));

/* A property that holds for every input, whatever the build type. */
#define fuzz_check(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);         \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#endif
