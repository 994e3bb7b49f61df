/* SPDX-License-Identifier: Apache-2.0 */
/* The runner: ranks of a case as processes, threads or coroutines. */
#include "tests/lib/net_suite_rank.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include "tests/lib/slow.h"
#include "util/clock.h"

enum { CASE_LIMIT_S = 600, FIBER_STACK = 256 << 10 };

struct run {
    const struct net_suite *suite;
    const struct suite_case *what;
    struct suite_shared *shared;
    void *world;
};

int net_suite_count(void)
{
    return suite_case_count;
}

const char *net_suite_name(int index)
{
    return suite_cases[index].name;
}

/* Cases that wait for it to pass wait only up to a point. */
static int network_timeout(const struct net_suite *suite, const struct suite_case *what)
{
    const int times = suite_time_scale(), is_short = what->timeout_ms && !(suite->finds_deaths && what->loses);

    return slow_ms(is_short ? what->timeout_ms * (times < 3 ? times : 3) : SUITE_LIMIT_MS * times);
}

static void be_rank(struct run *run, int rank)
{
    struct suite_rank self = {.suite = run->suite,
                              .shared = run->shared,
                              .world = run->world,
                              .rank = rank,
                              .nranks = run->what->nranks,
                              .timeout_ms = network_timeout(run->suite, run->what)};
    char text[512];

    /* Asked here: the test program itself must not open a library before it forks. */
    if (run->suite->ops->probe(run->suite->provider ? run->suite->provider : "", text, sizeof(text)))
        suite_skip(&self, "%s", text);
    else
        run->what->body(&self);
    suite_close(&self);
}

/* ---- Processes */

static void end_all(struct run *run)
{
    for (int i = 0; i < run->what->nranks; i++)
        if (atomic_load(&run->shared->pids[i]) > 0)
            kill(atomic_load(&run->shared->pids[i]), SIGKILL);
}

/* A rank that ends by itself in another way than by returning from its case is a failure; one that is gone is not. */
static void take_end(struct run *run, int rank, int status)
{
    struct suite_rank self = {.shared = run->shared, .rank = rank};

    atomic_store(&run->shared->pids[rank], 0);
    if (atomic_load(&run->shared->gone[rank]) || (WIFEXITED(status) && !WEXITSTATUS(status)))
        return;
    if (WIFSIGNALED(status))
        suite_fail(&self, "ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        suite_fail(&self, "ended with exit code %d", WEXITSTATUS(status));
}

static void wait_processes(struct run *run)
{
    const int limit_s = CASE_LIMIT_S * suite_time_scale();
    const uint64_t deadline = clock_ns() + (uint64_t)limit_s * 1000000000u;
    struct suite_rank self = {.shared = run->shared};
    int status, left;

    do {
        left = 0;
        for (int i = 0; i < run->what->nranks; i++) {
            pid_t pid = atomic_load(&run->shared->pids[i]);
            if (pid > 0 && waitpid(pid, &status, WNOHANG) == pid)
                take_end(run, i, status);
            else
                left += pid > 0;
        }
        if (left && clock_ns() > deadline) {
            suite_fail(&self, "%d ranks did not end within %d s", left, limit_s);
            end_all(run);
        }
        usleep(500);
    } while (left);
}

/* The handlers of a test framework would jump back into its main loop, in a rank's process. */
static void own_signals(void)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        signal(faults[i], SIG_DFL);
}

static int run_processes(struct run *run)
{
    for (int i = 0; i < run->what->nranks; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            end_all(run);
            return -1;
        }
        if (!pid) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            own_signals();
            be_rank(run, i);
            _exit(0); /* not through the handlers of the test program */
        }
        atomic_store(&run->shared->pids[i], pid);
    }
    wait_processes(run);
    return 0;
}

/* ---- Threads */

struct rank_thread {
    struct run *run;
    int rank;
};

static void *thread_main(void *arg)
{
    struct rank_thread *self = arg;

    be_rank(self->run, self->rank);
    return NULL;
}

