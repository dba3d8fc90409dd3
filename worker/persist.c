/* Saving and loading the training state: which pieces this rank writes and reads, and the
 * run's position in the manifest. */
#include <xxhash.h>
#include "proto/base/heap.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "worker/run.h"
#include "worker/save/agree.h"

struct piece_list {
    struct save_piece *pieces; /* owned; NULL in the counting pass */
    size_t n;
};

static void add_pieces(struct run *run, struct piece_list *list, const struct tensor *tensor,
                       uint32_t slice)
{
    const struct unit *unit = &run->units.units[tensor->unit];
    const size_t start = (size_t)slice * unit->slice_elems;
    const size_t end = start + unit->slice_elems;
    const size_t n = tensor->rows * tensor->cols;
    const size_t first = tensor->offset > start ? tensor->offset : start;
    const size_t last = tensor->offset + n < end ? tensor->offset + n : end;
    if (first >= last) {
        return;
    }
    struct training *training = &run->training;
    float *const sources[N_SAVE_STATES] = {
        params_slice(&training->params, tensor->unit, slice),
        optim_m(&training->optim, tensor->unit, slice),
        optim_v(&training->optim, tensor->unit, slice),
    };
    for (int state = 0; state < N_SAVE_STATES; state++) {
        if (list->pieces != NULL) {
            list->pieces[list->n] = (struct save_piece){
                .tensor = tensor->name,
                .state = (enum save_state)state,
                .first = first - tensor->offset,
                .n = last - first,
                .tensor_n = n,
                .data = sources[state] + (first - start),
            };
        }
        list->n++;
    }
}

static void walk_slices(struct run *run, struct piece_list *list, uint32_t first_slice,
                        uint32_t end_slice)
{
    list->n = 0;
    for (uint32_t i = 0; i < run->units.n_tensors; i++) {
        for (uint32_t slice = first_slice; slice < end_slice; slice++) {
            add_pieces(run, list, &run->units.tensors[i], slice);
        }
    }
}

/* The pieces of slices [first, end). */
static enum status list_pieces(struct run *run, uint32_t first_slice, uint32_t end_slice,
                               struct piece_list *out_list, struct failure *why)
{
    struct piece_list list = {0};
    walk_slices(run, &list, first_slice, end_slice);
    list.pieces = heap_calloc(list.n == 0 ? 1 : list.n, sizeof *list.pieces);
    if (list.pieces == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory to list %zu pieces", list.n);
    }
    walk_slices(run, &list, first_slice, end_slice);
    *out_list = list;
    return STATUS_OK;
}

static enum status copy_out(void *user, void *host, const float *device_data, size_t bytes,
                            struct failure *why)
{
    struct run *run = user;
    struct ticket ticket;
    const enum status status = run->device.table->copy(&run->device, host, device_data, bytes,
                                                       COPY_TO_HOST, &ticket, why);
    return status == STATUS_OK ? run->device.table->wait(&run->device, &ticket, why) : status;
}

static enum status copy_in(void *user, float *device_data, const void *host, size_t bytes,
                           struct failure *why)
{
    struct run *run = user;
    struct ticket ticket;
    const enum status status = run->device.table->copy(&run->device, device_data, host, bytes,
                                                       COPY_FROM_HOST, &ticket, why);
    return status == STATUS_OK ? run->device.table->wait(&run->device, &ticket, why) : status;
}

static struct save_io save_io_of(struct run *run)
{
    return (struct save_io){
        .run_dir = run->run_dir,
        .comm = &run->comm,
        .staging = run->save_staging,
        .staging_bytes = run->options.save_staging_bytes,
        .copy_out = copy_out,
        .copy_in = copy_in,
        .user = run,
    };
}

/* What a resume has to agree with, and where the run was. */
static json_t *make_meta(const struct run *run)
{
    char strategy[STRATEGY_TEXT_BYTES];
    strategy_format(NULL, &run->training.strategy, strategy);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s}", "step",
                     (json_int_t)run->step, "updates", (json_int_t)run->training.updates,
                     "skipped", (json_int_t)run->training.skipped, "generation",
                     (json_int_t)run->generation, "seed", (json_int_t)run->config->seed,
                     "global_batch", (json_int_t)run->config->global_batch, "seq_len",
                     (json_int_t)run->config->seq_len, "data_samples",
                     (json_int_t)run->sampler.n_samples, "model", run->units.spec->name, "strategy",
                     strategy);
}

