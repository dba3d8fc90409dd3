/* Training text as token samples: memory-mapped files, checked at the border.
 *
 * Formats: raw bytes (token = byte), llm.c (known by its magic), nanoGPT (headerless
 * uint16, must be asked for). Every id is checked against the vocabulary when
 * the file is opened, so nothing downstream meets a bad one. Owns the maps. Reading is
 * thread-safe. */
#ifndef BALLAST_WORKER_DATA_TOKENS_H
#define BALLAST_WORKER_DATA_TOKENS_H

#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"

enum data_format { DATA_AUTO, DATA_BYTES, DATA_LLMC, DATA_NANOGPT_UINT16 };

struct tokens; /* opaque, owned by the caller after open */

/* Open files as one stream of tokens each; a sample never crosses a file. BAD_DATA names file,
 * offset and id; NOT_FOUND, MALFORMED and IO name the file. A file with fewer than seq_len + 1
 * tokens is refused with both numbers. */
enum status tokens_open(const char *const *paths, size_t n_paths, enum data_format format,
                        uint32_t vocab, uint32_t seq_len, struct tokens **out_tokens,
                        struct failure *why) MUST_CHECK;
void tokens_close(struct tokens *tokens);

/* Samples in all files: sum of (n_tokens - 1) / seq_len. */
uint64_t tokens_n_samples(const struct tokens *tokens);
uint64_t tokens_n_tokens(const struct tokens *tokens);
/* Sample `index` (< n_samples): inputs(seq_len) and the next token as label(seq_len). */
void tokens_sample(const struct tokens *tokens, uint64_t index, int32_t *inputs, int32_t *labels);

#endif
