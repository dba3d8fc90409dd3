/* See reference.h. */
#include "tests/lib/reference.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include "kernels/philox.h"

void reference_matmul(enum matmul_form form, size_t m, size_t n, size_t k, const double *a,
                      const double *b, const double *bias, double *c, bool accumulate)
{
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            double sum = 0.0;
            for (size_t l = 0; l < k; l++)
                sum += (form == MATMUL_TN ? a[l * m + i] : a[i * k + l]) *
                       (form == MATMUL_NT ? b[j * k + l] : b[l * n + j]);
            if (bias)
                sum += bias[j];
            c[i * n + j] = accumulate ? c[i * n + j] + sum : sum;
        }
}

void reference_norm(enum norm_kind kind, double *out, const double *x, const double *weight,
                    const double *bias, size_t rows, size_t width, double eps)
{
    for (size_t r = 0; r < rows; r++) {
        double mean = 0.0, square = 0.0;
        for (size_t i = 0; i < width && kind == NORM_LAYER; i++)
            mean += x[r * width + i] / (double)width;
        for (size_t i = 0; i < width; i++)
            square += (x[r * width + i] - mean) * (x[r * width + i] - mean) / (double)width;
        for (size_t i = 0; i < width; i++)
            out[r * width + i] =
                (x[r * width + i] - mean) / sqrt(square + eps) * weight[i] + (bias ? bias[i] : 0.0);
    }
}

void reference_activation(enum activation_kind kind, double *out, const double *in, size_t rows,
                          size_t inner)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < inner; i++) {
            if (kind == ACTIVATION_GELU) {
                const double x = in[r * inner + i];
                const double u = sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x);
                out[r * inner + i] = 0.5 * x * (1.0 + tanh(u));
            } else {
                const double gate = in[r * 2 * inner + i], up = in[r * 2 * inner + inner + i];
                out[r * inner + i] = gate / (1.0 + exp(-gate)) * up;
            }
        }
}

void reference_rotary(double *qkv, const int32_t *positions, const struct rotary *rotary,
                      size_t rows, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim,
                      int direction)
{
    const size_t row = (size_t)(n_heads + 2 * n_kv_heads) * head_dim, half = head_dim / 2;
    for (size_t r = 0; r < rows; r++)
        for (size_t head = 0; head < n_heads + n_kv_heads; head++)
            for (size_t i = 0; i < half; i++) {
                double *x = qkv + r * row + head * head_dim;
                const double angle = direction * (double)positions[r] * (double)rotary->inv_freq[i];
                const double a = x[i], b = x[i + half];
                x[i] = a * cos(angle) - b * sin(angle);
                x[i + half] = b * cos(angle) + a * sin(angle);
            }
}

static double keep_factor(const struct dropout *d, uint32_t column, uint32_t token, uint32_t sample,
                          uint32_t head)
{
    if (d->p == 0.0f)
        return 1.0;
    const struct philox_key key = philox_key(d->seed, d->step);
    const struct philox drawn = philox4x32(key.key0, key.key1, column / 4, token, sample,
                                           philox_stream(d->layer, (enum random_use)d->use, head));
    return drawn.word[column % 4] < dropout_threshold(d->p) ? 0.0 : 1.0 / (1.0 - (double)d->p);
}

static bool may_meet(const struct attention *a, size_t sample, size_t query, size_t key)
{
    const int32_t *segments = a->segments ? a->segments + sample * a->seq_len : NULL;
    return key <= query && (!segments || segments[query] == segments[key]);
}

/* One query of one head: `scores` is memory for seq_len numbers. */
static void attend(const struct attention *a, double *out, double *lse, const double *qkv,
                   size_t sample, uint32_t head, size_t query, double *scores)
{
    const size_t width = a->head_dim;
    const size_t row = (a->n_heads + 2 * a->n_kv_heads) * width;
    const size_t kv_head = head / (a->n_heads / a->n_kv_heads);
    const double *sequence = qkv + sample * a->seq_len * row;
    const double *q = sequence + query * row + head * width;
    const double *keys = sequence + (a->n_heads + kv_head) * width;
    const double *values = keys + a->n_kv_heads * width;
    double most = -INFINITY, sum = 0.0;
    for (size_t key = 0; key <= query; key++) {
        scores[key] = 0.0;
        for (size_t i = 0; i < width; i++)
            scores[key] += (double)a->scale * q[i] * keys[key * row + i];
        if (may_meet(a, sample, query, key) && scores[key] > most)
            most = scores[key];
    }
    for (size_t i = 0; i < width; i++)
        out[i] = 0.0;
    for (size_t key = 0; key <= query; key++) {
        if (!may_meet(a, sample, query, key))
            continue;
        const double p = exp(scores[key] - most);
        const double kept = p * keep_factor(&a->dropout, a->dropout.first_token + (uint32_t)key,
                                            a->dropout.first_token + (uint32_t)query,
                                            a->dropout.first_sample + (uint32_t)sample,
                                            a->dropout.first_head + head);
        sum += p;
        for (size_t i = 0; i < width; i++)
            out[i] += kept * values[key * row + i];
    }
    for (size_t i = 0; i < width; i++)
        out[i] /= sum;
    if (lse)
        lse[(sample * a->n_heads + head) * a->seq_len + query] = most + log(sum);
}

void reference_attention(const struct attention *attention, double *out, double *lse,
                         const double *qkv)
{
    double *scores = calloc(attention->seq_len, sizeof *scores);
    assert(scores);
    const size_t width = attention->head_dim;
    for (size_t sample = 0; sample < attention->batch; sample++)
        for (uint32_t head = 0; head < attention->n_heads; head++)
            for (size_t query = 0; query < attention->seq_len; query++)
                attend(attention,
                       out + ((sample * attention->seq_len + query) * attention->n_heads + head) *
                                 width,
                       lse, qkv, sample, head, query, scores);
    free(scores);
}

void reference_keep(const struct dropout *dropout, double *keep, size_t rows, size_t width)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < width; i++)
            keep[r * width + i] = keep_factor(
                dropout, (uint32_t)i, dropout->first_token + (uint32_t)(r % dropout->seq_len),
                dropout->first_sample + (uint32_t)(r / dropout->seq_len), 0);
}

void reference_cross_entropy(double *losses, const double *logits, const int32_t *labels,
                             size_t rows, size_t vocab)
{
    for (size_t r = 0; r < rows; r++) {
        const double *x = logits + r * vocab;
        double most = -INFINITY, sum = 0.0;
        for (size_t i = 0; i < vocab; i++)
            most = x[i] > most ? x[i] : most;
        for (size_t i = 0; i < vocab; i++)
            sum += exp(x[i] - most);
        losses[r] = labels[r] < 0 ? 0.0 : most + log(sum) - x[labels[r]];
    }
}

static double central(double (*f)(const double *x, const void *context), double *x, size_t i,
                      double step, const void *context)
{
    const double saved = x[i];
    x[i] = saved + step;
    const double above = f(x, context);
    x[i] = saved - step;
    const double below = f(x, context);
    x[i] = saved;
    return (above - below) / (2.0 * step);
}

double reference_slope(double (*f)(const double *x, const void *context), double *x, size_t i,
                       const void *context)
{
    const double coarse = central(f, x, i, 2e-4, context);
    const double fine = central(f, x, i, 1e-4, context);
    return (4.0 * fine - coarse) / 3.0;
}
