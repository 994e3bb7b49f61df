/* SPDX-License-Identifier: Apache-2.0 */
/* The proxies of a rank: open, connect, close, statistics, quiet. loop.c handles commands. */
#include "proxy/proxy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proxy/internal.h"
#include "util/clock.h"
#include "util/env.h"
#include "util/leak.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/runtime.h"
#include "util/status.h"

#define THREADS_MAX 64
/* Entries in the queues of all peers of a thread together, divided among the peers; and the limits of one peer. */
#define PLACES (1u << 13)
#define DEPTH_MIN 8u
#define DEPTH_MAX 1024u
#define MERGE_BYTES (1 << 20)
#define QUIET_POLL_NS 50000

void proxy_fault(struct proxy_thread *t, enum fault fault, int status, int peer, int64_t expected, int64_t seen,
                 const char *text)
{
    const struct proxy_options *o = &t->group->options;
    const uint32_t bit = 1u << fault;

    if (__atomic_fetch_or(&t->group->reported, bit, __ATOMIC_RELAXED) & bit)
        return;
    if (o->on_error)
        o->on_error(o->context, status, peer, expected, seen, text);
}

/* ---- Opening ------------------------------------------------------------------------------------------------ */

static epx_status check_options(const struct proxy_options *o)
{
    if (o->nranks < 1 || o->nranks > IMMEDIATE_MAX_RANKS || o->rank < 0 || o->rank >= o->nranks)
        return fail(EPX_ERR_ARGUMENT, "proxies: expected a rank below the number of ranks, at most %d; got %d of %d",
                    IMMEDIATE_MAX_RANKS, o->rank, o->nranks);
    if (o->threads < 0 || o->threads > THREADS_MAX)
        return fail(EPX_ERR_ARGUMENT, "proxies: expected 1 to %d threads, got %d", THREADS_MAX, o->threads);
    if (o->kinds < 1 || o->kinds > 32 || o->slots < 1 || o->slots > 64)
        return fail(EPX_ERR_ARGUMENT, "proxies: expected 1 to 32 kinds and 1 to 64 slots of counters, got %d and %d",
                    o->kinds, o->slots);
    if (o->heap_bytes > COMMAND_MAX_OFFSET)
        return fail(EPX_ERR_UNSUPPORTED, "proxies: expected a heap of at most %llu bytes, got %llu",
                    (unsigned long long)COMMAND_MAX_OFFSET, (unsigned long long)o->heap_bytes);
    if (!o->net || !o->remote || !o->counters)
        return fail(EPX_ERR_ARGUMENT, "proxies: expected a network, the remote ranks and counters");
    return EPX_OK;
}

/* UCCL's switch: 0, proxies never sleep; 1, they do after two minutes. Beside a CPU device it counts for nothing: its
 * agents need the cores. */
static int64_t gpu_spin_us(void)
{
    const int64_t adaptive = env_int("EPX_PROXY_ADAPTIVE_SLEEP", -1, 0, 1);

    return adaptive < 0 ? 100000 : adaptive ? 120000000 : INT64_MAX / 1000000;
}

int proxy_threads_asked(void)
{
    return (int)env_int("EPX_PROXY_THREADS", 1, 1, THREADS_MAX);
}

static void read_environment(struct proxy_group *g)
{
    struct proxy_options *o = &g->options;
    const int64_t cores = sysconf(_SC_NPROCESSORS_ONLN);
    const int64_t both = env_int("EPX_IB_MAX_INFLIGHT", 0, 0, 1 << 20);
    /* A GPU cannot wake its proxy, which has a core of its own. With few cores, others need the core at once. */
    const int64_t spin_us = o->device_kind != EPX_DEVICE_CPU ? gpu_spin_us() : cores < 8 ? 5 : 50;

    if (o->threads == 0)
        o->threads = proxy_threads_asked();
    /* Agents on the CPU use all cores: a pinned proxy would often wait for them. */
    o->pin = (int)env_int("EPX_PROXY_PIN", o->pin || o->device_kind != EPX_DEVICE_CPU, 0, 1);
    g->spin_ns = (uint64_t)env_int("EPX_PROXY_SLEEP_US", spin_us, 0, 1000000000) * 1000;
    g->merge_bytes = (uint32_t)env_int("EPX_PROXY_MERGE_BYTES", MERGE_BYTES, 0, 1 << 30);
    g->limits = o->limits;
    if (!g->limits.max_bytes)
        g->limits.max_bytes = (uint64_t)env_int("EPX_IB_MAX_INFLIGHT_BYTES", 0, 0, INT64_MAX);
    if (!g->limits.max_messages[PROXY_LOW_LATENCY])
        g->limits.max_messages[PROXY_LOW_LATENCY] =
            (uint32_t)env_int("EPX_IB_MAX_INFLIGHT_LOW_LATENCY", both, 0, 1 << 20);
    if (!g->limits.max_messages[PROXY_NORMAL])
        g->limits.max_messages[PROXY_NORMAL] = (uint32_t)env_int("EPX_IB_MAX_INFLIGHT_NORMAL", both, 0, 1 << 20);
}

