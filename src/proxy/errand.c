/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a group's caller wants of a network besides the turns: opening, registering, connecting, closing. The library under
 * a network may never come back from a call (a driver that hangs, a lock that a killed process held), so no thread of the
 * caller's calls it: the endpoint's own thread does, and the caller waits for that with a deadline.
 *
 *   caller                                              the endpoint's thread
 *   errand = E, wakes it        ------------------->    after its turn: does E
 *   waits, with patience        <-------------------    outcome, text; errand = none; turns again, if connected
 *
 *   its end: abandoned = 1, detached                    back too late: sees it, and ends without another call
 *
 * Whatever an abandoned thread can still touch stays as it is until the process ends: its group's memory, the rings, the
 * endpoint, the heap (proxy_close and its callers see to that). The lock is never held during a call of the network.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/cpu/cpu.h"
#include "proxy/internal.h"
#include "util/clock.h"
#include "util/keep.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/status.h"

#define LOOK_NS 200000u    /* between two looks at whether a thread has made a turn, or has ended */
#define WAIT_NS 20000000u  /* ... whether an errand is done, where nothing wakes who waits */
#define SPEND_NS 50000000u /* most that one look may cost */
#define ENDING_MS 500

static const char *const doings[] = {
    [DOING_NOTHING] = "between two calls",
    [DOING_OPEN] = "opening an endpoint",
    [DOING_REGISTER] = "registering the heap",
    [DOING_CONNECT] = "connecting",
    [DOING_POLL] = "polling",
    [DOING_PUT] = "posting",
    [DOING_FLUSH] = "ringing the doorbell",
    [DOING_ARRIVALS] = "making arrivals visible to the device",
    [DOING_ARM] = "preparing to sleep",
    [DOING_SLEEP] = "sleeping",
    [DOING_CLOSE] = "closing the endpoint",
};

/* "polling", "posting to rank 3" */
static void what_it_does(const struct proxy_thread *t, char *text, size_t bytes)
{
    const int doing = __atomic_load_n(&t->doing, __ATOMIC_RELAXED);
    const int peer = __atomic_load_n(&t->doing_with, __ATOMIC_RELAXED);

    if (doing == DOING_PUT || doing == DOING_CONNECT)
        snprintf(text, bytes, "%s to rank %d", doings[doing], peer);
    else
        snprintf(text, bytes, "%s", doings[doing]);
}

/* ---- The endpoint's thread ---------------------------------------------------------------------------------- */

static epx_status open_endpoint(struct proxy_thread *t)
{
    const struct proxy_options *o = &t->group->options;
    const struct net_options net = {.rank = o->rank,
                                    .nranks = o->nranks,
                                    .index = t->index,
                                    .timeout_ms = o->timeout_ms,
                                    .provider = t->group->provider,
                                    .world = o->world,
                                    .memory_kind = o->memory_kind};

    doing(t, DOING_OPEN);
    return t->ops->open(&net, &t->net);
}

static epx_status register_heap(struct proxy_thread *t)
{
    const struct proxy_options *o = &t->group->options;
    const int far = net_memory_far(o->memory_kind);
    const struct net_memory memory = {.base = o->heap,
                                      .bytes = o->heap_bytes,
                                      .kind = far ? o->memory_kind : EPX_DEVICE_CPU,
                                      .index = o->memory_index,
                                      .dmabuf = far ? o->dmabuf : -1};
    epx_status status = far && o->device ? o->device->ops->use(o->device) : EPX_OK;

    doing(t, DOING_REGISTER);
    if (status == EPX_OK)
        status = t->ops->add_region(t->net, &memory, &t->card.region);
    if (status == EPX_OK)
        status = t->ops->address(t->net, &t->card.address);
    return status;
}

static epx_status connect_peers(struct proxy_thread *t)
{
    epx_status status = EPX_OK;

    for (int p = 0; p < t->npeers && status == EPX_OK; p++) {
        struct peer *peer = &t->peers[p];
        const struct proxy_card *card = &t->peer_cards[p];

        if (peer->dead)
            continue;
        peer->region_bytes = card->region.bytes < COMMAND_MAX_OFFSET ? card->region.bytes : COMMAND_MAX_OFFSET;
        __atomic_store_n(&t->doing_with, peer->rank, __ATOMIC_RELAXED);
        doing(t, DOING_CONNECT);
        status = t->ops->connect(t->net, peer->rank, &card->address, &card->region);
    }
    return status;
}

