/* What the tests of the configuration share: a folder, files in it, and what has to come of them.
 *
 * Included once and last: it includes cmocka.h. */
#ifndef BALLAST_TESTS_UNIT_CONFIG_FIXTURE_H
#define BALLAST_TESTS_UNIT_CONFIG_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "proto/json.h"
#include "worker/config.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static char folder[] = "/tmp/ballast-config-XXXXXX";
static struct config config; /* too large for the stack of a test */

static inline void in_folder(const char *name, char path[static 256])
{
    snprintf(path, 256, "%s/%s", folder, name);
}

static inline void write_text(const char *name, const char *text)
{
    char path[256];
    in_folder(name, path);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

static inline enum status load(const char *text, uint32_t world_size, struct failure *why)
{
    char name[256];
    in_folder("run.json", name);
    return config_from_text(text, strlen(text), name, world_size, &config, why);
}

static inline void load_ok(const char *text, uint32_t world_size)
{
    struct failure why;
    const enum status status = load(text, world_size, &why);
    if (status) {
        print_error("%s\n%s: %s\n", text, status_name(status), why.text);
    }
    assert_int_equal(status, STATUS_OK);
}

static inline void has(const char *text, const char *part)
{
    if (!strstr(text, part)) {
        print_error("'%s' lacks '%s'\n", text, part);
    }
    assert_non_null(strstr(text, part));
}

#define PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})

static inline void refused(const char *text, uint32_t world_size, enum status expected,
                    const char *const *parts)
{
    struct failure why;
    const int64_t live = heap_live();
    config.steps = 4711;
    const enum status status = load(text, world_size, &why);
    if (status != expected) {
        print_error("%.300s\n%s: %s\n", text, status_name(status), status ? why.text : "accepted");
    }
    assert_int_equal(status, expected);
    assert_int_equal(why.status, expected);
    assert_int_equal(config.steps, 4711); /* no output on failure */
    assert_int_equal(heap_live(), live);
    for (; *parts; parts++) {
        has(why.text, *parts);
    }
}

/* A file whose second line holds `top` and whose third holds `ours`; both may be empty. */
#define FILE_OF(top, ours)                                                                         \
    "{\n" top "\n\"ballast\": {" ours "\n"                                                         \
    "\"model\": \"t0\", \"data\": \"data.txt\", \"steps\": 10}}\n"
#define OURS(ours) FILE_OF("", ours)
#define TOP(top) FILE_OF(top, "")

static inline int make_folder(void **state)
{
    (void)state;
    json_use_heap();
    if (!mkdtemp(folder)) {
        return -1;
    }
    write_text("data.txt", "In the beginning God created the heaven and the earth.\n");
    return 0;
}

static inline int remove_folder(void **state)
{
    static const char *const names[] = {"data.txt", "good.json",         "check.json",
                                        "help.txt", "model/config.json", "model"};
    char path[256];
    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        in_folder(names[i], path);
        remove(path);
    }
    return rmdir(folder);
}

#endif
