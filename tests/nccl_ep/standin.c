/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for NCCL: ids that one rank makes for all, several communicators, what is refused. */
#include <nccl_device.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_case.h"

/* A communicator of all ranks by an id of rank 0's own, which the others get through the first communicator. */
static int second_communicator(ncclComm_t *comm)
{
    ncclUniqueId mine, *all = calloc((size_t)world.nranks, sizeof(*all));
    const char *where = getenv("NCCL_COMM_ID");
    char *kept = where ? strdup(where) : NULL;
    int rc;

    CHECK(all && kept);
    unsetenv("NCCL_COMM_ID");
    TRY(ncclGetUniqueId(&mine));
    TRY(setenv("NCCL_COMM_ID", kept, 1));
    TRY(epxNcclHostAllGather(world.comm, &mine, all, sizeof(mine)));
    for (int r = 1; r < world.nranks; r++)
        CHECK(memcmp(&all[0], &all[r], sizeof(mine)) != 0); /* no two are the same */
    rc = (int)ncclCommInitRank(comm, world.nranks, all[0], world.rank);
    free(all);
    free(kept);
    TRY(rc);
    return 0;
}

static int gather_in_turn(ncclComm_t a, ncclComm_t b)
{
    int all[64];

    CHECK(world.nranks <= 64);
    for (int i = 0; i < 20; i++) {
        const int mine = 100 * i + world.rank;

        TRY(epxNcclHostAllGather(i % 2 ? a : b, &mine, all, sizeof(mine)));
        for (int r = 0; r < world.nranks; r++)
            CHECK(all[r] == 100 * i + r);
    }
    return 0;
}

static int test_refused(ncclComm_t comm)
{
    ncclUniqueId id = {{0}};
    ncclComm_t none;
    ncclWindow_t window;
    ncclResult_t error = ncclInternalError;
    void *ptr;
    int number;

    EXPECT(ncclInvalidArgument, ncclGetUniqueId(NULL));
    EXPECT(ncclInvalidArgument, ncclCommInitRank(&none, 1, id, 0));
    TRY(ncclGetUniqueId(&id));
    EXPECT(ncclInvalidArgument, ncclCommInitRank(&none, 2, id, 2));
    EXPECT(ncclInvalidArgument, ncclCommInitRank(NULL, 1, id, 0));
    CHECK(strstr(ncclGetLastError(NULL), "expected a pointer") != NULL);
    EXPECT(ncclInvalidArgument, ncclCommCount(NULL, &number));
    EXPECT(ncclInvalidArgument, ncclCommUserRank(comm, NULL));
    EXPECT(ncclInvalidArgument, ncclCommDestroy((ncclComm_t)&id));
    EXPECT(ncclInvalidArgument, ncclMemAlloc(NULL, 1));
    EXPECT(ncclInvalidArgument, ncclCommWindowRegister(comm, NULL, 1, &window, 0));
    EXPECT(ncclInvalidArgument, ncclCommWindowDeregister(comm, (ncclWindow_t)&id));
    TRY(ncclMemAlloc(&ptr, 100));
    TRY(ncclCommWindowRegister(comm, ptr, 100, &window, NCCL_WIN_DEFAULT));
    EXPECT(ncclInvalidArgument, ncclCommWindowDeregister(world.comm, window)); /* of another communicator */
    TRY(ncclCommWindowDeregister(comm, window));
    TRY(ncclMemFree(ptr));
    EXPECT(ncclInvalidArgument, ncclMemFree(ptr)); /* again */
    EXPECT(ncclInvalidArgument, ncclMemFree(&id));
    TRY(ncclMemFree(NULL));
    TRY(ncclCommGetAsyncError(comm, &error));
    CHECK(error == ncclSuccess && strlen(ncclGetErrorString(ncclRemoteError)) > 0);
    return 0;
}

/* What Python's packages make communicators with, and the teams that programs ask for. */
static int test_scalable(ncclUniqueId *all)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER, wrong = NCCL_CONFIG_INITIALIZER;
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    const int node = world.ranks_per_node ? world.ranks_per_node : world.nranks;
    ncclComm_t comm;
    int device = -1;

    wrong.magic = 0;
    EXPECT(ncclInvalidArgument, ncclCommInitRankScalable(&comm, world.nranks, world.rank, 0, all, NULL));
    EXPECT(ncclInvalidArgument, ncclCommInitRankScalable(&comm, world.nranks, world.rank, 1, NULL, NULL));
    EXPECT(ncclInvalidArgument, ncclCommInitRankScalable(&comm, world.nranks, world.rank, 1, all, &wrong));
    TRY(ncclCommInitRankScalable(&comm, world.nranks, world.rank, 1, all, &config));
    CHECK(ncclTeamWorld(comm).nRanks == world.nranks && ncclTeamWorld(comm).rank == world.rank);
    CHECK(ncclTeamLsa(comm).nRanks == node && ncclTeamLsa(comm).rank == world.rank % node);
    CHECK(ncclTeamLsa(NULL).nRanks == 0);
    CHECK(ncclTeamRankToWorld(comm, ncclTeamLsa(comm), 0) == world.rank / node * node);
    TRY(ncclCommCuDevice(comm, &device));
    CHECK(device >= 0);
    TRY(ncclCommQueryProperties(comm, &properties));
    CHECK(properties.rank == world.rank && properties.nRanks == world.nranks &&
          properties.nLsaTeams == world.nranks / node);
    properties.magic = 0;
    EXPECT(ncclInvalidArgument, ncclCommQueryProperties(comm, &properties));
    TRY(ncclCommDestroy(comm));
    return 0;
}

int test_standin(void)
{
    ncclUniqueId id;
    ncclComm_t comm;
    int number;

    TRY(ncclGetUniqueId(&id)); /* of NCCL_COMM_ID: the same on all ranks */
    if (test_scalable(&id) || second_communicator(&comm) || gather_in_turn(world.comm, comm) || test_refused(comm))
        return -1;
    EXPECT(ncclInvalidArgument, ncclGetVersion(NULL));
    TRY(ncclGetVersion(&number));
    CHECK(number == NCCL_VERSION_CODE && number >= 23004); /* what programs for NCCL EP 0.2.0 want */
    TRY(ncclCommFinalize(comm));
    TRY(ncclCommAbort(comm));
    EXPECT(ncclInvalidArgument, ncclCommAbort(comm));
    EXPECT(ncclInvalidArgument, ncclCommCount(comm, &number));
    return 0;
}
