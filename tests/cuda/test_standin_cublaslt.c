/* The stand-in's cuBLASLt: products in all forms and types against plain sums in double,
 * workspaces, and the misuse of operands, workspaces and algorithms.
 *
 * links: standin testing kernels base
 *
 * Tolerances: fp32 sums of up to 300 products keep 1e-6 of the sum of their sizes; a bf16 result is
 * rounded to eight bits, half a unit is at most 2^-8 of it. */
#include <cublasLt.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h> /* last: it defines fail() as a macro */
#include "tests/cuda/lib/standin.h"
#include "tests/lib/must_abort.h"

#define LT(call) CHECK((call) == CUBLAS_STATUS_SUCCESS)

enum { WORKSPACE = 1 << 20 };

/* One product, column-major. */
struct product {
    size_t m, n, k;
    cublasOperation_t op_a, op_b;
    cudaDataType_t in, out;
    bool bias, tf32;
    float alpha, beta;
    size_t pad; /* added to leading dimensions */
};

static unsigned drawn = 1;

static float draw(void)
{
    drawn = drawn * 1664525u + 1013904223u;
    return (float)(drawn >> 8) / 8388608.0f - 1.0f;
}

static size_t elem_bytes(cudaDataType_t type)
{
    return type == CUDA_R_16BF ? 2 : 4;
}

static double read_element(const void *values, cudaDataType_t type, size_t i)
{
    if (type == CUDA_R_32F) {
        return (double)((const float *)values)[i];
    }
    const uint32_t bits = (uint32_t)((const uint16_t *)values)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Operands are cut, not rounded: any bf16 value will do. */
static void *random_matrix(cudaDataType_t type, size_t n)
{
    unsigned char *values = malloc(n * 4);
    for (size_t i = 0; i < n; i++) {
        const float value = draw();
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        const uint16_t high = (uint16_t)(bits >> 16);
        if (type == CUDA_R_32F) {
            memcpy(values + 4 * i, &value, 4);
        } else {
            memcpy(values + 2 * i, &high, 2);
        }
    }
    return values;
}

/* A matrix on the host and on the device. */
struct matrix {
    size_t rows, cols, ld, bytes;
    cudaDataType_t type;
    void *host, *device;
    cublasLtMatrixLayout_t layout;
};

static struct matrix new_matrix(cudaDataType_t type, size_t rows, size_t cols, size_t pad,
                                cudaStream_t stream)
{
    struct matrix m = {rows, cols, rows + pad, 0, type, NULL, NULL, NULL};
    m.bytes = m.ld * cols * elem_bytes(type);
    m.host = random_matrix(type, m.ld * cols);
    m.device = new_device(m.bytes);
    put_device(m.device, m.host, m.bytes, stream);
    LT(cublasLtMatrixLayoutCreate(&m.layout, type, rows, cols, (int64_t)m.ld));
    return m;
}

static void free_matrix(struct matrix *m)
{
    free(m->host);
    OK(cudaFree(m->device));
    LT(cublasLtMatrixLayoutDestroy(m->layout));
}

static double element(const struct matrix *m, cublasOperation_t op, size_t row, size_t col)
{
    const size_t i = op == CUBLAS_OP_N ? col * m->ld + row : row * m->ld + col;
    return read_element(m->host, m->type, i);
}

struct setting {
    cudaStream_t stream;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    struct matrix a, b, c, bias;
    unsigned char *workspace;
    cublasLtMatmulHeuristicResult_t found;
};

static cublasStatus_t heuristic(struct setting *s, uint64_t most, uint32_t align)
{
    cublasLtMatmulPreference_t preference;
    LT(cublasLtMatmulPreferenceCreate(&preference));
    LT(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                            &most, sizeof most));
    for (int i = 0; i < 4; i++) {
        LT(cublasLtMatmulPreferenceSetAttribute(
            preference,
            (cublasLtMatmulPreferenceAttributes_t)(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i),
            &align, sizeof align));
    }
    int n = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(s->handle, s->desc, s->a.layout, s->b.layout, s->c.layout,
                                       s->c.layout, preference, 1, &s->found, &n);
    LT(cublasLtMatmulPreferenceDestroy(preference));
    CHECK((n == 1) == (status == CUBLAS_STATUS_SUCCESS));
    return status;
}

