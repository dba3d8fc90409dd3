/* Operations on rows and on ranges, and the table of all. See operations.h. */
#include "tests/device/operations.h"
#include "kernels/philox.h"

#define ROWS shape->d[0]
#define WIDTH shape->d[1]

/* ---- embedding, biases ---- */

enum { POSITIONS = 1 };

static size_t describe_bias(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("dbias", ELEMENT_F32, WIDTH, 1e-5, 1e-5);
    o[1] = operand_in("dout", ELEMENT_COMPUTE, ROWS * WIDTH, 1.0);
    return 2;
}

static void call_bias(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    ops->bias_backward(ops, p[0], p[1], ROWS, WIDTH);
}

static const struct shape bias_shapes[] = {
    {SMALL | FULL, 0, {37, 48}},
    {SMALL | FULL, 0, {1, 5}},
    {SMALL | FULL, 0, {130, 33}},
    {FULL, 0, {4096, 3072}},
    {FULL, 0, {1000, 769}},
    {BENCH, 0, {32768, 3072}},
    {0, 0, {0}},
};

static size_t describe_embed(const struct shape *shape, struct operand *o)
{
    const size_t vocab = shape->d[2];
    o[0] = operand_out("out", ELEMENT_COMPUTE, ROWS * WIDTH, 0, 0);
    o[1] = operand_integers("tokens", VALUES_INTEGERS, ROWS, vocab);
    o[2] = operand_integers("positions", VALUES_POSITIONS, ROWS, 64);
    o[3] = operand_in("wte", ELEMENT_COMPUTE, vocab * WIDTH, 1.0);
    o[4] = operand_in("wpe", ELEMENT_COMPUTE, 64 * WIDTH, 1.0);
    return 5;
}

static void call_embed(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    ops->embed_forward(ops, p[0], p[1], p[2], p[3], shape->flags & POSITIONS ? p[4] : NULL, ROWS,
                       WIDTH);
}

static size_t describe_embed_backward(const struct shape *shape, struct operand *o)
{
    const size_t vocab = shape->d[2];
    o[0] = operand_inout("dwte", ELEMENT_F32, vocab * WIDTH, 1.0, 0, 0);
    o[1] = operand_inout("dwpe", ELEMENT_F32, 64 * WIDTH, 1.0, 0, 0);
    o[2] = operand_in("dout", ELEMENT_COMPUTE, ROWS * WIDTH, 1.0);
    o[3] = operand_integers("tokens", VALUES_INTEGERS, ROWS, vocab);
    o[4] = operand_integers("positions", VALUES_POSITIONS, ROWS, 64);
    return 5;
}

static void call_embed_backward(struct ops *ops, const struct shape *shape, void *const *p,
                                void *scratch)
{
    (void)scratch;
    ops->embed_backward(ops, p[0], shape->flags & POSITIONS ? p[1] : NULL, p[2], p[3], p[4], ROWS,
                        WIDTH);
}

static const struct shape embed_shapes[] = {
    {SMALL | FULL, POSITIONS, {90, 48, 17}}, {SMALL | FULL, 0, {7, 33, 300}},
    {FULL, POSITIONS, {4096, 768, 50257}},   {FULL, 0, {1000, 1600, 257}},
    {BENCH, POSITIONS, {32768, 768, 50257}}, {0, 0, {0}},
};

/* ---- norms ---- */

enum { RMS = 1 };

static enum norm_kind norm_of(const struct shape *shape)
{
    return shape->flags & RMS ? NORM_RMS : NORM_LAYER;
}

static size_t describe_norm(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("out", ELEMENT_COMPUTE, ROWS * WIDTH, 5e-6, UNIT_OF_BF16);
    o[1] = operand_out("rstd", ELEMENT_F32, ROWS, 2e-6, 2e-6);
    o[2] = operand_in("x", ELEMENT_COMPUTE, ROWS * WIDTH, 2.0);
    o[3] = operand_in("weight", ELEMENT_COMPUTE, WIDTH, 0.2);
    o[3].values = VALUES_NEAR_ONE;
    o[4] = operand_in("bias", ELEMENT_COMPUTE, WIDTH, 0.2);
    if (shape->flags & RMS) {
        return 5;
    }
    o[5] = operand_out("mean", ELEMENT_F32, ROWS, 5e-6, 5e-6);
    return 6;
}

