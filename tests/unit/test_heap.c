/* The counted heap and its failures on purpose.
 * links: base */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include "proto/base/fault.h"
#include "proto/base/heap.h"
#include <cmocka.h> /* last: it has a macro `fail` */

static void counts_blocks(void **state)
{
    (void)state;
    int64_t live = heap_live();
    heap_fail(0, false);
    char *a = heap_alloc(10), *b = heap_calloc(3, 5), *c = heap_strdup("text"), *d = heap_alloc(0);
    assert_non_null(a);
    assert_non_null(d);
    for (int i = 0; i < 15; i++) {
        assert_int_equal(b[i], 0);
    }
    assert_string_equal(c, "text");
    assert_int_equal(heap_live(), live + 4);
    assert_int_equal(heap_calls(), 4);
    memset(a, 7, 10);
    a = heap_realloc(a, 1000);
    assert_non_null(a);
    assert_int_equal(a[9], 7);
    assert_int_equal(heap_live(), live + 4);
    char *e = heap_realloc(NULL, 8);
    assert_int_equal(heap_live(), live + 5);
    assert_int_equal(heap_calls(), 6);
    assert_int_equal(heap_failures(), 0);
    heap_free(a);
    heap_free(b);
    heap_free(c);
    heap_free(d);
    heap_free(e);
    heap_free(NULL);
    assert_int_equal(heap_live(), live);
    assert_null(heap_calloc(SIZE_MAX / 2, 4));
    assert_int_equal(heap_live(), live);
}

static void nth_fails_once(void **state)
{
    (void)state;
    heap_fail(2, false);
    void *a = heap_alloc(1), *b = heap_alloc(1), *c = heap_alloc(1);
    assert_non_null(a);
    assert_null(b);
    assert_non_null(c);
    assert_int_equal(heap_calls(), 3);
    assert_int_equal(heap_failures(), 1);
    heap_fail(1, false);
    assert_null(heap_realloc(a, 100)); /* and `a` is still there */
    heap_free(a);
    heap_free(c);
    heap_fail(0, false);
}

static void nth_fails_for_ever(void **state)
{
    (void)state;
    heap_fail(2, true);
    void *a = heap_alloc(1);
    assert_non_null(a);
    assert_null(heap_alloc(1));
    assert_null(heap_calloc(1, 1));
    assert_null(heap_strdup(""));
    assert_int_equal(heap_failures(), 3);
    heap_fail(0, false);
    void *b = heap_alloc(1);
    assert_non_null(b);
    heap_free(a);
    heap_free(b);
}

static void fault_point_fails_it(void **state)
{
    (void)state;
    struct failure why;
    heap_fail(0, false);
    assert_int_equal(fault_arm("alloc:nth=3", &why), STATUS_OK);
    void *blocks[4];
    for (int i = 0; i < 4; i++) {
        blocks[i] = heap_alloc(1);
        assert_int_equal(blocks[i] == NULL, i == 2);
        heap_free(blocks[i]);
    }
    assert_int_equal(heap_failures(), 1);
    fault_disarm_all();
}

static _Atomic unsigned n_null;

static void *allocate_many(void *data)
{
    for (int i = 0; i < 1000; i++) {
        void *block = heap_alloc(16);
        if (block == NULL) {
            atomic_fetch_add(&n_null, 1);
        }
        heap_free(block);
    }
    return data;
}

static void exactly_one_thread_meets_the_failure(void **state)
{
    (void)state;
    int64_t live = heap_live();
    heap_fail(1500, false);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, allocate_many, NULL), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(n_null, 1);
    assert_int_equal(heap_failures(), 1);
    assert_int_equal(heap_calls(), 4000);
    assert_int_equal(heap_live(), live);
    heap_fail(0, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_blocks),
        cmocka_unit_test(nth_fails_once),
        cmocka_unit_test(nth_fails_for_ever),
        cmocka_unit_test(fault_point_fails_it),
        cmocka_unit_test(exactly_one_thread_meets_the_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
