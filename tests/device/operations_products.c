/* Operations that are made of products: matmul, attention and what turns its heads, and a body of
 * several operations. See operations.h. */
#include <math.h>
#include "kernels/philox.h"
#include "tests/device/operations.h"

/* ---- matmul ---- */

enum { NN = 1, TN = 2, BIAS = 4, C_FP32 = 8, ACCUMULATE = 16 };

static enum element type_of_c(const struct shape *shape)
{
    return shape->flags & C_FP32 ? ELEMENT_F32 : ELEMENT_COMPUTE;
}

static struct matmul matmul_of(const struct shape *shape)
{
    return (struct matmul){
        .form = shape->flags & NN   ? MATMUL_NN
                : shape->flags & TN ? MATMUL_TN
                                    : MATMUL_NT,
        .m = shape->d[0],
        .n = shape->d[1],
        .k = shape->d[2],
        .c_fp32 = (shape->flags & C_FP32) != 0,
        .accumulate = (shape->flags & ACCUMULATE) != 0,
    };
}

static size_t describe_matmul(const struct shape *shape, struct operand *o)
{
    const size_t m = shape->d[0], n = shape->d[1], k = shape->d[2];
    const double small = 1.0 / sqrt((double)k); /* so that results are of size 1 */
    const double bf16 = shape->flags & C_FP32 ? 1e-4 : UNIT_OF_BF16;
    o[0] = operand_in("a", ELEMENT_COMPUTE, m * k, 1.0);
    o[1] = operand_in("b", ELEMENT_COMPUTE, n * k, small);
    o[2] = shape->flags & ACCUMULATE ? operand_inout("c", type_of_c(shape), m * n, 1.0, 2e-5, bf16)
                                     : operand_out("c", type_of_c(shape), m * n, 2e-5, bf16);
    if ((shape->flags & BIAS) == 0) {
        return 3;
    }
    o[3] = operand_in("bias", ELEMENT_COMPUTE, n, 1.0);
    return 4;
}

static size_t scratch_matmul(struct ops *ops, const struct shape *shape)
{
    struct matmul call = matmul_of(shape);
    call.bias = shape->flags & BIAS ? shape : NULL; /* whether there is one, not which */
    return ops->matmul_scratch(ops, &call);
}

static void call_matmul(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    struct matmul call = matmul_of(shape);
    call.a = p[0];
    call.b = p[1];
    call.c = p[2];
    call.bias = shape->flags & BIAS ? p[3] : NULL;
    call.scratch = scratch;
    ops->matmul(ops, &call);
}

static double flops_matmul(const struct shape *shape)
{
    return 2.0 * (double)shape->d[0] * (double)shape->d[1] * (double)shape->d[2];
}

static const struct shape matmul_shapes[] = {
    {SMALL | FULL, BIAS, {64, 48, 32}},
    {SMALL | FULL, NN, {33, 40, 24}},
    {SMALL | FULL, TN | C_FP32, {48, 64, 40}},
    {SMALL | FULL, TN | C_FP32 | ACCUMULATE, {24, 32, 56}},
    {SMALL | FULL, C_FP32, {17, 257, 64}}, /* logits of an odd vocabulary */
    {SMALL | FULL, NN | ACCUMULATE, {16, 24, 257}},
    {SMALL | FULL, BIAS, {1, 7, 5}},
    {FULL, BIAS, {1024, 2304, 768}},
    {FULL, BIAS, {1000, 768, 3072}},
    {FULL, NN, {1024, 768, 2304}},
    {FULL, TN | C_FP32, {3072, 768, 1024}},
    {FULL, TN | C_FP32 | ACCUMULATE, {768, 768, 1000}},
    {FULL, 0, {512, 50257, 768}}, /* the head, its gradients */
    {FULL, NN, {512, 768, 50257}},
    {FULL, TN | C_FP32, {50257, 768, 256}},
    {FULL, 0, {777, 1111, 333}},
    {BENCH, 0, {4096, 4096, 4096}}, /* the rate that others are compared with */
    {BENCH, 0, {8192, 8192, 8192}},
    {BENCH, BIAS, {32768, 2304, 768}},
    {BENCH, BIAS, {32768, 3072, 768}},
    {BENCH, BIAS, {32768, 768, 3072}},
    {BENCH, NN, {32768, 768, 3072}},
    {BENCH, TN | C_FP32, {3072, 768, 32768}},
    {BENCH, 0, {8192, 50257, 768}},
    {BENCH, NN, {8192, 768, 50257}},
    {BENCH, TN | C_FP32, {50257, 768, 8192}},
    {0, 0, {0}},
};

