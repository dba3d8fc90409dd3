/* Are the declarations of kernels/cuda/emulate/include those of the toolkit?
 *
 * Compiled three times: as a table of the values and sizes of either set of headers (CHECK_TABLE
 * names it), and as the program that compares the two (CHECK_MAIN). What is declared and not in the
 * list below is a failure as well. Prototypes are compared by building the product with
 * both. */
#include <stdio.h>

struct entry {
    const char *name;
    long long value;
};

#ifndef CHECK_MAIN

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stddef.h>

/* clang-format off */
#define VALUES(V)                                                                                  \
    V(cudaSuccess) V(cudaErrorInvalidValue) V(cudaErrorMemoryAllocation)                           \
    V(cudaErrorInitializationError) V(cudaErrorInvalidConfiguration)                               \
    V(cudaErrorInvalidMemcpyDirection) V(cudaErrorStubLibrary) V(cudaErrorInsufficientDriver)      \
    V(cudaErrorNoDevice) V(cudaErrorInvalidDevice) V(cudaErrorDeviceUninitialized)                 \
    V(cudaErrorNoKernelImageForDevice) V(cudaErrorECCUncorrectable)                                \
    V(cudaErrorInvalidResourceHandle) V(cudaErrorSymbolNotFound) V(cudaErrorNotReady)              \
    V(cudaErrorIllegalAddress) V(cudaErrorLaunchOutOfResources) V(cudaErrorLaunchFailure)          \
    V(cudaErrorNotSupported) V(cudaErrorStreamCaptureUnsupported)                                  \
    V(cudaErrorStreamCaptureInvalidated) V(cudaErrorUnknown) V(cudaMemcpyHostToHost)               \
    V(cudaMemcpyHostToDevice) V(cudaMemcpyDeviceToHost) V(cudaMemcpyDeviceToDevice)                \
    V(cudaMemcpyDefault) V(cudaDevAttrMaxThreadsPerBlock) V(cudaDevAttrMaxSharedMemoryPerBlock)    \
    V(cudaDevAttrWarpSize) V(cudaDevAttrClockRate) V(cudaDevAttrMultiProcessorCount)               \
    V(cudaDevAttrIntegrated) V(cudaDevAttrComputeMode) V(cudaDevAttrPciBusId)                      \
    V(cudaDevAttrPciDeviceId) V(cudaDevAttrMemoryClockRate) V(cudaDevAttrGlobalMemoryBusWidth)     \
    V(cudaDevAttrL2CacheSize) V(cudaDevAttrMaxThreadsPerMultiProcessor)                            \
    V(cudaDevAttrAsyncEngineCount) V(cudaDevAttrUnifiedAddressing) V(cudaDevAttrPciDomainId)       \
    V(cudaDevAttrComputeCapabilityMajor) V(cudaDevAttrComputeCapabilityMinor)                      \
    V(cudaDevAttrStreamPrioritiesSupported) V(cudaDevAttrMaxSharedMemoryPerMultiprocessor)         \
    V(cudaDevAttrMaxSharedMemoryPerBlockOptin) V(cudaStreamCaptureModeGlobal)                      \
    V(cudaStreamCaptureModeThreadLocal) V(cudaStreamCaptureModeRelaxed)                            \
    V(cudaStreamCaptureStatusNone) V(cudaStreamCaptureStatusActive)                                \
    V(cudaStreamCaptureStatusInvalidated) V(cudaDriverEntryPointSuccess)                           \
    V(cudaDriverEntryPointSymbolNotFound) V(cudaDriverEntryPointVersionNotSufficent)               \
    V(cudaStreamDefault) V(cudaStreamNonBlocking) V(cudaEventDefault) V(cudaEventBlockingSync)     \
    V(cudaEventDisableTiming) V(cudaHostAllocDefault) V(cudaHostAllocPortable)                     \
    V(cudaEnableDefault) V(CUDA_SUCCESS) V(CUDA_ERROR_INVALID_VALUE) V(CUDA_ERROR_OUT_OF_MEMORY)   \
    V(CUDA_ERROR_NOT_INITIALIZED) V(CUDA_ERROR_DEINITIALIZED) V(CUDA_ERROR_NO_DEVICE)              \
    V(CUDA_ERROR_INVALID_DEVICE) V(CUDA_ERROR_INVALID_CONTEXT) V(CUDA_ERROR_MAP_FAILED)            \
    V(CUDA_ERROR_UNMAP_FAILED) V(CUDA_ERROR_ALREADY_MAPPED) V(CUDA_ERROR_NOT_MAPPED)               \
    V(CUDA_ERROR_INVALID_HANDLE) V(CUDA_ERROR_NOT_FOUND) V(CUDA_ERROR_ILLEGAL_ADDRESS)             \
    V(CUDA_ERROR_LAUNCH_FAILED) V(CUDA_ERROR_NOT_SUPPORTED) V(CUDA_ERROR_UNKNOWN)                  \
    V(CU_MEM_LOCATION_TYPE_INVALID) V(CU_MEM_LOCATION_TYPE_DEVICE) V(CU_MEM_LOCATION_TYPE_HOST)    \
    V(CU_MEM_ALLOCATION_TYPE_INVALID) V(CU_MEM_ALLOCATION_TYPE_PINNED)                             \
    V(CU_MEM_HANDLE_TYPE_NONE) V(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)                         \
    V(CU_MEM_ACCESS_FLAGS_PROT_NONE) V(CU_MEM_ACCESS_FLAGS_PROT_READ)                              \
    V(CU_MEM_ACCESS_FLAGS_PROT_READWRITE) V(CU_MEM_ALLOC_GRANULARITY_MINIMUM)                      \
    V(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) V(CUDA_R_32F) V(CUDA_R_64F) V(CUDA_R_16F)              \
    V(CUDA_R_16BF) V(CUBLAS_STATUS_SUCCESS) V(CUBLAS_STATUS_NOT_INITIALIZED)                       \
    V(CUBLAS_STATUS_ALLOC_FAILED) V(CUBLAS_STATUS_INVALID_VALUE) V(CUBLAS_STATUS_ARCH_MISMATCH)    \
    V(CUBLAS_STATUS_MAPPING_ERROR) V(CUBLAS_STATUS_EXECUTION_FAILED)                               \
    V(CUBLAS_STATUS_INTERNAL_ERROR) V(CUBLAS_STATUS_NOT_SUPPORTED)                                 \
    V(CUBLAS_STATUS_LICENSE_ERROR) V(CUBLAS_COMPUTE_32F) V(CUBLAS_COMPUTE_32F_FAST_TF32)           \
    V(CUBLAS_OP_N) V(CUBLAS_OP_T) V(CUBLAS_OP_C) V(CUBLASLT_POINTER_MODE_HOST)                     \
    V(CUBLASLT_ORDER_COL) V(CUBLASLT_ORDER_ROW) V(CUBLASLT_REDUCTION_SCHEME_NONE)                  \
    V(CUBLASLT_REDUCTION_SCHEME_INPLACE) V(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)                 \
    V(CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE) V(CUBLASLT_REDUCTION_SCHEME_MASK)                     \
    V(CUBLASLT_EPILOGUE_DEFAULT) V(CUBLASLT_EPILOGUE_BIAS) V(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE)    \
    V(CUBLASLT_MATMUL_DESC_SCALE_TYPE) V(CUBLASLT_MATMUL_DESC_POINTER_MODE)                        \
    V(CUBLASLT_MATMUL_DESC_TRANSA) V(CUBLASLT_MATMUL_DESC_TRANSB)                                  \
    V(CUBLASLT_MATMUL_DESC_EPILOGUE) V(CUBLASLT_MATMUL_DESC_BIAS_POINTER)                          \
    V(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE) V(CUBLASLT_MATRIX_LAYOUT_TYPE)                          \
    V(CUBLASLT_MATRIX_LAYOUT_ORDER) V(CUBLASLT_MATRIX_LAYOUT_ROWS)                                 \
    V(CUBLASLT_MATRIX_LAYOUT_COLS) V(CUBLASLT_MATRIX_LAYOUT_LD)                                    \
    V(CUBLASLT_MATMUL_PREF_SEARCH_MODE) V(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)                \
    V(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) V(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES)    \
    V(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES) V(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES)    \
    V(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES) V(ncclSuccess) V(ncclUnhandledCudaError)         \
    V(ncclSystemError) V(ncclInternalError) V(ncclInvalidArgument) V(ncclInvalidUsage)             \
    V(ncclRemoteError) V(ncclInProgress) V(ncclNumResults) V(ncclInt8) V(ncclUint8) V(ncclInt32)   \
    V(ncclUint32) V(ncclInt64) V(ncclUint64) V(ncclFloat16) V(ncclFloat32) V(ncclFloat64)          \
    V(ncclBfloat16) V(ncclSum) V(ncclProd) V(ncclMax) V(ncclMin) V(ncclAvg)                        \
    V(NCCL_UNIQUE_ID_BYTES) V(NCCL_CONFIG_UNDEF_INT)

