/* Runs ranges of an operation on the table's threads (OpenMP), or on the caller's alone in
 * builds without it. Owns no state. Main thread. */
#include "kernels/cpu/cpu_ops.h"

#include <dlfcn.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* Elements below which a call is not worth waking the other threads. */
enum { SERIAL_WORK = 32768 };

static void run_range(size_t n, size_t grain, size_t index, cpu_body *body, const void *call)
{
    const size_t begin = index * grain;
    body(call, begin, n - begin < grain ? n : begin + grain);
}

void cpu_parallel(const struct cpu_ops *cpu, size_t n, size_t grain, size_t work,
                  enum cpu_schedule schedule, cpu_body *body, const void *call)
{
    if (n == 0)
        return;
    const size_t n_ranges = (n + grain - 1) / grain;
#ifdef _OPENMP
    if (cpu->n_threads > 1 && n_ranges > 1 && work >= SERIAL_WORK) {
        if (schedule == CPU_EVEN) {
#pragma omp parallel for num_threads(cpu->n_threads) schedule(static)
            for (size_t i = 0; i < n_ranges; i++)
                run_range(n, grain, i, body, call);
        } else {
#pragma omp parallel for num_threads(cpu->n_threads) schedule(dynamic, 1)
            for (size_t i = 0; i < n_ranges; i++)
                run_range(n, grain, i, body, call);
        }
        return;
    }
#else
    (void)cpu;
    (void)work;
    (void)schedule;
#endif
    for (size_t i = 0; i < n_ranges; i++)
        run_range(n, grain, i, body, call);
}

size_t cpu_thread_index(void)
{
#ifdef _OPENMP
    return (size_t)omp_get_thread_num();
#else
    return 0;
#endif
}

/* The matrix library brings its own OpenMP runtime even where this file is compiled without,
 * so the setting is looked up in the process. */
void cpu_set_library_threads(int n_threads)
{
#ifdef _OPENMP
    omp_set_num_threads(n_threads);
#else
    static void (*set)(int);
    if (!set) {
        void *found = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
        if (!found)
            return;
        *(void **)&set = found;
    }
    set(n_threads);
#endif
}
