/* Cross-entropy of one row. See simd_table.h. The gradient needs the exponentials again: they are
 * kept in place of the logits where that loses nothing, computed once more where they would be
 * rounded. */
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/parts.h"

/* Elements whose exponentials are summed in fp32 before they are added in fp64. */
enum { SUM_BLOCK = 2048 };
static const bool KEEPS_EXACTLY = sizeof(elem) == sizeof(float);

static float greatest(const elem *x, size_t n)
{
    vec most[4] = {vec_set(-INFINITY), vec_set(-INFINITY), vec_set(-INFINITY), vec_set(-INFINITY)};
    size_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (size_t j = 0; j < 4; j++)
            most[j] = vec_max(elem_load(x + i + j * LANES), most[j]);
    for (; i < n; i += LANES)
        most[0] = vec_max(elem_load_part(x + i, n - i, -INFINITY), most[0]);
    return vec_greatest(vec_max(vec_max(most[0], most[1]), vec_max(most[2], most[3])));
}

/* Sum of exp(x - most); keeps the exponentials in place of x when asked to. */
static double sum_of_exponentials(elem *x, size_t n, float most, bool keep)
{
    double total = 0.0;
    for (size_t block = 0; block < n; block += SUM_BLOCK) {
        const size_t end = n - block < SUM_BLOCK ? n : block + SUM_BLOCK;
        vec sum = vec_set(0.0f);
        for (size_t i = block; i < end; i += LANES) {
            const vec e = vec_exp(elem_load_part(x + i, end - i, -INFINITY) - most);
            sum += e;
            if (keep)
                elem_store_part(x + i, e, end - i);
        }
        total += (double)vec_sum(sum);
    }
    return total;
}

/* x = scale * exp(x - most), of the exponentials where x holds them already. */
static void scale_exponentials(elem *x, size_t n, float most, float scale)
{
    for (size_t i = 0; i < n; i += LANES) {
        vec e = elem_load_part(x + i, n - i, 0.0f);
        if (!KEEPS_EXACTLY)
            e = vec_exp(e - most);
        elem_store_part(x + i, e * scale, n - i);
    }
}

float SIMD(cross_entropy_row)(void *row, size_t vocab, int32_t label, float grad_scale,
                              bool with_gradient)
{
    elem *logits = row;
    if (label < 0) {
        if (with_gradient)
            memset(logits, 0, vocab * sizeof *logits);
        return 0.0f;
    }
    const float most = greatest(logits, vocab);
    const float target = elem_get(logits + label);
    const double sum = sum_of_exponentials(logits, vocab, most, with_gradient && KEEPS_EXACTLY);
    if (with_gradient) {
        const float scale = (float)((double)grad_scale / sum);
        scale_exponentials(logits, vocab, most, scale);
        elem_set(logits + label, vec_exp(vec_set(target) - most)[0] * scale - grad_scale);
    }
    return (float)(log(sum) + ((double)most - (double)target));
}