static struct setting set_up(const struct product *p)
{
    struct setting s = {.stream = new_stream()};
    LT(cublasLtCreate(&s.handle));
    const cublasComputeType_t compute = p->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    LT(cublasLtMatmulDescCreate(&s.desc, compute, CUDA_R_32F));
    LT(cublasLtMatmulDescSetAttribute(s.desc, CUBLASLT_MATMUL_DESC_TRANSA, &p->op_a,
                                      sizeof p->op_a));
    LT(cublasLtMatmulDescSetAttribute(s.desc, CUBLASLT_MATMUL_DESC_TRANSB, &p->op_b,
                                      sizeof p->op_b));
    const bool a_n = p->op_a == CUBLAS_OP_N, b_n = p->op_b == CUBLAS_OP_N;
    s.a = new_matrix(p->in, a_n ? p->m : p->k, a_n ? p->k : p->m, p->pad, s.stream);
    s.b = new_matrix(p->in, b_n ? p->k : p->n, b_n ? p->n : p->k, p->pad, s.stream);
    s.c = new_matrix(p->out, p->m, p->n, p->pad, s.stream);
    s.bias = new_matrix(p->out, p->m, 1, 0, s.stream);
    if (p->bias) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        LT(cublasLtMatmulDescSetAttribute(s.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                          sizeof epilogue));
        LT(cublasLtMatmulDescSetAttribute(s.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &s.bias.device,
                                          sizeof s.bias.device));
    }
    s.workspace = new_device(WORKSPACE);
    LT(heuristic(&s, WORKSPACE, 2));
    return s;
}

static void tear_down(struct setting *s)
{
    LT(cublasLtMatmulDescDestroy(s->desc));
    LT(cublasLtDestroy(s->handle));
    free_matrix(&s->a);
    free_matrix(&s->b);
    free_matrix(&s->c);
    free_matrix(&s->bias);
    OK(cudaFree(s->workspace));
    OK(cudaStreamDestroy(s->stream));
}

static cublasStatus_t multiply(const struct setting *s, const struct product *p)
{
    return cublasLtMatmul(s->handle, s->desc, &p->alpha, s->a.device, s->a.layout, s->b.device,
                          s->b.layout, &p->beta, s->c.device, s->c.layout, s->c.device, s->c.layout,
                          &s->found.algo, s->workspace, WORKSPACE, s->stream);
}

/* The greatest distance to the plain sums, where 1 is what rounding may do: of every fp32
 * operation, and of the result. */
static double distance(const struct setting *s, const struct product *p, const void *got)
{
    double worst = 0.0;
    for (size_t row = 0; row < p->m; row++) {
        for (size_t col = 0; col < p->n; col++) {
            double sum = (double)p->beta * element(&s->c, CUBLAS_OP_N, row, col) +
                         (p->bias ? read_element(s->bias.host, p->out, row) : 0.0);
            double size = fabs(sum) + 1.0; /* operands are below 1 */
            for (size_t i = 0; i < p->k; i++) {
                const double term = (double)p->alpha * element(&s->a, p->op_a, row, i) *
                                    element(&s->b, p->op_b, i, col);
                sum += term;
                size += fabs(term);
            }
            const double allowed = 1e-6 * size + (p->out == CUDA_R_16BF ? fabs(sum) / 256 : 0.0);
            const double value = read_element(got, p->out, col * s->c.ld + row);
            worst = isnan(value) ? 1e30 : fmax(worst, fabs(value - sum) / allowed);
        }
    }
    return worst;
}

