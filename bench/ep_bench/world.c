/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "ep_bench.h"
#include "epx/epx.h"

struct world world;

void failed(const char *call, int result, const char *why)
{
    fprintf(stderr, "epx ep-bench: rank %d: %s: %d: %s\n", world.rank, call, result, why);
    exit(EXIT_BAD);
}

void world_open(void)
{
    epx_world launched = EPX_WORLD_INIT;
    char where[600];
    ncclUniqueId id;
    int devices = 0;

    if (epx_world_query(&launched) != EPX_OK)
        failed("epx_world_query", 0, epx_last_error());
    world.rank = launched.rank;
    world.nranks = launched.nranks;
    snprintf(where, sizeof(where), "%s:%d", world.nranks > 1 ? launched.host : "127.0.0.1",
             world.nranks > 1 ? launched.port : 29500);
    setenv("NCCL_COMM_ID", where, 0);
    CUDA(cudaGetDeviceCount(&devices));
    CUDA(cudaSetDevice((launched.local_rank >= 0 ? launched.local_rank : world.rank) % devices));
    CUDA(cudaStreamCreate(&world.stream));
    if (ncclGetUniqueId(&id) != ncclSuccess ||
        ncclCommInitRank(&world.comm, world.nranks, id, world.rank) != ncclSuccess)
        failed("ncclCommInitRank", 0, ncclGetLastError(NULL));
    world.lsa_ranks = ncclTeamLsa(world.comm).nRanks;
}

void world_close(void)
{
    CUDA(cudaStreamDestroy(world.stream));
    NCCL(ncclCommDestroy(world.comm));
}

void world_gather(double mine, double *all)
{
    if (epxNcclHostAllGather(world.comm, &mine, all, sizeof(mine)))
        failed("gathering a number of every rank", 0, ncclGetLastError(NULL));
}

void world_barrier(void)
{
    double *all = malloc((size_t)world.nranks * sizeof(*all));

    if (!all)
        failed("malloc", 0, "no memory");
    world_gather(0, all);
    free(all);
}
