/* See arrays.h. */
#include "tests/device/arrays.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static size_t element_bytes(enum element element, enum dtype dtype)
{
    switch (element) {
    case ELEMENT_COMPUTE:
        return dtype_bytes(dtype);
    case ELEMENT_F64:
        return 8;
    case ELEMENT_BYTE:
        return 1;
    case ELEMENT_F32:
    case ELEMENT_I32:
        break;
    }
    return 4;
}

static size_t aligned(size_t bytes)
{
    return (bytes + ARRAY_ALIGN - 1) / ARRAY_ALIGN * ARRAY_ALIGN;
}

void arrays_layout(struct layout *layout, const struct operation *operation,
                   const struct shape *shape, enum dtype dtype, size_t scratch_bytes)
{
    *layout = (struct layout){.scratch_bytes = scratch_bytes};
    layout->n = operation->describe(shape, layout->operands);
    size_t at = RED_ZONE_BYTES;
    for (size_t i = 0; i < layout->n; i++) {
        const struct operand *operand = &layout->operands[i];
        layout->offset[i] = at;
        layout->bytes[i] = operand->n * element_bytes(operand->element, dtype);
        at += aligned(layout->bytes[i] + RED_ZONE_BYTES);
    }
    layout->image_bytes = at;
}

void arrays_place(const struct layout *layout, void *base, void *out_p[static MAX_OPERANDS])
{
    for (size_t i = 0; i < MAX_OPERANDS; i++) {
        out_p[i] = i < layout->n ? (char *)base + layout->offset[i] : NULL;
    }
}

/* ---- values ---- */

static uint64_t next(uint64_t *state)
{
    uint64_t z = (*state += 0x9E3779B97F4A7C15u); /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Near enough to a normal one: four uniform ones of 16 bits added. */
static double draw_normal(uint64_t *state)
{
    const uint64_t bits = next(state);
    const double sum = (double)(bits & 0xFFFF) + (double)(bits >> 16 & 0xFFFF) +
                       (double)(bits >> 32 & 0xFFFF) + (double)(bits >> 48);
    return (sum / 65536.0 - 2.0) * 1.7320508;
}

static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); /* no NaN comes here */
}

static double from_bf16(uint16_t value)
{
    const uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return (double)wide;
}

static int32_t draw_integer(const struct operand *operand, size_t i, uint64_t *state)
{
    const int32_t limit = operand->limit;
    switch (operand->values) {
    case VALUES_POSITIONS:
        return (int32_t)(i % (size_t)limit);
    case VALUES_SEGMENTS: { /* three documents to a sequence, of different lengths */
        const int32_t token = (int32_t)(i % (size_t)limit);
        return (int32_t)(i / (size_t)limit) * 3 + (token * 5 >= limit) + (token * 2 >= limit);
    }
    case VALUES_LABELS:
        if (i % 7 == 3) {
            return -1;
        }
        break;
    case VALUES_INTEGERS:
    case VALUES_NORMAL:
    case VALUES_POSITIVE:
    case VALUES_NEAR_ONE:
        break;
    }
    return (int32_t)(next(state) % (uint64_t)limit);
}

void arrays_fill_operand(const struct operand *operand, enum dtype dtype, void *data, size_t n)
{
    uint64_t state = 1;
    for (const char *c = operand->name; *c != '\0'; c++) {
        state = state * 31 + (unsigned char)*c;
    }
    for (size_t i = 0; i < n; i++) {
        if (operand->element == ELEMENT_I32) {
            ((int32_t *)data)[i] = draw_integer(operand, i, &state);
            continue;
        }
        double value = operand->scale * draw_normal(&state);
        value = operand->values == VALUES_POSITIVE   ? value * value
                : operand->values == VALUES_NEAR_ONE ? 1.0 + value
                                                     : value;
        if (operand->element == ELEMENT_COMPUTE && dtype == DTYPE_BF16) {
            ((uint16_t *)data)[i] = to_bf16((float)value);
        } else {
            ((float *)data)[i] = (float)value;
        }
    }
}

void arrays_fill(const struct layout *layout, enum dtype dtype, void *image)
{
    memset(image, 0xFF, layout->image_bytes); /* not a number, in every type */
    for (size_t i = 0; i < layout->n; i++) {
        if (layout->operands[i].role != ROLE_OUT) {
            arrays_fill_operand(&layout->operands[i], dtype, (char *)image + layout->offset[i],
                                layout->operands[i].n);
        }
    }
}

/* ---- comparing ---- */

static double value_at(const struct operand *operand, enum dtype dtype, const void *data, size_t i)
{
    if (operand->element == ELEMENT_F64) {
        return ((const double *)data)[i];
    }
    if (operand->element == ELEMENT_COMPUTE && dtype == DTYPE_BF16) {
        return from_bf16(((const uint16_t *)data)[i]);
    }
    return (double)((const float *)data)[i];
}

