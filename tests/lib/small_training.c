/* See small_training.h. */
#include "tests/lib/small_training.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "tests/lib/kernel_ops.h"
#include <cmocka.h> /* last: it has a macro `fail` */

/* The test ends here unless the call succeeded. */
static void must(enum status status, const struct small_training *small, const char *what)
{
    if (status != STATUS_OK) {
        fail_msg("%s: %s%s%s", what, small->why.text, small->label[0] == '\0' ? "" : "\n  ",
                 small->label);
    }
}

void small_init(struct small_training *small, const char *preset)
{
    memset(small, 0, sizeof *small);
    must(spec_preset(preset, &small->spec, &small->why), small, "preset");
    small->n_threads = 1;
    small->strategy = (struct strategy){.micro_batch = 1,
                                        .checkpoint_blocks = 1,
                                        .checkpointing_layers = UINT32_MAX,
                                        .offload_optimizer_fraction = 1.0,
                                        .sequence_parallel = 1};
    small->options = (struct training_options){
        .limits = {.global_batch = 1, .seq_len = small->spec.max_positions},
        .seed = 1,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .weight_decay = 0.1,
        .schedule = {.kind = SCHEDULE_KIND_CONSTANT, .lr = 1e-3},
        .reduce_bucket_bytes = 1 << 20,
        .eval_micro_batch = 1,
        .save_staging_bytes = 1 << 16,
    };
}

static void complete_limits(struct small_training *small)
{
    struct strategy_limits *limits = &small->options.limits;
    limits->n_layers = small->spec.n_layers;
    limits->n_heads = small->spec.n_heads;
    limits->n_kv_heads = small->spec.n_kv_heads;
    limits->world_size = small->comm->size;
    if (small->strategy.checkpointing_layers > limits->n_layers) {
        small->strategy.checkpointing_layers = limits->n_layers;
    }
    must(spec_check(&small->spec, &small->why), small, "spec");
    must(strategy_check(&small->strategy, limits, &small->why), small, "strategy");
}

static void follow_plan(struct small_training *small)
{
    must(region_resize(&small->training.workspace.region, small->plan.workspace_bytes, &small->why),
         small, "workspace");
    must(workspace_follow(&small->training.workspace, &small->plan, &small->why), small, "plan");
}

void small_open(struct small_training *small)
{
    struct failure *why = &small->why;
    if (small->comm == NULL) {
        comm_dry_init(&small->alone, 0, 1);
        small->comm = &small->alone;
    }
    complete_limits(small);
    const uint32_t n_slices = small->n_slices == 0 ? small->comm->size : small->n_slices;
    must(units_init(&small->units, &small->spec, n_slices, why), small, "units");
    small->ops = kernel_ops_of(small->dtype, small->n_threads);
    must(cpu_device_init(&small->device, small->capacity_bytes, why), small, "device");
    small->telemetry.wake_fd = -1;
    small->rehearsal = (struct rehearsal){
        .options = &small->options,
        .units = &small->units,
        .target = small->ops,
        .granule_bytes = small->device.granule_bytes,
        .rank = small->comm->rank,
        .world_size = small->comm->size,
    };
    must(rehearse(&small->rehearsal, &small->strategy, &small->plan, &small->cost, why), small,
         "rehearsal");
    must(cpu_device_init(&small->host, 0, why), small, "host");
    const struct state_host host = {&small->host, small->ops, small->comm};
    must(training_init(&small->training, &small->options, &small->strategy, &small->units,
                       &small->device, small->ops, small->comm, &host, &small->telemetry, why),
         small, "training");
    small->training.plan = &small->plan;
    follow_plan(small);
    must(params_seed(&small->training.params, small->options.seed, why), small, "weights");
    must(small->ops->check(small->ops, why), small, "seed");
}

void small_switch(struct small_training *small)
{
    complete_limits(small);
    plan_fini(&small->plan);
    must(rehearse(&small->rehearsal, &small->strategy, &small->plan, &small->cost, &small->why),
         small, "rehearsal");
    follow_plan(small);
    small->training.strategy = small->strategy;
}

