/* The layout of parameters. See units.h. */
#include "worker/state/units.h"
#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"

/* Lays tensors into one unit after another. A first pass with no arrays counts them. */
struct layout {
    struct units *units;
    uint32_t unit;
    size_t at; /* next free element of the unit */
    uint32_t n_tensors;
};

struct shape {
    size_t rows, cols;
    bool decay;
    enum init_kind init;
    float init_std;
};

static struct shape matrix(size_t rows, size_t cols, float std)
{
    return (struct shape){rows, cols, true, INIT_NORMAL, std};
}

static struct shape vector(size_t n, enum init_kind init)
{
    return (struct shape){1, n, false, init, 0.0f};
}

__attribute__((format(printf, 3, 4))) static void add_tensor(struct layout *layout,
                                                             struct shape shape,
                                                             const char *format, ...)
{
    if (layout->units->tensors != NULL) {
        struct tensor *tensor = &layout->units->tensors[layout->n_tensors];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(tensor->name, sizeof tensor->name, format, arguments);
        va_end(arguments);
        tensor->unit = layout->unit;
        tensor->offset = layout->at;
        tensor->rows = shape.rows;
        tensor->cols = shape.cols;
        tensor->decay = shape.decay;
        tensor->init = shape.init;
        tensor->init_std = shape.init_std;
    }
    layout->n_tensors++;
    layout->at += shape.rows * shape.cols;
}

/* Start a slot: aligned, and its place noted. */
static void open_slot(struct layout *layout, size_t *out_slot)
{
    layout->at = (layout->at + UNIT_ALIGN_ELEMS - 1) / UNIT_ALIGN_ELEMS * UNIT_ALIGN_ELEMS;
    *out_slot = layout->at;
}

static void open_unit(struct layout *layout, uint32_t unit)
{
    layout->unit = unit;
    layout->at = 0;
    if (layout->units->units != NULL) {
        layout->units->units[unit].first_tensor = layout->n_tensors;
    }
}

static void close_unit(struct layout *layout)
{
    if (layout->units->units == NULL) {
        return;
    }
    const size_t step = (size_t)layout->units->world_size * UNIT_SLICE_ELEMS;
    struct unit *unit = &layout->units->units[layout->unit];
    unit->n_elems = (layout->at + step - 1) / step * step;
    unit->slice_elems = unit->n_elems / layout->units->world_size;
    unit->n_tensors = layout->n_tensors - unit->first_tensor;
}

