/* Where the training state lies under a strategy: which parts there are, and what of each a rank
 * holds. Pure; any thread.
 *
 *   part            layout        stage 0   1       2       3
 *   params          unit-major    whole     whole   whole   -
 *   params_shard    own slices    -         -       -       mine
 *   master, moments slice-major   whole     mine    mine    mine
 *   grads           unit-major    whole     whole   (1)     (1)
 *   grads_shard     own slices    -         -       (2)     (2)
 *
 * (1) only while whole sums have to wait for the last micro-step: grad_sync=last with more than
 * one micro-step. (2) otherwise. `master` exists when the compute type is not fp32; in fp32 the
 * parameters are their own master.
 *
 * With offload.optimizer=cpu the optimizer's states (master and moments) of the last units, as
 * many as the fraction asks for, lie on the host, at the same places of an address range of its
 * own. With offload.params=cpu params or params_shard lie there whole, and a unit comes to the
 * device for its use only. `staging` is what updates on the host go through. `inputs` are block
 * inputs that wait for backward on the host; how many there are the model says.
 *
 * Slice-major parts are N blocks, each starting at a granule: block r holds slice r of every unit,
 * so changing between `whole` and `mine` moves nothing. */
#ifndef BALLAST_WORKER_STATE_LAYOUT_H
#define BALLAST_WORKER_STATE_LAYOUT_H

#include "kernels/ops.h"
#include "proto/account.h"
#include "proto/strategy.h"
#include "worker/memory/region.h"
#include "worker/state/units.h"

enum state_part {
    PART_PARAMS,
    PART_PARAMS_SHARD,
    PART_MASTER,
    PART_GRADS,
    PART_GRADS_SHARD,
    PART_MOMENT_M,
    PART_MOMENT_V,
    PART_STAGING, /* these two on the host only */
    PART_INPUTS,
    N_STATE_PARTS
};
const char *part_name(enum state_part part);
enum category part_category(enum state_part part);

/* What does not change while a run lives. */
struct layout_facts {
    const struct units *units; /* borrowed */
    enum dtype dtype;          /* compute type */
    uint32_t rank;
    size_t granule_bytes;
    const struct strategy_limits *limits; /* borrowed */
};

struct part_layout {
    size_t reserve_bytes;   /* of address space; 0: no strategy has this part */
    struct extent extent;   /* committed on the device */
    size_t used_bytes;
    struct extent host;     /* committed on the host */
    size_t host_bytes;      /* used there */
};

struct layout {
    struct part_layout parts[N_STATE_PARTS];
    size_t block_bytes;   /* of fp32 slice-major parts */
    bool params_whole;    /* params, not params_shard */
    bool params_host;     /* and on the host */
    bool states_whole;    /* master and moments of all slices */
    bool grads_whole;     /* grads, not grads_shard */
    bool reduce_each;     /* gradients are summed over ranks after every micro-step */
    uint32_t first_host;  /* the optimizer states of this unit and later ones are on the host */
    size_t host_prefix;   /* elements of a block before them */
    size_t inputs_most;   /* bytes of block inputs under the largest micro-batch */
    size_t staging_elems; /* of a staging buffer; 0: nothing that is updated is on the host */
};

void layout_of(const struct layout_facts *facts, const struct strategy *strategy,
               struct layout *out_layout);
/* Staging buffers: gradients and results, two of each. */
enum { STAGING_BUFFERS = 4, STAGING_MAX_ELEMS = 1 << 20 };
/* Room on the host for block inputs that wait for backward there. */
void layout_add_inputs(const struct layout_facts *facts, size_t bytes, struct layout *layout);
/* Bytes that a rank commits on the device under it, and in a switch while it holds both. */
size_t layout_committed(const struct layout *layout);
size_t layout_committed_both(const struct layout *a, const struct layout *b);
/* What `b` commits on the host beyond `a`. */
size_t layout_host_missing(const struct layout *a, const struct layout *b);

#endif
