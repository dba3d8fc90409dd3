/* One transformer block: forward, recomputation, backward.
 *
 *   n1 = norm1(x0)            qkv = n1 Wqkv (+b), rotated     a = attention(qkv)
 *   x1 = x0 + drop(a Wo (+b)) n2 = norm2(x1)                  u = n2 Wup (+b)
 *   g = act(u)                x2 = x1 + drop(g Wdown (+b))
 *
 * Each activation is made by one function that first asks for what it needs. Forward
 * calls them in order and drops what is not kept; backward asks for what it reads, and whatever was
 * dropped is made again by the very same calls, so recomputation repeats the forward
 * bit for bit. Main thread. */
#ifndef BALLAST_WORKER_MODEL_BLOCK_H
#define BALLAST_WORKER_MODEL_BLOCK_H

#include "kernels/philox.h"
#include "worker/memory/workspace.h"
#include "worker/model/recompute.h"
#include "worker/model/spec.h"
#include "worker/state/grads.h"
#include "worker/state/params.h"

/* One micro-batch's shape and where it stands in the run. */
struct micro_batch {
    size_t batch, seq_len;  /* B, T */
    uint32_t micro_step;
    uint32_t step;          /* optimizer step */
    uint32_t first_sample;  /* index of row 0 in the global batch */
    uint64_t seed;
    bool train;             /* dropout is on */
};

/* What the model's functions work with; borrowed parts of the training. */
struct model_context {
    const struct model_spec *spec;
    const struct units *units;
    struct params *params;
    struct grads *grads;
    struct ops *ops;
    struct comm *comm; /* progress only */
    struct workspace *workspace;
    struct telemetry *telemetry;
    struct rotary rotary;
    struct micro_batch micro;
    const int32_t *positions; /* (N), device */
};

/* Tokens of the micro-batch at hand. */
static inline size_t micro_rows(const struct model_context *model)
{
    return model->micro.batch * model->micro.seq_len;
}
/* Bytes of (N, cols) activations. */
static inline size_t activation_bytes(const struct model_context *model, size_t cols)
{
    return micro_rows(model) * cols * model->ops->elem_bytes;
}
/* A matrix product with planned scratch. */
void model_matmul(struct model_context *model, struct matmul call);
/* Dropout of this layer and use for the micro-batch at hand; p = 0 outside training. */
struct dropout model_dropout(const struct model_context *model, float p, uint32_t layer,
                             enum random_use use);

struct block_acts {
    const void *x0; /* borrowed: the block's input */
    struct buffer norm1, mean1, rstd1;
    struct buffer qkv;
    struct buffer attention, lse;
    struct buffer x1;
    struct buffer norm2, mean2, rstd2;
    struct buffer up, act;
};

/* x2 = block(x0), written to `x2` (N,H), reserved by the caller before the call. Leaves in `acts`
 * what `keep` says. */
void block_forward(struct model_context *model, uint32_t layer, struct block_acts *acts,
                   struct recompute_keep keep, void *x2);
/* dx(N,H) holds the gradient of x2 and is turned into that of x0. Makes what `acts` lacks
 * and leaves it empty. x0 must be there. */
void block_backward(struct model_context *model, uint32_t layer, struct block_acts *acts, void *dx,
                    bool first_micro_step);

#endif
