/* SPDX-License-Identifier: Apache-2.0 */
/* A group's proxies: opened when its ranks are on several nodes. */
#include "group/net.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/auth.h"
#include "group/abort.h"
#include "group/error.h"
#include "group/handshake.h"
#include "group/launch.h"
#include "group/mask.h"
#include "group/signals.h"
#include "group/stats.h"
#include "device/arrivals.h"
#include "util/env.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/runtime.h"
#include "util/status.h"
#include "util/watch.h"
#include "util/text.h"

#define RING_SLOTS 4096
#define LOSS_GRACE_MS 250 /* an abort is on its way to all ranks for less */
#define RESPONSE_MS 200   /* one turn takes microseconds, but the thread may have to wait for a core */

/* What the kernels read of a rank of another node, in the place of its counter: its last reply, or that it has gone. No
 * reply follows that. Threads of several endpoints may say so. */
static void store_reply(struct epx_group *group, int rank, uint32_t alarm)
{
    uint64_t *word = &group->shadow.counters[(size_t)SIG_ABORT * (size_t)group->set.sig_slots * (size_t)group->nranks +
                                             (size_t)rank]; /* slot 0 */
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);

    do {
        if (is_gone((uint32_t)seen))
            return;
        /* For trail_ask(), has_gone() and is_lost(), which read nothing behind it. */
    } while (!__atomic_compare_exchange_n(word, &seen, WAITS_WORD(WAITS_BEAT(seen) + 1, alarm), 0, __ATOMIC_RELEASE,
                                          __ATOMIC_RELAXED));
}

/* An error about a rank that is masked already is not reported. */
static int is_masked(const struct epx_group *group, int peer)
{
    int32_t active = 1;

    return group->set.enable_mask && peer >= 0 && mask_read(group, peer, &active) == EPX_OK && !active;
}

/* Is the loss of a peer news? A peer that ends after a failure of which this rank has heard is not the cause. */
static int is_news(struct epx_group *group, int masked, const char *text)
{
    const char *known = masked ? "it is masked" : abort_word(group) ? "the group has failed before" : NULL;

    if (known)
        log_line(LOG_INFO, "%s; %s", text, known);
    return !known;
}

/* From a proxy thread: what kernels do in fail_all(). */
static void on_error(void *context, int status, int peer, int64_t expected, int64_t seen, const char *text)
{
    struct epx_group *group = context;

    if (__atomic_load_n(&group->closing, __ATOMIC_RELAXED))
        return; /* nothing is outstanding, and a peer that finished first may have closed its endpoints */
    if (status == EPX_ERR_PEER && !is_news(group, is_masked(group, peer), text))
        return;
    log_line(LOG_WARN, "%s", text);
    error_record_net(group, status, peer, expected, seen, text);
    /* With masks the wait for that rank reaches its deadline, and masks it: at once where this rank has given it up.
     * One that others have given up while it slept finds its connections reset, and must not go on before they do. */
    if (group->set.enable_mask && status == EPX_ERR_PEER && seen == ETIMEDOUT)
        store_reply(group, peer, ALARM(peer, ALARM_LOST));
    if (group->set.enable_mask && status == EPX_ERR_PEER)
        return;
    group_abort(group, status, status == EPX_ERR_PEER || status == EPX_ERR_MISMATCH ? peer : -1);
}

/* From a proxy thread, with masks: what this rank has given up is of high throughput, which nobody goes on without.
 * This rank may need nothing of that one, and its own operation be good: but that one waits in vain, and others for it.
 * So the operation ends on all ranks, as where there are no masks; also where low latency has masked that one before,
 * at its own deadline. Whoever masks a rank by hand means to go on without it. */
static void on_given_up(void *context, int peer, int error, const char *text)
{
    struct epx_group *group = context;

    if (__atomic_load_n(&group->closing, __ATOMIC_RELAXED))
        return; /* before it looks at anything: a proxy that was abandoned may come back late */
    if (!is_news(group, is_masked(group, peer) && !mask_by_deadline(group, peer), text))
        return;
    log_line(LOG_WARN, "%s", text);
    error_record_net(group, EPX_ERR_PEER, peer, 0, error, text);
    group_abort(group, EPX_ERR_PEER, peer);
}