#define ENTRY(name) {#name, (long long)(name)},
#define SIZE(type) {"sizeof " #type, (long long)sizeof(type)},
#define FIELD(type, field) {"offset of " #type "." #field, (long long)offsetof(type, field)},
#define PROP(field) FIELD(struct cudaDeviceProp, field)

extern const struct entry CHECK_TABLE[];
const struct entry CHECK_TABLE[] = {
    {"CUDART_VERSION", CUDART_VERSION},
    {"NCCL_VERSION_CODE", NCCL_VERSION_CODE},
    VALUES(ENTRY)
    SIZE(struct cudaDeviceProp) SIZE(cudaUUID_t) SIZE(CUuuid) SIZE(CUdeviceptr) SIZE(CUdevice)
    SIZE(CUmemGenericAllocationHandle) SIZE(CUmemLocation) SIZE(CUmemAllocationProp)
    SIZE(CUmemAccessDesc) SIZE(cudaDataType_t) SIZE(cublasLtMatmulDescOpaque_t)
    SIZE(cublasLtMatrixLayoutOpaque_t) SIZE(cublasLtMatmulPreferenceOpaque_t)
    SIZE(cublasLtMatmulAlgo_t) SIZE(cublasLtMatmulHeuristicResult_t) SIZE(ncclUniqueId)
    SIZE(ncclConfig_t)
    PROP(name) PROP(uuid) PROP(totalGlobalMem) PROP(sharedMemPerBlock) PROP(regsPerBlock)
    PROP(warpSize) PROP(memPitch) PROP(maxThreadsPerBlock) PROP(major) PROP(minor)
    PROP(multiProcessorCount) PROP(ECCEnabled) PROP(pciBusID) PROP(pciDeviceID) PROP(pciDomainID)
    PROP(memoryBusWidth) PROP(l2CacheSize) PROP(sharedMemPerMultiprocessor)
    PROP(sharedMemPerBlockOptin)
    FIELD(CUmemAllocationProp, location) FIELD(CUmemAccessDesc, flags)
    FIELD(CUmemAllocationProp, allocFlags) FIELD(ncclConfig_t, blocking)
    FIELD(ncclConfig_t, commName) FIELD(ncclConfig_t, nvlinkCentricSched)
    FIELD(cublasLtMatmulHeuristicResult_t, workspaceSize)
    FIELD(cublasLtMatmulHeuristicResult_t, state)
    {NULL, 0}};