const struct operation operation_matmul = {
    .name = "matmul",
    .dims = "m n k",
    .switches = "NN TN bias c_fp32 accumulate",
    .reason = "k terms added in another order; a bf16 C may round the other way",
    .describe = describe_matmul,
    .scratch = scratch_matmul,
    .call = call_matmul,
    .flops = flops_matmul,
    .shapes = matmul_shapes,
};

/* ---- attention ---- */

enum { SEGMENTS = 1, DROPOUT = 2 };

struct heads {
    size_t batch, seq_len, n, n_kv, dim, rows, q, kv, row;
};

static struct heads heads_of(const struct shape *shape)
{
    struct heads heads = {
        shape->d[0], shape->d[1], shape->d[2], shape->d[3], shape->d[4], 0, 0, 0, 0};
    heads.rows = heads.batch * heads.seq_len;
    heads.q = heads.n * heads.dim;
    heads.kv = heads.n_kv * heads.dim;
    heads.row = heads.q + 2 * heads.kv;
    return heads;
}

static struct attention attention_of(const struct shape *shape, const void *segments)
{
    const struct heads heads = heads_of(shape);
    return (struct attention){
        .batch = heads.batch,
        .seq_len = heads.seq_len,
        .n_heads = (uint32_t)heads.n,
        .n_kv_heads = (uint32_t)heads.n_kv,
        .head_dim = (uint32_t)heads.dim,
        .scale = 1.0f / sqrtf((float)heads.dim),
        .segments = shape->flags & SEGMENTS ? segments : NULL,
        .dropout = {.p = shape->flags & DROPOUT ? 0.2f : 0.0f,
                    .seed = 77,
                    .step = 3,
                    .first_sample = 5,
                    .seq_len = (uint32_t)heads.seq_len,
                    .layer = 2,
                    .use = RANDOM_ATTENTION_DROPOUT},
    };
}

static struct operand packed_heads(struct operand operand, const struct heads *heads)
{
    operand.row = heads->row;
    operand.part_end[0] = heads->q;
    operand.part_end[1] = heads->q + heads->kv;
    operand.part_end[2] = heads->row;
    return operand;
}

/* Probabilities are rounded to bf16 before they meet the values, and the result again. */
#define ATTENTION_BF16 1.6e-2
/* So are the slopes of the scores, on the way to the gradients of queries and keys, which are
 * differences of larger terms. */
#define ATTENTION_SLOPES_BF16 4e-2

static size_t describe_attention_forward(const struct shape *shape, struct operand *o)
{
    const struct heads heads = heads_of(shape);
    o[0] = operand_out("out", ELEMENT_COMPUTE, heads.rows * heads.q, 2e-5, ATTENTION_BF16);
    o[1] = operand_out("lse", ELEMENT_F32, heads.rows * heads.n, 1e-5, 1e-4);
    o[2] = operand_in("qkv", ELEMENT_COMPUTE, heads.rows * heads.row, 1.0);
    o[3] = operand_integers("segments", VALUES_SEGMENTS, heads.rows, heads.seq_len);
    return 4;
}

static void call_attention_forward(struct ops *ops, const struct shape *shape, void *const *p,
                                   void *scratch)
{
    (void)scratch;
    const struct attention attention = attention_of(shape, p[3]);
    ops->attention_forward(ops, &attention, p[0], p[1], p[2]);
}

static size_t describe_attention_backward(const struct shape *shape, struct operand *o)
{
    const struct heads heads = heads_of(shape);
    o[0] = packed_heads(
        operand_out("dqkv", ELEMENT_COMPUTE, heads.rows * heads.row, 5e-5, ATTENTION_SLOPES_BF16),
        &heads);
    o[1] = operand_out("delta", ELEMENT_F32, heads.rows * heads.n, 2e-5, 2e-5);
    o[2] = operand_in("dout", ELEMENT_COMPUTE, heads.rows * heads.q, 1.0);
    o[3] = operand_in("out", ELEMENT_COMPUTE, heads.rows * heads.q, 0.0);
    o[4] = operand_in("lse", ELEMENT_F32, heads.rows * heads.n, 0.0);
    o[5] = operand_in("qkv", ELEMENT_COMPUTE, heads.rows * heads.row, 1.0);
    o[6] = operand_integers("segments", VALUES_SEGMENTS, heads.rows, heads.seq_len);
    return 7;
}

