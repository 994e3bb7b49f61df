/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libepx_nccl.so: communicators that know their rank, their number, and how to gather bytes of host memory; enough for
 * nccl_ep.h on machines without NCCL. The ranks connect as EPX's do (boot/wire.h), for each communicator anew. An id
 * has the host, the port, and a number that no other communicator has.
 */
#include <nccl.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "boot/allgather.h"
#include "util/clock.h"
#include "util/descriptor.h"
#include "util/env.h"
#include "util/log.h"
#include "util/status.h"
#include "standin/standin.h"

struct id {
    uint64_t magic, job;
    int32_t port;
    char host[NCCL_UNIQUE_ID_BYTES - 20];
};
_Static_assert(sizeof(struct id) == sizeof(ncclUniqueId), "an id carries this");

#define ID_MAGIC 0x4c43434e58504575u

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ncclComm *comms;

int comm_known(const struct ncclComm *comm)
{
    const struct ncclComm *at;

    pthread_mutex_lock(&list_lock);
    for (at = comms; at && at != comm;)
        at = at->next;
    pthread_mutex_unlock(&list_lock);
    return at != NULL;
}

/* ---- Ids --------------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t draw(void)
{
    uint64_t value = 0;
    const int fd = fd_own(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
    const ssize_t got = fd >= 0 ? read(fd, &value, sizeof(value)) : 0;

    if (fd >= 0)
        close(fd);
    return got == (ssize_t)sizeof(value) ? value : mix(clock_ns(), &(pid_t){getpid()}, sizeof(pid_t));
}

/* A port that is free now. Should another program take it, rank 0 goes on to the next ones, and so do the others. */
static int free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t length = sizeof(at);
    const int fd = fd_own(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int port = -1;

    if (fd < 0)
        return -1;
    if (!bind(fd, (struct sockaddr *)&at, sizeof(at)) && !getsockname(fd, (struct sockaddr *)&at, &length))
        port = ntohs(at.sin_port);
    close(fd);
    return port;
}

/* How others reach this machine: by the interface asked for, else by its name, else, where that means nothing, not at
 * all. */
static void own_host(char *host, size_t bytes)
{
    const char *interfaces = env_string("EPX_SOCKET_IFNAME");
    struct endpoint found[RENDEZVOUS_MAX_ADDRESSES];
    char text[ENDPOINT_TEXT], *end;
    int count = 0;

    if (interfaces && !interface_addresses(interfaces, found, RENDEZVOUS_MAX_ADDRESSES, &count) && count) {
        endpoint_text(&found[0], text);
        end = strrchr(text, ':');
        if (end)
            *end = '\0';
        if (text[0] == '[') {
            text[strlen(text) - 1] = '\0';
            memmove(text, text + 1, strlen(text));
        }
        snprintf(host, bytes, "%s", text);
        return;
    }
    if (gethostname(host, bytes) || resolve_host(host, deadline_in(2000), found, RENDEZVOUS_MAX_ADDRESSES, &count) ||
        !count)
        snprintf(host, bytes, "127.0.0.1");
    host[bytes - 1] = '\0';
}

/* "HOST:PORT" or "[HOST]:PORT": the same id for everybody who asks as often. */
static ncclResult_t given_id(const char *text, struct id *id)
{
    static _Thread_local uint64_t asked;
    const char *colon = strrchr(text, ':');
    char *end = NULL;
    const long port = colon ? strtol(colon + 1, &end, 10) : 0;
    size_t length = colon ? (size_t)(colon - text) : 0;

    if (length > 1 && text[0] == '[' && text[length - 1] == ']') {
        text++;
        length -= 2;
    }
    if (!colon || *end || port < 1 || port > 65535 || !length || length >= sizeof(id->host))
        return standin_fail(ncclInvalidArgument, "NCCL_COMM_ID is \"%s\", expected HOST:PORT", text);
    memcpy(id->host, text, length);
    id->port = (int32_t)port;
    asked++;
    id->job = mix(mix(0xcbf29ce484222325u, id->host, length), &asked, sizeof(asked));
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    const char *text = getenv("NCCL_COMM_ID");
    struct id id = {.magic = ID_MAGIC};
    ncclResult_t result = ncclSuccess;

    if (!out)
        return standin_fail(ncclInvalidArgument, "ncclGetUniqueId: id: expected a pointer, got NULL");
    if (text && text[0]) {
        result = given_id(text, &id);
    } else {
        id.job = draw();
        id.port = free_port();
        own_host(id.host, sizeof(id.host));
        if (id.port < 0)
            result = standin_fail(ncclSystemError, "ncclGetUniqueId: no free TCP port: %s", strerror(errno));
    }
    memcpy(out, &id, sizeof(id));
    return result;
}

