/* Seal, unseal, check and index a manifest. Owns the index; the JSON is the caller's. */
#include "worker/save/manifest.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "proto/base/heap.h"
#include "proto/json_parse.h"
#include "worker/save/hash.h"

/* A sealed text ends  ,"xxh3":"32 digits"}  and a newline. */
static const char seal_head[] = ",\"xxh3\":\"";
static const char seal_tail[] = "\"}\n";
enum { SEAL_BYTES = sizeof seal_head - 1 + MANIFEST_HASH_BYTES - 1 + sizeof seal_tail - 1 };

/* Doubles are written with 17 digits, so that they read back to the same bits. */
static const size_t dump_flags = JSON_COMPACT | JSON_REAL_PRECISION(17);

const char *manifest_state_name(enum save_state state)
{
    static const char *const names[N_SAVE_STATES] = {"param", "moment_m", "moment_v"};
    return names[state];
}

static bool state_from_name(const char *name, enum save_state *out_state)
{
    for (int state = 0; state < N_SAVE_STATES; state++) {
        if (strcmp(name, manifest_state_name((enum save_state)state)) == 0) {
            *out_state = (enum save_state)state;
            return true;
        }
    }
    return false;
}

enum status manifest_seal(const json_t *object, char **out_text, size_t *out_n, struct failure *why)
{
    size_t n = json_dumpb(object, NULL, 0, dump_flags);
    char *text = n < 2 ? NULL : heap_alloc(n + SEAL_BYTES + 1);
    if (text == NULL || json_dumpb(object, text, n, dump_flags) != n) {
        heap_free(text);
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for a manifest of %zu bytes", n);
    }
    size_t body = n - 1; /* without the closing brace */
    struct manifest_hash hash = hash_of(text, body);
    snprintf(text + body, SEAL_BYTES + 1, "%s%s%s", seal_head, hash.hex, seal_tail);
    *out_text = text;
    *out_n = body + SEAL_BYTES;
    return STATUS_OK;
}

enum status manifest_unseal(const char *text, size_t n, const char *path, json_t **out_object,
                            struct failure *why)
{
    if (n < SEAL_BYTES + 1) {
        return fail(why, STATUS_CORRUPT, "%s has only %zu bytes: it is not whole", path, n);
    }
    size_t body = n - SEAL_BYTES;
    char seal[SEAL_BYTES + 1];
    struct manifest_hash hash = hash_of(text, body);
    snprintf(seal, sizeof seal, "%s%s%s", seal_head, hash.hex, seal_tail);
    if (memcmp(text + body, seal, SEAL_BYTES) != 0) {
        return fail(why, STATUS_CORRUPT,
                    "%s: bytes 0 to %zu do not match the checksum at byte %zu (computed %s)", path,
                    body, body, hash.hex);
    }
    json_t *object;
    json_error_t error = {0};
    enum status status = json_parse(text, n, JSON_REJECT_DUPLICATES, &object, &error);
    if (status == STATUS_OUT_OF_MEMORY) {
        return fail(why, status, "no memory to read the %zu bytes of %s", n, path);
    }
    if (status != STATUS_OK) {
        return fail(why, STATUS_CORRUPT, "%s: byte %d: %s", path, error.position, error.text);
    }
    json_object_del(object, "xxh3");
    *out_object = object;
    return STATUS_OK;
}

uint64_t manifest_align(uint64_t offset)
{
    return (offset + SHARD_ALIGN_BYTES - 1) / SHARD_ALIGN_BYTES * SHARD_ALIGN_BYTES;
}

static void put(uint8_t *at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        at[i] = (uint8_t)(value >> 8 * i);
    }
}

void manifest_shard_header(uint64_t step, uint32_t rank, uint32_t n_ranks, uint64_t n_pieces,
                           uint64_t file_bytes, uint8_t out_header[static SHARD_HEADER_BYTES])
{
    uint8_t *header = out_header;
    memset(header, 0, SHARD_HEADER_BYTES);
    memcpy(header, "BALSHARD", 8);
    put(header + 8, MANIFEST_VERSION, 4);
    put(header + 12, rank, 4);
    put(header + 16, step, 8);
    put(header + 24, n_ranks, 4);
    put(header + 32, n_pieces, 8);
    put(header + 40, file_bytes, 8);
    put(header + 56, XXH3_64bits(header, 56), 8);
}

/* A whole number >= 0 under this key. */
static bool get_u64(const json_t *object, const char *key, uint64_t *out)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        return false;
    }
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static bool get_text(const json_t *object, const char *key, const char **out)
{
    *out = json_string_value(json_object_get(object, key));
    return *out != NULL;
}

