/* SPDX-License-Identifier: Apache-2.0 */
/* A receive tensor whose first rows are in one kind of memory and the others in another, at neighbouring addresses: on
 * a GPU, its own memory and then the host's; on the CPU, a file in memory and then anonymous pages. */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "small.h"

struct span {
    char *base;
    size_t half; /* bytes of each part */
};

#ifdef CUDA_VERSION /* NVIDIA's own cuda.h */
#define FIND(name) find(driver, #name, &name##_)

static int find(void *driver, const char *name, void *function)
{
    void *at = dlsym(driver, name);

    memcpy(function, &at, sizeof(at));
    return at != NULL;
}

static int map_part(void *driver, CUdeviceptr at, size_t bytes, CUmemLocationType where, int id, int device)
{
    CUresult (*cuMemCreate_)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long) =
        NULL;
    CUresult (*cuMemMap_)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) = NULL;
    CUresult (*cuMemSetAccess_)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) = NULL;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = where, .id = id}};
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;

    CHECK(FIND(cuMemCreate) && FIND(cuMemMap) && FIND(cuMemSetAccess));
    TRY(cuMemCreate_(&handle, bytes, &prop, 0));
    TRY(cuMemMap_(at, bytes, 0, handle, 0));
    TRY(cuMemSetAccess_(at, bytes, &access, 1));
    return 0;
}

/* Freed with the process. */
static int span_open(struct span *s, size_t bytes)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CUresult (*cuMemAddressReserve_)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long) = NULL;
    CUdeviceptr at = 0;
    int device = 0;

    CHECK(driver && FIND(cuMemAddressReserve));
    TRY(cudaGetDevice(&device));
    s->half = (bytes + (2u << 20) - 1) / (2u << 20) * (2u << 20);
    TRY(cuMemAddressReserve_(&at, 2 * s->half, 0, 0, 0));
    s->base = (char *)(uintptr_t)at;
    return map_part(driver, at, s->half, CU_MEM_LOCATION_TYPE_DEVICE, device, device) ||
                   map_part(driver, at + s->half, s->half, CU_MEM_LOCATION_TYPE_HOST_NUMA, 0, device)
               ? -1
               : 0;
}
#else
static int span_open(struct span *s, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const int fd = memfd_create("elastic", 0);

    s->half = (bytes + page - 1) / page * page;
    CHECK(fd >= 0 && ftruncate(fd, (off_t)s->half) == 0);
    s->base = mmap(NULL, 2 * s->half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(s->base != MAP_FAILED);
    CHECK(mmap(s->base, s->half, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == s->base);
    CHECK(close(fd) == 0);
    return 0;
}
#endif

/* 16 rows around the border: dispatch writes them, combine reads them. */
static int test_layout(ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(HT, 16);
    const int to = 2 * ((world.rank + 1) % world.nranks), ids[] = {to, to, to, to};
    struct tensor_pair out;
    struct span span;
    struct small s;

    if (small_open(&s, &config, layout, 1, 1, 16, PLAIN) || small_route(&s, ids, 4) || span_open(&span, 4096))
        return -1;
    out = s.out;
    s.out.data = span.base + span.half - 2 * SMALL_HIDDEN * 2; /* two rows here, the others there */
    s.out.tensor->data = s.out.data;
    for (int round = 0; round < 3; round++) {
        if (small_dispatch(&s, 0x5a) || small_combine(&s, 0))
            return -1;
        for (int t = 0; t < 4; t++) {
            CHECK(small_row(&s.out, t) == small_value((world.rank + world.nranks - 1) % world.nranks, t));
            CHECK(small_row(&s.back, t) == small_value(world.rank, t));
        }
    }
    s.out.data = out.data;
    return small_close(&s);
}

int test_elastic(void)
{
    return test_layout(FLAT) || test_layout(EXPERT_MAJOR) ? -1 : 0;
}