/* From a proxy thread: a rank of another node says who has failed (put_abort() in kernel/put.h), or whom it waits for:
 * the kernel that has asked looks at the next word (trail_ask() in kernel/waiting_for.h). */
static void on_alarm(void *context, int rank, uint32_t alarm)
{
    struct epx_group *group = context;

    if (__atomic_load_n(&group->closing, __ATOMIC_RELAXED))
        return;
    if (ALARM_CAUSE(alarm) == PHASE_MASKS && ALARM_CULPRIT(alarm) == group->rank) /* as wait_failed() tells its node */
        group_aborted_by(group, abort_of_alarm(rank, alarm) | ABORT_LEFT_OUT);
    else if (ALARM_CAUSE(alarm) < ALARM_REPLY && ALARM_CAUSE(alarm) != ALARM_GOODBYE)
        group_aborted_by(group, abort_of_alarm(rank, alarm));
    else
        store_reply(group, rank, alarm);
}

/* From a proxy thread: `rank` waits for this one in vain. After a failure the reply is that failure. */
static uint32_t on_ask(void *context, int rank)
{
    struct epx_group *group = context;
    const uint64_t word = abort_word(group), waits = group_waits_word(group);

    (void)rank;
    if (word && !(word & ABORT_LEFT_OUT))
        return alarm_of_abort(word);
    return ALARM(WAITS_PEER(waits) & (KERNEL_MAX_RANKS - 1), ALARM_REPLY + (int)(WAITS_BEAT(waits) % ALARM_BEATS));
}

/* From a proxy thread: something came from `rank`, or this rank says goodbye. A rank that was masked by hand may become
 * active again. One that has failed itself may have masked ranks that go on. */
static int goes_on_without(void *context, int rank)
{
    struct epx_group *group = context;

    return __atomic_load_n(&group->closing, __ATOMIC_RELAXED) < CLOSING_MEMORY && mask_by_deadline(group, rank) &&
           !abort_word(group);
}

/* From a proxy thread: as publish_waits() in kernel/waiting_for.h, for agents that wait for room in the ring. */
static void on_blocked(void *context, int peer)
{
    struct epx_group *group = context;

    group_publish_waits(group, peer);
}

/* How the network registers the heap, and what must be done before kernels see arrivals there. */
static epx_status describe_heap(struct epx_group *group, struct proxy_options *o)
{
    struct device *device = group->device;
    const int rule = group->net_memory ? ARRIVALS_VISIBLE : device->ops->arrivals(device);

    o->heap = group->net_memory ? group->net_memory : group->heap.base;
    o->heap_bytes = group->net_memory ? group->plan.net_bytes : group->plan.total;
    o->memory_kind = group->net_memory || device->ops->caps & DEVICE_HOST_HEAP ? EPX_DEVICE_CPU : device->ops->kind;
    o->memory_index = group->set.device_index;
    o->dmabuf = -1;
    if (rule == ARRIVALS_NEVER)
        return fail(EPX_ERR_UNSUPPORTED,
                    "device %s: EPX_GPU_HEAP: expected host or auto, got device: the device has no way to see what a "
                    "card writes into its memory",
                    device->ops->name);
    o->flush = rule == ARRIVALS_FLUSH;
    if (net_memory_is_gpu(o->memory_kind) && device->ops->heap_dmabuf(device, &group->heap, &o->dmabuf) != EPX_OK)
        log_line(LOG_INFO, "%s; the network may have another way", epx_last_error());
    return EPX_OK;
}

struct search {
    const char *name;
    const struct net_ops *ops;
    const char *provider;
};

static epx_status search_net(void *arg)
{
    struct search *s = arg;

    return net_find(s->name, &s->ops, &s->provider);
}

