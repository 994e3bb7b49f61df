/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starting and ending teams. Each has one process that watches over its ranks: a copy of this program that runs
 * launch_ranks, or mpirun. If the driver dies, they are told.
 */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "commands.h"

static const char packages[] = "Debian has it in the packages openmpi-bin and libopenmpi-dev; "
                               "after installing them build EPX again";

static void die_with_parent(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(1);
}

/* In the watching process. A failed run has been reported already: the others get little time. */
static int watch_epx(const struct bench_config *config, const char *shm_path)
{
    char worker[] = "--worker", program[] = "epx", bench[] = "bench", path[64], threads[16];
    char *argv[] = {program, bench, worker, path, threads, NULL};
    struct launch_options launch = {
        .title = "epx bench", .nranks = config->threads ? 1 : config->ranks, .argv = argv, .self = 1, .grace_ms = 1000};

    snprintf(path, sizeof(path), "%s", shm_path);
    snprintf(threads, sizeof(threads), "%d", config->threads ? config->ranks : 0);
    return launch_ranks(&launch);
}

pid_t bench_team_start_epx(const struct bench_config *config, const char *shm_path)
{
    pid_t parent = getpid(), pid;

    fflush(NULL);
    pid = fork();
    if (pid < 0)
        fprintf(stderr, "epx bench: cannot fork: %s\n", strerror(errno));
    if (pid != 0)
        return pid;
    die_with_parent(parent);
    fflush(NULL);
    _exit(watch_epx(config, shm_path));
}

/* The baseline is in the folder of this program. 0 or -1 after a message. */
static int find_baseline(char *path, size_t bytes)
{
    ssize_t n = readlink("/proc/self/exe", path, bytes - 1);
    char *slash;

    if (n < 0) {
        fprintf(stderr, "epx bench: cannot find the folder of this program: %s\n", strerror(errno));
        return -1;
    }
    path[n] = '\0';
    slash = strrchr(path, '/');
    if (slash == NULL || snprintf(slash + 1, bytes - (size_t)(slash + 1 - path), "epx-mpi-baseline") >=
                             (int)(bytes - (size_t)(slash + 1 - path)))
        return -1;
    if (access(path, X_OK) == 0)
        return 0;
    fprintf(stderr, "epx bench: --vs mpi needs %s, which is not there. It is built where an MPI for C is found. %s.\n",
            path, packages);
    return -1;
}

/* Is there such a program in PATH? */
static int in_path(const char *name)
{
    const char *path = getenv("PATH");
    char file[PATH_MAX];

    while (path != NULL && *path != '\0') {
        size_t n = strcspn(path, ":");

        if (snprintf(file, sizeof(file), "%.*s/%s", (int)n, path, name) < (int)sizeof(file) && access(file, X_OK) == 0)
            return 1;
        path += n + (path[n] == ':');
    }
    return 0;
}

#define MPI_WORDS 48

struct mpirun {
    const char *argv[MPI_WORDS];
    int n;
    char program[PATH_MAX], agent[PATH_MAX + 16], ranks[16], hosts[4096];
};

static void add_words(struct mpirun *run, const char *const *words)
{
    while (*words != NULL && run->n < MPI_WORDS - 1)
        run->argv[run->n++] = *words++;
}

/* One host per node, each with its share of the ranks. 0, or -1 after a message. */
static int list_hosts(const struct bench_config *config, char *text, size_t bytes)
{
    const int per = bench_ranks_per_node(config);
    size_t used = 0;
    int node, first;

    for (node = first = 0; first < config->ranks; node++, first += per) {
        const int count = config->ranks - first < per ? config->ranks - first : per;
        const int n = snprintf(text + used, bytes - used, "%sepx-node-%d:%d", node > 0 ? "," : "", node, count);

        if (n < 0 || (size_t)n >= bytes - used) {
            fprintf(stderr, "epx bench: --vs mpi: too many nodes, %d\n", config->nodes);
            return -1;
        }
        used += (size_t)n;
    }
    return 0;
}

/* What was fastest: docs/bench.md has the numbers. */
static int mpirun_words(const struct bench_config *config, const char *shm_path, struct mpirun *run)
{
    /* Ranks that wait spin; with more ranks than cores they must let the others run. */
    const char *yield = config->ranks > sysconf(_SC_NPROCESSORS_ONLN) ? "1" : "0";
    const char *const always[] = {"mpirun",
                                  "-n",
                                  run->ranks,
                                  "--oversubscribe",
                                  "--allow-run-as-root",
                                  "--bind-to",
                                  "none",
                                  "--mca",
                                  "mpi_yield_when_idle",
                                  yield,
                                  "--mca",
                                  "btl_vader_single_copy_mechanism",
                                  "cma",
                                  NULL};
    /* The baseline takes the place of ssh (bench/mpi/node.h). */
    const char *const nodes[] = {
        "--host", run->hosts, "--mca",          "plm_rsh_agent", run->agent,           "--mca", "pml", "ob1",
        "--mca",  "btl",      "self,vader,tcp", "--mca",         "btl_tcp_if_include", "lo",    NULL};
    const char *const last[] = {run->program, shm_path, NULL};

    run->n = 0;
    snprintf(run->ranks, sizeof(run->ranks), "%d", config->ranks);
    snprintf(run->agent, sizeof(run->agent), "%s --node", run->program);
    add_words(run, always);
    if (config->nodes > 1) {
        if (list_hosts(config, run->hosts, sizeof(run->hosts)) != 0)
            return -1;
        add_words(run, nodes);
    }
    add_words(run, last);
    run->argv[run->n] = NULL;
    return 0;
}

pid_t bench_team_start_mpi(const struct bench_config *config, const char *shm_path, int log_fd)
{
    static struct mpirun run;
    pid_t parent = getpid(), pid;

    if (find_baseline(run.program, sizeof(run.program)) != 0)
        return -1;
    if (!in_path("mpirun")) {
        fprintf(stderr, "epx bench: --vs mpi needs mpirun, which is not in PATH. %s.\n", packages);
        return -1;
    }
    if (mpirun_words(config, shm_path, &run) != 0)
        return -1;
    fflush(NULL);
    pid = fork();
    if (pid < 0)
        fprintf(stderr, "epx bench: cannot fork: %s\n", strerror(errno));
    if (pid != 0)
        return pid;
    die_with_parent(parent);
    dup2(log_fd, STDOUT_FILENO);
    dup2(log_fd, STDERR_FILENO);
    execvp("mpirun", (char *const *)run.argv);
    _exit(127);
}

int bench_team_poll(pid_t pid)
{
    int status;

    errno = 0;
    if (waitpid(pid, &status, WNOHANG) != pid)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int bench_team_end(pid_t pid, int limit_ms)
{
    enum { STEP_MS = 50, TERM_MS = 5000 };
    int waited, code;

    for (waited = 0; waited < limit_ms + TERM_MS; waited += STEP_MS) {
        if ((code = bench_team_poll(pid)) >= 0)
            return code;
        if (errno == ECHILD)
            return -1;
        if (waited >= limit_ms && waited < limit_ms + STEP_MS)
            kill(pid, SIGTERM);
        usleep(STEP_MS * 1000);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return 128 + SIGKILL;
}

int bench_wait_child(pid_t pid, int limit_ms)
{
    int waited, status;

    for (waited = 0; waited < limit_ms; waited += 2) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return status == 0 ? 0 : -1;
        usleep(2000);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return -1;
}
