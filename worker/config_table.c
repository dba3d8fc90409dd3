/* Owns: the rows. Not: reading values (config_read) nor what follows from several of them
 * together (config_resolve). Constant data and pure functions; any thread.
 *
 * DeepSpeed's keys stand in the order of its own documentation, ours follow under "ballast".
 * A row that says `without effect` must be true: what the key asks for either happens anyway
 * or cannot matter here. Everything else that is not done is refused. */
#include "worker/config_table.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include "worker/config_words.h"

#define AT(field) offsetof(struct config_draft, field)
#define U32_HIGH 4294967295.0
#define U64_HIGH 9223372036854775807.0

/* The five common kinds of row; what is stored has its fields written out. */
#define SECTION(name)                                                                              \
    {                                                                                              \
        .path = name, .type = TYPE_SECTION, .verdict = VERDICT_SECTION, .at = CONFIG_NOWHERE       \
    }
#define IDLE(name, kind, reason)                                                                   \
    {                                                                                              \
        .path = name, .type = kind, .verdict = VERDICT_WITHOUT_EFFECT, .low = -1,                  \
        .high = U64_HIGH, .at = CONFIG_NOWHERE, .help = reason                                     \
    }
#define ONLY(name, values, reason)                                                                 \
    {                                                                                              \
        .path = name, .type = TYPE_ANY, .verdict = VERDICT_ONLY, .at = CONFIG_NOWHERE,             \
        .choices = values, .help = reason                                                          \
    }
#define SWITCHED_OFF(name, reason)                                                                 \
    {                                                                                              \
        .path = name, .type = TYPE_ANY, .verdict = VERDICT_SWITCHED_OFF, .at = CONFIG_NOWHERE,     \
        .help = reason                                                                             \
    }
#define REFUSED(name, reason)                                                                      \
    {                                                                                              \
        .path = name, .type = TYPE_ANY, .verdict = VERDICT_REFUSED, .at = CONFIG_NOWHERE,          \
        .help = reason                                                                             \
    }
#define CLAIM(name, kind, key, text)                                                               \
    {                                                                                              \
        .path = name, .type = kind, .verdict = VERDICT_HONOURED, .high = U32_HIGH,                 \
        .at = CONFIG_NOWHERE, .strategy_key = key, .help = text                                    \
    }
#define STORED(name, kind, field, least, most, preset, text)                                       \
    {                                                                                              \
        .path = name, .type = kind, .verdict = VERDICT_HONOURED, .low = least, .high = most,       \
        .at = AT(field), .standard = preset, .help = text                                          \
    }
#define CHOICE(name, field, values, known, preset, text)                                           \
    {                                                                                              \
        .path = name, .type = TYPE_CHOICE, .verdict = VERDICT_HONOURED, .at = AT(field),           \
        .choices = values, .refused = known, .standard = preset, .help = text                      \
    }

#define BUCKETS "bucket sizes follow from the memory plan"
#define OVERLAP "what overlaps follows from the plan and does not change results"
#define STAGE_3 "parameters are whole on every rank in this version; nothing is fetched"
#define HPZ "quantised or hierarchical communication would change results"
#define NO_HALF "this version computes in fp32 or bf16"
#define MASTER "master weights, gradients and moments are fp32"
#define NO_FP16 "loss scaling belongs to fp16, which is off"
#define NO_NVME "this version has no NVMe tier"
#define NO_OFFLOAD "how offloaded states travel follows from the plan"
#define MONITOR "metrics are in steps.jsonl and events.jsonl of the run directory"
#define PROFILER "ballastctl memory and steps.jsonl always show bytes and times by phase"
#define CHECKPOINT "the memory plan decides where kept activations lie"
#define ADAMW "updates are AdamW's, computed by one fused kernel"