static void lay_embedding(struct layout *layout)
{
    struct units *units = layout->units;
    const struct model_spec *spec = units->spec;
    const bool gpt2 = spec->family == FAMILY_GPT2;
    open_unit(layout, 0);
    open_slot(layout, &units->embed_slots[EMBED_TOKENS]);
    add_tensor(layout, matrix(spec->vocab, spec->width, spec->init_std), "%s",
               gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight");
    if (spec->learned_positions) {
        open_slot(layout, &units->embed_slots[EMBED_POSITIONS]);
        add_tensor(layout, matrix(spec->max_positions, spec->width, spec->init_std),
                   "transformer.wpe.weight");
    }
    close_unit(layout);
}

static void lay_gpt2_block(struct layout *layout, uint32_t layer)
{
    struct units *units = layout->units;
    const struct model_spec *spec = units->spec;
    const size_t h = spec->width;
    const size_t f = spec->inner;
    const float std = spec->init_std;
    /* The two projections that add to the residual stream start smaller, so that its variance does
     * not grow with depth (GPT-2 paper, section 2.3). */
    const float out_std = std / sqrtf(2.0f * (float)spec->n_layers);
    size_t *slots = units->block_slots;
    open_slot(layout, &slots[BLOCK_NORM1_WEIGHT]);
    add_tensor(layout, vector(h, INIT_ONES), "transformer.h.%u.ln_1.weight", layer);
    open_slot(layout, &slots[BLOCK_NORM1_BIAS]);
    add_tensor(layout, vector(h, INIT_ZEROS), "transformer.h.%u.ln_1.bias", layer);
    open_slot(layout, &slots[BLOCK_QKV_WEIGHT]);
    add_tensor(layout, matrix(3 * h, h, std), "transformer.h.%u.attn.c_attn.weight", layer);
    open_slot(layout, &slots[BLOCK_QKV_BIAS]);
    add_tensor(layout, vector(3 * h, INIT_ZEROS), "transformer.h.%u.attn.c_attn.bias", layer);
    open_slot(layout, &slots[BLOCK_OUT_WEIGHT]);
    add_tensor(layout, matrix(h, h, out_std), "transformer.h.%u.attn.c_proj.weight", layer);
    open_slot(layout, &slots[BLOCK_OUT_BIAS]);
    add_tensor(layout, vector(h, INIT_ZEROS), "transformer.h.%u.attn.c_proj.bias", layer);
    open_slot(layout, &slots[BLOCK_NORM2_WEIGHT]);
    add_tensor(layout, vector(h, INIT_ONES), "transformer.h.%u.ln_2.weight", layer);
    open_slot(layout, &slots[BLOCK_NORM2_BIAS]);
    add_tensor(layout, vector(h, INIT_ZEROS), "transformer.h.%u.ln_2.bias", layer);
    open_slot(layout, &slots[BLOCK_UP_WEIGHT]);
    add_tensor(layout, matrix(f, h, std), "transformer.h.%u.mlp.c_fc.weight", layer);
    open_slot(layout, &slots[BLOCK_UP_BIAS]);
    add_tensor(layout, vector(f, INIT_ZEROS), "transformer.h.%u.mlp.c_fc.bias", layer);
    open_slot(layout, &slots[BLOCK_DOWN_WEIGHT]);
    add_tensor(layout, matrix(h, f, out_std), "transformer.h.%u.mlp.c_proj.weight", layer);
    open_slot(layout, &slots[BLOCK_DOWN_BIAS]);
    add_tensor(layout, vector(h, INIT_ZEROS), "transformer.h.%u.mlp.c_proj.bias", layer);
}

static void lay_llama_attention(struct layout *layout, uint32_t layer)
{
    struct units *units = layout->units;
    const struct model_spec *spec = units->spec;
    const size_t h = spec->width;
    const size_t q = (size_t)spec->n_heads * spec->head_dim;
    const size_t kv = (size_t)spec->n_kv_heads * spec->head_dim;
    const float std = spec->init_std;
    size_t *slots = units->block_slots;
    open_slot(layout, &slots[BLOCK_QKV_WEIGHT]);
    add_tensor(layout, matrix(q, h, std), "model.layers.%u.self_attn.q_proj.weight", layer);
    add_tensor(layout, matrix(kv, h, std), "model.layers.%u.self_attn.k_proj.weight", layer);
    add_tensor(layout, matrix(kv, h, std), "model.layers.%u.self_attn.v_proj.weight", layer);
    if (spec->attention_bias) {
        open_slot(layout, &slots[BLOCK_QKV_BIAS]);
        add_tensor(layout, vector(q, INIT_ZEROS), "model.layers.%u.self_attn.q_proj.bias", layer);
        add_tensor(layout, vector(kv, INIT_ZEROS), "model.layers.%u.self_attn.k_proj.bias", layer);
        add_tensor(layout, vector(kv, INIT_ZEROS), "model.layers.%u.self_attn.v_proj.bias", layer);
    }
    open_slot(layout, &slots[BLOCK_OUT_WEIGHT]);
    add_tensor(layout, matrix(h, q, std), "model.layers.%u.self_attn.o_proj.weight", layer);
    if (spec->attention_out_bias) {
        open_slot(layout, &slots[BLOCK_OUT_BIAS]);
        add_tensor(layout, vector(h, INIT_ZEROS), "model.layers.%u.self_attn.o_proj.bias", layer);
    }
}

static void lay_llama_block(struct layout *layout, uint32_t layer)
{
    struct units *units = layout->units;
    const struct model_spec *spec = units->spec;
    const size_t h = spec->width;
    const size_t f = spec->inner;
    const float std = spec->init_std;
    size_t *slots = units->block_slots;
    open_slot(layout, &slots[BLOCK_NORM1_WEIGHT]);
    add_tensor(layout, vector(h, INIT_ONES), "model.layers.%u.input_layernorm.weight", layer);
    lay_llama_attention(layout, layer);
    open_slot(layout, &slots[BLOCK_NORM2_WEIGHT]);
    add_tensor(layout, vector(h, INIT_ONES), "model.layers.%u.post_attention_layernorm.weight",
               layer);
    open_slot(layout, &slots[BLOCK_UP_WEIGHT]);
    add_tensor(layout, matrix(f, h, std), "model.layers.%u.mlp.gate_proj.weight", layer);
    add_tensor(layout, matrix(f, h, std), "model.layers.%u.mlp.up_proj.weight", layer);
    if (spec->mlp_bias) {
        open_slot(layout, &slots[BLOCK_UP_BIAS]);
        add_tensor(layout, vector(f, INIT_ZEROS), "model.layers.%u.mlp.gate_proj.bias", layer);
        add_tensor(layout, vector(f, INIT_ZEROS), "model.layers.%u.mlp.up_proj.bias", layer);
    }
    open_slot(layout, &slots[BLOCK_DOWN_WEIGHT]);
    add_tensor(layout, matrix(h, f, std), "model.layers.%u.mlp.down_proj.weight", layer);
    if (spec->mlp_bias) {
        open_slot(layout, &slots[BLOCK_DOWN_BIAS]);
        add_tensor(layout, vector(h, INIT_ZEROS), "model.layers.%u.mlp.down_proj.bias", layer);
    }
}

static void lay_head(struct layout *layout)
{
    struct units *units = layout->units;
    const struct model_spec *spec = units->spec;
    const bool gpt2 = spec->family == FAMILY_GPT2;
    open_unit(layout, spec->n_layers + 1);
    open_slot(layout, &units->head_slots[HEAD_NORM_WEIGHT]);
    add_tensor(layout, vector(spec->width, INIT_ONES), "%s",
               gpt2 ? "transformer.ln_f.weight" : "model.norm.weight");
    if (gpt2) {
        open_slot(layout, &units->head_slots[HEAD_NORM_BIAS]);
        add_tensor(layout, vector(spec->width, INIT_ZEROS), "transformer.ln_f.bias");
    }
    if (!spec->tied) {
        open_slot(layout, &units->head_slots[HEAD_WEIGHT]);
        add_tensor(layout, matrix(spec->vocab, spec->width, spec->init_std), "lm_head.weight");
    }
    close_unit(layout);
}

static void lay_all(struct layout *layout)
{
    const struct model_spec *spec = layout->units->spec;
    lay_embedding(layout);
    for (uint32_t layer = 0; layer < spec->n_layers; layer++) {
        open_unit(layout, layer + 1);
        if (spec->family == FAMILY_GPT2) {
            lay_gpt2_block(layout, layer);
        } else {
            lay_llama_block(layout, layer);
        }
        close_unit(layout);
    }
    lay_head(layout);
}

static void clear_slots(size_t *slots, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        slots[i] = SIZE_MAX;
    }
}

