/* Owns: the maps of the data files and the check of every token id. Not: the order of samples
 * (sampler). Opening and closing on the main thread; reading on any.
 *
 * Sizes are checked once, when a file is opened. A file that somebody shortens while the run
 * reads it ends the run with SIGBUS, as any mapped file does: data files have to stay as they
 * are. Asking for the size again in every sample would cost a system call each and still race. */
#include "worker/data/tokens.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/heap.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "token files are little-endian and are read in place"
#endif

/* llm.c: 256 words of header, then the tokens. */
enum {
    LLMC_HEADER_BYTES = 1024,
    LLMC_MAGIC_16 = 20240520,
    LLMC_VERSION_16 = 1,
    LLMC_MAGIC_32 = 20240801,
    LLMC_VERSION_32 = 7,
};

enum { SCAN_TOKENS = 1 << 16 }; /* ids whose maximum is taken before it is compared */

struct token_file {
    char *path; /* owned */
    void *map;  /* owned */
    size_t map_bytes;
    size_t first_byte; /* of the first token */
    unsigned width;    /* bytes of a token: 1, 2 or 4 */
    uint64_t n_tokens;
    uint64_t first_sample; /* index of its first sample among all files */
    uint64_t n_samples;
};

struct tokens {
    size_t n_files;
    uint32_t seq_len;
    uint64_t n_tokens, n_samples;
    struct token_file files[];
};

/* ---- formats ---- */

static uint32_t word_at(const struct token_file *file, size_t index)
{
    uint32_t word;

    memcpy(&word, (const char *)file->map + index * sizeof(word), sizeof(word));
    return word;
}

static bool has_llmc_magic(const struct token_file *file)
{
    return file->map_bytes >= 4 &&
           (word_at(file, 0) == LLMC_MAGIC_16 || word_at(file, 0) == LLMC_MAGIC_32);
}

static enum status read_llmc(struct token_file *file, struct failure *why)
{
    if (file->map_bytes < LLMC_HEADER_BYTES) {
        return fail(why, STATUS_MALFORMED, "%.256s: %zu bytes, but llm.c's header alone has %d",
                    file->path, file->map_bytes, LLMC_HEADER_BYTES);
    }
    const uint32_t magic = word_at(file, 0), version = word_at(file, 1), n = word_at(file, 2);
    if (magic != LLMC_MAGIC_16 && magic != LLMC_MAGIC_32) {
        return fail(why, STATUS_MALFORMED,
                    "%.256s: its first word is %u; llm.c's token files start with %d or %d",
                    file->path, magic, LLMC_MAGIC_16, LLMC_MAGIC_32);
    }
    const bool wide = magic == LLMC_MAGIC_32;
    const uint32_t known = wide ? LLMC_VERSION_32 : LLMC_VERSION_16;
    if (version != known) {
        return fail(why, STATUS_UNSUPPORTED,
                    "%.256s: version %u of llm.c's format %u; only %u is known", file->path,
                    version, magic, known);
    }
    file->width = wide ? 4 : 2;
    file->first_byte = LLMC_HEADER_BYTES;
    file->n_tokens = n;
    const uint64_t right = LLMC_HEADER_BYTES + (uint64_t)n * file->width;
    if (file->map_bytes != right) {
        return fail(
            why, STATUS_MALFORMED,
            "%.256s: %zu bytes, but its header says %u tokens of %u bytes, which makes %" PRIu64,
            file->path, file->map_bytes, n, file->width, right);
    }
    return STATUS_OK;
}

static enum status read_nanogpt(struct token_file *file, struct failure *why)
{
    if (file->map_bytes % 2 != 0) {
        return fail(why, STATUS_MALFORMED,
                    "%.256s: %zu bytes is odd, but nanoGPT's tokens have two bytes each",
                    file->path, file->map_bytes);
    }
    file->width = 2;
    file->n_tokens = file->map_bytes / 2;
    return STATUS_OK;
}

/* Megatron's index names the tokens of a .bin beside it; read as bytes, either would train on
 * noise without a word. */
static bool is_megatron(const struct token_file *file)
{
    static const char magic[8] = "MMIDIDX\0";
    char path[4096], start[8] = "";
    const size_t n = strlen(file->path);

    if (file->map_bytes >= sizeof(magic) && memcmp(file->map, magic, sizeof(magic)) == 0) {
        return true;
    }
    if (n < 4 || n >= sizeof(path) || strcmp(file->path + n - 4, ".bin") != 0) {
        return false;
    }
    memcpy(path, file->path, n - 4);
    memcpy(path + n - 4, ".idx", 5);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return false;
    }
    const ssize_t got = read(fd, start, sizeof(start));
    close(fd);
    return got == (ssize_t)sizeof(start) && memcmp(start, magic, sizeof(magic)) == 0;
}

