/* The manifest of a save: what is where, and proof that it is whole.
 *
 * A sealed text is compact JSON whose last member is the XXH3-128 of every byte before it, so
 * that no flipped byte goes unseen; the seal stays the same in all format versions. Parsing
 * checks everything that reading relies on: names, ranges, offsets in a strict layout.
 *
 *   {"format":"ballast save","version":1,"step":N,"world_size":W,"meta":{...},
 *    "shards":[{"file":"rank-0.bin","rank":0,"step":N,"bytes":B,"pieces":[
 *      {"tensor":"x","state":"param","tensor_n":E,"first":F,"n":N,"offset":O,"xxh3":"..."}]}],
 *    "xxh3":"..."}
 *
 * Pure but for the heap; any thread, but manifest_unseal(): json_parse() allows one thread at a
 * time in jansson, so it is the main thread's. */
#ifndef BALLAST_WORKER_SAVE_MANIFEST_H
#define BALLAST_WORKER_SAVE_MANIFEST_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/base/status.h"
#include "worker/save/save.h"

enum {
    MANIFEST_VERSION = 1,
    MANIFEST_HASH_BYTES = 33, /* 32 hexadecimal digits and a zero */
    SHARD_HEADER_BYTES = 64,
    SHARD_ALIGN_BYTES = 64
};

struct manifest_hash {
    char hex[MANIFEST_HASH_BYTES];
};

struct manifest_piece {
    const char *tensor; /* borrowed from the JSON */
    enum save_state state;
    uint64_t tensor_n, first, n;
    uint32_t shard;
    uint64_t offset; /* of its first byte in the shard */
    uint64_t gap;    /* bytes of zeros before it */
    struct manifest_hash hash;
};

struct manifest_shard {
    uint64_t bytes; /* of the file */
    size_t first_piece, n_pieces;
};

struct manifest {
    uint64_t step;
    uint32_t n_shards;             /* the world size that wrote it */
    struct manifest_shard *shards; /* owned */
    size_t n_pieces;
    struct manifest_piece *pieces;        /* owned; in file order, shard by shard */
    const struct manifest_piece **sorted; /* owned; by tensor, state, first element */
};

const char *manifest_state_name(enum save_state state);

/* Compact JSON of `object` with its seal, in new memory (heap_free it). */
enum status manifest_seal(const json_t *object, char **out_text, size_t *out_n,
                          struct failure *why) MUST_CHECK;
/* CORRUPT unless the seal fits. The object is the caller's, without the seal. */
enum status manifest_unseal(const char *text, size_t n, const char *path, json_t **out_object,
                            struct failure *why) MUST_CHECK;

/* Check and index; `json` must outlive the result. VERSION names both versions; CORRUPT names
 * what is wrong. */
enum status manifest_parse(const json_t *json, struct manifest *out_manifest,
                           struct failure *why) MUST_CHECK;
void manifest_fini(struct manifest *manifest);
/* The pieces of one tensor's state in `sorted`: [*out_first, *out_first + count). Returns count. */
size_t manifest_find(const struct manifest *manifest, const char *tensor, enum save_state state,
                     size_t *out_first);
/* INVALID unless every state that a tensor has is there in full. */
enum status manifest_check_complete(const struct manifest *manifest,
                                    struct failure *why) MUST_CHECK;

/* The header that a shard must begin with. */
void manifest_shard_header(uint64_t step, uint32_t rank, uint32_t n_ranks, uint64_t n_pieces,
                           uint64_t file_bytes, uint8_t out_header[static SHARD_HEADER_BYTES]);
/* Up to the next place where a piece may begin. */
uint64_t manifest_align(uint64_t offset);

#endif
