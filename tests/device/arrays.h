/* The arrays of one case, laid out as one image that is the same on host and device, with red
 * zones between them: made, filled, compared. Any thread. */
#ifndef BALLAST_TESTS_DEVICE_ARRAYS_H
#define BALLAST_TESTS_DEVICE_ARRAYS_H

#include "tests/device/operations.h"

enum { ARRAY_ALIGN = 256, RED_ZONE_BYTES = 256 };

struct layout {
    size_t n;
    struct operand operands[MAX_OPERANDS];
    size_t offset[MAX_OPERANDS], bytes[MAX_OPERANDS];
    size_t image_bytes;   /* of all arrays and red zones */
    size_t scratch_bytes; /* behind them */
};

/* The operands of a call in a table of this type. */
void arrays_layout(struct layout *layout, const struct operation *operation,
                   const struct shape *shape, enum dtype dtype, size_t scratch_bytes);
/* Where the operands lie in an image that starts at `base`. */
void arrays_place(const struct layout *layout, void *base, void *out_p[static MAX_OPERANDS]);
/* Inputs from fixed seeds, outputs and red zones painted with what is not a number. */
void arrays_fill(const struct layout *layout, enum dtype dtype, void *image);
/* One operand's values, n of them, at `data`. */
void arrays_fill_operand(const struct operand *operand, enum dtype dtype, void *data, size_t n);

struct verdict {
    bool ok;
    double worst;     /* greatest distance, in units of its tolerance; exact ones: 0 or 1e30 */
    double distance;  /* of the operand that came closest to its tolerance, or went beyond */
    double tolerance; /* its; 0: equal bits are asked for */
    char text[160];   /* what is wrong, "" when ok */
};

/* Is `got` what `want` says? Both started as `before`. */
void arrays_compare(const struct layout *layout, enum dtype dtype, const void *before,
                    const void *want, const void *got, struct verdict *out_verdict);

#endif