/* One entry of a shard; `end` is where the piece before it ended. */
static enum status parse_piece(const json_t *json, uint32_t shard, uint64_t shard_bytes,
                               uint64_t end, struct manifest_piece *out_piece, struct failure *why)
{
    struct manifest_piece piece = {.shard = shard};
    const char *state, *hex;
    if (!get_text(json, "tensor", &piece.tensor) || !get_text(json, "state", &state) ||
        !get_text(json, "xxh3", &hex) || !get_u64(json, "tensor_n", &piece.tensor_n) ||
        !get_u64(json, "first", &piece.first) || !get_u64(json, "n", &piece.n) ||
        !get_u64(json, "offset", &piece.offset)) {
        return fail(why, STATUS_CORRUPT, "manifest: a piece of rank-%u.bin lacks a member", shard);
    }
    if (!state_from_name(state, &piece.state)) {
        return fail(why, STATUS_CORRUPT, "manifest: tensor %s: unknown state '%s'", piece.tensor,
                    state);
    }
    if (strlen(hex) != MANIFEST_HASH_BYTES - 1) {
        return fail(why, STATUS_CORRUPT, "manifest: tensor %s: '%s' is no checksum", piece.tensor,
                    hex);
    }
    memcpy(piece.hash.hex, hex, MANIFEST_HASH_BYTES);
    if (piece.n > piece.tensor_n || piece.first > piece.tensor_n - piece.n) {
        return fail(why, STATUS_CORRUPT,
                    "manifest: tensor %s: elements %" PRIu64 " + %" PRIu64 " of %" PRIu64,
                    piece.tensor, piece.first, piece.n, piece.tensor_n);
    }
    if (piece.offset != manifest_align(end) || piece.offset > shard_bytes ||
        piece.n > (shard_bytes - piece.offset) / sizeof(float)) {
        return fail(why, STATUS_CORRUPT,
                    "manifest: tensor %s: %" PRIu64 " elements at byte %" PRIu64
                    " of rank-%u.bin (%" PRIu64 " bytes) are out of place",
                    piece.tensor, piece.n, piece.offset, shard, shard_bytes);
    }
    piece.gap = piece.offset - end;
    *out_piece = piece;
    return STATUS_OK;
}

static enum status parse_shard(const json_t *json, uint32_t rank, struct manifest *manifest,
                               struct failure *why)
{
    struct manifest_shard *shard = &manifest->shards[rank];
    char expected[32];
    const char *file;
    uint64_t named_rank, step;
    snprintf(expected, sizeof expected, "rank-%u.bin", rank);
    const json_t *pieces = json_object_get(json, "pieces");
    if (!get_text(json, "file", &file) || strcmp(file, expected) != 0 ||
        !get_u64(json, "rank", &named_rank) || named_rank != rank ||
        !get_u64(json, "step", &step) || step != manifest->step ||
        !get_u64(json, "bytes", &shard->bytes) || !json_is_array(pieces)) {
        return fail(why, STATUS_CORRUPT, "manifest: its shard %u is not %s of step %" PRIu64, rank,
                    expected, manifest->step);
    }
    shard->first_piece = manifest->n_pieces;
    shard->n_pieces = json_array_size(pieces);
    uint64_t end = SHARD_HEADER_BYTES;
    for (size_t i = 0; i < shard->n_pieces; i++) {
        struct manifest_piece *piece = &manifest->pieces[manifest->n_pieces];
        enum status status =
            parse_piece(json_array_get(pieces, i), rank, shard->bytes, end, piece, why);
        if (status != STATUS_OK) {
            return status;
        }
        end = piece->offset + piece->n * sizeof(float);
        manifest->n_pieces++;
    }
    if (end != shard->bytes) {
        return fail(why, STATUS_CORRUPT,
                    "manifest: %s should end at byte %" PRIu64 ", but has %" PRIu64 " bytes",
                    expected, end, shard->bytes);
    }
    return STATUS_OK;
}

static int compare_key(const struct manifest_piece *piece, const char *tensor,
                       enum save_state state)
{
    int order = strcmp(piece->tensor, tensor);
    return order != 0 ? order : (int)piece->state - (int)state;
}

static int compare_pieces(const void *a, const void *b)
{
    const struct manifest_piece *left = *(const struct manifest_piece *const *)a;
    const struct manifest_piece *right = *(const struct manifest_piece *const *)b;
    int order = compare_key(left, right->tensor, right->state);
    return order != 0 ? order : (left->first > right->first) - (left->first < right->first);
}