/* Opens libraries and asks drivers what is there. */
static epx_status find_net(struct epx_group *group, struct proxy_options *o)
{
    struct search *s = calloc(1, sizeof(*s));
    epx_status status;
    int left;

    if (!s)
        return fail(EPX_ERR_MEMORY, "%s: no memory to look for a network", group->call);
    s->name = group->set.net;
    status = proxy_guard("looking for a network", handshake_step_ms(group), search_net, s, &left);
    group->kept |= left;
    if (left) /* not freed: the thread that is left still uses it */
        return fail(status, "rank %d: %s", group->rank, epx_last_error());
    o->net = s->ops;
    o->provider = s->provider;
    free(s);
    return status;
}

/* [R]: 1 = relays for this rank in its node. NULL: no memory. */
static uint8_t *relays_of(const struct epx_group *group)
{
    uint8_t *relays = calloc((size_t)group->nranks, 1);

    for (int n = 0; relays && n < group->nnodes; n++) {
        const int relay = n == group->node ? -1 : node_relay(&group->map, group->rank, n);

        if (relay >= 0)
            relays[relay] = 1;
    }
    return relays;
}

/* [R]; NULL: no memory. */
static uint32_t *routes_of(const struct epx_group *group)
{
    uint32_t *routes = calloc((size_t)group->nranks, sizeof(*routes));

    for (int r = 0; routes && r < group->nranks; r++)
        routes[r] = node_route(&group->map, group->rank, r);
    return routes;
}

static epx_status open_proxies(struct epx_group *group, int *dmabuf)
{
    uint32_t *routes;
    uint8_t *relays;
    struct proxy_options o;
    epx_status status;

    memset(&o, 0, sizeof(o));
    status = describe_heap(group, &o);
    *dmabuf = o.dmabuf;
    if (status != EPX_OK)
        return status;
    status = find_net(group, &o);
    if (status != EPX_OK)
        return status;
    o.rank = group->rank;
    o.nranks = group->nranks;
    o.ring_slots = RING_SLOTS;
    o.timeout_ms = group->set.timeout_ms;
    o.open_ms = handshake_step_ms(group);
    o.threads = group->set.proxy_threads;
    o.world = runtime()->net_world;
    o.key = handshake_key(group);
    o.remote = group->remote;
    o.absent = group->map.out;
    o.device_kind = group->device->ops->kind;
    group->device->ops->pci(group->device, o.pci);
    o.device = group->device;
    o.counters = group->shadow.counters;
    o.sent = group->shadow.sent;
    o.aggregates = group->shadow.aggregates;
    o.sent_all = group->shadow.sent_all;
    o.sums = signal_sums;
    o.kinds = SIG_COUNT;
    o.slots = group->set.sig_slots;
    o.flows = signal_flows;
    if (group->device->ops->caps & DEVICE_HOST_HEAP)
        o.bell = &((struct control *)group->heap.base)->bell;
    o.windows = group->watch ? watch_windows(group->watch) : NULL;
    o.on_error = on_error;
    if (group->set.enable_mask) {
        o.on_given_up = on_given_up;
        o.missable = signal_missable;
    }
    o.alarm_kind = SIG_ABORT;
    o.on_alarm = on_alarm;
    o.on_ask = on_ask;
    o.on_blocked = on_blocked;
    o.goes_on_without = group->set.enable_mask ? goes_on_without : NULL;
    relays = relays_of(group);
    o.relays = relays;
    routes = routes_of(group);
    o.routes = routes;
    o.grace_ms = group->set.timeout_ms / 8 < LOSS_GRACE_MS ? group->set.timeout_ms / 8 : LOSS_GRACE_MS;
    o.context = group;
    if (group->net_name != o.net->name) /* queries read it beside a recovery */
        group->net_name = o.net->name;
    status = relays && routes ? proxy_open(&o, &group->proxies)
                              : fail(EPX_ERR_MEMORY, "%s: no memory for %d ranks", group->call, group->nranks);
    free(relays);
    free(routes);
    return status;
}

