/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of nccl_ep.h with random nonsense in their structs, tensors and numbers: each returns one of NCCL's codes, and
 * the process and the group live on. One rank, so that nobody waits for it.
 * usage: nccl_ep_nonsense FIRST_SEED SEEDS [CALLS]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_ep.h>

#include "nccl_calls.h"

enum { EXPERTS = 8, TOPK = 3, TOKENS = 6, HIDDEN = 512, ROWS = 32, SLACK = 1 << 20, MOST_TENSORS = 16 };

static uint64_t state;
static char *no_access, *read_only;

static uint64_t draw(void)
{
    state += 0x9e3779b97f4a7c15u;
    uint64_t x = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Numbers at which sizes, enumerations and products go wrong. */
static uint64_t number(void)
{
    static const uint64_t special[] = {
        0,           1,           2,           3,          4,          5,          7,          8,        15,
        16,          17,          20,          31,         32,         33,         47,         48,       64,
        96,          100,         112,         512,        1u << 16,   1u << 20,   1u << 24,   1u << 30, 0x7fffffff,
        0x80000000u, 0xfffffffeu, 0xffffffffu, 1ull << 32, 1ull << 40, 1ull << 62, 1ull << 63, ~0ull};

    return draw() % 8 ? special[draw() % (sizeof(special) / sizeof(special[0]))] : draw();
}

/* Pointers that are none; never one to memory that is something else's. */
static void *pointer(void)
{
    void *const special[] = {NULL,
                             (void *)(uintptr_t)1,
                             (void *)(uintptr_t)16,
                             no_access,
                             no_access + 4088,
                             (void *)(uintptr_t)0xb7b7b7b7b7b7b7b0u,
                             (void *)~(uintptr_t)15};

    return special[draw() % (sizeof(special) / sizeof(special[0]))];
}

/* ---- A good call ------------------------------------------------------------------------------------------------- */

struct tensors { /* each with a megabyte, so that what is written for a size that is accepted has room */
    ncclEpTensor_t t[MOST_TENSORS];
    size_t sizes[MOST_TENSORS][4];
    int count;
};

struct calls {
    ncclEpGroupConfig_t group;
    ncclEpHandleConfig_t handle;
    struct nccl_calls args;
    ncclEpCompleteConfig_t complete;
    ncclEpTensorAllocConfig_t alloc;
    ncclEpTensor_t *idx, *memory;
    struct tensors tensors;
    int layout, topk;
};

static unsigned char *memory_of[MOST_TENSORS];

static ncclEpTensor_t *tensor(struct calls *c, ncclDataType_t type, unsigned int ndim, size_t d0, size_t d1, size_t d2)
{
    const int i = c->tensors.count++;
    ncclEpTensor_t *t = &c->tensors.t[i];
    size_t *sizes = c->tensors.sizes[i];

    *t = (ncclEpTensor_t)NCCL_EP_TENSOR_INIT;
    sizes[0] = d0, sizes[1] = d1, sizes[2] = d2, sizes[3] = 1;
    t->ndim = ndim;
    t->datatype = type;
    t->sizes = sizes;
    t->data = memory_of[i];
    return t;
}

static void good_structs(struct calls *c, int low)
{
    memset(c, 0, sizeof(*c));
    c->group = (ncclEpGroupConfig_t)NCCL_EP_GROUP_CONFIG_INIT;
    c->handle = (ncclEpHandleConfig_t)NCCL_EP_HANDLE_CONFIG_INIT;
    c->args = nccl_calls_none();
    c->complete = (ncclEpCompleteConfig_t)NCCL_EP_COMPLETE_CONFIG_INIT;
    c->alloc = (ncclEpTensorAllocConfig_t)NCCL_EP_TENSOR_ALLOC_CONFIG_INIT;
    c->group.algorithm = low ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
    c->group.num_experts = EXPERTS;
    c->group.max_dispatch_tokens_per_rank = TOKENS;
    c->group.max_recv_tokens_per_rank = low ? 0 : ROWS;
    c->group.max_token_bytes = HIDDEN * 4;
    c->group.enable_mask = 1;
}

/* What the layout wants; `kind` 0 to 3: low latency's two, high throughput's two. */
static void good_calls(struct calls *c, int kind)
{
    const int low = kind < 2, major = kind % 2 == 0;
    const size_t d0 = low ? (major ? EXPERTS : 1) : ROWS, d1 = low ? TOKENS : HIDDEN, d2 = low ? HIDDEN : 1;

    good_structs(c, low);
    c->layout = major ? NCCL_EP_LAYOUT_EXPERT_MAJOR : low ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT;
    c->topk = TOPK;
    c->idx = tensor(c, ncclInt64, 2, TOKENS, TOPK, 1);
    for (int i = 0; i < TOKENS * TOPK; i++)
        ((int64_t *)c->idx->data)[i] = i % EXPERTS;
    c->args.in.tokens = tensor(c, ncclBfloat16, 2, TOKENS, HIDDEN, 1);
    c->args.out.tokens = c->args.cin.tokens = tensor(c, ncclBfloat16, low ? 3 : 2, d0, d1, d2);
    c->args.cout.tokens = tensor(c, ncclBfloat16, 2, TOKENS, HIDDEN, 1);
    c->args.cout.topk_weights = tensor(c, ncclFloat32, 2, TOKENS, TOPK, 1);
    if (!low || major)
        c->args.info.expert_counters = tensor(c, ncclInt32, 1, EXPERTS, 1, 1);
    else
        c->args.info.src_rank_counters = tensor(c, ncclInt32, 1, 1, 1, 1);
    c->memory = tensor(c, ncclUint8, 1, SLACK, 1, 1);
    if (low && major)
        return;
    c->args.in.topk_weights = tensor(c, ncclFloat32, 2, TOKENS, TOPK, 1);
    c->args.out.topk_weights = low     ? tensor(c, ncclFloat32, 3, 1, TOKENS, TOPK)
                               : major ? tensor(c, ncclFloat32, 1, ROWS, 1, 1)
                                       : tensor(c, ncclFloat32, 2, ROWS, TOPK, 1);
    if (!major)
        c->args.out.topk_idx = low ? tensor(c, ncclInt32, 3, 1, TOKENS, TOPK) : tensor(c, ncclInt64, 2, ROWS, TOPK, 1);
}

/* ---- Nonsense ---------------------------------------------------------------------------------------------------- */

static void change_word(void *of, size_t bytes)
{
    const uint32_t value = (uint32_t)number();

    memcpy((char *)of + draw() % (bytes / 4) * 4, &value, sizeof(value));
}

/* A size that the memory has room for, or one that no tensor has: the library takes a caller's word for the rest. */
static void change_size(size_t *sizes)
{
    size_t *const one = &sizes[draw() % 3], before = *one;

    *one = (size_t)number();
    if (*one <= INT32_MAX && (double)sizes[0] * (double)sizes[1] * (double)sizes[2] * 8 > SLACK)
        *one = before;
}

static void change_tensor(struct calls *c)
{
    const int i = (int)(draw() % (uint64_t)c->tensors.count);
    ncclEpTensor_t *t = &c->tensors.t[i];

    if (draw() % 8 == 0) /* ids: the same expert twice, and experts that do not exist */
        ((int64_t *)(void *)memory_of[0])[draw() % (TOKENS * TOPK)] =
            draw() % 2 ? (int64_t)(draw() % EXPERTS) : (int64_t)number();

    switch (draw() % 8) {
    case 0:
        t->size = (unsigned int)number();
        break;
    case 1:
        t->magic = draw() % 2 ? 0xBEEFBEEFu : (unsigned int)number();
        break;
    case 2:
        t->ndim = (unsigned int)number();
        break;
    case 3:
        t->datatype = (ncclDataType_t)(draw() % 16);
        break;
    case 4:
        t->data = pointer();
        break;
    case 5:
        t->win_hdl = (ncclWindow_t)pointer();
        t->win_offset = number();
        t->data = draw() % 2 ? t->data : NULL;
        break;
    case 6:
        t->sizes = (size_t *)pointer();
        break;
    default:
        change_size(c->tensors.sizes[i]);
    }
}

/* A pointer of a struct to nothing, or to another tensor of the call. */
static void change_link(struct calls *c)
{
    ncclEpTensor_t **const links[] = {&c->args.in.tokens,
                                      &c->args.in.topk_weights,
                                      &c->args.in.scales,
                                      &c->args.out.tokens,
                                      &c->args.out.topk_weights,
                                      &c->args.out.scales,
                                      &c->args.out.topk_idx,
                                      &c->args.cin.tokens,
                                      &c->args.cin.topk_weights,
                                      &c->args.cin.scales,
                                      &c->args.cout.tokens,
                                      &c->args.cout.topk_weights,
                                      &c->args.info.expert_counters,
                                      &c->args.info.src_rank_counters,
                                      &c->args.info.expert_offsets,
                                      &c->args.info.recv_total_counter,
                                      &c->idx,
                                      &c->memory};
    ncclEpTensor_t **link = links[draw() % (sizeof(links) / sizeof(links[0]))];

    *link = draw() % 3 ? &c->tensors.t[draw() % (uint64_t)c->tensors.count] : pointer();
}

/* Sizes of structs, magic numbers, settings. */
static void change_struct(struct calls *c)
{
    switch (draw() % 8) {
    case 0:
        change_word(&c->args.config, sizeof(c->args.config));
        break;
    case 1:
        change_word(&c->args.cconfig, sizeof(c->args.cconfig));
        break;
    case 2:
        change_word(&c->handle, sizeof(c->handle));
        break;
    case 3:
        change_word(&c->complete, sizeof(c->complete));
        change_word(&c->alloc, sizeof(c->alloc));
        break;
    case 4:
        change_word(&c->args.info, 8);
        c->args.info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)number();
        break;
    case 5:
        change_word(draw() % 2 ? (void *)&c->args.in : (void *)&c->args.out, 8);
        break;
    case 6:
        change_word(draw() % 2 ? (void *)&c->args.cin : (void *)&c->args.cout, 8);
        break;
    default:
        c->layout = (int)number();
        c->topk = (int)number();
    }
}

