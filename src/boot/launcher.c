/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which launcher started this process. The first kind of the table whose variables are set counts, with these rules for
 * launchers inside each other:
 *
 *   torchrun inside anything        torchrun's RANK and WORLD_SIZE count
 *   RANK inside mpirun or srun      WORLD_SIZE larger: each outer task started several ranks, so RANK counts
 *                                   both equal: RANK counts, the outer launcher knows rank 0's machine
 *                                   otherwise: one of the two is wrong, an error names both
 *   mpirun inside srun              mpirun counts: it starts its daemons by srun. Open MPI and MPICH both do
 *
 * The batch script of a Slurm job has SLURM_PROCID and SLURM_NTASKS, but is no task: only a step has SLURM_STEP_ID.
 */
#include "boot/launcher.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/launcher_table.h"
#include "boot/rendezvous.h"
#include "util/env.h"
#include "util/log.h"
#include "util/status.h"

enum { PORT_BASE = 16384, PORT_COUNT = 16000, NAME_BYTES = 64 }; /* below the ports that Linux assigns, from 32768 on */

enum kind { TORCHRUN, BY_HAND, OPEN_MPI, PMI, SLURM, PMIX, KINDS };

/* In order of priority. */
static const struct launcher_kind kinds[KINDS] = {
    [TORCHRUN] = {.name = "torchrun",
                  .marker = "TORCHELASTIC_RUN_ID",
                  .rank = "RANK",
                  .nranks = "WORLD_SIZE",
                  .local_rank = "LOCAL_RANK",
                  .local_nranks = "LOCAL_WORLD_SIZE",
                  .hint = "torchrun --master-addr HOST --master-port PORT"},
    [BY_HAND] = {.name = "RANK and WORLD_SIZE",
                 .rank = "RANK",
                 .nranks = "WORLD_SIZE",
                 .local_rank = "LOCAL_RANK",
                 .local_nranks = "LOCAL_WORLD_SIZE",
                 .hint = "MASTER_ADDR=HOST MASTER_PORT=PORT in the environment of every rank"},
    [OPEN_MPI] = {.name = "Open MPI",
                  .rank = "OMPI_COMM_WORLD_RANK",
                  .nranks = "OMPI_COMM_WORLD_SIZE",
                  .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
                  .local_nranks = "OMPI_COMM_WORLD_LOCAL_SIZE",
                  .hint = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT",
                  .find_host = openmpi_find_host,
                  .find_job = openmpi_find_job},
    [PMI] = {.name = "PMI (MPICH, Intel MPI)",
             .rank = "PMI_RANK",
             .nranks = "PMI_SIZE",
             .local_rank = "MPI_LOCALRANKID",
             .local_nranks = "MPI_LOCALNRANKS",
             .hint = "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT",
             .find_host = pmi_find_host,
             .find_job = pmi_find_job},
    [SLURM] = {.name = "Slurm",
               .marker = "SLURM_STEP_ID,SLURM_STEPID",
               .rank = "SLURM_PROCID",
               .nranks = "SLURM_STEP_NUM_TASKS,SLURM_NTASKS",
               .local_rank = "SLURM_LOCALID",
               .hint = "MASTER_ADDR=HOST MASTER_PORT=PORT srun",
               .find_host = slurm_find_host,
               .find_job = slurm_find_job},
    /* PMIx has no variable for the number of ranks: the user passes WORLD_SIZE. */
    [PMIX] = {.name = "PMIx",
              .rank = "PMIX_RANK",
              .nranks = "WORLD_SIZE",
              .hint = "prun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT",
              .find_job = pmix_find_job},
};