enum { NET_NAME = (int)sizeof(((epx_group_info *)0)->net_name) };

/* What a rank tells the others of its network: its name, then the addresses of all threads, sealed or not. */
struct net_message {
    char name[NET_NAME];
    uint8_t addresses[];
};

/* All ranks must have chosen the same network: addresses of one mean nothing to another. */
static epx_status compare_nets(const struct epx_group *group, const char *all, size_t stride)
{
    int first = -1;

    for (int r = 0; r < group->nranks; r++) {
        const char *theirs = all + (size_t)r * stride;
        char a[NET_NAME], b[NET_NAME];

        if (group->map.out[r])
            continue;
        first = first < 0 ? r : first;
        if (strncmp(theirs, all + (size_t)first * stride, NET_NAME) != 0)
            return fail(EPX_ERR_MISMATCH,
                        "%s: rank %d has net = %s where rank %d has %s (epx_group_config.net, EPX_NET, or what each "
                        "machine has)",
                        group->call, r, text_clean(a, sizeof(a), theirs, NET_NAME), first,
                        text_clean(b, sizeof(b), all + (size_t)first * stride, NET_NAME));
    }
    return EPX_OK;
}

/* ---- Addresses: sealed by the group's key, for a caller's all-gather may travel in clear text -------------- */

enum { SEAL_BYTES = CRYPTO_NONCE + CRYPTO_TAG };

/* out: nonce, sealed text. The rank is authenticated: nobody's addresses can be taken for another's. */
static int seal_addresses(const uint8_t *key, int rank, const void *own, size_t bytes, uint8_t *out)
{
    const int32_t from = rank;

    if (crypto_random(out, CRYPTO_NONCE) != EPX_OK)
        return -1;
    return crypto()->seal(key, out, &from, sizeof(from), own, bytes, out + CRYPTO_NONCE);
}

static int unseal_addresses(const uint8_t *key, int rank, const uint8_t *sealed, size_t bytes, void *out)
{
    const int32_t from = rank;

    return crypto()->unseal(key, sealed, &from, sizeof(from), sealed + CRYPTO_NONCE, bytes, out);
}

static size_t address_bytes(const struct epx_group *group)
{
    return (size_t)group->set.proxy_threads * sizeof(struct proxy_address);
}

size_t group_net_message_bytes(const struct epx_group *group)
{
    if (group->nnodes == 1)
        return 0;
    return sizeof(struct net_message) + address_bytes(group) + (handshake_key(group) ? SEAL_BYTES : 0);
}

size_t group_net_message_most(const struct epx_group *group)
{
    return sizeof(struct net_message) + address_bytes(group) + SEAL_BYTES;
}

static epx_status describe_net(struct epx_group *group, struct net_message *m)
{
    struct proxy_address *own = calloc((size_t)group->set.proxy_threads, sizeof(*own));
    uint8_t key[CRYPTO_KEY];
    epx_status status = own ? proxy_addresses(group->proxies, own)
                            : fail(EPX_ERR_MEMORY, "%s: no memory for network addresses", group->call);

    snprintf(m->name, sizeof(m->name), "%s", group->net_name);
    if (status == EPX_OK && !handshake_key(group))
        memcpy(m->addresses, own, address_bytes(group));
    else if (status == EPX_OK && (auth_derive(handshake_key(group), "addresses of endpoints", NULL, 0, key) ||
                                  seal_addresses(key, group->rank, own, address_bytes(group), m->addresses)))
        status = fail(EPX_ERR_SYSTEM, "%s: rank %d cannot seal its addresses", group->call, group->rank);
    free(own);
    return status;
}

epx_status group_net_prepare(struct epx_group *group, void *message)
{
    int dmabuf = -1;
    epx_status status = open_proxies(group, &dmabuf);

    if (status == EPX_OK)
        status = describe_net(group, message);
    if (dmabuf >= 0 && status != EPX_ERR_TIMEOUT)
        close(dmabuf); /* registered by now, or not needed any more; a blocked thread may still use it */
    return status;
}

