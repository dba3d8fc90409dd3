/* Matrix products by cuBLASLt.
 *
 * cuBLASLt counts columns first, so what it is asked for is the transpose: C^T = B^T A^T. The bias
 * of a row-major C is then a value per row, which its epilogue adds. An algorithm is asked for once
 * per shape and kept; the request depends on the shape, on which operands are aligned and on the
 * scratch formula alone, so that a recomputation gives the bits of the first time. Sums that are
 * split over k are added in one written order (no atomics) or not split. Main thread. */
#include <assert.h>
#include <string.h>
#include "kernels/cuda/cuda_device.h"
#include "proto/base/heap.h"

enum {
    TABLE_SLOTS = 1024, /* a power of two */
    MAX_USED = 768,
    MAX_ANSWERS = 8,
    VECTOR_BYTES = 16, /* what kernels load at once; more alignment is not relied on */
    NO_ATOMICS = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
};
/* Below this many multiplications splitting k gains nothing. */
static const double scratch_from = 16777216.0;
static const size_t scratch_hopper_bytes = 32u * 1024 * 1024;
static const size_t scratch_older_bytes = 8u * 1024 * 1024;

struct product_key {
    uint64_t m, n, k;
    uint32_t form, dtype;
    uint32_t c_fp32, bias;
    uint32_t align_a, align_b, align_c; /* bytes */
    uint32_t unused;                    /* 0: no padding, since keys are compared as bytes */
};

struct product {
    struct product_key key;
    bool used;
    bool plain; /* cuBLASLt has nothing for it */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t first, second, c; /* in cuBLASLt's order: B, A */
    cublasLtMatmulAlgo_t algorithm;
    size_t scratch_bytes;
};

struct cuda_products {
    cublasLtHandle_t handle;
    uint32_t n_used;
    struct product table[TABLE_SLOTS];
};

size_t cuda_matmul_scratch(int major, const struct matmul *shape)
{
    const double work = (double)shape->m * (double)shape->n * (double)shape->k;
    if (work < scratch_from) {
        return 0;
    }
    return major >= 9 ? scratch_hopper_bytes : scratch_older_bytes;
}

/* ---- one product's description ---- */

static cudaDataType_t type_of(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* The largest power of two that divides the address and the rows' distance, up to 16. */
static uint32_t align_of(const void *at, size_t row_elems, size_t elem_bytes)
{
    uint32_t align = VECTOR_BYTES;
    while (align > elem_bytes &&
           ((uintptr_t)at % align != 0 || row_elems * elem_bytes % align != 0)) {
        align /= 2;
    }
    return align;
}

static struct product_key key_of(enum dtype dtype, const struct matmul *call)
{
    const size_t elem = dtype_bytes(dtype);
    const enum dtype c_dtype = call->c_fp32 ? DTYPE_FP32 : dtype;
    struct product_key key;
    memset(&key, 0, sizeof key);
    key.m = call->m;
    key.n = call->n;
    key.k = call->k;
    key.form = call->form;
    key.dtype = dtype;
    key.c_fp32 = c_dtype == DTYPE_FP32;
    key.bias = call->bias != NULL;
    key.align_a = align_of(call->a, call->form == MATMUL_TN ? call->m : call->k, elem);
    key.align_b = align_of(call->b, call->form == MATMUL_NT ? call->k : call->n, elem);
    key.align_c = align_of(call->c, call->n, dtype_bytes(c_dtype));
    return key;
}

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *at = bytes;
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ at[i]) * 1099511628211u; /* FNV-1a */
    }
    return hash;
}

static void destroy(struct product *product)
{
    if (product->desc != NULL) {
        cublasLtMatmulDescDestroy(product->desc);
    }
    if (product->first != NULL) {
        cublasLtMatrixLayoutDestroy(product->first);
    }
    if (product->second != NULL) {
        cublasLtMatrixLayoutDestroy(product->second);
    }
    if (product->c != NULL) {
        cublasLtMatrixLayoutDestroy(product->c);
    }
    *product = (struct product){0};
}

static cublasStatus_t layout(cublasLtMatrixLayout_t *out, enum dtype dtype, uint64_t rows,
                             uint64_t cols)
{
    return cublasLtMatrixLayoutCreate(out, type_of(dtype), rows, cols, (int64_t)rows);
}

