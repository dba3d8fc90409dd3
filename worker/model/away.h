/* Block inputs that wait for backward on the host (offload.activations).
 *
 * After its block's forward an input leaves; while the next block computes it is on its way, then
 * its place on the device is free. Backward fetches each one group ahead. Main thread. */
#ifndef BALLAST_WORKER_MODEL_AWAY_H
#define BALLAST_WORKER_MODEL_AWAY_H

#include "worker/model/decoder.h"

/* The input of `layer` leaves, if the strategy wants it to; the one before it is gone then. */
enum status away_send(struct model_context *model, struct decoder_state *state,
                      const struct strategy *strategy, uint32_t layer,
                      struct failure *why) MUST_CHECK;
/* The last one is gone. */
enum status away_sent(struct model_context *model, struct decoder_state *state,
                      struct failure *why) MUST_CHECK;
/* Start fetching the highest input that is away, of the layers below `end`. */
enum status away_fetch(struct model_context *model, struct decoder_state *state,
                       const struct strategy *strategy, uint32_t end,
                       struct failure *why) MUST_CHECK;
/* The input of `layer` is needed: it is here, if it was away. */
enum status away_arrive(struct model_context *model, struct decoder_state *state,
                        const struct strategy *strategy, uint32_t layer,
                        struct failure *why) MUST_CHECK;

#endif