static struct {
    pthread_mutex_t lock;
    char host[LAUNCHER_HOST_BYTES];
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- Variables ---------------------------------------------------------------------------------------------- */

const char *launcher_variable(const char *names, char name[NAME_BYTES])
{
    const char *value = NULL;

    while (names && *names && !value) {
        size_t length = strcspn(names, ",");
        snprintf(name, NAME_BYTES, "%.*s", (int)length, names);
        value = getenv(name);
        value = value && value[0] ? value : NULL;
        names += length + (names[length] == ',');
    }
    return value;
}

static int is_set(const char *names)
{
    char name[NAME_BYTES];

    return launcher_variable(names, name) != NULL;
}

/* A launcher's variable has no default, so an invalid value is an error. */
static epx_status read_int(const char *names, long low, long high, int *value)
{
    char name[NAME_BYTES] = "", *end;
    const char *text = launcher_variable(names, name);
    long number;

    if (!text)
        return fail(EPX_ERR_USAGE,
                    "%s is not set: start the ranks with `epx run`, torchrun, mpirun or srun, or give a bootstrap",
                    names);
    errno = 0;
    number = strtol(text, &end, 10);
    if (errno || *end || number < low || number > high)
        return fail(EPX_ERR_ARGUMENT, "%s is \"%s\", expected an integer from %ld to %ld", name, text, low, high);
    *value = (int)number;
    return EPX_OK;
}

static int read_optional(const char *names)
{
    char name[NAME_BYTES];
    const char *text = launcher_variable(names, name);

    return text ? (int)strtol(text, NULL, 10) : -1;
}

static int is_present(const struct launcher_kind *kind)
{
    return is_set(kind->rank) && is_set(kind->nranks) && (!kind->marker || is_set(kind->marker));
}

/* The first kind from `from` on whose variables are set, or KINDS. */
static enum kind find_kind(enum kind from)
{
    while (from < KINDS && !is_present(&kinds[from]))
        from++;
    return from;
}

static epx_status read_ranks(const struct launcher_kind *kind, int *rank, int *nranks)
{
    epx_status status = read_int(kind->nranks, 1, RENDEZVOUS_MAX_RANKS, nranks);

    return status ? status : read_int(kind->rank, 0, *nranks - 1, rank);
}

/* ---- One launcher inside another ---------------------------------------------------------------------------- */

static epx_status no_launcher(void)
{
    char name[NAME_BYTES];
    const char *pmix = launcher_variable("PMIX_RANK", name);
    int ignored;

    if (is_set("RANK") || is_set("WORLD_SIZE"))
        return read_ranks(&kinds[BY_HAND], &ignored, &ignored);
    if (pmix)
        return fail(EPX_ERR_USAGE, "PMIX_RANK is %s, but PMIx has no variable for the number of ranks: pass WORLD_SIZE",
                    pmix);
    if (is_set("SLURM_PROCID"))
        return fail(EPX_ERR_USAGE, "this process is in a Slurm job, but in no step of it: start the ranks with srun");
    return fail(EPX_ERR_USAGE,
                "no launcher was found (WORLD_SIZE is not set): start the ranks with `epx run`, torchrun, "
                "mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give a bootstrap");
}

static epx_status conflict(const struct launcher_kind *inner, int rank, int nranks, const struct launcher_kind *outer,
                           int outer_rank, int outer_nranks)
{
    char outer_size[NAME_BYTES] = "";

    launcher_variable(outer->nranks, outer_size);
    return fail(EPX_ERR_MISMATCH,
                "%s is %d and %s is %d, but %s has set %s to %d and %s to %d: unset %s and %s, or set them to the same "
                "values",
                inner->rank, rank, inner->nranks, nranks, outer->name, outer->rank, outer_rank, outer_size,
                outer_nranks, inner->rank, inner->nranks);
}

/* `backing`: the kind that knows rank 0's machine and the job. */
static epx_status resolve_nesting(enum kind kind, int rank, int nranks, enum kind *backing)
{
    enum kind outer = kind == BY_HAND ? find_kind(OPEN_MPI) : kind == PMI && is_present(&kinds[SLURM]) ? SLURM : KINDS;
    int outer_rank, outer_nranks;
    epx_status status;

    *backing = kind;
    if (outer == KINDS || outer == PMIX)
        return EPX_OK;
    status = read_ranks(&kinds[outer], &outer_rank, &outer_nranks);
    if (status)
        return status;
    if (kind == PMI) { /* srun --mpi=pmi2 sets both; MPICH's mpiexec may start its daemons by srun */
        *backing = nranks == outer_nranks ? SLURM : PMI;
        return EPX_OK;
    }
    if (nranks > outer_nranks)
        return EPX_OK;
    *backing = outer;
    return rank == outer_rank && nranks == outer_nranks
               ? EPX_OK
               : conflict(&kinds[kind], rank, nranks, &kinds[outer], outer_rank, outer_nranks);
}

/* ---- Rank 0's address --------------------------------------------------------------------------------------- */

static uint64_t hash_text(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u;

    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash ^ hash >> 32;
}

static epx_status find_host(const struct launcher_kind *backing, struct launcher *out)
{
    const char *host = getenv("MASTER_ADDR");

    if (host && host[0]) {
        if (strlen(host) >= sizeof(out->host))
            return fail(EPX_ERR_ARGUMENT, "MASTER_ADDR has %zu characters, expected at most %zu", strlen(host),
                        sizeof(out->host) - 1);
        memcpy(out->host, host, strlen(host) + 1);
        return EPX_OK;
    }
    if (backing->find_host)
        backing->find_host(out);
    if (out->host[0])
        return EPX_OK;
    return fail(EPX_ERR_USAGE, "MASTER_ADDR is not set, and rank 0's machine is not known from %s: use %s", out->name,
                out->host_hint);
}

/*
 * A port that the user has named is that port and no other. torchrun's own store listens on its MASTER_PORT, and a port
 * that is derived may be another job's: there rank 0 takes the next free one. Ranks find it by the secret, and compare
 * jobs (rendezvous_root.c).
 */
static epx_status find_port(enum kind kind, struct launcher *out)
{
    const int asked = (int)env_int("EPX_MASTER_PORTS", 0, 1, 1024);

    out->ports = asked ? asked : 1;
    out->port = (int)env_int("EPX_MASTER_PORT", 0, 1, 65535);
    if (out->port)
        return EPX_OK;
    if (!asked && (kind == TORCHRUN || !is_set("MASTER_PORT")))
        out->ports = 1 + RENDEZVOUS_MORE_PORTS;
    if (is_set("MASTER_PORT"))
        return read_int("MASTER_PORT", 1, 65535, &out->port);
    if (!out->job[0])
        return fail(EPX_ERR_USAGE, "MASTER_PORT is not set, and %s has no job id to derive a port from: use %s",
                    out->name, out->host_hint);
    out->port = PORT_BASE + (int)(hash_text(out->job) % PORT_COUNT);
    return EPX_OK;
}

static void find_job(const struct launcher_kind *backing, struct launcher *out)
{
    const char *id = env_string("EPX_JOB_ID");

    if (id)
        snprintf(out->job, sizeof(out->job), "%s", id);
    else if (backing->find_job)
        backing->find_job(out);
}

/* ---- Interface ---------------------------------------------------------------------------------------------- */

static void log_found(const struct launcher *found)
{
    if (found->nranks == 1)
        log_line(LOG_INFO, "rank 0 of 1, from %s", found->name);
    else
        log_line(LOG_INFO, "rank %d of %d, from %s; rank 0 is at %s, port %d (%s)", found->rank, found->nranks,
                 found->name, found->host, found->port, found->host_from ? found->host_from : "MASTER_ADDR");
}

static int read_local_size(enum kind kind, enum kind backing)
{
    int size = read_optional(kinds[kind].local_nranks);

    return size < 0 ? read_optional(kinds[backing].local_nranks) : size;
}

const char *launcher_name(void)
{
    enum kind kind = find_kind(TORCHRUN);

    return kind == KINDS ? NULL : kinds[kind].name;
}

epx_status launcher_read(struct launcher *out)
{
    enum kind kind = find_kind(TORCHRUN), backing;
    epx_status status;

    memset(out, 0, sizeof(*out));
    if (kind == KINDS)
        return no_launcher();
    status = read_ranks(&kinds[kind], &out->rank, &out->nranks);
    if (!status)
        status = resolve_nesting(kind, out->rank, out->nranks, &backing);
    if (status)
        return status;
    out->name = kinds[kind].name;
    out->host_hint = kinds[backing].hint;
    out->local_rank = read_optional(kinds[kind].local_rank);
    out->local_nranks = read_local_size(kind, backing);
    if (out->nranks > 1) {
        find_job(&kinds[backing], out);
        status = find_host(&kinds[backing], out);
        if (!status)
            status = find_port(kind, out);
    }
    if (!status)
        log_found(out);
    return status;
}

void launcher_keep_host(const struct launcher *launcher)
{
    pthread_mutex_lock(&kept.lock);
    memcpy(kept.host, launcher->host, sizeof(kept.host));
    pthread_mutex_unlock(&kept.lock);
}

void launcher_host(char host[LAUNCHER_HOST_BYTES])
{
    const char *given = getenv("MASTER_ADDR");

    snprintf(host, LAUNCHER_HOST_BYTES, "%s", given ? given : "");
    if (host[0])
        return;
    pthread_mutex_lock(&kept.lock);
    memcpy(host, kept.host, sizeof(kept.host));
    pthread_mutex_unlock(&kept.lock);
}

void launcher_clear_environment(void)
{
    for (int i = OPEN_MPI; i < KINDS; i++)
        unsetenv(kinds[i].rank);
    unsetenv(kinds[TORCHRUN].marker);
}
