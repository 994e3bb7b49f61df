/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups over communicators of a fake NCCL and a fake CUDA driver, both in this program: ranks are threads,
 * device memory is told from the host's, work on a stream is done when it is asked for the second time, and what is
 * copied to the device without a stream comes there late. The library finds both by name, as it would the real ones.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <nccl_ep.h>

enum { N = 3, MOST_BLOCKS = 256, NOT_READY = 600, INVALID = 1 };

#define PLAYED __attribute__((visibility("default")))

static struct stage {
    pthread_mutex_t lock;
    pthread_barrier_t barrier;
    struct {
        char *at;
        size_t bytes;
    } blocks[MOST_BLOCKS];
    int nblocks, contexts, streams, gathers, failures;
    /* How this NCCL behaves. */
    int nonblocking, refuses, never_ends;
    const char *send[N];
} stage = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local int depth; /* of contexts that are current */

static void complain(const char *what)
{
    pthread_mutex_lock(&stage.lock);
    stage.failures++;
    pthread_mutex_unlock(&stage.lock);
    fprintf(stderr, "nccl_ep comm: %s\n", what);
}

#define CHECK(condition)          \
    do {                          \
        if (!(condition))         \
            complain(#condition); \
    } while (0)

/* ---- The driver -------------------------------------------------------------------------------------------------- */

struct copy {
    char *to, *bytes; /* NULL: none */
    size_t count;
};

struct stream {
    int asked;
    struct copy in;
    void *to;
    size_t bytes;
    const struct ncclComm *comm;
};

static int on_device(const void *ptr, size_t bytes)
{
    int found = 0;

    pthread_mutex_lock(&stage.lock);
    for (int i = 0; i < stage.nblocks; i++)
        found |= stage.blocks[i].at && (const char *)ptr >= stage.blocks[i].at &&
                 (const char *)ptr + bytes <= stage.blocks[i].at + stage.blocks[i].bytes;
    pthread_mutex_unlock(&stage.lock);
    return found;
}

static void count(int *number, int by)
{
    pthread_mutex_lock(&stage.lock);
    *number += by;
    pthread_mutex_unlock(&stage.lock);
}

PLAYED int cuInit(unsigned int flags)
{
    return flags ? INVALID : 0;
}

PLAYED int cuDeviceGet(int *device, int ordinal)
{
    *device = 100 + ordinal;
    return 0;
}

PLAYED int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    CHECK((attribute == 16 || attribute == 75 || attribute == 76) && device >= 100); /* SMs, compute capability */
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
    return 0;
}

PLAYED int cuCtxGetDevice(int *device)
{
    (void)device;
    return INVALID;
}

PLAYED int cuDevicePrimaryCtxRetain(void **context, int device)
{
    CHECK(device >= 100);
    *context = &stage;
    count(&stage.contexts, 1);
    return 0;
}

PLAYED int cuDevicePrimaryCtxRelease_v2(int device)
{
    CHECK(device >= 100);
    count(&stage.contexts, -1);
    return 0;
}

PLAYED int cuCtxPushCurrent_v2(void *context)
{
    CHECK(context == &stage);
    depth++;
    return 0;
}

PLAYED int cuCtxPopCurrent_v2(void **context)
{
    *context = &stage;
    depth--;
    return 0;
}

PLAYED int cuMemAlloc_v2(unsigned long long *at, size_t bytes)
{
    char *block = malloc(bytes);

    CHECK(depth == 1 && block);
    pthread_mutex_lock(&stage.lock);
    if (stage.nblocks < MOST_BLOCKS) {
        stage.blocks[stage.nblocks].at = block;
        stage.blocks[stage.nblocks++].bytes = bytes;
    }
    pthread_mutex_unlock(&stage.lock);
    *at = (unsigned long long)(uintptr_t)block;
    return 0;
}

PLAYED int cuMemFree_v2(unsigned long long at)
{
    char *block = (char *)(uintptr_t)at;

    CHECK(depth == 1 && on_device(block, 1));
    pthread_mutex_lock(&stage.lock);
    for (int i = 0; i < stage.nblocks; i++)
        if (stage.blocks[i].at == block)
            stage.blocks[i] = stage.blocks[--stage.nblocks];
    pthread_mutex_unlock(&stage.lock);
    free(block);
    return 0;
}

