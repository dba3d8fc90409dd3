/* The CPU table: makes it, picks the instruction set, keeps the first error. Owns the struct
 * cpu_ops. Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <assert.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdarg.h>
#include <stdio.h>
#include "proto/base/heap.h"

void cpu_fail(struct cpu_ops *cpu, enum status status, const char *format, ...)
{
    if (cpu->error.status != STATUS_OK)
        return;
    cpu->error.status = status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(cpu->error.text, sizeof cpu->error.text, format, arguments);
    va_end(arguments);
}

static enum status check(struct ops *ops, struct failure *why)
{
    struct cpu_ops *cpu = cpu_of(ops);
    const struct failure error = cpu->error;
    cpu->error = (struct failure){0};
    if (error.status == STATUS_OK)
        return STATUS_OK;
    return fail(why, error.status, "%s", error.text);
}

static const char *fingerprint(struct ops *ops)
{
    return cpu_of(ops)->fingerprint;
}

static void free_ops(struct ops *ops)
{
    if (!ops)
        return;
    cpu_library_fini(cpu_of(ops));
    heap_free(cpu_of(ops));
}

static const struct simd_table *choose_simd(enum dtype dtype)
{
    const bool bf16 = dtype == DTYPE_BF16;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return bf16 ? &simd_table_avx512_bf16 : &simd_table_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2"))
        return bf16 ? &simd_table_avx2_bf16 : &simd_table_avx2;
#endif
    return bf16 ? &simd_table_plain_bf16 : &simd_table_plain;
}

static const char *library_isa(void)
{
    switch ((int)dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_sse41:
        return "sse41";
    case dnnl_cpu_isa_avx:
        return "avx";
    case dnnl_cpu_isa_avx2:
        return "avx2";
    case dnnl_cpu_isa_avx512_core:
        return "avx512_core";
    case dnnl_cpu_isa_avx512_core_vnni:
        return "avx512_core_vnni";
    case dnnl_cpu_isa_avx512_core_bf16:
        return "avx512_core_bf16";
    case dnnl_cpu_isa_avx512_core_amx:
        return "avx512_core_amx";
    default:
        return "other";
    }
}

/* The number after "kernels" changes whenever the same inputs may give other bits. */
static void write_fingerprint(struct cpu_ops *cpu)
{
    const dnnl_version_t *version = dnnl_version();
    const bool bf16 = cpu->base.dtype == DTYPE_BF16;
    int n = snprintf(cpu->fingerprint, sizeof cpu->fingerprint, "cpu %s; kernels 1 %s",
                     bf16 ? "bf16" : "fp32", cpu->simd->name);
    if (bf16 ? cpu->bf16_by_library : cpu->simd->panel_columns == 0)
        n += snprintf(cpu->fingerprint + n, sizeof cpu->fingerprint - (size_t)n,
                      "; products oneDNN %d.%d.%d %s", version->major, version->minor,
                      version->patch, library_isa());
    else if (bf16)
        n += snprintf(cpu->fingerprint + n, sizeof cpu->fingerprint - (size_t)n,
                      "; products widened to fp32");
    assert((size_t)n < sizeof cpu->fingerprint);
}

void cpu_choose_products(struct cpu_ops *cpu, bool by_library)
{
    cpu->bf16_by_library = cpu->base.dtype == DTYPE_BF16 && by_library;
    write_fingerprint(cpu);
}

/* Measured (README.md): AMD's dot products of bf16 are twice as fast as fp32, those of an Intel
 * processor that has AVX512_BF16 without AMX half as fast. */
bool cpu_library_has_bf16(void)
{
    switch ((int)dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_avx512_core_amx:
        return true;
    case dnnl_cpu_isa_avx512_core_bf16:
#if defined(__x86_64__)
        return __builtin_cpu_is("amd");
#endif
    default:
        return false;
    }
}

enum status cpu_ops_new(enum dtype dtype, int n_threads, struct ops **out_ops, struct failure *why)
{
    if (n_threads < 1)
        return fail(why, STATUS_OUT_OF_RANGE, "%d threads: at least 1 is needed", n_threads);
    struct cpu_ops *cpu = heap_calloc(1, sizeof *cpu);
    if (!cpu)
        return fail(why, STATUS_OUT_OF_MEMORY, "no memory for the table of cpu operations");
    cpu->base = (struct ops){.name = "cpu",
                             .dtype = dtype,
                             .elem_bytes = dtype_bytes(dtype),
                             .check = check,
                             .fingerprint = fingerprint,
                             .free = free_ops};
    cpu->n_threads = n_threads;
    cpu->simd = choose_simd(dtype);
    const enum status status = cpu_library_init(cpu, why);
    if (status != STATUS_OK) {
        heap_free(cpu);
        return status;
    }
    cpu_matmul_init(cpu);
    cpu_attention_init(cpu);
    cpu_norm_init(cpu);
    cpu_mlp_init(cpu);
    cpu_rotary_init(cpu);
    cpu_embed_init(cpu);
    cpu_loss_init(cpu);
    cpu_adamw_init(cpu);
    cpu_reduce_init(cpu);
    cpu_random_init(cpu);
    cpu_choose_products(cpu, cpu_library_has_bf16());
    *out_ops = &cpu->base;
    return STATUS_OK;
}
