/* What the link says by itself: who this rank is, where it is, what it holds.
 *
 * Reads the telemetry's and the comm's atomics and the kernel's view of this process. Link
 * thread only. */
#ifndef BALLAST_WORKER_LINK_STATE_H
#define BALLAST_WORKER_LINK_STATE_H

#include <stdbool.h>
#include "proto/base/status.h"
#include "worker/link.h"
#include "worker/link_queue.h"

enum { LINK_HOST_BYTES = 65 };

/* Where the rank was when it was last reported. */
struct link_place {
    int phase;
    uint64_t step;
    uint32_t micro_step;
};

struct link_place link_place_now(const struct telemetry *telemetry);
bool link_place_same(struct link_place a, struct link_place b);

/* The greeting; rank 0's run fields come from fill_hello. */
enum status link_encode_hello(const struct link_options *options, const char *host, bool restarted,
                              struct link_frame *out_frame) MUST_CHECK;
/* A RankState; statm_fd is /proc/self/statm (-1: unknown). out_place is what it says. */
enum status link_encode_state(const struct link_options *options, const char *host, int statm_fd,
                              struct link_frame *out_frame,
                              struct link_place *out_place) MUST_CHECK;
enum status link_encode(const Ballast__Link__V1__WorkerMessage *message,
                        struct link_frame *out_frame) MUST_CHECK;

#endif