static enum status read_bytes(struct token_file *file, uint32_t vocab, struct failure *why)
{
    if (vocab < 256) {
        return fail(
            why, STATUS_BAD_DATA,
            "%.256s: read byte by byte it has 256 different tokens, but the vocabulary has %u",
            file->path, vocab);
    }
    file->width = 1;
    file->n_tokens = file->map_bytes;
    return STATUS_OK;
}

static enum status read_format(struct token_file *file, enum data_format format, uint32_t vocab,
                               struct failure *why)
{
    if (format == DATA_AUTO && is_megatron(file)) {
        return fail(why, STATUS_UNSUPPORTED,
                    "%.256s: Megatron's indexed format is not in this version; convert it to "
                    "llm.c's, or set data_format to bytes to read it byte by byte",
                    file->path);
    }
    switch (format) {
    case DATA_AUTO:
        return has_llmc_magic(file) ? read_llmc(file, why) : read_bytes(file, vocab, why);
    case DATA_LLMC:
        return read_llmc(file, why);
    case DATA_NANOGPT_UINT16:
        return read_nanogpt(file, why);
    case DATA_BYTES:
        break;
    }
    return read_bytes(file, vocab, why);
}

/* ---- the check of every id ---- */

static uint32_t max_16(const uint16_t *ids, size_t n)
{
    uint16_t most = 0;

    for (size_t i = 0; i < n; i++) {
        most = ids[i] > most ? ids[i] : most;
    }
    return most;
}

static uint32_t max_32(const uint32_t *ids, size_t n)
{
    uint32_t most = 0;

    for (size_t i = 0; i < n; i++) {
        most = ids[i] > most ? ids[i] : most;
    }
    return most;
}

static uint32_t id_at(const struct token_file *file, uint64_t index)
{
    const char *first = (const char *)file->map + file->first_byte;

    switch (file->width) {
    case 1:
        return ((const uint8_t *)first)[index];
    case 2:
        return ((const uint16_t *)(const void *)first)[index];
    default:
        return ((const uint32_t *)(const void *)first)[index];
    }
}

static enum status check_ids(const struct token_file *file, uint32_t vocab, struct failure *why)
{
    const char *first = (const char *)file->map + file->first_byte;

    if (file->width == 1 || (file->width == 2 && vocab > UINT16_MAX)) {
        return STATUS_OK; /* no id of this type is too large */
    }
    for (uint64_t at = 0; at < file->n_tokens; at += SCAN_TOKENS) {
        const uint64_t left = file->n_tokens - at;
        const size_t n = left < SCAN_TOKENS ? (size_t)left : SCAN_TOKENS;
        const void *ids = first + at * file->width;
        if ((file->width == 2 ? max_16(ids, n) : max_32(ids, n)) < vocab) {
            continue;
        }
        uint64_t index = at;
        while (id_at(file, index) < vocab) {
            index++;
        }
        return fail(why, STATUS_BAD_DATA,
                    "%.256s: at byte %" PRIu64 ", token %" PRIu64
                    ", the id is %u, but the model's vocabulary has ids 0 to %u",
                    file->path, file->first_byte + index * file->width, index, id_at(file, index),
                    vocab - 1);
    }
    return STATUS_OK;
}

/* ---- opening ---- */

static void close_file(struct token_file *file)
{
    if (file->map) {
        munmap(file->map, file->map_bytes);
    }
    heap_free(file->path);
    *file = (struct token_file){.path = NULL};
}

static enum status map_file(struct token_file *file, uint32_t seq_len, struct failure *why)
{
    struct stat info;
    enum status status = STATUS_OK;
    const int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0 || fstat(fd, &info)) {
        const int error = errno;
        status = error == ENOENT || error == ENOTDIR ? STATUS_NOT_FOUND : status_from_errno(error);
        if (fd >= 0) {
            close(fd);
        }
        return fail(why, status, "%.256s: %s", file->path, strerror(error));
    }
    if (!S_ISREG(info.st_mode)) {
        status = fail(why, STATUS_INVALID, "%.256s is not a regular file", file->path);
    } else if (info.st_size == 0) {
        status = fail(why, STATUS_BAD_DATA,
                      "%.256s is empty; a sample of seq_len %u needs %" PRIu64 " tokens",
                      file->path, seq_len, (uint64_t)seq_len + 1);
    } else {
        file->map_bytes = (size_t)info.st_size;
        void *map = mmap(NULL, file->map_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            const int error = errno;
            status = fail(why, status_from_errno(error), "%.256s: cannot map its %zu bytes: %s",
                          file->path, file->map_bytes, strerror(error));
        } else {
            file->map = map;
        }
    }
    close(fd);
    return status;
}