/* Host memory that is not pinned: read at once, and written when its turn has come. */
static void copy_begin(struct copy *copy, unsigned long long to, const void *from, size_t bytes)
{
    CHECK(depth == 1 && on_device((void *)(uintptr_t)to, bytes) && !on_device(from, bytes) && !copy->bytes);
    *copy = (struct copy){.to = (char *)(uintptr_t)to, .bytes = malloc(bytes), .count = bytes};
    CHECK(copy->bytes);
    memcpy(copy->bytes, from, bytes);
}

static void copy_end(struct copy *copy)
{
    if (copy->bytes)
        memcpy(copy->to, copy->bytes, copy->count);
    free(copy->bytes);
    copy->bytes = NULL;
}

static _Thread_local struct copy late; /* of no stream that somebody asks for */

PLAYED int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes)
{
    copy_begin(&late, to, from, bytes);
    return 0;
}

PLAYED int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *stream)
{
    CHECK(stream != NULL);
    copy_begin(&((struct stream *)stream)->in, to, from, bytes);
    return 0;
}

PLAYED int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes)
{
    CHECK(depth == 1 && on_device((void *)(uintptr_t)from, bytes) && !on_device(to, bytes));
    copy_end(&late);
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return 0;
}

PLAYED int cuStreamCreate(void **stream, unsigned int flags)
{
    CHECK(depth == 1 && flags == 1);
    *stream = calloc(1, sizeof(struct stream));
    count(&stage.streams, 1);
    return 0;
}

PLAYED int cuStreamDestroy_v2(void *stream)
{
    copy_end(&((struct stream *)stream)->in);
    free(stream);
    count(&stage.streams, -1);
    return 0;
}

/* ---- NCCL -------------------------------------------------------------------------------------------------------- */

struct ncclComm {
    int rank;
    int busy;
};

/* Work that was queued is done here. */
PLAYED int cuStreamQuery(void *stream)
{
    struct stream *s = stream;

    if (stage.never_ends || !s->asked++)
        return NOT_READY;
    copy_end(&s->in);
    if (s->to) {
        pthread_barrier_wait(&stage.barrier);
        for (int r = 0; r < N; r++)
            memcpy((char *)s->to + (size_t)r * s->bytes, stage.send[r], s->bytes);
        pthread_barrier_wait(&stage.barrier); /* everybody has read */
        s->to = NULL;
    }
    return 0;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *ranks)
{
    (void)comm;
    *ranks = N;
    return ncclSuccess;
}

PLAYED ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    *device = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    *error = comm->busy-- > 0 ? ncclInProgress : ncclSuccess;
    return ncclSuccess;
}

PLAYED ncclResult_t ncclAllGather(const void *send, void *recv, size_t bytes, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream)
{
    struct stream *s = (struct stream *)stream;

    CHECK(type == ncclUint8 && s && depth == 1);
    CHECK(on_device(send, bytes) && on_device(recv, bytes * N));
    if (stage.refuses)
        return ncclUnhandledCudaError;
    stage.send[comm->rank] = send;
    s->to = recv;
    s->bytes = bytes;
    count(&stage.gathers, 1);
    comm->busy = stage.nonblocking ? 3 : 0;
    return stage.nonblocking ? ncclInProgress : ncclSuccess;
}

/* ---- The tests --------------------------------------------------------------------------------------------------- */

static ncclEpGroupConfig_t make_config(void)
{
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;

    config.num_experts = 2 * N;
    config.max_dispatch_tokens_per_rank = 4;
    config.max_token_bytes = 64;
    config.timeout_ns = stage.never_ends ? 200000000u : 0;
    return config;
}

/* A window: this NCCL cannot say where it is. */
static void use_window(ncclEpGroup_t group)
{
    size_t sizes[2] = {4, 2};
    ncclEpTensor_t idx = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt64, .sizes = sizes};
    ncclEpHandle_t handle;

    CHECK(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_RANK_MAJOR, NULL, 2, NULL) == ncclSuccess);
    idx.win_hdl = (ncclWindow_t)&stage;
    CHECK(ncclEpUpdateHandle(handle, &idx, NULL, NULL) == ncclInvalidUsage);
    CHECK(strstr(ncclEpxGetLastError(), "set data as well") != NULL);
}

