/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a process in which threads may still call a network's library: of groups that were not destroyed, or left
 * there because the library did not return in time (request.c). Destructors of libraries run then, and free what such a
 * thread uses: the process would end by a signal in the place of its exit status.
 *
 * The loader ends libraries in the order in which it has loaded them. The network's library was loaded by this one, so
 * this one's destructor runs first, and after the exit handlers of the program, which may still destroy groups. From
 * then on no thread begins a call of the network, and those that are there are waited for, but not for long.
 *
 *   destructor                                    a thread
 *   E1 known.over = 1                             T1 its lock
 *   E2 each thread's lock: is it inside?          T2 known.over? else inside = 1
 *   E3 tell it, unlock, look again                T3 unlock, call
 *
 * If T1 comes before E2, E2 sees what T2 has written; otherwise T2 sees known.over.
 */
#include <pthread.h>
#include <unistd.h>

#include "proxy/internal.h"
#include "util/pause.h"

#define CHECK_NS 200000u

static struct {
    pthread_mutex_t lock;
    struct caller *callers;
    pid_t pid; /* a child of fork() has the list, and none of the threads */
    int over;  /* shared: libraries are being ended */
} known = {.lock = PTHREAD_MUTEX_INITIALIZER};

int at_exit_began(void)
{
    return __atomic_load_n(&known.over, __ATOMIC_RELAXED);
}

void at_exit_add(struct caller *caller)
{
    pthread_mutex_lock(&known.lock);
    if (known.pid != getpid())
        known.callers = NULL;
    __atomic_store_n(&known.pid, getpid(), __ATOMIC_RELAXED);
    caller->next = known.callers;
    known.callers = caller;
    pthread_mutex_unlock(&known.lock);
}

void at_exit_remove(const struct caller *caller)
{
    struct caller **link = &known.callers;

    pthread_mutex_lock(&known.lock);
    while (*link && *link != caller)
        link = &(*link)->next;
    if (*link)
        *link = caller->next;
    pthread_mutex_unlock(&known.lock);
}

/* Waits for no lock: the thread that ends the process may have been interrupted by a signal anywhere. */
static int all_stay_away(void)
{
    int all = 1;

    if (pthread_mutex_trylock(&known.lock))
        return 0;
    for (struct caller *caller = known.callers; caller; caller = caller->next)
        all &= caller->stays_away(caller->of);
    pthread_mutex_unlock(&known.lock);
    return all;
}

__attribute__((destructor)) static void keep_from_networks(void)
{
    struct budget budget = budget_of(PROXY_CLOSE_MS);

    __atomic_store_n(&known.over, 1, __ATOMIC_RELAXED);
    while (__atomic_load_n(&known.pid, __ATOMIC_RELAXED) == getpid() && !all_stay_away() && budget_spend(&budget))
        pause_ns(CHECK_NS);
}
