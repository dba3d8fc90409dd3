/* Owns: the models that have a name of their own. Constant data; any thread.
 *
 * Small ones for tests and the quick start, GPT-2 124M as the reference, large ones for
 * planning what no single machine holds. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "worker/model/spec.h"

#define GPT2(preset, layers, wide, heads, tokens, longest)                                         \
    {                                                                                              \
        .name = preset, .family = FAMILY_GPT2, .n_layers = layers, .width = wide,                  \
        .n_heads = heads, .n_kv_heads = heads, .head_dim = (wide) / (heads), .inner = 4 * (wide),  \
        .vocab = tokens, .max_positions = longest, .norm = NORM_LAYER,                             \
        .activation = ACTIVATION_GELU, .learned_positions = true, .attention_bias = true,          \
        .attention_out_bias = true, .mlp_bias = true, .tied = true, .norm_eps = 1e-5F,             \
        .init_std = 0.02F                                                                          \
    }

#define LLAMA(preset, layers, wide, heads, kv_heads, dim, f, tokens, longest, theta)               \
    {                                                                                              \
        .name = preset, .family = FAMILY_LLAMA, .n_layers = layers, .width = wide,                 \
        .n_heads = heads, .n_kv_heads = kv_heads, .head_dim = dim, .inner = f, .vocab = tokens,    \
        .max_positions = longest, .norm = NORM_RMS, .activation = ACTIVATION_SWIGLU,               \
        .norm_eps = 1e-5F, .rope_theta = theta, .init_std = 0.02F                                  \
    }

static const struct model_spec presets[] = {
    /*   name, layers, width, heads, vocabulary, longest sequence */
    GPT2("gpt2-124m", 12, 768, 12, 50257, 1024),
    GPT2("gpt2-tiny", 2, 64, 4, 256, 128),
    /*    name, layers, width, heads, kv heads, head dim, inner, vocabulary, longest, theta */
    LLAMA("llama-tiny-bytes", 4, 256, 8, 4, 32, 688, 256, 2048, 10000.0F),
    LLAMA("t0", 2, 64, 4, 2, 16, 172, 256, 64, 10000.0F),
    LLAMA("llama-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096, 10000.0F),
    LLAMA("llama-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096, 10000.0F),
    LLAMA("llama-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, 500000.0F),
};

enum { N_PRESETS = sizeof(presets) / sizeof(presets[0]) };

static const char *const names[] = {"gpt2-124m", "gpt2-tiny", "llama-tiny-bytes", "t0",
                                    "llama-7b",  "llama-13b", "llama-70b",        NULL};
_Static_assert(sizeof(names) / sizeof(names[0]) == N_PRESETS + 1, "every preset is listed");

const char *const *spec_preset_names(void)
{
    return names;
}

static const struct model_spec *find_preset(const char *name)
{
    for (size_t i = 0; i < N_PRESETS; i++) {
        if (strcmp(presets[i].name, name) == 0) {
            return &presets[i];
        }
    }
    return NULL;
}

static void list_names(char *text, size_t room)
{
    size_t n = 0;

    for (size_t i = 0; i < N_PRESETS && n < room; i++) {
        n += (size_t)snprintf(text + n, room - n, "%s%s", i ? ", " : "", presets[i].name);
    }
}

enum status spec_preset(const char *name, struct model_spec *out_spec, struct failure *why)
{
    const struct model_spec *preset = find_preset(name);
    char known[256];

    if (!preset) {
        list_names(known, sizeof(known));
        return fail(why, STATUS_NOT_FOUND, "%.256s is not a preset; there are %s", name, known);
    }
    *out_spec = *preset;
    return STATUS_OK;
}

enum status spec_load(const char *model, struct model_spec *out_spec, struct failure *why)
{
    struct stat info;
    char known[256];

    if (find_preset(model)) {
        return spec_preset(model, out_spec, why);
    }
    if (stat(model, &info) == 0) {
        return spec_from_folder(model, out_spec, why);
    }
    list_names(known, sizeof(known));
    return fail(why, STATUS_NOT_FOUND, "%.256s is neither a folder nor a preset (%s)", model,
                known);
}
