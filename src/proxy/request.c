/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests to the thread that owns an endpoint: open, register, connect, close. The library under a network may never
 * return from a call (a driver that hangs, a lock that a killed process held). So the caller's threads never call it:
 * the endpoint's own thread does, and the caller waits for that thread with a deadline.
 *
 *   caller                                              the endpoint's thread
 *   request = R, wakes it       ------------------->    after the current iteration: performs R
 *   waits, within a budget      <-------------------    outcome, text; request = none; runs the loop again, if
 *                                                       connected
 *
 *   budget spent: abandoned = 1, detached               returns too late: sees it, and ends without another call
 *
 * Whatever an abandoned thread can still touch is kept until the process ends: its group's memory, the rings, the
 * endpoint, the heap (proxy_close and its callers see to that). The lock is never held during a call of the network.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "device/cpu/cpu.h"
#include "proxy/internal.h"
#include "util/clock.h"
#include "util/core_wait.h"
#include "util/leak.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/runtime.h"
#include "util/sigactions.h"
#include "util/status.h"

#define CHECK_NS 200000u   /* between two checks whether a thread makes progress, or has ended */
#define WAIT_NS 40000000u  /* ... whether a request is done, should a wake-up be missing */
#define SPEND_NS 50000000u /* most that one check may take from a budget */
#define ENDING_MS 500
#define TURNS_FOR_A_CORE 25 /* most that a wait is repeated for a thread that has had no core */

static const char *const state_names[] = {
    [STATE_BETWEEN_CALLS] = "between two calls",
    [STATE_OPEN] = "opening an endpoint",
    [STATE_REGISTER] = "registering the heap",
    [STATE_CONNECT] = "connecting",
    [STATE_POLL] = "polling",
    [STATE_PUT] = "posting",
    [STATE_FLUSH] = "ringing the doorbell",
    [STATE_ARRIVALS] = "making arrivals visible to the device",
    [STATE_ARM] = "preparing to sleep",
    [STATE_SLEEP] = "sleeping",
    [STATE_CLOSE] = "closing the endpoint",
};

/* "polling", "posting to rank 3" */
static void describe_state(const struct proxy_thread *t, char *text, size_t bytes)
{
    const int state = __atomic_load_n(&t->state, __ATOMIC_RELAXED);
    const int peer = __atomic_load_n(&t->state_peer, __ATOMIC_RELAXED);

    if (state == STATE_PUT || state == STATE_CONNECT)
        snprintf(text, bytes, "%s to rank %d", state_names[state], peer);
    else
        snprintf(text, bytes, "%s", state_names[state]);
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
                                    .key = o->key,
                                    .memory_kind = o->memory_kind,
                                    .pci = o->pci,
                                    .gpu = o->memory_index};

    set_state(t, STATE_OPEN);
    return t->ops->open(&net, &t->net);
}

static epx_status register_heap(struct proxy_thread *t)
{
    const struct proxy_options *o = &t->group->options;
    const int gpu = net_memory_is_gpu(o->memory_kind);
    const struct net_memory memory = {.base = o->heap,
                                      .bytes = o->heap_bytes,
                                      .kind = gpu ? o->memory_kind : EPX_DEVICE_CPU,
                                      .index = o->memory_index,
                                      .dmabuf = gpu ? o->dmabuf : -1};
    epx_status status = gpu && o->device ? o->device->ops->use(o->device) : EPX_OK;

    set_state(t, STATE_REGISTER);
    if (status == EPX_OK)
        status = t->ops->add_region(t->net, &memory, &t->own_address.region);
    if (status == EPX_OK)
        status = t->ops->address(t->net, &t->own_address.address);
    return status;
}

static epx_status connect_peers(struct proxy_thread *t)
{
    epx_status status = EPX_OK;

    for (int p = 0; p < t->npeers && status == EPX_OK; p++) {
        struct peer *peer = &t->peers[p];
        const struct proxy_address *exported = &t->peer_addresses[p];

        if (peer->dead)
            continue;
        peer->region_bytes = exported->region.bytes < COMMAND_MAX_OFFSET ? exported->region.bytes : COMMAND_MAX_OFFSET;
        __atomic_store_n(&t->state_peer, peer->rank, __ATOMIC_RELAXED);
        set_state(t, STATE_CONNECT);
        status = t->ops->connect(t->net, peer->rank, &exported->address, &exported->region);
    }
    return status;
}

