/* Normal random values (Box and Muller, 1958), the same bits as on the CPU: the polynomials and
 * the order of operations are those of kernels/cpu/simd/random.c, each rounding once.
 *
 * Elements 4j .. 4j+3 come from the one counter (j, j >> 32, tensor, stream of RANDOM_INIT):
 * words 0 and 1 give the first two, words 2 and 3 the others. A thread takes one counter. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/quads.h"

/* Natural logarithm of a positive normal number: x = 2^e m with m around 1, f = m - 1,
 * log(m) = f - f^2/2 + f^3 P(f). */
static __device__ __forceinline__ float natural_log(float x)
{
    const int root_half = 0x3F3504F3; /* 0.707106781 */
    const int offset = __float_as_int(x) - root_half;
    const float e = (float)(offset >> 23);
    const float f = __fsub_rn(__int_as_float((offset & 0x007FFFFF) + root_half), 1.0f);
    float p = __fmaf_rn(f, -0.0830548778f, 0.127989396f);
    p = __fmaf_rn(p, f, -0.129434034f);
    p = __fmaf_rn(p, f, 0.141902313f);
    p = __fmaf_rn(p, f, -0.166434884f);
    p = __fmaf_rn(p, f, 0.200018793f);
    p = __fmaf_rn(p, f, -0.250002801f);
    p = __fmaf_rn(p, f, 0.333333254f);
    const float square = __fmul_rn(f, f);
    const float tail = __fmaf_rn(p, __fmul_rn(square, f), __fmul_rn(e, 1.42860682e-6f));
    const float head = __fadd_rn(f, __fmaf_rn(square, -0.5f, tail));
    return __fmaf_rn(e, 0.693145752f, head);
}

/* Cosine and sine of a full turn times u, u in [0, 1) with 24 bits: quarter turns exactly. */
static __device__ __forceinline__ float2 turn(float u)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const float shifted = __fmaf_rn(u, 4.0f, round);
    const int quarter = __float_as_int(shifted) & 3;
    const float f = __fmaf_rn(u, 4.0f, __fsub_rn(round, shifted)); /* in [-1/2, 1/2] */
    const float z = __fmul_rn(f, f);
    float s = __fmaf_rn(z, -0.00460217707f, 0.0796802267f);
    s = __fmaf_rn(s, z, -0.64596349f);
    s = __fmul_rn(__fmaf_rn(s, z, 1.57079637f), f);
    float c = __fmaf_rn(z, 0.000906743517f, -0.0208615288f);
    c = __fmaf_rn(c, z, 0.253669411f);
    c = __fmaf_rn(c, z, -1.23370051f);
    c = __fmaf_rn(c, z, 1.0f);
    const bool odd = (quarter & 1) != 0;
    const float cosine = odd ? s : c, sine = odd ? c : s;
    return make_float2(((quarter + 1) & 2) != 0 ? -cosine : cosine,
                       (quarter & 2) != 0 ? -sine : sine);
}

/* Two words to two normals. The radius uses (0, 1] in steps of 2^-24. */
static __device__ __forceinline__ float2 box_muller(uint32_t first, uint32_t second)
{
    const float u1 = __fmul_rn((float)(int)((first >> 8) + 1), 0x1p-24f);
    const float u2 = __fmul_rn((float)(int)(second >> 8), 0x1p-24f);
    const float square = __fmul_rn(natural_log(u1), -2.0f);
    const float radius = square > 0.0f ? __fsqrt_rn(square) : 0.0f;
    const float2 direction = turn(u2);
    return make_float2(__fmul_rn(radius, direction.x), __fmul_rn(radius, direction.y));
}

/* values[i] is element first_element + i. `aligned`: where four elements of one counter begin,
 * so does a float4. */
static __global__ void __launch_bounds__(QUADS_BLOCK)
    random_normal(float *__restrict__ values, size_t n, float std, struct philox_key key,
                  uint32_t tensor, uint64_t first_element, bool aligned)
{
    const uint64_t end = first_element + n, before = first_element % 4;
    for (uint64_t i = quads_first(); i < before + n; i += quads_stride()) {
        const uint64_t element = first_element - before + i, counter = element / 4;
        const struct philox words =
            philox4x32(key.key0, key.key1, (uint32_t)counter, (uint32_t)(counter >> 32), tensor,
                       philox_stream(0, RANDOM_INIT, 0));
        const float2 a = box_muller(words.word[0], words.word[1]);
        const float2 b = box_muller(words.word[2], words.word[3]);
        const float x[4] = {__fmul_rn(a.x, std), __fmul_rn(a.y, std), __fmul_rn(b.x, std),
                            __fmul_rn(b.y, std)};
        if (element >= first_element) {
            store_quad(values + (element - first_element), x, end - element, aligned);
            continue;
        }
        for (uint64_t j = before; j < 4 && element + j < end; j++) {
            values[j - before] = x[j];
        }
    }
}

extern "C" void cuda_launch_random_normal(cudaStream_t stream,
                                          const struct cuda_random_normal *args)
{
    const size_t before = (size_t)(args->first_element % 4);
    /* Where the first whole counter's elements go. */
    const bool aligned = quads_aligned(args->values + (4 - before) % 4, sizeof(float));
    if (args->n > 0) {
        LAUNCH(random_normal, quads_grid(before + args->n), QUADS_BLOCK, 0, stream, args->values,
               args->n, args->std, philox_key(args->seed, 0), args->tensor, args->first_element,
               aligned);
    }
}
