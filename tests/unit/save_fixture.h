/* What the tests of saves share: a run folder, a little model, one-rank saves of it.
 *
 * Included once per test program, after cmocka.h. */
#ifndef BALLAST_TESTS_UNIT_SAVE_FIXTURE_H
#define BALLAST_TESTS_UNIT_SAVE_FIXTURE_H

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "proto/base/heap.h"
#include "worker/save/save.h"

enum { FIXTURE_TENSORS = 4, FIXTURE_ELEMENTS = 6304, FIXTURE_PATH_BYTES = 512 };

static const char *const fixture_names[FIXTURE_TENSORS] = {"wte.weight", "h.0.ln.bias",
                                                           "h.0.mlp.weight", "ln_f.weight"};
static const uint64_t fixture_sizes[FIXTURE_TENSORS] = {5000, 3, 1024, 277};

static char fixture_run[FIXTURE_PATH_BYTES];
static struct comm fixture_comm;
static struct failure fixture_why;
static _Alignas(64) uint8_t fixture_staging[4096];

/* The state of a model: three states of four tensors in a row. */
struct fixture_model {
    float data[N_SAVE_STATES][FIXTURE_ELEMENTS];
};

/* Any bit pattern may occur, NaN and -0 too: saves keep bits. */
static inline void fixture_fill(struct fixture_model *model, uint32_t seed)
{
    uint32_t x = seed * 2654435761U + 1;
    for (size_t state = 0; state < N_SAVE_STATES; state++) {
        for (size_t i = 0; i < FIXTURE_ELEMENTS; i++) {
            x = x * 1664525U + 1013904223U;
            memcpy(&model->data[state][i], &x, sizeof x);
        }
    }
}

static inline size_t fixture_offset(size_t tensor)
{
    size_t offset = 0;
    for (size_t i = 0; i < tensor; i++) {
        offset += fixture_sizes[i];
    }
    return offset;
}

/* The part of every tensor and state that rank `rank` of `size` has; returns the count. */
static inline size_t fixture_pieces(struct fixture_model *model, uint32_t rank, uint32_t size,
                                    struct save_piece out[static FIXTURE_TENSORS * N_SAVE_STATES])
{
    size_t n = 0;
    for (size_t state = 0; state < N_SAVE_STATES; state++) {
        for (size_t tensor = 0; tensor < FIXTURE_TENSORS; tensor++) {
            uint64_t total = fixture_sizes[tensor];
            uint64_t first = total * rank / size, end = total * (rank + 1) / size;
            if (first < end) {
                out[n++] = (struct save_piece){
                    .tensor = fixture_names[tensor],
                    .state = (enum save_state)state,
                    .first = first,
                    .n = end - first,
                    .tensor_n = total,
                    .data = &model->data[state][fixture_offset(tensor) + first],
                };
            }
        }
    }
    return n;
}

static inline enum status fixture_copy_out(void *user, void *host, const float *device,
                                           size_t bytes, struct failure *why)
{
    (void)user;
    (void)why;
    memcpy(host, device, bytes);
    return STATUS_OK;
}

static inline enum status fixture_copy_in(void *user, float *device, const void *host, size_t bytes,
                                          struct failure *why)
{
    (void)user;
    (void)why;
    memcpy(device, host, bytes);
    return STATUS_OK;
}

static inline struct save_io fixture_io(void)
{
    return (struct save_io){
        .run_dir = fixture_run,
        .comm = &fixture_comm,
        .staging = fixture_staging,
        .staging_bytes = sizeof fixture_staging,
        .copy_out = fixture_copy_out,
        .copy_in = fixture_copy_in,
    };
}

static inline json_t *fixture_meta(uint64_t step)
{
    return json_pack("{s:I, s:f, s:f, s:s}", "next_step", (json_int_t)step, "tenth", 0.1, "third",
                     1.0 / 3, "text", "B\xc3\xa4r");
}

/* Write the model with this seed as the save of this step, by this rank of the comm. */
static inline enum status fixture_write(uint64_t step, uint32_t seed, uint64_t keep)
{
    static struct fixture_model model;
    struct save_piece pieces[FIXTURE_TENSORS * N_SAVE_STATES];
    char path[FIXTURE_PATH_BYTES];
    struct save_io io = fixture_io();
    fixture_fill(&model, seed);
    size_t n = fixture_pieces(&model, fixture_comm.rank, fixture_comm.size, pieces);
    bool root = fixture_comm.rank == 0; /* its meta is the one that counts */
    json_t *meta = root ? fixture_meta(step) : NULL;
    enum status status = root && meta == NULL ? STATUS_OUT_OF_MEMORY
                                              : save_write(&io, step, pieces, n, meta, keep, path,
                                                           sizeof path, &fixture_why);
    json_decref(meta);
    return status;
}

/* Read the newest good save in full. OK when it is bit for bit the model with the seed that
 * belongs to its step: seeds[step], or also other_seed. */
static inline enum status fixture_load(uint64_t *out_step, struct fixture_model *out_model)
{
    struct save_piece pieces[FIXTURE_TENSORS * N_SAVE_STATES];
    struct save_io io = fixture_io();
    json_t *manifest = NULL;
    memset(out_model, 0xAA, sizeof *out_model);
    size_t n = fixture_pieces(out_model, 0, 1, pieces);
    enum status status = save_find(&io, true, 0, &manifest, out_step, &fixture_why);
    if (status == STATUS_OK) {
        status = save_read(&io, manifest, pieces, n, &fixture_why);
    }
    json_decref(manifest);
    return status;
}

static inline bool fixture_is(const struct fixture_model *model, uint32_t seed)
{
    static struct fixture_model expected;
    fixture_fill(&expected, seed);
    return memcmp(&expected, model, sizeof expected) == 0;
}

static inline bool fixture_exists(const char *name)
{
    char path[2 * FIXTURE_PATH_BYTES];
    snprintf(path, sizeof path, "%s/save/%s", fixture_run, name);
    return access(path, F_OK) == 0;
}

static inline void fixture_empty(void)
{
    char command[2 * FIXTURE_PATH_BYTES];
    snprintf(command, sizeof command, "rm -rf %s/save", fixture_run);
    if (system(command) != 0) {
        abort();
    }
}

/* A run folder in memory where there is such a place: the tests sync thousands of times. */
static inline void fixture_make_run(void)
{
    const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(fixture_run, sizeof fixture_run, "%s/ballast-save-XXXXXX", base);
    if (mkdtemp(fixture_run) == NULL) {
        abort();
    }
    json_set_alloc_funcs(heap_alloc, heap_free);
}

static inline void fixture_remove_run(void)
{
    fixture_empty();
    rmdir(fixture_run);
}

#endif
