/* The global gradient norm and the clipping factor.
 *
 * The norm is the square root of fp64 partial sums per (unit, slice), added in that order whatever
 * the ZeRO stage, so every stage clips alike. Main thread. */
#ifndef BALLAST_WORKER_STATE_CLIP_H
#define BALLAST_WORKER_STATE_CLIP_H

#include "worker/state/grads.h"

/* *out_norm over all parameters, once each; not finite when a gradient is not. */
/* Collective where a rank holds the sums of its own slices only. */
enum status clip_norm(struct grads *grads, struct device *device, double *out_norm,
                      struct failure *why) MUST_CHECK;
/* 1 below the limit (or without one), limit / norm above it. Pure. */
double clip_factor(double norm, double limit);

#endif
