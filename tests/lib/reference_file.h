/* Reference files: named tensors and numbers that an independent implementation computed.
 *
 * Reads the form that tests/parity/README.md describes. The whole file is in memory between
 * open and close. Any thread may read. */
#ifndef BALLAST_TESTS_LIB_REFERENCE_FILE_H
#define BALLAST_TESTS_LIB_REFERENCE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"

enum { REFERENCE_MAX_DIMENSIONS = 4, REFERENCE_NAME_BYTES = 128 };

enum reference_kind { REFERENCE_SCALAR, REFERENCE_FLOATS, REFERENCE_INTS };

/* One named value. Row-major; `floats` and `ints` are borrowed from the file until close, and
 * one of them is set, by kind. */
struct reference_entry {
    char name[REFERENCE_NAME_BYTES]; /* "grad/model.norm.weight" */
    enum reference_kind kind;
    double scalar;
    uint32_t n_dimensions;
    size_t shape[REFERENCE_MAX_DIMENSIONS];
    size_t n; /* elements */
    const float *floats;
    const int32_t *ints;
};

struct reference_file; /* opaque, owned by the caller after open */

/* NOT_FOUND, IO, TOO_LARGE (over 16 MiB), MALFORMED (with the line), OUT_OF_MEMORY. */
enum status reference_open(const char *path, struct reference_file **out_file,
                           struct failure *why) MUST_CHECK;
/* The same from `n_bytes` at `content` (copied); `name` is used in messages. */
enum status reference_parse(const void *content, size_t n_bytes, const char *name,
                            struct reference_file **out_file, struct failure *why) MUST_CHECK;
/* NULL is fine. */
void reference_close(struct reference_file *file);

size_t reference_n_entries(const struct reference_file *file);
const struct reference_entry *reference_entry(const struct reference_file *file, size_t index);
/* NULL when there is none of this name. */
const struct reference_entry *reference_find(const struct reference_file *file, const char *name);

/* For tests that cannot go on without: the value of a scalar, the n floats of a tensor, the n
 * ints. They fail the running cmocka test when the name is missing or the count differs. */
double reference_scalar(const struct reference_file *file, const char *name);
const float *reference_floats(const struct reference_file *file, const char *name, size_t n);
const int32_t *reference_ints(const struct reference_file *file, const char *name, size_t n);

/* The norm of a - b divided by the norm of b; the norm of a - b where b is zero. In double. */
double reference_distance(const float *a, const float *b, size_t n);

#endif