static void call_norm(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    const bool rms = (shape->flags & RMS) != 0;
    ops->norm_forward(ops, norm_of(shape), p[0], rms ? NULL : p[5], p[1], p[2], p[3],
                      rms ? NULL : p[4], ROWS, WIDTH, 1e-5f);
}

static size_t describe_norm_backward(const struct shape *shape, struct operand *o)
{
    o[0] = operand_inout("dx", ELEMENT_COMPUTE, ROWS * WIDTH, 0.5, 1e-5, UNIT_OF_BF16);
    o[1] = operand_out("dweight", ELEMENT_F32, WIDTH, 2e-5, 2e-5);
    o[2] = operand_in("dout", ELEMENT_COMPUTE, ROWS * WIDTH, 1.0);
    o[3] = operand_in("x", ELEMENT_COMPUTE, ROWS * WIDTH, 2.0);
    o[4] = operand_in("weight", ELEMENT_COMPUTE, WIDTH, 0.2);
    o[4].values = VALUES_NEAR_ONE;
    o[5] = operand_in("rstd", ELEMENT_F32, ROWS, 0.0);
    o[6] = operand_in("mean", ELEMENT_F32, ROWS, 0.0);
    o[7] = operand_in("out", ELEMENT_COMPUTE, ROWS * WIDTH, 0.0); /* of prepare alone */
    if (shape->flags & RMS) {
        return 8;
    }
    o[8] = operand_out("dbias", ELEMENT_F32, WIDTH, 2e-5, 2e-5);
    return 9;
}

static void prepare_norm_backward(struct ops *ops, const struct shape *shape, void *const *p)
{
    const bool rms = (shape->flags & RMS) != 0;
    ops->norm_forward(ops, norm_of(shape), p[7], rms ? NULL : p[6], p[5], p[3], p[4],
                      rms ? NULL : p[4], ROWS, WIDTH, 1e-5f);
}

static void call_norm_backward(struct ops *ops, const struct shape *shape, void *const *p,
                               void *scratch)
{
    (void)scratch;
    const bool rms = (shape->flags & RMS) != 0;
    ops->norm_backward(ops, norm_of(shape), p[0], p[1], rms ? NULL : p[8], p[2], p[3], p[4],
                       rms ? NULL : p[6], p[5], ROWS, WIDTH);
}

static const struct shape norm_shapes[] = {
    {SMALL | FULL, 0, {37, 48}}, {SMALL | FULL, RMS, {11, 65}}, {SMALL | FULL, 0, {1, 1000}},
    {FULL, 0, {4096, 768}},      {FULL, 0, {777, 1600}},        {FULL, RMS, {1024, 4096}},
    {BENCH, 0, {32768, 768}},    {BENCH, RMS, {16384, 3072}},   {0, 0, {0}},
};

/* ---- activation functions ---- */

enum { SWIGLU = 1, IN_PLACE = 2 };

static enum activation_kind activation_of(const struct shape *shape)
{
    return shape->flags & SWIGLU ? ACTIVATION_SWIGLU : ACTIVATION_GELU;
}

static size_t entering(const struct shape *shape)
{
    return ROWS * WIDTH * (shape->flags & SWIGLU ? 2 : 1);
}

static size_t describe_activation(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("out", ELEMENT_COMPUTE, ROWS * WIDTH, 1e-5, UNIT_OF_BF16);
    o[1] = operand_in("in", ELEMENT_COMPUTE, entering(shape), 2.0);
    return 2;
}

static void call_activation(struct ops *ops, const struct shape *shape, void *const *p,
                            void *scratch)
{
    (void)scratch;
    ops->activation_forward(ops, activation_of(shape), p[0], p[1], ROWS, WIDTH);
}