/* Descriptor and layouts. Row-major (r,c) is column-major (c,r). */
static cublasStatus_t describe(struct product *product)
{
    const struct product_key *key = &product->key;
    const enum dtype dtype = (enum dtype)key->dtype;
    const bool b_by_rows = key->form == MATMUL_NT; /* B is (n,k), else (k,n) */
    const bool a_by_cols = key->form == MATMUL_TN; /* A is (k,m), else (m,k) */
    const cublasOperation_t first = b_by_rows ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = a_by_cols ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue =
        key->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    const struct {
        cublasLtMatmulDescAttributes_t name;
        const void *value;
        size_t bytes;
    } attributes[] = {
        {CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first},
        {CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second},
        {CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue},
    };
    /* fp32 sums of exact products: never TF32, whatever the inputs. */
    cublasStatus_t result =
        cublasLtMatmulDescCreate(&product->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    for (size_t i = 0;
         i < sizeof attributes / sizeof *attributes && result == CUBLAS_STATUS_SUCCESS; i++) {
        result = cublasLtMatmulDescSetAttribute(product->desc, attributes[i].name,
                                                attributes[i].value, attributes[i].bytes);
    }
    if (result == CUBLAS_STATUS_SUCCESS) {
        result = b_by_rows ? layout(&product->first, dtype, key->k, key->n)
                           : layout(&product->first, dtype, key->n, key->k);
    }
    if (result == CUBLAS_STATUS_SUCCESS) {
        result = a_by_cols ? layout(&product->second, dtype, key->m, key->k)
                           : layout(&product->second, dtype, key->k, key->m);
    }
    if (result == CUBLAS_STATUS_SUCCESS) {
        result = layout(&product->c, key->c_fp32 ? DTYPE_FP32 : dtype, key->n, key->m);
    }
    return result;
}

/* Ask for algorithms within the scratch formula and take the first; none: plain. */
static cublasStatus_t choose(struct cuda_products *products, struct product *product,
                             size_t limit_bytes)
{
    const struct product_key *key = &product->key;
    const uint64_t limit = limit_bytes;
    const uint32_t schemes = NO_ATOMICS;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void *value;
        size_t bytes;
    } wishes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit, sizeof limit},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &key->align_b, sizeof key->align_b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &key->align_a, sizeof key->align_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &key->align_c, sizeof key->align_c},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &key->align_c, sizeof key->align_c},
    };
    cublasLtMatmulPreference_t preference = NULL;
    cublasStatus_t result = cublasLtMatmulPreferenceCreate(&preference);
    for (size_t i = 0; i < sizeof wishes / sizeof *wishes && result == CUBLAS_STATUS_SUCCESS; i++) {
        result = cublasLtMatmulPreferenceSetAttribute(preference, wishes[i].name, wishes[i].value,
                                                      wishes[i].bytes);
    }
    cublasLtMatmulHeuristicResult_t answers[MAX_ANSWERS];
    memset(answers, 0, sizeof answers);
    int n = 0;
    if (result == CUBLAS_STATUS_SUCCESS) {
        result = cublasLtMatmulAlgoGetHeuristic(products->handle, product->desc, product->first,
                                                product->second, product->c, product->c, preference,
                                                MAX_ANSWERS, answers, &n);
    }
    if (preference != NULL) {
        cublasLtMatmulPreferenceDestroy(preference);
    }
    product->plain = true;
    if (result == CUBLAS_STATUS_NOT_SUPPORTED) {
        return CUBLAS_STATUS_SUCCESS; /* its way of saying none */
    }
    for (int i = 0; i < n && result == CUBLAS_STATUS_SUCCESS && product->plain; i++) {
        if (answers[i].state == CUBLAS_STATUS_SUCCESS && answers[i].workspaceSize <= limit_bytes) {
            product->plain = false;
            product->algorithm = answers[i].algo;
            product->scratch_bytes = answers[i].workspaceSize;
        }
    }
    return result;
}

static cublasStatus_t make_product(struct cuda_products *products, int major,
                                   const struct product_key *key, struct product *out_product)
{
    memset(out_product, 0, sizeof *out_product);
    out_product->key = *key;
    out_product->used = true;
    /* A bias has C's type for cuBLASLt, the compute type for us. */
    if (key->bias && key->c_fp32 && key->dtype != DTYPE_FP32) {
        out_product->plain = true;
        return CUBLAS_STATUS_SUCCESS;
    }
    const struct matmul shape = {.m = key->m, .n = key->n, .k = key->k};
    cublasStatus_t result = describe(out_product);
    if (result == CUBLAS_STATUS_SUCCESS) {
        result = choose(products, out_product, cuda_matmul_scratch(major, &shape));
    }
    if (result != CUBLAS_STATUS_SUCCESS) {
        destroy(out_product);
    }
    return result;
}

/* ---- the table ---- */

static void empty_table(struct cuda_products *products)
{
    for (size_t i = 0; i < TABLE_SLOTS; i++) {
        destroy(&products->table[i]);
    }
    products->n_used = 0;
}

