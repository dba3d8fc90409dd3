/* AdamW on a range. See simd_table.h.
 *
 * This is the written order of operations that every device and tier follows: each line
 * rounds once per operation, fused only where fmaf says so. Factors that do not depend on the
 * element are rounded to fp32 first. The compiler vectorises the loop as it stands. The copy in the
 * compute type is made block by block, of values that are still in the first cache. */
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/parts.h"

static void update(float *restrict params, float *restrict moment_m, float *restrict moment_v,
                   const float *restrict grads, size_t n, const struct adamw *adamw)
{
    const float scale = adamw->grad_scale;
    const float beta1 = adamw->beta1, beta2 = adamw->beta2;
    const float rest1 = 1.0f - beta1, rest2 = 1.0f - beta2;
    const float correction1 = (float)adamw->bias_correction1;
    const float correction2 = (float)adamw->bias_correction2;
    const float lr = adamw->lr, eps = adamw->eps, decay = adamw->weight_decay;
    for (size_t i = 0; i < n; i++) {
        const float g = grads[i] * scale;
        const float m = fmaf(beta1, moment_m[i], rest1 * g);
        const float v = fmaf(beta2, moment_v[i], rest2 * (g * g));
        const float step = (m / correction1) / (sqrtf(v / correction2) + eps);
        const float p = params[i];
        moment_m[i] = m;
        moment_v[i] = v;
        params[i] = p - lr * (step + decay * p);
    }
}

void SIMD(adamw)(float *params, void *copy, float *moment_m, float *moment_v, const float *grads,
                 size_t n, const struct adamw *adamw)
{
    enum { BLOCK = 1024 };
    if (!copy) {
        update(params, moment_m, moment_v, grads, n, adamw);
        return;
    }
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t count = n - i < BLOCK ? n - i : BLOCK;
        update(params + i, moment_m + i, moment_v + i, grads + i, count, adamw);
        SIMD(narrow)((elem *)copy + i, params + i, count);
    }
}
