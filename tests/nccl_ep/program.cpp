/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program as NVIDIA's for NCCL EP are written: C++20, MPI, CUDA's runtime and its types, nothing of EPX. It uses what
 * they use of CUDA and NCCL (events, memory info, errors, capture and graphs, bf16 and fp8, profiler, NVTX, windows,
 * teams), and every result is checked. tests/scripts/nccl_programs.sh compiles it against the stand-ins.
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <mpi.h>

#include <cuda_bf16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <nvtx3/nvToolsExt.h>

#include "nccl_ep.h"

static int rank, nranks;

#define CUDA(call)                                                                                             \
    do {                                                                                                       \
        cudaError_t error_ = (call);                                                                           \
        if (error_ != cudaSuccess) {                                                                           \
            fprintf(stderr, "rank %d: %s: %s\n", rank, #call, cudaGetErrorString(error_));                     \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                                      \
        }                                                                                                      \
    } while (0)
#define NCCL(call)                                                                                             \
    do {                                                                                                       \
        ncclResult_t result_ = (call);                                                                         \
        if (result_ != ncclSuccess) {                                                                          \
            fprintf(stderr, "rank %d: %s: %s\n", rank, #call, ncclGetErrorString(result_));                    \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                                      \
        }                                                                                                      \
    } while (0)
#define CHECK(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            fprintf(stderr, "rank %d: line %d: %s\n", rank, __LINE__, #condition);                             \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                                      \
        }                                                                                                      \
    } while (0)

constexpr unsigned TOKENS = 16, HIDDEN = 512, TOPK = 2, LOCAL = 4;

static cudaError_t take(void **ptr, size_t bytes, void *context)
{
    ++*static_cast<int *>(context);
    return cudaMalloc(ptr, bytes);
}

static cudaError_t give_back(void *ptr, void *context)
{
    --*static_cast<int *>(context);
    return cudaFree(ptr);
}

template <class T> static T *to_device(const std::vector<T> &host)
{
    T *device = nullptr;

    CUDA(cudaMalloc(&device, host.size() * sizeof(T)));
    CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

static void check_types()
{
    const nv_bfloat16 x = __float2bfloat16(1.5f);
    const __nv_fp8_e4m3 y(448.0f);
    const __nv_fp8_storage_t z = __nv_cvt_float_to_fp8(-3.0f, __NV_SATFINITE, __NV_E5M2);
    const __half back(__nv_cvt_fp8_to_halfraw(z, __NV_E5M2));

    CHECK(__bfloat162float(x) == 1.5f && sizeof(x) == 2 && static_cast<float>(y) == 448.0f && sizeof(y) == 1);
    CHECK(__half2float(back) == -3.0f && __half2float(__float2half_rn(0.25f)) == 0.25f);
    const float values[] = {0.25f, 0.75f, -5.0f, -7.0f, 1.26f}; /* the first three lie between two codes */
    const unsigned char codes[] = {0, 2, 14, 15, 3};
    for (int i = 0; i < 5; i++)
        CHECK(__nv_cvt_float_to_fp4(values[i], __NV_E2M1, cudaRoundNearest) == codes[i]);
    for (unsigned char code = 0; code < 16; code++) {
        const __half value(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1));
        CHECK(__nv_cvt_float_to_fp4(__half2float(value), __NV_E2M1, cudaRoundNearest) == code);
    }
    CHECK(__nv_cvt_float2_to_fp4x2(float2{1.0f, -6.0f}, __NV_E2M1, cudaRoundNearest) == 0xf2);
    CHECK(static_cast<float>(__nv_fp4_e2m1(1.6f)) == 1.5f && sizeof(__nv_fp4x2_e2m1) == 1);
    CHECK(sizeof(int4) == 16 && CUDART_VERSION >= 11000 && std::max(1, 2) == 2 && INT_MAX > 0);
}

