/* A transformer block. See block.h. */
#include "worker/model/block.h"
#include <math.h>

static const void *weight(const struct model_context *model, uint32_t layer, enum block_slot slot)
{
    const size_t offset = model->units->block_slots[slot];
    return offset == SIZE_MAX ? NULL : params_get(model->params, layer + 1, offset);
}

void model_matmul(struct model_context *model, struct matmul call)
{
    struct buffer scratch = {0};
    const size_t bytes = model->ops->matmul_scratch(model->ops, &call);
    if (bytes > 0) {
        scratch = workspace_reserve_scratch(model->workspace, bytes);
    }
    call.scratch = scratch.data;
    model->ops->matmul(model->ops, &call);
    workspace_release(model->workspace, &scratch);
    model->comm->table->progress(model->comm);
    atomic_fetch_add_explicit(&model->telemetry->heartbeat, 1, memory_order_relaxed);
}

struct dropout model_dropout(const struct model_context *model, float p, uint32_t layer,
                             enum random_use use)
{
    return (struct dropout){
        .p = model->micro.train ? p : 0.0f,
        .seed = model->micro.seed,
        .step = model->micro.step,
        .first_sample = model->micro.first_sample,
        .first_token = 0,
        .seq_len = (uint32_t)model->micro.seq_len,
        .layer = layer,
        .use = use,
    };
}

static struct buffer reserve_rows(struct model_context *model, const char *name, size_t cols)
{
    return workspace_reserve(model->workspace, name, CATEGORY_ACTIVATIONS,
                             activation_bytes(model, cols));
}

static struct buffer reserve_stats(struct model_context *model, const char *name)
{
    return workspace_reserve(model->workspace, name, CATEGORY_ACTIVATIONS,
                             micro_rows(model) * sizeof(float));
}

static struct attention attention_of(const struct model_context *model, uint32_t layer)
{
    const struct model_spec *spec = model->spec;
    return (struct attention){
        .batch = model->micro.batch,
        .seq_len = model->micro.seq_len,
        .n_heads = spec->n_heads,
        .n_kv_heads = spec->n_kv_heads,
        .head_dim = spec->head_dim,
        .scale = 1.0f / sqrtf((float)spec->head_dim),
        .dropout =
            model_dropout(model, spec->dropout_attention, layer, RANDOM_ATTENTION_DROPOUT),
    };
}

/* Width of the up projection's output: gate and up side by side for SwiGLU. */
static size_t up_width(const struct model_spec *spec)
{
    return spec->activation == ACTIVATION_SWIGLU ? 2 * (size_t)spec->inner : spec->inner;
}

static size_t attention_width(const struct model_spec *spec)
{
    return (size_t)spec->n_heads * spec->head_dim;
}

/* ---- making activations: each function makes one, if it is not there ---- */

static void drop_norm(struct model_context *model, struct buffer *out, struct buffer *mean,
                      struct buffer *rstd)
{
    workspace_release(model->workspace, out);
    workspace_release(model->workspace, mean);
    workspace_release(model->workspace, rstd);
}

static void make_norm1(struct model_context *model, uint32_t layer, struct block_acts *acts)
{
    if (acts->norm1.data != NULL) {
        return;
    }
    const struct model_spec *spec = model->spec;
    acts->norm1 = reserve_rows(model, "norm1", spec->width);
    if (spec->norm == NORM_LAYER) {
        acts->mean1 = reserve_stats(model, "mean1");
    }
    acts->rstd1 = reserve_stats(model, "rstd1");
    model->ops->norm_forward(model->ops, spec->norm, acts->norm1.data, acts->mean1.data,
                             acts->rstd1.data, acts->x0, weight(model, layer, BLOCK_NORM1_WEIGHT),
                             weight(model, layer, BLOCK_NORM1_BIAS), micro_rows(model), spec->width,
                             spec->norm_eps);
}

