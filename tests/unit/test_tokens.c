/* Data files at the border: formats, sizes, every id, samples.
 * links: base worker */
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
#include "worker/data/tokens.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static char folder[] = "/tmp/ballast-tokens-XXXXXX";

static const char *path_of(const char *name, char path[static 256])
{
    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *head, size_t head_bytes, const void *body,
                       size_t body_bytes)
{
    char path[256];
    FILE *file = fopen(path_of(name, path), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(head, 1, head_bytes, file), head_bytes);
    assert_int_equal(fwrite(body, 1, body_bytes, file), body_bytes);
    assert_int_equal(fclose(file), 0);
}

static void write_llmc(const char *name, int32_t magic, int32_t version, int32_t count,
                       const void *body, size_t body_bytes)
{
    int32_t header[256] = {magic, version, count};
    write_file(name, header, sizeof(header), body, body_bytes);
}

static enum status open_one(const char *name, enum data_format format, uint32_t vocab,
                            uint32_t seq_len, struct tokens **out_tokens, struct failure *why)
{
    char path[256];
    const char *paths[] = {path_of(name, path)};
    return tokens_open(paths, 1, format, vocab, seq_len, out_tokens, why);
}

/* The open fails with this status, says all of `parts` (NULL-terminated) and leaks nothing. */
static void refused(const char *name, enum data_format format, uint32_t vocab, uint32_t seq_len,
                    enum status status, const char *const *parts)
{
    struct tokens *tokens = NULL;
    struct failure why = {.status = STATUS_OK};
    const int64_t live = heap_live();
    assert_int_equal(open_one(name, format, vocab, seq_len, &tokens, &why), status);
    assert_int_equal(why.status, status);
    assert_null(tokens);
    assert_int_equal(heap_live(), live);
    assert_non_null(strstr(why.text, name));
    for (; *parts; parts++) {
        if (!strstr(why.text, *parts)) {
            print_error("'%s' lacks '%s'\n", why.text, *parts);
        }
        assert_non_null(strstr(why.text, *parts));
    }
}

#define PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void bytes_are_tokens(void **state)
{
    static const uint8_t text[] = {0, 255, 'a', 'b', 'c', 'd', 'e', 'f', 'g'};
    struct tokens *tokens;
    int32_t inputs[4], labels[4];
    (void)state;
    write_file("text", "", 0, text, sizeof(text));
    assert_int_equal(open_one("text", DATA_AUTO, 256, 4, &tokens, NULL), STATUS_OK);
    assert_int_equal(tokens_n_tokens(tokens), 9);
    assert_int_equal(tokens_n_samples(tokens), 2); /* (9 - 1) / 4 */
    tokens_sample(tokens, 0, inputs, labels);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(inputs[i], text[i]);
        assert_int_equal(labels[i], text[i + 1]);
    }
    tokens_sample(tokens, 1, inputs, labels);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(inputs[i], text[4 + i]);
        assert_int_equal(labels[i], text[5 + i]);
    }
    tokens_close(tokens);
    refused("text", DATA_AUTO, 255, 4, STATUS_BAD_DATA, PARTS("256", "255"));
    refused("text", DATA_BYTES, 250, 4, STATUS_BAD_DATA, PARTS("256", "250"));
}

static void llmc_is_known_by_its_magic(void **state)
{
    uint16_t narrow[100];
    uint32_t wide[100];
    int32_t inputs[10], labels[10];
    struct tokens *tokens;
    (void)state;
    for (int i = 0; i < 100; i++) {
        narrow[i] = (uint16_t)(i * 3);
        wide[i] = (uint32_t)(i * 700);
    }
    write_llmc("narrow.bin", 20240520, 1, 100, narrow, sizeof(narrow));
    write_llmc("wide.bin", 20240801, 7, 100, wide, sizeof(wide));
    assert_int_equal(open_one("narrow.bin", DATA_AUTO, 300, 10, &tokens, NULL), STATUS_OK);
    assert_int_equal(tokens_n_tokens(tokens), 100);
    assert_int_equal(tokens_n_samples(tokens), 9);
    tokens_sample(tokens, 8, inputs, labels);
    assert_int_equal(inputs[0], 240);
    assert_int_equal(labels[9], 270);
    tokens_close(tokens);
    assert_int_equal(open_one("wide.bin", DATA_LLMC, 69301, 10, &tokens, NULL), STATUS_OK);
    tokens_sample(tokens, 8, inputs, labels);
    assert_int_equal(inputs[9], 89 * 700);
    assert_int_equal(labels[9], 90 * 700); /* above 65,535: not wrapped */
    tokens_close(tokens);
}

