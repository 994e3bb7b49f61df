/* SPDX-License-Identifier: Apache-2.0 */
/* Which ranks of a communicator share a machine, and what else it says about itself. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "standin/standin.h"
#include "util/descriptor.h"
#include "util/env.h"

/* Equal where ranks may map each other's memory: as the CPU device says it (device/cpu/device.c). */
struct machine {
    char boot[40];
    uint64_t pid_namespace, user_namespace;
    int32_t user, ranks_per_node;
};

static uint64_t inode_of(const char *path)
{
    struct stat info;

    return stat(path, &info) ? 0 : (uint64_t)info.st_ino;
}

static struct machine this_machine(int rank)
{
    struct machine machine = {.user = (int32_t)geteuid()};
    FILE *file = fd_open_file("/proc/sys/kernel/random/boot_id");

    if (!file || !fgets(machine.boot, sizeof(machine.boot), file))
        snprintf(machine.boot, sizeof(machine.boot), "rank %d", rank); /* not known: as another machine's */
    if (file)
        fclose(file);
    machine.pid_namespace = inode_of("/proc/self/ns/pid");
    machine.user_namespace = inode_of("/proc/self/ns/user");
    machine.ranks_per_node = (int32_t)env_int("EPX_RANKS_PER_NODE", 0, 1, 1 << 20);
    return machine;
}

static int same_node(const struct machine *all, int a, int b)
{
    const int cut = all[0].ranks_per_node;

    return !memcmp(&all[a], &all[b], sizeof(all[a])) && (!cut || a / cut == b / cut);
}

static void count_teams(struct ncclComm *comm, const struct machine *all)
{
    comm->lsa_ranks = comm->lsa_place = comm->lsa_teams = 0;
    for (int r = 0; r < comm->nranks; r++) {
        int first = 0;

        while (!same_node(all, first, r))
            first++;
        comm->lsa_teams += first == r;
        if (same_node(all, comm->rank, r)) {
            comm->lsa_ranks++;
            comm->lsa_place += r < comm->rank;
        }
    }
}

ncclResult_t comm_find_teams(struct ncclComm *comm)
{
    const struct machine mine = this_machine(comm->rank);
    struct machine *all = calloc((size_t)comm->nranks, sizeof(*all));
    int rc;

    if (!all)
        return standin_fail(ncclSystemError, "ncclCommInitRank: no memory for %d ranks", comm->nranks);
    rc = epxNcclHostAllGather(comm, &mine, all, sizeof(mine));
    if (!rc)
        count_teams(comm, all);
    free(all);
    return rc ? standin_fail(ncclRemoteError, "ncclCommInitRank: rank %d: the ranks could not exchange where they are",
                             comm->rank)
              : ncclSuccess;
}

/* ---- Teams ------------------------------------------------------------------------------------------------------- */

static const ncclTeam_t nobody = {0, 0, 0};

ncclTeam_t ncclTeamWorld(ncclComm_t comm)
{
    return comm_need(comm, "ncclTeamWorld") ? nobody : (ncclTeam_t){comm->nranks, comm->rank, 1};
}

ncclTeam_t ncclTeamLsa(ncclComm_t comm)
{
    return comm_need(comm, "ncclTeamLsa") ? nobody : (ncclTeam_t){comm->lsa_ranks, comm->lsa_place, 1};
}

ncclTeam_t ncclTeamRail(ncclComm_t comm)
{
    if (comm_need(comm, "ncclTeamRail"))
        return nobody;
    return (ncclTeam_t){comm->nranks / comm->lsa_ranks, comm->rank / comm->lsa_ranks, comm->lsa_ranks};
}

int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t of, int rank)
{
    return comm_need(comm, "ncclTeamRankToWorld") == ncclSuccess ? comm->rank + (rank - of.rank) * of.stride : -1;
}

int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t of, int rank)
{
    return comm_need(comm, "ncclTeamRankToLsa") == ncclSuccess ? comm->lsa_place + (rank - of.rank) * of.stride : -1;
}

/* ---- Properties -------------------------------------------------------------------------------------------------- */

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    ncclResult_t result = comm_need(comm, "ncclCommCuDevice");

    if (result == ncclSuccess && !device)
        result = standin_fail(ncclInvalidArgument, "ncclCommCuDevice: device: expected a pointer, got NULL");
    if (result == ncclSuccess)
        *device = comm->device < 0 ? 0 : comm->device;
    return result;
}

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t *properties)
{
    ncclResult_t result = comm_need(comm, "ncclCommQueryProperties");
    ncclCommProperties_t own = NCCL_COMM_PROPERTIES_INITIALIZER;
    const size_t header = offsetof(ncclCommProperties_t, rank);
    size_t bytes;

    if (result != ncclSuccess)
        return result;
    if (!properties || properties->magic != NCCL_API_MAGIC || properties->size < header)
        return standin_fail(ncclInvalidArgument, "ncclCommQueryProperties: expected NCCL_COMM_PROPERTIES_INITIALIZER");
    own.rank = comm->rank;
    own.nRanks = comm->nranks;
    own.cudaDev = own.nvmlDev = comm->device < 0 ? 0 : comm->device;
    own.nLsaTeams = comm->lsa_teams;
    own.commHash = comm->job;
    bytes = properties->size < sizeof(own) ? properties->size : sizeof(own);
    memcpy((char *)properties + header, (char *)&own + header, bytes - header);
    return ncclSuccess;
}