/* clang-format on */

#else

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

extern const struct entry table_of_stand_in[], table_of_toolkit[];

static bool in_table(const char *name, size_t length)
{
    for (const struct entry *e = table_of_stand_in; e->name != NULL; e++) {
        if (strlen(e->name) == length && memcmp(e->name, name, length) == 0) {
            return true;
        }
    }
    return false;
}

/* Names of enumeration values: what stands before " = " at the start of a line or after "{ " or
 * ", ". */
static int missing_from(const char *path)
{
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        printf("%s cannot be read\n", path);
        return 1;
    }
    char line[512];
    int n_missing = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        for (char *equals = strstr(line, " = "); equals != NULL;
             equals = strstr(equals + 1, " = ")) {
            const char *begin = equals;
            while (begin > line && (isalnum((unsigned char)begin[-1]) || begin[-1] == '_')) {
                begin--;
            }
            const size_t length = (size_t)(equals - begin);
            if (length > 0 && !in_table(begin, length)) {
                printf("%s: %.*s is not in the list of this check\n", path, (int)length, begin);
                n_missing++;
            }
        }
    }
    fclose(file);
    return n_missing;
}

int main(void)
{
    const struct entry *ours = table_of_stand_in, *theirs = table_of_toolkit;
    const bool same_version = ours[0].value == theirs[0].value && ours[1].value == theirs[1].value;
    int n_wrong = 0, n = 0;
    for (size_t i = 2; ours[i].name != NULL; i++, n++) {
        /* Structs may grow with the versions, values stay. */
        const bool is_size = strncmp(ours[i].name, "sizeof ", 7) == 0;
        if (ours[i].value != theirs[i].value && (same_version || !is_size)) {
            printf("%s is %lld, the toolkit says %lld\n", ours[i].name, ours[i].value,
                   theirs[i].value);
            n_wrong++;
        }
    }
    static const char *const headers[] = {"cuda_runtime_api.h", "cuda.h", "cublasLt.h", "nccl.h"};
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/kernels/cuda/emulate/include/%s", BALLAST_SOURCE_DIR,
                 headers[i]);
        n_wrong += missing_from(path);
    }
    printf("%d values and sizes compared with CUDA %lld, NCCL %lld: %d differ\n", n,
           theirs[0].value, theirs[1].value, n_wrong);
    return n_wrong > 0;
}

#endif
