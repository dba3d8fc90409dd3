/* The CPU table's own state, shared by the files of kernels/cpu.
 *
 * Owns nothing. An operation is written in two halves: the loop over independent ranges,
 * in the file named after it (kernels/cpu/norm.c), and the arithmetic on one range, in
 * kernels/cpu/simd/, which is compiled once per instruction set. Ranges are cut by shape
 * alone, never by the number of threads, so values do not depend on it. Main thread. */
#ifndef BALLAST_KERNELS_CPU_CPU_OPS_H
#define BALLAST_KERNELS_CPU_CPU_OPS_H

#include "kernels/cpu/simd/simd_table.h"
#include "kernels/ops.h"

struct matmul_cache;

struct cpu_ops {
    struct ops base; /* first: a struct ops * is a struct cpu_ops * */
    int n_threads;
    const struct simd_table *simd; /* borrowed, static; of the compute type */
    bool bf16_by_library;          /* who does bf16 products, see cpu_choose_products() */
    struct matmul_cache *matmuls;  /* owned; the library's primitives */
    struct failure error;          /* the first error since the last check */
    char fingerprint[160];
};

static inline struct cpu_ops *cpu_of(struct ops *ops)
{
    return (struct cpu_ops *)(void *)ops;
}

/* Element i of an operand in the compute type. */
static inline const void *const_elem_at(const struct simd_table *simd, const void *elements,
                                        size_t i)
{
    return (const unsigned char *)elements + i * simd->elem_bytes;
}

static inline void *elem_at(const struct simd_table *simd, void *elements, size_t i)
{
    return (unsigned char *)elements + i * simd->elem_bytes;
}

/* bf16 products by the library, or by our fp32 kernels on operands widened on the way; made by
 * cpu_ops_new() for the processor. Another choice is for tests and measurements, before the
 * first product. Writes the fingerprint. */
void cpu_choose_products(struct cpu_ops *cpu, bool by_library);
/* The library multiplies bf16 faster than our kernels multiply fp32 on this processor. */
bool cpu_library_has_bf16(void);

/* Keep the first error until ops->check() returns it. */
void cpu_fail(struct cpu_ops *cpu, enum status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- threads.c: the only file that forks ---- */

/* Work on the items [begin, end) of the call described by `call`. */
typedef void cpu_body(const void *call, size_t begin, size_t end);

enum cpu_schedule {
    CPU_EVEN,  /* items cost the same: one contiguous share per thread */
    CPU_UNEVEN /* they do not: threads take one grain after the other */
};

/* Run `body` over n items in ranges of at most `grain` items (ranges begin at multiples of
 * it). `work` is about how many elements the whole call touches: small calls stay on the
 * calling thread, since waking the others costs 5-8 us. */
void cpu_parallel(const struct cpu_ops *cpu, size_t n, size_t grain, size_t work,
                  enum cpu_schedule schedule, cpu_body *body, const void *call);
/* Which of the table's threads runs the calling `body`: 0 to n_threads - 1. */
size_t cpu_thread_index(void);
/* Sets how many threads the matrix library uses from the calling thread. */
void cpu_set_library_threads(int n_threads);

/* ---- matmul_library.c: products through oneDNN ---- */

enum status cpu_library_init(struct cpu_ops *cpu, struct failure *why) MUST_CHECK;
void cpu_library_fini(struct cpu_ops *cpu);
/* As ops->matmul_scratch and ops->matmul, of shapes that are not empty. */
size_t cpu_library_scratch(struct cpu_ops *cpu, const struct matmul *shape);
void cpu_library_matmul(struct cpu_ops *cpu, const struct matmul *call);

/* ---- one function per file: fill its part of the table ---- */
void cpu_matmul_init(struct cpu_ops *cpu);
void cpu_attention_init(struct cpu_ops *cpu);
void cpu_norm_init(struct cpu_ops *cpu);
void cpu_mlp_init(struct cpu_ops *cpu);
void cpu_rotary_init(struct cpu_ops *cpu);
void cpu_embed_init(struct cpu_ops *cpu);
void cpu_loss_init(struct cpu_ops *cpu);
void cpu_adamw_init(struct cpu_ops *cpu);
void cpu_reduce_init(struct cpu_ops *cpu);
void cpu_random_init(struct cpu_ops *cpu);

#endif