static size_t describe_activation_backward(const struct shape *shape, struct operand *o)
{
    const size_t n = entering(shape);
    o[0] = operand_in("dout", ELEMENT_COMPUTE, ROWS * WIDTH, 1.0);
    if (shape->flags & IN_PLACE) {
        o[1] = operand_inout("in, then din", ELEMENT_COMPUTE, n, 2.0, 1e-5, UNIT_OF_BF16);
        return 2;
    }
    o[1] = operand_out("din", ELEMENT_COMPUTE, n, 1e-5, UNIT_OF_BF16);
    o[2] = operand_in("in", ELEMENT_COMPUTE, n, 2.0);
    return 3;
}

static void call_activation_backward(struct ops *ops, const struct shape *shape, void *const *p,
                                     void *scratch)
{
    (void)scratch;
    ops->activation_backward(ops, activation_of(shape), p[1], p[0],
                             shape->flags & IN_PLACE ? p[1] : p[2], ROWS, WIDTH);
}

static const struct shape activation_shapes[] = {
    {SMALL | FULL, 0, {19, 48}},
    {SMALL | FULL, SWIGLU, {13, 43}},
    {FULL, 0, {4096, 3072}},
    {FULL, SWIGLU, {1000, 8192}},
    {BENCH, 0, {32768, 3072}},
    {BENCH, SWIGLU, {16384, 8192}},
    {0, 0, {0}},
};

static const struct shape activation_backward_shapes[] = {
    {SMALL | FULL, 0, {19, 48}},
    {SMALL | FULL, SWIGLU, {13, 43}},
    {SMALL | FULL, IN_PLACE, {5, 64}},
    {SMALL | FULL, SWIGLU | IN_PLACE, {7, 33}},
    {FULL, IN_PLACE, {4096, 3072}},
    {FULL, SWIGLU | IN_PLACE, {1000, 8192}},
    {BENCH, IN_PLACE, {32768, 3072}},
    {BENCH, SWIGLU | IN_PLACE, {16384, 8192}},
    {0, 0, {0}},
};

/* ---- the residual stream ---- */

enum { NO_RESIDUAL = 1, DROPOUT = 2, OVER_BRANCH = 4 };

static struct dropout dropout_of(const struct shape *shape, size_t tokens)
{
    return (struct dropout){.p = shape->flags & DROPOUT ? 0.1f : 0.0f,
                            .seed = 1234567890123,
                            .step = 41,
                            .first_sample = 6,
                            .first_token = 2,
                            .seq_len = (uint32_t)tokens,
                            .layer = 3,
                            .use = RANDOM_ATTENTION_OUT_DROPOUT};
}

static size_t describe_residual(const struct shape *shape, struct operand *o)
{
    const size_t n = ROWS * shape->d[1] * shape->d[2];
    const bool exact = (shape->flags & NO_RESIDUAL) != 0; /* the mask alone */
    const double fp32 = exact ? 0 : 1e-6, bf16 = exact ? 0 : UNIT_OF_BF16;
    if (shape->flags & OVER_BRANCH) {
        o[0] = operand_inout("branch, then out", ELEMENT_COMPUTE, n, 1.0, fp32, bf16);
        o[1] = operand_in("residual", ELEMENT_COMPUTE, n, 1.0);
        return 2;
    }
    o[0] = operand_out("out", ELEMENT_COMPUTE, n, fp32, bf16);
    o[1] = operand_in("residual", ELEMENT_COMPUTE, n, 1.0);
    o[2] = operand_in("branch", ELEMENT_COMPUTE, n, 1.0);
    return 3;
}

static void call_residual(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    const struct dropout dropout = dropout_of(shape, shape->d[1]);
    ops->residual_dropout(ops, p[0], shape->flags & NO_RESIDUAL ? NULL : p[1],
                          shape->flags & OVER_BRANCH ? p[0] : p[2], ROWS * shape->d[1], shape->d[2],
                          &dropout);
}

static size_t describe_dropout_backward(const struct shape *shape, struct operand *o)
{
    const size_t n = ROWS * shape->d[1] * shape->d[2];
    if (shape->flags & OVER_BRANCH) {
        o[0] = operand_inout("dout, then dbranch", ELEMENT_COMPUTE, n, 1.0, 0, 0);
        return 1;
    }
    o[0] = operand_out("dbranch", ELEMENT_COMPUTE, n, 0, 0);
    o[1] = operand_in("dout", ELEMENT_COMPUTE, n, 1.0);
    return 2;
}