enum status run_save(struct run *run, char *out_path, size_t path_bytes, struct failure *why)
{
    workspace_begin(&run->training.workspace, SECTION_SAVE);
    enum status status = training_enter(&run->training, PHASE_SAVE, why);
    if (status != STATUS_OK) {
        return status;
    }
    struct piece_list list = {0};
    json_t *meta = make_meta(run);
    enum status local = meta == NULL
                            ? fail(why, STATUS_OUT_OF_MEMORY, "no host memory for a save")
                            : list_pieces(run, run->comm.rank, run->comm.rank + 1, &list, why);
    /* Every rank must be able to, or none begins: the pieces were listed without an exchange. */
    const struct save_io io = save_io_of(run);
    status = save_agree(&io, "save: pieces", local, why);
    if (status == STATUS_OK) {
        status = save_write(&io, run->step, list.pieces, list.n, meta, run->config->save_keep,
                            out_path, path_bytes, why);
    }
    heap_free(list.pieces);
    json_decref(meta);
    run_leave_phase(run);
    if (status == STATUS_OK) {
        status = workspace_end(&run->training.workspace, why);
        run->has_save = true;
        run->last_save_step = run->step;
    }
    return status;
}

/* ---- resume ---- */

static enum status check_number(const json_t *meta, const char *key, uint64_t expected,
                                struct failure *why)
{
    const json_t *value = json_object_get(meta, key);
    if (!json_is_integer(value)) {
        return fail(why, STATUS_CORRUPT, "save: the manifest's %s is missing", key);
    }
    if ((uint64_t)json_integer_value(value) != expected) {
        return fail(why, STATUS_CONFLICT,
                    "resume: the save was made with %s %lld, the configuration says %llu", key,
                    (long long)json_integer_value(value), (unsigned long long)expected);
    }
    return STATUS_OK;
}

static enum status check_meta(const struct run *run, const json_t *meta, struct failure *why)
{
    const struct {
        const char *key;
        uint64_t expected;
    } facts[] = {{"seed", run->config->seed},
                 {"global_batch", run->config->global_batch},
                 {"seq_len", run->config->seq_len},
                 {"data_samples", run->sampler.n_samples}};
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        const enum status status = check_number(meta, facts[i].key, facts[i].expected, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

static uint64_t meta_number(const json_t *meta, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(meta, key));
}

static enum status load(struct run *run, const struct save_io *io, json_t *manifest,
                        struct failure *why)
{
    const json_t *meta = json_object_get(manifest, "meta");
    enum status status = check_meta(run, meta, why);
    if (status != STATUS_OK) {
        return status; /* on every rank: they read the same manifest */
    }
    struct piece_list list = {0};
    status = list_pieces(run, 0, run->units.world_size, &list, why);
    status = save_agree(io, "resume: pieces", status, why);
    if (status == STATUS_OK) {
        status = save_read(io, manifest, list.pieces, list.n, why);
    }
    heap_free(list.pieces);
    if (status == STATUS_OK) {
        run->training.updates = meta_number(meta, "updates");
        run->training.skipped = meta_number(meta, "skipped");
        run->generation = meta_number(meta, "generation");
        run->step = meta_number(meta, "step");
        run->has_save = true;
        run->last_save_step = run->step;
    }
    return status;
}

enum status run_resume(struct run *run, struct failure *why)
{
    const struct save_io io = save_io_of(run);
    json_t *manifest = NULL;
    uint64_t step = 0;
    enum status status = save_find(&io, run->config->resume_latest, run->config->resume_step,
                                   &manifest, &step, why);
    if (status != STATUS_OK) {
        return status;
    }
    status = load(run, &io, manifest, why);
    json_decref(manifest);
    return status;
}

uint64_t run_weights_checksum(const struct run *run)
{
    XXH3_state_t *state = XXH3_createState();
    if (state == NULL) {
        return 0;
    }
    XXH3_64bits_reset(state);
    for (uint32_t i = 0; i < run->units.n_tensors; i++) {
        const struct tensor *tensor = &run->units.tensors[i];
        const float *base = (const float *)(const void *)run->training.params.region.base +
                            run->units.units[tensor->unit].offset;
        XXH3_64bits_update(state, base + tensor->offset,
                           tensor->rows * tensor->cols * sizeof(float));
    }
    const uint64_t hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return hash;
}