/* A pair that is spread uses as many rings as there are slots, and its own. */
static int serves(const struct proxy_thread *t, int rank)
{
    int is_one = proxy_ring_of(t->group, rank, COUNTER(SIG_ABORT, 0)) == t->index;

    for (int slot = 0; slot < t->group->options.slots; slot++)
        is_one |= proxy_ring_of(t->group, rank, COUNTER(SIG_HD_ROWS, slot)) == t->index;
    return is_one;
}

/* The peers of a thread, and room for their pending and posted puts. */
static epx_status open_peers(struct proxy_thread *t)
{
    const struct proxy_group *g = t->group;
    const struct proxy_options *o = &g->options;
    size_t places;
    int rank;

    t->by_rank = calloc((size_t)o->nranks, sizeof(*t->by_rank));
    t->busy = calloc((size_t)o->nranks, sizeof(*t->busy));
    t->peers = calloc((size_t)o->nranks, sizeof(*t->peers));
    if (!t->by_rank || !t->busy || !t->peers)
        return fail(EPX_ERR_MEMORY, "proxy %d: no memory for %d ranks", t->index, o->nranks);
    for (rank = 0; rank < o->nranks; rank++) {
        const int mine = g->remote[rank] && rank != o->rank && serves(t, rank);

        t->by_rank[rank] = mine ? t->npeers : -1;
        if (!mine)
            continue;
        t->peers[t->npeers].rank = rank;
        t->peers[t->npeers++].dead = o->absent && o->absent[rank];
    }
    t->depth = DEPTH_MAX;
    while (t->depth > DEPTH_MIN && t->depth * (uint32_t)t->npeers > PLACES)
        t->depth /= 2;
    places = (size_t)t->npeers * t->depth + 1;
    t->pendings = calloc(places, sizeof(*t->pendings));
    t->posteds = calloc(places, sizeof(*t->posteds));
    if (!t->pendings || !t->posteds)
        return fail(EPX_ERR_MEMORY, "proxy %d: no memory for %zu puts", t->index, places);
    for (rank = 0; rank < t->npeers; rank++) {
        t->peers[rank].queue = &t->pendings[(size_t)rank * t->depth];
        t->peers[rank].posted = &t->posteds[(size_t)rank * t->depth];
        window_init(&t->peers[rank].window, t->depth);
    }
    return EPX_OK;
}

/* A limit of the rank and its card is divided among its threads; 0 = none. */
static uint32_t share_of(uint32_t limit, int threads)
{
    return limit ? (limit + (uint32_t)threads - 1) / (uint32_t)threads : UINT32_MAX;
}

static epx_status open_thread(struct proxy_group *g, int index)
{
    struct proxy_thread *t = &g->threads[index];
    const struct proxy_options *o = &g->options;
    epx_status status;
    int i;

    t->waiting_for = -1;
    t->merge_bytes = g->merge_bytes;
    t->bytes_max = UINT64_MAX;
    if (g->limits.max_bytes)
        t->bytes_max = (g->limits.max_bytes + (uint64_t)o->threads - 1) / (uint64_t)o->threads;
    for (i = 0; i < PROXY_FLOWS; i++)
        t->messages_max[i] = share_of(g->limits.max_messages[i], o->threads);
    status = open_peers(t);
    if (status == EPX_OK)
        status = count_begin(t);
    if (status == EPX_OK)
        status = ring_create(&t->ring, o->device, o->ring_slots, o->ring_start);
    if (status == EPX_OK)
        status = thread_open(t);
    if (status == EPX_OK)
        status = request_start(t);
    return status;
}

