/* SPDX-License-Identifier: Apache-2.0 */
/* handle_mem, which holds the routing, and the caller's allocator. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "small.h"

/* What a handle that was never updated does with memory that has a routing. */
static int run_both_passes(struct small *s)
{
    small_calls(s, 0);
    if (small_dispatch(s, 0x5a) || small_combine(s, 0))
        return -1;
    for (int t = 0; t < 3; t++)
        CHECK(small_row(&s->back, t) == small_value(world.rank, t));
    small_calls(s, 1);
    if (small_combine(s, 0))
        return -1;
    for (int t = 0; t < 3; t++)
        CHECK(((float *)s->back_weights.view.data)[t] == 1.0f / (float)(1 + t));
    /* Over what the forward pass left: the backward dispatch brings the same rows to the same places. */
    TRY(ncclEpDispatch(s->handle, &s->calls.in, &s->calls.out, NULL, &s->calls.config, world.stream));
    if (small_combine(s, 0))
        return -1;
    for (int t = 0; t < 3; t++)
        CHECK(small_row(&s->back, t) == small_value(world.rank, t));
    return 0;
}

/* A group of other sizes does not take the routing: its rows and blocks may lie elsewhere. */
static int refused_by_other_groups(ncclEpLayout_t layout, const struct tensor_pair *memory)
{
    ncclEpGroupConfig_t configs[] = {small_config(HT, 32), small_config(HT, 16)};
    struct small s;

    configs[0].max_token_bytes *= 2;
    for (int i = 0; i < 2; i++) {
        if (small_open(&s, &configs[i], layout, 1, 1, 32, PLAIN))
            return -1;
        TRY(ncclEpHandleDestroy(s.handle));
        TRY(ncclEpInitHandle(&s.handle, s.group, layout, NULL, 1, memory->tensor));
        EXPECT(ncclInvalidUsage, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, NULL, world.stream));
        if (small_close(&s))
            return -1;
    }
    return 0;
}

/* Nor does a handle of another layout, K or alignment of zones. The memory itself is aligned to 16 bytes. */
static int refused_by_other_handles(struct small *s, ncclEpLayout_t layout, const struct tensor_pair *memory)
{
    const ncclEpLayout_t other = layout == FLAT ? EXPERT_MAJOR : FLAT;
    ncclEpHandleConfig_t aligned = NCCL_EP_HANDLE_CONFIG_INIT;
    ncclEpTensor_t odd = *memory->tensor;
    ncclEpHandle_t handle;

    small_calls(s, 0);
    odd.magic = NCCL_EP_TENSOR_MAGIC;
    odd.data = memory->data + 1;
    EXPECT(ncclInvalidArgument, ncclEpInitHandle(&handle, s->group, layout, NULL, 1, &odd));
    CHECK(handle == NULL && strstr(ncclEpxGetLastError(), "aligned to 16 bytes"));
    for (int i = layout == FLAT; i < 3; i++) { /* FLAT has no zones to align */
        aligned.dispatch_output_per_expert_alignment = i == 0 ? 2 : 1;
        TRY(ncclEpInitHandle(&handle, s->group, i == 1 ? other : layout, &aligned, i == 2 ? 2 : 1, memory->tensor));
        EXPECT(ncclInvalidUsage, ncclEpCombine(handle, &s->calls.cin, &s->calls.cout, NULL, world.stream));
        CHECK(strstr(ncclEpxGetLastError(), "over memory that has one for the same configuration") != NULL);
        TRY(ncclEpHandleDestroy(handle));
    }
    return 0;
}

/* A second handle over the same memory, and a third over a copy of its bytes, need no update; nor do they when the
 * first handle is gone. */