/* ---- Communicators ----------------------------------------------------------------------------------------------- */

static void comm_free(struct ncclComm *comm)
{
    for (int i = 0; i < comm->channel_count; i++)
        channel_close(&comm->channels[i]);
    free(comm->channels);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}

/* The runtime's current device, whichever runtime it is. */
static int current_device(void)
{
    cudaError_t (*get_device)(int *device);
    int device = -1;

    *(void **)&get_device = dlsym(RTLD_DEFAULT, "cudaGetDevice");
    return get_device && get_device(&device) == cudaSuccess ? device : -1;
}

static ncclResult_t connect_ranks(struct ncclComm *comm, const struct id *id)
{
    const struct rendezvous_config config = {.rank = comm->rank,
                                             .nranks = comm->nranks,
                                             .timeout_ms = comm->timeout_ms,
                                             .host = id->host,
                                             .port = id->port,
                                             .ports = 1 + RENDEZVOUS_MORE_PORTS,
                                             .key = comm->secret.off ? NULL : comm->secret.key,
                                             .key_from = comm->secret.from,
                                             .job = id->job,
                                             .interfaces = env_string("EPX_SOCKET_IFNAME")};
    const int count = comm->rank ? 1 : comm->nranks;
    int block;

    if (comm->nranks == 1)
        return ncclSuccess;
    comm->channels = malloc((size_t)count * sizeof(*comm->channels));
    if (!comm->channels)
        return standin_fail(ncclSystemError, "ncclCommInitRank: no memory for %d ranks", comm->nranks);
    for (int i = 0; i < count; i++)
        comm->channels[i] = CHANNEL_CLOSED;
    comm->channel_count = count;
    if ((comm->rank ? rendezvous_client(&config, comm->channels, &block) : rendezvous_root(&config, comm->channels)) !=
        EPX_OK)
        return standin_fail(ncclRemoteError, "ncclCommInitRank: rank %d: %s", comm->rank, epx_last_error());
    return ncclSuccess;
}

static ncclResult_t check_call(const struct id *id, int nranks, int rank, const ncclConfig_t *config)
{
    if (nranks < 1 || nranks > RENDEZVOUS_MAX_RANKS || rank < 0 || rank >= nranks)
        return standin_fail(ncclInvalidArgument,
                            "ncclCommInitRank: expected a rank below a number of at most %d, got %d "
                            "of %d",
                            RENDEZVOUS_MAX_RANKS, rank, nranks);
    if (id->magic != ID_MAGIC || !memchr(id->host, 0, sizeof(id->host)))
        return standin_fail(ncclInvalidArgument, "ncclCommInitRank: id: expected one of ncclGetUniqueId");
    if (config && (config->size < 2 * sizeof(size_t) || config->magic != NCCL_API_MAGIC))
        return standin_fail(ncclInvalidArgument, "ncclCommInitRankConfig: config: expected NCCL_CONFIG_INITIALIZER");
    return ncclSuccess;
}

