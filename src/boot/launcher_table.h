/* SPDX-License-Identifier: Apache-2.0 */
/* Internal to launcher*.c: one kind of launcher. */
#ifndef EPX_BOOT_LAUNCHER_TABLE_H
#define EPX_BOOT_LAUNCHER_TABLE_H

#include "boot/launcher.h"

/* Names of variables. Where several are separated by commas, the first one that is set counts. */
struct launcher_kind {
    const char *name;
    const char *marker; /* the kind applies only where this is set, too; NULL = always */
    const char *rank, *nranks;
    const char *local_rank, *local_nranks; /* NULL = the launcher does not set it */
    const char *hint;                      /* how to set MASTER_ADDR and MASTER_PORT */
    /* Fills `host` and `host_from`; leaves `host` empty when rank 0's machine is not known. NULL = it never is. */
    void (*find_host)(struct launcher *launcher);
    /* Fills `job`; leaves it empty when it is not known. NULL = it never is. */
    void (*find_job)(struct launcher *launcher);
};

/* The value of the first variable of a comma-separated list that is set and not empty; NULL = none. *name: which. */
const char *launcher_variable(const char *names, char name[64]);

void openmpi_find_host(struct launcher *launcher);
void openmpi_find_job(struct launcher *launcher);
void slurm_find_host(struct launcher *launcher);
void slurm_find_job(struct launcher *launcher);
void pmi_find_host(struct launcher *launcher);
void pmi_find_job(struct launcher *launcher);
void pmix_find_job(struct launcher *launcher);

#endif
