/* Normal random values on a range (Box and Muller, 1958). See simd_table.h.
 *
 * Elements 4j .. 4j+3 come from the one counter (j, j >> 32, tensor, stream of RANDOM_INIT):
 * words 0 and 1 give the first two, words 2 and 3 the others. Logarithm, sine and cosine are
 * polynomials of this file, so that initial weights do not depend on a mathematics library. */
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/parts.h"

/* Natural logarithm of positive normal numbers, about 1 ulp: x = 2^e m with m around 1,
 * log(m) = f - f^2/2 + f^3 P(f), f = m - 1, P a minimax polynomial of degree 7. */
SIMD_INLINE vec natural_log(vec x)
{
    const ivec root_half = (ivec)vec_set(0.707106781f);
    const ivec offset = (ivec)x - root_half;
    const ivec exponent = offset >> 23;
    const vec f = (vec)((offset & 0x007FFFFF) + root_half) - 1.0f;
    const vec e = __builtin_convertvector(exponent, vec);
    vec p = vec_fma(f, vec_set(-0.0830548778f), vec_set(0.127989396f));
    p = vec_fma(p, f, vec_set(-0.129434034f));
    p = vec_fma(p, f, vec_set(0.141902313f));
    p = vec_fma(p, f, vec_set(-0.166434884f));
    p = vec_fma(p, f, vec_set(0.200018793f));
    p = vec_fma(p, f, vec_set(-0.250002801f));
    p = vec_fma(p, f, vec_set(0.333333254f));
    const vec square = f * f;
    const vec tail = vec_fma(p, square * f, e * vec_set(1.42860682e-6f));
    return vec_fma(e, vec_set(0.693145752f), f + vec_fma(square, vec_set(-0.5f), tail));
}

/* Cosine and sine of a full turn times u, u in [0, 1) with 24 bits: quarter turns exactly. */
SIMD_INLINE void turn(vec u, vec *out_cosine, vec *out_sine)
{
    const vec round = vec_set(12582912.0f);
    const vec shifted = vec_fma(u, vec_set(4.0f), round);
    const ivec quarter = (ivec)shifted & 3;
    const vec f = vec_fma(u, vec_set(4.0f), round - shifted); /* in [-1/2, 1/2] */
    const vec z = f * f;
    vec s = vec_fma(z, vec_set(-0.00460217707f), vec_set(0.0796802267f));
    s = vec_fma(s, z, vec_set(-0.64596349f));
    s = vec_fma(s, z, vec_set(1.57079637f)) * f;
    vec c = vec_fma(z, vec_set(0.000906743517f), vec_set(-0.0208615288f));
    c = vec_fma(c, z, vec_set(0.253669411f));
    c = vec_fma(c, z, vec_set(-1.23370051f));
    c = vec_fma(c, z, vec_set(1.0f));
    const ivec odd = (quarter & 1) != 0;
    const vec cosine = vec_select(odd, s, c), sine = vec_select(odd, c, s);
    const ivec cosine_sign = ((quarter + 1) & 2) << 30, sine_sign = (quarter & 2) << 30;
    *out_cosine = (vec)((ivec)cosine ^ cosine_sign);
    *out_sine = (vec)((ivec)sine ^ sine_sign);
}

/* Two words to two normals. The radius uses (0, 1] in steps of 2^-24, so at most 5.77. */
SIMD_INLINE void box_muller(uvec first, uvec second, vec *out_a, vec *out_b)
{
    const vec u1 = __builtin_convertvector((ivec)(first >> 8) + 1, vec) * 0x1p-24f;
    const vec u2 = __builtin_convertvector((ivec)(second >> 8), vec) * 0x1p-24f;
    vec square = natural_log(u1) * -2.0f;
    for (int i = 0; i < LANES; i++)
        square[i] = square[i] > 0.0f ? sqrtf(square[i]) : 0.0f;
    vec cosine, sine;
    turn(u2, &cosine, &sine);
    *out_a = square * cosine;
    *out_b = square * sine;
}

void SIMD(random_normal)(float *values, size_t n, float std, struct philox_key key, uint32_t tensor,
                         uint64_t first_element)
{
    enum { GROUP = 4 * LANES };
    const uint64_t end = first_element + n;
    for (uint64_t group = first_element / GROUP * GROUP; group < end; group += GROUP) {
        /* A group begins at a multiple of 64 elements, so its counters share their upper
         * word. */
        const uint64_t counter = group / 4;
        uvec c[4] = {uvec_count((uint32_t)counter), uvec_set((uint32_t)(counter >> 32)),
                     uvec_set(tensor), uvec_set(philox_stream(0, RANDOM_INIT, 0))};
        uvec_philox(key, c);
        vec normal[4];
        box_muller(c[0], c[1], &normal[0], &normal[1]);
        box_muller(c[2], c[3], &normal[2], &normal[3]);
        for (int j = 0; j < 4; j++)
            c[j] = (uvec)(normal[j] * std);
        uint32_t words[GROUP];
        float drawn[GROUP];
        uvec_interleave(c, words);
        memcpy(drawn, words, sizeof drawn);
        const uint64_t from = group < first_element ? first_element : group;
        const uint64_t to = end - group < GROUP ? end : group + GROUP;
        memcpy(values + (from - first_element), drawn + (from - group),
               (size_t)(to - from) * sizeof *values);
    }
}