static const struct config_row rows[] = {
    /* ---- batch ---- */
    STORED("train_batch_size", TYPE_COUNT32, train_batch, 1, U32_HIGH,
           "(micro-batch x accumulation x data-parallel size)",
           "sequences per optimizer step, over all ranks"),
    CLAIM("train_micro_batch_size_per_gpu", TYPE_COUNT32, "micro_batch",
          "sequences per sequence-parallel group and micro-step"),
    STORED("gradient_accumulation_steps", TYPE_COUNT32, accumulation, 1, U32_HIGH,
           "(from the batch sizes)", "micro-steps per optimizer step"),
    CLAIM("sequence_parallel_size", TYPE_COUNT32, "sequence_parallel",
          "ranks that share one sequence"),
    /* ---- optimizer ---- */
    SECTION("optimizer"),
    {.path = "optimizer.type",
     .type = TYPE_CHOICE,
     .verdict = VERDICT_HONOURED,
     .at = CONFIG_NOWHERE,
     .choices = "AdamW|Adam",
     .standard = "AdamW",
     .refused = "Lamb|OneBitAdam|ZeroOneAdam|OneBitLamb|Lion|Muon|SGD|Adagrad|MuAdam|MuAdamW|MuSGD|"
                "AdaFactor",
     .help = "both names mean AdamW, as in DeepSpeed"},
    SECTION("optimizer.params"),
    STORED("optimizer.params.lr", TYPE_NUMBER, config.lr, 0, 100, "0.001",
           "learning rate after warm-up"),
    STORED("optimizer.params.betas", TYPE_BETAS, betas, 0, 1, NULL,
           "[beta1, beta2], each at least 0 and below 1; default [0.9, 0.999]"),
    STORED("optimizer.params.eps", TYPE_NUMBER, config.eps, 1e-30, 1, "1e-8",
           "added to the root of the second moment"),
    STORED("optimizer.params.weight_decay", TYPE_NUMBER, config.weight_decay, 0, 100, "0",
           "decoupled decay, on matrices only"),
    ONLY("optimizer.params.bias_correction", "true", ADAMW),
    ONLY("optimizer.params.adam_w_mode", "true", ADAMW),
    ONLY("optimizer.params.amsgrad", "false", ADAMW),
    ONLY("optimizer.params.maximize", "false", ADAMW),
    IDLE("optimizer.params.torch_adam", TYPE_BOOL, ADAMW),
    IDLE("optimizer.params.fused", TYPE_BOOL, ADAMW),
    IDLE("optimizer.params.foreach", TYPE_BOOL, ADAMW),
    IDLE("optimizer.params.set_grad_none", TYPE_BOOL, "gradients have no state between steps"),
    ONLY("optimizer.legacy_fusion", "false", ADAMW),
    STORED("gradient_clipping", TYPE_NUMBER, config.gradient_clipping, 0, 1e30, "0",
           "limit of the global gradient norm; 0: none"),
    /* ---- schedule ---- */
    SECTION("scheduler"),
    CHOICE("scheduler.type", scheduler, "WarmupLR|WarmupDecayLR|WarmupCosineLR",
           "LRRangeTest|OneCycle", NULL,
           "constant, linear or cosine after the warm-up; without a scheduler lr is constant"),
    SECTION("scheduler.params"),
    STORED("scheduler.params.warmup_num_steps", TYPE_COUNT64, warmup_num_steps, 0, U64_HIGH, "1000",
           "steps of the warm-up; \"auto\" means 0"),
    STORED("scheduler.params.total_num_steps", TYPE_COUNT64, total_num_steps, 1, U64_HIGH,
           "(ballast.steps)", "steps until the decay ends"),
    STORED("scheduler.params.warmup_min_lr", TYPE_NUMBER, warmup_min_lr, 0, 100, "0",
           "learning rate at the first step (WarmupLR, WarmupDecayLR)"),
    STORED("scheduler.params.warmup_max_lr", TYPE_NUMBER, warmup_max_lr, 0, 100,
           "(optimizer.params.lr)", "learning rate after warm-up (WarmupLR, WarmupDecayLR)"),
    STORED("scheduler.params.warmup_min_ratio", TYPE_NUMBER, warmup_min_ratio, 0, 1, "0",
           "first learning rate / lr (WarmupCosineLR)"),
    STORED("scheduler.params.cos_min_ratio", TYPE_NUMBER, cos_min_ratio, 0, 1, "0.0001",
           "last learning rate / lr (WarmupCosineLR)"),
    CHOICE("scheduler.params.warmup_type", warmup_type, "linear", "log", "linear",
           "the shape of the warm-up; linear here also when the key is absent"),
    ONLY("scheduler.params.last_batch_iteration", "-1", "a run resumes with --resume"),
    /* ---- precision and wire ---- */
    SECTION("fp16"),
    ONLY("fp16.enabled", "false", NO_HALF),
    IDLE("fp16.auto_cast", TYPE_BOOL, NO_FP16),
    IDLE("fp16.loss_scale", TYPE_NUMBER, NO_FP16),
    IDLE("fp16.initial_scale_power", TYPE_COUNT64, NO_FP16),
    IDLE("fp16.loss_scale_window", TYPE_NUMBER, NO_FP16),
    IDLE("fp16.hysteresis", TYPE_COUNT64, NO_FP16),
    IDLE("fp16.consecutive_hysteresis", TYPE_BOOL, NO_FP16),
    IDLE("fp16.min_loss_scale", TYPE_NUMBER, NO_FP16),
    ONLY("fp16.fp16_master_weights_and_grads", "false", MASTER),
    SECTION("bf16"),
    STORED("bf16.enabled", TYPE_BOOL, bf16, 0, 1, "false",
           "weights and activations in bf16, sums and the optimizer in fp32"),
    IDLE("bf16.immediate_grad_update", TYPE_BOOL, "gradients are added up in fp32 as they come"),
    IDLE("bf16.check_grad_overflow", TYPE_BOOL, "gradients are always checked for finiteness"),
    ONLY("bf16.bf16_master_weights_and_grads", "false", MASTER),
    ONLY("bf16.bf16_optimizer_states", "false", MASTER),
    SECTION("bfloat16"),
    STORED("bfloat16.enabled", TYPE_BOOL, bfloat16, 0, 1, "false", "old name of bf16.enabled"),
    IDLE("bfloat16.immediate_grad_update", TYPE_BOOL,
         "gradients are added up in fp32 as they come"),
    IDLE("bfloat16.check_grad_overflow", TYPE_BOOL, "gradients are always checked for finiteness"),
    ONLY("bfloat16.bf16_master_weights_and_grads", "false", MASTER),
    ONLY("bfloat16.bf16_optimizer_states", "false", MASTER),
    SECTION("data_types"),
    ONLY("data_types.grad_accum_dtype", "\"fp32\"", MASTER),
    ONLY("data_types.param_dtype", "\"fp32\"", MASTER),
    ONLY("data_types.buffer_dtype", "\"fp32\"", MASTER),
    SWITCHED_OFF("amp", "write bf16.enabled instead"),
    SWITCHED_OFF("torch_autocast", "write bf16.enabled instead"),
    ONLY("communication_data_type", "\"fp32\"", "gradients travel in fp32"),
    ONLY("seq_parallel_communication_data_type", "\"fp32\"", "activations travel in fp32"),
    ONLY("prescale_gradients", "false", "the loss is divided once, by all labels of the step"),
    ONLY("gradient_predivide_factor", "1|1.0",
         "the loss is divided once, by all labels of the step"),
    ONLY("gradient_allreduce_op", "\"avg\"|\"mean\"|\"average\"|\"AVG\"",
         "the loss is the mean over all labels of the step"),
    ONLY("sparse_gradients", "false", "gradients are dense"),
    IDLE("fp32_allreduce", TYPE_BOOL, "gradients always travel in fp32"),
    IDLE("disable_allgather", TYPE_BOOL, OVERLAP),
    /* ---- ZeRO ---- */
    SECTION("zero_optimization"),
    CLAIM("zero_optimization.stage", TYPE_COUNT32, "zero.stage",
          "what is sliced over ranks: 1 optimizer, 2 + gradients, 3 + parameters"),
    IDLE("zero_optimization.contiguous_gradients", TYPE_BOOL, "gradients are always contiguous"),
    IDLE("zero_optimization.reduce_scatter", TYPE_BOOL, OVERLAP),
    IDLE("zero_optimization.reduce_bucket_size", TYPE_COUNT64, BUCKETS),
    IDLE("zero_optimization.use_multi_rank_bucket_allreduce", TYPE_BOOL, BUCKETS),
    IDLE("zero_optimization.allgather_partitions", TYPE_BOOL, OVERLAP),
    IDLE("zero_optimization.allgather_bucket_size", TYPE_COUNT64, BUCKETS),
    IDLE("zero_optimization.overlap_comm", TYPE_BOOL, OVERLAP),
    IDLE("zero_optimization.load_from_fp32_weights", TYPE_BOOL, "weights are kept in fp32"),
    IDLE("zero_optimization.round_robin_gradients", TYPE_BOOL, OVERLAP),
    IDLE("zero_optimization.sub_group_size", TYPE_COUNT64, BUCKETS),
    IDLE("zero_optimization.ignore_unused_parameters", TYPE_BOOL, "every parameter is used"),
    IDLE("zero_optimization.elastic_checkpoint", TYPE_BOOL,
         "saves are keyed by tensor and element, never by rank"),
    ONLY("zero_optimization.legacy_stage1", "false", "there is one form of stage 1"),
    IDLE("zero_optimization.stage3_prefetch_bucket_size", TYPE_COUNT64, STAGE_3),
    IDLE("zero_optimization.stage3_param_persistence_threshold", TYPE_COUNT64, STAGE_3),
    IDLE("zero_optimization.stage3_model_persistence_threshold", TYPE_COUNT64, STAGE_3),
    IDLE("zero_optimization.stage3_max_live_parameters", TYPE_COUNT64, STAGE_3),
    IDLE("zero_optimization.stage3_max_reuse_distance", TYPE_COUNT64, STAGE_3),
    IDLE("zero_optimization.stage3_module_granularity_threshold", TYPE_COUNT64, STAGE_3),
    IDLE("zero_optimization.stage3_use_all_reduce_for_fetch_params", TYPE_BOOL, STAGE_3),
    IDLE("zero_optimization.stage3_allgather_sequential", TYPE_BOOL, STAGE_3),
    IDLE("zero_optimization.stage3_partition_stream_chunk_size", TYPE_COUNT64, STAGE_3),
    ONLY("zero_optimization.stage3_gather_16bit_weights_on_model_save", "false",
         "saves hold fp32 weights"),
    ONLY("zero_optimization.stage3_gather_fp16_weights_on_model_save", "false",
         "saves hold fp32 weights"),
    ONLY("zero_optimization.zero_hpz_partition_size", "1", HPZ),
    ONLY("zero_optimization.zero_quantized_weights", "false", HPZ),
    ONLY("zero_optimization.zero_quantized_nontrainable_weights", "false", HPZ),
    ONLY("zero_optimization.zero_quantized_gradients", "false", HPZ),
    REFUSED("zero_optimization.zeropp_loco_param", HPZ),
    ONLY("zero_optimization.mics_shard_size", "-1", HPZ),
    ONLY("zero_optimization.mics_hierarchical_params_gather", "false", HPZ),
    IDLE("zero_optimization.memory_efficient_linear", TYPE_BOOL, "kernels and memory are planned"),
    IDLE("zero_optimization.override_module_apply", TYPE_BOOL, "there are no modules to override"),
    IDLE("zero_optimization.pipeline_loading_checkpoint", TYPE_BOOL, "loading follows the plan"),
    IDLE("zero_optimization.log_trace_cache_warnings", TYPE_BOOL, "there is no trace cache"),
    IDLE("zero_optimization.enable_sanity_checks", TYPE_BOOL, "the ledger is always checked"),
    IDLE("zero_optimization.save_muon_momentum_buffer_in_memory", TYPE_BOOL, ADAMW),
    IDLE("zero_optimization.leaf_module", TYPE_ANY, STAGE_3),
    REFUSED("zero_optimization.zenflow", "asynchronous updates would change results"),
    STORED("zero_optimization.cpu_offload", TYPE_BOOL, cpu_offload, 0, 0, NULL,
           "old form of offload_optimizer.device"),
    STORED("zero_optimization.cpu_offload_param", TYPE_BOOL, cpu_offload_param, 0, 0, NULL,
           "old form of offload_param.device"),
    ONLY("zero_optimization.cpu_offload_params", "false", "write offload_param.device instead"),
    IDLE("zero_optimization.cpu_offload_use_pin_memory", TYPE_BOOL, NO_OFFLOAD),
    SECTION("zero_optimization.offload_param"),
    CLAIM("zero_optimization.offload_param.device", TYPE_TEXT, "offload.params",
          "tier of the parameters: none, cpu or nvme"),
    IDLE("zero_optimization.offload_param.nvme_path", TYPE_TEXT, NO_NVME),
    IDLE("zero_optimization.offload_param.buffer_count", TYPE_COUNT64, NO_OFFLOAD),
    IDLE("zero_optimization.offload_param.buffer_size", TYPE_COUNT64, NO_OFFLOAD),
    IDLE("zero_optimization.offload_param.max_in_cpu", TYPE_COUNT64, NO_OFFLOAD),
    IDLE("zero_optimization.offload_param.pin_memory", TYPE_BOOL, NO_OFFLOAD),
    SECTION("zero_optimization.offload_optimizer"),
    CLAIM("zero_optimization.offload_optimizer.device", TYPE_TEXT, "offload.optimizer",
          "tier of the optimizer's states: none, cpu or nvme"),
    CLAIM("zero_optimization.offload_optimizer.ratio", TYPE_NUMBER, "offload.optimizer.fraction",
          "share of the optimizer's states to offload, 0 to 1"),
    IDLE("zero_optimization.offload_optimizer.nvme_path", TYPE_TEXT, NO_NVME),
    IDLE("zero_optimization.offload_optimizer.buffer_count", TYPE_COUNT64, NO_OFFLOAD),
    IDLE("zero_optimization.offload_optimizer.pin_memory", TYPE_BOOL, NO_OFFLOAD),
    IDLE("zero_optimization.offload_optimizer.pipeline_read", TYPE_BOOL, NO_OFFLOAD),
    IDLE("zero_optimization.offload_optimizer.pipeline_write", TYPE_BOOL, NO_OFFLOAD),
    IDLE("zero_optimization.offload_optimizer.pipeline", TYPE_BOOL, NO_OFFLOAD),
    IDLE("zero_optimization.offload_optimizer.fast_init", TYPE_BOOL, NO_OFFLOAD),
    IDLE("zero_optimization.offload_optimizer.super_offload", TYPE_BOOL, NO_OFFLOAD),
    IDLE("zero_optimization.offload_optimizer.convert_grad_on_cpu", TYPE_BOOL, NO_OFFLOAD),
    IDLE("zero_optimization.offload_optimizer.cpuadam_cores_perc", TYPE_NUMBER, NO_OFFLOAD),
    SECTION("aio"),
    IDLE("aio.block_size", TYPE_COUNT64, NO_NVME),
    IDLE("aio.queue_depth", TYPE_COUNT64, NO_NVME),
    IDLE("aio.thread_count", TYPE_COUNT64, NO_NVME),
    IDLE("aio.intra_op_parallelism", TYPE_COUNT64, NO_NVME),
    IDLE("aio.single_submit", TYPE_BOOL, NO_NVME),
    IDLE("aio.overlap_events", TYPE_BOOL, NO_NVME),
    IDLE("aio.use_gds", TYPE_BOOL, NO_NVME),
    IDLE("zero_allow_untested_optimizer", TYPE_BOOL, ADAMW),
    IDLE("zero_force_ds_cpu_optimizer", TYPE_BOOL, ADAMW),
    /* ---- activation checkpointing ---- */
    SECTION("activation_checkpointing"),
    STORED("activation_checkpointing.number_checkpoints", TYPE_COUNT32, number_checkpoints, 1,
           U32_HIGH, NULL,
           "n checkpoints mean checkpointing=block:K with K = layers / n, rounded up"),
    STORED("activation_checkpointing.cpu_checkpointing", TYPE_BOOL, cpu_checkpointing, 0, 0, NULL,
           "true means offload.activations=cpu"),
    IDLE("activation_checkpointing.partition_activations", TYPE_BOOL,
         "there is no model parallelism to partition over"),
    IDLE("activation_checkpointing.contiguous_memory_optimization", TYPE_BOOL, CHECKPOINT),
    IDLE("activation_checkpointing.synchronize_checkpoint_boundary", TYPE_BOOL, CHECKPOINT),
    IDLE("activation_checkpointing.profile", TYPE_BOOL, PROFILER),
    /* ---- reporting ---- */
    STORED("steps_per_print", TYPE_COUNT32, config.steps_per_print, 1, U32_HIGH, "10",
           "a line of progress every so many steps"),
    IDLE("wall_clock_breakdown", TYPE_BOOL, PROFILER),
    IDLE("memory_breakdown", TYPE_BOOL, PROFILER),
    IDLE("dump_state", TYPE_BOOL, "--check-config prints the configuration"),
    SECTION("flops_profiler"),
    IDLE("flops_profiler.enabled", TYPE_BOOL, PROFILER),
    IDLE("flops_profiler.profile_step", TYPE_COUNT64, PROFILER),
    IDLE("flops_profiler.module_depth", TYPE_COUNT64, PROFILER),
    IDLE("flops_profiler.top_modules", TYPE_COUNT64, PROFILER),
    IDLE("flops_profiler.detailed", TYPE_BOOL, PROFILER),
    IDLE("flops_profiler.output_file", TYPE_TEXT, PROFILER),
    IDLE("flops_profiler.recompute_fwd_factor", TYPE_NUMBER, PROFILER),
    SECTION("comms_logger"),
    IDLE("comms_logger.enabled", TYPE_BOOL, PROFILER),
    IDLE("comms_logger.verbose", TYPE_BOOL, PROFILER),
    IDLE("comms_logger.prof_all", TYPE_BOOL, PROFILER),
    IDLE("comms_logger.debug", TYPE_BOOL, PROFILER),
    IDLE("comms_logger.prof_ops", TYPE_ANY, PROFILER),
    SECTION("tensorboard"),
    IDLE("tensorboard.enabled", TYPE_BOOL, MONITOR),
    IDLE("tensorboard.output_path", TYPE_TEXT, MONITOR),
    IDLE("tensorboard.job_name", TYPE_TEXT, MONITOR),
    SECTION("csv_monitor"),
    IDLE("csv_monitor.enabled", TYPE_BOOL, MONITOR),
    IDLE("csv_monitor.output_path", TYPE_TEXT, MONITOR),
    IDLE("csv_monitor.job_name", TYPE_TEXT, MONITOR),
    SECTION("wandb"),
    IDLE("wandb.enabled", TYPE_BOOL, MONITOR),
    IDLE("wandb.group", TYPE_TEXT, MONITOR),
    IDLE("wandb.team", TYPE_TEXT, MONITOR),
    IDLE("wandb.project", TYPE_TEXT, MONITOR),
    SECTION("comet"),
    IDLE("comet.enabled", TYPE_BOOL, MONITOR),
    IDLE("comet.workspace", TYPE_TEXT, MONITOR),
    IDLE("comet.project", TYPE_TEXT, MONITOR),
    IDLE("comet.samples_log_interval", TYPE_COUNT64, MONITOR),
    IDLE("comet.experiment_name", TYPE_TEXT, MONITOR),
    IDLE("comet.api_key", TYPE_TEXT, MONITOR),
    IDLE("comet.experiment_key", TYPE_TEXT, MONITOR),
    IDLE("comet.online", TYPE_BOOL, MONITOR),
    IDLE("comet.mode", TYPE_TEXT, MONITOR),
    /* ---- saves and the rest of DeepSpeed ---- */
    SECTION("checkpoint"),
    IDLE("checkpoint.tag_validation", TYPE_TEXT, "all ranks vote on every save"),
    ONLY("checkpoint.load_universal", "false", "a run resumes from its own saves with --resume"),
    ONLY("checkpoint.use_node_local_storage", "false", "saves go to the run directory"),
    IDLE("checkpoint.parallel_write", TYPE_ANY, "all ranks write in parallel"),
    IDLE("checkpoint.writer", TYPE_ANY, "all ranks write in parallel"),
    IDLE("dataloader_drop_last", TYPE_BOOL, "data order is a function of seed and step"),
    IDLE("nebula", TYPE_ANY, "saves go to the run directory"),
    IDLE("autotuning", TYPE_ANY, "--plan predicts every strategy without trying it"),
    SWITCHED_OFF("elasticity", "the number of ranks is fixed for a run"),
    SWITCHED_OFF("hybrid_engine", "there is no generation mode"),
    SWITCHED_OFF("compile", "every kernel is compiled ahead"),
    SWITCHED_OFF("data_efficiency", "it would change which data are trained on"),
    SWITCHED_OFF("curriculum_learning", "it would change which data are trained on"),
    SWITCHED_OFF("progressive_layer_drop", "it would change the model"),
    SWITCHED_OFF("eigenvalue", "quantisation is not done here"),
    SWITCHED_OFF("quantize_training", "quantisation is not done here"),
    REFUSED("compression_training", "it would change the model"),
    REFUSED("sparse_attention", "attention is dense"),
    REFUSED("tensor_parallel", "there is no tensor parallelism"),
    REFUSED("pipeline", "there is no pipeline parallelism"),
    REFUSED("domino", "there is no tensor parallelism"),
    /* ---- ours: what to train ---- */
    SECTION("ballast"),
    STORED("ballast.model", TYPE_TEXT, config.model, 0, 0, "(required)",
           "a preset, or a folder with Hugging Face's config.json"),
    {.path = "ballast.dropout",
     .type = TYPE_NUMBER,
     .verdict = VERDICT_HONOURED,
     .low = 0,
     .high = 1,
     .below_high = true,
     .at = AT(dropout),
     .standard = "(the model's)",
     .help = "all three dropout rates of the model"},
    STORED("ballast.data", TYPE_PATHS, config.data, 0, 0, "(required)",
           "training text or token file, or a list of them"),
    CHOICE("ballast.data_format", config.data_format, "auto|bytes|llmc|nanogpt", "megatron", "auto",
           "auto knows llm.c's files by their magic and reads anything else byte by byte"),
    STORED("ballast.shuffle", TYPE_BOOL, config.shuffle, 0, 0, "true",
           "a new order of samples every epoch"),
    STORED("ballast.eval_data", TYPE_PATHS, config.eval_data, 0, 0, "(none)",
           "text or token files to evaluate on"),
    STORED("ballast.seq_len", TYPE_COUNT32, config.seq_len, 1, 1 << 24,
           "(the model's longest, at most 1024)", "tokens of a sample"),
    STORED("ballast.steps", TYPE_COUNT64, config.steps, 1, U32_HIGH, "(required)",
           "optimizer steps of the run"),
    STORED("ballast.seed", TYPE_COUNT64, config.seed, 0, U64_HIGH, "0",
           "of weights, dropout and data order"),
    /* ---- ours: where ---- */
    CHOICE("ballast.device", config.device, "auto|cpu|cuda", NULL, "auto",
           "where the step runs; auto: GPUs where every rank has one"),
    STORED("ballast.device_memory", TYPE_BYTES, config.device_memory, 1 << 20, U64_HIGH,
           "(a rank's share of the node)", "capacity of a rank's device"),
    STORED("ballast.host_memory", TYPE_BYTES, config.host_memory, 1 << 20, U64_HIGH,
           "(a rank's share of the node)", "host memory a rank may take"),
    CHOICE("ballast.reductions", config.reductions, "ordered|library", NULL, "ordered",
           "sums over ranks in rank order, or as the library likes: faster, not the same bits"),
    STORED("ballast.reduce_bucket", TYPE_BYTES, config.reduce_bucket, 1024, 1e12, "16MiB",
           "memory for the parts of an ordered sum"),
    IDLE("ballast.pinned_memory", TYPE_BYTES, "the pinned buffers have a fixed size"),
    IDLE("ballast.nvme_path", TYPE_TEXT, NO_NVME),
    {.path = "ballast.threads",
     .type = TYPE_COUNT32,
     .verdict = VERDICT_HONOURED,
     .low = 0,
     .high = 4096,
     .at = AT(config.threads),
     .standard = "0",
     .help = "compute threads a rank; 0: as many as the rank may use"},
    STORED("ballast.run_dir", TYPE_TEXT, config.run_dir, 0, 0, "(runs/<name of the file>)",
           "directory of this run's files"),
    /* ---- ours: how ---- */
    {.path = "ballast.strategy",
     .type = TYPE_STRATEGY,
     .verdict = VERDICT_SECTION,
     .at = CONFIG_NOWHERE},
    STORED("ballast.pause_at", TYPE_STEPS, config.pause_at, 0, U32_HIGH, NULL,
           "completed steps at which to pause: a number or a list of up to 16"),
    REFUSED("ballast.http", "this version serves no HTTP; use ballastctl"),
    ONLY("ballast.link", "\"auto\"|\"unix\"", "ranks reach the daemon over Unix sockets"),
    REFUSED("ballast.observers", "this version's socket is for its own user only"),
    SECTION("ballast.oom"),
    CHOICE("ballast.oom.policy", config.oom_policy, "report|abort", "adapt", "report",
           "out of memory: stop cleanly with a saved state, or at once"),
    ONLY("ballast.oom.give_back", "false", "memory stays as planned until a switch"),
    SECTION("ballast.save"),
    STORED("ballast.save.every", TYPE_COUNT64, config.save_every, 0, U32_HIGH, "0",
           "save every so many steps; 0: never"),
    STORED("ballast.save.keep", TYPE_COUNT64, config.save_keep, 0, U32_HIGH, "0",
           "saves to keep; 0: all"),
    SECTION("ballast.eval"),
    STORED("ballast.eval.every", TYPE_COUNT64, config.eval_every, 0, U32_HIGH, "0",
           "evaluate every so many steps; 0: never"),
    STORED("ballast.eval.micro_batch", TYPE_COUNT32, config.eval_micro_batch, 1, U32_HIGH,
           "(the strategy's micro_batch)", "sequences per evaluated micro-batch"),
    STORED("ballast.eval.batches", TYPE_COUNT64, config.eval_batches, 0, U64_HIGH, "0",
           "micro-batches to evaluate at most; 0: all"),
    STORED("ballast.step_timeout", TYPE_NUMBER, config.step_timeout_s, 0.1, 86400, "600",
           "seconds after which a wait inside a step is given up"),
    STORED("ballast.daemon", TYPE_BOOL, config.daemon, 0, 0, "true", "start ballastd"),
    SECTION("ballast.debug"),
    STORED("ballast.debug.paint", TYPE_BOOL, config.paint, 0, 0, "false",
           "paint the workspace and put red zones between buffers (slow)"),
};