static void nanogpt_has_to_be_asked_for(void **state)
{
    static const uint16_t ids[] = {1, 2, 300, 4, 50256};
    struct tokens *tokens;
    int32_t inputs[4], labels[4];
    (void)state;
    write_file("nano.bin", "", 0, ids, sizeof(ids));
    assert_int_equal(open_one("nano.bin", DATA_NANOGPT_UINT16, 50257, 4, &tokens, NULL), STATUS_OK);
    assert_int_equal(tokens_n_tokens(tokens), 5);
    tokens_sample(tokens, 0, inputs, labels);
    assert_int_equal(inputs[2], 300);
    assert_int_equal(labels[3], 50256);
    tokens_close(tokens);
    assert_int_equal(open_one("nano.bin", DATA_AUTO, 50257, 4, &tokens, NULL), STATUS_OK);
    assert_int_equal(tokens_n_tokens(tokens), 10);
    tokens_close(tokens);
    write_file("odd.bin", "x", 1, ids, sizeof(ids));
    refused("odd.bin", DATA_NANOGPT_UINT16, 50257, 4, STATUS_MALFORMED, PARTS("11 bytes", "odd"));
}

/* Bug case 19 (a): V = 256, one id 256 at token 1,000. */
static void an_id_at_the_vocabulary_is_refused(void **state)
{
    static uint16_t ids[2000];
    (void)state;
    memset(ids, 0, sizeof(ids));
    ids[1000] = 256;
    write_llmc("case19a.bin", 20240520, 1, 2000, ids, sizeof(ids));
    refused("case19a.bin", DATA_AUTO, 256, 64, STATUS_BAD_DATA,
            PARTS("byte 3024", "token 1000", "id is 256", "0 to 255"));
    write_file("case19a-nano.bin", "", 0, ids, sizeof(ids));
    refused("case19a-nano.bin", DATA_NANOGPT_UINT16, 256, 64, STATUS_BAD_DATA,
            PARTS("byte 2000", "token 1000", "id is 256", "0 to 255"));
    struct tokens *tokens;
    assert_int_equal(open_one("case19a.bin", DATA_AUTO, 257, 64, &tokens, NULL), STATUS_OK);
    tokens_close(tokens);
}

/* Bug case 19 (b): ids up to 70,000 need 32 bits; they are never wrapped to 4,464. */
static void a_wide_id_is_refused(void **state)
{
    static uint32_t ids[70000];
    (void)state;
    for (uint32_t i = 0; i < 70000; i++) {
        ids[i] = i % 60000;
    }
    ids[69000] = 70000;
    ids[69999] = UINT32_MAX; /* the first bad one is named, not the largest */
    write_llmc("case19b.bin", 20240801, 7, 70000, ids, sizeof(ids));
    refused("case19b.bin", DATA_AUTO, 65536, 64, STATUS_BAD_DATA,
            PARTS("byte 277024", "token 69000", "id is 70000", "0 to 65535"));
    ids[69000] = 0;
    write_llmc("case19b.bin", 20240801, 7, 70000, ids, sizeof(ids));
    refused("case19b.bin", DATA_AUTO, 65536, 64, STATUS_BAD_DATA,
            PARTS("token 69999", "id is 4294967295"));
    /* As sixteen-bit words the file is twice as long as its header says. */
    write_llmc("case19b16.bin", 20240520, 1, 70000, ids, sizeof(ids));
    refused("case19b16.bin", DATA_AUTO, 131072, 64, STATUS_MALFORMED,
            PARTS("281024 bytes", "70000 tokens of 2 bytes", "141024"));
}

static void broken_files_are_refused(void **state)
{
    uint16_t ids[50] = {0};
    (void)state;
    write_llmc("short.bin", 20240520, 1, 51, ids, sizeof(ids));
    refused("short.bin", DATA_AUTO, 256, 8, STATUS_MALFORMED, PARTS("1124 bytes", "51", "1126"));
    write_llmc("long.bin", 20240520, 1, 49, ids, sizeof(ids));
    refused("long.bin", DATA_AUTO, 256, 8, STATUS_MALFORMED, PARTS("1124 bytes", "49", "1122"));
    write_llmc("negative.bin", 20240801, 7, -1, ids, sizeof(ids));
    refused("negative.bin", DATA_AUTO, 256, 8, STATUS_MALFORMED, PARTS("4294967295"));
    write_llmc("version.bin", 20240520, 2, 50, ids, sizeof(ids));
    refused("version.bin", DATA_AUTO, 256, 8, STATUS_UNSUPPORTED, PARTS("version 2", "only 1"));
    const int32_t magic = 20240520;
    write_file("stub.bin", &magic, sizeof(magic), ids, 20);
    refused("stub.bin", DATA_AUTO, 256, 8, STATUS_MALFORMED, PARTS("24 bytes", "1024"));
    write_llmc("other.bin", 12345, 1, 50, ids, sizeof(ids));
    refused("other.bin", DATA_LLMC, 256, 8, STATUS_MALFORMED, PARTS("12345", "20240520"));
    write_file("empty", "", 0, "", 0);
    refused("empty", DATA_AUTO, 256, 8, STATUS_BAD_DATA, PARTS("empty", "9"));
    refused("missing", DATA_AUTO, 256, 8, STATUS_NOT_FOUND, PARTS("No such file"));
    refused(".", DATA_AUTO, 256, 8, STATUS_INVALID, PARTS("regular"));
    write_file("few", "", 0, "12345678", 8);
    refused("few", DATA_AUTO, 256, 8, STATUS_BAD_DATA, PARTS("8 tokens", "seq_len 8", "9"));
    char pipe[256];
    assert_int_equal(mkfifo(path_of("pipe", pipe), 0600), 0);
    refused("pipe", DATA_AUTO, 256, 8, STATUS_INVALID, PARTS("regular"));
}