static void check_product(const struct product *p)
{
    struct setting s = set_up(p);
    OK(cudaMemsetAsync(s.workspace, 0, WORKSPACE, s.stream));
    LT(multiply(&s, p));
    unsigned char *got = malloc(s.c.bytes), *scratch = malloc(WORKSPACE);
    get_device(got, s.c.device, s.c.bytes, s.stream);
    const double found = distance(&s, p, got);
    CHECK(p->tf32 || found <= 1.0);
    CHECK(!p->tf32 || (found > 2.0 && found < 1000.0)); /* operands of eleven bits */
    get_device(scratch, s.workspace, WORKSPACE, s.stream);
    for (size_t i = 0; i < WORKSPACE; i++) {
        CHECK(scratch[i] == (i < s.found.workspaceSize ? 0xff : 0));
    }
    /* What lies between the columns is left alone. */
    for (size_t col = 0; col < p->n && p->pad > 0; col++) {
        const size_t at = (col * s.c.ld + p->m) * elem_bytes(p->out);
        CHECK(memcmp(got + at, (unsigned char *)s.c.host + at, p->pad * elem_bytes(p->out)) == 0);
    }
    free(scratch);
    free(got);
    tear_down(&s);
}

static int all_products(void)
{
    static const size_t shapes[][3] = {{1, 1, 1}, {7, 5, 3}, {64, 32, 48}, {33, 65, 300}};
    static const cudaDataType_t types[][2] = {
        {CUDA_R_32F, CUDA_R_32F}, {CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16BF, CUDA_R_32F}};
    for (size_t i = 0; i < 4 * 3 * 4 * 4; i++) {
        const size_t *shape = shapes[i % 4];
        const cudaDataType_t *type = types[i / 4 % 3];
        const struct product p = {.m = shape[0],
                                  .n = shape[1],
                                  .k = shape[2],
                                  .op_a = i / 12 % 2 ? CUBLAS_OP_T : CUBLAS_OP_N,
                                  .op_b = i / 24 % 2 ? CUBLAS_OP_T : CUBLAS_OP_N,
                                  .in = type[0],
                                  .out = type[1],
                                  .bias = i / 48 % 2,
                                  .alpha = i / 96 % 2 ? 0.5f : 1.0f,
                                  .beta = i / 96 % 2 ? 1.0f : 0.0f,
                                  .pad = i / 96 % 2 ? 3 : 0};
        check_product(&p);
    }
    const struct product tf32 = {.m = 64,
                                 .n = 32,
                                 .k = 48,
                                 .in = CUDA_R_32F,
                                 .out = CUDA_R_32F,
                                 .tf32 = true,
                                 .alpha = 1.0f};
    check_product(&tf32);
    return 0;
}

static void products_are_right(void **state)
{
    (void)state;
    assert_int_equal(in_child(all_products, 1), 0);
}

/* 32 x 16 x 64, fp32. */
static const struct product plain = {
    .m = 32, .n = 16, .k = 64, .in = CUDA_R_32F, .out = CUDA_R_32F, .alpha = 1.0f};

static int algorithms(void)
{
    struct setting s = set_up(&plain);
    CHECK(s.found.workspaceSize > 0 && s.found.workspaceSize <= WORKSPACE);
    const size_t first = s.found.workspaceSize;
    LT(heuristic(&s, first, 16));
    CHECK(s.found.workspaceSize == first);
    LT(heuristic(&s, first - 1, 16)); /* its second choice */
    CHECK(s.found.workspaceSize == 0);
    int n_without = 0;
    for (size_t m = 1; m <= 7; m++) {
        cublasLtMatrixLayout_t a = s.a.layout, c = s.c.layout;
        LT(cublasLtMatrixLayoutCreate(&s.a.layout, CUDA_R_32F, m, 64, (int64_t)m));
        LT(cublasLtMatrixLayoutCreate(&s.c.layout, CUDA_R_32F, m, 16, (int64_t)m));
        const cublasStatus_t status = heuristic(&s, 0, 16);
        CHECK(status == CUBLAS_STATUS_SUCCESS || status == CUBLAS_STATUS_NOT_SUPPORTED);
        n_without += status == CUBLAS_STATUS_NOT_SUPPORTED;
        LT(cublasLtMatrixLayoutDestroy(s.a.layout));
        LT(cublasLtMatrixLayoutDestroy(s.c.layout));
        s.a.layout = a;
        s.c.layout = c;
    }
    CHECK(n_without == 1); /* some shape has no algorithm without a workspace */
    tear_down(&s);
    return 0;
}

