/* Owns: reading a model's shape from Hugging Face's config.json. Not: its weights. Main thread,
 * at start.
 *
 * A key that would change what the model computes is read or refused by name; keys about
 * generation, tokens and tools are none of our business and are passed over. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "proto/base/heap.h"
#include "proto/json.h"
#include "proto/json_parse.h"
#include "proto/text_file.h"
#include "worker/model/spec.h"

enum { MAX_JSON_BYTES = 256 << 10, FILE_BYTES = 1200 };

struct hf {
    const char *file; /* for messages */
    const json_t *root;
    struct failure *why;
    enum status status; /* the first failure; later reads do nothing */
};

/* ---- single keys ---- */

static void hf_fail(struct hf *hf, enum status status, const char *key, const json_t *value,
                    const char *limit)
{
    char *text = value ? json_format(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    void (*text_free)(void *) = NULL;

    if (!hf->status) {
        hf->status = fail(hf->why, status, "%.256s: %s %s%.64s%s", hf->file, key,
                          value ? "is " : "is missing", text ? text : "", limit);
    }
    json_get_alloc_funcs(NULL, &text_free);
    text_free(text);
}

/* A key that is absent or null. */
static const json_t *hf_get(const struct hf *hf, const char *key)
{
    const json_t *value = json_object_get(hf->root, key);

    return json_is_null(value) ? NULL : value;
}

static uint32_t hf_count(struct hf *hf, const char *key, uint32_t least, uint32_t standard)
{
    const json_t *value = hf_get(hf, key);

    if (!value && standard) {
        return standard;
    }
    if (!value) {
        hf_fail(hf, STATUS_INVALID, key, NULL, "");
    } else if (!json_is_integer(value)) {
        hf_fail(hf, STATUS_INVALID, key, value, "; it has to be a whole number");
    } else if (json_integer_value(value) < least || json_integer_value(value) > INT32_MAX) {
        hf_fail(hf, STATUS_OUT_OF_RANGE, key, value, "; it has to be 1 to 2147483647");
    } else {
        return (uint32_t)json_integer_value(value);
    }
    return 1;
}

static float hf_number_in(struct hf *hf, const json_t *object, const char *key, double low,
                          double high, double standard)
{
    const json_t *value = json_object_get(object, key);
    char limit[80];

    if (!value || json_is_null(value)) {
        return (float)standard;
    }
    if (!json_is_number(value)) {
        hf_fail(hf, STATUS_INVALID, key, value, "; it has to be a number");
    } else if (!(json_number_value(value) >= low && json_number_value(value) <= high)) {
        snprintf(limit, sizeof(limit), "; it has to be %g to %g", low, high);
        hf_fail(hf, STATUS_OUT_OF_RANGE, key, value, limit);
    } else {
        return (float)json_number_value(value);
    }
    return (float)standard;
}

static float hf_number(struct hf *hf, const char *key, double low, double high, double standard)
{
    return hf_number_in(hf, hf->root, key, low, high, standard);
}

static float hf_dropout(struct hf *hf, const char *key, double standard)
{
    const float p = hf_number(hf, key, 0, 1, standard);

    if (p >= 1.0F) {
        hf_fail(hf, STATUS_OUT_OF_RANGE, key, hf_get(hf, key), "; it has to be below 1");
    }
    return p;
}

static bool hf_bool(struct hf *hf, const char *key, bool standard)
{
    const json_t *value = hf_get(hf, key);

    if (!value) {
        return standard;
    }
    if (!json_is_boolean(value)) {
        hf_fail(hf, STATUS_INVALID, key, value, "; it has to be true or false");
    }
    return json_is_true(value);
}

/* A key whose other values mean a computation that is not done here. */
static void hf_require_bool(struct hf *hf, const char *key, bool only)
{
    if (hf_bool(hf, key, only) != only) {
        hf_fail(hf, STATUS_UNSUPPORTED, key, hf_get(hf, key),
                only ? ", which is not in this version; it has to be true"
                     : ", which is not in this version; it has to be false");
    }
}

static void hf_require_text(struct hf *hf, const char *key, const char *only, const char *alias)
{
    const json_t *value = hf_get(hf, key);
    const char *text = json_string_value(value);
    char limit[128];

    if (!value || (text && (strcmp(text, only) == 0 || (alias && strcmp(text, alias) == 0)))) {
        return;
    }
    snprintf(limit, sizeof(limit), ", which is not in this version; it has to be \"%s\"%s%s%s",
             only, alias ? " or \"" : "", alias ? alias : "", alias ? "\"" : "");
    hf_fail(hf, text ? STATUS_UNSUPPORTED : STATUS_INVALID, key, value, limit);
}

static void hf_require_absent(struct hf *hf, const char *key)
{
    if (hf_get(hf, key)) {
        hf_fail(hf, STATUS_UNSUPPORTED, key, hf_get(hf, key),
                ", which is not in this version; the key has to be absent or null");
    }
}

/* ---- families ---- */

static void read_gpt2(struct hf *hf, struct model_spec *spec)
{
    spec->family = FAMILY_GPT2;
    spec->vocab = hf_count(hf, "vocab_size", 1, 0);
    spec->width = hf_count(hf, "n_embd", 1, 0);
    spec->n_layers = hf_count(hf, "n_layer", 1, 0);
    spec->n_heads = hf_count(hf, "n_head", 1, 0);
    spec->max_positions = hf_count(hf, "n_positions", 1, 0);
    spec->inner = hf_count(hf, "n_inner", 1, spec->width <= INT32_MAX / 4 ? 4 * spec->width : 1);
    spec->n_kv_heads = spec->n_heads;
    if (spec->width % spec->n_heads != 0) {
        hf_fail(hf, STATUS_CONFLICT, "n_embd", hf_get(hf, "n_embd"),
                ", which is not a multiple of n_head");
    }
    spec->head_dim = spec->width / spec->n_heads;
    spec->norm = NORM_LAYER;
    spec->activation = ACTIVATION_GELU;
    spec->learned_positions = true;
    spec->attention_bias = spec->attention_out_bias = spec->mlp_bias = true;
    spec->tied = hf_bool(hf, "tie_word_embeddings", true);
    spec->norm_eps = hf_number(hf, "layer_norm_epsilon", 1e-12, 1, 1e-5);
    spec->init_std = hf_number(hf, "initializer_range", 0, 10, 0.02);
    spec->dropout_embed = hf_dropout(hf, "embd_pdrop", 0.1);
    spec->dropout_attention = hf_dropout(hf, "attn_pdrop", 0.1);
    spec->dropout_residual = hf_dropout(hf, "resid_pdrop", 0.1);
    hf_require_text(hf, "activation_function", "gelu_new", "gelu_pytorch_tanh");
    hf_require_bool(hf, "scale_attn_weights", true);
    hf_require_bool(hf, "scale_attn_by_inverse_layer_idx", false);
    hf_require_bool(hf, "add_cross_attention", false);
}

/* transformers 5 writes rope_parameters where 4 wrote rope_theta and rope_scaling; a type other
 * than "default" changes the frequencies and is refused by name. */
static void read_rope(struct hf *hf, struct model_spec *spec)
{
    static const char *const holders[] = {"rope_scaling", "rope_parameters"};
    const json_t *theta = hf_get(hf, "rope_theta");

    spec->rope_theta = hf_number(hf, "rope_theta", 1, 1e12, 10000);
    for (size_t i = 0; i < 2; i++) {
        const json_t *holder = hf_get(hf, holders[i]);
        if (!holder) {
            continue;
        }
        if (!json_is_object(holder)) {
            hf_fail(hf, STATUS_INVALID, holders[i], holder, "; it has to be an object or null");
            continue;
        }
        const json_t *type = json_object_get(holder, "rope_type");
        type = type ? type : json_object_get(holder, "type");
        if (type && (!json_is_string(type) || strcmp(json_string_value(type), "default") != 0)) {
            hf_fail(hf, STATUS_UNSUPPORTED, holders[i], type,
                    ", which is not in this version; its rope_type has to be \"default\"");
        }
        if (!type && (json_object_get(holder, "factor") || i == 0)) {
            hf_fail(hf, STATUS_UNSUPPORTED, holders[i], holder,
                    ", which scales positions; that is not in this version");
        }
        const json_t *inner = json_object_get(holder, "rope_theta");
        const float value = hf_number_in(hf, holder, "rope_theta", 1, 1e12, 10000);
        if (inner && theta && value != spec->rope_theta) {
            hf_fail(hf, STATUS_CONFLICT, "rope_theta", theta,
                    ", but rope_parameters.rope_theta says otherwise");
        }
        if (inner) {
            spec->rope_theta = value;
        }
        if (hf_number_in(hf, holder, "partial_rotary_factor", 0, 1, 1) < 1.0F) {
            hf_fail(hf, STATUS_UNSUPPORTED, "partial_rotary_factor",
                    json_object_get(holder, "partial_rotary_factor"),
                    ", which is not in this version; it has to be 1");
        }
    }
}

static void read_llama(struct hf *hf, struct model_spec *spec)
{
    spec->family = FAMILY_LLAMA;
    spec->vocab = hf_count(hf, "vocab_size", 1, 0);
    spec->width = hf_count(hf, "hidden_size", 1, 0);
    spec->inner = hf_count(hf, "intermediate_size", 1, 0);
    spec->n_layers = hf_count(hf, "num_hidden_layers", 1, 0);
    spec->n_heads = hf_count(hf, "num_attention_heads", 1, 0);
    spec->n_kv_heads = hf_count(hf, "num_key_value_heads", 1, spec->n_heads);
    spec->max_positions = hf_count(hf, "max_position_embeddings", 1, 0);
    if (!hf_get(hf, "head_dim") && spec->width % spec->n_heads != 0) {
        hf_fail(hf, STATUS_CONFLICT, "hidden_size", hf_get(hf, "hidden_size"),
                ", which is not a multiple of num_attention_heads; give head_dim");
    }
    const uint32_t even = spec->width / spec->n_heads;
    spec->head_dim = hf_count(hf, "head_dim", 1, even ? even : 1);
    spec->norm = NORM_RMS;
    spec->activation = ACTIVATION_SWIGLU;
    spec->attention_bias = spec->attention_out_bias = hf_bool(hf, "attention_bias", false);
    spec->mlp_bias = hf_bool(hf, "mlp_bias", false);
    spec->tied = hf_bool(hf, "tie_word_embeddings", false);
    spec->norm_eps = hf_number(hf, "rms_norm_eps", 1e-12, 1, 1e-6);
    spec->init_std = hf_number(hf, "initializer_range", 0, 10, 0.02);
    spec->dropout_attention = hf_dropout(hf, "attention_dropout", 0);
    read_rope(hf, spec);
    hf_require_text(hf, "hidden_act", "silu", "swish");
    hf_require_absent(hf, "sliding_window");
    if (hf_number(hf, "partial_rotary_factor", 0, 1, 1) < 1.0F) {
        hf_fail(hf, STATUS_UNSUPPORTED, "partial_rotary_factor",
                hf_get(hf, "partial_rotary_factor"),
                ", which is not in this version; it has to be 1");
    }
}

/* "gpt2" or "llama" from model_type, or from the architecture where that is absent. */
static void read_family(struct hf *hf, struct model_spec *spec)
{
    const json_t *type = hf_get(hf, "model_type");
    const json_t *architecture = json_array_get(hf_get(hf, "architectures"), 0);
    const char *name = json_string_value(type ? type : architecture);

    if (name && (strcmp(name, "gpt2") == 0 || strcmp(name, "GPT2LMHeadModel") == 0)) {
        read_gpt2(hf, spec);
    } else if (name && (strcmp(name, "llama") == 0 || strcmp(name, "LlamaForCausalLM") == 0)) {
        read_llama(hf, spec);
    } else {
        hf_fail(hf, type || architecture ? STATUS_UNSUPPORTED : STATUS_INVALID,
                type || !architecture ? "model_type" : "architectures", type ? type : architecture,
                "; this version has the families \"gpt2\" and \"llama\"");
    }
    hf_require_absent(hf, "quantization_config");
}

/* ---- folder and file ---- */

static enum status refuse_weights(const char *folder, struct failure *why)
{
    static const char *const weights[] = {"model.safetensors", "model.safetensors.index.json",
                                          "pytorch_model.bin", "pytorch_model.bin.index.json"};
    char path[FILE_BYTES];
    struct stat info;

    for (size_t i = 0; i < sizeof(weights) / sizeof(weights[0]); i++) {
        const int n = snprintf(path, sizeof(path), "%s/%s", folder, weights[i]);
        if (n > 0 && (size_t)n < sizeof(path) && stat(path, &info) == 0) {
            return fail(
                why, STATUS_UNSUPPORTED,
                "%.256s has weights (%s), but this version starts from seeded random values; "
                "remove the file or give a folder with config.json only",
                folder, weights[i]);
        }
    }
    return STATUS_OK;
}

static enum status load_json(const char *file, json_t **out_root, struct failure *why)
{
    json_error_t error = {.line = -1};
    char *text;
    size_t n_bytes;
    enum status status = text_file_read(file, MAX_JSON_BYTES, &text, &n_bytes, why);

    if (status) {
        return status;
    }
    status = json_parse(text, n_bytes, JSON_REJECT_DUPLICATES, out_root, &error);
    heap_free(text);
    if (status == STATUS_OUT_OF_MEMORY) {
        return fail(why, status, "%.256s: out of host memory", file);
    }
    if (status) {
        return fail(why, status, "%.256s:%d:%d: not valid JSON: %s", file, error.line, error.column,
                    error.text);
    }
    if (!json_is_object(*out_root)) {
        json_decref(*out_root);
        return fail(why, STATUS_MALFORMED, "%.256s:1: the file has to be one JSON object", file);
    }
    return STATUS_OK;
}

static void folder_name(const char *folder, char name[static SPEC_NAME_BYTES])
{
    size_t end = strlen(folder), start;

    while (end > 1 && folder[end - 1] == '/') {
        end--;
    }
    for (start = end; start > 0 && folder[start - 1] != '/'; start--) {
    }
    snprintf(name, SPEC_NAME_BYTES, "%.*s", (int)(end - start < 63 ? end - start : 63),
             folder + start);
}

enum status spec_from_folder(const char *folder, struct model_spec *out_spec, struct failure *why)
{
    struct model_spec spec = {.name = ""};
    char file[FILE_BYTES];
    json_t *root = NULL;

    const int n = snprintf(file, sizeof(file), "%s/config.json", folder);
    if (n < 0 || (size_t)n >= sizeof(file)) {
        return fail(why, STATUS_TOO_LARGE,
                    "%.256s...: the path has %d bytes; at most %zu are allowed", folder, n,
                    sizeof(file) - 1);
    }
    enum status status = load_json(file, &root, why);
    if (status) {
        return status;
    }
    struct hf hf = {.file = file, .root = root, .why = why};
    folder_name(folder, spec.name);
    read_family(&hf, &spec);
    status = hf.status;
    if (!status) {
        status = spec_check(&spec, why);
    }
    if (!status) {
        status = refuse_weights(folder, why);
    }
    json_decref(root);
    if (!status) {
        *out_spec = spec;
    }
    return status;
}