/* All pieces of one tensor must agree on its element count. */
static enum status check_counts(const struct manifest *manifest, struct failure *why)
{
    for (size_t i = 1; i < manifest->n_pieces; i++) {
        const struct manifest_piece *left = manifest->sorted[i - 1], *right = manifest->sorted[i];
        if (strcmp(left->tensor, right->tensor) == 0 && left->tensor_n != right->tensor_n) {
            return fail(why, STATUS_CORRUPT,
                        "manifest: tensor %s has %" PRIu64 " elements by one piece and %" PRIu64
                        " by another",
                        left->tensor, left->tensor_n, right->tensor_n);
        }
    }
    return STATUS_OK;
}

static enum status check_version(const json_t *json, struct failure *why)
{
    const char *format;
    uint64_t version;
    if (!get_text(json, "format", &format) || strcmp(format, "ballast save") != 0 ||
        !get_u64(json, "version", &version)) {
        return fail(why, STATUS_CORRUPT, "manifest: this is not the manifest of a save");
    }
    if (version != MANIFEST_VERSION) {
        return fail(why, STATUS_VERSION,
                    "the save has format version %" PRIu64 ", this program reads version %d",
                    version, MANIFEST_VERSION);
    }
    return STATUS_OK;
}

enum status manifest_parse(const json_t *json, struct manifest *out_manifest, struct failure *why)
{
    struct manifest manifest = {0};
    enum status status = check_version(json, why);
    if (status != STATUS_OK) {
        return status;
    }
    const json_t *shards = json_object_get(json, "shards");
    uint64_t world_size;
    if (!get_u64(json, "step", &manifest.step) || !get_u64(json, "world_size", &world_size) ||
        !json_is_array(shards) || json_array_size(shards) != world_size || world_size == 0 ||
        world_size > COMM_MAX_RANKS || json_object_get(json, "meta") == NULL) {
        return fail(why, STATUS_CORRUPT, "manifest: step, world_size, shards or meta is missing");
    }
    manifest.n_shards = (uint32_t)world_size;
    size_t n_pieces = 0;
    for (size_t i = 0; i < world_size; i++) {
        n_pieces += json_array_size(json_object_get(json_array_get(shards, i), "pieces"));
    }
    manifest.shards = heap_calloc(manifest.n_shards, sizeof *manifest.shards);
    manifest.pieces = heap_calloc(n_pieces, sizeof *manifest.pieces);
    manifest.sorted = heap_calloc(n_pieces, sizeof *manifest.sorted);
    if (manifest.shards == NULL || manifest.pieces == NULL || manifest.sorted == NULL) {
        status =
            fail(why, STATUS_OUT_OF_MEMORY, "no memory for a manifest of %zu pieces", n_pieces);
        goto undo_arrays;
    }
    for (uint32_t rank = 0; rank < manifest.n_shards; rank++) {
        status = parse_shard(json_array_get(shards, rank), rank, &manifest, why);
        if (status != STATUS_OK) {
            goto undo_arrays;
        }
    }
    for (size_t i = 0; i < n_pieces; i++) {
        manifest.sorted[i] = &manifest.pieces[i];
    }
    qsort(manifest.sorted, n_pieces, sizeof *manifest.sorted, compare_pieces);
    status = check_counts(&manifest, why);
    if (status != STATUS_OK) {
        goto undo_arrays;
    }
    *out_manifest = manifest;
    return STATUS_OK;

undo_arrays:
    manifest_fini(&manifest);
    return status;
}

void manifest_fini(struct manifest *manifest)
{
    heap_free(manifest->sorted);
    heap_free(manifest->pieces);
    heap_free(manifest->shards);
    *manifest = (struct manifest){0};
}

size_t manifest_find(const struct manifest *manifest, const char *tensor, enum save_state state,
                     size_t *out_first)
{
    size_t low = 0, high = manifest->n_pieces;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compare_key(manifest->sorted[middle], tensor, state) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    size_t end = low;
    while (end < manifest->n_pieces && compare_key(manifest->sorted[end], tensor, state) == 0) {
        end++;
    }
    *out_first = low;
    return end - low;
}

enum status manifest_check_complete(const struct manifest *manifest, struct failure *why)
{
    size_t i = 0;
    while (i < manifest->n_pieces) {
        const struct manifest_piece *piece = manifest->sorted[i];
        uint64_t covered = 0;
        size_t first;
        size_t count = manifest_find(manifest, piece->tensor, piece->state, &first);
        for (size_t k = first; k < first + count && manifest->sorted[k]->first <= covered; k++) {
            uint64_t end = manifest->sorted[k]->first + manifest->sorted[k]->n;
            covered = end > covered ? end : covered;
        }
        if (covered < piece->tensor_n) {
            return fail(why, STATUS_INVALID,
                        "the save would not be whole: no rank wrote element %" PRIu64 " of %" PRIu64
                        " of tensor %s, %s",
                        covered, piece->tensor_n, piece->tensor, manifest_state_name(piece->state));
        }
        i = first + count;
    }
    return STATUS_OK;
}