static void check_device()
{
    int devices = 0, device = -1, major = 0, minor = -1;
    size_t available = 0, total = 0;

    CUDA(cudaGetDeviceCount(&devices));
    CUDA(cudaSetDevice(rank % devices));
    CUDA(cudaGetDevice(&device));
    CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUDA(cudaMemGetInfo(&available, &total));
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, device));
    CHECK(properties.major == major && properties.minor == minor && properties.multiProcessorCount > 0 &&
          properties.totalGlobalMem == total && properties.warpSize == 32 && properties.name[0]);
    CHECK(cudaGetDeviceProperties(&properties, -1) == cudaErrorInvalidDevice);
    void *function = nullptr, *context = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    CUDA(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 12000, 0, &found));
    CHECK(found == cudaDriverEntryPointSuccess && !reinterpret_cast<int (*)(void **)>(function)(&context) && context);
    CUDA(cudaGetDriverEntryPointByVersion("cuNothing", &function, 12000, 0, &found));
    CHECK(found == cudaDriverEntryPointSymbolNotFound && !function);
    CHECK(cudaGetDriverEntryPointByVersion("cuNothing", &function, 12000, 0, nullptr) == cudaErrorSymbolNotFound);
    CHECK(device == rank % devices && major >= 9 && minor >= 0 && available > 0 && total >= available);
    CHECK(cudaSetDevice(1 << 20) != cudaSuccess && cudaGetLastError() == cudaErrorInvalidDevice);
    CHECK(!strcmp(cudaGetErrorName(cudaErrorInvalidDevice), "cudaErrorInvalidDevice"));
    CHECK(cudaGetLastError() == cudaSuccess);
    CUDA(cudaProfilerStart());
    CUDA(cudaProfilerStop());
    CHECK(nvtxRangePush("outer") == 0 && nvtxRangePop() == 0);
}

static ncclComm_t make_communicator()
{
    ncclUniqueId id;
    ncclComm_t comm;

    if (!rank)
        NCCL(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    NCCL(ncclCommInitRank(&comm, nranks, id, rank));
    CHECK(ncclTeamLsa(comm).nRanks == nranks);
    return comm;
}

/* Dispatch and combine of one routing through a graph, with tokens that change between its launches. */
struct Layer {
    int owned = 0;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    std::vector<nv_bfloat16> tokens, out;
    std::vector<size_t> idx_sizes{TOKENS, TOPK}, row_sizes, in_sizes{TOKENS, HIDDEN}, flat;
    nv_bfloat16 *device_tokens, *device_received, *device_out;
    float *device_weights, *device_row_weights;
    int64_t *device_idx, *device_received_idx;
    void *window_memory = nullptr;
    ncclWindow_t window;

    Layer(ncclComm_t comm)
    {
        const size_t rows = static_cast<size_t>(nranks) * TOKENS;
        std::vector<int64_t> idx(TOKENS * TOPK);
        std::vector<float> weights(TOKENS * TOPK, 1.0f);

        for (unsigned i = 0; i < TOKENS * TOPK; i++)
            idx[i] = (rank + i * LOCAL) % (nranks * LOCAL);
        ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
        config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
        config.num_experts = static_cast<unsigned>(nranks) * LOCAL;
        config.max_dispatch_tokens_per_rank = TOKENS;
        config.max_recv_tokens_per_rank = static_cast<unsigned>(rows);
        config.max_token_bytes = HIDDEN * 2;
        config.alloc = {.alloc_fn = take, .free_fn = give_back, .context = &owned};
        NCCL(ncclEpCreateGroup(&group, comm, &config));
        tokens.resize(TOKENS * HIDDEN);
        out.resize(TOKENS * HIDDEN);
        device_tokens = to_device(tokens);
        device_out = to_device(out);
        device_idx = to_device(idx);
        device_weights = to_device(weights);
        device_row_weights = to_device(std::vector<float>(rows * TOPK));
        device_received_idx = to_device(std::vector<int64_t>(rows * TOPK));
        NCCL(ncclMemAlloc(&window_memory, rows * HIDDEN * 2));
        NCCL(ncclCommWindowRegister(comm, window_memory, rows * HIDDEN * 2, &window, NCCL_WIN_COLL_SYMMETRIC));
        device_received = static_cast<nv_bfloat16 *>(window_memory);
        row_sizes = {rows, HIDDEN};
        flat = {rows, TOPK};
        NCCL(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, nullptr, TOPK, nullptr));
    }

    /* Designated initialisers, as NVIDIA's programs have them. */
    void issue(cudaStream_t stream)
    {
        ncclEpTensor_t idx{NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt64, .data = device_idx,
                           .sizes = idx_sizes.data()};
        ncclEpTensor_t weights{NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclFloat32, .data = device_weights,
                               .sizes = idx_sizes.data()};
        ncclEpTensor_t in_tokens{NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclBfloat16,
                                 .data = device_tokens, .sizes = in_sizes.data()};
        ncclEpTensor_t received{NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclBfloat16,
                                .data = device_received, .win_hdl = window, .sizes = row_sizes.data()};
        ncclEpTensor_t row_weights{NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclFloat32,
                                   .data = device_row_weights, .sizes = flat.data()};
        ncclEpTensor_t ids{NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt64, .data = device_received_idx,
                           .sizes = flat.data()};
        ncclEpTensor_t combined{NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclBfloat16, .data = device_out,
                                .sizes = in_sizes.data()};
        ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpCombineInputs_t combine_in = NCCL_EP_COMBINE_INPUTS_INIT;
        ncclEpCombineOutputs_t combine_out = NCCL_EP_COMBINE_OUTPUTS_INIT;

        in.tokens = &in_tokens;
        in.topk_weights = &weights;
        outputs.tokens = combine_in.tokens = &received;
        outputs.topk_weights = &row_weights;
        outputs.topk_idx = &ids;
        combine_out.tokens = &combined;
        NCCL(ncclEpUpdateHandle(handle, &idx, nullptr, stream));
        NCCL(ncclEpDispatch(handle, &in, &outputs, nullptr, nullptr, stream));
        NCCL(ncclEpComplete(handle, nullptr, stream));
        NCCL(ncclEpCombine(handle, &combine_in, &combine_out, nullptr, stream));
        NCCL(ncclEpComplete(handle, nullptr, stream));
    }

    void fill(int round)
    {
        for (unsigned i = 0; i < tokens.size(); i++)
            tokens[i] = __float2bfloat16(static_cast<float>((rank + round + static_cast<int>(i)) % 64));
        CUDA(cudaMemcpy(device_tokens, tokens.data(), tokens.size() * 2, cudaMemcpyHostToDevice));
        CUDA(cudaMemset(device_out, 0x7f, out.size() * 2));
    }

    /* A token goes to one rank or to two, and comes back once from each. */
    void check()
    {
        CUDA(cudaMemcpy(out.data(), device_out, out.size() * 2, cudaMemcpyDeviceToHost));
        const float times = nranks > 1 ? 2.0f : 1.0f;
        for (unsigned i = 0; i < out.size(); i++)
            CHECK(__bfloat162float(out[i]) == times * __bfloat162float(tokens[i]));
    }

    void close(ncclComm_t comm)
    {
        NCCL(ncclEpHandleDestroy(handle));
        NCCL(ncclEpGroupDestroy(group));
        CHECK(owned == 0); /* what alloc_fn gave came back */
        NCCL(ncclCommWindowDeregister(comm, window));
        NCCL(ncclMemFree(window_memory));
        CUDA(cudaFree(device_tokens));
        CUDA(cudaFree(device_out));
        CUDA(cudaFree(device_idx));
        CUDA(cudaFree(device_weights));
        CUDA(cudaFree(device_row_weights));
        CUDA(cudaFree(device_received_idx));
    }
};