static void call_dropout_backward(struct ops *ops, const struct shape *shape, void *const *p,
                                  void *scratch)
{
    (void)scratch;
    const struct dropout dropout = dropout_of(shape, shape->d[1]);
    ops->dropout_backward(ops, p[0], shape->flags & OVER_BRANCH ? p[0] : p[1], ROWS * shape->d[1],
                          shape->d[2], &dropout);
}

static const struct shape residual_shapes[] = {
    {SMALL | FULL, DROPOUT, {3, 11, 48}},
    {SMALL | FULL, NO_RESIDUAL | DROPOUT, {2, 9, 33}},
    {SMALL | FULL, 0, {1, 5, 40}},
    {SMALL | FULL, OVER_BRANCH | DROPOUT, {2, 7, 36}},
    {FULL, DROPOUT, {4, 1000, 768}},
    {FULL, NO_RESIDUAL | DROPOUT, {2, 1024, 1601}},
    {BENCH, 0, {32, 1024, 768}},
    {BENCH, DROPOUT, {32, 1024, 768}},
    {0, 0, {0}},
};

static const struct shape dropout_backward_shapes[] = {
    {SMALL | FULL, DROPOUT, {3, 11, 48}}, {SMALL | FULL, OVER_BRANCH | DROPOUT, {2, 7, 37}},
    {SMALL | FULL, 0, {1, 5, 40}},        {FULL, DROPOUT, {4, 1000, 768}},
    {BENCH, DROPOUT, {32, 1024, 768}},    {0, 0, {0}},
};

/* ---- loss ---- */

enum { GRADIENT = 1 };

static size_t describe_cross_entropy(const struct shape *shape, struct operand *o)
{
    const size_t vocab = WIDTH;
    o[0] = operand_out("losses", ELEMENT_F32, ROWS, 1e-5, 1e-5);
    if (shape->flags & GRADIENT) {
        o[1] = operand_inout("logits, then gradient", ELEMENT_COMPUTE, ROWS * vocab, 2.0, 3e-5,
                             UNIT_OF_BF16);
        o[1].floor = 1e-4; /* most are far smaller than the few at the labels */
    } else {
        o[1] = operand_in("logits", ELEMENT_COMPUTE, ROWS * vocab, 2.0);
    }
    o[2] = operand_integers("labels", VALUES_LABELS, ROWS, vocab);
    return 3;
}

static void call_cross_entropy(struct ops *ops, const struct shape *shape, void *const *p,
                               void *scratch)
{
    (void)scratch;
    ops->cross_entropy(ops, p[0], p[1], p[2], ROWS, WIDTH, 0.25f, (shape->flags & GRADIENT) != 0);
}

static const struct shape loss_shapes[] = {
    {SMALL | FULL, GRADIENT, {20, 257}},
    {SMALL | FULL, 0, {9, 100}},
    {SMALL | FULL, GRADIENT, {8, 3}},
    {FULL, GRADIENT, {256, 50257}},
    {FULL, 0, {100, 128256}},
    {BENCH, GRADIENT, {8192, 50257}},
    {0, 0, {0}},
};

/* ---- sums ---- */

static size_t describe_sum(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("sum", ELEMENT_F64, 1, 1e-12, 1e-12);
    o[1] = operand_in("values", ELEMENT_F32, ROWS, 1.0);
    o[1].values = VALUES_POSITIVE;
    return 2;
}

static void call_sum(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    ops->sum(ops, p[0], p[1], ROWS);
}

static void call_sum_squares(struct ops *ops, const struct shape *shape, void *const *p,
                             void *scratch)
{
    (void)scratch;
    ops->sum_squares(ops, p[0], p[1], ROWS);
}

static const struct shape sum_shapes[] = {
    {SMALL | FULL, 0, {1000}}, {SMALL | FULL, 0, {1}}, {SMALL | FULL, 0, {40001}},
    {FULL, 0, {32768}},        {BENCH, 0, {32768}},    {0, 0, {0}},
};