static void make_qkv(struct model_context *model, uint32_t layer, struct block_acts *acts)
{
    if (acts->qkv.data != NULL) {
        return;
    }
    make_norm1(model, layer, acts);
    const struct model_spec *spec = model->spec;
    acts->qkv = reserve_rows(model, "qkv", spec_qkv_width(spec));
    model_matmul(model, (struct matmul){.form = MATMUL_NT,
                                        .m = micro_rows(model),
                                        .n = spec_qkv_width(spec),
                                        .k = spec->width,
                                        .a = acts->norm1.data,
                                        .b = weight(model, layer, BLOCK_QKV_WEIGHT),
                                        .bias = weight(model, layer, BLOCK_QKV_BIAS),
                                        .c = acts->qkv.data});
    if (!spec->learned_positions) {
        model->ops->rotary(model->ops, acts->qkv.data, model->positions, &model->rotary,
                           micro_rows(model), spec->n_heads, spec->n_kv_heads, spec->head_dim, 1);
    }
}

static void make_attention(struct model_context *model, uint32_t layer, struct block_acts *acts)
{
    if (acts->attention.data != NULL) {
        return;
    }
    make_qkv(model, layer, acts);
    const struct attention attention = attention_of(model, layer);
    acts->attention = reserve_rows(model, "attention", attention_width(model->spec));
    acts->lse = workspace_reserve(model->workspace, "lse", CATEGORY_ACTIVATIONS,
                                  micro_rows(model) * model->spec->n_heads * sizeof(float));
    model->ops->attention_forward(model->ops, &attention, acts->attention.data, acts->lse.data,
                                  acts->qkv.data);
}

static void make_x1(struct model_context *model, uint32_t layer, struct block_acts *acts)
{
    if (acts->x1.data != NULL) {
        return;
    }
    make_attention(model, layer, acts);
    const struct model_spec *spec = model->spec;
    acts->x1 = reserve_rows(model, "residual", spec->width);
    model_matmul(model, (struct matmul){.form = MATMUL_NT,
                                        .m = micro_rows(model),
                                        .n = spec->width,
                                        .k = attention_width(spec),
                                        .a = acts->attention.data,
                                        .b = weight(model, layer, BLOCK_OUT_WEIGHT),
                                        .bias = weight(model, layer, BLOCK_OUT_BIAS),
                                        .c = acts->x1.data});
    const struct dropout dropout =
        model_dropout(model, spec->dropout_residual, layer, RANDOM_ATTENTION_OUT_DROPOUT);
    model->ops->residual_dropout(model->ops, acts->x1.data, acts->x0, acts->x1.data,
                                 micro_rows(model), spec->width, &dropout);
}

static void make_norm2(struct model_context *model, uint32_t layer, struct block_acts *acts)
{
    if (acts->norm2.data != NULL) {
        return;
    }
    make_x1(model, layer, acts);
    const struct model_spec *spec = model->spec;
    acts->norm2 = reserve_rows(model, "norm2", spec->width);
    if (spec->norm == NORM_LAYER) {
        acts->mean2 = reserve_stats(model, "mean2");
    }
    acts->rstd2 = reserve_stats(model, "rstd2");
    model->ops->norm_forward(model->ops, spec->norm, acts->norm2.data, acts->mean2.data,
                             acts->rstd2.data, acts->x1.data,
                             weight(model, layer, BLOCK_NORM2_WEIGHT),
                             weight(model, layer, BLOCK_NORM2_BIAS), micro_rows(model), spec->width,
                             spec->norm_eps);
}

static void make_up(struct model_context *model, uint32_t layer, struct block_acts *acts)
{
    if (acts->up.data != NULL) {
        return;
    }
    make_norm2(model, layer, acts);
    const struct model_spec *spec = model->spec;
    acts->up = reserve_rows(model, "up", up_width(spec));
    model_matmul(model, (struct matmul){.form = MATMUL_NT,
                                        .m = micro_rows(model),
                                        .n = up_width(spec),
                                        .k = spec->width,
                                        .a = acts->norm2.data,
                                        .b = weight(model, layer, BLOCK_UP_WEIGHT),
                                        .bias = weight(model, layer, BLOCK_UP_BIAS),
                                        .c = acts->up.data});
}