/* How long a caller waits for threads that open or connect. */
static int open_ms(const struct proxy_group *g)
{
    const int ms = g->options.open_ms ? g->options.open_ms : g->options.timeout_ms;

    return ms > PROXY_CLOSE_MS ? ms : PROXY_CLOSE_MS;
}

/* All threads perform the request at the same time; returns the first failure. */
static epx_status all_threads(struct proxy_group *g, enum request request, struct budget *budget)
{
    epx_status status = EPX_OK;
    int i;

    for (i = 0; i < g->options.threads; i++)
        request_submit(&g->threads[i], request);
    for (i = 0; i < g->options.threads; i++) {
        epx_status own = request_wait(&g->threads[i], budget);

        status = status == EPX_OK ? own : status;
    }
    return status;
}

epx_status proxy_open(const struct proxy_options *options, struct proxy_group **proxies)
{
    struct proxy_group *g;
    epx_status status = check_options(options);
    int i;

    if (status != EPX_OK)
        return status;
    g = calloc(1, sizeof(*g));
    if (!g)
        return fail(EPX_ERR_MEMORY, "proxies: no memory for %zu bytes", sizeof(*g));
    g->options = *options;
    g->manual = options->manual;
    g->in_place = options->manual || runtime()->proxies;
    g->env = options->env ? options->env : cpu_env_current();
    snprintf(g->provider, sizeof(g->provider), "%s", options->provider ? options->provider : "");
    read_environment(g);
    g->threads = calloc((size_t)g->options.threads, sizeof(*g->threads));
    g->remote = calloc((size_t)options->nranks, 2);
    g->routes = calloc((size_t)options->nranks, sizeof(*g->routes));
    for (i = 0; g->threads && i < g->options.threads;
         i++) { /* proxy_close() wants it of those that are not opened too */
        g->threads[i].group = g;
        g->threads[i].index = i;
        g->threads[i].ops = options->net;
    }
    if (!g->threads || !g->remote || !g->routes) {
        status = fail(EPX_ERR_MEMORY, "proxies: no memory for %d threads", g->options.threads);
        goto close;
    }
    memcpy(g->remote, options->remote, (size_t)options->nranks);
    g->options.remote = g->remote;
    if (options->relays) {
        memcpy(g->remote + options->nranks, options->relays, (size_t)options->nranks);
        g->options.relays = g->remote + options->nranks;
    }
    if (options->routes)
        memcpy(g->routes, options->routes, (size_t)options->nranks * sizeof(*g->routes));
    for (i = 0; !options->routes && i < options->nranks; i++)
        g->routes[i] = (uint32_t)(options->rank + i);
    g->options.routes = g->routes;
    for (i = 0; i < g->options.threads && status == EPX_OK; i++)
        status = open_thread(g, i);
    g->opening = budget_of(open_ms(g));
    if (status == EPX_OK)
        status = all_threads(g, REQUEST_OPEN, &g->opening);
    if (status != EPX_OK)
        goto close;
    *proxies = g;
    return EPX_OK;
close:
    if (proxy_close(g) != EPX_OK)
        *proxies = g; /* for its statistics; an abandoned thread still uses it */
    return status;
}

/* ---- Connecting --------------------------------------------------------------------------------------------- */

epx_status proxy_addresses(struct proxy_group *g, struct proxy_address *addresses)
{
    const epx_status status = all_threads(g, REQUEST_REGISTER, &g->opening);
    int i;

    for (i = 0; i < g->options.threads && status == EPX_OK; i++)
        addresses[i] = g->threads[i].own_address;
    return status;
}

