/* Saving and loading the training state: which pieces this rank writes and reads, and the
 * run's position in the manifest. */
#include <stdio.h>
#include <string.h>
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

/* Elements of the unit that belong to the tensor and to the slice; none when first >= last. */
struct overlap {
    size_t start; /* of the slice */
    size_t first, last;
};

static struct overlap overlap_of(const struct run *run, const struct tensor *tensor,
                                 uint32_t slice)
{
    const struct unit *unit = &run->units.units[tensor->unit];
    const size_t start = (size_t)slice * unit->slice_elems;
    const size_t end = start + unit->slice_elems;
    const size_t tensor_end = tensor->offset + tensor->rows * tensor->cols;
    return (struct overlap){
        .start = start,
        .first = tensor->offset > start ? tensor->offset : start,
        .last = tensor_end < end ? tensor_end : end,
    };
}

/* Where this rank keeps a slice of a state; NULL when it does not. */
static float *source_of(struct training *training, enum save_state state, uint32_t unit,
                        uint32_t slice)
{
    const bool of_params = state == SAVE_PARAM && training->ops->dtype == DTYPE_FP32;
    if (of_params ? !state_has_params(&training->state, slice)
                  : !state_has_slice(&training->state, slice)) {
        return NULL;
    }
    switch (state) {
    case SAVE_PARAM:
        return params_slice(&training->params, unit, slice);
    case SAVE_MOMENT_M:
        return optim_m(&training->optim, unit, slice);
    case SAVE_MOMENT_V:
        return optim_v(&training->optim, unit, slice);
    case N_SAVE_STATES:
        break;
    }
    return NULL;
}

static void add_pieces(struct run *run, struct piece_list *list, const struct tensor *tensor,
                       uint32_t slice)
{
    const struct overlap overlap = overlap_of(run, tensor, slice);
    if (overlap.first >= overlap.last) {
        return;
    }
    for (int state = 0; state < N_SAVE_STATES; state++) {
        float *source = source_of(&run->training, (enum save_state)state, tensor->unit, slice);
        if (source == NULL) {
            continue;
        }
        if (list->pieces != NULL) {
            list->pieces[list->n] = (struct save_piece){
                .tensor = tensor->name,
                .state = (enum save_state)state,
                .first = overlap.first - tensor->offset,
                .n = overlap.last - overlap.first,
                .tensor_n = tensor->rows * tensor->cols,
                .data = source + (overlap.first - overlap.start),
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
    if (state_is_host(&run->training.state, device_data)) {
        memcpy(host, device_data, bytes);
        return STATUS_OK;
    }
    const enum status status = run->device.table->copy(&run->device, host, device_data, bytes,
                                                       COPY_TO_HOST, &ticket, why);
    return status == STATUS_OK ? run->device.table->wait(&run->device, &ticket, why) : status;
}

static enum status copy_in(void *user, float *device_data, const void *host, size_t bytes,
                           struct failure *why)
{
    struct run *run = user;
    struct ticket ticket;
    if (state_is_host(&run->training.state, device_data)) {
        memcpy(device_data, host, bytes);
        return STATUS_OK;
    }
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
    char configured[STRATEGY_TEXT_BYTES];
    strategy_format(NULL, &run->training.strategy, strategy);
    strategy_format(NULL, &run->config->strategy, configured);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:s, s:s}", "step",
                     (json_int_t)run->step, "updates", (json_int_t)run->training.updates,
                     "skipped", (json_int_t)run->training.skipped, "generation",
                     (json_int_t)run->generation, "seed", (json_int_t)run->config->seed,
                     "global_batch", (json_int_t)run->config->global_batch, "seq_len",
                     (json_int_t)run->config->seq_len, "data_samples",
                     (json_int_t)run->sampler.n_samples, "model", run->units.spec->name,
                     "precision", dtype_name(run->ops->dtype), "strategy", strategy, "configured", configured);
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
    /* The state is fp32 either way; what follows is another computation. */
    const char *precision = json_string_value(json_object_get(meta, "precision"));
    if (precision != NULL && strcmp(precision, dtype_name(run->ops->dtype)) != 0 &&
        run->comm.rank == 0) {
        log_warn("resume: the save was made in %s, this run computes in %s", precision,
                 dtype_name(run->ops->dtype));
    }
    return STATUS_OK;
}

static uint64_t meta_number(const json_t *meta, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(meta, key));
}

/* Set "key=value key=value ..." one after the other. */
static enum status set_all(struct strategy *strategy, const char *text, struct failure *why)
{
    char copy[STRATEGY_TEXT_BYTES];
    char *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, " ", &rest); word != NULL;
         word = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(word, '=');
        if (value == NULL) {
            return fail(why, STATUS_CORRUPT, "save: the strategy '%s' does not parse", text);
        }
        *value++ = '\0';
        const enum status status = strategy_set(strategy, word, value, why);
        if (status != STATUS_OK) {
            (void)fail_within(why, "save: its strategy");
            return status;
        }
    }
    return STATUS_OK;
}

/* The strategy in force at the save goes on, as the generation does, unless the
 * configuration was changed since: then it says what its writer wants. */