static epx_status close_endpoint(struct proxy_thread *t)
{
    set_state(t, STATE_CLOSE);
    if (t->net)
        t->ops->close(t->net);
    t->net = NULL;
    return EPX_OK;
}

static epx_status call_network(struct proxy_thread *t, enum request request)
{
    switch (request) {
    case REQUEST_NONE:
        break;
    case REQUEST_OPEN:
        return open_endpoint(t);
    case REQUEST_REGISTER:
        return register_heap(t);
    case REQUEST_CONNECT:
        return connect_peers(t);
    case REQUEST_CLOSE:
        return close_endpoint(t);
    }
    return EPX_OK;
}

/* Libraries load and initialise some of their parts only now: the signal handling of the process stays as it is. */
static epx_status run(struct proxy_thread *t, enum request request)
{
    struct sigactions actions;
    epx_status status;

    if (t->group->in_place) /* no such library in a simulation */
        return call_network(t, request);
    sigactions_save(&actions);
    status = call_network(t, request);
    sigactions_restore(&actions, t->ops->name);
    return status;
}

/* Called with the lock held, and releases it during the call. 0: the thread is to end. A request that comes as the
 * process ends is not served: who waits for it has a deadline. */
static int serve_request(struct proxy_thread *t)
{
    const enum request request = (enum request)t->request;
    epx_status status;

    pthread_mutex_unlock(&t->lock);
    status = run(t, request);
    set_state(t, STATE_BETWEEN_CALLS);
    pthread_mutex_lock(&t->lock);
    if (t->abandoned)
        return 0;
    t->outcome = status;
    snprintf(t->text, sizeof(t->text), "%s", status == EPX_OK ? "" : epx_last_error());
    t->connected |= request == REQUEST_CONNECT && status == EPX_OK;
    t->request = REQUEST_NONE;
    __atomic_store_n(&t->called, 0, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&t->changed);
    return request != REQUEST_CLOSE;
}

static void *thread_main(void *arg)
{
    struct proxy_thread *t = arg;
    int stays = 1;

    log_set_rank(t->group->options.rank);
    __atomic_store_n(&t->tid, (int)gettid(), __ATOMIC_RELAXED);
    if (t->group->options.pin)
        thread_pin(t);
    pthread_mutex_lock(&t->lock);
    while (!t->abandoned && stays) {
        t->inside = !at_exit_began();
        if (t->inside && t->request != REQUEST_NONE) {
            stays = serve_request(t);
        } else if (t->inside && t->connected) {
            pthread_mutex_unlock(&t->lock);
            thread_loop(t);
            pthread_mutex_lock(&t->lock);
        } else {
            t->inside = 0;
            pthread_cond_wait(&t->changed, &t->lock); /* for the caller, who ends it by REQUEST_CLOSE */
        }
    }
    t->ended = 1;
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* ---- The caller --------------------------------------------------------------------------------------------- */

/* With the lock held: the loop ends. */
static void call_thread(struct proxy_thread *t)
{
    __atomic_store_n(&t->called, 1, __ATOMIC_RELEASE); /* pairs with the acquire in thread_loop */
    pthread_cond_broadcast(&t->changed);
}

/* Libraries may have destructors that run when a thread ends. */
static int has_gone(int tid)
{
    return tid && tgkill(getpid(), tid, 0) != 0 && errno == ESRCH;
}

/* The process ends. */
static int leave_network(void *of)
{
    struct proxy_thread *t = of;
    int away, wake;

    if (pthread_equal(t->pthread, pthread_self()))
        return 1; /* it is this thread that ends the process */
    if (pthread_mutex_trylock(&t->lock))
        return 0;
    away = t->ended ? has_gone(t->tid) : !t->inside;
    wake = !t->ended && t->inside && !t->called && !t->abandoned; /* one that was abandoned wakes, if ever, by itself */
    if (wake)
        call_thread(t);
    pthread_mutex_unlock(&t->lock);
    if (wake)
        thread_wake(t);
    return away;
}

epx_status request_start(struct proxy_thread *t)
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
    t->caller = (struct caller){.stays_away = leave_network, .of = t};
    if (t->started)
        at_exit_add(&t->caller);
    return status;
}

