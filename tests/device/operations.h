/* Every operation of struct ops as a case that any two tables can be given: which arrays it has,
 * what is in them, how far the results of two devices may lie apart, and the call itself.
 *
 * Pure data and pure functions; any thread. */
#ifndef BALLAST_TESTS_DEVICE_OPERATIONS_H
#define BALLAST_TESTS_DEVICE_OPERATIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/ops.h"

enum { MAX_DIMS = 5, MAX_OPERANDS = 10 };

/* When a shape is run: quick enough for a GPU made of fibres; as large as training uses; as large
 * as GPT-2 124M is timed with. */
enum { SMALL = 1, FULL = 2, BENCH = 4 };

/* One call: its dimensions, in the order of the operation's `dims`, and its switches, bit i of
 * `flags` being the i-th word of the operation's `switches`. */
struct shape {
    unsigned when;
    unsigned flags;
    size_t d[MAX_DIMS];
};

enum element { ELEMENT_COMPUTE, ELEMENT_F32, ELEMENT_F64, ELEMENT_I32, ELEMENT_BYTE };
enum role { ROLE_IN, ROLE_OUT, ROLE_INOUT };
enum values {
    VALUES_NORMAL,    /* of mean 0 and standard deviation `scale` */
    VALUES_POSITIVE,  /* squares of such */
    VALUES_NEAR_ONE,  /* 1 plus such */
    VALUES_INTEGERS,  /* 0 <= i < limit */
    VALUES_LABELS,    /* the same, every seventh -1 */
    VALUES_POSITIONS, /* 0, 1, ..., limit - 1, 0, 1, ... */
    VALUES_SEGMENTS   /* document ids that change within each `limit` tokens */
};

struct operand {
    const char *name;
    enum element element;
    enum role role;
    enum values values;
    size_t n;
    double scale;
    int32_t limit;
    /* The greatest distance |got - want| / max(|want|, floor * rms) of an fp32 and a bf16 table;
     * 0: the same bits. */
    double tolerance[2];
    double floor; /* 0: 1 */
    /* Where rows of `row` elements hold parts of different size (queries, keys, values), each
     * part has an rms of its own; it ends at these columns. row 0: one part. */
    size_t row, part_end[3];
};

struct operation {
    const char *name;
    const char *dims;     /* "rows width" */
    const char *switches; /* "bias accumulate"; "" if none */
    const char *reason;   /* of the tolerances */
    size_t (*describe)(const struct shape *shape, struct operand *operands);
    /* Inputs that follow from other inputs, by the CPU's table; NULL if none do. */
    void (*prepare)(struct ops *ops, const struct shape *shape, void *const *p);
    size_t (*scratch)(struct ops *ops, const struct shape *shape); /* NULL: none */
    /* p[i] is operand i; `scratch` has as many bytes as were asked for. */
    void (*call)(struct ops *ops, const struct shape *shape, void *const *p, void *scratch);
    double (*flops)(const struct shape *shape); /* NULL: it is a matter of bytes */
    const struct shape *shapes;                 /* ends with when = 0 */
};

extern const struct operation operations[];
extern const size_t n_operations;

/* The operations of the other file. */
extern const struct operation operation_matmul, operation_body, operation_attention_forward,
    operation_attention_backward, operation_rotary;

/* ---- for the files of operations ---- */

#define UNIT_OF_BF16 8e-3 /* a unit in the last place is at most 2^-7 of the value */

static inline struct operand operand_in(const char *name, enum element element, size_t n,
                                        double scale)
{
    return (struct operand){
        .name = name, .element = element, .role = ROLE_IN, .n = n, .scale = scale};
}

static inline struct operand operand_out(const char *name, enum element element, size_t n,
                                         double fp32, double bf16)
{
    return (struct operand){
        .name = name, .element = element, .role = ROLE_OUT, .n = n, .tolerance = {fp32, bf16}};
}

static inline struct operand operand_inout(const char *name, enum element element, size_t n,
                                           double scale, double fp32, double bf16)
{
    return (struct operand){.name = name,
                            .element = element,
                            .role = ROLE_INOUT,
                            .n = n,
                            .scale = scale,
                            .tolerance = {fp32, bf16}};
}

static inline struct operand operand_integers(const char *name, enum values values, size_t n,
                                              size_t limit)
{
    return (struct operand){.name = name,
                            .element = ELEMENT_I32,
                            .role = ROLE_IN,
                            .values = values,
                            .n = n,
                            .limit = (int32_t)limit};
}

#endif
