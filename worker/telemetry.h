/* Where this rank is, as atomics that the link thread reads without stopping the step.
 *
 * Written by the main thread only. */
#ifndef BALLAST_WORKER_TELEMETRY_H
#define BALLAST_WORKER_TELEMETRY_H

#include <stdatomic.h>
#include <stdint.h>
#include "proto/account.h"

struct telemetry {
    _Atomic int phase;            /* enum phase */
    _Atomic uint64_t step;        /* in progress */
    _Atomic uint32_t micro_step;
    _Atomic int layer;            /* -1 outside the blocks */
    _Atomic uint64_t heartbeat;   /* grows with every operation of the main thread */
    _Atomic uint64_t bytes[N_TIERS][N_CATEGORIES]; /* the ledger's live bytes */
    _Atomic uint64_t committed_bytes;              /* device tier */
    _Atomic uint64_t limit_bytes;
    _Atomic uint64_t driver_bytes; /* this process on its GPU as the driver counts; 0: not known */
    int wake_fd;                  /* eventfd to poke the link thread; -1: none */
};

/* Set the phase and wake the link thread, so that the daemon knows the true phase even when this
 * process dies in it. */
void telemetry_phase(struct telemetry *telemetry, enum phase phase);

#endif
