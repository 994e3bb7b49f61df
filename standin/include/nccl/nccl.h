/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for nccl.h on machines without NCCL, and where ranks share a GPU, which NCCL refuses: as much of it as
 * programs for nccl_ep.h need to make communicators. Link libepx_nccl.so. There are no collectives.
 *
 * The ranks meet over TCP. An id of ncclGetUniqueId names a port of the machine it was made on, which must be rank 0's;
 * with NCCL_COMM_ID=HOST:PORT every rank may make the id by itself. Values are those of NCCL's own header.
 */
#ifndef EPX_STANDIN_NCCL_H
#define EPX_STANDIN_NCCL_H

#include <cuda_runtime.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#define NCCL_MAJOR 2
#define NCCL_MINOR 30 /* programs for NCCL EP 0.2.0 want 2.30.4 */
#define NCCL_PATCH 4
#define NCCL_SUFFIX "-epx"
#define NCCL_VERSION_CODE 23004
#define NCCL_VERSION(X, Y, Z) (((X) <= 2 && (Y) <= 8) ? (X)*1000 + (Y)*100 + (Z) : (X)*10000 + (Y)*100 + (Z))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
#define NCCL_COMM_NULL NULL
#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
} ncclResult_t;

typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12
} ncclDataType_t;

/* Read for its size and magic number alone: a communicator here has no settings. */
typedef struct ncclConfig_v22800 {
    size_t size;
    unsigned int magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
} ncclConfig_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_API_MAGIC 0xcafebeefu
#define NCCL_CONFIG_INITIALIZER                                                                                     \
    {                                                                                                               \
        sizeof(ncclConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, INT_MIN, INT_MIN, INT_MIN, INT_MIN, NULL, INT_MIN, \
            INT_MIN, NULL, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN                                     \
    }

/* As NCCL 2.29 began it; what a caller's own has beyond is not written. */
typedef struct ncclCommProperties_v22900 {
    size_t size;
    unsigned int magic, version;
    int rank, nRanks, cudaDev, nvmlDev;
    unsigned char deviceApiSupport, multimemSupport;
    int ginType, nLsaTeams;
    unsigned char hostRmaSupport;
    int railedGinType;
    uint64_t commHash;
} ncclCommProperties_t;

#define NCCL_COMM_PROPERTIES_INITIALIZER                                                                 \
    {                                                                                                    \
        sizeof(ncclCommProperties_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

/* nRanks ranks, every stride-th of the communicator; `rank` is one's own among them. */
typedef struct ncclTeam {
    int nRanks, rank, stride;
} ncclTeam_t;

#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

#if defined(__GNUC__)
#define EPX_STANDIN_API __attribute__((visibility("default")))
#else
#define EPX_STANDIN_API
#endif

EPX_STANDIN_API ncclResult_t ncclGetVersion(int *version);
EPX_STANDIN_API ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
/* Collective. Fails after EPX_BOOT_TIMEOUT_MS (100 s) naming the ranks that did not come: ncclGetLastError. */
EPX_STANDIN_API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank);
EPX_STANDIN_API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                                    ncclConfig_t *config);
/* All ranks connect by the first id, which must be rank 0's. */
EPX_STANDIN_API ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int nId,
                                                      ncclUniqueId *ids, ncclConfig_t *config);
EPX_STANDIN_API ncclResult_t ncclCommFinalize(ncclComm_t comm);
EPX_STANDIN_API ncclResult_t ncclCommDestroy(ncclComm_t comm);
EPX_STANDIN_API ncclResult_t ncclCommAbort(ncclComm_t comm);
EPX_STANDIN_API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
EPX_STANDIN_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);
EPX_STANDIN_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
/* properties.size, magic and version are the caller's. */
EPX_STANDIN_API ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t *properties);
/* All ranks; those that load and store each other's memory (one machine, or EPX_RANKS_PER_NODE of it); those with the
 * same place in other such teams. Of no communicator: no ranks. */
EPX_STANDIN_API ncclTeam_t ncclTeamWorld(ncclComm_t comm);
EPX_STANDIN_API ncclTeam_t ncclTeamLsa(ncclComm_t comm);
EPX_STANDIN_API ncclTeam_t ncclTeamRail(ncclComm_t comm);
EPX_STANDIN_API int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank);
EPX_STANDIN_API int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank);
EPX_STANDIN_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
EPX_STANDIN_API const char *ncclGetErrorString(ncclResult_t result);
/* The sentence of the last failed call of this thread; comm is not looked at. */
EPX_STANDIN_API const char *ncclGetLastError(ncclComm_t comm);
/* Memory of the device that EPX_DEVICE names: of the current GPU (cuda), else of the host. */
EPX_STANDIN_API ncclResult_t ncclMemAlloc(void **ptr, size_t size);
EPX_STANDIN_API ncclResult_t ncclMemFree(void *ptr);
/* A window is a name for memory; nothing is registered with anybody. */
EPX_STANDIN_API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                                    int flags);
EPX_STANDIN_API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
EPX_STANDIN_API ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **ptr);

/* What EPX's nccl_ep asks of a stand-in. All ranks: each gives `bytes` of host memory, and receives all of them in rank
 * order. Nonzero: failed, or comm is none of this library's (known without waiting where bytes is 0). */
EPX_STANDIN_API int epxNcclHostAllGather(ncclComm_t comm, const void *send, void *recv, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
