/* Owns: what follows from a model's shape: consistency, parameter counts, arithmetic. Not:
 * where shapes come from (presets, hf). Pure; any thread. */
#include "worker/model/spec.h"

#include <stdio.h>
#include <string.h>

enum {
    MAX_WIDTH = 1 << 17,
    MAX_HEADS = 4096,
    MAX_INNER = 1 << 20,
    MAX_VOCAB = 1 << 24,
    MAX_POSITIONS = 1 << 24,
    MAX_HEAD_DIM = 2 * ROTARY_MAX_PAIRS,
};

static enum status check_count(const struct model_spec *spec, const char *field, uint32_t value,
                               uint32_t low, uint32_t high, struct failure *why)
{
    if (value >= low && value <= high) {
        return STATUS_OK;
    }
    return fail(why, STATUS_OUT_OF_RANGE, "model %s: %s is %u; it has to be %u to %u", spec->name,
                field, value, low, high);
}

static enum status check_number(const struct model_spec *spec, const char *field, float value,
                                float low, float high, struct failure *why)
{
    if (value >= low && value <= high) {
        return STATUS_OK;
    }
    return fail(why, STATUS_OUT_OF_RANGE, "model %s: %s is %g; it has to be %g to %g", spec->name,
                field, (double)value, (double)low, (double)high);
}

static enum status check_counts(const struct model_spec *spec, struct failure *why)
{
    const struct {
        const char *field;
        uint32_t value, high;
    } counts[] = {
        {"the number of layers", spec->n_layers, SPEC_MAX_LAYERS},
        {"the width", spec->width, MAX_WIDTH},
        {"the number of heads", spec->n_heads, MAX_HEADS},
        {"the number of key/value heads", spec->n_kv_heads, MAX_HEADS},
        {"the head dimension", spec->head_dim, MAX_HEAD_DIM},
        {"the inner width", spec->inner, MAX_INNER},
        {"the vocabulary", spec->vocab, MAX_VOCAB},
        {"the longest sequence", spec->max_positions, MAX_POSITIONS},
    };

    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        const enum status status =
            check_count(spec, counts[i].field, counts[i].value, 1, counts[i].high, why);
        if (status) {
            return status;
        }
    }
    return STATUS_OK;
}

static enum status check_numbers(const struct model_spec *spec, struct failure *why)
{
    const struct {
        const char *field;
        float value, low, high;
    } numbers[] = {
        {"the norm's epsilon", spec->norm_eps, 1e-12F, 1.0F},
        {"the rotary base", spec->learned_positions ? 1.0F : spec->rope_theta, 1.0F, 1e12F},
        {"the initial deviation", spec->init_std, 0.0F, 10.0F},
    };
    const struct {
        const char *field;
        float p;
    } rates[] = {
        {"the embedding's dropout", spec->dropout_embed},
        {"the attention's dropout", spec->dropout_attention},
        {"the residual dropout", spec->dropout_residual},
    };

    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        const enum status status = check_number(spec, numbers[i].field, numbers[i].value,
                                                numbers[i].low, numbers[i].high, why);
        if (status) {
            return status;
        }
    }
    for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
        if (!(rates[i].p >= 0.0F && rates[i].p < 1.0F)) {
            return fail(why, STATUS_OUT_OF_RANGE,
                        "model %s: %s is %g; it has to be at least 0 and below 1", spec->name,
                        rates[i].field, (double)rates[i].p);
        }
    }
    return STATUS_OK;
}

static enum status check_family(const struct model_spec *spec, struct failure *why)
{
    const bool gpt2 = spec->family == FAMILY_GPT2;
    const bool right = gpt2 ? spec->norm == NORM_LAYER && spec->activation == ACTIVATION_GELU &&
                                  spec->learned_positions
                            : spec->norm == NORM_RMS && spec->activation == ACTIVATION_SWIGLU &&
                                  !spec->learned_positions;

