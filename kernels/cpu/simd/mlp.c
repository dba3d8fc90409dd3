/* Activation functions and dropout on a range. See simd_table.h. */
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/parts.h"

/* GELU, tanh form: 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). */
static const float GELU_2A = 1.59576912f;    /* 2 sqrt(2/pi) */
static const float GELU_2AB = 0.0713548163f; /* 2 sqrt(2/pi) 0.044715 */
static const float GELU_6AB = 0.214064449f;  /* three times that: the derivative of 2u */

SIMD_INLINE vec sigmoid(vec x)
{
    return 1.0f / (vec_exp(-x) + 1.0f);
}

/* Also 1 - sigmoid, as exp(-x) sigmoid: the difference would lose its digits. */
SIMD_INLINE vec sigmoid_and_rest(vec x, vec *out_rest)
{
    vec e = vec_exp(-x);
    e = vec_select(e > vec_set(1e30f), vec_set(1e30f), e); /* infinity times 0 */
    const vec s = 1.0f / (e + 1.0f);
    *out_rest = e * s;
    return s;
}

void SIMD(gelu_forward)(void *outputs, const void *inputs, size_t n)
{
    const elem *in = inputs;
    elem *out = outputs;
    for (size_t i = 0; i < n; i += LANES) {
        const vec x = elem_load_part(in + i, n - i, 0.0f);
        const vec u2 = x * vec_fma(x * x, vec_set(GELU_2AB), vec_set(GELU_2A));
        elem_store_part(out + i, x * sigmoid(u2), n - i);
    }
}

void SIMD(gelu_backward)(void *dinputs, const void *doutputs, const void *inputs, size_t n)
{
    const elem *dout = doutputs, *in = inputs;
    elem *din = dinputs;
    for (size_t i = 0; i < n; i += LANES) {
        /* Beyond 40 the slope is 0 or 1 to the last bit; x cubed must not overflow. */
        vec x = vec_max(vec_set(-40.0f), elem_load_part(in + i, n - i, 0.0f));
        x = vec_select(x > vec_set(40.0f), vec_set(40.0f), x);
        const vec square = x * x;
        vec rest;
        const vec s =
            sigmoid_and_rest(x * vec_fma(square, vec_set(GELU_2AB), vec_set(GELU_2A)), &rest);
        const vec slope = vec_fma(square, vec_set(GELU_6AB), vec_set(GELU_2A));
        const vec d = vec_fma(x * slope, s * rest, s);
        elem_store_part(din + i, elem_load_part(dout + i, n - i, 0.0f) * d, n - i);
    }
}

void SIMD(swiglu_forward)(void *outputs, const void *inputs, size_t inner)
{
    const elem *in = inputs;
    elem *out = outputs;
    for (size_t i = 0; i < inner; i += LANES) {
        const size_t n = inner - i;
        const vec gate = elem_load_part(in + i, n, 0.0f);
        const vec up = elem_load_part(in + inner + i, n, 0.0f);
        elem_store_part(out + i, gate * sigmoid(gate) * up, n);
    }
}

void SIMD(swiglu_backward)(void *dinputs, const void *doutputs, const void *inputs, size_t inner)
{
    const elem *dout = doutputs, *in = inputs;
    elem *din = dinputs;
    for (size_t i = 0; i < inner; i += LANES) {
        const size_t n = inner - i;
        const vec gate = elem_load_part(in + i, n, 0.0f);
        const vec up = elem_load_part(in + inner + i, n, 0.0f);
        const vec d = elem_load_part(dout + i, n, 0.0f);
        vec rest;
        const vec s = sigmoid_and_rest(gate, &rest);
        const vec slope = s * vec_fma(gate, rest, vec_set(1.0f));
        elem_store_part(din + i, d * up * slope, n);
        elem_store_part(din + inner + i, d * gate * s, n);
    }
}

static void drop(elem *out, const elem *residual, const elem *branch, size_t width,
                 const struct dropout_row *row)
{
    for (size_t i = 0; i < width; i += 4 * LANES) {
        uint32_t words[4 * LANES];
        uvec counter[4] = {uvec_count((uint32_t)(i / 4)), uvec_set(row->token),
                           uvec_set(row->sample), uvec_set(row->stream)};
        uvec_philox(row->key, counter);
        uvec_interleave(counter, words);
        for (size_t j = i; j < width && j < i + 4 * LANES; j += LANES) {
            uvec word;
            memcpy(&word, words + (j - i), sizeof word);
            const vec x = elem_load_part(branch + j, width - j, 0.0f) * row->scale;
            const vec kept = vec_select((ivec)(word >= row->threshold), x, vec_set(0.0f));
            const vec base =
                residual ? elem_load_part(residual + j, width - j, 0.0f) : vec_set(0.0f);
            elem_store_part(out + j, base + kept, width - j);
        }
    }
}

void SIMD(dropout_row)(void *outputs, const void *residuals, const void *branches, size_t width,
                       const struct dropout_row *row)
{
    const elem *residual = residuals, *branch = branches;
    elem *out = outputs;
    if (row->threshold != 0) {
        drop(out, residual, branch, width, row);
    } else if (residual) {
        for (size_t i = 0; i < width; i += LANES) {
            const vec sum = elem_load_part(residual + i, width - i, 0.0f) +
                            elem_load_part(branch + i, width - i, 0.0f);
            elem_store_part(out + i, sum, width - i);
        }
    } else if (out != branch) {
        memcpy(out, branch, width * sizeof *out);
    }
}
