/* cuBLASLt's matmul on the CPU: D = alpha op(A) op(B) + beta C (+ bias), column-major, fp32 or bf16
 * operands, fp32 sums in an order of k that depends on the shape only. Owns handles,
 * descriptions and preferences. Any thread; products run on the executor's.
 *
 * Algorithms are made up. The first choice wants a workspace whose size is a function of the shape,
 * and scribbles over all of it; the second wants none, and there are shapes that have none such.
 * One holds for the shape, the types and the alignments it was asked for; used for anything else
 * it is misuse. All of them give the same values. */
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/emulate/emulate.h"

enum { HANDLE_BYTES = 16 << 20, WORKSPACE_ALIGN = 256, N_OPERANDS = 4 };

static const uint64_t MAGIC = 0x6d61746d756c2d31u;

struct cublasLtContext {
    bool is_destroyed;
};

struct description {
    int32_t compute, scale, pointer_mode, op_a, op_b, bias_type;
    uint32_t epilogue;
    const void *bias;
};

struct layout {
    uint32_t type;
    int32_t order;
    uint64_t rows, cols;
    int64_t ld;
};

struct preference {
    uint64_t max_workspace_bytes;
    uint32_t search_mode, reduction_mask, align[N_OPERANDS];
};

/* ---- objects ---- */