static const struct shape sum_squares_shapes[] = {
    {SMALL | FULL, 0, {1000}}, {SMALL | FULL, 0, {1}},  {SMALL | FULL, 0, {40001}},
    {FULL, 0, {8000003}},      {BENCH, 0, {124439808}}, {0, 0, {0}},
};

static size_t describe_sum_parts(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("out", ELEMENT_F32, shape->d[2], 0, 0);
    o[1] = operand_in("parts", ELEMENT_F32, shape->d[0] * shape->d[1], 1.0);
    return 2;
}

static void call_sum_parts(struct ops *ops, const struct shape *shape, void *const *p,
                           void *scratch)
{
    (void)scratch;
    ops->sum_parts(ops, p[0], p[1], shape->d[0], shape->d[1], shape->d[2]);
}

static const struct shape sum_parts_shapes[] = {
    {SMALL | FULL, 0, {3, 128, 100}},
    {SMALL | FULL, 0, {1, 7, 7}},
    {FULL, 0, {8, 1000000, 999999}},
    {BENCH, 0, {8, 4194304, 4194304}},
    {0, 0, {0}},
};

/* ---- ranges of numbers ---- */

enum { COPY_OUT = 1 };

static size_t describe_adamw(const struct shape *shape, struct operand *o)
{
    o[0] = operand_inout("params", ELEMENT_F32, ROWS, 0.02, 0, 0);
    o[1] = operand_inout("moment m", ELEMENT_F32, ROWS, 0.01, 0, 0);
    o[2] = operand_inout("moment v", ELEMENT_F32, ROWS, 0.01, 0, 0);
    o[2].values = VALUES_POSITIVE;
    o[3] = operand_in("grads", ELEMENT_F32, ROWS, 0.1);
    if ((shape->flags & COPY_OUT) == 0) {
        return 4;
    }
    o[4] = operand_out("copy", ELEMENT_COMPUTE, ROWS, 0, 0);
    return 5;
}

static void call_adamw(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    const struct adamw adamw = {.lr = 3e-4f,
                                .beta1 = 0.9f,
                                .beta2 = 0.95f,
                                .eps = 1e-8f,
                                .weight_decay = 0.1f,
                                .grad_scale = 0.37f,
                                .bias_correction1 = 1.0 - 0.9 * 0.9 * 0.9,
                                .bias_correction2 = 1.0 - 0.95 * 0.95 * 0.95};
    ops->adamw(ops, p[0], shape->flags & COPY_OUT ? p[4] : NULL, p[1], p[2], p[3], ROWS, &adamw);
}

static const struct shape adamw_shapes[] = {
    {SMALL | FULL, COPY_OUT, {1003}},
    {SMALL | FULL, 0, {256}},
    {FULL, COPY_OUT, {5000001}},
    {BENCH, COPY_OUT, {124439808}},
    {0, 0, {0}},
};

static size_t describe_range_f32(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("values", ELEMENT_F32, ROWS, 0, 0);
    return 1;
}

static void call_fill(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    ops->fill(ops, p[0], ROWS, -1.25f);
}

static void call_random_normal(struct ops *ops, const struct shape *shape, void *const *p,
                               void *scratch)
{
    (void)scratch;
    ops->random_normal(ops, p[0], ROWS, 0.02f, 42, 5, shape->d[1]);
}

static size_t describe_zero(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("dst", ELEMENT_BYTE, ROWS, 0, 0);
    return 1;
}

static void call_zero(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    ops->zero(ops, p[0], ROWS);
}

static size_t describe_copy(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("dst", ELEMENT_BYTE, ROWS * 4, 0, 0);
    o[1] = operand_in("src", ELEMENT_F32, ROWS, 1.0);
    return 2;
}

static void call_copy(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    ops->copy(ops, p[0], p[1], ROWS * 4);
}

static size_t describe_add(const struct shape *shape, struct operand *o)
{
    o[0] = operand_inout("dst", ELEMENT_F32, ROWS, 1.0, 0, 0);
    o[1] = operand_in("src", ELEMENT_F32, ROWS, 1.0);
    return 2;
}

static void call_add(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    ops->add(ops, p[0], p[1], ROWS);
}