static void make_act(struct model_context *model, uint32_t layer, struct block_acts *acts)
{
    if (acts->act.data != NULL) {
        return;
    }
    make_up(model, layer, acts);
    const struct model_spec *spec = model->spec;
    acts->act = reserve_rows(model, "act", spec->inner);
    model->ops->activation_forward(model->ops, spec->activation, acts->act.data, acts->up.data,
                                   micro_rows(model), spec->inner);
}

/* ---- forward ---- */

/* A block's operations are the same in every step, so a device may capture them. Forward comes by
 * a second time, with other buffers, where backward recomputes it. */
enum block_pass { PASS_FORWARD, PASS_RECOMPUTE, PASS_BACKWARD };

static void begin_block(struct model_context *model, uint32_t layer, enum block_pass pass)
{
    model->workspace->layer = (int)layer;
    atomic_store_explicit(&model->telemetry->layer, (int)layer, memory_order_relaxed);
    params_gather(model->params, layer + 1);
    const struct body body = {
        .section = (uint32_t)model->workspace->section,
        .layer = layer,
        .pass = pass,
        .step = model->micro.step,
        .first_sample = model->micro.first_sample,
    };
    ops_body_begin(model->ops, &body);
}

static void end_block(struct model_context *model, uint32_t layer)
{
    params_release(model->params, layer + 1);
    model->workspace->layer = -1;
    atomic_store_explicit(&model->telemetry->layer, -1, memory_order_relaxed);
}

void block_forward(struct model_context *model, uint32_t layer, struct block_acts *acts,
                   struct recompute_keep keep, void *x2)
{
    struct workspace *workspace = model->workspace;
    const struct model_spec *spec = model->spec;
    begin_block(model, layer,
                workspace->phase == PHASE_BACKWARD ? PASS_RECOMPUTE : PASS_FORWARD);
    make_qkv(model, layer, acts);
    if (!keep.norm1) {
        drop_norm(model, &acts->norm1, &acts->mean1, &acts->rstd1);
    }
    make_attention(model, layer, acts);
    if (!keep.qkv) {
        workspace_release(workspace, &acts->qkv);
    }
    make_x1(model, layer, acts);
    if (!keep.attention) {
        workspace_release(workspace, &acts->attention);
        workspace_release(workspace, &acts->lse);
    }
    make_up(model, layer, acts);
    if (!keep.norm2) {
        drop_norm(model, &acts->norm2, &acts->mean2, &acts->rstd2);
    }
    make_act(model, layer, acts);
    if (!keep.up) {
        workspace_release(workspace, &acts->up);
    }
    model_matmul(model, (struct matmul){.form = MATMUL_NT,
                                        .m = micro_rows(model),
                                        .n = spec->width,
                                        .k = spec->inner,
                                        .a = acts->act.data,
                                        .b = weight(model, layer, BLOCK_DOWN_WEIGHT),
                                        .bias = weight(model, layer, BLOCK_DOWN_BIAS),
                                        .c = x2});
    const struct dropout dropout =
        model_dropout(model, spec->dropout_residual, layer, RANDOM_MLP_OUT_DROPOUT);
    model->ops->residual_dropout(model->ops, x2, acts->x1.data, x2, micro_rows(model), spec->width,
                                 &dropout);
    if (!keep.act) {
        workspace_release(workspace, &acts->act);
    }
    if (!keep.residual) {
        workspace_release(workspace, &acts->x1);
    }
    ops_body_end(model->ops);
    end_block(model, layer);
}

/* ---- backward ---- */

/* Gradients of one linear layer y = x W^T + b: dW, db and, into dx, dy W. */
struct linear_backward {
    size_t in, out;
    const void *dy, *x, *weight;
    void *dx;
    float *dweight, *dbias; /* dbias NULL without a bias */
};

