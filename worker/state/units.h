/* Units: how parameters are laid out.
 *
 * Unit 0 is the embedding, units 1..L are the blocks, unit L+1 is the head. A unit is one flat
 * fp32 buffer holding its tensors one after another, each starting at a multiple of
 * UNIT_ALIGN_ELEMS, padded so that every rank owns an equal slice of a multiple of
 * UNIT_SLICE_ELEMS. A tied head is no tensor of its own: the table stays in unit 0.
 * Group flags (weight decay) belong to the tensor, so they survive slicing. Pure but for the
 * heap. */
#ifndef BALLAST_WORKER_STATE_UNITS_H
#define BALLAST_WORKER_STATE_UNITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"
#include "worker/model/spec.h"

enum { UNIT_ALIGN_ELEMS = 64, UNIT_SLICE_ELEMS = 256, TENSOR_NAME_BYTES = 80 };

/* Places inside a block's unit. q, k, v lie next to each other, so one product serves all
 * three; so do gate and up. */
enum block_slot {
    BLOCK_NORM1_WEIGHT,
    BLOCK_NORM1_BIAS,
    BLOCK_QKV_WEIGHT,
    BLOCK_QKV_BIAS,
    BLOCK_OUT_WEIGHT,
    BLOCK_OUT_BIAS,
    BLOCK_NORM2_WEIGHT,
    BLOCK_NORM2_BIAS,
    BLOCK_UP_WEIGHT, /* SwiGLU: gate rows, then up rows */
    BLOCK_UP_BIAS,
    BLOCK_DOWN_WEIGHT,
    BLOCK_DOWN_BIAS,
    N_BLOCK_SLOTS
};
enum embed_slot { EMBED_TOKENS, EMBED_POSITIONS, N_EMBED_SLOTS };
enum head_slot { HEAD_NORM_WEIGHT, HEAD_NORM_BIAS, HEAD_WEIGHT, N_HEAD_SLOTS };
enum { N_SLOTS = N_BLOCK_SLOTS };

enum init_kind { INIT_NORMAL, INIT_ONES, INIT_ZEROS };

/* A logical tensor, by Hugging Face's name; matrices are (out, in). */
struct tensor {
    char name[TENSOR_NAME_BYTES];
    uint32_t unit;
    size_t offset; /* elements from the unit's start */
    size_t rows, cols; /* rows = 1 for vectors */
    bool decay;
    enum init_kind init;
    float init_std;
};

struct unit {
    size_t offset;       /* elements, unit-major, in `params` and `grads` */
    size_t n_elems;      /* padded: world_size * slice_elems */
    size_t slice_elems;
    size_t slice_offset; /* elements of this unit's slice inside a rank's block, slice-major */
    uint32_t first_tensor, n_tensors;
};

struct units {
    const struct model_spec *spec; /* borrowed */
    uint32_t world_size;
    uint32_t n_units;
    struct unit *units;     /* owned */
    struct tensor *tensors; /* owned */
    uint32_t n_tensors;
    size_t n_elems;         /* of all units, padded */
    size_t block_elems;     /* of one rank's slices of all units */
    /* Element offset of each slot inside its unit; SIZE_MAX when the model has no such tensor. */
    size_t block_slots[N_BLOCK_SLOTS];
    size_t embed_slots[N_EMBED_SLOTS];
    size_t head_slots[N_HEAD_SLOTS];
};

enum status units_init(struct units *units, const struct model_spec *spec, uint32_t world_size,
                       struct failure *why) MUST_CHECK;
void units_fini(struct units *units);
/* NULL when the model has no tensor of this name. */
const struct tensor *units_find(const struct units *units, const char *name);
static inline uint32_t units_head(const struct units *units)
{
    return units->n_units - 1;
}
/* Elements of gaps between and behind the tensors of a unit: called for each, in order. */
void units_each_gap(const struct units *units, uint32_t unit,
                    void (*visit)(void *user, size_t offset, size_t n), void *user);

#endif