#define N_ROWS (sizeof(rows) / sizeof(rows[0]))

_Static_assert(N_ROWS <= CONFIG_MAX_ROWS, "the draft remembers which rows were seen");
_Static_assert(sizeof(enum data_format) == sizeof(int) &&
                   sizeof(enum device_choice) == sizeof(int) &&
                   sizeof(enum oom_policy) == sizeof(int),
               "choices are stored as int");
_Static_assert(sizeof(((struct config *)0)->threads) == sizeof(uint32_t), "read as a count");
_Static_assert(OOM_REPORT == 0 && OOM_ABORT == 1 && DEVICE_CHOICE_AUTO == 0 &&
                   DEVICE_CHOICE_CPU == 1 && DATA_AUTO == 0 && DATA_BYTES == 1 && DATA_LLMC == 2 &&
                   DATA_NANOGPT_UINT16 == 3,
               "choices stand in the order of their enums");

size_t config_n_rows(void)
{
    return N_ROWS;
}

const struct config_row *config_row_at(size_t index)
{
    assert(index < N_ROWS);
    return &rows[index];
}

const struct config_row *config_row(const char *path)
{
    for (size_t i = 0; i < N_ROWS; i++) {
        if (strcmp(rows[i].path, path) == 0) {
            return &rows[i];
        }
    }
    return NULL;
}

