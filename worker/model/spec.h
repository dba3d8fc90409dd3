/* What a model is: shapes and switches, read from Hugging Face's config.json keys or a preset.
 *
 * A plain value; pure; any thread. Weights are not its business. */
#ifndef BALLAST_WORKER_MODEL_SPEC_H
#define BALLAST_WORKER_MODEL_SPEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/ops.h"
#include "proto/base/status.h"

enum family { FAMILY_GPT2, FAMILY_LLAMA };

enum { SPEC_NAME_BYTES = 64, SPEC_MAX_LAYERS = 4095 };

struct model_spec {
    char name[SPEC_NAME_BYTES]; /* preset or folder name */
    enum family family;
    uint32_t n_layers;      /* L, 1..SPEC_MAX_LAYERS */
    uint32_t width;         /* H */
    uint32_t n_heads;       /* nh */
    uint32_t n_kv_heads;    /* nkv, divides nh */
    uint32_t head_dim;      /* hd; even when rotary */
    uint32_t inner;         /* F */
    uint32_t vocab;         /* V */
    uint32_t max_positions; /* longest sequence */
    enum norm_kind norm;
    enum activation_kind activation;
    bool learned_positions; /* else rotary */
    bool attention_bias, attention_out_bias, mlp_bias;
    bool tied; /* head shares the embedding table */
    float norm_eps;
    float rope_theta;
    float init_std;
    float dropout_embed, dropout_attention, dropout_residual; /* 0 <= p < 1 */
};

/* "gpt2-124m", "llama-tiny-bytes", ...; NOT_FOUND lists the presets. */
enum status spec_preset(const char *name, struct model_spec *out_spec,
                        struct failure *why) MUST_CHECK;
/* NULL-terminated list of preset names. */
const char *const *spec_preset_names(void);
/* Read DIR/config.json (families gpt2 and llama). Unknown architecture, rope type,
 * activation, missing or out-of-range keys: a failure naming file, key, value and limit. */
enum status spec_from_folder(const char *folder, struct model_spec *out_spec,
                             struct failure *why) MUST_CHECK;
/* A preset name or a folder, whichever exists. */
enum status spec_load(const char *model, struct model_spec *out_spec,
                      struct failure *why) MUST_CHECK;
/* Consistency of all fields; names field, value and limit. */
enum status spec_check(const struct model_spec *spec, struct failure *why) MUST_CHECK;

uint64_t spec_n_parameters(const struct model_spec *spec); /* tied table once */
/* Parameters that take part in matrix products (head once, embeddings not). */
uint64_t spec_n_matmul_parameters(const struct model_spec *spec);
/* 6 N_matmul + 6 L (nh hd) T: forward and backward, causal attention, no recomputation. */
double spec_flops_per_token(const struct model_spec *spec, uint32_t seq_len);
uint32_t spec_qkv_width(const struct model_spec *spec); /* (nh + 2 nkv) hd */

#endif