static void weight_backward(struct model_context *model, const struct linear_backward *linear)
{
    model_matmul(model, (struct matmul){.form = MATMUL_TN,
                                        .m = linear->out,
                                        .n = linear->in,
                                        .k = micro_rows(model),
                                        .a = linear->dy,
                                        .b = linear->x,
                                        .c = linear->dweight,
                                        .c_fp32 = true});
    if (linear->dbias != NULL) {
        model->ops->bias_backward(model->ops, linear->dbias, linear->dy, micro_rows(model),
                                  linear->out);
    }
}

static void input_backward(struct model_context *model, const struct linear_backward *linear)
{
    model_matmul(model, (struct matmul){.form = MATMUL_NN,
                                        .m = micro_rows(model),
                                        .n = linear->in,
                                        .k = linear->out,
                                        .a = linear->dy,
                                        .b = linear->weight,
                                        .c = linear->dx});
}

static float *gradient(const struct model_context *model, const struct unit_grad *grad,
                       enum block_slot slot)
{
    const size_t offset = model->units->block_slots[slot];
    return offset == SIZE_MAX ? NULL : grad->data + offset;
}

/* The gradient behind a dropout: dx itself when nothing was dropped, so nothing is copied. */
static const void *branch_gradient(struct model_context *model, struct buffer *buffer,
                                   const void *dx, uint32_t layer, enum random_use use)
{
    const struct dropout dropout = model_dropout(model, model->spec->dropout_residual, layer, use);
    if (dropout.p == 0.0f) {
        return dx;
    }
    *buffer = reserve_rows(model, "branch_grad", model->spec->width);
    model->ops->dropout_backward(model->ops, buffer->data, dx, micro_rows(model),
                                 model->spec->width, &dropout);
    return buffer->data;
}

static void mlp_backward(struct model_context *model, uint32_t layer, struct block_acts *acts,
                         void *dx, struct unit_grad *grad)
{
    struct workspace *workspace = model->workspace;
    const struct model_spec *spec = model->spec;
    make_act(model, layer, acts);
    struct buffer branch = {0};
    const void *dy = branch_gradient(model, &branch, dx, layer, RANDOM_MLP_OUT_DROPOUT);
    struct linear_backward down = {.in = spec->inner,
                                   .out = spec->width,
                                   .dy = dy,
                                   .x = acts->act.data,
                                   .weight = weight(model, layer, BLOCK_DOWN_WEIGHT),
                                   .dweight = gradient(model, grad, BLOCK_DOWN_WEIGHT),
                                   .dbias = gradient(model, grad, BLOCK_DOWN_BIAS)};
    weight_backward(model, &down);
    workspace_release(workspace, &acts->act);
    struct buffer dact = reserve_rows(model, "act_grad", spec->inner);
    down.dx = dact.data;
    input_backward(model, &down);
    workspace_release(workspace, &branch);

    make_up(model, layer, acts);
    void *dup = acts->up.data; /* in place: `up` is not read again */
    model->ops->activation_backward(model->ops, spec->activation, dup, dact.data, acts->up.data,
                                    micro_rows(model), spec->inner);
    workspace_release(workspace, &dact);
    make_norm2(model, layer, acts);
    struct linear_backward up = {.in = spec->width,
                                 .out = up_width(spec),
                                 .dy = dup,
                                 .x = acts->norm2.data,
                                 .weight = weight(model, layer, BLOCK_UP_WEIGHT),
                                 .dweight = gradient(model, grad, BLOCK_UP_WEIGHT),
                                 .dbias = gradient(model, grad, BLOCK_UP_BIAS)};
    weight_backward(model, &up);
    /* norm2 has been read for the last time: its place takes its own gradient. */
    up.dx = acts->norm2.data;
    input_backward(model, &up);
    workspace_release(workspace, &acts->up);
    model->ops->norm_backward(model->ops, spec->norm, dx, gradient(model, grad, BLOCK_NORM2_WEIGHT),
                              gradient(model, grad, BLOCK_NORM2_BIAS), acts->norm2.data,
                              acts->x1.data, weight(model, layer, BLOCK_NORM2_WEIGHT),
                              acts->mean2.data, acts->rstd2.data, micro_rows(model), spec->width);
    drop_norm(model, &acts->norm2, &acts->mean2, &acts->rstd2);
    workspace_release(workspace, &acts->x1);
}

