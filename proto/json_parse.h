/* JSON text to a tree, safe when memory runs out. */
#ifndef BALLAST_PROTO_JSON_PARSE_H
#define BALLAST_PROTO_JSON_PARSE_H

#include <jansson.h>
#include <stddef.h>
#include "proto/base/status.h"

/* As json_loadb(), but survives every failed allocation: jansson 2.14 does not look whether its
 * token buffer could grow, and then loses characters or writes behind a string. MALFORMED fills
 * `out_error`; OUT_OF_MEMORY. The tree is the caller's (json_decref).
 *
 * Changes jansson's allocator for the time of the call: only while no other thread uses
 * jansson, so at start or in single-threaded programs. */
enum status json_parse(const char *text, size_t n_bytes, size_t flags, json_t **out_root,
                       json_error_t *out_error) MUST_CHECK;

#endif
