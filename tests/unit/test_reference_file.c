/* The reader of reference files, on the files of tests/parity and on damaged text.
 *
 * links: testing base
 */
#include "tests/lib/reference_file.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "proto/base/heap.h"

static struct reference_file *open_named(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tests/parity/%s", BALLAST_SOURCE_DIR, name);
    struct reference_file *file = NULL;
    struct failure why = {0};
    if (reference_open(path, &file, &why) != STATUS_OK)
        fail_msg("%s", why.text);
    return file;
}

static size_t count_prefix(const struct reference_file *file, const char *prefix)
{
    size_t n = 0;
    for (size_t i = 0; i < reference_n_entries(file); i++)
        n += strncmp(reference_entry(file, i)->name, prefix, strlen(prefix)) == 0;
    return n;
}

/* What is stored has to be consistent: the norm of the gradients is the stored norm. */
static double norm_of(const struct reference_file *file, const char *prefix)
{
    double sum = 0;
    for (size_t i = 0; i < reference_n_entries(file); i++) {
        const struct reference_entry *entry = reference_entry(file, i);
        if (strncmp(entry->name, prefix, strlen(prefix)) != 0)
            continue;
        for (size_t k = 0; k < entry->n; k++)
            sum += (double)entry->floats[k] * (double)entry->floats[k];
    }
    return sqrt(sum);
}

static void check_family(const char *name, size_t n_tensors, double loss, double grad_norm)
{
    struct reference_file *file = open_named(name);
    assert_int_equal(count_prefix(file, "weight/"), n_tensors);
    assert_int_equal(count_prefix(file, "grad/"), n_tensors);
    assert_int_equal(count_prefix(file, "final/"), n_tensors);
    assert_true(fabs(reference_scalar(file, "loss") - loss) < 1e-6);
    assert_true(fabs(reference_scalar(file, "grad_norm") - grad_norm) < 1e-6);
    assert_true(reference_scalar(file, "loss.0") == reference_scalar(file, "loss"));
    assert_true(fabs(norm_of(file, "grad/") / grad_norm - 1) < 1e-6);

    const int32_t *inputs = reference_ints(file, "inputs", 36);
    const int32_t *labels = reference_ints(file, "labels", 36);
    size_t n_valid = 0;
    for (size_t i = 0; i < 36; i++) {
        assert_in_range(inputs[i], 0, 60);
        assert_true(labels[i] >= -1 && labels[i] < 61);
        n_valid += labels[i] >= 0;
        /* Labels are the next inputs, where they count. */
        if (labels[i] >= 0 && i % 12 != 11)
            assert_int_equal(labels[i], inputs[i + 1]);
    }
    assert_true((double)n_valid == reference_scalar(file, "n_valid"));
    reference_close(file);
}

static void test_gpt2(void **state)
{
    (void)state;
    check_family("gpt2.ref", 28, 5.011925, 4.349630);
    struct reference_file *file = open_named("gpt2.ref");
    const struct reference_entry *qkv =
        reference_find(file, "weight/transformer.h.1.attn.c_attn.weight");
    assert_non_null(qkv);
    assert_int_equal(qkv->n_dimensions, 2);
    assert_int_equal(qkv->shape[0], 96);
    assert_int_equal(qkv->shape[1], 32);
    /* The key bias, the middle third, has no gradient; the query's and value's have. */
    const float *bias = reference_floats(file, "grad/transformer.h.1.attn.c_attn.bias", 96);
    for (size_t i = 0; i < 32; i++) {
        assert_true(fabsf(bias[i]) > 1e-6f);
        assert_true(fabsf(bias[32 + i]) < 1e-12f);
        assert_true(fabsf(bias[64 + i]) > 1e-6f);
    }
    reference_close(file);
}

static void test_llama(void **state)
{
    (void)state;
    check_family("llama.ref", 21, 4.477778, 7.377798);
    struct reference_file *file = open_named("llama.ref");
    assert_int_equal(reference_find(file, "grad/model.layers.0.self_attn.k_proj.weight")->shape[0],
                     16);
    assert_null(reference_find(file, "grad/model.layers.2.self_attn.k_proj.weight"));
    /* Ten steps moved the weights, each by no more than about ten learning rates. */
    const float *before = reference_floats(file, "weight/model.norm.weight", 32);
    const float *after = reference_floats(file, "final/model.norm.weight", 32);
    double moved = reference_distance(after, before, 32);
    assert_true(moved > 1e-3 && moved < 2e-2);
    reference_close(file);
}