static int test_routing_in_memory(ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(HT, 32);
    const int to = 2 * ((world.rank + 1) % world.nranks), ids[] = {to, to + 1, to};
    struct tensor_pair memory = {0}, copy = {0};
    ncclEpHandle_t own;
    struct small s;
    size_t bytes = 0;

    if (small_open(&s, &config, layout, 1, 1, 32, PLAIN))
        return -1;
    own = s.handle;
    TRY(ncclEpHandleMemSize(s.group, EXPERT_MAJOR, NULL, &bytes, 2)); /* enough for all handles that follow */
    if (tensor_pair_open(&memory, s.group, PLAIN, EPX_UINT8, 1, (int64_t)bytes, 0, 0) ||
        tensor_pair_open(&copy, s.group, PLAIN, EPX_UINT8, 1, (int64_t)bytes, 0, 0) ||
        tensor_pair_fill(&memory, 0xee) || tensor_pair_fill(&copy, 0x11))
        return -1;
    TRY(ncclEpInitHandle(&s.handle, s.group, layout, NULL, 1, memory.tensor));
    EXPECT(ncclInvalidUsage, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, NULL, world.stream));
    EXPECT(ncclInvalidUsage, ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, NULL, world.stream));
    if (small_route(&s, ids, 3))
        return -1;
    TRY(ncclEpHandleDestroy(s.handle)); /* leaves the memory to the caller */
    TRY(ncclEpInitHandle(&s.handle, s.group, layout, NULL, 1, memory.tensor));
    if (run_both_passes(&s) || tensor_pair_get(&memory))
        return -1;
    TRY(ncclEpHandleDestroy(s.handle));
    memcpy(copy.view.data, memory.view.data, bytes);
    if (tensor_pair_fill(&memory, 0) || tensor_pair_put(&copy))
        return -1;
    TRY(ncclEpInitHandle(&s.handle, s.group, layout, NULL, 1, copy.tensor));
    if (run_both_passes(&s) || refused_by_other_groups(layout, &copy) || refused_by_other_handles(&s, layout, &copy))
        return -1;
    TRY(ncclEpHandleDestroy(s.handle));
    s.handle = own;
    return tensor_pair_close(&memory) || tensor_pair_close(&copy) || small_close(&s) ? -1 : 0;
}

/* The copy is behind another group on the stream, and the dispatch behind the copy; a host that waits for counts waits
 * for the copy too. */
