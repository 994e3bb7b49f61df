/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of libepx_nccl.so share. */
#ifndef EPX_STANDIN_STANDIN_H
#define EPX_STANDIN_STANDIN_H

#include <nccl.h>
#include <pthread.h>
#include <stdint.h>

#include "boot/secret.h"

/* Remembers the sentence for ncclGetLastError on this thread, logs it at level "info", returns `result`. */
ncclResult_t standin_fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));

struct ncclComm {
    int rank, nranks, timeout_ms;
    int device;               /* current when it was made; -1 = no CUDA in the process */
    int lsa_ranks, lsa_place; /* ranks of this one's node, and its place among them */
    int lsa_teams;
    uint64_t job;
    struct channel *channels; /* rank 0: of every rank; others: [0] is that of rank 0 */
    int channel_count;
    struct secret secret;
    int broken;
    uint64_t sequence;
    pthread_mutex_t lock; /* of one all-gather */
    struct ncclComm *next;
};

int comm_known(const struct ncclComm *comm);
/* Looks a communicator up before it is followed. */
ncclResult_t comm_need(const struct ncclComm *comm, const char *call);
/* Finds out which ranks share a machine. All ranks. */
ncclResult_t comm_find_teams(struct ncclComm *comm);

#endif