size_t cublasLtGetVersion(void)
{
    return 130100;
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_SUCCESS           ? "CUBLAS_STATUS_SUCCESS"
           : status == CUBLAS_STATUS_NOT_INITIALIZED ? "CUBLAS_STATUS_NOT_INITIALIZED"
           : status == CUBLAS_STATUS_ALLOC_FAILED    ? "CUBLAS_STATUS_ALLOC_FAILED"
           : status == CUBLAS_STATUS_INVALID_VALUE   ? "CUBLAS_STATUS_INVALID_VALUE"
           : status == CUBLAS_STATUS_NOT_SUPPORTED   ? "CUBLAS_STATUS_NOT_SUPPORTED"
                                                     : "CUBLAS_STATUS_OTHER";
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return cublasLtGetStatusName(status);
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    if (emulate_enter("cublasLtCreate") != cudaSuccess) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    if (!emulate_account_take(HANDLE_BYTES)) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    *handle = calloc(1, sizeof **handle);
    return *handle == NULL ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    emulate_account_give(HANDLE_BYTES);
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set(void *field, size_t field_bytes, const void *value, size_t bytes)
{
    if (value == NULL || bytes != field_bytes) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    struct description *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    *made = (struct description){.compute = (int32_t)compute,
                                 .scale = (int32_t)scale,
                                 .bias_type = -1,
                                 .epilogue = CUBLASLT_EPILOGUE_DEFAULT};
    *desc = (void *)made;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    struct description *d = (void *)desc;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE:
        return set(&d->compute, sizeof d->compute, value, bytes);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE:
        return set(&d->scale, sizeof d->scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        return set(&d->pointer_mode, sizeof d->pointer_mode, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return set(&d->op_a, sizeof d->op_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return set(&d->op_b, sizeof d->op_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return set(&d->epilogue, sizeof d->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return set(&d->bias, sizeof d->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return set(&d->bias_type, sizeof d->bias_type, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    struct layout *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    *made = (struct layout){
        .type = (uint32_t)type, .order = CUBLASLT_ORDER_COL, .rows = rows, .cols = cols, .ld = ld};
    *layout = (void *)made;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes)
{
    struct layout *l = (void *)layout;
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
        return set(&l->type, sizeof l->type, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        return set(&l->order, sizeof l->order, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
        return set(&l->rows, sizeof l->rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
        return set(&l->cols, sizeof l->cols, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD:
        return set(&l->ld, sizeof l->ld, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    struct preference *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    /* The library's own defaults: no workspace, and operands aligned as cudaMalloc's blocks are. */
    *made = (struct preference){.reduction_mask = CUBLASLT_REDUCTION_SCHEME_MASK,
                                .align = {256, 256, 256, 256}};
    *preference = (void *)made;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes)
{
    struct preference *p = (void *)preference;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
        return set(&p->search_mode, sizeof p->search_mode, value, bytes);
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return set(&p->max_workspace_bytes, sizeof p->max_workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return set(&p->reduction_mask, sizeof p->reduction_mask, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: {
        uint32_t *align = &p->align[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES];
        return set(align, sizeof *align, value, bytes);
    }
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- algorithms ---- */

static size_t elem_bytes(uint32_t type)
{
    return type == CUDA_R_16BF ? 2 : 4;
}

static bool is_sound(const struct layout *l)
{
    return l->ld > 0 && (uint64_t)l->ld >= l->rows;
}

/* What of it there is on real GPUs, as far as Ballast uses it. */
static cublasStatus_t check_problem(const struct description *d, const struct layout *a,
                                    const struct layout *b, const struct layout *c,
                                    const struct layout *out)
{
    const uint64_t k = d->op_a == CUBLAS_OP_N ? a->cols : a->rows;
    if ((d->op_a == CUBLAS_OP_N ? a->rows : a->cols) != out->rows ||
        (d->op_b == CUBLAS_OP_N ? b->cols : b->rows) != out->cols ||
        (d->op_b == CUBLAS_OP_N ? b->rows : b->cols) != k || c->rows != out->rows ||
        c->cols != out->cols || !is_sound(a) || !is_sound(b) || !is_sound(c) || !is_sound(out)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    const bool is_fp32 = a->type == CUDA_R_32F && out->type == CUDA_R_32F;
    const bool is_bf16 =
        a->type == CUDA_R_16BF && (out->type == CUDA_R_16BF || out->type == CUDA_R_32F);
    if (a->type != b->type || c->type != out->type || (!is_fp32 && !is_bf16) ||
        d->scale != CUDA_R_32F || d->pointer_mode != CUBLASLT_POINTER_MODE_HOST ||
        (d->compute != CUBLAS_COMPUTE_32F &&
         !(is_fp32 && d->compute == CUBLAS_COMPUTE_32F_FAST_TF32)) ||
        a->order != CUBLASLT_ORDER_COL || b->order != CUBLASLT_ORDER_COL ||
        c->order != CUBLASLT_ORDER_COL || out->order != CUBLASLT_ORDER_COL ||
        (d->epilogue != CUBLASLT_EPILOGUE_DEFAULT && d->epilogue != CUBLASLT_EPILOGUE_BIAS) ||
        (d->bias_type != -1 && d->bias_type != (int32_t)out->type)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

static uint64_t mixed(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

/* Everything an algorithm is chosen for. The bias pointer may change between calls. */
static uint64_t problem_hash(const struct description *d, const struct layout *a,
                             const struct layout *b, const struct layout *c,
                             const struct layout *out)
{
    uint64_t hash = mixed(mixed(1, (uint64_t)d->compute), d->epilogue);
    hash = mixed(mixed(hash, (uint64_t)d->op_a), (uint64_t)d->op_b);
    const struct layout *layouts[] = {a, b, c, out};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        hash = mixed(mixed(hash, layouts[i]->type), layouts[i]->rows);
        hash = mixed(mixed(hash, layouts[i]->cols), (uint64_t)layouts[i]->ld);
    }
    return hash;
}

/* Workspaces of the algorithms for a shape, best first. Long inner dimensions are treated as if
 * they were split in two and the halves kept apart. */
static int workspaces_of(const struct description *d, const struct layout *a,
                         const struct layout *out, size_t out_bytes[2])
{
    const uint64_t m = out->rows, n = out->cols, k = d->op_a == CUBLAS_OP_N ? a->cols : a->rows;
    const size_t pretended = 1024 * (size_t)(1 + (3 * m + 5 * n + 7 * k) % 61);
    const bool is_long = k >= 4 * m && k >= 4 * n;
    out_bytes[0] = pretended + (is_long ? (size_t)((2 * m * n * 4 + 255) / 256 * 256) : 0);
    out_bytes[1] = 0;
    return (m + 2 * n + 3 * k) % 7 == 3 ? 1 : 2;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int n_asked,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *n_found)
{
    if (handle == NULL || n_asked < 1) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    const struct description *description = (void *)desc;
    const struct layout *la = (void *)a, *lb = (void *)b, *lc = (void *)c, *ld = (void *)d;
    const struct preference *p = (void *)preference;
    *n_found = 0;
    const cublasStatus_t status = check_problem(description, la, lb, lc, ld);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    uint64_t align = 0;
    for (int i = 0; i < N_OPERANDS; i++) {
        align |= (uint64_t)(p->align[i] < 0xffff ? p->align[i] : 0xffff) << (16 * i);
    }
    size_t workspaces[2];
    const int n = workspaces_of(description, la, ld, workspaces);
    for (int i = 0; i < n && *n_found < n_asked; i++) {
        if (workspaces[i] <= p->max_workspace_bytes) {
            results[(*n_found)++] = (cublasLtMatmulHeuristicResult_t){
                .algo = {{MAGIC, workspaces[i], problem_hash(description, la, lb, lc, ld), align}},
                .workspaceSize = workspaces[i],
                .state = CUBLAS_STATUS_SUCCESS,
                .wavesCount = 1.0f};
        }
    }
    return *n_found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* ---- products ---- */

struct operand {
    const char *name;
    const void *start;
    size_t bytes;
    struct layout layout;
};

struct product {
    struct description description;
    struct operand a, b, c, d; /* c.start NULL: beta is 0 */
    float alpha, beta;
    void *workspace;
    size_t workspace_bytes;
};

static float widened(const void *values, uint32_t type, size_t i)
{
    if (type == CUDA_R_32F) {
        return ((const float *)values)[i];
    }
    const uint32_t bits = (uint32_t)((const uint16_t *)values)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void put(void *values, uint32_t type, size_t i, float value)
{
    if (type == CUDA_R_32F) {
        ((float *)values)[i] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
    ((uint16_t *)values)[i] = (uint16_t)(bits >> 16);
}

/* To the ten fraction bits that a tensor core takes of an fp32 operand. */
static float to_tf32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7f800000u) != 0x7f800000u) {
        bits = (bits + 0x1000u) & 0xffffe000u;
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float *new_floats(size_t n)
{
    float *values = malloc((n > 0 ? n : 1) * sizeof *values);
    if (values == NULL) {
        emulate_misuse("no host memory for a product of %zu elements", n);
    }
    return values;
}

/* A dense fp32 copy, column after column; or row after row when `transpose`. */
static float *dense(const struct operand *x, bool transpose, bool tf32)
{
    const struct layout *l = &x->layout;
    float *out = new_floats((size_t)(l->rows * l->cols));
    for (size_t col = 0; col < l->cols; col++) {
        for (size_t row = 0; row < l->rows; row++) {
            float value = widened(x->start, l->type, col * (size_t)l->ld + row);
            value = tf32 ? to_tf32(value) : value;
            out[transpose ? row * l->cols + col : col * l->rows + row] = value;
        }
    }
    return out;
}

/* What is column-major here is the transpose in row-major, so D^T = op(B)^T op(A)^T is computed:
 * the left operand is B, the right one A. */
static void run_product(void *closure)
{
    struct product *p = closure;
    struct ops *ops = emulate_cpu_ops(DTYPE_FP32);
    if (p->workspace_bytes > 0) {
        memset(p->workspace, 0xff, p->workspace_bytes);
    }
    const bool tf32 = p->description.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    const bool a_is_n = p->description.op_a == CUBLAS_OP_N;
    const bool b_is_n = p->description.op_b == CUBLAS_OP_N;
    const bool both_t = !a_is_n && !b_is_n; /* no such form: transpose B */
    float *a = dense(&p->a, false, tf32), *b = dense(&p->b, both_t, tf32);
    const size_t m = (size_t)p->d.layout.rows, n = (size_t)p->d.layout.cols;
    struct matmul call = {.form = a_is_n ? (b_is_n ? MATMUL_NN : MATMUL_TN) : MATMUL_NT,
                          .m = n,
                          .n = m,
                          .k = (size_t)(a_is_n ? p->a.layout.cols : p->a.layout.rows),
                          .a = b,
                          .b = a,
                          .c = new_floats(m * n)};
    float *scratch = new_floats(ops->matmul_scratch(ops, &call) / sizeof *scratch + 1);
    call.scratch = scratch;
    ops->matmul(ops, &call);
    struct failure why = {0};
    if (ops->check(ops, &why) != STATUS_OK) {
        emulate_misuse("cublasLtMatmul: %s", why.text);
    }
    const float *sums = call.c;
    for (size_t col = 0; col < n; col++) {
        for (size_t row = 0; row < m; row++) {
            float value = p->alpha * sums[col * m + row];
            if (p->c.start != NULL) {
                value += p->beta *
                         widened(p->c.start, p->c.layout.type, col * (size_t)p->c.layout.ld + row);
            }
            if (p->description.epilogue == CUBLASLT_EPILOGUE_BIAS) {
                value += widened(p->description.bias, p->d.layout.type, row);
            }
            put((void *)(uintptr_t)p->d.start, p->d.layout.type, col * (size_t)p->d.layout.ld + row,
                value);
        }
    }
    free(scratch);
    free(call.c);
    free(b);
    free(a);
}

static struct operand operand(const char *name, const void *start, const struct layout *l)
{
    const size_t n = l->cols == 0 ? 0 : (size_t)((l->cols - 1) * (uint64_t)l->ld + l->rows);
    return (struct operand){name, start, n * elem_bytes(l->type), *l};
}

static bool overlap(const void *x, size_t x_bytes, const void *y, size_t y_bytes)
{
    const uintptr_t at_x = (uintptr_t)x, at_y = (uintptr_t)y;
    return at_x < at_y + y_bytes && at_y < at_x + x_bytes;
}

static void check_operand(const struct product *p, const struct operand *x, uint64_t align)
{
    if (x->start == NULL) {
        return;
    }
    char what[64];
    snprintf(what, sizeof what, "cublasLtMatmul: operand %s", x->name);
    emulate_check_device(what, x->start, x->bytes);
    if (align == 0 || (uintptr_t)x->start % align != 0) {
        emulate_misuse("%s at %p is not aligned to %llu bytes, as the preference of its algorithm "
                       "promised (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_%s_BYTES, 256 unless set)",
                       what, x->start, (unsigned long long)align, x->name);
    }
    if (overlap(x->start, x->bytes, p->workspace, p->workspace_bytes)) {
        emulate_misuse("%s overlaps the workspace", what);
    }
    const bool is_output = x->start == p->d.start && x->layout.ld == p->d.layout.ld &&
                           (x->name[0] == 'C' || x->name[0] == 'D');
    if (!is_output && overlap(x->start, x->bytes, p->d.start, p->d.bytes)) {
        emulate_misuse("%s overlaps the output", what);
    }
}

static void check_product(const struct product *p, const cublasLtMatmulAlgo_t *algo,
                          size_t workspace_bytes)
{
    const uint64_t hash =
        problem_hash(&p->description, &p->a.layout, &p->b.layout, &p->c.layout, &p->d.layout);
    if (algo == NULL || algo->data[0] != MAGIC || algo->data[2] != hash) {
        emulate_misuse("cublasLtMatmul with an algorithm that was found for another product");
    }
    if (workspace_bytes < algo->data[1]) {
        emulate_misuse("cublasLtMatmul: the workspace has %zu bytes, the algorithm needs %llu",
                       workspace_bytes, (unsigned long long)algo->data[1]);
    }
    emulate_check_device("cublasLtMatmul: workspace", p->workspace, p->workspace_bytes);
    if ((uintptr_t)p->workspace % WORKSPACE_ALIGN != 0) {
        emulate_misuse("cublasLtMatmul: the workspace at %p is not aligned to %d bytes",
                       p->workspace, WORKSPACE_ALIGN);
    }
    const struct operand *operands[N_OPERANDS] = {&p->a, &p->b, &p->c, &p->d};
    for (int i = 0; i < N_OPERANDS; i++) {
        check_operand(p, operands[i], algo->data[3] >> (16 * i) & 0xffff);
    }
    if (p->description.epilogue == CUBLASLT_EPILOGUE_BIAS) {
        const size_t elem = elem_bytes(p->d.layout.type);
        const size_t bytes = (size_t)p->d.layout.rows * elem;
        emulate_check_device("cublasLtMatmul: bias", p->description.bias, bytes);
        if ((uintptr_t)p->description.bias % elem != 0 ||
            overlap(p->description.bias, bytes, p->workspace, p->workspace_bytes) ||
            overlap(p->description.bias, bytes, p->d.start, p->d.bytes)) {
            emulate_misuse("cublasLtMatmul: the bias is misaligned, or overlaps the workspace or "
                           "the output");
        }
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    if (emulate_enter("cublasLtMatmul") != cudaSuccess || handle == NULL) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    struct product p = {.description = *(struct description *)(void *)desc,
                        .a = operand("A", a, (void *)a_layout),
                        .b = operand("B", b, (void *)b_layout),
                        .c = operand("C", c, (void *)c_layout),
                        .d = operand("D", d, (void *)d_layout),
                        .workspace = workspace};
    const cublasStatus_t status =
        check_problem(&p.description, &p.a.layout, &p.b.layout, &p.c.layout, &p.d.layout);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    memcpy(&p.alpha, alpha, sizeof p.alpha);
    memcpy(&p.beta, beta, sizeof p.beta);
    if (p.beta == 0) {
        p.c.start = NULL;
        p.c.bytes = 0;
    }
    p.workspace_bytes = algo != NULL ? (size_t)algo->data[1] : 0;
    check_product(&p, algo, workspace_bytes);
    const bool has_bias = p.description.epilogue == CUBLASLT_EPILOGUE_BIAS;
    const struct emulate_range ranges[] = {
        {a, p.a.bytes},
        {b, p.b.bytes},
        {c, p.c.bytes},
        {d, p.d.bytes},
        {workspace, p.workspace_bytes},
        {p.description.bias, has_bias ? (size_t)p.d.layout.rows * elem_bytes(p.d.layout.type) : 0}};
    emulate_submit(stream, &(struct emulate_work){.name = "cublasLtMatmul",
                                                  .run = run_product,
                                                  .closure = &p,
                                                  .bytes = sizeof p,
                                                  .ranges = ranges,
                                                  .n_ranges = sizeof ranges / sizeof ranges[0]});
    return CUBLAS_STATUS_SUCCESS;
}
