/* Owns nothing. Any thread. */
#include "kernels/cuda/emulate/nccl_reduce.h"

#include <stdint.h>
#include <string.h>
#include "kernels/cuda/emulate/emulate.h"

size_t emulate_nccl_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    }
    return 0;
}

bool emulate_nccl_can_reduce(ncclDataType_t type, ncclRedOp_t op)
{
    const bool is_known_op = op == ncclSum || op == ncclProd || op == ncclMax || op == ncclMin ||
                             (op == ncclAvg && (type == ncclFloat32 || type == ncclFloat64));
    return is_known_op && type != ncclFloat16 && emulate_nccl_bytes(type) > 0;
}

/* Whole numbers wrap, as they do on a GPU: they are added and multiplied without a sign. */
#define REDUCE(name, type, unsigned_type)                                                          \
    static type combine_##name(type a, type b, ncclRedOp_t op)                                     \
    {                                                                                              \
        switch (op) {                                                                              \
        case ncclSum:                                                                              \
        case ncclAvg:                                                                              \
            return (type)((unsigned_type)a + (unsigned_type)b);                                    \
        case ncclProd:                                                                             \
            return (type)((unsigned_type)a * (unsigned_type)b);                                    \
        case ncclMax:                                                                              \
            return a > b ? a : b;                                                                  \
        case ncclMin:                                                                              \
            return a < b ? a : b;                                                                  \
        }                                                                                          \
        return a;                                                                                  \
    }                                                                                              \
    static void reduce_##name(type *out, const type *parts, size_t n, size_t n_parts,              \
                              size_t first, ncclRedOp_t op)                                        \
    {                                                                                              \
        for (size_t i = 0; i < n; i++) {                                                           \
            type value = parts[first * n + i];                                                     \
            for (size_t p = 1; p < n_parts; p++) {                                                 \
                value = combine_##name(value, parts[(first + p) % n_parts * n + i], op);           \
            }                                                                                      \
            out[i] = value;                                                                        \
        }                                                                                          \
    }

REDUCE(i8, int8_t, unsigned)
REDUCE(u8, uint8_t, unsigned)
REDUCE(i32, int32_t, uint32_t)
REDUCE(u32, uint32_t, uint32_t)
REDUCE(i64, int64_t, uint64_t)
REDUCE(u64, uint64_t, uint64_t)
REDUCE(f32, float, float)
REDUCE(f64, double, double)

static float widen(uint16_t value)
{
    const uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static uint16_t narrow(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits | 0x400000u) >> 16);
    }
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Rounded after every step. */
static void reduce_bf16(uint16_t *out, const uint16_t *parts, size_t n, size_t n_parts,
                        size_t first, ncclRedOp_t op)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t value = parts[first * n + i];
        for (size_t p = 1; p < n_parts; p++) {
            const float next = widen(parts[(first + p) % n_parts * n + i]);
            value = narrow(combine_f32(widen(value), next, op));
        }
        out[i] = value;
    }
}

void emulate_nccl_reduce(void *out, const void *parts, size_t n, size_t n_parts, size_t first,
                         ncclDataType_t type, ncclRedOp_t op)
{
    switch (type) {
    case ncclInt8:
        reduce_i8(out, parts, n, n_parts, first, op);
        return;
    case ncclUint8:
        reduce_u8(out, parts, n, n_parts, first, op);
        return;
    case ncclInt32:
        reduce_i32(out, parts, n, n_parts, first, op);
        return;
    case ncclUint32:
        reduce_u32(out, parts, n, n_parts, first, op);
        return;
    case ncclInt64:
        reduce_i64(out, parts, n, n_parts, first, op);
        return;
    case ncclUint64:
        reduce_u64(out, parts, n, n_parts, first, op);
        return;
    case ncclFloat32:
        reduce_f32(out, parts, n, n_parts, first, op);
        for (size_t i = 0; i < n && op == ncclAvg; i++) {
            ((float *)out)[i] /= (float)n_parts;
        }
        return;
    case ncclFloat64:
        reduce_f64(out, parts, n, n_parts, first, op);
        for (size_t i = 0; i < n && op == ncclAvg; i++) {
            ((double *)out)[i] /= (double)n_parts;
        }
        return;
    case ncclBfloat16:
        reduce_bf16(out, parts, n, n_parts, first, op);
        return;
    case ncclFloat16:
        break;
    }
    emulate_misuse("NCCL: no reductions of type %d", (int)type);
}