/* Not alloc: a function that is none is not found out. */
static void change_group(struct calls *c)
{
    if (draw() % 2)
        change_word(&c->group, offsetof(ncclEpGroupConfig_t, alloc));
    else
        change_word((char *)&c->group + offsetof(ncclEpGroupConfig_t, enable_mask),
                    sizeof(c->group) - offsetof(ncclEpGroupConfig_t, enable_mask));
}

static void change(struct calls *c)
{
    switch (draw() % 4) {
    case 0:
    case 1:
        change_tensor(c);
        break;
    case 2:
        change_link(c);
        break;
    default:
        change_struct(c);
    }
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

struct session {
    ncclComm_t comm;
    cudaStream_t stream;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    int kind;
};

static int is_code(ncclResult_t result)
{
    return (int)result >= 0 && (int)result < (int)ncclNumResults;
}

static ncclResult_t call_other(struct session *s, struct calls *c)
{
    ncclEpHandle_t handle = NULL;
    ncclEpTensor_t *made = NULL;
    size_t bytes = 0;
    ncclResult_t result;

    switch (draw() % 5) {
    case 0:
        return ncclEpHandleMemSize(s->group, (ncclEpLayout_t)c->layout, &c->handle, draw() % 4 ? &bytes : pointer(),
                                   c->topk);
    case 1:
        result = ncclEpInitHandle(&handle, s->group, (ncclEpLayout_t)c->layout, &c->handle, c->topk,
                                  draw() % 2 ? c->memory : NULL);
        return result == ncclSuccess ? ncclEpHandleDestroy(handle) : result;
    case 2:
        result = ncclEpCreateHandle(&handle, s->group, (ncclEpLayout_t)c->layout, c->idx, &c->args.info, &c->handle,
                                    s->stream);
        (void)cudaStreamSynchronize(s->stream);
        return result == ncclSuccess ? ncclEpHandleDestroy(handle) : result;
    case 3:
        result = ncclEpTensorAlloc(&made, (unsigned int)number() % 9, (ncclDataType_t)number(), c->tensors.sizes[0],
                                   &c->alloc);
        return result == ncclSuccess ? ncclEpTensorDestroy(made) : result;
    default:
        return ncclEpTensorDestroy(draw() % 2 ? pointer() : (void *)&c->tensors.t[0]);
    }
}

static ncclResult_t call_masks(struct session *s)
{
    static int mask[1]; /* the stream writes it, later */

    mask[0] = 1;
    switch (draw() % 5) {
    case 0:
        return ncclEpMaskQuery(s->group, draw() % 2 ? mask : pointer(), s->stream);
    case 1:
        return ncclEpMaskUpdate(s->group, draw() % 2 ? mask : pointer(), s->stream);
    case 2:
        return ncclEpGetAsyncError(s->group, draw() % 2 ? mask : (int *)(void *)read_only);
    case 3:
        return ncclEpMaskQuery(pointer(), mask, s->stream);
    default:
        return ncclEpComplete(pointer(), NULL, s->stream);
    }
}

/* A group of nonsense; small enough to be made, or refused. */
static ncclResult_t call_group(struct session *s, struct calls *c)
{
    ncclEpGroup_t group = NULL;
    ncclResult_t result;

    change_group(c);
    if (c->group.max_dispatch_tokens_per_rank > 1024 || c->group.max_recv_tokens_per_rank > 4096 ||
        c->group.max_token_bytes > 65536 || c->group.num_experts > 4096)
        c->group.magic ^= draw() % 2; /* these need gigabytes: refused in any case, or by chance */
    if (c->group.magic == NCCL_EP_MAGIC &&
        (c->group.max_dispatch_tokens_per_rank > 1024 || c->group.max_token_bytes > 65536 ||
         c->group.num_experts > 4096 || c->group.max_recv_tokens_per_rank > 4096))
        return ncclSuccess;
    result = ncclEpCreateGroup(&group, s->comm, &c->group);
    return result == ncclSuccess ? ncclEpGroupDestroy(group) : result;
}

static ncclResult_t call_random(struct session *s, struct calls *c)
{
    ncclResult_t result;

    switch (draw() % 8) {
    case 0:
        result = ncclEpUpdateHandle(s->handle, c->idx, draw() % 2 ? &c->args.info : NULL, s->stream);
        break;
    case 1:
    case 2:
        result = ncclEpDispatch(s->handle, &c->args.in, &c->args.out, draw() % 4 ? &c->args.info : NULL,
                                &c->args.config, s->stream);
        break;
    case 3:
    case 4:
        result = ncclEpCombine(s->handle, &c->args.cin, &c->args.cout, &c->args.cconfig, s->stream);
        break;
    case 5:
        result = call_other(s, c);
        break;
    case 6:
        result = call_masks(s);
        break;
    default:
        result = call_group(s, c);
    }
    (void)ncclEpComplete(s->handle, NULL, s->stream); /* what was staged by chance */
    (void)cudaStreamSynchronize(s->stream);
    return result;
}

#define TRY(call)                                                                                \
    do {                                                                                         \
        const int result = (int)(call);                                                          \
        if (result) {                                                                            \
            fprintf(stderr, "nccl_ep_nonsense: line %d: " #call ": %d (%s)\n", __LINE__, result, \
                    ncclEpxGetLastError());                                                      \
            return -1;                                                                           \
        }                                                                                        \
    } while (0)

static int open_session(struct session *s, int kind)
{
    struct calls c;

    good_calls(&c, kind);
    s->kind = kind;
    TRY(ncclEpCreateGroup(&s->group, s->comm, &c.group));
    TRY(ncclEpInitHandle(&s->handle, s->group, (ncclEpLayout_t)c.layout, NULL, TOPK, NULL));
    return 0;
}

/* The group still works. */
static int good_round(struct session *s)
{
    struct calls c;
    int error = -1;

    good_calls(&c, s->kind);
    TRY(ncclEpUpdateHandle(s->handle, c.idx, s->kind < 2 ? NULL : &c.args.info, s->stream));
    TRY(ncclEpDispatch(s->handle, &c.args.in, &c.args.out, &c.args.info, &c.args.config, s->stream));
    TRY(ncclEpCombine(s->handle, &c.args.cin, &c.args.cout, &c.args.cconfig, s->stream));
    TRY(cudaStreamSynchronize(s->stream));
    TRY(ncclEpGetAsyncError(s->group, &error));
    TRY(error);
    return 0;
}

static int run_seed(struct session *s, uint64_t seed, int calls)
{
    state = seed * 1000003;
    if (open_session(s, (int)(seed % 4)))
        return -1;
    for (int i = 0; i < calls; i++) {
        struct calls c;
        int changes = 1 + (int)(draw() % 3);
        ncclResult_t result;

        good_calls(&c, s->kind);
        while (changes--)
            change(&c);
        result = call_random(s, &c);
        if (!is_code(result)) {
            fprintf(stderr, "nccl_ep_nonsense: seed %llu call %d returned %d\n", (unsigned long long)seed, i, result);
            return -1;
        }
        if (i % 16 == 0 && good_round(s)) {
            fprintf(stderr, "nccl_ep_nonsense: seed %llu call %d: the group does not work any more\n",
                    (unsigned long long)seed, i);
            return -1;
        }
    }
    TRY(ncclEpHandleDestroy(s->handle));
    TRY(ncclEpGroupDestroy(s->group));
    return 0;
}

int main(int argc, char **argv)
{
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    const int seeds = argc > 2 ? atoi(argv[2]) : 4, calls = argc > 3 ? atoi(argv[3]) : 500;
    struct session s = {0};
    ncclUniqueId id;

    no_access = mmap(NULL, 3 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    read_only = no_access + 2 * 4096;
    TRY(no_access == MAP_FAILED || mprotect(read_only, 4096, PROT_READ));
    for (int i = 0; i < MOST_TENSORS; i++)
        TRY(cudaMalloc((void **)&memory_of[i], SLACK));
    TRY(cudaStreamCreate(&s.stream));
    TRY(ncclGetUniqueId(&id));
    TRY(ncclCommInitRank(&s.comm, 1, id, 0));
    for (uint64_t seed = first; seed < first + (uint64_t)seeds; seed++)
        if (run_seed(&s, seed, calls))
            return 1;
    TRY(ncclCommDestroy(s.comm));
    printf("nccl_ep_nonsense: %d times %d calls from seed %llu: ok\n", seeds, calls, (unsigned long long)first);
    return 0;
}