/* Which part of its row element i belongs to. */
static size_t part_of(const struct operand *operand, size_t i)
{
    size_t part = 0;
    if (operand->row != 0) {
        while (i % operand->row >= operand->part_end[part]) {
            part++;
        }
    }
    return part;
}

static void sizes_of(const struct operand *operand, enum dtype dtype, const void *want,
                     double out_rms[static 3])
{
    double squares[3] = {0}, count[3] = {0};
    for (size_t i = 0; i < operand->n; i++) {
        const double value = value_at(operand, dtype, want, i);
        const size_t part = part_of(operand, i);
        squares[part] += value * value;
        count[part] += 1;
    }
    for (size_t part = 0; part < 3; part++) {
        out_rms[part] = count[part] > 0 ? sqrt(squares[part] / count[part]) : 0;
    }
}

/* The greatest distance, and where. What is not finite on one side is as far as can be. */
static double distance_of(const struct operand *operand, enum dtype dtype, const void *want,
                          const void *got, size_t *out_where)
{
    double rms[3], worst = 0;
    sizes_of(operand, dtype, want, rms);
    const double floor = operand->floor > 0 ? operand->floor : 1.0;
    for (size_t i = 0; i < operand->n; i++) {
        const double a = value_at(operand, dtype, want, i), b = value_at(operand, dtype, got, i);
        if (a == b) {
            continue;
        }
        const double least = floor * rms[part_of(operand, i)];
        double distance = fabs(a - b) / fmax(fmax(fabs(a), least), 1e-30);
        distance = isfinite(distance) ? distance : 1e30;
        if (distance > worst) {
            worst = distance;
            *out_where = i;
        }
    }
    return worst;
}

static size_t first_difference(const void *a, const void *b, size_t n)
{
    size_t i = 0;
    while (i < n && ((const char *)a)[i] == ((const char *)b)[i]) {
        i++;
    }
    return i;
}

static void compare_operand(const struct layout *layout, size_t which, enum dtype dtype,
                            const void *want, const void *got, struct verdict *verdict)
{
    const struct operand *operand = &layout->operands[which];
    const double tolerance = operand->tolerance[dtype == DTYPE_BF16];
    size_t where = 0;
    double distance = 0;
    if (tolerance > 0) {
        distance = distance_of(operand, dtype, want, got, &where);
    } else if (memcmp(want, got, layout->bytes[which]) != 0) {
        where = first_difference(want, got, layout->bytes[which]) /
                element_bytes(operand->element, dtype);
        distance = 1e30;
    }
    const double share = tolerance > 0 ? distance / tolerance : distance;
    if (share > verdict->worst || (verdict->worst <= 0 && verdict->tolerance <= 0)) {
        verdict->worst = share;
        verdict->distance = distance;
        verdict->tolerance = tolerance;
    }
    if (share <= 1.0 || !verdict->ok) {
        return;
    }
    verdict->ok = false;
    if (operand->element == ELEMENT_BYTE) {
        snprintf(verdict->text, sizeof verdict->text, "%s: byte %zu differs", operand->name, where);
        return;
    }
    snprintf(verdict->text, sizeof verdict->text, "%s[%zu] is %.9g, not %.9g", operand->name, where,
             value_at(operand, dtype, got, where), value_at(operand, dtype, want, where));
}

void arrays_compare(const struct layout *layout, enum dtype dtype, const void *before,
                    const void *want, const void *got, struct verdict *out_verdict)
{
    *out_verdict = (struct verdict){.ok = true};
    size_t end = 0; /* of what is compared so far */
    for (size_t i = 0; i <= layout->n; i++) {
        const size_t next_begin = i < layout->n ? layout->offset[i] : layout->image_bytes;
        const size_t differs =
            first_difference((const char *)before + end, (const char *)got + end, next_begin - end);
        if (differs < next_begin - end && out_verdict->ok) {
            out_verdict->ok = false;
            out_verdict->worst = out_verdict->distance = 1e30;
            snprintf(out_verdict->text, sizeof out_verdict->text,
                     "written %zu bytes behind the end of %s", differs,
                     i == 0 ? "what lies before" : layout->operands[i - 1].name);
        }
        if (i == layout->n) {
            break;
        }
        const char *got_at = (const char *)got + layout->offset[i];
        if (layout->operands[i].role != ROLE_IN) {
            compare_operand(layout, i, dtype, (const char *)want + layout->offset[i], got_at,
                            out_verdict);
        } else if (out_verdict->ok && memcmp((const char *)before + layout->offset[i], got_at,
                                             layout->bytes[i]) != 0) {
            out_verdict->ok = false;
            out_verdict->worst = out_verdict->distance = 1e30;
            snprintf(out_verdict->text, sizeof out_verdict->text, "%s, an input, was changed",
                     layout->operands[i].name);
        }
        end = layout->offset[i] + layout->bytes[i];
    }
}