/* A copy of its peers' addresses: a thread that is blocked in the network may need it after proxy_connect(). */
static epx_status copy_addresses(struct proxy_thread *t, const struct proxy_address *addresses)
{
    const struct proxy_options *o = &t->group->options;
    int p;

    t->peer_addresses = calloc((size_t)t->npeers + 1, sizeof(*t->peer_addresses));
    if (!t->peer_addresses)
        return fail(EPX_ERR_MEMORY, "proxy %d: no memory for the addresses of %d ranks", t->index, t->npeers);
    for (p = 0; p < t->npeers; p++)
        t->peer_addresses[p] = addresses[(size_t)t->peers[p].rank * (size_t)o->threads + (size_t)t->index];
    return EPX_OK;
}

epx_status proxy_connect(struct proxy_group *g, const struct proxy_address *addresses)
{
    struct budget budget = budget_of(open_ms(g));
    epx_status status = EPX_OK;
    int i;

    if (g->connected)
        return fail(EPX_ERR_USAGE, "the proxies are already connected");
    for (i = 0; i < g->options.threads && status == EPX_OK; i++)
        status = copy_addresses(&g->threads[i], addresses);
    if (status == EPX_OK)
        status = all_threads(g, REQUEST_CONNECT, &budget);
    if (status != EPX_OK)
        return status;
    g->connected = 1;
    for (i = 0; i < g->options.threads; i++) { /* hundreds of bytes per peer */
        free(g->threads[i].peer_addresses);
        g->threads[i].peer_addresses = NULL;
    }
    for (i = 0; runtime()->proxies && !g->options.manual && i < g->options.threads && status == EPX_OK; i++) {
        status = runtime()->proxies->start(g, i);
        g->threads[i].started = status == EPX_OK;
    }
    return status;
}

/* Shown with EPX_LOG=info. */
static void log_totals(const struct proxy_thread *t)
{
    const struct proxy_stats *s = &t->stats;
    uint64_t least = UINT64_MAX, most = 0;
    uint32_t messages = UINT32_MAX;
    int i;

    for (i = 0; i < t->npeers; i++) {
        const struct window *w = &t->peers[i].window;

        least = w->bytes_limit < least ? w->bytes_limit : least;
        most = w->bytes_limit > most ? w->bytes_limit : most;
        messages = w->messages_limit < messages ? w->messages_limit : messages;
    }
    if (s->commands == 0 || t->npeers == 0)
        return;
    log_line(
        LOG_INFO,
        "proxy %d over %s: %llu commands in %llu puts (%llu without bytes), %llu bytes, %llu arrivals, %llu window "
        "waits, %llu sleeps, %llu wakes, %llu refused, %llu dropped; final windows %llu to %llu KiB, %u messages "
        "or more",
        t->index, t->ops->name, (unsigned long long)s->commands, (unsigned long long)s->puts,
        (unsigned long long)s->signals, (unsigned long long)s->bytes, (unsigned long long)s->arrivals,
        (unsigned long long)s->window_waits, (unsigned long long)s->sleeps, (unsigned long long)s->wakes,
        (unsigned long long)s->refused, (unsigned long long)s->dropped, (unsigned long long)least >> 10,
        (unsigned long long)most >> 10, messages);
}

static void free_thread(struct proxy_thread *t)
{
    thread_close(t);
    ring_destroy(&t->ring);
    request_free(t);
    free(t->peer_addresses);
    free(t->posteds);
    free(t->pendings);
    free(t->peers);
    free(t->busy);
    free(t->by_rank);
    free(t->reached);
}

static void stop_driven(struct proxy_group *g)
{
    int i;

    for (i = 0; g->in_place && i < g->options.threads; i++)
        if (g->threads[i].started) {
            g->threads[i].started = 0;
            runtime()->proxies->stop(g, i);
        }
}

epx_status proxy_close(struct proxy_group *g)
{
    const int half = g ? g->options.timeout_ms / 2 : 0, ms = half > PROXY_CLOSE_MS ? half : PROXY_CLOSE_MS;
    struct budget budget = budget_of(ms);
    epx_status status = EPX_OK;
    int i;

    if (!g)
        return EPX_OK;
    if (g->threads) {
        alarm_wait(g);
        stop_driven(g);
        for (i = 0; i < g->options.threads; i++)
            request_submit(&g->threads[i], REQUEST_CLOSE);
        for (i = 0; i < g->options.threads; i++) {
            epx_status own = request_join(&g->threads[i], &budget);

            log_totals(&g->threads[i]);
            status = status == EPX_OK ? own : status;
        }
    }
    if (status != EPX_OK) {
        if (!g->leaked)
            leak_on_purpose(g);
        g->leaked = 1;
        return status;
    }
    for (i = 0; g->threads && i < g->options.threads; i++)
        free_thread(&g->threads[i]);
    free(g->threads);
    free(g->remote);
    free(g->routes);
    free(g);
    return EPX_OK;
}