static void megatron_is_refused(void **state)
{
    (void)state;
    write_file("corpus.idx", "MMIDIDX\0", 8, "0123456789", 10);
    write_file("corpus.bin", "", 0, "0123456789", 10);
    refused("corpus.idx", DATA_AUTO, 256, 4, STATUS_UNSUPPORTED, PARTS("Megatron"));
    refused("corpus.bin", DATA_AUTO, 256, 4, STATUS_UNSUPPORTED, PARTS("Megatron"));
    struct tokens *tokens;
    assert_int_equal(open_one("corpus.bin", DATA_BYTES, 256, 4, &tokens, NULL), STATUS_OK);
    tokens_close(tokens);
}

/* Samples of several files: counted per file, in order, none across a border. */
static void samples_stay_inside_a_file(void **state)
{
    char a[256], b[256], c[256];
    int32_t inputs[4], labels[4];
    struct tokens *tokens;
    (void)state;
    write_file("a", "", 0, "aaaaaaa", 7);        /* 1 sample of 4 */
    write_file("b", "", 0, "bcdefghijklmn", 13); /* 3 */
    write_file("c", "", 0, "ccccc", 5);          /* 1 */
    const char *paths[] = {path_of("a", a), path_of("b", b), path_of("c", c)};
    assert_int_equal(tokens_open(paths, 3, DATA_AUTO, 256, 4, &tokens, NULL), STATUS_OK);
    assert_int_equal(tokens_n_tokens(tokens), 25);
    assert_int_equal(tokens_n_samples(tokens), 5);
    static const char first[] = "abfjc", last[] = "afjnc";
    for (uint64_t i = 0; i < 5; i++) {
        tokens_sample(tokens, i, inputs, labels);
        assert_int_equal(inputs[0], first[i]);
        assert_int_equal(labels[3], last[i]);
    }
    tokens_close(tokens);
    /* One bad file fails the whole and releases the others. */
    const char *broken[] = {paths[0], "/nonexistent/file", paths[2]};
    struct failure why;
    const int64_t live = heap_live();
    assert_int_equal(tokens_open(broken, 3, DATA_AUTO, 256, 4, &tokens, &why), STATUS_NOT_FOUND);
    assert_non_null(strstr(why.text, "/nonexistent/file"));
    assert_int_equal(heap_live(), live);
    assert_int_equal(tokens_open(paths, 0, DATA_AUTO, 256, 4, &tokens, &why), STATUS_INVALID);
    assert_int_equal(tokens_open(paths, 1, DATA_AUTO, 256, 0, &tokens, &why), STATUS_INVALID);
    tokens_close(NULL);
}

static void every_allocation_may_fail(void **state)
{
    char a[256], b[256];
    const char *paths[] = {path_of("a", a), path_of("b", b)};
    const int64_t live = heap_live();
    (void)state;
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        for (uint64_t nth = 1; nth <= 20; nth++) {
            struct tokens *tokens = NULL;
            struct failure why;
            heap_fail(nth, for_ever != 0);
            const enum status status = tokens_open(paths, 2, DATA_AUTO, 256, 4, &tokens, &why);
            const uint64_t failures = heap_failures();
            heap_fail(0, false);
            if (failures == 0) {
                assert_int_equal(status, STATUS_OK);
                assert_int_equal(nth, 4); /* the list and two paths */
                tokens_close(tokens);
                break;
            }
            assert_int_equal(status, STATUS_OUT_OF_MEMORY);
            assert_int_equal(heap_live(), live);
        }
    }
    assert_int_equal(heap_live(), live);
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    static const char *const names[] = {"text",
                                        "narrow.bin",
                                        "wide.bin",
                                        "nano.bin",
                                        "odd.bin",
                                        "case19a.bin",
                                        "stub.bin",
                                        "case19b.bin",
                                        "short.bin",
                                        "long.bin",
                                        "few",
                                        "negative.bin",
                                        "other.bin",
                                        "version.bin",
                                        "empty",
                                        "pipe",
                                        "a",
                                        "case19a-nano.bin",
                                        "b",
                                        "c",
                                        "corpus.idx",
                                        "corpus.bin",
                                        "case19b16.bin"};
    char path[256];
    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        unlink(path_of(names[i], path));
    }
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_tokens),
        cmocka_unit_test(llmc_is_known_by_its_magic),
        cmocka_unit_test(nanogpt_has_to_be_asked_for),
        cmocka_unit_test(an_id_at_the_vocabulary_is_refused),
        cmocka_unit_test(a_wide_id_is_refused),
        cmocka_unit_test(broken_files_are_refused),
        cmocka_unit_test(megatron_is_refused),
        cmocka_unit_test(samples_stay_inside_a_file),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