bool config_is_seen(const struct config_draft *draft, const char *path)
{
    const struct config_row *row = config_row(path);
    assert(row);
    return draft->seen[row - rows] == SEEN_GIVEN;
}

/* ---- defaults ---- */

static void store_default(struct config_draft *draft, const struct config_row *row)
{
    char *at = (char *)draft + row->at;
    const double number = strtod(row->standard, NULL);

    switch (row->type) {
    case TYPE_BOOL:
        *(bool *)at = strcmp(row->standard, "true") == 0;
        break;
    case TYPE_COUNT32:
        *(uint32_t *)(void *)at = (uint32_t)number;
        break;
    case TYPE_COUNT64:
    case TYPE_BYTES:
        *(uint64_t *)(void *)at = (uint64_t)number;
        break;
    case TYPE_NUMBER:
        *(double *)(void *)at = number;
        break;
    case TYPE_CHOICE:
        *(int *)(void *)at = config_choice(row->choices, row->standard);
        break;
    case TYPE_TEXT:
    case TYPE_PATHS:
    case TYPE_STEPS:
    case TYPE_BETAS:
    case TYPE_STRATEGY:
    case TYPE_SECTION:
    case TYPE_ANY:
        assert(row->type == TYPE_BOOL); /* defaults of these types are worked out later */
        break;
    }
}

void config_draft_init(struct config_draft *draft)
{
    memset(draft, 0, sizeof(*draft));
    for (size_t i = 0; i < N_ROWS; i++) {
        const struct config_row *row = &rows[i];
        if (row->standard && row->standard[0] != '(' && row->at != CONFIG_NOWHERE) {
            store_default(draft, row);
        }
    }
    draft->betas[0] = 0.9;
    draft->betas[1] = 0.999;
}
