/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stopping. A rank that gives up an operation tells its caller so, and the caller may then use the memory of that
 * operation for something else. Before that, the network must have stopped reading it: a put that reads it later would
 * deliver wrong rows, which the receiver counts as good.
 *
 *   kernel (kernel/begin_end.h) or host       this thread
 *   stop = 1, ring the ring's bell  ------->  drops pending puts, aborts excepted (alarm.c), and all commands to come
 *                                             waits until every posted put with bytes has completed, or its peer is
 *                                             lost; after a quarter of the deadline, or where the endpoint is broken,
 *                                             closes it
 *   wait until stopped = 1          <-------  stopped = 1: nothing reads this rank's memory any more
 *
 * There is no way back: a group that recovers opens new proxies.
 */
#include "proxy/internal.h"
#include "util/pause.h"

#define STOP_POLL_NS 20000

enum {
    STOP_WAITS = 8
}; /* as in kernel/begin_end.h: time in which the process was stopped is not held against its proxies */

/* Keeps the aborts among the pending puts of a peer. */
static void drop_pending(struct proxy_thread *t, struct peer *peer)
{
    const uint32_t mask = t->depth - 1;
    uint32_t i, kept = peer->head;

    for (i = peer->head; i != peer->tail; i++) {
        const struct pending *p = &peer->queue[i & mask];

        if (is_alarm(&t->group->options, p->counter))
            peer->queue[kept++ & mask] = *p;
        else
            commands_drop(t, peer, p->count);
    }
    peer->tail = kept;
}

/* What is still in flight will not complete in time: a closed endpoint reads nothing. */
static void close_endpoint(struct proxy_thread *t)
{
    int i;

    set_state(t, STATE_CLOSE);
    if (t->net)
        t->ops->close(t->net);
    t->net = NULL;
    t->broken = 1;
    for (i = 0; i < t->npeers; i++) {
        t->peers[i].dead = 1;
        drop_pending(t, &t->peers[i]);
        t->peers[i].head = t->peers[i].tail;
        window_forget(t, &t->peers[i]);
    }
    t->still_read = 0;
}

void stop_begin(struct proxy_thread *t)
{
    int i;

    if (t->stopping)
        return;
    t->stopping = 1;
    t->stop_by_ns = loop_now(t) + (uint64_t)t->group->options.timeout_ms * 1000000u / 4;
    for (i = 0; i < t->npeers; i++)
        drop_pending(t, &t->peers[i]);
}

static int is_read(const struct proxy_thread *t)
{
    return t->bytes_in_flight > 0 || t->still_read > 0;
}

/* At the end of an iteration: aborts that were pushed before the stop are then with the network, and a caller that
 * closes the endpoint next does not take them back. */
void stop_progress(struct proxy_thread *t)
{
    if (t->stopping == 2)
        return;
    if (is_read(t) && (t->broken || loop_now(t) >= t->stop_by_ns))
        close_endpoint(t);
    if (is_read(t))
        return;
    t->stopping = 2;
    /* Release: pairs with the acquires of network_stop() in kernel/begin_end.h and of proxy_stop(). */
    __atomic_store_n(t->ring.dev.stopped, 1, __ATOMIC_RELEASE);
    t->ring_bell = 1;
}

static int is_stopped(struct proxy_thread *t)
{
    if (t->group->manual)
        proxy_progress(t);
    return __atomic_load_n(t->ring.dev.stopped, __ATOMIC_ACQUIRE) == 1; /* pairs with stop_progress() */
}

/* One of STOP_WAITS waits that take half the deadline together. */
static int wait_stopped(struct proxy_thread *t)
{
    const struct proxy_group *g = t->group;
    const uint64_t ns = (uint64_t)g->options.timeout_ms * 1000000u / (2 * STOP_WAITS);
    const uint64_t deadline = g->env->now_ns(g->env->self) + ns;

    while (!is_stopped(t) && !g->manual && g->env->now_ns(g->env->self) < deadline)
        pause_ns(STOP_POLL_NS);
    return is_stopped(t);
}

int proxy_stop(struct proxy_group *g)
{
    int i, n = 0, stopped = 1; /* n: waits in vain, of all threads together, which stop side by side */

    if (!g->connected)
        return 1;
    for (i = 0; i < g->options.threads; i++) {
        /* Release: pairs with the acquire in stop_asked(). */
        __atomic_store_n(g->threads[i].ring.dev.stop, 1, __ATOMIC_RELEASE);
        cpu_env_ring(g->env, g->threads[i].ring.dev.bell);
    }
    for (i = 0; i < g->options.threads; i++) {
        /* 2: a kernel has waited for it already. Pairs with the release in network_stop(). */
        const int waits = __atomic_load_n(g->threads[i].ring.dev.stopped, __ATOMIC_ACQUIRE) == 2 ? 1 : STOP_WAITS;

        while (n < waits && !wait_stopped(&g->threads[i]))
            n++;
        stopped &= is_stopped(&g->threads[i]);
    }
    return stopped;
}
