/* A CPU table for a test of kernels, or the test fails. */
#ifndef BALLAST_TESTS_LIB_KERNEL_OPS_H
#define BALLAST_TESTS_LIB_KERNEL_OPS_H

#include "kernels/ops.h"

struct ops *kernel_ops(int n_threads); /* fp32 */
struct ops *kernel_ops_of(enum dtype dtype, int n_threads);
/* Checks that no operation failed, and frees. */
void kernel_ops_free(struct ops *ops);

#endif
