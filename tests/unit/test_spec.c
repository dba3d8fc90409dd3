/* Models: presets, Hugging Face's keys, consistency, counts.
 * links: base proto worker */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/json.h"
#include "worker/model/spec.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static char folder[] = "/tmp/ballast-spec-XXXXXX";

static void write_text(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

static void remove_file(const char *name)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    unlink(path);
}

static uint64_t parameters(const char *preset)
{
    struct model_spec spec;
    assert_int_equal(spec_preset(preset, &spec, NULL), STATUS_OK);
    assert_string_equal(spec.name, preset);
    return spec_n_parameters(&spec);
}

/* Counts worked out by hand or known from the models' papers. */
static void presets_have_the_known_sizes(void **state)
{
    struct failure why;
    size_t n = 0;
    (void)state;
    assert_int_equal(parameters("t0"), 123712);
    assert_int_equal(parameters("gpt2-124m"), 124439808);
    assert_int_equal(parameters("gpt2-tiny"), 256 * 64 + 128 * 64 + 2 * 49984 + 128);
    assert_int_equal(parameters("llama-tiny-bytes"), 3033344);
    assert_int_equal(parameters("llama-7b"), UINT64_C(6738415616));
    assert_int_equal(parameters("llama-13b"), UINT64_C(13015864320));
    assert_int_equal(parameters("llama-70b"), UINT64_C(70553706496));
    for (const char *const *name = spec_preset_names(); *name; name++, n++) {
        struct model_spec spec;
        assert_int_equal(spec_load(*name, &spec, &why), STATUS_OK);
        assert_int_equal(spec_check(&spec, &why), STATUS_OK);
    }
    assert_int_equal(n, 7);
    struct model_spec spec;
    assert_int_equal(spec_preset("gpt3", &spec, &why), STATUS_NOT_FOUND);
    assert_non_null(strstr(why.text, "gpt3"));
    assert_non_null(strstr(why.text, "llama-tiny-bytes"));
    assert_int_equal(spec_load("/nonexistent", &spec, &why), STATUS_NOT_FOUND);
    assert_non_null(strstr(why.text, "gpt2-124m"));
}

static void counts_follow_the_shape(void **state)
{
    struct model_spec t0, gpt2;
    (void)state;
    assert_int_equal(spec_preset("t0", &t0, NULL), STATUS_OK);
    assert_int_equal(spec_qkv_width(&t0), 128);
    assert_int_equal(spec_n_matmul_parameters(&t0), 2 * (8192 + 4096 + 33024) + 256 * 64);
    assert_true(spec_flops_per_token(&t0, 64) == 6.0 * 107008 + 6.0 * 2 * 64 * 64);
    t0.tied = true;
    assert_int_equal(spec_n_parameters(&t0), 107328);
    assert_int_equal(spec_n_matmul_parameters(&t0), 107008); /* the head counts once either way */
    assert_int_equal(spec_preset("gpt2-124m", &gpt2, NULL), STATUS_OK);
    assert_int_equal(spec_n_matmul_parameters(&gpt2), 12 * 7077888 + 50257 * 768);
}

static void llama_with_biases_counts_them(void **state)
{
    struct model_spec spec;
    (void)state;
    assert_int_equal(spec_preset("t0", &spec, NULL), STATUS_OK);
    spec.attention_bias = spec.attention_out_bias = spec.mlp_bias = true;
    assert_int_equal(spec_n_parameters(&spec), 123712 + 2 * (128 + 64 + 2 * 172 + 64));
}

#define LLAMA_KEYS                                                                                 \
    "\"model_type\":\"llama\",\"vocab_size\":256,\"hidden_size\":64,\"intermediate_size\":172,"    \
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"max_position_embeddings\":64"
#define GPT2_KEYS                                                                                  \
    "\"model_type\":\"gpt2\",\"vocab_size\":256,\"n_embd\":64,\"n_layer\":2,\"n_head\":4,"         \
    "\"n_positions\":128"