static void *run_rank(void *arg)
{
    struct ncclComm comm = {.rank = *(int *)arg};
    const ncclEpGroupConfig_t config = make_config();
    const int fails = stage.refuses || stage.never_ends;
    ncclEpGroup_t group = NULL;
    const ncclResult_t result = ncclEpCreateGroup(&group, &comm, &config);
    int error = -1;

    if (result != (fails ? ncclRemoteError : ncclSuccess))
        complain(ncclEpxGetLastError());
    CHECK(depth == 0);
    if (!group)
        return NULL;
    use_window(group);
    CHECK(ncclEpxGetAsyncError(group, &error) == ncclSuccess && !error);
    CHECK(ncclEpGroupDestroy(group) == ncclSuccess);
    return NULL;
}

static void run_ranks(const char *name)
{
    const int before = stage.failures;
    pthread_t threads[N];
    int ranks[N];

    stage.gathers = 0;
    for (int r = 0; r < N; r++) {
        ranks[r] = r;
        CHECK(!pthread_create(&threads[r], NULL, run_rank, &ranks[r]));
    }
    for (int r = 0; r < N; r++)
        pthread_join(threads[r], NULL);
    CHECK(stage.contexts == 0);
    if (!stage.never_ends && !stage.refuses)
        CHECK(stage.nblocks == 0 && stage.streams == 0 && stage.gathers >= N);
    printf("nccl_ep comm: %s: %s\n", name, stage.failures == before ? "ok" : "FAILED");
}

/* A communicator of the stand-in, which is opened out of sight, beside this program's NCCL: as in a process of torch,
 * which brings NCCL along, on a machine without a GPU. */
static void run_beside(const char *standin)
{
    const int before = stage.failures;
    void *library = dlopen(standin, RTLD_NOW | RTLD_LOCAL);
    ncclResult_t (*get_id)(ncclUniqueId * id) = NULL;
    ncclResult_t (*init)(ncclComm_t * comm, int nranks, ncclUniqueId id, int rank) = NULL;
    ncclResult_t (*destroy)(ncclComm_t comm) = NULL;
    ncclEpGroupConfig_t config = make_config();
    ncclEpGroup_t group = NULL;
    ncclComm_t comm = NULL;
    ncclUniqueId id;

    if (library) {
        *(void **)&get_id = dlsym(library, "ncclGetUniqueId");
        *(void **)&init = dlsym(library, "ncclCommInitRank");
        *(void **)&destroy = dlsym(library, "ncclCommDestroy");
    }
    if (!get_id || !init || !destroy) {
        complain("the stand-in cannot be opened");
        return;
    }
    stage.gathers = 0;
    config.num_experts = 2;
    CHECK(get_id(&id) == ncclSuccess && init(&comm, 1, id, 0) == ncclSuccess);
    if (ncclEpCreateGroup(&group, comm, &config) != ncclSuccess)
        complain(ncclEpxGetLastError());
    else
        CHECK(ncclEpGroupDestroy(group) == ncclSuccess);
    CHECK(stage.gathers == 0 && destroy(comm) == ncclSuccess);
    printf("nccl_ep comm: the stand-in's, beside another NCCL: %s\n", stage.failures == before ? "ok" : "FAILED");
}

int main(int argc, char **argv)
{
    setenv("EPX_DEVICE", "cpu", 1); /* the communicators are of GPUs, the groups are not */
    setenv("EPX_LOG", "none", 0);
    setenv("EPX_ALLOC_BYTES", "1M", 0);
    pthread_barrier_init(&stage.barrier, NULL, N);
    run_ranks("gathers through device memory");
    stage.nonblocking = 1;
    run_ranks("a communicator that does not block");
    stage.nonblocking = 0;
    stage.refuses = 1;
    run_ranks("one that refuses");
    stage.refuses = 0;
    stage.never_ends = 1;
    run_ranks("one that never ends");
    stage.never_ends = 0;
    if (argc > 1)
        run_beside(argv[1]);
    return stage.failures != 0;
}
