/* AdamW on long arrays, in the written order of operations (kernels/cpu/simd/adamw.c): every
 * operation rounds once, fused only where __fmaf_rn says so, so that the values are those of
 * the CPU bit for bit. Bound by memory: each array is read and written once. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/quads.h"

/* struct adamw with all that does not depend on the element rounded to fp32 first. */
struct adamw_factors {
    float scale, beta1, beta2, rest1, rest2, correction1, correction2, lr, eps, decay;
};

static __device__ __forceinline__ void update_one(const struct adamw_factors &f, float grad,
                                                  float *p, float *m, float *v)
{
    const float g = __fmul_rn(grad, f.scale);
    *m = __fmaf_rn(f.beta1, *m, __fmul_rn(f.rest1, g));
    *v = __fmaf_rn(f.beta2, *v, __fmul_rn(f.rest2, __fmul_rn(g, g)));
    const float root = __fsqrt_rn(__fdiv_rn(*v, f.correction2));
    const float step = __fdiv_rn(__fdiv_rn(*m, f.correction1), __fadd_rn(root, f.eps));
    *p = __fsub_rn(*p, __fmul_rn(f.lr, __fadd_rn(step, __fmul_rn(f.decay, *p))));
}

template <class T>
static __global__ void __launch_bounds__(QUADS_BLOCK)
    update_params(float *__restrict__ params, T *__restrict__ copy, float *__restrict__ moment_m,
                  float *__restrict__ moment_v, const float *__restrict__ grads, size_t n,
                  struct adamw_factors factors, bool aligned)
{
    for (size_t i = quads_first(); i < n; i += quads_stride()) {
        float g[4], p[4], m[4], v[4];
        load_quad(g, grads + i, n - i, aligned);
        load_quad(p, params + i, n - i, aligned);
        load_quad(m, moment_m + i, n - i, aligned);
        load_quad(v, moment_v + i, n - i, aligned);
        for (int j = 0; j < 4; j++) {
            update_one(factors, g[j], &p[j], &m[j], &v[j]);
        }
        store_quad(moment_m + i, m, n - i, aligned);
        store_quad(moment_v + i, v, n - i, aligned);
        store_quad(params + i, p, n - i, aligned);
        if (copy != NULL) {
            store_quad(copy + i, p, n - i, aligned);
        }
    }
}

/* ---- launchers ---- */

template <class T> static void launch(cudaStream_t stream, const struct cuda_adamw *args)
{
    const struct adamw *a = &args->adamw;
    const struct adamw_factors factors = {a->grad_scale,
                                          a->beta1,
                                          a->beta2,
                                          1.0f - a->beta1,
                                          1.0f - a->beta2,
                                          (float)a->bias_correction1,
                                          (float)a->bias_correction2,
                                          a->lr,
                                          a->eps,
                                          a->weight_decay};
    const bool aligned =
        quads_aligned(args->params, sizeof(float)) && quads_aligned(args->copy, sizeof(T)) &&
        quads_aligned(args->moment_m, sizeof(float)) &&
        quads_aligned(args->moment_v, sizeof(float)) && quads_aligned(args->grads, sizeof(float));
    if (args->n > 0) {
        LAUNCH(update_params<T>, quads_grid(args->n), QUADS_BLOCK, 0, stream, args->params,
               (T *)args->copy, args->moment_m, args->moment_v, args->grads, args->n, factors,
               aligned);
    }
}

extern "C" void cuda_launch_adamw(cudaStream_t stream, const struct cuda_adamw *args)
{
    if (args->dtype == DTYPE_BF16) {
        launch<bf16>(stream, args);
    } else {
        launch<float>(stream, args);
    }
}