enum status units_init(struct units *units, const struct model_spec *spec, uint32_t world_size,
                       struct failure *why)
{
    *units = (struct units){
        .spec = spec, .world_size = world_size, .n_units = spec->n_layers + 2};
    clear_slots(units->block_slots, N_BLOCK_SLOTS);
    clear_slots(units->embed_slots, N_EMBED_SLOTS);
    clear_slots(units->head_slots, N_HEAD_SLOTS);
    struct layout counting = {.units = units};
    lay_all(&counting);
    units->n_tensors = counting.n_tensors;
    units->units = heap_calloc(units->n_units, sizeof *units->units);
    units->tensors = heap_calloc(units->n_tensors, sizeof *units->tensors);
    if (units->units == NULL || units->tensors == NULL) {
        const uint32_t n = units->n_tensors;
        units_fini(units);
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory for the names of %u tensors", n);
    }
    struct layout filling = {.units = units};
    lay_all(&filling);
    for (uint32_t i = 0; i < units->n_units; i++) {
        units->units[i].offset = units->n_elems;
        units->units[i].slice_offset = units->block_elems;
        units->n_elems += units->units[i].n_elems;
        units->block_elems += units->units[i].slice_elems;
    }
    return STATUS_OK;
}

void units_fini(struct units *units)
{
    heap_free(units->units);
    heap_free(units->tensors);
    *units = (struct units){0};
}

const struct tensor *units_find(const struct units *units, const char *name)
{
    for (uint32_t i = 0; i < units->n_tensors; i++) {
        if (strcmp(units->tensors[i].name, name) == 0) {
            return &units->tensors[i];
        }
    }
    return NULL;
}

void units_each_gap(const struct units *units, uint32_t unit,
                    void (*visit)(void *user, size_t offset, size_t n), void *user)
{
    const struct unit *u = &units->units[unit];
    size_t at = 0;
    for (uint32_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
        const struct tensor *tensor = &units->tensors[i];
        if (tensor->offset > at) {
            visit(user, at, tensor->offset - at);
        }
        at = tensor->offset + tensor->rows * tensor->cols;
    }
    if (u->n_elems > at) {
        visit(user, at, u->n_elems - at);
    }
}