    if (!right) {
        return fail(why, STATUS_UNSUPPORTED,
                    "model %s: the %s family has %s; other combinations are not in this version",
                    spec->name, gpt2 ? "GPT-2" : "Llama",
                    gpt2 ? "LayerNorm, GELU and learned positions"
                         : "RMSNorm, SwiGLU and rotary positions");
    }
    if (gpt2 &&
        (spec->n_kv_heads != spec->n_heads || spec->width != spec->n_heads * spec->head_dim)) {
        return fail(why, STATUS_CONFLICT,
                    "model %s: GPT-2's width %u has to be %u heads x head dimension %u, with as "
                    "many key/value heads (%u)",
                    spec->name, spec->width, spec->n_heads, spec->head_dim, spec->n_kv_heads);
    }
    return STATUS_OK;
}

enum status spec_check(const struct model_spec *spec, struct failure *why)
{
    enum status status = check_counts(spec, why);

    if (!status) {
        status = check_numbers(spec, why);
    }
    if (!status) {
        status = check_family(spec, why);
    }
    if (status) {
        return status;
    }
    if (spec->n_heads % spec->n_kv_heads != 0) {
        return fail(why, STATUS_CONFLICT,
                    "model %s: %u heads are not a multiple of %u key/value heads", spec->name,
                    spec->n_heads, spec->n_kv_heads);
    }
    if (!spec->learned_positions && spec->head_dim % 2 != 0) {
        return fail(why, STATUS_CONFLICT,
                    "model %s: head dimension %u is odd, but rotary positions turn pairs",
                    spec->name, spec->head_dim);
    }
    return STATUS_OK;
}

/* ---- counts ---- */

uint32_t spec_qkv_width(const struct model_spec *spec)
{
    return (spec->n_heads + 2 * spec->n_kv_heads) * spec->head_dim;
}

/* Weights of one block that take part in matrix products. */
static uint64_t block_matmul_parameters(const struct model_spec *spec)
{
    const uint64_t h = spec->width;
    const uint64_t attention =
        (uint64_t)spec_qkv_width(spec) * h + (uint64_t)spec->n_heads * spec->head_dim * h;
    const uint64_t matrices = spec->activation == ACTIVATION_SWIGLU ? 3 : 2;

    return attention + matrices * h * spec->inner;
}

static uint64_t norm_parameters(const struct model_spec *spec)
{
    return (spec->norm == NORM_LAYER ? 2 : 1) * (uint64_t)spec->width;
}

static uint64_t block_parameters(const struct model_spec *spec)
{
    const uint64_t in_biases = spec->activation == ACTIVATION_SWIGLU ? 2 : 1;
    uint64_t n = block_matmul_parameters(spec) + 2 * norm_parameters(spec);

    n += spec->attention_bias ? spec_qkv_width(spec) : 0;
    n += spec->attention_out_bias ? spec->width : 0;
    n += spec->mlp_bias ? in_biases * spec->inner + spec->width : 0;
    return n;
}

uint64_t spec_n_parameters(const struct model_spec *spec)
{
    const uint64_t table = (uint64_t)spec->vocab * spec->width;
    uint64_t n = table + spec->n_layers * block_parameters(spec) + norm_parameters(spec);

    n += spec->learned_positions ? (uint64_t)spec->max_positions * spec->width : 0;
    n += spec->tied ? 0 : table;
    return n;
}

uint64_t spec_n_matmul_parameters(const struct model_spec *spec)
{
    return spec->n_layers * block_matmul_parameters(spec) + (uint64_t)spec->vocab * spec->width;
}

double spec_flops_per_token(const struct model_spec *spec, uint32_t seq_len)
{
    const double attention = (double)spec->n_layers * spec->n_heads * spec->head_dim * seq_len;

    return 6.0 * (double)spec_n_matmul_parameters(spec) + 6.0 * attention;
}