static enum status take_strategy(struct run *run, const json_t *meta, struct failure *why)
{
    char configured[STRATEGY_TEXT_BYTES];
    const char *then = json_string_value(json_object_get(meta, "configured"));
    const char *in_force = json_string_value(json_object_get(meta, "strategy"));
    if (then == NULL || in_force == NULL) {
        return fail(why, STATUS_CORRUPT, "save: the manifest's strategy is missing");
    }
    if (strcmp(then, strategy_format(NULL, &run->config->strategy, configured)) != 0) {
        return STATUS_OK;
    }
    struct strategy strategy = run->start_strategy;
    enum status status = set_all(&strategy, in_force, why);
    if (status == STATUS_OK) {
        status = strategy_check(&strategy, &run->options.limits, why);
    }
    if (status == STATUS_OK) {
        run->start_strategy = strategy;
    }
    return status;
}

/* Rank 0's steps.jsonl has the last step: the run is done, though nothing was saved. */
static enum status is_finished(struct run *run, bool *out_finished, struct failure *why)
{
    uint64_t finished = 0;
    if (run->comm.rank == 0) {
        finished = run_steps_in_file(run) >= run->config->steps ? 1 : 0;
    }
    const enum status status = run->comm.table->broadcast(&run->comm, "finished", &finished,
                                                          sizeof finished, why);
    *out_finished = finished != 0;
    return status;
}

enum status run_find_save(struct run *run, struct failure *why)
{
    const struct save_io io = save_io_of(run);
    uint64_t step = 0;
    enum status status = save_find(&io, run->config->resume_latest, run->config->resume_step,
                                   &run->manifest, &step, why);
    bool finished = false;
    if (status == STATUS_NO_SAVE && run->config->resume_latest) {
        struct failure ignored = {0};
        const enum status asked = is_finished(run, &finished, &ignored);
        return asked == STATUS_OK && finished ? STATUS_STOPPED : status;
    }
    if (status != STATUS_OK) {
        return status;
    }
    const json_t *meta = json_object_get(run->manifest, "meta");
    status = check_meta(run, meta, why);
    return status == STATUS_OK ? take_strategy(run, meta, why) : status;
}

enum status run_load_save(struct run *run, struct failure *why)
{
    const struct save_io io = save_io_of(run);
    const json_t *meta = json_object_get(run->manifest, "meta");
    struct piece_list list = {0};
    enum status status = list_pieces(run, 0, run->units.world_size, &list, why);
    status = save_agree(&io, "resume: pieces", status, why);
    if (status == STATUS_OK) {
        status = save_read(&io, run->manifest, list.pieces, list.n, why);
    }
    heap_free(list.pieces);
    if (status == STATUS_OK) {
        status = params_refresh(&run->training.params, why);
    }
    if (status == STATUS_OK) {
        status = run->ops->check(run->ops, why);
    }
    if (status == STATUS_OK) {
        run->training.updates = meta_number(meta, "updates");
        run->training.skipped = meta_number(meta, "skipped");
        run->generation = meta_number(meta, "generation");
        run->step = meta_number(meta, "step");
        run->has_save = true;
        run->last_save_step = run->step;
    }
    json_decref(run->manifest);
    run->manifest = NULL;
    return status;
}

/* ---- the checksum ---- */

/* Weights are hashed in pieces of this many elements of a tensor, each with its place as the seed,
 * and the pieces' hashes are added: so the sum does not depend on who holds which. A slice and a
 * tensor's start in its unit are multiples of it. */
enum { HASH_ELEMS = UNIT_ALIGN_ELEMS };

/* n elements from `at` of the tensor, in host memory. */
static uint64_t hash_pieces(uint32_t tensor, uint64_t at, const float *values, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i += HASH_ELEMS) {
        const size_t left = n - i < HASH_ELEMS ? n - i : HASH_ELEMS;
        const uint64_t seed = ((uint64_t)tensor << 40) + (at + i) / HASH_ELEMS;
        sum += XXH3_64bits_withSeed(values + i, left * sizeof *values, seed);
    }
    return sum;
}

/* The part of the tensor that lies in this rank's slice, through the staging buffer. */
static enum status hash_tensor(struct run *run, uint32_t index, uint64_t *sum, struct failure *why)
{
    const struct tensor *tensor = &run->units.tensors[index];
    const struct overlap overlap = overlap_of(run, tensor, run->comm.rank);
    const size_t room = run->options.save_staging_bytes / sizeof(float) / HASH_ELEMS * HASH_ELEMS;
    if (overlap.first >= overlap.last) {
        return STATUS_OK;
    }
    const float *data = params_slice(&run->training.params, tensor->unit, run->comm.rank) +
                        (overlap.first - overlap.start);
    const size_t n = overlap.last - overlap.first;
    for (size_t at = 0; at < n; at += room) {
        const size_t now = n - at < room ? n - at : room;
        const enum status status =
            copy_out(run, run->save_staging, data + at, now * sizeof *data, why);
        if (status != STATUS_OK) {
            return status;
        }
        *sum += hash_pieces(index, overlap.first - tensor->offset + at, run->save_staging, now);
    }
    return STATUS_OK;
}

enum status run_weights_checksum(struct run *run, uint64_t *out_hash, struct failure *why)
{
    uint64_t sum = 0;
    enum status status = STATUS_OK;
    for (uint32_t i = 0; i < run->units.n_tensors && status == STATUS_OK; i++) {
        status = hash_tensor(run, i, &sum, why);
    }
    struct failure sum_why = {0};
    const enum status summed = comm_sum_u64(&run->comm, "weights", sum, &sum, &sum_why);
    if (status == STATUS_OK && summed != STATUS_OK) {
        *why = sum_why;
        status = summed;
    }
    if (status == STATUS_OK) {
        *out_hash = sum;
    }
    return status;
}