static void llama_is_read(void **state)
{
    struct model_spec spec;
    struct failure why;
    (void)state;
    write_text("config.json",
               "{" LLAMA_KEYS ",\"num_key_value_heads\":2,\"rms_norm_eps\":1e-5,"
               "\"rope_theta\":500000.0,\"rope_scaling\":null,\"hidden_act\":\"silu\","
               "\"tie_word_embeddings\":true,\"attention_bias\":true,\"mlp_bias\":true,"
               "\"attention_dropout\":0.25,\"initializer_range\":0.5,\"torch_dtype\":\"float32\"}");
    assert_int_equal(spec_load(folder, &spec, &why), STATUS_OK);
    assert_int_equal(spec.family, FAMILY_LLAMA);
    assert_int_equal(spec.vocab, 256);
    assert_int_equal(spec.width, 64);
    assert_int_equal(spec.inner, 172);
    assert_int_equal(spec.n_layers, 2);
    assert_int_equal(spec.n_heads, 4);
    assert_int_equal(spec.n_kv_heads, 2);
    assert_int_equal(spec.head_dim, 16);
    assert_int_equal(spec.max_positions, 64);
    assert_true(spec.norm_eps == 1e-5F && spec.rope_theta == 500000.0F && spec.init_std == 0.5F);
    assert_true(spec.tied && spec.attention_bias && spec.attention_out_bias && spec.mlp_bias);
    assert_true(spec.dropout_attention == 0.25F && spec.dropout_residual == 0.0F);
    assert_false(spec.learned_positions);
    assert_string_equal(spec.name, strrchr(folder, '/') + 1);

    /* Absent keys have Hugging Face's defaults; transformers 5 nests the rotary base. */
    write_text("config.json",
               "{" LLAMA_KEYS ",\"head_dim\":32,\"num_key_value_heads\":null,"
               "\"rope_parameters\":{\"rope_theta\":1e6,\"rope_type\":\"default\"}}");
    assert_int_equal(spec_from_folder(folder, &spec, &why), STATUS_OK);
    assert_int_equal(spec.n_kv_heads, 4);
    assert_int_equal(spec.head_dim, 32);
    assert_true(spec.norm_eps == 1e-6F && spec.rope_theta == 1e6F && spec.init_std == 0.02F);
    assert_false(spec.tied || spec.attention_bias || spec.mlp_bias);
}

static void gpt2_is_read(void **state)
{
    struct model_spec spec;
    struct failure why;
    (void)state;
    write_text("config.json", "{" GPT2_KEYS ",\"n_inner\":null,\"resid_pdrop\":0.25,"
                              "\"embd_pdrop\":0.5,\"attn_pdrop\":0,\"activation_function\":"
                              "\"gelu_new\",\"layer_norm_epsilon\":1e-6}");
    assert_int_equal(spec_from_folder(folder, &spec, &why), STATUS_OK);
    assert_int_equal(spec.family, FAMILY_GPT2);
    assert_int_equal(spec.inner, 256);
    assert_int_equal(spec.n_kv_heads, 4);
    assert_int_equal(spec.head_dim, 16);
    assert_int_equal(spec.max_positions, 128);
    assert_true(spec.tied && spec.learned_positions && spec.mlp_bias);
    assert_true(spec.dropout_residual == 0.25F && spec.dropout_embed == 0.5F &&
                spec.dropout_attention == 0.0F && spec.norm_eps == 1e-6F);
    write_text("config.json", "{\"architectures\":[\"GPT2LMHeadModel\"],\"vocab_size\":256,"
                              "\"n_embd\":64,\"n_layer\":2,\"n_head\":4,\"n_positions\":128,"
                              "\"n_inner\":100}");
    assert_int_equal(spec_from_folder(folder, &spec, &why), STATUS_OK);
    assert_int_equal(spec.inner, 100);
    assert_true(spec.dropout_residual == 0.1F); /* Hugging Face's default */
}

