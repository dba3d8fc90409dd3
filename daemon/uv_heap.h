/* libuv's allocations through our heap.
 *
 * libuv 1.44 aborts when it cannot grow its table of watched descriptors. So the table is grown
 * to its final size once, at the start, and a reserve block stands in should exactly that
 * allocation fail; everything else in libuv reports UV_ENOMEM. Loop thread. */
#ifndef BALLAST_DAEMON_UV_HEAP_H
#define BALLAST_DAEMON_UV_HEAP_H

#include <uv.h>
#include "proto/base/status.h"

/* Call first of all, before any other libuv function. */
enum status uv_heap_install(struct failure *why) MUST_CHECK;
/* Grow the loop's table for descriptors below `n_descriptors`. */
enum status uv_heap_reserve_descriptors(uv_loop_t *loop, int n_descriptors,
                                        struct failure *why) MUST_CHECK;
/* Give the reserve back, for leak checks. */
void uv_heap_uninstall(void);

/* The status for a negative libuv code. */
enum status uv_heap_status(int uv_code);

#endif