static void attention_backward(struct model_context *model, uint32_t layer,
                               struct block_acts *acts, void *dx, struct unit_grad *grad)
{
    struct workspace *workspace = model->workspace;
    const struct model_spec *spec = model->spec;
    make_attention(model, layer, acts);
    struct buffer branch = {0};
    const void *dy = branch_gradient(model, &branch, dx, layer, RANDOM_ATTENTION_OUT_DROPOUT);
    struct linear_backward out = {.in = attention_width(spec),
                                  .out = spec->width,
                                  .dy = dy,
                                  .x = acts->attention.data,
                                  .weight = weight(model, layer, BLOCK_OUT_WEIGHT),
                                  .dweight = gradient(model, grad, BLOCK_OUT_WEIGHT),
                                  .dbias = gradient(model, grad, BLOCK_OUT_BIAS)};
    weight_backward(model, &out);
    struct buffer dattention = reserve_rows(model, "attention_grad", attention_width(spec));
    out.dx = dattention.data;
    input_backward(model, &out);
    workspace_release(workspace, &branch);

    struct buffer dqkv = reserve_rows(model, "qkv_grad", spec_qkv_width(spec));
    struct buffer delta = workspace_reserve(workspace, "delta", CATEGORY_TEMP,
                                            micro_rows(model) * spec->n_heads * sizeof(float));
    const struct attention attention = attention_of(model, layer);
    model->ops->attention_backward(model->ops, &attention, dqkv.data, delta.data, dattention.data,
                                   acts->attention.data, acts->lse.data, acts->qkv.data);
    workspace_release(workspace, &delta);
    workspace_release(workspace, &dattention);
    workspace_release(workspace, &acts->attention);
    workspace_release(workspace, &acts->lse);
    workspace_release(workspace, &acts->qkv);
    if (!spec->learned_positions) {
        model->ops->rotary(model->ops, dqkv.data, model->positions, &model->rotary,
                           micro_rows(model), spec->n_heads, spec->n_kv_heads, spec->head_dim, -1);
    }
    make_norm1(model, layer, acts);
    struct linear_backward qkv = {.in = spec->width,
                                  .out = spec_qkv_width(spec),
                                  .dy = dqkv.data,
                                  .x = acts->norm1.data,
                                  .weight = weight(model, layer, BLOCK_QKV_WEIGHT),
                                  .dx = acts->norm1.data, /* after its last use, see below */
                                  .dweight = gradient(model, grad, BLOCK_QKV_WEIGHT),
                                  .dbias = gradient(model, grad, BLOCK_QKV_BIAS)};
    weight_backward(model, &qkv);
    input_backward(model, &qkv);
    workspace_release(workspace, &dqkv);
    model->ops->norm_backward(model->ops, spec->norm, dx, gradient(model, grad, BLOCK_NORM1_WEIGHT),
                              gradient(model, grad, BLOCK_NORM1_BIAS), acts->norm1.data, acts->x0,
                              weight(model, layer, BLOCK_NORM1_WEIGHT), acts->mean1.data,
                              acts->rstd1.data, micro_rows(model), spec->width);
    drop_norm(model, &acts->norm1, &acts->mean1, &acts->rstd1);
}

void block_backward(struct model_context *model, uint32_t layer, struct block_acts *acts, void *dx,
                    bool first_micro_step)
{
    begin_block(model, layer, PASS_BACKWARD);
    struct unit_grad grad = grads_begin(model->grads, layer + 1, first_micro_step);
    mlp_backward(model, layer, acts, dx, &grad);
    attention_backward(model, layer, acts, dx, &grad);
    ops_body_end(model->ops); /* sums over ranks are no part of it */
    grads_end(model->grads, layer + 1, &grad);
    end_block(model, layer);
}