/* On failure whatever was acquired stays in `file` for close_file(). */
static enum status open_file(struct token_file *file, const char *path, enum data_format format,
                             uint32_t vocab, uint32_t seq_len, struct failure *why)
{
    file->path = heap_strdup(path);
    if (!file->path) {
        return fail(why, STATUS_OUT_OF_MEMORY, "%.256s: out of host memory", path);
    }
    enum status status = map_file(file, seq_len, why);
    if (!status) {
        status = read_format(file, format, vocab, why);
    }
    if (status) {
        return status;
    }
    if (file->n_tokens < (uint64_t)seq_len + 1) {
        return fail(why, STATUS_BAD_DATA,
                    "%.256s: %" PRIu64 " tokens, but a sample of seq_len %u needs %" PRIu64,
                    file->path, file->n_tokens, seq_len, (uint64_t)seq_len + 1);
    }
    (void)madvise(file->map, file->map_bytes, MADV_SEQUENTIAL);
    status = check_ids(file, vocab, why);
    (void)madvise(file->map, file->map_bytes, MADV_NORMAL);
    file->n_samples = (file->n_tokens - 1) / seq_len;
    return status;
}

enum status tokens_open(const char *const *paths, size_t n_paths, enum data_format format,
                        uint32_t vocab, uint32_t seq_len, struct tokens **out_tokens,
                        struct failure *why)
{
    if (n_paths == 0 || seq_len == 0 || vocab == 0) {
        return fail(
            why, STATUS_INVALID,
            "data needs at least one file, seq_len and vocabulary at least 1; got %zu files, "
            "seq_len %u, vocabulary %u",
            n_paths, seq_len, vocab);
    }
    struct tokens *tokens = heap_calloc(1, sizeof(*tokens) + n_paths * sizeof(tokens->files[0]));
    if (!tokens) {
        return fail(why, STATUS_OUT_OF_MEMORY, "out of host memory for the list of %zu data files",
                    n_paths);
    }
    tokens->n_files = n_paths;
    tokens->seq_len = seq_len;
    for (size_t i = 0; i < n_paths; i++) {
        struct token_file *file = &tokens->files[i];
        const enum status status = open_file(file, paths[i], format, vocab, seq_len, why);
        if (status) {
            tokens_close(tokens);
            return status;
        }
        file->first_sample = tokens->n_samples;
        tokens->n_samples += file->n_samples;
        tokens->n_tokens += file->n_tokens;
    }
    *out_tokens = tokens;
    return STATUS_OK;
}

void tokens_close(struct tokens *tokens)
{
    if (!tokens) {
        return;
    }
    for (size_t i = 0; i < tokens->n_files; i++) {
        close_file(&tokens->files[i]);
    }
    heap_free(tokens);
}

/* ---- reading ---- */

uint64_t tokens_n_samples(const struct tokens *tokens)
{
    return tokens->n_samples;
}

uint64_t tokens_n_tokens(const struct tokens *tokens)
{
    return tokens->n_tokens;
}

static const struct token_file *file_of(const struct tokens *tokens, uint64_t sample)
{
    size_t low = 0, high = tokens->n_files - 1;

    while (low < high) { /* the last file that starts at or before the sample */
        const size_t middle = low + (high - low + 1) / 2;
        if (tokens->files[middle].first_sample <= sample) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return &tokens->files[low];
}

void tokens_sample(const struct tokens *tokens, uint64_t index, int32_t *inputs, int32_t *labels)
{
    assert(index < tokens->n_samples);
    const struct token_file *file = file_of(tokens, index);
    const uint32_t n = tokens->seq_len;
    const uint64_t start = (index - file->first_sample) * n;

    for (uint32_t i = 0; i < n; i++) {
        inputs[i] = (int32_t)id_at(file, start + i);
        labels[i] = (int32_t)id_at(file, start + i + 1);
    }
}