static void wrong_folders_are_refused(void **state)
{
    static const struct {
        const char *text;
        enum status status;
        const char *parts[3];
    } cases[] = {
        {"{", STATUS_MALFORMED, {"config.json:1", "JSON"}},
        {"[]", STATUS_MALFORMED, {"object"}},
        {"{\"a\":1,\"a\":2}", STATUS_MALFORMED, {"duplicate"}},
        {"{}", STATUS_INVALID, {"model_type", "missing"}},
        {"{\"model_type\":\"mamba\"}", STATUS_UNSUPPORTED, {"mamba", "gpt2", "llama"}},
        {"{\"architectures\":[\"BertModel\"]}", STATUS_UNSUPPORTED, {"BertModel"}},
        {"{\"model_type\":\"llama\",\"vocab_size\":256}", STATUS_INVALID, {"hidden_size"}},
        {"{" GPT2_KEYS ",\"n_inner\":0}", STATUS_OUT_OF_RANGE, {"n_inner", "0"}},
        {"{" GPT2_KEYS ",\"n_inner\":\"4\"}", STATUS_INVALID, {"n_inner", "whole number"}},
        {"{" GPT2_KEYS ",\"n_inner\":2147483648}", STATUS_OUT_OF_RANGE, {"2147483648"}},
        {"{" GPT2_KEYS ",\"n_inner\":2097152}", STATUS_OUT_OF_RANGE, {"2097152", "1048576"}},
        {"{" GPT2_KEYS ",\"resid_pdrop\":1.0}", STATUS_OUT_OF_RANGE, {"resid_pdrop"}},
        {"{" GPT2_KEYS ",\"attn_pdrop\":-0.1}", STATUS_OUT_OF_RANGE, {"attn_pdrop", "-0.1"}},
        {"{" GPT2_KEYS ",\"activation_function\":\"relu\"}",
         STATUS_UNSUPPORTED,
         {"relu", "gelu_new"}},
        {"{" GPT2_KEYS ",\"scale_attn_weights\":false}",
         STATUS_UNSUPPORTED,
         {"scale_attn_weights"}},
        {"{" GPT2_KEYS ",\"tie_word_embeddings\":1}",
         STATUS_INVALID,
         {"tie_word", "true or false"}},
        {"{" GPT2_KEYS ",\"quantization_config\":{}}", STATUS_UNSUPPORTED, {"quantization_config"}},
        {"{\"model_type\":\"gpt2\",\"vocab_size\":256,\"n_embd\":65,\"n_layer\":2,\"n_head\":4,"
         "\"n_positions\":128}",
         STATUS_CONFLICT,
         {"n_embd", "65", "n_head"}},
        {"{" LLAMA_KEYS ",\"num_key_value_heads\":3}", STATUS_CONFLICT, {"4 heads", "3"}},
        {"{" LLAMA_KEYS ",\"head_dim\":15}", STATUS_CONFLICT, {"15", "odd"}},
        {"{" LLAMA_KEYS ",\"head_dim\":258}", STATUS_OUT_OF_RANGE, {"258", "256"}},
        {"{" LLAMA_KEYS ",\"hidden_act\":\"gelu\"}",
         STATUS_UNSUPPORTED,
         {"hidden_act", "gelu", "silu"}},
        {"{" LLAMA_KEYS ",\"rms_norm_eps\":0}", STATUS_OUT_OF_RANGE, {"rms_norm_eps"}},
        {"{" LLAMA_KEYS ",\"sliding_window\":128}", STATUS_UNSUPPORTED, {"sliding_window", "128"}},
        /* Bug case 25: scaled rotary positions are refused by name, never dropped. */
        {"{" LLAMA_KEYS ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0}}",
         STATUS_UNSUPPORTED,
         {"rope_scaling", "llama3"}},
        {"{" LLAMA_KEYS ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}}",
         STATUS_UNSUPPORTED,
         {"rope_scaling", "linear"}},
        {"{" LLAMA_KEYS ",\"rope_parameters\":{\"rope_theta\":1e4,\"rope_type\":\"yarn\"}}",
         STATUS_UNSUPPORTED,
         {"rope_parameters", "yarn"}},
        {"{" LLAMA_KEYS ",\"rope_parameters\":{\"rope_theta\":1e4,\"factor\":2}}",
         STATUS_UNSUPPORTED,
         {"rope_parameters", "factor"}},
        {"{" LLAMA_KEYS ",\"rope_theta\":1e4,\"rope_parameters\":{\"rope_theta\":2e4}}",
         STATUS_CONFLICT,
         {"rope_theta"}},
        {"{" LLAMA_KEYS ",\"partial_rotary_factor\":0.5}", STATUS_UNSUPPORTED, {"0.5"}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct model_spec spec = {.n_layers = 77};
        struct failure why;
        const int64_t live = heap_live();
        write_text("config.json", cases[i].text);
        const enum status status = spec_from_folder(folder, &spec, &why);
        if (status != cases[i].status) {
            print_error("%s: %s\n", cases[i].text, status ? why.text : "accepted");
        }
        assert_int_equal(status, cases[i].status);
        assert_int_equal(spec.n_layers, 77);
        assert_int_equal(heap_live(), live);
        for (size_t p = 0; p < 3 && cases[i].parts[p]; p++) {
            if (!strstr(why.text, cases[i].parts[p])) {
                print_error("'%s' lacks '%s'\n", why.text, cases[i].parts[p]);
            }
            assert_non_null(strstr(why.text, cases[i].parts[p]));
        }
    }
}