/* The addresses of all ranks that are there. */
static epx_status unseal_all(const struct epx_group *group, const char *all, size_t stride, struct proxy_address *out)
{
    const size_t bytes = address_bytes(group);
    uint8_t key[CRYPTO_KEY];

    if (handshake_key(group) && auth_derive(handshake_key(group), "addresses of endpoints", NULL, 0, key))
        return fail(EPX_ERR_SYSTEM, "%s: rank %d cannot unseal addresses", group->call, group->rank);
    for (int r = 0; r < group->nranks; r++) {
        const struct net_message *m = (const struct net_message *)(all + (size_t)r * stride);
        struct proxy_address *to = out + (size_t)r * (size_t)group->set.proxy_threads;

        if (group->map.out[r])
            continue;
        if (!handshake_key(group))
            memcpy(to, m->addresses, bytes);
        else if (unseal_addresses(key, r, m->addresses, bytes, to))
            return fail(EPX_ERR_MISMATCH,
                        "%s: the addresses of rank %d were changed on their way, or sealed by another key", group->call,
                        r);
    }
    return EPX_OK;
}

epx_status group_net_connect(struct epx_group *group, const void *all, size_t stride)
{
    struct proxy_address *addresses =
        calloc((size_t)group->nranks * (size_t)group->set.proxy_threads, sizeof(*addresses));
    epx_status status =
        addresses ? compare_nets(group, all, stride)
                  : fail(EPX_ERR_MEMORY, "%s: no memory for %d network addresses", group->call, group->nranks);

    if (status == EPX_OK)
        status = unseal_all(group, all, stride, addresses);
    if (status == EPX_OK)
        status = proxy_connect(group->proxies, addresses);
    free(addresses);
    return status;
}

epx_status group_net_open(struct epx_group *group)
{
    const size_t bytes = group_net_message_bytes(group);
    char *own, *all;
    epx_status status;

    if (group->nnodes == 1)
        return EPX_OK;
    own = calloc(1, bytes);
    all = calloc((size_t)group->nranks, bytes);
    status = own && all ? group_net_prepare(group, own)
                        : fail(EPX_ERR_MEMORY, "%s: no memory for %d network addresses", group->call, group->nranks);
    status = handshake_ready(group, status);
    if (status == EPX_OK)
        status = handshake_allgather(group, own, all, bytes);
    if (status == EPX_OK)
        status = group_net_connect(group, all, bytes);
    free(own);
    free(all);
    return status;
}

/* Have all signals arrived that `rank` still has to send? */
static int all_signals_arrived(struct epx_group *group, const uint64_t *epochs, int rank)
{
    const int slots = group->set.sig_slots;

    for (int kind = 0; kind < SIG_COUNT; kind++) {
        if (!signal_is_owed(group, kind, rank))
            continue;
        for (int slot = 0; slot < slots; slot++) {
            const size_t at = ((size_t)kind * (size_t)slots + (size_t)slot) * (size_t)group->nranks + (size_t)rank;
            /* Pairs with the release in count_arrival(), although nothing is read after it. */
            if (__atomic_load_n(&group->shadow.counters[at], __ATOMIC_ACQUIRE) <
                signal_owed(group, epochs, kind, slot, rank))
                return 0;
        }
    }
    return 1;
}

/* Releases staged operations that will never be completed: the other ranks wait for their readers. */
static void release_staged(struct epx_group *group)
{
    for (struct epx_handle *h = group->handles; h; h = h->next) {
        struct mask_params params;

        if (h->staged == STAGED_NONE)
            continue;
        memset(&params, 0, sizeof(params));
        params.g = group->dev;
        params.staged = h->dev;
        params.staged_kind = h->staged == STAGED_DISPATCH ? SIG_LL_DONE : SIG_LC_DONE;
        if (launch_ordered(group, NULL, KERNEL_MASK, &params, sizeof(params)) != EPX_OK)
            log_line(LOG_WARN, "rank %d: a staged operation stays open: %s", group->rank, epx_last_error());
    }
    group->device->ops->stream_sync(group->device, group->default_stream);
}

