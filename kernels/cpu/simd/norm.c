/* Norms on a range of rows or columns, and sums of columns. See simd_table.h. */
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/parts.h"

static float row_mean(const elem *x, size_t width)
{
    vec sum = vec_set(0.0f);
    for (size_t i = 0; i < width; i += LANES)
        sum += elem_load_part(x + i, width - i, 0.0f);
    return vec_sum(sum) / (float)width;
}

/* Mean of the squared distances from `mean`. Lanes beyond the row hold the mean itself. */
static float row_variance(const elem *x, size_t width, float mean)
{
    vec sum = vec_set(0.0f);
    for (size_t i = 0; i < width; i += LANES) {
        const vec d = elem_load_part(x + i, width - i, mean) - mean;
        sum = vec_fma(d, d, sum);
    }
    return vec_sum(sum) / (float)width;
}

void SIMD(norm_forward)(enum norm_kind kind, void *out_rows, float *mean, float *rstd,
                        const void *x_rows, const void *weights, const void *biases, size_t rows,
                        size_t width, float eps)
{
    const elem *x = x_rows, *weight = weights, *bias = biases;
    elem *out = out_rows;
    for (size_t r = 0; r < rows; r++, x += width, out += width) {
        const float m = kind == NORM_LAYER ? row_mean(x, width) : 0.0f;
        const float s = 1.0f / sqrtf(row_variance(x, width, m) + eps);
        if (mean)
            mean[r] = m;
        rstd[r] = s;
        for (size_t i = 0; i < width; i += LANES) {
            const size_t n = width - i;
            const vec normal = (elem_load_part(x + i, n, 0.0f) - m) * s;
            const vec w = elem_load_part(weight + i, n, 0.0f);
            const vec y = bias ? vec_fma(normal, w, elem_load_part(bias + i, n, 0.0f)) : normal * w;
            elem_store_part(out + i, y, n);
        }
    }
}

/* With n = (x - mean) rstd and g = dout weight: dx = rstd (g - avg(g) - n avg(g n)); RMS norm
 * has no avg(g) term. */
void SIMD(norm_backward_rows)(enum norm_kind kind, void *dx_rows, const void *dout_rows,
                              const void *x_rows, const void *weights, const float *mean,
                              const float *rstd, size_t rows, size_t width)
{
    const elem *dout = dout_rows, *x = x_rows, *weight = weights;
    elem *dx = dx_rows;
    for (size_t r = 0; r < rows; r++, x += width, dout += width, dx += width) {
        const float m = mean ? mean[r] : 0.0f;
        const float s = rstd[r];
        vec sum_g = vec_set(0.0f), sum_gn = vec_set(0.0f);
        for (size_t i = 0; i < width; i += LANES) {
            const size_t n = width - i;
            const vec g = elem_load_part(dout + i, n, 0.0f) * elem_load_part(weight + i, n, 0.0f);
            const vec normal = (elem_load_part(x + i, n, 0.0f) - m) * s;
            sum_g += g;
            sum_gn = vec_fma(g, normal, sum_gn);
        }
        const float avg_g = kind == NORM_LAYER ? vec_sum(sum_g) / (float)width : 0.0f;
        const float avg_gn = vec_sum(sum_gn) / (float)width;
        for (size_t i = 0; i < width; i += LANES) {
            const size_t n = width - i;
            const vec g = elem_load_part(dout + i, n, 0.0f) * elem_load_part(weight + i, n, 0.0f);
            const vec normal = (elem_load_part(x + i, n, 0.0f) - m) * s;
            const vec inner = vec_fma(normal, vec_set(-avg_gn), g - avg_g);
            elem_store_part(dx + i, vec_fma(inner, vec_set(s), elem_load_part(dx + i, n, 0.0f)), n);
        }
    }
}

void SIMD(norm_backward_columns)(enum norm_kind kind, float *dweight, float *dbias,
                                 const void *dout_rows, const void *x_rows, const float *mean,
                                 const float *rstd, size_t rows, size_t width, size_t n)
{
    const elem *dout = dout_rows, *x = x_rows;
    for (size_t i = 0; i < n; i += LANES) {
        vec sum_weight = vec_set(0.0f), sum_bias = vec_set(0.0f);
        for (size_t r = 0; r < rows; r++) {
            const float m = kind == NORM_LAYER ? mean[r] : 0.0f;
            const vec d = elem_load_part(dout + r * width + i, n - i, 0.0f);
            const vec normal = (elem_load_part(x + r * width + i, n - i, 0.0f) - m) * rstd[r];
            sum_weight = vec_fma(d, normal, sum_weight);
            sum_bias += d;
        }
        vec_store_part(dweight + i, sum_weight, n - i);
        if (dbias)
            vec_store_part(dbias + i, sum_bias, n - i);
    }
}

void SIMD(column_sums)(float *out, const void *matrix, size_t rows, size_t stride, size_t n)
{
    const elem *in = matrix;
    enum { GROUP = 8 }; /* vectors of columns that are summed side by side */
    size_t i = 0;
    for (; i + GROUP * LANES <= n; i += GROUP * LANES) {
        vec sum[GROUP] = {0};
        for (size_t r = 0; r < rows; r++)
            for (int j = 0; j < GROUP; j++)
                sum[j] += elem_load(in + r * stride + i + (size_t)j * LANES);
        for (int j = 0; j < GROUP; j++)
            vec_store(out + i + (size_t)j * LANES, sum[j]);
    }
    for (; i < n; i += LANES) {
        vec sum = vec_set(0.0f);
        for (size_t r = 0; r < rows; r++)
            sum += elem_load_part(in + r * stride + i, n - i, 0.0f);
        vec_store_part(out + i, sum, n - i);
    }
}
