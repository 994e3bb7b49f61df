/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a process in which threads may still call a network's library: of groups that were not destroyed, or left
 * there because the library did not return in time (request.c). Destructors of libraries run then, and free what such a
 * thread uses: the process would end by a signal in the place of its exit status.
 *
 * The loader ends libraries in the order in which it has loaded them. The network's library was loaded by this one, so
 * this one's destructor runs first, and after the exit handlers of the program, which may still destroy groups. It asks
 * the threads to stay away from the network, and waits for them, but not for long.
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
} known = {.lock = PTHREAD_MUTEX_INITIALIZER};

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

static int all_stay_away(void)
{
    int all = 1;

    for (struct caller *caller = known.callers; caller; caller = caller->next)
        all &= caller->stays_away(caller->of);
    return all;
}

/* The thread that ends the process may have been interrupted by a signal anywhere: it waits for no lock. */
__attribute__((destructor)) static void keep_from_networks(void)
{
    struct budget budget = budget_of(PROXY_CLOSE_MS);

    if (__atomic_load_n(&known.pid, __ATOMIC_RELAXED) != getpid() || pthread_mutex_trylock(&known.lock))
        return;
    while (!all_stay_away() && budget_spend(&budget))
        pause_ns(CHECK_NS);
    pthread_mutex_unlock(&known.lock);
}