static int run_threads(struct run *run)
{
    pthread_t threads[SUITE_RANKS];
    struct rank_thread ranks[SUITE_RANKS];
    int started = 0;

    for (; started < run->what->nranks; started++) {
        ranks[started] = (struct rank_thread){run, started};
        if (pthread_create(&threads[started], NULL, thread_main, &ranks[started]))
            break;
    }
    if (started < run->what->nranks)
        atomic_store(&run->shared->stop, 1);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return started == run->what->nranks ? 0 : -1;
}

/* ---- Coroutines: one after the other in a circle */

static struct {
    struct run *run;
    int count, at, ended[SUITE_RANKS];
    ucontext_t home, ranks[SUITE_RANKS];
} fibers;

static void fiber_switch(void)
{
    const int from = fibers.at;

    do
        fibers.at = (fibers.at + 1) % fibers.count;
    while (fibers.ended[fibers.at]);
    if (fibers.at != from)
        swapcontext(&fibers.ranks[from], &fibers.ranks[fibers.at]);
}

static void fiber_main(void)
{
    const int me = fibers.at;

    be_rank(fibers.run, me);
    fibers.ended[me] = 1;
    for (int i = 0; i < fibers.count; i++) {
        if (!fibers.ended[i]) {
            fibers.at = i;
            setcontext(&fibers.ranks[i]);
        }
    }
    setcontext(&fibers.home);
}

/* On its own: compilers take getcontext for something that may return twice, and worry about loop counters. */
static void make_fiber(ucontext_t *fiber, char *stack)
{
    getcontext(fiber);
    fiber->uc_stack.ss_sp = stack;
    fiber->uc_stack.ss_size = FIBER_STACK;
    makecontext(fiber, fiber_main, 0);
}

static int run_fibers(struct run *run)
{
    char *stacks = malloc((size_t)FIBER_STACK * SUITE_RANKS);

    if (!stacks)
        return -1;
    memset(&fibers, 0, sizeof(fibers));
    fibers.run = run;
    fibers.count = run->what->nranks;
    for (int i = 0; i < fibers.count; i++)
        make_fiber(&fibers.ranks[i], stacks + (size_t)FIBER_STACK * (size_t)i);
    suite_switch = fiber_switch;
    swapcontext(&fibers.home, &fibers.ranks[0]);
    suite_switch = NULL;
    free(stacks);
    return 0;
}

/* ---- A case */

static const char *why_skipped(const struct net_suite *suite, const struct suite_case *what)
{
    if (what->needs_kill && suite->ranks != NET_SUITE_PROCESSES && !suite->world_kill)
        return "this network has no way to end one rank alone";
    for (int i = 0; i < NET_SUITE_GAPS && suite->gaps[i].name; i++)
        if (!strcmp(suite->gaps[i].name, what->name))
            return suite->gaps[i].why;
    return NULL;
}

enum net_suite_outcome suite_run_case(const struct net_suite *suite, const struct suite_case *what, char *text,
                                      size_t bytes)
{
    struct run run = {.suite = suite, .what = what};
    const char *skipped = why_skipped(suite, run.what);
    enum net_suite_outcome outcome = NET_SUITE_FAILED;
    int failed;

    snprintf(text, bytes, "%s", skipped ? skipped : "");
    if (skipped)
        return NET_SUITE_SKIPPED;
    run.shared = mmap(NULL, sizeof(*run.shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (run.shared == MAP_FAILED) {
        snprintf(text, bytes, "no shared memory: %s", strerror(errno));
        return NET_SUITE_FAILED;
    }
    if (suite->world_open)
        run.world = suite->world_open(run.what->nranks);
    failed = suite->ranks == NET_SUITE_PROCESSES ? run_processes(&run)
             : suite->ranks == NET_SUITE_THREADS ? run_threads(&run)
                                                 : run_fibers(&run);
    if (suite->world_close)
        suite->world_close(run.world);
    if (!failed) {
        outcome = (enum net_suite_outcome)run.shared->outcome;
        snprintf(text, bytes, "%s", run.shared->text);
    } else {
        snprintf(text, bytes, "ranks could not be started: %s", strerror(errno));
    }
    munmap(run.shared, sizeof(*run.shared));
    return outcome;
}

enum net_suite_outcome net_suite_run(const struct net_suite *suite, int index, char *text, size_t bytes)
{
    return suite_run_case(suite, &suite_cases[index], text, bytes);
}
