/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/proxy.h"

#include <stdlib.h>

#include "sim/cost.h"
#include "sim/device.h"
#include "sim/sched.h"
#include "util/status.h"

/* A real one sleeps up to a millisecond while something is unanswered. */
#define NAP_NS 2000000u

struct proxy_task {
    struct proxy_group *proxies;
    int rank, index;
    struct doorbell *bell;
    int signalled; /* since its turn began: look again before parking */
    int stop, ended;
    struct proxy_task *next;
};

static struct proxy_task *tasks[SIM_MAX_RANKS]; /* of each rank */

/* One turn. With costs, the commands that it took take their time. */
static int step(const struct proxy_task *p)
{
    struct proxy_stats before, after;
    int busy;

    if (!cost_model())
        return proxy_step(p->proxies, p->index);
    proxy_stats_read(p->proxies, &before);
    busy = proxy_step(p->proxies, p->index);
    proxy_stats_read(p->proxies, &after);
    cost_commands(after.commands - before.commands);
    return busy;
}

static void proxy_main(void *arg)
{
    struct proxy_task *p = arg;

    while (!p->stop) {
        const uint32_t seen = p->bell->seq;

        p->signalled = 0;
        p->bell->waiters = 1; /* whoever pushes a command from now on rings */
        if (step(p))
            sim_yield();
        else if (!p->signalled && !p->stop)
            sim_park_bell(p->bell, seen, sim_now() + NAP_NS, "proxy: nothing to do");
    }
    p->ended = 1;
    sim_wake(&p->ended);
}

/* Only tasks of its own rank call for a proxy. */
static struct proxy_task *find(const struct proxy_group *proxies, int index)
{
    struct proxy_task *p = tasks[sim_rank()];

    while (p && (p->proxies != proxies || p->index != index))
        p = p->next;
    return p;
}

static void signal_task(struct proxy_task *p)
{
    p->signalled = 1;
    sim_wake(p->bell);
}

static epx_status start(struct proxy_group *proxies, int index)
{
    struct proxy_task *p = calloc(1, sizeof(*p));

    if (!p)
        return fail(EPX_ERR_MEMORY, "simulated proxy: no memory");
    p->proxies = proxies;
    p->rank = sim_rank();
    p->index = index;
    p->bell = proxy_ring(proxies, index)->bell;
    if (sim_spawn(SIM_PROXY, p->rank, index, proxy_main, p) != 0) {
        free(p);
        return fail(EPX_ERR_MEMORY, "simulated proxy: no memory for its task");
    }
    p->next = tasks[p->rank];
    tasks[p->rank] = p;
    return EPX_OK;
}

static void wake(struct proxy_group *proxies, int index)
{
    struct proxy_task *p = find(proxies, index);

    if (p)
        signal_task(p);
}

static void stop(struct proxy_group *proxies, int index)
{
    struct proxy_task *p = find(proxies, index), **link;

    if (!p)
        return;
    link = &tasks[p->rank];
    p->stop = 1;
    signal_task(p);
    while (!p->ended)
        sim_park(&p->ended, SIM_NEVER, "waits for its proxy to end");
    while (*link != p)
        link = &(*link)->next;
    *link = p->next;
    free(p);
}

void sim_proxy_notify(int rank, int index)
{
    for (struct proxy_task *p = tasks[rank]; p; p = p->next)
        if (p->index == index)
            signal_task(p);
}

void sim_proxy_reset(void)
{
    for (int r = 0; r < SIM_MAX_RANKS; r++) {
        while (tasks[r]) {
            struct proxy_task *p = tasks[r];

            tasks[r] = p->next;
            free(p);
        }
    }
}

const struct proxy_driver sim_proxy_driver = {.start = start, .wake = wake, .stop = stop};