static void run(ncclComm_t comm)
{
    Layer layer(comm);
    cudaStream_t stream;
    cudaEvent_t start, end;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float ms = 0;

    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    layer.issue(stream);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    for (int round = 0; round < 3; round++) {
        layer.fill(round);
        MPI_Barrier(MPI_COMM_WORLD);
        CUDA(cudaEventRecord(start, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaEventRecord(end, stream));
        CUDA(cudaStreamSynchronize(stream));
        CUDA(cudaEventElapsedTime(&ms, start, end));
        CHECK(ms > 0);
        layer.check();
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaEventDestroy(start));
    CUDA(cudaEventDestroy(end));
    layer.close(comm);
    CUDA(cudaStreamDestroy(stream));
}

int main(int argc, char **argv)
{
    struct {
        double value;
        int rank;
    } mine, most;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    check_types();
    check_device();
    ncclComm_t comm = make_communicator();
    const double begin = MPI_Wtime();
    run(comm);
    mine.value = MPI_Wtime() - begin;
    mine.rank = rank;
    MPI_Reduce(&mine, &most, 1, MPI_DOUBLE_INT, MPI_MAXLOC, 0, MPI_COMM_WORLD);
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaDeviceReset());
    if (!rank)
        printf("program: %d ranks, slowest %d: passed\n", nranks, most.rank);
    MPI_Finalize();
    return 0;
}