static void prepare_attention_backward(struct ops *ops, const struct shape *shape, void *const *p)
{
    const struct attention attention = attention_of(shape, p[6]);
    ops->attention_forward(ops, &attention, p[3], p[4], p[5]);
}

static void call_attention_backward(struct ops *ops, const struct shape *shape, void *const *p,
                                    void *scratch)
{
    (void)scratch;
    const struct attention attention = attention_of(shape, p[6]);
    ops->attention_backward(ops, &attention, p[0], p[1], p[2], p[3], p[4], p[5]);
}

/* Two products forward, each over half of the pairs. */
static double flops_attention_forward(const struct shape *shape)
{
    const struct heads heads = heads_of(shape);
    return 2.0 * (double)heads.rows * (double)heads.seq_len * (double)heads.q;
}

static double flops_attention_backward(const struct shape *shape)
{
    return 2.5 * flops_attention_forward(shape);
}

static const struct shape attention_shapes[] = {
    {SMALL | FULL, 0, {2, 40, 4, 4, 64}},
    {SMALL | FULL, DROPOUT, {1, 33, 4, 2, 32}},
    {SMALL | FULL, SEGMENTS, {1, 50, 2, 1, 64}},
    {SMALL | FULL, SEGMENTS | DROPOUT, {1, 37, 2, 2, 128}},
    {SMALL | FULL, DROPOUT, {1, 70, 2, 1, 64}},
    {SMALL | FULL, 0, {1, 1, 2, 2, 16}},
    {FULL, 0, {2, 1024, 12, 12, 64}},
    {FULL, DROPOUT, {1, 1000, 12, 12, 64}},
    {FULL, SEGMENTS, {2, 1024, 8, 2, 128}},
    {FULL, SEGMENTS | DROPOUT, {1, 777, 4, 4, 96}},
    {FULL, 0, {1, 512, 2, 2, 256}},
    {BENCH, 0, {32, 1024, 12, 12, 64}},
    {BENCH, DROPOUT, {32, 1024, 12, 12, 64}},
    {BENCH, 0, {4, 4096, 24, 8, 128}},
    {0, 0, {0}},
};

const struct operation operation_attention_forward = {
    .name = "attention_forward",
    .dims = "batch tokens heads kv_heads head_dim",
    .switches = "segments dropout",
    .reason = "exponentials and sums in another order; bf16 probabilities on tensor cores",
    .describe = describe_attention_forward,
    .call = call_attention_forward,
    .flops = flops_attention_forward,
    .shapes = attention_shapes,
};

const struct operation operation_attention_backward = {
    .name = "attention_backward",
    .dims = "batch tokens heads kv_heads head_dim",
    .switches = "segments dropout",
    .reason = "as forward; slopes are rounded to bf16 too, and are differences",
    .describe = describe_attention_backward,
    .prepare = prepare_attention_backward,
    .call = call_attention_backward,
    .flops = flops_attention_backward,
    .shapes = attention_shapes,
};

/* ---- rotary ---- */

enum { BACKWARD = 1, LONGEST = 1024 };

static size_t describe_rotary(const struct shape *shape, struct operand *o)
{
    const size_t rows = shape->d[0], heads = shape->d[1] + 2 * shape->d[2];
    o[0] =
        operand_inout("qkv", ELEMENT_COMPUTE, rows * heads * shape->d[3], 1.0, 1e-6, UNIT_OF_BF16);
    o[1] = operand_integers("positions", VALUES_POSITIONS, rows, LONGEST);
    return 2;
}

static void call_rotary(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    const uint32_t head_dim = (uint32_t)shape->d[3];
    struct rotary rotary = {.n_pairs = head_dim / 2};
    for (uint32_t i = 0; i < rotary.n_pairs; i++) {
        rotary.inv_freq[i] = (float)pow(10000.0, -2.0 * i / head_dim);
    }
    ops->rotary(ops, p[0], p[1], &rotary, shape->d[0], (uint32_t)shape->d[1], (uint32_t)shape->d[2],
                head_dim, shape->flags & BACKWARD ? -1 : 1);
}