/* Of a rank that has begun to end its group in order. All ranks are told of a failure. That some have masked this rank
 * only it is told: the others have all that they need of it, and would lose it without a goodbye. The word is read
 * once, for it may come at any time, and group_usable() gives up. */
static int says_goodbye(struct epx_group *group)
{
    const uint64_t word = abort_word(group);

    return !word || word & ABORT_LEFT_OUT || group_usable(group) == EPX_OK;
}

/*
 * Before the endpoints are closed: waits until all signals that peers still send have arrived, so that no peer writes
 * to a closed endpoint, and until everything that this rank sent has arrived. A peer may take longer: one that waits
 * for ranks which are masked by now has deadlines of its own. So the last word is a goodbye (proxy/goodbye.c). Bounded
 * by the group's timeout; a group that has failed does not wait, and says no goodbye. A rank that is told meanwhile
 * that it was masked does not wait for signals either.
 */
void group_net_settle(struct epx_group *group)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)group->set.timeout_ms * 1000000u;
    const struct device_ops *ops = group->device->ops;
    int32_t *mask = calloc((size_t)group->nranks, sizeof(*mask));
    struct group_state state;

    if (!group->proxies || !mask || group_usable(group) != EPX_OK || group_net_responsive(group) != EPX_OK)
        goto out;
    release_staged(group);
    if (ops->copy(group->device, &state, group->shadow.state, sizeof(state)) != EPX_OK ||
        ops->copy(group->device, mask, group->shadow.mask, (size_t)group->nranks * sizeof(*mask)) != EPX_OK)
        goto out;
    for (int r = 0; r < group->nranks; r++)
        while (group->remote[r] && mask[r] && !all_signals_arrived(group, state.epoch, r) && !abort_word(group) &&
               host_now_ns() < deadline)
            pause_ns(20000);
    __atomic_store_n(&group->closing, CLOSING_ENDING, __ATOMIC_RELAXED);
    if (says_goodbye(group) && proxy_leave(group->proxies) != EPX_OK)
        log_line(LOG_INFO, "rank %d closes before all that it sent has arrived", group->rank);

out:
    free(mask);
}

epx_status group_net_responsive(struct epx_group *group)
{
    char text[128];

    if (!group->proxies || proxy_responsive(group->proxies, RESPONSE_MS, text, sizeof(text)))
        return EPX_OK;
    return fail(EPX_ERR_TIMEOUT, "%s", text);
}

/* Once per failure, by the first caller: the exchange decides who that is, and orders nothing else. */
static void find_stuck(struct epx_group *group)
{
    int state = STUCK_UNKNOWN;

    if (!group->proxies ||
        !__atomic_compare_exchange_n(&group->stuck_state, &state, STUCK_ASKING, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    state = group_net_responsive(group) == EPX_OK ? STUCK_NO : STUCK_YES;
    if (state == STUCK_YES)
        snprintf(group->stuck_text, sizeof(group->stuck_text), "%.120s", epx_last_error());
    __atomic_store_n(&group->stuck_state, state, __ATOMIC_RELEASE); /* pairs with the acquire in add_stuck() */
}

void group_net_find_stuck(struct epx_group *group)
{
    if (pthread_mutex_trylock(&group->giving_up) != 0)
        return;
    if (!group_recovers_elsewhere(group))
        find_stuck(group);
    pthread_mutex_unlock(&group->giving_up);
}

epx_status group_net_close(struct epx_group *group)
{
    struct proxy_stats counted = {0};
    epx_status status = EPX_OK;

    if (group->proxies) {
        proxy_stats_read(group->proxies, &counted);
        status = proxy_close(group->proxies);
    }
    if (status == EPX_OK) {
        stats_keep_net(group, &counted);
        group->proxies = NULL;
    } else {
        group->kept = 1;
    }
    return status;
}
