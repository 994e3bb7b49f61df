/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the launcher of a process says about its rank: torchrun, `epx run`, mpirun of Open MPI, MPICH and Intel MPI,
 * srun, or variables that a user sets. One table (launcher.c) has the variables of all launchers.
 */
#ifndef EPX_BOOT_LAUNCHER_H
#define EPX_BOOT_LAUNCHER_H

#include <stdint.h>

#include "epx/epx.h"

enum { LAUNCHER_HOST_BYTES = 512, LAUNCHER_JOB_BYTES = 512 };

struct launcher {
    const char *name; /* of the launcher, for messages */
    int rank, nranks;
    int local_rank, local_nranks; /* on this machine; -1 = unknown */
    /* Of rank 0's machine: MASTER_ADDR; or what the launcher knows, then several addresses may be separated by commas.
     * Empty with one rank. */
    char host[LAUNCHER_HOST_BYTES];
    const char *host_from;        /* what `host` was derived from; NULL = MASTER_ADDR is set */
    const char *host_hint;        /* how to set MASTER_ADDR and MASTER_PORT with this launcher */
    int port;                     /* the first one to try; 0 with one rank */
    int ports;                    /* how many rank 0 may try, from the first on; 1 where the user named the port */
    char job[LAUNCHER_JOB_BYTES]; /* text that the ranks of this job share and other jobs do not; "" = unknown */
};

/* The name of the launcher that started this process, or NULL. */
const char *launcher_name(void);
/* Fails when there is no launcher, its variables are invalid, two launchers contradict each other, or rank 0's address
 * is not known. */
epx_status launcher_read(struct launcher *out);
/* Called when the ranks connect as `launcher` says: launcher_host() then returns its host. A caller's own bootstrap may
 * connect ranks of several launchers, so a host that was only derived must not count there. */
void launcher_keep_host(const struct launcher *launcher);
/* MASTER_ADDR, else the host that was kept, else "". */
void launcher_host(char host[LAUNCHER_HOST_BYTES]);
/* Removes the ranks that other launchers have set from the environment, before a new world sets RANK and WORLD_SIZE. */
void launcher_clear_environment(void);

#endif