static ncclResult_t comm_make(struct ncclComm **out, const struct id *id, int nranks, int rank)
{
    struct ncclComm *comm = calloc(1, sizeof(*comm));
    ncclResult_t result;

    if (!comm)
        return standin_fail(ncclSystemError, "ncclCommInitRank: no memory");
    comm->rank = rank;
    comm->nranks = nranks;
    comm->device = current_device();
    comm->job = id->job;
    comm->timeout_ms = (int)env_int("EPX_BOOT_TIMEOUT_MS", 100000, 1, 1000000000);
    pthread_mutex_init(&comm->lock, NULL);
    log_set_rank(rank);
    result = secret_read(1, &comm->secret) == EPX_OK
                 ? connect_ranks(comm, id)
                 : standin_fail(ncclSystemError, "ncclCommInitRank: %s", epx_last_error());
    if (result != ncclSuccess)
        comm_free(comm);
    else
        *out = comm;
    return result;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int nranks, ncclUniqueId given, int rank, ncclConfig_t *config)
{
    struct ncclComm *comm = NULL;
    struct id id;
    ncclResult_t result;

    memcpy(&id, &given, sizeof(id));
    if (!out)
        return standin_fail(ncclInvalidArgument, "ncclCommInitRank: comm: expected a pointer, got NULL");
    *out = NULL;
    result = check_call(&id, nranks, rank, config);
    if (result == ncclSuccess)
        result = comm_make(&comm, &id, nranks, rank);
    if (result != ncclSuccess)
        return result;
    pthread_mutex_lock(&list_lock);
    comm->next = comms;
    comms = comm;
    pthread_mutex_unlock(&list_lock);
    *out = comm;
    result = comm_find_teams(comm);
    if (result != ncclSuccess) {
        (void)ncclCommDestroy(comm);
        *out = NULL;
    }
    return result;
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int nranks, ncclUniqueId given, int rank)
{
    return ncclCommInitRankConfig(out, nranks, given, rank, NULL);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int nranks, int rank, int nId, ncclUniqueId *ids,
                                      ncclConfig_t *config)
{
    if (nId < 1 || nId > nranks || !ids)
        return standin_fail(ncclInvalidArgument, "ncclCommInitRankScalable: expected 1 to %d ids, got %d at %p", nranks,
                            nId, (void *)ids);
    return ncclCommInitRankConfig(out, nranks, ids[0], rank, config);
}

ncclResult_t comm_need(const struct ncclComm *comm, const char *call)
{
    if (comm_known(comm))
        return ncclSuccess;
    return standin_fail(ncclInvalidArgument, "%s: comm: expected one of ncclCommInitRank, got %p", call,
                        (const void *)comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    struct ncclComm **link = &comms;
    ncclResult_t result = comm ? comm_need(comm, "ncclCommDestroy") : ncclSuccess;

    if (result != ncclSuccess || !comm)
        return result;
    pthread_mutex_lock(&list_lock);
    while (*link && *link != comm)
        link = &(*link)->next;
    if (*link)
        *link = comm->next;
    pthread_mutex_unlock(&list_lock);
    comm_free(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    return ncclCommDestroy(comm);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    return comm_need(comm, "ncclCommFinalize"); /* nothing is ever on its way */
}

static ncclResult_t give(const char *call, int value, int *out)
{
    if (!out)
        return standin_fail(ncclInvalidArgument, "%s: expected a pointer, got NULL", call);
    *out = value;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    ncclResult_t result = comm_need(comm, "ncclCommCount");

    return result == ncclSuccess ? give("ncclCommCount", comm->nranks, count) : result;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    ncclResult_t result = comm_need(comm, "ncclCommUserRank");

    return result == ncclSuccess ? give("ncclCommUserRank", comm->rank, rank) : result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    ncclResult_t result = comm_need(comm, "ncclCommGetAsyncError");

    if (result == ncclSuccess && !error)
        result = standin_fail(ncclInvalidArgument, "ncclCommGetAsyncError: error: expected a pointer, got NULL");
    if (result == ncclSuccess)
        *error = comm->broken ? ncclRemoteError : ncclSuccess;
    return result;
}

/* ---- Gathering --------------------------------------------------------------------------------------------------- */

static int gather_all(struct ncclComm *comm, const void *send, void *recv, size_t bytes)
{
    const struct gather gather = {.rank = comm->rank,
                                  .nranks = comm->nranks,
                                  .timeout_ms = comm->timeout_ms,
                                  .sequence = ++comm->sequence,
                                  .send = send,
                                  .recv = recv,
                                  .bytes = bytes};

    if (comm->broken)
        return -1;
    comm->broken =
        (comm->rank ? allgather_client(&gather, comm->channels) : allgather_root(&gather, comm->channels)) != EPX_OK;
    if (comm->broken)
        log_line(LOG_ERROR, "rank %d: gathering %zu bytes: %s", comm->rank, bytes, epx_last_error());
    return comm->broken ? -1 : 0;
}

int epxNcclHostAllGather(ncclComm_t comm, const void *send, void *recv, size_t bytes)
{
    int rc;

    if (!comm_known(comm))
        return -1;
    if (!bytes)
        return 0;
    if (comm->nranks == 1) {
        memmove(recv, send, bytes);
        return 0;
    }
    pthread_mutex_lock(&comm->lock);
    rc = gather_all(comm, send, recv, bytes);
    pthread_mutex_unlock(&comm->lock);
    return rc;
}