static cublasStatus_t find_product(struct cuda_products *products, int major,
                                   const struct product_key *key, struct product **out_product)
{
    size_t slot = hash_bytes(14695981039346656037u, key, sizeof *key) % TABLE_SLOTS;
    while (products->table[slot].used) {
        if (memcmp(&products->table[slot].key, key, sizeof *key) == 0) {
            *out_product = &products->table[slot];
            return CUBLAS_STATUS_SUCCESS;
        }
        slot = (slot + 1) % TABLE_SLOTS;
    }
    if (products->n_used >= MAX_USED) {
        empty_table(products); /* the same questions get the same answers */
        slot = hash_bytes(14695981039346656037u, key, sizeof *key) % TABLE_SLOTS;
    }
    const cublasStatus_t result = make_product(products, major, key, &products->table[slot]);
    if (result == CUBLAS_STATUS_SUCCESS) {
        products->n_used++;
        *out_product = &products->table[slot];
    }
    return result;
}

enum status cuda_products_new(struct cuda_device *cuda, struct failure *why)
{
    struct cuda_products *products = heap_calloc(1, sizeof *products);
    if (products == NULL) {
        return fail(why, STATUS_OUT_OF_MEMORY, "no host memory for the table of products");
    }
    const cublasStatus_t result = cublasLtCreate(&products->handle);
    if (result != CUBLAS_STATUS_SUCCESS) {
        heap_free(products);
        return fail(why, STATUS_IO, "cuBLASLt %zu did not start: it says %d", cublasLtGetVersion(),
                    (int)result);
    }
    cuda->products = products;
    return STATUS_OK;
}

void cuda_products_free(struct cuda_device *cuda)
{
    struct cuda_products *products = cuda->products;
    if (products == NULL) {
        return;
    }
    empty_table(products);
    cublasLtDestroy(products->handle);
    heap_free(products);
    cuda->products = NULL;
}

/* ---- carrying out ---- */

static void run_plain(struct cuda_ops *self, const struct matmul *call)
{
    struct cuda_plain_matmul args;
    memset(&args, 0, sizeof args);
    args.dtype = self->base.dtype;
    args.call = *call;
    self->kernels->plain_matmul(self->cuda->streams[STREAM_COMPUTE], &args);
}

void cuda_matmul_run(struct cuda_ops *self, const void *args)
{
    const struct matmul *call = args;
    struct cuda_device *cuda = self->cuda;
    const struct product_key key = key_of(self->base.dtype, call);
    struct product *product = NULL;
    cublasStatus_t result = find_product(cuda->products, cuda->gpu.major, &key, &product);
    if (result == CUBLAS_STATUS_SUCCESS && product->plain) {
        run_plain(self, call);
        return;
    }
    if (result == CUBLAS_STATUS_SUCCESS && call->bias != NULL) {
        result = cublasLtMatmulDescSetAttribute(product->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                &call->bias, sizeof call->bias);
    }
    if (result == CUBLAS_STATUS_SUCCESS) {
        const float alpha = 1.0f;
        const float beta = call->accumulate ? 1.0f : 0.0f;
        assert(product->scratch_bytes == 0 || call->scratch != NULL);
        result = cublasLtMatmul(cuda->products->handle, product->desc, &alpha, call->b,
                                product->first, call->a, product->second, &beta, call->c,
                                product->c, call->c, product->c, &product->algorithm,
                                product->scratch_bytes == 0 ? NULL : call->scratch,
                                product->scratch_bytes, cuda->streams[STREAM_COMPUTE]);
    }
    if (result != CUBLAS_STATUS_SUCCESS) {
        cuda_ops_note(
            self, STATUS_IO, "product %s of %zu x %zu x %zu on GPU %d: cuBLASLt %zu says %d",
            call->form == MATMUL_NT   ? "NT"
            : call->form == MATMUL_NN ? "NN"
                                      : "TN",
            call->m, call->n, call->k, cuda->gpu.index, cublasLtGetVersion(), (int)result);
    }
}

/* ---- the fingerprint ---- */

size_t cuda_products_version(void)
{
    return cublasLtGetVersion();
}

uint64_t cuda_products_hash(struct cuda_ops *self)
{
    static const struct matmul shapes[] = {
        {.form = MATMUL_NT, .m = 1024, .n = 2304, .k = 768},
        {.form = MATMUL_NN, .m = 1024, .n = 768, .k = 3072},
        {.form = MATMUL_TN, .m = 3072, .n = 768, .k = 1024, .c_fp32 = true},
        {.form = MATMUL_NT, .m = 8192, .n = 4096, .k = 4096},
        {.form = MATMUL_TN, .m = 4096, .n = 4096, .k = 8192, .c_fp32 = true},
        {.form = MATMUL_NT, .m = 512, .n = 50257, .k = 768},
    };
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const struct product_key key = key_of(self->base.dtype, &shapes[i]);
        struct product product;
        if (make_product(self->cuda->products, self->cuda->gpu.major, &key, &product) !=
            CUBLAS_STATUS_SUCCESS) {
            continue;
        }
        if (!product.plain) {
            hash = hash_bytes(hash, &product.algorithm, sizeof product.algorithm);
        }
        destroy(&product);
    }
    return hash;
}