static void check_refused(const char *text, size_t n_bytes, enum status wanted, const char *part)
{
    struct reference_file *file = NULL;
    struct failure why = {0};
    enum status status = reference_parse(text, n_bytes, "text", &file, &why);
    if (status != wanted || file != NULL)
        fail_msg("'%s' gave %s", text, status_name(status));
    if (strstr(why.text, part) == NULL)
        fail_msg("'%s' does not mention '%s'", why.text, part);
}

static void test_damaged(void **state)
{
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "begin"},
        {"ballast-reference 2\nend\n", "begin"},
        {"ballast-reference 1 \nscalar a 1\n", "end"},
        {"ballast-reference 1 2\nend\n", ":1:"},
        {"ballast-reference 1\n\nend\n", ":2: an empty line"},
        {"ballast-reference 1\nscalar a\nend\n", ":2:"},
        {"ballast-reference 1\nscalar a 1x\nend\n", "one number"},
        {"ballast-reference 1\nscalar a 1 2\nend\n", "one number"},
        {"ballast-reference 1\nscalar a 1\nscalar a 1\nend\n", ":3: the name stands there twice"},
        {"ballast-reference 1\nvector a 1 1 0\nend\n....", "expected tensor"},
        {"ballast-reference 1\ntensor a 1 2 0\nend\n....", "past the end"},
        {"ballast-reference 1\ntensor a 1 1 4\nend\n....", "past the end"},
        {"ballast-reference 1\ntensor a 1 1 2\nend\n......", "past the end"},
        {"ballast-reference 1\ntensor a 1 -1 0\nend\n....", "out of range"},
        {"ballast-reference 1\ntensor a 2 9999999 9999999 0\nend\n....", "out of range"},
        {"ballast-reference 1\ntensor a 0 0\nend\n....", "1 to 4 dimensions"},
        {"ballast-reference 1\ntensor a 5 1 1 1 1 1 0\nend\n....", "too many words"},
        {"ballast-reference 1\ntensor a 2 1 0\nend\n....", "1 to 4 dimensions"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_refused(cases[i].text, strlen(cases[i].text), STATUS_MALFORMED, cases[i].part);
    struct reference_file *file = NULL;
    struct failure why = {0};
    assert_int_equal(reference_open("/nonexistent/file.ref", &file, &why), STATUS_NOT_FOUND);
    assert_non_null(strstr(why.text, "/nonexistent/file.ref"));
    assert_int_equal(heap_live(), 0);
}

static void test_distance(void **state)
{
    (void)state;
    const float a[] = {3, 4, 0}, b[] = {3, 4, 0.5f}, zero[] = {0, 0, 0};
    assert_true(reference_distance(a, a, 3) == 0);
    assert_true(fabs(reference_distance(b, a, 3) - 0.1) < 1e-12);
    assert_true(fabs(reference_distance(a, zero, 3) - 5) < 1e-12);
}

/* Fail allocation number 1, 2, 3, ... until it goes through: a status each time, no leak. */
static void test_allocation_failures(void **state)
{
    (void)state;
    static const char text[] =
        "ballast-reference 1\nscalar s 2.5\ntensor a 2 1 1 0\nend\n\0\0\x80?";
    for (uint64_t nth = 1;; nth++) {
        assert_true(nth < 20);
        struct reference_file *file = NULL;
        struct failure why = {0};
        heap_fail(nth, false);
        enum status status = reference_parse(text, sizeof text - 1, "text", &file, &why);
        uint64_t n_failed = heap_failures();
        heap_fail(0, false);
        if (n_failed == 0) {
            assert_int_equal(status, STATUS_OK);
            assert_true(reference_scalar(file, "s") == 2.5);
            assert_true(reference_floats(file, "a", 1)[0] == 1.0f);
            reference_close(file);
            break;
        }
        assert_int_equal(status, STATUS_OUT_OF_MEMORY);
        assert_null(file);
        assert_int_equal(heap_live(), 0);
    }
    assert_int_equal(heap_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2),
        cmocka_unit_test(test_llama),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_distance),
        cmocka_unit_test(test_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