static const struct shape rotary_shapes[] = {
    {SMALL | FULL, 0, {37, 4, 2, 16}}, {SMALL | FULL, BACKWARD, {5, 2, 2, 64}},
    {FULL, 0, {2048, 24, 8, 128}},     {FULL, BACKWARD, {1500, 8, 8, 256}},
    {BENCH, 0, {32768, 12, 12, 64}},   {0, 0, {0}},
};

const struct operation operation_rotary = {
    .name = "rotary",
    .dims = "rows heads kv_heads head_dim",
    .switches = "backward",
    .reason = "a product and a sum may be one operation; a bf16 result may round the other way",
    .describe = describe_rotary,
    .call = call_rotary,
    .shapes = rotary_shapes,
};

/* ---- a body, which a device may replay ---- */

enum { BODY_ROUNDS = 4 };

static size_t describe_body(const struct shape *shape, struct operand *o)
{
    const size_t rows = shape->d[0] * shape->d[1], width = shape->d[2], n = rows * width;
    o[0] = operand_out("results", ELEMENT_COMPUTE, BODY_ROUNDS * n, 1e-4, 2e-2);
    o[1] = operand_in("x", ELEMENT_COMPUTE, n, 1.0);
    o[2] = operand_in("norm weight", ELEMENT_COMPUTE, width, 0.1);
    o[2].values = VALUES_NEAR_ONE;
    o[3] = operand_in("weight", ELEMENT_COMPUTE, width * width, 1.0 / sqrt((double)width));
    o[4] = operand_in("bias", ELEMENT_COMPUTE, width, 0.1);
    o[5] = operand_out("rstd", ELEMENT_F32, rows, 1e-5, 1e-5);
    o[6] = operand_out("normed", ELEMENT_COMPUTE, n, 1e-5, UNIT_OF_BF16);
    o[7] = operand_out("product", ELEMENT_COMPUTE, n, 5e-5, 2e-2);
    o[8] = operand_out("out", ELEMENT_COMPUTE, n, 1e-4, 2e-2);
    return 9;
}

static struct matmul body_product(const struct shape *shape)
{
    return (struct matmul){.form = MATMUL_NT,
                           .m = shape->d[0] * shape->d[1],
                           .n = shape->d[2],
                           .k = shape->d[2],
                           .bias = shape};
}

static size_t scratch_body(struct ops *ops, const struct shape *shape)
{
    const struct matmul call = body_product(shape);
    return ops->matmul_scratch(ops, &call);
}

static void call_body(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    const size_t rows = shape->d[0] * shape->d[1], width = shape->d[2];
    const size_t bytes = rows * width * ops->elem_bytes;
    struct matmul call = body_product(shape);
    call.a = p[6];
    call.b = p[3];
    call.bias = p[4];
    call.c = p[7];
    call.scratch = scratch;
    for (uint32_t round = 0; round < BODY_ROUNDS; round++) {
        const struct body body = {
            .section = 1, .layer = 2, .pass = 0, .step = 10 + round, .first_sample = 3 * round};
        const struct dropout dropout = {.p = 0.3f,
                                        .seed = 5,
                                        .step = body.step,
                                        .first_sample = body.first_sample,
                                        .seq_len = (uint32_t)shape->d[1],
                                        .layer = 2,
                                        .use = RANDOM_MLP_OUT_DROPOUT};
        ops_body_begin(ops, &body);
        ops->norm_forward(ops, NORM_RMS, p[6], NULL, p[5], p[1], p[2], NULL, rows, width, 1e-5f);
        ops->matmul(ops, &call);
        ops->residual_dropout(ops, p[8], p[1], p[7], rows, width, &dropout);
        ops_body_end(ops);
        ops->copy(ops, (char *)p[0] + round * bytes, p[8], bytes);
    }
    ops_body_forget(ops);
}

static const struct shape body_shapes[] = {
    {SMALL | FULL, 0, {2, 9, 48}},
    {FULL, 0, {4, 512, 768}},
    {0, 0, {0}},
};

const struct operation operation_body = {
    .name = "body",
    .dims = "batch tokens width",
    .switches = "",
    .reason = "those of its operations, one after the other",
    .describe = describe_body,
    .scratch = scratch_body,
    .call = call_body,
    .shapes = body_shapes,
};