static epx_status close_endpoint(struct proxy_thread *t)
{
    doing(t, DOING_CLOSE);
    if (t->net)
        t->ops->close(t->net);
    t->net = NULL;
    return EPX_OK;
}

static epx_status run(struct proxy_thread *t, enum errand errand)
{
    epx_status status = EPX_OK;

    switch (errand) {
    case ERRAND_NONE:
        break;
    case ERRAND_OPEN:
        status = open_endpoint(t);
        break;
    case ERRAND_REGISTER:
        status = register_heap(t);
        break;
    case ERRAND_CONNECT:
        status = connect_peers(t);
        break;
    case ERRAND_CLOSE:
        status = close_endpoint(t);
        break;
    }
    doing(t, DOING_NOTHING);
    return status;
}

/* With the lock held, but for the calls. 0: the thread shall end. */
static int next_errand(struct proxy_thread *t)
{
    const enum errand errand = (enum errand)t->errand;
    epx_status status;

    pthread_mutex_unlock(&t->lock);
    status = run(t, errand);
    pthread_mutex_lock(&t->lock);
    if (t->abandoned)
        return 0;
    t->outcome = status;
    snprintf(t->text, sizeof(t->text), "%s", status == EPX_OK ? "" : epx_last_error());
    t->connected |= errand == ERRAND_CONNECT && status == EPX_OK;
    __atomic_store_n(&t->errand, ERRAND_NONE, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&t->changed);
    return errand != ERRAND_CLOSE;
}

