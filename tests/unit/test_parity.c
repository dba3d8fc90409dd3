/* Both families against an independent implementation: loss, every gradient, ten AdamW steps, under
 * every way to save memory. See tests/parity/README.md.
 * links: testing worker kernels proto base
 * labels: parity */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/heap.h"
#include "tests/lib/reference_file.h"
#include "tests/lib/small_training.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static const double bound = 1e-5;

static struct reference_file *open_reference(const char *name)
{
    char path[512];
    struct reference_file *file;
    struct failure why;
    snprintf(path, sizeof path, "%s/tests/parity/%s.ref", BALLAST_SOURCE_DIR, name);
    if (reference_open(path, &file, &why) != STATUS_OK) {
        fail_msg("%s", why.text);
    }
    return file;
}

static uint32_t count_of(const struct reference_file *file, const char *name)
{
    return (uint32_t)reference_scalar(file, name);
}

/* The two families call the same facts by different names. */
static void read_spec(const struct reference_file *file, bool gpt2, struct model_spec *spec)
{
    spec->vocab = count_of(file, "config.vocab_size");
    if (gpt2) {
        spec->max_positions = count_of(file, "config.n_positions");
        spec->width = count_of(file, "config.n_embd");
        spec->n_layers = count_of(file, "config.n_layer");
        spec->n_heads = spec->n_kv_heads = count_of(file, "config.n_head");
        spec->head_dim = spec->width / spec->n_heads;
        spec->inner = count_of(file, "config.n_inner");
        spec->norm_eps = (float)reference_scalar(file, "config.layer_norm_epsilon");
        return;
    }
    spec->max_positions = count_of(file, "config.max_position_embeddings");
    spec->width = count_of(file, "config.hidden_size");
    spec->n_layers = count_of(file, "config.num_hidden_layers");
    spec->n_heads = count_of(file, "config.num_attention_heads");
    spec->n_kv_heads = count_of(file, "config.num_key_value_heads");
    spec->head_dim = count_of(file, "config.head_dim");
    spec->inner = count_of(file, "config.intermediate_size");
    spec->norm_eps = (float)reference_scalar(file, "config.rms_norm_eps");
    spec->rope_theta = (float)reference_scalar(file, "config.rope_theta");
}

static void read_options(const struct reference_file *file, struct training_options *options)
{
    options->limits.global_batch = count_of(file, "config.batch");
    options->limits.seq_len = count_of(file, "config.seq_len");
    options->beta1 = reference_scalar(file, "config.beta1");
    options->beta2 = reference_scalar(file, "config.beta2");
    options->eps = reference_scalar(file, "config.eps");
    options->weight_decay = reference_scalar(file, "config.weight_decay");
    options->gradient_clipping = reference_scalar(file, "config.clip");
    options->schedule.lr = reference_scalar(file, "config.lr");
}

static void load_weights(const struct reference_file *file, struct small_training *small)
{
    for (uint32_t i = 0; i < small->units.n_tensors; i++) {
        const char *name = small->units.tensors[i].name;
        char key[REFERENCE_NAME_BYTES];
        size_t n;
        float *param = small_param(small, name, &n);
        snprintf(key, sizeof key, "weight/%s", name);
        memcpy(param, reference_floats(file, key, n), n * sizeof *param);
    }
}

static void check_near(double got, double want, const char *what)
{
    if (!(fabs(got - want) <= bound * fabs(want))) {
        fail_msg("%s: %.9g, the reference has %.9g", what, got, want);
    }
}

static void check_part(const float *got, const float *want, size_t n, const char *key)
{
    const double distance = reference_distance(got, want, n);
    if (!(distance <= bound)) {
        fail_msg("%s: %.3g from the reference", key, distance);
    }
}

/* Compare every tensor with "prefix/NAME". GPT-2's key bias, whose true gradient is zero, is
 * left out. */
