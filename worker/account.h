/* The memory account for a person: what the plan says, phase by phase and category by
 * category, against the limit. Main thread. */
#ifndef BALLAST_WORKER_ACCOUNT_H
#define BALLAST_WORKER_ACCOUNT_H

#include <stdio.h>
#include "worker/rehearsal.h"

struct account_view {
    const struct model_spec *spec;
    const struct training_options *options;
    const struct strategy *strategy;
    const struct plan *plan;
    const struct rehearsal_cost *cost;
    uint64_t limit_bytes; /* per rank, 0: none */
    enum dtype dtype;     /* compute type */
};

void account_print(const struct account_view *view, FILE *out);
/* One JSON object on one line. OUT_OF_MEMORY. */
enum status account_print_json(const struct account_view *view, FILE *out,
                               struct failure *why) MUST_CHECK;

#endif