/* ---- In use ------------------------------------------------------------------------------------------------- */

int proxy_ring_count(const struct proxy_group *g)
{
    return g->options.threads;
}

const struct ring_dev *proxy_ring(const struct proxy_group *g, int index)
{
    return &g->threads[index].ring.dev;
}

int proxy_step(struct proxy_group *g, int index)
{
    return proxy_progress(&g->threads[index]);
}

void proxy_alarm(struct proxy_group *g, uint32_t alarm, int to_all)
{
    const uint64_t word = ALARM_SET | (to_all ? ALARM_ALL : 0) | alarm;

    for (int i = 0; i < g->options.threads; i++) {
        uint64_t none = 0;

        /* Release: pairs with the acquire in alarm_waits(). */
        if (__atomic_compare_exchange_n(g->threads[i].ring.dev.alarm, &none, word, 0, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED))
            thread_wake(&g->threads[i]);
    }
}

void proxy_stats_read(const struct proxy_group *g, struct proxy_stats *stats)
{
    proxy_ring_stats_read(g, -1, stats);
}

void proxy_ring_stats_read(const struct proxy_group *g, int index, struct proxy_stats *stats)
{
    uint64_t *sum = (uint64_t *)stats;
    size_t word;
    int i;

    memset(stats, 0, sizeof(*stats));
    for (i = index < 0 ? 0 : index; i < (index < 0 ? g->options.threads : index + 1); i++) {
        const uint64_t *own = (const uint64_t *)&g->threads[i].stats;

        for (word = 0; word < sizeof(*stats) / sizeof(*sum); word++)
            sum[word] += __atomic_load_n(&own[word], __ATOMIC_RELAXED);
    }
}

/* ---- Quiet -------------------------------------------------------------------------------------------------- */

/* Non-zero when thread t has found nothing left since request `asked`. */
static int is_quiet(struct proxy_thread *t, uint64_t asked)
{
    if (t->group->manual)
        proxy_progress(t);
    /* Acquire: pairs with the release in report_quiet. */
    return __atomic_load_n(&t->quiet, __ATOMIC_ACQUIRE) >= asked;
}

static epx_status wait_quiet(struct proxy_thread *t, uint64_t asked, uint64_t deadline)
{
    const struct proxy_group *g = t->group;

    while (!is_quiet(t, asked)) {
        if (g->manual) /* the caller runs the iterations, and moves the clock and the peers too */
            return EPX_ERR_NOT_READY;
        if (g->env->now_ns(g->env->self) >= deadline)
            return fail(EPX_ERR_TIMEOUT, "proxy %d: not all puts have completed after %d ms; those to rank %d have not",
                        t->index, g->options.timeout_ms, __atomic_load_n(&t->waiting_for, __ATOMIC_RELAXED));
        pause_ns(QUIET_POLL_NS);
    }
    return EPX_OK;
}

epx_status proxy_quiet(struct proxy_group *g)
{
    const uint64_t deadline = g->env->now_ns(g->env->self) + (uint64_t)g->options.timeout_ms * 1000000u;
    epx_status status = EPX_OK;
    int i;

    if (!g->connected)
        return EPX_OK;
    for (i = 0; i < g->options.threads && status == EPX_OK; i++) {
        struct proxy_thread *t = &g->threads[i];
        /* Pairs with the acquire in proxy_progress. */
        const uint64_t asked = __atomic_add_fetch(&t->asked, 1, __ATOMIC_ACQ_REL);

        thread_wake(t);
        status = wait_quiet(t, asked, deadline);
    }
    return status;
}

epx_status proxy_leave(struct proxy_group *g)
{
    __atomic_store_n(&g->leaving, 1, __ATOMIC_RELEASE); /* pairs with the acquire in is_leaving() */
    return proxy_quiet(g);
}