static void check_tensors(const struct reference_file *file, struct small_training *small,
                          const char *prefix,
                          float *(*of)(struct small_training *, const char *, size_t *))
{
    for (uint32_t i = 0; i < small->units.n_tensors; i++) {
        const char *name = small->units.tensors[i].name;
        char key[REFERENCE_NAME_BYTES];
        size_t n;
        const float *got = of(small, name, &n);
        snprintf(key, sizeof key, "%s/%s", prefix, name);
        const float *want = reference_floats(file, key, n);
        if (strstr(name, "c_attn.bias") != NULL) {
            const size_t third = n / 3;
            check_part(got, want, third, key);
            check_part(got + 2 * third, want + 2 * third, third, key);
        } else {
            check_part(got, want, n, key);
        }
    }
}

static void ten_steps(const struct reference_file *file, struct small_training *small)
{
    const size_t n = (size_t)small->options.limits.global_batch * small->options.limits.seq_len;
    struct small_rows rows = {reference_ints(file, "inputs", n), reference_ints(file, "labels", n),
                              small->options.limits.seq_len};
    const struct batch_source source = small_rows_source(&rows);
    const uint32_t steps = count_of(file, "config.steps");
    bool clipped = false;
    bool unclipped = false;
    for (uint32_t step = 0; step < steps; step++) {
        char name[32];
        const struct step_result result = small_step(small, &source, step);
        assert_int_equal(result.labels, count_of(file, "n_valid"));
        assert_false(result.skipped);
        snprintf(name, sizeof name, "loss.%u", step);
        check_near(result.loss, reference_scalar(file, name), name);
        snprintf(name, sizeof name, "grad_norm.%u", step);
        check_near(result.grad_norm, reference_scalar(file, name), name);
        if (step == 0) {
            check_near(result.loss, reference_scalar(file, "loss"), "loss");
            check_tensors(file, small, "grad", small_grad);
        }
        clipped |= result.grad_norm > small->options.gradient_clipping;
        unclipped |= result.grad_norm < small->options.gradient_clipping;
        small_check_peak(small, PHASE_FORWARD);
        small_check_peak(small, PHASE_BACKWARD);
        small_check_peak(small, PHASE_STEP);
    }
    assert_true(clipped && unclipped);
    check_tensors(file, small, "final", small_param);
}

struct way {
    enum checkpointing checkpointing;
    uint32_t blocks, loss_tile, micro_batch;
};

static void check_way(const struct reference_file *file, bool gpt2, struct way way)
{
    struct small_training small;
    small_init(&small, gpt2 ? "gpt2-tiny" : "t0");
    read_spec(file, gpt2, &small.spec);
    read_options(file, &small.options);
    small.strategy.checkpointing = way.checkpointing;
    small.strategy.checkpoint_blocks = way.blocks;
    small.strategy.loss_tile = way.loss_tile;
    small.strategy.micro_batch = way.micro_batch;
    /* Painted memory shows what reads before it writes. */
    small.options.paint = true;
    small_open(&small);
    /* Nothing may be missing on either side. */
    size_t n_weights = 0;
    for (size_t i = 0; i < reference_n_entries(file); i++) {
        n_weights += strncmp(reference_entry(file, i)->name, "weight/", 7) == 0;
    }
    assert_int_equal(n_weights, small.units.n_tensors);
    load_weights(file, &small);
    ten_steps(file, &small);
    small_close(&small);
}

static void check_family(const char *name, bool gpt2)
{
    static const struct way modes[] = {
        {.checkpointing = CHECKPOINTING_NONE, .blocks = 1},
        {.checkpointing = CHECKPOINTING_SELECTIVE, .blocks = 1},
        {.checkpointing = CHECKPOINTING_SPLIT, .blocks = 1},
        {.checkpointing = CHECKPOINTING_BLOCK, .blocks = 1},
        {.checkpointing = CHECKPOINTING_BLOCK, .blocks = 2},
    };
    struct reference_file *file = open_reference(name);
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        for (uint32_t tile = 0; tile <= 5; tile += 5) {
            for (uint32_t micro_batch = 1; micro_batch <= 3; micro_batch += 2) {
                struct way way = modes[i];
                way.loss_tile = tile;
                way.micro_batch = micro_batch;
                check_way(file, gpt2, way);
            }
        }
    }
    reference_close(file);
}

static void gpt2_matches(void **state)
{
    (void)state;
    check_family("gpt2", true);
}

static void llama_matches(void **state)
{
    (void)state;
    check_family("llama", false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_matches),
        cmocka_unit_test(llama_matches),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (heap_live() != 0);
}