static void algorithms_depend_on_the_shape(void **state)
{
    (void)state;
    assert_int_equal(in_child(algorithms, 1), 0);
}

/* Captured with the bias of the capture, replayed on what memory holds then. */
static int captured(void)
{
    struct product p = plain;
    p.bias = true;
    struct setting s = set_up(&p);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal));
    LT(multiply(&s, &p));
    OK(cudaStreamEndCapture(s.stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    const void *none = NULL;
    LT(cublasLtMatmulDescSetAttribute(s.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &none,
                                      sizeof none));
    for (int round = 0; round < 2; round++) {
        ((float *)s.a.host)[0] = (float)(3 + round);
        put_device(s.a.device, s.a.host, s.a.bytes, s.stream);
        OK(cudaGraphLaunch(exec, s.stream));
        unsigned char *got = malloc(s.c.bytes);
        get_device(got, s.c.device, s.c.bytes, s.stream);
        CHECK(distance(&s, &p, got) <= 1.0);
        free(got);
    }
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    tear_down(&s);
    return 0;
}

static void products_are_captured(void **state)
{
    (void)state;
    assert_int_equal(in_child(captured, 1), 0);
}

/* ---- misuse ---- */

static void misaligned_operand(void)
{
    struct setting s = set_up(&plain);
    heuristic(&s, WORKSPACE, 16);
    s.a.device = (unsigned char *)new_device(s.a.bytes + 4) + 4;
    multiply(&s, &plain);
}

static void workspace_over_operand(void)
{
    struct setting s = set_up(&plain);
    s.workspace = s.b.device;
    multiply(&s, &plain);
}

static void workspace_over_output(void)
{
    struct setting s = set_up(&plain);
    unsigned char *both = new_device(WORKSPACE + s.c.bytes);
    s.workspace = both;
    s.c.device = both + s.found.workspaceSize - 256;
    multiply(&s, &plain);
}

static void workspace_too_small(void)
{
    struct setting s = set_up(&plain);
    const float one = 1.0f;
    cublasLtMatmul(s.handle, s.desc, &one, s.a.device, s.a.layout, s.b.device, s.b.layout,
                   &plain.beta, s.c.device, s.c.layout, s.c.device, s.c.layout, &s.found.algo,
                   s.workspace, s.found.workspaceSize - 1, s.stream);
}

static void other_algorithm(void)
{
    struct product longer = plain;
    longer.k = 65;
    struct setting s = set_up(&plain), other = set_up(&longer);
    s.found = other.found;
    multiply(&s, &plain);
}

static void host_operand(void)
{
    struct setting s = set_up(&plain);
    s.b.device = s.b.host;
    multiply(&s, &plain);
}

static void output_over_operand(void)
{
    struct setting s = set_up(&plain);
    s.c.device = s.a.device;
    multiply(&s, &plain);
}

static void misuse_aborts(void **state)
{
    (void)state;
    must_abort(misaligned_operand, "operand A");
    must_abort(workspace_over_operand, "is not");
    must_abort(workspace_over_output, "overlaps the workspace");
    must_abort(workspace_too_small, "the workspace has");
    must_abort(other_algorithm, "found for another product");
    must_abort(host_operand, "operand B");
    must_abort(output_over_operand, "overlaps the output");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_right),
        cmocka_unit_test(algorithms_depend_on_the_shape),
        cmocka_unit_test(products_are_captured),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