void request_submit(struct proxy_thread *t, enum request request)
{
    if (t->abandoned)
        return;
    if (t->group->in_place) {
        t->outcome = run(t, request);
        return;
    }
    if (!t->started)
        return;
    pthread_mutex_lock(&t->lock);
    t->request = (int)request;
    call_thread(t);
    pthread_mutex_unlock(&t->lock);
    thread_wake(t);
}

/* The thread stays blocked where it is. */
static epx_status abandon(struct proxy_thread *t, int ms)
{
    char state[64];

    describe_state(t, state, sizeof(state));
    snprintf(t->text, sizeof(t->text),
             "rank %d: proxy %d is blocked in the network %s (%s) and has not returned within %d ms; the thread, its "
             "endpoint and the group's memory are kept until the process ends",
             t->group->options.rank, t->index, t->ops->name, state, ms);
    __atomic_store_n(&t->stats.stuck, 1, __ATOMIC_RELAXED);
    log_line(LOG_WARN, "%s", t->text);
    pthread_detach(t->pthread);
    return fail(EPX_ERR_TIMEOUT, "%s", t->text);
}

struct budget budget_of(int ms)
{
    return (struct budget){.ms = ms, .left_ns = (uint64_t)ms * 1000000u, .last_ns = clock_ns()};
}

int budget_spend(struct budget *b)
{
    const uint64_t now = clock_ns(), passed = now - b->last_ns < SPEND_NS ? now - b->last_ns : SPEND_NS;

    b->last_ns = now;
    b->left_ns = b->left_ns > passed ? b->left_ns - passed : 0;
    return b->left_ns > 0;
}

epx_status request_wait(struct proxy_thread *t, struct budget *budget)
{
    if (t->abandoned)
        return fail(EPX_ERR_TIMEOUT, "%s", t->text);
    if (t->group->in_place)
        return t->outcome; /* the message is in this thread already */
    if (!t->started)
        return EPX_OK;
    pthread_mutex_lock(&t->lock);
    while (t->request != REQUEST_NONE && budget_spend(budget)) {
        const uint64_t until = clock_ns() + WAIT_NS;
        const struct timespec at = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};

        pthread_cond_timedwait(&t->changed, &t->lock, &at);
    }
    t->abandoned = t->request != REQUEST_NONE;
    pthread_mutex_unlock(&t->lock);
    if (t->abandoned)
        return abandon(t, budget->ms);
    return t->outcome == EPX_OK ? EPX_OK : fail(t->outcome, "%s", t->text);
}

/* 0: the thread has ended and is joined. (pthread_timedjoin_np measures by a clock that an administrator may set.) */
static int join_within(pthread_t thread, struct budget *budget)
{
    int rc;

    while ((rc = pthread_tryjoin_np(thread, NULL)) == EBUSY && budget_spend(budget))
        pause_ns(CHECK_NS);
    return rc;
}

epx_status request_join(struct proxy_thread *t, struct budget *budget)
{
    struct budget ending = budget_of(ENDING_MS);
    epx_status status = request_wait(t, budget);

    if (status == EPX_OK && t->started) {
        /* The thread makes no more calls, but libraries may have destructors that run when a thread ends. */
        t->abandoned = join_within(t->pthread, &ending) != 0;
        if (t->abandoned)
            return abandon(t, budget->ms);
    }
    if (status == EPX_OK)
        t->started = 0;
    return status;
}

void request_free(struct proxy_thread *t)
{
    if (!t->begun)
        return;
    at_exit_remove(&t->caller);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
}

/* ---- Liveness ----------------------------------------------------------------------------------------------- */

