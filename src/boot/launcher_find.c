/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each launcher knows about rank 0's machine and about the job, when the user has not set MASTER_ADDR:
 *
 *                 all ranks on one machine             rank 0's machine                     job
 *   Open MPI      LOCAL_SIZE equals SIZE               first node of a Slurm job, and       PMIX_NAMESPACE and mpirun's
 *                                                      mpirun's machine                     address
 *   MPICH, Intel  LOCALNRANKS equals SIZE              first node of a Slurm job            process id of the daemon
 *   Slurm         one node in the step                 first node of the step               job and step
 *
 * On one machine the host is 127.0.0.1. On several the host is a guess, which rank 0 checks (rendezvous_root.c): with
 * unusual placements rank 0 may run elsewhere. Where there are two candidates both are in the list.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "boot/launcher_table.h"
#include "boot/nodelist.h"

#define NODELISTS "SLURM_STEP_NODELIST,SLURM_JOB_NODELIST,SLURM_NODELIST"

static const char *value_of(const char *names)
{
    char name[64];

    return launcher_variable(names, name);
}

/* ---- Parts of a list, separated by commas -------------------------------------------------------------------- */

static void add(char *list, size_t bytes, const char *text, size_t length)
{
    size_t used = strlen(list);

    if (length && used + length + 2 <= bytes)
        snprintf(list + used, bytes - used, "%s%.*s", used ? "," : "", (int)length, text);
}

static void add_host(struct launcher *launcher, const char *text, size_t length, const char *from)
{
    if (length && !launcher->host_from)
        launcher->host_from = from;
    add(launcher->host, sizeof(launcher->host), text, length);
}

static void add_job(struct launcher *launcher, const char *names)
{
    const char *value = value_of(names);

    if (value)
        add(launcher->job, sizeof(launcher->job), value, strlen(value));
}

static int on_one_machine(struct launcher *launcher)
{
    if (launcher->local_nranks != launcher->nranks)
        return 0;
    add_host(launcher, "127.0.0.1", strlen("127.0.0.1"), "all ranks are on this machine");
    return 1;
}

/* ---- Slurm --------------------------------------------------------------------------------------------------- */

static void add_first_node(struct launcher *launcher, const char *lists)
{
    const char *list = value_of(lists);
    char node[256];

    if (list && nodelist_host(list, 0, node, sizeof(node)) > 0)
        add_host(launcher, node, strlen(node), "Slurm's list of nodes");
}

void slurm_find_host(struct launcher *launcher)
{
    const char *nodes = value_of("SLURM_STEP_NUM_NODES,SLURM_NNODES"), *address;

    if (nodes && !strcmp(nodes, "1")) {
        add_host(launcher, "127.0.0.1", strlen("127.0.0.1"), "all ranks are on this machine");
        return;
    }
    add_first_node(launcher, NODELISTS);
    address = value_of("SLURM_LAUNCH_NODE_IPADDR"); /* of srun, which may run on another machine than rank 0 */
    if (!launcher->host[0] && address)
        add_host(launcher, address, strlen(address), "SLURM_LAUNCH_NODE_IPADDR");
}

void slurm_find_job(struct launcher *launcher)
{
    add_job(launcher, "SLURM_JOB_ID,SLURM_JOBID");
    add_job(launcher, "SLURM_STEP_ID,SLURM_STEPID");
}

/* ---- Open MPI ------------------------------------------------------------------------------------------------ */

/* Version 4: "2038169600.0;tcp://10.0.0.2,10.1.0.2:34269;tcp6://[fd00::2]:47837", the addresses of mpirun's machine. */
static void add_uri_hosts(struct launcher *launcher, const char *uri)
{
    const char *at = uri;

    while ((at = strstr(at, "://"))) {
        size_t length;
        at += 3;
        at += *at == '[';
        length = strcspn(at, "];");
        if (at[-1] != '[') /* the port of IPv4 addresses is behind the last colon */
            for (size_t i = 0; i < length; i++)
                if (at[i] == ':')
                    length = i;
        add_host(launcher, at, length, "mpirun's address (OMPI_MCA_orte_hnp_uri)");
    }
}

/* Version 5: "prterun-HOST-PID@1", and "prte-HOST-PID@1" for a daemon that serves several runs. */
static void add_namespace_host(struct launcher *launcher, const char *namespace)
{
    const char *host = strchr(namespace, '-'), *end = strchr(namespace, '@');

    if (strncmp(namespace, "prte", 4) || !host || !end)
        return;
    while (end > host && *end != '-')
        end--;
    if (end > host + 1)
        add_host(launcher, host + 1, (size_t)(end - host - 1), "mpirun's machine (PMIX_NAMESPACE)");
}

void openmpi_find_host(struct launcher *launcher)
{
    const char *uri = value_of("OMPI_MCA_orte_hnp_uri"), *namespace = value_of("PMIX_NAMESPACE");

    if (on_one_machine(launcher))
        return;
    add_first_node(launcher, "SLURM_JOB_NODELIST,SLURM_NODELIST"); /* mpirun may run on a login node */
    if (uri)
        add_uri_hosts(launcher, uri);
    else if (namespace)
        add_namespace_host(launcher, namespace);
}

/* In version 4 the namespace has 16 bits that differ between two mpiruns of one machine: the others differ more. */
void openmpi_find_job(struct launcher *launcher)
{
    add_job(launcher, "PMIX_NAMESPACE,OMPI_MCA_ess_base_jobid");
    add_job(launcher, "OMPI_MCA_orte_precondition_transports");
    add_job(launcher, "OMPI_MCA_orte_hnp_uri");
}

/* ---- PMI and PMIx ---------------------------------------------------------------------------------------------- */

void pmi_find_host(struct launcher *launcher)
{
    if (!on_one_machine(launcher))
        add_first_node(launcher, "SLURM_JOB_NODELIST,SLURM_NODELIST");
}

/*
 * Hydra, the launcher of MPICH and Intel MPI, sets no variable that differs between jobs. But every rank has inherited
 * a socket to the daemon that started all ranks of this machine, and the daemon's process id is known to the kernel. On
 * other machines it is another one, so this serves one machine only.
 */
void pmi_find_job(struct launcher *launcher)
{
    const char *text = value_of("PMI_FD");
    struct ucred daemon = {0};
    socklen_t length = sizeof(daemon);

    add_job(launcher, "PMI_JOBID");
    if (launcher->job[0] || !text || launcher->local_nranks != launcher->nranks)
        return;
    if (!getsockopt((int)strtol(text, NULL, 10), SOL_SOCKET, SO_PEERCRED, &daemon, &length) && daemon.pid > 0)
        snprintf(launcher->job, sizeof(launcher->job), "hydra %d", (int)daemon.pid);
}

void pmix_find_job(struct launcher *launcher)
{
    add_job(launcher, "PMIX_NAMESPACE");
}