static void *thread_main(void *arg)
{
    struct proxy_thread *t = arg;

    log_set_rank(t->group->options.rank);
    if (t->group->options.pin)
        thread_pin(t);
    pthread_mutex_lock(&t->lock);
    while (!t->abandoned) {
        if (t->errand != ERRAND_NONE) {
            if (!next_errand(t))
                break;
        } else if (t->connected) {
            pthread_mutex_unlock(&t->lock);
            thread_turns(t);
            pthread_mutex_lock(&t->lock);
        } else {
            pthread_cond_wait(&t->changed, &t->lock); /* for its caller, who ends it by ERRAND_CLOSE */
        }
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* ---- The caller --------------------------------------------------------------------------------------------- */

epx_status errand_begin(struct proxy_thread *t)
{
    pthread_condattr_t attr;
    char name[16];
    epx_status status = EPX_OK;

    pthread_mutex_init(&t->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&t->changed, &attr);
    pthread_condattr_destroy(&attr);
    t->begun = 1;
    if (t->group->in_place)
        return EPX_OK;
    snprintf(name, sizeof(name), "epx-proxy-%d", t->index);
    status = cpu_thread_start(&t->pthread, name, thread_main, t);
    t->started = status == EPX_OK;
    return status;
}

void errand_ask(struct proxy_thread *t, enum errand errand)
{
    if (t->abandoned)
        return;
    if (t->group->in_place) {
        t->outcome = run(t, errand);
        return;
    }
    if (!t->started)
        return;
    pthread_mutex_lock(&t->lock);
    __atomic_store_n(&t->errand, errand, __ATOMIC_RELEASE); /* pairs with the acquire in thread_turns */
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    thread_wake(t);
}

/* The thread stays where it is. */
static epx_status abandon(struct proxy_thread *t, int ms)
{
    char does[64];

    what_it_does(t, does, sizeof(does));
    snprintf(t->text, sizeof(t->text),
             "rank %d: proxy %d has not come back from the network (%s) within %d ms: it was %s; the thread, its "
             "endpoint and "
             "the group's memory stay until the process ends",
             t->group->options.rank, t->index, t->ops->name, ms, does);
    __atomic_store_n(&t->stats.stuck, 1, __ATOMIC_RELAXED);
    log_line(LOG_WARN, "%s", t->text);
    pthread_detach(t->pthread);
    return fail(EPX_ERR_TIMEOUT, "%s", t->text);
}

struct patience patience_of(int ms)
{
    return (struct patience){.ms = ms, .left_ns = (uint64_t)ms * 1000000u, .last_ns = clock_ns()};
}

/* What has passed since it was last called is spent, but no more than the longest look: where this thread did not run, because
 * the process was stopped or others had its core, the one that it waits for did not either. 0: nothing is left. */
static int spend(struct patience *p)
{
    const uint64_t now = clock_ns(), passed = now - p->last_ns < SPEND_NS ? now - p->last_ns : SPEND_NS;

    p->last_ns = now;
    p->left_ns = p->left_ns > passed ? p->left_ns - passed : 0;
    return p->left_ns > 0;
}

epx_status errand_await(struct proxy_thread *t, struct patience *patience)
{
    if (t->abandoned)
        return fail(EPX_ERR_TIMEOUT, "%s", t->text);
    if (t->group->in_place)
        return t->outcome; /* and its message is this thread's */
    if (!t->started)
        return EPX_OK;
    pthread_mutex_lock(&t->lock);
    while (t->errand != ERRAND_NONE && spend(patience)) {
        const uint64_t until = clock_ns() + WAIT_NS;
        const struct timespec at = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};

        pthread_cond_timedwait(&t->changed, &t->lock, &at);
    }
    t->abandoned = t->errand != ERRAND_NONE;
    pthread_mutex_unlock(&t->lock);
    if (t->abandoned)
        return abandon(t, patience->ms);
    return t->outcome == EPX_OK ? EPX_OK : fail(t->outcome, "%s", t->text);
}

/* 0: it has ended, and is joined. The joins with a limit know only clocks that may be set. */
static int join_patiently(pthread_t thread, struct patience *patience)
{
    int rc;

    while ((rc = pthread_tryjoin_np(thread, NULL)) == EBUSY && spend(patience))
        pause_ns(LOOK_NS);
    return rc;
}

epx_status errand_end(struct proxy_thread *t, struct patience *patience)
{
    struct patience ending = patience_of(ENDING_MS);
    epx_status status = errand_await(t, patience);

    if (status == EPX_OK && t->started) {
        /* It makes no call any more, but libraries may have something to tidy up when a thread of theirs ends. */
        t->abandoned = join_patiently(t->pthread, &ending) != 0;
        if (t->abandoned)
            return abandon(t, patience->ms);
    }
    if (status == EPX_OK)
        t->started = 0;
    return status;
}

void errand_free(struct proxy_thread *t)
{
    if (!t->begun)
        return;
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
}

/* ---- Does it live? ------------------------------------------------------------------------------------------ */

/* Does it begin another turn? */
static int moves(struct proxy_thread *t, int ms)
{
    const uint64_t before = __atomic_load_n(&t->turns, __ATOMIC_RELAXED);
    struct patience patience = patience_of(ms);

    thread_wake(t);
    while (__atomic_load_n(&t->turns, __ATOMIC_RELAXED) == before && spend(&patience))
        pause_ns(LOOK_NS);
    return __atomic_load_n(&t->turns, __ATOMIC_RELAXED) != before;
}

int proxy_answers(struct proxy_group *g, int ms, char *text, size_t bytes)
{
    int all = 1;

    for (int i = 0; i < g->options.threads && !g->in_place; i++) {
        struct proxy_thread *t = &g->threads[i];
        const int stuck = t->abandoned || (g->connected && !moves(t, ms));
        char does[64];

        __atomic_store_n(&t->stats.stuck, (uint64_t)stuck, __ATOMIC_RELAXED);
        if (!stuck || !all)
            continue;
        what_it_does(t, does, sizeof(does));
        snprintf(text, bytes, "proxy %d of rank %d does not come back from the network (%s): it is %s", i,
                 g->options.rank, t->ops->name, does);
        all = 0;
    }
    return all;
}

/* ---- One call, without an endpoint -------------------------------------------------------------------------- */

struct guarded {
    epx_status (*fn)(void *arg);
    void *arg;
    epx_status status;
    char text[256];
};

static void *guarded_main(void *arg)
{
    struct guarded *call = arg;

    call->status = call->fn(call->arg);
    snprintf(call->text, sizeof(call->text), "%s", call->status == EPX_OK ? "" : epx_last_error());
    return NULL;
}

epx_status proxy_guard(const char *what, int ms, epx_status (*fn)(void *arg), void *arg, int *left)
{
    struct patience patience = patience_of(ms);
    struct guarded *call;
    pthread_t thread;
    epx_status status;

    *left = 0;
    if (proxy_driver)
        return fn(arg);
    call = calloc(1, sizeof(*call));
    if (!call)
        return fail(EPX_ERR_MEMORY, "no memory to ask the network");
    call->fn = fn;
    call->arg = arg;
    status = cpu_thread_start(&thread, "epx-ask", guarded_main, call);
    if (status != EPX_OK)
        goto free_call;
    if (join_patiently(thread, &patience) != 0) {
        pthread_detach(thread);
        keep_forever(call);
        *left = 1;
        return fail(EPX_ERR_TIMEOUT, "%s: the library has not come back within %d ms", what, ms);
    }
    status = call->status == EPX_OK ? EPX_OK : fail(call->status, "%s", call->text);

free_call:
    free(call);
    return status;
}