void small_close(struct small_training *small)
{
    training_fini(&small->training);
    plan_fini(&small->plan);
    units_fini(&small->units);
    kernel_ops_free(small->ops);
    assert_int_equal(atomic_load(&small->device.committed_bytes), 0);
    assert_int_equal(atomic_load(&small->host.committed_bytes), 0);
    device_fini(&small->device);
    device_fini(&small->host);
}

struct step_result small_step(struct small_training *small, const struct batch_source *source,
                              uint64_t step)
{
    struct step_result result;
    must(step_run(&small->training, source, step, &result, &small->why), small, "step");
    return result;
}

uint64_t small_measured(const struct small_training *small, enum phase phase)
{
    return ledger_resident_bytes(&small->training.ledger) +
           small->training.workspace.high_water[phase];
}

void small_check_peak(struct small_training *small, enum phase phase)
{
    const struct workspace *workspace = &small->training.workspace;
    const uint64_t planned = small->plan.phases[phase].peak_bytes;
    if (small_measured(small, phase) != planned) {
        fail_msg("%s: measured %llu bytes, planned %llu\n  %s", phase_name(phase),
                 (unsigned long long)small_measured(small, phase), (unsigned long long)planned,
                 small->label);
    }
    if (workspace->paint && workspace->touched[phase] != workspace->high_water[phase]) {
        fail_msg("%s: reserved up to %llu, touched up to %llu\n  %s", phase_name(phase),
                 (unsigned long long)workspace->high_water[phase],
                 (unsigned long long)workspace->touched[phase], small->label);
    }
    must(ledger_check(&small->training.ledger, &small->why), small, "ledger");
}

static const struct tensor *find(const struct small_training *small, const char *name,
                                 size_t *out_n)
{
    const struct tensor *tensor = units_find(&small->units, name);
    if (tensor == NULL) {
        fail_msg("the model has no tensor %s", name);
    }
    *out_n = tensor->rows * tensor->cols;
    return tensor;
}

float *small_param(struct small_training *small, const char *name, size_t *out_n)
{
    const struct tensor *tensor = find(small, name, out_n);
    return params_get(&small->training.params, tensor->unit, tensor->offset);
}

float *small_grad(struct small_training *small, const char *name, size_t *out_n)
{
    const struct tensor *tensor = find(small, name, out_n);
    return grads_slice(&small->training.grads, tensor->unit, 0) + tensor->offset;
}

static void fill_rows(void *user, uint64_t step, uint32_t sample, int32_t *inputs, int32_t *labels)
{
    (void)step;
    const struct small_rows *rows = user;
    memcpy(inputs, rows->inputs + sample * rows->seq_len, rows->seq_len * sizeof *inputs);
    memcpy(labels, rows->labels + sample * rows->seq_len, rows->seq_len * sizeof *labels);
}

struct batch_source small_rows_source(struct small_rows *rows)
{
    return (struct batch_source){fill_rows, rows};
}

static int32_t series_token(const struct small_series *series, uint64_t i)
{
    return (int32_t)((7 * i + i * i / 3) % series->vocab);
}

static void fill_from(const struct small_series *series, uint64_t sample, int32_t *inputs,
                      int32_t *labels)
{
    for (uint32_t t = 0; t < series->seq_len; t++) {
        inputs[t] = series_token(series, sample * series->seq_len + t);
        labels[t] = series_token(series, sample * series->seq_len + t + 1);
    }
}

static void fill_series(void *user, uint64_t step, uint32_t sample, int32_t *inputs,
                        int32_t *labels)
{
    const struct small_series *series = user;
    fill_from(series, step * series->global_batch + sample, inputs, labels);
}

struct batch_source small_series_source(struct small_series *series)
{
    return (struct batch_source){fill_series, series};
}

static void fill_eval(void *user, uint64_t sample, int32_t *inputs, int32_t *labels)
{
    fill_from(user, sample, inputs, labels);
}

struct eval_source small_series_eval(struct small_series *series, uint64_t n_samples)
{
    return (struct eval_source){n_samples, fill_eval, series};
}
