/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of the tests of nccl_ep.h: a program for NCCL EP as users write them, started on several ranks by
 * tests/scripts/nccl_ep.sh (CPU device) and scripts/gpu.sh (GPU).
 * usage: nccl_ep_ranks layouts|misuse|masks|standin|runtime...
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epx/epx.h"
#include "small.h"

struct world world;

static int number(const char *name, int fallback)
{
    const char *text = getenv(name);

    return text && text[0] ? atoi(text) : fallback;
}

static int open_world(void)
{
    char where[600];
    epx_world launched = EPX_WORLD_INIT;
    ncclUniqueId id;
    int count = 0, rank = -1, devices = 0, major = 0;

    TRY(epx_world_query(&launched));
    world.rank = launched.rank;
    world.nranks = launched.nranks;
    world.ranks_per_node = number("EPX_RANKS_PER_NODE", 0);
    snprintf(where, sizeof(where), "%s:%d", world.nranks > 1 ? launched.host : "127.0.0.1",
             world.nranks > 1 ? launched.port : 29500);
    setenv("NCCL_COMM_ID", where, 0);
    TRY(cudaGetDeviceCount(&devices));
    TRY(cudaSetDevice(world.rank % devices));
    TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, world.rank % devices));
    CHECK(major >= 8);
    TRY(cudaStreamCreate(&world.stream));
    TRY(cudaStreamCreateWithFlags(&world.other, cudaStreamNonBlocking));
    TRY(ncclGetUniqueId(&id));
    TRY(ncclCommInitRank(&world.comm, world.nranks, id, world.rank));
    TRY(ncclCommCount(world.comm, &count));
    TRY(ncclCommUserRank(world.comm, &rank));
    CHECK(count == world.nranks && rank == world.rank);
    return 0;
}

static int close_world(void)
{
    TRY(cudaStreamDestroy(world.other));
    TRY(cudaStreamDestroy(world.stream));
    TRY(ncclCommDestroy(world.comm));
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(void);
    } parts[] = {
#ifndef EPX_REAL_NCCL /* scripts/gpu_nccl.sh compiles this program for NCCL itself */
        {"layouts", test_layouts}, {"misuse", test_misuse}, {"masks", test_masks},     {"standin", test_standin},
        {"rules", test_rules},     {"drop", test_drop},     {"recipes", test_recipes}, {"eager", test_eager},
        {"memory", test_memory},   {"nvfp4", test_nvfp4},   {"elastic", test_elastic}, {"pinned", test_pinned},
        {"counts", test_counts},   {"mxfp8", test_mxfp8},
#endif
        {"runtime", test_runtime}};

    if (open_world())
        return 1;
    for (int i = 1; i < argc; i++) {
        size_t p = 0;

        while (p < sizeof(parts) / sizeof(parts[0]) && strcmp(argv[i], parts[p].name))
            p++;
        if (p == sizeof(parts) / sizeof(parts[0])) {
            fprintf(
                stderr,
                "nccl_ep: no part \"%s\"; there are layouts, misuse, masks, standin, runtime, rules, drop, recipes, "
                "eager, memory, nvfp4, elastic, pinned, counts, mxfp8\n",
                argv[i]);
            return 2;
        }
        if (parts[p].run()) {
            fprintf(stderr, "nccl_ep: rank %d: %s FAILED\n", world.rank, argv[i]);
            return 1;
        }
        printf("nccl_ep: rank %d: %s ok\n", world.rank, argv[i]);
    }
    return close_world() ? 1 : 0;
}