/* Does the thread begin another iteration within `ms`? A thread that could run and has hardly run since then is not
 * blocked: other threads have the cores, and it is waited for again. */
static int makes_progress(struct proxy_thread *t, int ms)
{
    const uint64_t before = __atomic_load_n(&t->iterations, __ATOMIC_RELAXED);
    const int tid = __atomic_load_n(&t->tid, __ATOMIC_RELAXED);
    const uint64_t ran = thread_ran_ns(tid);

    thread_wake(t);
    for (int turn = 0; turn < TURNS_FOR_A_CORE; turn++) {
        struct budget budget = budget_of(ms);

        while (__atomic_load_n(&t->iterations, __ATOMIC_RELAXED) == before && budget_spend(&budget))
            pause_ns(CHECK_NS);
        if (__atomic_load_n(&t->iterations, __ATOMIC_RELAXED) != before)
            return 1;
        if (!thread_is_runnable(tid) || (thread_ran_ns(tid) - ran) / 1000000u >= (uint64_t)ms / 2)
            return 0;
    }
    return 0;
}

int proxy_responsive(struct proxy_group *g, int ms, char *text, size_t bytes)
{
    int all = 1;

    for (int i = 0; i < g->options.threads && !g->in_place; i++) {
        struct proxy_thread *t = &g->threads[i];
        const int stuck = t->abandoned || (g->connected && !makes_progress(t, ms));
        char state[64];

        __atomic_store_n(&t->stats.stuck, (uint64_t)stuck, __ATOMIC_RELAXED);
        if (!stuck || !all)
            continue;
        describe_state(t, state, sizeof(state));
        snprintf(text, bytes, "proxy %d of rank %d is blocked in the network %s (%s)", i, g->options.rank, t->ops->name,
                 state);
        all = 0;
    }
    return all;
}

/* ---- One call, without an endpoint -------------------------------------------------------------------------- */

struct guarded {
    epx_status (*fn)(void *arg);
    void *arg;
    epx_status status;
    int tid; /* shared: the kernel's id of the thread, once it has returned */
    char text[256];
    struct caller caller;
};

static int has_returned(void *of)
{
    const struct guarded *call = of;

    return has_gone(__atomic_load_n(&call->tid, __ATOMIC_ACQUIRE)); /* pairs with guarded_main */
}

static void *guarded_main(void *arg)
{
    struct guarded *call = arg;
    struct sigactions actions;

    sigactions_save(&actions);
    call->status = call->fn(call->arg);
    sigactions_restore(&actions, "the network");
    snprintf(call->text, sizeof(call->text), "%s", call->status == EPX_OK ? "" : epx_last_error());
    __atomic_store_n(&call->tid, (int)gettid(), __ATOMIC_RELEASE); /* pairs with has_returned */
    return NULL;
}

epx_status proxy_guard(const char *what, int ms, epx_status (*fn)(void *arg), void *arg, int *left)
{
    struct budget budget = budget_of(ms);
    struct guarded *call;
    pthread_t thread;
    epx_status status;

    *left = 0;
    if (runtime()->proxies)
        return fn(arg);
    call = calloc(1, sizeof(*call));
    if (!call)
        return fail(EPX_ERR_MEMORY, "%s: no memory", what);
    call->fn = fn;
    call->arg = arg;
    call->caller = (struct caller){.stays_away = has_returned, .of = call};
    at_exit_add(&call->caller);
    status = at_exit_began() ? fail(EPX_ERR_SYSTEM, "%s: the process ends", what)
                             : cpu_thread_start(&thread, "epx-ask", guarded_main, call);
    if (status != EPX_OK)
        goto forget_call;
    if (join_within(thread, &budget) != 0) {
        pthread_detach(thread);
        leak_on_purpose(call);
        *left = 1;
        return fail(EPX_ERR_TIMEOUT, "%s: the library has not returned within %d ms", what, ms);
    }
    status = call->status == EPX_OK ? EPX_OK : fail(call->status, "%s", call->text);

forget_call:
    at_exit_remove(&call->caller);
    free(call);
    return status;
}
