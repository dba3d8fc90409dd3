/* See kernel_ops.h. */
#include "tests/lib/kernel_ops.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

struct ops *kernel_ops(int n_threads)
{
    return kernel_ops_of(DTYPE_FP32, n_threads);
}

struct ops *kernel_ops_of(enum dtype dtype, int n_threads)
{
    struct ops *ops = NULL;
    struct failure why = {0};
    if (cpu_ops_new(dtype, n_threads, &ops, &why) != STATUS_OK)
        fail_msg("%s", why.text);
    return ops;
}

void kernel_ops_free(struct ops *ops)
{
    struct failure why = {0};
    if (ops->check(ops, &why) != STATUS_OK)
        fail_msg("%s", why.text);
    ops->free(ops);
}