static void weights_are_refused_for_now(void **state)
{
    static const char *const files[] = {"model.safetensors", "model.safetensors.index.json"};
    struct model_spec spec;
    struct failure why;
    (void)state;
    write_text("config.json", "{" LLAMA_KEYS "}");
    for (size_t i = 0; i < 2; i++) {
        write_text(files[i], "");
        assert_int_equal(spec_from_folder(folder, &spec, &why), STATUS_UNSUPPORTED);
        assert_non_null(strstr(why.text, files[i]));
        assert_non_null(strstr(why.text, "config.json only"));
        remove_file(files[i]);
    }
    assert_int_equal(spec_from_folder(folder, &spec, &why), STATUS_OK);
    remove_file("config.json");
    assert_int_equal(spec_from_folder(folder, &spec, &why), STATUS_NOT_FOUND);
    assert_non_null(strstr(why.text, "config.json"));
}

static void check_refuses(void (*spoil)(struct model_spec *), enum status status, const char *part)
{
    struct model_spec spec;
    struct failure why;
    assert_int_equal(spec_preset("t0", &spec, &why), STATUS_OK);
    spoil(&spec);
    assert_int_equal(spec_check(&spec, &why), status);
    if (!strstr(why.text, part)) {
        print_error("'%s' lacks '%s'\n", why.text, part);
    }
    assert_non_null(strstr(why.text, part));
}

static void no_layers(struct model_spec *spec)
{
    spec->n_layers = 0;
}
static void many_layers(struct model_spec *spec)
{
    spec->n_layers = SPEC_MAX_LAYERS + 1;
}
static void no_vocabulary(struct model_spec *spec)
{
    spec->vocab = 0;
}
static void odd_heads(struct model_spec *spec)
{
    spec->n_kv_heads = 3;
}
static void full_dropout(struct model_spec *spec)
{
    spec->dropout_residual = 1.0F;
}
static void nan_dropout(struct model_spec *spec)
{
    spec->dropout_embed = __builtin_nanf("");
}
static void mixed_family(struct model_spec *spec)
{
    spec->norm = NORM_LAYER;
}
static void gpt2_width(struct model_spec *spec)
{
    (void)!spec_preset("gpt2-tiny", spec, NULL);
    spec->head_dim = 8;
}

static void check_names_field_value_and_limit(void **state)
{
    (void)state;
    check_refuses(no_layers, STATUS_OUT_OF_RANGE, "layers is 0; it has to be 1 to 4095");
    check_refuses(many_layers, STATUS_OUT_OF_RANGE, "4096");
    check_refuses(no_vocabulary, STATUS_OUT_OF_RANGE, "vocabulary is 0");
    check_refuses(odd_heads, STATUS_CONFLICT, "4 heads are not a multiple of 3");
    check_refuses(full_dropout, STATUS_OUT_OF_RANGE, "residual dropout is 1");
    check_refuses(nan_dropout, STATUS_OUT_OF_RANGE, "embedding's dropout is nan");
    check_refuses(mixed_family, STATUS_UNSUPPORTED, "RMSNorm");
    check_refuses(gpt2_width, STATUS_CONFLICT, "width 64");
}

static void every_allocation_may_fail(void **state)
{
    const int64_t live = heap_live();
    (void)state;
    write_text("config.json", "{" LLAMA_KEYS ",\"rope_scaling\":{\"rope_type\":\"default\"}}");
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        bool clean = false;
        for (uint64_t nth = 1; nth <= 500 && !clean; nth++) {
            struct model_spec spec;
            struct failure why;
            heap_fail(nth, for_ever != 0);
            const enum status status = spec_from_folder(folder, &spec, &why);
            clean = heap_failures() == 0;
            heap_fail(0, false);
            assert_int_equal(status, clean ? STATUS_OK : STATUS_OUT_OF_MEMORY);
            assert_int_equal(heap_live(), live);
        }
        assert_true(clean);
    }
    remove_file("config.json");
}

static int make_folder(void **state)
{
    (void)state;
    json_use_heap();
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    remove_file("config.json");
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets_have_the_known_sizes),
        cmocka_unit_test(counts_follow_the_shape),
        cmocka_unit_test(llama_with_biases_counts_them),
        cmocka_unit_test(llama_is_read),
        cmocka_unit_test(gpt2_is_read),
        cmocka_unit_test(wrong_folders_are_refused),
        cmocka_unit_test(weights_are_refused_for_now),
        cmocka_unit_test(check_names_field_value_and_limit),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