static size_t describe_narrow(const struct shape *shape, struct operand *o)
{
    o[0] = operand_out("dst", ELEMENT_COMPUTE, ROWS, 0, 0);
    o[1] = operand_in("src", ELEMENT_F32, ROWS, 1.0);
    return 2;
}

static void call_narrow(struct ops *ops, const struct shape *shape, void *const *p, void *scratch)
{
    (void)scratch;
    ops->narrow(ops, p[0], p[1], ROWS);
}

static const struct shape range_shapes[] = {
    {SMALL | FULL, 0, {1003, 7}},
    {SMALL | FULL, 0, {4, 0}},
    {FULL, 0, {3000001, 1000000007}},
    {BENCH, 0, {124439808, 0}},
    {0, 0, {0}},
};

/* ---- the table ---- */

#define SAME "one written order of operations: the same bits"
#define ORDER "sums in another order, in fp32"

const struct operation operations[] = {
    {"bias_backward", "rows width", "", ORDER, describe_bias, NULL, NULL, call_bias, NULL,
     bias_shapes},
    {"embed_forward", "rows width vocab", "positions", "one sum, rounded once: the same bits",
     describe_embed, NULL, NULL, call_embed, NULL, embed_shapes},
    {"embed_backward", "rows width vocab", "positions", "rows in order: the same bits",
     describe_embed_backward, NULL, NULL, call_embed_backward, NULL, embed_shapes},
    {"norm_forward", "rows width", "RMS", ORDER "; a bf16 result may round the other way",
     describe_norm, NULL, NULL, call_norm, NULL, norm_shapes},
    {"norm_backward", "rows width", "RMS", ORDER "; a bf16 result may round the other way",
     describe_norm_backward, prepare_norm_backward, NULL, call_norm_backward, NULL, norm_shapes},
    {"activation_forward", "rows inner", "swiglu",
     "exponentials differ by an ulp or two; a bf16 result may round the other way",
     describe_activation, NULL, NULL, call_activation, NULL, activation_shapes},
    {"activation_backward", "rows inner", "swiglu in_place", "as forward",
     describe_activation_backward, NULL, NULL, call_activation_backward, NULL,
     activation_backward_shapes},
    {"residual_dropout", "batch tokens width", "no_residual dropout over_branch",
     "masks have the same bits; the product and the sum may be one operation", describe_residual,
     NULL, NULL, call_residual, NULL, residual_shapes},
    {"dropout_backward", "batch tokens width", "no_residual dropout over_branch",
     "a mask and one product: the same bits", describe_dropout_backward, NULL, NULL,
     call_dropout_backward, NULL, dropout_backward_shapes},
    {"cross_entropy", "rows vocab", "gradient",
     "exponentials differ by an ulp or two, summed in another order", describe_cross_entropy, NULL,
     NULL, call_cross_entropy, NULL, loss_shapes},
    {"sum", "n", "", "fp64", describe_sum, NULL, NULL, call_sum, NULL, sum_shapes},
    {"sum_squares", "n", "", "fp64, blocks of another size", describe_sum, NULL, NULL,
     call_sum_squares, NULL, sum_squares_shapes},
    {"sum_parts", "parts stride n", "", "parts in order: the same bits", describe_sum_parts, NULL,
     NULL, call_sum_parts, NULL, sum_parts_shapes},
    {"add", "n", "", SAME, describe_add, NULL, NULL, call_add, NULL, range_shapes},
    {"zero", "n", "", SAME, describe_zero, NULL, NULL, call_zero, NULL, range_shapes},
    {"fill", "n", "", SAME, describe_range_f32, NULL, NULL, call_fill, NULL, range_shapes},
    {"copy", "n", "", SAME, describe_copy, NULL, NULL, call_copy, NULL, range_shapes},
    {"narrow", "n", "", "round to nearest even: the same bits", describe_narrow, NULL, NULL,
     call_narrow, NULL, range_shapes},
    {"random_normal", "n first", "", "our own polynomials: the same bits", describe_range_f32, NULL,
     NULL, call_random_normal, NULL, range_shapes},
    {"adamw", "n", "copy", SAME, describe_adamw, NULL, NULL, call_adamw, NULL, adamw_shapes},
};
const size_t n_operations = sizeof operations / sizeof operations[0];