static int test_routing_on_its_way(unsigned int max_recv)
{
    const struct timespec pause = {.tv_nsec = 300000000};
    const int to = 2 * ((world.rank + 1) % world.nranks), ids[] = {to, to + 1, to, to};
    ncclEpGroupConfig_t config = small_config(HT, max_recv), low = small_config(LL, 0);
    struct tensor_pair memory = {0}, copy = {0};
    struct small s, other;
    size_t bytes = 0;

    config.num_topk = 1;
    if (small_open(&s, &config, FLAT, 1, 1, 32, PLAIN) || small_open(&other, &low, EXPERT_MAJOR, 1, 1, 0, PLAIN) ||
        small_route(&other, ids, 4))
        return -1;
    TRY(ncclEpHandleDestroy(s.handle));
    TRY(ncclEpHandleMemSize(s.group, FLAT, NULL, &bytes, 1));
    if (tensor_pair_open(&memory, s.group, PLAIN, EPX_UINT8, 1, (int64_t)bytes, 0, 0) ||
        tensor_pair_open(&copy, s.group, PLAIN, EPX_UINT8, 1, (int64_t)bytes, 0, 0) || tensor_pair_fill(&copy, 0x11))
        return -1;
    TRY(ncclEpInitHandle(&s.handle, s.group, FLAT, NULL, 1, memory.tensor));
    if (small_route(&s, ids, 4))
        return -1;
    TRY(ncclEpHandleDestroy(s.handle));
    TRY(ncclEpInitHandle(&s.handle, s.group, FLAT, NULL, 1, copy.tensor));
    TRY(cudaStreamSynchronize(world.stream));
    if (world.rank > 0 && world.rank == world.nranks - 1)
        nanosleep(&pause, NULL); /* the others wait for this rank */
    TRY(ncclEpDispatch(other.handle, &other.calls.in, &other.calls.out, &other.calls.info, NULL, world.stream));
    TRY(cudaMemcpyAsync(copy.data, memory.data, bytes, cudaMemcpyDeviceToDevice, world.stream));
    TRY(ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
    if (small_combine(&s, 0))
        return -1;
    for (int t = 0; t < 4; t++)
        CHECK(small_row(&s.back, t) == small_value(world.rank, t));
    return tensor_pair_close(&memory) || tensor_pair_close(&copy) || small_close(&other) || small_close(&s) ? -1 : 0;
}

/* ---- The caller's allocator ------------------------------------------------------------------------------------ */

struct ledger {
    void *ptr[64];
    size_t bytes[64];
    int n, freed, refuse, failed;
};

static cudaError_t ledger_alloc(void **ptr, size_t bytes, void *context)
{
    struct ledger *l = context;
    cudaError_t error;

    if (l->refuse || l->n == 64)
        return cudaErrorMemoryAllocation;
    error = cudaMalloc(ptr, bytes);
    l->ptr[l->n] = *ptr;
    l->bytes[l->n++] = bytes;
    return error;
}

static cudaError_t ledger_free(void *ptr, void *context)
{
    struct ledger *l = context;

    for (int i = 0; i < l->n; i++)
        if (l->ptr[i] == ptr) {
            const cudaError_t error = cudaFree(ptr);
            l->ptr[i] = NULL;
            l->freed++;
            l->failed += error != cudaSuccess;
            return error;
        }
    return cudaErrorInvalidValue;
}

/* Group and handles ask it for memory, and give back what they got; a handle asks for what ncclEpHandleMemSize says; a
 * refusal fails the call. */
static int test_allocator(ncclEpAlgorithm_t algorithm)
{
    ncclEpGroupConfig_t config = small_config(algorithm, algorithm == HT ? 32 : 0);
    const ncclEpLayout_t layout = EXPERT_MAJOR;
    const int ids[] = {0, 1, 0, 1};
    struct ledger ledger = {0};
    ncclEpHandle_t handle;
    struct small s;
    size_t bytes = 0;
    int before;

    config.alloc.alloc_fn = ledger_alloc;
    config.alloc.free_fn = ledger_free;
    config.alloc.context = &ledger;
    if (small_open(&s, &config, layout, 1, 1, 32, PLAIN))
        return -1;
    CHECK(ledger.n >= 2 && ledger.freed == 0);
    TRY(ncclEpHandleMemSize(s.group, layout, NULL, &bytes, 1));
    CHECK(ledger.bytes[ledger.n - 1] == bytes);
    if (small_route(&s, ids, 4) || small_dispatch(&s, 0) || small_combine(&s, 0))
        return -1;
    before = ledger.n;
    ledger.refuse = 1;
    EXPECT(ncclSystemError, ncclEpInitHandle(&handle, s.group, layout, NULL, 1, NULL));
    CHECK(handle == NULL);
    ledger.refuse = 0;
    TRY(ncclEpInitHandle(&handle, s.group, layout, NULL, 1, NULL));
    CHECK(ledger.n == before + 1);
    TRY(ncclEpHandleDestroy(handle));
    CHECK(ledger.freed == 1);
    if (small_close(&s))
        return -1;
    CHECK(ledger.freed == ledger.n && ledger.failed == 0); /* cudaFree waits for all streams, of the group too */
    return 0;
}

int test_memory(void)
{
    return test_routing_in_memory(FLAT) || test_routing_in_memory(EXPERT_MAJOR) || test_routing_on_its_way(32) ||
                   test_routing_on_its_way(NCCL_EP_AUTO) || test_allocator(LL) || test_allocator(HT)
               ? -1
               : 0;
}
