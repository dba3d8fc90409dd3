/* The decoder: embedding, blocks, head and loss; forward, backward, evaluation.
 *
 * The fused head computes loss and its gradient tile by tile in forward, so logits never exist
 * for more than `loss_tile` tokens. Main thread. */
#ifndef BALLAST_WORKER_MODEL_DECODER_H
#define BALLAST_WORKER_MODEL_DECODER_H

#include "worker/model/block.h"

/* Token ids, labels and positions of a micro-batch, on the device. */
struct decoder_input {
    struct buffer tokens, labels, positions; /* (N) int32 each */
};

/* What forward leaves for backward. */
/* A block input between device and host. */
struct decoder_journey {
    struct ticket ticket;
    uint32_t layer;
    bool on_its_way;
};

struct decoder_state {
    struct decoder_input input;
    struct buffer *residual; /* borrowed scratch, L+1: the stream before and after each block */
    struct block_acts *acts; /* borrowed scratch, L */
    struct buffer final_mean, final_rstd;
    struct buffer final_grad; /* (N,H) gradient of the final norm's output */
    struct unit_grad head_grad;
    struct unit_grad table_grad; /* a tied head began the embedding's gradient */
    struct decoder_journey leaving, coming;
};

/* Forward of a training micro-batch. grad_scale = 1 / valid labels of the whole step.
 * *out_loss += the sum of the per-token losses, unscaled. */
enum status decoder_forward(struct model_context *model, struct device *device,
                            const struct strategy *strategy, struct decoder_state *state,
                            bool first_micro_step, float grad_scale, double *out_loss,
                            struct failure *why) MUST_CHECK;
enum status decoder_backward(struct model_context *model, const struct strategy *strategy,
                             struct decoder_state *state, bool first_micro_step,
                             struct failure *why) MUST_CHECK;
/* Forward without gradients; keeps nothing. *out_loss += the sum of the per-token losses. */
enum status decoder_evaluate(struct model_context *model, struct device *device,
                             const struct strategy *strategy, struct decoder_state *state,
                             double *out_loss, struct failure *why) MUST_CHECK;

#endif
