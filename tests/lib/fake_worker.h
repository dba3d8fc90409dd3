/* A rank as the daemon sees it: speaks link.proto over the link socket, computes nothing.
 *
 * Blocking with deadlines; one thread. For tests of the daemon. */
#ifndef BALLAST_TESTS_LIB_FAKE_WORKER_H
#define BALLAST_TESTS_LIB_FAKE_WORKER_H

#include <stdbool.h>
#include <stdint.h>
#include "proto/account.h"
#include "proto/base/status.h"
#include "proto/frame.h"
#include "proto/link.pb-c.h"
#include "proto/strategy.h"

struct fake_worker {
    int fd; /* -1: not linked */
    uint32_t rank;
    struct frame_reader reader; /* owned */
    struct strategy strategy;
    struct strategy_limits limits;
    uint64_t step, generation;
    const char *oom_time; /* of the next report; NULL: none is told */
    char error[256]; /* why the daemon refused the link */
};

struct fake_hello {
    const char *link_path;
    const char *run_id;
    uint32_t rank, world_size;
    uint64_t n_steps;
    uint64_t step, generation;
    int32_t pid;
    bool restarted;
    uint32_t major; /* 0: the right one */
};

/* Connect, greet and wait up to 5 s for the daemon's answer. REFUSED: see `error`. */
enum status fake_worker_link(struct fake_worker *worker, const struct fake_hello *hello) MUST_CHECK;
/* Close the link; what a dying process does. Closing twice is fine. */
void fake_worker_drop(struct fake_worker *worker);

enum status fake_worker_send(struct fake_worker *worker,
                             const Ballast__Link__V1__WorkerMessage *message) MUST_CHECK;
/* The next message of the daemon; frame_free() it. DEADLINE, LINK_LOST. */
enum status fake_worker_receive(struct fake_worker *worker, int timeout_ms,
                                Ballast__Link__V1__DaemonMessage **out_message) MUST_CHECK;

/* What a rank tells. */
enum status fake_worker_tell_rank(struct fake_worker *worker, enum phase phase,
                                  uint64_t step) MUST_CHECK;
enum status fake_worker_tell_step(struct fake_worker *worker, uint64_t step,
                                  double loss) MUST_CHECK;
enum status fake_worker_tell_run(struct fake_worker *worker, bool paused, const char *doing,
                                 bool with_plan) MUST_CHECK;
enum status fake_worker_tell_event(struct fake_worker *worker, const char *type, const char *text,
                                   const char *details_json) MUST_CHECK;
enum status fake_worker_tell_oom(struct fake_worker *worker, enum phase phase) MUST_CHECK;
enum status fake_worker_tell_end(struct fake_worker *worker, uint32_t exit_code) MUST_CHECK;
enum status fake_worker_tell_result(struct fake_worker *worker, uint64_t command_id,
                                    enum status status, const char *text, bool final) MUST_CHECK;

#endif
